"""Variation of tokens per joule between windows and launches of one configuration: a naive client against ours.

    python tests/benchmarks/variation.py --file RAW.jsonl --launches 3 +space=h200 [overrides]
    python tests/benchmarks/variation.py --file RAW.jsonl --summary
    python tests/benchmarks/variation.py --overhead [--concurrency 64] [--windows 3] +space=local [overrides]

Launches the space's baseline server, and on each launch measures every load of --concurrency in two ways, --windows
times: `ours` is what a study does (staggered lengths, a warm-up until steady, a window until it is precise enough);
`naive` is what a script does (equal lengths, all sent at once, windows of 10 s back to back after 5 s).
Every window is one line of RAW.jsonl, kept as soon as it is measured; more launches may be added to a file later.
The summary gives the coefficient of variation (sample standard deviation over mean) of tokens/J between the windows of
a launch (mean over launches), and between the launches' means.

--overhead is the cost of measuring instead, in shares of one core. `client` is the load client's CPU time over the
window, `tuner` that of this process (counters, power, estimates, watching the server) between the first and the last
line of progress of the window, `whole` the same for all of the measurement: its first request, starting the client,
warm-up, window, percentiles and files.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

NAIVE_WARMUP_S, NAIVE_WINDOW_S = 5.0, 10.0
METHODS = ("naive", "ours")


def rows_of(file: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def keep(file: pathlib.Path, method: str, launch: int, level: int, tokens: float, window_s: float,
         joules: float | None, reasons: Sequence[str], **more: object) -> None:
    """Append one window to the file, and print it; a figure that was not measured is None."""
    row = {"method": method, "launch": launch, "concurrency": level, "tokens": tokens, "window_s": window_s,
           "joules": joules, "tokens_per_s": tokens / window_s, "tokens_per_j": tokens / joules if joules else None,
           "reasons": list(reasons), **more}
    with file.open("a") as opened_file:
        opened_file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def opened(overrides: Sequence[str]) -> tuple[Any, Any]:
    """(settings, executor) of this host, as the verbs have them."""
    from autotune.config import compose
    from autotune.engine.gpus import visible_gpus
    from autotune.engine.host import engine_version
    from autotune.executors.local import LocalExecutor
    from autotune.executors.preflight import working_power

    settings = compose.load(list(overrides))
    gpus = visible_gpus()
    power, _ = working_power(settings, gpus)
    return settings, LocalExecutor(settings, engine_version(settings.engine), gpus, power)


def measure(overrides: Sequence[str], file: pathlib.Path, launches: int, windows: int, levels: Sequence[int],
            methods: Sequence[str]) -> None:
    """Launch and measure; a launch that crashes ends the program with its crash."""
    settings, executor = opened(overrides)
    server = settings.space.split(settings.space.baseline)[0]
    first = max((r["launch"] for r in rows_of(file)), default=0) + 1
    for launch in range(first, first + launches):
        folder = settings.folder / "launches" / f"variation-{launch}"
        with executor.launch(server, folder, lambda text, after_s: None) as live:
            if live.crash is not None:
                raise SystemExit(f"launch {launch} crashed: {live.crash}")
            print(f"launch {launch}: ready after {live.launch_s:.0f} s", flush=True)
            for level in levels:
                for method in methods:
                    (ours if method == "ours" else naive)(live, file, launch, level, windows)


def overhead(overrides: Sequence[str], levels: Sequence[int], windows: int) -> None:
    """Print a line for each window; a crash ends the program."""
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
        for level, number in itertools.product(levels, range(windows)):
            edges.clear()
            cpu_s, wall_s = time.process_time(), time.monotonic()
            found = measured(live, level, f"overhead-{level}-{number}")
            whole = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
            if len(edges) < 2:
                raise SystemExit("the window is too short for this: workload.window_s=5")
            tuner = (edges[-1][1] - edges[0][1]) / (edges[-1][0] - edges[0][0])
            client = found.client_cpu_share
            print(f"C={level}  {found.output_tokens / found.window_s:.0f} tok/s over {found.window_s:.0f} s  "
                  f"client {client:.2%}  tuner {tuner:.2%}  together {client + tuner:.2%} of a core, "
                  f"the tuner over the whole measurement {whole:.2%}  {', '.join(found.reasons)}", flush=True)


def measured(live: Any, level: int, name: str) -> Any:
    """One measurement as a study makes it; a crash ends the program."""
    from autotune.records import Crash

    found = live.measure({"concurrency": level}, name)
    if isinstance(found, Crash):
        raise SystemExit(f"the server died under load: {found}")
    return found


def ours(live: Any, file: pathlib.Path, launch: int, level: int, windows: int) -> None:
    """What a study measures, `windows` times."""
    for number in range(windows):
        found = measured(live, level, f"ours-{level}-{number}")
        reasons = [*found.reasons, *found.energy.reasons]
        keep(file, "ours", launch, level, found.output_tokens, found.window_s, found.energy.joules, reasons,
             relative_error=found.relative_error)


def naive(live: Any, file: pathlib.Path, launch: int, level: int, windows: int) -> None:
    """Equal lengths, all at once, fixed windows one after the other whatever the server is doing."""
    from autotune.loadgen.client import LoadClient
    from autotune.loadgen.workload import LoadOrder
    from autotune.measure.window import tokens_at
    from autotune.power import open_meter
    from autotune.power.meter import Powered

    executor, settings = live.executor, live.executor.settings
    load = dataclasses.replace(settings.workload, spread=0.0).load({"concurrency": level})
    powered = Powered(live.server.pid, executor.uuids(live.server.command.gpus))
    meter, _ = open_meter(executor.power or settings.power, powered)
    with meter, LoadClient(LoadOrder(live.target(), load, None)) as client:
        client.wait(NAIVE_WARMUP_S)
        edges = [meter.read()]
        for _ in range(windows):
            client.wait(edges[0].t + len(edges) * NAIVE_WINDOW_S - time.monotonic())
            edges.append(meter.read())
        client.wait(0.5)
        tokens = [tokens_at(client.ticks, edge.t) for edge in edges]
        client.stop()
    for a, b, before, after in zip(edges, edges[1:], tokens, tokens[1:], strict=False):
        energy = meter.energy(a, b)
        keep(file, "naive", launch, level, after - before, b.t - a.t, energy.joules, energy.reasons)


def variation(values: Sequence[float]) -> float | None:
    """Coefficient of variation; None of fewer than two values."""
    return statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per method, concurrency and metric: the two coefficients of variation. Invalid windows are left out of `ours`,
    as a study leaves them out, and counted."""
    found = []
    for level in sorted({r["concurrency"] for r in rows}):
        for metric in ("tokens_per_j", "tokens_per_s"):
            for method in METHODS:
                mine = [r for r in rows if r["method"] == method and r["concurrency"] == level and r[metric]]
                valid = [r for r in mine if method == "naive" or not r["reasons"]]
                launches = {n: [r[metric] for r in valid if r["launch"] == n] for n in {r["launch"] for r in valid}}
                within = [v for values in launches.values() if (v := variation(values)) is not None]
                found.append({
                    "concurrency": level, "metric": metric, "method": method, "launches": len(launches),
                    "windows": len(valid), "left_out": len(mine) - len(valid),
                    "mean": statistics.fmean(r[metric] for r in valid) if valid else None,
                    "between_windows": statistics.fmean(within) if within else None,
                    "between_launches": variation([statistics.fmean(v) for v in launches.values()])})
    return found


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print the summary as a table."""
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.2%}"

    print(f"{'C':>4} {'metric':<13} {'method':<6} {'launches':>8} {'windows':>8} {'left out':>8} {'mean':>10} "
          f"{'between windows':>16} {'between launches':>17}")
    for r in found:
        mean = "-" if r["mean"] is None else f"{r['mean']:.2f}"
        print(f"{r['concurrency']:>4} {r['metric']:<13} {r['method']:<6} {r['launches']:>8} {r['windows']:>8} "
              f"{r['left_out']:>8} {mean:>10} {share(r['between_windows']):>16} {share(r['between_launches']):>17}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=pathlib.Path)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[32, 128])
    parser.add_argument("--overhead", action="store_true", help="the CPU time that measuring takes")
    parser.add_argument("--method", choices=METHODS, help="one of the two only")
    parser.add_argument("--summary", action="store_true", help="only summarise what the file holds")
    line, overrides = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if line.overhead:
        overhead(overrides, line.concurrency, line.windows)
        return
    if line.file is None:
        parser.error("--file is needed")
    if not line.summary:
        methods = (line.method,) if line.method else ("ours", "naive")
        measure(overrides, line.file, line.launches, line.windows, line.concurrency, methods)
    show(summary(rows_of(line.file)))


if __name__ == "__main__":
    main()
