"""Several workers on tables that stand in for clusters: hours of the clock until 98 % of the optimum, and efficiency.

    python tests/benchmarks/fleet.py TABLE.yaml... [--strategies launch_aware,tpe] [--workers 1,4,16,64] [--seeds 5]

`hours` is the median over all seeds until the reported configuration got to 98 % of the true optimum and stayed there
(a seed that never did counts with all its hours), `mean` their mean; `of one` is the share of the hours (the median) of
one worker, `floor` the least that it could be: the time of one launch and one measurement, for one who knew the optimum
and launched it first. `efficiency` is the speed-up per worker, `rounds` how many launches take that long. Regret is 1
less the share of the optimum that would be reported after so many hours (mean over seeds).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.search import STRATEGIES, make  # noqa: E402
from tests.search.simulate import Fleet, Run  # noqa: E402
from tests.search.tables import Table  # noqa: E402

SHARE = 0.98
AT_H = (0.1, 0.25, 0.5, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One strategy with so many workers on one table."""

    reached: int
    hours: float
    mean: float
    launches: float
    crashed: float
    twice: int
    regret: tuple[float, ...]


def regret(run: Run, hours: float) -> float:
    """1 less the share of the optimum of what would be reported after so many hours."""
    return 1 - next((step.share for step in reversed(run.steps) if step.hours <= hours), 0.0)


def measure(table: Table, strategy: str, workers: int, seeds: int, hours: float) -> Row:
    """A row of the table, from `seeds` studies of at most `hours` of the clock."""
    fleets = [Fleet(table, make(strategy, table, seed), seed, workers) for seed in range(seeds)]
    runs = [fleet.run(hours) for fleet in fleets]
    steps = [run.reached(SHARE) for run in runs]
    used = [step.hours if step else hours for step in steps]
    return Row(sum(step is not None for step in steps), statistics.median(used), statistics.mean(used),
               statistics.mean(r.launches for r in runs), statistics.mean(r.crashed for r in runs),
               sum(fleet.twice for fleet in fleets),
               tuple(statistics.mean(regret(run, at) for run in runs) for at in AT_H))


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+", type=pathlib.Path, metavar="TABLE.yaml")
    parser.add_argument("--strategies", default="launch_aware,tpe", help="comma-separated: " + ", ".join(STRATEGIES))
    parser.add_argument("--workers", default="1,4,16,64")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=8.0, help="of the clock, simulated")
    args = parser.parse_args()
    print(f"{'table':16} {'strategy':12} {'workers':>7} {'reached':>8} {'hours':>6} {'mean':>6} {'of one':>6} "
          f"{'floor':>6} {'efficiency':>10} {'rounds':>6} "
          f"{'launches':>8} {'crashed':>7}  regret after " + " ".join(f"{h:g} h" for h in AT_H))
    for path in args.tables:
        table = Table.load(path)
        round_h = (float(table.spec["launch_s"]) + float(table.spec["measure_s"])) / 3600
        for strategy in args.strategies.split(","):
            one: float | None = None
            for workers in map(int, args.workers.split(",")):
                row = measure(table, strategy, workers, args.seeds, args.hours)
                one = row.hours if workers == 1 else one
                assert row.twice == 0, "a server part was launched while it ran elsewhere"
                reached = f"{row.reached}/{args.seeds}"
                of_one = f"{'-':>6} {'-':>6} {'-':>10}" if one is None else (
                    f"{row.hours / one:6.1%} {round_h / one:6.1%} {one / row.hours / workers:10.0%}")
                print(f"{table.name:16} {strategy:12} {workers:7} {reached:>8} {row.hours:6.3f} {row.mean:6.3f} "
                      f"{of_one} {row.hours / round_h:6.1f} {row.launches:8.1f} {row.crashed:7.1f}  "
                      + " ".join(f"{r:.3f}" for r in row.regret), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
