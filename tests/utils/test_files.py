"""Files of a study: nothing is written through a link, and no pipe or device is waited for or read without end."""

from __future__ import annotations

import errno
import os
import pathlib
import types
from collections.abc import Callable

import pytest

from autotune.__main__ import help_text
from autotune.config.compose import load, space_files
from autotune.engine.orphans import end_orphans
from autotune.engine.supervisor import BoundedLog
from autotune.executors.topology import exclusive
from autotune.measure.correctness import AgreementSettings, Gate
from autotune.records import AutotuneError, UsageError
from autotune.storage.locks import StudyLock
from autotune.storage.schema import read_pivots
from autotune.tuning.worker import share_references
from autotune.utils.files import append_line, fresh, read_plain, write_output, write_text
from autotune.utils.redact import Redactor
from tests.loadgen.harness import BUILTIN


@pytest.fixture
def link(tmp_path: pathlib.Path) -> pathlib.Path:
    """A link to a file that must stay as it is."""
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    return tmp_path / "link"


def intact(link: pathlib.Path) -> bool:
    return (link.parent / "precious").read_text() == "mine\n"


def logged(path: pathlib.Path, text: str) -> None:
    log = BoundedLog(path, 1 << 20, Redactor())
    log.write(text.encode())
    log.close()


@pytest.mark.parametrize("write", [logged, lambda path, text: fresh(path).write_text(text), write_text])
def test_a_file_that_is_written_anew_takes_the_place_of_a_link(
        link: pathlib.Path, write: Callable[[pathlib.Path, str], object]) -> None:
    write(link, "new\n")
    assert link.read_text() == "new\n" and not link.is_symlink() and intact(link)


def test_what_is_added_to_a_file_is_not_added_through_a_link(link: pathlib.Path) -> None:
    with pytest.raises(OSError):
        append_line(link, "{}")
    append_line(link.with_name("new"), "{}")
    assert intact(link) and link.with_name("new").read_text() == "{}\n"


def test_the_file_beside_one_that_is_replaced_is_no_way_out_either(link: pathlib.Path) -> None:
    part = link.with_name(f"new.{os.getpid()}.part")
    part.symlink_to("precious")
    write_text(link.with_name("new"), "whole")
    assert intact(link) and link.with_name("new").read_text() == "whole" and not part.is_symlink()


def test_a_link_or_a_pipe_where_a_lock_belongs_is_one_line_and_no_hang(link: pathlib.Path) -> None:
    os.mkfifo(link.with_name("db.lock"))
    link.with_name("other.lock").symlink_to(link.with_name("made by nobody"))
    for name, why in (("db", "no plain file: remove it"), ("other", "a link: remove it")):
        with pytest.raises(AutotuneError, match=why), StudyLock(f"sqlite:///{link.with_name(name)}", "t").held():
            pass
    with pytest.raises(OSError, match="no plain file"):
        append_line(link.with_name("db.lock"), "{}")
    with pytest.raises(OSError, match="a link: remove it"), exclusive(link, str):
        pass
    assert intact(link) and not link.with_name("made by nobody").exists()


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
    assert end_orphans(tmp_path) == {} and "odd" not in space_files([str(spaces)])
    with pytest.raises(AutotuneError, match="pivots.jsonl cannot be read .*: remove it"):
        read_pivots(tmp_path)
    gate = Gate(tmp_path / "agreement.json", AgreementSettings(1, 4, 8, 0.1, 2.0, 0.1, 2.0, 60.0), BUILTIN)
    assert gate.references() == []
    share_references(types.SimpleNamespace(attrs=dict, set_attr=pytest.fail), gate.file)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="there is no space 'odd'"):
        load(["+space=odd"], [str(spaces)])
    told = help_text([str(spaces)])
    assert "local" in told and "odd" not in told


def test_a_file_that_is_far_too_large_is_refused_without_being_read(tmp_path: pathlib.Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError) as error:
        read_plain(tmp_path / "sparse", most_bytes=1 << 20)
    assert error.value.errno == errno.EFBIG


def test_an_output_never_replaces_a_device_or_a_pipe(tmp_path: pathlib.Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no regular file"):
        write_output(pipe, "text")
    assert pipe.is_fifo()
    write_output(tmp_path / "file", "text")
    write_output(tmp_path / "file", "more")
    assert (tmp_path / "file").read_text() == "more"
