"""Several workers on one study: which hosts may join, and what workers share beside trials.

    study = join(lambda: open_study(settings))
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
from collections.abc import Callable
from typing import Any

from autotune.records import HostCannotRun
from autotune.storage.study import Study, StudyMismatch, is_here, owner_alive
from autotune.utils.files import read_plain, write_json

OF_A_HOST = {"devices": "its GPUs (or CPU)", "engine_version": "its engine's version"}
"""Conditions of a study that a host brings with it; the others come from settings."""
SHARED = "agreement"
"""Attribute of a study that keeps the baseline's outputs, for the agreement gate on every host."""


def join(open_study: Callable[[], Study]) -> Study:
    """The study, for a worker. Raises HostCannotRun when this host is of another kind than those it was made on."""
    try:
        return open_study()
    except StudyMismatch as error:
        own = {key: pair for key, pair in error.different.items() if key in OF_A_HOST}
        if set(own) != set(error.different):
            raise
        told = "; ".join(f"{OF_A_HOST[key]}: the study has {_text(then)}, {socket.gethostname()} has {_text(now)}"
                         for key, (then, now) in own.items())
        raise HostCannotRun(f"this host cannot join study {error.name}: {told}; only hosts of one kind share a study, "
                            "study.name=NAME starts another") from error


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def neighbours(study: Study) -> int:
    """Other living workers on this host that have a trial running now: they disturb measurements on its CPU cores."""
    owners = {str(r.attrs.get("owner", "")) for r in study.records() if r.state == "RUNNING"} - {study.owner}
    return sum(is_here(owner) and owner_alive(owner) for owner in owners)


def share_references(study: Study, file: pathlib.Path) -> None:
    """Bring the baseline's outputs to every host: from the study when `file` is missing here, else into it once."""
    if not file.exists():
        kept = study.attrs().get(SHARED)
        if kept is not None:
            write_json(file, kept)
        return
    if SHARED not in study.attrs():
        with contextlib.suppress(ValueError, OSError, RecursionError):
            study.set_attr(SHARED, json.loads(read_plain(file)))
