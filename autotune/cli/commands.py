"""What each verb does, given checked settings. Wiring only: the work is in the modules it calls."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from autotune.cli import check as checklist
from autotune.config.identity import command_line, identity, provenance, versions
from autotune.config.settings import Settings
from autotune.engine.gpus import visible_gpus
from autotune.engine.host import engine_version
from autotune.engine.orphans import end_orphans
from autotune.executors import gpu_locks, preflight
from autotune.measure.objective import Objective
from autotune.power.meter import PowerSettings
from autotune.records import AutotuneError, HostCannotRun, NothingFeasible, UsageError
from autotune.space.constraints import Rule
from autotune.storage.urls import sqlite_url
from autotune.utils import logging as journal
from autotune.utils.files import no_link

if TYPE_CHECKING:
    from autotune.cli.progress import Progress
    from autotune.executors.local import LocalExecutor
    from autotune.executors.parallel import ParallelExecutor
    from autotune.executors.ray import RayExecutor
    from autotune.search.protocol import Strategy
    from autotune.storage.study import Study
    from autotune.tuning.loop import Tuner

LOG = logging.getLogger("autotune")


def run(verb: str, settings: Settings, verbose: bool) -> int:
    """Do one verb; returns its exit code."""
    if verb == "check":
        return check(settings)
    if verb in ("tune", "matrix", "worker"):
        with prepared(settings, verbose, alone=verb != "worker"):
            return {"tune": tune, "matrix": matrix, "worker": worker}[verb](settings)
    study = open_study(settings, create=False)
    attrs = study.attrs()
    settings = settings.ruled(attrs.get("identity", {}).get("engine_version"))
    settings = settings.without([Rule({k: tuple(v) for k, v in rule["when"].items()}, rule["because"])
                                 for rule in attrs.get("unavailable") or ()])
    if verb == "report":
        from autotune.report.report import report

        return report(settings, study)
    if verb == "export":
        from autotune.export.launch_files import export

        print(export(settings, study))
        return 0
    if verb == "dashboard":
        from autotune.report.dashboard import dashboard

        return dashboard(settings, study)
    raise UsageError(f"{verb} is no verb")


def check(settings: Settings) -> int:
    """Print what this host lacks; exit 4 when the baseline, or the configuration asked for, cannot run."""
    label, config = checklist.BASELINE, None
    if settings.config != checklist.BASELINE:
        from autotune.tuning import matrix as table

        label, config = table.chosen(settings.config, settings.space, open_study(settings, create=False).records())
    report = preflight.check(settings, config)
    try:
        count = preflight.side_by_side(settings, report.gpus, report.version)
    except HostCannotRun as error:
        count, report = 1, dataclasses.replace(report, problems=(*report.problems, str(error)))
    print(checklist.shown(report, settings, count, label, config))
    return HostCannotRun.exit_code if report.problems else 0


def tune(settings: Settings) -> int:
    """Run or resume the study, then report and export."""
    from autotune.executors.parallel import ParallelExecutor
    from autotune.export.launch_files import export
    from autotune.report.report import report as tell
    from autotune.search.protocol import StopKind
    from autotune.search.strategy import LaunchAware
    from autotune.tuning import bug_reports, interference
    from autotune.tuning.confirm import confirm

    with contextlib.ExitStack() as held:
        hosts = held.enter_context(cluster(settings)) if settings.executor.kind == "ray" else None
        report, power, refused = hosts.preflight() if hosts is not None else here(settings)
        refuse(settings, report)
        settings = dataclasses.replace(settings, objective=objective_for(settings, power.source)).without(report.barred)
        study = open_study(settings, report=report)
        study.lead()
        held.enter_context(study.fail_running_on_exit())
        study.set_attr("unavailable", [{"when": {k: list(v) for k, v in rule.when.items()},
                                   "because": settings.redactor.text(rule.because)} for rule in report.barred])
        study.set_attr("provenance", provenance(settings, report.version, report.gpus))
        study.set_attr("strategy", settings.study.strategy)
        with progress(settings, study, energy_text(power, refused)) as watcher:
            place = hosts or here_or_slots(settings, report, power)
            tuner = make_tuner(settings, study, place, watcher)
            stop = tuner.run()
            watcher.note(f"stopped: {stop.reason}")
            if isinstance(tuner.strategy, LaunchAware) and (lesson := tuner.strategy.past_report()) is not None:
                study.set_attr("warm_start", lesson)
                watcher.note(lesson)
            if isinstance(place, ParallelExecutor):
                if settings.parallel.check and stop.kind is not StopKind.HOST:
                    interference.check(tuner, place)
                tuner.bench, tuner.at_once = place.alone, 1  # whatever decides
            bug_reports.isolate(tuner, settings.study.isolate)
            if settings.study.confirm.finalists:
                decision = confirm(tuner, settings.study.confirm)
                if decision is not None:
                    watcher.note(f"confirmation: {decision.state.replace('_', ' ')}: {decision.reason}")
    tell(dataclasses.replace(settings, out=None), study)  # out= is the launch file's
    made_by = versions(study.attrs()["provenance"])
    for path in bug_reports.write(settings.folder, settings.space, study.records(), made_by):
        print(f"bug report: {path}")
    if stop.kind is StopKind.HOST:
        raise HostCannotRun(stop.reason)
    try:
        print(f"launch script: {export(settings, study)}")
    except NothingFeasible as nothing:
        print(f"autotune: {nothing}", file=sys.stderr)
        return nothing.exit_code
    return 0


def worker(settings: Settings) -> int:
    """Search along with the others on a study, until nothing is left to launch. `tune` confirms and reports."""
    from autotune.search.protocol import StopKind
    from autotune.tuning import worker as fleet

    if settings.executor.kind == "ray":
        raise UsageError("a worker launches on its own host: leave executor=ray out, or run tune executor=ray once")
    report, power, refused = here(settings)
    settings = dataclasses.replace(settings, objective=objective_for(settings, power.source)).without(report.barred)
    study = fleet.join(lambda: open_study(settings))
    made_by = provenance(settings, report.version, report.gpus)
    for name, value in (("provenance", made_by), ("strategy", settings.study.strategy)):
        if name not in study.attrs():
            study.set_attr(name, value)
    with study.fail_running_on_exit(), progress(settings, study, energy_text(power, refused)) as watcher:
        if not report.gpus.gpus and (others := fleet.neighbours(study)):
            watcher.note(f"{others} other worker{'s' if others > 1 else ''} on this host's CPU cores: their "
                         "measurements and ours disturb each other")
        stop = make_tuner(settings, study, here_or_slots(settings, report, power), watcher).run()
    mine = [record for record in study.records() if record.start.owner == study.owner]
    print(f"this worker made {len(mine)} of {len(study.records())} trials and stopped: {stop.reason}\n"
          f"{command_line(settings, 'tune')} confirms and reports")
    if stop.kind is StopKind.HOST:
        raise HostCannotRun(stop.reason)
    return 0


def progress(settings: Settings, study: Study, energy: str) -> Progress:
    """Who tells of the study's progress, from the trials that it has on."""
    from autotune.cli.progress import Progress

    past = study.records()
    made = Progress(settings.space.baseline, settings.objective.unit, settings.study.launches, past=past)
    made.note(f"study {settings.study_name}: {len(past)} trials so far, objective "
              f"{settings.objective.name.replace('_', ' ')}, energy from {energy}")
    return made


