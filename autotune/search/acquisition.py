"""Expected gain and cost of each possible launch, and the choice of load parts on a live server.

Gains are natural logs of objective / best objective; a small gain is about the relative improvement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from autotune.search.crash_model import CrashModel
from autotune.search.grid import Codes, Floats, Mask
from autotune.search.observations import MOST_REPEATS, NOISE, Key, Observations
from autotune.search.transfer import Past
from autotune.search.value_model import Data, Posterior, Prediction, Prior, expected_improvement, normal_cdf

Belief = tuple[float, Posterior]  # (weight, value model)

LEAST = 1e-4  # smallest gain that justifies a measurement
BLIND_GAIN = 0.1  # expected gain of a launch before the first measurement
SURVIVED = 0.05  # load parts with a lower survival probability promise no gain
UPPER = 1.64  # sds above the mean that are still plausible (the 95 % quantile)
CRASH_WEIGHT = 0.5  # least cost of a crash as a share of a launch: it is shorter but less informative
UNTRIED = 0.99  # past studies count where the probability of no new crash cause is below this
DEFAULT_LAUNCH_S = 300.0
DEFAULT_MEASURE_S = 30.0
DEAR = 1.2  # price of a launch above which neither a merely plausible gain nor the cover of pairs is worth it
USUAL_LOADS = 2  # load parts per launch, for its expected cost


class Costs(NamedTuple):
    """Expected seconds of a successful launch, a crash, and a measurement."""

    launch_s: float
    crash_s: float
    measure_s: float

    @property
    def usual_s(self) -> float:
        """Of a successful launch with its measurements."""
        return self.launch_s + USUAL_LOADS * self.measure_s

    @classmethod
    def of(cls, memory: Observations) -> Costs:
        launch_s = float(np.mean(memory.launch_s)) if memory.launch_s else DEFAULT_LAUNCH_S
        crash_s = (sum(memory.crash_s) + 0.5 * launch_s) / (len(memory.crash_s) + 1)
        measure_s = float(np.mean(memory.measure_s)) if memory.measure_s else DEFAULT_MEASURE_S
        return cls(launch_s, crash_s, measure_s)


class Forecast(NamedTuple):
    """Forecast for n server parts and L load parts; measured and crashed ones have no gain."""

    rows: Codes  # (n, P)
    chance: Floats  # (n,) probability that the launch comes up
    serving: Floats  # (n,) probability that it then survives its safest load part with a gain
    gains: Floats  # (n, L) expected gain of a measurement on the live server
    gain: Floats  # (n,) gain of the best load part
    upper: Floats  # (n,) plausible gain (95 % quantile); 0 where the server survives hardly any load part
    upper_served: Floats  # (n,) plausible gain if the server survived every load part
    cost_s: Floats  # (n,)
    price: Floats  # (n,) factor on the least gain that justifies a launch: a dear one must gain more
    survives: Floats  # (n,) probability that it comes up and survives its safest load part

    @property
    def expected(self) -> Floats:
        """(n,) expected gain of a launch, with the crash risk included."""
        return self.gain * self.chance

    def inside(self, when: Mapping[int, tuple[int, ...]]) -> Mask:
        """(n,) True where the server part has one of the codes of each column in `when`."""
        return np.asarray(np.all([np.isin(self.rows[:, column], codes) for column, codes in when.items()], axis=0))


def forecast_launches(memory: Observations, beliefs: Sequence[Belief], crashes: CrashModel, rows: Codes,
                      best: float | None, busy: AbstractSet[Key], past: Past | None = None) -> Forecast:
    """Forecast all launches of `rows` (n, P).

    `best`: log objective of the best configuration, None if nothing feasible was measured. `beliefs`: weighted value
    models, empty before the first measurement.
    """
    allowed = memory.grid.allowed(rows)
    serving = crashes.chance_serving(rows) * allowed
    if not beliefs:
        gains = upper = np.full(serving.shape, BLIND_GAIN)
    else:
        level = best if best is not None else beliefs[0][1].level - 1.0
        gains, upper = np.zeros((2, *serving.shape))
        for weight, posterior in beliefs:
            seen = posterior.predict(rows)
            some = weight * expected_improvement(seen.mean, seen.sd, level)
            high = np.maximum(seen.mean + UPPER * seen.sd - level, 0.0)
            for ratio in seen.ratios:
                some = some * normal_cdf(-ratio / seen.sd)
                high = high * (ratio < UPPER * seen.sd)
            gains, upper = gains + some, np.maximum(upper, high)
    gains, upper = gains * serving, upper * allowed
    chance = crashes.chance(rows)
    again = repeats(memory, beliefs) if beliefs else {}
    for i, key in enumerate(map(tuple, rows.tolist())):
        server = memory.servers.get(key)
        if key in busy or (server is not None and memory.dead(server, float(chance[i]))):
            gains[i] = upper[i] = 0.0
        elif server is not None:
            gone = sorted(memory.settled(server))
            gains[i, gone] = [again.get((key, load), 0.0) for load in gone]
            upper[i, gone] = 0.0
    costs = Costs.of(memory)
    if past is not None:
        unseen = crashes.unseen(rows)
        combined = np.where(unseen < UNTRIED, past.chance(rows), unseen)
        chance = chance * (combined / unseen) ** past.trust_in_crashes(memory)
    usual_s = costs.usual_s
    crash_s = np.maximum(CRASH_WEIGHT * costs.launch_s, crashes.crash_cost_s(rows, costs.crash_s))
    cost_s = chance * usual_s + (1 - chance) * crash_s
    price = np.maximum(1.0, cost_s / usual_s)
    survived, hopeful = upper * (serving > SURVIVED), serving * (upper > 0)
    return Forecast(rows, chance, hopeful.max(axis=1), gains, gains.max(axis=1), survived.max(axis=1),
                    upper.max(axis=1), cost_s, price,
                    chance * serving.max(axis=1))


CHEAP = 0.25  # most expensive exploratory measurement, as a share of a launch's time
SAFE = 0.9  # least survival probability of an exploratory measurement


def mixed(beliefs: Sequence[Belief], rows: Codes) -> Prediction:
    """Mean and sd of the weighted value models together."""
    seen = [posterior.predict(rows) for _, posterior in beliefs]
    weights = np.array([weight for weight, _ in beliefs])
    mean = np.tensordot(weights, np.array([s.mean for s in seen]), 1)
    square = np.tensordot(weights, np.array([s.sd ** 2 + s.mean ** 2 for s in seen]), 1)
    ratios = np.tensordot(weights, np.array([s.ratios for s in seen]), 1)
    return Prediction(mean, np.sqrt(np.maximum(square - mean ** 2, 1e-10)), ratios)


def repeats(memory: Observations, beliefs: Sequence[Belief]) -> dict[tuple[Key, int], float]:
    """Worth of measuring leading configurations again, by server and load part, for the choice of the winner.

    Knowledge gradient for one normal among known ones (Frazier, Powell and Dayanik 2009).
    """
    feasible = memory.leading()
    if len(feasible) < 2:
        return {}
    seen = mixed(beliefs, np.array([k for k, _ in feasible], dtype=np.int16))
    at = np.arange(len(feasible)), np.array([load for _, load in feasible], dtype=np.intp)
    mean, sd = seen.mean[at], seen.sd[at]
    again = [memory.servers[k].values[load] for k, load in feasible]
    noise = np.array([some[-1].relative_noise or NOISE for some in again])
    second, first = np.sort(mean)[-2:]
    rival = np.where(mean == first, second, first)
    worth = expected_improvement(-np.abs(mean - rival), np.maximum(sd ** 2 / np.hypot(sd, noise), 1e-9), 0.0)
    return {k: float(w) for k, w, some in zip(feasible, worth, again, strict=True) if len(some) < MOST_REPEATS}


def unfamiliar(memory: Observations, crashes: CrashModel, posterior: Posterior, key: Key) -> int | None:
    """The most promising load part beyond the expected limits, for a server with a choice seen under one load only.

    The new choice may keep a limit that other choices break. One such measurement is made per unordered choice if it is
    cheap beside a launch; None otherwise.
    """
    costs, here, grid = Costs.of(memory), memory.servers[key], memory.grid
    if costs.measure_s > CHEAP * costs.launch_s or not here.values:
        return None
    under: dict[tuple[int, int], set[int]] = {}
    for server in memory.servers.values():
        for column, code in enumerate(server.row.tolist()):
            under.setdefault((column, code), set()).update(server.values)
    if all(len(under[i, key[i]]) > 1 for i, param in enumerate(grid.server_params) if not param.numeric):
        return None
    row = here.row[None]
    seen = posterior.predict(row)
    open_ = grid.allowed(row)[0] & (crashes.chance_serving(row)[0] >= SAFE) & (seen.ratios[:, 0] > 0).any(axis=0)
    open_[[*here.values, *here.load_crashes]] = False
    return int(np.argmax(np.where(open_, seen.mean[0], -np.inf))) if open_.any() else None


def without_choices_under_test(crashes: CrashModel, rows: Codes, worth: Floats, busy: Sequence[Key],
                               least: float) -> Floats:
    """(n,) worth with 0 for choices that pending launches try first; unchanged if nothing else is worth `least`.

    A choice that exists only together with another new choice does not count.
    """
    tested = np.zeros(len(rows), dtype=bool)
    for column, (param, seen) in enumerate(zip(crashes.grid.server_params, crashes.seen, strict=True)):
        if param.when and not seen[:-1].any():
            continue
        first = [key[column] for key in busy if key[column] < len(param.choices) and not seen[key[column]]]
        tested |= np.isin(rows[:, column], first)
    return np.where(tested, 0.0, worth) if (worth[~tested] >= least).any() else worth


def with_pending(data: Data, belief: Posterior | Prior, rows: Codes, loads: Sequence[int]) -> Data:
    """Measurements plus the pending ones at their expected values: means stay, uncertainty shrinks.

    belief: the prior before the first measurement; `data` is then ignored.
    """
    at = np.arange(len(rows)), np.array(loads, dtype=np.intp)
    if isinstance(belief, Prior):
        return Data(rows, at[1], belief.mean(rows)[at][:, None], np.full(len(rows), NOISE))
    seen = belief.predict(rows)
    y = np.stack([seen.mean[at], *(ratio[at] for ratio in seen.ratios)], axis=1)
    return Data(np.concatenate([data.rows, rows]), np.concatenate([data.loads, at[1]]), np.concatenate([data.y, y]),
                np.concatenate([data.noise, np.full(len(rows), NOISE)]))


def expected_best(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """Expected log objective of the best configuration after the pending launches.

    rows: (n, P) pending server parts; chance: (n, L) probability of a measurement under each load part.
    """
    seen = belief.predict(rows)
    kept = np.all([ratio <= 0 for ratio in seen.ratios], axis=0)
    return best + float((chance * kept * np.maximum(seen.mean - best, 0.0)).max(initial=0.0))


def chance_to_stay_best(best: float, belief: Posterior, rows: Codes, chance: Floats) -> float:
    """Probability that no pending launch beats the best; arguments as in `expected_best`."""
    seen = belief.predict(rows)
    better = chance * normal_cdf((seen.mean - best) / seen.sd)
    for ratio in seen.ratios:
        better = better * normal_cdf(-ratio / seen.sd)
    return float(np.prod(1 - better.max(axis=1)))


def best_configuration(memory: Observations, beliefs: Sequence[Belief]) -> tuple[Key, int, float] | None:
    """(server, load, log objective) of the best feasible configuration, None without any.

    Its score is mean minus sd, plus the log probability that it keeps the limits: a mean alone would prefer a lucky
    measurement to a repeated one.
    """
    feasible = memory.leading()
    if not feasible:
        return None
    keys = list(dict.fromkeys(key for key, _ in feasible))
    seen = mixed(beliefs, np.array(keys, dtype=np.int16))
    scored = []
    for key, load in feasible:
        ratios, noise = memory.ratios(key, load)
        kept = float(np.prod(normal_cdf(-ratios / noise)))
        at = keys.index(key), load
        value = float(seen.mean[at])
        scored.append((value - float(seen.sd[at]) + math.log(max(kept, 1e-9)), key, load, value))
    return max(scored, key=lambda some: some[0])[1:]
