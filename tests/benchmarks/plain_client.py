"""A load client as one writes it with a library, for comparison.

    python plain_client.py httpx|aiohttp URL CONCURRENCY REQUESTS OUT.json

Runs in any environment that has the library: streams /v1/completions on one event loop and parses every event.
"""

from __future__ import annotations

import asyncio
import functools
import json
import pathlib
import sys
import time
from typing import Any

PROMPT, OUTPUT_TOKENS = "x" * 60, 64
BODY = {"model": "stub", "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def one(lines: Any) -> dict[str, float]:
    """Read one answer: its tokens, first and last arrival."""
    tokens, first, last = 0, 0.0, 0.0
    async for raw in lines:
        line = raw.decode() if isinstance(raw, bytes) else raw
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            continue
        now, value = time.monotonic(), json.loads(line[5:])
        count = (value.get("usage") or {}).get("completion_tokens") or 0
        if count > tokens:
            first = first or now
            tokens, last = count, now
    return {"tokens": tokens, "first": first, "last": last}


async def run(library: str, url: str, concurrency: int, requests: int) -> list[dict[str, float]]:
    done: list[dict[str, float]] = []
    left = iter(range(requests))
    if library == "httpx":
        import httpx

        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        client: Any = httpx.AsyncClient(limits=limits, timeout=600)
    else:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=concurrency)
        client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600))

    async def ask() -> None:
        for _ in left:
            sent = time.monotonic()
            begin = functools.partial(client.stream, "POST") if library == "httpx" else client.post
            async with begin(url + "/v1/completions", json=BODY) as answer:
                found = await one(answer.aiter_lines() if library == "httpx" else answer.content)
            done.append({**found, "sent": sent})

    async with client:
        await asyncio.gather(*(ask() for _ in range(concurrency)))
    return done


def main() -> None:
    library, url, concurrency, requests, out = sys.argv[1:]
    done = [d for d in asyncio.run(run(library, url, int(concurrency), int(requests))) if d["tokens"] == OUTPUT_TOKENS]
    pathlib.Path(out).write_text(json.dumps({
        "requests": len(done), "tokens": sum(d["tokens"] for d in done), "ttft": [d["first"] - d["sent"] for d in done],
        "tpot": [(d["last"] - d["first"]) / (d["tokens"] - 1) for d in done]}))


if __name__ == "__main__":
    main()
