"""The fault campaign: one real study per fault on the stand-in engine, and the state that it ended in.

    python -m tests.benchmarks.faults [--quick] [--jobs 2] [--only WORD,...] [--slow 1] [--json FILE]
                                      [--keep FOLDER]

A row is right when the exit code, the trials in the database, the crash's stage and category and the message are what
they have to be, no process of ours lives, no port of ours is open, every file is whole, and (where the study was
stopped) the same command runs it to its end. `--quick` is a sample, `--slow N` multiplies every limit on a machine that
others keep busy. The last line is the verdict; exit 1 on any wrong state. Rows that need root or a compiler say so when
they are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.campaign import ROOT, SHORT, Site, Trial, end, space, standin, tree

LIMITS = {"arg-parse": 30, "device-init": 6, "nccl-init": 6, "load": 6, "kv-alloc": 6, "graph-capture": 6, "warmup": 20}
PATIENCE_S = 900.0  # on a machine that others keep busy
FAKES = ROOT / "tests" / "fakes"
UNDER_LOAD = ("hang", "frozen", "silent", "http500", "cut", "malformed", "endless", "die-under-load")
SAMPLED = ("silent", "cut", "endless", "die-under-load")


SLOW = [1]  # how many times slower than a quiet one this machine is taken to be


class Skip(Exception):
    """A fault that cannot be made here."""


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    expected: str
    run: Callable[[pathlib.Path], str]  # a folder of its own -> the state that it ended in; AssertionError, or Skip
    quick: bool = False


def make(folder: pathlib.Path, fault: str = "none", at: str = "serving", env: dict[str, str] | None = None,
         workload: dict[str, Any] | None = None, stage_s: float = 0.02) -> Site:
    """A study of the baseline and, unless `fault` is none, of one configuration with that fault."""
    faulty = fault != "none"
    slower = {k: v * SLOW[0] for k, v in SHORT.items() if k.endswith("timeout_s") or k == "warmup_max_s"}
    made = space(
        "standin", {"speed": [100] if faulty else [100, 150], "fault": ["none", fault] if faulty else ["none"],
                    "at": [at], "concurrency": [2]},
        {**slower, **(workload or {})}, study={"confirm": {"finalists": 0}, "launches": 4, "strategy": "grid"},
        server={"ready_poll_s": 0.1, "stage_limits_s": {k: v * SLOW[0] for k, v in LIMITS.items()},
                "log_limit_mib": 8, "disk_free_mib": 1, "gpu_free_s": 2},
        agreement={"prompts": 2, "output_tokens": 4, "context_tokens": 8, "timeout_s": 3 * SLOW[0]})
    host = ["--host", "{host}", "--port", "{port}", "--stage-s", str(stage_s)]
    return Site.make(folder, made, standin({}, args=[host]), env)


# A window that lasts long enough for a fault to come in it
LONGER = {"window_s": 3.0, "window_max_s": 3.5}
QUIET = ("power=none", "objective=tokens_per_s", "study.storage_wait_s=300")
IMPATIENT = (*QUIET[:2], "study.storage_wait_s=4")
WINDOW, KEPT = " window", "the study is kept"  # what a tuner says


def alone(site: Site) -> None:
    """Nothing of a study runs any more."""
    left, took_s = site.settled(3.0)
    assert not left, f"processes left {took_s:.0f} s after the end: {left}"
    assert not site.bound_ports(), f"ports still open: {site.bound_ports()}"


def clean(site: Site, running: bool = False) -> None:
    """Check what has to hold after every end. With `running`, a trial may still be open."""
    alone(site)
    assert not site.torn(), f"torn files: {site.torn()}"
    assert running or all(t.state != "RUNNING" for t in site.trials()), f"trials left running: {states(site)}"


def states(site: Site) -> str:
    return ", ".join(f"{t.number} {t.attrs.get('crash_category') or ('measured' if t.measured else t.state)}"
                     for t in site.trials())


def measured(site: Site) -> None:
    """Nothing is left, and both configurations of a study without a faulty one were measured, once."""
    clean(site)
    assert [t.measured for t in site.trials()] == [True, True], f"{states(site)}: {site.said()[-300:]!r}"


def resumed(site: Site, *overrides: str) -> str:
    """Run the same command to its end; nothing that was measured may be measured again."""
    before = [t for t in site.trials() if t.finished]
    code = site.start(*(overrides or QUIET)).wait(PATIENCE_S)
    trials = site.trials()
    assert code == well(trials), f"resuming ended with {code}: {site.said()[-300:]!r}"
    clean(site)
    done = [t.key for t in trials if t.measured]
    assert len(done) == len(set(done)) == 2, f"after resuming: {states(site)}"
    assert all(t in trials for t in before), "a finished trial changed"
    return f"resumed: exit {code}, {states(site)}"


@contextlib.contextmanager
def started(site: Site, *overrides: str, after: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A tuner that has said `after` and ends within the body, leaving nothing; what a failed check leaves is killed."""
    tuner = site.start(*(overrides or QUIET))
    try:
        if after:
            site.wait_for(after, tuner)
        yield tuner
        alone(site)
    finally:
        end(site, tuner)


