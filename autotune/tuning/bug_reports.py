"""Bug reports: one per crash signature in outputs/STUDY/bugs/, with the smallest difference that crashes.

    isolate(tuner, launches=6)      # optional: spend launches on that difference
    write(folder, space, records, versions)

The difference comes from failure isolation (crash/isolate.py) over all trials of the study. Where isolation is
undecided, the report shows the difference to the most similar configuration that worked, and says so.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autotune.crash.isolate import Isolated, Isolation, suspects
from autotune.records import Config, Crash, Stage, config_key
from autotune.space.constraints import text as spelled
from autotune.space.space import Space
from autotune.storage.trial import TrialRecord
from autotune.utils.files import write_text
from autotune.utils.redact import Redactor
from autotune.utils.text import KEPT, REPLACED, SPELLED, printable

if TYPE_CHECKING:
    from autotune.tuning.loop import Tuner

TITLE = 120  # characters


@dataclasses.dataclass(frozen=True)
class Bug:
    """The crashes of one signature.

    `crashing` and `working` are the most similar pair of configurations; `working` is None when nothing ever worked.
    `known` maps configuration keys to True (worked) or False (crashed); they include load parts only when `loaded`, for
    crashes under load.
    """

    signature: str
    records: tuple[TrialRecord, ...]
    crashing: TrialRecord
    working: TrialRecord | None
    known: Mapping[str, bool]
    loaded: bool

    def isolation(self, space: Space) -> Isolation | None:
        """A failure isolation with the outcomes of the study; None where nothing worked.

        It starts from the baseline if that worked: a more similar configuration may share choices with the crashing one
        that take part in the cause.
        """
        if self.working is None:
            return None
        crashing, working, baseline = (_part(space, config, self.loaded) for config in (
            self.crashing.config, self.working.config, space.baseline))
        if self.known.get(config_key(baseline)):
            working = baseline
        return Isolation(space, crashing, working, self.known, suspects(_crash(self.crashing), list(crashing)))


def bugs(space: Space, records: Sequence[TrialRecord]) -> list[Bug]:
    """The distinct crashes of a study, most frequent first."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.crashed:
            groups.setdefault(_crash(record).signature, []).append(record)
    found = [_bug(space, signature, crashed, records) for signature, crashed in groups.items()]
    return sorted(found, key=lambda bug: -len(bug.records))


def _crash(record: TrialRecord) -> Crash:
    assert record.crash is not None
    return record.crash


def _bug(space: Space, signature: str, crashed: Sequence[TrialRecord], records: Sequence[TrialRecord]) -> Bug:
    loaded = all(r.crashed_under_load for r in crashed)
    worked = [r for r in records if r.state == "COMPLETE"]
    if not loaded:  # a server that got further before it died did not crash like this
        ready = any(_crash(r).stage is Stage.SERVING for r in crashed)
        worked += [r for r in records if r.crashed_under_load or
                   r.crashed and not ready and _crash(r).stage is Stage.SERVING]

    def part(record: TrialRecord) -> Config:
        return _part(space, record.config, loaded)

    known = {config_key(part(r)): False for r in crashed} | {config_key(part(r)): True for r in worked}
    pairs = [(a, b) for a in crashed for b in worked if config_key(part(a)) != config_key(part(b))]
    if not pairs:
        nearest = min(crashed, key=lambda r: _distance(r.config, space.baseline))
        return Bug(signature, tuple(crashed), nearest, None, known, loaded)
    crashing, working = min(pairs, key=lambda pair: _distance(part(pair[0]), part(pair[1])))
    return Bug(signature, tuple(crashed), crashing, working, known, loaded)


def _part(space: Space, config: Config, loaded: bool) -> Config:
    """The part of a configuration that can cause a crash: all of it under load, else the server part."""
    return dict(config) if loaded else space.split(config)[0]


def _distance(a: Config, b: Config) -> int:
    return sum(a.get(name) != b.get(name) for name in {*a, *b})


def isolate(tuner: Tuner, launches: int) -> None:
    """Spend at most `launches` on the smallest differences, most frequent crash first.

    Probes are ordinary trials, measured under the load part of the working configuration.
    """
    space, left = tuner.study.space, launches
    for bug in bugs(space, tuner.study.records()):
        search = bug.isolation(space)
        while left > 0 and search is not None and (probe := search.next_probe()) is not None:
            assert bug.working is not None
            left -= 1
            record = tuner.measure({**space.split(bug.working.config)[1], **probe}, reason=f"isolates {bug.signature}",
                                   isolates=bug.signature)
            same = record.crash is not None and record.crash.signature == bug.signature
            search.tell(False if same else None if record.crashed else True)


