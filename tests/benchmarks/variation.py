"""Variation of tokens per joule between windows and launches of one configuration: a naive client against ours.

    python tests/benchmarks/variation.py --file RAW.jsonl --launches 3 +space=h200 [overrides]
    python tests/benchmarks/variation.py --file RAW.jsonl --summary

Launches the space's baseline server, and on each launch measures every load of --concurrency in two ways, --windows
times: `ours` is what a study does (staggered lengths, a warm-up until steady, a window until it is precise enough);
`naive` is what a script does (equal lengths, all sent at once, windows of 10 s back to back after 5 s).
Every window is one line of RAW.jsonl, kept as soon as it is measured; more launches may be added to a file later.
The summary gives the coefficient of variation (sample standard deviation over mean) of tokens/J between the windows of
a launch (mean over launches), and between the launches' means.
"""

from __future__ import annotations

import argparse
import dataclasses
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


def ours(live: Any, file: pathlib.Path, launch: int, level: int, windows: int) -> None:
    """What a study measures, `windows` times."""
    from autotune.records import Crash

    for number in range(windows):
        found = live.measure({"concurrency": level}, f"ours-{level}-{number}")
        if isinstance(found, Crash):
            raise SystemExit(f"launch {launch} died under load: {found}")
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
    load = dataclasses.replace(settings.workload.load({"concurrency": level}), output_spread=0.0)
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
    parser.add_argument("--file", type=pathlib.Path, required=True)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[32, 128])
    parser.add_argument("--method", choices=METHODS, help="one of the two only")
    parser.add_argument("--summary", action="store_true", help="only summarise what the file holds")
    line, overrides = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not line.summary:
        methods = (line.method,) if line.method else ("ours", "naive")
        measure(overrides, line.file, line.launches, line.windows, line.concurrency, methods)
    show(summary(rows_of(line.file)))


if __name__ == "__main__":
    main()
