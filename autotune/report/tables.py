"""Tables and key figures of a study as plain data: text only, never markup. Templates and the terminal lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autotune.records import Config, config_key
from autotune.report import measured, verdict
from autotune.report.charts import px
from autotune.report.crashes import fates
from autotune.report.levers import Lever
from autotune.report.measured import Tested, changes_text, choice_text, config_text, region_text, value_text
from autotune.report.story import Story
from autotune.space.space import server_key
from autotune.utils.text import count, number, one_line, percent, with_unit

Picture = Mapping[str, Any]  # a bar or a swatch: `kind` and coordinates, for templates/charts.jinja
BAR_WIDTH = 200
REACHES = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0)  # half-widths of the scale of levers, as shares
ACCEPTANCE = "accept_length"
MOST_SERVERS = 20  # servers in the table of acceptance lengths, best objective first
MOST_GROUPS = 40  # crash signatures shown
MATRIX = {"tokens_per_s": "tok/s", "per_request_tokens_per_s": "tok/s per request", "watts": "W",
          "tokens_per_j": "tok/J", ACCEPTANCE: "acceptance length", "ttft_p50_ms": "TTFT p50 ms", "wall_s": "wall s",
          "prompt_tokens": "prompt tokens"}
MATRIX_MAIN = ("tokens_per_s", "per_request_tokens_per_s", "watts", "tokens_per_j")


class Cell(NamedTuple):
    """A table cell. `tone` is good, bad, strong, muted or empty; `picture` replaces the text on the page."""

    text: str
    tone: str = ""
    picture: Picture | None = None


class Column(NamedTuple):
    """A column; narrow screens leave out an `optional` one."""

    title: str
    numeric: bool
    optional: bool


class Table(NamedTuple):
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    @property
    def css(self) -> str:
        needed = [c for c in self.columns if not c.optional]
        classes = {"stack": len(needed) > 3 and sum(not c.numeric for c in needed) > 2, "wide": len(self.columns) > 4,
                   "dense": len(self.columns) > 8}
        return " ".join(name for name, holds in classes.items() if holds)

    def filled(self) -> Table:
        """The table without columns that are empty in every row."""
        return self.only(*(c.title for i, c in enumerate(self.columns) if any(row[i].text for row in self.rows)))

    def only(self, *titles: str) -> Table:
        kept = [i for i, column in enumerate(self.columns) if column.title in titles]
        return Table(tuple(self.columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in self.rows),
                     self.caption)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Cell]], caption: str = "") -> Table:
    """A table. A leading ">" marks a column of numbers, "?" before it an optional one."""
    titles = tuple(Column(c.lstrip("?>"), c.lstrip("?").startswith(">"), c.startswith("?")) for c in columns)
    return Table(titles, tuple(tuple(Cell(c) if isinstance(c, str) else c for c in row) for row in rows), caption)


def nearest(story: Story) -> Table:
    """The best configurations of a study without a feasible one, with the limits that they break."""
    return table(("Trial", "Configuration", f">{story.unit}", "Breaks"), (
        (str(t.trial), config_text(t.config), number(t.value),
         ", ".join(f"{n} by {percent(t.ratios[n] - 1)}" for n in t.violated)) for t in story.measured[:5]))


def changes(story: Story, base: Tested, winner: Tested) -> Table:
    return table(("Choice", "Baseline", "Winner" if story.confirmed else "Best"), (
        (name, value_text(a), Cell(value_text(b), "strong"))
        for name, (a, b) in measured.changed(base.config, winner.config).items()),
        "What changes; every other choice is the baseline's")


def figures(story: Story) -> Table:
    """Every known figure of the baseline and the winner (where that is another) with the limits.

    Changes are those from the configuration that the verdict compares the winner with.
    """
    base, winner, reference = story.baseline, story.winner, story.reference
    limits = {measured.limited(limit.name): limit for limit in story.limits}
    rows = []
    for name in [*measured.FIGURES, *(n for n in limits if n not in measured.FIGURES)]:
        title, unit = measured.figure_title(name)
        a, same, b = (entry.figures.get(name) if entry else None for entry in (base, reference, winner))
        if a is not None or b is not None or name in limits:
            rows.append((title, with_unit(a, unit), with_unit(same, unit), with_unit(b, unit),
                         percent(b / same - 1, signed=True) if same and b is not None else "",
                         verdict.limit_words(limits[name]) if name in limits else ""))
    if base is winner:
        return table(("Figure", ">Baseline", "?Limit"), ((r[0], r[1], r[5]) for r in rows), "The baseline's figures")
    head = "Winner" if story.confirmed else "Best"
    shown = table(("Figure", ">Baseline", ">Its server at this load", f">{head}", ">Change", "?Limit"), rows, "Figures")
    return shown if reference is not base else shown.only("Figure", "Baseline", head, "Change", "Limit")


def shares(story: Story) -> Table:
    """The gain in its parts: of the server, of the load, and of both together."""
    parts = {"The server, under its load": story.shares.server,
             "The server, under the baseline's load": story.shares.server_before,
             "The load, on the baseline's server": story.shares.load, "Both together": story.shares.both}
    return table(("What was changed", ">Gain", "Interval"), (
        (what, percent(gain.share, signed=True), verdict.interval_text(gain))
        for what, gain in parts.items() if gain is not None), "The gain in its parts")


def finalists(story: Story) -> Table:
    """The best feasible configurations with the confirmation's results under equal load."""
    acceptance = any(ACCEPTANCE in entry.figures for entry in story.finalists)
    rows = []
    for entry in story.finalists:
        gain = story.stated(entry, story.confirmed_shares(entry))
        error = "" if entry.relative_error is None else f" ± {percent(entry.relative_error)}"
        changes = changes_text(story.space.baseline, entry.config) or "nothing: it is the baseline"
        rows.append((str(entry.trial), changes, f"{number(entry.value)}{error}",
                     *([number(entry.figures.get(ACCEPTANCE))] if acceptance else []),
                     percent(gain.share, signed=True) if gain else "", verdict.interval_text(gain) if gain else "",
                     verdict.finalist_words(story, entry)))
    return table(("Trial", "Differs from the baseline in", f">{story.unit}", *([">Acceptance length"] if acceptance
                  else []), ">Confirmed gain", "Interval", "Standing"), rows,
                 "Confirmed gains are the server's under equal load; of another load on the baseline's server, that "
                 "load's" if any(story.confirmed_gain(entry) for entry in story.finalists) else "")


