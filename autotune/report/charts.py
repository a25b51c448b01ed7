"""Charts as hand-written SVG: no script, no network, colours from the page's style sheet.

Each has a title and a description for readers who do not see it, and a native tooltip for every mark.
Marks differ in shape as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.engine.spec import text
from autotune.report.markup import Markup, el, join
from autotune.report.series import Axis, Curve, Point, Step, Tradeoff, ticks
from autotune.report.story import Story
from autotune.report.wording import config_text, number, one_line, percent, with_unit

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 44
Scale = Callable[[float], float]


def tradeoff_chart(story: Story, data: Tradeoff) -> Markup:
    """Every configuration in the plane of two goods, the front of the feasible ones, baseline and winner."""
    xs, ys = [p.x for p in data.points], [p.y for p in data.points]
    xt, yt = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    x, y = scale(xt, LEFT, WIDTH - RIGHT), scale(yt, HEIGHT - BOTTOM, TOP)
    body = [axes(data.x, data.y, xt, yt, x, y)]
    for value, (name, limit) in [(x(v), (n, v)) for n, v in data.x.limits if xt[0] <= v <= xt[-1]]:
        body.append(el("line", x1=f(value), x2=f(value), y1=TOP, y2=HEIGHT - BOTTOM, class_="limit"))
        body.append(el("text", f"{name} {number(limit)}", x=f(value + 3), y=TOP + 10, class_="note"))
    steps = []
    for i, p in enumerate(data.front):
        steps.append(f"{f(x(p.x))},{f(y(p.y))}")
        if i + 1 < len(data.front):
            steps.append(f"{f(x(p.x))},{f(y(data.front[i + 1].y))}")
    body.append(el("polyline", points=" ".join(steps), class_="front"))
    ordered = sorted(data.points, key=lambda p: (p.role != "", p.entry.feasible))
    body += [_mark(p, x(p.x), y(p.y), data) for p in ordered]
    desc = (f"{len(data.points)} configurations; {len(data.front)} on the front of those within limits. Up and to the "
            "right is better.")
    return svg("tradeoff", f"{data.x.title} against {data.y.title.lower()}", desc, body)


def _mark(point: Point, x: float, y: float, data: Tradeoff) -> Markup:
    entry = point.entry
    words = (f"trial {entry.trial}: {with_unit(point.x, data.x.unit)}, {with_unit(point.y, data.y.unit)}"
             + ("" if entry.feasible else f", breaks {', '.join(entry.violated) or 'a limit'}"))
    if point.role == "winner":
        shape = el("path", el("title", f"winner, {words}"), d=star(x, y, 9), class_="winner")
    elif point.role == "baseline":
        shape = el("path", el("title", f"baseline, {words}"), d=diamond(x, y, 7), class_="baseline")
    elif entry.feasible:
        shape = el("circle", el("title", words), cx=f(x), cy=f(y), r=3.5, class_="good")
    else:
        shape = el("path", el("title", words), d=triangle(x, y, 4.5), class_="over")
    if not point.role:
        return shape
    side = "end" if x > WIDTH * 0.7 else "start"
    return join([shape, el("text", point.role, x=f(x + (-12 if side == "end" else 12)), y=f(y + 4),
                           text_anchor=side, class_="tag")])


def curves_chart(story: Story, data: Sequence[Curve], name: str) -> Markup:
    """The objective of every launch over the load; baseline and winner stand out."""
    seen = {repr(v) for curve in data for v, _, _ in curve.values}
    choices = [c for c in story.space.param(name).choices if repr(c) in seen]
    where = {repr(c): i for i, c in enumerate(choices)}
    values = [v for curve in data for _, v, _ in curve.values]
    yt = ticks(0, max(values))
    y = scale(yt, HEIGHT - BOTTOM, TOP)
    x = scale([-0.15, max(len(choices) - 1, 1) + 0.15], LEFT, WIDTH - RIGHT)
    labels = [(x(i), one_line(text(c))) for i, c in enumerate(choices)]
    body = [axes(Axis(name, ""), Axis("Objective", story.unit), [], yt, x, y, labels)]
    for curve in sorted(data, key=lambda c: c.role != ""):
        points = [(x(where[repr(v)]), y(value), ok) for v, value, ok in curve.values]
        line = " ".join(f"{f(px)},{f(py)}" for px, py, _ in points)
        told = f"launch {curve.launch}{f', {curve.role}' if curve.role else ''}: {config_text(curve.server)}"
        marks = [el("circle", cx=f(px), cy=f(py), r=3.5 if curve.role else 2, class_="dot" if ok else "dot hollow")
                 for px, py, ok in points]
        body.append(el("g", el("title", told), el("polyline", points=line), marks, class_=f"curve {curve.role}"))
    for part in ("baseline", "winner"):
        first = next((c for c in data if c.role == part), None)
        if first is not None:
            last, value, _ = first.values[-1]
            body.append(el("text", part, x=f(x(where[repr(last)]) - 4), y=f(y(value) - 8), text_anchor="end",
                           class_=f"tag {part}"))
    return svg("curves", f"Objective over {name}, one line a launch",
               f"{len(data)} launches measured under several loads.", body)


def progress_chart(story: Story, steps: Sequence[Step]) -> Markup:
    """Objective of every trial by launch, the best so far, crashes along the bottom, pivots as vertical lines."""
    values = [s.record.value for s in steps if s.kind in ("feasible", "infeasible") and s.record.value is not None]
    yt = ticks(0, max(values, default=1.0))
    last = max((s.launch for s in steps), default=1)
    xt = [t for t in ticks(0, last) if t <= last and t == int(t)]
    floor = HEIGHT - BOTTOM - 14
    x, y = scale([0, last + 0.5], LEFT, WIDTH - RIGHT), scale(yt, floor, TOP)
    body = [axes(Axis("Launches", ""), Axis("Objective", story.unit), xt, yt, x, y)]
    for pivot in story.pivots:
        at = float(pivot.get("after_launches") or 0)
        if 0 <= at <= last:
            body.append(el("line", el("title", one_line(f"{pivot.get('action')}: {pivot.get('reason')}")),
                           x1=f(x(at)), x2=f(x(at)), y1=TOP, y2=HEIGHT - BOTTOM, class_=f"pivot {pivot.get('action')}"))
    line: list[str] = []
    before: float | None = None
    for step in steps:
        if step.best is not None and step.best != before:
            if before is not None:
                line.append(f"{f(x(step.launch))},{f(y(before))}")
            line.append(f"{f(x(step.launch))},{f(y(step.best))}")
            before = step.best
    if before is not None:
        line.append(f"{f(x(last))},{f(y(before))}")
    body.append(el("polyline", points=" ".join(line), class_="best"))
    for step in steps:
        told = el("title", f"trial {step.record.number}: {_step_words(story, step)}")
        px, value = x(step.launch), step.record.value
        if step.kind == "crashed":
            body.append(el("path", told, d=cross(px, HEIGHT - BOTTOM - 7, 3), class_="crash"))
        elif step.kind == "feasible" and value is not None:
            body.append(el("circle", told, cx=f(px), cy=f(y(value)), r=3, class_="good"))
        elif value is not None:
            body.append(el("path", told, d=triangle(px, y(value), 4), class_="over"))
    crashes = sum(s.kind == "crashed" for s in steps)
    return svg("progress", "Objective over launches", f"{len(steps)} trials, {crashes} crashed, "
               f"{len(story.pivots)} pivots (dashed lines). The line is the best so far.", body)


def _step_words(story: Story, step: Step) -> str:
    if step.kind == "crashed":
        return one_line(f"crashed, {step.record.attrs.get('crash_category')}")
    return f"{with_unit(step.record.value, story.unit)}, {step.kind}"


def interval_bar(factor: float, low: float | None, high: float | None, reach: float) -> Markup:
    """A lever's change on a common scale from -reach to +reach, zero in the middle."""
    width, height = 200, 18
    x = scale([-reach, reach], 4, width - 4)
    at = x(max(-reach, min(reach, factor - 1)))
    parts = [el("line", x1=f(x(0)), x2=f(x(0)), y1=0, y2=height, class_="zero")]
    kind = "flat"
    if low is not None and high is not None:
        kind = "up" if low > 1 else "down" if high < 1 else "flat"
        ends = [x(max(-reach, min(reach, v - 1))) for v in (low, high)]
        parts.append(el("line", x1=f(ends[0]), x2=f(ends[1]), y1=9, y2=9, class_=f"range {kind}"))
    parts.append(el("circle", cx=f(at), cy=9, r=4, class_=f"mid {kind}"))
    return el("svg", *parts, viewBox=f"0 0 {width} {height}", class_="bar", aria_hidden="true")


