"""Fixtures: studies with known outcomes, written through the real Study and Optuna.

Storage lies in memory-backed files where the machine has them: a trial is some forty commits.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from autotune.cli.verbs import open_study
from autotune.config.compose import load
from autotune.config.settings import Settings
from autotune.records import Stage
from autotune.report.story import read
from tests.report.studies import Made, baseline, search

Maker = Callable[..., Made]
PROVENANCE: dict[str, Any] = {
    "autotune": "0.1", "python": "3.11", "driver": None, "gpu": [], "created": "2026-01-01T00:00:00Z",
    "command": "python -m autotune tune +space=local"}
SHM = pathlib.Path("/dev/shm")
# Groups of tests that one worker of pytest-xdist runs: those that compare times of several processes, and those that
# share something slow to make (torch, a server, composed configurations, written studies, a compiled program).
GROUPS = {"timed": ("loadgen/test_process.py", "loadgen/test_read_batching.py", "measure/test_window.py"),
          "torch": ("ddtree/test_decoding.py", "ddtree/test_llama.py", "ddtree/test_tree.py"),
          "server": ("ddtree/test_server.py",),
          "spaces": ("sglang/test_variants.py", "sglang/test_spaces.py", "sglang/test_traps.py", "vllm/test_spaces.py"),
          "rich": ("report/test_dashboard.py", "report/test_report.py", "report/test_story.py"),
          "small": ("storage/test_corrupt.py", "storage/test_study.py"),
          "compare": ("report/test_compare.py",), "nvml": ("power/test_nvml.py",),
          "replay": ("replay/test_standin.py",)}

hypothesis.settings.register_profile("fast", max_examples=100, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=2000, deadline=None)
hypothesis.settings.load_profile("fast")  # pytest --hypothesis-profile thorough


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for group, files in GROUPS.items():
            if item.path.as_posix().endswith(files):
                item.add_marker(pytest.mark.xdist_group(group))


@functools.cache
def composed(*overrides: str) -> Settings:
    """Hydra's part, once for each set of overrides."""
    return load(["+space=local", "+limits={ttft_p99_ms: 400, tpot_p99_ms: 40}", *overrides])


def opened(outputs: pathlib.Path, *overrides: str) -> Made:
    """A study in `outputs`, opened or made as the command line does it."""
    settings = dataclasses.replace(composed(*overrides), outputs=outputs)
    settings.folder.mkdir(parents=True, exist_ok=True)
    return Made(settings, open_study(settings))


@pytest.fixture(scope="session")
def fast_folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def outputs(fast_folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty outputs folder of one test."""
    with tempfile.TemporaryDirectory(dir=fast_folder) as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def make(outputs: pathlib.Path) -> Maker:
    """make("overrides", ...) opens an empty study of the space `local`."""

    def made(*overrides: str) -> Made:
        study = opened(outputs, *overrides)
        study.study.set_attr("provenance", PROVENANCE)
        return study

    return made


@pytest.fixture(scope="session")
def small_folder(fast_folder: pathlib.Path) -> pathlib.Path:
    """Twelve trials: a baseline, gains, a broken limit, an invalid window, two crash signatures, a copy, a failure."""
    made = opened(fast_folder / "template")
    made.study.set_attr("provenance", PROVENANCE)
    made.measure(baseline(made), 2.0)
    made.measure(baseline(made, concurrency=8), 2.4, same_launch=True)
    made.crash(baseline(made, nvls=True))
    made.measure(baseline(made, tree_budget=8), 2.6)
    made.measure(baseline(made, tree_budget=8, concurrency=8), 3.0, same_launch=True)
    made.measure(baseline(made, tree_budget=16, concurrency=16), 3.9, tpot_ms=60.0)
    made.crash(baseline(made, tree_budget=8, nvls=True))
    made.crash(baseline(made, allreduce_fusion=True), "fuse0001", category="bad_flag", stage=Stage.ARG_PARSE,
               excerpt="error: --enable-allreduce-fusion needs --tp-size 2",
               explanation="All-reduce fusion needs tensor parallelism.", next_step="Use tp=2.")
    made.measure(baseline(made, tp=2), 1.8)
    made.measure(baseline(made, tp=2, concurrency=8), 2.2, same_launch=True, reasons=("unsteady",))
    made.measure(baseline(made, dp=2), 2.0, same_as=0)
    made.study.fail(made.study.ask(baseline(made, dp=2, tp=2), 99), "interrupted")
    return made.settings.folder


@pytest.fixture(scope="session")
def rich_folder(fast_folder: pathlib.Path) -> pathlib.Path:
    """A search of thirty launches with a confirmation, pivots and a matrix."""
    made = opened(fast_folder / "rich")
    made.study.set_attr("provenance", PROVENANCE)
    search(made, 30)
    winner = read(made.settings, made.study).best
    assert winner is not None
    made.study.set_attr("confirmation", {
        "method": "re-launched in interleaved blocks", "decided": "improved", "reason": "", "winner": winner.trial,
        "gain": 0.5, "interval": [0.4, 0.6], "blocks": 6,
        "finalists": {str(winner.trial): {"gain": 0.5, "interval": [0.4, 0.6], "verdict": "better"}}})
    made.study.set_attr("stop", {"kind": "gain", "reason": "no launch left is expected to add more than 2 %"})
    pivot = {"action": "close", "region": {"nvls": [True]}, "reason": "one fault in three launches", "trials": [5, 6],
             "reopens_when": "a launch with it serves", "after_launches": 9, "launches_saved": 4, "belief": 0.97}
    (made.settings.folder / "pivots.jsonl").write_text(json.dumps(pivot) + "\n" + '{"action": "clo')
    rows = [{"config": label, "ctx": 60, "concurrency": level, "tokens_per_s": 40.0 * level * factor, "watts": 40.0,
             "tokens_per_j": level * factor}
            for label, factor in (("baseline", 1.0), ("best", 1.5)) for level in (1, 4)]
    (made.settings.folder / "matrix.json").write_text(json.dumps(rows))
    return made.settings.folder


def copied(folder: pathlib.Path, outputs: pathlib.Path) -> Made:
    """A copy of a study's folder in `outputs`, opened."""
    shutil.copytree(folder, outputs / folder.name)
    made = opened(outputs)
    made.launches = 90
    return made


@pytest.fixture
def rich(rich_folder: pathlib.Path, outputs: pathlib.Path) -> Made:
    """A copy of the rich study."""
    return copied(rich_folder, outputs)


@pytest.fixture
def small(small_folder: pathlib.Path, outputs: pathlib.Path) -> Made:
    """A copy of the small study."""
    return copied(small_folder, outputs)
