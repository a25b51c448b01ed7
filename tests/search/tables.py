"""Tuning tables: a table-driven stand-in for a cluster.

    table = Table.load("b300_kimi.yaml")
    table.crash_rule(config, roll)     # the first rule that fires, or None
    table.rate(config), table.watts(config)
    table.optimum                      # (configuration, tokens per joule), free of noise

Every noise-free figure of a table is computed once, as dense arrays with one axis per parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from autotune.records import Config, Stage, UsageError, Value
from autotune.space.space import Space

Rule = Mapping[str, Any]
FloatArray = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Table:
    """One table. Configurations map every parameter to one of its choices."""

    spec: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | Path) -> Table:
        """Read and check a table. Raises OSError, or ValueError with one line."""
        try:
            spec = yaml.safe_load(Path(path).read_text())
        except yaml.YAMLError as error:
            raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from error
        check(spec)
        table = cls(spec)
        try:
            table.space  # noqa: B018 -- its checks
        except UsageError as error:
            raise ValueError(str(error)) from error
        return table

    def shuffled(self, seed: int) -> Table:
        """The same table with the order of its parameters and choices drawn by `seed`."""
        rng = random.Random(f"order/{self.name}/{seed}")
        names = rng.sample(list(self.params), len(self.params))
        return Table({**self.spec, "params": {n: rng.sample(self.params[n], len(self.params[n])) for n in names}})

    @property
    def remarks(self) -> tuple[str, ...]:
        """Warnings about probable mistakes."""
        found = [f"the key {key} is not of the format: ignored" for key in self.spec if key not in KEYS]
        found += [f"the key slo.{key} is not of the format: ignored" for key in self.spec.get("slo") or {}
                  if key != "tpot_ms"]
        found += [f"client_params names {name}, which is no parameter" for name in sorted(self.client_params)
                  if name not in self.params]
        for where, rule in _rules(self.spec):
            found += [f"{where}: {name}={value!r} is not a choice, so this never matches"
                      for name, values in rule["when"].items() for value in _listed(values)
                      if value not in self.params[name]]
        if not math.isfinite(self.optimum[1]):
            found.append("no configuration works within the limits: there is no optimum, and every share is 0")
        return tuple(found)

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def params(self) -> Mapping[str, list[Value]]:
        params: Mapping[str, list[Value]] = self.spec["params"]
        return params

    @property
    def client_params(self) -> frozenset[str]:
        return frozenset(self.spec["client_params"])

    @property
    def tpot_limit_ms(self) -> float:
        return float((self.spec.get("slo") or {}).get("tpot_ms", math.inf))

    @functools.cached_property
    def space(self) -> Space:
        """The table's parameters as a space."""
        params = {name: {"choices": choices, "load": name in self.client_params}
                  for name, choices in self.params.items()}
        return Space.parse({"name": self.name, "engine": "table", "params": params,
                            "baseline": self.spec["baseline"]}, where=self.name)

    @property
    def relieves(self) -> Mapping[str, str]:
        """The resource that a server parameter relieves."""
        found: Mapping[str, str] = self.spec.get("relieves") or {}
        return found

    def short(self, config: Config) -> dict[str, float]:
        """How short a configuration's server is of each resource, 0..1: the last signal that matches."""
        return {rule["short"]: float(rule["share"]) for rule in self.spec.get("signals") or []
                if matches(rule["when"], config)}

    def with_signals(self, kind: str) -> Table:
        """The same table with its signals (`right`), without (`none`), or with other parameters named (`wrong`)."""
        if kind == "right":
            return self
        others = [name for name in self.params if name not in self.relieves and name not in self.client_params]
        named = dict(zip(others, self.relieves.values(), strict=False)) if kind == "wrong" else {}
        return Table({**self.spec, "relieves": named, "signals": self.spec.get("signals") if named else []})

    def rate(self, config: Config) -> float:
        """Output tokens per second, free of noise."""
        return float(self._rates[self._index(config)])

    def watts(self, config: Config) -> float:
        return float(self._watts[self._index(config)])

    def tpot_ms(self, config: Config, rate: float) -> float:
        """Milliseconds per output token of one request when `concurrency` requests share `rate`."""
        return 1000 * float(config["concurrency"]) / rate

    def crash_rule(self, config: Config, roll: Callable[[int], float]) -> Rule | None:
        """The first crash rule that matches and fires; `roll(i)` in [0, 1) decides flaky rule i."""
        for i, rule in enumerate(self.spec.get("crashes") or []):
            if matches(rule["when"], config) and (rule.get("probability", 1.0) >= 1 or roll(i) < rule["probability"]):
                return dict(rule)
        return None

    def true_value(self, config: Config) -> float:
        """Noise-free tokens per joule; 0 when the configuration crashes always or breaks the limit."""
        return max(0.0, float(self._values[self._index(config)]))

    @functools.cached_property
    def optimum(self) -> tuple[dict[str, Value], float]:
        """The best feasible configuration and its tokens per joule."""
        index = np.unravel_index(int(np.argmax(self._values)), self._values.shape)
        config = {name: choices[int(i)] for (name, choices), i in zip(self.params.items(), index, strict=True)}
        return config, float(self._values[index])

    @functools.cached_property
    def crash_share(self) -> float:
        """Share of all configurations that crash always."""
        return float(self._crashed.mean())

    @functools.cached_property
    def _rates(self) -> FloatArray:
        return self._product("tokens_per_s")

    @functools.cached_property
    def _watts(self) -> FloatArray:
        return self._product("watts")

    @functools.cached_property
    def _crashed(self) -> NDArray[np.bool_]:
        crashed = np.zeros(self._shape, dtype=bool)
        for rule in self.spec.get("crashes") or []:
            if rule.get("probability", 1.0) >= 1:
                crashed[self._where(rule["when"])] = True
        return crashed

    @functools.cached_property
    def _values(self) -> FloatArray:
        values = self._rates / self._watts
        concurrency = np.array(self.params["concurrency"], dtype=float)
        axis = list(self.params).index("concurrency")
        per_axis = concurrency.reshape([-1 if i == axis else 1 for i in range(len(self._shape))])
        broken = 1000 * per_axis / self._rates > self.tpot_limit_ms
        return np.where(self._crashed | broken, -np.inf, values)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(len(choices) for choices in self.params.values())

    def _product(self, quantity: str) -> FloatArray:
        table = self.spec[quantity]
        out = np.ones(self._shape)
        for level, value in table["by_concurrency"].items():
            out[self._where({"concurrency": level})] *= float(value)
        for factor in table.get("factors") or []:
            out[self._where(factor["when"])] *= factor["times"]
        return out

    def _where(self, when: Mapping[str, Any]) -> tuple[NDArray[np.intp], ...]:
        picks = [[i for i, c in enumerate(choices) if name not in when or c in _listed(when[name])]
                 for name, choices in self.params.items()]
        return np.ix_(*(np.array(p, dtype=np.intp) for p in picks))

    def _index(self, config: Config) -> tuple[int, ...]:
        return tuple(choices.index(config[name]) for name, choices in self.params.items())


