"""What launches side by side do to each other's measurements: the baseline alone against the baseline with neighbours.

The answer goes to the study's attribute `neighbours`. Its trials carry the attribute `confirm` (alone, beside), so that
no search learns from them.
"""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Sequence
from typing import Any

from autotune.executors.parallel import ParallelExecutor
from autotune.records import config_key
from autotune.storage.trial import ALONE, BESIDE, TrialRecord
from autotune.tuning.loop import Tuner

ATTR = "neighbours"


def check(tuner: Tuner, slots: ParallelExecutor) -> dict[str, Any] | None:
    """Measure it once a study: alone, as many baselines as fit side by side, alone again.

    None: nothing fits beside the baseline, or it only crashed.
    """
    space, study = tuner.study.space, tuner.study
    many = min(slots.at_once, len(slots.layout.units) // slots.units(space.split(space.baseline)[0]))
    known = study.attrs().get(ATTR)
    if known is not None and known["count"] == many - 1:
        return dict(known)
    own = [r for r in study.records() if config_key(r.config) == config_key(space.baseline) and r.state != "FAIL"]
    if own and all(r.crashed for r in own):
        return None
    if many < 2:
        tuner.watcher.note("the baseline takes all of this host: nothing was measured beside it")
        return None

    def one(kind: str) -> TrialRecord:
        return tuner.block(dict(space.baseline), "what neighbours do to the baseline", confirm=kind)

    tuner.watcher.note(f"the baseline alone, with {many - 1} of its kind beside it, and alone again")
    alone = [one(ALONE)]
    with slots.together(many), concurrent.futures.ThreadPoolExecutor(many, "beside") as pool:
        beside = [made.result() for made in [pool.submit(one, BESIDE) for _ in range(many)]]
    alone.append(one(ALONE))
    told = result(alone, beside, many - 1)
    study.set_attr(ATTR, told)
    tuner.watcher.note(sentence(told))
    return told


def result(alone: Sequence[TrialRecord], beside: Sequence[TrialRecord], count: int) -> dict[str, Any]:
    """Plain data: values of both kinds, the change that neighbours make (a share, None when either kind has none), how
    far the values alone are apart, and the trials."""
    values = {kind: [r.value for r in records if r.state == "COMPLETE" and r.value is not None and r.value > 0]
              for kind, records in ((ALONE, alone), (BESIDE, beside))}
    change = None
    if values[ALONE] and values[BESIDE]:
        change = math.exp(_level(values[BESIDE]) - _level(values[ALONE])) - 1
    apart = max(values[ALONE]) / min(values[ALONE]) - 1 if len(values[ALONE]) > 1 else None
    return {"count": count, **values, "change": change, "alone_apart": apart,
            "trials": [r.number for r in (*alone, *beside)]}


def sentence(told: dict[str, Any]) -> str:
    """The result for people."""
    count = told["count"]
    who = f"{count} neighbour{'s' if count > 1 else ''}"
    if told["change"] is None:
        return f"what {who} do{'es' if count == 1 else ''} to the baseline is not known: it could not be measured"
    less = "less" if told["change"] < 0 else "more"
    apart = "" if told["alone_apart"] is None else f" (two measurements alone are {told['alone_apart']:.1%} apart)"
    return f"with {who} of its kind the baseline is worth {abs(told['change']):.1%} {less} than alone{apart}"


def _level(values: Sequence[float]) -> float:
    return sum(map(math.log, values)) / len(values)
