"""What a server answers, read as from a stranger: bounded in time, size and depth, and of the types that are expected.

    answer = ask(url + "/v1/models", within_s=30)       # raises NoAnswer, BadAnswer
    names = [text(model, "id") for model in parts(answer.json(), "data")]

Whatever a server sends ends in a value or in one of these two exceptions, which its caller makes a value of.
Requests take their whole answer within a time; the load client has its own way to read, and shares what is below it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 8 << 20
"""Of an answer: a completion, metrics and what a server says of itself are far smaller."""
MOST_DEPTH = 64
MOST_COUNT = 10**12
"""Of tokens and steps of one request."""
LARGEST_INT = 2**63 - 1
LATE = "no whole answer within"


class BadAnswer(ValueError):
    """What a server sent is not what was asked for: no HTTP/1.1 as RFC 9112 wants it, or not of the expected kind."""


class NoAnswer(Exception):
    """No whole answer came: refused, cut, or (`late`) not within its time."""

    def __init__(self, reason: str, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole answer, of at most the bytes that were allowed."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> dict[str, Any]:
        """The JSON object that it is, as `plain` gives it. Raises BadAnswer."""
        found: dict[str, Any] = plain(parsed(self.body))
        return found


def ask(url: str, body: Mapping[str, Any] | None = None, *, within_s: float,
        headers: Mapping[str, str] | None = None, most_bytes: int = MOST_BYTES) -> Answer:
    """GET, or POST a JSON body, and take the whole answer, all of it within a time. Follows no redirection.

    Raises NoAnswer, and BadAnswer for what is no HTTP or larger than `most_bytes`. Not for use in an event loop.
    """
    import asyncio

    return asyncio.run(_ask(url, body, within_s, headers or {}, most_bytes))


async def _ask(url: str, body: Mapping[str, Any] | None, within_s: float, headers: Mapping[str, str],
               most_bytes: int) -> Answer:
    import asyncio

    import httpx

    wanted = {"Accept-Encoding": "identity", "Connection": "close", **headers}
    pieces, size = [], 0
    try:
        async with (asyncio.timeout(within_s),  # httpx's own limits are for each read
                    httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as client,
                    client.stream("GET" if body is None else "POST", url, headers=wanted,
                                  json=body) as answer):
            async for piece in answer.aiter_raw():  # raw: what is packed stays so
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
    """What the operating system said of a connection, where it did."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(error) or type(error).__name__


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object as Python reads it. Raises BadAnswer."""
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

    Raises BadAnswer for what is nested more than `depth` deep.
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
    """A text without halves of characters (lone surrogates), which no file takes."""
    if words.isascii():
        return words
    return words.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def part(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; an empty one when there is none. Raises BadAnswer."""
    found = value.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise BadAnswer(f"{key} is not an object: {_shown(found)}")
    return found


def parts(value: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects under a key; [] when there is none. Raises BadAnswer."""
    found = value.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadAnswer(f"{key} is not a list of objects: {_shown(found)}")
    return found


def text(value: Mapping[str, Any], key: str) -> str:
    """The text under a key; "" when there is none. Raises BadAnswer."""
    found = value.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise BadAnswer(f"{key} is not a text: {_shown(found)}")
    return whole(found)


def count(value: Mapping[str, Any], key: str) -> int | None:
    """The count of tokens or steps under a key; None when there is none. Raises BadAnswer."""
    found = value.get(key)
    if found is None:
        return None
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MOST_COUNT:
        raise BadAnswer(f"{key} is not a count: {_shown(found)}")
    return found


def error_in(value: Mapping[str, Any]) -> str:
    """The server's own message in an answer that is an error; "" in any other. Raises BadAnswer."""
    error = value.get("error") or (value if value.get("object") == "error" else None)
    if not error:
        return ""
    told = error.get("message", error) if isinstance(error, dict) else error
    return whole(told) if isinstance(told, str) else _shown(told)


def usage_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Where an answer says how many tokens there are: `usage`, or SGLang's `meta_info`. Raises BadAnswer."""
    return part(value, "usage") or part(value, "meta_info")


def completion_text(value: Mapping[str, Any]) -> str:
    """The text of an answer that was not streamed, in any of the three protocols. Raises BadAnswer."""
    choices = parts(value, "choices")
    if not choices:
        return text(value, "text")
    return text(choices[0], "text") or text(part(choices[0], "message"), "content")


def _shown(value: Any) -> str:
    return json.dumps(plain(value))[:80]
