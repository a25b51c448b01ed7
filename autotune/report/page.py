"""The report as one HTML file: no script, no network, nothing in it that a log could turn into markup."""

from __future__ import annotations

import functools

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
from autotune.report.markup import Markup, el, join
from autotune.report.style import CSS

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy of the page: even a mistake of ours could not load or run anything."""


def html(document: Document) -> str:
    """The page as text."""
    head = el("head", el("meta", charset="utf-8"),
              el("meta", name="viewport", content="width=device-width, initial-scale=1"),
              el("meta", http_equiv="Content-Security-Policy", content=POLICY),
              el("title", document.title), el("style", Markup(CSS)))
    links = [el("a", section.name.capitalize(), href=f"#{section.name}") for section in document.sections]
    top = el("header", el("p", document.kicker, class_="kicker"), el("h1", document.headline, class_=document.tone),
             el("p", document.support, class_="support") if document.support else None,
             el("ul", [el("li", chip) for chip in document.chips], class_="chips"),
             el("nav", links, aria_label="Sections"))
    body = el("body", el("main", top, [_section(s) for s in document.sections], el("footer", document.footer)))
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def _section(section: Section) -> Markup:
    return el("section", el("h2", section.title, id=f"{section.name}-h"), [block(b) for b in section.blocks],
              id=section.name, aria_labelledby=f"{section.name}-h")


@functools.singledispatch
def block(value: Block) -> Markup:
    """One block as HTML."""
    raise TypeError(f"no HTML for {type(value).__name__}")


@block.register
def _para(value: Para) -> Markup:
    return el("p", value.text, class_={"muted": "muted small", "warn": "warn-box"}.get(value.tone))


@block.register
def _table(value: Table) -> Markup:
    needed = len(value.columns) - sum(value.optional)
    texts = sum(not n and not o for n, o in zip(value.numeric, value.optional, strict=True))
    kind = " ".join(word for word, holds in (("stack", texts > 2 and needed > 3), ("wide", len(value.columns) > 4),
                                             ("dense", len(value.columns) > 8)) if holds)
    columns = list(zip(value.titles, value.numeric, value.optional, strict=True))
    head = el("tr", [el("th", title, scope="col", class_=_classes(("n", n), ("opt", o))) for title, n, o in columns])
    rows = [el("tr", [_cell(c, *column) for c, column in zip(row, columns, strict=True)]) for row in value.rows]
    table = el("table", el("caption", value.caption) if value.caption else None, el("thead", head), el("tbody", rows),
               class_=kind or None)
    return el("div", table, class_="scroll", tabindex=0, role="group", aria_label=value.caption or value.titles[0])


def _cell(cell: str | Cell, title: str, numeric: bool, optional: bool) -> Markup:
    cell = Cell(cell) if isinstance(cell, str) else cell
    empty = not cell.text and cell.picture is None
    classes = _classes(("n", numeric), ("opt", optional), ({"muted": "mu"}.get(cell.tone, cell.tone), bool(cell.tone)),
                       ("empty", empty))
    return el("td", el("span", cell.picture) if cell.picture is not None else cell.text, class_=classes,
              data_label=title)


def _classes(*names: tuple[str, bool]) -> str | None:
    return " ".join(name for name, holds in names if holds) or None


@block.register
def _facts(value: Facts) -> Markup:
    return el("dl", [join([el("dt", k), el("dd", v)]) for k, v in value.rows], class_="facts")


@block.register
def _code(value: Code) -> Markup:
    return join([el("p", value.caption, class_="label") if value.caption else None, el("pre", value.text)])


@block.register
def _chart(value: Chart) -> Markup:
    return el("figure", value.picture, el("figcaption", value.caption))


@block.register
def _charts(value: Charts) -> Markup:
    return el("div", [_chart(c) for c in value.charts], class_="charts")


@block.register
def _tiles(value: Tiles) -> Markup:
    return el("dl", [_tile(t) for t in value.tiles], class_="tiles")


def _tile(tile: Tile) -> Markup:
    number, _, unit = tile.value.partition(" ")
    value = el("dd", number, el("span", f" {unit}", class_="unit") if unit else None, class_="value")
    return el("div", el("dt", tile.title), value, el("dd", tile.change, class_="change") if tile.change else None,
              el("dd", f"baseline {tile.was}", class_="was") if tile.was else None,
              el("dd", tile.remark, class_="remark") if tile.remark else None, class_=f"tile {tile.tone}".rstrip())


@block.register
def _fold(value: Fold) -> Markup:
    return el("details", el("summary", value.summary), [block(b) for b in value.blocks])
