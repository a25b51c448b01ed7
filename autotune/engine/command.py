"""The exact command of a configuration. No other module puts flags together.

    command = build(engine, space, server, values)

Trials and exported scripts share the command. A configuration that the engine file cannot express raises UsageError.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Mapping

from autotune.engine.spec import PLACEHOLDER, Action, EngineSpec, matches, text
from autotune.records import Config, UsageError, Value
from autotune.space.space import Space


class UnknownPlaceholder(UsageError):
    """An engine file names something in braces that the space does not give."""


@dataclasses.dataclass(frozen=True)
class Command:
    """An argument vector and the environment variables set on top of the caller's own; `gpus` it uses."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    gpus: int = 1


def build(engine: EngineSpec, space: Space, server: Config, *, host: str = "127.0.0.1", port: int | str = 0,
          device: str = "auto", version: str | None = None) -> Command:
    """The command that starts `server`, a server part of `space`, on `engine`.

    Raises UsageError when the engine file does not know a parameter, a choice or a placeholder, or has
    nothing for the engine's version.
    """
    values = variables(engine, space, server, host=host, port=port, device=device)
    parts = [(Action(engine.command, engine.env), values)]
    parts += [(action, values) for action in engine.args if matches(action.versions, version)]
    gpus = 1
    for value, action in chosen(engine, space, server, values, version):
        parts.append((action, {**values, "value": text(value)}))
        gpus *= gpus_of(action, value)
    argv = [fill(arg, given, engine.name) for action, given in parts for arg in action.args]
    env = {key: fill(value, given, engine.name) for action, given in parts for key, value in action.env.items()}
    return Command(tuple(argv), env, gpus)


def gpus_of(action: Action, value: Value) -> int:
    """The factor of a choice on the number of GPUs. Raises UsageError for a choice that should be a number."""
    if action.gpus != "value":
        return int(action.gpus)
    if not text(value).isdecimal() or len(text(value)) > 6 or not int(value):
        raise UsageError(f"{text(value)[:40]!r} is not a number of GPUs")
    return int(value)


def chosen(engine: EngineSpec, space: Space, server: Config, values: Mapping[str, str],
           version: str | None) -> list[tuple[Value, Action]]:
    """(choice, its action) for each parameter of a server part, and for each default of a parameter that it lacks."""
    picked = {name: fill(spec.default, values, engine.name) if isinstance(spec.default, str) else spec.default
              for name, spec in engine.params.items() if name not in server and spec.default is not None}
    picked.update((param.name, server[param.name]) for param in space.server_params if param.name in server)
    return [(value, choose(engine, name, value, version)) for name, value in picked.items()]


def needed(action: Action, values: Mapping[str, str]) -> tuple[str, ...]:
    """The flags of an action and the other words that the engine must know."""
    said = [PLACEHOLDER.sub(lambda match: values.get(match[1], ""), word) for word in (*action.args, *action.needs)]
    return tuple(word for number, word in enumerate(said) if word.startswith("--") or number >= len(action.args))


def choose(engine: EngineSpec, name: str, value: Value, version: str | None) -> Action:
    """The action for one choice under an engine version. Raises UsageError when there is none."""
    spec = engine.params.get(name)
    where = f"engine {engine.name}"
    if spec is None:
        raise UsageError(f"{where} does not know the parameter {name}; it has {', '.join(sorted(engine.params))}")
    actions = spec.alternatives(value)
    if actions is None:
        raise UsageError(f"{where} does not know {name}={text(value)}; it has {', '.join(sorted(spec.choices))}")
    for action in actions:
        if matches(action.versions, version):
            return action
    raise UsageError(f"{where} cannot express {name}={text(value)} in version {version or 'unknown'} "
                     f"(it can in {'; '.join(a.versions for a in actions)})")


def variables(engine: EngineSpec, space: Space, server: Config, *, host: str, port: int | str,
              device: str) -> dict[str, str]:
    """The values of an engine file's placeholders."""
    return {"host": host, "port": str(port), "device": device, "python": engine.python or sys.executable,
            **engine.constants(space), **{f"config.{key}": text(value) for key, value in server.items()}}


def fill(template: str, values: Mapping[str, str], engine: str) -> str:
    """Replace {name}s. Only names are looked up: no attributes, indexes or expressions."""

    def lookup(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UnknownPlaceholder(f"engine {engine}: {{{match[1]}}} is not known here (model paths are set in the "
                                     "space)")
        return values[match[1]]

    return PLACEHOLDER.sub(lookup, template)


def shown(command: Command) -> str:
    """One line for people: environment, then shell-quoted arguments."""
    env = [f"{key}={shlex.quote(value)}" for key, value in sorted(command.env.items())]
    return " ".join([*env, shlex.join(command.argv)])
