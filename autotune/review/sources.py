"""Where the story comes from: the study's storage and the files beside it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune.records import AutotuneError
from autotune.review.story import Story, tell

if TYPE_CHECKING:
    from autotune.config import Settings
    from autotune.study import Study


def read(settings: Settings, study: Study) -> Story:
    """The story of an open study, with pivots.jsonl and matrix.json of its folder where they exist.

    Raises AutotuneError when one of those files is not what the loop writes.
    """
    attrs = study.attrs()
    identity: Mapping[str, Any] = attrs.get("identity") or {}
    matrix = _json(settings.folder / "matrix.json")
    return tell(settings.study_name, settings.space, str(identity.get("objective") or settings.objective.name),
                settings.limits, study.records(), attrs, _json_lines(settings.folder / "pivots.jsonl"), matrix)


def _json(path: pathlib.Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AutotuneError(f"{path} cannot be read ({error}): delete it, or run the verb matrix again") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise AutotuneError(f"{path} is not a list of rows: delete it, or run the verb matrix again")
    return rows


def _json_lines(path: pathlib.Path) -> list[Mapping[str, Any]]:
    """The lines of a file that is appended to; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows: list[Mapping[str, Any]] = []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError as error:
            if i == len(lines) - 1:
                break
            raise AutotuneError(f"{path}, line {i + 1} is not JSON ({error}): remove that line") from error
        if isinstance(row, dict):
            rows.append(row)
    return rows
