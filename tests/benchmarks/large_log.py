"""CPU seconds and memory of `classify` on a large log, as file, pipe and gzip, the failure anywhere in it.

    python -m tests.benchmarks.large_log [--gb 1] [--at 0 0.3 0.5 0.99] [--failure traceback|line]

The rest of the log are lines of a healthy server. Exit 1 if the failure is not found or a limit is passed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPU_S, GZIP_CPU_S, MEMORY_MB = 10.0, 20.0, 300.0
FAILURES = {"traceback": """[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 1024, in event_loop_overlap
RuntimeError: CUDA error: an illegal memory access was encountered
""", "line": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"}
HEALTHY = ("[2026-01-01 00:00:{0:02} TP0] Decode batch, #running-req: {0}, #token: {1}, token usage: 0.{0:02}, "
           "cuda graph: True, gen throughput (token/s): {1}.11, #queue-req: 0\n"
           "[2026-01-01 00:00:{0:02}] INFO:     127.0.0.1:{1} - \"POST /generate HTTP/1.1\" 200 OK\n")


def write(path: pathlib.Path, size: int, share: float, failure: str) -> None:
    """A log of `size` bytes with one failure after a share of it."""
    block = "".join(HEALTHY.format(i % 60, 30_000 + i) for i in range(4000)).encode()
    with path.open("wb") as file:
        written, told = 0, False
        while written < size:
            if not told and written >= share * size:
                file.write(FAILURES[failure].encode())
                told = True
            file.write(block)
            written += len(block)


def measured(path: pathlib.Path, how: str) -> tuple[str, float, float]:
    """(category, CPU seconds, peak memory in MB) of one run of classify."""
    code = ("import resource, sys; from autotune.__main__ import main; code = main(['classify', *sys.argv[1:]]); "
            "use = resource.getrusage(resource.RUSAGE_SELF); "
            "hwm = open('/proc/self/status').read().split('VmHWM:')[1]; "
            "print(use.ru_utime + use.ru_stime, int(hwm.split()[0]) / 1024); sys.exit(code)")
    with path.open("rb") as file:
        done = subprocess.run([sys.executable, "-c", code, "-" if how == "pipe" else str(path)], cwd=ROOT, text=True,
                              stdin=file if how == "pipe" else None, capture_output=True, check=True)
    answer, use = done.stdout.splitlines()
    cpu_s, memory_mb = map(float, use.split())
    return json.loads(answer)["category"], cpu_s, memory_mb


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--at", type=float, nargs="+", default=[0.0, 0.3, 0.5, 0.99])
    parser.add_argument("--failure", choices=list(FAILURES), default="traceback")
    parser.add_argument("--forms", nargs="+", choices=["file", "pipe", "gzip"], default=["file", "pipe", "gzip"])
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "server.log")
        for share in options.at:
            write(path, int(options.gb * 1e9), share, options.failure)
            for form in options.forms:
                file = path
                if form == "gzip":
                    file = path.with_suffix(".log.gz")
                    with path.open("rb") as plain, gzip.open(file, "wb", compresslevel=1) as packed:
                        while chunk := plain.read(1 << 22):
                            packed.write(chunk)
                category, cpu_s, memory_mb = measured(file, form)
                limit = GZIP_CPU_S if form == "gzip" else CPU_S
                good = category == "illegal_memory_access" and cpu_s <= limit and memory_mb <= MEMORY_MB
                wrong += not good
                print(f"{options.gb:g} GB, {options.failure} at {share:.0%}, {form}: {category}, {cpu_s:.1f} s CPU, "
                      f"{memory_mb:.0f} MB{'' if good else '  FAILED'}", flush=True)
                if file != path:
                    os.remove(file)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
