"""Figures of a study: one description each, drawn as SVG on the page and as plotly JSON in optuna-dashboard.

    figure = tradeoff(story)       # or load_curves, progress; None without data
    figure.plotly()                # data for optuna-dashboard; templates/charts.jinja draws the SVG
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from autotune.records import Config, config_key
from autotune.report.crashes import launch_key
from autotune.report.measured import FIGURES, config_text, copied, ended, limited, valid, value_text
from autotune.report.story import Story
from autotune.space.space import server_key
from autotune.storage.trial import TrialRecord
from autotune.utils.text import number, one_line, percent, with_unit

BLUE, GREEN, ORANGE, RED, GREY, PURPLE = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#7D7D7D", "#CC79A7"
MOST_CURVES = 40
MOST_CURVES_PLOTLY = 15
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 320, 56, 14, 14, 44  # of an SVG chart, with its margins
STRIP = 14  # height of the strip for crashes, below the zero of the y axis


class Mark(NamedTuple):
    """Appearance of one kind of point: style class, shape and radius in SVG; symbol, colour and size in plotly."""

    css: str
    shape: str
    radius: float
    symbol: str
    colour: str
    size: int


MARKS = {"feasible": Mark("good", "circle", 3, "circle", BLUE, 8),
         "infeasible": Mark("over", "triangle", 4.5, "triangle-up-open", GREY, 9),
         "invalid": Mark("over", "triangle", 4.5, "x-thin-open", PURPLE, 8),
         "crashed": Mark("crash", "cross", 3, "x", RED, 8),
         "baseline": Mark("baseline", "diamond", 7, "diamond", ORANGE, 14),
         "winner": Mark("winner", "star", 9, "star", GREEN, 16)}
LINES = {"front": BLUE, "best": GREEN}
Point = tuple[float, float, str, Config]  # x, y, tooltip, configuration


class Axis(NamedTuple):
    """`labels`, where given, name the positions 0, 1, 2, ... of an axis of categories."""

    title: str
    unit: str
    ticks: tuple[float, ...]
    low: float
    high: float
    labels: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Position and label of each tick."""
        return [(t, self.labels[int(t)] if self.labels else _tick(t, self.ticks)) for t in self.ticks]


class Trace(NamedTuple):
    """Points of one kind, a line (`kind` front or best, with its `step` shape), or the curve of one launch.

    `texts` are tooltips of the points, `configs` their configurations, `tag` is a label in the picture. A curve has a
    `role` (baseline, winner or empty), one tooltip `about`, and hollow points where `feasible` is false.
    """

    name: str
    kind: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    texts: tuple[str, ...] = ()
    configs: tuple[Config, ...] = ()
    step: str = ""
    tag: str = ""
    role: str = ""
    about: str = ""
    feasible: tuple[bool, ...] = ()


class Rule(NamedTuple):
    """A vertical line at `x`: a limit with a label, or a pivot with a tooltip."""

    x: float
    css: str
    label: str = ""
    about: str = ""