def fate_bar(served: int, crashed: Sequence[tuple[str, int]], names: Sequence[str]) -> Markup:
    """How launches with a choice ended, as shares of a bar."""
    total = served + sum(n for _, n in crashed)
    width, height = 200, 14
    parts, at = [], 0.0
    for key, n in [("served", served), *crashed]:
        part = width * n / total if total else 0
        kind = "served" if key == "served" else f"sig{names.index(key) % 9}"
        if n:
            parts.append(el("rect", el("title", f"{key}: {n} ({percent(n / total)})"), x=f(at), y=0, width=f(part),
                            height=height, class_=kind))
        at += part
    return el("svg", *parts, viewBox=f"0 0 {width} {height}", class_="bar", aria_hidden="true",
              preserveAspectRatio="none")


def swatch(position: int) -> Markup:
    """The colour of a signature in `fate_bar`."""
    return el("svg", el("rect", width=10, height=10, class_=f"sig{position % 9}"), viewBox="0 0 10 10", class_="swatch",
              aria_hidden="true")


def svg(name: str, title: str, desc: str, body: Sequence[Markup]) -> Markup:
    """A chart with its accessible name."""
    return el("svg", el("title", title, id=f"{name}-t"), el("desc", desc, id=f"{name}-d"), *body,
              viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart", aria_labelledby=f"{name}-t {name}-d")


def axes(x_axis: Axis, y_axis: Axis, xt: Sequence[float], yt: Sequence[float], x: Scale, y: Scale,
         labels: Sequence[tuple[float, str]] = ()) -> Markup:
    """Grid, ticks and titles."""
    base = HEIGHT - BOTTOM
    parts = [el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f(y(t)), y2=f(y(t)), class_="grid") for t in yt]
    parts += [el("text", tick(t, yt), x=LEFT - 6, y=f(y(t) + 4), text_anchor="end", class_="tick") for t in yt]
    marks = list(labels) or [(x(t), tick(t, xt)) for t in xt]
    parts += [el("text", told, x=f(at), y=base + 16, text_anchor="middle", class_="tick") for at, told in marks]
    parts += [el("line", x1=f(at), x2=f(at), y1=base, y2=base + 4, class_="axis") for at, _ in marks]
    parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, class_="axis"))
    parts.append(el("text", x_axis.label, x=f((LEFT + WIDTH - RIGHT) / 2), y=HEIGHT - 8, text_anchor="middle",
                    class_="axis-title"))
    middle = (TOP + base) / 2
    parts.append(el("text", y_axis.label, x=14, y=f(middle), text_anchor="middle", class_="axis-title",
                    transform=f"rotate(-90 14 {f(middle)})"))
    return join(parts)


def scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A linear map from the range of `values` to start..end."""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return lambda v: start + (v - low) / span * (end - start)


def tick(value: float, among: Sequence[float]) -> str:
    """A tick's label with as many decimals as its neighbours need."""
    step = among[1] - among[0] if len(among) > 1 else abs(value) or 1.0
    decimals = next((d for d in range(7) if abs(round(step, d) - step) < step * 1e-6), 6)
    return f"{value:,.{decimals}f}"


def f(value: float) -> str:
    """A coordinate with one decimal."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def star(x: float, y: float, r: float) -> str:
    points = [(x + (r if i % 2 == 0 else r * 0.45) * math.sin(i * math.pi / 5),
               y - (r if i % 2 == 0 else r * 0.45) * math.cos(i * math.pi / 5)) for i in range(10)]
    return "M" + "L".join(f"{f(a)},{f(b)}" for a, b in points) + "Z"


def diamond(x: float, y: float, r: float) -> str:
    return f"M{f(x)},{f(y - r)}L{f(x + r)},{f(y)}L{f(x)},{f(y + r)}L{f(x - r)},{f(y)}Z"


def triangle(x: float, y: float, r: float) -> str:
    return f"M{f(x)},{f(y - r)}L{f(x + r)},{f(y + r * 0.8)}L{f(x - r)},{f(y + r * 0.8)}Z"


def cross(x: float, y: float, r: float) -> str:
    return f"M{f(x - r)},{f(y - r)}L{f(x + r)},{f(y + r)}M{f(x - r)},{f(y + r)}L{f(x + r)},{f(y - r)}"
