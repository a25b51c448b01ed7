"""HTTP/1.1 as far as a client of one server needs it: request bytes, and the framing of an answer as it arrives.

Written by hand because the hot path allows a few microseconds per chunk; tests/benchmarks/load.py compares
it with clients on httpx and aiohttp. Framing follows RFC 9112 sections 6 and 7.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from autotune.utils.http import BadAnswer

HEAD_LIMIT = 65536
TRAILER_LIMIT = 65536
SIZE_DIGITS = 10
SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
LENGTH = re.compile(r"[0-9]{1,18}")


def request(host: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    """A POST of a JSON body, or a GET without one, ready to send; `host` is HOST:PORT."""
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    if body is not None:
        lines += ["Content-Type: application/json", "Accept: text/event-stream", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


class Framing:
    """Takes the payload out of one answer's bytes.

    `feed` returns the payload bytes that became complete; `done` says that the answer has ended, `status`
    is None until the head was read, `reusable` whether the connection may carry another request. `eof`
    must be called when the peer closes. Raises BadAnswer.
    """

    __slots__ = ("_beside", "_chunked", "_left", "_rest", "_trailer", "done", "reusable", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        self.done = False
        self.reusable = True
        self._chunked = False
        self._left: int | None = None  # of the body or of the chunk at hand; None: until the peer closes
        self._rest = b""
        self._trailer = False
        self._beside = 0  # bytes of interim answers, the head and a trailer

    @property
    def between_chunks(self) -> bool:
        """Whether a new chunk comes next."""
        return self._chunked and not self._rest and not self._left and not self._trailer

    def feed(self, data: bytes) -> bytes:
        if not self._chunked or self._rest or self._left:
            return self._feed(data)
        at, whole, parts = 0, len(data), []  # nearly every read of a token stream is one or more whole chunks
        while at < whole:
            eol = data.find(b"\r\n", at, at + SIZE_DIGITS)
            try:
                size = int(data[at:eol], 16) if eol > at else 0
            except ValueError:
                size = 0
            end = eol + 2 + size
            if size <= 0 or end + 2 > whole:
                parts.append(self._feed(data[at:]))  # the last chunk, a piece of one, or nonsense
                break
            parts.append(data[eol + 2:end])
            at = end + 2
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _feed(self, data: bytes) -> bytes:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        while self.status is None:  # also after an interim 1xx answer
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > HEAD_LIMIT:
                    raise BadAnswer("the head of the answer does not end")
                self._rest = data
                return b""
            self._head(data[:end])
            data = data[end + 4:]
            self._beside += end + 4
            if self.status is None and self._beside > HEAD_LIMIT:
                raise BadAnswer("interim answers (1xx) without end")
        if self._chunked:
            return self._chunks(data)
        if self._left is None:
            return data
        if len(data) > self._left:
            raise BadAnswer("more bytes than Content-Length says")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def end(self) -> None:
        """The caller saw the last chunk."""
        self.done = True

    def eof(self) -> bool:
        """The peer closed: whether that ends the answer as it should."""
        self.reusable = False
        if self.status is not None and not self._chunked and self._left is None:
            self.done = True
        return self.done

    def _head(self, head: bytes) -> None:
        found = _parsed(head)
        if found is None:
            return
        self.status, self._chunked, left, self.reusable = found
        self._left = 0 if self._chunked else left
        self.done = left == 0 and not self._chunked

    def _chunks(self, data: bytes) -> bytes:
        payload = []
        at = 0
        while at < len(data):
            if self._left and self._left > 0:
                part = data[at:at + self._left]
                payload.append(part)
                at += len(part)
                self._left -= len(part)
                if self._left:
                    break
                self._left = -2  # the line end after a chunk
            if self._left is not None and self._left < 0:
                ending = data[at:at - self._left]
                if ending != b"\r\n"[self._left:][:len(ending)]:
                    raise BadAnswer("a chunk is longer than its size says")
                at += len(ending)
                self._left += len(ending)
                continue
            eol = data.find(b"\r\n", at)
            if eol < 0:
                if len(data) - at > HEAD_LIMIT:
                    raise BadAnswer("a chunk has no size")
                self._rest = data[at:]
                break
            line = data[at:eol]
            at = eol + 2
            if self._trailer:
                self._beside += len(line) + 2
                if self._beside > HEAD_LIMIT + TRAILER_LIMIT:
                    raise BadAnswer("a trailer without end")
                if not line:
                    self._trailer = False
                    self.done = True
                    if at < len(data):
                        raise BadAnswer("bytes after the end of the answer")
                continue
            size = line.split(b";", 1)[0].strip(b" \t")
            if not SIZE.fullmatch(size):
                raise BadAnswer(f"not a chunk size: {line[:40]!r}")
            self._left = int(size, 16)
            if self._left == 0:
                self._trailer = True
        return b"".join(payload)


@functools.lru_cache(maxsize=16)  # the answers of a second have the same head
def _parsed(head: bytes) -> tuple[int, bool, int | None, bool] | None:
    """(status, whether chunked, bytes of the body, whether the connection can be used again); None of an interim head.

    The bytes are None where the body ends with the connection. Raises BadAnswer.
    """
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or len(parts[1]) != 3 or not parts[1].isdecimal():
        raise BadAnswer(f"not an HTTP answer: {lines[0][:80]!r}")
    status = int(parts[1])
    if 100 <= status < 200:
        return None
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadAnswer(f"not a header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip().lower()
    chunked = "chunked" in headers.get("transfer-encoding", "")
    keep = headers.get("connection", "keep-alive" if parts[0] != "HTTP/1.0" else "close")
    left = None
    if status in (204, 304):
        left = 0
    elif "content-length" in headers and not chunked:
        if not LENGTH.fullmatch(headers["content-length"]):
            raise BadAnswer(f"Content-Length {headers['content-length'][:40]!r}")
        left = int(headers["content-length"])
    return status, chunked, left, "close" not in keep and (chunked or left is not None)
