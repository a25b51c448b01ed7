"""The command line as a person meets it: verbs, help, exit codes, one line for every fault."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

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
    (["check", "+space=local", "study.storage=sqlite://"], "a database in memory keeps nothing"),
    (["--spaces", "/nonexistent", "+space=local"], "does not exist"),
])
def test_bad_usage_is_one_line_and_exit_2(args: list[str], message: str) -> None:
    done = autotune(*args)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_check_says_what_this_host_lacks_and_exits_4() -> None:
    done = autotune("check", "+space=b300")
    assert done.returncode == 4
    assert "the space needs 8 GPUs" in done.stdout and "--tp-size 8" in done.stdout


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
