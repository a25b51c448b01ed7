"""Log lines out of what containers, journals and collectors wrap around them.

    for container, text in unwrap(text):
        ...

Known: Kubernetes (kubectl with --prefix, CRI files), Docker (compose, json-file), Ray, JSON lines of any collector, and
journald (short, JSON and export format). Logs with the newest line first are turned round.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

SAMPLE, SHARE, LAYERS = 60, 0.6, 3  # lines that are looked at; share that a wrapper must match; wrappers around another
TEXTS = ("MESSAGE", "log", "message", "msg", "textPayload", "line", "body", "text", "content", "event")
TIMES = ("__REALTIME_TIMESTAMP", "time", "timestamp", "ts", "@timestamp", "receiveTimestamp")
NAMES = ("CONTAINER_NAME", "container_name", "container", "_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER", "service")
NESTED = ("kubernetes", "jsonPayload", "labels", "_source", "fields", "resource", "attributes", "stream")
SHARED = {"kernel", "systemd", "dockerd", "containerd"}  # journal entries that concern every container

STAMP = r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
LINES = tuple(re.compile(pattern) for pattern in (
    rf"(?P<time>{STAMP}) (?:stdout|stderr) (?P<part>[FP]) (?P<text>.*)",  # CRI
    r"\[pod/(?P<name>[\w./-]+)\] ?(?P<text>.*)",  # kubectl logs --prefix
    r"(?P<name>[A-Za-z][\w.-]{0,80}?) {0,40}\| ?(?P<text>.*)",  # docker compose
    rf"(?P<time>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?|(?:[A-Z][a-z]{{2}} )?{STAMP}(?: [A-Z]{{3,4}})?"
    r"|\d{10}\.\d{6}|\[ *\d+\.\d{6}\]) [\w.-]+ "
    r"(?P<name>[\w./@-]+(?=\[)|kernel|systemd)(?:\[\d+\])?: ?(?P<text>.*)",  # journald, syslog
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6,9}(?:Z|[+-]\d\d:\d\d)) (?P<text>.*)",  # kubectl --timestamps
    r"(?:\x1b\[\d+m)?\(\w[\w.-]* pid=\d+, ip=[^)]*\)(?:\x1b\[0m)? ?(?P<text>.*)",  # Ray
))
STAMPED = re.compile(  # the time of a line: [TIME TP0], (Worker pid=1) ERROR TIME
    rf"(?:\W{{0,2}}|\W?\([^)\n]{{1,60}}\) )(?:[A-Z]+ )?({STAMP}|(?:\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?)")
FIELD = re.compile(r"(?P<name>[A-Z_][A-Z0-9_]*)(?:=(?P<value>.*))?$")  # journald's export format
FRAME = re.compile(r'File ["“][^"”\n]{1,300}["”],')
RAISED = re.compile(r"(?:^|[\s\]])(?:\w+\.)*[A-Z]?\w*(?:Error|Exception)(?:: |$)")
HEADER = "Traceback (most recent call last)"
REPEATED = re.compile(r" ?(?:\x1b\[\d+m)?\[repeated \d+x across cluster\].*$", re.M)  # Ray


class Record(NamedTuple):
    """One entry of a log. `text` may have several lines; `time` sorts as text; `joined`: the next one continues it."""

    text: str
    name: str = ""
    time: str = ""
    joined: bool = False


def unwrap(text: str) -> dict[str, str]:
    """Text of each container, oldest line first; one without a name has the name ""."""
    records = [Record(line) for line in text.split("\n")]
    if whole := _document(text):
        records = whole
    for _ in range(LAYERS):
        unwrapped = _layer(records)
        if unwrapped is None:
            break
        records = unwrapped
    records = _oldest_first(records)
    names = list(dict.fromkeys(r.name for r in records if r.name and r.name not in SHARED))
    if len(names) < 2:
        return {names[0] if names else "": _text(records)}
    return {name: _text([r for r in records if r.name in (name, "") or r.name in SHARED]) for name in names}


def _text(records: Sequence[Record]) -> str:
    joined = "".join(r.text + ("" if r.joined else "\n") for r in records)
    return REPEATED.sub("", joined) if "across cluster]" in joined else joined


def _layer(records: Sequence[Record]) -> list[Record] | None:
    """Records without their outermost wrapper; None if most have none."""
    filled = [r for r in records if r.text.strip()]
    sample = filled[:SAMPLE] + filled[-SAMPLE:]
    if any(r.text.startswith("__CURSOR=") for r in sample):
        return list(_exported(records))
    readers: list[Callable[[Record], Record | None]] = [_object, *(lambda r, p=p: _matched(r, p) for p in LINES)]
    for reader in readers:
        if sum(reader(r) is not None for r in sample) > SHARE * len(sample):
            return [reader(r) or r for r in records]
    return None


def _matched(record: Record, pattern: re.Pattern[str]) -> Record | None:
    match = pattern.match(record.text)
    if match is None:
        return None
    found = match.groupdict()
    name = (found.get("name") or "").strip()
    return Record(found["text"], record.name or name, record.time or found.get("time") or "", found.get("part") == "P")


def _object(record: Record) -> Record | None:
    """The record in a JSON object."""
    if not record.text.lstrip().startswith("{"):
        return None
    try:
        data = json.loads(record.text)
    except (ValueError, RecursionError):
        return None
    return _entry(data, record)


def _entry(data: Any, record: Record) -> Record | None:
    if not isinstance(data, dict):
        return None
    flat = {**data}
    for key in NESTED:
        if isinstance(data.get(key), dict):
            flat = {**data[key], **flat}
    said = next((flat[key] for key in TEXTS if isinstance(flat.get(key), str | list)), None)
    if isinstance(said, list):  # journald writes bytes that are not printable as a list
        said = bytes(c for c in said if isinstance(c, int) and 0 <= c < 256).decode("utf-8", "replace")
    if said is None:
        return None
    name = next((str(flat[key]) for key in NAMES if flat.get(key)), "")
    pod = next((str(flat[key]) for key in ("pod_name", "pod") if flat.get(key)), "")
    time = next((str(flat[key]) for key in TIMES if flat.get(key)), "")
    return Record(said.removesuffix("\n"), record.name or "/".join(filter(None, (pod, name))), record.time or time)


def _document(text: str) -> list[Record]:
    """Records of a JSON array, or of objects that each have several lines; none for other texts."""
    found, at = list[Any](), 0
    while re.match(r"[\[{]\s", text[at:at + 2]) or (text.startswith("[{", at)):
        try:
            data, at = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        found += data if isinstance(data, list) else [data]
        while text[at:at + 1].isspace():
            at += 1
    return [entry for item in found if (entry := _entry(item, Record(""))) is not None]


def _exported(records: Sequence[Record]) -> Iterator[Record]:
    """Entries of journald's export format: NAME=value, or NAME, 8 bytes of length and lines of text."""
    entry: dict[str, list[str]] = {}
    binary = ""
    for record in (*records, Record("")):
        field = FIELD.match(record.text)
        if field and (field["value"] is not None or not binary):
            binary = "" if field["value"] is not None else field["name"]
            entry[field["name"]] = [] if binary else [field["value"]]
        elif binary and record.text:
            entry[binary].append(record.text if entry[binary] else record.text[8:])
        elif not record.text and "MESSAGE" in entry:
            name = next((entry[key][0] for key in NAMES if entry.get(key)), "")
            time = "".join(entry.get("__REALTIME_TIMESTAMP", ()))
            yield Record("\n".join(entry["MESSAGE"]), name, time)
            entry, binary = {}, ""


