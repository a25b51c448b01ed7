"""The verbs. A new verb is one function and one entry of VERBS, at the end. The work is in the modules called here."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from autotune.cli.output import BASELINE, Progress, check_report, open_journal, print_table
from autotune.config.settings import Settings, identity, provenance, versions
from autotune.engine.gpus import visible_gpus
from autotune.engine.host import engine_version
from autotune.engine.orphans import end_orphans
from autotune.executors import open_executor, preflight, topology
from autotune.records import AutotuneError, Config, HostCannotRun, NothingFeasible, UsageError
from autotune.space.constraints import Rule
from autotune.storage.database import sqlite_url
from autotune.utils.text import REPLACED, printable

if TYPE_CHECKING:
    from autotune.executors.base import Executor
    from autotune.search.strategy import Strategy
    from autotune.storage.study import Study
    from autotune.tuning.loop import Tuner

LOG = logging.getLogger("autotune")
SUMMARY = ("file", "stage", "category", "blame", "signature")  # columns of classify on a terminal


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb: `run` takes settings, or words of the command line (not `space`), or settings and a study (`study`).

    `starts`: it starts the engine and works in the study's folder; `alone`: it locks that folder, except for workers.
    `study`: it reads a study that exists, and needs neither its engine nor its GPUs.
    """

    run: Callable[..., int]
    help: str
    space: bool = True
    starts: bool = False
    alone: bool = False
    study: bool = False

    def call(self, settings: Settings, verbose: bool) -> int:
        """Run a verb on a space; returns the exit code."""
        if self.starts:
            with study_folder(settings, verbose, self.alone):
                return self.run(settings)
        if not self.study:
            return self.run(settings)
        study = open_study(settings, create=False)
        attrs = study.attrs()
        settings = settings.ruled(attrs.get("identity", {}).get("engine_version"))
        return self.run(settings.without([Rule({k: tuple(v) for k, v in rule["when"].items()}, rule["because"])
                                          for rule in attrs.get("unavailable") or ()]), study)


def tune(settings: Settings) -> int:
    """Run or resume the study, then report and export."""
    from autotune.executors.parallel import ParallelExecutor
    from autotune.export import launch_files
    from autotune.report import render
    from autotune.search.launch_aware import LaunchAware
    from autotune.search.strategy import StopKind
    from autotune.tuning import bug_reports
    from autotune.tuning.confirm import Budget, check_interference, confirm

    with contextlib.ExitStack() as held:
        executor = held.enter_context(open_executor(settings))
        host, settings = executor.report, executor.settings
        study = open_study(settings, host=host)
        study.lead()
        held.enter_context(study.fail_running_on_exit())
        study.set_attr("unavailable", [{"when": {k: list(v) for k, v in rule.when.items()},
                                   "because": settings.redactor.text(rule.because)} for rule in host.unavailable])
        study.set_attr("provenance", provenance(settings, host.version, host.gpus))
        study.set_attr("strategy", settings.study.strategy)
        listener = held.enter_context(progress(settings, study, host))
        tuner = make_tuner(settings, study, executor, listener)
        stop = tuner.run()
        listener.note(f"stopped: {stop.reason}")
        if isinstance(tuner.strategy, LaunchAware) and (lesson := tuner.strategy.past_report()) is not None:
            study.set_attr("warm_start", lesson)
            listener.note(lesson)
        if isinstance(executor, ParallelExecutor):
            if settings.parallel.check and stop.kind is not StopKind.HOST:
                check_interference(tuner, executor)
            tuner.executor = executor.alone
        bug_reports.isolate(tuner, settings.study.isolate)
        budget = Budget(settings.study.launches, settings.study.hours)
        if settings.study.confirm.finalists and stop.kind is not StopKind.HOST and (
                decision := confirm(tuner, settings.study.confirm, budget)) is not None:
            listener.note(f"confirmation: {decision.state.replace('_', ' ')}: {decision.reason}")
    render.report(dataclasses.replace(settings, out=None), study)  # out= names the launch file
    made_by = versions(study.attrs()["provenance"])
    for path in bug_reports.write(settings.folder, settings.space, study.records(), made_by):
        print(f"bug report: {path}")
    if stop.kind is StopKind.HOST:
        raise HostCannotRun(stop.reason)
    try:
        print(f"launch script: {launch_files.export(settings, study)}")
    except NothingFeasible as nothing:
        print(f"autotune: {nothing}", file=sys.stderr)
        return nothing.exit_code
    return 0


