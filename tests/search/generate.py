"""Random tuning tables, to test the robustness of a strategy.

    table = random_table(seed)     # the same seed gives the same table

Parameters, effects, interactions, crash rules, the baseline's quality, latency limits and the curve over the load are
drawn at random; the optimum of some tables lies in a region that seems to crash.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

from tests.search.tables import Table

MOST_SERVERS = 4000
# Bands of the share of configurations that crash; each table is drawn from one.
SHARES = [(0.02, 0.15), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.85)]
# Stage -> seconds until it crashes, for a launch of 360 s (scaled to the table's own launch).
STAGES = {"nccl_init": 60, "load": 200, "kv_alloc": 220, "graph_capture": 300, "warmup": 330}


def random_table(seed: int) -> Table:
    """A table in which the baseline serves and the optimum beats it or equals it. Deterministic by seed."""
    share = random.Random(f"table/{seed}").choice(SHARES)
    for attempt in itertools.count():
        table = _draw(random.Random(f"table/{seed}/{attempt}"), f"random_{seed}", *share)
        if table is not None:
            return table
    raise AssertionError("unreachable")


def _draw(rng: random.Random, name: str, lowest: float, highest: float) -> Table | None:
    params = _params(rng)
    levels = rng.choice([[1, 8, 32, 64], [8, 32, 64, 128], [1, 8, 32, 64, 128], [1, 8, 32, 64, 128, 256], [4, 16, 64]])
    strength = rng.choice([0.04, 0.08, 0.15])
    written = rng.random() < 0.5
    rates = _few_factors(rng, params, levels) if written else _factors(rng, params, levels, strength)
    watts = _few_factors(rng, params, levels)[:2] if written else _factors(rng, params, levels, strength / 4, 0.4)
    spec: dict[str, Any] = {
        "name": name, "client_params": ["concurrency"], "params": {**params, "concurrency": levels},
        "baseline": {}, "launch_s": rng.choice([40, 90, 180, 300, 540, 900]), "measure_s": rng.choice([20, 30, 45, 60]),
        "noise_cv": rng.choice([0.004, 0.01, 0.015, 0.03]),
        "tokens_per_s": {"by_concurrency": _curve(rng, levels), "factors": rates},
        "watts": {"by_concurrency": _watts(rng, levels), "factors": watts},
        "crashes": [],
    }
    trap = rng.random() < 0.3
    if trap:
        _set_trap(rng, spec, params)
    _add_crashes(rng, spec, params, levels, lowest)
    table = Table(spec)
    if not lowest <= table.crash_share <= highest:
        return None
    return _with_baseline_and_limit(rng, table, trap)


def _params(rng: random.Random) -> dict[str, list[Any]]:
    while True:
        params: dict[str, list[Any]] = {}
        for i in range(rng.randint(3, 9)):
            kind = rng.choice(["switch", "modes", "ordered"])
            count = rng.randint(2, 6)
            if kind == "switch":
                params[f"switch{i}"] = [False, True]
            elif kind == "modes":
                params[f"mode{i}"] = [f"m{k}" for k in range(count)]
            else:
                params[f"level{i}"] = [2 ** k for k in range(1, count + 1)]
        if 12 <= math.prod(len(c) for c in params.values()) <= MOST_SERVERS:
            return params


def _curve(rng: random.Random, levels: list[int]) -> dict[int, float]:
    single, half = rng.uniform(50, 300), rng.choice([8, 30, 100])
    rates = {c: single * c / (1 + c / half) for c in levels}
    if rng.random() < 0.25:
        rates[levels[-1]] *= rng.uniform(0.6, 0.95)
    return {c: round(r, 2) for c, r in rates.items()}


def _watts(rng: random.Random, levels: list[int]) -> dict[int, float]:
    idle, rise = rng.uniform(400, 2500), rng.uniform(0.05, 0.5)
    return {c: round(idle * (1 + rise * i / (len(levels) - 1)), 1) for i, c in enumerate(levels)}


def _effect(rng: random.Random, strength: float) -> float:
    return round(math.exp(rng.gauss(0, strength * (3 if rng.random() < 0.12 else 1))), 4)


def _factors(rng: random.Random, params: dict[str, list[Any]], levels: list[int], strength: float,
             share: float = 0.75) -> list[dict[str, Any]]:
    factors: list[dict[str, Any]] = []
    for name, choices in params.items():
        if rng.random() > share:
            continue
        if name.startswith("level"):  # ordered: a hump somewhere
            peak, width = rng.uniform(-0.5, len(choices) - 0.5), strength * rng.uniform(0.3, 1.5)
            times = [math.exp(-width * ((i - peak) / len(choices) * 3) ** 2) for i in range(len(choices))]
            factors += [{"when": {name: c}, "times": round(t, 4)} for c, t in zip(choices, times, strict=True)]
        else:
            factors += [{"when": {name: c}, "times": _effect(rng, strength)} for c in choices if rng.random() < 0.7]
    for _ in range(rng.randint(0, 2 * len(params)) if share > 0.5 else 0):
        when = _conjunction(rng, params, rng.choice([1, 2, 2, 3]))
        if len(when) == 1 or rng.random() < 0.3:
            cut = rng.randint(1, len(levels) - 1)
            when["concurrency"] = levels[cut:] if rng.random() < 0.7 else levels[:cut]
        factors.append({"when": when, "times": _effect(rng, strength * 0.8)})
    return factors


def _few_factors(rng: random.Random, params: dict[str, list[Any]], levels: list[int]) -> list[dict[str, Any]]:
    """Factors of a hand-written table: round figures, most choices neutral, one or two important parameters."""
    factors: list[dict[str, Any]] = []
    leads = set(rng.sample(sorted(params), rng.choice([1, 1, 2])))
    for name, choices in params.items():
        for choice in choices[1:] if rng.random() < 0.7 else choices[:-1]:
            if rng.random() < 0.55:
                times = rng.uniform(0.7, 1.4) if name in leads else rng.uniform(0.85, 1.08)
                factors.append({"when": {name: choice}, "times": round(times, 2)})
    for _ in range(rng.randint(1, 6)):
        when = _conjunction(rng, params, rng.choice([1, 1, 2]))
        if len(when) == 1 or rng.random() < 0.4:
            cut = rng.randint(1, len(levels) - 1)
            when["concurrency"] = levels[cut:] if rng.random() < 0.6 else levels[:cut]
        factors.append({"when": when, "times": round(rng.uniform(0.8, 1.2), 2)})
    rng.shuffle(factors)
    return factors


def _conjunction(rng: random.Random, params: dict[str, list[Any]], order: int) -> dict[str, Any]:
    names = rng.sample(sorted(params), min(order, len(params)))
    when: dict[str, Any] = {}
    for name in names:
        choices = params[name]
        if len(choices) > 3 and rng.random() < 0.25:
            cut = rng.randint(1, len(choices) - 1)
            when[name] = choices[cut:]
        else:
            when[name] = rng.choice(choices)
    return when


def _set_trap(rng: random.Random, spec: dict[str, Any], params: dict[str, list[Any]]) -> None:
    """The best choice of one parameter crashes together with one or two common choices of others."""
    star = rng.choice(sorted(params))
    choice = rng.choice(params[star])
    spec["tokens_per_s"]["factors"].append({"when": {star: choice}, "times": round(rng.uniform(1.15, 1.5), 3)})
    others = [n for n in sorted(params) if n != star]
    for other in rng.sample(others, min(len(others), rng.choice([1, 1, 2]))):
        spec["crashes"].append({"when": {star: choice, other: rng.choice(params[other])}})
    spec["trap"] = {star: choice}


def _add_crashes(rng: random.Random, spec: dict[str, Any], params: dict[str, list[Any]], levels: list[int],
                 lowest: float) -> None:
    while len(spec["crashes"]) < 8:
        if spec["crashes"] and Table(spec).crash_share >= lowest and rng.random() < 0.6:
            break
        spec["crashes"].append({"when": _conjunction(rng, params, rng.choice([1, 1, 2, 2, 3]))})
    if rng.random() < 0.5:
        when = _conjunction(rng, params, 1) if rng.random() < 0.8 else {}
        cut = rng.randint(len(levels) // 2, len(levels) - 1)
        spec["crashes"].append({"when": {**when, "concurrency": levels[cut:]}, "stage": "serving"})
    if rng.random() < 0.3:
        spec["crashes"].append({"when": _conjunction(rng, params, 1), "probability": rng.choice([0.1, 0.2, 0.4])})
    rng.shuffle(spec["crashes"])
    logs = [f"log{i}" for i in range(len(spec["crashes"]))]
    if rng.random() < 0.3:  # one message for several faults
        logs = [rng.choice(logs) for _ in logs]
    for rule, log in zip(spec["crashes"], logs, strict=True):
        stage = rule.setdefault("stage", rng.choice(list(STAGES)))
        rule["log"] = log
        rule["after_s"] = 0 if stage == "serving" else round(STAGES[stage] / 360 * spec["launch_s"], 1)


def _with_baseline_and_limit(rng: random.Random, table: Table, trap: bool) -> Table | None:
    spec = dict(table.spec)
    if rng.random() < 0.6:
        config, _ = table.optimum
        spec["slo"] = {"tpot_ms": round(table.tpot_ms(config, table.rate(config)) * rng.choice([0.4, 0.7, 0.9, 2]), 3)}
        table = Table(spec)
    best, value = table.optimum
    if not math.isfinite(value) or (trap and any(best[k] != v for k, v in spec["trap"].items())):
        return None
    spec.pop("trap", None)
    kind = rng.choice(["near", "average", "average", "poor"])
    low, high = {"near": (0.9, 1.0), "average": (0.6, 0.92), "poor": (0.3, 0.7)}[kind]
    for _ in range(300):
        config = {name: rng.choice(choices) for name, choices in table.params.items()}
        if kind == "near":
            keep = rng.sample(sorted(best), max(1, len(best) - 2))
            config.update({k: best[k] for k in keep})
        if low <= table.true_value(config) / value <= high and not table.crash_rule(config, lambda _: 0.0):
            spec["baseline"] = config
            return Table(spec)
    return None
