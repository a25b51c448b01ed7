"""What a study maximises: one number of a measurement, or two for a Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autotune.records import Measurement, UsageError

NAMES = ("tokens_per_joule", "tokens_per_s", "goodput_per_joule", "cost", "pareto")
UNITS = {"tokens_per_joule": "tok/J", "tokens_per_s": "tok/s", "goodput_per_joule": "good tok/J",
         "cost": "tok per unit of money"}


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective by name; larger is better in each of `parts`.

    `cost` is output tokens per unit of money at `price_per_device_hour` for `devices` devices. `pareto`
    is tokens/s against tokens per joule. Raises UsageError for an unknown name or a missing price.
    """

    name: str
    price_per_device_hour: float | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(f"objective={self.name!r} is not one of {', '.join(NAMES)}")
        if self.name == "cost" and not (self.price_per_device_hour and self.price_per_device_hour > 0):
            raise UsageError("objective=cost needs price_per_device_hour, above 0")

    @property
    def parts(self) -> tuple[str, ...]:
        """The single objectives it consists of."""
        return ("tokens_per_s", "tokens_per_joule") if self.name == "pareto" else (self.name,)

    @property
    def unit(self) -> str:
        """Unit of the first of `parts`."""
        return UNITS[self.parts[0]]

    @property
    def needs_energy(self) -> bool:
        return any(part.endswith("_per_joule") for part in self.parts)

    def without_energy(self) -> Objective:
        """The objective for a host without any meter: tokens per second in place of tokens per joule."""
        return dataclasses.replace(self, name="tokens_per_s") if self.needs_energy else self

    def values(self, measurement: Measurement) -> tuple[float, ...] | None:
        """One value for each of `parts`; None when one of them was not measured."""
        found = tuple(self._value(part, measurement) for part in self.parts)
        return None if any(v is None for v in found) else tuple(v for v in found if v is not None)

    def _value(self, part: str, m: Measurement) -> float | None:
        if part == "tokens_per_s":
            return m.tokens_per_s
        if part == "tokens_per_joule":
            return m.tokens_per_j
        if part == "goodput_per_joule":
            return m.good_tokens / m.energy.joules if m.good_tokens is not None and m.energy.joules else None
        assert self.price_per_device_hour is not None
        return m.tokens_per_s * 3600 / (self.price_per_device_hour * self.devices)


def dominates(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Whether `a` is at least as good as `b` everywhere and better somewhere."""
    return all(x >= y for x, y in zip(a, b, strict=True)) and a != b


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Indices of the points that no other dominates, in the order given; of equal points the first only."""
    return [i for i, p in enumerate(points)
            if not any(dominates(q, p) or (q == p and j < i) for j, q in enumerate(points))]
