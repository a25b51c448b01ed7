"""The verb export: the best configuration, or `trial=N`, as a launch file with launch.json beside it."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, cast

from autotune.export.deployment import deploy
from autotune.export.formats import FORMATS
from autotune.records import NothingFeasible, UsageError
from autotune.report import verdict
from autotune.report.story import Story, read
from autotune.storage.trial import TrialRecord
from autotune.utils.files import output_path, write_output

if TYPE_CHECKING:
    from autotune.config.settings import Format, Settings
    from autotune.storage.study import Study


def export(settings: Settings, study: Study) -> pathlib.Path:
    """Write the launch file and launch.json; returns the launch file's path.

    Raises NothingFeasible when no configuration keeps the limits, UsageError for an unknown trial.
    """
    name, render = FORMATS[cast("Format", settings.format)]
    story = read(settings, study)
    deployment = deploy(settings, story, choose(story, settings.trial))
    path = output_path(settings.out, settings.folder / name)
    write_output(path, render(deployment), executable=settings.format == "sh")
    origin = {**deployment.origin, "format": settings.format, "file": path.name}
    write_output(origin_path(path), json.dumps(origin, indent=1, default=str) + "\n")
    return path


def choose(story: Story, number: int | None) -> TrialRecord:
    """The trial to ship: the winner's, or the one asked for. Crashed and unfinished trials are refused."""
    if number is None:
        if story.winner is None:
            raise NothingFeasible(f"study {story.study}: {verdict.headline(story)} There is nothing to export; "
                                  "see the report, or name a trial with trial=N")
        number = story.winner.trial
    record = next((r for r in story.records if r.number == number), None)
    if record is None:
        raise UsageError(f"study {story.study} has no trial {number}; it has {len(story.records)} trials from 0")
    if record.crash is not None:
        raise UsageError(f"trial {number} crashed ({record.crash.category}, signature {record.crash.signature}): "
                         "there is no working server to export")
    if record.state not in ("COMPLETE", "PRUNED"):
        raise UsageError(f"trial {number} has no measurement (state {record.state}): choose a finished trial")
    return record


def origin_path(path: pathlib.Path) -> pathlib.Path:
    """The path of a launch file's origin: launch.json for launch.sh and launch.k8s.yaml."""
    name = path.with_name(f"{path.name.split('.')[0] or path.name}.json")
    return name if name != path else path.with_name(path.name + ".origin")
