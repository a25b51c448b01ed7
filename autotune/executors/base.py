"""The contract of executors; tests/executors/test_conformance.py holds for every implementation.

    with executor.launch(server_part, folder, progress) as server:
        outcome = server.crash or server.measure({"concurrency": 8}, label=3)

A failure of the configuration is a Crash value; exceptions are failures of autotune or of the host.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import pathlib
import socket
from collections.abc import Callable
from typing import Any

from autotune.config.settings import Settings
from autotune.executors.preflight import Preflight, check_disk
from autotune.measure.correctness import Gate
from autotune.records import AutotuneError, Config, Crash, HostCannotRun, Measurement, canonical, digest

# Stages before a launch starts. Time up to PLACED is not charged to the configuration.
WAITING, PLACED = "waiting for a place", "placed"
# Called with a stage and the seconds since the start of the launch.
Progress = Callable[[str, float], None]


class HostLost(AutotuneError):
    """The host of a launch is gone and the launch with it: nothing is known about its configuration."""


class LaunchCancelled(AutotuneError):
    """The launch ended because `Executor.cancel` was called: another one failed or was interrupted."""


@dataclasses.dataclass
class RunningServer(abc.ABC):
    """A launch: crashed at its start (`crash`), or serving. `argv`, `env` and `resolved` are free of secrets.

    `neighbours`: most launches beside this one on its host during its last measurement, None where it runs alone or
    the number is unknown. `machine`: the name of its host.
    """

    folder: pathlib.Path
    crash: Crash | None
    launch_s: float
    argv: list[str]
    env: dict[str, str]
    resolved: dict[str, Any]
    neighbours: int | None = None
    machine: str = dataclasses.field(default_factory=socket.gethostname)

    @property
    def resolved_key(self) -> str | None:
        """Hash of the settings that the server reports plus the environment that we set. None if it reports nothing.

        Two launches with the same key are the same server, whichever executor started them.
        """
        return digest(canonical([self.resolved, self.env])) if self.resolved else None

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """True while the server can be measured."""

    @abc.abstractmethod
    def measure(self, load: Config, label: int | str) -> Measurement | Crash:
        """Measure one load part; `label` names the files that the measurement leaves in `folder`.

        A server that fails under load gives a Crash of stage serving. Raises HostLost, LaunchCancelled.
        """


class Executor(abc.ABC):
    """Hosts that launches run on. `preflight` adapts the study's `settings` to them and leaves its `report`."""

    settings: Settings
    report: Preflight
    capacity: int = 1  # most launches side by side

    def preflight(self) -> Preflight:
        """Check that the baseline can run; forbid choices that cannot, and an objective with energy without a meter.

        Raises HostCannotRun with everything that is missing.
        """
        self.report, settings = self.inspect(), self.settings
        if self.report.problems:
            raise HostCannotRun(f"space {settings.space.name} cannot run here: {'; '.join(self.report.problems)} "
                                f"({settings.shown_command('check')} tells more)")
        settings = settings.without(self.report.unavailable)
        if self.report.power.source == "none":
            settings = dataclasses.replace(settings, objective=settings.objective.without_energy())
        self.settings = settings
        return self.report

    @abc.abstractmethod
    def inspect(self) -> Preflight:
        """The preflight check, made where launches run."""

    def has_room(self) -> bool:
        """True when another launch can start now. Raises HostCannotRun when the disk is too full for it."""
        check_disk(self.settings, self.settings.folder, self.capacity)
        return True

    @abc.abstractmethod
    def launch(self, config: Config, folder: pathlib.Path,
               progress: Progress) -> contextlib.AbstractContextManager[RunningServer]:
        """Start the server of a server part; its files go to `folder`. On leaving, all of its processes have ended.

        Raises HostLost, LaunchCancelled.
        """

    @abc.abstractmethod
    def cancel(self) -> None:
        """End every launch, from any thread; the threads that wait for one get LaunchCancelled or HostLost."""

    @property
    def gate(self) -> Gate:
        """The correctness gate of the study."""
        return Gate(self.settings.folder / "agreement.json", self.settings.agreement,
                    self.settings.workload.prompt_source())
