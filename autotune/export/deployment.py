"""One configuration ready to be shipped: its command with the host's own parts as parameters. Formats render it.

    deployment = deploy(settings, story, record)

The command comes from engine.argv.build, as it does for trials; host, port, interpreter, folder and model paths
are parameters with the measured values as defaults. Secrets are referenced by name and never carried.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.identity import command_line
from autotune.config.settings import Settings
from autotune.engine.command import Command, build
from autotune.records import Config, UsageError
from autotune.report import verdict
from autotune.report.measured import FIGURES, Tested, config_text
from autotune.report.story import Conclusion, Story
from autotune.storage.trial import TrialRecord
from autotune.utils.redact import HIDDEN, Redactor, after_flags, secret_name
from autotune.utils.text import number, one_line, percent, with_unit

DEFAULT_PORT = "8000"
OPEN, CLOSE = "\ue000", "\ue001"
"""Private-use characters around a parameter's name while the command is built; no real path has them."""
MARK = re.compile(f"{OPEN}([A-Z][A-Z0-9_]*){CLOSE}")
TAKEN = {"HOST", "PORT", "PYTHON", "WORKDIR", "IMAGE", "PATH", "HOME", "USER", "SHELL", "PWD", "LANG", "IFS", "ENV",
         "TERM", "PS4", "UID", "TMPDIR", "RANDOM", "SECONDS", "LINENO", "OPTIND", "HOSTNAME"}
"""Variables of an export itself, and of every shell: a secret of that name would be taken for set."""
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclasses.dataclass(frozen=True)
class Ref:
    """A parameter or secret in a word."""

    name: str


Word = tuple[str | Ref, ...]
"""One argument or value: literal text and references, in order."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A part of the command that belongs to a host. `path` tells a file or folder of this host from other text."""

    name: str
    default: str
    what: str
    path: bool = False


@dataclasses.dataclass(frozen=True)
class Deployment:
    study: str
    trial: int
    engine: str
    package: str | None
    version: str | None
    argv: tuple[Word, ...]
    env: Mapping[str, Word]
    parameters: tuple[Parameter, ...]
    secrets: tuple[str, ...]
    gpus: int
    health: str
    startup_s: float | None
    stop_s: float
    config_file: str | None
    facts: tuple[tuple[str, str], ...]
    """Where it came from, as (label, one line) for the header of every format."""
    warning: str | None
    origin: Mapping[str, Any]
    """The same as data, for launch.json."""

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.name == name), None)

    @property
    def models(self) -> tuple[Parameter, ...]:
        """Model paths that are folders of this host (and not names on a hub)."""
        return tuple(p for p in self.parameters if p.name.startswith("MODEL_") and p.path)


def deploy(settings: Settings, story: Story, record: TrialRecord, version: str | None = None) -> Deployment:
    """The deployment of one measured trial.

    Raises UsageError when the engine file now gives another command than the one that was measured.
    """
    space, engine = settings.space, settings.engine
    version = version or story.identity.get("engine_version")
    marked_space = dataclasses.replace(space, model={k: _mark(_model_name(k)) for k in space.model})
    marked_engine = dataclasses.replace(engine, python=_mark("PYTHON"))
    server = space.split(record.config)[0]
    command = build(marked_engine, marked_space, server, host=_mark("HOST"), port=_mark("PORT"),
                    device=settings.device, version=version)
    secrets = _Secrets(command, engine.vars)
    env: dict[str, Word] = {}
    for name, value in command.env.items():
        if not IDENTIFIER.match(name):
            raise UsageError(f"engine {engine.name}: {name!r} cannot be the name of an environment variable")
        env[name] = secrets.variable(name, value) or _word(value)
    words = secrets.words(command.argv)
    _same_as_measured(record, words, env)
    used = {part.name for word in [*words, *env.values()] for part in word if isinstance(part, Ref)}
    used -= set(secrets.names)
    on_gpus = settings.device != "cpu" and bool(story.provenance.get("gpu") or space.needs.get("gpus"))
    measured_in = record.attrs.get("same_as", record.number)
    entry = next((t for t in story.measured if measured_in in t.trials), None)
    return Deployment(
        study=story.study, trial=record.number, engine=engine.name, package=engine.package, version=version,
        argv=tuple(words), env=env, secrets=tuple(dict.fromkeys(secrets.names)),
        parameters=tuple(p for p in _parameters(settings, story.provenance.get("folder"))
                         if p.name in used or p.name == "WORKDIR"),
        gpus=command.gpus if on_gpus else 0,
        health=engine.ready.path, startup_s=_positive(record.attrs.get("launch_s")), stop_s=engine.stop_s,
        config_file=engine.config_file, facts=_facts(settings, story, record, entry, version),
        warning=_warning(story, record, entry), origin=_origin(settings, story, record, entry, words, env))


