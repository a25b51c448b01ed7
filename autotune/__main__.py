"""The command line: `python -m autotune [VERB] +space=NAME [overrides]`. The verbs are in cli/verbs.py.

Exit codes: 0 done; 1 our failure; 2 bad usage or space; 3 nothing feasible; 4 this host cannot run it;
130 interrupted (state kept). Every failure is one line on standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import signal
import sys
from collections.abc import Sequence

from autotune.cli.verbs import VERBS
from autotune.records import AutotuneError, UsageError
from autotune.utils.files import read_plain
from autotune.utils.redact import Redactor
from autotune.utils.text import one_line

USAGE = "usage: python -m autotune [VERB] +space=NAME [key=value ...] [--spaces DIR] [-v] [--cfg]"
OPTIONS = {"-v": "verbose", "--verbose": "verbose", "-h": "help", "--help": "help", "--version": "version",
           "--cfg": "show_config"}


@dataclasses.dataclass(frozen=True)
class Line:
    """A command line taken apart: the verb, Hydra overrides, plain arguments, and our options."""

    verb: str
    overrides: tuple[str, ...]
    files: tuple[str, ...]
    spaces: tuple[str, ...]
    options: frozenset[str]  # of verbose, help, version, show_config


def parse(argv: Sequence[str]) -> Line:
    """Take a command line apart. Raises UsageError for words that are neither verb, override nor option."""
    rest = list(argv)
    verb = rest.pop(0) if rest and rest[0] in VERBS else "tune"
    overrides, files, spaces, options = [], [], [], set()
    while rest:
        item = rest.pop(0)
        if item in OPTIONS:
            options.add(OPTIONS[item])
        elif item == "--spaces" and rest:
            spaces.append(rest.pop(0))
        elif item.startswith("--spaces="):
            spaces.append(item.split("=", 1)[1])
        elif not VERBS[verb].space and (item == "-" or not item.startswith("-")):
            files.append(item)
        elif item.startswith("-"):
            raise UsageError(f"unknown option {item} ({USAGE})")
        elif "=" in item or item.startswith("~"):
            overrides.append(item)
        elif item in VERBS:
            raise UsageError(f"the verb comes first: python -m autotune {item} ...")
        else:
            raise UsageError(f"{item!r} is neither a verb ({', '.join(VERBS)}) nor an override key=value")
    return Line(verb, tuple(overrides), tuple(files), tuple(spaces), frozenset(options))


def run(line: Line) -> int:
    """Run a command line; returns the exit code."""
    if "version" in line.options:
        import autotune

        print(f"autotune {autotune.__version__}")
        return 0
    if "help" in line.options:
        print(help_text(line.spaces))
        return 0
    verb, show_config = VERBS[line.verb], "show_config" in line.options
    if not verb.space:
        if line.spaces or show_config:
            raise UsageError(f"{line.verb} reads logs and needs no space: leave --spaces and --cfg out")
        return verb.run(line.files)
    from autotune.config import compose
    from autotune.config.settings import refuse_unused

    if not show_config:
        refuse_unused(line.verb, line.overrides)
    starts = verb.starts and not show_config
    settings = compose.load(line.overrides, line.spaces, installed=not verb.study and not starts)
    if show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(OmegaConf.create(settings.redactor.mapping(settings.composed))), end="")
        return 0
    if starts:
        if settings.engine.python_of_file:
            print(for_people(f"autotune: the file of engine {settings.engine.name} names its own interpreter, which is "
                             f"asked for its version and then started: {settings.engine.python}"), file=sys.stderr)
        settings = settings.asking()
    return verb.call(settings, "verbose" in line.options)


def help_text(extra: Sequence[str]) -> str:
    """The text of --help, with the spaces that exist here and in the folders `extra`."""
    from autotune.config.compose import space_files

    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:{width}}  {verb.help}" for name, verb in VERBS.items())
    spaces = "\n".join(f"  {name:{width}}  {describe(file)}" for name, file in sorted(space_files(extra).items()))
    return (f"{USAGE}\n\nFind the inference-server configuration with the most output tokens per joule.\n\n"
            f"verbs:\n{verbs}\n\nspaces:\n{spaces}\n\n"
            "settings are Hydra overrides: study.launches=20 workload.window_s=60 power=cpu_time engine.python=/path\n"
            "--spaces DIR adds a folder of spaces; --cfg prints the composed configuration; -v logs to the terminal")


def describe(file: pathlib.Path) -> str:
    """The `describe` line of a space file, without parsing the space; "" when it cannot be read."""
    with contextlib.suppress(OSError):
        if found := re.search("^describe: *(.*)", read_plain(file), re.M):
            return for_people(found[1])
    return ""


def for_people(text: str, argv: Sequence[str] = ()) -> str:
    """Text for the terminal: without control characters and the secrets of `argv` and the environment."""
    return one_line(Redactor.from_command(argv, os.environ).text(text))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: every failure becomes one line and an exit code. SIGTERM and SIGHUP act like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup sets it to be ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    words = sys.argv[1:] if argv is None else argv
    try:
        return run(parse(words))
    except AutotuneError as error:
        print(f"autotune: {for_people(str(error), words)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process ends already
            signal.signal(number, signal.SIG_IGN)
        print("autotune: interrupted; the study is kept: run the same command to resume", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "-v" in words:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        print(f"autotune: a fault of autotune itself ({for_people(text, words)}); the same command with -v shows "
              "where", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
