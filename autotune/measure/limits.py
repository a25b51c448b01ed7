"""Limits on a service level (SLO), as graded constraints: how far a measurement is over each, as a share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.loadgen.result import Reply
from autotune.records import Measurement, Percentiles, UsageError

_LATENCY = re.compile(r"^(ttft|tpot|itl|e2e)_(p50|p90|p99|mean)_ms$")
OTHERS = ("error_rate", "max_watts", "min_tokens_per_s", "min_request_tokens_per_s", "min_output_agreement")
UNKNOWN = 1.0
"""The violation of a limit that could not be checked: not satisfied, and no better than twice the limit."""


class Limits:
    """Named limits, in a fixed order.

    Names: `<ttft|tpot|itl|e2e>_<p50|p90|p99|mean>_ms` (at most), `error_rate` (share of failed requests, at most),
    `max_watts` (mean power, at most), `min_tokens_per_s`, `min_request_tokens_per_s` (decode speed that 99 of 100
    requests reach: 1000 / TPOT p99), `min_output_agreement`. Raises UsageError for other names and bad values.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        for name, value in limits.items():
            if not _LATENCY.match(name) and name not in OTHERS:
                raise UsageError(f"limits: unknown limit {name}; known: {', '.join(OTHERS)} and "
                                 "<ttft|tpot|itl|e2e>_<p50|p90|p99|mean>_ms")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf") or (value == 0 and name != "error_rate"):
                raise UsageError(f"limits: {name}={value!r} must be a number above 0")
        self._limits = {name: float(limits[name]) for name in sorted(limits)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._limits)

    def violations(self, measurement: Measurement) -> dict[str, float]:
        """For each limit, by how much of itself it is exceeded (at most 0: satisfied). Always the same keys."""
        found = {}
        for name, limit in self._limits.items():
            value = _value(name, measurement)
            if value is None:
                found[name] = UNKNOWN
            elif name.startswith("min_"):
                found[name] = 1 - value / limit
            else:
                found[name] = value / limit - 1 if limit else value
        return found

    @property
    def need_gaps(self) -> bool:
        """Whether a limit looks at the time between tokens, so that every stream must be watched."""
        return any(name.startswith("itl_") for name in self._limits)

    def good(self, reply: Reply) -> bool:
        """Whether one request by itself keeps every latency limit (whatever the percentile) and the speed limit."""
        if not reply.ok:
            return False
        own = {"ttft": reply.ttft_s, "tpot": reply.tpot_s, "e2e": reply.e2e_s, "itl": _longest_gap(reply)}
        for name, limit in self._limits.items():
            found = _LATENCY.match(name)
            value = own[found[1]] if found else None
            if value is not None and value * 1000 > limit:
                return False
            if name == "min_request_tokens_per_s" and reply.tpot_s and 1 / reply.tpot_s < limit:
                return False
        return True


def _longest_gap(reply: Reply) -> float | None:
    times = reply.times
    return max(b - a for a, b in zip(times, times[1:], strict=False)) if len(times) > 1 else None


def _value(name: str, m: Measurement) -> float | None:
    found = _LATENCY.match(name)
    if found:
        latency: Percentiles | None = getattr(m, f"{found[1]}_ms")
        return None if latency is None else float(getattr(latency, found[2]))
    if name == "error_rate":
        return m.errors / (m.requests + m.errors) if m.requests + m.errors else None
    if name == "min_request_tokens_per_s":
        return 1000 / m.tpot_ms.p99 if m.tpot_ms and m.tpot_ms.p99 > 0 else None
    values: dict[str, float | None] = {"max_watts": m.energy.watts, "min_tokens_per_s": m.tokens_per_s,
                                       "min_output_agreement": m.output_agreement}
    return values[name]
