"""One configuration ready to be shipped: its command with the host-specific parts as parameters. Formats render it.

    deployment = deploy(settings, story, record)

The command comes from engine.command.build, as for trials. Host, port, interpreter, folder and model paths are
parameters with the measured values as defaults. Secrets are referenced by name and never written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.config.settings import Settings
from autotune.engine.command import Command, build
from autotune.engine.spec import EngineSpec
from autotune.records import Config, UsageError
from autotune.report import verdict
from autotune.report.measured import FIGURES, Tested, config_text
from autotune.report.story import Conclusion, Story
from autotune.storage.trial import TrialRecord
from autotune.utils.redact import HIDDEN, Redactor, after_flags, secret_name
from autotune.utils.text import number, one_line, percent, with_unit

CONTAINER_PORT, CONTAINER_PYTHON = 8000, "python3"
START_SLACK = 3  # a start may take this many times the measured time
SHORTEST_START_S = 300
OPEN, CLOSE = "\ue000", "\ue001"  # around a parameter's name while the command is built: no real path has them
MARK = re.compile(f"{OPEN}([A-Z][A-Z0-9_]*){CLOSE}")
# Variables of an export itself, and of every shell: a secret of such a name would be taken for set.
TAKEN = {"HOST", "PORT", "PYTHON", "WORKDIR", "IMAGE", "PATH", "HOME", "USER", "SHELL", "PWD", "LANG", "IFS", "ENV",
         "TERM", "PS4", "UID", "TMPDIR", "RANDOM", "SECONDS", "LINENO", "OPTIND", "HOSTNAME"}
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class Ref(NamedTuple):
    """A parameter or secret in a word."""

    name: str


Word = tuple[str | Ref, ...]  # one argument or value: literal text and references, in order


class Parameter(NamedTuple):
    """A part of the command that differs between hosts.

    `path`: its default is a file or folder of this host. `inside` is where a container mounts that, read-only.
    """

    name: str
    default: str
    what: str
    path: bool = False
    inside: str = ""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """`facts` are (label, one line) of the origin for the header of every format, `origin` the same for launch.json."""

    study: str
    trial: int
    engine: EngineSpec
    version: str | None
    argv: tuple[Word, ...]
    env: Mapping[str, Word]
    parameters: Mapping[str, Parameter]
    secrets: tuple[str, ...]
    gpus: int
    start_limit_s: int
    facts: Mapping[str, str]
    warning: str | None
    origin: Mapping[str, Any]

    @property
    def mounts(self) -> tuple[Parameter, ...]:
        """Each model that is a folder of this host, and not a name on a hub; the defaults are absolute paths."""
        folder = pathlib.Path(self.parameters["WORKDIR"].default).absolute()
        return tuple(
            p._replace(default=os.path.normpath(folder / pathlib.Path(p.default).expanduser()),
                       inside=f"/models/{p.name.removeprefix('MODEL_').lower()}")
            for p in self.parameters.values() if p.name.startswith("MODEL_") and p.path)

    @property
    def own_env(self) -> dict[str, Word]:
        """The environment without secrets that keep their name: those come from outside."""
        return {name: value for name, value in self.env.items() if value != (Ref(name),)}

    @property
    def image(self) -> str:
        """Engine and version that a container image must have, on one line."""
        return one_line(" ".join(x for x in (self.engine.package or self.engine.name, self.version) if x))

    @property
    def stop_limit_s(self) -> int:
        return math.ceil(self.engine.stop_s) + 20

    def comment(self) -> str:
        """The header of every format: lines starting with `#`, every fact on one line."""
        width = max(map(len, self.facts))
        out = ["# Written by autotune: starts one measured configuration of a study.", "#"]
        if self.warning:
            out += ["#  " + "!" * 100, f"#  !!  {one_line(self.warning)}", "#  " + "!" * 100, "#"]
        return "\n".join([*out, *(f"#   {label.ljust(width)}  {fact}" for label, fact in self.facts.items()), "#"])


def deploy(settings: Settings, story: Story, record: TrialRecord, version: str | None = None) -> Deployment:
    """The deployment of one measured trial.

    Raises UsageError when the engine file now gives another command than the one that was measured.
    """
    space, engine = settings.space, settings.engine
    version = version or story.identity.get("engine_version")
    marked_space = dataclasses.replace(space, model={k: _mark(_model_name(k)) for k in space.model})
    marked_engine = dataclasses.replace(engine, python=_mark("PYTHON"))
    command = build(marked_engine, marked_space, space.split(record.config)[0], host=_mark("HOST"),
                    port=_mark("PORT"), device=settings.device, version=version)
    secrets = _Secrets(command, engine.vars)
    env: dict[str, Word] = {}
    for name, value in command.env.items():
        if not IDENTIFIER.match(name):
            raise UsageError(f"engine {engine.name}: {name!r} cannot be the name of an environment variable")
        env[name] = secrets.variable(name, value) or _word(value)
    words = secrets.words(command.argv)
    _same_as_measured(record, words, env)
    used = {"WORKDIR", *(part.name for word in [*words, *env.values()] for part in word if isinstance(part, Ref))}
    on_gpus = settings.device != "cpu" and bool(story.provenance.get("gpu") or space.needs.get("gpus"))
    measured_in = record.number if record.same_as is None else record.same_as
    entry = next((t for t in story.measured if measured_in in t.trials), None)
    return Deployment(
        study=story.study, trial=record.number, engine=engine, version=version, argv=tuple(words), env=env,
        secrets=tuple(secrets.values), gpus=command.gpus if on_gpus else 0,
        parameters={p.name: p for p in _parameters(settings, story.provenance.get("folder"))
                    if p.name in used.difference(secrets.values)},
        start_limit_s=max(SHORTEST_START_S, math.ceil(START_SLACK * (record.launch_s or 0))),
        facts=_facts(settings, story, record, entry, version), warning=_warning(record, entry),
        origin=_origin(settings, story, record, entry, words, env))


def spell(word: Word, reference: Callable[[str], str], literal: Callable[[str], str] = str) -> str:
    """A word as one text: the names of parameters and secrets by `reference`, the rest by `literal`."""
    return "".join(reference(part.name) if isinstance(part, Ref) else literal(part) for part in word)


def plain(word: Word) -> str:
    """A word for people and for JSON: references as ${NAME}."""
    return spell(word, "${{{}}}".format)


def _parameters(settings: Settings, folder: str | None) -> list[Parameter]:
    """`folder` is the one in which the study was started; None for studies that did not store it."""
    return [Parameter("HOST", "127.0.0.1", "address to listen on (0.0.0.0: every interface)"),
            Parameter("PORT", "8000", "port to listen on"),
            Parameter("PYTHON", settings.engine.python or sys.executable, "interpreter that has the engine", True),
            Parameter("WORKDIR", folder or os.getcwd(), "folder to start in: relative paths count from it", True),
            *(Parameter(_model_name(key), value, f"the {key} model",
                        value.startswith(("/", ".", "~")) or value.count("/") > 1)
              for key, value in settings.space.model.items())]


def _model_name(key: str) -> str:
    return "MODEL_" + re.sub(r"[^A-Z0-9]", "_", key.upper())


def _mark(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


def _word(text: str) -> Word:
    pieces = enumerate(MARK.split(text))  # literal text and names in turn
    return tuple(Ref(piece) if i % 2 else piece for i, piece in pieces if i % 2 or piece) or ("",)


class _Secrets:
    """References in place of secrets: values of secret-looking flags, variables and placeholders, and texts with one.

    `values` are the secrets by variable: the flag's own name, unless another value or the shell uses it.
    """

    def __init__(self, command: Command, placeholders: Mapping[str, str]) -> None:
        self.redactor = Redactor.from_command(command.argv, command.env, placeholders)
        self.values: dict[str, str] = {}

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
        self.values[name] = value
        return (Ref(name),)

    def looks(self, text: str) -> bool:
        return self.redactor.text(text) != text

    def reference(self, flag: str, value: str) -> Ref:
        name = re.sub(r"[^A-Z0-9]+", "_", flag.lstrip("-").upper()) or "SECRET"
        if name in TAKEN or name.startswith("MODEL_") or not IDENTIFIER.match(name):
            name = f"SECRET_{name}"
        names = (name if n == 1 else f"{name}_{n}" for n in itertools.count(1))
        return Ref(next(n for n in names if self.values.setdefault(n, value) == value))


def _same_as_measured(record: TrialRecord, words: Sequence[Word], env: Mapping[str, Word]) -> None:
    """Raises UsageError when the measured command has another form than `words` and `env`."""
    measured, before = record.launch.argv, record.launch.env
    if not measured:
        return
    differ = [plain(w) for w, m in zip(words, measured, strict=False) if not _fits(w, m)]
    if len(words) != len(measured):
        differ.append(f"{len(words)} arguments instead of {len(measured)}")
    if before is not None:
        differ += [name for name in (*before, *(n for n in env if n not in before))
                   if name not in before or name not in env or not _fits(env[name], before[name])]
    if differ:
        raise UsageError(f"trial {record.number} was measured with another command than the engine file gives now "
                         f"({one_line(', '.join(differ[:4]))}): pass the overrides of the study, or measure again")


def _fits(word: Word, measured: str) -> bool:
    """True when a measured argument is `word` with some value for each reference."""
    pieces = spell(word, lambda name: OPEN).split(OPEN)
    return _has(measured, pieces) or (  # redacted text matches anything
        HIDDEN in measured and _has(plain(word), measured.split(HIDDEN)))


def _has(text: str, pieces: Sequence[str]) -> bool:
    """True when a text is these pieces with any text between each two of them."""
    if len(pieces) == 1:
        return text == pieces[0]
    first, *between, last = map(re.escape, pieces)
    # Atomic groups: the leftmost match of each piece leaves the most text for the rest, so nothing is tried twice.
    return re.fullmatch(first + "".join(f"(?>.*?{piece})" for piece in between) + ".*" + last, text, re.S) is not None


def _facts(settings: Settings, story: Story, record: TrialRecord, entry: Tested | None,
           version: str | None) -> dict[str, str]:
    made = story.provenance
    facts = {
        "Study": story.study, "Trial": record.number, "Space": f"{settings.space.name} ({settings.space.digest})",
        "Engine": " ".join(str(x) for x in (settings.engine.name, settings.engine.package, version) if x),
        "Model": ", ".join(f"{k} {v}" for k, v in settings.space.model.items()),
        "Device": ", ".join(map(str, made.get("gpu") or story.identity.get("devices") or ())),
        "Driver": made.get("driver"), "autotune": made.get("autotune"), "Configuration": config_text(record.config),
        "Measured": _figures(story, entry, settings.space.split(record.config)[1]),
        "Energy": verdict.energy_words(entry), "Verdict": _claim(story, record),
        "Reproduce": made.get("command") or settings.shown_command("tune")}
    return {label: one_line(value) for label, value in facts.items() if value not in (None, "")}


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
    if story.gain is None:
        return "not confirmed"
    return f"{verdict.headline(story)} {verdict.support(story)}" if story.gain.confirmed else verdict.headline(story)


def _warning(record: TrialRecord, entry: Tested | None) -> str | None:
    if entry is None:
        reasons = ", ".join(record.invalid_reasons) or "no valid measurement"
        return f"trial {record.number} has no valid measurement ({one_line(reasons)}): its figures prove nothing"
    broken = [f"{name} by {percent(entry.ratios[name] - 1)}" for name in entry.violated]
    return f"trial {record.number} breaks its limits: {', '.join(broken)}" if broken else None


def _origin(settings: Settings, story: Story, record: TrialRecord, entry: Tested | None, words: Sequence[Word],
            env: Mapping[str, Word]) -> dict[str, Any]:
    return {
        "study": story.study, "trial": record.number, "config": record.config,
        "command": [plain(word) for word in words], "env": {name: plain(value) for name, value in env.items()},
        "feasible": entry.feasible if entry else False, "conclusion": str(story.conclusion),
        "verdict": _claim(story, record), "gain": story.gain and story.gain._asdict(),
        "shares": {name: gain and gain._asdict() for name, gain in story.shares._asdict().items()},
        "objective": story.objective,
        "unit": story.unit, "value": entry.value if entry else None, "figures": entry.figures if entry else {},
        "energy_source": entry.energy.source if entry else None,
        "energy_assumed": entry.energy.assumed if entry else None,
        "limits": {limit.name: limit.limit for limit in story.limits},
        "limit_ratios": entry.ratios if entry else {}, "identity": story.identity, "provenance": story.provenance,
        "reproduce": story.provenance.get("command") or settings.shown_command("tune")}