def smallest(space: Space, bug: Bug) -> Isolated | None:
    """The smallest difference that the study's outcomes prove, else the difference of the most similar pair."""
    search = bug.isolation(space)
    if search is None or bug.working is None:
        return None
    if search.result is not None:
        return search.result
    crashing, working = (_part(space, r.config, bug.loaded) for r in (bug.crashing, bug.working))
    choices = {name: value for name, value in crashing.items() if name not in working or working[name] != value}
    holding = [worked for key, worked in bug.known.items() if choices.items() <= json.loads(key).items()]
    instead = {name: working[name] for name in choices if name in working}
    return Isolated(choices, instead, exact=False, launches=0, crashed=holding.count(False), worked=holding.count(True))


def write(folder: pathlib.Path, space: Space, records: Sequence[TrialRecord],
          versions: Mapping[str, str]) -> list[pathlib.Path]:
    """Write one Markdown file per signature; returns their paths."""
    paths = []
    for bug in bugs(space, records):
        launch, working = bug.crashing.launch, bug.working.launch.argv if bug.working else ()
        text = bug_report(_crash(bug.crashing), command=launch.argv, isolated=smallest(space, bug),
                          working_command=working, environment=launch.env, versions=versions)
        path = folder / "bugs" / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', bug.signature)}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        paths.append(path)
    return paths


def bug_report(crash: Crash, *, command: Sequence[str], isolated: Isolated | None = None,
               working_command: Sequence[str] = (), environment: Mapping[str, str] | None = None,
               versions: Mapping[str, str] | None = None) -> str:
    """A report in Markdown, ready to paste, without secrets.

    `command` crashes; `working_command` differs in the isolated choices only and works. `environment`: variables of the
    launch. `versions`: component -> version (engine, GPU, driver, packages).
    """
    redactor = Redactor.from_command(command, environment := environment or {})
    facts = {"stage": crash.stage, "category": crash.category, "blame": crash.blame, "signature": crash.signature,
             "exit status": crash.exit_status, "after": None if crash.after_s is None else f"{crash.after_s:.0f} s"}
    parts = [_title(crash, redactor), crash.explanation,
             _table(("what", "value"), [fact for fact in facts.items() if fact[1] is not None]),
             "## Reproduce", _shell(redactor, command, environment)]
    if working_command:
        parts += ["This works instead:", _shell(redactor, working_command, environment)]
    if isolated is not None:
        rows = [(name, spelled(value), spelled(isolated.instead[name]) if name in isolated.instead else
                 "(does not exist)") for name, value in isolated.choices.items()]
        certain = ("Each of these choices is needed for the crash." if isolated.exact else
                   "Some combinations could not be decided: one of these choices may be innocent.")
        parts += ["## Smallest difference found", _table(("choice", "crashes", "works"), rows),
                  f"{certain} Launches with these choices: {isolated.crashed} crashed, {isolated.worked} worked "
                  f"(isolated in {isolated.launches} launches)."]
    parts += ["## Log", _fence(redactor.text(crash.excerpt), "text")]
    if versions:
        parts += ["## Versions", _table(("component", "version"), [(k, redactor.text(v)) for k, v in versions.items()])]
    return "\n\n".join(parts) + "\n"


def _title(crash: Crash, redactor: Redactor) -> str:
    last = [line for line in crash.excerpt.splitlines() if re.search(r"error|exception|fail|assert", line, re.I)]
    said = (last or crash.excerpt.splitlines() or [crash.category])[-1]
    shown = f"[{crash.category}] {printable(' '.join(redactor.text(said).split()))}"[:TITLE]
    return "# " + re.sub(r"([<>&`\\])", r"\\\1", shown)


def _shell(redactor: Redactor, command: Sequence[str], environment: Mapping[str, str]) -> str:
    words = [f"{name}={shlex.quote(str(value))}" for name, value in redactor.mapping(environment).items()]
    return _fence(printable(" ".join([*words, shlex.join(redactor.argv(list(command)))]), instead=SPELLED), "sh")


def _fence(text: str, language: str) -> str:
    """Code block with a fence longer than any run of backticks in the text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}{language}\n{printable(text, keep=KEPT, instead=REPLACED)}\n{fence}"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [[printable(str(cell).replace("|", "\\|"), instead=SPELLED) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])
