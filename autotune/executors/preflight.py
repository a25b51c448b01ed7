"""Preflight: everything that keeps a space or one of its choices from running on this host, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence

from autotune.config.settings import Settings
from autotune.engine.command import Command, UnknownPlaceholder, build, choose, chosen, gpus_of, needed, variables
from autotune.engine.gpus import Gpus, gpu_users, visible_gpus
from autotune.engine.host import engine_version, installed, interpreter_problem, lacking
from autotune.engine.spec import EngineSpec, matches, text
from autotune.executors.topology import of_cores
from autotune.loadgen.requests import read_prompts
from autotune.power.meter import MeterUnavailable, Powered, PowerSettings
from autotune.power.registry import open_meter
from autotune.records import Config, HostCannotRun, UsageError, Value
from autotune.space.constraints import Rule
from autotune.utils.files import free_mib

SETTLE_S, POLL_S = 10.0, 0.5


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of one parameter; without `problems` it can run here."""

    param: str
    value: Value
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Preflight:
    """The state of a host. `problems` keep the baseline, or the configuration asked for, from running on it.

    `unavailable` has a rule for each choice that cannot run here. `power` names a meter that works here, and `refused`
    gives the reason against each one that `power=auto` passed over.
    """

    command: Command
    version: str | None
    gpus: Gpus
    problems: tuple[str, ...]
    choices: tuple[Choice, ...]
    unavailable: tuple[Rule, ...]
    power: PowerSettings
    refused: Mapping[str, str]

    def refuse(self, settings: Settings) -> None:
        """Raises HostCannotRun with every problem, if there is one."""
        if self.problems:
            raise HostCannotRun(f"space {settings.space.name} cannot run here: {'; '.join(self.problems)} "
                                f"({settings.shown_command('check')} tells more)")


def check(settings: Settings, config: Config | None = None) -> Preflight:
    """Check this host for a space and one of its configurations (None: the baseline).

    Raises UsageError when space and engine file contradict each other.
    """
    space, engine = settings.space, settings.engine
    version, gpus = engine_version(engine), visible_gpus()
    server = space.split(space.baseline if config is None else config)[0]
    command = build(engine, space, server, port="PORT", device=settings.device, version=version)
    choices = [Choice(param.name, value, tuple(choice_problems(settings, server, param.name, value, gpus, version)))
               for param in space.server_params for value in param.choices]
    problems = host_problems(settings, gpus, version)
    power, refused = settings.power, dict[str, str]()
    try:
        power, refused = working_power(settings, gpus)
    except MeterUnavailable as error:
        problems.append(f"power={settings.power.source}: {error}")
    problems += missing_files(settings, [*command.argv, *command.env.values()])
    values = placeholders(settings, server)
    actions = [action for action in engine.args if matches(action.versions, version)]
    actions += [action for _, action in chosen(engine, space, server, values, version)]
    problems += [f"{problem}: engine {engine.name} is for a build that does (install that, or choose the engine file "
                 "of yours)" for problem in lacks(engine, [w for action in actions for w in needed(action, values)])]
    if config is not None and (reason := space.forbidden(config)) is not None:
        problems.append(f"it is never launched: {reason}")
    if len(gpus.gpus) >= int(space.needs.get("gpus", 0)):
        problems += gpu_problem(command.gpus, gpus, settings)
    unavailable = tuple(Rule({c.param: (c.value,)}, "; ".join(c.problems)) for c in choices
                        if c.problems and space.forbidden({c.param: c.value}) is None)
    return Preflight(command, version, gpus, tuple(problems), tuple(choices), unavailable, power, refused)


def working_power(settings: Settings, gpus: Gpus) -> tuple[PowerSettings, dict[str, str]]:
    """The power settings with `auto` replaced by a meter that works here, and the reasons against those before it.

    Raises MeterUnavailable when a meter asked for by name does not work.
    """
    uuids = () if settings.device == "cpu" else tuple(g.uuid for g in gpus.gpus[:1])
    meter, refused = open_meter(settings.power, Powered(os.getpid(), uuids))
    return dataclasses.replace(settings.power, source=meter.source), refused


def check_disk(settings: Settings, folder: pathlib.Path, launches: int = 1) -> None:
    """Raises HostCannotRun when the disk of `folder` has no room for the files of so many launches."""
    while not folder.exists():
        folder = folder.parent
    free, server = free_mib(folder), settings.server
    needed = launches * (server.disk_free_mib + server.log_limit_mib)
    if free < needed:
        who = "a launch" if launches == 1 else f"{launches} launches side by side"
        raise HostCannotRun(f"only {free:.0f} MiB are free on the disk of {folder}, and {who} may need {needed:.0f}: "
                            "make room and run the same command, the study is kept (server.disk_free_mib and "
                            "server.log_limit_mib say how much)")