def make_tuner(settings: Settings, study: Study, place: LocalExecutor | ParallelExecutor | RayExecutor,
               watcher: Progress) -> Tuner:
    """The loop of these settings, on this host or on those that Ray chooses."""
    from autotune.executors.parallel import ParallelExecutor
    from autotune.measure.objective import evaluator
    from autotune.tuning import worker as fleet
    from autotune.tuning.loop import Tuner

    at_once = settings.executor.at_once if settings.executor.kind == "ray" else 1
    if isinstance(place, ParallelExecutor):
        at_once = place.at_once
        watcher.note(f"up to {at_once} launches side by side: what they measure is for screening")

    fleet.share_references(study, place.gate.file)
    place.gate.references()  # those of other settings are said now, not after a launch
    return Tuner(study, make_strategy(settings), place, settings.folder,
                 evaluator(settings.objective, settings.limits), watcher, Notes(settings), settings.study.trials,
                 at_once=at_once,
                 exchange=lambda: fleet.share_references(study, place.gate.file))


def cluster(settings: Settings) -> contextlib.AbstractContextManager[RayExecutor]:
    """The Ray cluster of these settings."""
    from autotune.executors.ray import connected

    return connected(settings)


def bench(settings: Settings, report: preflight.Preflight, power: PowerSettings) -> LocalExecutor:
    """This host."""
    from autotune.executors.local import LocalExecutor

    return LocalExecutor(settings, report.version, report.gpus, power)


def here_or_slots(settings: Settings, report: preflight.Preflight,
                  power: PowerSettings) -> LocalExecutor | ParallelExecutor:
    """This host, shared out as `parallel.slots` asks."""
    from autotune.executors import parallel as slots

    alone = bench(settings, report, power)
    return slots.of(settings, alone) or alone


def here(settings: Settings) -> tuple[preflight.Preflight, PowerSettings, dict[str, str]]:
    """(preflight, power settings, meters refused) of this host. Raises HostCannotRun."""
    from autotune.executors.local import working_power

    report = ready_or_refuse(settings)
    return report, *working_power(settings, report.gpus)


def make_strategy(settings: Settings) -> Strategy:
    """The strategy that the settings name. Raises UsageError for a past study that cannot be read or used."""
    from autotune.search.past_studies import past_observations
    from autotune.search.protocol import Limits
    from autotune.search.samplers import OptunaStrategy
    from autotune.search.strategy import LaunchAware

    study = settings.study
    limits = Limits(launches=study.launches, hours=study.hours, gain=study.min_gain)
    if study.strategy != "autotune":
        if study.warm_start:
            raise UsageError(f"study.strategy={study.strategy} learns nothing from study.warm_start: leave one out")
        return OptunaStrategy(settings.space, study.strategy, limits, study.seed)
    past = past_observations(study.warm_start, settings.space, settings.objective.name)
    return LaunchAware(settings.space, limits, study.seed, past)


