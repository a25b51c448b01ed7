"""Text for people: the progress of a run, the report of the verb check, and the log of a run."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autotune.config.settings import Settings
from autotune.engine.command import shown as command_line
from autotune.engine.host import installed
from autotune.engine.spec import text
from autotune.executors.preflight import Preflight
from autotune.measure.limits import few_requests
from autotune.records import Config
from autotune.search.strategy import Launch, Pivot
from autotune.storage.database import backend, redacted, sqlite_file, sqlite_url
from autotune.storage.trial import TrialRecord
from autotune.utils.files import fresh
from autotune.utils.redact import Redactor
from autotune.utils.text import KEPT, REPLACED, count, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

LOG = logging.getLogger("autotune")
STANDARD = set(logging.makeLogRecord({}).__dict__) | {"taskName"}
BASELINE = "baseline"
COUNTING = ("warm-up", "window")  # stages whose text counts seconds: printed once without a terminal
FIGURES = {"tokens_per_s": "{:.1f} tok/s", "watts": "{:.1f} W", "tokens_per_j": "{:.3f} tok/J",
           "accept_length": "acceptance length {:.2f}", "tpot_p50_ms": "TPOT {:.1f} ms"}
PLAIN_S = 30.0  # without a terminal, a stage that lasts is printed again after this long


class Progress:
    """A ProgressListener of one run. Configurations are shown as their difference to `baseline`."""

    def __init__(self, baseline: Mapping[str, Any], unit: str, launches: int | None, console: Console | None = None,
                 past: list[TrialRecord] | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.baseline, self.unit, self.launches = baseline, unit, launches
        self.best: TrialRecord | None = None
        self.signatures: collections.Counter[str] = collections.Counter()
        self.began = time.monotonic()
        self.head = ""
        self._status: Status | None = None
        self._last: tuple[str, float] = ("", 0.0)
        for record in past or []:
            self._count(record)

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._status = self.console.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def launching(self, number: int, step: Launch) -> None:
        total = f"/{self.launches}" if self.launches and number <= self.launches else ""
        self.head = f"launch {number}{total}"
        self.note(f"{self.head}: {self._config(step.server)}  ({step.reason})")

    def stage(self, name: str, after_s: float) -> None:
        if self._status is not None:
            from rich.text import Text

            line = f"{self.head} | {name} {after_s:.0f} s | {self._standing()}"
            self._status.update(Text(one_line(line)))
            return
        last, when = self._last
        kind = name.split()[0]
        if kind != last or after_s - when >= PLAIN_S or after_s < when:
            self._last = (kind, after_s)
            self.note(f"  {after_s:6.1f} s  {name if kind not in COUNTING else kind}")

    def outcome(self, record: TrialRecord) -> None:
        self._count(record)
        load = {k: v for k, v in record.config.items() if k in ("concurrency", "context")}
        where = f"trial {record.number} at {self._config(load, whole=True)}" if load else f"trial {record.number}"
        if (crash := record.crash) is not None:
            self.note(f"  {where}: CRASH {crash.category} at {crash.stage} [{crash.signature}], blame {crash.blame}: "
                      f"{crash.explanation}")
            return
        shown, measured = record.figures, record.measurement
        figures = [text.format(shown[name]) for name, text in FIGURES.items() if name in shown]
        if record.same_as is not None:
            figures.append(f"the same server as trial {record.same_as}")
        remarks = [f"over the limit {v}" for v in (record.score.violated if record.score is not None else ())]
        remarks += few_requests(record.ratios, measured) if measured is not None else []
        remarks += record.invalid_reasons
        if measured is not None and measured.energy.source != "none":
            remarks.append(f"energy {measured.energy.source}" + (", assumed" if measured.energy.assumed else ""))
        new = "  * best so far" if self.best is not None and self.best.number == record.number else ""
        self.note(f"  {where}: {', '.join(figures)}" + (f" ({'; '.join(remarks)})" if remarks else "") + new)

    def pivot(self, pivot: Pivot) -> None:
        self.note(f"  PIVOT {pivot.action}: {pivot.reason}")

    def note(self, text: str) -> None:
        self.console.print(one_line(text), markup=False)

    def _count(self, record: TrialRecord) -> None:
        if record.crash is not None:
            self.signatures[record.crash.signature] += 1
        elif record.feasible and record.value is not None and (
                self.best is None or self.best.value is None or record.value > self.best.value):
            self.best = record

    def _standing(self) -> str:
        text = count(self.signatures.total(), "crash", "crashes")
        if self.signatures:
            text += f" ({count(len(self.signatures), 'signature')})"
        best = "no result yet"
        if self.best is not None:
            best = f"best {self.best.value:.3f} {self.unit} (trial {self.best.number})"
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{best} | {text} | {minutes}:{seconds:02d}"

    def _config(self, config: Mapping[str, Any], whole: bool = False) -> str:
        shown = {k: v for k, v in config.items() if whole or k not in self.baseline or self.baseline[k] != v}
        return ", ".join(f"{k}={text(v)}" for k, v in shown.items()) or "the baseline"


def version_unknown(settings: Settings) -> str:
    """The reason for an unknown version of the engine, for people."""
    if installed(settings.engine).asked:
        return "(version unknown)"
    return (f"(version not asked: the engine file names its own interpreter, {settings.engine.python}, which runs only "
            "with the engine; give engine.python=PATH or engine.version.use=VERSION)")


def where(settings: Settings, side_by_side: int) -> list[str]:
    """Two lines: where the study is kept, and where its launches are made."""
    url = settings.study.storage or sqlite_url(settings.folder)
    file = sqlite_file(url) if backend(url) == "sqlite" else None
    begun = "" if file is None else " (there already: tune resumes it)" if file.exists() else " (not begun yet)"
    if settings.executor.kind == "ray":
        launches = (f"by Ray at {settings.executor.address}, up to {settings.executor.at_once} side by side "
                    "(executor=ray); what is said here is about this host alone")
    else:
        together = "one at a time" if side_by_side == 1 else f"up to {side_by_side} side by side"
        launches = f"on this host, {together} (executor=local, parallel.slots={settings.parallel.slots})"
    return [f"study    {settings.study_name}, in {settings.folder}, kept in {redacted(url)}{begun}",
            f"launches {launches}"]


def check_report(report: Preflight, settings: Settings, side_by_side: int = 1, label: str = BASELINE,
                 config: Config | None = None) -> str:
    """The report on `config` (None: the baseline) as plain text, without secrets. `label` names it."""
    called = f"the {label}" if label in (BASELINE, "best") else label
    redactor = Redactor([*Redactor.from_command(report.command.argv, report.command.env).values,
                         *settings.redactor.values])
    command = dataclasses.replace(report.command, argv=tuple(redactor.argv(report.command.argv)), env={
        name: str(value) for name, value in redactor.mapping(report.command.env).items()})
    described = " ".join(settings.space.describe.split())  # on one line: more could pass for lines of ours
    lines = [f"space    {settings.space.name}: {described or settings.space.engine}",
             f"engine   {settings.engine.name} {report.version or version_unknown(settings)}",
             f"GPUs     {', '.join(g.hashed for g in report.gpus.gpus) or report.gpus.why_none}",
             *where(settings, side_by_side),
             f"{label:8} {', '.join(f'{k}={text(v)}' for k, v in (config or settings.space.baseline).items())}",
             "", f"command of {called}:", "  " + command_line(command), ""]
    if report.problems:
        lines += [f"{called} cannot run here:", *(f"  - {p}" for p in report.problems), ""]
    else:
        lines += [f"{called} can run here.", ""]
    lines.append("choices:")
    for param in settings.space.params:
        lines.append(f"  {param.name}" + (" (load, changed on a live server)" if param.load else ""))
        for value in param.choices:
            found = "; ".join(report.choices.get((param.name, value), ()))
            state = found or ("ok" if param.load or not report.problems else "once the above is mended")
            lines.append(f"    {text(value):24} {state}")
    if rules := [*settings.space.rules, *(rule for rule in report.unavailable if len(rule.when) > 1)]:
        lines += ["", "never launched together:"]
        for rule in rules:
            together = " + ".join(f"{k}={'|'.join(text(x) for x in v)}" for k, v in rule.when.items())
            lines.append(f"  {together}: {rule.because}")
    return "\n".join(one_line(redactor.text(line)) for line in lines)


class RedactedLines(logging.Formatter):
    """Lines without secrets. A file's is a JSON object: time, level, module, message, and the fields of `extra`."""

    def __init__(self, redactor: Redactor, terminal: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)s %(module)s: %(message)s")
        self.redactor, self.terminal = redactor, terminal

    def format(self, record: logging.LogRecord) -> str:
        if self.terminal:
            return printable(self.redactor.text(super().format(record)), keep=KEPT, instead=REPLACED)
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
                 "level": record.levelname.lower(), "module": record.module, "message": record.getMessage()}
        entry |= {key: value for key, value in record.__dict__.items() if key not in STANDARD}
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(self.redactor.data(entry), default=str)


