"""CPU meters: a process tree's CPU seconds, and RAPL counters."""

from __future__ import annotations

import csv
import dataclasses
import os
import pathlib
import select
import subprocess
import sys
import time

import pytest

from autotune.power import check_source, open_meter
from autotune.power.cpu_meters import CpuTimeMeter, RaplMeter
from autotune.power.host_load import CpuSample, HostLoad
from autotune.power.meter import MeterUnavailable, NoMeter, Powered, PowerSettings, Reading
from autotune.records import UsageError
from autotune.utils.validation import convert

SETTINGS = PowerSettings(source="auto", watts_per_core=10.0, sample_s=0.1, max_gap_s=1.0, tolerance=0.05, others=1.0,
                         wait_s=0.0)
BURN = pathlib.Path(__file__).parent / "burn.py"


@pytest.mark.parametrize("role", ["waited", "orphan"])
def test_each_cpu_second_of_the_tree_is_counted_once(role: str, tmp_path: pathlib.Path) -> None:
    """Of children that are waited for while the meter runs, and of one whose parent died."""
    spent = tmp_path / "spent"
    root = subprocess.Popen([sys.executable, str(BURN), str(spent), role], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert root.stdin and root.stdout
    with CpuTimeMeter(SETTINGS, Powered(root.pid), tmp_path / "power.csv") as meter:
        time.sleep(0.2)
        start = meter.read()
        root.stdin.write("go\n")
        root.stdin.flush()
        while not select.select([root.stdout], [], [], 0.1)[0]:
            meter.read()
        energy = meter.energy(start, meter.read())
    root.kill()
    root.communicate()
    truth = sum(map(float, spent.read_text().split()))
    assert energy.assumed and energy.source == "cpu_time" and energy.joules is not None
    assert energy.joules / 10 == pytest.approx(truth, abs=0.3)  # each interpreter's start and end are in one or other
    assert truth > 0.8
    with (tmp_path / "power.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows and {row["assumed"] for row in rows} == {"1"} and all(float(r["watts"]) >= 0 for r in rows)


def test_a_server_that_did_nothing_has_no_energy_rather_than_0() -> None:
    with CpuTimeMeter(SETTINGS, Powered(os.getpid()), None) as meter:
        energy = meter.energy(Reading(1.0, {"cpu": 5.0}), Reading(2.0, {"cpu": 5.0}))
    assert energy.joules is None and energy.watts is None and energy.reasons == ("counter_flat",)


BUSY = "import time\nend = time.monotonic() + 60\nwhile time.process_time() < 0.3 and time.monotonic() < end: pass"
FOREIGN = ("import os, subprocess, sys; os.fork() and os._exit(0); os.setsid()\n"
           "subprocess.run([sys.executable, '-c', sys.argv[1]])")


def test_a_window_beside_another_program_is_host_busy_and_not_valid() -> None:
    settings = dataclasses.replace(SETTINGS, others=0.0)
    with CpuTimeMeter(settings, Powered(os.getpid()), None) as meter:
        start, began = meter.read(), time.process_time()
        subprocess.run([sys.executable, "-c", FOREIGN, BUSY], stdout=subprocess.PIPE, check=True)  # until all ended
        while time.process_time() < began + 0.1:
            pass
        energy = meter.energy(start, meter.read())
    assert energy.joules and energy.reasons == ("host_busy",) and not energy.valid


def test_what_we_and_the_server_compute_is_not_of_others() -> None:
    before, after = CpuSample(100.0, 50.0, 20.0), CpuSample(108.0, 52.0, 27.5)
    assert after.share_of_others(before) == pytest.approx(0.05)
    assert after.share_of_others(after) == 0.0 and CpuSample(101.0, 50.0, 29.0).share_of_others(before) == 0.0
    others = HostLoad(None, 1.0)
    start = others.sample()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert others.sample().own_s - start.own_s > 0.25  # in ticks of 10 ms


def test_a_busy_host_is_seen_between_any_two_readings_though_it_is_looked_at_now_and_then() -> None:
    others = HostLoad(None, -1.0)  # anything is too much
    assert others.reasons(1.0, 2.0) == ()  # it was never looked at
    for t in (10.0, 10.5, 11.0, 12.0, 13.0, 14.5):
        others.record(t)
    assert [t for t, _ in others._samples] == [10.0, 12.0, 14.5]
    assert others.reasons(10.0, 14.5) == others.reasons(10.5, 11.0) == others.reasons(9.0, 9.5) == ("host_busy",)


def test_cpu_time_needs_a_process_and_an_assumption() -> None:
    no_watts = dataclasses.replace(SETTINGS, watts_per_core=None)
    for settings, powered in ((no_watts, Powered(1)), (SETTINGS, Powered(None))):
        with pytest.raises(MeterUnavailable, match="cpu_time: "):
            CpuTimeMeter(settings, powered, None)


def zone(root: pathlib.Path, name: str, label: str, micro: int) -> pathlib.Path:
    (folder := root / name).mkdir()
    for file, text in (("name", label), ("energy_uj", micro), ("max_energy_range_uj", 1_000_000)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


def rapl(root: pathlib.Path, trace: pathlib.Path | None = None) -> RaplMeter:
    return RaplMeter(SETTINGS, Powered(None), trace, root=root)


def test_rapl_adds_packages_and_dram_once_and_survives_the_wrap(tmp_path: pathlib.Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 5)
    dram = zone(tmp_path, "intel-rapl:0:1", "dram", 100)
    zone(tmp_path, "intel-rapl:1", "psys", 7)
    with rapl(tmp_path, tmp_path / "power.csv") as meter:
        start = meter.read()
        package.write_text("99999")
        dram.write_text("50100")
        energy = meter.energy(start, end := meter.read())
        flat = meter.energy(end, meter.read())
    assert energy.joules == pytest.approx(0.2 + 0.05) and energy.source == "rapl" and not energy.assumed
    assert len(energy.per_device_j) == 2 and energy.reasons == ()
    assert len((tmp_path / "power.csv").read_text().splitlines()) == 5
    assert flat.joules is None and flat.reasons == ("counter_flat",)  # not 0 W


def test_rapl_says_why_it_cannot_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(MeterUnavailable, match="no CPU package"):
        rapl(tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()
    with pytest.raises(MeterUnavailable, match="root only"):
        rapl(tmp_path)


def test_auto_takes_the_first_that_works_and_none_is_no_energy() -> None:
    nothing = dataclasses.replace(SETTINGS, watts_per_core=None)
    meter, why = open_meter(nothing, Powered(os.getpid()))
    assert meter.source in ("none", "rapl") and "watts_per_core" in why.get("cpu_time", "watts_per_core")
    assert why["nvml"].startswith("nvml: ")
    with NoMeter(nothing, Powered(None), None) as none:
        assert none.energy(none.read(), none.read()).joules is None


@pytest.mark.parametrize(("changes", "text"), [
    ({"source": "solar"}, "power='solar'"), ({"watts_per_core": 0.0}, "power.watts_per_core must be a number above 0"),
    ({"sample_s": 0.001}, "power.sample_s must be 0.05 s or more"), ({"others": 10.0}, "power.others must be a share")])
def test_bad_power_settings_are_one_clear_line(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_source(convert(dataclasses.asdict(SETTINGS) | changes, PowerSettings, "power."))


def test_a_wait_for_a_busy_host_ends_when_it_is_calm_and_names_the_share_when_it_is_not(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    told: list[str] = []
    assert HostLoad(None, 1.0).wait(60.0, told.append) == "" and not told
    assert HostLoad(None, -1.0).wait(0.0, told.append).startswith("other programs take ") and not told
