"""Search strategies side by side on tables that stand in for a cluster, in simulated hours.

    python tests/benchmarks/search.py TABLE.yaml... [--random N] [--shuffle] [--strategies launch_aware,tpe_loads]
                                      [--signals right] [--seeds 20] [--hours 8] [--jobs 1] [--json]
                                      [--workers 1,4,16,64]

--random N adds N tables drawn by tests/search/generate.py. `launch_aware` is study.strategy=autotune; tpe, random and
grid have the same names there; tests/search/opponents.py adds tpe_loads, tpe_fail and smac. All get the same outcomes.
`reached` counts seeds whose best configuration reached 98 % (99 %) of the noise-free optimum and stayed there; medians
of launches and hours are over those seeds. A study ends when its hours are used or the strategy stops.

--workers compares several workers on one study instead. `hours` is the median over all seeds until the reported
configuration got to 98 % of the true optimum and stayed there (a seed that never did counts with all its hours), `mean`
their mean; `of one` is the share of the hours (the median) of one worker, `floor` the least that it could be: the time
of one launch and one measurement, for one who knew the optimum and launched it first. `efficiency` is the speed-up per
worker, `rounds` how many launches take that long. Regret is 1 less the share of the optimum that would be reported
after so many hours (mean over seeds).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")  # the matrices are small: threads would only compete

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotune.search.launch_aware import LaunchAware  # noqa: E402
from autotune.search.optuna_samplers import SAMPLERS, OptunaStrategy  # noqa: E402
from autotune.search.strategy import Limits, Strategy  # noqa: E402
from tests.search.generate import random_table  # noqa: E402
from tests.search.opponents import OPPONENTS  # noqa: E402
from tests.search.simulate import Fleet, Run, simulate  # noqa: E402
from tests.search.tables import Table  # noqa: E402

STRATEGIES = ("launch_aware", *SAMPLERS)  # by default; OPPONENTS on request
SHARES = (0.98, 0.99)
EARLY_H = 3.0
PER_RANDOM_TABLE = 2  # seeds
REGRET_H = (0.1, 0.25, 0.5, 1.0, 2.0)


def make(name: str, table: Table, seed: int) -> Strategy:
    """The strategy without budgets: it stops only when no gain is left."""
    if name in OPPONENTS:
        opponent: Strategy = OPPONENTS[name](table.space, Limits(), seed)
        return opponent
    if name == "launch_aware":
        return LaunchAware(table.space, Limits(), seed, relieves=table.relieves)
    return OptunaStrategy(table.space, name, Limits(), seed)


def study(job: tuple[Table, str, int, float]) -> Run:
    """One simulated study."""
    table, name, seed, hours = job
    return simulate(table, make(name, table, seed), seed, hours)


def summary(table: str, strategy: str, runs: Sequence[Run]) -> dict[str, Any]:
    """One strategy on one table (or on all random ones) over its seeds; shares are of the true optimum.

    `stopped` is the share of the studies that the strategy ended before their hours were used.
    """
    row: dict[str, Any] = {"table": table, "strategy": strategy, "seeds": len(runs)}
    for share in SHARES:
        steps = [step for run in runs if (step := run.reached(share)) is not None]
        name = f"{share:.2f}"[2:]
        row |= {f"reached_{name}": len(steps),
                f"launches_{name}": statistics.median(s.launches for s in steps) if steps else None,
                f"hours_{name}": statistics.median(s.hours for s in steps) if steps else None}
    early = [max((s for s in run.steps if s.hours <= EARLY_H), key=lambda s: s.hours, default=None) for run in runs]
    return row | {"launches": statistics.mean(r.launches for r in runs),
                  "crashed": statistics.mean(r.crashed for r in runs),
                  "share_early": statistics.mean(s.share if s else 0.0 for s in early),
                  "share": statistics.mean(r.final_share for r in runs), "worst": min(r.final_share for r in runs),
                  "stopped": statistics.mean(r.stop is not None for r in runs)}


def show(row: dict[str, Any]) -> str:
    """One line of the printed table."""
    def at(share: str) -> str:
        launches, hours = row[f"launches_{share}"], row[f"hours_{share}"]
        figures = f"{'-':>5} {'-':>6}" if launches is None else f"{launches:5.1f} {hours:6.2f}"
        return f"{row[f'reached_{share}']:4d}/{row['seeds']:<4d} {figures}"

    return (f"{row['table']:16} {row['strategy']:13} {at('98')}  {at('99')}  {row['launches']:7.1f} "
            f"{row['crashed']:7.1f}  {row['share_early']:.3f} {row['share']:.3f} {row['worst']:.3f} "
            f"{row['stopped']:7.0%}")


HEAD = (f"{'':30} {'98 % of the optimum':^23} {'99 %':^22}  {'launches':>8} {'crashed':>7}  share of optimum\n"
        f"{'table':16} {'strategy':13} {'reached':>8} {'launch':>7} {'hours':>6}  {'reached':>8} {'launch':>7} "
        f"{'hours':>6}  {'(mean)':>7} {'(mean)':>7}  {f'{EARLY_H:g} h':>5} {'end':>5} {'worst':>5} {'stopped':>7}")


FLEET_HEAD = (f"{'table':16} {'strategy':12} {'workers':>7} {'reached':>8} {'hours':>6} {'mean':>6} {'of one':>6} "
              f"{'floor':>6} {'efficiency':>10} {'rounds':>6} {'launches':>8} {'crashed':>7}  regret after "
              + " ".join(f"{h:g} h" for h in REGRET_H))


def compare_workers(table: Table, strategy: str, numbers: Sequence[int], seeds: int, hours: float) -> None:
    """Print a line for each number of workers."""
    round_h = (float(table.spec["launch_s"]) + float(table.spec["measure_s"])) / 3600
    one: float | None = None
    for workers in numbers:
        fleets = [Fleet(table, make(strategy, table, seed), seed, workers) for seed in range(seeds)]
        runs = [fleet.run(hours) for fleet in fleets]
        assert not any(fleet.twice for fleet in fleets), "a server part was launched while it ran elsewhere"
        steps = [run.reached(SHARES[0]) for run in runs]
        used = [step.hours if step else hours for step in steps]
        median = statistics.median(used)
        one = median if workers == 1 else one
        of_one = f"{'-':>6} {'-':>6} {'-':>10}" if one is None else (
            f"{median / one:6.1%} {round_h / one:6.1%} {one / median / workers:10.0%}")
        regrets = [statistics.mean(1 - next((step.share for step in reversed(run.steps) if step.hours <= at), 0.0)
                                   for run in runs) for at in REGRET_H]
        reached = f"{sum(step is not None for step in steps)}/{seeds}"
        print(f"{table.name:16} {strategy:12} {workers:7} {reached:>8} {median:6.3f} {statistics.mean(used):6.3f} "
              f"{of_one} {median / round_h:6.1f} {statistics.mean(r.launches for r in runs):8.1f} "
              f"{statistics.mean(r.crashed for r in runs):7.1f}  " + " ".join(f"{r:.3f}" for r in regrets), flush=True)


def main() -> int:
    """Run and print; exit code 2 for a table that cannot be read."""
    args = _arguments()
    groups: list[tuple[str, list[tuple[Table, int]]]] = []
    for path in args.tables:
        try:
            table = Table.load(path)
        except (OSError, ValueError) as error:
            print(f"search.py: {path} is not a table: {error}", file=sys.stderr)
            return 2
        for remark in table.remarks:
            print(f"search.py: {path}: {remark}", file=sys.stderr)
        table = table.with_signals(args.signals)
        groups.append((table.name, [(table.shuffled(seed) if args.shuffle else table, seed)
                                    for seed in range(args.seeds)]))
    if args.random:
        tables = [random_table(i) for i in range(args.random_from, args.random_from + args.random)]
        groups.append((f"{args.random} random", [(t, s) for t in tables for s in range(PER_RANDOM_TABLE)]))
    if args.workers:
        print(FLEET_HEAD)
        for table, strategy in itertools.product([pairs[0][0] for _, pairs in groups], args.strategies):
            compare_workers(table, strategy, [int(n) for n in args.workers.split(",")], args.seeds, args.hours)
        return 0
    if not args.json:
        print(HEAD)
    rows, began, count = [], time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        run_all = map if args.jobs == 1 else stack.enter_context(concurrent.futures.ProcessPoolExecutor(args.jobs)).map
        for name, pairs in groups:
            for strategy in args.strategies:
                runs = list(run_all(study, [(table, strategy, seed, args.hours) for table, seed in pairs]))
                count += len(runs)
                rows.append(summary(name, strategy, runs))
                if not args.json:
                    print(show(rows[-1]), flush=True)
    rate = 60 * count / (time.monotonic() - began)
    if args.json:
        print(json.dumps({"hours": args.hours, "studies_per_minute": round(rate), "jobs": args.jobs,
                          "rows": rows}, indent=1))
    else:
        print(f"{count} studies of {args.hours:g} simulated hours, {rate:.0f} a minute ({args.jobs} process"
              f"{'es' if args.jobs > 1 else ''})")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", type=pathlib.Path, metavar="TABLE.yaml")
    parser.add_argument("--strategies", default=",".join(STRATEGIES),
                        help="comma-separated: " + ", ".join((*STRATEGIES, *OPPONENTS)))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--hours", type=float, default=8.0, help="simulated")
    parser.add_argument("--random", type=int, default=0, help=f"random tables, {PER_RANDOM_TABLE} seeds each")
    parser.add_argument("--random-from", type=int, default=0, help="number of the first random table")
    parser.add_argument("--shuffle", action="store_true", help="order of parameters and choices drawn per seed")
    parser.add_argument("--signals", choices=("right", "none", "wrong"), default="right",
                        help="what a table says that its servers are short of: as it is, nothing, of other parameters")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--workers", help="comma-separated: compare so many workers on each table")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.strategies = args.strategies.split(",")
    unknown = sorted(set(args.strategies) - {*STRATEGIES, *OPPONENTS})
    if unknown:
        parser.error(f"unknown strategy {', '.join(unknown)}; known: {', '.join((*STRATEGIES, *OPPONENTS))}")
    if "smac" in args.strategies and importlib.util.find_spec("smac") is None:
        parser.error("smac needs the extra bench: pip install -e '.[bench]'")
    if not (args.tables or args.random) or min(args.seeds, args.jobs) < 1 or args.hours <= 0:
        parser.error("name at least one table, or --random N; --seeds, --jobs and --hours must be positive")
    return args


if __name__ == "__main__":
    sys.exit(main())
