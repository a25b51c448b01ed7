"""Progress for people: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.engine.spec import text
from autotune.search.strategy import Launch, Pivot
from autotune.storage.trial import TrialRecord
from autotune.utils.text import SPELLED, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

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
            self._status.update(Text(printable(line, instead=SPELLED)))
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
        remarks += record.invalid_reasons
        if measured is not None and measured.energy.source != "none":
            remarks.append(f"energy {measured.energy.source}" + (", assumed" if measured.energy.assumed else ""))
        new = "  * best so far" if self.best is not None and self.best.number == record.number else ""
        self.note(f"  {where}: {', '.join(figures)}" + (f" ({'; '.join(remarks)})" if remarks else "") + new)

    def pivot(self, pivot: Pivot) -> None:
        self.note(f"  PIVOT {pivot.action}: {pivot.reason}")

    def note(self, text: str) -> None:
        self.console.print(printable(text, instead=SPELLED), markup=False)

    def _count(self, record: TrialRecord) -> None:
        if record.crash is not None:
            self.signatures[record.crash.signature] += 1
        elif record.feasible and record.value is not None and (
                self.best is None or self.best.value is None or record.value > self.best.value):
            self.best = record

    def _standing(self) -> str:
        crashes = self.signatures.total()
        text = f"{crashes} crash{'es' if crashes != 1 else ''}"
        if self.signatures:
            text += f" ({len(self.signatures)} signature{'s' if len(self.signatures) > 1 else ''})"
        best = "no result yet"
        if self.best is not None:
            best = f"best {self.best.value:.3f} {self.unit} (trial {self.best.number})"
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{best} | {text} | {minutes}:{seconds:02d}"

    def _config(self, config: Mapping[str, Any], whole: bool = False) -> str:
        shown = {k: v for k, v in config.items() if whole or k not in self.baseline or self.baseline[k] != v}
        return ", ".join(f"{k}={text(v)}" for k, v in shown.items()) or "the baseline"


@dataclasses.dataclass(frozen=True)
class Annotator:
    """A TrialAnnotator for optuna-dashboard. `folder` is the study's."""

    folder: pathlib.Path

    def attach(self, trial: Any, launch: pathlib.Path) -> None:
        from autotune.report.dashboard import attach

        attach(trial, self.folder / "artifacts",
               [launch / "server.log", launch / f"power-{trial.number}.csv", launch / f"requests-{trial.number}.jsonl"])

    def annotate(self, study: Any, record: Any) -> None:
        from autotune.report.dashboard import annotate

        annotate(study, record)
