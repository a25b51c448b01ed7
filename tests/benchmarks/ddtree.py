"""Measures the embedded DDTree server: acceptance length against the tree, and output tokens per second.

    python tests/benchmarks/ddtree.py [--json] [--device cuda] [--repeats 3] [--skip-acceptance]

Prompts are windows of standard library files that training held out. Each figure is the median of interleaved
repeats over servers that run at the same time; idle servers sleep.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
BUDGETS, TOPKS = (4, 8, 16, 32, 64), (1, 2, 4, 8)
SPEED_BUDGETS, CLIENTS = (0, 4, 8, 16), (1, 16)


def prompts(count: int, characters: int) -> list[str]:
    """Windows of held-out files, evenly spread."""
    sys.path.insert(0, str(ROOT))
    from autotune.ddtree.train import read_text

    text = "\n".join(read_text(Path(sysconfig.get_paths()["stdlib"]))[1])
    stride = (len(text) - characters) // count
    return [text[start : start + characters] for start in range(0, stride * count, stride)]


@contextlib.contextmanager
def served(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server of its own, which answers; it is stopped when the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "autotune.ddtree", "--port", port, *flags, "--log-level", "warning"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}: {' '.join(command)}")
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def load(url: str, texts: Sequence[str], clients: int, tokens: int, temperature: float) -> dict[str, float]:
    """Sends every text once from `clients` closed loops; return output tokens/s and tokens per verify step."""
    waiting = list(texts)
    made = steps = 0

    async def loop(client: httpx.AsyncClient) -> None:
        nonlocal made, steps
        while waiting:
            body = {"prompt": waiting.pop(), "max_tokens": tokens, "temperature": temperature, "ignore_eos": True}
            answer: dict[str, Any] = (await client.post(url + "/v1/completions", json=body)).raise_for_status().json()
            made += answer["usage"]["completion_tokens"]
            steps += answer["meta_info"].get("spec_verify_ct", 0)

    async with httpx.AsyncClient(timeout=600) as client:
        start = time.perf_counter()
        await asyncio.gather(*(loop(client) for _ in range(clients)))
        seconds = time.perf_counter() - start
    return {"tokens_per_s": made / seconds, "accept_length": made / steps if steps else float("nan")}


def acceptance(flags: Sequence[str], texts: Sequence[str], tokens: int, temperature: float) -> list[dict[str, float]]:
    rows = []
    for budget, topk in itertools.product(BUDGETS, TOPKS):
        with served([*flags, "--tree-budget", str(budget), "--tree-topk", str(topk)]) as url:
            result = asyncio.run(load(url, texts, 8, tokens, temperature))
        rows.append({"budget": budget, "topk": topk, "accept_length": round(result["accept_length"], 3)})
    return rows


def speed(flags: Sequence[str], texts: Sequence[str], tokens: int, temperature: float,
          repeats: int) -> list[dict[str, float]]:
    rows = []
    with contextlib.ExitStack() as stack:
        servers = {budget: stack.enter_context(served([*flags, "--tree-budget", str(budget)]))
                   for budget in SPEED_BUDGETS}
        for url in servers.values():
            asyncio.run(load(url, texts[:2], 2, 16, temperature))
        for clients in CLIENTS:
            asked = texts[: max(3, 2 * clients)]
            found: dict[int, list[float]] = {budget: [] for budget in servers}
            for _ in range(repeats):
                for budget, url in servers.items():
                    result = asyncio.run(load(url, asked, clients, tokens, temperature))
                    found[budget].append(result["tokens_per_s"])
                    print(f"{clients} clients, budget {budget}: {result}", file=sys.stderr, flush=True)
            for budget, values in found.items():
                rows.append({"clients": clients, "budget": budget, "tokens_per_s": round(statistics.median(values), 1),
                             "lowest": round(min(values), 1), "highest": round(max(values), 1)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="model directory; default: the packaged one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--skip-acceptance", action="store_true", help="speed only")
    options = parser.parse_args()
    flags = ["--device", options.device, *(["--model", options.model] if options.model else [])]
    texts = prompts(32, 400)
    result: dict[str, Any] = {"speed": speed(flags, texts, options.tokens, options.temperature, options.repeats)}
    if not options.skip_acceptance:
        result["acceptance"] = acceptance(flags, texts[::2], options.tokens, options.temperature)
    if options.json:
        print(json.dumps(result))
        return

    def table(kind: str, first: str, heads: Sequence[str], numbers: Sequence[int], cell: str) -> None:
        print(f"| {first} | {' | '.join(heads)} |\n{'| --- ' * (len(heads) + 1)}|")
        for n in numbers:
            print(f"| {n} | " + " | ".join(cell.format(**row) for row in result[kind] if row[first] == n) + " |")

    table("speed", "clients", [f"budget {n}" for n in SPEED_BUDGETS], CLIENTS, "{tokens_per_s:.0f} tokens/s")
    if "acceptance" in result:
        print()
        table("acceptance", "budget", [f"topk {n}" for n in TOPKS], BUDGETS, "{accept_length:.2f}")


if __name__ == "__main__":
    main()
