"""Sequential test of the finalists against the baseline, in interleaved blocks; `tuning/confirm.py` measures them.

A block is one launch of a server, measured under the baseline's load and under the finalists' loads. A round has one
block of the baseline's server and one of every remaining finalist's, alternately forwards and backwards
(A B B A ...), so that a drift of the machine cancels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Annotated, NamedTuple

from msgspec import Meta

from autotune.records import UsageError
from autotune.utils.text import count, percent
from autotune.utils.validation import Count, NotNegative

BASELINE = "baseline"
BASELINE_FAILURES = 3  # in a row
FEWEST_BLOCKS = 4  # of a finalist, before bad ones can end it
DISTURBED_AGAIN = 2  # further launches for a block whose window must not be compared
RESERVE, MOST_RESERVED = 0.35, 14  # launches kept for the confirmation: a share of the study's, at most so many


@dataclasses.dataclass(frozen=True)
class ConfirmSettings:
    """study.confirm: the re-launches of at most `finalists` servers before the verdict; 0: no confirmation.

    `alpha` bounds the chance of reporting any winner when no finalist is better than the baseline. Decisions are taken
    after `min_rounds`..`max_rounds` rounds. Finalists that cannot gain `worth` (a share) any more are dropped.
    `launches`: the part of study.launches that the search leaves for it; None: a third, at most 14.
    """

    finalists: Count
    alpha: Annotated[float, Meta(gt=0, lt=0.5, description="a number above 0 and below 0.5")]
    min_rounds: Annotated[int, Meta(ge=2, description="a whole number of at least 2")]
    max_rounds: int
    worth: NotNegative
    launches: Count | None = None

    def __post_init__(self) -> None:
        if self.min_rounds > self.max_rounds:
            raise UsageError(f"study.confirm.min_rounds={self.min_rounds} is above max_rounds={self.max_rounds}")

    def reserve(self, launches: int | None) -> int:
        """Launches of a study of `launches` that the search must leave; 0 where too few would be left to it."""
        if not self.finalists or launches is None:
            return 0
        fewest = 2 * self.min_rounds
        if self.launches is not None:
            return self.launches
        kept = min(MOST_RESERVED, max(fewest, round(RESERVE * launches)))
        return kept if launches >= 2 * fewest else 0

    def plan(self, servers: int, launches: int | None) -> tuple[int, int]:
        """(finalists with a server of their own, rounds) for so many candidates and launches; (0, 0): too few.

        The more rounds, the smaller the gain that can be shown: a further finalist must leave one round to spare.
        """
        for finalists in range(min(self.finalists, servers), -1, -1):
            rounds = self.max_rounds if launches is None else min(self.max_rounds, launches // (1 + finalists))
            if rounds >= min(self.min_rounds + (finalists > 1), self.max_rounds):
                return finalists, rounds
        return 0, 0


class Finalist(NamedTuple):
    """A configuration to confirm: `load` is the key of its load part.

    own_server: False for the baseline's server under another load, which the baseline's blocks measure.
    """

    key: str
    load: str
    own_server: bool = True


class Block(NamedTuple):
    """The outcome of one launch: the objective by load key (without loads that gave none), and what was wrong.

    `over`: loads under which a limit was broken. `crash`: the signature of a crash. `disturbed`: a window must not be
    compared, which says nothing against the configuration. Blocks of two machines are never compared.
    """

    values: Mapping[str, float]
    over: Collection[str] = ()
    crash: str = ""
    disturbed: bool = False
    machine: str = ""


class Gain(NamedTuple):
    """A gain as a share, and its interval; None where it is unknown."""

    gain: float | None = None
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Gains:
    """The gains of one finalist, and its verdict.

    `server`: its server over the baseline's, under the finalist's load; `server_before`: under the baseline's load;
    `load`: the finalist's load over the baseline's, on the baseline's server; `both`: the finalist over the baseline.
    `verdict` is `better`, `open`, `not_better` (the interval ends below what is worth it, or a rival's begins above)
    or `failed` (more than half of its blocks were bad: a crash or a broken limit). `tied`: the winner is not shown to
    be better than it.
    """

    server: Gain
    server_before: Gain
    load: Gain
    both: Gain
    verdict: str
    blocks: int
    bad: int
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Decision:
    """`state` is `running`, `confirmed`, `no_improvement` or `failed` (the baseline could not be measured).

    `level` is the probability that all intervals hold their true values, at every look.
    """

    state: str
    winner: str | None
    gains: Mapping[str, Gains]
    rounds: int
    reason: str
    level: float


class Confirmation:
    """A sequential test: the next block, and the decision so far. A pure function of its blocks, in order.

    The test: differences of logarithms between two blocks of one round (paired, so that neither a slow round nor the
    unequal noise of other configurations enters), their mean and Student's t with n - 1 degrees of freedom at the level
    alpha / (finalists x looks): Bonferroni over both, so that neither choosing among finalists nor looking after every
    round raises the error above alpha. A finalist with a server of its own is tested for what that server gives under
    equal load, the baseline's server under another load for what the load gives.
    """

    def __init__(self, finalists: Sequence[Finalist], base_load: str, settings: ConfirmSettings, rounds: int) -> None:
        self.finalists = {f.key: f for f in finalists}
        if BASELINE in self.finalists or len(self.finalists) != len(finalists):
            raise UsageError("confirm: each finalist must be named once")
        self.base_load, self.settings, self.most_rounds = base_load, settings, rounds
        self._looks = max(1, rounds - settings.min_rounds + 1)
        self._blocks: dict[tuple[int, str], Block] = {}
        self._dropped: dict[str, str] = {}
        self._crashes: set[str] = set()
        self._failures = self._repeats = 0
        self._winner: str | None = None
        self._ended = "" if finalists else "there is no finalist"
        self.rounds = 0  # complete ones
        self._queue = self._order()

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(key for key in self.finalists if key not in self._dropped)

    @property
    def servers(self) -> tuple[str, ...]:
        """Remaining finalists that are launched."""
        return tuple(key for key in self.live if self.finalists[key].own_server)

    def next(self) -> tuple[int, str] | None:
        """(round, server to launch) of the next block; None when the decision is taken."""
        return None if self._ended else (self.rounds + 1, self._queue[0])

    def add(self, block: Block) -> None:
        """The outcome of the launch that `next` named. It stays the next one where it must be made again."""
        if self._ended:
            raise UsageError("confirm: the decision is taken")
        key, compared = self._queue[0], not block.disturbed
        if block.disturbed and self._repeats < DISTURBED_AGAIN:
            self._repeats += 1
            return
        self._repeats = 0
        if key == BASELINE:
            self._failures = 0 if compared and self.base_load in block.values else self._failures + 1
            if self._failures >= BASELINE_FAILURES:
                self._ended = f"the baseline failed {self._failures} times in a row"
            if self._failures:
                return
        elif block.crash and block.crash not in self._crashes:
            self._crashes.add(block.crash)  # made again once for each signature: it may have been transient
            return
        self._blocks[self.rounds + 1, key] = block if compared else Block({})
        self._queue.pop(0)
        for one in self.live:
            bad, blocks = self._bad(one)
            if blocks >= FEWEST_BLOCKS and 2 * bad > blocks:
                self._dropped[one] = "failed"
        if not self.live:
            self._ended = "no finalist is left"
        elif not self._queue:
            self.rounds += 1
            self._look()
            self._queue = self._order()

    def stop(self, reason: str) -> None:
        """End without a further block, for a budget that is used up; what is shown already is decided."""
        if not self._ended:
            self._end(reason)

    def decision(self) -> Decision:
        """The state so far; final once `next` is None."""
        failed = self._failures >= BASELINE_FAILURES
        state = ("running" if not self._ended else "confirmed" if self._winner is not None
                 else "failed" if failed else "no_improvement")
        return Decision(state, self._winner, {key: self.gains(key) for key in self.finalists}, self.rounds,
                        self._ended or "not decided yet", 1 - 2 * self.settings.alpha)

    def gains(self, key: str) -> Gains:
        """The gains of a finalist in the complete rounds."""
        load, before, apart = self.finalists[key].load, self.base_load, self.finalists[key].own_server
        verdict = self._dropped.get(key) or ("better" if self._shown(key) else "open")
        bad, blocks = self._bad(key)
        return Gains(
            self._gain((key, load), (BASELINE, load)) if apart else Gain(),
            self._gain((key, before), (BASELINE, before)) if apart else Gain(),
            self._gain((BASELINE, load), (BASELINE, before)) if load != before else Gain(),
            self._gain(self._configuration(key), (BASELINE, before)), verdict, blocks, bad,
            bool(self._winner) and key != self._winner and verdict in ("better", "open")
            and not self._beaten(key, str(self._winner)))

    def _order(self) -> list[str]:
        order = [BASELINE, *self.servers]
        return order if self.rounds % 2 == 0 else order[::-1]

    def _look(self) -> None:
        """Decide what can be decided after a complete round."""
        if self.rounds < self.settings.min_rounds:
            return
        leader = max(self.live, key=self._value)
        if self._shown(leader) and (leader in self.servers or not self.servers):
            return self._end("")
        for key in self.live:
            high = self._gain(*self._tested(key)).high
            if high is not None and high < self.settings.worth or key != leader and self._beaten(key, leader):
                self._dropped[key] = "not_better"
        if not self.live:
            self._end(f"no finalist can gain {percent(self.settings.worth)} any more")
        elif self.rounds >= self.most_rounds:
            self._end(f"no gain is shown after {count(self.rounds, 'round')}")

    def _end(self, reason: str) -> None:
        shown = [key for key in self.finalists if self._dropped.get(key) != "failed" and self._shown(key)]
        self._ended = reason
        if shown and self.rounds >= self.settings.min_rounds:
            self._winner = max(shown, key=self._value)
            low, what = self._gain(*self._tested(self._winner)).low or 0.0, self.finalists[self._winner]
            self._ended = ((f"the server of trial {what.key} gives at least {percent(low)} more under the same load"
                            if what.own_server else f"the load gives at least {percent(low)} more, and no other server "
                            "is shown to be better under it") + f", after {count(self.rounds, 'round')}")

    def _bad(self, key: str) -> tuple[int, int]:
        """(bad blocks, blocks) of a finalist."""
        server, load = self._configuration(key)
        found = [block for (_, name), block in self._blocks.items() if name == server and (block.values or block.crash)]
        return sum(bool(block.crash) or load in block.over for block in found), len(found)

    def _logs(self, key: str, load: str) -> dict[int, tuple[str, float]]:
        """(machine, logarithm of the value) by complete round, of a server under a load."""
        return {number: (block.machine, math.log(block.values[load]))
                for (number, name), block in self._blocks.items()
                if name == key and number <= self.rounds and load in block.values}

    def _pairs(self, one: tuple[str, str], other: tuple[str, str]) -> list[float]:
        """Differences of two (server, load) in the rounds that have both, on one machine."""
        a, b = self._logs(*one), self._logs(*other)
        return [a[n][1] - b[n][1] for n in sorted(a.keys() & b.keys()) if a[n][0] == b[n][0]]

    def _gain(self, one: tuple[str, str], other: tuple[str, str]) -> Gain:
        from autotune.measure.statistics import student_t

        found = self._pairs(one, other)
        if len(found) < 2:
            return Gain(math.expm1(fmean(found)) if found else None)
        mean, n = fmean(found), len(found)
        t = student_t(1 - self.settings.alpha / (self._looks * len(self.finalists)), n - 1)
        half = t * stdev(found) / math.sqrt(n)
        return Gain(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))

    def _configuration(self, key: str) -> tuple[str, str]:
        """(server, load) of a finalist."""
        return key if self.finalists[key].own_server else BASELINE, self.finalists[key].load

    def _tested(self, key: str) -> tuple[tuple[str, str], tuple[str, str]]:
        """The two (server, load) whose difference decides on a finalist."""
        server, load = self._configuration(key)
        return (server, load), (BASELINE, self.base_load if server == BASELINE else load)

    def _shown(self, key: str) -> bool:
        low, (bad, blocks) = self._gain(*self._tested(key)).low, self._bad(key)
        enough = len(self._pairs(*self._tested(key))) >= self.settings.min_rounds and 2 * bad <= blocks
        return enough and low is not None and low > 0

    def _value(self, key: str) -> float:
        """The mean logarithm of a finalist's value."""
        logs = [log for _, log in self._logs(*self._configuration(key)).values()]
        return fmean(logs) if logs else -math.inf

    def _beaten(self, key: str, leader: str) -> bool:
        low = self._gain(self._configuration(leader), self._configuration(key)).low
        return low is not None and low > 0
