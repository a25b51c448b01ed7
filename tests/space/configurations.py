"""Configurations of a space: all of them, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator

from autotune.records import Value
from autotune.space.space import Space


def servers(space: Space) -> Iterator[dict[str, Value]]:
    """Every allowed server part, in order of the choices."""
    params = space.server_params

    def extend(index: int, config: dict[str, Value]) -> Iterator[dict[str, Value]]:
        if index == len(params):
            if space.forbidden(config) is None:
                yield config
        elif not space.active(params[index], config):
            yield from extend(index + 1, config)
        else:
            for choice in params[index].choices:
                yield from extend(index + 1, {**config, params[index].name: choice})

    return extend(0, {})


def sample(space: Space, rng: random.Random) -> dict[str, Value]:
    """A random allowed configuration."""
    while True:
        config: dict[str, Value] = {}
        for param in space.params:
            if space.active(param, config):
                config[param.name] = rng.choice(param.choices)
        if space.forbidden(config) is None:
            return config
