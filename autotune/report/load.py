"""Where the story comes from: the study's storage and the files beside it."""

from __future__ import annotations

import contextlib
import gc
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from autotune.records import AutotuneError, Count, from_json
from autotune.report.story import Story, tell
from autotune.space.space import Space
from autotune.storage.schema import Choice, read_pivots
from autotune.utils.files import read_plain

if TYPE_CHECKING:
    from autotune.config.settings import Settings
    from autotune.storage.study import Study


class Row(msgspec.Struct):
    """Required values of a row of matrix.json."""

    config: str
    ctx: Count
    concurrency: Count


def read(settings: Settings, study: Study) -> Story:
    """The story of an open study, with pivots.jsonl and matrix.json of its folder where they exist.

    Raises AutotuneError when matrix.json is not what the verb matrix writes.
    """
    identity: Mapping[str, Any] = study.attrs().get("identity") or {}
    objective = str(identity.get("objective") or settings.objective.name)
    limits = identity.get("limits")
    return of_folder(study, settings.study_name, settings.space, objective,
                     settings.limits if limits is None else limits, settings.folder)


def of_folder(study: Study, name: str, space: Space, objective: str, limits: Mapping[str, float],
              folder: pathlib.Path | None) -> Story:
    """The same for a study whose space and limits are not the settings' own."""
    matrix = _json(folder / "matrix.json") if folder else []
    pivots = read_pivots(folder) if folder else []
    with uncollected():
        return tell(name, space, objective, limits, study.records(), study.attrs(), pivots, matrix)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: a large study is read into a million objects that all live, and looking
    through them again and again takes more than half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _json(path: pathlib.Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    try:
        rows = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError) as error:
        raise AutotuneError(f"{path} cannot be read ({error}): delete it, or run the verb matrix again") from error
    try:
        from_json(rows, list[Row])
        checked: list[Mapping[str, Any]] = from_json(rows, list[dict[str, Choice | None]])
    except ValueError as error:
        raise AutotuneError(f"{path} is not a list of rows as the verb matrix writes them (row {error}): delete it, or "
                            "run the verb matrix again") from error
    return checked
