"""Results of a load: a `Reply` per request, a `Tick` of counters five times a second, a `Tally`, a `LoadFailure`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from autotune.loadgen.wire_formats import TokenStream
from autotune.utils.files import write_lines
from autotune.utils.http import BadAnswer

OK = "ok"
OPEN = "open"
NO_FAILURES = ("retry", "late")  # kinds that a tally counts besides failures
DETAIL_CHARS = 500


@dataclasses.dataclass
class Reply:
    """One request: when it was due, sent, and ended; what arrived when.

    Times are seconds of CLOCK_MONOTONIC; `ended` is the arrival of the last byte. `kind` is `ok`, `open` (in flight
    when the load ended) or the kind of failure: `connect`, `reset`, `http_503`, `stream_error`, `aborted`, `partial`,
    `malformed`, `empty`, `timeout_first_token`, `timeout_token`, `timeout_request`. `completion_tokens` is the
    server's final count, None when it gave none. `times` and `counts` are those of `TokenStream`; of a request that
    was not `watched` only the first and the last time are arrivals, the others are reads.
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
        """True if the server gave a running token count with every event."""
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


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Counters of a running load at `t` (CLOCK_MONOTONIC seconds).

    `counted` tokens are the server's running counts, with an estimate of what streams brought since they were last
    read. `events` come from streams without counts; each stands for `ratio` tokens, by the finished requests. `kinds`
    counts failures, and `retry` and `late`; `details` has one example each. `wait_s` is the time that the client was
    ready to run and did not; None where the system does not say.
    """

    t: float
    counted: float
    events: int
    ratio: float
    in_flight: int
    finished: int
    kinds: dict[str, int]
    details: dict[str, str]
    cpu_s: float
    wait_s: float | None

    @property
    def tokens(self) -> float:
        return self.counted + self.events * self.ratio

    @property
    def errors(self) -> int:
        """Failed requests; retries and late arrivals are not failures."""
        return sum(n for kind, n in self.kinds.items() if kind not in NO_FAILURES)


class Final(msgspec.Struct, frozen=True, tag=True):
    """The last line of a load: its packed replies follow, `size` bytes."""

    size: int


@dataclasses.dataclass(frozen=True)
class LoadFailure:
    """A load on a started server that gave no measurement; with the server's log it becomes a Crash.

    `kind` is `server_died`, `no_answer` (to the very first request), `error_rate`, `hung` (every error was a timeout)
    or `gpu_lost` (no configuration can be measured until a person has acted). `detail` is one line for a person;
    `excerpt` is the server's answer to a failed request.
    """

    kind: str
    detail: str
    excerpt: str = ""


def packed(replies: Sequence[Reply]) -> bytes:
    """Replies in msgpack, their arrays as raw bytes, for a machine of the same kind."""
    return msgspec.msgpack.encode(replies, enc_hook=lambda values: values.tobytes())


def unpacked(data: bytes) -> list[Reply]:
    """The replies that `packed` encoded. Raises msgspec.DecodeError when `data` is cut."""
    return [Reply(**{**row, "times": array("d", row["times"]), "counts": array("q", row["counts"])})
            for row in msgspec.msgpack.decode(data)]


class Tally:
    """Finished requests and running counters of a load. `kinds` counts failures, and `retry` and `late`."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.kinds: Counter[str] = Counter()
        self.details: dict[str, str] = {}
        self.errors_in_row = 0
        self._finished = self._counted_tokens = self._loose_events = 0
        self._known_events = self._known_tokens = 0  # of streams without running counts that gave a final one

    def complete(self, done: Reply, status: int | None, stream: TokenStream, now: float) -> None:
        """Count a request whose answer is complete: a success, or the failure that the answer reports."""
        self.ended(done, status, now, *_outcome(done, status, stream))

    def tick(self, now: float, streams: Sequence[TokenStream], unread: float, cpu_s: float,
             wait_s: float | None) -> Tick:
        """The counters at `now`, given the running streams and the tokens that they have not read yet."""
        arrivals = [stream.counts for stream in streams if stream.counts]
        counted = self._counted_tokens + sum(counts[-1] for counts in arrivals if counts[0])
        events = self._loose_events + sum(len(counts) for counts in arrivals if not counts[0])
        ratio = self._known_tokens / self._known_events if self._known_events else 1.0
        return Tick(now, counted + unread, events, ratio, len(streams), self._finished, dict(self.kinds), self.details,
                    cpu_s, wait_s)

    def ended(self, done: Reply, status: int | None, now: float, kind: str, detail: str) -> None:
        """Count a request that ended `now`. Without a whole answer its tokens so far count."""
        done.ended, done.status, done.kind, done.detail = now, status, kind, detail[:DETAIL_CHARS]
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


def _outcome(done: Reply, status: int | None, stream: TokenStream) -> tuple[str, str]:
    """(kind, detail) of a complete answer, whose final counts are set."""
    if status != 200:
        return f"http_{status}", done.detail
    try:
        done.completion_tokens, done.prompt_tokens, done.verify_steps = stream.close()
    except BadAnswer as error:
        return "malformed", str(error)
    if stream.error is not None:
        return stream.kind or "stream_error", stream.error
    if not stream.finished and done.completion_tokens is None:
        return "partial", "the stream ended without [DONE], usage or a finish reason"
    return (OK, "") if done.tokens else ("empty", "no output token")


def write_replies(path: pathlib.Path, replies: Iterable[Reply], zero: float,
                  hide: Callable[[str], str] = str) -> None:
    """Write one JSON line per request, in the order of sending, with times in seconds after `zero`.

    `hide` takes secrets out of the server's messages.
    """
    def line(reply: Reply) -> str:
        first, last = (reply.times[0], reply.times[-1]) if reply.times else (None, None)
        moments = {"due_s": reply.due, "sent_s": reply.sent, "first_s": first, "last_s": last, "ended_s": reply.ended}
        row = {"index": reply.index, "kind": reply.kind, "status": reply.status,
               **{name: None if t is None else round(t - zero, 6) for name, t in moments.items()},
               "wanted_tokens": reply.wanted_tokens, "tokens": reply.tokens, "events": len(reply.times),
               "prompt_tokens": reply.prompt_tokens, "verify_steps": reply.verify_steps,
               "attempts": reply.attempts, "detail": hide(reply.detail)}
        return json.dumps({k: v for k, v in row.items() if v not in (None, "")}) + "\n"

    write_lines(path, map(line, sorted(replies, key=lambda r: r.sent)))
