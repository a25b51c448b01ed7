"""Preflight: everything that keeps a space or one of its choices from running on this host, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import pathlib
import shutil
import time
from collections.abc import Mapping, Sequence

from autotune.config.settings import Settings
from autotune.engine.command import Command, UnknownPlaceholder, build, choose, chosen, gpus_of, needed, variables
from autotune.engine.gpus import Gpus, gpu_users, visible_gpus
from autotune.engine.host import engine_version, installed, interpreter_problem, lacking
from autotune.engine.spec import EngineSpec, matches, text
from autotune.executors.topology import of_cores
from autotune.loadgen.requests import read_prompts
from autotune.power import open_meter
from autotune.power.meter import MeterUnavailable, Powered, PowerSettings
from autotune.records import Config, HostCannotRun, UsageError, Value
from autotune.space.constraints import Rule
from autotune.space.space import Param

SETTLE_S, POLL_S = 10.0, 0.5


@dataclasses.dataclass(frozen=True)
class Preflight:
    """The state of a host. `problems` keep the baseline, or the configuration asked for, from running on it.

    `choices` maps (parameter, choice) to the problems of that choice; `unavailable` has a rule for each one with
    problems, and for combinations that need too many GPUs. `power` names a meter that works here, and `refused` has the
    reasons against those that `power=auto` passed over, by name.
    """

    command: Command
    version: str | None
    gpus: Gpus
    problems: tuple[str, ...]
    choices: Mapping[tuple[str, Value], tuple[str, ...]]
    unavailable: tuple[Rule, ...]
    power: PowerSettings
    refused: Mapping[str, str]


def check(settings: Settings, config: Config | None = None) -> Preflight:
    """Check this host for a space and one of its configurations (None: the baseline).

    Raises UsageError when space and engine file contradict each other.
    """
    space, engine = settings.space, settings.engine
    version, gpus = engine_version(engine), visible_gpus()
    server = space.split(space.baseline if config is None else config)[0]
    command = build(engine, space, server, port="PORT", device=settings.device, version=version)
    choices = {(param.name, value): choice_problems(settings, server, param.name, value, gpus, version)
               for param in space.server_params for value in param.choices}
    problems, power, refused = host_problems(settings, gpus, version), settings.power, dict[str, str]()
    try:
        power, refused = working_power(settings, gpus)
    except MeterUnavailable as error:
        problems.append(f"power={power.source}: {error}")
    problems += missing_files(settings, [*command.argv, *command.env.values()])
    values = variables(engine, space, server, host="HOST", port="PORT", device=settings.device)
    actions = [action for action in engine.args if matches(action.versions, version)]
    actions += [action for _, action in chosen(engine, space, server, values, version)]
    problems += [f"{problem}: engine {engine.name} is for a build that does (install that, or choose the engine file "
                 "of yours)" for problem in lacks(engine, [w for action in actions for w in needed(action, values)])]
    if config is not None and (reason := space.forbidden(config)) is not None:
        problems.append(f"it is never launched: {reason}")
    if len(gpus.gpus) >= int(space.needs.get("gpus", 0)):
        problems += gpu_problem(command.gpus, gpus, settings)
    unavailable = tuple(Rule({name: (value,)}, "; ".join(against)) for (name, value), against in choices.items()
                        if against and space.forbidden({name: value}) is None)
    return Preflight(command, version, gpus, tuple(problems), choices,
                     (*unavailable, *combination_problems(settings, gpus, version)), power, refused)


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
    free, server = shutil.disk_usage(folder).free / 2**20, settings.server
    needed = launches * (server.disk_free_mib + server.log_limit_mib)
    if free < needed:
        who = "a launch" if launches == 1 else f"{launches} launches side by side"
        raise HostCannotRun(f"only {free:.0f} MiB are free on the disk of {folder}, and {who} may need {needed:.0f}: "
                            "make room and run the same command, the study is kept (server.disk_free_mib and "
                            "server.log_limit_mib say how much)")


def host_problems(settings: Settings, gpus: Gpus, version: str | None) -> list[str]:
    """Problems of every configuration."""
    engine, needs = settings.engine, settings.space.needs
    found, there = list(filter(None, [interpreter_problem(engine)])), installed(engine)
    if there.asked and ((engine.package is not None and version is None) or not there.found):
        found.append(f"{engine.package or engine.command[2]} is not installed in {engine.python or 'this Python'} "
                     "(install it, or set engine.python to the interpreter that has it)")
    count = int(needs.get("gpus", 0))
    why_none = f": {gpus.why_none}" if gpus.why_none else ""
    if len(gpus.gpus) < count:
        found.append(f"the space needs {count} GPUs, {len(gpus.gpus)} visible{why_none}")
    name, memory = str(needs.get("gpu_name", "")), float(needs.get("gpu_memory_gib", 0))
    if not all(name.lower() in gpu.name.lower() for gpu in gpus.gpus):
        found.append(f"the space needs {name} GPUs, here are {', '.join(sorted({g.name for g in gpus.gpus}))}")
    if small := [gpu.memory_gib for gpu in gpus.gpus if gpu.memory_gib < memory]:
        found.append(f"the space needs {memory:g} GiB a GPU, here are {small[0]:.0f} GiB")
    if settings.device == "cuda" and not gpus.gpus:
        found.append(f"device=cuda, but no GPU is visible{why_none}")
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


def missing_files(settings: Settings, words: Sequence[str]) -> list[str]:
    """Problems with local model paths in the words of a command. ORG/NAME is a repository on a hub, not a path."""
    return [f"model.{key}: {path} does not exist (set space.model.{key}=/path)"
            for key, path in settings.space.model.items()
            if (path.startswith(("/", ".")) or "/" in path and (path.startswith("~") or path.count("/") != 1))
            and not pathlib.Path(path).exists() and any(path in word for word in words)]


def gpu_problem(wanted: int, gpus: Gpus, settings: Settings) -> list[str]:
    """The problem of a configuration that needs more GPUs than are visible, on an engine that runs on GPUs."""
    if not _on_gpus(settings, gpus) or wanted <= len(gpus.gpus):
        return []
    return [f"needs {wanted} GPU{'s' if wanted > 1 else ''}, {len(gpus.gpus)} visible"]


def _on_gpus(settings: Settings, gpus: Gpus) -> bool:
    """True if the engine's servers run on GPUs. An engine that is told the device takes the GPUs that it sees."""
    engine, told = settings.engine, any("{device}" in word for action in settings.engine.args for word in action.args)
    device = engine.vars.get("device") or (settings.device if told else None)
    return bool(settings.space.needs.get("gpus")) or settings.device != "cpu" and (
        device == "cuda" or device == "auto" and bool(gpus.gpus))


