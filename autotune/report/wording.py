"""How figures and choices are spelled everywhere: four significant digits, units, durations, one line for odd text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from autotune.engine.spec import text
from autotune.records import Config, Value
from autotune.utils.text import SPELLED, printable

UNKNOWN = "-"
PHRASES = {"tokens_per_joule": "output tokens per joule", "tokens_per_s": "output tokens per second",
           "goodput_per_joule": "good output tokens per joule", "cost": "output tokens per unit of money"}
FIGURES = {
    "tokens_per_j": ("Output tokens per joule", "tok/J"), "tokens_per_s": ("Throughput", "tok/s"),
    "watts": ("Power", "W"), "ttft_p50_ms": ("TTFT p50", "ms"), "ttft_p99_ms": ("TTFT p99", "ms"),
    "tpot_p50_ms": ("TPOT p50", "ms"), "tpot_p99_ms": ("TPOT p99", "ms"), "e2e_p99_ms": ("Whole request p99", "ms"),
    "accept_length": ("Acceptance length", "tok/step"), "output_agreement": ("Output agreement", ""),
    "error_rate": ("Error rate", ""),
}
"""Attribute: (name for people, unit), in the order in which tables show them."""
LATENCY = re.compile(r"(ttft|tpot|itl|e2e)_(p50|p90|p99|mean)_ms")


def figure_title(name: str) -> tuple[str, str]:
    """(name for people, unit) of a trial attribute or of a limit."""
    plain = limited(name)
    if plain in FIGURES:
        return FIGURES[plain]
    latency = LATENCY.fullmatch(plain)
    if latency:
        return f"{latency[1].upper() if latency[1] != 'e2e' else 'Whole request'} {latency[2]}", "ms"
    return ("Speed of a request", "tok/s") if plain == "request_tokens_per_s" else (plain.replace("_", " "), "")


def limited(limit: str) -> str:
    """The figure that a limit bounds: max_watts bounds watts."""
    return limit.removeprefix("max_").removeprefix("min_")


def number(value: float | None, digits: int = 4) -> str:
    """A figure with `digits` significant digits and thousands separators; "-" when unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 12)}f}"


def with_unit(value: float | None, unit: str) -> str:
    """A figure and its unit; "-" when unknown."""
    shown = number(value)
    return f"{shown} {unit}" if unit and shown != UNKNOWN else shown


def percent(share: float | None, signed: bool = False) -> str:
    """A share as per cent: one decimal, none from 100 % on."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    shown = 100 * share
    decimals = 0 if abs(shown) >= 99.95 else 1
    return f"{shown:+,.{decimals}f} %" if signed else f"{shown:,.{decimals}f} %"


def duration(seconds: float | None) -> str:
    """Seconds as people say them: 41 s, 3 min 5 s, 2 h 10 min."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def count(n: int, noun: str, plural: str = "") -> str:
    """1 launch, 2 launches."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def config_text(config: Config) -> str:
    """name=value for every choice, on one line."""
    return " ".join(f"{name}={one_line(text(value))}" for name, value in config.items())


def choice_text(name: str, value: Value) -> str:
    return f"{name}={one_line(text(value))}"


def region_text(region: Mapping[str, object]) -> str:
    """A set of configurations as `a=1 or 2 and b=true`."""
    parts = []
    for name, values in region.items():
        several = values if isinstance(values, list | tuple) else (values,)
        parts.append(f"{name}={' or '.join(one_line(text(v)) for v in several)}")
    return " and ".join(parts) or "the whole space"


def one_line(words: object) -> str:
    """Any text on one line, control characters spelled out, so that it cannot leave a comment or a table cell."""
    return printable(str(words), instead=SPELLED)


def interval_text(low: float | None, high: float | None) -> str:
    """A 95 % interval of shares; empty when unknown."""
    if low is None or high is None:
        return ""
    return f"95 % interval {percent(low, signed=True)} to {percent(high, signed=True)}"
