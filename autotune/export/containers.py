"""What Compose and Kubernetes share: a container sees model folders under /models and listens on every interface."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib

from autotune.export.deployment import Deployment, Parameter
from autotune.utils.text import one_line

PORT = 8000
PYTHON = "python3"
START_SLACK = 3
SHORTEST_START_S = 300


@dataclasses.dataclass(frozen=True)
class Mount:
    """A folder of the host, read-only in the container. The parameter's default is an absolute path."""

    parameter: Parameter
    inside: str


def mounts(deployment: Deployment) -> tuple[Mount, ...]:
    """One mount for each model that is a folder."""
    folder = next(p.default for p in deployment.parameters if p.name == "WORKDIR")
    return tuple(Mount(dataclasses.replace(p, default=absolute(p.default, folder)),
                       f"/models/{p.name.removeprefix('MODEL_').lower()}") for p in deployment.models)


def absolute(path: str, folder: str) -> str:
    """A path of this host that means the same from any folder as this one did from `folder`."""
    return os.path.normpath(pathlib.Path(folder).absolute() / pathlib.Path(path).expanduser())


def image(deployment: Deployment) -> str:
    """The engine and version that an image must have, as words on one line: comments are made of it."""
    return one_line(" ".join(x for x in (deployment.package or deployment.engine, deployment.version) if x))


def start_limit_s(deployment: Deployment) -> int:
    """How long a start may take: three times what it took when it was measured, and five minutes at least."""
    return max(SHORTEST_START_S, math.ceil(START_SLACK * (deployment.startup_s or 0)))


def stop_limit_s(deployment: Deployment) -> int:
    return math.ceil(deployment.stop_s) + 20