def finished(site: Site, tuner: subprocess.Popen[bytes], *codes: int, says: str = "") -> int:
    """The tuner ends with one of `codes`, says so in words, without a traceback. Returns the code."""
    found = tuner.wait(PATIENCE_S)
    assert found in [code or well(site.trials()) for code in codes], \
        f"exit {found}, not {codes}: {site.said()[-400:]!r}"
    assert says in " ".join(site.said().split()), f"does not say {says!r}: {site.said()[-400:]!r}"
    assert "Traceback (most recent call last)" not in site.said(), f"a traceback: {site.said()[-600:]!r}"
    return found


@contextlib.contextmanager
def survived(site: Site, *overrides: str, after: str = "", says: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A study that a fault does not harm: the body commits it once the tuner has said `after`."""
    with started(site, *overrides, after=after) as tuner:
        yield tuner
        finished(site, tuner, 0, says=says)
    measured(site)


def given_up(site: Site, harm: Callable[[Site], contextlib.AbstractContextManager[None]], *codes: int) -> str:
    """The tuner cannot go on after a fault in a window; without the fault the study is resumed."""
    with started(site, *IMPATIENT, after=WINDOW) as tuner, harm(site):
        code = finished(site, tuner, *codes, says=KEPT)
    clean(site, running=True)
    return f"exit {code} with a clear line, {resumed(site)}"


def well(trials: list[Trial]) -> int:
    """The exit code of a study that ran to its end: 3 where this machine was too busy for any window to be compared."""
    return 0 if any(t.state == "COMPLETE" for t in trials) else 3


# The engine's faults


def engine(fault: str, at: str, stage: str, folder: pathlib.Path) -> str:
    """The faulty configuration is PRUNED with a category and stage, the baseline measured, the study ends well."""
    site = make(folder, fault, at, {"STANDIN_LATE_S": str(9 * SLOW[0]), "STANDIN_FLOOD_MB": "1000"})
    with started(site) as tuner:
        finished(site, tuner, 0)
    clean(site)
    good = [t for t in site.trials() if t.params.get("fault") == "none"]
    bad = [t for t in site.trials() if t.params.get("fault") == fault]
    assert good and all(t.measured for t in good), f"the baseline: {states(site)}"
    assert bad and all(t.state == "PRUNED" for t in bad), f"the faulty one: {states(site)}"
    first = bad[0].attrs
    ended = f"PRUNED {first['crash_category']} at {first['crash_stage']} ({first['crash_blame']})"
    assert first["crash_stage"] == stage, f"{ended}, not at {stage}"
    assert first["crash_signature"] and first["crash_explanation"], "without signature or explanation"
    return ended


def harmless(fault: str, folder: pathlib.Path) -> str:
    """A server that serves well and is hard to end: measured like any other, and ended all the same."""
    with survived(make(folder, fault, "serving")):
        pass
    return "measured, nothing left"


# Faults around it


def port_stolen(folder: pathlib.Path) -> str:
    site = make(folder, stage_s=0.3)
    with socket.socket() as thief, survived(site) as tuner:
        command = site.study / "launches" / "0001" / "command.json"
        while not command.exists() and tuner.poll() is None:
            time.sleep(0.002)
        thief.bind(("127.0.0.1", json.loads(command.read_text())["port"]))
        thief.listen()
    assert "was taken" in "".join(p.read_text() for p in site.study.glob("logs/*.jsonl")), "the theft was not noticed"
    return "started again on another port, all measured"


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 40 MiB at folder/outputs."""
    outputs = folder / "outputs"
    outputs.mkdir(parents=True)
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "faults", str(outputs)],
                                          capture_output=True, check=False).returncode:
        raise Skip("needs root (a file system of its own)")
    try:
        yield outputs
    finally:
        subprocess.run(["umount", "-l", str(outputs)], check=False)


