"""Interference between launches side by side: the baseline alone against the baseline with neighbours of its kind.

The result is the study's attribute `neighbours`. Its trials carry the attribute `confirm` (alone, beside), so that no
search learns from them.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from autotune.executors.parallel import ParallelExecutor
from autotune.records import config_key
from autotune.storage.trial import ALONE, BESIDE, TrialRecord
from autotune.tuning.loop import Tuner

ATTR = "neighbours"


def check(tuner: Tuner, executor: ParallelExecutor) -> dict[str, Any] | None:
    """Measure it once a study: alone, as many baselines as fit side by side, alone again.

    None: nothing fits beside the baseline, or it only crashed.
    """
    space, study = tuner.study.space, tuner.study
    many = min(executor.capacity, len(executor.layout.units) // executor.units(space.split(space.baseline)[0]))
    known = study.attrs().get(ATTR)
    if known is not None and known["count"] == many - 1:
        return dict(known)
    own = [r for r in study.records() if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
    if own and all(r.crashed for r in own):
        return None
    if many < 2:
        tuner.listener.note("the baseline takes all of this host: nothing was measured beside it")
        return None

    def measure(kind: str) -> TrialRecord:
        return tuner.measure(dict(space.baseline), "what neighbours do to the baseline", confirm=kind)

    tuner.listener.note(f"the baseline alone, with {many - 1} of its kind beside it, and alone again")
    alone = [measure(ALONE)]
    with executor.together(many), concurrent.futures.ThreadPoolExecutor(many, "beside") as pool:
        beside = list(pool.map(measure, [BESIDE] * many))
    alone.append(measure(ALONE))
    found = result(alone, beside, many - 1)
    study.set_attr(ATTR, found)
    tuner.listener.note(sentence(found))
    return found


def result(alone: Sequence[TrialRecord], beside: Sequence[TrialRecord], count: int) -> dict[str, Any]:
    """Plain data: values of both kinds, the trials, the relative `change` by `count` neighbours (None when either kind
    has no value), and the relative difference of the values alone."""
    values = {kind: [r.value for r in records if r.state == "COMPLETE" and r.value is not None and r.value > 0]
              for kind, records in ((ALONE, alone), (BESIDE, beside))}
    means = [geometric_mean(values[kind]) for kind in (ALONE, BESIDE) if values[kind]]
    change = means[1] / means[0] - 1 if len(means) == 2 else None
    apart = max(values[ALONE]) / min(values[ALONE]) - 1 if len(values[ALONE]) > 1 else None
    return {"count": count, **values, "change": change, "alone_apart": apart,
            "trials": [r.number for r in (*alone, *beside)]}


def sentence(found: dict[str, Any]) -> str:
    """The result for people."""
    count = found["count"]
    neighbours = f"{count} neighbour{'s' if count > 1 else ''}"
    if found["change"] is None:
        return f"the effect of {neighbours} on the baseline is not known: it could not be measured"
    less = "less" if found["change"] < 0 else "more"
    apart = "" if found["alone_apart"] is None else f" (two measurements alone are {found['alone_apart']:.1%} apart)"
    return f"with {neighbours} of its kind the baseline is worth {abs(found['change']):.1%} {less} than alone{apart}"
