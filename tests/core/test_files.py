"""Files in a study's folder are ours alone: nothing is written through a link that somebody left there."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from autotune.engine.keeper import BoundedLog
from autotune.files import append_line, fresh, write_text
from autotune.redact import Redactor


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


def test_a_studys_lock_that_is_a_link_is_one_line_and_stays(link: pathlib.Path) -> None:
    study = link.parent / "outputs" / "local"
    study.mkdir(parents=True)
    (study / "lock").symlink_to(link.parent / "precious")
    done = subprocess.run([sys.executable, "-m", "autotune", "tune", "+space=local", "device=cpu", "power=none"],
                          capture_output=True, text=True, cwd=link.parent, timeout=100)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "cannot write in" in done.stderr and intact(link)
