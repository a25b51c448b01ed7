"""The pieces a report consists of, before it is HTML or Markdown: text only, never markup."""

from __future__ import annotations

import dataclasses

from autotune.report.markup import Markup


@dataclasses.dataclass(frozen=True)
class Cell:
    """A table cell. `tone` is good, bad, strong or muted; `picture` is shown instead of the text where it can be."""

    text: str
    tone: str = ""
    picture: Markup | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """A leading ">" marks a column of numbers, "?" before it one that narrow screens can do without. Rows are
    strings or cells, as many as columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | Cell, ...], ...]
    caption: str = ""

    @property
    def titles(self) -> tuple[str, ...]:
        return tuple(c.lstrip("?>") for c in self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        return tuple(c.lstrip("?").startswith(">") for c in self.columns)

    @property
    def optional(self) -> tuple[bool, ...]:
        return tuple(c.startswith("?") for c in self.columns)


@dataclasses.dataclass(frozen=True)
class Para:
    """A paragraph; `tone` is muted, warn or empty."""

    text: str
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Labels with values."""

    rows: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Code:
    """Preformatted text, shown as it is."""

    text: str
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture that Markdown leaves out; `caption` says what it shows."""

    picture: Markup
    caption: str


@dataclasses.dataclass(frozen=True)
class Charts:
    """Pictures side by side where there is room."""

    charts: tuple[Chart, ...]


@dataclasses.dataclass(frozen=True)
class Tile:
    """A key figure: `was` is the baseline's, `change` the difference, `remark` a qualification."""

    title: str
    value: str
    was: str = ""
    change: str = ""
    tone: str = ""
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Tiles:
    tiles: tuple[Tile, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Blocks that open on demand."""

    summary: str
    blocks: tuple[Block, ...]


Block = Table | Para | Facts | Code | Chart | Charts | Tiles | Fold


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """`kicker` stands above the headline, `tone` colours it: good, bad, warn or plain."""

    title: str
    kicker: str
    headline: str
    tone: str
    support: str
    chips: tuple[str, ...]
    sections: tuple[Section, ...]
    footer: str
