"""Token streams as server-sent events: arrival times and token counts of one request.

Events like their neighbours are only counted and stamped; the first, the last and whatever is unlike are
parsed as JSON. Knows the streams of OpenAI-compatible servers and SGLang's /generate.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any

from autotune.loadgen.http1 import Framing
from autotune.utils import http
from autotune.utils.http import BadAnswer

LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
"""How nearly every answer of an OpenAI-compatible server ends."""
CHUNK_OF_EVENTS = b"\n\n\r\n"
"""How a chunk ends that is whole events."""
_KEY = b'"completion_tokens"'
_COUNTS = re.compile(rb'"completion_tokens":\s*(\d{1,12})(?!\d)')
_COUNT = _COUNTS.match
_BEGUN = re.compile(rb'HTTP/1\.1 200 .*"completion_tokens":\s*[1-9]', re.DOTALL).match
EVENT_LIMIT = 8 << 20
"""Bytes of one event."""
OVERSHOOT = 64
"""Tokens of a last verify step that servers may count beyond what was asked for; they are worth nothing to anybody."""


class TokenStream:
    """What one streamed answer gave so far.

    `times` are the arrivals of tokens, in seconds of the caller's clock; `counts` the tokens generated up to each
    (0 where the server did not say: then there is one arrival per event). `error` is the server's own message when it
    reported one inside the stream; `kind` then names it (`stream_error`, `aborted`).
    """

    __slots__ = ("_count", "_rest", "_tail", "_value", "counts", "error", "finished", "kind", "most", "times")

    def __init__(self, most: int = http.MOST_COUNT) -> None:
        """`most`: tokens that were asked for. More are not counted, and many more are a bad answer."""
        self.most = most
        self.times = array("d")
        self.counts = array("q")
        self.error: str | None = None
        self.kind: str | None = None
        self.finished = False  # [DONE] or a finish reason was seen
        self._count = 0
        self._rest = b""
        self._value: dict[str, Any] | None = None  # the last event that carried a token count ...
        self._tail = b""  # ... or the chunk that holds it

    @property
    def counting(self) -> bool:
        """Whether the server says with its events how many tokens there were so far."""
        return self._count > 0

    def take(self, framing: Framing, parts: Sequence[bytes], stamps: Sequence[float]) -> None:
        """Digest what was read of an answer: `parts`, each with its time. Raises BadAnswer.

        Nearly every part is whole chunks of whole events like those before: only its last token count is looked for.
        """
        alike = bool(self.times) and not self._rest and framing.between_chunks
        if alike and self._count and len(parts) > 1 and self._take_events(parts[:-1], stamps[:-1]):
            parts, stamps = parts[-1:], stamps[-1:]  # which may be the end
        for part, now in zip(parts, stamps, strict=True):
            if alike:
                if self._take_alike(part, now):
                    continue
                if part.endswith(LAST_CHUNKS) and self._take_alike(part[:-len(LAST_CHUNKS)], now):
                    self.finished = True
                    framing.end()
                    return
                cut = _end_of_alike(part)
                if cut and self._take_alike(part[:cut], now):
                    part = part[cut:]
            payload = framing.feed(part)
            if payload:
                self.feed(payload, now)
            alike = not self._rest and framing.between_chunks

    def _take_alike(self, part: bytes, now: float) -> bool:
        """Take a part that is whole chunks of whole events with tokens; False, with nothing taken, if in doubt.

        In a stream whose events end with two line feeds, such an end before a chunk's own line end is the chunk's end.
        """
        if not part.endswith(CHUNK_OF_EVENTS):
            return False
        if self._count:
            return self._take_counted(part, now)
        if _KEY in part or b"\n:" in part or b'"error"' in part or b"[DONE]" in part:
            return False
        events = part.count(b"\n\n")
        if part.count(b"}\n\n") != events:
            return False  # one that was cut off, or is no JSON at all
        for _ in range(events):
            self.times.append(now)
            self.counts.append(0)
        return True

    def _take_counted(self, part: bytes, now: float) -> bool:
        """The same where each event says how many tokens there are."""
        if part.count(_KEY) != part.count(b"\ndata:"):
            return False  # an event without a count of its own: an error, the end
        found = _COUNT(part, part.rfind(_KEY))
        if found is None or not self._count < (count := int(found[1])) <= self.most:
            return False
        self._count, self._tail, self._value = count, part, None
        self.times.append(now)
        self.counts.append(count)
        return True

    def begin(self, framing: Framing, data: bytes, now: float) -> int:
        """Take the beginning of an answer if it is one as it should be: how many bytes of it were taken."""
        if framing.status is not None or not begins_counting(data) or b'error"' in data:
            return 0
        body = data.index(b"\r\n\r\n") + 4
        framing.feed(data[:body])
        first = data.index(CHUNK_OF_EVENTS, body) + len(CHUNK_OF_EVENTS)  # an arrival of its own: TPOT counts from it
        if data.count(b"\ndata:", body - 2, first) != 1 or not framing.between_chunks \
                or not self._take_counted(data[body - 2:first], now):
            return body
        return len(data) if first == len(data) or self._take_counted(data[first - 2:], now) else first

    def _take_events(self, parts: Sequence[bytes], stamps: Sequence[float]) -> bool:
        """The same of parts that are one event each and say how many tokens there are."""
        data = b"".join(parts)
        counts = [int(count) for count in _COUNTS.findall(data)]
        if not len(parts) == len(counts) == data.count(b"\n\n") == data.count(CHUNK_OF_EVENTS):
            return False
        if counts[-1] > self.most or not all(
                before < count for before, count in zip([self._count, *counts], counts, strict=False)):
            return False
        if not all(part.endswith(CHUNK_OF_EVENTS) for part in parts):
            return False
        self._count, self._tail, self._value = counts[-1], parts[-1], None
        self.times.extend(stamps)
        self.counts.extend(counts)
        return True

    def feed(self, payload: bytes, now: float) -> None:
        """Take payload that arrived at `now`, event by event. Raises BadAnswer."""
        payload = self._rest + payload
        if b"\r\n" in payload:
            payload = payload.replace(b"\r\n", b"\n")
        cut = payload.rfind(b"\n\n") + 1
        self._rest = payload[cut + 1:] if cut else payload
        if len(self._rest) > EVENT_LIMIT:
            raise BadAnswer(f"an event of more than {EVENT_LIMIT >> 20} MiB")
        events = payload[:cut].split(b"\n\n") if cut else []
        at, last = 0, len(events) - 2  # what follows the last event's end is empty
        looked = False
        while at < len(events):
            if events[at] and not events[at].isspace():
                self._event(events[at], now)
            at += 1
            if self._count and not looked and at < last:
                looked = True
                if _all_count(events[at:last]):
                    at = last  # came together with the last one, which says how many tokens there are by now

    def _add(self, count: int, now: float) -> None:
        """An event with tokens; `count` so far, 0 if the server did not say."""
        self.times.append(now)
        self.counts.append(count)

    def _event(self, event: bytes, now: float) -> None:
        data = event[5:] if event.startswith(b"data:") and b"\n" not in event else b"\n".join(
            line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return  # a comment (ping) or another field
        if data.strip() == b"[DONE]":
            self.finished = True
            return
        value = http.parsed(data)
        if ("error" in value or "object" in value) and (told := http.error_in(value)):
            self.kind, self.error = "stream_error", told
        tokens = self._tokens(http.usage_of(value))
        if tokens:
            self._value = value
            if value.get("choices") != []:
                if tokens > self._count:
                    self._count = tokens
                    self._add(tokens, now)
                return
        if _brings_output(value):
            self._add(0, now)

    def close(self) -> dict[str, Any]:
        """Parse what the end said: usage, verify steps, finish reason. Empty when there was no count at all.

        Raises BadAnswer.
        """
        value = self._value
        if value is None:
            if not self._tail:
                return {}
            start, end = self._tail.rfind(b"\ndata:") + 6, self._tail.rfind(b"\n\n")
            value = http.parsed(self._tail[start:end] if start > 5 else self._tail)
        meta, usage = http.part(value, "meta_info"), http.usage_of(value)
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self.kind, self.error = "aborted", http.text(reason, "message") or "aborted by the server"
        if reason:
            self.finished = True
        steps = http.count(meta if "spec_verify_ct" in meta else usage, "spec_verify_ct")
        return {"completion_tokens": self._tokens(usage), "prompt_tokens": http.count(usage, "prompt_tokens"),
                "verify_steps": steps}

    def _tokens(self, usage: dict[str, Any]) -> int | None:
        """The tokens so far, none beyond those that were asked for. Raises BadAnswer."""
        told = http.count(usage, "completion_tokens")
        if told is not None and told > self.most + OVERSHOOT:
            raise BadAnswer(f"the server counts {told} tokens where {self.most} were asked for")
        return told if told is None else min(told, self.most)


def begins_counting(data: bytes) -> bool:
    """Whether this is the beginning of a good answer, in whole chunks of whole events, with a count of its tokens."""
    return data.endswith(CHUNK_OF_EVENTS) and _BEGUN(data) is not None


def _end_of_alike(part: bytes) -> int:
    """Where the chunks end that come before an error, the end of the stream, or a piece of a chunk; 0: at once."""
    stops = [at for at in (part.find(b'"error"'), part.find(b"[DONE]")) if at >= 0]
    at = part.rfind(CHUNK_OF_EVENTS, 0, min(stops, default=len(part)))
    return at + len(CHUNK_OF_EVENTS) if at >= 0 else 0


def _all_count(events: Sequence[bytes]) -> bool:
    """Whether each event says how many tokens there are so far, and nothing that must be looked at."""
    return all(_KEY in event and b'"error"' not in event for event in events)


def _brings_output(value: dict[str, Any]) -> bool:
    """Whether an event stands for output. A chat's first delta has only a role; a text may be withheld, yet count.

    Raises BadAnswer.
    """
    if value.get("text") or value.get("output_ids"):
        return True
    for choice in http.parts(value, "choices"):
        delta = http.part(choice, "delta")
        if choice.get("delta") is None or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False