@contextlib.contextmanager
def filled(disk: pathlib.Path, leave_mib: float = 0) -> Iterator[None]:
    """One file takes all of a disk."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
        while shutil.disk_usage(disk).free > leave_mib * 2**20:
            file.write(b"\0" * min(65536, max(1, int(shutil.disk_usage(disk).free - leave_mib * 2**20))))
    yield
    filler.unlink()


@contextlib.contextmanager
def read_only(disk: pathlib.Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextlib.contextmanager
def immutable(paths: list[pathlib.Path]) -> Iterator[None]:
    if subprocess.run(["chattr", "+i", *map(str, paths)], capture_output=True, check=False).returncode:
        raise Skip("needs root and a file system with chattr")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *map(str, paths)], check=True)


@contextlib.contextmanager
def without_database(site: Site) -> Iterator[None]:
    moved = (site.study / "study.db").rename(site.study / "study.db.away")
    yield
    moved.rename(site.study / "study.db")


@contextlib.contextmanager
def locked_database(site: Site) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(site.study / "study.db", timeout=60, isolation_level=None)) as db:
        db.execute("begin exclusive")
        yield
        db.execute("rollback")


def disk_refused(code: int, says: str, folder: pathlib.Path) -> str:
    """A disk that is full (exit 4) or read-only (exit 1) before a launch."""
    with small_disk(folder) as disk:
        site = make(folder)
        with filled(disk, leave_mib=6) if code == 4 else read_only(disk), started(site) as tuner:
            finished(site, tuner, code, says=says)
        clean(site)
        assert not site.trials(), states(site)
        return f"exit {code} before a launch, {resumed(site)}"


def disk_full_during(folder: pathlib.Path) -> str:
    with small_disk(folder) as disk:
        return given_up(make(folder, workload=LONGER), lambda site: filled(disk), 1, 4)


def disk_full_for_a_while(folder: pathlib.Path) -> str:
    with small_disk(folder) as disk:
        site = make(folder)
        with started(site, after=" warm-up") as tuner:
            with filled(disk, leave_mib=0.05):
                time.sleep(4)
            code = finished(site, tuner, 0, 1, 4)
        clean(site)
        if code in (1, 4):
            assert KEPT in " ".join(site.said().split()), f"says {site.said()[-300:]!r}"
            return f"exit {code} with a clear line, {resumed(site)}"
        return f"exit {code}, {states(site)}"


def read_only_during(folder: pathlib.Path) -> str:
    return given_up(make(folder, workload=LONGER), lambda site: immutable(
        [site.study, site.study / "launches", *site.study.glob("launches/*")]), 1, 4)


def database_away(harm: Callable[[Site], contextlib.AbstractContextManager[None]], seconds: float,
                  folder: pathlib.Path) -> str:
    site = make(folder)
    with survived(site, after=WINDOW), harm(site):
        time.sleep(seconds)
    return "waited for, all measured"


def database_gone_for_good(folder: pathlib.Path) -> str:
    return given_up(make(folder), without_database, 1)


@functools.cache
def built(source: str, name: str) -> pathlib.Path:
    """A stand-in library, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Skip("needs a C compiler")
    folder = pathlib.Path(tempfile.mkdtemp())
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name),
                    str(FAKES / source)], check=True)
    return folder / name


GPU = ("count 1\ndriver 580.1\n0.uuid GPU-faults-1\n0.name Stand-in\n0.memory_mib 80000\n0.used_mib 100\n"
       "0.power_mw 300000\n0.counter_mw 300000\n")
