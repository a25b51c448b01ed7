"""Raw logs: large, interleaved, coloured, partly binary."""

from __future__ import annotations

import gzip
import io
import pathlib
import random

import pytest

from autotune.crash import log as logtext
from autotune.crash import source
from autotune.crash.classify import classify
from tests.benchmarks import large_log

CRASH = """[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 1024, in event_loop_overlap
    batch_result = self.run_batch(batch)
RuntimeError: CUDA error: an illegal memory access was encountered
"""
DECODE = "[2026-01-01 00:00:00 TP0] Decode batch, #running-req: {}, #token: 65664, cuda graph: True, #queue-req: 0\n"


def texts(data: bytes | str) -> list[str]:
    return [line.text for line in logtext.clean(data).lines]


@pytest.mark.parametrize(("raw", "writer", "text"), [
    ("[2025-07-20 05:25:37 TP0] Load weight begin.", "TP0", "Load weight begin."),
    ("[2025-07-20 05:25:37 DP3 TP7] boom", "DP3 TP7", "boom"),
    ("2025-06-18 13:43:34 ERROR 31423 [ TP6 PP0 scheduler.py:2547] boom", "TP6 PP0", "boom"),
    ("(EngineCore_DP0 pid=4242) ERROR 09-28 15:47:24 [core.py:718] boom", "EngineCore_DP0", "boom"),
    ("(Worker_TP2 pid=418) ERROR 02-19 10:46:04 [multiproc_executor.py:863] boom", "Worker_TP2", "boom"),
    ("ERROR 02-20 16:43:12 engine.py:389] boom", "", "boom"),
    ("[rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] boom", "rank4", "boom"),
    ("[07/08/2025-19:47:15] [TRT-LLM] [RANK 1] [E] boom", "RANK 1", "boom"),
    ("ci-pod-7:97:183 [0] include/shm.h:28 NCCL WARN boom", "", "include/shm.h:28 NCCL WARN boom"),
    ("sglang_service-1  | [2026-09-22 15:00:54 TP1] boom", "TP1", "boom"),
    ("\x1b[36m(WorkerDict pid=1216, ip=10.0.0.7)\x1b[0m [2025-05-26 15:54:41 TP1] boom", "TP1", "boom"),
    ("2025-11-10T09:50:25.135404509Z boom", "", "boom"),
])
def test_prefixes_of_engines_and_containers_are_separated_from_the_text(raw: str, writer: str, text: str) -> None:
    (line,) = logtext.clean(raw).lines
    assert (line.writer, line.text) == (writer, text)


def test_a_progress_bar_does_not_hide_the_rest_of_its_line() -> None:
    bar = "Capturing batches (avail_mem=13.48 GB):  {}%|#####| {}/23 [00:39<00:01,  1.34s/it]"
    raw = "\r".join(bar.format(i, i) for i in range(20)) + "[host:1:2:3] Caught signal 11 (Segmentation fault)"
    assert texts(raw)[1:] == ["Caught signal 11 (Segmentation fault)"]


def test_lines_that_differ_only_in_numbers_are_folded_and_counted() -> None:
    raw = "".join(f"IndexKernel.cu:16: block: [{i},0,0] Assertion `x < y` failed.\n" for i in range(5000)) + "end\n"
    lines = logtext.clean(raw).lines
    assert [(line.repeats, line.text[:11]) for line in lines] == [(5000, "IndexKernel"), (1, "end")]
    assert "5000 such lines" in classify(raw).excerpt


def test_colours_bad_bytes_nuls_and_utf16_do_not_matter() -> None:
    plain, raw = classify(CRASH), CRASH.encode()
    for data in (raw.replace(b"CUDA", b"\x1b[31mCUDA\x1b[0m"), b"\xfa\xff junk\n\xf0\x28 x\n" + raw,
                 CRASH.encode("utf-16"), raw.replace(b"\n", b"\r\n"), raw.replace(b" ", b" \x00")):
        assert classify(data).signature == plain.signature