def open_journal(folder: pathlib.Path, verbose: bool, secrets: Iterable[str] = ()) -> pathlib.Path:
    """Start this run's log file, free of `secrets`, and return its path. Raises OSError."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    redactor = Redactor([*Redactor.from_command(sys.argv, os.environ).values, *secrets])
    for old in list(LOG.handlers):
        LOG.removeHandler(old)
        old.close()
    logging.raiseExceptions = False  # drops a record that cannot be written (a full disk): no traceback
    LOG.addHandler(logging.FileHandler(fresh(path)))
    LOG.handlers[0].setFormatter(RedactedLines(redactor))
    if verbose:
        LOG.addHandler(logging.StreamHandler(sys.stderr))
        LOG.handlers[1].setFormatter(RedactedLines(redactor, terminal=True))
    LOG.setLevel(logging.DEBUG)
    LOG.propagate = False
    return path


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table that fits the terminal; the first column folds, the others stay whole."""
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=rich.box.SIMPLE, header_style="dim", pad_edge=False)
    for number, column in enumerate(columns):
        shown.add_column(column.replace("_", " "), overflow="fold", no_wrap=number > 0)
    for row in rows:
        shown.add_row(*(Text(printable(cell, instead=REPLACED)) for cell in row))
    Console(highlight=False).print(shown)
