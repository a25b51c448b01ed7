"""The load client's books: what became of each request, and the running counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from autotune.loadgen import sse
from autotune.loadgen.result import OK, Reply
from autotune.utils.http import BadAnswer

DETAIL_CHARS = 500


class Tally:
    """Finished requests and counters of a load. `kinds` counts failures, and `retry` and `late` besides."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.kinds: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.errors_in_row = 0
        self._finished = self._counted_tokens = self._loose_events = 0
        self._known_events = self._known_tokens = 0  # of streams without running counts that said a final one

    def ended(self, done: Reply, status: int | None, stream: sse.TokenStream, now: float) -> None:
        """A request whose answer is complete: a success, or whatever the answer says."""
        done.ended, done.status = now, status
        if status != 200:
            self._account(done, f"http_{status}", done.detail)
            return
        try:
            _fill(done, stream)
        except BadAnswer as error:
            self._account(done, "malformed", str(error))
            return
        if stream.error is not None:
            self._account(done, stream.kind or "stream_error", stream.error)
        elif not stream.finished and done.completion_tokens is None:
            self._account(done, "partial", "the stream ended without [DONE], usage or a finish reason")
        elif not done.tokens:
            self._account(done, "empty", "no output token")
        else:
            self._account(done, OK, "")

    def broke(self, done: Reply, status: int | None, stream: sse.TokenStream, now: float, kind: str,
              detail: str) -> None:
        """A request that did not get its whole answer. Its tokens so far count; its final count is unknown."""
        done.ended, done.status = now, status
        done.times, done.counts = stream.times, stream.counts
        self._account(done, kind, detail)

    def row(self, now: float, open_streams: Iterable[sse.TokenStream]) -> dict[str, Any]:
        """The counters at `now`, given the streams that are still running: the fields of `client.Tick`."""
        counted, events, flying = self._counted_tokens, self._loose_events, 0
        for stream in open_streams:
            flying += 1
            counts = stream.counts
            if counts and counts[0]:
                counted += counts[-1]
            else:
                events += len(counts)
        ratio = self._known_tokens / self._known_events if self._known_events else 1.0
        return {"t": now, "counted": counted, "events": events, "ratio": ratio, "in_flight": flying,
                "finished": self._finished, "kinds": dict(self.kinds), "details": self.details}

    def _account(self, done: Reply, kind: str, detail: str) -> None:
        done.kind, done.detail = kind, detail[:DETAIL_CHARS]
        self.replies.append(done)
        if kind == OK:
            self._finished += 1
            self.errors_in_row = 0
        else:
            self.errors_in_row += 1
            self.kinds[kind] += 1
            self.details.setdefault(kind, done.detail)
        if done.counted:
            self._counted_tokens += done.tokens
            return
        self._loose_events += len(done.times)
        if done.completion_tokens is not None:
            self._known_events += len(done.times)
            self._known_tokens += done.completion_tokens


def _fill(done: Reply, stream: sse.TokenStream) -> None:
    """Move what the stream gave into the reply."""
    done.times, done.counts = stream.times, stream.counts
    end = stream.close()
    done.completion_tokens = end.get("completion_tokens")
    done.prompt_tokens = end.get("prompt_tokens")
    done.verify_steps = end.get("verify_steps")
