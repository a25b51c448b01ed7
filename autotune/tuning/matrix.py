"""The verb matrix: one configuration under every concurrency and context, on one launch if it survives.

Each row goes to outputs/STUDY/matrix.json as soon as it is measured (the same cell of the same configuration is
replaced), so that an interrupted table keeps what it has, and to the terminal at the end.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autotune.config.settings import Settings
from autotune.executors.local import LocalExecutor, Progress
from autotune.records import Config, Crash, Measurement, NothingFeasible, UsageError
from autotune.space.space import Space
from autotune.storage.trial import TrialRecord
from autotune.utils.files import read_plain, write_json


def cells(settings: Settings) -> list[tuple[int, int]]:
    """(context, concurrency) pairs: the settings' own, else those of the space and workload."""
    space = settings.space

    def own(name: str, otherwise: list[int]) -> list[int]:
        return next(([int(c) for c in p.choices] for p in space.params if p.name == name), otherwise)

    contexts = settings.matrix.contexts or own("context", list(settings.workload.contexts))
    levels = settings.matrix.concurrency or own("concurrency", [1])
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


def measure_all(bench: LocalExecutor, server: Config, label: str, folder: pathlib.Path, todo: Sequence[tuple[int, int]],
                progress: Progress, keep: Callable[[Mapping[str, Any]], object]) -> list[dict[str, Any]]:
    """Rows for every cell, each told to `keep` at once; a server that dies is launched again for those left."""
    rows: list[dict[str, Any]] = []

    def add(context: int, level: int, outcome: Measurement | Crash) -> None:
        rows.append(_row(label, context, level, outcome))
        keep(rows[-1])

    launches = 0
    left = list(todo)
    while left:
        launches += 1
        name = f"matrix-{label.replace(' ', '-')}-{launches}"
        with bench.launch(server, folder / "launches" / name, progress) as live:
            if live.crash is not None:
                for context, level in left:
                    add(context, level, live.crash)
                return rows
            while left and live.alive:
                context, level = left.pop(0)
                outcome = live.measure({"concurrency": level, "context": context}, f"{context}-{level}")
                add(context, level, outcome)
                progress(f"context {context}, concurrency {level}", 0.0)
    return rows


def file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "matrix.json"


def save(folder: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Add one row to matrix.json, in place of an older one of the same configuration and cell."""
    path = file(folder)
    try:
        before = json.loads(read_plain(path))
    except (OSError, ValueError, RecursionError):
        before = []
    rows = [old for old in before if isinstance(old, dict)] if isinstance(before, list) else []
    write_json(path, [old for old in rows if _cell(old) != _cell(row)] + [dict(row)])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table; what was not measured is a dash."""
    from rich.console import Console
    from rich.table import Table

    table = Table("ctx", "C", "tok/s", "tok/s per request", "wall s", "prompt tokens", "W", "tok/J", "remark",
                  title=f"{rows[0]['config']}: output tokens under load" if rows else "nothing measured")
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in rows:
        table.add_row(str(row["ctx"]), str(row["concurrency"]), *(_number(row, k, d) for k, d in (
            ("tokens_per_s", 1), ("per_request_tokens_per_s", 1), ("wall_s", 1), ("prompt_tokens", 0), ("watts", 1),
            ("tokens_per_j", 3))), str(row.get("remark", "")))
    Console(highlight=False).print(table)


def _cell(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row.get("config"), row.get("ctx"), row.get("concurrency")


def _row(label: str, context: int, level: int, outcome: Measurement | Crash) -> dict[str, Any]:
    row: dict[str, Any] = {"config": label, "ctx": context, "concurrency": level}
    if isinstance(outcome, Crash):
        return row | {"crash_signature": outcome.signature, "remark": f"crash: {outcome.category} at {outcome.stage}"}
    remarks = [*outcome.reasons, *outcome.energy.reasons]
    if outcome.energy.assumed:
        remarks.append("watts assumed")
    found = {
        "tokens_per_s": outcome.tokens_per_s, "per_request_tokens_per_s": _per_request(outcome),
        "wall_s": outcome.window_s, "prompt_tokens": outcome.prompt_tokens, "watts": outcome.energy.watts,
        "tokens_per_j": outcome.tokens_per_j, "accept_length": outcome.accept_length,
        "relative_error": outcome.relative_error, "energy_source": outcome.energy.source,
        "ttft_p50_ms": outcome.ttft_ms.p50 if outcome.ttft_ms else None,
        "tpot_p50_ms": outcome.tpot_ms.p50 if outcome.tpot_ms else None,
        "remark": "; ".join(remarks),
    }
    return row | {key: value for key, value in found.items() if value is not None}


def _per_request(m: Measurement) -> float | None:
    """Median decoding speed of one request in tokens/s; None without TPOT."""
    return 1000 / m.tpot_ms.p50 if m.tpot_ms is not None and m.tpot_ms.p50 > 0 else None


def _number(row: Mapping[str, Any], key: str, digits: int) -> str:
    return f"{row[key]:.{digits}f}" if key in row else "-"
