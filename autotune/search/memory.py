"""What a study has seen, in codes: the facts that every model of the strategy is computed from."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from autotune.records import Blame, Config, Crash, Stage
from autotune.search.crashes import Failure
from autotune.search.grid import Codes, Grid
from autotune.search.protocol import Measured, Observation

Key = tuple[int, ...]
NOISE = 0.02
"""Relative standard deviation of a measurement when nothing says how large it is."""


@dataclasses.dataclass
class Server:
    """What happened to one server part."""

    row: Codes
    launches: int = 0
    came_up: bool = False
    launch_crashes: list[Crash] = dataclasses.field(default_factory=list)
    values: dict[int, list[Measured]] = dataclasses.field(default_factory=dict)  # by load index
    load_crashes: dict[int, list[Crash]] = dataclasses.field(default_factory=dict)


class Memory:
    """Everything told, in order."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.servers: dict[Key, Server] = {}
        self.failures: list[tuple[Key, Failure]] = []
        self.launches = 0
        self.used_s = 0.0
        self.count = 0
        self.launch_s: list[float] = []
        self.crash_s: list[float] = []
        self.measure_s: list[float] = []
        self.passes = 0
        self.last_good: Key | None = None
        self.environment: list[tuple[int, Key, Crash]] = []  # (launches that passed before it, server, crash)

    def key(self, server: Config) -> Key:
        return tuple(int(c) for c in self.grid.server_row(server))

    def add(self, observation: Observation) -> None:
        """Raises KeyError when the configuration is not in the space."""
        row = self.grid.server_row(observation.server)
        key = tuple(int(c) for c in row)
        load = None if observation.load is None else self.grid.load_index(observation.load)
        server = self.servers.setdefault(key, Server(row))
        self.count += 1
        self.used_s += observation.cost_s
        if observation.launch_s > 0:
            self.launches += 1
            server.launches += 1
        if isinstance(observation.outcome, Crash):
            self._crash(server, key, load, observation, observation.outcome)
            return
        if load is None:
            raise ValueError("a measurement needs the load part that it was made under")
        server.came_up = True
        self.passes += observation.launch_s > 0
        self.last_good = key
        self.measure_s.append(observation.cost_s - observation.launch_s)
        if observation.launch_s > 0:
            self.launch_s.append(observation.launch_s)
        server.values.setdefault(load, []).append(observation.outcome)

    def dead(self, server: Server) -> bool:
        """Whether a server part crashed at its start and is not to be launched again (a transient crash is retried)."""
        if server.came_up or not server.launch_crashes:
            return False
        return len(server.launch_crashes) > 1 or server.launch_crashes[0].blame is not Blame.TRANSIENT

    def dead_loads(self, server: Server) -> list[int]:
        """Load parts that ended this server."""
        return [load for load, crashes in server.load_crashes.items()
                if len(crashes) > 1 or crashes[0].blame is not Blame.TRANSIENT]

    def _crash(self, server: Server, key: Key, load: int | None, observation: Observation, crash: Crash) -> None:
        tail = self.grid.load_rows[load] if load is not None else np.full(len(self.grid.load_params), -1, np.int16)
        self.failures.append((key, Failure(np.concatenate([server.row, tail]), crash, observation.trial)))
        if load is not None:
            server.load_crashes.setdefault(load, []).append(crash)
        else:
            server.launch_crashes.append(crash)
            self.crash_s.append(observation.cost_s)
        if crash.stage is Stage.SERVING:
            server.came_up = True
            self.last_good = self.last_good or key
        elif crash.blame is Blame.ENVIRONMENT:
            self.environment.append((self.passes, key, crash))

    def evidence(self) -> list[Failure]:
        """Crashes that count against a configuration: a first transient one does not, it gets a retry."""
        out: list[Failure] = []
        for key, failure in self.failures:
            if failure.crash.blame is Blame.TRANSIENT and len(self.servers[key].launch_crashes) == 1:
                continue
            out.append(failure)
        return out

    def passed(self) -> Codes:
        """(n, P) server parts that came up."""
        return _stack([s.row for s in self.servers.values() if s.came_up], self.grid.width)

    def served(self) -> Codes:
        """(n, D) configurations measured without a crash."""
        rows = [np.concatenate([s.row, self.grid.load_rows[j]]) for s in self.servers.values() for j in s.values]
        return _stack(rows, len(self.grid.params))

    def measurements(self, limits: list[str]) -> tuple[Codes, NDArray[np.intp], NDArray[np.float64],
                                                       NDArray[np.float64]]:
        """Mean log objective and log limit ratios per configuration with a value, and the sd of their noise."""
        rows, loads, y, noise = [], [], [], []
        for server in self.servers.values():
            for load, seen in server.values.items():
                valid = [m for m in seen if m.value is not None and m.value > 0]
                if not valid:
                    continue
                rows.append(server.row)
                loads.append(load)
                y.append(np.mean([[math.log(m.value or 1.0), *_ratios(m, limits)] for m in valid], axis=0))
                spread = [m.relative_noise or NOISE for m in valid]
                noise.append(max(2e-3, float(np.mean(spread)) / math.sqrt(len(valid))))
        return (_stack(rows, self.grid.width), np.array(loads, dtype=np.intp),
                np.array(y).reshape(len(rows), 1 + len(limits)), np.array(noise))

    def limits(self) -> list[str]:
        """Names of the limits that any measurement was held against."""
        names = {name for s in self.servers.values() for seen in s.values.values() for m in seen for name in m.ratios}
        broken = any(not m.feasible and not m.violations
                     for s in self.servers.values() for seen in s.values.values() for m in seen)
        return sorted(names) + ([""] if broken else [])

    def feasible(self) -> list[tuple[Key, int]]:
        """Configurations that kept every limit in (the majority of) their valid measurements."""
        out = []
        for key, server in self.servers.items():
            for load, seen in server.values.items():
                valid = [m for m in seen if m.value is not None and m.value > 0]
                if valid and 2 * sum(m.feasible for m in valid) > len(valid):
                    out.append((key, load))
        return out


def _ratios(measured: Measured, limits: list[str]) -> list[float]:
    """Log of measured / limit per name; the name `` stands for a failure that has no ratio."""
    out = []
    for name in limits:
        if name:
            out.append(math.log(max(1e-6, measured.ratios.get(name, 0.9))))
        else:
            out.append(-0.1 if measured.feasible or measured.violations else 0.1)
    return out


def _stack(rows: list[Codes], width: int) -> Codes:
    return np.array(rows, dtype=np.int16).reshape(len(rows), width)
