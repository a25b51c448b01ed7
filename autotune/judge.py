"""What a measurement is worth: objective, limits and validity in one verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.history import Verdict
from autotune.measure.limits import Limits
from autotune.measure.objective import Objective
from autotune.records import Measurement


def judge_for(objective: Objective, limits: Mapping[str, float]) -> Callable[[Measurement], Verdict]:
    """A function from measurements to verdicts. Raises UsageError for an unknown limit."""
    checked = Limits(limits)

    def judge(measured: Measurement) -> Verdict:
        values = objective.values(measured)
        reasons = list(measured.reasons)
        if objective.needs_energy:
            reasons += measured.energy.reasons
        if values is None:
            reasons.append("no_objective")
        ratios = {name: 1 + over for name, over in checked.violations(measured).items()}
        return Verdict(None if values is None else values[0], ratios, tuple(reasons))

    return judge