def test_interleaved_tracebacks_of_ranks_are_separated() -> None:
    prefix = "(Worker_TP{0} pid=4{0}) ERROR 01-01 00:00:00 [multiproc_executor.py:597] "
    head = "Traceback (most recent call last):"
    one = [head, '  File "/x/vllm/a.py", line 1, in load_model', "    f()", "KeyError: 'a'"]
    two = [head, '  File "/x/vllm/b.py", line 2, in init_device', "    g()", "TypeError: b"]
    raw = "\n".join(prefix.format(rank) + line for pair in zip(one, two, strict=True) for rank, line in enumerate(pair))
    found = logtext.tracebacks(logtext.clean(raw).lines)
    assert [(b.type, b.frames[0][1]) for b in found] == [("KeyError", "load_model"), ("TypeError", "init_device")]


def test_chained_and_cut_tracebacks_are_found() -> None:
    raw = """  File "gemm.py", line 167
    assert n % 64 == 0
AssertionError

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/vllm/a.py", line 3, in run
ValueError: first line
second line
Traceback (most recent call last):
  File “/x/vllm/b.py”, line 3, in cut
"""
    found = logtext.tracebacks(logtext.clean(raw).lines)
    assert [(b.type, b.message, b.code) for b in found] == [
        ("AssertionError", "", "assert n % 64 == 0"), ("ValueError", "first line\nsecond line", ""), ("", "", "")]


def test_head_tail_and_exceptions_between_them_are_read_of_a_log_that_is_too_long(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "server.log"
    filler = "".join(DECODE.format(i % 100) for i in range(10_000))
    with path.open("w") as file:
        file.write("[2026-01-01 00:00:00 TP0] Load weight begin.\n")
        for part in range(12):
            file.write(CRASH if part == 6 else "")
            file.write(filler)
        file.write("the last line\n")
    assert path.stat().st_size > source.HEAD + 2 * source.TAIL
    data = source.read_path(path)
    assert len(data) < source.HEAD + 2 * source.TAIL
    assert b"Load weight begin" in data and b"illegal memory access" in data and data.endswith(b"the last line\n")
    assert classify(path).category == "illegal_memory_access"


def test_an_exception_on_the_border_of_two_chunks_is_kept() -> None:
    for shift in range(-120, 40, 7):
        before = b"x" * 79 + b"\n"
        room = source.HEAD + 2 * source.CHUNK + shift
        data = (before * (room // 80 + 1))[:room] + b"\n" + CRASH.encode() + before * (2 * source.TAIL // 80)
        assert b"illegal memory access" in source.read_stream(io.BytesIO(data)), shift


@pytest.mark.parametrize("at", [0, 4500, 9000])
def test_many_different_lines_are_capped_and_a_failure_among_them_is_kept(at: int) -> None:
    letters = str.maketrans("0123456789", "abcdefghij")
    lines = [f"request {i}".translate(letters) for i in range(9000)]
    raw = "\n".join([*lines[:at], CRASH.rstrip(), *lines[at:]])
    log = logtext.clean(raw)
    assert len(log.lines) <= logtext.MAX_LINES + 100
    assert classify(raw).category == "illegal_memory_access"


def test_a_damaged_gzip_file_counts_up_to_the_damage() -> None:
    packed = gzip.compress(CRASH.encode() + random.Random(0).randbytes(100_000))
    assert CRASH.encode() in source.read_stream(io.BytesIO(packed[:len(packed) // 2]))


def test_a_failure_is_found_in_a_stream_whose_healthy_lines_speak_of_errors_too() -> None:
    noise = b"".join(b"stats: errors=0 timeouts=0 request %d\n" % i for i in range(100_000))
    data = noise * 2 + b"CUDA error: an illegal memory access was encountered\n" + noise * 2
    assert b"illegal memory access" in source.read_stream(io.BytesIO(data))


@pytest.mark.slow
def test_a_log_of_1_gb_needs_little_memory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "server.log"
    large_log.write(path, 10**9, 0.9, "traceback")
    category, _, memory_mb = large_log.measured(path, "file")
    assert category == "illegal_memory_access" and memory_mb < 100