def worker(settings: Settings) -> int:
    """Join the search of a study until nothing is left to launch. `tune` confirms and reports."""
    from autotune.search.strategy import StopKind
    from autotune.tuning.worker import join, workers_here

    if settings.executor.kind == "ray":
        raise UsageError("a worker launches on its own host: leave executor=ray out, or run tune executor=ray once")
    with open_executor(settings) as executor:
        host, settings = executor.report, executor.settings
        study = join(lambda: open_study(settings))
        for name, value in (("provenance", provenance(settings, host.version, host.gpus)),
                            ("strategy", settings.study.strategy)):
            if name not in study.attrs():
                study.set_attr(name, value)
        with study.fail_running_on_exit(), progress(settings, study, host) as listener:
            if not host.gpus.gpus and (others := workers_here(study)):
                listener.note(f"{others} other worker{'s' if others > 1 else ''} on this host's CPU cores: their "
                              "measurements and ours disturb each other")
            stop = make_tuner(settings, study, executor, listener).run()
    own = [record for record in study.records() if record.start.owner == study.owner]
    print(f"this worker made {len(own)} of {len(study.records())} trials and stopped: {stop.reason}\n"
          f"{settings.shown_command('tune')} confirms and reports")
    if stop.kind is StopKind.HOST:
        raise HostCannotRun(stop.reason)
    return 0


def matrix(settings: Settings) -> int:
    """Measure and print the concurrency x context table of one configuration."""
    from autotune.executors.local import LocalExecutor
    from autotune.tuning import matrix as table

    if settings.executor.kind == "ray":
        raise UsageError("matrix launches on its own host: leave executor=ray out")
    executor = LocalExecutor(settings)
    executor.preflight()
    has_study = settings.study.storage is not None or (settings.folder / "study.db").exists()
    records = open_study(settings, create=False).records() if has_study else []
    label, config = table.chosen(settings.config, settings.space, records)
    with Progress(settings.space.baseline, "", None) as listener:
        rows = table.measure_all(executor, settings.space.split(config)[0], label, settings.folder,
                                 table.cells(settings), listener.stage)
    table.show(rows)
    print(f"rows: {table.file(settings.folder)}")
    return 0


def check(settings: Settings) -> int:
    """Print the result of the preflight; exit 4 when the baseline, or the configuration asked for, cannot run."""
    label, config = BASELINE, None
    if settings.config != BASELINE:
        from autotune.tuning.matrix import chosen

        label, config = chosen(settings.config, settings.space, open_study(settings, create=False).records())
    report = preflight.check(settings, config)
    try:
        count = preflight.launches_at_once(settings, report.gpus, report.version)
    except HostCannotRun as error:
        count, report = 1, dataclasses.replace(report, problems=(*report.problems, str(error)))
    print(check_report(report, settings, count, label, config))
    return HostCannotRun.exit_code if report.problems else 0