KEYS = ("name", "client_params", "params", "baseline", "launch_s", "measure_s", "noise_cv", "slo", "tokens_per_s",
        "watts", "crashes", "relieves", "signals")
OPTIONAL = ("slo", "crashes", "relieves", "signals")


def check(spec: Any) -> None:
    """Raises ValueError with one line if a key is missing or a value is invalid."""
    if not isinstance(spec, dict):
        raise ValueError(f"a table is a mapping, not {type(spec).__name__}")
    missing = [key for key in KEYS if key not in spec and key not in OPTIONAL]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    params = spec["params"]
    if not isinstance(params, dict) or not all(isinstance(c, list) and c for c in params.values()):
        raise ValueError("params: every parameter needs a list of choices")
    if "concurrency" not in params:
        raise ValueError("params: concurrency is missing")
    for key in ("launch_s", "measure_s", "noise_cv"):
        _number(spec[key], key, zero=True)
    for quantity in ("tokens_per_s", "watts"):
        levels = spec[quantity].get("by_concurrency") if isinstance(spec[quantity], dict) else None
        for level in params["concurrency"]:
            if not isinstance(levels, dict) or level not in levels:
                raise ValueError(f"{quantity}.by_concurrency: {level} is missing")
            _number(levels[level], f"{quantity}.by_concurrency: {level}")
    for where, rule in _rules(spec):
        if not isinstance(rule, dict) or not isinstance(rule.get("when"), dict):
            raise ValueError(f"{where}: when is missing")
        unknown = sorted(set(rule["when"]) - set(params))
        if unknown:
            raise ValueError(f"{where}: a rule names the unknown parameter {', '.join(unknown)}")
        if where.startswith("crashes"):
            _crash_rule(rule, where)
        elif where.startswith("signals"):
            _number(rule.get("share"), f"{where}: share", zero=True)
            if not isinstance(rule.get("short"), str) or rule["share"] > 1:
                raise ValueError(f"{where}: short is missing, or share is above 1")
        else:
            _number(rule.get("times"), f"{where}: times")


def _crash_rule(rule: Rule, where: str) -> None:
    for key in ("stage", "log"):
        if not isinstance(rule.get(key), str):
            raise ValueError(f"{where}: {key} is missing")
    try:
        stage = Stage.parse(rule["stage"])
    except ValueError as error:
        raise ValueError(f"{where}: the stage {rule['stage']} is unknown; known: {', '.join(Stage)}") from error
    if stage is not Stage.SERVING:
        _number(rule.get("after_s"), f"{where}: after_s", zero=True)
    _number(rule.get("probability", 1), f"{where}: probability", zero=True)


def _number(value: Any, where: str, zero: bool = False) -> None:
    if value is None:
        raise ValueError(f"{where} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 or zero and value == 0):
        raise ValueError(f"{where} must be a positive number, not {value!r}")


def _rules(spec: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every factor and crash rule, with its path in the file."""
    found = [(f"{quantity}.factors[{i}]", rule) for quantity in ("tokens_per_s", "watts")
             for i, rule in enumerate(spec[quantity].get("factors") or [])]
    found += [(f"signals[{i}]", rule) for i, rule in enumerate(spec.get("signals") or [])]
    return found + [(f"crashes[{i}]", rule) for i, rule in enumerate(spec.get("crashes") or [])]


def matches(when: Mapping[str, Any], config: Config) -> bool:
    """True if every parameter of `when` has (one of) the listed values."""
    return all(config[name] in _listed(value) for name, value in when.items())


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
