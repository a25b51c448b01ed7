"""The report's content: sections of blocks from a story, the verdict first. Rendered by page.py and markdown.py."""

from __future__ import annotations

import shlex
from typing import Any

from autotune.engine.spec import text
from autotune.records import Value
from autotune.report import evidence, verdict
from autotune.report.acceptance import FIGURE, acceptance
from autotune.report.blocks import (
    Block,
    Cell,
    Chart,
    Charts,
    Code,
    Document,
    Facts,
    Fold,
    Para,
    Section,
    Table,
    Tile,
    Tiles,
)
from autotune.report.charts import curves_chart, tradeoff_chart
from autotune.report.levers import changed
from autotune.report.loadtable import load_table
from autotune.report.series import curves, load_axis, tradeoff
from autotune.report.story import Conclusion, Story
from autotune.report.tested import Tested
from autotune.report.wording import config_text, interval_text, number, one_line, percent, with_unit

TONES = {Conclusion.IMPROVED: "good", Conclusion.NO_IMPROVEMENT: "plain", Conclusion.UNDECIDED: "warn",
         Conclusion.NOT_CONFIRMED: "warn", Conclusion.NOTHING_FEASIBLE: "bad", Conclusion.NOTHING_MEASURED: "bad"}


def build(story: Story) -> Document:
    """The whole report."""
    sections = [_verdict(story), _pictures(story), load_table(story), acceptance(story), evidence.levers(story),
                evidence.crashes(story), evidence.search(story), evidence.untried(story), _provenance(story),
                evidence.trials(story)]
    return Document(
        title=f"autotune: {one_line(story.study)}", kicker=f"autotune report · study {one_line(story.study)}",
        headline=verdict.headline(story), tone=TONES[story.conclusion], support=verdict.support(story),
        chips=_chips(story), sections=tuple(s for s in sections if s is not None),
        footer=f"{verdict.spent_words(story)}. Stopped: {verdict.stop_words(story)}.")


def _chips(story: Story) -> tuple[str, ...]:
    identity, made = story.identity, story.provenance
    engine = " ".join(str(x) for x in (identity.get("engine"), identity.get("engine_version")) if x)
    gpus = made.get("gpu") or []
    device = f"{len(gpus)} GPUs" if len(gpus) > 1 else "1 GPU" if gpus else str(made.get("cpu") or "")
    name = str(story.space.needs.get("gpu_name") or "")
    found = [engine, f"{name} · {device}" if name and device else device, str(made.get("created") or "")[:10],
             f"objective: {story.objective.replace('_', ' ')}"]
    return tuple(one_line(x) for x in found if x)


def _verdict(story: Story) -> Section | None:
    winner, base = story.winner, story.baseline
    if winner is None:
        rows = [t for t in story.measured[:5]]
        blocks: list[Block] = [Para(f"Trials: {verdict.counts_words(story)}.")]
        if rows:
            blocks.append(Table(("Trial", "Configuration", f">{story.unit}", "Breaks"), tuple(
                (str(t.trial), config_text(t.config), number(t.value), ", ".join(
                    f"{n} by {percent(t.ratios[n] - 1)}" for n in t.violated)) for t in rows)))
        return Section("verdict", "What was measured", tuple(blocks))
    blocks = [Tiles(_tiles(story, winner))]
    if winner.energy_assumed:
        blocks.append(Para(f"Energy is {verdict.energy_words(winner)}. Do not quote these watts.", "warn"))
    if base is not None and base is not winner:
        moved = changed(base.config, winner.config)
        blocks.append(Table(("Choice", "Baseline", "Winner" if story.confirmed else "Best"), tuple(
            (name, side(a), Cell(side(b), "strong")) for name, (a, b) in moved.items()),
            "What changes; every other choice is the baseline's"))
    head = verdict.label(story, winner)
    columns = ("Figure", ">Baseline", f">{head}", ">Change", "?Limit") if base is not winner else \
        ("Figure", ">Baseline", "?Limit")
    rows_ = verdict.figure_rows(story)
    blocks.append(Table(columns, tuple(r if base is not winner else (r[0], r[1], r[4]) for r in rows_),
                        "Figures" if base is not winner else "The baseline's figures"))
    blocks.append(_finalists(story))
    if said := verdict.neighbour_words(story):
        blocks.append(Para(said))
    return Section("verdict", "Verdict in figures", tuple(blocks))


def _tiles(story: Story, winner: Tested) -> tuple[Tile, ...]:
    base, gain = story.baseline, story.gain
    tiles = []
    objective = Tile("Objective", with_unit(winner.value, story.unit))
    if base is not None and base is not winner and gain is not None:
        objective = Tile("Objective", with_unit(winner.value, story.unit), with_unit(base.value, story.unit),
                         percent(gain.share, signed=True), "good" if gain.confirmed and gain.share > 0 else "",
                         interval_text(gain.low, gain.high) + ("" if gain.confirmed else "; not confirmed"))
    tiles.append(objective)
    for name in ("tokens_per_s", "tokens_per_j"):
        unit = {"tokens_per_s": "tok/s", "tokens_per_j": "tok/J"}[name]
        if name in winner.figures and unit != story.unit:
            title = "Throughput" if name == "tokens_per_s" else "Energy efficiency"
            tiles.append(_tile(title, winner, base, name, unit))
    if "watts" in winner.figures:
        limit = next((x for x in story.limits if x.name == "max_watts"), None)
        remark = verdict.energy_words(winner) if not winner.energy_assumed else "assumed, not measured"
        if limit is not None:
            remark = f"{remark}; limit {with_unit(limit.limit, 'W')}{verdict.headroom(limit.ratio)}"
        tiles.append(_tile("Power", winner, base, "watts", "W", remark))
    bounds = [x for x in story.limits if x.ratio is not None and (x.limit or x.ratio > 1)]  # 0 has no headroom to tell
    nearest = max(bounds, key=lambda x: x.ratio or 0.0, default=None)
    if nearest is not None and nearest.ratio is not None:
        tiles.append(Tile("Tightest limit", percent(1 - nearest.ratio) + " headroom", remark=nearest.name))
    elif not story.limits:
        tiles.append(Tile("Limits", "none set", remark="latency was not bounded"))
    return tuple(tiles)


