"""Markdown: the report, and the escaping that notes share. Text stays text, whatever is in it."""

from __future__ import annotations

import functools
import re

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
    Table,
    Tiles,
)
from autotune.report.wording import one_line
from autotune.utils.text import KEPT, REPLACED, printable


def markdown(document: Document) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [f"# {escape(document.headline)}", f"*{escape(document.kicker)}*",
             " · ".join(escape(c) for c in document.chips), escape(document.support)]
    for section in document.sections:
        told = [text for text in (block(b) for b in section.blocks) if text]
        parts += [f"## {escape(section.title)}", *told] if told else []
    return "\n\n".join(p for p in [*parts, "---", escape(document.footer)] if p) + "\n"


@functools.singledispatch
def block(value: Block) -> str:
    """One block as Markdown; pictures are left out."""
    raise TypeError(f"no Markdown for {type(value).__name__}")


@block.register
def _para(value: Para) -> str:
    return f"**{escape(value.text)}**" if value.tone == "warn" else escape(value.text)


@block.register
def _table(value: Table) -> str:
    kept = [i for i in range(len(value.columns)) if any(_text(row[i]) for row in value.rows)]
    lines = ["| " + " | ".join(escape(value.titles[i]) for i in kept) + " |",
             "| " + " | ".join("---:" if value.numeric[i] else "---" for i in kept) + " |"]
    lines += ["| " + " | ".join(_styled(row[i]) for i in kept) + " |" for row in value.rows]
    return (f"{escape(value.caption)}:\n\n" if value.caption else "") + "\n".join(lines)


def _text(cell: str | Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _styled(cell: str | Cell) -> str:
    text = escape(_text(cell))
    return f"**{text}**" if text and isinstance(cell, Cell) and cell.tone == "strong" else text


@block.register
def _facts(value: Facts) -> str:
    return "\n".join(f"- {escape(k)}: {escape(v)}" for k, v in value.rows)


@block.register
def _code(value: Code) -> str:
    return (f"{escape(value.caption)}:\n\n" if value.caption else "") + fence(value.text)


@block.register
def _chart(value: Chart) -> str:
    return ""


@block.register
def _charts(value: Charts) -> str:
    return ""


@block.register
def _tiles(value: Tiles) -> str:
    return "\n".join(f"- **{escape(t.title)}: {escape(t.value)}**"
                     + (f" {escape(t.change)}" if t.change else "")
                     + (f", baseline {escape(t.was)}" if t.was else "")
                     + (f" ({escape(t.remark)})" if t.remark else "") for t in value.tiles)


@block.register
def _fold(value: Fold) -> str:
    inner = "\n\n".join(text for text in (block(b) for b in value.blocks) if text)
    return f"<details><summary>{_html(value.summary)}</summary>\n\n{inner}\n\n</details>"


def fence(text: str) -> str:
    """A code block that the text cannot end, whatever back-ticks are in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}text\n{printable(text, keep=KEPT, instead=REPLACED).rstrip()}\n{ticks}"


def code(text: str) -> str:
    """Text for an inline code span."""
    return one_line(text).replace("`", "'")


def escape(text: object) -> str:
    """Text as Markdown that shows it literally, on one line."""
    shown = re.sub(r"([\\`*\[\]<>#|~&])", r"\\\1", one_line(text))
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", shown)


def _html(text: str) -> str:
    """Text inside an HTML block of the Markdown file; every character that Markdown knows as an entity too."""
    return re.sub(r"[&<>\[\]`*_|]", lambda m: f"&#{ord(m[0])};", one_line(text))
