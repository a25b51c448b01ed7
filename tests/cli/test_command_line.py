"""The command line as a person meets it: verbs, help, exit codes, one line for every fault."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from autotune.__main__ import main
from autotune.cli.verbs import VERBS, open_study
from autotune.config.compose import load
from tests.report.studies import Made

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORT = "OSError: [Errno 98] Address already in use\n"
FLAG = "launch_server.py: error: unrecognized arguments: --foo\n"
KEYS = ["file", "stage", "category", "blame", "signature", "excerpt", "explanation", "next_step", "blame_why",
        "blame_also", "engine", "container"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def autotune(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """autotune(words ...) runs a command line in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}

    def run(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        code = main(words)
        said = capfd.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_process_lists_verbs_and_spaces_from_any_folder(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-m", "autotune", "--help"], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0
    for word in (*VERBS, "local", "b300"):
        assert word in done.stdout


def test_a_process_explains_logs_without_a_space_or_heavy_imports(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    code = ("import sys; from autotune.__main__ import main; code = main(sys.argv[1:]); "
            "print(sorted({'torch', 'optuna', 'hydra', 'numpy', 'httpx'} & set(sys.modules))); sys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code, "classify", str(tmp_path / "a.log"), "-"], cwd=ROOT, text=True,
                          input=FLAG, capture_output=True)
    first, second, heavy = done.stdout.splitlines()
    assert done.returncode == 0 and heavy == "[]"
    assert json.loads(first)["category"] == "port_in_use" and json.loads(second)["category"] == "unrecognized_flag"


def test_a_process_that_is_terminated_says_so_and_exits_130(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    waiting = subprocess.Popen([sys.executable, "-m", "autotune", "classify", str(tmp_path / "a.log"), "-"], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stdout is not None and waiting.stdout.readline()  # now it waits for standard input
    waiting.send_signal(signal.SIGTERM)
    _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == 130 and "interrupted; the study is kept" in said and said.count("\n") == 1


@pytest.mark.parametrize(("words", "message"), [
    ([], "pass +space=NAME"),
    (["+spce=local"], "not spce"),
    (["tuen", "+space=local"], "neither a verb"),
    (["+space=local", "check"], "the verb comes first"),
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
    (["matrix", "+space=local", "executor=ray", "outputs={tmp}"], "leave executor=ray out"),
    (["worker", "+space=local", "executor=ray", "outputs={tmp}"], "leave executor=ray out"),
    (["tune", "+space=local", "executor.at_once=4"], "at_once"),
])
def test_bad_usage_is_one_line_and_exit_2(autotune: Run, tmp_path: pathlib.Path, words: list[str],
                                          message: str) -> None:
    done = autotune(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_fault_of_autotune_is_one_line_and_exit_1(autotune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: object) -> int:
        raise ValueError("odd")

    monkeypatch.setitem(VERBS, "check", dataclasses.replace(VERBS["check"], run=fail))
    done = autotune("check", "+space=local")
    assert (done.returncode, done.stdout) == (1, "")
    assert "a fault of autotune itself (ValueError: odd)" in done.stderr and done.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="odd"):
        autotune("check", "+space=local", "-v")


def test_check_says_what_this_host_lacks_and_tune_starts_nothing(autotune: Run, tmp_path: pathlib.Path) -> None:
    done = autotune("check", "+space=b300")
    assert done.returncode == 4
    assert "the space needs 8 GPUs" in done.stdout and "--tp-size 8" in done.stdout
    done = autotune("+space=b300", f"outputs={tmp_path}")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*/launches/*"))


def test_check_says_where_the_study_would_live_and_where_its_launches_are_made(autotune: Run,
                                                                               tmp_path: pathlib.Path) -> None:
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


def test_an_unwritable_outputs_folder_is_one_line_and_exit_1(autotune: Run, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    done = autotune("+space=local", f"outputs={tmp_path / 'file'}")
    assert done.returncode == 1 and "cannot write in" in done.stderr and done.stderr.count("\n") == 1


def test_each_log_gives_one_json_object_a_line_and_an_unreadable_one_gives_exit_2(autotune: Run,
                                                                                  tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    (tmp_path / "b.log").write_bytes(b"\xff\xfa" + FLAG.encode())
    done = autotune("classify", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "-", stdin=FLAG.encode())
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [list(line) for line in lines] == [KEYS] * 3
    assert [line["category"] for line in lines] == ["port_in_use", "unrecognized_flag", "unrecognized_flag"]
    assert [line["blame"] for line in lines] == ["transient", "environment", "environment"]
    assert (lines[2]["file"], lines[2]["stage"]) == ("-", "arg-parse")
    done = autotune("classify", str(tmp_path / "none.log"), str(tmp_path / "a.log"))
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 1
    assert done.stderr.count("\n") == 1 and "none.log" in done.stderr and "No such file" in done.stderr


def test_a_folder_gives_one_object_for_each_file_and_container(autotune: Run, tmp_path: pathlib.Path) -> None:
    (tmp_path / "pods").mkdir()
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(PORT.encode()))
    (tmp_path / "pods" / "core").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "pods" / "b.log").write_text("".join(
        f"[pod/x/{name}] {line}\n" for name, line in (("one", FLAG), ("two", PORT), ("one", "bye"))))
    lines = [json.loads(line) for line in autotune("classify", str(tmp_path)).stdout.splitlines()]
    assert [(pathlib.Path(line["file"]).name, line["container"], line["category"]) for line in lines] == [
        ("a.log.gz", "", "port_in_use"), ("b.log", "x/one", "unrecognized_flag"), ("b.log", "x/two", "port_in_use")]


@pytest.mark.slow
def test_a_terminal_gets_a_table_and_the_next_step(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-m", "autotune", "classify", "a.log"], cwd=tmp_path, stdout=theirs, check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = os.read(ours, 1 << 16).decode()
    assert "port_in_use" in said and "a.log: Launch again on a free port" in said and "{" not in said


def test_version_and_composed_configuration_are_printed(autotune: Run) -> None:
    assert autotune("--version").stdout.startswith("autotune ")
    assert "tree_budget" in autotune("check", "+space=local", "--cfg").stdout


@pytest.mark.parametrize(("code", "overrides", "says"), [
    (4, ["workload.prompts=/nope.jsonl"], "/nope.jsonl is not a file"), (4, ["power=nvml", "device=cpu"], "power=nvml"),
    (4, ["device=cuda"], "no GPU is visible"),
    (4, ["device=cpu", "parallel.slots=4096"], "  - parallel.slots=4096, and this host has"),
    (0, ["device=cpu", "parallel.slots=auto"], "one at a time (executor=local, parallel.slots=auto)")])
def test_check_says_what_a_study_would_stop_at(autotune: Run, tmp_path: pathlib.Path, code: int, overrides: list[str],
                                               says: str) -> None:
    done = autotune("check", "+space=local", f"outputs={tmp_path}", *overrides)
    assert done.returncode == code and says in done.stdout and "Traceback" not in done.stderr


def test_check_of_a_trial_is_about_that_configuration(autotune: Run, tmp_path: pathlib.Path) -> None:
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
    forbidden = autotune("check", *here, "config=1",
                         "++engine.rules=[{max_running_requests: 16, because: no more than eight}]")
    assert forbidden.returncode == 4 and "  - it is never launched: no more than eight" in forbidden.stdout
    missing = autotune("check", *here, "config=77")
    assert missing.returncode == 2 and "config=77 is neither baseline, best nor the number" in missing.stderr


def test_the_command_to_run_next_leaves_out_settings_that_its_verb_refuses(tmp_path: pathlib.Path) -> None:
    settings = load(["+space=local", "report.format=json", "out=x/", "study.launches=3"], [str(tmp_path)])
    assert settings.command("check")[3:] == ["check", "+space=local", "study.launches=3", f"--spaces={tmp_path}"]
    assert settings.command("tune")[3:] == ["tune", "+space=local", "report.format=json", "out=x/", "study.launches=3",
                                            f"--spaces={tmp_path}"]
