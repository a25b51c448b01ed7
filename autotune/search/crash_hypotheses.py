"""Hypotheses about the cause of a group of crashes: single choices, pairs or triples, each with a probability.

A hypothesis must cover all crashes of its group. Its weight depends on how common causes of its size are, on the words
of the crash, and on launches that passed with the same choices: one pass refutes a cause that always fails and weakens
a flaky one. Several choices of one parameter may form one hypothesis.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Crash, Stage, Value
from autotune.search.grid import Codes, Floats, Grid
from autotune.space.space import Param

# Relative prior probability that a given single choice, pair or triple is the cause of a crash; for crashes blamed on
# the environment, the cause is nearly always one feature that the host lacks.
COMMON = (0.15, 0.02, 0.003)
ENVIRONMENT = (0.5, 0.01, 0.001)
SELF_ONLY = 0.004  # probability that only the whole configuration explains a crash
SEVERAL = 0.3  # factor for each further choice of a parameter in one hypothesis
ALWAYS = ((1.0, 0.85), (0.5, 0.1), (0.15, 0.05))  # (crash rate of a faulty configuration, share of such faults)
KEPT = 150  # hypotheses kept for a group


class Failure(NamedTuple):
    """One crash as (D,) server and load codes; load codes are -1 without a load part."""

    row: Codes
    crash: Crash
    trial: int | None
    loaded: bool  # crashed under a load part, not at its start or readiness request


class Culprit(NamedTuple):
    """A set of choices that may explain the crashes of one signature, with its probability."""

    when: Mapping[str, tuple[Value, ...]]
    probability: float
    signature: str
    trials: tuple[int, ...]


class Group:
    """Crashes with one cause, and the weighted hypotheses about it."""

    def __init__(self, grid: Grid, failures: Sequence[Failure], passed: Codes) -> None:
        self.grid, self.failures = grid, tuple(failures)
        self.loaded = any(f.loaded for f in failures)
        self.columns = len(grid.params) if self.loaded else grid.width
        rows = np.array([f.row[:self.columns] for f in failures])
        self.atom_column, self.atom_mask, atom_weight = self._atoms(rows)
        hits = self._hits(passed[:, :self.columns])
        self.own = np.array(sorted({tuple(row) for row in rows.tolist()}), dtype=np.int16)
        crashes = len(self.own)
        likelihood, rates = _strikes(crashes, len(passed)), _strikes(crashes + 1, len(passed))
        common = ENVIRONMENT if all(f.crash.blame is Blame.ENVIRONMENT for f in failures) else COMMON
        sets = _combinations(tuple(self.atom_column))
        weights, counts = [], []
        for order, index in enumerate(sets):
            counts.append(hits[index].all(axis=1).sum(axis=1))
            weights.append(common[order] * atom_weight[index].prod(axis=1))
        every = np.concatenate([*weights, [SELF_ONLY if crashes == 1 else 0.0]])
        count = np.concatenate([*counts, [0]])
        joint = every * likelihood[count]
        # probability of these crashes and passes over all hypotheses, not normalised over groupings
        self.evidence = float(joint.sum())
        best = np.argsort(-joint)[:KEPT]
        best = best[joint[best] > 1e-4 * joint[best[0]]]
        self.weights: Floats = joint[best] / max(self.evidence, 1e-300)
        self.rate: Floats = (rates[count] / np.maximum(likelihood[count], 1e-300))[best]
        ends = np.cumsum([0, *map(len, sets)])
        self.hypotheses: list[tuple[int, ...]] = []  # indices of atoms; none: the whole configuration
        for i in best.tolist():
            order = int(np.searchsorted(ends, i, side="right")) - 1
            self.hypotheses.append(tuple(sets[order][i - ends[order]].tolist()) if order < 3 else ())

    def chance_to_hit(self, rows: Codes) -> Floats:
        """(n,) probability that the cause is present in each row and makes it crash."""
        out: Floats = (self.weights * self.rate) @ self._presence(rows)
        return np.minimum(out, 1.0)

    def part(self, column: int, code: int) -> float:
        """Probability that a choice is part of the cause."""
        if not (self.own[:, column] == code).any():
            return 0.0
        return float(sum(w for atoms, w in zip(self.hypotheses, self.weights, strict=True)
                         if any(self.atom_column[a] == column for a in atoms)))

    def alone(self, column: int, code: int) -> float:
        """Probability that a choice alone is the cause."""
        return float(sum(w for atoms, w in zip(self.hypotheses, self.weights, strict=True)
                         if len(atoms) == 1 and self.atom_column[atoms[0]] == column
                         and self.atom_mask[atoms[0], code]))

    def culprits(self) -> list[Culprit]:
        """Hypotheses, likeliest first. An empty `when` stands for the whole configuration."""
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
        """(hypotheses, n) 1 where the hypothesis holds in the row."""
        hits = self._hits(rows[:, :self.columns])
        out = np.ones((len(self.hypotheses), len(rows)))
        for order in range(4):
            which = [i for i, atoms in enumerate(self.hypotheses) if len(atoms) == order]
            if which and order:
                out[which] = hits[np.array([self.hypotheses[i] for i in which])].all(axis=1)
            elif which:
                out[which] = (rows[:, None, :self.columns] == self.own[None]).all(axis=2).any(axis=1)
        return out

    def _hits(self, rows: Codes) -> NDArray[np.bool_]:
        """(atoms, n) True where a row has one of the atom's choices."""
        hits: NDArray[np.bool_] = self.atom_mask[np.arange(len(self.atom_mask))[:, None], rows[:, self.atom_column].T]
        return hits

    def _atoms(self, rows: Codes) -> tuple[NDArray[np.intp], NDArray[np.bool_], Floats]:
        """Conditions on one parameter that hold in every crash: its choice, or a set of choices."""
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
                    option = frozenset(range(low, high + 1))
                    options[option] = max(SEVERAL, options.get(option, 0.0))
            for option, weight in options.items():
                if len(option) < len(param.choices) + bool(param.when):
                    columns.append(column)
                    masks.append([i in option for i in range(widest)])
                    chosen = tuple(c for i, c in enumerate(param.choices) if i in option)
                    weights.append(weight * word_weight(param, chosen, self.failures[0].crash))
        if not columns:
            return np.zeros(0, dtype=np.intp), np.zeros((0, widest), dtype=bool), np.zeros(0)
        return np.array(columns), np.array(masks), np.array(weights)


