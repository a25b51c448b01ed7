"""Folders of others may hold what is no file: it is neither waited for nor read without end."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from autotune.config.compose import load, space_files
from autotune.engine.orphans import end_orphans
from autotune.measure.correctness import AgreementSettings, Gate
from autotune.records import AutotuneError, UsageError
from autotune.storage.schema import read_pivots
from autotune.tuning.worker import share_references
from autotune.utils.files import read_plain
from tests.loadgen.harness import BUILTIN

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS: dict[str, Callable[[pathlib.Path], None]] = {
    "a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"), "a folder": lambda path: path.mkdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_no_text_no_space_and_no_record(tmp_path: pathlib.Path, kind: str) -> None:
    launch, spaces = tmp_path / "launches" / "0001", tmp_path / "spaces"
    (spaces / "engine").mkdir(parents=True)
    launch.mkdir(parents=True)
    for path in (tmp_path / "x", launch / "owner.json", spaces / "odd.yaml", spaces / "engine" / "odd.yaml",
                 tmp_path / "pivots.jsonl", tmp_path / "agreement.json"):
        KINDS[kind](path)
    with pytest.raises(OSError):
        read_plain(tmp_path / "x")
    assert end_orphans(tmp_path) == [] and "odd" not in space_files([str(spaces)])
    with pytest.raises(AutotuneError, match="pivots.jsonl cannot be read .*: remove it"):
        read_pivots(tmp_path)
    gate = Gate(tmp_path / "agreement.json", AgreementSettings(1, 4, 8, 0.1, 2.0, 0.1, 2.0), BUILTIN)
    assert gate.references() == []
    with pytest.raises(UsageError, match="there is no space 'odd'"):
        load(["+space=odd"], [str(spaces)])
    told = subprocess.run([sys.executable, "-m", "autotune", "--help", "--spaces", str(spaces)], capture_output=True,
                          text=True, timeout=120, cwd=ROOT, check=True).stdout
    assert "local" in told and "odd" not in told


def test_a_file_that_is_far_too_large_is_refused_without_being_read(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError) as error:
        read_plain(tmp_path / "sparse", most_bytes=1 << 20)
    assert error.value.errno == errno.EFBIG


def test_outputs_of_the_baseline_that_are_no_file_are_not_shared(tmp_path: pathlib.Path) -> None:
    class Nothing:
        def attrs(self) -> dict[str, object]:
            return {}

        def set_attr(self, name: str, value: object) -> None:
            raise AssertionError(name)

    os.mkfifo(tmp_path / "agreement.json")
    share_references(Nothing(), tmp_path / "agreement.json")  # type: ignore[arg-type]
