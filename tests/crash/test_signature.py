"""Signatures: equal for the same fault in another run, on another host or rank; different for other faults."""

from __future__ import annotations

import itertools
import random
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.crash.classify import classify
from autotune.crash.signature import around, signature, skeleton
from autotune.records import Stage
from tests.crash.test_cases import CASES, JUDGED, classified

SAME_FAULT = [  # ids of cases: one fault in two logs
    "c009 c010", "c020 c021", "c022 w076", "c029 c030", "c036 r-vllm-tp3", "c038 w100", "c039 c040", "c046 c047",
    "d053 k038", "k039 k040", "m023 k012 k013", "w051 d009", "w062 k019", "w072 d013", "w080 h030",
    "w097 k105", "w117 r-vllm-ep", "w121 r-vllm-ctx"]
COUNTED = {"of", "error", "code", "errno", "status", "signal", "xid", "failure", "http", "returned"}
words = st.text(string.ascii_lowercase, min_size=2, max_size=9).filter(lambda word: word not in COUNTED)
numbers = st.integers(0, 10**12)
RANK = re.compile(r"\b(TP|DP|PP|EP|[Rr]ank ?|Worker_TP|EngineCore_DP|cuda:)(\d+)\b")
PID = re.compile(r"(\bpid[:= ]+|PID )\d+")
ADDRESS = re.compile(r"\b0x[0-9a-f]+\b")
PREFIX = re.compile(
    r"(?:/[\w.-]+)*/(?=site-packages/)|/sgl-workspace/(?=nvshmem|sglang)|/pytorch/(?=aten)|/mnt/(?=models)")
PREFIXES = ("/usr/local/lib/python3.12/", "/home/user/miniconda3/envs/llm-2/lib/python3.10/",
            "/opt/venv/lib/python3.11/", "/data/vllm/env/lib/", "/sgl-workspace/")
# times, dates, threads, hosts, sizes, counts
HOUR, DAY = re.compile(r"\b\d\d(?=:\d\d:\d\d\b)"), re.compile(r"(?<=\b\d{4}-\d\d-)\d\d\b")
DIGITS = re.compile(r"\[\d+(?=,0,0\])|\bhost:\d+:\d+:\d+\b"
                    r"|\b\d+\.\d+(?= (?:GB|MB|GiB|MiB)\b)|(?<=[=: (])\d{4,12}\b(?!\.)")
HOST = re.compile(r"\b(?:node-b|ci-pod-\d+|gpu1|host)\b(?=:\d+:\d+)|(?<=ip=)[\d.]+")
PCI = re.compile(r"\b0000:[0-9a-f]{2}:00(?:\.0)?\b")
LAYER = re.compile(r"(?<=\blayers\.)\d+")
NAMED = re.compile(r"^\[[^\]]*(?:TP|DP)\d+[^\]]*\]|^\[rank\d+\]")


def mutate(log: str, rng: random.Random) -> str:
    """The same fault in another run, on another host, in another order of ranks, with other paths and sizes."""
    shift, lines = rng.randrange(1, 8), list[str]()
    for named, group in itertools.groupby(log.split("\n"), lambda line: bool(NAMED.match(line))):
        run = list(group)
        lines += rng.sample(run, len(run)) if named else run
    text = RANK.sub(lambda m: f"{m[1]}{(int(m[2]) + shift) % 8}", "\n".join(lines))
    text = PID.sub(lambda m: f"{m[1]}{rng.randrange(100, 4_000_000)}", text)
    text = ADDRESS.sub(lambda _: hex(rng.randrange(1 << 16, 1 << 48)), text)
    text = PREFIX.sub(lambda _: rng.choice(PREFIXES), text)
    text = DAY.sub(f"{rng.randrange(1, 29):02}", HOUR.sub(f"{rng.randrange(24):02}", text))
    text = HOST.sub(lambda _: rng.choice(("gpu-node-17", "n3", "ip-10-0-0-9", "dgx", "a1.lab.internal")), text)
    text = PCI.sub(lambda _: f"0000:{rng.choice('0123456789abc')}{rng.choice('0123456789abcdef')}:00.0", text)
    text = LAYER.sub(lambda _: str(rng.randrange(60)), text)
    return DIGITS.sub(lambda m: re.sub(r"\d", lambda _: rng.choice("123456789"), m[0]), text)


