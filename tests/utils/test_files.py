"""Files in a study's folder are ours alone: nothing is written through a link that somebody left there."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from autotune.engine.supervisor import BoundedLog
from autotune.records import AutotuneError
from autotune.storage.locks import StudyLock
from autotune.utils.files import append_line, fresh, write_text
from autotune.utils.redact import Redactor


@pytest.fixture
def link(tmp_path: pathlib.Path) -> pathlib.Path:
    """A link to a file that must stay as it is."""
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    return tmp_path / "link"


def intact(link: pathlib.Path) -> bool:
    return (link.parent / "precious").read_text() == "mine\n"


def test_what_is_written_anew_takes_the_place_of_a_link(link: pathlib.Path) -> None:
    log = BoundedLog(link, 1 << 20, Redactor())
    log.write(b"a line\n")
    log.close()
    assert link.read_text() == "a line\n" and not link.is_symlink() and intact(link)
    link.unlink()
    link.symlink_to("precious")
    fresh(link).write_text("new")
    assert link.read_text() == "new" and intact(link)
    link.unlink()
    link.symlink_to("precious")
    write_text(link, "whole")
    assert link.read_text() == "whole" and intact(link)


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
    assert not link.with_name("made by nobody").exists()


def test_a_studys_lock_that_is_a_link_is_one_line_and_stays(link: pathlib.Path) -> None:
    study = link.parent / "outputs" / "local"
    study.mkdir(parents=True)
    (study / "lock").symlink_to(link.parent / "precious")
    done = subprocess.run([sys.executable, "-m", "autotune", "tune", "+space=local", "device=cpu", "power=none"],
                          capture_output=True, text=True, cwd=link.parent, timeout=100)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "lock is a link: remove it" in done.stderr and intact(link)