def load(story: Story) -> Table | None:
    """Baseline and winner under each load, from matrix.json or else from the trials; None for fewer than two loads."""
    if not story.matrix:
        return _load_of_trials(story)
    loads: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for row in story.matrix:
        loads.setdefault((row["ctx"], row["concurrency"]), {})[row["config"]] = row
    names = sorted(dict.fromkeys(row["config"] for row in story.matrix), key=lambda name: name != "baseline")
    units = {k: MATRIX[k] for k in MATRIX_MAIN if any(k in row for row in story.matrix)}
    key = next((k for k in ("tokens_per_j", "tokens_per_s") if k in units), "")
    return _by_load((">Context", ">Concurrency"), [((_plain(ctx), _plain(level)), rows)
                                                  for (ctx, level), rows in sorted(loads.items())],
                    names, units, key, f">Change in {units.get(key)}")


def _load_of_trials(story: Story) -> Table | None:
    """The same from trials of the baseline's and the winner's server."""
    if story.winner is None:
        return None
    servers = {server_key(story.space, story.winner.config): "Winner",
               server_key(story.space, story.space.baseline): "Baseline"}
    found: dict[str, tuple[Config, dict[str, Mapping[str, Any]]]] = {}
    for entry in story.measured:
        name, load = servers.get(server_key(story.space, entry.config)), story.space.split(entry.config)[1]
        if name and load:
            found.setdefault(config_key(load), (load, {}))[1][name] = {**entry.figures, "": entry.value}
    if len(found) < 2:
        return None
    order = {(p.name, repr(choice)): i for p in story.space.load_params for i, choice in enumerate(p.choices)}
    ordered = sorted(found.values(), key=lambda pair: [order[name, repr(value)] for name, value in pair[0].items()])
    units = {"": story.unit} | ({"tokens_per_s": "tok/s"} if story.unit != "tok/s" else {})
    return _by_load(("Load",), [((config_text(load),), rows) for load, rows in ordered],
                    sorted(servers.values()), units, "", ">Change")


