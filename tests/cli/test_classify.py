"""`autotune classify`: for people who paste a log."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PORT = "OSError: [Errno 98] Address already in use\n"
FLAG = "launch_server.py: error: unrecognized arguments: --foo\n"
KEYS = ["file", "stage", "category", "blame", "signature", "excerpt", "explanation", "next_step"]


def classify(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "autotune", "classify", *arguments], cwd=ROOT, input=given,
                          capture_output=True, check=False)


def test_each_file_gives_one_json_object_a_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    (tmp_path / "b.log").write_bytes(b"\xff\xfa" + FLAG.encode())
    done = classify(str(tmp_path / "a.log"), str(tmp_path / "b.log"))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [list(line) for line in lines] == [KEYS, KEYS]
    assert [line["category"] for line in lines] == ["port_in_use", "unrecognized_flag"]
    assert [line["blame"] for line in lines] == ["transient", "environment"]


def test_a_dash_reads_standard_input() -> None:
    done = classify("-", given=FLAG.encode())
    line = json.loads(done.stdout)
    assert (line["file"], line["category"], line["stage"]) == ("-", "unrecognized_flag", "arg-parse")


def test_an_unreadable_file_is_one_line_and_the_others_are_still_told(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.log").write_text(PORT)
    done = classify(str(tmp_path / "none.log"), str(tmp_path), str(tmp_path / "a.log"))
    assert done.returncode == 2 and len(done.stdout.splitlines()) == 1
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 2 and "none.log" in errors[0] and "No such file" in errors[0] and "directory" in errors[1]


def test_it_starts_without_heavy_imports() -> None:
    code = ("import io, sys; from autotune.cli.classify import run; run(['/dev/null'], io.StringIO()); "
            "print(sorted({'torch', 'optuna', 'hydra', 'numpy', 'httpx'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
