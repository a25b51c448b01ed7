"""The study's own plots in optuna-dashboard: plotly figures as plain JSON, so that plotly itself is not needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.report.series import Curve, Step, Tradeoff, curves, fates, load_axis, progress, tradeoff
from autotune.report.story import Story
from autotune.report.wording import choice_text, config_text, one_line, percent, with_unit

BLUE, GREEN, ORANGE, RED, GREY, PURPLE = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#7D7D7D", "#CC79A7"
SHOWN_CURVES = 15


@dataclasses.dataclass(frozen=True)
class Figure:
    """What optuna_dashboard.save_plotly_graph_object needs of a figure."""

    name: str
    data: tuple[Mapping[str, Any], ...]
    layout: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"data": list(self.data), "layout": dict(self.layout)})


def figures(story: Story) -> tuple[Figure, ...]:
    """Every plot that the study has data for."""
    plane, steps, name = tradeoff(story), progress(story), load_axis(story)
    lines = curves(story) if name else ()
    found = [_tradeoff(plane) if plane else None, _curves(story, lines, name) if name and lines else None,
             _crash_map(story), _levers(story), _progress(story, steps) if steps else None]
    return tuple(figure for figure in found if figure is not None)


def _tradeoff(data: Tradeoff) -> Figure:
    kinds = [("within limits", "circle", BLUE, 8, [p for p in data.points if p.entry.feasible and not p.role]),
             ("breaks a limit", "triangle-up-open", GREY, 9,
              [p for p in data.points if not p.entry.feasible and not p.role]),
             ("baseline", "diamond", ORANGE, 14, [p for p in data.points if p.role == "baseline"]),
             ("winner", "star", GREEN, 16, [p for p in data.points if p.role == "winner"])]
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "name": "Pareto front", "line": {"color": BLUE, "shape": "vh"},
         "x": [p.x for p in data.front], "y": [p.y for p in data.front], "hoverinfo": "skip"}]
    traces += [{"type": "scatter", "mode": "markers", "name": name, "x": [p.x for p in points],
                "y": [p.y for p in points], "marker": {"symbol": symbol, "color": colour, "size": size},
                "text": [_told(p.entry.trial, p.entry.config) for p in points], "hoverinfo": "x+y+text"}
               for name, symbol, colour, size, points in kinds if points]
    shapes = [_vertical(limit, RED) for _, limit in data.x.limits]
    return Figure("autotune-1-tradeoff", tuple(traces), _layout(
        f"{data.x.title} against {data.y.title.lower()}", data.x.label, data.y.label, shapes=shapes))


def _curves(story: Story, lines: Sequence[Curve], name: str) -> Figure:
    traces = []
    for curve in lines[:SHOWN_CURVES]:
        colour = {"baseline": ORANGE, "winner": GREEN}.get(curve.role, GREY)
        title = f"launch {curve.launch} {curve.role}".strip()
        traces.append({"type": "scatter", "mode": "lines+markers", "name": title, "showlegend": bool(curve.role),
                       "x": [str(v) for v, _, _ in curve.values], "y": [y for _, y, _ in curve.values],
                       "line": {"color": colour, "width": 3 if curve.role else 1}, "opacity": 1 if curve.role else 0.6,
                       "marker": {"symbol": ["circle" if ok else "circle-open" for _, _, ok in curve.values]},
                       "text": [config_text(curve.server)] * len(curve.values), "hoverinfo": "x+y+text"})
    levels = [str(c) for c in story.space.param(name).choices]
    return Figure("autotune-2-load", tuple(traces), _layout(
        f"Objective over {name}, one line a launch (hollow: over a limit)", name, f"Objective ({story.unit})",
        xaxis={"type": "category", "categoryorder": "array", "categoryarray": levels}))


def _crash_map(story: Story) -> Figure | None:
    names, rows = fates(story)
    rows = tuple(r for r in rows if r.launches)
    if not names or not rows:
        return None
    about = {g.signature: g.crash.category for g in story.crashes}
    columns = ["served", *names]
    counts = [[r.served if c == "served" else r.crashed.get(c, 0) for c in columns] for r in rows]
    trace = {"type": "heatmap", "colorscale": "Cividis", "xgap": 2, "ygap": 2,
             "x": [f"{c}<br>{_safe(about[c])}" if c in about else c for c in columns],
             "y": [_safe(choice_text(r.param, r.value)) for r in rows],
             "z": [[n / r.launches for n in line] for r, line in zip(rows, counts, strict=True)],
             "text": [[f"{n}/{r.launches}" if n else "" for n in line] for r, line in zip(rows, counts, strict=True)],
             "texttemplate": "%{text}", "textfont": {"size": 12}, "hoverinfo": "x+y+text", "zmin": 0, "zmax": 1,
             "colorbar": {"title": {"text": "share"}, "tickformat": ".0%"}}
    return Figure("autotune-3-crash-map", (trace,), _layout(
        "Crash map: how launches with each choice ended", "", "", height=120 + 26 * len(rows),
        yaxis={"autorange": "reversed", "automargin": True}, xaxis={"automargin": True}))


def _levers(story: Story) -> Figure | None:
    found = [lever for lever in story.levers if not lever.load] or list(story.levers)
    if not found:
        return None
    found.sort(key=lambda lever: lever.factor)
    middle = [100 * (lever.factor - 1) for lever in found]
    up = [100 * (x.high - x.factor) if x.high is not None else 0 for x in found]
    down = [100 * (x.factor - x.low) if x.low is not None else 0 for x in found]
    trace = {"type": "bar", "orientation": "h", "x": middle,
             "y": [_safe(f"{x.name} instead of {x.instead}") for x in found],
             "marker": {"color": [{1: GREEN, -1: RED, 0: GREY}[x.sign] for x in found]},
             "error_x": {"type": "data", "symmetric": False, "array": up, "arrayminus": down},
             "text": [f"{x.pairs} pairs" for x in found], "textposition": "none", "hoverinfo": "x+y+text"}
    return Figure("autotune-4-levers", (trace,), _layout(
        "What each choice is worth (95 % intervals; grey: not told apart from nothing)", "Change of the objective in %",
        "", height=160 + 26 * len(found), yaxis={"automargin": True}))


def _progress(story: Story, steps: Sequence[Step]) -> Figure:
    traces: list[dict[str, Any]] = []
    for kind, symbol, colour in (("feasible", "circle", BLUE), ("infeasible", "triangle-up-open", GREY),
                                 ("invalid", "x-thin-open", PURPLE), ("crashed", "x", RED)):
        some = [s for s in steps if s.kind == kind and (kind == "crashed" or s.record.value is not None)]
        if some:
            traces.append({"type": "scatter", "mode": "markers", "name": kind, "x": [s.launch for s in some],
                           "y": [0 if kind == "crashed" else s.record.value for s in some],
                           "marker": {"symbol": symbol, "color": colour, "size": 8}, "hoverinfo": "x+y+text",
                           "text": [_step(story, s) for s in some]})
    best = [s for s in steps if s.best is not None]
    traces.append({"type": "scatter", "mode": "lines", "name": "best so far", "x": [s.launch for s in best],
                   "y": [s.best for s in best], "line": {"color": GREEN, "shape": "hv"}, "hoverinfo": "skip"})
    shapes, notes = [], []
    for pivot in story.pivots:
        at = pivot.get("after_launches") or 0
        shapes.append(_vertical(at, PURPLE))
        notes.append({"x": at, "yref": "paper", "y": 1, "text": "pivot", "showarrow": False, "textangle": -90,
                      "xanchor": "left", "yanchor": "top", "hovertext": _safe(one_line(pivot.get("reason") or ""))})
    return Figure("autotune-5-progress", tuple(traces), _layout(
        "Search: objective by launch, crashes at zero, pivots dashed", "Launches", f"Objective ({story.unit})",
        shapes=shapes, annotations=notes))


def _vertical(at: float, colour: str) -> dict[str, Any]:
    """A dashed line over the whole height."""
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1,
            "line": {"color": colour, "dash": "dash"}}


def _step(story: Story, step: Step) -> str:
    if step.kind == "crashed":
        return _safe(f"trial {step.record.number}: {step.record.attrs.get('crash_category')}")
    error = step.record.attrs.get("relative_error")
    return f"trial {step.record.number}: {with_unit(step.record.value, story.unit)}" \
        + (f" ± {percent(error)}" if error is not None else "")


def _told(trial: int, config: Mapping[str, Any]) -> str:
    return _safe(f"trial {trial}: {config_text(config)}")


def _safe(text: str) -> str:
    """Text that plotly shows as it is: it reads a few HTML tags in labels."""
    return one_line(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _layout(title: str, x: str, y: str, **more: Any) -> dict[str, Any]:
    layout: dict[str, Any] = {"title": {"text": title, "font": {"size": 16}}, "hovermode": "closest",
                              "legend": {"orientation": "h", "y": -0.25}, "margin": {"t": 60, "r": 20}, **more}
    layout["xaxis"] = {"title": {"text": x}, **more.get("xaxis", {})}
    layout["yaxis"] = {"title": {"text": y}, **more.get("yaxis", {})}
    return layout