def _by_load(heads: Sequence[str], loads: Iterable[tuple[Sequence[str], Mapping[str, Mapping[str, Any]]]],
             names: Sequence[str], units: Mapping[str, str], key: str, change: str) -> Table:
    """A row for each load: figures `units` of every configuration in `names`, and the change of the figure `key`."""
    several = len(names) > 1 and key in units
    found = ((head, [rows.get(name, {}) for name in names]) for head, rows in loads)
    return table([*heads, *(f">{one_line(name)} {unit}" for name in names for unit in units.values()),
                  *([change] if several else [])], (
        [*head, *(_figure(row, k) for row in rows for k in units),
         *([_change(rows[0].get(key), rows[-1].get(key))] if several else [])] for head, rows in found))


def matrix_details(story: Story) -> Table | None:
    """The other figures of matrix.json; None without any."""
    rest = [k for k in MATRIX if k not in MATRIX_MAIN and any(k in r for r in story.matrix)]
    if not rest:
        return None
    return table(("Configuration", ">Context", ">Concurrency", *(f">{MATRIX[k]}" for k in rest), "Remark"), (
        (one_line(r["config"]), _plain(r["ctx"]), _plain(r["concurrency"]), *(_figure(r, k) for k in rest),
         one_line(r.get("remark") or "")) for r in story.matrix))


def _figure(row: Mapping[str, Any], key: str) -> Cell:
    if key in row:
        return Cell(_plain(row[key]))
    return Cell("crash", "bad") if row.get("crash_signature") else Cell("-", "muted")


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else one_line(value)


def _change(before: Any, now: Any) -> Cell:
    if not isinstance(before, int | float) or not isinstance(now, int | float) or before <= 0:
        return Cell("-", "muted")
    share = now / before - 1
    return Cell(percent(share, signed=True), "good" if share > 0 else "bad" if share < 0 else "")


def acceptance(story: Story) -> tuple[Table, int] | None:
    """(acceptance lengths by server and load, number of servers); None when none was measured."""
    servers: dict[str, list[Tested]] = {}
    for entry in story.measured:
        if ACCEPTANCE in entry.figures:
            servers.setdefault(server_key(story.space, entry.config), []).append(entry)
    if not servers:
        return None
    base_server = story.space.split(story.space.baseline)[0]
    base = {config_key(story.space.split(entry.config)[1]): entry for entry in story.measured
            if server_key(story.space, entry.config) == server_key(story.space, base_server)}
    speed = [] if story.unit == "tok/s" else [">tok/s"]
    rows: list[tuple[str, ...]] = []
    for group in list(servers.values())[:MOST_SERVERS]:
        for entry in sorted(group, key=lambda e: e.figures[ACCEPTANCE], reverse=True):
            server, load = story.space.split(entry.config)
            other = base.get(config_key(load), entry)
            gain = entry.value / other.value - 1 if other is not entry and other.value > 0 else None
            rows.append((str(entry.trial), changes_text(base_server, server) or "the baseline's",
                         config_text(load) or "-", f"{entry.figures[ACCEPTANCE]:.2f}",
                         *(number(entry.figures.get("tokens_per_s")) for _ in speed), number(entry.value),
                         percent(gain, signed=True)))
    return table(("Trial", "Server", "Load", ">Tokens per verify step", *speed, f">{story.unit}",
                  ">Against the baseline's server"), rows), len(servers)


def levers(found: Sequence[Lever], title: str) -> Table:
    widest = max(abs(lever.factor - 1) for lever in found)
    reach = next((r for r in REACHES if r >= widest), widest)
    scale = f"-{percent(reach)} to +{percent(reach)}".replace(" %", "%")
    return table(("Choice", "?Instead of", ">Change", scale, "?95 % interval", "?>Pairs"), (
        (x.name, x.instead, Cell(percent(x.factor - 1, signed=True), tone_of(x)), Cell("", picture=_interval(x, reach)),
         verdict.range_words(x.low, x.high), str(x.pairs)) for x in found), title)


