"""Measures the embedded DDTree server: acceptance length against the tree, and output tokens per second.

    python tests/benchmarks/ddtree.py [--json] [--device cuda] [--repeats 3] [--skip-acceptance]

Prompts are windows of standard library files that training held out. Each figure is the median of interleaved
repeats over servers that run at the same time; idle servers sleep.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack
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


class Running:
    """A server of its own on a free port, stopped when the block ends."""

    def __init__(self, flags: Sequence[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.command = [sys.executable, "-m", "autotune.ddtree", "--port", str(self.port), *flags]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Running":
        self.process = subprocess.Popen([*self.command, "--log-level", "warning"], cwd=ROOT)
        return self

    def wait(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise SystemExit(f"the server ended with {self.process.returncode}: {' '.join(self.command)}")
            try:
                if httpx.get(self.url + "/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


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
    for budget in BUDGETS:
        for topk in TOPKS:
            with Running([*flags, "--tree-budget", str(budget), "--tree-topk", str(topk)]) as server:
                server.wait()
                result = asyncio.run(load(server.url, texts, 8, tokens, temperature))
            rows.append({"budget": budget, "topk": topk, "accept_length": round(result["accept_length"], 3)})
    return rows


def speed(flags: Sequence[str], texts: Sequence[str], tokens: int, temperature: float,
          repeats: int) -> list[dict[str, float]]:
    rows = []
    with ExitStack() as stack:
        servers = {budget: stack.enter_context(Running([*flags, "--tree-budget", str(budget)]))
                   for budget in SPEED_BUDGETS}
        for server in servers.values():
            server.wait()
            asyncio.run(load(server.url, texts[:2], 2, 16, temperature))
        for clients in CLIENTS:
            asked = texts[: max(3, 2 * clients)]
            found: dict[int, list[float]] = {budget: [] for budget in servers}
            for _ in range(repeats):
                for budget, server in servers.items():
                    result = asyncio.run(load(server.url, asked, clients, tokens, temperature))
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
    print("| clients | " + " | ".join(f"budget {budget}" for budget in SPEED_BUDGETS) + " |")
    print("| --- " * (len(SPEED_BUDGETS) + 1) + "|")
    for clients in CLIENTS:
        cells = [f"{r['tokens_per_s']:.0f} tokens/s" for r in result["speed"] if r["clients"] == clients]
        print(f"| {clients} | " + " | ".join(cells) + " |")
    if "acceptance" in result:
        print("\n| budget | " + " | ".join(f"topk {topk}" for topk in TOPKS) + " |")
        print("| --- " * (len(TOPKS) + 1) + "|")
        for budget in BUDGETS:
            cells = [f"{r['accept_length']:.2f}" for r in result["acceptance"] if r["budget"] == budget]
            print(f"| {budget} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
