"""Several workers on one study: which hosts may join, what workers share, and how each keeps up with the others."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
from collections.abc import Callable, Sequence

from autotune.records import Config, HostCannotRun, config_key
from autotune.search.strategy import Measured, Observation, Strategy
from autotune.storage.locks import is_here, owner_alive
from autotune.storage.schema import add_pivot
from autotune.storage.study import Study, StudyMismatch
from autotune.storage.trial import TrialRecord
from autotune.tuning import ProgressListener
from autotune.utils.files import read_plain, write_json

# Conditions of a study that come from the host, not from settings.
HOST_CONDITIONS = {"devices": "its GPUs (or CPU)", "engine_version": "its engine's version"}
REFERENCES = "agreement"  # attribute of a study with the baseline's outputs, for the correctness gate of every host


class StudySync:
    """Keeps a strategy up to date with a study that other workers may work on as well.

    `others` are the server parts that other workers run now, `searched` counts the trials that the strategy knows.
    """

    def __init__(self, study: Study, strategy: Strategy, folder: pathlib.Path) -> None:
        self.study, self.strategy, self.folder = study, strategy, folder
        self.others: set[str] = set()
        self.searched = 0
        self._known: set[int] = set()
        self._pivots = 0  # pivots of the strategy that are in pivots.jsonl
        self._measured: dict[tuple[str, str], list[TrialRecord]] = {}  # by resolved key and load part

    def trials(self) -> None:
        """Tell the strategy of trials that ended since the last call, and of launches that others run now."""
        running = set()
        for record in self.study.records():
            if record.number in self._known:
                continue
            server, load = self.study.space.split(record.config)
            search = not record.confirm
            if record.state in ("COMPLETE", "PRUNED"):
                key = record.launch.resolved_key
                if record.state == "COMPLETE" and key is not None and not record.invalid_reasons:
                    self._measured.setdefault((str(key), config_key(load)), []).append(record)
                if search:
                    self.searched += 1
                    self.strategy.tell(observation_of(self.study, record))
            elif record.state != "FAIL":
                if search and record.config and record.start.owner != self.study.owner:
                    running.add(config_key(server))
                    self.strategy.pending(server, load)
                continue
            self._known.add(record.number)
        for ended in self.others - running:
            self.strategy.done(json.loads(ended))
        self.others = running

    def equivalent(self, server: Config, load: Config, key: str | None) -> TrialRecord | None:
        """A trial of another server part that resolved to the same `key` and was measured under this load part."""
        if key is None:
            return None
        self.trials()
        return next((record for record in self._measured.get((key, config_key(load)), [])
                     if config_key(self.study.space.split(record.config)[0]) != config_key(server)), None)

    def pivots(self, listener: ProgressListener) -> None:
        """Add new pivots of the strategy to pivots.jsonl."""
        pivots = self.strategy.pivots()
        for pivot in pivots[self._pivots:]:
            if add_pivot(self.folder, pivot.to_json()):
                listener.pivot(pivot)
        self._pivots = len(pivots)


def observation_of(study: Study, record: TrialRecord) -> Observation:
    """A finished trial as the strategy sees it."""
    server, load = study.space.split(record.config)
    cost_s, launch_s = record.cost_s or 0.0, record.launch_s or 0.0
    if record.crash is not None:
        return Observation(server, load if record.crashed_under_load else None, record.crash, cost_s, launch_s,
                           record.number)
    noise = record.measurement.relative_error if record.measurement is not None else None
    measured = Measured(None if record.invalid_reasons else record.value,
                        record.score is not None and record.score.feasible, record.ratios,
                        None if noise is None else noise / 2,
                        record.score.ratio_errors if record.score is not None else {},
                        record.measurement.short if record.measurement is not None else {})
    return Observation(server, load, measured, cost_s, launch_s, record.number)


def new_launch_folder(folder: pathlib.Path, records: Sequence[TrialRecord]) -> int:
    """Make the folder of a new launch in a study's folder and return its number, unused by any worker on any host."""
    launches = folder / "launches"
    number = max([0, *(int(p.name) for p in launches.glob("[0-9]*") if p.name.isdecimal()),
                  *(record.launch_id or 0 for record in records)])
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            (launches / f"{number:04d}").mkdir(parents=True)
            return number


def join(open_study: Callable[[], Study]) -> Study:
    """The study, for a worker. Raises HostCannotRun on a host of another kind than those that it was made on."""
    try:
        return open_study()
    except StudyMismatch as error:
        different = {key: pair for key, pair in error.different.items() if key in HOST_CONDITIONS}
        if set(different) != set(error.different):
            raise
        reasons = "; ".join(f"{HOST_CONDITIONS[key]}: the study has {then}, {socket.gethostname()} has {now}"
                            for key, (then, now) in different.items())
        raise HostCannotRun(f"this host cannot join study {error.name}: {reasons}; only hosts of one kind share a "
                            "study, study.name=NAME starts another") from error


def workers_here(study: Study) -> int:
    """Other living workers on this host that have a trial running now: they disturb measurements on its CPU cores."""
    owners = {r.start.owner or "" for r in study.records() if r.state == "RUNNING"} - {study.owner}
    return sum(is_here(owner) and owner_alive(owner) for owner in owners)


def share_references(study: Study, file: pathlib.Path) -> None:
    """Copy the baseline's outputs from the study to `file` where it is missing, else from `file` to the study once."""
    if not file.exists():
        kept = study.attrs().get(REFERENCES)
        if kept is not None:
            write_json(file, kept)
        return
    if REFERENCES not in study.attrs():
        with contextlib.suppress(ValueError, OSError, RecursionError):
            study.set_attr(REFERENCES, json.loads(read_plain(file)))
