"""All observations of a study as integer codes: the input of every model of the strategy."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping

import numpy as np

from autotune.records import Blame, Config, Crash, Stage, Value
from autotune.search.crash_model import Failure
from autotune.search.grid import Codes, Floats, Grid
from autotune.search.retries import Retries
from autotune.search.strategy import Measured, Observation
from autotune.search.value_model import Data

Key = tuple[int, ...]
LEAST_NOISE = 0.002
MOST_INVALID = 2  # invalid measurements of a configuration before it is given up
MOST_REPEATS = 6  # measurements of one configuration
STRADDLES = 1.645  # standard errors of a ratio within which its limit is undecided (90 %)
EDGE, EVIDENCE = 0.03, math.log(0.985 / 0.015)  # a ratio so far from its limit is told apart with 1.5 % error
CLEAR = 3.0  # standard errors beyond which a limit is decided whatever the noise
MOST_STRADDLING = 24  # measurements of one configuration for that
SURE = 0.01  # relative standard error below which a leader is not measured again
MANY = 160  # most configurations given to the value model, whose cost grows with their cube
MANY_CRASHES, OF_ONE_KIND = 60, 10  # most crashes given to the crash model, in all and per signature: the newest
BY_CHANCE = 0.5  # least probability to come up for another launch of a crashed server
DEAR = 2.0  # cost of a crash in launches that no retry is worth
NOISE = 0.02  # relative standard deviation of a measurement that does not state its own


@dataclasses.dataclass
class Server:
    """History of one server part; load parts by index."""

    row: Codes
    came_up: bool = False
    launch_crashes: list[Crash] = dataclasses.field(default_factory=list)
    values: dict[int, list[Measured]] = dataclasses.field(default_factory=dict)  # by load index
    load_crashes: dict[int, list[Crash]] = dataclasses.field(default_factory=dict)


class Observations:
    """All observations, in order."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.servers: dict[Key, Server] = {}
        self.failures: list[tuple[Key, Failure]] = []
        self.count = self.launches = self.passes = 0
        self.used_s = 0.0
        self.launch_s, self.crash_s, self.measure_s = list[float](), list[float](), list[float]()
        self.limits: list[str] = []
        self._kept: dict[tuple[Key, int], bool] = {}  # whether configurations with a value keep every limit
        self._leading: tuple[int, list[tuple[Key, int]]] = (-1, [])  # by the number of observations
        self._points: dict[tuple[Key, int], tuple[Floats, float]] = {}
        self._limit_noise: dict[tuple[Key, int], Floats] = {}
        self.last_good: Key | None = None
        self.retries = Retries()
        self._worked: set[tuple[int, int]] = set()  # (column, code) of choices of servers that came up
        self.doubtful: Key | None = None  # its crash may be chance: transient, or each of its choices had come up
        self.environment: list[tuple[int, Key, Crash]] = []  # (earlier launches that came up, server, crash)

    def key(self, server: Config) -> Key:
        return tuple(self.grid.server_row(server).tolist())

    def add(self, observation: Observation) -> None:
        """Raises KeyError when the configuration is not in the space."""
        row = self.grid.server_row(observation.server)
        key = tuple(row.tolist())
        load = None if observation.load is None else self.grid.load_index(observation.load)
        server = self.servers.setdefault(key, Server(row))
        self.count += 1
        self.used_s += observation.cost_s
        self.launches += observation.launch_s > 0
        if isinstance(observation.outcome, Crash):
            self._crash(server, key, load, observation, observation.outcome)
            return
        if load is None:
            raise ValueError("a measurement needs a load part")
        server.came_up = True
        if observation.launch_s > 0:
            self.doubtful = None
            self._worked.update(enumerate(server.row.tolist()))
            self.passes += 1
            self.retries.started(key, None)
        self.last_good = key
        self.measure_s.append(observation.cost_s - observation.launch_s)
        if observation.launch_s > 0:
            self.launch_s.append(observation.launch_s)
        server.values.setdefault(load, []).append(observation.outcome)
        self._summarise(key, load)

    def dead(self, server: Server, chance: float = 0.0) -> bool:
        """True if a server part crashed at its start and gets no further launch.

        A server that came up at another time may be launched again, and so may one whose crashes struck by chance: its
        signatures came up on a retry, or the crash model expects it to come up with the probability `chance`.
        """
        crashes = server.launch_crashes
        if not crashes or server.came_up:
            return len(crashes) > 1
        return chance < BY_CHANCE and not self.retries.worthwhile(tuple(server.row.tolist()))

    def settled(self, server: Server) -> set[int]:
        """Load parts that need no measurement on a server: measured, twice invalid, or the server's crash."""
        known = {load for load, seen in server.values.items()
                 if len(seen) >= MOST_INVALID or any(m.value is not None for m in seen)}
        return known | {load for load, crashes in server.load_crashes.items()
                        if len(crashes) > 1 or crashes[0].blame is not Blame.TRANSIENT}

    def _crash(self, server: Server, key: Key, load: int | None, observation: Observation, crash: Crash) -> None:
        tail = self.grid.load_rows[load] if load is not None else np.full(len(self.grid.load_params), -1, np.int16)
        self.failures.append((key, Failure(np.concatenate([server.row, tail]), crash, observation.trial,
                                            loaded=load is not None, cost_s=observation.cost_s)))
        known = all(at in self._worked for at in enumerate(server.row.tolist()))
        dear = self.launch_s and observation.cost_s > DEAR * float(np.mean(self.launch_s))
        if load is None and not server.came_up and self.retries.left(crash.signature) and (
                crash.blame is Blame.TRANSIENT or known and crash.blame is not Blame.ENVIRONMENT and not dear):
            self.doubtful = key
        if load is not None:
            server.load_crashes.setdefault(load, []).append(crash)
        else:
            server.launch_crashes.append(crash)
            self.doubtful = None if key == self.doubtful and len(server.launch_crashes) > 1 else self.doubtful
            self.retries.started(key, crash.signature)
            self.crash_s.append(observation.cost_s)
        if crash.stage is Stage.SERVING and load is not None:
            server.came_up = True
            self.last_good = self.last_good or key
        elif crash.blame is Blame.ENVIRONMENT:
            self.environment.append((self.passes, key, crash))

    def evidence(self) -> list[Failure]:
        """Crashes that count against a configuration; a first transient crash does not."""
        out = [failure for key, failure in self.failures
               if failure.crash.blame is not Blame.TRANSIENT or not self.retries.left(failure.crash.signature)
               or len(self.servers[key].launch_crashes) != 1]
        return out if len(out) <= MANY_CRASHES else _newest(out)

    @property
    def anything_works(self) -> bool:
        """True if any server came up."""
        return any(server.came_up for server in self.servers.values())

    def passed(self) -> Codes:
        """(n, P) codes of server parts that came up."""
        return self._rows([key for key, s in self.servers.items() if s.came_up])

    def crashed(self) -> Codes:
        """(n, P) codes of server parts that crashed and never came up."""
        return self._rows([key for key, s in self.servers.items() if s.launch_crashes and not s.came_up])

    def _rows(self, keys: list[Key]) -> Codes:
        return np.array(keys, dtype=np.int16).reshape(len(keys), self.grid.width)

    def works(self, when: Mapping[str, tuple[Value, ...]], under_load: bool) -> bool:
        """True if a server part with one of the choices of each parameter in `when` came up (or was measured)."""
        return any((server.values if under_load else server.came_up)
                   and all(self.grid.server(server.row).get(name) in values for name, values in when.items())
                   for server in self.servers.values())

    def ratios(self, key: Key, load: int) -> tuple[Floats, Floats]:
        """(limits,) mean log of measured / limit of a configuration, and the sd of the noise of each."""
        return self._points[key, load][0][1:], self._limit_noise[key, load]

    def uncertain(self, key: Key, load: int) -> bool:
        """True if a configuration's mean is uncertain and another measurement is allowed."""
        few = len(self.servers[key].values[load]) < MOST_REPEATS
        return self._points[key, load][1] > SURE and few or self.straddles(key, load)

    def straddles(self, key: Key, load: int) -> bool:
        """True if noise leaves open whether a limit is kept, and another measurement is allowed.

        Noisy ratios are decided by a sequential test (Wald 1945) between `EDGE` below and above the limit.
        """
        ratios, noise = self.ratios(key, load)
        values = self.servers[key].values[load]
        seen, stated = len(values), {name for m in values for name in m.ratio_errors}
        open_ = np.array([name in stated or not stated for name in self.limits], dtype=bool) & (ratios != 0)  # 0: exact
        bound = STRADDLES * noise * (seen < MOST_REPEATS)
        if seen < MOST_STRADDLING:
            bound = np.maximum(bound, np.minimum(EVIDENCE / (2 * EDGE) * noise ** 2, CLEAR * noise))
        return bool((ratios <= bound).all() and (abs(ratios) < bound)[open_].any())

    def promising(self, key: Key, above: float) -> int | None:
        """A load part measured on a server above a log objective that may keep its limits; None without any."""
        at = [(self._points[key, load][0][0], load) for load in self.servers[key].values if (key, load) in self._points]
        return next((load for value, load in sorted(at, reverse=True) if value > above and self.straddles(key, load)),
                    None)

    def served(self) -> Codes:
        """(n, D) codes of configurations measured without a crash."""
        at = [(key, load) for key, server in self.servers.items() for load in server.values]
        loads = np.array([load for _, load in at], dtype=np.intp)
        return np.concatenate([self._rows([key for key, _ in at]), self.grid.load_rows[loads]], axis=1)

    def measurements(self) -> Data:
        """Mean log objective and log limit ratios per configuration with a value, and the sd of their noise.

        Above `MANY` configurations: the best (half of `MANY`), the newest (a quarter), and a spread of the others.
        """
        points = list(self._points.items())
        if len(points) > MANY:
            points = [points[i] for i in _informative(np.array([y[0] for y, _ in self._points.values()]))]
        rows = self._rows([key for (key, _), _ in points])
        return Data(rows, np.array([load for (_, load), _ in points], dtype=np.intp),
                    np.array([y for _, (y, _) in points]).reshape(len(rows), 1 + len(self.limits)),
                    np.array([noise for _, (_, noise) in points]))

    def shortage(self, key: Key | None) -> dict[str, float]:
        """Shortage of each resource on a server (None: on any), 0..1, under the load that showed it most."""
        found: dict[str, float] = {}
        for server in self.servers.values() if key is None else [self.servers[key]]:
            for measured in (some for seen in server.values.values() for some in seen):
                for name, share in measured.short.items():
                    found[name] = max(share, found.get(name, 0.0))
        return found

    def leading(self) -> list[tuple[Key, int]]:
        """Feasible configurations, at most `MANY`: those with the best means."""
        if self._leading[0] != self.count:
            feasible = self.feasible()
            if len(feasible) > MANY:
                feasible = heapq.nlargest(MANY, feasible, key=lambda at: float(self._points[at][0][0]))
            self._leading = self.count, feasible
        return self._leading[1]

    def _summarise(self, key: Key, load: int) -> None:
        """Update the mean of one configuration; a new limit updates all of them."""
        new = {name for m in self.servers[key].values[load] for name in _names(m)} - set(self.limits)
        if new:
            self.limits = sorted({*self.limits, *new})
            for other in self._points:
                self._point(*other)
        self._point(key, load)

    def _point(self, key: Key, load: int) -> None:
        valid = [m for m in self.servers[key].values[load] if m.value is not None and m.value > 0]
        if valid:
            y = np.mean([[math.log(m.value or 1.0), *_ratios(m, self.limits)] for m in valid], axis=0)
            noise = sum(m.relative_noise or NOISE for m in valid) / len(valid)
            sd = max(LEAST_NOISE, noise / math.sqrt(len(valid)))
            self._points[key, load] = (y, sd)
            self._limit_noise[key, load] = np.array([_ratio_noise(valid, name, sd) for name in self.limits])
            self._kept[key, load] = self._keeps_limits(key, load, valid)

    def feasible(self) -> list[tuple[Key, int]]:
        """Configurations that kept every limit in the majority of their valid measurements; where ratios have errors,
        in the mean of them."""
        return [at for at, kept in self._kept.items() if kept]

    def _keeps_limits(self, key: Key, load: int, valid: list[Measured]) -> bool:
        if any(m.ratio_errors for m in valid):
            return bool((self.ratios(key, load)[0] <= 0).all())
        return sum(1 if m.feasible else -1 for m in valid) > 0