def plain(word: Word) -> str:
    """A word for people and for JSON: references as ${NAME}."""
    return "".join(f"${{{part.name}}}" if isinstance(part, Ref) else part for part in word)


def lines(argv: Sequence[Word]) -> list[list[Word]]:
    """Arguments grouped as people write them: a flag with its values on a line."""
    grouped: list[list[Word]] = [[]]
    for word in argv:
        if word and isinstance(word[0], str) and word[0].startswith("--") and grouped[-1]:
            grouped.append([])
        grouped[-1].append(word)
    return grouped


def _parameters(settings: Settings, folder: str | None) -> list[Parameter]:
    """`folder`: where the study was started; None for studies that did not store it."""
    models = [Parameter(_model_name(key), value, f"the {key} model",
                        value.startswith(("/", ".", "~")) or value.count("/") > 1)
              for key, value in settings.space.model.items()]
    return [Parameter("HOST", "127.0.0.1", "address to listen on (0.0.0.0: every interface)"),
            Parameter("PORT", DEFAULT_PORT, "port to listen on"),
            Parameter("PYTHON", settings.engine.python or sys.executable, "interpreter that has the engine", True),
            Parameter("WORKDIR", folder or str(pathlib.Path.cwd()), "folder to start in: relative paths count from it",
                      True),
            *models]


def _model_name(key: str) -> str:
    return "MODEL_" + re.sub(r"[^A-Z0-9]", "_", key.upper())


