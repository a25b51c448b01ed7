"""The server process over HTTP: answers, errors, metrics, end of all processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import yaml

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape, parse
from tests.ddtree.conftest import HTTP, ROOT, Server
from tests.processes import alive, eventually

Start = Callable[..., Server]
PROMPT = "class Cache:\n    def __init__(self, size):\n"


def post(server: Server, **body: Any) -> httpx.Response:
    request = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    return HTTP.post(server.url + "/v1/completions", json=request)


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    lines = post(server, stream=True, **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_a_completion_has_text_usage_and_verify_steps(server: Server) -> None:
    answer = post(server).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["text"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    assert 24 / 8 <= answer["meta_info"]["spec_verify_ct"] < 24


def test_streamed_chunks_make_the_same_text_and_the_last_has_the_usage(server: Server) -> None:
    whole = post(server).json()
    chunks = stream(server, stream_options={"include_usage": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert len(chunks) - 2 < 24, "tokens of one accepted path come in one chunk"
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["meta_info"] == chunks[-2]["meta_info"] == whole["meta_info"]


def test_usage_is_streamed_in_every_chunk_only_if_asked_for(server: Server) -> None:
    chunks = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 1, "the prompt's pass gives one token"
    assert sorted(counts) == counts and counts[-1] == counts[-2] == 24
    assert not any("usage" in chunk for chunk in stream(server))


def test_a_seed_repeats_its_text_and_token_lists_are_prompts(server: Server) -> None:
    texts = [post(server, prompt=[5, 17, 300, 42], temperature=1.0, seed=seed).json()["choices"][0]["text"]
             for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(("body", "says"), [
    ({"prompt": list(range(1020))}, "context length is 1024"), ({"prompt": []}, "length >= 1"),
    ({"prompt": [1, 4000]}, "outside the vocabulary"), ({"prompt": ["a", "b"]}, "at `$.prompt[0]`"),
    ({"max_tokens": 0}, ">= 1 - at `$.max_tokens`"), ({"max_tokens": "ten"}, "Expected `int`"),
    ({"temperature": -1}, "temperature"), ({"n": 2}, "n is not supported"), ({"stop": ["x"]}, "stop is not supported"),
    ({"top_p": 0.5}, "top_p is not supported"), (None, ""),
])
def test_an_invalid_request_is_a_400_with_the_reason(server: Server, body: dict[str, Any] | None, says: str) -> None:
    answer = HTTP.post(server.url + "/v1/completions", content=b"{") if body is None else post(server, **body)
    assert answer.status_code == answer.json()["error"]["code"] == 400
    assert says in answer.json()["error"]["message"]


def test_metrics_count_tokens_and_verify_steps(server: Server) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total", "spec_verify_steps_total", "spec_accepted_tokens_total")
    before = [server.metric(name) for name in names]
    answer = post(server, max_tokens=40).json()
    prompt, output, steps, accepted = (server.metric(name) - was for name, was in zip(names, before, strict=True))
    assert prompt == answer["usage"]["prompt_tokens"]
    assert output == 40
    assert steps == answer["meta_info"]["spec_verify_ct"]
    assert 40 - 1 - steps <= accepted <= 40 + 7 - steps, "the last step may accept more than was asked for"
    assert server.metric("num_running_reqs") == 0
    named = yaml.safe_load((ROOT / "conf/engine/ddtree.yaml").read_text())["metrics"]
    for key in ("accept_tokens", "accept_steps", "running", "queued"):
        assert server.metric(named[key].removeprefix("ddtree:")) >= 0


def test_the_slot_of_a_disconnected_client_goes_to_a_queued_request(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 980, "temperature": 1.0, "ignore_eos": True, "stream": True}
    before = server.metric("generation_tokens_total")
    leaving = threading.Event()

    def ask_and_leave() -> None:
        with HTTP.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # its end would close the connection
            next(lines, None)
            leaving.wait()

    for _ in range(3):
        threading.Thread(target=ask_and_leave, daemon=True).start()
    eventually(lambda: server.metric("num_running_reqs") == 2 and server.metric("num_queue_reqs") == 1)
    leaving.set()
    eventually(lambda: server.metric("num_running_reqs") + server.metric("num_queue_reqs") == 0)
    assert server.metric("generation_tokens_total") - before < 2 * 980
    assert post(server).status_code == 200


def test_server_info_models_and_the_stages_in_the_log_describe_the_server(server: Server) -> None:
    info = HTTP.get(server.url + "/server_info").json()
    assert (info["tree_budget"], info["tree_nodes"], info["device"], info["threads"]) == (8, 8, "cpu", 1)
    assert info["kv_cache_tokens"] == 2 * 1040
    assert HTTP.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] == 1024
    marks = ["Load weight begin", "Load weight end", "KV cache is allocated", "Warmup begin", "ready to roll!"]
    places = [server.log.index(mark) for mark in marks]
    assert places == sorted(places)


def test_health_is_503_before_and_sigterm_ends_cleanly_after_ready(start: Start) -> None:
    server = start("--max-running-requests", "1").wait_ready()
    assert server.codes == {503, 200}
    workers = server.workers()
    assert len(workers) == 1
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(2) == 0, server.log
    eventually(lambda: not any(map(alive, workers)), 0.5)


def test_sigkill_of_the_front_leaves_no_worker(start: Start) -> None:
    server = start("--dp-size", "2", "--tree-budget", "0").wait_ready()
    workers = server.workers()
    assert len(workers) == 2
    assert "spec_verify_ct" not in post(server).json()["meta_info"]
    assert server.metric("spec_verify_steps_total") == 0 < server.metric("generation_tokens_total")
    server.process.kill()
    eventually(lambda: not any(map(alive, workers)), 2)


@pytest.mark.slow
def test_a_dead_rank_ends_the_server_with_an_error(start: Start) -> None:
    server = start("--tp-size", "2", "--enable-allreduce-fusion").wait_ready()
    workers = server.workers()
    assert len(workers) == 2
    assert "Init torch distributed end" in server.log
    os.kill(workers[1], signal.SIGKILL)
    assert server.process.wait(5) == 1
    assert "has ended" in server.log
    eventually(lambda: not any(map(alive, workers)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_two_ranks_give_the_output_of_one(start: Start, server: Server, fused: bool) -> None:
    two = start("--tp-size", "2", *(["--enable-allreduce-fusion"] if fused else [])).wait_ready()
    for prompt in (PROMPT, "import os\n\ndef main():\n", "    raise ValueError("):
        for temperature in (0.0, 0.8):
            answers = [post(each, prompt=prompt, temperature=temperature, seed=1).json() for each in (server, two)]
            assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(("flags", "says"), [
    ("--tree-size=8", "unrecognized arguments"), ("--tree-budget=-1", "less than 0"),
    ("--device=tpu", "invalid choice"), ("--corrupt-output=2", "not between 0 and 1"),
    ("--draft-depth=9", "predicts 7 positions"), ("--tree-topk=3000", "exceeds the vocabulary"),
    ("--enable-allreduce-fusion", "needs --tp-size"), ("--context-length=4096", "greater than the model's max_pos")])
def test_impossible_settings_are_errors_before_anything_starts(capsys: pytest.CaptureFixture[str], flags: str,
                                                               says: str) -> None:
    with pytest.raises((SystemExit, ValueError)) as ended:
        parse([flags]).check(Shape.load(PACKAGED_MODEL))
    assert says in capsys.readouterr().err + str(ended.value)
    assert ended.type is ValueError or str(ended.value) == "2"


STARTS = [
    (["--max-running-requests", "64", "--kv-cache-tokens", "8192"], "Load weight end", "Not enough memory for the KV"),
    (["--tree-budget", "64", "--max-running-requests", "40"], "KV cache is allocated", "verify buffer is too small"),
    (["--enable-nccl-nvls", "--tp-size", "2"], "Init torch distributed begin", "NVLink multicast"),
    (["--tp-size", "3"], "Load weight begin", "must be divisible by --tp-size"),
    (["--ep-size", "2"], "Load weight begin", "the model is dense"),
]


@pytest.mark.parametrize(("flags", "stage", "says"),
                         [STARTS[0], *(pytest.param(*rest, marks=pytest.mark.slow) for rest in STARTS[1:])])
def test_a_failed_start_ends_at_its_stage_with_a_traceback(start: Start, flags: list[str], stage: str,
                                                           says: str) -> None:
    server = start(*flags)
    assert server.process.wait(90) == 1
    assert server.log.index(stage) < server.log.index("Traceback") < server.log.index(says)
    assert "ready to roll" not in server.log


def test_help_explains_the_flags_without_loading_torch() -> None:
    probe = ("import sys; from autotune.ddtree.__main__ import main\nsys.argv = ['x', '--help']\n"
             "try: main()\nexcept SystemExit: sys.exit('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--tree-budget" in done.stdout and "for tests only" in done.stdout
