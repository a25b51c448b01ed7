"""What the replay's server does with a configuration: speed, power, crashes (table.yaml)."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from autotune.records import Config

FILE = pathlib.Path(__file__).with_name("table.yaml")


@dataclasses.dataclass(frozen=True)
class Table:
    """The figures of table.yaml; `spec` is the whole of it as plain data."""

    spec: Mapping[str, Any]

    @classmethod
    def load(cls, path: pathlib.Path = FILE) -> Table:
        import yaml

        return cls(yaml.safe_load(path.read_text(encoding="utf-8")))

    def curve(self, figure: str, server: Config) -> dict[int, float]:
        """`tokens_per_s` or `watts` of a server at every concurrency of the table."""
        part = self.spec[figure]
        found = {}
        for level, value in part["by_concurrency"].items():
            for factor in part["factors"]:
                if matches(factor["when"], {**server, "concurrency": level}):
                    value *= factor["times"]
            found[int(level)] = float(value)
        return found

    def crash(self, server: Config, concurrency: int = 0) -> Mapping[str, Any] | None:
        """The first crash rule that a server meets at its start, or under `concurrency` requests."""
        for rule in self.spec["crashes"]:
            least = rule["when"].get("concurrency", 0)
            if matches({k: v for k, v in rule["when"].items() if k != "concurrency"}, server) and least <= concurrency:
                found: Mapping[str, Any] = rule
                return found
        return None


def matches(when: Mapping[str, Any], config: Config) -> bool:
    """Whether every named parameter has the value, or one of the values, of `when`."""
    return all(config.get(name) in (values if isinstance(values, list) else [values]) for name, values in when.items())


def at(curve: Mapping[int, float], concurrency: int) -> float:
    """A figure between the levels of a curve, on straight lines over the logarithm of the concurrency."""
    levels = sorted(curve)
    if concurrency <= levels[0]:
        return curve[levels[0]]
    if concurrency >= levels[-1]:
        return curve[levels[-1]]
    above = next(level for level in levels if level >= concurrency)
    below = levels[levels.index(above) - 1]
    share = math.log(concurrency / below) / math.log(above / below)
    return curve[below] * math.pow(curve[above] / curve[below], share)
