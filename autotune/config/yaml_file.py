"""YAML files of others: read as data only, and refused where they would blow up or ask for this machine's variables.

    check(path)        # raises UsageError, one line naming the file and the key
    bases(path, node)  # what it is based on: plain names only
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

from autotune.records import UsageError

MOST_NODES = 10_000
"""Values in a file, aliases counted as often as they are used: Hydra takes about a millisecond for each."""
MOST_BYTES = 4 << 20
PLAIN = re.compile(r"\$\{[\w.\[\]-]*\}")
"""An interpolation that only names another key."""
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
"""A file in a group, without a way to another folder."""
INTEGER = "tag:yaml.org,2002:int"
NULL = "tag:yaml.org,2002:null"
DIGITS = 40
MISREAD = {"on", "off", "yes", "no", "y", "n"}


def check(path: pathlib.Path, misread_words: bool = False) -> None:
    """Refuse a file that cannot be read, is no YAML, is too large with its aliases written out, or holds a resolver,
    a number of more than 40 digits, or characters that no command line takes.

    `misread_words`: also plain on/off/yes/no, which YAML 1.1 reads as booleans behind the author's back.
    """
    import yaml

    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES >> 20} MiB, which no space or engine file needs")
        text = path.read_text(encoding="utf-8")
        if misread_words:
            _no_misread_words(path, text)
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if root is not None:
            _count(root, path, {}, [])
            _no_resolvers(root, path, set(), ())
            _no_odd_values(root, path, set())
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error


def bases(path: pathlib.Path, node: Any) -> list[str]:
    """What the `defaults` of a file (as plain data) name beside it. Raises UsageError for what names no such file."""
    entries = node.get("defaults") if isinstance(node, dict) else None
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise UsageError(f"{path}: defaults must be a list such as [NAME, _self_], not {str(entries)[:60]!r}")
    for entry in entries:
        if not isinstance(entry, str) or not NAME.fullmatch(entry):
            raise UsageError(f"{path}: defaults: {str(entry)[:60]!r} is not the plain name of another file of its kind "
                             "(letters, digits, _ - and dots)")
    return [entry for entry in entries if entry != "_self_"]


def _no_odd_values(node: Any, path: pathlib.Path, seen: set[int]) -> None:
    """Raises UsageError for integers that Python refuses to write, texts with a null or half a character, null keys."""
    import yaml

    if id(node) in seen:
        return
    seen.add(id(node))
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.tag == NULL:
            raise UsageError(f"{path}, line {key.start_mark.line + 1}: a key must have a name")
    for inner in _inner(node):
        _no_odd_values(inner, path, seen)
    if not isinstance(node.value, str):
        return
    where = f"{path}, line {node.start_mark.line + 1}"
    if node.tag == INTEGER and len(node.value) > DIGITS:
        raise UsageError(f"{where}: a number of more than {DIGITS} digits")
    if "\0" in node.value or any("\ud800" <= c <= "\udfff" for c in node.value):
        raise UsageError(f"{where}: a text with a null character or half a character, which no command line takes")


def _count(node: Any, path: pathlib.Path, counted: dict[int, int], inside: list[int]) -> int:
    """How many values a node has with its aliases written out; each is looked at once."""
    if id(node) in inside:
        raise UsageError(f"{path}, line {node.start_mark.line + 1}: the anchor refers to itself")
    if id(node) not in counted:
        inside.append(id(node))
        counted[id(node)] = 1 + sum(_count(inner, path, counted, inside) for inner in _inner(node))
        inside.pop()
        if counted[id(node)] > MOST_NODES:
            raise UsageError(f"{path}, line {node.start_mark.line + 1}: more than {MOST_NODES:,} values once its "
                             "aliases (*name) are written out")
    return counted[id(node)]


def _inner(node: Any) -> list[Any]:
    """The nodes right inside one."""
    if not isinstance(node.value, list):
        return []
    return [inner for item in node.value for inner in (item if isinstance(item, tuple) else (item,))]


def _no_resolvers(node: Any, path: pathlib.Path, seen: set[int], at: tuple[str, ...]) -> None:
    """Raises UsageError for ${name:...} in any key or value."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node.value, str):
        if "${" in (left := _without_plain(node.value)):
            shown = left[left.index("${"):][:60]
            raise UsageError(f"{path}, key {'.'.join(at) or '(root)'}: {shown!r} asks for more than another key of the "
                             "settings, which a file may not: give the value itself, or set it on the command line")
        return
    for number, item in enumerate(node.value):
        name = str(item[0].value) if isinstance(item, tuple) else str(number)
        for inner in item if isinstance(item, tuple) else (item,):
            _no_resolvers(inner, path, seen, (*at, name))


def _without_plain(text: str) -> str:
    """A text without the interpolations that only name another key, one inside another too."""
    for _ in range(20):
        text, found = PLAIN.subn("x", text)
        if not found:
            break
    return text


def _no_misread_words(path: pathlib.Path, text: str) -> None:
    import yaml

    for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(token, yaml.ScalarToken) and token.plain and token.value.lower() in MISREAD:
            raise UsageError(f"{path}, line {token.start_mark.line + 1}: YAML reads {token.value} as a boolean: "
                             f'write true or false, or quote it: "{token.value}"')
