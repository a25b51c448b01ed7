"""Baseline and winner over contexts and concurrency: the verb matrix's rows, or what the study's trials say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.records import config_key
from autotune.report.blocks import Block, Cell, Fold, Para, Section, Table
from autotune.report.story import Story
from autotune.report.tested import Tested
from autotune.report.verdict import cell
from autotune.report.wording import config_text, number, one_line, percent

FIGURES = (("tokens_per_s", "tok/s"), ("per_request_tokens_per_s", "tok/s per request"), ("watts", "W"),
           ("tokens_per_j", "tok/J"), ("accept_length", "acceptance length"), ("ttft_p50_ms", "TTFT p50 ms"),
           ("wall_s", "wall s"), ("prompt_tokens", "prompt tokens"))


def load_table(story: Story) -> Section | None:
    """The section; None when neither the matrix nor the trials give two loads."""
    if story.matrix:
        return Section("load", "Baseline and winner under load", tuple(_matrix(story)))
    table = _from_trials(story)
    if table is None:
        return None
    return Section("load", "Baseline and winner under load", (
        table, Para("From the search's own trials. python -m autotune matrix +space=... config=baseline (and "
                    "config=best) measures the whole table.", "muted")))


def _matrix(story: Story) -> list[Block]:
    """One row a load; for every configuration its figures, and the change from the first one."""
    names = list(dict.fromkeys(str(row.get("config")) for row in story.matrix))
    names.sort(key=lambda n: n != "baseline")
    rows = {(str(r.get("config")), r.get("ctx"), r.get("concurrency")): r for r in story.matrix}
    loads = sorted({(r.get("ctx") or 0, r.get("concurrency") or 0) for r in story.matrix})
    shown = [(k, title) for k, title in FIGURES if any(k in r for r in story.matrix)]
    change = next((k for k in ("tokens_per_j", "tokens_per_s") if any(k in r for r in story.matrix)), None)
    main = [(k, t) for k, t in shown if k in ("tokens_per_s", "per_request_tokens_per_s", "watts", "tokens_per_j")]
    columns = [">Context", ">Concurrency"]
    for name in names:
        columns += [f">{one_line(name)} {title}" for _, title in main]
    columns += [f">Change in {dict(FIGURES)[change]}"] if len(names) > 1 and change else []
    lines = []
    for ctx, level in loads:
        found = [rows.get((name, ctx, level), {}) for name in names]
        line: list[str | Cell] = [cell(ctx), cell(level)]
        for row in found:
            line += [_figure(row, key) for key, _ in main]
        if len(names) > 1 and change:
            line.append(_change(found[0].get(change), found[-1].get(change)))
        lines.append(tuple(line))
    blocks: list[Block] = [Table(tuple(columns), tuple(lines))]
    rest = [(k, t) for k, t in shown if (k, t) not in main]
    if rest:
        blocks.append(Fold("Latency, wall clock and other figures of the same windows", (Table(
            ("Configuration", ">Context", ">Concurrency", *[f">{t}" for _, t in rest], "Remark"), tuple(
                (one_line(r.get("config")), cell(r.get("ctx")), cell(r.get("concurrency")),
                 *[_figure(r, k) for k, _ in rest], one_line(r.get("remark") or "")) for r in story.matrix)),)))
    return blocks


def _figure(row: Mapping[str, Any], key: str) -> str | Cell:
    if not row:
        return Cell("-", "muted")
    if key not in row:
        return Cell("crash" if row.get("crash_signature") else "-", "bad" if row.get("crash_signature") else "muted")
    return cell(row[key])


def _change(before: Any, now: Any) -> str | Cell:
    if not isinstance(before, int | float) or not isinstance(now, int | float) or before <= 0:
        return Cell("-", "muted")
    share = now / before - 1
    return Cell(percent(share, signed=True), "good" if share > 0 else "bad" if share < 0 else "")


def _from_trials(story: Story) -> Table | None:
    """The same table from trials of the baseline's and the winner's server."""
    if story.winner is None:
        return None
    split = story.space.split
    servers = {"Baseline": split(story.space.baseline)[0], "Winner": split(story.winner.config)[0]}
    if config_key(servers["Baseline"]) == config_key(servers["Winner"]):
        servers.pop("Winner")
    found: dict[str, dict[str, Tested]] = {}
    loads = {}
    for entry in story.measured:
        server, load = split(entry.config)
        for name, wanted in servers.items():
            if load and config_key(server) == config_key(wanted):
                found.setdefault(config_key(load), {})[name] = entry
                loads[config_key(load)] = load
    if len(found) < 2:
        return None
    order = sorted(found, key=lambda k: [_position(story, n, v) for n, v in loads[k].items()])
    columns = ["Load"]
    for name in servers:
        columns += [f">{name} {story.unit}", f">{name} tok/s"] if story.unit != "tok/s" else [f">{name} tok/s"]
    columns += [">Change"] if len(servers) > 1 else []
    rows = []
    for key in order:
        row: list[str | Cell] = [config_text(loads[key])]
        for name in servers:
            entry_ = found[key].get(name)
            row.append(number(entry_.value) if entry_ else Cell("-", "muted"))
            if story.unit != "tok/s":
                row.append(number(entry_.figures.get("tokens_per_s")) if entry_ else Cell("-", "muted"))
        if len(servers) > 1:
            a, b = found[key].get("Baseline"), found[key].get("Winner")
            row.append(_change(a.value if a else None, b.value if b else None))
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows))


def _position(story: Story, name: str, value: Any) -> int:
    choices = [repr(c) for c in story.space.param(name).choices]
    return choices.index(repr(value)) if repr(value) in choices else len(choices)
