"""Progress that a person can follow: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.engine.spec import text
from autotune.search.protocol import Launch, Pivot
from autotune.storage.trial import TrialRecord
from autotune.utils.text import SPELLED, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

COUNTING = ("warm-up", "window")
"""Stages whose text counts seconds: told once on a plain terminal."""
PLAIN_S = 30.0
"""Without a terminal, a stage that lasts is repeated this often."""


class Progress:
    """Follows one run. `baseline` shortens configurations to what differs from it."""

    def __init__(self, baseline: Mapping[str, Any], unit: str, launches: int | None, console: Console | None = None,
                 past: list[TrialRecord] | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self.baseline, self.unit, self.launches = baseline, unit, launches
        self.best: TrialRecord | None = None
        self.signatures: dict[str, int] = {}
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
        """A launch begins."""
        total = f"/{self.launches}" if self.launches and number <= self.launches else ""
        self.head = f"launch {number}{total}"
        self._say(f"{self.head}: {self._config(step.server)}  ({step.reason})")

    def stage(self, name: str, after_s: float) -> None:
        """The launch or the load run is in stage `name`, `after_s` seconds after the launch began."""
        if self._status is not None:
            from rich.text import Text

            line = f"{self.head} | {name} {after_s:.0f} s | {self._standing()}"
            self._status.update(Text(printable(line, instead=SPELLED)))
            return
        last, when = self._last
        kind = name.split()[0]
        if kind != last or after_s - when >= PLAIN_S or after_s < when:
            self._last = (kind, after_s)
            self._say(f"  {after_s:6.1f} s  {name if kind not in COUNTING else kind}")

    def outcome(self, record: TrialRecord) -> None:
        """A trial ended."""
        self._count(record)
        attrs = record.attrs
        load = {k: v for k, v in record.config.items() if k in ("concurrency", "context")}
        where = f"trial {record.number} at {self._config(load, whole=True)}" if load else f"trial {record.number}"
        if record.crashed:
            self._say(f"  {where}: CRASH {attrs['crash_category']} at {attrs['crash_stage']} "
                      f"[{attrs['crash_signature']}], blame {attrs['crash_blame']}: {attrs['crash_explanation']}")
            return
        figures = [f"{attrs['tokens_per_s']:.1f} tok/s"]
        if "watts" in attrs:
            figures += [f"{attrs['watts']:.1f} W", f"{attrs['tokens_per_j']:.3f} tok/J"]
        if "accept_length" in attrs:
            figures.append(f"acceptance length {attrs['accept_length']:.2f}")
        if "tpot_p50_ms" in attrs:
            figures.append(f"TPOT {attrs['tpot_p50_ms']:.1f} ms")
        if attrs.get("same_as") is not None:
            figures.append(f"the same server as trial {attrs['same_as']}")
        remarks = [f"over the limit {v}" for v in attrs.get("violated", [])] + list(attrs.get("invalid_reasons", []))
        source = attrs.get("energy_source", "none")
        if source != "none":
            remarks.append(f"energy {source}" + (", assumed" if attrs.get("energy_assumed") else ""))
        new = "  * best so far" if self.best is not None and self.best.number == record.number else ""
        self._say(f"  {where}: {', '.join(figures)}" + (f" ({'; '.join(remarks)})" if remarks else "") + new)

    def pivot(self, pivot: Pivot) -> None:
        """A region was closed or opened again."""
        self._say(f"  PIVOT {pivot.action}: {pivot.reason}")

    def note(self, text: str) -> None:
        """Anything else worth a line."""
        self._say(text)

    def _say(self, line: str) -> None:
        self.console.print(printable(line, instead=SPELLED), markup=False)

    def _count(self, record: TrialRecord) -> None:
        if record.crashed:
            signature = str(record.attrs["crash_signature"])
            self.signatures[signature] = self.signatures.get(signature, 0) + 1
        elif record.feasible and record.value is not None and (
                self.best is None or self.best.value is None or record.value > self.best.value):
            self.best = record

    def _standing(self) -> str:
        crashes = sum(self.signatures.values())
        told = f"{crashes} crash{'es' if crashes != 1 else ''}"
        if self.signatures:
            told += f" ({len(self.signatures)} signature{'s' if len(self.signatures) > 1 else ''})"
        best = "no result yet"
        if self.best is not None:
            best = f"best {self.best.value:.3f} {self.unit} (trial {self.best.number})"
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        return f"{best} | {told} | {minutes}:{seconds:02d}"

    def _config(self, config: Mapping[str, Any], whole: bool = False) -> str:
        shown = {k: v for k, v in config.items() if whole or k not in self.baseline or self.baseline[k] != v}
        return ", ".join(f"{k}={text(v)}" for k, v in shown.items()) or "the baseline"
