"""The data behind every chart, for the report's SVG and the dashboard's plots alike. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from autotune.records import Config, Value, config_key
from autotune.report.story import Story
from autotune.report.tested import Tested, copied, valid
from autotune.report.verdict import is_baseline
from autotune.report.wording import FIGURES
from autotune.space.space import server_key
from autotune.storage.trial import TrialRecord

MOST_CURVES = 40
MOST_SIGNATURES = 8


@dataclasses.dataclass(frozen=True)
class Axis:
    """What an axis shows. `limits` are values that a limit of the study draws on it."""

    title: str
    unit: str
    limits: tuple[tuple[str, float], ...] = ()

    @property
    def label(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


@dataclasses.dataclass(frozen=True)
class Point:
    """One configuration in a plane. `role` is baseline, winner or empty."""

    entry: Tested
    x: float
    y: float
    role: str


@dataclasses.dataclass(frozen=True)
class Tradeoff:
    """Two things that are both better when larger, and the feasible points that no other one beats in both."""

    x: Axis
    y: Axis
    points: tuple[Point, ...]
    front: tuple[Point, ...]


@dataclasses.dataclass(frozen=True)
class Curve:
    """The objective of one launch over a load parameter's choices. `role` as for points."""

    launch: int
    role: str
    server: Config
    values: tuple[tuple[Value, float, bool], ...]
    """(choice, objective, feasible), in the order of the choices."""


@dataclasses.dataclass(frozen=True)
class Fate:
    """How launches with one choice ended: served, and crashes by signature."""

    param: str
    value: Value
    served: int
    crashed: dict[str, int]

    @property
    def launches(self) -> int:
        return self.served + sum(self.crashed.values())


@dataclasses.dataclass(frozen=True)
class Step:
    """One trial in the order of launches. `kind` is feasible, infeasible, invalid or crashed."""

    launch: int
    record: TrialRecord
    kind: str
    best: float | None


def tradeoff(story: Story) -> Tradeoff | None:
    """Throughput against energy efficiency; without energy, against the speed that one request sees."""
    efficiency = [t for t in story.measured if "tokens_per_j" in t.figures and "tokens_per_s" in t.figures]
    if len(efficiency) >= 2:
        y, rows = _axis(story, "tokens_per_j"), [(t, t.figures["tokens_per_j"]) for t in efficiency]
    else:
        y = Axis("Speed of one request", "tok/s")
        rows = [(t, 1000 / t.figures["tpot_p50_ms"]) for t in story.measured if t.figures.get("tpot_p50_ms")]
    points = tuple(Point(t, t.figures["tokens_per_s"], value, role(story, t)) for t, value in rows
                   if "tokens_per_s" in t.figures)
    if len(points) < 2:
        return None
    return Tradeoff(_axis(story, "tokens_per_s"), y, points, front(p for p in points if p.entry.feasible))


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Points that no other one equals or beats in both directions, by rising x."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x, -p.y)):
        if not kept or point.y > kept[-1].y:
            kept.append(point)
    return tuple(reversed(kept))


def role(story: Story, entry: Tested) -> str:
    if is_baseline(story, entry):
        return "baseline"
    return "winner" if entry is story.winner else ""


def load_axis(story: Story) -> str | None:
    """The load parameter that curves are drawn over: concurrency where there is one."""
    names = [p.name for p in story.space.load_params if p.numeric and len(p.choices) > 1]
    return "concurrency" if "concurrency" in names else next(iter(names), None)


def curves(story: Story) -> tuple[Curve, ...]:
    """One curve for each launch measured under several loads; those of baseline and winner first, then the best."""
    name = load_axis(story)
    if name is None:
        return ()
    choices = {repr(c): i for i, c in enumerate(story.space.param(name).choices)}
    groups: dict[tuple[int | None, str], list[TrialRecord]] = {}
    for record in story.records:
        if valid(record) and not copied(record) and name in record.config:
            rest = {k: v for k, v in record.config.items() if k != name}
            groups.setdefault((record.launch_id, config_key(rest)), []).append(record)
    winner = server_key(story.space, story.winner.config) if story.winner else None
    base = server_key(story.space, story.space.baseline)
    found = []
    for (launch, _), members in groups.items():
        levels = {repr(r.config[name]): r for r in members}
        if len(levels) < 2 or launch is None:
            continue
        ordered = sorted(levels.values(), key=lambda r: choices.get(repr(r.config[name]), 0))
        server = story.space.split(members[0].config)[0]
        key = config_key(server)
        part = "winner" if key == winner and key != base else "baseline" if key == base else ""
        found.append(Curve(launch, part, server,
                           tuple((r.config[name], float(r.value or 0), r.feasible) for r in ordered)))
    found.sort(key=lambda c: (c.role == "", -max(v for _, v, _ in c.values)))
    return tuple(found[:MOST_CURVES])


def fates(story: Story) -> tuple[tuple[str, ...], tuple[Fate, ...]]:
    """(signatures, how launches ended for each server choice); signatures beyond the most frequent are "other"."""
    named = tuple(g.signature for g in story.crashes[:MOST_SIGNATURES])
    ended: dict[int, tuple[Config, str | None]] = {}
    for record in story.records:
        if copied(record) or record.state not in ("COMPLETE", "PRUNED"):
            continue
        key = record.launch_id if record.launch_id is not None else -1 - record.number
        signature = record.attrs.get("crash_signature")
        if key not in ended or (ended[key][1] is None and signature is not None):
            ended[key] = (record.config, signature)
    counted: dict[tuple[str, str], dict[str | None, int]] = {}
    for config, signature in ended.values():
        told = signature if signature is None or signature in named else "other"
        for name, value in config.items():
            fate = counted.setdefault((name, repr(value)), {})
            fate[told] = fate.get(told, 0) + 1
    rows = []
    for param in story.space.server_params:
        for value in param.choices:
            fate = counted.get((param.name, repr(value)), {})
            rows.append(Fate(param.name, value, fate.get(None, 0), {s: n for s, n in fate.items() if s is not None}))
    others = ("other",) if len(story.crashes) > MOST_SIGNATURES else ()
    return named + others, tuple(rows)


def progress(story: Story) -> tuple[Step, ...]:
    """Every finished trial in order, with the best feasible objective so far. Launches are counted from 1."""
    order: dict[int, int] = {}
    best: float | None = None
    steps = []
    for record in story.records:
        if record.state not in ("COMPLETE", "PRUNED"):
            continue
        key = record.launch_id if record.launch_id is not None else -1 - record.number
        launch = order.setdefault(key, len(order) + 1)
        if record.crashed:
            kind = "crashed"
        elif not valid(record):
            kind = "invalid"
        else:
            kind = "feasible" if record.feasible else "infeasible"
        if kind == "feasible" and record.value is not None and (best is None or record.value > best):
            best = record.value
        steps.append(Step(launch, record, kind, best))
    return tuple(steps)


def _axis(story: Story, name: str) -> Axis:
    title, unit = FIGURES[name]
    drawn = tuple((limit.name, limit.limit) for limit in story.limits
                  if limit.name.removeprefix("max_").removeprefix("min_") == name)
    return Axis(title, unit, drawn)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from below `low` to above `high`, 1, 2 or 5 times a power of ten apart."""
    span = high - low or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]
