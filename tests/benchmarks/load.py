"""Load clients side by side against one stub server: ours, plain ones on httpx and aiohttp, and other tools'
(sglang.bench_serving, guidellm, aiperf).

    python tests/benchmarks/load.py [--json] [--peers httpx aiohttp sglang guidellm aiperf] [--install]
                                    [--concurrency 64 1024]

Up to C=64 the stub decodes in steps of 20 ms, as real servers do, above that as fast as it can, 8 events at once.
For each client: requests done, tokens lost, tokens per second, CPU seconds of the client's processes per million
tokens (between samples from the first request to the last token: neither start nor report), and its TTFT and TPOT
against the stub's own times. Each peer lives in an environment of its own (tests/envs.py); one that is not there is
said to be missing, or is installed with --install. Figures depend on what else the machine does: compare rows only.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from autotune.loadgen.client import LoadClient  # noqa: E402
from autotune.loadgen.workload import LoadOrder, LoadSpec, Target, WorkloadSettings  # noqa: E402
from autotune.power.cpu_meters import CpuTimeMeter  # noqa: E402
from autotune.power.meter import Powered, PowerSettings  # noqa: E402
from tests import envs  # noqa: E402
from tests.fakes.stub import Stub  # noqa: E402

PROMPT_TOKENS, OUTPUT_TOKENS = 60, 64
LIMIT_S = 540.0
SAMPLE_S = 0.1
PACED = ("--itl-ms", "20", "--align")  # as a real server decodes: one token of every stream, every 20 ms
FLOOD = ("--itl-ms", "0", "--burst", "8")  # as fast as the stub can, as it arrives at a client that lags behind
RECIPES = {"guidellm": envs.Recipe(("guidellm==0.8.1",)), "aiperf": envs.Recipe(("aiperf==0.13.0",))}
SGLANG_ENV = "sglang-0.5.23"
SGLANG = """
import sys, types
sys.modules["datasets"] = types.ModuleType("datasets")  # imported for data sets that are not used here
sys.modules["datasets"].load_dataset = None
from sglang.benchmark.serving import cli_main
cli_main()
"""
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
bytes_ = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
made = Tokenizer(models.BPE(bytes_, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
made.add_special_tokens(["</s>"])
PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(sys.argv[1])
"""


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a client reports: completed requests and their tokens, and latencies in ms.

    `until`: latencies are those of requests that were sent before (CLOCK_MONOTONIC seconds), all of which ended.
    """

    requests: int
    tokens: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    until: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A client: words of `command` are filled in (race), `claim` reads what it left in a folder."""

    name: str
    env: str | None
    command: str
    claim: Callable[[pathlib.Path], Claim]
    offline: bool = True  # aiperf takes a tokenizer's folder for a name on Hugging Face when offline


def worker(url: str, concurrency: int, requests: int, out: str) -> None:
    """Our client, as measure() uses it, for a number of requests."""
    load = LoadSpec(concurrency, WorkloadSettings(
        prompts=None, contexts=[PROMPT_TOKENS], output_tokens=OUTPUT_TOKENS, spread=0.0, temperature=0.0,
        ignore_eos=True, shared_prefix=0.0, rate_per_s=None, seed=1, first_token_timeout_s=120.0, token_timeout_s=120.0,
        request_timeout_s=LIMIT_S, retries=1, warmup_s=0.0, warmup_max_s=0.0, settle_s=1.0, drift=0.1, window_s=1.0,
        window_max_s=1.0, block_s=1.0, precision=0.5, min_requests=1, max_error_rate=0.0, min_errors=1))
    with LoadClient(LoadOrder(Target(url, "openai_completions", "stub", True), load, 1.0)) as client:
        while (tick := client.wait(0.25)) is None or tick.finished + tick.errors < requests + concurrency:
            pass
        replies = client.stop()
    ok = [r for r in replies if r.ok and r.wanted_tokens == OUTPUT_TOKENS]
    until = min(r.sent for r in replies if not r.ok)  # latencies of requests in flight at the end are unknown
    whole = [r for r in ok if r.sent < until]
    pathlib.Path(out).write_text(json.dumps({
        "requests": len(ok), "tokens": sum(r.tokens for r in ok), "ttft": [r.ttft_s for r in whole],
        "tpot": [r.tpot_s for r in whole], "until": until}))


def own_claim(folder: pathlib.Path) -> Claim:
    found = json.loads((folder / "claim.json").read_text())
    return Claim(found["requests"], found["tokens"], *_latency(found["ttft"]), statistics.mean(found["tpot"]) * 1000,
                 found.get("until", float("inf")))


