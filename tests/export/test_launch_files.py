"""Exports: exactly the measured server, odd names and all, secrets by reference only."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from autotune.config import settings
from autotune.config.compose import load
from autotune.engine.command import build
from autotune.engine.server import free_port
from autotune.engine.spec import EngineSpec
from autotune.export.deployment import Ref, _fits
from autotune.export.formats import FORMATS
from autotune.export.launch_files import export
from autotune.records import AutotuneError, NothingFeasible, UsageError
from autotune.utils.redact import HIDDEN
from tests.report.studies import Made, baseline

ODD = 'a folder "quoted" \'twice\'\nand a new line; $(touch hacked) `id` %n {x} #!'
SPY = ("import json, os, sys; json.dump({'argv': sys.argv, 'cwd': os.getcwd(), 'env': dict(os.environ)}, "
       "open(os.environ['SPY_OUT'], 'w'))")


def run_script(path: pathlib.Path, tmp_path: pathlib.Path, **env: str) -> dict[str, Any]:
    """Run a launch script with an interpreter that only notes what it was started with."""
    spy, out = tmp_path / "spy python", tmp_path / "spy.json"
    spy.write_text(f"#!{sys.executable}\n{SPY}\n")
    spy.chmod(0o755)
    subprocess.run(["bash", str(path)], check=True, cwd="/", timeout=60,
                   env={"PATH": os.environ["PATH"], "PYTHON": str(spy), "SPY_OUT": str(out), **env})
    seen: dict[str, Any] = json.loads(out.read_text())
    return seen


def changed(made: Made, *, engine: dict[str, Any] | None = None, model: dict[str, str] | None = None,
            **settings: Any) -> None:
    """Settings of a study with parts of the engine file or the space replaced."""
    spec = EngineSpec.parse({**dict(made.settings.composed["engine"]), **(engine or {})}, "engine test")
    space = dataclasses.replace(made.settings.space, model=model or {})
    made.settings = dataclasses.replace(made.settings, engine=spec, space=space, **settings)


def test_the_script_starts_exactly_the_measured_command_and_names_its_origin(small: Made,
                                                                             tmp_path: pathlib.Path) -> None:
    path = export(small.settings, small.study)
    assert path == small.settings.folder / "launch.sh" and path.stat().st_mode & 0o111
    winner = small.study.records()[4]
    made = build(small.settings.engine, small.settings.space, small.settings.space.split(winner.config)[0],
                 port=8123, device=small.settings.device)
    seen = run_script(path, tmp_path, PORT="8123")
    assert seen["argv"][1:] == list(made.argv)[1:] and seen["cwd"] == os.getcwd()
    text = path.read_text()
    for said in ("Trial          4", "3.000 tok/J", "(not confirmed)", "ASSUMED", "python -m autotune tune"):
        assert said in text
    origin = json.loads(path.with_suffix(".json").read_text())
    assert origin["trial"] == 4 and origin["feasible"] is True
    assert origin["config"]["tree_budget"] == 8 and origin["identity"]["engine"] == "ddtree"


def test_odd_names_survive_and_run_nothing(make: Callable[..., Made], tmp_path: pathlib.Path) -> None:
    made = make()
    changed(made, engine={"args": [["--host", "{host}", "--port", "{port}", "--model", "{model.target}"]],
                          "env": {"CACHE": "{model.target}/cache"}}, model={"target": "/models/" + ODD})
    made.measure(baseline(made), 2.0)
    seen = run_script(export(made.settings, made.study), tmp_path)
    assert seen["argv"][seen["argv"].index("--model") + 1] == "/models/" + ODD
    assert seen["env"]["CACHE"] == f"/models/{ODD}/cache"
    assert not pathlib.Path("/hacked").exists()


@pytest.mark.parametrize(("engine", "given", "words", "env"), [
    ({"args": [["--api-key", "s3cret-value-1"], ["--auth-token=s3cret-value-2"]],
      "env": {"HF_TOKEN": "s3cret-value-3", "PROXY": "http://me:s3cret-value-4@proxy"}},
     {"API_KEY": "one", "AUTH_TOKEN": "two", "HF_TOKEN": "three", "PROXY": "four"},
     ["--api-key", "one", "--auth-token=two"], {"HF_TOKEN": "three", "PROXY": "four"}),
    # a variable of its own for each secret, and none that a shell has set
    ({"args": [["--api-key", "s3cret-value-1", "s3cret-value-2", "--note", "Xs3cret-value-1X"],
               ["--path", "https://u:s3cret-value-3@h/m"]], "env": {"WHERE": "with s3cret-value-2 in it"}},
     {"API_KEY": "one", "API_KEY_2": "two", "NOTE": "three", "SECRET_PATH": "four", "WHERE": "five"},
     ["--api-key", "one", "two", "--note", "three", "--path", "four"], {"WHERE": "five"}),
    # a secret placeholder, whatever flag or variable it goes to
    ({"vars": {"access_token": "s3cret-value-1", "threads": "1"}, "args": [["--say", "{access_token}"]],
      "env": {"WHERE": "at {access_token}"}}, {"SAY": "one", "WHERE": "two"}, ["--say", "one"], {"WHERE": "two"})])
def test_secrets_are_referenced_and_never_written(make: Callable[..., Made], tmp_path: pathlib.Path,
                                                  engine: dict[str, Any], given: dict[str, str], words: list[str],
                                                  env: dict[str, str]) -> None:
    made = make()
    changed(made, engine=engine)
    made.measure(baseline(made), 2.0)
    path = export(made.settings, made.study)
    assert "s3cret" not in path.read_text() + path.with_suffix(".json").read_text()
    seen = run_script(path, tmp_path, **given)
    at = seen["argv"].index(words[0])
    assert seen["argv"][at:at + len(words)] == words and seen["env"].items() >= env.items()
    with pytest.raises(subprocess.CalledProcessError):
        run_script(path, tmp_path)


def test_a_command_that_was_not_measured_is_refused(make: Callable[..., Made]) -> None:
    made = make()
    same: dict[str, Any] = {"env": {"THREADS": "0|1"}}
    changed(made, engine=same)
    made.measure(baseline(made), 2.0)
    export(made.settings, made.study)
    params = {**made.settings.composed["engine"]["params"], "tree_budget": {"flag": "--other-budget"}}
    for engine, name in (({**same, "params": params}, "--other-budget"), ({"env": {}}, "THREADS"),
                         ({"env": {**same["env"], "NEW": "1"}}, "NEW")):
        changed(made, engine=engine)
        with pytest.raises(UsageError, match=f"{name}.*pass the overrides"):
            export(made.settings, made.study)


def test_a_trial_that_breaks_its_limits_is_exported_only_when_asked_for(make: Callable[..., Made]) -> None:
    made = make()
    made.measure(baseline(made), 2.0, tpot_ms=60.0)
    with pytest.raises(NothingFeasible):
        export(made.settings, made.study)
    text = export(dataclasses.replace(made.settings, trial=0), made.study).read_text()
    assert "!!  trial 0 breaks its limits: tpot_p99_ms by 50.0 %" in text and "not the winner" in text


def test_a_trial_without_a_valid_measurement_is_exported_with_a_warning(small: Made) -> None:
    invalid = next(record for record in small.study.records() if record.invalid_reasons)
    text = export(dataclasses.replace(small.settings, trial=invalid.number), small.study).read_text()
    assert f"trial {invalid.number} has no valid measurement (unsteady): its figures prove nothing" in text
    assert "no valid measurement" in text.split("!!")[-1], "no figures are told as measured"


def test_trials_without_a_working_server_are_refused(small: Made) -> None:
    for trial, problem in ((2, "crashed"), (11, "no measurement"), (77, "has no trial 77")):
        with pytest.raises(UsageError, match=problem):
            export(dataclasses.replace(small.settings, trial=trial), small.study)


def test_out_takes_a_file_or_a_folder(small: Made, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "new folder"
    for out, path in ((f"{folder}/start me.sh", folder / "start me.sh"), (str(folder), folder / "launch.sh"),
                      (f"{tmp_path}/not there yet/", tmp_path / "not there yet" / "launch.sh"),
                      ("", small.settings.folder / "launch.sh")):
        assert export(dataclasses.replace(small.settings, out=out), small.study) == path
        assert path.exists() and path.with_suffix(".json").exists()


def test_an_unknown_format_names_the_known_ones_before_anything_is_launched() -> None:
    with pytest.raises(UsageError, match="sh.*not 'helm'"):
        load(["+space=local", "format=helm"])
    assert tuple(FORMATS) == settings.FORMATS


def test_a_full_disk_is_no_wrong_setting(small: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("autotune.utils.files.write_text", full)
    with pytest.raises(AutotuneError, match="No space left on device; the study is kept") as error:
        export(small.settings, small.study)
    assert error.value.exit_code == 1


def test_launch_json_holds_no_character_that_turns_lines_around(small: Made) -> None:
    small.study.set_attr("provenance", {**small.study.attrs()["provenance"], "space": "a\u202eb"})
    origin = export(small.settings, small.study).with_suffix(".json").read_text(encoding="utf-8")
    assert origin.isascii() and "\\u202e" in origin


def test_whether_a_measured_argument_fits_is_known_at_once_whatever_is_in_it() -> None:
    parts: tuple[str | Ref, ...] = tuple(part for _ in range(40) for part in (Ref("PYTHON"), "a"))
    assert _fits(parts, "xa" * 400) and not _fits(parts, "a" * 4000 + "b") and not _fits(parts, "a" * 39)
    assert not _fits((*parts, "b"), HIDDEN.join(["a"] * 40))
    assert _fits(("--key=", Ref("KEY")), f"--key={HIDDEN}") and _fits(("a-secret-b",), f"a-{HIDDEN}-b")
    assert not _fits(("ab", Ref("X"), "bc"), "abc") and not _fits(("a",), "ab") and _fits(("",), "")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_exported_script_starts_a_server_that_answers(small: Made, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("torch")
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(["bash", str(export(small.settings, small.study))], cwd=tmp_path, stdout=output,
                                  stderr=subprocess.STDOUT, start_new_session=True,
                                  env={**os.environ, "PORT": str(port), "HOST": "127.0.0.1"})
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        healthy = False
        while not healthy:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                healthy = httpx.get(f"{address}/health", timeout=5, trust_env=False).status_code == 200
            time.sleep(0.5)
        answer = httpx.post(f"{address}/v1/completions", json={"prompt": "def main(", "max_tokens": 8}, timeout=60,
                            trust_env=False).json()
        assert answer["usage"]["completion_tokens"] > 0
        told = httpx.get(f"{address}/server_info", timeout=60, trust_env=False).json()
        assert told["tree_budget"] == small.study.records()[4].config["tree_budget"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
