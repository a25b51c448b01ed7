"""What the replay's server does with a configuration: speed, power, crashes (table.yaml)."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from autotune.records import Config

FILE = pathlib.Path(__file__).with_name("table.yaml")


@dataclasses.dataclass(frozen=True)
class Table:
    """The figures of table.yaml; `spec` is the whole of it as plain data."""

    spec: Mapping[str, Any]

    @classmethod
    def load(cls) -> Table:
        return cls(yaml.safe_load(FILE.read_text()))

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
            when = {"concurrency": 0, **rule["when"]}
            if when.pop("concurrency") <= concurrency and matches(when, server):
                found: Mapping[str, Any] = rule
                return found
        return None


def matches(when: Mapping[str, Any], config: Config) -> bool:
    """Whether every named parameter has the value, or one of the values, of `when`."""
    return all(config.get(name) in (values if isinstance(values, list) else [values]) for name, values in when.items())


def at(curve: Mapping[int, float], concurrency: int) -> float:
    """A figure between the levels of a curve, on straight lines over the logarithms of both."""
    levels = sorted(curve)
    return float(np.exp(np.interp(np.log(max(1, concurrency)), np.log(levels), np.log([curve[n] for n in levels]))))
