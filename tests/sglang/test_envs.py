"""Environments of real engines are made once, whoever asks, and again when their recipe changed."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.envs import Recipe, ensure

pytestmark = pytest.mark.slow

ASK = "from tests.envs import Recipe, ensure; print(ensure('bare', Recipe(())))"


def test_two_processes_share_one_environment(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "AUTOTUNE_ENV_CACHE": str(tmp_path), "PYTHONPATH": os.getcwd()}
    both = [subprocess.Popen([sys.executable, "-c", ASK], env=environment, text=True, stdout=subprocess.PIPE)
            for _ in range(2)]
    answers = {process.communicate(timeout=110)[0].strip() for process in both}
    assert answers == {str(tmp_path / "bare/bin/python")}
    monkeypatch.setenv("AUTOTUNE_ENV_CACHE", str(tmp_path))
    (tmp_path / "bare/mine").touch()
    assert ensure("bare", Recipe(())).exists() and (tmp_path / "bare/mine").exists()


def test_an_environment_that_was_not_finished_is_made_again(tmp_path: pathlib.Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_ENV_CACHE", str(tmp_path))
    (tmp_path / "bare/bin").mkdir(parents=True)
    (tmp_path / "bare/half").touch()
    python = ensure("bare", Recipe(()))
    assert not (tmp_path / "bare/half").exists()
    assert subprocess.run([python, "-c", "import sys; print(sys.prefix)"], text=True, stdout=subprocess.PIPE
                          ).stdout.strip() == str(tmp_path / "bare")


def test_a_package_that_cannot_be_installed_is_told_in_pips_words(tmp_path: pathlib.Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_ENV_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="No such file|does not exist|Invalid requirement"):
        ensure("broken", Recipe((str(tmp_path / "nothing.whl"),)))
    assert not (tmp_path / "broken/complete").exists()
