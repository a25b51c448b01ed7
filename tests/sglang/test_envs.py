"""Environments of real engines are made once, whoever asks, and again when their recipe changed."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.envs import Recipe, ensure

pytestmark = pytest.mark.slow

ASK = "from tests.envs import Recipe, ensure; print(ensure('bare', Recipe(())))"


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("AUTOTUNE_ENV_CACHE", str(tmp_path))
    return tmp_path


def test_two_processes_share_one_environment(cache: pathlib.Path) -> None:
    both = [subprocess.Popen([sys.executable, "-c", ASK], env={**os.environ, "PYTHONPATH": os.getcwd()}, text=True,
                             stdout=subprocess.PIPE) for _ in range(2)]
    answers = {process.communicate(timeout=110)[0].strip() for process in both}
    assert answers == {str(cache / "bare/bin/python")}
    (cache / "bare/mine").touch()
    assert ensure("bare", Recipe(())).exists() and (cache / "bare/mine").exists()


def test_an_environment_that_was_not_finished_is_made_again(cache: pathlib.Path) -> None:
    (cache / "bare/bin").mkdir(parents=True)
    (cache / "bare/half").touch()
    python = ensure("bare", Recipe(()))
    assert not (cache / "bare/half").exists()
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], text=True, stdout=subprocess.PIPE).stdout
    assert prefix.strip() == str(cache / "bare")


def test_a_package_that_cannot_be_installed_is_told_in_pips_words(cache: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="No such file|does not exist|Invalid requirement"):
        ensure("broken", Recipe((str(cache / "nothing.whl"),)))
    assert not (cache / "broken/complete").exists()
