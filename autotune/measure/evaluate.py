"""What a measurement is worth: objective, limits and validity in one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.measure.limits import Limits
from autotune.measure.objective import Objective
from autotune.records import Measurement
from autotune.storage.trial import Verdict


def doubts(objective: Objective, measured: Measurement) -> tuple[str, ...]:
    """Validity codes of a measurement: of its window, and of its energy where that is needed."""
    return (*measured.reasons, *(measured.energy.reasons if objective.needs_energy else ()))


def judge_for(objective: Objective, limits: Mapping[str, float]) -> Callable[[Measurement], Verdict]:
    """A function from measurements to verdicts. Raises UsageError for an unknown limit."""
    checked = Limits(limits)

    def judge(measured: Measurement) -> Verdict:
        value = objective.value(measured)
        reasons = (*doubts(objective, measured), *(("no_objective",) if value is None else ()))
        ratios = {name: 1 + over for name, over in checked.violations(measured).items()}
        return Verdict(value, ratios, reasons)

    return judge
