"""Predicted objective of unmeasured configurations: a Gaussian process on its logarithm, with a prior mean.

The log of the objective is a constant plus a curve over the load, an effect of each server parameter, and effects of
pairs of parameters and of a parameter under a load (ANOVA kernel: Durrande et al., "ANOVA kernels and RKHS of zero mean
functions", 2013). A small grid of strengths of effects is weighed by marginal likelihood (Rasmussen and Williams 2006,
eq. 5.8). Limits (log of measured / limit) share the kernel, because they follow the same throughput.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.records import Config, exact
from autotune.search.grid import Codes, Floats, Grid, Mask
from autotune.space.space import Param

OVERALL = 1.0  # sd of the unknown level after centring
LOAD = 0.8  # sd of the curve over the load
# (sd of a parameter's effects, share of parameters)
STRENGTHS = ((0.005, 0.1), (0.02, 0.25), (0.07, 0.35), (0.2, 0.25), (0.4, 0.05))
# (variance of a pair's effect as a share of the product of the parameters' sds, prior probability)
PAIRS = ((0.03, 0.6), (0.12, 0.3), (0.5, 0.1))
UNDER_LOAD = (0.05, 0.3)  # variance of a parameter's effect under one load, as a share of its own variance
FLAT, NOTHING = 0.1, 0.001  # prior probability that no server choice matters, and the sd of effects then
RESIDUALS = ((0.003, 0.3), (0.02, 0.7))  # (sd of the term of one server part, prior probability)
OPTIONS = list(itertools.product((share for share, _ in PAIRS), UNDER_LOAD, (sd for sd, _ in RESIDUALS)))
OPTION_WEIGHTS = np.array([weight * other for _, weight in PAIRS for _ in UNDER_LOAD for _, other in RESIDUALS])
UNSEEN = 2.0  # least variance of the effect of an unmeasured choice, as a share of the mean variance of effects
SHARED = 4.0  # weight of STRENGTHS' shares, in parameters: those that were measured correct it
LEAST_WEIGHT = 0.03
CANDIDATES = 4  # kept strengths of interactions with at least LEAST_WEIGHT
SWEEPS = 2
# (sd of the effects of one pair of parameters, or of a parameter under a load, prior probability that it is so strong)
STRONG = ((0.1, 0.02), (0.3, 0.02), (0.8, 0.01))
MOST_STRONG, TRIED = 3, 3  # strong interactions of one study; candidates that are weighed


Strong = tuple[int, int, float]  # column, other column or -1 for the load, variance of their interaction


class Strengths(NamedTuple):
    """Strengths of effects; variances are those of logs."""

    variance: Floats  # (P,) of each parameter's effects
    share: tuple[float, float, float]  # of pairs, of a parameter under one load, and the sd of one server part
    new: float  # least variance of the effect of an unmeasured choice
    strong: tuple[Strong, ...] = ()


class Data(NamedTuple):
    """rows: (n, P) server codes; loads: (n,) indices of load parts; y: (n, 1 + limits) logs; noise: (n,) sd."""

    rows: Codes
    loads: NDArray[np.intp]
    y: Floats
    noise: Floats


class Prediction(NamedTuple):
    """(n, L) mean and sd of the log objective, and (k, n, L) mean log ratio of each limit, with the same sd."""

    mean: Floats
    sd: Floats
    ratios: Floats


class ValueModel:
    """Gaussian process; `fit` is a pure function of its arguments and the prior."""

    def __init__(self, grid: Grid, prior: Prior) -> None:
        self.grid, self.prior = grid, prior
        self.server_tables = [_likeness(p) * np.outer(scale, scale)
                              for p, scale in zip(grid.server_params, prior.scales, strict=True)]
        self.load_tables = [_likeness(p, smooth=0.9) for p in grid.load_params]
        self._naming = np.random.default_rng(0).integers(1, 2 ** 40, size=grid.width)

    def fit(self, data: Data, strengths: Strengths) -> Posterior:
        """Posterior for given strengths of effects."""
        base, loaded = self.kernel(data.rows, data.rows, strengths)
        k = base + self.load_likeness(data.loads, data.loads) * loaded + np.diag(data.noise ** 2)
        return Posterior(self, data, strengths, k)

    def strengths(self, data: Data) -> list[tuple[float, Strengths]]:
        """(weight, strengths), likeliest first, with weights that add up to 1.

        Marginal likelihood weighs one parameter after the other. Interactions keep several candidates, because few
        measurements say little about them. The trust in past studies is set in the same way.
        """
        rows, loads, noise = data.rows, data.loads, data.noise
        y = self._rest(data, self.prior.trust)
        like = [table[rows[:, i]][:, rows[:, i]] for i, table in enumerate(self.server_tables)]
        v = self.load_likeness(loads, loads)
        same = self._same(rows, rows)
        loss = self.prior.loss(rows)
        known = np.diag(noise ** 2) + OVERALL ** 2 + np.outer(loss, loss)
        strengths = np.array([s for s, _ in STRENGTHS])
        usual = np.array([w for _, w in STRENGTHS])
        variance = np.full(len(like), float((usual * strengths ** 2).sum()))
        learned = np.zeros((len(like), len(usual)))  # shares that each parameter's measurements give
        share, weights = OPTIONS[0], np.ones(len(OPTIONS))
        k = known[None]
        strong: list[Strong] = []
        for _ in range(SWEEPS):
            extra = _strong(strong, like, v)
            fixed = known + extra + share[2] ** 2 * same
            for i, u in enumerate(like):
                others = [j for j in range(len(like)) if j != i]
                first, linear, pairs = _sums(variance[others], [like[j] for j in others], u.shape)
                g = strengths[:, None, None]
                singles = first + g ** 2 * u
                pairs = pairs + g * u * linear
                shares = SHARED * usual + learned.sum(axis=0) - learned[i]
                weight = _weights(np.log(shares / shares.sum()) + _evidence(fixed + singles + share[0] * pairs
                                                    + v * (LOAD ** 2 + share[1] * singles), y))
                variance[i] = float((weight * strengths ** 2).sum())
                learned[i] = weight * bool(np.ptp(u))
            first, _, pairs = _sums(variance, like, v.shape)
            k = np.asarray([known + r ** 2 * same + first + a * pairs + v * (LOAD ** 2 + b * first)
                            for a, b, r in OPTIONS])
            weights = _weights(np.log(OPTION_WEIGHTS) + _evidence(k + extra, y))
            share = OPTIONS[int(np.argmax(weights))]
            strong = _find_strong(k[int(np.argmax(weights))], like, v, y)
        k += _strong(strong, like, v)
        shares = SHARED * usual + learned.sum(axis=0)
        new = UNSEEN * float((shares * strengths ** 2).sum() / shares.sum())
        if self.prior.informed:
            best = k[[int(np.argmax(weights))]]
            self.prior.trust = max(TRUST, key=lambda trust: float(_evidence(best, self._rest(data, trust))[0]))
        alike = known + RESIDUALS[0][0] ** 2 * same + v * LOAD ** 2
        evidence = np.log(np.append(OPTION_WEIGHTS / OPTION_WEIGHTS.sum() * (1 - FLAT), FLAT)) + _evidence(
            np.concatenate([k, alike[None]]), y)
        total = _weights(evidence)
        flat = float(total[-1])
        found = [(w * (1 - flat), s) for w, s in _kept(total[:-1], variance, new, tuple(strong))]
        if flat > LEAST_WEIGHT:
            nothing = np.full(len(like), NOTHING ** 2)
            found.append((flat, Strengths(nothing, (*OPTIONS[0][:2], RESIDUALS[0][0]), new)))
        return sorted(found, key=lambda some: -some[0])

    def usual_strengths(self) -> list[tuple[float, Strengths]]:
        """Weighted strengths before the first measurement."""
        strengths, weights = np.array(STRENGTHS).T
        variance = np.full(self.grid.width, float((weights * strengths ** 2).sum()))
        return _kept(OPTION_WEIGHTS, variance, UNSEEN * float(variance[0]))

    def kernel(self, a: Codes, b: Codes, strengths: Strengths) -> tuple[Floats, Floats]:
        """(len(a), len(b)) kernel as a part without the load and a part that multiplies the similarity of loads."""
        variance, share, _, strong = strengths
        first, linear, squares = np.zeros((3, len(a), len(b)))
        for i, table in enumerate(self.server_tables):
            u = np.take(math.sqrt(variance[i]) * table[a[:, i]], b[:, i], axis=1)
            linear += u
            first += math.sqrt(variance[i]) * u
            u *= u
            squares += u
        base = OVERALL ** 2 + share[2] ** 2 * self._same(a, b) + np.outer(self.prior.loss(a), self.prior.loss(b))
        base += first + share[0] * (linear ** 2 - squares) / 2
        loaded = LOAD ** 2 + share[1] * first
        for i, j, size in strong:
            u = size * self.server_tables[i][a[:, i]][:, b[:, i]]
            if j < 0:
                loaded += u
            else:
                base += u * self.server_tables[j][a[:, j]][:, b[:, j]]
        return base, loaded

    def spread(self, rows: Codes, strengths: Strengths) -> Floats:
        """(n,) prior variance of the log objective: the kernel of each row with itself."""
        variance, share, _, strong = strengths
        u = np.array([math.sqrt(variance[i]) * table.diagonal()[rows[:, i]]
                      for i, table in enumerate(self.server_tables)]).reshape(len(variance), len(rows))
        first = np.sqrt(variance) @ u
        pairs = (u.sum(axis=0) ** 2 - (u ** 2).sum(axis=0)) / 2
        constant = OVERALL ** 2 + share[2] ** 2 + LOAD ** 2 + self.prior.loss(rows) ** 2
        for i, j, size in strong:
            some = size * self.server_tables[i].diagonal()[rows[:, i]]
            constant += some if j < 0 else some * self.server_tables[j].diagonal()[rows[:, j]]
        return np.asarray(constant + (1 + share[1]) * first + share[0] * pairs)

    def load_likeness(self, a: NDArray[np.intp], b: NDArray[np.intp]) -> Floats:
        """(len(a), len(b)) correlation of the curve over the load between load parts."""
        out = np.ones((len(a), len(b)))
        for i, table in enumerate(self.load_tables):
            codes = self.grid.load_rows[:, i]
            out *= table[codes[a]][:, codes[b]]
        return out

    def _rest(self, data: Data, trust: float) -> Floats:
        """(n,) centred residual of the log objective after the prior mean."""
        rest = data.y[:, 0] - self.prior.mean(data.rows, trust)[np.arange(len(data.rows)), data.loads]
        return np.asarray(rest - rest.mean())

    def _same(self, a: Codes, b: Codes) -> Mask:
        """(len(a), len(b)) True for equal server parts."""
        return np.asarray(np.equal.outer(a.astype(np.int64) @ self._naming, b.astype(np.int64) @ self._naming))


class Posterior:
    """Posterior of the value model."""

    def __init__(self, model: ValueModel, data: Data, strengths: Strengths, kernel: Floats) -> None:
        self.model, self.rows, self.loads, self.strengths = model, data.rows, data.loads, strengths
        prior = model.prior.mean(data.rows)[np.arange(len(data.rows)), data.loads]
        self.centre = np.asarray(data.y.mean(axis=0), dtype=np.float64)
        self.centre[0] -= prior.mean()
        self.level = float(self.centre[0])  # mean log objective of the measurements
        rest = data.y - self.centre
        rest[:, 0] -= prior
        self.inverse: Floats = np.asarray(np.linalg.inv(np.linalg.cholesky(kernel)), dtype=np.float64)
        self.solved = self.inverse @ rest
        self._wider = [self._unseen(i) for i in range(model.grid.width)]

    def predict(self, rows: Codes) -> Prediction:
        """Prediction for the server parts `rows` (m, P) under every load part."""
        model = self.model
        every = np.arange(len(model.grid.load_rows))
        base, loaded = model.kernel(self.rows, rows, self.strengths)
        spread = model.spread(rows, self.strengths)
        v = model.load_likeness(self.loads, every)
        half = self.inverse @ base
        mean = np.empty((self.centre.size, len(rows), every.size))
        variance = np.empty(mean.shape[1:])
        for j in every:
            cross = half + (self.inverse * v[:, j]) @ loaded
            variance[:, j] = spread - np.einsum("ij,ij->j", cross, cross)
            mean[:, :, j] = self.solved.T @ cross
        mean += self.centre[:, None, None]
        mean[0] += model.prior.mean(rows)
        for i, wider in enumerate(self._wider):
            variance += wider[rows[:, i]][:, None]
        return Prediction(mean[0], np.sqrt(np.maximum(variance, 1e-10)), mean[1:])

    def _unseen(self, column: int) -> Floats:
        """(choices + 1,) extra variance of unmeasured choices, about which other choices say little.

        Zero for numeric parameters, whose neighbours are informative, and for choices with a belief.
        """
        param, scale = self.model.grid.server_params[column], self.model.prior.scales[column]
        out = np.full(len(param.choices) + 1, max(0.0, self.strengths.new - float(self.strengths.variance[column])))
        out[self.rows[:, column]] = 0.0
        out[scale != 1] = 0.0
        return out * (not param.numeric)


def _strong(strong: Iterable[Strong], like: list[Floats], v: Floats) -> Floats:
    """(n, n) kernel of strong interactions."""
    return np.asarray(sum((size * like[i] * (v if j < 0 else like[j]) for i, j, size in strong), np.zeros(v.shape)))


def _find_strong(k: Floats, like: list[Floats], v: Floats, y: Floats) -> list[Strong]:
    """Interactions that the kernel `k` lacks: each time the one whose odds against its absence are best and above 1.

    The slope of the log marginal likelihood in the variance of each (a score test: Rao 1948) selects the candidates.
    """
    found: list[Strong] = []
    open_ = [(i, j) for i in range(len(like)) for j in range(-1, i) if np.ptp(like[i]) and (j < 0 or np.ptp(like[j]))]
    prior = np.log([1 - sum(w for _, w in STRONG), *(w for _, w in STRONG)])
    sizes = np.array([0.0, *(sd ** 2 for sd, _ in STRONG)])
    while open_ and len(found) < MOST_STRONG:
        inverse = np.linalg.inv(k)
        solved = inverse @ y
        terms = np.array([like[i] * (v if j < 0 else like[j]) for i, j in open_])
        slope = solved @ terms @ solved - np.einsum("ij,pij->p", inverse, terms)
        best: tuple[float, tuple[int, int], Floats] = (0.0, (0, 0), sizes)
        for at in np.argsort(-slope / np.sqrt(np.einsum("pij,pij->p", terms, terms)))[:TRIED].tolist():
            logs = prior + _evidence(k + sizes[:, None, None] * terms[at], y)
            odds = float(np.logaddexp.reduce(logs[1:]) - logs[0])
            if odds > best[0]:
                best = odds, open_[at], _weights(logs[1:])
        if best[0] <= 0:
            break
        (i, j), size = best[1], float(best[2] @ sizes[1:])
        found.append((i, j, size))
        k = k + _strong(found[-1:], like, v)
        open_.remove((i, j))
    return found


def _kept(weights: Floats, variance: Floats, new: float,
          strong: tuple[Strong, ...] = ()) -> list[tuple[float, Strengths]]:
    """The likeliest strengths of interactions, with weights that add up to 1."""
    weights = weights / weights.sum()
    kept = sorted((some for some in zip(weights.tolist(), OPTIONS, strict=True) if some[0] > LEAST_WEIGHT),
                  reverse=True)[:CANDIDATES]
    total = sum(w for w, _ in kept)
    return [(w / total, Strengths(variance, option, new, strong)) for w, option in kept]


def _sums(variance: Floats, like: list[Floats], shape: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
    """Sums over parameters: of effects, of effects weighed by their sd, and of products of two effects."""
    first, linear, squares = np.zeros((3, *shape))
    for weight, u in zip(variance, like, strict=True):
        first += weight * u
        linear += math.sqrt(weight) * u
        squares += weight * u ** 2
    return first, linear, (linear ** 2 - squares) / 2


def _weights(logs: Floats) -> Floats:
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


def _evidence(k: Floats, y: Floats) -> Floats:
    """Log marginal likelihoods of y under each of the stacked kernels (g, n, n), up to a constant."""
    factor = np.linalg.cholesky(k)
    solved = np.linalg.solve(factor, np.broadcast_to(y[:, None], (*k.shape[:2], 1)))[..., 0]
    return np.asarray(-0.5 * (solved ** 2).sum(axis=1) - np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1))


def _likeness(param: Param, smooth: float = 0.5) -> Floats:
    """(choices + 1, choices + 1) correlation of the effects of a parameter's choices; the last one is `absent`."""
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
    """Expected improvement of a normal variable over `best` (Mockus 1978)."""
    z = (mean - best) / sd
    return (mean - best) * normal_cdf(z) + sd * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


