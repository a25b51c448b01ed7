"""The soak: two weeks of launches, compressed. One tuner, many launches of the stand-in; does anything of it grow?

    python -m tests.benchmarks.soak [--launches 1000] [--json FILE] [--keep FOLDER]

After each launch the tuner's resident memory, file descriptors, threads and child processes are read from /proc.
Prints the means of the first and the last tenth (of the first hundred the first ten launches are left out: imports and
caches), the slope of memory, and a verdict; exit 1 when anything grows. Each trial is a record that the strategy and
the report read again, so that memory for each is right; anything beyond is a leak. How much is right is measured: by
how much a tuner that resumes the ended study, and so reads all of it and launches nothing, is larger than one that
resumes a study of ten launches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pathlib
import statistics
import sys
import tempfile
import time

import psutil

from tests.benchmarks.campaign import Site, end, space, standin

# Growth per launch, beyond that of a tuner that only reads the study, which is an allocator's noise
LEAK_KIB = 4.0
WARM = 10
KINDS = ("rss_kib", "descriptors", "threads", "children", "seconds")


def sample(pid: int) -> dict[str, float]:
    """What a process takes now. Raises psutil.Error when it ended."""
    process = psutil.Process(pid)
    return {"rss_kib": process.memory_info().rss / 1024, "threads": process.num_threads(),
            "descriptors": process.num_fds(), "children": len(process.children())}


def study_of(launches: int) -> tuple[str, ...]:
    return ("power=none", "objective=tokens_per_s", "study.strategy=grid", f"study.launches={launches}")


def soak(site: Site, launches: int) -> tuple[list[dict[str, float]], int]:
    """Run the study; one sample a launch, taken when the next one begins. Returns them and the exit code."""
    tuner = site.start(*study_of(launches))
    samples: list[dict[str, float]] = []
    log = site.folder / "tuner.log"
    began, told = time.monotonic(), 0
    try:
        with log.open() as lines:
            while tuner.poll() is None:
                fresh = sum(line.startswith("launch ") for line in iter(lines.readline, ""))
                if fresh:
                    with contextlib.suppress(psutil.Error):
                        now = time.monotonic()
                        samples.append({**sample(tuner.pid), "seconds": now - began})
                        began = now
                if len(samples) >= told + 50:
                    told = len(samples)
                    print(f"{told} launches: " + ", ".join(f"{k} {samples[-1][k]:.0f}" for k in KINDS[:4]), flush=True)
                time.sleep(0.02)
        return samples, tuner.returncode
    finally:
        end(site, tuner)


def reader_kib(site: Site, launches: int) -> float:
    """Resident memory of a tuner that resumes the ended study: it has read everything and launches nothing."""
    before = len(site.said())
    tuner = site.start(*study_of(launches))
    taken = 0.0
    while tuner.poll() is None:
        with contextlib.suppress(psutil.Error):
            if not taken and "stopped: " in site.said()[before:]:
                taken = sample(tuner.pid)["rss_kib"]
        time.sleep(0.005)
    assert taken, site.said()[before:]
    return taken


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path)
    options = parser.parse_args()
    side = math.isqrt(options.launches // 2) + 1
    made = space(
        "standin", {"speed": [1000 + 10 * i for i in range(side)], "flags": [f"f{i}" for i in range(side)],
                    "fault": ["none", "exit"], "at": ["load"], "concurrency": [2]},
        {"warmup_s": 0.05, "settle_s": 0.1, "window_s": 0.15, "window_max_s": 0.2, "block_s": 0.05},
        server={"ready_poll_s": 0.05, "log_limit_mib": 1, "disk_free_mib": 1}, study={"confirm": {"finalists": 0}},
        agreement={"prompts": 1, "output_tokens": 2, "context_tokens": 4})
    host = ["--host", "{host}", "--port", "{port}", "--stage-s", "0"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        place = options.keep or pathlib.Path(scratch)
        small = Site.make(place / "small", made, standin({}, args=[host]))
        soak(small, WARM)
        site = Site.make(place / "soak", made, standin({}, args=[host]))
        samples, code = soak(site, options.launches)
        left, _ = site.settled(5)
        reads = (reader_kib(site, options.launches) - reader_kib(small, WARM)) / max(1, len(samples) - WARM)
        kept = [t.state for t in site.trials()]
    if options.json:
        options.json.write_text(json.dumps(samples) + "\n")
    tenth = max(1, len(samples) // 10)
    grows = []
    warm = samples[min(WARM, len(samples) - 2):]
    each = {kind: statistics.linear_regression(range(len(warm)), [s[kind] for s in warm]).slope for kind in KINDS}
    print(f"{'':14}{'first ' + str(tenth):>14}{'last ' + str(tenth):>14}{'per launch':>14}")
    for kind in KINDS:
        a, b = (statistics.fmean(s[kind] for s in part) for part in (warm[:tenth], warm[-tenth:]))
        print(f"{kind:14}{a:14.2f}{b:14.2f}{each[kind]:14.4f}")
        if kind in KINDS[1:4] and b > a + 1:
            grows.append(kind)
    beyond = each["rss_kib"] - reads
    print(f"one who only reads the study grows by {reads:.2f} KiB per launch, the tuner by {beyond:+.2f} more")
    if beyond > LEAK_KIB and options.launches >= 10 * WARM:  # fewer are all imports and caches
        grows.append("memory beyond the study's records")
    wrong = [*(f"{g} grows" for g in grows), *([f"left: {left}"] if left else []),
             *([f"exit {code}"] if code not in (0, 3) else []),
             *([f"{len(samples)} launches seen"] if len(samples) < options.launches else []),
             *([f"states {sorted(set(kept))}"] if not set(kept) <= {"COMPLETE", "PRUNED"} else [])]
    print(f"{len(samples)} launches, {kept.count('COMPLETE')} measured, {kept.count('PRUNED')} crashed, "
          f"{time.monotonic() - began:.0f} s: {'; '.join(wrong) or 'flat'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
