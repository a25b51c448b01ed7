"""The launch formats: each function renders a Deployment. A new format is a function here and an entry of FORMATS."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from autotune.export.deployment import CONTAINER_PORT, CONTAINER_PYTHON, Deployment, Parameter, Ref, Word, plain, spell
from autotune.records import UsageError
from autotune.utils.text import one_line, slug

if TYPE_CHECKING:
    from autotune.config.settings import Format

LONG_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9-]*\Z")
# A possible default in Compose's `${NAME:-default}`, which has no escape for `}`.
SAFE_DEFAULT = re.compile(r"[A-Za-z0-9_./:@,+-]+\Z")
HEALTH_CHECK = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
PROBE_S = 10


def sh(deployment: Deployment) -> str:
    """A bash script that starts the server in the foreground. Host-specific parts can be set from outside."""

    def word(value: Word) -> str:
        return spell(value, '"${{{}}}"'.format, shlex.quote)

    out = ["#!/usr/bin/env bash", deployment.comment(),
           "# shellcheck disable=SC2016  # single quotes are meant: nothing in a value may expand",
           "set -euo pipefail", ""]
    for p in deployment.parameters.values():
        remark = "" if "\n" in p.default else f"  # {one_line(p.what)}"
        out.append(f"{p.name}=${{{p.name}:-{shlex.quote(p.default)}}}{remark}")
    out += [f': "${{{name}:?set {name}: a secret of the measured command, never written here}}"'
            for name in deployment.secrets]
    out.append("")
    out += [f"export {name}" if value == (Ref(name),) else f"export {name}={word(value)}"
            for name, value in deployment.env.items()]
    out += [""] if deployment.env else []
    return "\n".join([*out, 'cd -- "$WORKDIR"', f"exec {_joined(_lines(deployment.argv), word)}", ""])


def systemd(deployment: Deployment) -> str:
    """A systemd unit. Parameters are environment variables of the unit; /etc/autotune/NAME.env overrides them.

    systemd starts no shell: words are quoted by the rules of systemd (systemd.syntax(7), "Quoting"; systemd.service(5),
    "Command lines"), `%` doubled everywhere and `$` in commands.
    """
    known = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

    def escaped(text: str) -> str:
        return "".join(known.get(c) or (c if c.isprintable() else "".join(f"\\x{b:02x}" for b in c.encode()))
                       for c in text)

    def word(value: Word) -> str:
        text = spell(value, "${{{}}}".format, lambda part: escaped(part).replace("$", "$$"))
        return text if text and all(c.isalnum() or c in "-_./:=,${}+@" for c in text) else f'"{text}"'

    name = slug(deployment.study)
    settings = f"/etc/autotune/{name}.env"
    title = one_line(f"inference server of study {deployment.study}, trial {deployment.trial}")
    out = [deployment.comment(), f"# Install: copy to /etc/systemd/system/{name}.service; systemctl daemon-reload; "
           f"systemctl enable --now {name}", f"# NAME=value lines in {settings} replace the values of Environment=.",
           "", "[Unit]", "Description=" + title.replace("%", "%%").rstrip("\\"),
           "Wants=network-online.target", "After=network-online.target", "", "[Service]", "Type=exec"]
    # `$` means nothing in Environment=.
    out += [f'Environment="{escaped(f"{p.name}={p.default}")}"' for p in deployment.parameters.values()]
    out.append(f"EnvironmentFile={'' if deployment.secrets else '-'}{settings}")
    out += [f"ExecStartPre=/usr/bin/test -n ${{{name}}}" for name in deployment.secrets]
    words: list[list[Word]] = [[("/usr/bin/env",), ("--chdir=", Ref("WORKDIR"))]]
    words += [[(f"{name}=", *value)] for name, value in deployment.own_env.items()]
    out += [f"ExecStart={_joined([*words, *_lines(deployment.argv)], word)}", "Restart=on-failure", "RestartSec=10",
            f"TimeoutStopSec={deployment.stop_limit_s}", "KillMode=mixed", "LimitNOFILE=1048576", "", "[Install]",
            "WantedBy=multi-user.target", ""]
    return "\n".join(out)


def compose(deployment: Deployment) -> str:
    """A Docker Compose file (Compose specification). Set IMAGE; HOST, PORT and model folders have defaults."""

    def literal(text: str) -> str:
        return text.replace("$", "$$")

    def default(parameter: Parameter) -> str:
        """`${NAME:-default}`, or the bare value where Compose could not read it as a default."""
        safe = SAFE_DEFAULT.match(parameter.default)
        return f"${{{parameter.name}:-{parameter.default}}}" if safe else literal(parameter.default)

    mounts, python = deployment.mounts, f"${{PYTHON:-{CONTAINER_PYTHON}}}"
    inside = {**{name: default(p) for name, p in deployment.parameters.items()}, "PYTHON": python,
              **{name: f"${{{name}:?set {name}}}" for name in deployment.secrets},
              "HOST": "0.0.0.0", "PORT": str(CONTAINER_PORT), **{m.name: m.inside for m in mounts}}
    health = f"http://127.0.0.1:{CONTAINER_PORT}{deployment.engine.ready.path}"
    service: dict[str, Any] = {
        "image": f"${{IMAGE:?set IMAGE to an image that has {deployment.image}}}",
        "entrypoint": [spell(w, inside.__getitem__, literal) for w in deployment.argv], "command": [],
        "ports": [f"${{HOST:-127.0.0.1}}:${{PORT:-{CONTAINER_PORT}}}:{CONTAINER_PORT}"],
        "healthcheck": {"test": ["CMD", python, "-c", HEALTH_CHECK, literal(health)], "interval": "10s",
                        "timeout": "10s", "retries": 3, "start_period": f"{deployment.start_limit_s}s"},
        "restart": "unless-stopped", "stop_grace_period": f"{deployment.stop_limit_s}s", "init": True}
    if deployment.env:
        service["environment"] = {n: spell(value, inside.__getitem__, literal) for n, value in deployment.env.items()}
    if mounts:
        service["volumes"] = [{"type": "bind", "source": default(m), "target": m.inside, "read_only": True}
                              for m in mounts]
    if deployment.gpus:
        service |= {"ipc": "host", "ulimits": {"memlock": -1, "stack": 67108864},
                    "deploy": {"resources": {"reservations": {"devices": [
                        {"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}]}}}}
    usage = [f"# Start: IMAGE=... docker compose -f FILE up -d   (IMAGE needs {deployment.image})",
             "# HOST and PORT say where the host listens; model folders can be replaced by "
             f"{', '.join(m.name for m in mounts) or 'variables of the same kind (none here)'}.", ""]
    return "\n".join([deployment.comment(), *usage]) + _yaml({"services": {slug(deployment.study): service}})


def kubernetes(deployment: Deployment) -> str:
    """A ConfigMap of parameters, a Deployment with probes, a Service. Secrets are references.

    Kubernetes expands `$(NAME)` in commands and variables itself; `$$(` stands for a literal `$(`.
    """

    def word(value: Word) -> str:
        return spell(value, "$({})".format, lambda part: part.replace("$(", "$$("))

    def probe(failures: int) -> dict[str, Any]:
        return {"httpGet": {"path": deployment.engine.ready.path, "port": "http"}, "periodSeconds": PROBE_S,
                "timeoutSeconds": 5, "failureThreshold": failures}

    name = slug(deployment.study)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "autotune"}
    inside = {"HOST": "0.0.0.0", "PORT": str(CONTAINER_PORT), "PYTHON": CONTAINER_PYTHON,
              **{m.name: m.inside for m in deployment.mounts}}
    data = {key: inside.get(key, p.default) for key, p in deployment.parameters.items() if key != "WORKDIR"}
    # Parameters and secrets come first, since `$(NAME)` sees only earlier variables.
    env: list[dict[str, Any]] = [{"name": key, "valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}
                                 for key in data]
    env += [{"name": key, "valueFrom": {"secretKeyRef": {"name": f"{name}-secrets", "key": key}}}
            for key in deployment.secrets]
    env += [{"name": key, "value": word(value)} for key, value in deployment.own_env.items()]
    tag = re.sub(r"[^A-Za-z0-9_.-]", "-", deployment.version or "set-a-tag")
    image = re.sub(r"[^a-z0-9._-]", "-", (deployment.engine.package or deployment.engine.name).lower())
    container: dict[str, Any] = {
        "name": "server", "image": f"{image}:{tag}", "command": [word(w) for w in deployment.argv],
        "env": env, "ports": [{"name": "http", "containerPort": CONTAINER_PORT}],
        "startupProbe": probe(math.ceil(deployment.start_limit_s / PROBE_S)),
        "readinessProbe": probe(3), "livenessProbe": probe(6),
        "securityContext": {"allowPrivilegeEscalation": False}}
    volumes: list[tuple[dict[str, Any], str, bool]] = [  # (volume, where it is mounted, read-only)
        ({"name": "model-" + re.sub(r"[^a-z0-9]+", "-", m.inside.removeprefix("/models/")).strip("-"),
          "hostPath": {"path": m.default, "type": "Directory"}}, m.inside, True) for m in deployment.mounts]
    if deployment.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(deployment.gpus)}}
        volumes.append(({"name": "shm", "emptyDir": {"medium": "Memory"}}, "/dev/shm", False))
    pod: dict[str, Any] = {"automountServiceAccountToken": False,
                           "terminationGracePeriodSeconds": deployment.stop_limit_s, "containers": [container]}
    if volumes:
        container["volumeMounts"] = [{"name": volume["name"], "mountPath": path, "readOnly": read_only}
                                     for volume, path, read_only in volumes]
        pod["volumes"] = [volume for volume, *_ in volumes]
    facts = {**deployment.facts, "Warning": deployment.warning}
    notes = {f"autotune/{label.lower()}": facts[label]
             for label in ("Study", "Trial", "Measured", "Energy", "Verdict", "Warning") if facts.get(label)}
    named = {"name": name, "labels": labels}
    chosen = {"app.kubernetes.io/name": name}
    usage = [f"# Before kubectl apply: set the image (needs {deployment.image}) and the folders of the "
             "hostPath volumes."]
    if deployment.secrets:
        usage.append(f"# Secrets: kubectl create secret generic {name}-secrets "
                     + " ".join(f"--from-literal={s}=..." for s in deployment.secrets))
    return "\n".join([deployment.comment(), *usage, ""]) + _yaml(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": data},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {**named, "annotations": notes},
         "spec": {"replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": chosen},
                  "template": {"metadata": {"labels": labels}, "spec": pod}}},
        {"apiVersion": "v1", "kind": "Service", "metadata": named,
         "spec": {"selector": chosen, "ports": [{"name": "http", "port": CONTAINER_PORT, "targetPort": "http"}]}})


def engine_yaml(deployment: Deployment) -> str:
    """The engine's own configuration file (`--config FILE` of SGLang and vLLM): flags as YAML keys.

    The command line wins over the file, so host, port and secrets are passed there. Environment variables cannot stand
    in such a file; the header lists them. Raises UsageError when the engine reads no such file, or when a flag cannot
    stand in one.
    """
    flag = deployment.engine.config_file
    if flag is None:
        raise UsageError(f"engine {deployment.engine.name} reads no configuration file: "
                         "use format=sh, systemd, compose or k8s")
    defaults = {name: p.default for name, p in deployment.parameters.items()}

    def value(word: Word) -> str:
        return spell(word, lambda name: defaults.get(name, f"${name}"))

    def shell(words: list[Word]) -> str:
        return " ".join(f'"{plain(w)}"' if len(w) == 1 and isinstance(w[0], Ref) and w[0].name in deployment.secrets
                        else _shell_word(value(w)) for w in words)

    head, *rest = _lines(deployment.argv)
    if any(isinstance(word[0], str) and word[0].startswith("--") for word in head):
        head, rest = [], [head, *rest]
    settings: dict[str, Any] = {}
    passed = ""
    for line in rest:
        if any(isinstance(part, Ref) and part.name in deployment.secrets for word in line for part in word):
            passed += f" {shell(line)}"
            continue
        first = line[0]
        name, equals, start = (first[0] if isinstance(first[0], str) else "").partition("=")
        if not LONG_FLAG.match(name):
            raise UsageError(f"{plain(first)} is not a long flag, which a configuration file needs: use format=sh")
        if name[2:] in settings:
            raise UsageError(f"{name} is given more than once, which a configuration file cannot say: use format=sh")
        values = [*([value((start, *first[1:]))] if equals else []), *map(value, line[1:])]
        settings[name[2:]] = (values if len(values) > 1 else values[0]) if values else True
    out = [deployment.comment(), f"# Start: {shell(head)} {flag} THIS_FILE{passed}",
           "# Flags on the command line win over this file: --host 0.0.0.0 --port 9000"]
    out += [f"# Needs the environment variable {name}={_shell_word(value(word))}"
            for name, word in deployment.own_env.items()]
    out += [f"# Needs the secret {name} in the environment" for name in deployment.secrets]
    return "\n".join([*out, ""]) + _yaml(settings)


# Default file name and renderer of each format.
FORMATS: dict[Format, tuple[str, Callable[[Deployment], str]]] = {
    "sh": ("launch.sh", sh), "systemd": ("launch.service", systemd), "compose": ("launch.compose.yaml", compose),
    "k8s": ("launch.k8s.yaml", kubernetes), "yaml": ("launch.yaml", engine_yaml)}


def _lines(argv: Sequence[Word]) -> list[list[Word]]:
    """Arguments grouped into lines: a flag with its values on each."""
    grouped: list[list[Word]] = [[]]
    for word in argv:
        if word and isinstance(word[0], str) and word[0].startswith("--") and grouped[-1]:
            grouped.append([])
        grouped[-1].append(word)
    return grouped


def _joined(lines: list[list[Word]], word: Callable[[Word], str]) -> str:
    return " \\\n  ".join(" ".join(map(word, line)) for line in lines)


def _shell_word(text: str) -> str:
    """A shell word on one line, also with line breaks in it (bash's $'...')."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join({"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t"}.get(c) or
                          (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text) + "'"


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)  # lists are indented under their key

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def choose_scalar_style(self) -> Any:
        """Quotes for every text that is not a key."""
        is_text = isinstance(self.event, yaml.ScalarEvent) and self.event.implicit[1] and not self.simple_key_context
        return '"' if is_text else super().choose_scalar_style()


def _yaml(*documents: dict[str, Any]) -> str:
    """Documents with every text quoted, so that no version of YAML reads a word as something else."""
    return "---\n".join(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
                        for document in documents)
