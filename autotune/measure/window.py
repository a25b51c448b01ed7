"""One measurement of a live server: warm-up until steady, then a window until it is precise enough.

Everything is timed by CLOCK_MONOTONIC, which the load client's process shares. The window lies between two readings of
the meter; its tokens are those that arrived in it.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, variance

import msgspec

from autotune.loadgen.client import LoadClient
from autotune.loadgen.requests import chars_per_token
from autotune.loadgen.result import NO_FAILURES, LoadFailure, Reply, Tick, write_replies
from autotune.loadgen.workload import LoadOrder, LoadSpec, Target
from autotune.measure.limits import Limits
from autotune.measure.metrics import MetricsReader
from autotune.measure.statistics import (
    gaps,
    halves_differ,
    percentiles,
    relative_half_width,
    token_arrivals,
    tokens_between,
    trend,
)
from autotune.power.meter import DeviceLost, Meter, Reading
from autotune.records import Measurement
from autotune.utils.http import BadAnswer, NoAnswer

POLL_S = 0.25
PROGRESS_S = 1.0
CLIENT_BUSY = 0.8  # share of a core, waiting for one included, above which the client itself may be the limit
HELD = 0.95  # share of the wanted concurrency that must have been in flight


class _Failed(Exception):
    """Ends a run. Its only argument is the LoadFailure."""


@dataclasses.dataclass(frozen=True)
class Pulse:
    """Totals at a block's edge: tokens so far, and the meter."""

    t: float
    tokens: float
    reading: Reading

    def spent(self, since: Pulse) -> float:
        """Joules since an earlier pulse; seconds without a meter."""
        now, then = self.reading.total, since.reading.total
        return now - then if now is not None and then is not None else self.t - since.t


def measure(target: Target, load: LoadSpec, meter: Meter, *, limits: Limits, alive: Callable[[], bool],
            progress: Callable[[str], None], record: pathlib.Path | None = None,
            hide: Callable[[str], str] = str) -> Measurement | LoadFailure:
    """Measure `target` under `load`; blocks until done. A KeyboardInterrupt ends the load and is raised again.

    `alive` is True while the server's process runs. `progress` gets a line about every second, `record` a JSON line per
    request, with secrets taken out by `hide`. `limits` decide which requests count for goodput. The meter must be open.
    Raises AutotuneError for failures of autotune itself only.
    """
    try:
        ratio = chars_per_token(target, load)
    except (NoAnswer, BadAnswer) as error:
        return LoadFailure("no_answer" if alive() else "server_died",
                           f"the server did not answer the first request: {str(error)[:200]}", str(error))
    with LoadClient(LoadOrder(target, load, ratio, limits.need_gaps)) as client, MetricsReader(target) as metrics:
        run = _Run(client, load, meter, alive, progress, limits.requests)
        try:
            steady = run.warm_up()
            before = metrics.mark()
            pulses = run.window()
            after = metrics.mark()
        except _Failed as failed:
            failure: LoadFailure = failed.args[0]
            return failure
        except DeviceLost as error:
            return LoadFailure("gpu_lost", str(error))
        replies = client.stop()
    if record is not None:
        write_replies(record, replies, pulses[0].t, hide)
    reasons = [*([] if steady else ["not_steady"]), *run.client_reasons(pulses), *metrics.reasons(before, after)]
    measurement = run.measurement(replies, pulses, limits, metrics.accept_length(before, after), reasons)
    return msgspec.structs.replace(measurement, short=metrics.short(before, after))


