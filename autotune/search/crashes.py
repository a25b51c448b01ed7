"""Which choices crash: hypotheses about the causes of the crashes seen, and the chance that a launch works.

Crashes of one signature are taken to have one cause: a single choice, or two or three choices together (several
choices of one parameter may stand for each other). Each hypothesis that covers all crashes of the group is weighed by
how common causes of its size are and by the launches that passed although it was present: a cause that fails always
is refuted by one pass, a flaky one only weakened. When no hypothesis explains a whole group, it is split. The chance
that a launch works is the product, over the groups, of the chance that their cause is absent, times the
chance that it meets no cause yet unseen, which grows with each choice and pair of choices that never passed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Crash, Stage, Value
from autotune.search import hints
from autotune.search.grid import Codes, Grid, Mask

Floats = NDArray[np.float64]

RATE = 0.1
COMMON = (0.15, 0.02, 0.003)
"""How common faulty single choices, pairs and triples of choices are, before anything is seen."""
ENVIRONMENT = (0.5, 0.01, 0.001)
"""The same for crashes blamed on the environment: nearly always one feature that this host lacks."""
ELSE = 0.02  # that a new configuration crashes for no reason among these
SELF_ONLY = 0.004  # that a crash has to do with no smaller part of its configuration
SEVERAL = 0.3  # discount for a hypothesis that several choices of a parameter fail alike
ALWAYS = ((1.0, 0.85), (0.5, 0.1), (0.15, 0.05))
"""(how often a faulty configuration crashes, share of faults that are like this)."""
UNSEEN_LOAD = 0.03  # that a load part which nothing was yet measured under ends a server
SEEN_LOAD = 0.005
VARIED = 0.3  # that a faulty choice shows itself by another signature the next time
KEPT = 150  # hypotheses kept for a group
PRIOR_WEIGHT = 20.0  # tested choices that the belief in COMMON[0] counts for


@dataclasses.dataclass(frozen=True)
class Failure:
    """One crash in codes: (D,) server and load codes, load codes -1 where no load part was involved."""

    row: Codes
    crash: Crash
    trial: int | None

    @property
    def loaded(self) -> bool:
        return self.crash.stage is Stage.SERVING or bool((self.row < 0).sum() == 0)


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A set of choices that may explain the crashes of one signature."""

    when: Mapping[str, tuple[Value, ...]]
    probability: float
    signature: str
    trials: tuple[int, ...]


