"""Prompts: the same for every configuration, of the wanted length."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from autotune.loadgen.requests import PromptSet, builtin_text, chars_per_token, read_prompts
from autotune.loadgen.result import Reply, write_replies
from autotune.loadgen.workload import PromptSpec, Target
from autotune.records import UsageError
from autotune.utils.http import BadAnswer
from autotune.utils.redact import Redactor
from tests.loadgen.harness import BUILTIN, OPENAI, load
from tests.utils.test_http import said, serving


def jsonl(tmp_path: pathlib.Path, *rows: object) -> PromptSpec:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return dataclasses.replace(BUILTIN, path=path)


def test_built_in_text_has_the_wanted_length_and_depends_on_seed_and_number_only() -> None:
    one, two = PromptSet(BUILTIN, 200, 4.0), PromptSet(BUILTIN, 200, 4.0)
    assert [one.prompt(i) for i in range(5)] == [two.prompt(i) for i in (0, 1, 2, 3, 4)]
    assert {len(str(one.prompt(i))) for i in range(20)} == {800} and len({str(one.prompt(i)) for i in range(20)}) == 20
    assert PromptSet(dataclasses.replace(BUILTIN, seed=2), 200, 4.0).prompt(0) != one.prompt(0)
    assert len(builtin_text()) > 1_000_000


def test_thousands_of_prompts_of_built_in_text_are_all_different() -> None:
    """A prompt that came before would be answered from the server's prefix cache."""
    prompts = PromptSet(BUILTIN, 60, 4.0)
    assert len({str(prompts.prompt(i))[:160] for i in range(5000)}) > 4950


def test_prompts_longer_than_all_text_go_round(tmp_path: pathlib.Path) -> None:
    prompts = PromptSet(jsonl(tmp_path, {"text": "abc"}, {"prompt": "def"}), 100, 2.0)
    assert len(str(prompts.prompt(3))) == 200 and len({str(prompts.prompt(i)) for i in range(30)}) > 4


def test_a_share_of_the_prompt_can_be_common_to_all() -> None:
    prompts = PromptSet(dataclasses.replace(BUILTIN, shared_prefix=0.75), 100, 4.0)
    texts = [str(prompts.prompt(i)) for i in range(8)]
    assert len({t[:300] for t in texts}) == 1 and len({t[300:] for t in texts}) == 8
    ids = PromptSet(dataclasses.replace(BUILTIN, tokens=(0, 500), shared_prefix=0.5), 64)
    lists = [ids.prompt(i) for i in range(4)]
    assert all(len(p) == 64 for p in lists) and all(p[:32] == lists[0][:32] for p in lists)
    assert lists[0][32:] != lists[1][32:]


def test_a_file_gives_the_texts_of_prompts_and_of_chat_messages(tmp_path: pathlib.Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ["x"]}]
    spec = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "", "text": "b"}, "", {"messages": chat, "score": 10**30})
    assert spec.path and read_prompts(spec.path) == ["a", "b", "user: hi\nassistant: ['x']"]


@pytest.mark.parametrize(("line", "text"), [
    ("{", "p.jsonl:1: not JSON"), ('{"other": 1}', "p.jsonl:1: needs a text"), ("[1]", "p.jsonl:1: needs a text"),
    ('{"prompt": [1, 2]}', "needs a text"), ('{"messages": [{"role": "user"}]}', "needs a text"), ("", "no prompts"),
    ('{"prompt": "a \\ud800 b"}', "p.jsonl:1: a lone surrogate"),
    ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "p.jsonl:1: a lone surrogate"),
    ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "p.jsonl:1: not JSON")])
def test_a_bad_file_is_one_clear_line(tmp_path: pathlib.Path, line: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        PromptSet(jsonl(tmp_path, line), 60)


def test_a_missing_file_is_one_clear_line(tmp_path: pathlib.Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot read"):
            read_prompts(path)


def test_odd_ends_of_lines_within_a_text_are_part_of_it(tmp_path: pathlib.Path) -> None:
    odd = "a\u2028b\u0085c\x0bd\x1ce"
    path = tmp_path / "p.jsonl"
    text = f"{json.dumps({'prompt': odd}, ensure_ascii=False)}\r\n{json.dumps({'prompt': 'two'})}\r\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # with a mark of byte order, as some editors begin files
    assert read_prompts(path) == [odd, "two"]


@pytest.mark.parametrize(("counts", "message"), [
    *[([count], "bad answer: prompt_tokens is not a count") for count in (b'"4"', b"1e999")],
    *[(counts, "bad answer: the server counts .* in .* characters") for counts in ([b"1"], [b"99999999999"],
                                                                                    [b"2000", b"1", b"0", b"0"])]])
def test_a_count_that_no_prompt_has_is_no_answer_instead_of_prompts_of_gigabytes(counts: list[bytes],
                                                                                  message: str) -> None:
    bodies = [said(b'{"usage": {"prompt_tokens": %b}}' % count) for count in counts]
    with serving(*bodies) as url, pytest.raises(BadAnswer, match=message):
        chars_per_token(Target(url, OPENAI, "m", False), load(contexts=[8192]))


def test_reasons_of_failed_requests_are_written_without_secrets(tmp_path: pathlib.Path) -> None:
    failed = Reply(1, 8, 0.5, 0.25, ended=2.0, kind="http_500", detail="no access with canary-secret")
    write_replies(tmp_path / "requests.jsonl", [failed], 0.0, Redactor(["canary-secret"]).text)
    assert "no access with [redacted]" in (tmp_path / "requests.jsonl").read_text()
