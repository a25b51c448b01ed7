"""Kubernetes objects: a ConfigMap of parameters, a Deployment with probes, a Service. Secrets are references.

Kubernetes expands `$(NAME)` in commands and variables itself; `$$(` stands for a literal `$(`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from autotune.export.deployment import CONTAINER_PORT, CONTAINER_PYTHON, Deployment, Ref, Word
from autotune.export.engine_yaml import dump
from autotune.utils.text import slug

PROBE_S = 10


def render(deployment: Deployment) -> str:
    """The objects as one YAML stream."""
    name = slug(deployment.study)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "autotune"}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": labels},
              "data": _parameters(deployment)}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "labels": labels},
               "spec": {"selector": {"app.kubernetes.io/name": name},
                        "ports": [{"name": "http", "port": CONTAINER_PORT, "targetPort": "http"}]}}
    usage = [f"# Before kubectl apply: set the image (needs {deployment.image}) and the folders of the "
             "hostPath volumes."]
    if deployment.secrets:
        usage.append(f"# Secrets: kubectl create secret generic {name}-secrets "
                     + " ".join(f"--from-literal={s}=..." for s in deployment.secrets))
    return "\n".join([deployment.comment(), *usage, ""]) + dump(config, _deployment(deployment, name, labels), service)


def _parameters(deployment: Deployment) -> dict[str, str]:
    """Data of the ConfigMap: the parameters with their values inside the container."""
    inside = {"HOST": "0.0.0.0", "PORT": str(CONTAINER_PORT), "PYTHON": CONTAINER_PYTHON,
              **{m.name: m.inside for m in deployment.mounts}}
    return {name: inside.get(name, p.default) for name, p in deployment.parameters.items() if name != "WORKDIR"}


def _deployment(deployment: Deployment, name: str, labels: dict[str, str]) -> dict[str, Any]:
    facts = {**deployment.facts, "Warning": deployment.warning}
    notes = {f"autotune/{label.lower()}": facts[label]
             for label in ("Study", "Trial", "Measured", "Energy", "Verdict", "Warning") if facts.get(label)}
    volumes: list[dict[str, Any]] = []
    inside: list[dict[str, Any]] = []
    for mount in deployment.mounts:
        volume = "model-" + re.sub(r"[^a-z0-9]+", "-", mount.inside.removeprefix("/models/")).strip("-")
        volumes.append({"name": volume, "hostPath": {"path": mount.default, "type": "Directory"}})
        inside.append({"name": volume, "mountPath": mount.inside, "readOnly": True})
    container: dict[str, Any] = {
        "name": "server", "image": _image(deployment), "command": [_word(w) for w in deployment.argv],
        "env": _environment(deployment, name), "ports": [{"name": "http", "containerPort": CONTAINER_PORT}],
        "startupProbe": _probe(deployment, math.ceil(deployment.start_limit_s / PROBE_S)),
        "readinessProbe": _probe(deployment, 3), "livenessProbe": _probe(deployment, 6),
        "securityContext": {"allowPrivilegeEscalation": False}}
    if deployment.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(deployment.gpus)}}
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        inside.append({"name": "shm", "mountPath": "/dev/shm", "readOnly": False})
    pod: dict[str, Any] = {"automountServiceAccountToken": False,
                           "terminationGracePeriodSeconds": deployment.stop_limit_s, "containers": [container]}
    if volumes:
        container["volumeMounts"], pod["volumes"] = inside, volumes
    return {"apiVersion": "apps/v1", "kind": "Deployment",
            "metadata": {"name": name, "labels": labels, "annotations": notes},
            "spec": {"replicas": 1, "strategy": {"type": "Recreate"},
                     "selector": {"matchLabels": {"app.kubernetes.io/name": name}},
                     "template": {"metadata": {"labels": labels}, "spec": pod}}}


def _environment(deployment: Deployment, name: str) -> list[dict[str, Any]]:
    """Environment variables; parameters and secrets come first, since `$(NAME)` sees only earlier ones."""
    found: list[dict[str, Any]] = [
        {"name": key, "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}} for key in _parameters(deployment)]
    found += [{"name": key, "valueFrom": {"secretKeyRef": {"name": f"{name}-secrets", "key": key}}}
              for key in deployment.secrets]
    found += [{"name": key, "value": _word(value)} for key, value in deployment.env.items() if value != (Ref(key),)]
    return found


def _word(value: Word) -> str:
    return "".join(f"$({part.name})" if isinstance(part, Ref) else part.replace("$(", "$$(") for part in value)


def _probe(deployment: Deployment, failures: int) -> dict[str, Any]:
    return {"httpGet": {"path": deployment.engine.ready.path, "port": "http"}, "periodSeconds": PROBE_S,
            "timeoutSeconds": 5, "failureThreshold": failures}


def _image(deployment: Deployment) -> str:
    """A placeholder named after the engine and version that the image must have."""
    version = re.sub(r"[^A-Za-z0-9_.-]", "-", deployment.version or "set-a-tag")
    return f"{re.sub(r'[^a-z0-9._-]', '-', (deployment.engine.package or deployment.engine.name).lower())}:{version}"