def classify(files: Sequence[str]) -> int:
    """Explain server logs (files, folders, `-` for standard input), one JSON object a line for each file and container.

    Returns 2 when one cannot be read. A terminal gets a table and the next steps instead of JSON.

    The keys are file, stage, category, blame, signature, excerpt, explanation, next_step, blame_why, blame_also, engine
    and container.
    """
    from autotune.crash.classify import classify as explain
    from autotune.crash.log import containers
    from autotune.crash.source import logs, read_stream

    if not files:
        raise UsageError("classify needs at least one log file or folder, or - for standard input")
    exit_code, rows, steps, table = 0, list[tuple[str, ...]](), list[str](), sys.stdout.isatty()
    for name in files:
        try:
            for file, data in [("-", read_stream(sys.stdin.buffer))] if name == "-" else logs(pathlib.Path(name)):
                for container, text in containers(data).items():
                    crash = explain(text)
                    line = {"file": file, "stage": str(crash.stage), "category": crash.category,
                            "blame": str(crash.blame), "signature": crash.signature, "excerpt": crash.excerpt,
                            "explanation": crash.explanation, "next_step": crash.next_step,
                            "blame_why": crash.blame_why, "blame_also": [str(blame) for blame in crash.blame_also],
                            "engine": crash.engine, "container": container}
                    rows.append((f"{file} {container}".strip(), *(str(line[key]) for key in SUMMARY[1:])))
                    steps.append(crash.next_step)
                    if not table:
                        print(printable(json.dumps(line, ensure_ascii=False), instead=REPLACED), flush=True)
        except OSError as error:
            print(f"classify: cannot read {name}: {error.strerror or error}", file=sys.stderr)
            exit_code = UsageError.exit_code
    if table and rows:
        print_table(SUMMARY, rows)
        for row, step in zip(rows, steps, strict=True):
            print(printable(f"{row[0]}: {step}", instead=REPLACED))
    return exit_code


def report(settings: Settings, study: Study) -> int:
    from autotune.report import render

    return render.report(settings, study)


def export(settings: Settings, study: Study) -> int:
    from autotune.export import launch_files

    print(launch_files.export(settings, study))
    return 0


def dashboard(settings: Settings, study: Study) -> int:
    from autotune.report import dashboard

    return dashboard.dashboard(settings, study)


def progress(settings: Settings, study: Study, host: preflight.Preflight) -> Progress:
    """The listener that prints the study's progress."""
    past, energy = study.records(), host.power.source
    if energy == "cpu_time":
        energy += f" (ASSUMED: CPU seconds x {host.power.watts_per_core} W per core, no sensor)"
    listener = Progress(settings.space.baseline, settings.objective.unit, settings.study.launches, past=past)
    listener.note(f"study {settings.study_name}: {len(past)} trials so far, objective "
                  f"{settings.objective.name.replace('_', ' ')}, energy from {energy}"
                  + "".join(f"; not {reason}" for reason in host.refused.values()))
    if kept := settings.study.confirm.reserve(settings.study.launches):
        listener.note(f"{settings.study.launches} launches, of which {kept} are kept for the confirmation of the best")
    return listener


def make_tuner(settings: Settings, study: Study, executor: Executor, listener: Progress) -> Tuner:
    """The loop of these settings."""
    from autotune.measure.objective import evaluator
    from autotune.report.dashboard import annotate, attach
    from autotune.tuning.loop import Tuner
    from autotune.tuning.roofline import Roofline
    from autotune.tuning.worker import share_references

    if executor.capacity > 1 and settings.executor.kind == "local":
        listener.note(f"up to {executor.capacity} launches side by side: what they measure is for screening")
    gate = executor.gate
    share_references(study, gate.file)
    gate.references()  # refuses those of other settings before anything is launched
    roofline = Roofline.read(settings, executor.report.version, gpu_name(settings, executor.report))
    if roofline is not None and settings.study.strategy == "autotune" and not settings.study.warm_start:
        listener.note("the search starts from the roofline of this model on these GPUs, and learns how far to trust it")
    return Tuner(study, make_strategy(settings, roofline.objective if roofline else None), executor, settings.folder,
                 evaluator(settings.objective, settings.limits), listener, attach, annotate, settings.study.trials,
                 exchange=lambda: share_references(study, gate.file))


def gpu_name(settings: Settings, host: preflight.Preflight) -> str:
    """The name of the GPUs that servers run on; "" without any."""
    return host.gpus.gpus[0].name if host.gpus.gpus and settings.device != "cpu" else ""


