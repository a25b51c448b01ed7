"""Runs inside an environment that has vLLM: parses command lines with vLLM's own parser, without starting anything.

    python parse_worker.py JOBS.json RESULTS.json

JOBS is a list of argument lists (without the interpreter and module). Each result is null, or what the parser said.
"""

import contextlib
import importlib
import io
import json
import sys


def main(jobs_file: str, results_file: str) -> None:
    kind = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(kind())
    with open(jobs_file) as file:
        jobs = json.load(file)
    results: list[str | None] = []
    for argv in jobs:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parser.parse_args(argv)
            results.append(None)
        except (SystemExit, ValueError) as error:
            results.append(said.getvalue().strip().splitlines()[-1] if said.getvalue() else repr(error))
    with open(results_file, "w") as file:
        json.dump({"options": sorted(o for o in parser._option_string_actions if o.startswith("--")),
                   "results": results}, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
