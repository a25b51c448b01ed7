"""Types of everything that a study stores beside its trials, and the one line about values of other types.

    settled = convert(attrs, StudyAttributes, "study s")      # CorruptStudy with one line
    PivotFile(folder).add(pivot)
    pivots = read_pivots(folder)

Other programs may add attributes under names of their own: those are ignored.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from autotune.records import AutotuneError, Count, Number, from_json
from autotune.utils.files import append_line, read_plain
from autotune.utils.text import SPELLED, printable

REMEDY = "Restore a backup or use study.name=NAME."
Choice = str | Count | Number | bool
Choices = dict[str, Choice]
Interval = Annotated[list[Number | None], msgspec.Meta(max_length=2)]
# "baseline" or a trial's number
Planned = Annotated[str, msgspec.Meta(pattern=r"^(baseline|[0-9]{1,18})\Z")]


class CorruptStudy(AutotuneError):
    """A study holds values that autotune did not write; `problem` names the first one."""

    def __init__(self, problem: str) -> None:
        self.problem = printable(problem, instead=SPELLED)
        super().__init__(f"corrupt study database: {self.problem}. {REMEDY}")


def corrupt(problem: str) -> CorruptStudy:
    return CorruptStudy(problem)


def convert(plain: Any, kind: Any, where: str) -> Any:
    """Plain data as a value of type `kind`. Raises CorruptStudy, beginning with `where`."""
    try:
        return from_json(plain, kind)
    except ValueError as error:
        raise CorruptStudy(f"{where}: {error}") from error


class Identity(msgspec.Struct):
    space: str | None = None
    space_digest: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    engine_file: str | None = None
    objective: str | None = None
    limits: dict[str, Number] | None = None
    model: dict[str, str] | None = None
    devices: list[str] | None = None
    workload: dict[str, Any] | None = None
    slots: Count | None = None


class Provenance(msgspec.Struct):
    autotune: str | None = None
    python: str | None = None
    engine_version: str | None = None
    driver: str | None = None
    cpu: str | None = None
    kernel: str | None = None
    command: str | None = None
    folder: str | None = None
    created: str | None = None
    packages: dict[str, str | None] = {}
    gpu: list[str] = []


class StopReason(msgspec.Struct):
    kind: str = ""
    reason: str = ""


class Unavailable(msgspec.Struct):
    when: dict[str, list[Choice]]
    because: str


class Plan(msgspec.Struct):
    after_trials: Count
    configurations: dict[Planned, Choices]


class Gain(msgspec.Struct):
    verdict: str
    gain: Number | None = None
    interval: Interval | None = None


class ConfirmationResult(msgspec.Struct):
    method: str | None = None
    decided: str | None = None
    reason: str | None = None
    winner: Count | None = None
    rounds: Count | None = None
    blocks: Count | None = None
    gain: Number | None = None
    interval: Interval | None = None
    finalists: dict[str, Gain] | None = None
    configurations: dict[str, Choices] = {}
    values: list[Any] = []


class Neighbours(msgspec.Struct):
    count: Count
    change: Number | None
    alone_apart: Number | None
    alone: list[Number] = []
    beside: list[Number] = []
    trials: list[Count] = []


class StudyAttributes(msgspec.Struct):
    """Attributes of a study; `barred` is the name of `unavailable` in studies of earlier releases."""

    strategy: str | None = None
    warm_start: str | None = None
    tuner: str | None = None
    identity: Identity | None = None
    provenance: Provenance | None = None
    stop: StopReason | None = None
    unavailable: list[Unavailable] | None = None
    barred: list[Unavailable] | None = None
    confirmation_plan: Plan | None = None
    confirmation: ConfirmationResult | None = None
    neighbours: Neighbours | None = None


def study_attributes(name: str, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of the study `name` as plain data under today's names. Raises CorruptStudy."""
    convert(stored, StudyAttributes, f"study {name}")
    found = dict(stored)
    if "barred" in found:
        found.setdefault("unavailable", found.pop("barred"))
    return found


class StoredPivot(msgspec.Struct):
    """A line of pivots.jsonl."""

    action: str = ""
    reason: str = ""
    reopens_when: str = ""
    alternative: str = ""
    key: str = ""
    after_launches: Count = 0
    launches_saved: Count = 0
    belief: Number | None = None
    chance: Number | None = None
    upper_gain: Number | None = None
    cost_s: Number | None = None
    region: dict[str, Choice | list[Choice]] = {}
    trials: list[Count] = []
    signatures: list[str] = []


class PivotFile:
    """Append-only pivots.jsonl of a study's folder, shared by all tuners of the study."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def add(self, pivot: Mapping[str, Any]) -> bool:
        """Append a decision; False if it equals the last one on its region (a resumed strategy decides again)."""
        last = {json.dumps(known.get("region")): known.get("key") for known in read_pivots(self.folder)}
        if last.get(json.dumps(pivot["region"])) == pivot["key"]:
            return False
        append_line(self.folder / "pivots.jsonl", json.dumps(pivot))
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
        try:
            pivot = json.loads(line)
            from_json(pivot, StoredPivot)
        except (ValueError, RecursionError):
            continue
        pivots.append(pivot)
    return pivots
