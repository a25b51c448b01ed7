"""The NVML meter over a stand-in for NVIDIA's library: a real shared object with the real ABI, scripted by a file."""

from __future__ import annotations

import csv
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest

from autotune.engine.gpus import Gpu, chosen, visible_gpus
from autotune.power import open_meter
from autotune.power.meter import Powered
from autotune.power.nvml import integrate
from tests.power.nvml_worker import SETTINGS

FAKES = pathlib.Path(__file__).parents[1] / "fakes"
ROOT = pathlib.Path(__file__).parents[2]
GPUS = {  # a line that starts with ~ comes into force in the middle of the window
    "good": ["power_mw 300000", "temp 61", "limit_mw 650000", "pids OURS"],
    "second": ["power_mw 100000", "counter_mw 100000"],
    "disagrees": ["power_mw 270000"],
    "flat": ["power_mw 300000", "flat 1"],
    "back": ["power_mw 300000", "base_mj 9000000", "~base_mj 1000000"],
    "hot": ["power_mw 300000", "bits 72"],
    "braked": ["power_mw 300000", "bits 136"],
    "capped": ["power_mw 300000", "bits 4"],
    "shared": ["power_mw 300000", "pids OURS,1"],
    "namespaced": ["power_mw 300000", "pids 1"],
    "untraced": ["error.fields 3"],
    "gap": ["power_mw 300000", "~error.fields 3"],
    "bare": ["power_mw 300000", "error.temp 3", "error.bits 3", "error.limit 3", "error.pids 3"],
    "grace": ["power_mw 300000", "module_mw 500000", "counter_mw 500000"],
    "fails": ["power_mw 300000", "~error.energy 999"],
    "lost": ["power_mw 300000", "~error.fields 15"],
    "sliced": ["mig 1"],
    "old": ["error.energy 3"],
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o",
                    str(folder / "libnvidia-ml.so.1"), str(FAKES / "nvml.c")], check=True)
    return folder


