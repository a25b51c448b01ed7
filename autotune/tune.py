"""The main loop on one page: propose a launch, start it, measure load parts, tell everybody, repeat.

`Tuner.run()` is the verb `tune`. What a strategy decides is in search/, what a launch does in trial.py,
what is stored in study.py; this module only connects them, so that killing it anywhere loses nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from autotune.files import append_line
from autotune.history import TrialRecord, Verdict, crash_of
from autotune.records import Config, Crash, Measurement, config_key
from autotune.search.protocol import Launch, Measured, Observation, Pivot, Stop, StopKind, Strategy
from autotune.study import Study
from autotune.trial import Bench, LiveServer


class Watcher(Protocol):
    """Who follows the progress: a terminal, a log, a test."""

    def launching(self, number: int, step: Launch) -> None: ...
    def stage(self, text: str, after_s: float) -> None: ...
    def outcome(self, record: TrialRecord) -> None: ...
    def pivot(self, pivot: Pivot) -> None: ...
    def note(self, text: str) -> None: ...


class Noter(Protocol):
    """Who writes down, for people, what a trial was: files before it is told, a note after."""

    def attach(self, trial: Any, launch: pathlib.Path) -> None: ...
    def annotate(self, study: Study, record: TrialRecord) -> None: ...


@dataclasses.dataclass
class _Asked:
    """The trial of a launch that is asked and not yet told, and since when its time counts."""

    inner: Any
    began: float = dataclasses.field(default_factory=time.monotonic)
    first: bool = True

    def done(self) -> None:
        self.inner, self.first, self.began = None, False, time.monotonic()


@dataclasses.dataclass
class Tuner:
    study: Study
    strategy: Strategy
    bench: Bench
    folder: pathlib.Path
    judge: Callable[[Measurement], Verdict]
    watcher: Watcher
    notes: Noter
    trials: int | None = None  # most trials of the search, crashes included
    heard: set[int] = dataclasses.field(default_factory=set)
    elsewhere: set[str] = dataclasses.field(default_factory=set)
    searched: int = 0  # trials told to the strategy

    def run(self) -> Stop:
        """Launch and measure until the strategy stops. KeyboardInterrupt leaves a resumable study."""
        while True:
            self._hear()
            step: Launch | Stop = self.strategy.propose() if not self._enough() else \
                Stop(StopKind.TRIALS, f"all {self.trials} trials are used")
            self._write_pivots()
            if isinstance(step, Stop):
                self.study.set_attr("stop", {"kind": str(step.kind), "reason": step.reason})
                return step
            self.launch(step)

    def launch(self, step: Launch) -> None:
        """One launch with every load part that the strategy wants measured on it."""
        load = self.strategy.next_load(step.server)
        if load is None:
            raise RuntimeError(f"the strategy proposed a launch with nothing to measure on it: {step.server}")
        with self._live(step.server, load, step, {"reason": step.reason}) as (server, trial, number):
            while True:
                self._measure(trial, server, load, step.server)
                load = self.strategy.next_load(step.server) if server.alive and not self._enough() else None
                if load is None:
                    return
                trial.inner = self.study.ask({**step.server, **load}, number, reason=step.reason)

    def _enough(self) -> bool:
        return self.trials is not None and self.searched >= self.trials

    def block(self, config: Config, reason: str, **attrs: Any) -> TrialRecord:
        """A launch that no strategy asked for (confirmation, isolation), measured under its load part."""
        server_part, load = self.study.space.split(config)
        step = Launch(server_part, reason, 0.0, 1.0, "confirm")
        with self._live(server_part, load, step, {"reason": reason, **attrs}) as (server, trial, _):
            return self._measure(trial, server, load, server_part, search=False)

    @contextlib.contextmanager
    def _live(self, server: Config, load: Config, step: Launch,
              attrs: dict[str, Any]) -> Iterator[tuple[LiveServer, _Asked, int]]:
        """A launch whose first trial is asked before it starts; an open trial is told FAIL when we fail."""
        self.bench.check_room(self.folder)
        number = self._next_launch()
        self.watcher.launching(number, step)
        asked = _Asked(self.study.ask({**server, **load}, number, **attrs))
        try:
            with self.bench.launch(server, self.folder / "launches" / f"{number:04d}", self.watcher.stage) as live:
                yield live, asked, number
        except BaseException as error:
            if asked.inner is not None:
                self.study.fail(asked.inner, f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def _measure(self, asked: _Asked, live: LiveServer, load: Config, server: Config,
                 search: bool = True) -> TrialRecord:
        trial = asked.inner
        twin = self._twin(server, load, live) if search else None
        outcome = live.crash or twin or live.measure(load, trial.number)
        launch_s = live.launch_s if asked.first else 0.0
        record = self._record(trial, outcome, live, time.monotonic() - asked.began, launch_s, search)
        asked.done()
        return record

    def _record(self, trial: Any, outcome: Measurement | Crash | TrialRecord, live: LiveServer, cost_s: float,
                launch_s: float, search: bool) -> TrialRecord:
        facts = {"server_argv": live.argv, "server_env": live.env, "resolved": live.resolved,
                 "resolved_key": live.resolved_key}
        self.notes.attach(trial, live.folder)
        if isinstance(outcome, TrialRecord):
            self.study.copy(trial, outcome, cost_s=cost_s, launch_s=launch_s, **facts)
        else:
            verdict = self.judge(outcome) if isinstance(outcome, Measurement) else None
            self.study.tell(trial, outcome, verdict, cost_s=cost_s, launch_s=launch_s, **facts)
        record = self.study.record(trial.number)
        if search:
            self._hear()
            self._write_pivots()
        self.notes.annotate(self.study, record)
        self.watcher.outcome(record)
        return record

    def _twin(self, server: Config, load: Config, live: LiveServer) -> TrialRecord | None:
        """The trial of another configuration that resolved to this very server, measured under this load."""
        if live.resolved_key is None:
            return None
        for record in self.study.records():
            its_server, its_load = self.study.space.split(record.config)
            if (record.state == "COMPLETE" and not record.attrs.get("invalid_reasons")
                    and record.attrs.get("resolved_key") == live.resolved_key
                    and config_key(its_load) == config_key(load) and config_key(its_server) != config_key(server)):
                return record
        return None

    def _hear(self) -> None:
        """Tell the strategy what it has not heard yet: past trials, and those of other workers on this study."""
        running = set()
        for record in self.study.records():
            server = self.study.space.split(record.config)[0]
            if record.state in ("COMPLETE", "PRUNED") and record.number not in self.heard:
                self.heard.add(record.number)
                if not record.attrs.get("confirm"):
                    self.searched += 1
                    self.strategy.tell(observation_of(self.study, record))
            elif record.state == "RUNNING" and record.attrs.get("owner") != self.study.owner and record.config:
                running.add(config_key(server))
                if config_key(server) not in self.elsewhere:
                    self.strategy.pending(server)
        for key in self.elsewhere - running:
            self.strategy.done(json.loads(key))
        self.elsewhere = running

    def _next_launch(self) -> int:
        """A launch number of our own: making its folder reserves it, also against other workers."""
        launches = self.folder / "launches"
        number = max((int(p.name) for p in launches.glob("[0-9]*") if p.name.isdigit()), default=0)
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):
                (launches / f"{number:04d}").mkdir(parents=True)
                return number

    def _write_pivots(self) -> None:
        known = {pivot["key"] for pivot in read_pivots(self.folder)}
        for pivot in self.strategy.pivots():
            if pivot.key not in known:
                known.add(pivot.key)
                append_line(self.folder / "pivots.jsonl", json.dumps(pivot.to_json()))
                self.watcher.pivot(pivot)


def read_pivots(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The pivots written so far; a line cut off by a kill is left out."""
    try:
        lines = (folder / "pivots.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    pivots = []
    for line in lines:
        try:
            pivots.append(json.loads(line))
        except ValueError:
            continue
    return pivots


def observation_of(study: Study, record: TrialRecord) -> Observation:
    """One finished trial as the strategy sees it."""
    server, load = study.space.split(record.config)
    attrs = record.attrs
    if record.crashed:
        outcome: Measured | Crash = crash_of(attrs)
        before_load = attrs.get("crash_stage") != "serving"
        return Observation(server, None if before_load else load, outcome, attrs["cost_s"], attrs["launch_s"],
                           record.number)
    noise = attrs.get("relative_error")
    invalid = bool(attrs.get("invalid_reasons"))
    outcome = Measured(None if invalid else record.value, bool(attrs.get("feasible")), attrs.get("limit_ratios") or {},
                       None if noise is None else noise / 2)
    return Observation(server, load, outcome, attrs["cost_s"], attrs["launch_s"], record.number)