NVML = ("power=nvml", "device=cuda")


def with_gpu(folder: pathlib.Path, fault: str = "none", uuid: str = "") -> tuple[Site, pathlib.Path]:
    """A study on one scripted GPU, and the script."""
    library = built("nvml.c", "libnvidia-ml.so.1")
    state = folder / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    state.write_text(GPU.replace("GPU-faults-1", uuid or f"GPU-{folder.name}-{os.getpid()}"))
    site = make(folder, fault, "load", env={"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML": str(state)},
                workload={"window_s": 5.2, "window_max_s": 6.0})
    return site, state


def nvml_lost(folder: pathlib.Path) -> str:
    site, state = with_gpu(folder)
    good = state.read_text()
    with started(site, *NVML, after=WINDOW) as tuner:
        state.write_text(good + "0.error.fields 15\n0.error.energy 15\n")
        finished(site, tuner, 1, says="needs a reset or a reboot")
    clean(site)
    assert [t.state for t in site.trials()] == ["FAIL"], states(site)
    state.write_text(good)
    return f"exit 1, FAIL (not the configuration's fault), {resumed(site, *NVML)}"


def gpu_busy(folder: pathlib.Path) -> str:
    site, state = with_gpu(folder)
    good = state.read_text()
    with subprocess.Popen(["sleep", "60"]) as other:
        state.write_text(good + f"0.pids {other.pid}\n0.used_mib 30000\n")
        with started(site, *NVML) as tuner:
            finished(site, tuner, 4, says=f"is in use by pid {other.pid} (sleep 60")
        assert other.poll() is None, "the other process was ended"
        other.kill()
    clean(site)
    state.write_text(good)
    return f"exit 4 naming the process, which lives on, {resumed(site, *NVML)}"


def gpu_memory_kept(folder: pathlib.Path) -> str:
    site, _ = with_gpu(folder, "hold-gpu")
    with survived(site, *NVML, says="not given back"):
        pass
    return "said, all measured"


def two_on_one_gpu(folder: pathlib.Path) -> str:
    first, _ = with_gpu(folder / "a", uuid=f"GPU-both-{os.getpid()}")
    second, _ = with_gpu(folder / "b", uuid=f"GPU-both-{os.getpid()}")
    with started(first, *NVML, after="launch 1") as one:
        with started(second, *NVML) as two:
            finished(second, two, 1, says=f"is used by another autotune (pid {one.pid})")
        finished(first, one, 0)
    clean(first)
    clean(second)
    return f"the second: exit 1 naming the first; the first: exit 0, {states(first)}"


def with_clock(folder: pathlib.Path, variable: str) -> tuple[Site, pathlib.Path]:
    """A study with a clock that is set through a file of seconds, and that file."""
    library = built("clock.c", "libclock.so")
    folder.mkdir(parents=True, exist_ok=True)
    offset = folder / "offset"
    offset.write_text("0\n")
    return make(folder, env={"LD_PRELOAD": str(library), variable: str(offset)}), offset


def clock_jumps(folder: pathlib.Path) -> str:
    site, offset = with_clock(folder, "FAKE_CLOCK")
    with survived(site, after=WINDOW) as tuner:
        offset.write_text("90000\n")
        site.wait_for("launch 2", tuner)
        offset.write_text("-200000\n")
    assert all(0 < t.attrs["cost_s"] < 300 and 0 < t.attrs["window_s"] < 10 for t in site.trials()), "times are off"
    return "all measured, no time off"


def asleep(folder: pathlib.Path) -> str:
    """The machine sleeps in a window: CLOCK_BOOTTIME runs on, CLOCK_MONOTONIC does not."""
    site, offset = with_clock(folder, "FAKE_BOOT")
    with survived(site, after=WINDOW, says="again: the window was suspended"):
        offset.write_text("3600\n")
    return "measured again, all measured"