def _informative(values: Floats) -> list[int]:
    """Indices of `MANY` measured configurations for the value model, oldest first."""
    best = np.argsort(-values, kind="stable")[:MANY // 2]
    newest = np.arange(len(values) - MANY // 4, len(values))
    chosen = np.union1d(best, newest)
    others = np.setdiff1d(np.arange(len(values)), chosen)
    spread = others[np.linspace(0, len(others) - 1, MANY - len(chosen)).astype(int)]
    return [int(i) for i in np.union1d(chosen, spread)]


def _newest(failures: list[Failure]) -> list[Failure]:
    """The newest failures of each signature, oldest first."""
    left: dict[tuple[str, bool], int] = {}
    kept: list[Failure] = []
    for failure in reversed(failures):
        kind = failure.crash.signature, failure.loaded
        left[kind] = left.get(kind, OF_ONE_KIND) - 1
        if left[kind] >= 0 and len(kept) < MANY_CRASHES:
            kept.append(failure)
    return kept[::-1]


def _names(measured: Measured) -> list[str]:
    """Limits of a measurement; the empty name stands for a failure without a ratio."""
    return [*measured.ratios, *([] if measured.feasible or measured.violations else [""])]


def _ratios(measured: Measured, limits: list[str]) -> list[float]:
    """Log of measured / limit for each name."""
    unnamed = -0.1 if measured.feasible or measured.violations else 0.1
    return [math.log(max(1e-6, measured.ratios.get(name, 0.9))) if name else unnamed for name in limits]


def _ratio_noise(valid: list[Measured], name: str, sd: float) -> float:
    """Sd of the mean log ratio of a limit: from the stated errors, else `sd`."""
    errors = [m.ratio_errors[name] / max(1e-6, m.ratios[name]) for m in valid
              if name in m.ratio_errors and name in m.ratios]
    return max(LEAST_NOISE, math.hypot(*errors) / len(errors)) if errors else sd