@pytest.mark.parametrize(("case", "times"), [
    *(pytest.param(case, 12, id=case["id"]) for case in JUDGED),
    *(pytest.param(case, 20, id=f"{case['id']}-20", marks=pytest.mark.slow) for case in CASES)])
def test_mutations_of_a_log_keep_its_signature(case: dict[str, str], times: int) -> None:
    rng, crash = random.Random(case["id"]), classified(case["log"])
    for _ in range(times):
        log = mutate(case["log"], rng)
        again = classify(log)
        assert (again.signature, again.category, again.stage) == (crash.signature, crash.category, crash.stage), log


def test_mutations_really_change_the_logs() -> None:
    changed = [case for case in JUDGED if len({mutate(case["log"], random.Random(seed)) for seed in range(9)}) > 3]
    assert len(changed) > 25


def test_numbers_paths_addresses_ranks_and_times_do_not_count() -> None:
    a = "failed at /opt/a/b/gpu_worker.py:180 on TP3 (rank 5): 3.22/4.0 GiB at 0x7f00, pid 4242, port 30000, 12 s"
    b = "failed at /x/y/gpu_worker.py:7 on TP0 (rank 11): 70.1/79.25 GiB at 0xdeadbeef, pid 1, port 8123, 900 s"
    assert skeleton(a) == skeleton(b)


def test_error_numbers_count() -> None:
    assert skeleton("CUDA error 401 'not permitted'") != skeleton("CUDA error 802 'not ready'")
    assert skeleton("[Errno 98] Address already in use") != skeleton("[Errno 99] Address already in use")
    assert skeleton("exit code: -9") != skeleton("exit code: -11")
    assert skeleton("Error 803: bad driver") != skeleton("Error 804: bad driver")


def test_type_message_frames_and_stage_count() -> None:
    frames = [("/x/sglang/srt/a.py", "load"), ("/x/sglang/srt/b.py", "copy"), ("/x/torch/c.py", "add")]
    base = signature(Stage.LOAD, "ValueError", "foo is not bar", frames)
    assert base == signature(Stage.LOAD, "x.y.ValueError", "foo is not bar",
                             [("/other/sglang/srt/a.py", "load"), ("/z/sglang/srt/b.py", "copy")])
    others = [(Stage.WARMUP, "ValueError", "foo is not bar", frames),
              (Stage.LOAD, "KeyError", "foo is not bar", frames), (Stage.LOAD, "ValueError", "foo is not baz", frames),
              (Stage.LOAD, "ValueError", "foo is not bar", frames[:1])]
    assert base not in [signature(*other) for other in others]


def test_a_folder_named_after_an_engine_does_not_make_engine_frames() -> None:
    plain = [("/opt/env/lib/python3.12/site-packages/torch/x.py", "f")]
    named = [("/home/vllm/env/lib/python3.12/site-packages/torch/x.py", "f")]
    assert signature(Stage.LOAD, "ValueError", "m", plain) == signature(Stage.LOAD, "ValueError", "m", named)


def test_the_sentence_with_the_cause_is_taken() -> None:
    message = "unexpected error from cudagetdevicecount(). error 803: unsupported driver\nsee the manual"
    assert around(message, "error 803").strip() == "error 803: unsupported driver"
    assert around("one line\nanother", "nothing of this") == "one line"


