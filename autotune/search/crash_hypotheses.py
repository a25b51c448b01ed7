"""What may have caused the crashes of one group: single choices, or two or three together, each with a weight.

Each hypothesis that covers all crashes of the group is weighed by how common causes of its size are, by what the crash
says of itself (`hints`), and by the launches that passed although it was present: a cause that fails always is refuted
by one pass, a flaky one only weakened. Several choices of one parameter may stand for each other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Crash, Value
from autotune.search import crash_features
from autotune.search.grid import Codes, Grid

Floats = NDArray[np.float64]

COMMON = (0.15, 0.02, 0.003)
"""How likely a given single choice, pair or triple is to be the cause of a crash, relative to each other."""
ENVIRONMENT = (0.5, 0.01, 0.001)
"""The same for crashes blamed on the environment: nearly always one feature that this host lacks."""
SELF_ONLY = 0.004  # that a crash has to do with no smaller part of its configuration
SEVERAL = 0.3  # discount for a hypothesis that several choices of a parameter fail alike
ALWAYS = ((1.0, 0.85), (0.5, 0.1), (0.15, 0.05))
"""(how often a faulty configuration crashes, share of faults that are like this)."""
KEPT = 150  # hypotheses kept for a group


@dataclasses.dataclass(frozen=True)
class Failure:
    """One crash in codes: (D,) server and load codes, load codes -1 where no load part was involved."""

    row: Codes
    crash: Crash
    trial: int | None
    loaded: bool  # a load part was on it: not at its start, nor at its readiness request


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
                    weights.append(weight * crash_features.weight(param, chosen, self.failures[0].crash))
        if not columns:
            return np.zeros(0, dtype=np.intp), np.zeros((0, widest), dtype=bool), np.zeros(0)
        return np.array(columns), np.array(masks), np.array(weights)


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
