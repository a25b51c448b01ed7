"""Cost of measuring: CPU time of the tuner and of its load client while a server is measured.

    python tests/benchmarks/overhead.py [--concurrency 64] [--windows 3] +space=local [overrides]

Launches the space's baseline server and measures it as a study does. `client` is the load client's CPU time over the
window, `tuner` that of this process (counters, power, estimates, watching the server) between the first and the last
line of progress of the window, `whole` the same for all of the measurement: its first request, starting the client,
warm-up, window, percentiles and files. All are shares of one core.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import sys
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.variation import opened  # noqa: E402


def measure(overrides: Sequence[str], level: int, windows: int) -> None:
    """Print a line for each window; a crash ends the program."""
    from autotune.records import Crash

    settings, executor = opened(overrides)
    server = settings.space.split(settings.space.baseline)[0]
    folder = settings.folder / "launches" / f"overhead-{time.time_ns()}"
    edges: list[tuple[float, float]] = []  # (wall clock, CPU time), in s, at each line of progress of a window

    def progress(text: str, after_s: float) -> None:
        if text.startswith("window"):
            edges.append((time.monotonic(), time.process_time()))

    with executor.launch(server, folder, progress) as live:
        if live.crash is not None:
            raise SystemExit(f"the launch crashed: {live.crash}")
        for number in range(windows):
            edges.clear()
            cpu_s, wall_s = time.process_time(), time.monotonic()
            found = live.measure({"concurrency": level}, f"overhead-{number}")
            if isinstance(found, Crash):
                raise SystemExit(f"the server died under load: {found}")
            whole = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
            if len(edges) < 2:
                raise SystemExit("the window is too short for this: workload.window_s=5")
            tuner = (edges[-1][1] - edges[0][1]) / (edges[-1][0] - edges[0][0])
            client = found.client_cpu_share
            assert client is not None
            print(f"C={level}  {found.output_tokens / found.window_s:.0f} tok/s over {found.window_s:.0f} s  "
                  f"client {client:.2%}  tuner {tuner:.2%}  together {client + tuner:.2%} of a core, "
                  f"the tuner over the whole measurement {whole:.2%}  "
                  f"{', '.join(found.reasons)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--windows", type=int, default=3)
    line, overrides = parser.parse_known_args()
    if line.concurrency < 1 or line.windows < 1:
        parser.error("--concurrency and --windows must be at least 1")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    measure(overrides, line.concurrency, line.windows)


if __name__ == "__main__":
    main()
