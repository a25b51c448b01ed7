"""Trials as plain data: what a measurement or crash means for the study, and how it is stored. No Optuna here."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from autotune.records import AutotuneError, Blame, Config, Crash, Measurement, Stage
from autotune.utils.files import append_line, read_plain

SEVERITY = {Stage.ARG_PARSE: 4.0, Stage.IMPORT: 4.0, Stage.DEVICE_INIT: 3.5, Stage.NCCL_INIT: 3.0, Stage.LOAD: 3.0,
            Stage.KV_ALLOC: 2.5, Stage.GRAPH_CAPTURE: 2.0, Stage.WARMUP: 1.5, Stage.SERVING: 1.0}
"""Constraint of a crash by stage: the earlier, the further from working. Unknown blame: the mildest."""
MILDEST = 0.5
ALONE, BESIDE = "alone", "beside"
"""Attribute `confirm` of the baseline's trials that tell what neighbours do to it: no measurement of the search's."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a measurement means for the study: its objective value, and measured / limit per limit.

    `value` is None when the measurement must not be compared; `reasons` then say why.
    """

    value: float | None
    ratios: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()

    @property
    def violated(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if ratio > 1)

    @property
    def feasible(self) -> bool:
        return self.value is not None and not self.reasons and not self.violated


@dataclasses.dataclass(frozen=True)
class TrialRecord:
    """One trial as the reports read it. `state` is Optuna's: COMPLETE, PRUNED, FAIL, RUNNING, WAITING."""

    number: int
    state: str
    config: Config
    value: float | None
    attrs: Mapping[str, Any]
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None

    @property
    def crashed(self) -> bool:
        return "crash_signature" in self.attrs

    @property
    def feasible(self) -> bool:
        return self.state == "COMPLETE" and bool(self.attrs.get("feasible"))

    @property
    def crashed_under_load(self) -> bool:
        """Whether a load part was being measured when it crashed. A server that died of its readiness request, or whose
        answers were wrong, had none; studies that did not store it go by the stage."""
        serving = self.crashed and self.attrs["crash_stage"] == str(Stage.SERVING)
        return self.crashed and bool(self.attrs.get("crash_under_load", serving))

    @property
    def launch_id(self) -> int | None:
        return self.attrs.get("launch_id")


def severity(crash: Crash) -> float:
    """How far a crash is from working, for samplers that grade constraints."""
    return MILDEST if crash.blame in (Blame.UNKNOWN, Blame.TRANSIENT) else SEVERITY[crash.stage]


def measurement_attrs(m: Measurement) -> dict[str, Any]:
    """A measurement as trial attributes; what is unknown is None (and then absent), never 0."""
    flat: dict[str, Any] = {
        "tokens_per_s": m.tokens_per_s, "tokens_per_j": m.tokens_per_j,
        "watts": m.energy.watts, "joules": m.energy.joules,
        "energy_source": m.energy.source, "energy_assumed": m.energy.assumed, "energy_valid": m.energy.valid,
        "energy_reasons": list(m.energy.reasons), "energy_scope": m.energy.scope,
        "energy_cross_check_j": m.energy.cross_check_j,
        "accept_length": m.accept_length, "window_s": m.window_s, "output_tokens": m.output_tokens,
        "requests": m.requests, "errors": m.errors, "prompt_tokens": m.prompt_tokens,
        "relative_error": m.relative_error, "output_agreement": m.output_agreement, "window_reasons": list(m.reasons),
        "client_cpu_share": m.client_cpu_share,
    }
    for name, p in (("ttft", m.ttft_ms), ("tpot", m.tpot_ms), ("itl", m.itl_ms), ("e2e", m.e2e_ms)):
        if p is not None:
            flat |= {f"{name}_{q}_ms": getattr(p, q) for q in ("p50", "p90", "p99", "mean")}
    return flat


def crash_attrs(crash: Crash) -> dict[str, Any]:
    """A crash as trial attributes."""
    return {
        "crash_category": crash.category, "crash_stage": str(crash.stage), "crash_blame": str(crash.blame),
        "crash_signature": crash.signature, "crash_excerpt": crash.excerpt, "crash_explanation": crash.explanation,
        "crash_next_step": crash.next_step, "crash_exit_status": crash.exit_status, "crash_after_s": crash.after_s,
    }


def crash_of(attrs: Mapping[str, Any]) -> Crash:
    """The crash that a trial's attributes describe."""
    return Crash(attrs["crash_category"], Stage.parse(attrs["crash_stage"]), Blame(attrs["crash_blame"]),
                 attrs["crash_signature"], attrs.get("crash_excerpt", ""), attrs.get("crash_explanation", ""),
                 attrs.get("crash_next_step", ""), attrs.get("crash_exit_status"), attrs.get("crash_after_s"))


class PivotFile:
    """pivots.jsonl of a study's folder, as the tuners write it that work on it one after the other or together."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def add(self, pivot: Mapping[str, Any]) -> bool:
        """Add a decision; False when the last one on its region was the same: a strategy that resumes decides again."""
        last = {json.dumps(known.get("region")): known.get("key") for known in read_pivots(self.folder)}
        if last.get(json.dumps(pivot["region"])) == pivot["key"]:
            return False
        append_line(self.folder / "pivots.jsonl", json.dumps(pivot))
        return True


def read_pivots(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The pivots written so far; lines that a kill or a full disk cut off are left out, wherever they are."""
    try:
        lines = read_plain(folder / "pivots.jsonl").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AutotuneError(f"{folder / 'pivots.jsonl'} cannot be read ({error.strerror}): remove it") from error
    pivots = []
    for line in lines:
        try:
            pivot = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(pivot, dict):
            pivots.append(pivot)
    return pivots
