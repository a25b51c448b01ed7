"""Launch formats: byte for byte as in golden/, read back as YAML, and checked by the tools of their own world.

After an intended change of a format, AUTOTUNE_GOLDEN=write pytest tests/export/test_formats.py rewrites golden/;
read the difference before you commit it.
"""

from __future__ import annotations

import dataclasses
import os
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
from autotune.export.formats import FORMATS
from autotune.export.launch_files import export
from autotune.records import UsageError
from tests.export.test_launch_files import ODD, changed
from tests.report.studies import Made, baseline

GOLDEN = pathlib.Path(__file__).with_name("golden")
MODEL = "/models/" + ODD
ARGV = ["python3", "-m", "autotune.ddtree", "--host", "0.0.0.0", "--port", "8000", "--model", "/models/target",
        "--note", "100% $HOME $(id) ${X} \\n", "--api-key", "given", "--draft", "org/draft"]


def with_model(made: Made, model: str, **engine: Any) -> Made:
    """A measured baseline of a server with that model folder, an odd argument, variables, secrets and GPUs."""
    args = ["--host", "{host}", "--port", "{port}", "--model", "{model.target}", "--note", ARGV[10], "--api-key",
            "s3cret-value", "--draft", "{model.draft}"]
    changed(made, engine={"args": [args], "env": {"CACHE": "{model.target}/cache %h", "HF_TOKEN": "s3cret-token"},
                          "config_file": "--config", **engine}, model={"target": model, "draft": "org/draft"})
    made.study.set_attr("provenance", {
        "gpu": ["GPU-12ab"], "driver": "580", "autotune": "0.1", "folder": "/srv/tuning",
        "command": "python -m autotune tune +space=local"})
    made.measure(baseline(made), 2.0)
    return made


@pytest.fixture
def odd(make: Callable[..., Made]) -> Made:
    """A study whose model folder, arguments and variables try to break every quoting rule."""
    return with_model(make(), MODEL)


def written(made: Made, form: str) -> pathlib.Path:
    return export(dataclasses.replace(made.settings, format=form), made.study)


def documents(made: Made, form: str) -> list[Any]:
    return list(yaml.safe_load_all(written(made, form).read_text()))


def test_every_format_is_byte_for_byte_as_in_golden(make: Callable[..., Made]) -> None:
    made = with_model(make(), "/models/Target-7B", python="/opt/engine/bin/python")
    made.study.set_attr("identity", {**made.study.attrs()["identity"], "engine_version": "1.2.3"})
    for form in FORMATS:
        path = written(made, form)
        if os.environ.get("AUTOTUNE_GOLDEN") == "write":
            shutil.copyfile(path, GOLDEN / path.name)
        assert path.read_bytes() == (GOLDEN / path.name).read_bytes(), f"{path.name}: see the docstring of this file"
    assert {path.name for path in GOLDEN.iterdir()} == {name for name, _ in FORMATS.values()}


def test_no_format_holds_a_secret_or_lets_text_of_a_study_out_of_its_comments(odd: Made) -> None:
    identity = odd.study.attrs()["identity"]
    odd.study.set_attr("identity", {**identity, "engine": "e\nowned: 1",
                                    "engine_version": "1\nowned: 1\n---\nowned: 2"})
    odd.study.set_attr("provenance", {"gpu": ["g\nowned: 3"], "driver": "5\nowned: 4", "autotune": "1\nowned",
                                      "command": "c\nowned: 5"})
    for form in FORMATS:
        text = (path := written(odd, form)).read_text()
        assert "owned: 4" in text and not re.search(r"^\s*owned", text, re.M)
        assert "s3cret" not in text + (path.parent / "launch.json").read_text()


def test_composes_health_check_runs_nothing_of_an_engines_path(odd: Made) -> None:
    engine = dataclasses.replace(odd.settings.engine, ready=Ready("/x');print('owned')#"))
    odd.settings = dataclasses.replace(odd.settings, engine=engine)
    test = next(iter(documents(odd, "compose")[0]["services"].values()))["healthcheck"]["test"]
    assert "owned" not in test[-2] and test[-1].endswith("/x');print('owned')#")


