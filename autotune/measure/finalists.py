"""Sequential test of the finalists against the baseline, in interleaved blocks; `tuning/confirm.py` measures them.

A round measures the baseline and every remaining finalist once, alternately forwards and backwards (A B B A ...), so
that a drift of the machine cancels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated

from msgspec import Meta

from autotune.records import UsageError
from autotune.utils.validation import Count, NotNegative

BASELINE_FAILURES = 2


@dataclasses.dataclass(frozen=True)
class ConfirmSettings:
    """study.confirm: the re-launches of at most `finalists` configurations before the verdict; 0: no confirmation.

    `alpha` bounds the chance of reporting any winner when no finalist is better than the baseline. Decisions are taken
    after `min_rounds`..`max_rounds` rounds. Finalists that cannot gain `worth` (a share) any more are dropped.
    """

    finalists: Count
    alpha: Annotated[float, Meta(gt=0, lt=0.5, description="a number above 0 and below 0.5")]
    min_rounds: Annotated[int, Meta(ge=2, description="a whole number of at least 2")]
    max_rounds: int
    worth: NotNegative

    def __post_init__(self) -> None:
        if self.min_rounds > self.max_rounds:
            raise UsageError(f"study.confirm.min_rounds={self.min_rounds} is above max_rounds={self.max_rounds}")


@dataclasses.dataclass(frozen=True)
class Gain:
    """A finalist's gain over the baseline, as a share: estimate and interval. `verdict` is `better`, `open`,
    `not_better` (its interval ends below what is worth it, or a rival's begins above it) or `failed`."""

    gain: float | None
    low: float | None
    high: float | None
    rounds: int
    verdict: str


@dataclasses.dataclass(frozen=True)
class Decision:
    """`state` is `running`, `confirmed`, `no_improvement` or `failed` (the baseline could not be measured)."""

    state: str
    winner: str | None
    gains: Mapping[str, Gain]
    rounds: int
    reason: str


class Confirmation:
    """A sequential test: the next block, and the decision so far.

    The test: logarithms of the values, additive in configuration and round; the difference of two means then has
    variance 2 s^2 / n with the residual variance s^2 of that two-way layout (Scheffe 1959, chapter 4). A
    finalist is better when its difference exceeds Student's t at the level alpha / (finalists x looks): Bonferroni over
    both, so that neither choosing among finalists nor looking after every round raises the error above alpha.
    """

    def __init__(self, baseline: str, finalists: Sequence[str], settings: ConfirmSettings) -> None:
        if baseline in finalists or len(set(finalists)) != len(finalists):
            raise UsageError("confirm: the baseline and each finalist must be named once")
        self.baseline, self.finalists, self.settings = baseline, tuple(finalists), settings
        self._logs: dict[str, list[float]] = {key: [] for key in (baseline, *finalists)}
        self._dropped: dict[str, Gain] = {}
        self._baseline_failures = 0
        self._winner: str | None = None
        self._ended = "" if finalists else "there is no finalist"
        self._queue: list[str] = []
        self._round = 0
        self._refill()

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(key for key in self.finalists if key not in self._dropped)

    @property
    def rounds(self) -> int:
        """Complete rounds so far."""
        return min((len(self._logs[key]) for key in (self.baseline, *self.live)), default=0)

    def next(self) -> str | None:
        """The configuration to measure next; None when the decision is taken."""
        return None if self._ended else self._queue[0]

    def add(self, key: str, value: float | None) -> None:
        """The objective of one more block of `key`, which must be the one that `next` named; None when it failed."""
        if key != self.next():
            raise UsageError(f"confirm: the next block is {self.next()}, not {key}")
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"confirm: {value} is not a positive objective")
        if key == self.baseline:
            self._baseline_failures = self._baseline_failures + 1 if value is None else 0
            if self._baseline_failures >= BASELINE_FAILURES:
                self._ended = f"the baseline failed {self._baseline_failures} times in a row"
            if value is None:
                return  # it stays next
        self._queue.pop(0)
        if value is None:
            self._drop(key, "failed")
        else:
            self._logs[key].append(math.log(value))
        if not self.live:
            self._ended = "no finalist is left"
        elif not self._queue:
            self._look()
            self._refill()

    def decision(self) -> Decision:
        """The state so far; final once `next` is None."""
        gains = {key: self._dropped.get(key) or self._gain(key) for key in self.finalists}
        failed = self._baseline_failures >= BASELINE_FAILURES
        state = ("running" if not self._ended else "confirmed" if self._winner is not None
                 else "failed" if failed else "no_improvement")
        return Decision(state, self._winner, gains, self.rounds, self._ended or "not decided yet")

    def _refill(self) -> None:
        if not self._ended:
            order = [self.baseline, *self.live]
            self._queue = order if self._round % 2 == 0 else order[::-1]
            self._round += 1

    def _look(self) -> None:
        """Decide what can be decided after a complete round."""
        if self.rounds < self.settings.min_rounds:
            return
        gains = {key: self._gain(key) for key in self.live}
        leader = max(gains, key=self._mean)
        if gains[leader].verdict == "better":
            self._winner, low = leader, gains[leader].low or 0.0
            self._ended = f"a gain of at least {100 * low:.2g} % is certain after {self.rounds} rounds"
            return  # no other gain can be certain where the leader's is not
        for key, gain in gains.items():
            beaten = key != leader and self._difference(leader, key)[1] > 0
            if beaten or (gain.high is not None and gain.high < self.settings.worth):
                self._drop(key, "not_better")
        if not self.live:
            self._ended = f"no finalist can gain {100 * self.settings.worth:g} %"
        elif self.rounds >= self.settings.max_rounds:
            self._ended = f"no gain is certain after {self.rounds} rounds"

    def _drop(self, key: str, verdict: str) -> None:
        self._dropped[key] = dataclasses.replace(self._gain(key), verdict=verdict)

    def _mean(self, key: str) -> float:
        return fmean(self._logs[key][:self.rounds])

    def _gain(self, key: str) -> Gain:
        n = min(len(self._logs[key]), len(self._logs[self.baseline]))
        if n < 2 or self.rounds < 2:
            total = sum(f - b for f, b in zip(self._logs[key], self._logs[self.baseline], strict=False))
            return Gain(math.expm1(total / n) if n else None, None, None, n, "open")
        mean, low, high = self._difference(key, self.baseline)
        verdict = "better" if low > 0 and self.rounds >= self.settings.min_rounds else "open"
        return Gain(math.expm1(mean), math.expm1(low), math.expm1(high), self.rounds, verdict)

    def _difference(self, key: str, other: str) -> tuple[float, float, float]:
        """Mean difference of logarithms and its interval, at the level of one look at one finalist."""
        from autotune.measure.statistics import student_t

        n, keys = self.rounds, (self.baseline, *self.live)
        table = [self._logs[k][:n] for k in keys]
        grand = sum(map(sum, table)) / (n * len(keys))
        rounds = [sum(row[r] for row in table) / len(keys) for r in range(n)]
        square = sum((row[r] - sum(row) / n - rounds[r] + grand) ** 2 for row in table for r in range(n))
        freedom = (n - 1) * (len(keys) - 1)
        looks = self.settings.max_rounds - self.settings.min_rounds + 1
        t = student_t(1 - self.settings.alpha / (looks * len(self.finalists)), freedom)
        mean = self._mean(key) - self._mean(other)
        half = t * math.sqrt(2 * square / freedom / n)
        return mean, mean - half, mean + half
