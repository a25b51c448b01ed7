"""The command line: `python -m autotune [VERB] +space=NAME [overrides]`. Verbs are in `autotune/cli/commands.py`.

Exit codes: 0 done; 1 our failure; 2 bad usage or space; 3 nothing feasible; 4 this host cannot run it;
130 interrupted (state kept). Every failure is one line on standard error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from autotune.records import AutotuneError, UsageError
from autotune.utils.redact import Redactor
from autotune.utils.text import SPELLED, printable

VERBS = {
    "tune": "run or resume the study (the default)",
    "check": "what this host lacks, the exact command (or that of config=TRIAL), and every choice with its reason",
    "matrix": "concurrency x context table for config=baseline, config=best or config=TRIAL on one launch",
    "classify": "explain server logs: classify FILE... (- reads standard input); needs no space",
    "report": "write report.html and report.md (or out=FILE), print the summary (report.format=json for scripts)",
    "export": "write the best configuration (or trial=N): format=sh, systemd, compose, k8s, yaml, out=FILE",
    "dashboard": "optuna-dashboard on this study, on loopback only",
    "worker": "join a study from another process or host",
}
TELLING = ("report", "export", "dashboard")
"""Verbs on a study that is there: they need no engine, and go by the version that was measured."""
STARTING = ("tune", "matrix", "worker")
"""Verbs that start the engine."""
USAGE = "usage: python -m autotune [VERB] +space=NAME [key=value ...] [--spaces DIR] [-v] [--cfg]"


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line taken apart: the verb, Hydra overrides, plain arguments, and our options."""

    verb: str
    overrides: tuple[str, ...]
    files: tuple[str, ...]
    spaces: tuple[str, ...]
    verbose: bool
    help: bool
    version: bool
    show_config: bool


def parse(argv: Sequence[str]) -> Line:
    """Take a command line apart. Raises UsageError for what is neither verb, override nor option."""
    rest = list(argv)
    verb = rest.pop(0) if rest and rest[0] in VERBS else "tune"
    overrides, files, spaces = [], [], []
    flags = {"verbose": False, "help": False, "version": False, "show_config": False}
    names = {"-v": "verbose", "--verbose": "verbose", "-h": "help", "--help": "help", "--version": "version",
             "--cfg": "show_config"}
    while rest:
        item = rest.pop(0)
        if item in names:
            flags[names[item]] = True
        elif item == "--spaces" and rest:
            spaces.append(rest.pop(0))
        elif item.startswith("--spaces="):
            spaces.append(item.split("=", 1)[1])
        elif verb == "classify" and (item == "-" or not item.startswith("-")):
            files.append(item)
        elif item.startswith("-"):
            raise UsageError(f"unknown option {item} ({USAGE})")
        elif "=" in item or item.startswith("~"):
            overrides.append(item)
        else:
            if item in VERBS:
                raise UsageError(f"the verb comes first: python -m autotune {item} ...")
            raise UsageError(f"{item!r} is neither a verb ({', '.join(VERBS)}) nor an override key=value")
    return Line(verb, tuple(overrides), tuple(files), tuple(spaces), **flags)


def help_text(extra: Sequence[str]) -> str:
    """What --help prints, with the spaces that exist."""
    from autotune.config.compose import space_files

    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {text}" for name, text in VERBS.items())
    spaces = "\n".join(f"  {name:{width}}  {describe(file)}" for name, file in sorted(space_files(extra).items()))
    return (f"{USAGE}\n\nFind the inference-server configuration with the most output tokens per joule.\n\n"
            f"verbs:\n{verbs}\n\nspaces:\n{spaces}\n\n"
            "settings are Hydra overrides: study.launches=20 workload.window_s=60 power=cpu_time engine.python=/path\n"
            "--spaces DIR adds a folder of spaces; --cfg prints the composed configuration; -v logs to the terminal")


def describe(file: object) -> str:
    """The `describe` line of a space file, without reading it as a space."""
    import pathlib

    from autotune.utils.files import read_plain

    try:
        lines = read_plain(pathlib.Path(str(file)), most_bytes=4 << 20).splitlines()
    except OSError:
        return ""
    said = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("describe:")), "")
    return for_people(said)


def for_people(text: str, argv: Sequence[str] = ()) -> str:
    """Text for the terminal: without control characters and the secrets of `argv` and the environment."""
    import os

    return printable(Redactor.from_command(argv, os.environ).text(text), instead=SPELLED)


def run(argv: Sequence[str]) -> int:
    """Do what a command line says; returns the exit code."""
    line = parse(argv)
    if line.version:
        import autotune

        print(f"autotune {autotune.__version__}")
        return 0
    if line.help:
        print(help_text(line.spaces))
        return 0
    if line.verb == "classify":
        from autotune.cli.classify import run as classify

        if line.spaces or line.show_config:
            raise UsageError("classify reads logs and needs no space: leave --spaces and --cfg out")
        if not line.files:
            raise UsageError("classify needs at least one log file, or - for standard input")
        return classify(list(line.files), sys.stdout)
    from autotune.config import compose
    from autotune.config.settings import refuse_unused

    if not line.show_config:
        refuse_unused(line.verb, line.overrides)
    starts = line.verb in STARTING and not line.show_config
    settings = compose.load(line.overrides, line.spaces, installed=line.verb not in TELLING and not starts)
    if line.show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create(settings.redactor.mapping(settings.composed))), end="")
        return 0
    if starts:
        if settings.engine.python_of_file:
            print(for_people(f"autotune: the file of engine {settings.engine.name} names its own interpreter, which is "
                             f"asked for its version and then started: {settings.engine.python}"), file=sys.stderr)
        settings = settings.asking()
    from autotune.cli import commands

    return commands.run(line.verb, settings, line.verbose)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: one line and an exit code for whatever goes wrong. SIGTERM, SIGHUP: like Ctrl-C."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # under nohup it is to be ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    told = sys.argv[1:] if argv is None else argv
    try:
        return run(told)
    except AutotuneError as error:
        print(f"autotune: {for_people(str(error), told)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends already: once more changes nothing
            signal.signal(number, signal.SIG_IGN)
        print("autotune: interrupted; the study is kept: run the same command to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "-v" in told:
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        print(f"autotune: a fault of autotune itself ({for_people(said, told)}); the same command with -v shows "
              "where", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