class _Run:
    """One running load: waits in small steps, and ends when the server dies or too many requests fail."""

    def __init__(self, client: LoadClient, load: LoadSpec, meter: Meter, alive: Callable[[], bool],
                 progress: Callable[[str], None], requests: int) -> None:
        self.requests = requests  # that the window should see, within `window_max_s`
        self.client, self.load, self.meter, self.settings = client, load, meter, load.workload
        self.alive, self.progress = alive, progress
        self.said_s = 0.0

    def warm_up(self) -> bool:
        """Wait until the load is steady; False when `warmup_max_s` passed before that."""
        s, pulses = self.settings, []
        begin = time.monotonic()
        while True:
            tick = self.step(s.block_s)
            pulses.append(self.pulse(tick))
            waited = time.monotonic() - begin
            answered = tick.finished >= self.load.concurrency
            self.say(f"warm-up {waited:.0f} s: {_rate(pulses, s.settle_s):.0f} tok/s, "
                     f"{tick.finished} of {self.load.concurrency} requests answered", tick)
            steady, late = answered and self.steady(pulses), waited >= s.warmup_max_s
            if waited >= s.warmup_s and steady and (late or not self.climbs(pulses)):
                return True
            if late and tick.finished:
                return False

    def steady(self, pulses: Sequence[Pulse]) -> bool:
        """True if tokens/s and power of the two halves of the last `settle_s` agree."""
        n = max(2, round(self.settings.settle_s / self.settings.block_s / 2))
        if len(pulses) < 2 * n + 1:
            return False
        blocks = list(pairwise(pulses[-2 * n - 1:]))
        rates = [(b.tokens - a.tokens) / (b.t - a.t) for a, b in blocks]
        power = [b.spent(a) / (b.t - a.t) for a, b in blocks]
        return all(_level(values[:n], values[n:], self.settings.drift) for values in (rates, power))

    def climbs(self, pulses: Sequence[Pulse]) -> bool:
        """True if tokens/s of the later half of the warm-up still move one way, by a quarter of `drift` a window."""
        last = pulses[-max(round(self.settings.settle_s / self.settings.block_s), len(pulses) // 2) - 1:]
        rates = [(b.tokens - a.tokens) / (b.t - a.t) for a, b in pairwise(last)]
        slope, error = trend(rates)  # per block
        moved = abs(slope) * self.settings.window_s / self.settings.block_s
        return abs(slope) > 2 * error and moved > self.settings.drift / 4 * fmean(rates)

    def window(self) -> list[Pulse]:
        """Run the window: pulses at the edges of its blocks."""
        s = self.settings
        begin = self.step(0)
        pulses = [self.pulse(begin)]
        while True:
            tick = self.step(s.block_s)
            pulses.append(self.pulse(tick))
            length = pulses[-1].t - pulses[0].t
            half = relative_half_width([b.tokens - a.tokens for a, b in pairwise(pulses)],
                                       [b.spent(a) for a, b in pairwise(pulses)])
            seen = tick.finished - begin.finished
            self.say(f"window {length:.0f} s: {_rate(pulses, length):.0f} tok/s"
                     + (f" \u00b1 {100 * half:.1f} %" if half is not None else "")
                     + (f", {seen} of {self.requests} requests" if seen < self.requests else ""), tick)
            precise = half is not None and half <= s.precision
            if length >= s.window_max_s or (length >= s.window_s and precise and seen >= self.requests):
                return pulses

    def step(self, seconds: float) -> Tick:
        """The counters after `seconds`. Raises _Failed."""
        end = time.monotonic() + seconds
        while True:
            tick = self.client.wait(max(0.0, min(POLL_S, end - time.monotonic())))
            if not self.alive():
                raise _Failed(LoadFailure("server_died", "the server's process ended under load", _excerpt(tick)))
            if tick is not None:
                self.check_errors(tick)
                if time.monotonic() >= end:
                    return tick

    def check_errors(self, tick: Tick) -> None:
        s, done = self.settings, tick.finished + tick.errors
        if tick.errors >= s.min_errors and tick.errors > s.max_error_rate * done:
            common = ", ".join(f"{n} {kind}" for kind, n in Counter(tick.kinds).most_common(3))
            hung = all(kind.startswith("timeout") for kind in tick.kinds if kind not in NO_FAILURES)
            raise _Failed(LoadFailure("hung" if hung else "error_rate",
                                      f"{tick.errors} of {done} requests failed ({common})", _excerpt(tick)))

    def pulse(self, tick: Tick) -> Pulse:
        reading = self.meter.read()
        return Pulse(reading.t, tokens_at(self.client.ticks, reading.t), reading)

    def say(self, text: str, tick: Tick) -> None:
        now = time.monotonic()
        if now - self.said_s >= PROGRESS_S:
            self.said_s = now
            self.progress(text + (f", {tick.errors} errors" if tick.errors else ""))

    def ticks(self, pulses: Sequence[Pulse]) -> list[Tick]:
        """The load client's counters in the window."""
        return [tick for tick in self.client.ticks if pulses[0].t <= tick.t <= pulses[-1].t]

    def client_reasons(self, pulses: Sequence[Pulse]) -> list[str]:
        """Validity codes of the load client: short of CPU, or not enough requests in flight."""
        ticks, reasons = self.ticks(pulses), []
        if _client_cpu(ticks, waiting=True) > CLIENT_BUSY:
            reasons.append("client_short_of_cpu")
        if self.settings.rate_per_s is None and sum(t.in_flight - HELD * self.load.concurrency for t in ticks) < 0:
            reasons.append("concurrency_not_held")
        if len({t.kinds.get("late", 0) for t in ticks}) > 1:
            reasons.append("connections_exhausted")
        return reasons

    def measurement(self, replies: Sequence[Reply], pulses: Sequence[Pulse], limits: Limits,
                    counted_length: float | None, reasons: list[str]) -> Measurement:
        """The window's measurement; `reasons` found so far, `counted_length` the server's own acceptance length."""
        start, end = pulses[0].t, pulses[-1].t
        blocks = tokens_between(token_arrivals(replies), [p.t for p in pulses])
        half = relative_half_width(blocks, [b.spent(a) for a, b in pairwise(pulses)])
        if halves_differ(blocks, [b.t - a.t for a, b in pairwise(pulses)], self.settings.drift / 2):
            reasons.append("drifted")
        ended = [r for r in replies if r.ended is not None and start <= r.ended < end]
        ok, failed = [r for r in ended if r.ok], [r for r in ended if r.failed]
        if len(ok) < self.settings.min_requests:
            reasons.append("too_few_requests")
        if ok and all(r.completion_tokens is None for r in ok):
            reasons.append("no_usage")
        if len(failed) > self.settings.max_error_rate * len(ended):
            reasons.append("error_rate")
        tokens, ended_tokens = round(sum(blocks)), sum(r.tokens for r in ok)
        good = sum(r.tokens for r in ok if limits.good(r))
        prompts = [r.prompt_tokens for r in ok if r.prompt_tokens is not None]
        retries = sum(r.attempts - 1 for r in ended)
        return Measurement(
            output_tokens=tokens, window_s=end - start, requests=len(ok), errors=len(failed),
            concurrency=self.load.concurrency, energy=self.meter.energy(pulses[0].reading, pulses[-1].reading),
            ttft_ms=percentiles([r.ttft_s for r in replies if r.times and start <= r.times[0] < end]),
            tpot_ms=percentiles([r.tpot_s for r in ok]), e2e_ms=percentiles([r.e2e_s for r in ok]),
            itl_ms=percentiles(gaps(replies, start, end)),
            prompt_tokens=sum(prompts) if prompts else None, accept_length=_accept_length(ok) or counted_length,
            relative_error=half if half is not None and math.isfinite(half) else None, reasons=tuple(reasons),
            error_kinds=dict(Counter(r.kind for r in failed) + Counter(retry=retries)),
            client_cpu_share=_client_cpu(self.ticks(pulses)),
            good_tokens=round(tokens * good / ended_tokens) if ended_tokens else None)


def _excerpt(tick: Tick | None) -> str:
    """An example of the most frequent failure; "" without any."""
    failures = {kind: n for kind, n in tick.kinds.items() if kind not in NO_FAILURES} if tick else {}
    return tick.details.get(max(failures, key=failures.__getitem__), "") if tick and failures else ""


def _client_cpu(ticks: Sequence[Tick], waiting: bool = False) -> float:
    """Share of one core that the load client took, with or without its waits for a core."""
    if len(ticks) < 2:
        return 0.0
    first, last = ticks[0], ticks[-1]
    spent = last.cpu_s - first.cpu_s
    if waiting and first.wait_s is not None and last.wait_s is not None:
        spent += last.wait_s - first.wait_s
    return spent / (last.t - first.t)


def _accept_length(replies: Sequence[Reply]) -> float | None:
    """Completion tokens over verify steps, over the requests that ended in the window."""
    steps = sum(r.verify_steps or 0 for r in replies)
    return sum(r.tokens for r in replies if r.verify_steps) / steps if steps else None


def tokens_at(ticks: Sequence[Tick], t: float) -> float:
    """Tokens at a moment between two ticks, by interpolation; extrapolated past the last one by its rate."""
    if len(ticks) < 2:
        return ticks[-1].tokens if ticks else 0.0
    ratio = ticks[-1].ratio
    later = next((i for i in range(len(ticks) - 1, 0, -1) if ticks[i - 1].t <= t), 1)
    a, b = ticks[later - 1], ticks[later]
    at_a, at_b = a.counted + a.events * ratio, b.counted + b.events * ratio
    return at_a + (at_b - at_a) * (t - a.t) / (b.t - a.t) if b.t > a.t else at_b


def _rate(pulses: Sequence[Pulse], seconds: float) -> float:
    recent = [p for p in pulses if p.t >= pulses[-1].t - seconds - 1e-6]
    length = recent[-1].t - recent[0].t
    return (recent[-1].tokens - recent[0].tokens) / length if length > 0 else 0.0


def _level(before: Sequence[float], after: Sequence[float], drift: float) -> bool:
    """True if two stretches have the same level: within `drift`, or within three standard errors."""
    a, b = fmean(before), fmean(after)
    noise = math.sqrt(sum(variance(values) / len(values) for values in (before, after)))
    most = drift * max(a, b)
    return most > 0 and abs(b - a) <= max(most, min(3 * noise, 5 * most))