def suspended(when: str, seconds: float, folder: pathlib.Path) -> str:
    """The whole tree stopped for longer than the limits of a stage and of a token."""
    site = make(folder, stage_s=1.0 if when == "load" else 0.02)
    with survived(site, after=f" {when}") as tuner:
        for number in (signal.SIGSTOP, signal.SIGSTOP, signal.SIGSTOP, signal.SIGCONT):
            # processes that were born during a round are caught in the next one
            if number == signal.SIGCONT:
                time.sleep(seconds)
            for pid in {*site.processes(), *tree(tuner.pid)}:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
    assert all(t.attrs["window_s"] < seconds / 2 for t in site.trials()), "the sleep was measured"
    return "all measured, the sleep not measured"


def two_tuners(folder: pathlib.Path) -> str:
    site = make(folder)
    with started(site, after="launch 1") as one:
        two = site.start(*QUIET, stderr=folder / "second.log")
        code, said = two.wait(60), (folder / "second.log").read_text()
        assert code == 1 and f"another autotune (pid {one.pid})" in said, f"the second: exit {code}, {said!r}"
        finished(site, one, 0)
    measured(site)
    return "the second: exit 1 naming the first; the first: exit 0, all measured"


def interrupted(times: int, rounds: int, seed: int, folder: pathlib.Path, number: int = signal.SIGINT) -> str:
    """Ctrl-C, or another signal, at random moments; the study is then resumed."""
    rng = random.Random(seed)
    site = make(folder)
    codes: list[int] = []
    while len(codes) < rounds and not {0, 3} & set(codes):
        with started(site) as tuner:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tuner.wait(rng.uniform(0.3, 9.0))
            for nth in range(times):
                if nth:
                    time.sleep(rng.uniform(0.0, 0.7))
                with contextlib.suppress(OSError):
                    os.killpg(tuner.pid, number)
            codes.append(tuner.wait(60))
            clean(site, running=times > 1)
            assert codes[-1] in (130, -number, 0, 3), f"exit {codes[-1]}: {site.said()[-500:]!r}"
    return f"exit {', '.join(map(str, codes))}, nothing left, {resumed(site)}"


def supervisor_killed(folder: pathlib.Path) -> str:
    site = make(folder, workload=LONGER)
    with started(site, after=WINDOW) as tuner:
        os.kill(site.records("owner.json")["0001"]["supervisor"], signal.SIGKILL)
        finished(site, tuner, 1, says=KEPT)
    clean(site)
    assert [t.state for t in site.trials()] == ["FAIL"], states(site)
    return f"exit 1, FAIL, the server ended all the same, {resumed(site)}"


def client_killed(folder: pathlib.Path) -> str:
    site = make(folder, workload=LONGER)
    with survived(site, after=WINDOW):
        for pid, line in site.processes().items():
            if "autotune.loadgen.process" in line:
                os.kill(pid, signal.SIGKILL)
    return "measured again, all measured"