def host_problems(settings: Settings, gpus: Gpus, version: str | None) -> list[str]:
    """Problems of every configuration."""
    engine, needs = settings.engine, settings.space.needs
    found = [problem for problem in [interpreter_problem(engine)] if problem]
    there = installed(engine)
    if there.asked and ((engine.package is not None and version is None) or not there.found):
        found.append(f"{engine.package or engine.command[2]} is not installed in {engine.python or 'this Python'} "
                     "(install it, or set engine.python to the interpreter that has it)")
    count = int(needs.get("gpus", 0))
    if count and len(gpus.gpus) < count:
        found.append(f"the space needs {count} GPUs, {len(gpus.gpus)} visible"
                     + (f": {gpus.why_none}" if gpus.why_none else ""))
    name = str(needs.get("gpu_name", ""))
    if name and gpus.gpus and not all(name.lower() in g.name.lower() for g in gpus.gpus):
        found.append(f"the space needs {name} GPUs, here are {', '.join(sorted({g.name for g in gpus.gpus}))}")
    memory = float(needs.get("gpu_memory_gib", 0))
    small = [g for g in gpus.gpus if g.memory_gib < memory]
    if small:
        found.append(f"the space needs {memory:g} GiB a GPU, here are {small[0].memory_gib:.0f} GiB")
    if settings.device == "cuda" and not gpus.gpus:
        found.append(f"device=cuda, but no GPU is visible{f': {gpus.why_none}' if gpus.why_none else ''}")
    if settings.device != "cpu":
        deadline = time.monotonic() + min(SETTLE_S, settings.server.gpu_free_s)
        while (users := gpu_users(gpus)) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # memory of a process that just ended is freed late
        found += [f"{user}: autotune measures on idle GPUs only (CUDA_VISIBLE_DEVICES chooses others)"
                  for user in users]
    path = settings.workload.prompt_source().path
    if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
        found.append(f"workload.prompts: {path} is not a file that can be read")
    elif path is not None:
        read_prompts(path)  # raises UsageError for a bad line before anything is launched
    return found


def lacks(engine: EngineSpec, wanted: Sequence[str]) -> list[str]:
    """A sentence that lists the flags and names of `wanted` which the installed engine does not know; [] if none."""
    unknown = lacking(engine, wanted)
    build = " ".join(filter(None, [engine.package, installed(engine).version]))
    return [f"the installed {build} does not know {', '.join(unknown)}"] if unknown else []


def placeholders(settings: Settings, server: Config) -> dict[str, str]:
    """Values of the engine file's placeholders for a server part."""
    return variables(settings.engine, settings.space, server, host="HOST", port="PORT", device=settings.device)


def missing_files(settings: Settings, words: Sequence[str]) -> list[str]:
    """Problems with local model paths in the words of a command. ORG/NAME is a repository on a hub, not a path."""
    return [f"model.{key}: {path} does not exist (set space.model.{key}=/path)"
            for key, path in settings.space.model.items()
            if (path.startswith(("/", ".")) or "/" in path and (path.startswith("~") or path.count("/") != 1))
            and not pathlib.Path(path).exists() and any(path in word for word in words)]


def gpu_problem(wanted: int, gpus: Gpus, settings: Settings) -> list[str]:
    """The problem of a configuration that needs more GPUs than are visible, on an engine that runs on GPUs."""
    on_gpus = settings.space.needs.get("gpus") or (
        settings.engine.vars.get("device") == "cuda" and settings.device != "cpu")
    if not on_gpus or wanted <= len(gpus.gpus):
        return []
    return [f"needs {wanted} GPU{'s' if wanted > 1 else ''}, {len(gpus.gpus)} visible"]


def choice_problems(settings: Settings, server: Config, name: str, value: Value, gpus: Gpus,
                    version: str | None) -> list[str]:
    """Problems of one choice on this host.

    Raises UsageError when the command of `server` with it cannot be built: a study would end in the middle.
    """
    full = {**{p.name: p.choices[0] for p in settings.space.server_params}, **server, name: value}
    try:
        build(settings.engine, settings.space, full, port="PORT", device=settings.device, version=version)
    except UnknownPlaceholder as error:
        raise UsageError(f"{name}={text(value)}: {error}") from None
    except UsageError:  # this version lacks a choice, maybe another one
        pass
    try:
        action = choose(settings.engine, name, value, version)
        wanted = gpus_of(action, value)
    except UsageError as error:
        return [str(error)]
    ray = settings.executor.kind == "ray"  # where this host sees only the GPUs that a launch like the baseline's gets
    problems = gpu_problem(wanted, gpus, settings) if wanted > 1 and not ray else []
    problems += lacks(settings.engine, needed(action, placeholders(settings, {name: value})))
    paths = {f"{{model.{key}}}": path for key, path in settings.space.model.items()}
    problems += missing_files(settings, [paths[word] for word in [*action.args, *action.env.values()] if word in paths])
    alone = [rule.because for rule in settings.space.rules if set(rule.when) == {name} and rule.matches({name: value})]
    return problems + [because for because in alone if because not in problems]


def launches_at_once(settings: Settings, gpus: Gpus, version: str | None) -> int:
    """Launches side by side that `parallel.slots` asks for on this host.

    Raises UsageError or HostCannotRun when the host has too few GPUs or cores.
    """
    asked, count = settings.parallel.count, len(gpus.gpus) if settings.device != "cpu" else 0
    if asked == 1 or not count:
        return len(of_cores(asked).units) if asked not in (1, None) else 1
    fewest = fewest_gpus(settings, version)
    if asked is not None and asked > count // fewest:
        raise UsageError(f"parallel.slots={asked}: {count} GPU{'s' if count > 1 else ''} take at most "
                         f"{count // fewest} launches of {fewest} side by side")
    return asked or max(1, count // fewest)


def fewest_gpus(settings: Settings, version: str | None) -> int:
    """GPUs of the smallest configuration of the space."""
    space, engine = settings.space, settings.engine
    baseline = space.split(space.baseline)[0]
    count = build(engine, space, baseline, device=settings.device, version=version).gpus
    for param in space.server_params:
        sizes = []
        for value in param.choices:
            with contextlib.suppress(UsageError):  # this version cannot express the choice
                action = choose(engine, param.name, value, version)
                sizes.append(gpus_of(action, value))
                if value == baseline.get(param.name):
                    count //= sizes[-1]
        count *= min(sizes, default=1) if param.name in baseline else 1
    return max(1, count)
