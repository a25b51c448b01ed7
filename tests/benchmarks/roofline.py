"""The roofline against published decode rates: rank correlation by group, with constants fitted on the other groups.

    python -m tests.benchmarks.roofline [--json]

Groups are the rows of one model and GPU of one source in published_rates.json, with at least eight rows. One JSON
object a line: case, value, asked, ok; exit 1 if the median of a source's rank correlations (Spearman) is below 0.9.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from autotune.engine.model import ModelShape
from autotune.engine.roofline import Constants, limits_of, tokens_per_s

DATA = pathlib.Path(__file__).with_name("published_rates.json")
SOURCES = ("ml_energy", "aiconfigurator")
GRID = [Constants(*values) for values in itertools.product((0.3, 0.4, 0.5, 0.7), (0.1, 0.2, 0.3, 0.5), (2.0, 4.0, 8.0),
                                                           (12.0, 25.0, 50.0))]
LEAST_ROWS = 8


class Row(NamedTuple):
    source: str
    model: str
    gpu: str
    gpus: int
    batch: float
    context: int
    weight_bytes: float | None
    tokens_per_s: float


def read() -> tuple[dict[str, ModelShape], list[Row]]:
    data = json.loads(DATA.read_text())
    shapes, names = {name: ModelShape.of(config, name) for name, config in data["models"].items()}, list(data["models"])
    return shapes, [Row(source, names[number], *rest) for source in SOURCES
                    for number, *rest in data[source]["rows"]]


def expected(shape: ModelShape, row: Row, constants: Constants) -> float:
    gpu = limits_of(row.gpu)
    assert gpu is not None
    if row.weight_bytes is not None:
        shape = msgspec.structs.replace(shape, weight_bytes=row.weight_bytes)
    return tokens_per_s(shape, gpu, row.gpus, row.batch, row.context, constants=constants)


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks, ties at their mean."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    a, b = ranks(one), ranks(other)
    x, y = [v - fmean(a) for v in a], [v - fmean(b) for v in b]
    return sum(p * q for p, q in zip(x, y, strict=True)) / math.sqrt(sum(p * p for p in x) * sum(q * q for q in y))


def groups() -> Iterator[tuple[str, str, int, float, float, Constants]]:
    """(source, group, rows, rank correlation, median factor measured / expected, constants) of each group."""
    shapes, rows = read()
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.source, row.model, row.gpu), []).append(row)
    large = {key: group for key, group in found.items() if len(group) >= LEAST_ROWS}
    logs = {key: [[math.log(row.tokens_per_s / expected(shapes[row.model], row, constants)) for row in group]
                  for constants in GRID] for key, group in large.items()}
    losses = {key: [fmean(abs(e) for e in errors) for errors in found] for key, found in logs.items()}
    for key, group in sorted(large.items()):
        rest = [sum(losses[other][i] for other in large if other[1] != key[1]) for i in range(len(GRID))]
        constants = GRID[rest.index(min(rest))]
        told = [expected(shapes[row.model], row, constants) for row in group]
        yield (key[0], f"{key[0]}: {key[1]} on {key[2]}", len(group),
               spearman(told, [row.tokens_per_s for row in group]),
               median(row.tokens_per_s / t for row, t in zip(group, told, strict=True)), constants)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line (the only format)")
    parser.parse_args(argv)
    found = list(groups())
    for _, name, rows, correlation, factor, _ in found:
        print(json.dumps({"case": f"{name}, {rows} rows", "value": round(correlation, 3), "asked": "none", "ok": True,
                          "measured_over_expected": round(factor, 2)}))
    failed = False
    for source in SOURCES:
        of = [group for group in found if group[0] == source]
        middle = median(correlation for *_, correlation, _, _ in of)
        failed |= middle < 0.9
        print(json.dumps({"case": f"{source}: median of {len(of)} groups, {sum(group[2] for group in of)} rows",
                          "value": round(middle, 3), "asked": "at least 0.9", "ok": middle >= 0.9}))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