def test_compose_runs_the_measured_command(odd: Made) -> None:
    (service,) = documents(odd, "compose")[0]["services"].values()
    words = [interpolated(w, {"API_KEY": "given"}) for w in service["entrypoint"]]
    assert words[:len(ARGV)] == ARGV
    assert interpolated(service["environment"]["CACHE"], {}) == "/models/target/cache %h"
    assert interpolated(service["volumes"][0]["source"], {}) == MODEL


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
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_engines_own_file_holds_every_flag_but_secrets(odd: Made) -> None:
    path = written(odd, "yaml")
    settings = yaml.safe_load(path.read_text())
    assert settings["model"] == MODEL and settings["note"] == ARGV[10] and settings["tp-size"] == "1"
    assert "api-key" not in settings
    start = next(line for line in path.read_text().splitlines() if line.startswith("# Start:"))
    assert start.endswith('--config THIS_FILE --api-key "${API_KEY}"')
    assert "$'/models/" in path.read_text()  # the variable CACHE on one line, for a shell


def test_an_engines_own_file_is_refused_where_it_cannot_say_the_command(small: Made, make: Callable[..., Made]) -> None:
    with pytest.raises(UsageError, match="reads no configuration file"):
        written(small, "yaml")
    made = make("study.name=twice")
    changed(made, engine={"args": [["--lora", "a", "--lora", "b"]], "config_file": "--config"})
    made.measure(baseline(made), 2.0)
    with pytest.raises(UsageError, match="--lora is given more than once"):
        written(made, "yaml")


def test_systemd_units_keep_every_byte_of_odd_values(odd: Made) -> None:
    text = written(odd, "systemd").read_text()
    inner = text.partition('\nEnvironment="MODEL_TARGET=')[2].partition('"\n')[0].replace("%%", "%")
    assert inner.encode().decode("unicode_escape") == MODEL
    assert '"100%% $$HOME $$(id) $${X} \\\\n"' in text


def tool(name: str) -> str:
    """The path of an installed tool; skips the test where there is none."""
    found = shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


def test_shellcheck_has_nothing_to_say(odd: Made) -> None:
    done = subprocess.run([tool("shellcheck"), "--severity=style", str(written(odd, "sh"))], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout


def test_systemd_accepts_the_unit_and_reads_the_same_words(odd: Made, tmp_path: pathlib.Path) -> None:
    unit = tmp_path / "autotune-local.service"
    shutil.copy(written(odd, "systemd"), unit)
    done = subprocess.run([tool("systemd-analyze"), "verify", "--man=no", str(unit)], capture_output=True, text=True,
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
    done = subprocess.run([tool("docker-compose"), "-f", str(written(odd, "compose")), "config"], capture_output=True,
                          text=True, env={"PATH": "/usr/bin:/bin", "IMAGE": "x:1", "API_KEY": "given", "HF_TOKEN": "t"})
    assert done.returncode == 0, done.stderr
    (service,) = yaml.safe_load(done.stdout)["services"].values()
    assert [w.replace("$$", "$") for w in service["entrypoint"]][:len(ARGV)] == ARGV
    assert service["volumes"][0]["source"].replace("$$", "$") == MODEL


def test_the_kubernetes_schemas_accept_the_objects(odd: Made) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in documents(odd, "k8s"):
        validate.validate(document, validate.latest_version(), strict=True)


def interpolated(text: str, env: dict[str, str]) -> str:
    """A value after Compose's interpolation (Compose specification)."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[2] or "")

    return re.sub(r"\$\$|\$\{([A-Z_]+)(?::-([^}]*)|:\?[^}]*)?\}", value, text)


def expanded(text: str, env: dict[str, Any]) -> str:
    """A command word after Kubernetes' expansion."""
    return re.sub(r"\$\$|\$\(([A-Z_]+)\)", lambda m: "$" if m[0] == "$$" else str(env.get(m[1], m[0])), text)