@dataclasses.dataclass(frozen=True)
class Notes:
    """What optuna-dashboard shows beside a trial: files before it is told, a note after."""

    settings: Settings

    def attach(self, trial: Any, launch: pathlib.Path) -> None:
        from autotune.report.notes import attach

        attach(trial, self.settings.folder / "artifacts",
               [launch / "server.log", launch / f"power-{trial.number}.csv", launch / f"requests-{trial.number}.jsonl"])

    def annotate(self, study: Any, record: Any) -> None:
        from autotune.report.notes import annotate

        annotate(study, record)


def ready_or_refuse(settings: Settings) -> preflight.Preflight:
    """Preflight; raises HostCannotRun with everything that is missing."""
    report = preflight.check(settings)
    refuse(settings, report)
    return report


def refuse(settings: Settings, report: preflight.Preflight) -> None:
    """Raises HostCannotRun with everything that is missing."""
    if report.problems:
        raise HostCannotRun(f"space {settings.space.name} cannot run here: {'; '.join(report.problems)} "
                            f"({command_line(settings, 'check')} tells more)")


def objective_for(settings: Settings, energy_source: str) -> Objective:
    """Without any meter, tokens per joule cannot be known: the objective is then tokens per second."""
    return settings.objective.without_energy() if energy_source == "none" else settings.objective


def energy_text(power: PowerSettings, refused: Mapping[str, str]) -> str:
    """Where the energy comes from, and why not from a better source."""
    text = power.source
    if power.source == "cpu_time":
        text += f" (ASSUMED: CPU seconds x {power.watts_per_core} W per core, no sensor)"
    return text + "".join(f"; not {why}" for why in refused.values())


def matrix(settings: Settings) -> int:
    """The concurrency x context table of one configuration on one launch."""
    from autotune.cli.progress import Progress
    from autotune.tuning import matrix as table

    if settings.executor.kind == "ray":
        raise UsageError("matrix launches on its own host: leave executor=ray out")
    report, power, _ = here(settings)
    has_study = settings.study.storage is not None or (settings.folder / "study.db").exists()
    records = open_study(settings, create=False).records() if has_study else []
    label, config = table.chosen(settings.config, settings.space, records)
    server = settings.space.split(config)[0]
    with Progress(settings.space.baseline, "", None) as watcher:
        rows = table.measure_all(bench(settings, report, power), server, label, settings.folder,
                                 table.cells(settings), watcher.stage,
                                 lambda row: table.save(settings.folder, row))
    table.show(rows)
    print(f"rows: {table.file(settings.folder)}")
    return 0


def open_study(settings: Settings, create: bool = True, report: preflight.Preflight | None = None) -> Study:
    """The study of these settings; refuses to mix. Raises UsageError or AutotuneError with one line."""
    from autotune.storage.study import Study

    url = settings.study.storage or sqlite_url(settings.folder)
    if not create and settings.study.storage is None and not (settings.folder / "study.db").exists():
        raise UsageError(f"there is no study in {settings.folder} yet: "
                         f"run {command_line(settings, 'tune')} first")
    # whoever only tells of a study needs neither its engine nor its GPUs
    if not create:
        who: Mapping[str, Any] = {"space_digest": settings.space.digest}
    elif report is not None:
        who = identity(settings, report.version, report.gpus)
    else:
        who = identity(settings, engine_version(settings.engine), visible_gpus())
    return Study.open(url, settings.study_name, settings.space, who, sorted(settings.limits), create,
                      settings.study.lost_after_s, settings.study.storage_wait_s)


@contextlib.contextmanager
def prepared(settings: Settings, verbose: bool, alone: bool = True) -> Iterator[None]:
    """The study's folder: made, logged to, and rid of what a dead tuner left running.

    alone: locked for this process, except against workers.
    """
    folder = settings.folder
    try:
        (folder / "launches").mkdir(parents=True, exist_ok=True)
        lock = _own(folder / "lock") if alone else contextlib.nullcontext()
        journal.open_journal(folder, verbose, settings.redactor.values)
    except OSError as error:
        raise AutotuneError(f"cannot write in {folder}: {error.strerror or error} (outputs=DIR chooses another place)"
                            ) from error
    with lock as file:
        if file is not None:
            _lock(file)
        for ended in end_orphans(folder):
            print(f"autotune: ended {ended.processes} process(es) that launch {ended.launch} of a dead tuner "
                  "left running", file=sys.stderr)
        try:
            here = settings.device != "cpu" and settings.executor.kind == "local"
            with gpu_locks.locked(visible_gpus().gpus if here else ()):
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


def _own(path: pathlib.Path) -> TextIO:
    """A file of ours to lock, not through a link. Raises OSError."""
    return os.fdopen(no_link(str(path), os.O_RDWR | os.O_CREAT), "r+")


def _lock(file: TextIO) -> None:
    """Raises AutotuneError when another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise AutotuneError(f"another autotune (pid {file.read().strip() or 'unknown'}) runs this study; "
                            "use the verb worker to join it, or study.name=NAME for one of your own") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
