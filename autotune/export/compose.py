"""A Docker Compose file (Compose specification). Set IMAGE; HOST, PORT and model folders have defaults."""

from __future__ import annotations

import re
from typing import Any

from autotune.export.deployment import CONTAINER_PORT, CONTAINER_PYTHON, Deployment, Parameter, Ref, Word
from autotune.export.engine_yaml import dump
from autotune.utils.text import slug

ASK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
# A possible default in `${NAME:-default}`: Compose has no escape for `}` there.
SAFE_DEFAULT = re.compile(r"[A-Za-z0-9_./:@,+-]+\Z")


def render(deployment: Deployment) -> str:
    """The file as text."""
    mounts, python = deployment.mounts, f"${{PYTHON:-{CONTAINER_PYTHON}}}"
    inside = {**{name: _default(p) for name, p in deployment.parameters.items()}, "PYTHON": python,
              **{name: f"${{{name}:?set {name}}}" for name in deployment.secrets},
              "HOST": "0.0.0.0", "PORT": str(CONTAINER_PORT), **{m.name: m.inside for m in mounts}}

    def word(value: Word) -> str:
        return "".join(inside[part.name] if isinstance(part, Ref) else _literal(part) for part in value)

    health = f"http://127.0.0.1:{CONTAINER_PORT}{deployment.engine.ready.path}"
    service: dict[str, Any] = {
        "image": f"${{IMAGE:?set IMAGE to an image that has {deployment.image}}}",
        "entrypoint": [word(w) for w in deployment.argv], "command": [],
        "ports": [f"${{HOST:-127.0.0.1}}:${{PORT:-{CONTAINER_PORT}}}:{CONTAINER_PORT}"],
        "healthcheck": {"test": ["CMD", python, "-c", ASK, _literal(health)], "interval": "10s", "timeout": "10s",
                        "retries": 3, "start_period": f"{deployment.start_limit_s}s"},
        "restart": "unless-stopped", "stop_grace_period": f"{deployment.stop_limit_s}s", "init": True}
    if deployment.env:
        service["environment"] = {name: word(value) for name, value in deployment.env.items()}
    if mounts:
        service["volumes"] = [{"type": "bind", "source": _default(m), "target": m.inside, "read_only": True}
                              for m in mounts]
    if deployment.gpus:
        service |= {"ipc": "host", "ulimits": {"memlock": -1, "stack": 67108864},
                    "deploy": {"resources": {"reservations": {"devices": [
                        {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}]}}}}
    usage = [f"# Start: IMAGE=... docker compose -f FILE up -d   (IMAGE needs {deployment.image})",
             "# HOST and PORT say where the host listens; model folders can be replaced by "
             f"{', '.join(m.name for m in mounts) or 'variables of the same kind (none here)'}.", ""]
    return "\n".join([deployment.comment(), *usage]) + dump({"services": {slug(deployment.study): service}})


def _default(parameter: Parameter) -> str:
    """`${NAME:-default}`, or the bare value where Compose could not read it as a default."""
    if SAFE_DEFAULT.match(parameter.default):
        return f"${{{parameter.name}:-{parameter.default}}}"
    return _literal(parameter.default)


def _literal(text: str) -> str:
    return text.replace("$", "$$")