def sglang_claim(folder: pathlib.Path) -> Claim:
    found = json.loads((folder / "sglang.jsonl").read_text().splitlines()[-1])
    return Claim(found["completed"], found["total_output_tokens"], found["mean_ttft_ms"], found["p99_ttft_ms"],
                 found["mean_tpot_ms"])


def guidellm_claim(folder: pathlib.Path) -> Claim:
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    first, later = (metrics[name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    return Claim(metrics["request_totals"]["successful"], tokens, first["mean"], first["percentiles"]["p99"],
                 later["mean"])


def aiperf_claim(folder: pathlib.Path) -> Claim:
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    first, later = found["time_to_first_token"], found["inter_token_latency"]
    tokens = found["total_output_tokens"]["avg"]
    return Claim(int(found["request_count"]["avg"]), tokens, first["avg"], first["p99"], later["avg"])


PLAIN = "{python} {here}/plain_client.py %s {url} {concurrency} {requests} {folder}/claim.json"
CONTENDERS = (
    Contender("ours", None, "{python} {here}/load.py --worker {url} {concurrency} {requests} {folder}/claim.json",
              own_claim),
    Contender("httpx", None, PLAIN % "httpx", own_claim),
    Contender("aiohttp", SGLANG_ENV, PLAIN % "aiohttp", own_claim),
    Contender("sglang", SGLANG_ENV, "{python} -c {sglang} --backend sglang-oai --base-url {url} --model stub "
              "--tokenizer {tokenizer} --dataset-name random-ids --random-input-len {prompt} --random-output-len "
              "{output} --random-range-ratio 1 --num-prompts {requests} --max-concurrency {concurrency} --disable-tqdm "
              "--output-file {folder}/sglang.jsonl", sglang_claim),
    Contender("guidellm", "guidellm", "{bin}/guidellm run --backend "
              "kind=openai_http,target={url},model=stub,request_format=/v1/completions --profile "
              "kind=concurrent,streams={concurrency} --constraint kind=max_requests,count={requests} --tokenizer "
              "kind=hf_auto,model={tokenizer} --data kind=synthetic_text,prompt_tokens={prompt},output_tokens={output} "
              "--output kind=json,path={folder}/guidellm.json --disable-console", guidellm_claim),
    Contender("aiperf", "aiperf", "{bin}/aiperf profile --model stub --url {url} --endpoint-type completions "
              "--streaming --concurrency {concurrency} --request-count {requests} --synthetic-input-tokens-mean "
              "{prompt} --output-tokens-mean {output} --tokenizer {tokenizer} --artifact-dir {folder}/aiperf --ui none "
              "--use-server-token-count", aiperf_claim, offline=False))


def python_of(contender: Contender, install: bool) -> str | None:
    """The contender's Python; None when its environment is missing."""
    if contender.env is None:
        return sys.executable
    envs.RECIPES.update(RECIPES)
    if not install and not (envs.cache() / contender.env / "complete").is_file():
        return None
    return str(envs.ensure(contender.env))


def race(contender: Contender, python: str, concurrency: int, requests: int,
         stub_arguments: Sequence[str]) -> dict[str, Any]:
    """Run one contender against a fresh stub."""
    with tempfile.TemporaryDirectory() as name, Stub(pathlib.Path(name), *stub_arguments) as stub:
        folder = pathlib.Path(name)
        if contender.env is not None:
            subprocess.run([python, "-c", TOKENIZER, str(folder / "tokenizer")], check=True, capture_output=True)
        command = [word.format(
            python=python, bin=pathlib.Path(python).parent, here=pathlib.Path(__file__).parent, sglang=SGLANG,
            url=stub.url, concurrency=concurrency, requests=requests, folder=folder, tokenizer=folder / "tokenizer",
            prompt=PROMPT_TOKENS, output=OUTPUT_TOKENS) for word in contender.command.split()]
        env = os.environ | ({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if contender.offline else {})
        if contender.env == SGLANG_ENV:
            env["PYTHONPATH"] = str(ROOT / "tests/sglang/standin")
        cpu: list[tuple[float, float]] = []
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True,
                                       cwd=folder)
            meter = CpuTimeMeter(PowerSettings("cpu_time", 1.0, 0.1, 1.0, 0.05, 1.0, 0.0), Powered(process.pid), None)
            end = time.monotonic() + LIMIT_S
            with meter:
                while process.poll() is None and time.monotonic() < end:
                    reading = meter.read()
                    cpu.append((reading.t, reading.total or 0.0))
                    time.sleep(SAMPLE_S)
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
            return {"client": contender.name, "concurrency": concurrency, "failed": f"not done after {LIMIT_S:g} s"}
        stub.stop()
        try:
            claim = contender.claim(folder)
        except (OSError, ValueError, KeyError, StopIteration) as error:
            logs = [folder / "log", *sorted(folder.rglob("*.log"))]
            tail = logs[-1].read_text()[-600:]
            return {"client": contender.name, "concurrency": concurrency, "failed": f"{error!r}; its log ends: {tail}"}
        return compare(contender.name, claim, stub.truth, cpu, concurrency)


def compare(name: str, claim: Claim, truth: list[dict[str, Any]], cpu: list[tuple[float, float]],
            concurrency: int) -> dict[str, Any]:
    """A row: the claim beside the truth."""
    whole = [t for t in truth if len(t["sent"]) > 1 and t["tokens"] == t["wanted"] == OUTPUT_TOKENS
             and t["received"] < claim.until]
    begin, end = min(t["received"] for t in truth), max(t["sent"][-1] for t in truth if t["sent"])
    inside = [(t, c) for t, c in cpu if begin <= t <= end]  # clients work at full speed just before and just after
    if len(inside) < 3:
        return {"client": name, "concurrency": concurrency, "failed": f"done in {end - begin:.2f} s, which is too soon"}
    (start, before), (end, after) = inside[0], inside[-1]
    spent, sent = after - before, sum(_tokens(t, end) - _tokens(t, start) for t in truth)
    ttft_mean, ttft_p99 = _latency([t["sent"][0] - t["received"] for t in whole])
    tpot = statistics.mean((t["sent"][-1] - t["sent"][0]) / (t["tokens"] - 1) for t in whole) * 1000
    return {"client": name, "concurrency": concurrency, "requests": claim.requests,
            "tokens_lost": round(OUTPUT_TOKENS * claim.requests - claim.tokens),
            "tokens_per_s": round(sent / (end - start)), "cpu_s_per_million": round(spent / sent * 1e6, 1),
            "ttft_ms": round(claim.ttft_mean, 2), "ttft_error_ms": round(claim.ttft_mean - ttft_mean, 2),
            "ttft_p99_error_ms": round(claim.ttft_p99 - ttft_p99, 2), "tpot_ms": round(claim.tpot_mean, 3),
            "tpot_error_ms": round(claim.tpot_mean - tpot, 3)}


def _latency(seconds: Sequence[float]) -> tuple[float, float]:
    """Mean and 99th percentile in ms."""
    ordered = sorted(seconds)
    return statistics.mean(ordered) * 1000, ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1000


def _tokens(request: dict[str, Any], t: float) -> int:
    """Tokens of a request that the stub had sent at a moment."""
    events = bisect.bisect(request["sent"], t)
    return int(request["counts"][events - 1]) if events else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    names = [c.name for c in CONTENDERS[1:]]
    parser.add_argument("--peers", nargs="*", default=names, choices=names)
    parser.add_argument("--install", action="store_true", help="make the environments that are missing (minutes)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.concurrency) < 1:
        parser.error("--concurrency must be at least 1")
    if args.worker:
        worker(args.worker[0], int(args.worker[1]), int(args.worker[2]), args.worker[3])
        return

    def say(row: dict[str, Any]) -> None:
        print(json.dumps(row) if args.json else "  ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    rows = []
    for concurrency in args.concurrency:
        paced = concurrency <= 64
        arguments = ("--ttft-ms", "100", "--chars", "1", *(PACED if paced else FLOOD))
        requests = 16 * concurrency if paced else 4 * concurrency  # some 20 s of a stub that is paced
        for contender in (c for c in CONTENDERS if c.name in ("ours", *args.peers)):
            python = python_of(contender, args.install)
            if python is None:
                row: dict[str, Any] = {"client": contender.name, "concurrency": concurrency,
                                       "failed": "missing (--install makes its environment)"}
            else:
                row = race(contender, python, concurrency, requests, arguments)
            rows.append(row)
            say(row)
    for concurrency in args.concurrency:
        cost = {r["client"]: r["cpu_s_per_million"] for r in rows
                if r["concurrency"] == concurrency and "failed" not in r}
        peers = {name: value for name, value in cost.items() if name != "ours"}
        if "ours" in cost and peers:
            best = min(peers, key=lambda name: peers[name])
            say({"concurrency": concurrency, "best_peer": best,
                 "times_the_tokens_per_cpu_s": round(peers[best] / cost["ours"], 1)})


if __name__ == "__main__":
    main()