@pytest.mark.parametrize(("a", "b"), [
    ("connect to gpu-node-07:29500 failed", "connect to alpha-3:1234 failed"),
    ("NCCL WARN Connect to 10.0.0.4<56849> returned 113", "NCCL WARN Connect to n3<11111> returned 113"),
    ("connect to alpha:29500 failed", "connect to beta.lab:29501 failed"),
    ("could not resolve hostname worker-3.cluster.local", "could not resolve hostname n7.lab.internal"),
    ("GPU 0000:3b:00.0 is lost", "GPU 0000:b3:00.0 is lost"),
    ("KeyError: 'model.layers.3.mlp.experts.12.w1'", "KeyError: 'model.layers.47.mlp.experts.3.w1'"),
    ("layer 3 has no weight", "layer 47 has no weight"),
    ("bind to fe80::1ff:fe23:4567:890a failed", "bind to 2001:db8::8a2e:370:7334 failed"),
    ("request a3f9c2 failed in here", "request 9b1d0e failed in here"),
    ("tried to allocate 24.00 MiB on gpu", "tried to allocate 1.5 GB on gpu"),
    ("needs 80G of memory", "needs 141G of memory"),
    ("pid 9 on node-69.rack6.example: no quorum", "pid 9 on node-7.rack12.example: no quorum")])
def test_hosts_pci_ids_layers_addresses_short_hex_and_sizes_do_not_count(a: str, b: str) -> None:
    assert skeleton(a) == skeleton(b)


@pytest.mark.parametrize(("a", "b"), [
    ("page_size 1 is not supported", "page_size 64 is not supported"),
    ("--page-size=1 is bad here", "--page-size=64 is bad here"), ("head_dim (80) is not", "head_dim (96) is not"),
    ("Initialization failed. cuBLAS has no handle", "Initialization failed. MoE has no handle"),
    ("file one.cpp:4242 says no", "file two.cpp:4242 says no"),
    ("libcudart.so.12: cannot open it", "libcudart.so.13: cannot open it"),
    ("cannot read shard-1.model.safetensors", "cannot read config-1.model.json"), ("sm_100 is not", "sm_120 is not"),
    ("operator torchvision::nms is not", "operator sgl_kernel::nms is not")])
def test_values_of_parameters_versions_and_the_sentence_after_a_generic_one_count(a: str, b: str) -> None:
    assert skeleton(a) != skeleton(b)


def test_no_two_faults_of_the_corpus_share_a_signature() -> None:
    faults: dict[str, list[str]] = {}
    for case in CASES:
        faults.setdefault(classified(case["log"]).signature, []).append(case["id"])
    assert sorted(" ".join(ids) for ids in faults.values() if len(ids) > 1) == SAME_FAULT


@given(st.lists(words, min_size=3, max_size=8), st.lists(numbers, min_size=2, max_size=2, unique=True))
def test_a_number_between_words_never_changes_a_skeleton(text: list[str], pair: list[int]) -> None:
    first, second = (" ".join([*text[:2], "took", str(n), *text[2:]]) for n in pair)
    assert skeleton(first) == skeleton(second)


@given(st.lists(words, min_size=1, max_size=5), st.lists(words, min_size=1, max_size=4), st.lists(words, min_size=1))
def test_the_folders_of_a_source_file_never_change_a_skeleton(a: list[str], b: list[str], said: list[str]) -> None:
    first, second = (f"{' '.join(said)} in /{'/'.join(folders)}/runner.py failed" for folders in (a, b))
    assert skeleton(first) == skeleton(second)


@given(st.lists(words, min_size=2, max_size=10), st.lists(words, min_size=2, max_size=10))
def test_other_words_give_other_signatures(a: list[str], b: list[str]) -> None:
    first, second = " ".join(a), " ".join(b)
    same = first.replace(" ", "") == second.replace(" ", "")
    assert (signature(Stage.LOAD, "ValueError", first) == signature(Stage.LOAD, "ValueError", second)) == same


@given(st.text(max_size=400))
def test_any_text_has_a_short_skeleton_that_is_its_own_skeleton(text: str) -> None:
    once = skeleton(text)
    assert len(once) <= 160 and "\n" not in once
    assert signature(None, "", text).isprintable()


@given(st.binary(max_size=600))
def test_any_bytes_are_classified(data: bytes) -> None:
    assert classify(data).signature.startswith("v2-")
