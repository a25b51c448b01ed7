"""Token streams as server-sent events: arrival times and token counts of one request.

The hot path only counts and stamps; events are parsed as JSON until the first token arrived, when an error
may be inside, and once at the end. Knows the streams of OpenAI-compatible servers and SGLang's /generate.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)').match


class BadStream(ValueError):
    """Bytes that are not server-sent events with JSON data."""


class TokenStream:
    """What one streamed answer gave so far.

    `times` are the arrivals of events with tokens, in seconds of the caller's clock; `counts` the tokens
    generated up to each (0 where the server did not say). `error` is the server's own message when it
    reported one inside the stream; `kind` then names it (`stream_error`, `aborted`).
    """

    __slots__ = ("_count", "_rest", "_tail", "counts", "error", "finished", "kind", "times")

    def __init__(self) -> None:
        self.times = array("d")
        self.counts = array("q")
        self.error: str | None = None
        self.kind: str | None = None
        self.finished = False  # [DONE] or a finish reason was seen
        self._count = 0
        self._rest = b""
        self._tail = b""  # the last events that carry token counts

    def feed(self, payload: bytes, now: float) -> int:
        """Take payload that arrived at `now`; returns how many events with tokens it completed."""
        if self._rest or not payload.endswith(b"\n\n"):
            payload = self._whole(payload)
            if not payload:
                return 0
        if self._count:  # the server counts along: nearly every payload is one event of that kind
            found = _COUNT(payload, payload.rfind(b'"completion_tokens"'))
            if found is not None and payload.find(b"\n\n") == len(payload) - 2:
                return self._counted(payload, int(found[1]), now)
        careful = self._count or not self.times or b"[DONE]" in payload
        if careful or b'"error"' in payload or b'"completion_tokens"' in payload:
            return sum(self._event(event, now) for event in payload.split(b"\n\n") if event)
        events = payload.count(b"\n\n")
        for _ in range(events):
            self.times.append(now)
            self.counts.append(0)
        return events

    def _counted(self, event: bytes, count: int, now: float) -> int:
        """An event that carries the number of tokens so far."""
        self._tail = event
        if count <= self._count:
            return 0
        self._count = count
        self.times.append(now)
        self.counts.append(count)
        return 1

    def _whole(self, payload: bytes) -> bytes:
        """The whole events at hand; what is incomplete waits for more."""
        payload = (self._rest + payload).replace(b"\r\n", b"\n")
        cut = payload.rfind(b"\n\n") + 2 if b"\n\n" in payload else 0
        self._rest = payload[cut:]
        return payload[:cut]

    def _event(self, event: bytes, now: float) -> int:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return 0  # a comment (ping) or another field
        if data == b"[DONE]":
            self.finished = True
            return 0
        try:
            value = json.loads(data)
        except ValueError as error:
            raise BadStream(f"not JSON: {data[:80]!r}") from error
        if not isinstance(value, dict):
            raise BadStream(f"not a JSON object: {data[:80]!r}")
        self._look_for_error(value)
        count = (value.get("usage") or value.get("meta_info") or {}).get("completion_tokens")
        if count:
            self._tail = event
            if value.get("choices") != []:
                return self._counted(event, int(count), now)
        if not _brings_output(value):
            return 0
        self.times.append(now)
        self.counts.append(0)
        return 1

    def _look_for_error(self, value: dict[str, Any]) -> None:
        error = value.get("error")
        if not error and value.get("object") == "error":
            error = value
        if error:
            self.kind = "stream_error"
            self.error = str(error.get("message", error)) if isinstance(error, dict) else str(error)

    def close(self) -> dict[str, Any]:
        """Parse what the end said: usage, verify steps, finish reason. Empty when there was no count at all."""
        if not self._tail:
            return {}
        lines = [line[5:] for line in self._tail.split(b"\n") if line.startswith(b"data:")]
        try:
            value = json.loads(b"\n".join(lines))
        except ValueError as error:
            raise BadStream(f"not JSON: {self._tail[:80]!r}") from error
        meta = value.get("meta_info") or {}
        usage = value.get("usage") or meta
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            self.kind, self.error = "aborted", str(reason.get("message", "aborted by the server"))
        if reason:
            self.finished = True
        steps = meta.get("spec_verify_ct", usage.get("spec_verify_ct"))
        return {"completion_tokens": usage.get("completion_tokens"), "prompt_tokens": usage.get("prompt_tokens"),
                "verify_steps": steps}


def _brings_output(value: dict[str, Any]) -> bool:
    """Whether an event stands for output. A chat's first delta has only a role; a text may be withheld, yet count."""
    if value.get("text") or value.get("output_ids"):
        return True
    for choice in value.get("choices") or ():
        delta = choice.get("delta")
        if delta is None or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False
