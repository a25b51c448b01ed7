"""What the objective is worth where it was not measured: a Gaussian process on its logarithm.

The log of the objective is a constant, plus a curve over the load, plus an effect of each server parameter, plus
effects of pairs of parameters and of a parameter under a load (an ANOVA kernel: Durrande et al., "ANOVA kernels and
RKHS of zero mean functions", 2013). Factors multiply on real servers, hence the logarithm. Choices of a numeric
parameter that lie side by side are taken to be alike. How strong effects and interactions are is not fixed: a small
grid of strengths is weighed by marginal likelihood (Rasmussen and Williams 2006, eq. 5.8).

Limits (measured / limit, also in logs) share the kernel, since they come from the same throughput.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from autotune.records import Value
from autotune.search.grid import Codes, Grid
from autotune.space import Param

Floats = NDArray[np.float64]

OVERALL = 1.0  # sd of the unknown level, after the mean is taken out
LOAD = 0.8  # sd of the curve over the load
STRENGTHS = ((0.02, 0.3), (0.07, 0.38), (0.2, 0.26), (0.4, 0.06))
"""(sd of one parameter's effects, share of parameters that are like this)."""
PAIRS = (0.03, 0.12, 0.5)  # variance of a pair's effect, as a share of the product of the two parameters' sds
PRIOR_PAIR = (.6, .3, .1)
UNDER_LOAD = (0.05, 0.3)  # variance of a parameter's effect under one load, as a share of its own
RESIDUAL = 0.02
UNSEEN = 0.2
DOWN = 0.03
SWEEPS = 2
MOST = 400  # observations kept; beyond them the best ones and a spread of the others


Strengths = tuple[Floats, tuple[float, float]]
"""Variance of each parameter's effects, (share of pairs, share under a load)."""


@dataclasses.dataclass(frozen=True)
class Data:
    """rows: (n, P) server codes; loads: (n,) rows of grid.load_rows; y: (n, 1 + limits) logs; noise: (n,) sd."""

    rows: Codes
    loads: NDArray[np.intp]
    y: Floats
    noise: Floats


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Over (servers, loads): mean and sd of the log objective, and mean of the log ratio of each limit (k, n, L).

    The sd of a ratio is taken to be the objective's.
    """

    mean: Floats
    sd: Floats
    ratios: Floats


class ValueModel:
    """The posterior given observations. `fit` is a pure function of its arguments."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.server_tables = [_likeness(p) for p in grid.server_params]
        self.load_tables = [_likeness(p, smooth=0.9) for p in grid.load_params]
        self.server_means = [_means(p, grid.space.baseline.get(p.name)) for p in grid.server_params]

        self.naming = np.random.default_rng(0).integers(1, 2 ** 40, size=grid.width)

    def prior(self, rows: Codes) -> Floats:
        """(n,) prior mean of the log objective of server parts, relative to the baseline."""
        return _sum([means[rows[:, i]] for i, means in enumerate(self.server_means)], np.zeros(len(rows)))

    def fit(self, data: Data, strengths: Strengths) -> Posterior:
        """The posterior, given how strong effects are."""
        centre = np.asarray(data.y.mean(axis=0), dtype=np.float64)
        prior = self.prior(data.rows)
        centre[0] -= prior.mean()
        base, loaded = self.kernel(data.rows, data.rows, *strengths)
        k = base + self._load_likeness(data.loads, data.loads) * loaded + np.diag(data.noise ** 2)
        return Posterior(self, data, centre, prior, strengths, np.linalg.cholesky(k))

    def strengths(self, data: Data) -> Strengths:
        """How strong effects are: weighed, one parameter after the other, by marginal likelihood."""
        rows, loads = data.rows, data.loads
        y, noise = data.y[:, 0] - self.prior(rows), data.noise
        y = y - y.mean()
        like = [table[rows[:, i]][:, rows[:, i]] for i, table in enumerate(self.server_tables)]
        v = self._load_likeness(loads, loads)
        diagonal = RESIDUAL ** 2 * (self._names(rows)[:, None] == self._names(rows)[None, :]) + np.diag(noise ** 2)
        strengths, prior = np.array([s for s, _ in STRENGTHS]), np.log([w for _, w in STRENGTHS])
        variance = np.full(len(like), float((np.exp(prior) * strengths ** 2).sum()))
        share = (PAIRS[0], UNDER_LOAD[0])
        for _ in range(SWEEPS):
            for i, u in enumerate(like):
                others = [j for j in range(len(like)) if j != i]
                first = _sum([variance[j] * like[j] for j in others], u)
                linear = _sum([math.sqrt(variance[j]) * like[j] for j in others], u)
                squares = _sum([variance[j] * like[j] ** 2 for j in others], u)
                g = strengths[:, None, None]
                singles = first + g ** 2 * u
                pairs = (linear ** 2 - squares) / 2 + g * u * linear
                k = OVERALL ** 2 + singles + share[0] * pairs + v * (LOAD ** 2 + share[1] * singles) + diagonal
                weight = prior + _evidence(k, y)
                weight = np.exp(weight - weight.max())
                variance[i] = float((weight * strengths ** 2).sum() / weight.sum())
            first = _sum([variance[j] * u for j, u in enumerate(like)], v)
            linear = _sum([math.sqrt(variance[j]) * u for j, u in enumerate(like)], v)
            squares = _sum([variance[j] * u ** 2 for j, u in enumerate(like)], v)
            pairs = (linear ** 2 - squares) / 2
            options = list(itertools.product(PAIRS, UNDER_LOAD))
            k = np.stack([OVERALL ** 2 + first + a * pairs + v * (LOAD ** 2 + b * first) + diagonal
                          for a, b in options])
            ev = _evidence(k, y) + np.log([PRIOR_PAIR[PAIRS.index(a)] for a, _ in options])
            share = options[int(np.argmax(ev))]
        w = np.exp(ev - ev.max()); w /= w.sum()
        self.mix = sorted(zip(w.tolist(), options), reverse=True)
        return variance, share

    def kernel(self, a: Codes, b: Codes, variance: Floats, share: tuple[float, float]) -> tuple[Floats, Floats]:
        """The kernel as (part free of the load, part that multiplies the likeness of loads), each (len(a), len(b))."""
        first, linear, squares = np.zeros((3, len(a), len(b)))
        for i, table in enumerate(self.server_tables):
            u = np.take(math.sqrt(variance[i]) * table[a[:, i]], b[:, i], axis=1)
            linear += u
            first += math.sqrt(variance[i]) * u
            u *= u
            squares += u
        own = RESIDUAL ** 2 * (self._names(a)[:, None] == self._names(b)[None, :])
        return OVERALL ** 2 + own + first + share[0] * (linear ** 2 - squares) / 2, LOAD ** 2 + share[1] * first

    def _names(self, rows: Codes) -> NDArray[np.int64]:
        """(n,) equal for equal rows."""
        out: NDArray[np.int64] = rows.astype(np.int64) @ self.naming
        return out

    def _load_likeness(self, a: NDArray[np.intp], b: NDArray[np.intp]) -> Floats:
        out = np.ones((len(a), len(b)))
        for i, table in enumerate(self.load_tables):
            codes = self.grid.load_rows[:, i]
            out *= table[codes[a]][:, codes[b]]
        return out


class Posterior:
    """What is believed after the observations."""

    def __init__(self, model: ValueModel, data: Data, centre: Floats, prior: Floats, strengths: Strengths, factor: Floats) -> None:
        self.model, self.rows, self.loads, self.centre = model, data.rows, data.loads, centre
        self.variance, self.share = strengths
        self.inverse = np.linalg.inv(factor)
        rest = data.y - centre
        rest[:, 0] -= prior
        self.solved = self.inverse @ rest
        self.fresh = []
        for i, param in enumerate(model.grid.server_params):
            fresh = np.ones(len(param.choices) + 1, dtype=bool)
            fresh[data.rows[:, i]] = False
            self.fresh.append(fresh * (0.0 if param.numeric else max(0.0, UNSEEN ** 2 - float(self.variance[i]))))
        self.level = float(centre[0])
        """Mean log objective of what was measured."""

    def predict(self, rows: Codes) -> Prediction:
        """For every server part of `rows` (m, P) under every load part."""
        model = self.model
        every = np.arange(len(model.grid.load_rows))
        base, loaded = model.kernel(self.rows, rows, self.variance, self.share)
        root = np.sqrt(self.variance)
        prior = (OVERALL ** 2 + RESIDUAL ** 2 + LOAD ** 2 + (1 + self.share[1]) * self.variance.sum()
                 + self.share[0] * (root.sum() ** 2 - self.variance.sum()) / 2)
        v = model._load_likeness(self.loads, every)
        half = self.inverse @ base
        mean = np.empty((self.centre.size, len(rows), every.size))
        variance = np.empty(mean.shape[1:])
        for j in every:
            cross = half + (self.inverse * v[:, j]) @ loaded
            variance[:, j] = prior - np.einsum("ij,ij->j", cross, cross)
            mean[:, :, j] = self.solved.T @ cross
        mean += self.centre[:, None, None]
        mean[0] += model.prior(rows)[:, None]
        variance += sum(extra[rows[:, i]] for i, extra in enumerate(self.fresh))[:, None]
        return Prediction(mean[0], np.sqrt(np.maximum(variance, 1e-10)), mean[1:])


def _sum(terms: list[Floats], like: Floats) -> Floats:
    return np.sum(terms, axis=0) if terms else np.zeros_like(like)


def _evidence(k: Floats, y: Floats) -> Floats:
    """Log marginal likelihoods of y under each of the stacked kernels (g, n, n), up to a constant."""
    factor = np.linalg.cholesky(k)
    solved = np.linalg.solve(factor, np.broadcast_to(y[:, None], (*k.shape[:2], 1)))[..., 0]
    out: Floats = -0.5 * (solved ** 2).sum(axis=1) - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
    return out


def _means(param: Param, usual: Value | None) -> Floats:
    """(choices + 1,) prior mean of the log factor of each choice against the baseline's."""
    out = np.full(len(param.choices) + 1, -DOWN)
    for i, choice in enumerate((*param.choices, None)):
        if choice == usual and type(choice) is type(usual):
            out[i] = 0.0
    return out


def _likeness(param: Param, smooth: float = 0.5) -> Floats:
    """Correlation of the effects of two choices of a parameter, (choices + 1) square: the last one is `absent`."""
    n = len(param.choices) + 1
    out = np.eye(n)
    if param.numeric and n > 3:
        steps = np.subtract.outer(np.arange(n - 1), np.arange(n - 1))
        alike = np.exp(-0.5 * (steps / (1.2 if smooth < 0.8 else 1.5)) ** 2)
        out[:-1, :-1] = smooth * alike + (1 - smooth) * np.eye(n - 1)
    return out


def normal_cdf(z: Floats) -> Floats:
    """Standard normal distribution function (Abramowitz and Stegun 7.1.26, error below 1.5e-7)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 1 - 0.5 * tail * np.exp(-x * x)
    return np.where(z >= 0, upper, 1 - upper)


def expected_improvement(mean: Floats, sd: Floats, best: float | Floats) -> Floats:
    """Expected amount by which a normal exceeds `best` (Mockus 1978)."""
    z = (mean - best) / sd
    return (mean - best) * normal_cdf(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
