"""Probability that a launch works, from all launches that passed and crashed.

Crashes of one signature have one cause (`crash_hypotheses.Group`); a group that no hypothesis explains is split. A
launch works if the cause of each group is absent and no unseen cause strikes; the risk of unseen causes grows with each
choice and pair of choices that never passed. A choice that may explain several signatures counts once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.search.crash_hypotheses import COMMON, Culprit, Failure, Group
from autotune.search.grid import Codes, Floats, Grid

RATE = 0.1  # prior share of faulty single choices
PAIR_RATE = 0.02  # prior share of faulty pairs
PRIOR_WEIGHT = 20.0  # weight of RATE, in tested choices
ELSE = 0.02  # probability that a new configuration crashes for another reason
UNSEEN_LOAD = 0.03  # crash probability under a load part without any measurement
SEEN_LOAD = 0.005  # crash probability under a measured load part
MANY_PASSES, AT_A_TIME = 400, 100  # most passes per group (the newest), updated in steps so that groups are reused
VARIED = 0.3  # probability that a faulty choice shows another signature the next time


class CrashModel:
    """Crash probabilities as a pure function of the passes and crashes of a study."""

    def __init__(self, grid: Grid, passed: Codes, served: Codes, failures: Sequence[Failure],
                 earlier: CrashModel | None = None) -> None:
        """passed: (n, P) server parts that came up; served: (m, D) configurations measured without a crash.

        earlier: an older model of the same study, whose unchanged groups are reused.
        """
        self.grid, self.failures = grid, tuple(failures)
        self._made: dict[tuple[int, ...], Group] = {}
        self._earlier: dict[tuple[int, ...], Group] = earlier._made if earlier else {}
        self.passed, self.served = passed, served
        signatures: dict[tuple[str, bool], list[Failure]] = {}
        for failure in failures:
            signatures.setdefault((failure.crash.signature, failure.loaded), []).append(failure)
        self.groups = [g for fails in signatures.values() for g in self._split(fails)]
        self._earlier = {}
        faulty = sum(float(g.weights[[len(h) == 1 for h in g.hypotheses]].sum()) for g in self.groups if not g.loaded)
        self.seen = [np.isin(np.arange(len(p.choices) + 1), passed[:, i]) for i, p in enumerate(grid.server_params)]
        tested = float(sum(s.sum() for s in self.seen)) + faulty
        self.rate = (RATE * PRIOR_WEIGHT + faulty) / (PRIOR_WEIGHT + tested)  # posterior share of faulty choices
        self.pair_rate = PAIR_RATE * self.rate / RATE
        self._paired = np.zeros(grid.pair_count, dtype=bool)
        self._paired[grid.pair_codes(passed).ravel()] = True
        self._shared = self._in_several_groups()

    def chance(self, servers: Codes) -> Floats:
        """(n,) probability that each server part comes up."""
        chance = self.unseen(servers)
        for group in self.groups:
            if not group.loaded:
                chance = chance * (1 - group.chance_to_hit(servers))
        for column, code, factor in self._shared:
            chance = np.where(servers[:, column] == code, chance * factor, chance)
        return chance

    def _in_several_groups(self) -> list[tuple[int, int, float]]:
        """(column, code, factor on the chance) of choices that may alone explain several signatures.

        Groups are weighed as if their causes were unrelated, but one faulty choice can explain several. With a =
        probability in a group that the choice alone is the cause, the odds that the choice is faulty are
        rate * (prod(1 + q a / (rate (1 - a))) - 1), with q = 1 for one group and VARIED for the others.
        """
        out = []
        groups = [g for g in self.groups if not g.loaded]
        for column, seen in enumerate(self.seen):
            for code in np.flatnonzero(~seen).tolist():
                parts = sorted((a for g in groups if (a := g.alone(column, code)) > 0.01), reverse=True)
                if len(parts) > 1:
                    apart = float(np.prod([1 - a for a in parts]))
                    odds = np.prod([1 + (VARIED if i else 1.0) * a / (self.rate * (1 - a + 1e-6))
                                    for i, a in enumerate(parts)]) - 1
                    out.append((column, code, min(1.0, float(1 / (1 + self.rate * odds)) / max(apart, 1e-9))))
        return out

    def unseen(self, servers: Codes) -> Floats:
        """(n,) probability that no unseen cause strikes."""
        singles = np.stack([~seen[servers[:, i]] for i, seen in enumerate(self.seen)], axis=1)
        pairs = ~self._paired[self.grid.pair_codes(servers)]
        out: Floats = np.exp(-ELSE * pairs.any(axis=1) - self.rate * singles.sum(axis=1)
                             - self.pair_rate * pairs.sum(axis=1))
        return out

    def new(self, servers: Codes) -> NDArray[np.intp]:
        """(n,) number of choices that never came up; choices that depend on another new choice do not count."""
        count = np.zeros(len(servers), dtype=np.intp)
        for i, (param, seen) in enumerate(zip(self.grid.server_params, self.seen, strict=True)):
            if seen[:-1].any() or not param.when:
                count += ~seen[servers[:, i]] & (servers[:, i] < len(param.choices))
        return count

    def suspects(self, under_load: bool = False) -> list[tuple[int, int, float]]:
        """(column, code, probability of a part in a cause) of server choices that never came up.

        under_load: of choices that came up, crashed under load, and were never measured.
        """
        out = []
        groups = [group for group in self.groups if group.loaded or not under_load]
        for column, seen in enumerate(self.seen):
            measured = set(self.served[:, column].tolist()) if under_load else set()
            for code in np.flatnonzero(seen == under_load).tolist():
                guilty = 0.0 if code in measured else 1 - math.prod(1 - group.part(column, code) for group in groups)
                if guilty > 0:
                    out.append((column, code, guilty))
        return out

    def combinations(self) -> list[tuple[dict[int, tuple[int, ...]], float]]:
        """(codes by column, probability) of the likeliest cause of each group with several choices."""
        out = []
        for group in self.groups:
            atoms = group.hypotheses[0]
            if len(atoms) > 1 and not group.loaded:
                when = {int(group.atom_column[a]): tuple(np.flatnonzero(group.atom_mask[a]).tolist()) for a in atoms}
                out.append((when, float(group.weights[0])))
        return out

    def culprits(self) -> list[Culprit]:
        """Hypotheses of all groups with a probability above 5 %, likeliest first."""
        return sorted((c for group in self.groups for c in group.culprits() if c.probability > 0.05),
                      key=lambda c: -c.probability)

    def chance_serving(self, servers: Codes) -> Floats:
        """(n, L) probability that a live server survives each load part."""
        loads = self.grid.load_rows
        known = {tuple(row) for row in np.unique(self.served[:, self.grid.width:], axis=0).tolist()}
        fresh = np.array([tuple(row) not in known for row in loads.tolist()])
        out = np.repeat(np.where(fresh, 1 - UNSEEN_LOAD, 1 - SEEN_LOAD)[None, :], len(servers), axis=0)
        for group in self.groups:
            if group.loaded:
                for j, load in enumerate(loads):
                    full = np.concatenate([servers, np.tile(load, (len(servers), 1))], axis=1)
                    out[:, j] *= 1 - group.chance_to_hit(full)
        return out

    def _split(self, failures: list[Failure]) -> list[Group]:
        """One group if one cause explains all crashes; else each crash joins the group that it fits best."""
        passed = self.served if any(f.loaded for f in failures) else self.passed
        whole = self._group(failures, passed)
        if len(failures) == 1 or whole.evidence > 1e-3 * COMMON[2]:
            return [whole]
        groups: list[Group] = []
        for failure in failures:
            alone = self._group([failure], passed)
            joined = [self._group([*g.failures, failure], passed) for g in groups]
            gains = [j.evidence / (g.evidence * alone.evidence) for j, g in zip(joined, groups, strict=True)]
            if gains and max(gains) > 1:
                groups[int(np.argmax(gains))] = joined[int(np.argmax(gains))]
            else:
                groups.append(alone)
        return groups

    def _group(self, failures: Sequence[Failure], passed: Codes) -> Group:
        used = len(passed)
        if used > MANY_PASSES:
            used -= used % AT_A_TIME
            passed = passed[used - MANY_PASSES:used]
        key = (used, *(id(f) for f in failures))
        if key not in self._made:
            self._made[key] = self._earlier.get(key) or Group(self.grid, failures, passed)
        return self._made[key]