class Figure(NamedTuple):
    """`traces`: the last one in front. `strip`: room below zero for crashes. `description`: read instead of seen."""

    name: str
    title: str
    description: str
    caption: str
    x: Axis
    y: Axis
    traces: tuple[Trace, ...]
    rules: tuple[Rule, ...] = ()
    strip: bool = False

    def left(self, x: float) -> float:
        """The x coordinate of a value in the SVG."""
        return LEFT + (x - self.x.low) / (self.x.high - self.x.low or 1.0) * (WIDTH - RIGHT - LEFT)

    def top(self, y: float, trace: Trace | None = None) -> float:
        """The y coordinate of a value in the SVG; crashes lie in the strip."""
        if trace is not None and trace.kind == "crashed":
            return HEIGHT - BOTTOM - STRIP / 2
        floor = HEIGHT - BOTTOM - (STRIP if self.strip else 0)
        return floor - (y - self.y.low) / (self.y.high - self.y.low or 1.0) * (floor - TOP)

    def points(self, trace: Trace) -> str:
        """The `points` of a polyline; the corners of steps included."""
        at = [(self.left(x), self.top(y)) for x, y in zip(trace.x, trace.y, strict=True)]
        if trace.step:
            corners = [(b[0], a[1]) if trace.step == "hv" else (a[0], b[1]) for a, b in zip(at, at[1:], strict=False)]
            at = [p for pair in zip(at, [*corners, at[-1]], strict=True) for p in pair] if at else []
        return " ".join(f"{px(x)},{px(y)}" for x, y in at)

    def plotly(self) -> dict[str, Any]:
        curves = [t for t in self.traces if t.kind == "curve"]
        shown = [t for t in self.traces if t.kind != "curve"] + curves[:-MOST_CURVES_PLOTLY - 1:-1]
        labels = self.x.labels
        axis = {"type": "category", "categoryorder": "array", "categoryarray": list(labels)} if labels else {}
        shapes = [{"type": "line", "x0": r.x, "x1": r.x, "yref": "paper", "y0": 0, "y1": 1,
                   "line": {"color": RED if r.css == "limit" else PURPLE, "dash": "dash"}} for r in self.rules]
        notes = [{"x": r.x, "yref": "paper", "y": 1, "text": "pivot", "showarrow": False, "textangle": -90,
                  "xanchor": "left", "yanchor": "top", "hovertext": plain(r.about)} for r in self.rules if r.about]
        return {"data": [_plotly(t, labels) for t in shown],
                "layout": layout(self.title, self.x.label, self.y.label, xaxis=axis, shapes=shapes, annotations=notes)}


def _plotly(trace: Trace, labels: Sequence[str]) -> dict[str, Any]:
    x = [labels[int(v)] for v in trace.x] if labels else list(trace.x)
    data: dict[str, Any] = {"type": "scatter", "name": trace.name, "x": x, "y": list(trace.y), "hoverinfo": "x+y+text"}
    if trace.kind == "curve":
        colour = MARKS[trace.role].colour if trace.role else GREY
        return data | {
            "mode": "lines+markers", "showlegend": bool(trace.role), "opacity": 1 if trace.role else 0.6,
            "line": {"color": colour, "width": 3 if trace.role else 1}, "text": [plain(trace.about)] * len(x),
            "marker": {"symbol": ["circle" if ok else "circle-open" for ok in trace.feasible]}}
    if trace.kind in LINES:
        return data | {"mode": "lines", "line": {"color": LINES[trace.kind], "shape": trace.step}, "hoverinfo": "skip"}
    mark = MARKS[trace.kind]
    return data | {"mode": "markers", "marker": {"symbol": mark.symbol, "color": mark.colour, "size": mark.size},
                   "text": [plain(f"{words}: {config_text(config)}")
                            for words, config in zip(trace.texts, trace.configs, strict=True)]}


def plain(text: str) -> str:
    """Text that plotly shows literally: it reads a few HTML tags in labels."""
    return html.escape(one_line(text), quote=False)


def layout(title: str, x: str, y: str, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": title, "font": {"size": 16}}, "hovermode": "closest",
                             "legend": {"orientation": "h", "y": -0.25}, "margin": {"t": 60, "r": 20}, **more}
    return found | {"xaxis": {"title": {"text": x}, **more.get("xaxis", {})},
                    "yaxis": {"title": {"text": y}, **more.get("yaxis", {})}}


