"""How many tokens each verify step of speculation gave, by server and load."""

from __future__ import annotations

from autotune.records import config_key
from autotune.report.blocks import Para, Section, Table
from autotune.report.levers import changed
from autotune.report.story import Story
from autotune.report.tested import Tested
from autotune.report.wording import config_text, number, one_line, percent

FIGURE = "accept_length"
SHOWN = 20
"""Servers with rows in the table; best objective first."""


def acceptance(story: Story) -> Section | None:
    """Every configuration whose acceptance length was measured; None when there is none."""
    entries = [entry for entry in story.measured if FIGURE in entry.figures]
    if not entries:
        return None
    split = story.space.split
    servers: dict[str, list[Tested]] = {}
    for entry in entries:
        servers.setdefault(config_key(split(entry.config)[0]), []).append(entry)
    plain = {config_key(split(e.config)[1]): e for e in story.measured
             if config_key(split(e.config)[0]) == config_key(split(story.space.baseline)[0])}
    rows: list[tuple[str, ...]] = []
    for group in list(servers.values())[:SHOWN]:
        for entry in sorted(group, key=lambda e: e.figures[FIGURE], reverse=True):
            server, load = split(entry.config)
            base = plain.get(config_key(load))
            if base is entry or base is not None and base.value <= 0:  # nothing to compare with: no good token at all
                base = None
            rows.append((str(entry.trial), _server(story, entry), config_text(load) if load else "-",
                         f"{entry.figures[FIGURE]:.2f}", number(entry.figures.get("tokens_per_s")), number(entry.value),
                         percent(entry.value / base.value - 1, signed=True) if base is not None else "-"))
    columns: tuple[str, ...] = ("Trial", "Server", "Load", ">Tokens per verify step", ">tok/s", f">{story.unit}",
                                ">Against the baseline's server")
    if story.unit == "tok/s":
        columns, rows = columns[:4] + columns[5:], [row[:4] + row[5:] for row in rows]
    words = ("Output tokens over verify steps, the step's own token among them: 1 would be no draft accepted. The last "
             "column compares under the same load.")
    if len(servers) > SHOWN:
        words += f" The best {SHOWN} of {len(servers):,} servers are shown."
    return Section("acceptance", "Acceptance length of speculation",
                   (Table(columns, tuple(rows)), Para(words, "muted")))


def _server(story: Story, entry: Tested) -> str:
    server, before = (story.space.split(config)[0] for config in (entry.config, story.space.baseline))
    moved = [f"{name}={'absent' if b is None else one_line(b)}" for name, (_, b) in changed(before, server).items()]
    return ", ".join(moved) or "the baseline's"
