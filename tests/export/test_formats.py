"""Launch formats: read back by YAML, and checked by the tools of their own world where those are installed."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from autotune.engine.spec import Ready
from autotune.export.launch_files import export
from autotune.records import UsageError
from tests.export.test_launch_files import ODD, changed
from tests.report.studies import Made, baseline

MODEL = "/models/" + ODD
FORMATS = ("sh", "systemd", "compose", "k8s", "yaml")
ARGV = ["python3", "-m", "autotune.ddtree", "--host", "0.0.0.0", "--port", "8000", "--model", "/models/target",
        "--note", "100% $HOME $(id) ${X} \\n", "--api-key", "given", "--draft", "org/draft"]


@pytest.fixture
def odd(make: Callable[..., Made]) -> Made:
    """A study whose model folder, arguments and variables try to break every quoting rule, with a secret and GPUs."""
    made = make()
    args = ["--host", "{host}", "--port", "{port}", "--model", "{model.target}", "--note", ARGV[10], "--api-key",
            "s3cret-value", "--draft", "{model.draft}"]
    changed(made, engine={"args": [args], "env": {"CACHE": "{model.target}/cache %h", "HF_TOKEN": "s3cret-token"},
                          "config_file": "--config"}, model={"target": MODEL, "draft": "org/draft"})
    made.study.set_attr("provenance", {"gpu": ["GPU-12ab"], "driver": "580"})
    made.measure(baseline(made), 2.0)
    return made


def written(made: Made, form: str) -> pathlib.Path:
    changed_settings = made.settings
    object.__setattr__(changed_settings, "format", form)
    return export(changed_settings, made.study)


def documents(made: Made, form: str) -> list[Any]:
    return list(yaml.safe_load_all(written(made, form).read_text()))


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_says_where_it_came_from_and_holds_no_secret(odd: Made, form: str) -> None:
    path = written(odd, form)
    text = path.read_text()
    assert "s3cret" not in text
    assert re.search(r"^#   Trial +0$", text, re.M)
    assert re.search(r"^#   Measured +2.000 tok/J", text, re.M)
    assert (path.parent / "launch.json").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_no_text_of_a_study_leaves_the_comments(odd: Made, form: str) -> None:
    identity = odd.study.attrs()["identity"]
    odd.study.set_attr("identity", {**identity, "engine": "e\nowned: 1",
                                    "engine_version": "1\nowned: 1\n---\nowned: 2"})
    odd.study.set_attr("provenance", {"gpu": ["g\nowned: 3"], "driver": "5\nowned: 4", "autotune": "1\nowned",
                                      "command": "c\nowned: 5"})
    lines = written(odd, form).read_text().splitlines()
    assert not [line for line in lines if line.lstrip().startswith("owned")]


def test_composes_health_check_runs_nothing_of_an_engines_path(odd: Made) -> None:
    engine = dataclasses.replace(odd.settings.engine, ready=Ready("/x');print('owned')#"))
    object.__setattr__(odd.settings, "engine", engine)
    test = next(iter(documents(odd, "compose")[0]["services"].values()))["healthcheck"]["test"]
    assert "owned" not in test[-2] and test[-1].endswith("/x');print('owned')#")


def test_compose_runs_the_measured_command(odd: Made) -> None:
    (service,) = documents(odd, "compose")[0]["services"].values()
    words = [interpolated(w, {"API_KEY": "given"}) for w in service["entrypoint"]]
    assert words[:len(ARGV)] == ARGV
    assert interpolated(service["environment"]["CACHE"], {}) == "/models/target/cache %h"
    assert service["environment"]["HF_TOKEN"] == "${HF_TOKEN:?set HF_TOKEN}"
    assert interpolated(service["volumes"][0]["source"], {}) == MODEL
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 1


def test_kubernetes_runs_the_measured_command(odd: Made) -> None:
    config, deployment, service = documents(odd, "k8s")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    env = {e["name"]: e.get("value") for e in container["env"]} | config["data"] | {"API_KEY": "given"}
    assert [expanded(w, env) for w in container["command"]][:len(ARGV)] == ARGV
    assert expanded(env["CACHE"], env) == "/models/target/cache %h"
    order = [e["name"] for e in container["env"]]
    assert order.index("MODEL_TARGET") < order.index("CACHE")
    assert pod["volumes"][0]["hostPath"]["path"] == MODEL
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    token = next(e for e in container["env"] if e["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["key"] == "HF_TOKEN"


def test_the_engines_own_file_holds_every_flag_but_secrets(odd: Made) -> None:
    path = written(odd, "yaml")
    settings = yaml.safe_load(path.read_text())
    assert settings["model"] == MODEL and settings["note"] == ARGV[10] and settings["tp-size"] == "1"
    assert "api-key" not in settings
    start = next(line for line in path.read_text().splitlines() if line.startswith("# Start:"))
    assert start.endswith('--config THIS_FILE --api-key "${API_KEY}"')
    assert "$'/models/" in path.read_text()  # the variable CACHE on one line, for a shell


def test_an_engine_without_a_configuration_file_is_told_so(small: Made) -> None:
    with pytest.raises(UsageError, match="reads no configuration file"):
        written(small, "yaml")


def test_a_flag_given_twice_is_not_squeezed_into_a_file(make: Callable[..., Made]) -> None:
    made = make()
    changed(made, engine={"args": [["--lora", "a", "--lora", "b"]], "config_file": "--config"})
    made.measure(baseline(made), 2.0)
    with pytest.raises(UsageError, match="--lora is given more than once"):
        written(made, "yaml")


def test_systemd_units_keep_every_byte_of_odd_values(odd: Made) -> None:
    text = written(odd, "systemd").read_text()
    assigned = next(line for line in text.splitlines() if line.startswith('Environment="MODEL_TARGET='))
    inner = assigned.removeprefix('Environment="').removesuffix('"').replace("%%", "%")
    assert inner.encode().decode("unicode_escape") == f"MODEL_TARGET={MODEL}"
    assert '"100%% $$HOME $$(id) $${X} \\\\n"' in text
    assert "ExecStartPre=/usr/bin/test -n ${API_KEY}" in text


def test_shellcheck_has_nothing_to_say(odd: Made) -> None:
    tool = shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([tool, "--severity=style", str(written(odd, "sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_systemd_accepts_the_unit_and_reads_the_same_words(odd: Made, tmp_path: pathlib.Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "autotune-local.service"
    shutil.copy(written(odd, "systemd"), unit)
    done = subprocess.run([tool, "verify", "--man=no", str(unit)], capture_output=True, text=True,
                          env={"SYSTEMD_LOG_LEVEL": "debug", "PATH": "/usr/bin:/bin", "SYSTEMD_COLORS": "0"})
    complaints = [line for line in done.stderr.splitlines() if unit.name in line and "fail" in line.lower()]
    assert done.returncode == 0 and not complaints, done.stderr[-2000:]
    assert f"Environment: MODEL_TARGET={MODEL}\n" in done.stdout
    dumped = [line.split("Command Line: ", 1)[1] for line in done.stdout.splitlines() if "Command Line: " in line]
    words = [w.replace("$$", "$") for w in shlex.split(dumped[-1].replace("\\$", "$"))]
    given = {"PYTHON": "python3", "HOST": "0.0.0.0", "PORT": "8000", "MODEL_TARGET": "/models/target",
             "API_KEY": "given", "MODEL_DRAFT": "org/draft"}
    start = words.index("${PYTHON}")
    assert words[:start] == ["/usr/bin/env", "--chdir=${WORKDIR}", "CACHE=${MODEL_TARGET}/cache %h"]
    assert [given.get(w.strip("${}"), w) if w.startswith("${") else w for w in words[start:]][:len(ARGV)] == ARGV


def test_docker_compose_accepts_the_file(odd: Made) -> None:
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is not installed")
    done = subprocess.run([tool, "-f", str(written(odd, "compose")), "config"], capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "IMAGE": "x:1", "API_KEY": "given", "HF_TOKEN": "t"})
    assert done.returncode == 0, done.stderr
    (service,) = yaml.safe_load(done.stdout)["services"].values()
    assert [w.replace("$$", "$") for w in service["entrypoint"]][:len(ARGV)] == ARGV
    assert service["volumes"][0]["source"].replace("$$", "$") == MODEL


def test_the_kubernetes_schemas_accept_the_objects(odd: Made) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(odd, "k8s"):
        validate.validate(document, validate.latest_version(), strict=True)


def interpolated(text: str, env: dict[str, str]) -> str:
    """What Compose makes of a value (Compose specification, interpolation)."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[2] or "")

    return re.sub(r"\$\$|\$\{([A-Z_]+)(?::-([^}]*)|:\?[^}]*)?\}", value, text)


def expanded(text: str, env: dict[str, Any]) -> str:
    """What Kubernetes makes of a command word."""
    return re.sub(r"\$\$|\$\(([A-Z_]+)\)", lambda m: "$" if m[0] == "$$" else str(env.get(m[1], m[0])), text)
