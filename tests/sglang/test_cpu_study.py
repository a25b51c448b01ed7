"""A whole study of the space sglang_cpu on a real SGLang: crashes become knowledge, and are not bought a third time."""

from __future__ import annotations

import pathlib

import pytest

from tests.sglang.support import HERE, Tuned, environment

# six minutes on a quiet machine of two cores
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Nine servers out of the space, six of which really break, under one load level: a tuner that learned nothing would buy
# the crash of expert parallelism three times. Short answers give a window enough of them to be valid at once.
STUDY = (
    "study.launches=7", "study.seed=1", "study.confirm.finalists=0",
    "space.params.parallel.choices=[tp1_bound,tp2,ep2_bound]", "~space.belief",
    "space.params.page_size.choices=[1]", "space.params.dtype.choices=[auto]",
    "space.params.overlap_schedule.choices=[true]", "space.params.radix_cache.choices=[true]",
    "space.params.concurrency.choices=[8]", "space.params.max_running_requests.choices=[8,12,16]",
    "workload.output_tokens=16", "power.others=1",  # also beside other work
)


def test_a_study_on_a_real_server_learns_from_its_crashes(tmp_path: pathlib.Path) -> None:
    tuned = Tuned.of(tmp_path, "sglang_cpu", (
        f"outputs={tmp_path}", "device=cpu", f"space.model.target={tmp_path / 'moe'}",
        f"engine.python={environment('sglang', '0.5.23')}", f"+engine.env.PYTHONPATH={HERE / 'standin'}", *STUDY))
    assert {t["parallel"] for t in tuned.complete} == {"tp1_bound"}
    experts = [t for t in tuned.crashed if t["parallel"] == "ep2_bound"]
    unbound = [t for t in tuned.crashed if t["parallel"] == "tp2"]
    assert experts and unbound and len(experts) + len(unbound) == len(tuned.crashed)
    for crash in experts:
        assert crash["crash_stage"] == "warmup" and "index -1 is out of bounds" in crash["crash_excerpt"]
    for crash in unbound:
        assert "SGLANG_CPU_OMP_THREADS_BIND" in crash["crash_excerpt"]
    assert len({crash["crash_signature"] for crash in experts}) == 1
    assert 1 <= sum("--ep-size" in argv for argv in tuned.launched) <= 2
    assert (tuned.folder / "report.html").exists() and (tuned.folder / "launch.sh").exists()