class Group:
    """The crashes of one cause, and the weighed hypotheses about it."""

    def __init__(self, grid: Grid, failures: Sequence[Failure], passed: Codes) -> None:
        self.grid = grid
        self.failures = tuple(failures)
        self.loaded = any(f.loaded for f in failures)
        self.columns = len(grid.params) if self.loaded else grid.width
        rows = np.array([f.row[:self.columns] for f in failures])
        self.atom_column, self.atom_mask, atom_weight = self._atoms(rows)
        hits = self._hits(passed[:, :self.columns]).astype(float)
        self.own = np.array(sorted({tuple(row) for row in rows.tolist()}), dtype=np.int16)
        crashes = len(self.own)
        likelihood, rates = _strikes(crashes, len(passed)), _strikes(crashes + 1, len(passed))
        common = ENVIRONMENT if all(f.crash.blame is Blame.ENVIRONMENT for f in failures) else COMMON
        sets = _combinations(tuple(self.atom_column))
        weights, counts = [], []
        for order, index in enumerate(sets):
            present = hits[index[:, 0]]
            for k in range(1, order + 1):
                present = present * hits[index[:, k]]
            counts.append(present.sum(axis=1).astype(int))
            weights.append(common[order] * atom_weight[index].prod(axis=1))
        every = np.concatenate([np.concatenate(weights), [SELF_ONLY if crashes == 1 else 0.0]])
        count = np.concatenate([*counts, [0]])
        joint = every * likelihood[count]
        self.evidence = float(joint.sum())
        """Probability of these crashes and passes, all hypotheses together (not normalised over groupings)."""
        order_ = np.argsort(-joint)[:KEPT]
        order_ = order_[joint[order_] > 1e-4 * joint[order_[0]]]
        self.weights: Floats = joint[order_] / max(self.evidence, 1e-300)
        self.rate: Floats = (rates[count] / np.maximum(likelihood[count], 1e-300))[order_]
        ends = np.cumsum([len(index) for index in sets])
        self.hypotheses: list[tuple[int, ...]] = []
        for i in order_.tolist():
            order = int(np.searchsorted(ends, i, side="right"))
            start = int(ends[order - 1]) if order else 0
            self.hypotheses.append(tuple(sets[order][i - start].tolist()) if order < 3 else ())

    def chance_to_hit(self, rows: Codes) -> Floats:
        """(n,) probability that the cause is present in each row and strikes."""
        out: Floats = (self.weights * self.rate) @ self._presence(rows)
        return np.minimum(out, 1.0)

    def part(self, column: int, code: int) -> float:
        """Probability that a choice takes part in the cause, alone or with others."""
        if not (self.own[:, column] == code).any():
            return 0.0
        return float(sum(w for atoms, w in zip(self.hypotheses, self.weights, strict=True)
                         if any(self.atom_column[a] == column for a in atoms)))

    def alone(self, column: int, code: int) -> float:
        """Probability that a choice is the cause all by itself."""
        return float(sum(w for atoms, w in zip(self.hypotheses, self.weights, strict=True)
                         if len(atoms) == 1 and self.atom_column[atoms[0]] == column
                         and self.atom_mask[atoms[0], code]))

    def culprits(self) -> list[Culprit]:
        """Hypotheses with their probabilities, the likeliest first. An empty `when`: no part of it alone."""
        trials = tuple(f.trial for f in self.failures if f.trial is not None)
        return [Culprit(self.when(atoms), float(weight), self.failures[0].crash.signature, trials)
                for atoms, weight in zip(self.hypotheses, self.weights, strict=True)]

    def when(self, atoms: Sequence[int]) -> dict[str, tuple[Value, ...]]:
        out = {}
        for atom in atoms:
            param = self.grid.params[self.atom_column[atom]]
            out[param.name] = tuple(c for i, c in enumerate(param.choices) if self.atom_mask[atom, i])
        return out

    def _presence(self, rows: Codes) -> Floats:
        """(hypotheses, n): 1 where the hypothesis holds in the row."""
        hits = self._hits(rows[:, :self.columns])
        out = np.ones((len(self.hypotheses), len(rows)))
        for order in (1, 2, 3):
            which = [i for i, atoms in enumerate(self.hypotheses) if len(atoms) == order]
            if which:
                index = np.array([self.hypotheses[i] for i in which])
                out[which] = np.logical_and.reduce([hits[index[:, k]] for k in range(order)])
        for i, atoms in enumerate(self.hypotheses):
            if not atoms:
                out[i] = (rows[:, None, :self.columns] == self.own[None]).all(axis=2).any(axis=1)
        return out

    def _hits(self, rows: Codes) -> NDArray[np.bool_]:
        """(atoms, n): whether each row has one of the atom's choices."""
        hits: NDArray[np.bool_] = self.atom_mask[np.arange(len(self.atom_mask))[:, None], rows[:, self.atom_column].T]
        return hits

    def _atoms(self, rows: Codes) -> tuple[NDArray[np.intp], NDArray[np.bool_], Floats]:
        """Conditions on one parameter that hold in every crash: its choice, or a wider set of them."""
        widest = max(len(p.choices) for p in self.grid.params) + 1
        columns, masks, weights = [], [], []
        for column in range(self.columns):
            param = self.grid.params[column]
            seen = sorted({int(c) for c in rows[:, column]})
            if seen[0] < 0:
                continue
            options = {frozenset(seen): 1.0 if len(seen) == 1 else SEVERAL ** (len(seen) - 1)}
            if param.numeric and seen[-1] < len(param.choices):
                for low, high in ((seen[0], len(param.choices) - 1), (0, seen[-1]), (seen[0], seen[-1])):
                    options[frozenset(range(low, high + 1))] = max(
                        SEVERAL, options.get(frozenset(range(low, high + 1)), 0.0))
            for option, weight in options.items():
                if len(option) < len(param.choices) + bool(param.when):
                    columns.append(column)
                    masks.append([i in option for i in range(widest)])
                    chosen = tuple(c for i, c in enumerate(param.choices) if i in option)
                    weights.append(weight * hints.weight(param, chosen, self.failures[0].crash))
        if not columns:
            return np.zeros(0, dtype=np.intp), np.zeros((0, widest), dtype=bool), np.zeros(0)
        return np.array(columns), np.array(masks), np.array(weights)