def _strikes(crashes: int, most: int) -> Floats:
    """(most + 1,) probability of `crashes` crashes and 0, 1, ... `most` passes of a faulty configuration."""
    passes = np.arange(most + 1)
    out: Floats = np.sum([share * rate ** crashes * (1 - rate) ** passes for rate, share in ALWAYS], axis=0)
    return out


@functools.lru_cache(maxsize=512)
def _combinations(columns: tuple[int, ...]) -> tuple[NDArray[np.intp], ...]:
    """Indices of one, two and three atoms on different columns: shapes (n1, 1), (n2, 2), (n3, 3)."""
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


NAMED = 8.0  # factor for a parameter that the words or the stage of a crash name

# Words in parameter names, by the stage that they concern.
ABOUT: dict[Stage, frozenset[str]] = {
    Stage.DEVICE_INIT: frozenset({"device", "gpu", "visible", "parallel", "tp", "dp", "pp", "ep"}),
    Stage.NCCL_INIT: frozenset({"nccl", "nvls", "allreduce", "reduce", "a2a", "all2all", "comm", "p2p", "parallel",
                                "tp", "dp", "pp", "ep"}),
    Stage.LOAD: frozenset({"parallel", "tp", "dp", "pp", "ep", "quant", "quantization", "dtype", "weights", "load"}),
    Stage.KV_ALLOC: frozenset({"mem", "memory", "fraction", "kv", "cache", "context", "running", "batch"}),
    Stage.GRAPH_CAPTURE: frozenset({"graph", "graphs", "capture", "eager", "compile"}),
    Stage.WARMUP: frozenset({"backend", "attention", "kernel", "kernels", "compile", "moe"}),
    Stage.SERVING: frozenset({"concurrency", "context", "mem", "memory", "fraction", "kv", "batch", "running"}),
}

GENERIC = frozenset({"none", "auto", "true", "false", "default", "size", "enable", "disable", "max", "num", "error",
                     "the", "and", "for", "with"})


def word_weight(param: Param, choices: tuple[Value, ...], crash: Crash) -> float:
    """Prior factor of hypotheses in which `param` has one of `choices`, from the words and stage of a crash."""
    said = _words(f"{crash.category} {crash.signature} {crash.excerpt}"[:4000])
    about = bool(_words(param.name) & ABOUT.get(crash.stage, frozenset()))
    return NAMED if about or _own(param, choices) & said else 1.0


def named(param: Param, choices: tuple[Value, ...], text: str) -> bool:
    """True if a text names the parameter or one of these choices."""
    return bool(_own(param, choices) & _words(text))


def _own(param: Param, choices: tuple[Value, ...]) -> frozenset[str]:
    return (_words(param.name) | {w for c in choices if isinstance(c, str) for w in _words(c)}) - GENERIC


@functools.lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(w for w in re.split(r"[^a-z0-9]+", text.lower()) if len(w) > 1 and not w.isdigit())