def _mark(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


def _word(text: str) -> Word:
    pieces = MARK.split(text)
    word = tuple(Ref(piece) if i % 2 else piece for i, piece in enumerate(pieces) if i % 2 or piece)
    return word or ("",)


class _Secrets:
    """References in place of secrets: values of secret-looking flags, variables and placeholders, and what holds one.

    `names` are the variables that carry them: a flag's own name, unless another value or the shell has it.
    """

    def __init__(self, command: Command, placeholders: Mapping[str, str]) -> None:
        self.redactor = Redactor.from_command(command.argv, command.env, placeholders)
        self.names: list[str] = []
        self._values: dict[str, str] = {}

    def words(self, argv: Sequence[str]) -> list[Word]:
        shown: list[Word] = []
        before = ""
        for (arg, after_secret), word in zip(after_flags(argv), map(_word, argv), strict=True):
            flag, equals, value = plain(word).partition("=")
            is_flag = arg.startswith("-")
            if is_flag and equals and (secret_name(flag) or self.looks(value)):
                word = (flag + "=", self.reference(flag, value))
            elif after_secret or self.looks(arg):
                word = (self.reference(before, arg),)
            before = flag if is_flag else before
            shown.append(word)
        return shown

    def variable(self, name: str, value: str) -> Word | None:
        """The reference for an environment variable that holds a secret; None when it holds none."""
        if not secret_name(name) and not self.looks(value):
            return None
        self._values[name] = value
        self.names.append(name)
        return (Ref(name),)

    def looks(self, text: str) -> bool:
        return self.redactor.text(text) != text

    def reference(self, flag: str, value: str) -> Ref:
        name = re.sub(r"[^A-Z0-9]+", "_", flag.lstrip("-").upper()) or "SECRET"
        if name in TAKEN or name.startswith("MODEL_") or not IDENTIFIER.match(name):
            name = f"SECRET_{name}"
        number = 1
        while self._values.setdefault(_numbered(name, number), value) != value:
            number += 1
        self.names.append(_numbered(name, number))
        return Ref(self.names[-1])


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def _same_as_measured(record: TrialRecord, words: Sequence[Word], env: Mapping[str, Word]) -> None:
    """Whether the measured command has the form that the engine file gives now."""
    measured = record.attrs.get("server_argv")
    if measured is None:
        return
    differ = [plain(w) for w, m in zip(words, measured, strict=False) if not _fits(w, str(m))]
    if len(words) != len(measured):
        differ.append(f"{len(words)} arguments instead of {len(measured)}")
    told = record.attrs.get("server_env")
    if told is not None:
        differ += [name for name in (*told, *(n for n in env if n not in told))
                   if name not in told or name not in env or not _fits(env[name], str(told[name]))]
    if differ:
        raise UsageError(f"trial {record.number} was measured with another command than the engine file gives now "
                         f"({one_line(', '.join(differ[:4]))}): pass the overrides of the study, or measure again")


def _fits(word: Word, measured: str) -> bool:
    """Whether a measured argument is `word` with some value for each reference."""
    pieces = [""]
    for part in word:
        pieces = [*pieces, ""] if isinstance(part, Ref) else [*pieces[:-1], pieces[-1] + part]
    return _has(measured, pieces) or (  # what was hidden may have been anything
        HIDDEN in measured and _has(plain(word), measured.split(HIDDEN)))


def _has(text: str, pieces: Sequence[str]) -> bool:
    """Whether a text is these pieces with any text between each two of them."""
    first, *between, last = pieces if len(pieces) > 1 else (pieces[0], "")
    if len(pieces) == 1 or len(first) + len(last) > len(text):
        return len(pieces) == 1 and text == first
    at, end = len(first), len(text) - len(last)
    for piece in between:  # the nearest of each leaves the most for the others
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return text.startswith(first) and text.endswith(last)


def _facts(settings: Settings, story: Story, record: TrialRecord, entry: Tested | None,
           version: str | None) -> tuple[tuple[str, str], ...]:
    identity, made = story.identity, story.provenance
    load = settings.space.split(record.config)[1]
    facts: list[tuple[str, Any]] = [
        ("Study", story.study), ("Trial", record.number), ("Space", f"{settings.space.name} ({settings.space.digest})"),
        ("Engine", " ".join(str(x) for x in (settings.engine.name, settings.engine.package, version) if x)),
        ("Model", ", ".join(f"{k} {v}" for k, v in settings.space.model.items())),
        ("Device", _joined(made.get("gpu") or identity.get("devices"))), ("Driver", made.get("driver")),
        ("autotune", made.get("autotune")), ("Configuration", config_text(record.config)),
        ("Measured", _figures(story, entry, load)), ("Energy", verdict.energy_words(entry)),
        ("Verdict", _claim(story, record)), ("Reproduce", made.get("command") or command_line(settings, "tune")),
    ]
    return tuple((label, one_line(value)) for label, value in facts if value not in (None, ""))


def _figures(story: Story, entry: Tested | None, load: Config) -> str:
    if entry is None:
        return "no valid measurement"
    shown = [with_unit(entry.value, story.unit)]
    shown += [f"{number(entry.figures[name])} {unit}" for name, unit in
              (("tokens_per_s", "tok/s"), ("watts", "W")) if name in entry.figures and unit != story.unit]
    shown += [f"{FIGURES[name][0]} {number(entry.figures[name])} ms"
              for name in ("ttft_p99_ms", "tpot_p99_ms") if name in entry.figures]
    return ", ".join(shown) + (f" at {config_text(load)}" if load else "")


def _claim(story: Story, record: TrialRecord) -> str:
    winner = story.winner
    if winner is None or record.number not in winner.trials:
        return "not the winner of the study: exported because it was asked for"
    if story.conclusion is Conclusion.NO_IMPROVEMENT:
        return "no improvement: this is the baseline, confirmed as good as anything found"
    if story.gain is None or not story.gain.confirmed:
        told = "" if story.gain is None else f" ({percent(story.gain.share, signed=True)} over the baseline)"
        return f"not confirmed{told}"
    return f"{verdict.headline(story)} {verdict.support(story)}"


def _warning(story: Story, record: TrialRecord, entry: Tested | None) -> str | None:
    if entry is None:
        reasons = ", ".join(record.attrs.get("invalid_reasons") or ()) or "no valid measurement"
        return f"trial {record.number} has no valid measurement ({one_line(reasons)}): its figures prove nothing"
    broken = [f"{name} by {percent(entry.ratios[name] - 1)}" for name in entry.violated]
    return f"trial {record.number} breaks its limits: {', '.join(broken)}" if broken else None


def _origin(settings: Settings, story: Story, record: TrialRecord, entry: Tested | None, words: Sequence[Word],
            env: Mapping[str, Word]) -> dict[str, Any]:
    gain = story.gain
    return {
        "study": story.study, "trial": record.number, "config": dict(record.config),
        "command": [plain(word) for word in words], "env": {name: plain(value) for name, value in env.items()},
        "feasible": entry.feasible if entry else False, "conclusion": str(story.conclusion),
        "verdict": _claim(story, record),
        "gain": None if gain is None else {**vars(gain)}, "objective": story.objective, "unit": story.unit,
        "value": entry.value if entry else None, "figures": dict(entry.figures) if entry else {},
        "energy_source": entry.energy_source if entry else None,
        "energy_assumed": entry.energy_assumed if entry else None,
        "limits": {limit.name: limit.limit for limit in story.limits},
        "limit_ratios": dict(entry.ratios) if entry else {},
        "identity": dict(story.identity), "provenance": dict(story.provenance),
        "reproduce": story.provenance.get("command") or command_line(settings, "tune"),
    }


def _joined(value: Any) -> str | None:
    if value is None:
        return None
    return ", ".join(str(v) for v in value) if isinstance(value, list | tuple) else str(value)


def _positive(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value > 0 else None
