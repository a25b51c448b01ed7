"""Probability that a launch works, from all launches that passed and crashed.

Crashes of one signature have one cause, a `Group` of them with weighted hypotheses: single choices, pairs or triples
that all crashes of the group have. A weight depends on how common causes of that size are, on the words of the crash,
and on launches that passed with the same choices: one pass refutes a cause that always fails and weakens a flaky one. A
group that no hypothesis explains is split. A launch works if the cause of each group is absent and no unseen cause
strikes; the risk of unseen causes grows with each choice and pair of choices that never passed.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Crash, Stage, Value
from autotune.search.grid import Codes, Floats, Grid, Mask
from autotune.space.space import Param

# Relative prior probability that one choice, a pair or a triple is the cause of a crash, shared by all that it has; for
# crashes blamed on the environment, the cause is nearly always one feature that the host lacks.
COMMON = (0.9, 0.3, 0.06)
ENVIRONMENT = (3.0, 0.15, 0.02)
LEAST_COMMON = 0.003  # usual share of one triple
SELF_ONLY = 0.004  # probability that only the whole configuration explains a crash
BY_CHANCE = 0.03  # that no choice does: the fault strikes any launch
SHARED = 0.05  # that two unrelated faults have one signature
SEVERAL = 0.3  # factor for each further choice of a parameter in one hypothesis
# (crash rate of a faulty configuration, share of such faults)
ALWAYS = ((1.0, 0.85), (0.5, 0.06), (0.3, 0.05), (0.15, 0.04))
KEPT = 150  # hypotheses kept for a group


class Failure(NamedTuple):
    """One crash as (D,) server and load codes; load codes are -1 without a load part."""

    row: Codes
    crash: Crash
    trial: int | None
    loaded: bool  # crashed under a load part, not at its start or readiness request
    cost_s: float = 0.0


class Group:
    """Crashes with one cause, and the weighted hypotheses about it."""

    def __init__(self, grid: Grid, failures: Sequence[Failure], passed: Codes) -> None:
        self.grid, self.failures = grid, tuple(failures)
        self.loaded = any(f.loaded for f in failures)
        self.columns = len(grid.params) if self.loaded else grid.width
        rows = np.array([f.row[:self.columns] for f in failures])
        self.atom_column, self.atom_mask, atom_weight = self._atoms(rows)
        self.own = np.array(sorted({tuple(row) for row in rows.tolist()}), dtype=np.int16)
        crashes = len(failures)
        likelihood, rates = _strikes(crashes, len(passed)), _strikes(crashes + 1, len(passed))
        common = [share / max(1, math.comb(self.columns, i)) for i, share in enumerate(
            ENVIRONMENT if all(f.crash.blame is Blame.ENVIRONMENT for f in failures) else COMMON, 1)]
        sets = _combinations(tuple(self.atom_column[:-2].tolist()))
        size = (sets < len(self.atom_column) - 2).sum(axis=1)
        count = self._hits(passed)[sets].all(axis=1).sum(axis=1)
        count[-1] = 0
        joint = np.array([SELF_ONLY if len(self.own) == 1 else 0.0, *common])[size] * atom_weight[sets].prod(axis=1)
        joint[-2] = BY_CHANCE
        joint = joint * likelihood[count]
        # probability of these crashes and passes over all hypotheses, not normalised over groupings
        self.evidence = float(joint.sum())
        best = np.argsort(-joint)[:KEPT]
        best = best[joint[best] > 1e-4 * joint[best[0]]]
        self.weights: Floats = joint[best] / max(self.evidence, 1e-300)
        self.rate: Floats = (rates[count] / np.maximum(likelihood[count], 1e-300))[best]
        self.hypotheses, self.size = sets[best], size[best]  # (k, 3) atoms, (k,) number of single conditions
        self.by_chance = float(self.weights[best == len(sets) - 2].sum())  # probability that no choice is the cause
        self.cost_s = float(np.mean([f.cost_s for f in failures]))

    def chance_to_hit(self, rows: Codes) -> Floats:
        """(n,) probability that the cause is present in each row and makes it crash."""
        present = self._hits(rows)[self.hypotheses].all(axis=1)
        return np.asarray(np.minimum((self.weights * self.rate) @ present.astype(np.float64), 1.0))

    def part(self, column: int, code: int) -> float:
        """Probability that a choice is part of the cause."""
        if not (self.own[:, column] == code).any():
            return 0.0
        return float(sum(self.weights[(self.atom_column[self.hypotheses] == column).any(axis=1)]))

    def alone(self, column: int, code: int) -> float:
        """Probability that a choice alone is the cause."""
        atom = self.hypotheses[:, 0]
        return float(sum(self.weights[(self.size == 1) & (self.atom_column[atom] == column)
                                      & self.atom_mask[atom, code]]))

    def _hits(self, rows: Codes) -> Mask:
        """(atoms, n) True where the atom holds in the row."""
        rows = rows[:, :self.columns]
        hits = self.atom_mask[np.arange(len(self.atom_mask))[:, None], rows[:, self.atom_column].T]
        hits[-2] = True
        hits[-1] = (rows[:, None] == self.own).all(axis=2).any(axis=1)
        return np.asarray(hits)

    def _atoms(self, rows: Codes) -> tuple[NDArray[np.intp], Mask, Floats]:
        """(column, choices, weight) of conditions on one parameter that hold in every crash.

        The last two atoms stand for no condition and for the whole configuration of a crash.
        """
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
        return np.array([*columns, -1, -1]), np.array([*masks, *[[False] * widest] * 2]), np.array([*weights, 1.0, 1.0])


def _plausibility(groups: Sequence[Group]) -> float:
    """Relative probability that the crashes of one signature have these causes."""
    return math.prod(g.evidence for g in groups) * SHARED ** (len(groups) - 1)


def _risky(param: Param, seen: Mask) -> Floats:
    """(choices + 1,) risk of each choice relative to that of a new one; less for numbers between two that came up."""
    risk = 1.0 - seen
    if param.numeric and seen[:-1].any():
        low, high = np.flatnonzero(seen[:-1])[[0, -1]]
        risk[low:high + 1] *= BETWEEN
    return np.asarray(risk)


def _strikes(crashes: int, most: int) -> Floats:
    """(most + 1,) probability of `crashes` crashes and 0, 1, ... `most` passes of a faulty configuration."""
    passes = np.arange(most + 1)
    return np.asarray(np.sum([share * rate ** crashes * (1 - rate) ** passes for rate, share in ALWAYS], axis=0))


@functools.lru_cache(maxsize=512)
def _combinations(columns: tuple[int, ...]) -> NDArray[np.intp]:
    """(n, 3) indices of one, two or three atoms on different columns; then no atom, and the whole configuration."""
    column, nothing = np.array(columns, dtype=np.intp), len(columns)
    out = []
    for order in (1, 2, 3):
        index = np.array(list(itertools.combinations(range(nothing), order)), dtype=np.intp).reshape(-1, order)
        apart = (np.diff(np.sort(column[index], axis=1), axis=1) != 0).all(axis=1)
        out.append(np.pad(index[apart], ((0, 0), (0, 3 - order)), constant_values=nothing))
    return np.concatenate([*out, [[nothing] * 3, [nothing + 1, nothing, nothing]]])


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
    names = _words(param.name) | ({"parallel"} if any(map(_layout, param.choices)) else set())
    about = bool(names & ABOUT.get(crash.stage, frozenset()))
    return NAMED if about or _own(param, choices) & said else 1.0


def _layout(choice: Value) -> bool:
    """True for a choice that names a parallel layout, such as tp8 or tp4_dp2."""
    return isinstance(choice, str) and re.match(r"(tp|dp|pp|ep)\d", choice.lower()) is not None


def named(param: Param, choices: tuple[Value, ...], text: str) -> bool:
    """True if a text names the parameter or one of these choices."""
    return bool(_own(param, choices) & _words(text))


def _own(param: Param, choices: tuple[Value, ...]) -> frozenset[str]:
    return (_words(param.name) | {w for c in choices if isinstance(c, str) for w in _words(c)}) - GENERIC


@functools.lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(w for w in re.split(r"[^a-z0-9]+", text.lower()) if len(w) > 1 and not w.isdigit())


RATE = 0.1  # prior share of faulty single choices
PAIR_RATE = 0.02  # prior share of faulty pairs
BETWEEN = 0.3  # risk of a number between two that came up, relative to another new choice
PRIOR_WEIGHT = 20.0  # weight of RATE, in tested choices
ELSE = 0.02  # probability that a new configuration crashes for another reason
UNSEEN_LOAD = 0.03  # crash probability under a load part without any measurement
SEEN_LOAD = 0.005  # crash probability under a measured load part
MANY_PASSES, AT_A_TIME = 400, 100  # most passes per group (the newest), updated in steps so that groups are reused
SUSPECTED = 0.1  # probability of chance above which repeated crashes of one signature are retried once
VARIED = 0.3  # probability that a faulty choice shows another signature the next time


class CrashModel:
    """Crash probabilities as a pure function of the passes and crashes of a study."""

    def __init__(self, grid: Grid, passed: Codes, served: Codes, failures: Sequence[Failure],
                 earlier: CrashModel | None = None) -> None:
        """passed: (n, P) server parts that came up; served: (m, D) configurations measured without a crash.

        earlier: an older model of the same study, whose unchanged groups are reused.
        """
        self.grid, self.failures = grid, tuple(failures)
        self._hit: tuple[Codes, list[tuple[Group, Floats]]] | None = None  # of the last server parts
        self._made: dict[tuple[int, ...], Group] = {}
        self._earlier: dict[tuple[int, ...], Group] = earlier._made if earlier else {}
        self.passed, self.served = passed, served
        signatures: dict[tuple[str, bool], list[Failure]] = {}
        for failure in failures:
            signatures.setdefault((failure.crash.signature, failure.loaded), []).append(failure)
        self.groups = [g for fails in signatures.values() for g in self._split(fails)]
        self._earlier = {}
        faulty = sum(float(g.weights[g.size == 1].sum()) for g in self.groups if not g.loaded)
        self.seen = [np.isin(np.arange(len(p.choices) + 1), passed[:, i]) for i, p in enumerate(grid.server_params)]
        self._risky = [_risky(p, s) for p, s in zip(grid.server_params, self.seen, strict=True)]
        tested = float(sum(s.sum() for s in self.seen)) + faulty
        self.rate = (RATE * PRIOR_WEIGHT + faulty) / (PRIOR_WEIGHT + tested)  # posterior share of faulty choices
        self.pair_rate = PAIR_RATE * self.rate / RATE
        self._paired = np.zeros(grid.pair_count, dtype=bool)
        self._paired[grid.pair_codes(passed).ravel()] = True
        self._familiar = grid.with_neighbours(self._paired)
        self._shared = self._in_several_groups()

    def chance(self, servers: Codes) -> Floats:
        """(n,) probability that each server part comes up."""
        chance = self.unseen(servers)
        for _, hit in self._hits(servers):
            chance = chance * (1 - hit)
        for column, code, factor in self._shared:
            chance = np.where(servers[:, column] == code, chance * factor, chance)
        return chance

    def crash_cost_s(self, servers: Codes, usual_s: float) -> Floats:
        """(n,) expected seconds of a crash of each server part; usual_s: of a crash for an unseen cause."""
        risk = 1 - self.unseen(servers)
        total = risk * usual_s
        for group, hit in self._hits(servers):
            risk, total = risk + hit, total + hit * group.cost_s
        return np.asarray(total / np.maximum(risk, 1e-9))

    def _hits(self, servers: Codes) -> list[tuple[Group, Floats]]:
        """Each group of failed launches, and the (n,) probability that its cause strikes each server part."""
        if self._hit is None or self._hit[0] is not servers:
            self._hit = servers, [(g, g.chance_to_hit(servers)) for g in self.groups if not g.loaded]
        return self._hit[1]

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
        singles = np.sum([self._risky[i][servers[:, i]] for i in range(self.grid.width)], axis=0)
        pairs = ~self._paired[self.grid.pair_codes(servers)]
        risk = ELSE * pairs.any(axis=1) + self.rate * singles + self.pair_rate * pairs.sum(axis=1)
        return np.asarray(np.exp(-risk))

    def new_pairs(self, servers: Codes) -> NDArray[np.intp]:
        """(n,) number of pairs of choices that never came up together, nor did their neighbours, and of new choices."""
        singles = np.sum([~seen[servers[:, i]] for i, seen in enumerate(self.seen)], axis=0)
        return np.asarray((~self._familiar[self.grid.pair_codes(servers)]).sum(axis=1) + singles)

    def new(self, servers: Codes) -> NDArray[np.intp]:
        """(n,) number of choices that never came up; choices that depend on another new choice do not count."""
        count = np.zeros(len(servers), dtype=np.intp)
        for i, (param, seen) in enumerate(zip(self.grid.server_params, self.seen, strict=True)):
            if seen[:-1].any() or not param.when:
                count += ~seen[servers[:, i]] & (servers[:, i] < len(param.choices))
        return count

    def expected(self, server: Sequence[int]) -> bool:
        """True if a crash of a server part shares its cause with crashes of others and hardly struck by chance."""
        own = tuple(server)
        return any(len(g.own) > 1 and g.by_chance < SUSPECTED and own in map(tuple, g.own.tolist())
                   for g in self.groups if not g.loaded)

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
            if group.size[0] > 1 and not group.loaded:
                when = {int(group.atom_column[a]): tuple(np.flatnonzero(group.atom_mask[a]).tolist())
                        for a in group.hypotheses[0, :group.size[0]]}
                out.append((when, float(group.weights[0])))
        return out

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
        if len(failures) == 1 or (whole.evidence > 1e-3 * LEAST_COMMON and whole.by_chance < 0.5):
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
        options = [groups, *self._apart(failures, passed)]
        best = max(options, key=_plausibility)
        return [whole] if whole.by_chance and whole.evidence > _plausibility(best) else best

    def _apart(self, failures: list[Failure], passed: Codes) -> list[list[Group]]:
        """Splits of failures into those with a choice that never passed and those without it."""
        out = []
        rows = np.array([f.row for f in failures])
        for column in range(self.grid.width):
            for code in set(rows[:, column].tolist()) - set(passed[:, column].tolist()):
                parts = [[f for f in failures if (f.row[column] == code) == inside] for inside in (True, False)]
                if min(map(len, parts)) > 0:
                    out.append([self._group(part, passed) for part in parts])
        return out

    def _group(self, failures: Sequence[Failure], passed: Codes) -> Group:
        used = len(passed)
        if used > MANY_PASSES:
            used -= used % AT_A_TIME
            passed = passed[used - MANY_PASSES:used]
        key = (used, *(id(f) for f in failures))
        if key not in self._made:
            self._made[key] = self._earlier.get(key) or Group(self.grid, failures, passed)
        return self._made[key]