def _oldest_first(records: list[Record]) -> list[Record]:
    """Records in the order of time, turned round if timestamps or tracebacks show the newest first."""
    backward, forward = _tracebacks(records)
    times = [r.time or _stamp(r.text) for r in records]
    known = [time for time in times if time]
    down = sum(a > b for a, b in itertools.pairwise(known))
    up = sum(a < b for a, b in itertools.pairwise(known))
    if known and (down > 2 * up if down + up else backward > forward):
        heads = [i for i, time in enumerate(times) if time]
        if forward > backward:  # entries are turned round, their lines are not; or ranks write at the same time
            if len(heads) > len([r for r in records if r.text.strip()]) - forward:
                return records
            spans = [records[a:b] for a, b in itertools.pairwise([0, *heads, len(records)])]
            return [record for span in reversed(spans) for record in span]
        return records[::-1]
    return records[::-1] if not known and backward > forward else records


def _stamp(text: str) -> str:
    match = STAMPED.match(text)
    return match[1] if match else ""


def _tracebacks(records: Sequence[Record]) -> tuple[int, int]:
    """(tracebacks that are upside down, tracebacks in order)."""
    lines = [r.text for r in records if r.text.strip()]
    kinds = "".join("H" if HEADER in line else "F" if FRAME.search(line) else "E" if RAISED.search(line) else "."
                    for line in lines)
    return (len(re.findall(r"F\.?H(?!F)|E\.{0,4}F", kinds)), len(re.findall(r"HF|F\.{0,4}E", kinds)))
