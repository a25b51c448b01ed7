"""Logs out of files, pipes, gzip files and folders, read in bounded memory whatever their size.

    for name, data in logs(path):
        classify(data)
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import io
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

HEAD, TAIL, CHUNK = 1 << 20, 3 << 20, 1 << 20  # bytes
BEFORE, AFTER, WINDOWS = 6 << 10, 10 << 10, 8  # bytes around a trace of a failure; most windows kept at each end
GAP = "[... part of the log left out ...]"
# What a line of a failure contains. `bytes.find` is some twenty times faster than a regular expression.
STRONG = (b"Traceback (most", b"out of memory", b"CUDA error", b"Killed")
WEAK = (b"rror", b"ailed", b"imeout", b"ignal ")
INSTEAD = {b"rror": b"Error: ", b"ailed": b" failed: ", b"imeout": b"Timeout"}  # where healthy lines have these too
COPIES, MOST_SHAPES, FRUITLESS = 2, 10_000, 50_000  # windows of one shape of line; shapes; hits without a new shape
DIGITS = b"0123456789"
GZIP = b"\x1f\x8b"


def logs(path: pathlib.Path) -> Iterator[tuple[str, bytes]]:
    """(name, relevant parts) of a log file, or of each file in a folder. Raises OSError as `open` does."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        data = read_path(file)
        if file == path or b"\0" not in data[:HEAD // 1024]:  # a folder may hold core dumps and archives
            yield str(file), data


def read_path(path: pathlib.Path) -> bytes:
    """The relevant parts of a log file, at most a few MB. Raises OSError as `open` does."""
    with path.open("rb") as file:
        return read_stream(file)


def read_stream(file: BinaryIO) -> bytes:
    """Head, surroundings of failures and tail of a stream, gzip or plain, in bounded memory.

    A damaged gzip stream counts up to the damage.
    """
    buffered: Any = file if hasattr(file, "peek") else io.BufferedReader(cast(io.RawIOBase, file))
    stream = gzip.GzipFile(fileobj=buffered) if buffered.peek(len(GZIP)).startswith(GZIP) else buffered

    def read(size: int) -> bytes:
        data = bytearray()
        with contextlib.suppress(gzip.BadGzipFile, EOFError, zlib.error):
            while len(data) < size and (part := stream.read1(size - len(data))):
                data += part
        return bytes(data)

    head = read(HEAD)
    scan, tail, held = _Scan(len(head)), collections.deque[bytes](), 0
    while chunk := read(CHUNK):
        tail.append(chunk)
        held += len(chunk)
        while held - len(tail[0]) >= TAIL:
            held -= len(tail[0])
            scan.feed(tail.popleft())
    marker = f"\n{GAP}\n".encode()
    return (marker if scan.fed else b"").join([marker.join([head, *scan.windows()]), b"".join(tail)])


class _Scan:
    """Surroundings of the first and last traces of failures in a stream of chunks, strong and weak ones apart."""

    def __init__(self, offset: int) -> None:
        self.fed = False
        self._block, self._base, self._from = b"", offset, 0  # bytes, their offset in the stream, searched up to
        self._kept: dict[bool, list[tuple[int, bytes]]] = {True: [], False: []}
        self._needles = {True: list(STRONG), False: list(WEAK)}
        self._shapes: dict[bytes, int] = {}
        self._fruitless: collections.Counter[bytes] = collections.Counter()

    def feed(self, chunk: bytes) -> None:
        self.fed = True
        cut = max(0, self._from - BEFORE)
        self._block, self._base, self._from = self._block[cut:] + chunk, self._base + cut, self._from - cut
        self._search(len(self._block) - AFTER)

    def windows(self) -> list[bytes]:
        """The kept windows in the order of the stream, without overlaps."""
        self._search(len(self._block))
        found, end = [], 0
        for at, window in sorted((*self._kept[True], *self._kept[False])):
            if at + len(window) > end:
                found.append(window[max(0, end - at):])
                end = at + len(window)
        return found

    def _search(self, last: int) -> None:
        """Search the block up to `last`; what follows waits for its surroundings."""
        if last <= self._from:
            return
        for strong, needles in self._needles.items():
            for needle in tuple(needles):
                at = self._from
                while (at := self._block.find(needle, at, last + len(needle) - 1)) >= 0:
                    at = self._hit(needle, at, strong)
                if self._fruitless[needle] > FRUITLESS:
                    needles.remove(needle)
                    needles += [INSTEAD[needle]] if needle in INSTEAD else []
        self._from = last

    def _hit(self, needle: bytes, at: int, strong: bool) -> int:
        """Keep the surroundings of a hit if its line is new; returns where to go on."""
        block = self._block
        end = block.find(b"\n", at, at + 400)
        line = block[max(block.rfind(b"\n", max(0, at - 400), at) + 1, at - 400):end if end >= 0 else at + 400]
        shape = line.translate(None, DIGITS)[-200:]
        seen = self._shapes.get(shape, 0)
        if seen >= COPIES or len(self._shapes) >= MOST_SHAPES:
            self._fruitless[needle] += 1
            return end if end >= 0 else at + len(needle)
        self._shapes[shape] = seen + 1
        first = block.find(b"\n", max(0, at - BEFORE), at) + 1 or max(0, at - BEFORE)
        stop = block.rfind(b"\n", at, at + AFTER)
        stop = stop if stop >= 0 else at + AFTER
        kept = self._kept[strong]
        kept.append((self._base + first, block[first:stop]))
        del kept[WINDOWS:-WINDOWS]
        return max(stop, at + len(needle))
