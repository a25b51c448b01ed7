"""HTTP requests to servers that are not trusted: answers are bounded in time, size and depth, and checked for types.

    answer = ask(url + "/v1/models", within_s=30)       # raises NoAnswer, BadAnswer
    names = [text(model, "id") for model in parts(answer.json(), "data")]

The load client reads answers in its own way and shares the JSON helpers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

MOST_BYTES = 8 << 20  # of an answer: completions, metrics and server settings are far smaller
MOST_DEPTH = 64  # of nested JSON
MOST_COUNT = 10**12  # of tokens and steps of one request
LARGEST_INT = 2**63 - 1
LATE = "no whole answer within"
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_COUNT)]


class BadAnswer(ValueError):
    """The server sent something else than the answer: no HTTP/1.1 (RFC 9112), no JSON, or a wrong type."""


class NoAnswer(Exception):
    """No whole answer: refused, cut, or (`late`) not in time."""

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer within the allowed bytes."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """The body as a JSON object, made storable by `plain`. Raises BadAnswer."""
        found: dict[str, Any] = plain(parsed(self.body))
        return found


def ask(url: str, body: Mapping[str, Any] | None = None, *, within_s: float, most_bytes: int = MOST_BYTES) -> Answer:
    """GET, or POST a JSON body, and take the whole answer within a time. Follows no redirection.

    Raises NoAnswer, and BadAnswer for bad HTTP or more than `most_bytes`. Not for use in an event loop.
    """
    import asyncio

    return asyncio.run(_ask(url, body, within_s, most_bytes))


async def _ask(url: str, body: Mapping[str, Any] | None, within_s: float, most_bytes: int) -> Answer:
    import asyncio

    import httpx

    wanted = {"Accept-Encoding": "identity", "Connection": "close"}
    pieces, size = [], 0
    try:
        async with (asyncio.timeout(within_s),  # httpx limits each read, not the whole
                    httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
                    client.stream("GET" if body is None else "POST", url, headers=wanted, json=body) as answer):
            async for piece in answer.aiter_raw():  # raw: compressed bodies are not unpacked
                pieces.append(piece)
                size += len(piece)
                if size > most_bytes:
                    raise BadAnswer(f"an answer of more than {most_bytes >> 20} MiB")
    except TimeoutError as error:
        raise NoAnswer(f"{LATE} {within_s:g} s", late=True) from error
    except (httpx.RemoteProtocolError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        if "closed connection" in str(error) or "disconnected" in str(error):
            raise NoAnswer("the server closed the connection before the end of its answer") from error
        raise BadAnswer(f"no answer as HTTP has it: {error}") from error
    except httpx.TransportError as error:
        raise NoAnswer(_reason(error)) from error
    return Answer(answer.status_code, b"".join(pieces))


def _reason(error: BaseException) -> str:
    """The operating system's reason for a failed connection, if it gave one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object; NaN and lone surrogates, which servers send, are taken. Raises BadAnswer."""
    try:
        value = json.loads(data.decode())
    except RecursionError as error:
        raise BadAnswer("JSON that is nested too deeply") from error
    except ValueError as error:  # no UTF-8, no JSON, a number of thousands of digits
        raise BadAnswer(f"not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise BadAnswer(f"not a JSON object: {data[:80]!r}")
    return value


def plain(value: Any, depth: int = MOST_DEPTH) -> Any:
    """JSON that every file and database takes: whole characters, finite numbers of 64 bits (others become text).

    Raises BadAnswer for JSON nested more than `depth` deep.
    """
    if isinstance(value, str):
        return whole(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= LARGEST_INT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not depth:
        raise BadAnswer(f"JSON that is nested more than {MOST_DEPTH} deep")
    if isinstance(value, dict):
        return {whole(str(key)): plain(inner, depth - 1) for key, inner in value.items()}
    return [plain(inner, depth - 1) for inner in value]


def whole(words: str) -> str:
    """`words` with lone surrogates replaced: no file takes them."""
    return words if words.isascii() else words.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def part(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; {} when absent. Raises BadAnswer."""
    return _typed(value, key, dict[str, Any], "an object") or {}


def parts(value: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects under a key; [] when absent. Raises BadAnswer."""
    return _typed(value, key, list[dict[str, Any]], "a list of objects") or []


def text(value: Mapping[str, Any], key: str) -> str:
    """The text under a key; "" when absent. Raises BadAnswer."""
    return whole(_typed(value, key, str, "a text") or "")


def count(value: Mapping[str, Any], key: str) -> int | None:
    """The count of tokens or steps under a key; None when absent. Raises BadAnswer."""
    found: int | None = _typed(value, key, Count, "a count")
    return found


def _typed(value: Mapping[str, Any], key: str, kind: Any, name: str) -> Any:
    found = value.get(key)
    try:
        return None if found is None else msgspec.convert(found, kind)
    except msgspec.ValidationError:
        raise BadAnswer(f"{key} is not {name}: {_shown(found)}") from None


def error_in(value: Mapping[str, Any]) -> str:
    """The server's message in an answer that is an error; "" in any other. Raises BadAnswer."""
    error = value.get("error") or (value if value.get("object") == "error" else None)
    message = error.get("message", error) if isinstance(error, dict) else error or ""
    return whole(message) if isinstance(message, str) else _shown(message)


def usage_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """The token counts of an answer: `usage`, or SGLang's `meta_info`. Raises BadAnswer."""
    return part(value, "usage") or part(value, "meta_info")


def completion_text(value: Mapping[str, Any]) -> str:
    """The text of an answer that was not streamed, in any of the three protocols. Raises BadAnswer."""
    choices = parts(value, "choices")
    if not choices:
        return text(value, "text")
    return text(choices[0], "text") or text(part(choices[0], "message"), "content")


def _shown(value: Any) -> str:
    return json.dumps(plain(value))[:80]