class CrashModel:
    """What the passes and crashes of a study say. A pure function of them."""

    def __init__(self, grid: Grid, passed: Codes, served: Codes, failures: Sequence[Failure],
                 earlier: CrashModel | None = None) -> None:
        """passed: (n, P) server parts that came up; served: (m, D) configurations measured without a crash.

        `earlier` is a model of the same study from which unchanged groups are taken over, to save time.
        """
        self.grid = grid
        self.failures = tuple(failures)
        self._made: dict[tuple[int, ...], Group] = {}
        self._earlier: dict[tuple[int, ...], Group] = earlier._made if earlier else {}
        self.passed, self.served = passed, served
        signatures: dict[tuple[str, bool], list[Failure]] = {}
        for failure in failures:
            signatures.setdefault((failure.crash.signature, failure.loaded), []).append(failure)
        self.groups = [g for fails in signatures.values() for g in self._split(fails)]
        self._earlier = {}
        faulty = sum(float(g.weights[[len(h) == 1 for h in g.hypotheses]].sum()) for g in self.groups if not g.loaded)
        self.seen = [np.zeros(len(p.choices) + 1, dtype=bool) for p in grid.server_params]
        for i, seen in enumerate(self.seen):
            seen[passed[:, i]] = True
        tested = float(sum(s.sum() for s in self.seen)) + faulty
        self.rate = (RATE * PRIOR_WEIGHT + faulty) / (PRIOR_WEIGHT + tested)
        """How common faulty single choices are here, by now."""
        self.pair_rate = COMMON[1] * self.rate / RATE
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
        """(column, code, factor on the chance) of choices that may be the one cause behind several signatures.

        The groups are weighed as if their causes were unrelated; that one faulty choice shows itself in several ways
        needs one fault only. With a = probability in a group that the choice alone is its cause, the odds that it is
        faulty are rate * (prod(1 + q a / (rate (1 - a))) - 1), q = 1 for one group and VARIED for the others.
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
        """(n,) probability that no cause strikes which has not shown itself yet."""
        singles, pairs = self._novelty(servers)
        out: Floats = np.exp(-ELSE * pairs.any(axis=1) - self.rate * singles.sum(axis=1)
                             - self.pair_rate * pairs.sum(axis=1))
        return out

    def _novelty(self, servers: Codes) -> tuple[Mask, Mask]:
        """(n, P) choices and (n, pairs) pairs of choices that never passed."""
        singles = np.stack([~seen[servers[:, i]] for i, seen in enumerate(self.seen)], axis=1)
        return singles, ~self._paired[self.grid.pair_codes(servers)]

    def suspects(self) -> list[tuple[int, int, float]]:
        """(column, code, probability that it takes part in a cause) of server choices that never came up."""
        out = []
        for column, seen in enumerate(self.seen):
            for code in np.flatnonzero(~seen).tolist():
                innocent = 1.0
                for group in self.groups:
                    innocent *= 1 - group.part(column, code)
                if innocent < 1:
                    out.append((column, code, 1 - innocent))
        return out

    def combinations(self) -> list[tuple[dict[int, tuple[int, ...]], float]]:
        """(codes by column, probability) of the likeliest cause of each group, where several choices make it up."""
        out = []
        for group in self.groups:
            atoms = group.hypotheses[0]
            if len(atoms) > 1 and not group.loaded:
                when = {int(group.atom_column[a]): tuple(np.flatnonzero(group.atom_mask[a]).tolist()) for a in atoms}
                out.append((when, float(group.weights[0])))
        return out

    def culprits(self) -> list[Culprit]:
        """What may have caused the crashes, for people: the likely hypotheses of every group, likeliest first."""
        found = [c for group in self.groups for c in group.culprits() if c.probability > 0.05]
        return sorted(found, key=lambda c: -c.probability)

    def chance_serving(self, servers: Codes) -> Floats:
        """(n, L) probability that a live server of each part survives each load part."""
        loads = self.grid.load_rows
        known = {tuple(row) for row in self.served[:, self.grid.width:].tolist()}
        fresh = np.array([tuple(row) not in known for row in loads.tolist()])
        out = np.repeat(np.where(fresh, 1 - UNSEEN_LOAD, 1 - SEEN_LOAD)[None, :], len(servers), axis=0)
        for group in self.groups:
            if group.loaded:
                for j, load in enumerate(loads):
                    full = np.concatenate([servers, np.repeat(load[None, :], len(servers), axis=0)], axis=1)
                    out[:, j] *= 1 - group.chance_to_hit(full)
        return out

    def _split(self, failures: list[Failure]) -> list[Group]:
        """One group where one cause explains all; else crashes join, one by one, the group they fit best."""
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
        key = (len(passed), *(id(f) for f in failures))
        if key not in self._made:
            self._made[key] = self._earlier.get(key) or Group(self.grid, failures, passed)
        return self._made[key]


def _strikes(crashes: int, most: int) -> Floats:
    """(most + 1,) probability that a faulty configuration crashed `crashes` times and passed 0, 1, ... `most` times."""
    passes = np.arange(most + 1)
    out: Floats = np.sum([share * rate ** crashes * (1 - rate) ** passes for rate, share in ALWAYS], axis=0)
    return out


@functools.lru_cache(maxsize=512)
def _combinations(columns: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    """Indices of one, two and three atoms on different columns: (n1, 1), (n2, 2), (n3, 3)."""
    column = np.array(columns, dtype=np.intp)
    out = []
    for order in (1, 2, 3):
        index = np.array(list(itertools.combinations(range(len(column)), order)), dtype=np.intp).reshape(-1, order)
        held = column[index]
        keep = np.ones(len(index), dtype=bool)
        for a, b in itertools.combinations(range(order), 2):
            keep &= held[:, a] != held[:, b]
        out.append(index[keep])
    return tuple(out)
