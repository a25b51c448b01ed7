"""What each verb does, given checked settings. Wiring only: the work is in the modules it calls."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import pathlib
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autotune import journal, preflight
from autotune.config import Settings
from autotune.engine import gpulock
from autotune.engine.leftovers import end_leftovers
from autotune.engine.probe import cpu_name, engine_version, visible_gpus
from autotune.measure.objective import Objective
from autotune.measure.power.meter import PowerSettings
from autotune.records import AutotuneError, HostCannotRun, NothingFeasible, UsageError, digest

if TYPE_CHECKING:
    from autotune.search.protocol import Strategy

LOG = logging.getLogger("autotune")


def run(verb: str, settings: Settings, verbose: bool) -> int:
    """Do one verb; returns its exit code."""
    if verb == "check":
        return check(settings)
    if verb in ("tune", "matrix"):
        with prepared(settings, verbose):
            return tune(settings) if verb == "tune" else matrix(settings)
    if verb == "report":
        from autotune.review.report import report

        return report(settings, open_study(settings, create=False))
    if verb == "export":
        from autotune.review.export import export

        print(export(settings, open_study(settings, create=False)))
        return 0
    if verb == "dashboard":
        from autotune.review.dashboard import dashboard

        return dashboard(settings, open_study(settings, create=False))
    raise UsageError(f"the verb {verb} comes later")


def check(settings: Settings) -> int:
    """Print what this host lacks; exit 4 when the baseline cannot run."""
    report = preflight.check(settings)
    print(preflight.shown(report, settings))
    return HostCannotRun.exit_code if report.problems else 0


def tune(settings: Settings) -> int:
    """Run or resume the study, then report and export."""
    from autotune import bugs
    from autotune.confirm import confirm
    from autotune.judge import judge_for
    from autotune.review.export import export
    from autotune.review.report import report as tell
    from autotune.search.protocol import StopKind
    from autotune.search.strategy import LaunchAware
    from autotune.trial import Bench, working_power
    from autotune.tune import Tuner
    from autotune.watch import Progress

    report = ready_or_refuse(settings)
    power, refused = working_power(settings, report.gpus)
    settings = dataclasses.replace(settings, objective=objective_for(settings, power.source))
    study = open_study(settings)
    study.set_attr("provenance", provenance(settings, report))
    study.set_attr("strategy", settings.study.strategy)
    past = study.records()
    bench = Bench(settings, report.version, report.gpus, power)
    unit = settings.objective.unit
    with Progress(settings.space.baseline, unit, settings.study.launches, past=past) as watcher:
        watcher.note(f"study {settings.study_name}: {len(past)} trials so far, objective "
                     f"{settings.objective.name.replace('_', ' ')}, energy from {energy_text(power, refused)}")
        for trial in study.clear_dead():
            watcher.note(f"trial {trial} was left running by a tuner that died: told FAIL, will be asked again")
        strategy = make_strategy(settings)
        tuner = Tuner(study, strategy, bench, settings.folder,
                      judge_for(settings.objective, settings.limits), watcher, Notes(settings),
                      settings.study.trials)
        stop = tuner.run()
        watcher.note(f"stopped: {stop.reason}")
        if isinstance(strategy, LaunchAware) and (lesson := strategy.past_report()) is not None:
            study.set_attr("warm_start", lesson)
            watcher.note(lesson)
        bugs.isolate(tuner, settings.study.isolate)
        if settings.study.confirm.finalists:
            decision = confirm(tuner, settings.study.confirm)
            if decision is not None:
                watcher.note(f"confirmation: {decision.state.replace('_', ' ')}: {decision.reason}")
    tell(settings, study)
    for path in bugs.write(settings.folder, settings.space, study.records(), versions(study.attrs()["provenance"])):
        print(f"bug report: {path}")
    if stop.kind is StopKind.HOST:
        raise HostCannotRun(stop.reason)
    try:
        print(f"launch script: {export(settings, study)}")
    except NothingFeasible as nothing:
        print(f"autotune: {nothing}", file=sys.stderr)
        return nothing.exit_code
    return 0


def make_strategy(settings: Settings) -> Strategy:
    """The strategy that the settings name. Raises UsageError for a past study that cannot be read or used."""
    from autotune.search.plain import Plain
    from autotune.search.protocol import Limits
    from autotune.search.strategy import LaunchAware
    from autotune.search.warm import past_observations

    study = settings.study
    limits = Limits(launches=study.launches, hours=study.hours, gain=study.min_gain)
    if study.strategy != "autotune":
        if study.warm_start:
            raise UsageError(f"study.strategy={study.strategy} learns nothing from study.warm_start: leave one out")
        return Plain(settings.space, study.strategy, limits, study.seed)
    past = past_observations(study.warm_start, settings.space, settings.objective.name)
    return LaunchAware(settings.space, limits, study.seed, past)


@dataclasses.dataclass(frozen=True)
class Notes:
    """What optuna-dashboard shows beside a trial: files before it is told, a note after."""

    settings: Settings

    def attach(self, trial: Any, launch: pathlib.Path) -> None:
        from autotune.review.notes import attach

        attach(trial, self.settings.folder / "artifacts",
               [launch / "server.log", launch / f"power-{trial.number}.csv", launch / f"requests-{trial.number}.jsonl"])

    def annotate(self, study: Any, record: Any) -> None:
        from autotune.review.notes import annotate

        annotate(study, record)


def ready_or_refuse(settings: Settings) -> preflight.Preflight:
    """Preflight; raises HostCannotRun with everything that is missing."""
    report = preflight.check(settings)
    if report.problems:
        raise HostCannotRun(f"space {settings.space.name} cannot run here: {'; '.join(report.problems)} "
                            f"(python -m autotune check +space={settings.space.name} tells more)")
    return report


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
    from autotune import matrix as table
    from autotune.trial import Bench, working_power
    from autotune.watch import Progress

    report = ready_or_refuse(settings)
    power, _ = working_power(settings, report.gpus)
    has_study = settings.study.storage is not None or (settings.folder / "study.db").exists()
    records = open_study(settings, create=False).records() if has_study else []
    label, server = table.chosen(settings.config, settings.space, records)
    bench = Bench(settings, report.version, report.gpus, power)
    with Progress(settings.space.baseline, "", None) as watcher:
        rows = table.measure_all(bench, server, label, settings.folder, table.cells(settings), watcher.stage,
                                 lambda row: table.save(settings.folder, row))
    table.show(rows)
    print(f"rows: {table.file(settings.folder)}")
    return 0


def open_study(settings: Settings, create: bool = True) -> Any:
    """The study of these settings; refuses to mix. Raises UsageError or AutotuneError with one line."""
    from autotune.study import Study, sqlite_url

    url = settings.study.storage or sqlite_url(settings.folder)
    if not create and settings.study.storage is None and not (settings.folder / "study.db").exists():
        raise UsageError(f"there is no study in {settings.folder} yet: "
                         f"run python -m autotune +space={settings.space.name} first")
    limits = sorted(settings.limits)
    return Study.open(url, settings.study_name, settings.space, identity(settings), limits, create,
                      settings.study.storage_wait_s)


def identity(settings: Settings) -> dict[str, Any]:
    """What must be the same for results to be comparable."""
    gpus = visible_gpus().gpus if settings.device != "cpu" else ()
    work = settings.workload
    return {
        "space": settings.space.name, "space_digest": settings.space.digest, "engine": settings.engine.name,
        "engine_version": engine_version(settings.engine), "model": dict(settings.space.model),
        "devices": [g.hashed for g in gpus] or [cpu_name()], "objective": settings.objective.name,
        "limits": dict(settings.limits),
        "workload": {"prompts": _content(work.prompts), "contexts": list(work.contexts),
                     "output_tokens": work.output_tokens, "spread": work.spread, "temperature": work.temperature,
                     "shared_prefix": work.shared_prefix, "rate_per_s": work.rate_per_s},
    }


def provenance(settings: Settings, report: preflight.Preflight) -> dict[str, Any]:
    """Where a study comes from: versions, host, command."""
    import importlib.metadata
    import shlex
    import time

    import autotune
    from autotune.redact import Redactor

    packages = {}
    for name in ("optuna", "hydra-core", "torch", "httpx", "nvidia-ml-py", settings.engine.package):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[str(name)] = importlib.metadata.version(str(name))
    command = ["python", "-m", "autotune", "tune", *settings.overrides]
    return {"autotune": autotune.__version__, "python": platform.python_version(), "packages": packages,
            "engine_version": report.version, "driver": report.gpus.driver, "cpu": cpu_name(),
            "gpu": [g.hashed for g in report.gpus.gpus], "kernel": platform.release(),
            "command": shlex.join(Redactor().argv(command)),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    """What a bug report lists of where the study ran."""
    shown = {"autotune": provenance["autotune"], "python": provenance["python"], **provenance["packages"],
             "engine": provenance["engine_version"], "driver": provenance["driver"], "kernel": provenance["kernel"],
             "GPUs": len(provenance["gpu"]) or None, "CPU": provenance["cpu"]}
    return {name: str(value) for name, value in shown.items() if value}


@contextlib.contextmanager
def prepared(settings: Settings, verbose: bool) -> Iterator[None]:
    """The study's folder: made, locked for this process, logged to, and rid of what a dead tuner left running."""
    folder = settings.folder
    try:
        (folder / "launches").mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a+")
        journal.open_journal(folder, verbose)
    except OSError as error:
        raise AutotuneError(f"cannot write in {folder}: {error.strerror or error} (outputs=DIR chooses another place)"
                            ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise AutotuneError(f"another autotune (pid {lock.read().strip() or 'unknown'}) runs this study; "
                                "use the verb worker to join it, or study.name=NAME for one of your own") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        for ended in end_leftovers(folder):
            print(f"autotune: ended {ended.processes} process(es) that launch {ended.launch} of a dead tuner "
                  "left running", file=sys.stderr)
        try:
            with gpulock.locked(visible_gpus().gpus if settings.device != "cpu" else ()):
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


def _content(prompts: str | None) -> str | None:
    if prompts is None:
        return None
    try:
        return digest(pathlib.Path(prompts).read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"workload.prompts: {prompts} cannot be read: {error.strerror}") from error