def _tile(title: str, winner: Tested, base: Tested | None, name: str, unit: str, remark: str = "") -> Tile:
    now = winner.figures[name]
    before = base.figures.get(name) if base is not None and base is not winner else None
    change = percent(now / before - 1, signed=True) if before else ""
    return Tile(title, with_unit(now, unit), with_unit(before, unit) if before is not None else "", change, "", remark)


def _finalists(story: Story) -> Block:
    told = story.confirmation.get("finalists") or {}
    rows: list[tuple[str, ...]] = []
    for entry in story.finalists:
        by = next((told[str(n)] for n in entry.trials if str(n) in told), None)
        standing = "winner" if entry is story.winner and story.confirmed else str(by["verdict"]).replace("_", " ") \
            if by else ""
        low, high = (list((by or {}).get("interval") or []) + [None, None])[:2]
        error = "" if entry.relative_error is None else f" ± {percent(entry.relative_error)}"
        rows.append((str(entry.trial), _differs(story, entry), f"{number(entry.value)}{error}",
                     percent(by.get("gain"), signed=True) if by else "", interval_text(low, high), standing))
    columns = ["Trial", "Differs from the baseline in", f">{story.unit}", ">Confirmed gain", "Interval", "Standing"]
    if any(FIGURE in entry.figures for entry in story.finalists):
        columns.insert(3, ">Acceptance length")
        rows = [(*row[:3], number(entry.figures.get(FIGURE)), *row[3:])
                for row, entry in zip(rows, story.finalists, strict=True)]
    return Fold(f"The best {len(rows)} configurations", (Table(tuple(columns), tuple(rows)),))


def _differs(story: Story, entry: Tested) -> str:
    moved = changed(story.space.baseline, entry.config)
    return ", ".join(f"{name}={side(b)}" for name, (_, b) in moved.items()) or "nothing: it is the baseline"


def side(value: Value | None) -> str:
    """A choice, or that the parameter does not exist there."""
    return "absent" if value is None else one_line(text(value))


def _pictures(story: Story) -> Section | None:
    found = []
    data = tradeoff(story)
    if data is not None:
        found.append(Chart(tradeoff_chart(story, data), f"{data.x.title} against {data.y.title.lower()}. The line "
                           "joins configurations within limits that no other one beats in both; triangles break one."))
    name = load_axis(story)
    lines = curves(story) if name else ()
    if name and lines:
        found.append(Chart(curves_chart(story, lines, name), f"Objective over {name}: one line a launch; hollow dots "
                           "break a limit."))
    return Section("pictures", "In pictures", (Charts(tuple(found)),)) if found else None


def _provenance(story: Story) -> Section:
    identity, made = story.identity, story.provenance
    packages = made.get("packages") or {}
    rows: list[tuple[str, Any]] = [
        ("Study", story.study), ("Space", f"{story.space.name}, digest {identity.get('space_digest')}"),
        ("Strategy", story.strategy), ("Engine", " ".join(
            str(x) for x in (identity.get("engine"), identity.get("engine_version")) if x)),
        ("Model", ", ".join(f"{k}: {v}" for k, v in (identity.get("model") or {}).items())),
        ("GPUs (hashed UUIDs)", ", ".join(map(str, made.get("gpu") or []))), ("Driver", made.get("driver")),
        ("CPU", made.get("cpu")), ("Kernel", made.get("kernel")),
        ("autotune", made.get("autotune")), ("Python", made.get("python")),
        ("Packages", ", ".join(f"{k} {v}" for k, v in packages.items())),
        ("Workload", _mapping_text(identity.get("workload"))), ("Limits", _mapping_text(identity.get("limits"))),
        ("Seeds", _mapping_text(made.get("seeds"))), ("Started", made.get("created")),
        ("Time", verdict.spent_words(story)), ("Trials", verdict.counts_words(story)),
    ]
    blocks: list[Block] = [Facts(tuple((k, one_line(v)) for k, v in rows if v not in (None, "", "None")))]
    lines = [str(made["command"])] if made.get("command") else []
    if lines and story.winner is not None:
        lines += [lines[0].replace(" tune ", f" {verb} ", 1) for verb in ("export", "dashboard")]
    if lines:
        blocks.append(Code("\n".join(lines), "How to reproduce the study, export its winner, and look at every trial"))
    argv = story.winner.record.attrs.get("server_argv") if story.winner is not None else None
    if argv:
        blocks.append(Code(shlex.join(str(a) for a in argv), "The winner's server, as it was measured"))
    return Section("provenance", "Where this comes from", tuple(blocks))


def _mapping_text(value: Any) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{k} {', '.join(map(str, v)) if isinstance(v, list) else v}" for k, v in value.items()
                     if v is not None)
