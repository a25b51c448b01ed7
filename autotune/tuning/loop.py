"""The main loop on one page: propose a launch, start it, measure load parts, tell everybody, repeat.

`Tuner.run()` is the verb `tune`, and `worker` on a study that others work on too. What a strategy decides is in
search/, what a launch does in trial.py, what is stored in study.py; this module only connects them, so that killing it
anywhere loses nothing. To hear, propose and ask is one turn: no two workers choose the same launch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from autotune.executors.local import PLACED, HostLost
from autotune.records import Config, Crash, Measurement, Score, config_key
from autotune.search.protocol import Launch, Measured, Observation, Pivot, Stop, StopKind, Strategy
from autotune.storage.schema import PivotFile
from autotune.storage.study import Study
from autotune.storage.trial import LaunchFacts, TrialRecord

IDLE = 10
"""How many times longer than else the loop waits, while launches run, to ask again after nothing was left to launch."""


OURS = re.compile("[0-9]{4,9}")
"""The name of a launch's folder."""


class Watcher(Protocol):
    """Who follows the progress: a terminal, a log, a test."""

    def launching(self, number: int, step: Launch) -> None: ...
    def stage(self, text: str, after_s: float) -> None: ...
    def outcome(self, record: TrialRecord) -> None: ...
    def pivot(self, pivot: Pivot) -> None: ...
    def note(self, text: str) -> None: ...


class TrialAnnotator(Protocol):
    """Who writes down, for people, what a trial was: files before it is told, a note after."""

    def attach(self, trial: Any, launch: pathlib.Path) -> None: ...
    def annotate(self, study: Study, record: TrialRecord) -> None: ...


class RunningServer(Protocol):
    """A launch: crashed at its start, or serving."""

    crash: Crash | None
    launch_s: float
    folder: pathlib.Path
    argv: list[str]
    env: dict[str, str]
    resolved: dict[str, Any]

    @property
    def alive(self) -> bool: ...
    @property
    def neighbours(self) -> int | None: ...
    @property
    def resolved_key(self) -> str | None: ...
    def measure(self, load: Config, label: int | str) -> Measurement | Crash: ...


class Executor(Protocol):
    """What launches are made on: this host (`trial.Bench`), several at once (`slots.Slots`), or hosts that Ray chooses
    (`rayhosts.RayHosts`)."""

    def launch(self, config: Config, folder: pathlib.Path,
               progress: Callable[[str, float], None]) -> contextlib.AbstractContextManager[RunningServer]: ...

    def room(self) -> bool:
        """Whether another launch could start now."""

    def check_room(self, folder: pathlib.Path) -> None:
        """Raises HostCannotRun when the disk of `folder` has no room for what a launch writes."""

    def end(self) -> None:
        """End whatever runs, from another thread: nobody waits for its results any more."""


@dataclasses.dataclass
class _Claim:
    """A launch of ours: its first trial is asked, so nobody else makes it. `trial` is the one asked and not yet told,
    `began` since when its time counts."""

    step: Launch
    load: Config
    number: int
    trial: Any
    began: float = dataclasses.field(default_factory=time.monotonic)
    first: bool = True

    def done(self) -> None:
        self.trial, self.first, self.began = None, False, time.monotonic()


