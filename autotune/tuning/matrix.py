"""The concurrency x context table of one configuration, measured on one launch if it survives.

Each row goes to outputs/STUDY/matrix.json as soon as it is measured, in place of an older row of the same cell, so an
interruption loses no row. The table is printed at the end.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.config.settings import Settings
from autotune.executors.base import Executor, Progress
from autotune.records import Config, Crash, Measurement, NothingFeasible, UsageError
from autotune.space.space import Space
from autotune.storage.trial import TrialRecord, figures_of
from autotune.utils.files import read_plain, write_json

COLUMNS = (("tokens_per_s", "tok/s", 1), ("per_request_tokens_per_s", "tok/s per request", 1), ("wall_s", "wall s", 1),
           ("prompt_tokens", "prompt tokens", 0), ("watts", "W", 1), ("tokens_per_j", "tok/J", 3))
FIGURES = ("tokens_per_s", "prompt_tokens", "watts", "tokens_per_j", "accept_length", "relative_error", "ttft_p50_ms",
           "tpot_p50_ms")


def cells(settings: Settings) -> list[tuple[int, int]]:
    """(context, concurrency) pairs of the settings, else of the space and workload. Raises UsageError."""
    choices = {param.name: [int(c) for c in param.choices] for param in settings.space.params
               if param.name in ("context", "concurrency")}
    contexts = settings.matrix.contexts or choices.get("context", list(settings.workload.contexts))
    levels = settings.matrix.concurrency or choices.get("concurrency", [1])
    if min([*contexts, *levels]) < 1:
        raise UsageError("matrix.contexts and matrix.concurrency take positive whole numbers")
    return [(context, level) for context in contexts for level in levels]


def chosen(which: str, space: Space, records: Sequence[TrialRecord]) -> tuple[str, Config]:
    """(label, configuration) for `config=baseline`, `best` or a trial's number. Raises UsageError, NothingFeasible."""
    if which == "baseline":
        return "baseline", space.baseline
    if which == "best":
        feasible = [r for r in records if r.feasible and r.value is not None]
        if not feasible:
            raise NothingFeasible("the study has no feasible trial yet, so there is no best configuration")
        return "best", max(feasible, key=lambda r: r.value or 0.0).config
    number = int(which) if which.isdigit() else -1
    found = [r for r in records if r.number == number]
    if not found:
        raise UsageError(f"config={which} is neither baseline, best nor the number of a trial of this study")
    return f"trial {number}", found[0].config


def measure_all(executor: Executor, server_part: Config, label: str, folder: pathlib.Path,
                todo: Sequence[tuple[int, int]], progress: Progress) -> list[dict[str, Any]]:
    """Rows for every cell, each saved at once; a server that dies is launched again for the cells left."""
    rows: list[dict[str, Any]] = []

    def add(context: int, level: int, outcome: Measurement | Crash) -> None:
        rows.append(_row(label, context, level, outcome))
        save(folder, rows[-1])

    launches, left = 0, list(todo)
    while left:
        launches += 1
        name = f"matrix-{label.replace(' ', '-')}-{launches}"
        with executor.launch(server_part, folder / "launches" / name, progress) as server:
            if server.crash is not None:
                for context, level in left:
                    add(context, level, server.crash)
                return rows
            while left and server.alive:
                context, level = left.pop(0)
                add(context, level, server.measure({"concurrency": level, "context": context}, f"{context}-{level}"))
                progress(f"context {context}, concurrency {level}", 0.0)
    return rows


def file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "matrix.json"


def save(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Add one row to matrix.json, in place of an older one of the same configuration and cell."""
    path = file(folder)
    rows = json.loads(read_plain(path)) if path.exists() else []
    write_json(path, [old for old in rows if _cell(old) != _cell(row)] + [dict(row)])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table, with a dash for each figure that was not measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table("ctx", "C", *(title for _, title, _ in COLUMNS), "remark",
                  title=f"{rows[0]['config']}: output tokens under load" if rows else "nothing measured")
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(str(row["ctx"]), str(row["concurrency"]), *(
            f"{row[key]:.{digits}f}" if key in row else "-" for key, _, digits in COLUMNS), str(row.get("remark", "")))
    Console(highlight=False).print(table)


def _cell(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row.get("config"), row.get("ctx"), row.get("concurrency")


def _row(label: str, context: int, level: int, outcome: Measurement | Crash) -> dict[str, Any]:
    row: dict[str, Any] = {"config": label, "ctx": context, "concurrency": level}
    if isinstance(outcome, Crash):
        return row | {"crash_signature": outcome.signature, "remark": f"crash: {outcome.category} at {outcome.stage}"}
    energy, figures = outcome.energy, figures_of(outcome)
    row |= {name: figures[name] for name in FIGURES if name in figures}
    if (tpot_ms := figures.get("tpot_p50_ms", 0.0)) > 0:
        row["per_request_tokens_per_s"] = 1000 / tpot_ms
    remarks = [*outcome.reasons, *energy.reasons, *(["watts assumed"] if energy.assumed else [])]
    return row | {"wall_s": outcome.window_s, "energy_source": energy.source, "remark": "; ".join(remarks)}
