"""HTML and SVG built so that text can never become markup: every child that is not `Markup` is escaped.

    el("p", "Trial ", el("b", 4), class_="note")  ->  <p class="note">Trial <b>4</b></p>
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from autotune.utils.text import KEPT, REPLACED, printable


class Markup(str):
    """Text that is markup already."""


Child = object
VOID = {"br", "hr", "meta", "line", "circle", "rect", "path", "polyline", "polygon", "use"}


def el(tag: str, *children: Child, **attrs: object) -> Markup:
    """An element. Attributes: trailing underscores dropped, underscores become hyphens, None left out."""
    written = "".join(f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
                      for name, value in attrs.items() if value is not None)
    if tag in VOID and not children:
        return Markup(f"<{tag}{written}>" if tag in ("br", "hr", "meta") else f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{join(children)}</{tag}>")


def join(children: Iterable[Child], between: str = "") -> Markup:
    """Children after one another; lists and tuples are flattened, None is left out."""
    return Markup(between.join(_text(child) for child in children if child is not None))


def _text(child: Child) -> str:
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return join(child)
    return html.escape(printable(str(child), keep=KEPT, instead=REPLACED), quote=False)
