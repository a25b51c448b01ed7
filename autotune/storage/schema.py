"""Types of everything that a study stores beside its trials, and the one line about values of other types.

Other programs may add attributes under names of their own: those are ignored.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from autotune.records import AutotuneError, Count, Number, UsageError
from autotune.utils.files import append_line, read_plain
from autotune.utils.text import SPELLED, printable
from autotune.utils.validation import from_json

REMEDY = "Restore a backup or use study.name=NAME."
Choice = str | Count | Number | bool
Choices = dict[str, Choice]
Interval = Annotated[list[Number | None], msgspec.Meta(max_length=2)]
# "baseline", a trial's number, or load-N: the baseline's server under the load of trial N
Planned = Annotated[str, msgspec.Meta(pattern=r"^(baseline|(load-)?[0-9]{1,18})\Z")]


class CorruptStudy(AutotuneError):
    """A study holds values that autotune did not write; `problem` names the first one."""

    def __init__(self, problem: str) -> None:
        self.problem = printable(problem, instead=SPELLED)
        super().__init__(f"corrupt study database: {self.problem}. {REMEDY}")


def convert(plain: Any, kind: Any, where: str) -> Any:
    """Plain data as a value of type `kind`. Raises CorruptStudy, beginning with `where`."""
    try:
        return from_json(plain, kind)
    except UsageError as error:
        raise CorruptStudy(f"{where}: {error}") from error


def _struct(name: str, optional: Mapping[Any, str], **required: Any) -> Any:
    """A type of stored data. `optional` maps types to names of fields that may be absent."""
    fields = [(field, kind, None) for kind, fields in optional.items() for field in fields.split()]
    return msgspec.defstruct(name, [*required.items(), *fields])


Identity = _struct("Identity", {
    str | None: "space space_digest engine engine_version engine_file objective", dict[str, Number] | None: "limits",
    dict[str, str] | None: "model", list[str] | None: "devices", dict[str, Any] | None: "workload",
    Count | None: "slots"})
Provenance = _struct("Provenance", {
    str | None: "autotune python engine_version driver cpu kernel command folder created",
    dict[str, str | None]: "packages", list[str]: "gpu"})
Part = _struct("Part", {Number | None: "gain", Interval | None: "interval"})
Gain = _struct("Gain", {Number | None: "gain", Interval | None: "interval", Count | None: "blocks bad",
                        Part | None: "server server_before load", bool: "tied"}, verdict=str)
Decision = _struct("Decision", {
    str | None: "method decided reason", Count | None: "winner rounds blocks", Number | None: "gain level",
    Interval | None: "interval", dict[str, Choices]: "configurations", list[Any]: "values",
    dict[str, Gain] | None: "finalists"})  # type: ignore[valid-type]
Plan = _struct("Plan", {Count | None: "rounds"}, after_trials=Count, configurations=dict[Planned, Choices])
Neighbours = _struct("Neighbours", {list[Number]: "alone beside", list[Count]: "trials"},
                     count=Count, change=Number | None, alone_apart=Number | None)
Unavailable = _struct("Unavailable", {}, when=dict[str, list[Choice]], because=str)
# `barred` is the name of `unavailable` in studies of earlier releases.
StudyAttributes = _struct("StudyAttributes", {
    str | None: "strategy warm_start tuner", Identity | None: "identity", Provenance | None: "provenance",
    _struct("StopReason", {str: "kind reason"}) | None: "stop", Plan | None: "confirmation_plan",
    Decision | None: "confirmation", Neighbours | None: "neighbours",
    list[Unavailable] | None: "unavailable barred"})  # type: ignore[valid-type]
StoredPivot = _struct("StoredPivot", {
    str: "action reason reopens_when alternative key", Count: "after_launches launches_saved",
    Number | None: "belief chance upper_gain cost_s", dict[str, Choice | list[Choice]]: "region",
    list[Count]: "trials", list[str]: "signatures"})


def study_attributes(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the study `name` as plain data under today's names. Raises CorruptStudy."""
    convert(stored, StudyAttributes, f"study {name}")
    found = dict(stored)
    if "barred" in found:
        found.setdefault("unavailable", found.pop("barred"))
    return found


def add_pivot(folder: pathlib.Path, pivot: Mapping[str, Any]) -> bool:
    """Append a decision to pivots.jsonl, shared by all tuners of the study in `folder`.

    False if it equals the last one on its region (a resumed strategy decides again).
    """
    last = {json.dumps(known.get("region")): known.get("key") for known in read_pivots(folder)}
    if last.get(json.dumps(pivot["region"])) == pivot["key"]:
        return False
    append_line(folder / "pivots.jsonl", json.dumps(pivot))
    return True


def read_pivots(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The valid decisions of pivots.jsonl. Lines cut off by a kill or a full disk are left out."""
    try:
        lines = read_plain(folder / "pivots.jsonl").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AutotuneError(f"{folder / 'pivots.jsonl'} cannot be read ({error.strerror}): remove it") from error
    pivots = []
    for line in lines:
        with contextlib.suppress(UsageError, ValueError, RecursionError):
            pivot = json.loads(line)
            from_json(pivot, StoredPivot)
            pivots.append(pivot)
    return pivots