DOWN = 0.03  # log of the expected loss of a choice without a belief against the baseline's
SIGMAS = 3.29  # width of a belief in sds: 90 % of a normal distribution
USUAL_SD = 0.15  # sd of an effect without a belief (root mean square of STRENGTHS)
NARROW = 0.2  # least sd of a believed effect, as a share of USUAL_SD
TRUST = (0.0, 0.25, 0.5, 0.75, 1.0)  # candidate shares of past studies in the prior mean


class Analytic:
    """Log factors against the baseline by a formula. `known`: columns of server parameters that change its value.

    `objective` gives a value for a server part and a load part, None where the formula does not apply: such a row
    counts like the baseline. Parameters with a stated belief are left to it.
    """

    def __init__(self, grid: Grid, objective: Callable[[Config, Config], float | None]) -> None:
        self.grid, self._objective, self._rows = grid, objective, dict[bytes, Floats]()
        self._loads = [grid.load(i) for i in range(len(grid.load_rows))]
        server, load = grid.space.split(grid.space.baseline)
        self._base = math.log(objective(server, load) or 1.0)
        self.known = [i for i, param in enumerate(grid.server_params)
                      if param.name not in grid.space.belief and param.name in server
                      and any(not np.allclose(self._row({**server, param.name: choice}), self._row(server))
                              for choice in param.choices)]
        self._fixed = {param.name: server.get(param.name) for i, param in enumerate(grid.server_params)
                       if i not in self.known}

    def effects(self, rows: Codes) -> Floats:
        """(n, L) log factors of the known parameters and of the load."""
        found = []
        for row in rows:
            key = row[self.known].tobytes()
            if key not in self._rows:
                config = {**self.grid.server(row), **self._fixed}
                self._rows[key] = self._row({name: value for name, value in config.items() if value is not None})
            found.append(self._rows[key])
        return np.array(found).reshape(len(rows), len(self._loads))

    def _row(self, server: Config) -> Floats:
        values = [self._objective(server, load) for load in self._loads]
        return np.array([0.0 if value is None else math.log(value) - self._base for value in values])