@dataclasses.dataclass
class Tuner:
    study: Study
    strategy: Strategy
    bench: Executor
    folder: pathlib.Path
    evaluate: Callable[[Measurement], Score]
    watcher: Watcher
    notes: TrialAnnotator
    trials: int | None = None  # most trials of the search, crashes included
    at_once: int = 1  # launches of this process side by side
    poll_s: float = 1.0  # how often other workers are looked at while there is nothing to do
    exchange: Callable[[], None] = lambda: None  # what workers share beside trials
    heard: set[int] = dataclasses.field(default_factory=set)
    elsewhere: set[str] = dataclasses.field(default_factory=set)
    searched: int = 0  # trials told to the strategy

    def __post_init__(self) -> None:
        self._mutex = threading.RLock()  # taken before a turn, never within one
        self._ending = False
        self._twins: dict[tuple[str, str], list[TrialRecord]] = {}
        self._decided = 0  # decisions of the strategy that are in pivots.jsonl

    def run(self) -> Stop:
        """Launch and measure until the strategy stops and nobody else has a launch running.

        KeyboardInterrupt leaves a resumable study.
        """
        if self.at_once == 1:
            return self._run(None)
        with concurrent.futures.ThreadPoolExecutor(self.at_once, "launch") as pool:
            try:
                return self._run(pool)
            except BaseException:
                self._ending = True
                self.bench.end()
                raise

    def _run(self, pool: concurrent.futures.Executor | None) -> Stop:
        running: set[concurrent.futures.Future[None]] = set()
        waiting = False
        while True:
            for ended in [one for one in running if one.done()]:
                running.discard(ended)
                ended.result()
            step = self._begin() if len(running) < self.at_once and self.bench.room() else None
            if isinstance(step, _Claim):
                waiting = False
                if pool is None:
                    self.launch(step)
                else:
                    running.add(pool.submit(self.launch, step))
            elif running:
                asked = isinstance(step, Stop)  # again only for news from elsewhere: a proposal costs time
                concurrent.futures.wait(running, self.poll_s * (IDLE if asked else 1),
                                        concurrent.futures.FIRST_COMPLETED)
            elif isinstance(step, Stop) and self.elsewhere:
                if not waiting:
                    waiting = True
                    self.watcher.note(f"nothing to launch before other workers are done ({step.reason})")
                time.sleep(self.poll_s)
            elif isinstance(step, Stop):
                self.study.set_attr("stop", {"kind": str(step.kind), "reason": step.reason})
                return step
            else:  # no host has room now
                time.sleep(self.poll_s)

    def _begin(self) -> _Claim | Stop:
        """Hear, propose and ask in one turn. Trials of dead workers are told FAIL first, so that they come up again."""
        with self._mutex, self.study.turn():
            for number in self.study.fail_stale_trials():
                self.watcher.note(f"trial {number} was left running by a worker that died: told FAIL, "
                                  "will be asked again")
            self._hear()
            self.exchange()
            step: Launch | Stop = self.strategy.propose() if not self._enough() else \
                Stop(StopKind.TRIALS, f"all {self.trials} trials are used")
            self._write_pivots()
            if isinstance(step, Stop):
                return step
            load = self._next_load(step.server)
            if load is None:
                raise RuntimeError(f"the strategy proposed a launch with nothing to measure on it: {step.server}")
            if self.at_once > 1:
                self.strategy.pending(step.server)
            return self._claim(step, load, reason=step.reason)

    def launch(self, claim: _Claim) -> None:
        """One launch with every load part that the strategy wants measured on it."""
        server = claim.step.server
        try:
            with self._live(claim) as live:
                load: Config | None = claim.load
                while load is not None:
                    record = self._measure(claim, live, load)
                    if record.state == "FAIL":
                        return
                    with self._mutex:
                        load = self._next_load(server) if live.alive and not self._enough() else None
                        if load is not None:
                            claim.trial = self.study.ask({**server, **load}, claim.number, reason=claim.step.reason)
        except HostLost as lost:
            self.watcher.note(f"launch {claim.number}: {lost}: told FAIL, will be asked again")
        finally:
            if self.at_once > 1:
                with self._mutex:
                    self.strategy.done(server)

    def block(self, config: Config, reason: str, **attrs: Any) -> TrialRecord:
        """A launch that no strategy asked for (confirmation, isolation), measured under its load part."""
        server_part, load = self.study.space.split(config)
        step = Launch(server_part, reason, 0.0, 1.0, "confirm")
        while True:
            with self._mutex, self.study.turn():
                claim = self._claim(step, load, reason=reason, **attrs)
            try:
                with self._live(claim) as live:
                    return self._measure(claim, live, load, search=False)
            except HostLost as lost:
                self.watcher.note(f"launch {claim.number}: {lost}: told FAIL, made again")

    def _enough(self) -> bool:
        return self.trials is not None and self.searched >= self.trials

    def _next_load(self, server: Config) -> Config | None:
        """The strategy's next load part. A launch of ours is not pending to itself."""
        if self.at_once == 1:
            return self.strategy.next_load(server)
        self.strategy.done(server)
        load = self.strategy.next_load(server)
        self.strategy.pending(server)
        return load

    def _claim(self, step: Launch, load: Config, **attrs: Any) -> _Claim:
        self.bench.check_room(self.folder)
        number = self._next_launch()
        self.watcher.launching(number, step)
        return _Claim(step, load, number, self.study.ask({**step.server, **load}, number, **attrs))

    @contextlib.contextmanager
    def _live(self, claim: _Claim) -> Iterator[RunningServer]:
        """The launch's server; an open trial is told FAIL when we fail."""
        label = f"launch {claim.number}: " if self.at_once > 1 else ""

        def told(stage: str, after_s: float) -> None:
            if stage.startswith(PLACED):
                claim.began = time.monotonic()
            self.watcher.stage(label + stage, after_s)

        try:
            with self.bench.launch(claim.step.server, self.folder / "launches" / f"{claim.number:04d}", told) as live:
                yield live
        except BaseException as error:
            if claim.trial is not None:
                self.study.fail(claim.trial, f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def _measure(self, claim: _Claim, live: RunningServer, load: Config, search: bool = True) -> TrialRecord:
        trial = claim.trial
        twin = self._twin(claim.step.server, load, live) if search else None
        outcome = live.crash or twin or live.measure(load, trial.number)
        if self._ending:
            raise RuntimeError("another launch of this tuner failed or was interrupted")
        launch_s = live.launch_s if claim.first else 0.0
        with self._mutex:
            record = self._record(trial, outcome, live, time.monotonic() - claim.began, launch_s, search)
        claim.done()
        return record

    def _record(self, trial: Any, outcome: Measurement | Crash | TrialRecord, live: RunningServer, cost_s: float,
                launch_s: float, search: bool) -> TrialRecord:
        facts = LaunchFacts(tuple(live.argv), live.env, live.resolved, live.resolved_key, live.neighbours,
                            under_load=live.crash is None if isinstance(outcome, Crash) else None)
        self.notes.attach(trial, live.folder)
        if isinstance(outcome, TrialRecord):
            told = self.study.copy(trial, outcome, facts, cost_s=cost_s, launch_s=launch_s)
        else:
            score = self.evaluate(outcome) if isinstance(outcome, Measurement) else None
            told = self.study.tell(trial, outcome, score, facts, cost_s=cost_s, launch_s=launch_s)
        record = self.study.record(trial.number)
        if search:
            self._hear()
            self._write_pivots()
        if not told:
            self.watcher.note(f"trial {record.number} was told FAIL meanwhile, by a worker that took this one to be "
                              "dead: its outcome is dropped")
            return record
        self.notes.annotate(self.study, record)
        self.watcher.outcome(record)
        return record

    def _twin(self, server: Config, load: Config, live: RunningServer) -> TrialRecord | None:
        """The trial of another configuration that resolved to this very server, measured under this load."""
        if live.resolved_key is None:
            return None
        with self._mutex:
            self._hear()
            for record in self._twins.get((live.resolved_key, config_key(load)), []):
                if config_key(self.study.space.split(record.config)[0]) != config_key(server):
                    return record
        return None

    def _hear(self) -> None:
        """Tell the strategy what it has not heard yet: past trials, and those of other workers on this study."""
        running = set()
        for record in self.study.records():
            if record.number in self.heard:
                continue
            if record.state in ("COMPLETE", "PRUNED"):
                self.heard.add(record.number)
                self._remember(record)
                if not record.confirm:
                    self.searched += 1
                    self.strategy.tell(observation_of(self.study, record))
            elif record.state == "FAIL":
                self.heard.add(record.number)
            elif (record.state == "RUNNING" and record.start.owner != self.study.owner and record.config
                    and not record.confirm):
                server, load = self.study.space.split(record.config)
                running.add(config_key(server))
                self.strategy.pending(server, load)
        for key in self.elsewhere - running:
            self.strategy.done(json.loads(key))
        self.elsewhere = running

    def _remember(self, record: TrialRecord) -> None:
        """Keep what was measured under which load by what a server said of itself."""
        key = record.launch.resolved_key
        if record.state == "COMPLETE" and key is not None and not record.invalid_reasons:
            load = self.study.space.split(record.config)[1]
            self._twins.setdefault((str(key), config_key(load)), []).append(record)

    def _next_launch(self) -> int:
        """A launch number of our own, the same study's on other hosts counted; making its folder reserves it."""
        launches = self.folder / "launches"
        number = max((int(p.name) for p in launches.glob("[0-9]*") if OURS.fullmatch(p.name)), default=0)
        number = max([number, *(record.launch_id or 0 for record in self.study.records())])
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):
                (launches / f"{number:04d}").mkdir(parents=True)
                return number

    def _write_pivots(self) -> None:
        pivots = self.strategy.pivots()
        for pivot in pivots[self._decided:]:
            if PivotFile(self.folder).add(pivot.to_json()):
                self.watcher.pivot(pivot)
        self._decided = len(pivots)


def observation_of(study: Study, record: TrialRecord) -> Observation:
    """One finished trial as the strategy sees it."""
    server, load = study.space.split(record.config)
    cost_s, launch_s = record.cost_s or 0.0, record.launch_s or 0.0
    if record.crash is not None:
        return Observation(server, load if record.crashed_under_load else None, record.crash, cost_s, launch_s,
                           record.number)
    noise = record.measurement.relative_error if record.measurement is not None else None
    score = record.score
    outcome = Measured(None if record.invalid_reasons else record.value, score is not None and score.feasible,
                       record.ratios, None if noise is None else noise / 2)
    return Observation(server, load, outcome, cost_s, launch_s, record.number)
