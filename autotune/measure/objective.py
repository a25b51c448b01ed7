"""The number that a study maximises, and the score of a measurement: objective, limits and validity."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from autotune.measure.limits import Limits
from autotune.records import Measurement, Score, UsageError

UNITS = {"tokens_per_joule": "tok/J", "tokens_per_s": "tok/s", "goodput_per_joule": "good tok/J",
         "cost": "tok per unit of money"}


@dataclasses.dataclass(frozen=True)
class Objective:
    """An objective by name; larger is better.

    `cost` is output tokens per unit of money at `price_per_device_hour` for `devices` devices.
    Raises UsageError for an unknown name or a missing price.
    """

    name: str
    price_per_device_hour: float | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        if self.name not in UNITS:
            raise UsageError(f"objective={self.name!r} is not one of {', '.join(UNITS)}")
        if self.name == "cost" and not (self.price_per_device_hour and self.price_per_device_hour > 0):
            raise UsageError("objective=cost needs price_per_device_hour, above 0")

    @property
    def unit(self) -> str:
        return UNITS[self.name]

    @property
    def needs_energy(self) -> bool:
        return self.name.endswith("_per_joule")

    def without_energy(self) -> Objective:
        """The objective on a host without any meter: tokens per second in place of tokens per joule."""
        return dataclasses.replace(self, name="tokens_per_s") if self.needs_energy else self

    def value(self, measurement: Measurement) -> float | None:
        """The objective in `unit`; None when something that it needs was not measured."""
        m = measurement
        if self.name == "tokens_per_s":
            return m.tokens_per_s
        if self.name == "tokens_per_joule":
            return m.tokens_per_j
        if self.name == "goodput_per_joule":
            return m.good_tokens / m.energy.joules if m.good_tokens is not None and m.energy.joules else None
        assert self.price_per_device_hour is not None
        return m.tokens_per_s * 3600 / (self.price_per_device_hour * self.devices)


def invalid_reasons(objective: Objective, measured: Measurement) -> tuple[str, ...]:
    """Validity codes of a measurement: of its window, and of its energy if the objective needs it."""
    return (*measured.reasons, *(measured.energy.reasons if objective.needs_energy else ()))


def evaluator(objective: Objective, limits: Mapping[str, float]) -> Callable[[Measurement], Score]:
    """A function that scores measurements. Raises UsageError for an unknown limit."""
    checked = Limits(limits)

    def evaluate(measured: Measurement) -> Score:
        value = objective.value(measured)
        reasons = (*invalid_reasons(objective, measured), *(("no_objective",) if value is None else ()))
        return Score(value, checked.ratios(measured), reasons, checked.errors(measured))

    return evaluate
