"""The core loop on one page: reserve a launch, start it, measure its load parts, record the outcomes, repeat.

`Tuner.run()` serves the verbs tune and worker. Strategies are in search/, launches in executors/, trials in storage/;
this module connects them so that killing it at any line loses the launch in progress at most.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune.executors.base import PLACED, Executor, HostLost, RunningServer
from autotune.executors.parallel import LaunchPool
from autotune.records import Config, Crash, Measurement, Score
from autotune.search.strategy import Launch, Stop, StopKind, Strategy
from autotune.storage.study import Study
from autotune.storage.trial import LaunchFacts, TrialRecord
from autotune.tuning import ProgressListener
from autotune.tuning.worker import StudySync, new_launch_folder

IDLE_POLLS = 10  # poll-interval multiplier while launches run and the strategy has nothing to propose


@dataclasses.dataclass
class Plan:
    """A reserved launch. Its first trial is asked, so that no other worker makes the same launch.

    `trial` (Optuna's) has no outcome yet; its time counts from `began`. `search`: the strategy learns from the outcome.
    """

    step: Launch
    load: Config
    number: int
    trial: Any
    search: bool
    first: bool = True
    began: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass
class Tuner:
    study: Study
    strategy: Strategy
    executor: Executor
    folder: pathlib.Path
    evaluate: Callable[[Measurement], Score]
    listener: ProgressListener
    attach: Callable[[Any, pathlib.Path], Any]  # (Optuna's trial, launch folder): attaches its files for the dashboard
    annotate: Callable[[Study, TrialRecord], None]  # writes the trial's note for the dashboard
    trials: int | None = None  # most trials of the search, crashes included
    poll_s: float = 1.0  # interval of looking at other workers while there is nothing to do
    exchange: Callable[[], None] = lambda: None  # shares more than trials with other workers

    def __post_init__(self) -> None:
        self.sync = StudySync(self.study, self.strategy, self.folder)
        self._mutex = threading.RLock()  # taken before the study's lock, never while holding it

    def run(self) -> Stop:
        """Search until the strategy stops and no worker has a launch running. KeyboardInterrupt: can be resumed."""
        with LaunchPool(self.executor) as pool:
            while not isinstance(plan := self._next(pool), Stop):
                pool.submit(self.launch, plan)
        self.study.set_attr("stop", {"kind": str(plan.kind), "reason": plan.reason})
        return plan

    def launch(self, plan: Plan) -> None:
        """One launch, measured under every load part that the strategy asks for."""
        try:
            with self._server(plan) as server:
                while plan.trial is not None:
                    self._measure(plan, server)
        except HostLost as lost:
            self.listener.note(f"launch {plan.number}: {lost}: its trial is marked FAIL and will be asked again")
        finally:
            with self._mutex:
                self.strategy.done(plan.step.server)

    def measure(self, config: Config, reason: str, **attrs: Any) -> TrialRecord:
        """One launch and one trial beside the search, for isolation and interference."""
        server_part, load = self.study.space.split(config)
        return self.measure_loads(server_part, [load], reason, **attrs)[0]

    def measure_loads(self, server_part: Config, loads: Sequence[Config], reason: str,
                      **attrs: Any) -> list[TrialRecord]:
        """One launch beside the search and a trial for each load part, in order, until the server crashes."""
        self.executor.has_room()  # the disk may be full
        while True:
            with self._mutex, self.study.locked():
                plan = self._plan(Launch(server_part, reason, 0.0, 1.0, "confirm"), loads[0], search=False, **attrs)
            try:
                with self._server(plan) as server:
                    records = [self._measure(plan, server)]
                    for load in loads[1:]:
                        if not server.alive:
                            break
                        plan.load = load
                        plan.trial = self.study.ask({**server_part, **load}, plan.number, reason=reason, **attrs)
                        records.append(self._measure(plan, server))
                    return records
            except HostLost as lost:
                self.listener.note(f"launch {plan.number}: {lost}: its trial is marked FAIL, and it is made again")

    def _next(self, pool: LaunchPool) -> Plan | Stop:
        """Wait until a launch can be made, or until a stop is final: no launch of any worker can revoke it."""
        noted = False
        while True:
            plan = self._reserve() if pool.has_room() else None
            if isinstance(plan, Plan) or plan and not pool.running and not self.sync.others:
                return plan
            if plan and not pool.running and not noted:
                noted = True
                self.listener.note(f"nothing to launch before other workers are done ({plan.reason})")
            pool.wait(self.poll_s * (IDLE_POLLS if plan and pool.running else 1))

    def _reserve(self) -> Plan | Stop:
        """Sync with other workers, propose and ask under one lock, after freeing the trials of dead workers."""
        with self._mutex, self.study.locked():
            for number in self.study.fail_stale_trials():
                self.listener.note(f"trial {number} was left running by a worker that died: it is marked FAIL and will "
                                   "be asked again")
            self.sync.trials()
            self.exchange()
            step = self.strategy.propose() if not self._enough() else \
                Stop(StopKind.TRIALS, f"all {self.trials} trials are used")
            self.sync.pivots(self.listener)
            if isinstance(step, Stop):
                return step
            load = self._next_load(step.server)
            if load is None:
                raise RuntimeError(f"the strategy proposed a launch with nothing to measure on it: {step.server}")
            return self._plan(step, load, search=True)

    def _plan(self, step: Launch, load: Config, search: bool, **attrs: Any) -> Plan:
        number = new_launch_folder(self.folder, self.study.records())
        self.listener.launching(number, step)
        trial = self.study.ask({**step.server, **load}, number, reason=step.reason, **attrs)
        return Plan(step, load, number, trial, search)

    def _enough(self) -> bool:
        return self.trials is not None and self.sync.searched >= self.trials

    def _next_load(self, server: Config) -> Config | None:
        """The strategy's next load part on a server. A launch is not pending to itself."""
        self.strategy.done(server)
        load = self.strategy.next_load(server)
        if self.executor.capacity > 1:
            self.strategy.pending(server)
        return load

    def _next_trial(self, plan: Plan) -> Any:
        """Ask a trial for the next load part on a running server; None when there is none."""
        load = None if self._enough() else self._next_load(plan.step.server)
        if load is None:
            return None
        plan.load = load
        return self.study.ask({**plan.step.server, **load}, plan.number, reason=plan.step.reason)

    @contextlib.contextmanager
    def _server(self, plan: Plan) -> Iterator[RunningServer]:
        """The plan's launch. An exception marks its open trial FAIL."""
        label = f"launch {plan.number}: " if self.executor.capacity > 1 else ""

        def progress(stage: str, after_s: float) -> None:
            if stage.startswith(PLACED):
                plan.began = time.monotonic()
            self.listener.stage(label + stage, after_s)

        try:
            folder = self.folder / "launches" / f"{plan.number:04d}"
            with self.executor.launch(plan.step.server, folder, progress) as server:
                yield server
        except BaseException as error:
            if plan.trial is not None:
                self.study.fail(plan.trial, f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def _measure(self, plan: Plan, server: RunningServer) -> TrialRecord:
        """Measure the plan's trial, or copy the outcome of an equivalent one, and record it. Then the plan's trial is
        the next one on this server: asked under the same lock, or another worker would take the launch as ended."""
        trial = plan.trial
        assert trial is not None
        same = None
        if plan.search and server.crash is None:
            with self._mutex:
                same = self.sync.equivalent(plan.step.server, plan.load, server.resolved_key)
        outcome = server.crash or (same and same.outcome) or server.measure(plan.load, trial.number)
        score = same.score if same else self.evaluate(outcome) if isinstance(outcome, Measurement) else None
        facts = LaunchFacts(tuple(server.argv), server.env, server.resolved, server.resolved_key,
                            server.neighbours, server.crash is None if isinstance(outcome, Crash) else None,
                            server.machine)
        with self._mutex:
            spent = {"cost_s": time.monotonic() - plan.began, "launch_s": server.launch_s if plan.first else 0.0}
            self.attach(trial, server.folder)
            with self.study.locked():
                stored = self.study.tell(trial, outcome, score, facts, same_as=same.number if same else None, **spent)
                plan.trial, plan.first, plan.began = None, False, time.monotonic()
                if plan.search:
                    self.sync.trials()
                    self.sync.pivots(self.listener)
                    plan.trial = self._next_trial(plan) if stored and server.alive else None
            record = self.study.record(trial.number)
            if stored:
                self.annotate(self.study, record)
                self.listener.outcome(record)
            else:
                self.listener.note(f"trial {record.number} was marked FAIL meanwhile by a worker that took this one to "
                                   "be dead: its outcome is dropped")
        return record
