"""Failure isolation: a smallest set of choices that turns a working configuration into a crashing one.

    search = Isolation(space, crashing, working, known={config_key(c): False, ...}, suspects=["nvls"])
    while (probe := search.next_probe()) is not None:
        search.tell(launch(probe))          # True: it worked, False: the same crash, None: something else
    search.result.choices                   # {"nvls": True, "tp": 8}

Delta debugging by bisection of prefixes (Zeller and Hildebrandt 2002; the prefix form as in Junker's QuickXplain,
2004): k guilty choices among n differing ones cost about k * (log2 n + 1) launches, fewer with what is known.
Known outcomes decide a probe without a launch: whatever contains only choices of the crashing configuration that
already worked together works, whatever contains all those that already crashed crashes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence

from autotune.records import Config, Crash, UsageError, Value, config_key
from autotune.space.space import Space

SUSPECT_WEIGHT = 4.0
"""How much likelier a suspect is than another parameter; it decides where the bisection cuts."""
Probe = Generator[dict[str, Value], bool | None, bool | None]


@dataclasses.dataclass(frozen=True)
class Isolated:
    """What the isolation found.

    `choices` of the crashing configuration suffice to crash `config`, which is the working one otherwise; `instead`
    holds what the working one has there (a parameter that does not exist there is absent). `exact` is False when
    some combinations could not be decided, so that `choices` may hold innocent ones. `launches` were told during
    the search; of all outcomes, told or known, `crashed` contain the choices and crashed, and `worked` contain them
    and worked (more than none: the crash depends on something else too).
    """

    choices: dict[str, Value]
    instead: dict[str, Value]
    config: dict[str, Value]
    exact: bool
    launches: int
    crashed: int
    worked: int


class Isolation:
    """Says which configuration to launch next; the caller launches. `result` is there when `next_probe` is None.

    `known` maps `config_key(config)` to whether it worked; only crashes with the same signature belong in it.
    `suspects` are parameters to try first, `confirm` is how often the minimal configuration is launched again at
    the end. Pass server parts only when the crash is at the start.
    """

    def __init__(self, space: Space, crashing: Config, working: Config, known: Mapping[str, bool] | None = None,
                 suspects: Sequence[str] = (), confirm: int = 0) -> None:
        self.space, self.crashing, self.working, self.confirm = space, dict(crashing), dict(working), confirm
        self.names = [p.name for p in space.params if p.name in crashing or p.name in working]
        self.differing = [n for n in self.names if not _same(crashing, working, n)]
        if not self.differing:
            raise UsageError("failure isolation needs a crashing and a working configuration that differ")
        self.seen: list[tuple[frozenset[str], bool]] = [(self._guilty(crashing), False), (self._guilty(working), True)]
        pair = {config_key(self.crashing), config_key(self.working)}
        for key, passed in (known or {}).items():
            if key not in pair:
                self.seen.append((self._guilty(json.loads(key)), passed))
        self.launches = 0
        self.undecided: set[str] = set()
        self.result: Isolated | None = None
        self._order = self._suspicion(suspects)
        self._weight = {n: SUSPECT_WEIGHT if n in suspects else 1.0 for n in self.differing}
        self._steps = self._search()
        self._probe: dict[str, Value] | None = self._advance(None, first=True)

    def next_probe(self) -> dict[str, Value] | None:
        """The configuration to launch now; None when the isolation is complete. Does not move on before `tell`."""
        return None if self._probe is None else dict(self._probe)

    def tell(self, passed: bool | None) -> None:
        """The outcome of the last probe: it worked, it crashed the same way, or (None) it told nothing."""
        if self._probe is None:
            raise UsageError("failure isolation is complete: there is no probe to tell about")
        self.launches += 1
        if passed is None:
            self.undecided.add(config_key(self._probe))
        else:
            self.seen.append((self._guilty(self._probe), passed))
        self._probe = self._advance(passed)

    def mix(self, names: Iterable[str]) -> dict[str, Value]:
        """The working configuration with the crashing one's choices for `names`, made consistent with conditions."""
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

    def _advance(self, passed: bool | None, first: bool = False) -> dict[str, Value] | None:
        try:
            return next(self._steps) if first else self._steps.send(passed)
        except StopIteration as end:
            self.result = end.value
            return None

    def _search(self) -> Generator[dict[str, Value], bool | None, Isolated]:
        found: list[str] = []
        rest, exact = self._order, True
        while rest:
            if found and (yield from self._works(found)) is False:
                break
            low, high = 0, len(rest)  # found + rest[:low] works, found + rest[:high] crashes
            skipped: set[int] = set()
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
        minimal = self.mix(found)
        for _ in range(self.confirm):
            yield minimal
        return self._isolated(found, minimal, exact)

    def _works(self, names: Sequence[str]) -> Probe:
        """Whether the mix with `names` works: from what is known, else by a launch. None: cannot be told."""
        config = self.mix(names)
        if config_key(config) in self.undecided or self.space.forbidden(config) is not None:
            return None
        guilty = self._guilty(config)
        for seen, passed in self.seen:
            if (guilty <= seen) if passed else (seen <= guilty):
                return passed
        return (yield config)

    def _cut(self, rest: Sequence[str], low: int, high: int, skipped: set[int]) -> int | None:
        """Where to cut between `low` and `high`: half the weight on each side; None when nothing is left to try."""
        cuts = [i for i in range(low + 1, high) if i not in skipped]
        total = sum(self._weight[n] for n in rest[low:high])
        return min(cuts, default=None, key=lambda i: abs(sum(self._weight[n] for n in rest[low:i]) - total / 2))

    def _guilty(self, config: Config) -> frozenset[str]:
        """The parameters that a configuration has in common with the crashing one."""
        return frozenset(n for n in self.names if _same(config, self.crashing, n))

    def _suspicion(self, suspects: Sequence[str]) -> list[str]:
        """The differing parameters, likeliest first: named suspects, then those that crashed more often than worked."""
        def score(name: str) -> int:
            return sum(-1 if passed else 1 for seen, passed in self.seen[2:] if name in seen)

        rank = {name: place for place, name in enumerate(suspects)}
        return sorted(self.differing, key=lambda n: (rank.get(n, len(rank)), -score(n)))

    def _isolated(self, found: Sequence[str], config: dict[str, Value], exact: bool) -> Isolated:
        """`found` as a result; choices that do not exist in the minimal configuration are dropped."""
        choices = {n: self.crashing[n] for n in self.names if n in found and n in config and n in self.crashing}
        instead = {n: self.working[n] for n in self.names if n in found and n in self.working}
        holding = [passed for seen, passed in self.seen if set(found) <= seen]
        return Isolated(choices, instead, config, exact, self.launches, holding.count(False), holding.count(True))


def suspects(crash: Crash, flags: Mapping[str, Sequence[str]]) -> list[str]:
    """The parameters that a crash's text or category names, in the order of `flags` (parameter -> its flags or words).

    Dashes and underscores are the same; a name counts only as a whole word.
    """
    said = "_" + re.sub(r"[^a-z0-9]+", "_", f"{crash.category} {crash.excerpt}".lower()) + "_"
    return [name for name, others in flags.items()
            if any(f"_{re.sub(r'[^a-z0-9]+', '_', word.lower()).strip('_')}_" in said for word in (name, *others))]


def _same(a: Config, b: Config, name: str) -> bool:
    """Whether both have the same value (True is not 1), or both lack it."""
    if (name in a) != (name in b):
        return False
    return name not in a or (a[name] == b[name] and isinstance(a[name], bool) == isinstance(b[name], bool))
