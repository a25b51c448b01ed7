"""Limits on a service level (SLO): the share of each limit that a measurement uses.

A limit on a new figure is one entry of FIGURES.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from autotune.loadgen.result import Reply
from autotune.records import QUANTILES, STATISTICS, Measurement, Percentiles, UsageError

# Ratio of a limit that could not be checked: broken, and no better than twice the limit.
UNKNOWN = 2.0


def requests_needed(share: float, confidence: float = 0.95) -> int:
    """Fewest requests whose largest value bounds the percentile `share` from above (Wilks 1941): 299 for p99."""
    return math.ceil(math.log(1 - confidence) / math.log(share) - 1e-9)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure that a limit bounds: of a window, and of a single request where it has one."""

    of: Callable[[Measurement], float | None]
    of_request: Callable[[Reply], float | None] = lambda reply: None
    error: Callable[[Measurement], float | None] = lambda measurement: None  # standard error, as a share of the figure
    at_least: bool = False  # the limit is a lower bound
    gaps: bool = False  # needs the time between tokens of every stream
    requests: int = 0  # fewest requests that bound the figure from above with 95 % confidence


def _percentile(latency: str, which: str) -> Callable[[Measurement], float | None]:
    def of(measurement: Measurement) -> float | None:
        known: Percentiles | None = getattr(measurement, f"{latency}_ms")
        return None if known is None else getattr(known, which)
    return of


def _percentile_error(latency: str, which: str) -> Callable[[Measurement], float | None]:
    def of(measurement: Measurement) -> float | None:
        known: Percentiles | None = getattr(measurement, f"{latency}_ms")
        return None if known is None else known.errors.get(which)
    return of


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _longest_gap_ms(reply: Reply) -> float | None:
    return max((1000 * (b - a) for a, b in zip(reply.times, reply.times[1:], strict=False)), default=None)


LATENCIES: Mapping[str, Callable[[Reply], float | None]] = {
    "ttft": lambda reply: _milliseconds(reply.ttft_s), "tpot": lambda reply: _milliseconds(reply.tpot_s),
    "e2e": lambda reply: _milliseconds(reply.e2e_s), "itl": _longest_gap_ms}
OTHERS: Mapping[str, Figure] = {
    "error_rate": Figure(lambda m: m.error_rate),
    "max_watts": Figure(lambda m: m.energy.watts),
    "min_tokens_per_s": Figure(lambda m: m.tokens_per_s, at_least=True),
    # decode speed that 99 of 100 requests reach
    "min_request_tokens_per_s": Figure(
        lambda m: 1000 / m.tpot_ms.p99 if m.tpot_ms and m.tpot_ms.p99 > 0 else None,
        lambda reply: 1 / reply.tpot_s if reply.tpot_s else None, _percentile_error("tpot", "p99"), at_least=True,
        requests=requests_needed(QUANTILES["p99"])),
    "min_output_agreement": Figure(lambda m: m.output_agreement, at_least=True)}
FIGURES: Mapping[str, Figure] = {
    **{f"{name}_{which}_ms": Figure(_percentile(name, which), of_request, _percentile_error(name, which),
                                    gaps=name == "itl",
                                    requests=requests_needed(QUANTILES[which]) if which in QUANTILES else 0)
       for name, of_request in LATENCIES.items() for which in STATISTICS}, **OTHERS}


class Limits:
    """Limits by name (see FIGURES), in a fixed order. Raises UsageError for other names and impossible values."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        for name, value in limits.items():
            if name not in FIGURES:
                raise UsageError(f"limits: unknown limit {name}; known: {', '.join(OTHERS)} and "
                                 f"<{'|'.join(LATENCIES)}>_<{'|'.join(STATISTICS)}>_ms")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf") or (value == 0 and name != "error_rate"):
                raise UsageError(f"limits: {name}={value!r} must be a number above 0")
        self._limits = {name: float(limits[name]) for name in sorted(limits)}

    @property
    def need_gaps(self) -> bool:
        """True if a limit needs the time between tokens, so that every stream must be watched."""
        return any(FIGURES[name].gaps for name in self._limits)

    @property
    def requests(self) -> int:
        """Fewest requests of a window that the percentiles under a limit need: 299 for p99, 59 for p95, 29 for p90."""
        return max((FIGURES[name].requests for name in self._limits), default=0)

    def ratios(self, measurement: Measurement) -> dict[str, float]:
        """Measured / limit of every limit, always the same keys; above 1 the limit is broken.

        A lower bound counts the missing share: 2 - measured / limit.
        """
        return {name: _ratio(FIGURES[name], FIGURES[name].of(measurement), limit)
                for name, limit in self._limits.items()}

    def errors(self, measurement: Measurement) -> dict[str, float]:
        """Standard error of each ratio whose figure has one, in the unit of the ratio."""
        errors: dict[str, float] = {}
        for name, limit in self._limits.items():
            figure = FIGURES[name]
            value, error = figure.of(measurement), figure.error(measurement)
            if value is not None and error is not None and limit:
                errors[name] = error * value / limit
        return errors

    def good(self, reply: Reply) -> bool:
        """True if one successful request by itself keeps every latency and speed limit, whatever the percentile."""
        return reply.ok and all(
            value is None or (value >= limit if FIGURES[name].at_least else value <= limit)
            for name, limit in self._limits.items() for value in (FIGURES[name].of_request(reply),))


def few_requests(names: Iterable[str], measurement: Measurement) -> list[str]:
    """A remark for each limit whose percentile the window had too few requests for."""
    return [f"{name} of {measurement.requests} requests, of {FIGURES[name].requests} that it needs" for name in names
            if name in FIGURES and measurement.requests < FIGURES[name].requests]


def _ratio(figure: Figure, value: float | None, limit: float) -> float:
    if value is None:
        return UNKNOWN
    if figure.at_least:
        return 2 - value / limit
    return value / limit if limit else 1 + value  # no errors at all
