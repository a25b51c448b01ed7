"""The command line as a person meets it: verbs, help, exit codes, one line for every fault."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from autotune.cli.commands import open_study
from autotune.config.compose import load
from tests.report.studies import Made

ROOT = pathlib.Path(__file__).resolve().parents[2]


def autotune(*args: str, cwd: pathlib.Path | None = None, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "autotune", *args], cwd=cwd or ROOT, capture_output=True, text=True,
                          input=stdin, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)


def test_help_lists_verbs_and_spaces() -> None:
    done = autotune("--help")
    assert done.returncode == 0
    for word in ("tune", "check", "matrix", "classify", "report", "export", "dashboard", "worker", "local", "b300"):
        assert word in done.stdout


def test_spaces_are_found_from_any_folder(tmp_path: pathlib.Path) -> None:
    done = autotune("check", "+space=local", "--cfg", cwd=tmp_path)
    assert done.returncode == 0 and "tree_budget" in done.stdout


@pytest.mark.parametrize(("args", "message"), [
    ([], "pass +space=NAME"),
    (["+spce=local"], "not spce"),
    (["tuen", "+space=local"], "neither a verb"),
    (["--loud", "+space=local"], "unknown option --loud"),
    (["+space=local", "study.launchs=1"], "launchs"),
    (["+space=local", "space.params.tp.choices=[]"], "choices is empty"),
    (["report", "+space=local", "outputs=/nonexistent"], "no study"),
    (["export", "+space=local", "outputs=/nonexistent"], "no study"),
    (["classify"], "at least one log file"),
    (["classify", "--cfg", "server.log"], "leave --spaces and --cfg out"),
    (["check", "+space=b300", "engine.vars.ddtree_topk_flg=--k"], "has no {ddtree_topk_flg} and would ignore it"),
    (["check", "+space=local", "study.storage=sqlite://"], "a database in memory keeps nothing"),
    (["--spaces", "/nonexistent", "+space=local"], "does not exist"),
    (["check", "+space=local", "config=7", "outputs=/nonexistent"], "no study"),
    (["report", "+space=local", "trial=3"], "trial= is for export, and report would ignore it"),
    (["tune", "+space=local", "trial=3"], "trial= is for export, and tune would ignore it"),
    (["check", "+space=local", "out=here/"], "out= is for export and report and tune, and check would ignore it"),
    (["export", "+space=local", "config=best"], "config= is for check and matrix, and export would ignore it"),
    (["worker", "+space=local", "++report.format=json"], "report= is for report and tune, and worker would ignore it"),
    (["dashboard", "+space=local", "format=k8s"], "format= is for export and tune, and dashboard would ignore it"),
    (["report", "+space=local", "matrix.concurrency=[1]"], "matrix= is for matrix, and report would ignore it"),
    (["+space=local", "format=helm"], "format must be one of sh, systemd"),
    (["check", "+space=local", "price_per_device_hour=2"], "objective=tokens_per_joule would ignore it"),
    (["matrix", "+space=local", "executor=ray", "outputs=/tmp/autotune-none"], "leave executor=ray out"),
    (["tune", "+space=local", "executor.at_once=4"], "at_once"),
])
def test_bad_usage_is_one_line_and_exit_2(args: list[str], message: str) -> None:
    done = autotune(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_check_says_what_this_host_lacks_and_exits_4() -> None:
    done = autotune("check", "+space=b300")
    assert done.returncode == 4
    assert "the space needs 8 GPUs" in done.stdout and "--tp-size 8" in done.stdout


def test_check_says_where_the_study_would_live_and_where_its_launches_are_made(tmp_path: pathlib.Path) -> None:
    here = ["+space=local", f"outputs={tmp_path}", "device=cpu"]
    alone = autotune("check", *here).stdout
    assert f"study    local, in {tmp_path}/local, kept in sqlite:///{tmp_path}/local/study.db (not begun yet)" in alone
    assert "launches on this host, one at a time (executor=local, parallel.slots=1)" in alone
    assert not list(tmp_path.iterdir())
    away = autotune("check", *here, "executor=ray", "executor.address=head:10001", "executor.at_once=6",
                    "study.name=mine", "study.storage='postgresql://me:hush@db/x?sslpassword=hush2'").stdout
    assert f"study    mine, in {tmp_path}/mine, kept in postgresql://" in away and "@db/x" in away
    assert "hush" not in away
    assert "launches by Ray at head:10001, up to 6 side by side (executor=ray)" in away


def test_check_says_when_this_host_has_not_so_many_slots(tmp_path: pathlib.Path) -> None:
    done = autotune("check", "+space=local", "device=cpu", "parallel.slots=4096", f"outputs={tmp_path}")
    assert done.returncode == 4 and "  - parallel.slots=4096, and this host has" in done.stdout
    few = autotune("check", "+space=local", "device=cpu", "parallel.slots=auto", f"outputs={tmp_path}")
    assert few.returncode == 0 and "one at a time (executor=local, parallel.slots=auto)" in few.stdout


def test_tuning_a_space_that_cannot_run_here_exits_4_before_anything_starts(tmp_path: pathlib.Path) -> None:
    done = autotune("+space=b300", f"outputs={tmp_path}")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*/launches/*"))


def test_an_unwritable_outputs_folder_is_one_line_and_exit_1(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = autotune("+space=local", f"outputs={tmp_path / 'file'}")
    assert done.returncode == 1 and "cannot write in" in done.stderr and done.stderr.count("\n") == 1


def test_classify_reads_files_and_standard_input_without_a_space(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    done = autotune("classify", str(tmp_path / "a.log"), "-", stdin="error: unrecognized arguments: --tree-bugdet 8\n")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    assert '"category": "oom' in first and '"category": "unrecognized_flag"' in second


def test_the_version_is_told() -> None:
    assert autotune("--version").stdout.startswith("autotune ")


@pytest.mark.parametrize(("overrides", "says"), [
    (["workload.prompts=/nope.jsonl"], "/nope.jsonl is not a file"), (["power=nvml", "device=cpu"], "power=nvml"),
    (["device=cuda"], "no GPU is visible")])
def test_check_says_what_a_study_would_stop_at(overrides: list[str], says: str) -> None:
    done = autotune("check", "+space=local", *overrides)
    assert done.returncode == 4 and says in done.stdout and "Traceback" not in done.stderr


def test_check_of_a_trial_is_about_that_configuration(tmp_path: pathlib.Path) -> None:
    here = ["+space=local", f"outputs={tmp_path}", "device=cpu", "+limits={ttft_p99_ms: 400, tpot_p99_ms: 40}"]
    settings = load(here)
    settings.folder.mkdir()
    made = Made(settings, open_study(settings))
    made.measure(dict(settings.space.baseline), 1.0)
    made.measure({**settings.space.baseline, "max_running_requests": 16, "concurrency": 8}, 2.0)
    for which, called in (("1", "trial 1"), ("best", "the best")):
        done = autotune("check", *here, f"config={which}")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "study.db (there already: tune resumes it)" in done.stdout
        assert f"command of {called}:" in done.stdout and f"{called} can run here." in done.stdout
        assert "--max-running-requests 16" in done.stdout and "max_running_requests=16, concurrency=8" in done.stdout
    barred = autotune("check", *here, "config=1",
                      "++engine.rules=[{max_running_requests: 16, because: no more than eight}]")
    assert barred.returncode == 4 and "  - it is never launched: no more than eight" in barred.stdout
    missing = autotune("check", *here, "config=77")
    assert missing.returncode == 2 and "config=77 is neither baseline, best nor the number" in missing.stderr


def test_what_is_said_to_be_run_next_leaves_out_what_that_verb_would_refuse(tmp_path: pathlib.Path) -> None:
    settings = load(["+space=local", "report.format=json", "out=x/", "study.launches=3"], [str(tmp_path)])
    assert settings.command("check")[3:] == ["check", "+space=local", "study.launches=3", f"--spaces={tmp_path}"]
    assert settings.command("tune")[3:] == ["tune", "+space=local", "report.format=json", "out=x/", "study.launches=3",
                                            f"--spaces={tmp_path}"]
