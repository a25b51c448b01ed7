"""Typed values from plain data (YAML files, the Hydra command line, stored JSON), by msgspec.

    study = convert(raw, StudySettings, "study.", typed=True)
    space = convert(raw, SpaceFile, "space local: ")

Bad data raises a UsageError of one line: the place, the expected type, the value, and the known keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from autotune.records import UsageError
from autotune.utils.text import SPELLED, printable

T = TypeVar("T")
Number = int | float
Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
NotNegative = Annotated[float, Meta(ge=0, description="a number of at least 0")]
Share = Annotated[float, Meta(ge=0, le=1, description="a share between 0 and 1")]
Count = Annotated[int, Meta(ge=0, description="a whole number of at least 0")]
AtLeastOne = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]

WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null",
         Any: "another value"}
BOOLEANS = {"true": True, "yes": True, "y": True, "on": True, "false": False, "no": False, "n": False, "off": False}
FAULT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.S)
STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.S)
MISSING = re.compile(r"Object missing required field `(\w+)`")
LONGEST = 80  # characters of a value in a message


def convert(raw: object, kind: type[T], where: str, typed: bool = False) -> T:
    """`raw` as a value of type `kind`: a Struct, a dataclass, or a type such as dict[str, int].

    `typed`: the data was typed on a command line. Numbers count as text where only text belongs, text as the number or
    the boolean that it spells. Raises UsageError, whose message begins with `where`: a file or section and a separator.
    """
    if typed:
        raw = _typed(raw, kind, where)
    try:
        return msgspec.convert(raw, kind, strict=not typed)
    except msgspec.ValidationError as error:
        raise UsageError(printable(_line(str(error), raw, kind, where, typed), instead=SPELLED)) from error


def from_json(plain: Any, kind: Any) -> Any:
    """A stored value of type `kind`. Types are strict, unknown keys are ignored. Raises UsageError."""
    try:
        found = convert(plain, kind, "")
        msgspec.json.encode(found)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise UsageError(f"the value cannot be stored as JSON ({error})") from error
    return found


def refuse_unknown(given: Mapping[Any, Any], known: typing.Iterable[str], where: str) -> None:
    """Raises UsageError for keys that are not known; it names those that are."""
    known = sorted(known)
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        line = f"{where}: " * bool(where) + f"unknown key {', '.join(unknown)}{meant}; known: {', '.join(known)}"
        raise UsageError(printable(line, instead=SPELLED))


def shown(value: object) -> str:
    """A value for a message, shortened."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def _at(where: str, path: str) -> str:
    """The place of a value: `study.name`, `space local: params.tp`, `own.yaml: rules[0]`."""
    if not path:
        return where.rstrip(".: ")
    return where.rstrip(".") + path if path.startswith("[") else where + path.removeprefix(".")


def _line(message: str, raw: Any, kind: Any, where: str, typed: bool) -> str:
    found = FAULT.fullmatch(message)
    assert found is not None
    what, path, hint = found["what"], "", kind
    for name, index in STEP.findall(found["path"] or ""):
        hint = _inside(hint, name or index)
        if index == "...":
            name = next(key for key, value in raw.items() if _refused(value, hint, typed))
        raw = raw[int(index)] if index.isdecimal() else raw[name]
        path += f"[{index}]" if index.isdecimal() else f".{name}"
    here = _at(where, path)
    if unknown := UNKNOWN.fullmatch(what):
        known = next(arm for arm in _arms(hint) if _has_fields(arm))
        try:
            refuse_unknown({key: None for key in raw if isinstance(key, str)}, typing.get_type_hints(known), here)
        except UsageError as error:
            return str(error)
        return f"{here}: unknown key {unknown[1]}"
    if missing := MISSING.fullmatch(what):
        path += f".{missing[1]}"
        return f"{_at(where, path)} must be {_wanted(_inside(hint, missing[1]), typed)} (it is missing)"
    if found["key"]:
        hint = _inside(hint, "key")
        wrong = next(key for key in raw if _refused(key, hint, typed))
        quote = "" if isinstance(wrong, str) else " (quote it: YAML reads it as another type)"
        return f"{here}: the name {shown(wrong)} must be {_wanted(hint, typed)}{quote}"
    if what.startswith(("Expected ", "Invalid ")):
        listed = typed and any(typing.get_origin(arm) is list for arm in _arms(hint))
        remedy = f": write {here}=[A,B]" if listed else ""
        return f"{here or 'the value'} must be {_wanted(hint, typed)}, not {shown(raw)}{remedy}"
    return f"{here}: {what}"


def _refused(value: Any, hint: Any, typed: bool) -> bool:
    try:
        msgspec.convert(value, hint, strict=not typed)
    except msgspec.ValidationError:
        return True
    return False


def _arms(hint: Any) -> list[Any]:
    """The members of a union, without annotations; of another type the type alone."""
    origin = typing.get_origin(hint)
    if origin is Annotated:
        return _arms(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [arm for part in typing.get_args(hint) for arm in _arms(part)]
    return [hint]


def _has_fields(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) or isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _inside(hint: Any, step: str) -> Any:
    """The type of a field, of an item, of the values of a mapping ("...") or of its keys ("key")."""
    for arm in _arms(hint):
        origin, args = typing.get_origin(arm), [part for part in typing.get_args(arm) if part is not ...]
        if _has_fields(arm) and step in (fields := typing.get_type_hints(arm, include_extras=True)):
            return fields[step]
        if isinstance(origin, type) and issubclass(origin, Mapping) and step in ("...", "key"):
            return args[step == "..."]
        if origin in (list, tuple) and step.isdecimal():
            return args[min(int(step), len(args) - 1)]
    return Any


def _wanted(hint: Any, typed: bool) -> str:
    """The words for a type, or its description; without `or null` for files, where an absent key does the same."""
    words = list(dict.fromkeys(_words(hint)))
    for word, other in (("a whole number", "a number"), ("null", "" if typed else words[0])):
        if word in words and other in words:
            words.remove(word)
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _words(hint: Any) -> list[str]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        described = [meta.description for meta in args[1:] if isinstance(meta, Meta) and meta.description]
        return described or _words(args[0])
    if origin in (typing.Union, types.UnionType):
        return [word for arm in args for word in _words(arm)]
    if origin is typing.Literal:
        return [f"one of {', '.join(map(str, args))}"]
    return [WORDS.get(hint, "a list" if origin in (list, tuple) else "a mapping")]


def _typed(raw: Any, hint: Any, where: str) -> Any:
    """Data of a command line with text for numbers where only text belongs.

    Raises UsageError for unknown keys, which msgspec ignores in dataclasses, and for nan and infinity.
    """
    arms = _arms(hint)
    if Any in arms:
        return raw
    if isinstance(raw, dict):
        fields = next((typing.get_type_hints(arm, include_extras=True) for arm in arms if _has_fields(arm)), None)
        if fields is not None:
            refuse_unknown(raw, fields, _at(where, ''))
        return {key: _typed(value, fields[key] if fields else _inside(hint, "..."), f"{_at(where, str(key))}.")
                for key, value in raw.items()}
    if isinstance(raw, list):
        return [_typed(item, _inside(hint, "0"), f"{_at(where, f'[{i}]')}.") for i, item in enumerate(raw)]
    if isinstance(raw, float) and not math.isfinite(raw):
        raise UsageError(f"{_at(where, '')} must be a finite number, not {raw}")
    if str in arms and isinstance(raw, int | float):
        return str(raw).lower() if isinstance(raw, bool) else str(raw)
    if bool in arms and isinstance(raw, str):
        return BOOLEANS.get(raw.lower(), raw)
    return raw