def make_strategy(settings: Settings, expected: Callable[[Config, Config], float | None] | None = None) -> Strategy:
    """The strategy that the settings name; `expected`: the objective by a formula.

    Raises UsageError for a past study that cannot be read or used.
    """
    from autotune.search.launch_aware import LaunchAware
    from autotune.search.optuna_samplers import OptunaStrategy
    from autotune.search.strategy import Limits
    from autotune.search.transfer import past_observations

    study = settings.study
    kept = study.confirm.reserve(study.launches)
    hours = study.hours if study.hours is None or not study.launches else study.hours * (1 - kept / study.launches)
    limits = Limits(study.launches and study.launches - kept, hours, study.min_gain)
    if study.strategy != "autotune":
        if study.warm_start:
            raise UsageError(f"study.strategy={study.strategy} learns nothing from study.warm_start: leave one out")
        return OptunaStrategy(settings.space, study.strategy, limits, study.seed)
    past = past_observations(study.warm_start, settings.space, settings.objective.name)
    return LaunchAware(settings.space, limits, study.seed, past, expected)


def open_study(settings: Settings, create: bool = True, host: preflight.Preflight | None = None) -> Study:
    """The study of these settings. Raises UsageError for one of other conditions, AutotuneError for its storage."""
    from autotune.storage.study import Study

    url = settings.study.storage or sqlite_url(settings.folder)
    if not create and settings.study.storage is None and not (settings.folder / "study.db").exists():
        raise UsageError(f"there is no study in {settings.folder} yet: "
                         f"run {settings.shown_command('tune')} first")
    conditions = {"space_digest": settings.space.digest}  # a reader needs neither the engine nor the GPUs of a study
    if create:
        conditions = identity(settings, *((host.version, host.gpus) if host is not None else
                                          (engine_version(settings.engine), visible_gpus())))
    return Study.open(url, settings.study_name, settings.space, conditions, create=create,
                      lost_after_s=settings.study.lost_after_s, wait_s=settings.study.storage_wait_s)


@contextlib.contextmanager
def study_folder(settings: Settings, verbose: bool, alone: bool = True) -> Iterator[None]:
    """Make the study's folder and log to it; end servers that a dead tuner left running; lock this host's GPUs.

    alone: lock the folder for this process, except for workers. Any exception becomes an AutotuneError.
    """
    folder = settings.folder
    with contextlib.ExitStack() as held:
        try:
            (folder / "launches").mkdir(parents=True, exist_ok=True)
            if alone:
                held.enter_context(topology.exclusive(folder / "lock", lambda pid: (
                    f"another autotune (pid {pid}) runs this study; use the verb worker to join it, or "
                    "study.name=NAME for one of your own")))
            open_journal(folder, verbose, settings.redactor.values)
        except OSError as error:
            raise AutotuneError(f"cannot write in {folder}: {error.strerror or error} (outputs=DIR chooses another "
                                "place)") from error
        for launch, processes in end_orphans(folder).items():
            print(f"autotune: ended {processes} process(es) that launch {launch} of a dead tuner "
                  "left running", file=sys.stderr)
        try:
            here = settings.device != "cpu" and settings.executor.kind == "local"
            with topology.locked(visible_gpus().gpus if here else ()):
                yield
        except AutotuneError as error:
            LOG.error("%s", error)
            raise
        except Exception as error:
            LOG.exception("our own fault")
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise AutotuneError(f"cannot write in {folder}: {error.strerror}: mend that and run the same command; "
                                    "the study is kept") from error
            raise AutotuneError(f"our own fault ({type(error).__name__}: {error}); the traceback is in {folder}/logs; "
                                "the study is kept and can be resumed") from error


VERBS = {
    "tune": Verb(tune, "run or resume the study (the default)", starts=True, alone=True),
    "check": Verb(check, "what this host lacks, the exact command (or that of config=TRIAL), and every choice with its "
                         "reason"),
    "matrix": Verb(matrix, "concurrency x context table for config=baseline, config=best or config=TRIAL on one launch",
                   starts=True, alone=True),
    "classify": Verb(classify, "explain server logs: classify FILE... (also folders and gzip, - reads standard input); "
                               "needs no space",
                     space=False),
    "report": Verb(report, "write report.html and report.md (or out=FILE), print the summary (report.format=json for "
                           "scripts)", study=True),
    "export": Verb(export, "write the best configuration (or trial=N): format=sh, systemd, compose, k8s, yaml, "
                           "out=FILE", study=True),
    "dashboard": Verb(dashboard, "optuna-dashboard on this study, on loopback only", study=True),
    "worker": Verb(worker, "join a study from another process or host", starts=True),
}
