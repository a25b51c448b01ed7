"""What became of one request, as the load client reports it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotune.utils.files import write_lines

OK = "ok"
OPEN = "open"


@dataclasses.dataclass
class Reply:
    """One request: when it was due, sent, and ended; what arrived when.

    Times are seconds of CLOCK_MONOTONIC; an answer that is complete `ended` when the last of it arrived. `kind` is
    `ok`, `open` (still in flight when the load ended) or the kind of failure: `connect`, `reset`, `http_503`,
    `stream_error`, `aborted`, `partial`, `malformed`, `empty`, `timeout_first_token`, `timeout_token`,
    `timeout_request`. `completion_tokens` is the server's final count, None when it gave none. `times` and `counts` are
    as in `sse.TokenStream`; of a request that was not `watched` only the first and the last time are those of an
    arrival, the others are when it was looked at.
    """

    index: int
    wanted_tokens: int
    due: float
    sent: float
    ended: float | None = None
    kind: str = OPEN
    status: int | None = None
    detail: str = ""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    verify_steps: int | None = None
    attempts: int = 1
    watched: bool = True
    times: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    counts: array[int] = dataclasses.field(default_factory=lambda: array("q"))

    @property
    def ok(self) -> bool:
        return self.kind == OK

    @property
    def failed(self) -> bool:
        return self.kind not in (OK, OPEN)

    @property
    def counted(self) -> bool:
        """Whether the server said after every event how many tokens there were."""
        return bool(self.counts) and self.counts[0] > 0 and (len(self.counts) == 1 or self.counts[1] > 0)

    @property
    def tokens(self) -> int:
        """Output tokens by the server's count; events when it gave none."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return self.counts[-1] if self.counted else len(self.times)

    @property
    def ttft_s(self) -> float | None:
        """From when the request was due (sent, in a closed loop) to the first token."""
        return self.times[0] - self.due if self.times else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first arrival: tokens, not events, are counted."""
        later = self.tokens - (self.counts[0] if self.counted else 1)
        return (self.times[-1] - self.times[0]) / later if self.times and later > 0 else None

    @property
    def e2e_s(self) -> float | None:
        return self.ended - self.due if self.ended is not None else None


ARRAYS = ("times", "counts")


def packed(replies: Sequence[Reply]) -> tuple[list[dict[str, Any]], bytes]:
    """Replies as plain fields, with the number of events in place of the arrays, and the arrays' bytes one by one."""
    plain = [{**{f.name: getattr(r, f.name) for f in dataclasses.fields(r) if f.name not in ARRAYS},
              "events": [len(r.times), len(r.counts)]} for r in replies]
    return plain, b"".join(part for r in replies for part in (r.times.tobytes(), r.counts.tobytes()))


def unpacked(plain: Sequence[Mapping[str, Any]], data: bytes) -> list[Reply]:
    """The replies that `packed` took apart, on a machine of the same kind. Raises ValueError when `data` is short."""
    replies, at = [], 0
    for fields in plain:
        reply = Reply(**{k: v for k, v in fields.items() if k != "events"})
        for name, count in zip(ARRAYS, fields["events"], strict=True):
            values: array[Any] = getattr(reply, name)
            values.frombytes(data[at:at + count * values.itemsize])
            if len(values) != count:
                raise ValueError("the replies of the load client end too early")
            at += count * values.itemsize
        replies.append(reply)
    return replies


def write_replies(path: pathlib.Path, replies: Iterable[Reply], zero: float,
                  hide: Callable[[str], str] = str) -> None:
    """One JSON line per request, in the order of sending; times in seconds after `zero`; what servers said is hidden by
    `hide` where it is secret."""
    def after(t: float | None) -> float | None:
        return None if t is None else round(t - zero, 6)

    def lines() -> Iterator[str]:
        for reply in sorted(replies, key=lambda r: r.sent):
            row = {"index": reply.index, "kind": reply.kind, "status": reply.status, "due_s": after(reply.due),
                   "sent_s": after(reply.sent), "first_s": after(reply.times[0] if reply.times else None),
                   "last_s": after(reply.times[-1] if reply.times else None), "ended_s": after(reply.ended),
                   "wanted_tokens": reply.wanted_tokens, "tokens": reply.tokens, "events": len(reply.times),
                   "prompt_tokens": reply.prompt_tokens, "verify_steps": reply.verify_steps,
                   "attempts": reply.attempts, "detail": hide(reply.detail)}
            yield json.dumps({k: v for k, v in row.items() if v not in (None, "")}) + "\n"

    write_lines(path, lines())