def campaign() -> list[Fault]:
    """Every fault, in the order of the table."""
    faults: list[Fault] = []

    def add(name: str, expected: str, run: Callable[..., str], *args: Any, quick: bool = False, **more: Any) -> None:
        faults.append(Fault(name, expected, functools.partial(run, *args, **more), quick))

    for fault, name, places, sampled in (
            ("exit", "exits at {at}", "device-init nccl-init load kv-alloc graph-capture warmup", "load"),
            ("silent-exit", "{fault} at {at}", "load graph-capture serving", ""),
            ("segfault", "{fault} at {at}", "load graph-capture serving", "graph-capture"),
            ("killed", "{fault} at {at}", "load graph-capture serving", ""),
            ("hang", "hangs silently at {at}", "load graph-capture", "load"),
            ("late", "ready after the limit", "load", ""),
            *((fault, "{fault} under load", "serving", "serving" if fault in SAMPLED else "") for fault in UNDER_LOAD),
            ("garbage", "answers garbage", "serving", ""),
            ("flood", "floods its log with 1 GB", "load", ""),
            ("not-utf8", "writes bytes that are no UTF-8 at {at}", "load serving", "")):
        for at in places.split():
            stage = "warmup" if fault == "garbage" else at
            add(name.format(fault=fault, at=at), f"PRUNED {'hang ' * (fault in ('hang', 'late') and at != 'serving')}"
                f"at {stage}", engine, fault, at, stage, quick=at == sampled)
    for fault in ("ignore-sigterm", "grandchildren", "keep-port"):
        add(fault, "measured, nothing left", harmless, fault, quick=fault != "ignore-sigterm")
    add("GPU memory kept (simulated)", "said, measured", gpu_memory_kept)
    add("port stolen", "another port, measured", port_stolen, quick=True)
    add("disk full before a launch", "exit 4, resumable", disk_refused, 4, "MiB are free on the disk", quick=True)
    add("disk full in a window", "clear line, resumable", disk_full_during, quick=True)
    add("disk full for 4 s", "no loss", disk_full_for_a_while)
    add("outputs/ read-only", "exit 1, resumable", disk_refused, 1, "cannot write in")
    add("outputs/ read-only in a window", "clear line, resumable", read_only_during)
    add("database locked for 70 s", "waited for, measured", database_away, locked_database, 70)
    add("database locked for 8 s", "waited for, measured", database_away, locked_database, 8, quick=True)
    add("database gone for 60 s", "waited for, measured", database_away, without_database, 60)
    add("database gone for good", "exit 1, resumable", database_gone_for_good)
    add("NVML lost in a window", "exit 1, FAIL, resumable", nvml_lost, quick=True)
    add("GPU busy", "exit 4 naming the process", gpu_busy)
    add("two studies on one GPU", "the second is refused", two_on_one_gpu)
    add("clock jumps a day on and two back", "measured", clock_jumps)
    add("the machine sleeps in a window", "measured again", asleep, quick=True)
    add("suspended in a window for 10 s", "measured again", suspended, "window", 10, quick=True)
    add("suspended in a start for 10 s", "no crash", suspended, "load", 10)
    add("two tuners on one study", "the second is refused", two_tuners, quick=True)
    add("supervisor killed in a window", "exit 1, FAIL, resumable", supervisor_killed)
    add("load client killed in a window", "measured again", client_killed)
    for seed in range(3):
        add(f"Ctrl-C once at random moments ({seed})", "130, resumable", interrupted, 1, 3, seed, quick=seed == 0)
        add(f"Ctrl-C twice at random moments ({seed})", "130, resumable", interrupted, 2, 3, 9 + seed, quick=seed == 0)
    add("SIGTERM at random moments", "130, resumable", interrupted, 1, 2, 7, number=signal.SIGTERM)
    add("terminal closed (SIGHUP)", "130, resumable", interrupted, 1, 2, 8, number=signal.SIGHUP)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a sample, within 8 minutes")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="only faults whose name holds one of these words")
    parser.add_argument("--slow", type=int, default=1, help="multiply every limit on a busy machine")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, help="keep the studies in this folder")
    options = parser.parse_args()
    faults = [f for f in campaign() if (f.quick or not options.quick) and
              any(word in f.name for word in options.only.split(","))]
    SLOW[0] = options.slow
    began = time.monotonic()
    said = threading.Lock()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, \
            concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def one(number: int, fault: Fault) -> dict[str, Any]:
            """One row of the table."""
            started_s = time.monotonic()
            try:
                ended, verdict = fault.run((options.keep or pathlib.Path(scratch)) / f"{number:02d}"), "right"
            except Skip as skip:
                ended, verdict = str(skip), "skipped"
            except Exception as error:  # the campaign goes on
                ended, verdict = f"{type(error).__name__}: {error}", "WRONG"
            row: dict[str, Any] = {"fault": fault.name, "expected": fault.expected, "ended": ended,
                                   "seconds": round(time.monotonic() - started_s, 1), "verdict": verdict}
            with said:
                print(f"{row['verdict']:7} {row['seconds']:6.1f} s  {row['fault']:40} {row['expected']:28} "
                      f"{row['ended'][:400]}", flush=True)
            return row

        rows = [f.result() for f in [pool.submit(one, n, fault) for n, fault in enumerate(faults)]]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    count = {word: sum(r["verdict"] == word for r in rows) for word in ("right", "WRONG", "skipped")}
    print(f"{len(rows)} faults in {time.monotonic() - began:.0f} s: {count['right']} right, {count['WRONG']} wrong, "
          f"{count['skipped']} left out: {'WRONG' if count['WRONG'] else 'all right'}")
    return 1 if count["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
