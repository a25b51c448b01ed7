"""A server's Prometheus metrics, read during a window."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Collection
from typing import Self

import msgspec

from autotune.loadgen.workload import Target
from autotune.utils.http import BadAnswer, NoAnswer, ask

INTERVAL_S = 2.0
TIMEOUT_S = 5.0
LARGEST = 1e30  # larger values (inf, 1e308) are not counts and cannot be added up
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+\d+)?\s*$")


def parse(text: str, wanted: Collection[str] | None = None) -> dict[str, float]:
    """Samples of a Prometheus text, summed over the labels of a name (ranks).

    Bad lines, values that are not finite and names that are not `wanted` are skipped.
    """
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        if found and (wanted is None or found[1] in wanted):
            try:
                value = float(found[2])
            except ValueError:
                continue
            if abs(value) <= LARGEST:
                values[found[1]] = values.get(found[1], 0.0) + value
    return values


class MetricsReader:
    """Reads the metrics of a target at each `mark` and, as a context manager, every 2 s in a thread.

    A failed read gives no sample; without a metrics path nothing is read.
    """

    def __init__(self, target: Target) -> None:
        self.names = target.metrics
        self._wanted = {name for name in msgspec.structs.astuple(self.names) if isinstance(name, str)}
        self._url = target.base_url.rstrip("/") + self.names.path if self.names.path else None
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Self:
        if self._url:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._url:
            self._thread.join(TIMEOUT_S + 1)

    def mark(self) -> float:
        """Read now, for an edge of the window; returns the time of that sample."""
        self._sample()
        return self.samples[-1][0] if self.samples else time.monotonic()

    def between(self, start: float, end: float) -> list[dict[str, float]]:
        """The samples taken in [start, end], in CLOCK_MONOTONIC seconds."""
        return [values for t, values in self.samples if start <= t <= end]

    def reasons(self, start: float, end: float) -> tuple[str, ...]:
        """Validity codes of a window: requests retracted from the server's batch.

        Requests that wait in its queue are no disturbance but a property of this server under this load.
        """
        samples, names, found = self.between(start, end), self.names, []
        if names.retracted and samples:
            series = [s.get(names.retracted, 0.0) for s in samples]
            if (series[-1] - series[0] if names.retracted.endswith("_total") else max(series)) > 0:
                found.append("server_retracted")
        return tuple(found)

    def short(self, start: float, end: float) -> dict[str, float]:
        """Shortage of each resource, 0..1: the share of samples in which requests waited for a place
        (`queue`), and 1 if requests were retracted from the batch (`kv_memory`). What was not read is left out."""
        waits = [s[self.names.queued] > 0 for s in self.between(start, end) if self.names.queued in s]
        found = {"queue": sum(waits) / len(waits)} if any(waits) else {}
        return {**found, "kv_memory": 1.0} if self.reasons(start, end) else found

    def accept_length(self, start: float, end: float) -> float | None:
        """Tokens per verify step from the growth of counters; None where they are missing or did not grow."""
        names, samples = self.names, self.between(start, end)
        if not names.accept_tokens or not names.accept_steps or len(samples) < 2:
            return None
        first, last = samples[0], samples[-1]
        if not {names.accept_tokens, names.accept_steps} <= first.keys() & last.keys():
            return None
        tokens, steps = (last[name] - first[name] for name in (names.accept_tokens, names.accept_steps))
        return names.accept_bonus + tokens / steps if steps > 0 and tokens >= 0 else None

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(NoAnswer, BadAnswer):
            if self._url and (answer := ask(self._url, within_s=TIMEOUT_S)).status == 200:
                self.samples.append((time.monotonic(), parse(answer.text, self._wanted)))