def tradeoff(story: Story) -> Figure | None:
    """Throughput against energy efficiency; without energy, against the speed of one request."""
    title, unit = FIGURES["tokens_per_j"]
    measured = [(t.figures["tokens_per_s"], t) for t in story.measured if "tokens_per_s" in t.figures]
    points = [(x, t.figures["tokens_per_j"], t) for x, t in measured if "tokens_per_j" in t.figures]
    if len(points) < 2:
        title, unit = "Speed of one request", "tok/s"
        points = [(x, 1000 / t.figures["tpot_p50_ms"], t) for x, t in measured if t.figures.get("tpot_p50_ms")]
    if len(points) < 2:
        return None
    x_title, x_unit = FIGURES["tokens_per_s"]
    names = {"infeasible": "breaks a limit", "feasible": "within limits", "baseline": "", "winner": ""}
    kinds: dict[str, list[Point]] = {kind: [] for kind in names}
    for x, y, t in points:
        kind = "baseline" if story.is_baseline(t) else "winner" if t is story.winner else \
            "feasible" if t.feasible else "infeasible"
        words = f"trial {t.trial}: {with_unit(x, x_unit)}, {with_unit(y, unit)}" \
            + ("" if t.feasible else f", breaks {', '.join(t.violated) or 'a limit'}")
        kinds[kind].append((x, y, words if names[kind] else f"{kind}, {words}", t.config))
    front = _front((x, y) for x, y, t in points if t.feasible)
    traces = [Trace("Pareto front", "front", tuple(x for x, _ in front), tuple(y for _, y in front), step="vh")]
    traces += [_marks(name or kind, kind, kinds[kind], tag="" if name else kind)
               for kind, name in names.items() if kinds[kind]]
    rules = tuple(Rule(limit.limit, "limit", f"{limit.name} {number(limit.limit)}") for limit in story.limits
                  if limited(limit.name) == "tokens_per_s")
    about = f"{x_title} against {title.lower()}"
    return Figure(
        "tradeoff", about, f"{len(points)} configurations; {len(front)} on the front of those within limits. Up and to "
        "the right is better.", f"{about}. The line joins configurations within limits that no other one beats in "
        "both; triangles break one.", _axis(x_title, x_unit, [p[0] for p in points]),
        _axis(title, unit, [p[1] for p in points]), tuple(traces), rules)


def _marks(name: str, kind: str, points: Sequence[Point], tag: str = "") -> Trace:
    x, y, texts, configs = zip(*points, strict=True)
    return Trace(name, kind, x, y, texts, configs, tag=tag)


def _front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other one equals or beats in both directions, by rising x."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def load_curves(story: Story) -> Figure | None:
    """The objective over concurrency (or another load parameter), a curve for each launch; the best ones in front."""
    space, found = story.space, [p for p in story.space.load_params if p.numeric and len(p.choices) > 1]
    param = min(found, key=lambda p: p.name != "concurrency", default=None)
    if param is None:
        return None
    name, order = param.name, [repr(c) for c in param.choices]
    groups: dict[tuple[int, str], dict[int, TrialRecord]] = {}
    for record in story.records:
        if valid(record) and not copied(record) and repr(record.config.get(name)) in order \
                and record.launch_id is not None:
            rest = config_key({k: v for k, v in record.config.items() if k != name})
            groups.setdefault((record.launch_id, rest), {})[order.index(repr(record.config[name]))] = record
    roles = {server_key(space, story.winner.config): "winner"} if story.winner else {}
    roles[server_key(space, space.baseline)] = "baseline"
    curves = [(roles.get(server_key(space, levels[min(levels)].config), ""), launch, levels)
              for (launch, _), levels in groups.items() if len(levels) > 1]
    curves.sort(key=lambda curve: (curve[0] == "", -max(r.value or 0 for r in curve[2].values())))
    shown = sorted({i for _, _, levels in curves[:MOST_CURVES] for i in levels})
    traces: list[Trace] = []
    for role, launch, levels in curves[:MOST_CURVES]:
        title = f"launch {launch}" + (f", {role}" if role else "")
        members = [levels[i] for i in sorted(levels)]
        traces.append(Trace(
            title, "curve", tuple(shown.index(i) for i in sorted(levels)), tuple(r.value or 0.0 for r in members),
            tag="" if role in [t.role for t in traces] else role, role=role,
            about=f"{title}: {config_text(space.split(members[0].config)[0])}",
            feasible=tuple(r.feasible for r in members)))
    if not traces:
        return None
    x = Axis(name, "", tuple(range(len(shown))), -0.15, max(len(shown) - 1, 1) + 0.15,
             tuple(value_text(param.choices[i]) for i in shown))
    return Figure("load", f"Objective over {name}, one line a launch", f"{len(traces)} launches measured under several "
                  f"loads.", f"Objective over {name}: one line a launch; hollow dots break a limit.", x,
                  _axis("Objective", story.unit, [0, *(v for t in traces for v in t.y)]), tuple(traces[::-1]))


