"""Random changes to a log that do not change the fault: another run, host, rank order, path, size."""

from __future__ import annotations

import random
import re

RANK = re.compile(r"\b(TP|DP|PP|EP|[Rr]ank ?|Worker_TP|EngineCore_DP|cuda:)(\d+)\b")
PID = re.compile(r"(\bpid[:= ]+|PID )\d+")
CLOCK = re.compile(r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b")
DATE = re.compile(r"\b\d{4}-\d\d-\d\d\b")
ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
THREADS = re.compile(r"\[(\d+),0,0\]")
HOST = re.compile(r"\bhost:\d+:\d+:\d+\b")
PREFIX = re.compile(
    r"(?:/[\w.-]+)*/(?=site-packages/)|/sgl-workspace/(?=nvshmem|sglang)|/pytorch/(?=aten)|/mnt/(?=models)")
SIZE = re.compile(r"\b\d+\.\d+(?= (?:GB|MB|GiB|MiB)\b)")
COUNT = re.compile(r"(?<=[=: (])\d{4,12}\b(?!\.)")
NAMED = re.compile(r"^\[[^\]]*(?:TP|DP)\d+[^\]]*\]|^\[rank\d+\]")


def mutate(log: str, rng: random.Random) -> str:
    """The same fault in other circumstances."""
    shift, lines = rng.randrange(1, 8), log.split("\n")
    lines = _reordered(lines, rng)
    text = "\n".join(lines)
    text = RANK.sub(lambda m: f"{m[1]}{(int(m[2]) + shift) % 8}", text)
    text = PID.sub(lambda m: f"{m[1]}{rng.randrange(100, 4_000_000)}", text)
    text = CLOCK.sub(lambda m: _clock(m[0], rng), text)
    text = DATE.sub(lambda _: f"20{rng.randrange(20, 40)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}", text)
    text = ADDRESS.sub(lambda _: hex(rng.randrange(1 << 16, 1 << 48)), text)
    text = THREADS.sub(lambda _: f"[{rng.randrange(1024)},0,0]", text)
    text = HOST.sub(lambda _: ":".join(["node7", *(str(rng.randrange(9999)) for _ in range(3))]), text)
    text = PREFIX.sub(lambda _: rng.choice([
        "/usr/local/lib/python3.12/", "/home/user/miniconda3/envs/llm-2/lib/python3.10/", "/opt/venv/lib/python3.11/",
        "/data/vllm/env/lib/", "/sgl-workspace/"]), text)
    text = SIZE.sub(lambda _: f"{rng.uniform(0.1, 200):.2f}", text)
    return COUNT.sub(lambda m: str(rng.randrange(10 ** (len(m[0]) - 1), 10 ** len(m[0]))), text)


def _clock(old: str, rng: random.Random) -> str:
    new = f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}"
    return new + (f"{old[8]}{rng.randrange(10 ** (len(old) - 9)):0{len(old) - 9}}" if len(old) > 9 else "")


def _reordered(lines: list[str], rng: random.Random) -> list[str]:
    """Runs of neighbouring lines by different ranks, shuffled."""
    result: list[str] = []
    run: list[str] = []
    for line in [*lines, ""]:
        if NAMED.match(line):
            run.append(line)
            continue
        rng.shuffle(run)
        result += [*run, line]
        run = []
    return result[:-1]