def run_with(library: pathlib.Path, state: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
    if state is not None:
        (library / "state").write_text(state)
        env["FAKE_NVML"] = str(library / "state")
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture(scope="module")
def found(library: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lines = [f"count {len(GPUS)}"]
    for index, (name, settings) in enumerate(GPUS.items()):
        lines.append(f"{index}.uuid GPU-{name}")
        lines += [f"~{index}.{line[1:]}" if line.startswith("~") else f"{index}.{line}" for line in settings]
    folder = tmp_path_factory.mktemp("traces")
    done = run_with(library, "\n".join(lines) + "\n", "-m", "tests.power.nvml_worker", str(folder))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    result["folder"] = folder
    return result


def test_the_counters_difference_is_the_energy_and_sampled_power_agrees(found: dict[str, Any]) -> None:
    energy = found["GPU-good"]
    assert energy["source"] == "nvml" and energy["reasons"] == [] and energy["scope"] == "gpu"
    assert energy["joules"] == pytest.approx(300 * energy["window_s"], rel=0.04)
    assert energy["cross_check_j"] == pytest.approx(energy["joules"], rel=0.04)
    assert energy["power_limit_w"] == {"GPU-good": 650.0} and energy["temperature_c"] == {"GPU-good": [61.0, 61.0]}


def test_all_gpus_of_a_server_are_added(found: dict[str, Any]) -> None:
    energy = found["both"]
    assert set(energy["per_device_j"]) == {"GPU-good", "GPU-second"} and energy["reasons"] == []
    assert energy["joules"] == pytest.approx(400 * energy["window_s"], rel=0.04)


@pytest.mark.parametrize(("name", "reasons"), [
    ("disagrees", ["trace_disagrees"]), ("hot", ["thermal_slowdown"]), ("braked", ["power_brake"]), ("capped", []),
    ("shared", ["other_process_on_gpu"]), ("namespaced", []), ("untraced", ["trace_gap"]), ("gap", ["trace_gap"])])
def test_what_spoils_a_window_is_named_and_the_energy_still_told(found: dict[str, Any], name: str,
                                                                 reasons: list[str]) -> None:
    energy = found[f"GPU-{name}"]
    assert energy["reasons"] == reasons and energy["joules"] == pytest.approx(300 * energy["window_s"], rel=0.04)


@pytest.mark.parametrize(("name", "reason"), [("flat", "counter_flat"), ("back", "counter_went_back"),
                                              ("fails", "counter_failed")])
def test_a_broken_counter_gives_no_energy_and_never_0_watts(found: dict[str, Any], name: str, reason: str) -> None:
    assert found[f"GPU-{name}"]["joules"] is None and reason in found[f"GPU-{name}"]["reasons"]


def test_metrics_that_are_not_supported_hide_no_other(found: dict[str, Any]) -> None:
    energy = found["GPU-bare"]
    assert energy["reasons"] == [] and energy["joules"] > 0
    assert energy["temperature_c"] == {} and energy["power_limit_w"] == {}


def test_where_the_counter_is_the_whole_modules_the_gpus_own_power_is_the_energy(found: dict[str, Any]) -> None:
    energy = found["GPU-grace"]
    assert energy["joules"] == pytest.approx(300 * energy["window_s"], rel=0.04)
    assert "sampled" in energy["scope"] and energy["reasons"] == []


def test_short_windows_lost_gpus_and_gpus_that_cannot_be_measured_are_reported(found: dict[str, Any]) -> None:
    assert found["all"] == [f"GPU-{name}" for name in GPUS]
    assert "window_too_short" in found["short"]["reasons"]
    assert "GPU is lost" in found["GPU-lost"]["lost"] and "reset" in found["GPU-lost"]["lost"]
    assert set(found["refused"]) == {"GPU-sliced", "GPU-old"}
    assert "MIG" in found["refused"]["GPU-sliced"] and "no energy counter" in found["refused"]["GPU-old"]


def test_samples_are_written_as_they_come(found: dict[str, Any]) -> None:
    with (found["folder"] / "GPU-good.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["device"] for row in rows} == {"GPU-good"}
    known = [row for row in rows if row["watts"]]  # a sample that came late on a busy machine has no power of its own
    assert len(known) > 20
    assert {float(row["watts"]) for row in known} == {300.0} and {row["temperature_c"] for row in known} == {"61"}
    with (found["folder"] / "GPU-untraced.csv").open() as file:
        assert {row["watts"] for row in csv.DictReader(file)} == {""}  # unknown, not 0


def test_without_a_driver_auto_goes_on_and_says_why(library: pathlib.Path) -> None:
    code = ("from autotune.power.meter import *\nfrom autotune.power import open_meter\n"
            "s = PowerSettings(source='auto', watts_per_core=5.0, sample_s=0.1, max_gap_s=1.0, tolerance=0.05,"
            " others=1.0, wait_s=0.0)\n"
            "import os; meter, why = open_meter(s, Powered(os.getpid(), ('GPU-a',)))\nprint(meter.source, why['nvml'])")
    done = run_with(library, None, "-c", code)
    assert "Driver Not Loaded" in done.stdout and done.stdout.split()[0] in ("rapl", "cpu_time"), done.stderr


def test_integration_is_linear_between_samples_and_refuses_gaps() -> None:
    line = [(float(t), 10.0 * t) for t in range(11)]
    assert integrate(line, 2.5, 7.5, 1.0) == pytest.approx(5 * 50.0)
    assert integrate(line, 2.0, 10.5, 1.0) == pytest.approx(480 + 50.0)
    assert integrate(line, 2.0, 12.0, 1.0) is None and integrate(line[:3] + line[6:], 1.0, 8.0, 1.0) is None
    assert integrate(line[:2] + line[9:], 3.0, 7.0, 1.0) is None and integrate([], 0.0, 1.0, 1.0) is None


def test_cuda_visible_devices_picks_gpus_by_number_or_uuid_up_to_the_first_unknown_entry() -> None:
    gpus = [Gpu("GPU-aa1", "H200", 141.0), Gpu("GPU-bb2", "H200", 141.0)]
    assert chosen(gpus, None) == gpus
    assert chosen(gpus, "1") == [gpus[1]] and chosen(gpus, "GPU-bb,0") == [gpus[1], gpus[0]]
    assert chosen(gpus, "99") == [] and chosen(gpus, "0,99,1") == [gpus[0]]


@pytest.mark.gpu
def test_a_real_gpus_counter_and_its_sampled_power_agree() -> None:
    uuids = tuple(gpu.uuid for gpu in visible_gpus().gpus)
    meter, _ = open_meter(SETTINGS, Powered(None, uuids))
    with meter:
        time.sleep(1.0)
        start = meter.read()
        time.sleep(10.0)
        energy = meter.energy(start, meter.read())
    assert energy.joules and energy.watts and energy.watts > 10 * len(uuids)
    assert set(energy.per_device_j) == set(energy.power_limit_w) == set(energy.temperature_c) == set(uuids)
    assert energy.cross_check_j == pytest.approx(energy.joules, rel=0.2)
