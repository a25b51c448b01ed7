"""The wire formats of the APIs that the load client speaks: request bodies and streamed events.

`WIRE_FORMATS` has one entry per name in `Api`, the values of `request.api` in an engine file. A format turns a
`Generation` into a JSON body and decodes one streamed event into the few fields that `TokenStream` needs.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from autotune.utils import http
from autotune.utils.http import MOST_COUNT, BadAnswer, Count

Api = Literal["openai_completions", "sglang_generate"]
Prompt = str | list[int]  # text or token ids

CHUNK_OF_EVENTS = b"\n\n\r\n"  # the end of a chunk that holds whole events
DONE = b"[DONE]"
ERROR_KIND = msgspec.Raw(b'"error"')  # `object` of an error event of SGLang
EVENT_LIMIT = 8 << 20  # bytes of one event
OVERSHOOT = 64  # tokens of a last verify step that servers may count beyond the request's limit; not worth anything
_KEY = b'"completion_tokens"'
_COUNT = re.compile(rb'"completion_tokens":\s*(\d{1,12})(?!\d)').match
_COUNTS_FIRST_TOKEN = re.compile(rb'HTTP/1\.1 200 .*"completion_tokens":\s*[1-9]', re.DOTALL).match


class Generation(msgspec.Struct, frozen=True):
    """One generation of at most `output_tokens` tokens, independent of the API."""

    model: str
    prompt: Prompt
    output_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    stream: bool = False
    continuous_usage: bool = False


def _openai_body(asked: Generation) -> dict[str, Any]:
    body: dict[str, Any] = {"model": asked.model, "max_tokens": asked.output_tokens, "temperature": asked.temperature,
                            "stream": asked.stream, "prompt": asked.prompt}
    if asked.ignore_eos:
        body["ignore_eos"] = True
    if asked.stream:
        body["stream_options"] = {"include_usage": True}
        if asked.continuous_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    return body


def _generate_body(asked: Generation) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_new_tokens": asked.output_tokens, "temperature": asked.temperature}
    if asked.ignore_eos:
        sampling["ignore_eos"] = True
    prompt_key = "text" if isinstance(asked.prompt, str) else "input_ids"
    return {"sampling_params": sampling, "stream": asked.stream, prompt_key: asked.prompt}


_ABSENT = msgspec.Raw(b"")
_EMPTY = (b"", b"null", b'""', b"[]")


class Usage(msgspec.Struct):
    """Token counts of an event: `usage` in OpenAI's formats, `meta_info` in SGLang's."""

    completion_tokens: Count | None = None
    prompt_tokens: Count | None = None
    spec_verify_ct: Count | None = None
    finish_reason: msgspec.Raw = _ABSENT


class Event(msgspec.Struct):
    """One streamed event. Fields of which only the presence counts stay undecoded (msgspec.Raw)."""

    usage: Usage | None = None
    meta_info: Usage | None = None
    error: msgspec.Raw = _ABSENT
    kind: msgspec.Raw = msgspec.field(default=_ABSENT, name="object")

    @property
    def brings_output(self) -> bool:
        """True if the event stands for output, also when its text is withheld."""
        raise NotImplementedError

    @property
    def only_usage(self) -> bool:
        """True if the event brings no output, only the final counts."""
        return False


class _Choice(msgspec.Struct):
    """One choice: its presence stands for output."""


class OpenAIEvent(Event):
    choices: list[_Choice] | None = None

    @property
    def brings_output(self) -> bool:
        return bool(self.choices)

    @property
    def only_usage(self) -> bool:
        return self.choices == []


class GenerateEvent(Event):
    text: msgspec.Raw = _ABSENT
    output_ids: msgspec.Raw = _ABSENT

    @property
    def brings_output(self) -> bool:
        return _any_of(self.text, self.output_ids)


def _any_of(*values: msgspec.Raw) -> bool:
    return any(bytes(value) not in _EMPTY for value in values)


class WireFormat(msgspec.Struct, frozen=True):
    """One HTTP interface: where to POST, the body of a request, and the decoder of a streamed event."""

    path: str
    body: Callable[[Generation], dict[str, Any]]
    decode: Callable[[bytes], Event]


COMPLETIONS = WireFormat("/v1/completions", _openai_body, msgspec.json.Decoder(OpenAIEvent).decode)
GENERATE = WireFormat("/generate", _generate_body, msgspec.json.Decoder(GenerateEvent).decode)
WIRE_FORMATS: dict[Api, WireFormat] = {"openai_completions": COMPLETIONS, "sglang_generate": GENERATE}


class FinalCounts(NamedTuple):
    """Counts at the end of an answer; None where the server gives none."""

    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    verify_steps: int | None = None


class TokenStream:
    """The server-sent events of one answer: arrival times and token counts.

    `times` are the arrivals of tokens, in seconds of the caller's clock; `counts` the tokens generated up to each
    arrival, 0 where the server gives no count (then every event is an arrival). `error` is the server's own message
    of a failure inside the stream, `kind` its name (`stream_error`, `aborted`). `finished`: [DONE] or a finish reason
    was seen. `most` tokens were asked for: more are not counted, and many more are a bad answer.
    """

    __slots__ = ("_count", "_decode", "_final", "_last", "_rest", "counts", "error", "finished", "kind", "most",
                 "times")

    def __init__(self, wire_format: WireFormat = COMPLETIONS, most: int = MOST_COUNT) -> None:
        self.most = most
        self.times, self.counts = array("d"), array("q")
        self.error: str | None = None
        self.kind: str | None = None
        self.finished = False
        self._decode = wire_format.decode
        self._count, self._rest = 0, b""
        self._final: Event | None = None  # the last event with a token count ...
        self._last = b""  # ... or its JSON

    @property
    def counting(self) -> bool:
        """True if the server's events carry running token counts."""
        return self._count > 0

    def take(self, pieces: Sequence[bytes], now: float) -> None:
        """Take pieces of payload that arrived at `now`, most often one event each. Raises BadAnswer."""
        if self._rest or pieces[-1][-2:] != b"\n\n" or b"".join(pieces).count(b"\n") != 2 * len(pieces):
            pieces = self._whole_events(pieces)
        for event in pieces:
            self._event(event, now)

    def skip_chunks(self, data: bytes, now: float) -> int:
        """Take chunks of whole events like those before, of which only the last token count is read: the bytes taken.

        Nearly all tokens of a load come this way: three searches cost less than parsing every chunk. `data` begins
        with a chunk.
        """
        end = len(data) if data.endswith(CHUNK_OF_EVENTS) else \
            data.rfind(CHUNK_OF_EVENTS, 0, max(data.rfind(DONE), 0)) + len(CHUNK_OF_EVENTS)
        if end < 2 * len(CHUNK_OF_EVENTS) or self._rest or not self._count \
                or data.count(_KEY, 0, end) != data.count(b"\ndata:", 0, end):
            return 0  # an event without a count of its own: an error, the end
        found = _COUNT(data, data.rfind(_KEY, 0, end))
        if found is None or not self._count < (count := int(found[1])) <= self.most:
            return 0
        self._count, self._last = count, data[data.rfind(b"\ndata:", 0, end) + 6:end - 2]
        self.times.append(now)
        self.counts.append(count)
        return end

    def _whole_events(self, pieces: Sequence[bytes]) -> list[bytes]:
        payload = b"".join(pieces)
        ends = b"\n" in payload
        payload = self._rest + payload
        if ends:
            payload = payload.replace(b"\r\n", b"\n")
        *events, self._rest = payload.split(b"\n\n") if ends else (payload,)
        if len(self._rest) > EVENT_LIMIT:
            raise BadAnswer(f"an event of more than {EVENT_LIMIT >> 20} MiB")
        return [event + b"\n\n" for event in events]

    def _event(self, event: bytes, now: float) -> None:
        data = event[5:-2] if event.startswith(b"data:") and b"\n" not in event[:-2] else b"\n".join(
            line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return  # a comment (ping) or another field
        if data.strip() == DONE:
            self.finished = True
            return
        value = self._decoded(data)
        if (value.error or value.kind == ERROR_KIND) and (message := http.error_in(http.parsed(data))):
            self.kind, self.error = "stream_error", message
        tokens = self._tokens(value)
        if tokens:
            self._final, self._last = value, b""
            if tokens <= self._count or (value.only_usage and not self._count):
                return
            self._count = tokens
        elif not value.brings_output:
            return
        self.times.append(now)
        self.counts.append(tokens or 0)

    def _decoded(self, data: bytes) -> Event:
        try:
            try:
                return self._decode(data)
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, RecursionError):  # JSON that Python takes: NaN, half of a surrogate pair
                return self._decode(json.dumps(http.plain(http.parsed(data))).encode())
        except msgspec.ValidationError as error:
            raise BadAnswer(f"not an event of this API ({error}): {data[:80]!r}") from error

    def _tokens(self, value: Event) -> int | None:
        """Tokens so far, at most those that were asked for. Raises BadAnswer."""
        usage = value.usage or value.meta_info
        tokens = usage.completion_tokens if usage is not None else None
        if tokens is not None and tokens > self.most + OVERSHOOT:
            raise BadAnswer(f"the server counts {tokens} tokens where {self.most} were asked for")
        return tokens if tokens is None else min(tokens, self.most)

    def close(self) -> FinalCounts:
        """Counts and finish reason of the last event that carried a count. Raises BadAnswer."""
        value = self._decoded(self._last) if self._last else self._final
        if value is None:
            return FinalCounts()
        usage, meta = value.usage or value.meta_info or Usage(), value.meta_info or Usage()
        if meta.finish_reason and _any_of(meta.finish_reason):
            self.finished = True
            reason = http.parsed(bytes(meta.finish_reason)) if bytes(meta.finish_reason).startswith(b"{") else {}
            if reason.get("type") == "abort":
                self.kind, self.error = "aborted", http.text(reason, "message") or "aborted by the server"
        steps = usage.spec_verify_ct if meta.spec_verify_ct is None else meta.spec_verify_ct
        return FinalCounts(self._tokens(value), usage.prompt_tokens, steps)


def begins_counting(data: bytes) -> bool:
    """True for the beginning of a good answer, in whole chunks of whole events, with a count of its tokens."""
    return data.endswith(CHUNK_OF_EVENTS) and _COUNTS_FIRST_TOKEN(data) is not None