def progress(story: Story) -> Figure | None:
    """The objective of every trial by launch, the best so far, crashes below zero, pivots as vertical lines."""
    launches: dict[int, int] = {}  # launch key: its number, counted from 1
    kinds: dict[str, list[Point]] = {kind: [] for kind in ("infeasible", "invalid", "crashed", "feasible")}
    best: list[tuple[int, float]] = []
    trials = [r for r in story.records if ended(r)]
    for r in trials:
        launch = launches.setdefault(launch_key(r), len(launches) + 1)
        kind = "crashed" if r.crashed else "invalid" if not valid(r) else "feasible" if r.feasible else "infeasible"
        if r.crash is not None:
            kinds[kind].append((launch, 0.0, one_line(f"trial {r.number}: crashed, {r.crash.category}"), r.config))
        elif r.value is not None:
            error = r.measurement.relative_error if r.measurement is not None else None
            spread = "" if error is None else f" ± {percent(error)}"
            kinds[kind].append((launch, r.value, f"trial {r.number}: {with_unit(r.value, story.unit)}{spread}, {kind}",
                                r.config))
            if kind == "feasible" and (not best or r.value > best[-1][1]):
                best.append((launch, r.value))
    if not launches:
        return None
    last = len(launches)
    traces = [_marks(kind, kind, points) for kind, points in kinds.items() if points]
    if best:
        best.append((last, best[-1][1]))
        x, y = zip(*best, strict=True)
        traces.insert(0, Trace("best so far", "best", x, y, step="hv"))
    rules = tuple(Rule(float(p.get("after_launches") or 0), f"pivot {p.get('action')}",
                       about=one_line(f"{p.get('action')}: {p.get('reason')}")) for p in story.pivots)
    return Figure(
        "progress", "Objective over launches", f"{len(trials)} trials, {len(kinds['crashed'])} "
        f"crashed, {len(rules)} pivots (dashed lines). The line is the best so far.",
        "Every trial by launch, the best so far as a line, crashes along the bottom, pivots as dashed lines.",
        Axis("Launches", "", tuple(t for t in ticks(0, last) if t <= last and t == int(t)), 0, last + 0.5),
        _axis("Objective", story.unit, [0, max((y for kind in ("feasible", "infeasible") for _, y, *_ in kinds[kind]),
                                               default=1.0)]), tuple(traces), rules, strip=True)


def px(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def path(shape: str, x: float, y: float, r: float) -> str:
    if shape == "cross":
        return f"M{px(x - r)},{px(y - r)}L{px(x + r)},{px(y + r)}M{px(x - r)},{px(y + r)}L{px(x + r)},{px(y - r)}"
    points = {"diamond": [(0.0, -1.0), (1.0, 0.0), (0.0, 1.0), (-1.0, 0.0)],
              "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
              "star": [((1.0, 0.45)[i % 2] * math.sin(i * math.pi / 5), -(1.0, 0.45)[i % 2] * math.cos(i * math.pi / 5))
                       for i in range(10)]}[shape]
    return "M" + "L".join(f"{px(x + r * a)},{px(y + r * b)}" for a, b in points) + "Z"


def _axis(title: str, unit: str, values: Sequence[float]) -> Axis:
    found = ticks(min(values), max(values))
    return Axis(title, unit, found, found[0], found[-1])


def ticks(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Round values from below `low` to above `high`, 1, 2 or 5 times a power of ten apart."""
    span = high - low or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, max(last, first + 1) + 1))


def _tick(value: float, among: Sequence[float]) -> str:
    """A tick's label with as many decimals as the distance to its neighbours needs."""
    step = among[1] - among[0] if len(among) > 1 else abs(value) or 1.0
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step * 1e-6), 6)
    return f"{value:,.{decimals}f}"