def tone_of(lever: Lever) -> str:
    return {1: "good", -1: "bad", 0: ""}[lever.sign]


def _interval(lever: Lever, reach: float) -> Picture:
    """A lever's change on a scale from -reach to +reach (shares), zero in the middle."""
    def at(factor: float) -> str:
        return px(4 + (max(-reach, min(reach, factor - 1)) + reach) / (2 * reach or 1.0) * (BAR_WIDTH - 8))

    ends = None if lever.low is None or lever.high is None else (at(lever.low), at(lever.high))
    return {"kind": "interval", "css": {1: "up", -1: "down", 0: "flat"}[lever.sign], "zero": at(1),
            "middle": at(lever.factor), "ends": ends}


def crashes(story: Story) -> tuple[Table, Table]:
    """(crashes by signature, outcomes of the launches with each choice)."""
    names, outcomes = fates(story.space, story.records, story.crashes)

    def css(outcome: str) -> str:
        return outcome if outcome == "served" else f"sig{names.index(outcome if outcome in names else 'other') % 9}"

    groups = table(("Signature", ">Launches", "Stage", "Blame", "Category", "What happened", "Always with"), (
        (Cell(one_line(g.signature), picture={"kind": "swatch", "css": css(g.signature)}), str(g.launches),
         str(g.crash.stage), Cell(str(g.crash.blame), "strong"), one_line(g.crash.category),
         one_line(g.crash.explanation or g.crash.excerpt.strip()[-160:]),
         ", ".join(f"{choice_text(s.param, s.value)} ({s.crashed} of {s.launches})" for s in g.suspects))
        for g in story.crashes[:MOST_GROUPS]))
    return groups, table(("Choice", "?>Launches", ">Served", "Share", "?Crashes by signature"), (
        (choice_text(fate.param, fate.value), str(sum(fate.outcomes.values())), str(fate.outcomes.get("served", 0)),
         Cell("", picture=_shares(fate.outcomes, css)),
         ", ".join(f"{s}: {n}" for s, n in fate.outcomes.items() if s != "served")) for fate in outcomes),
        "How launches with each choice ended (green: served)")


def _shares(outcomes: Mapping[str, int], css: Callable[[str], str]) -> Picture:
    """Launches by outcome as shares of a bar; css: the style class of an outcome."""
    parts, at, launches = [], 0.0, sum(outcomes.values())
    for name, n in outcomes.items():
        width = BAR_WIDTH * n / launches
        parts.append({"css": css(name), "x": px(at), "width": px(width),
                      "title": f"{name}: {n} ({percent(n / launches)})"})
        at += width
    return {"kind": "shares", "parts": parts}


def pivots(story: Story) -> Table:
    return table(("After", "Decision", "Region", "Reason", "Evidence", "Reopens when"), (
        (count(int(pivot.get("after_launches") or 0), "launch", "launches"),
         Cell("given up", "bad") if pivot.get("action") == "close" else Cell("reopened", "good"),
         Cell(region_text(pivot.get("region") or {}), "strong"), one_line(pivot.get("reason") or ""),
         verdict.pivot_words(pivot), one_line(pivot.get("reopens_when") or "")) for pivot in story.pivots),
        "Pivots: regions given up, and why")


def untried(story: Story) -> Table:
    words = {"forbidden": "forbidden", "closed": "given up", "crashed": "only crashed",
             "shadowed": "confounded", "unreached": "not reached"}
    return table(("Choices", "Standing", "Why"), (
        (region_text({u.param: u.values}), Cell(words[u.kind], "muted"), one_line(u.why)) for u in story.untried))


def trials(story: Story) -> Table:
    return table((
        ">Trial", "?>Launch", "Differs from the baseline in", f">{story.unit}", "?>tok/s", "?>W", "Standing"), (
        (str(r.number), "" if r.launch_id is None else str(r.launch_id),
         changes_text(story.space.baseline, r.config, absent="-") or "baseline",
         number(r.value) if r.value is not None else "",
         *(number(x) if x else "" for x in map(r.figures.get, ("tokens_per_s", "watts"))),
         Cell(measured.standing(r), "bad" if r.crashed else "good" if r.feasible else "muted")) for r in story.records))