class Prior:
    """Prior mean of the log objective, and the scale of each choice's effect, from the space's `belief` and the past.

    A choice without a belief is expected slightly below the baseline's, because baselines are chosen with care.
    `past`: (n, L) log objective of server rows as past studies predict it, up to a constant. `analytic`: the same by a
    formula, which replaces the beliefs on the parameters that it knows and leaves the others.
    """

    def __init__(self, grid: Grid, past: Callable[[Codes], Floats] | None = None,
                 analytic: Analytic | None = None) -> None:
        self.grid, self.past, self.analytic = grid, past, None if past is not None else analytic
        self.trust = 0.5 if self.informed else 0.0  # share of past studies, or of the formula, in the mean
        believed = [_believed(grid, p, DOWN) for p in grid.server_params]
        self.means = [mean for mean, _ in believed]
        self.scales = [scale for _, scale in believed]  # (choices + 1,) sd of an effect over USUAL_SD
        self.losses = [np.where((scale == 1) & (mean == -DOWN), mean, 0.0) for mean, scale in believed]
        self.loads = _added([_believed(grid, p, 0.0)[0] for p in grid.load_params], grid.load_rows)

    def loss(self, rows: Codes) -> Floats:
        """(n,) part of the mean, in logs, of choices without a belief; its common factor has an sd of 1."""
        return _added(self.losses, rows)

    def mean(self, rows: Codes, trust: float | None = None) -> Floats:
        """(n, L) log of the expected factor against the baseline; `trust`, 0..1, replaces its own."""
        trust = self.trust if trust is None else trust
        believed: Floats = np.add.outer(_added(self.means, rows), self.loads)
        if trust == 0:
            return believed
        if self.past is not None:
            return trust * self.past(rows) + (1 - trust) * believed
        if self.analytic is not None:
            known = [mean if i in self.analytic.known else np.zeros_like(mean) for i, mean in enumerate(self.means)]
            return believed + trust * (self.analytic.effects(rows) - np.add.outer(_added(known, rows), self.loads))
        return believed

    @property
    def informed(self) -> bool:
        """True if there is more than beliefs, whose weight is learned."""
        return self.past is not None or self.analytic is not None


def _added(means: list[Floats], rows: Codes) -> Floats:
    """(n,) sum of the mean effects of each row's choices."""
    return np.asarray(np.sum([mean[rows[:, i]] for i, mean in enumerate(means)], axis=0) + np.zeros(len(rows)))


def _believed(grid: Grid, param: Param, down: float) -> tuple[Floats, Floats]:
    """(choices + 1,) mean and scale of each choice's log factor against the baseline's; the last one is `absent`."""
    belief = grid.space.belief.get(param.name, {})
    usual = grid.space.baseline.get(param.name)
    mean, scale = np.full(len(param.choices) + 1, -down), np.ones(len(param.choices) + 1)
    for i, choice in enumerate((*param.choices, None)):
        if exact(choice) == exact(usual):
            mean[i] = 0.0
        for other, (low, high) in belief.items():
            if choice is not None and exact(choice) == exact(other):
                mean[i] = (math.log(low) + math.log(high)) / 2
                scale[i] = max(NARROW, math.log(high / low) / SIGMAS / USUAL_SD)
    return mean, scale