def combination_problems(settings: Settings, gpus: Gpus, version: str | None) -> list[Rule]:
    """A rule for each smallest combination of choices that needs more GPUs than are visible, though each of its parts
    has enough."""
    if settings.executor.kind == "ray" or not _on_gpus(settings, gpus):
        return []
    sizes: dict[str, dict[Value, int]] = {}
    for param in settings.space.server_params:
        if several := {value: count for value, count in _sizes(settings.engine, param, version).items() if count > 1}:
            sizes[param.name] = several
    found = []
    for many in range(2, len(sizes) + 1):
        for names in itertools.combinations(sizes, many):
            for values in itertools.product(*(sizes[name] for name in names)):
                counts = [sizes[name][value] for name, value in zip(names, values, strict=True)]
                wanted = math.prod(counts)
                if wanted // min(counts) <= len(gpus.gpus) < wanted:
                    found.append(Rule({name: (value,) for name, value in zip(names, values, strict=True)},
                                      *gpu_problem(wanted, gpus, settings)))
    return found


def choice_problems(settings: Settings, server: Config, name: str, value: Value, gpus: Gpus,
                    version: str | None) -> tuple[str, ...]:
    """Problems of one choice on this host.

    Raises UsageError when the command of `server` with it cannot be built: a study would end in the middle.
    """
    engine, space = settings.engine, settings.space
    full = {**{p.name: p.choices[0] for p in space.server_params}, **server, name: value}
    try:
        build(engine, space, full, port="PORT", device=settings.device, version=version)
    except UnknownPlaceholder as error:
        raise UsageError(f"{name}={text(value)}: {error}") from None
    except UsageError:  # this version lacks a choice, maybe another one
        pass
    try:
        action = choose(engine, name, value, version)
        wanted = gpus_of(action, value)
    except UsageError as error:
        return (str(error),)
    ray = settings.executor.kind == "ray"  # where this host sees only the GPUs that a launch like the baseline's gets
    problems = gpu_problem(wanted, gpus, settings) if wanted > 1 and not ray else []
    values = variables(engine, space, {name: value}, host="HOST", port="PORT", device=settings.device)
    problems += lacks(engine, needed(action, values))
    paths = {f"{{model.{key}}}": path for key, path in space.model.items()}
    problems += missing_files(settings, [paths[word] for word in [*action.args, *action.env.values()] if word in paths])
    problems += [rule.because for rule in space.rules if set(rule.when) == {name} and rule.matches({name: value})]
    return tuple(dict.fromkeys(problems))


def launches_at_once(settings: Settings, gpus: Gpus, version: str | None) -> int:
    """Launches side by side that `parallel.slots` asks for on this host.

    Raises UsageError or HostCannotRun when the host has too few GPUs or cores.
    """
    asked, count = settings.parallel.count, len(gpus.gpus) if settings.device != "cpu" else 0
    if asked == 1 or not count:
        return len(of_cores(asked or 1).units)
    most = count // (fewest := fewest_gpus(settings, version))
    if asked is not None and asked > most:
        raise UsageError(f"parallel.slots={asked}: {count} GPU{'s' if count > 1 else ''} take at most {most} launches "
                         f"of {fewest} side by side")
    return asked or max(1, most)


def fewest_gpus(settings: Settings, version: str | None) -> int:
    """GPUs of the smallest configuration of the space."""
    space, engine = settings.space, settings.engine
    baseline = space.split(space.baseline)[0]
    count = build(engine, space, baseline, device=settings.device, version=version).gpus
    for param in (param for param in space.server_params if param.name in baseline):
        sizes = _sizes(engine, param, version)
        count = count // sizes.get(baseline[param.name], 1) * min(sizes.values(), default=1)
    return max(1, count)


def _sizes(engine: EngineSpec, param: Param, version: str | None) -> dict[Value, int]:
    """The factor of each choice on the number of GPUs, without choices that this version cannot express."""
    found = {}
    for value in param.choices:
        with contextlib.suppress(UsageError):
            found[value] = gpus_of(choose(engine, param.name, value, version), value)
    return found
