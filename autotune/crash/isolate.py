"""Failure isolation: a smallest set of choices that makes a working configuration crash.

    search = Isolation(space, crashing, working, known={config_key(c): False, ...}, suspects=["nvls"])
    while (probe := search.next_probe()) is not None:
        search.tell(launch(probe))          # True: worked, False: the same crash, None: another outcome
    search.result.choices                   # {"nvls": True, "tp": 8}

Delta debugging by bisection of prefixes (as in Junker's QuickXplain, 2004): k guilty choices among n differing ones
cost about k * (log2 n + 1) launches. Known outcomes decide a probe without a launch: a subset of choices that worked
together works, and a superset of choices that crashed crashes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from autotune.records import Config, Crash, UsageError, Value, config_key, exact
from autotune.space.space import Space

SUSPECT_WEIGHT = 4.0  # weight of a suspect relative to another parameter, for the cuts of the bisection
Probe = Generator[dict[str, Value], bool | None, bool | None]


class Isolated(NamedTuple):
    """Result of an isolation.

    `choices` of the crashing configuration suffice to crash the working one, whose choices `instead` holds. `exact` is
    False if some combinations were undecidable, so `choices` may contain innocent ones. `crashed`, `worked`: outcomes
    with these choices; `worked` above 0 means that the crash depends on something else too.
    """

    choices: dict[str, Value]
    instead: dict[str, Value]
    exact: bool
    launches: int
    crashed: int
    worked: int


class Isolation:
    """Proposes configurations; the caller launches them. `result` is set when `next_probe` returns None.

    `known` maps `config_key(config)` to whether it worked, with crashes of the same signature only. `suspects`:
    parameters to try first. For a crash at the start, pass server parts only.
    """

    def __init__(self, space: Space, crashing: Config, working: Config, known: Mapping[str, bool] | None = None,
                 suspects: Sequence[str] = ()) -> None:
        self.space, self.crashing, self.working = space, dict(crashing), dict(working)
        self.names = [p.name for p in space.params if p.name in crashing or p.name in working]
        self.differing = [n for n in self.names if n not in self._guilty(working)]
        if not self.differing:
            raise UsageError("failure isolation needs a crashing and a working configuration that differ")
        self.seen: list[tuple[frozenset[str], bool]] = [(self._guilty(crashing), False), (self._guilty(working), True)]
        self.seen += [(self._guilty(json.loads(key)), passed) for key, passed in (known or {}).items()
                      if key not in (config_key(crashing), config_key(working))]
        self.launches = 0
        self.undecided: set[str] = set()
        self.result: Isolated | None = None
        rank = {name: place for place, name in enumerate(suspects)}
        score = {n: sum(1 if passed else -1 for seen, passed in self.seen[2:] if n in seen) for n in self.differing}
        # named suspects first, then the parameters with the most crashes
        self._order = sorted(self.differing, key=lambda n: (rank.get(n, len(rank)), score[n]))
        self._weight = {n: SUSPECT_WEIGHT if n in suspects else 1.0 for n in self.differing}
        self._steps = self._search()
        self._probe: dict[str, Value] | None = self._advance(None)

    def next_probe(self) -> dict[str, Value] | None:
        """The configuration to launch now, the same until `tell`; None when the isolation is complete."""
        return None if self._probe is None else dict(self._probe)

    def tell(self, passed: bool | None) -> None:
        """Outcome of the last probe: True worked, False the same crash, None undecided."""
        assert self._probe is not None
        self.launches += 1
        if passed is None:
            self.undecided.add(config_key(self._probe))
        else:
            self.seen.append((self._guilty(self._probe), passed))
        self._probe = self._advance(passed)

    def mix(self, names: Iterable[str]) -> dict[str, Value]:
        """The working configuration with the crashing one's choices for `names`, consistent with all conditions."""
        chosen, mixed = set(names), dict[str, Value]()
        for param in self.space.params:
            name = param.name
            if name not in self.names or not self.space.active(param, mixed):
                continue
            source = self.crashing if name in chosen else self.working
            other = self.working if name in chosen else self.space.baseline
            neutral = next((c for c in param.choices if c != self.crashing.get(name)), param.choices[0])
            mixed[name] = source.get(name, other.get(name, neutral))
        return mixed

    def _advance(self, passed: bool | None) -> dict[str, Value] | None:
        try:
            return self._steps.send(passed)
        except StopIteration as end:
            self.result = end.value
            return None

    def _search(self) -> Generator[dict[str, Value], bool | None, Isolated]:
        found, rest, exact = list[str](), self._order, True
        while rest:
            if found and (yield from self._works(found)) is False:
                break
            low, high, skipped = 0, len(rest), set[int]()  # found + rest[:low] works, found + rest[:high] crashes
            while middle := self._cut(rest, low, high, skipped):
                worked = yield from self._works([*found, *rest[:middle]])
                if worked is None:
                    skipped.add(middle)
                elif worked:
                    low = middle
                else:
                    high = middle
            exact = exact and high - low == 1
            found, rest = [*found, *rest[low:high]], rest[:low]
        for name in list(found):
            without = [n for n in found if n != name]
            if without and (yield from self._works(without)) is False:
                found = without
        choices = {n: self.crashing[n] for n in self.mix(found) if n in found and n in self.crashing}
        instead = {n: self.working[n] for n in self.names if n in found and n in self.working}
        holding = [passed for seen, passed in self.seen if set(found) <= seen]
        return Isolated(choices, instead, exact, self.launches, holding.count(False), holding.count(True))

    def _works(self, names: Sequence[str]) -> Probe:
        """True if the mix with `names` works, from known outcomes or by a launch; None if undecidable."""
        config = self.mix(names)
        if config_key(config) in self.undecided or self.space.forbidden(config) is not None:
            return None
        guilty = self._guilty(config)
        for seen, passed in self.seen:
            if (guilty <= seen) if passed else (seen <= guilty):
                return passed
        return (yield config)

    def _cut(self, rest: Sequence[str], low: int, high: int, skipped: set[int]) -> int | None:
        """Cut between `low` and `high` with half the weight on each side; None without a cut to try."""
        cuts = [i for i in range(low + 1, high) if i not in skipped]
        total = sum(self._weight[n] for n in rest[low:high])
        return min(cuts, default=None, key=lambda i: abs(sum(self._weight[n] for n in rest[low:i]) - total / 2))

    def _guilty(self, config: Config) -> frozenset[str]:
        """Parameters with the same choice as the crashing configuration."""
        return frozenset(n for n in self.names if exact(config.get(n)) == exact(self.crashing.get(n)))


def suspects(crash: Crash, names: Iterable[str]) -> list[str]:
    """Parameters that a crash's text or category names, as whole words; dashes equal underscores."""
    said, *words = (re.sub(r"[^a-z0-9]+", "_", f"_{text.lower()}_") for text in (
        f"{crash.category} {crash.excerpt}", *names))
    return [name for name, word in zip(names, words, strict=True) if word in said]
