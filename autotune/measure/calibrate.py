"""How many characters a token of this server has, so that text prompts get the wanted length in tokens."""

from __future__ import annotations

from autotune.loadgen.body import auth, request_body
from autotune.loadgen.prompts import PromptSet
from autotune.loadgen.spec import LoadSpec, Target
from autotune.utils.http import BadAnswer, NoAnswer, ask, count, error_in, usage_of

TRIES = 3
MOST_CHARS_PER_TOKEN = 64
"""No text that is sent here has so long tokens: prompts would grow with the square of the context's length."""
MOST_TOKENS_PER_CHAR = 8
TEMPLATE_TOKENS = 4096
"""What a chat template, or a prompt of the system, may add to every prompt."""


class Unanswered(Exception):
    """The server did not answer a calibration request; the text says how."""


def chars_per_token(target: Target, load: LoadSpec) -> float | None:
    """Characters per token of the prompts of `load`; None where no text length is wanted or no usage came back.

    A first request as short as the context is in characters (so never too long), then three at the wanted
    length. Raises Unanswered.
    """
    prompts = PromptSet(load.prompts, load.context_tokens)
    if not prompts.needs_calibration:
        return None
    assert load.context_tokens is not None
    tokens = _count(target, load, prompts.sample(0, load.context_tokens))
    if not tokens:
        return None
    ratio = _ratio(load.context_tokens, tokens)
    chars = counted = 0
    for index in range(1, TRIES + 1):
        text = prompts.sample(index, max(1, round(ratio * load.context_tokens)))
        chars += len(text)
        counted += _count(target, load, text) or 0
    return _ratio(chars, counted) if counted else None


def _ratio(chars: int, tokens: int) -> float:
    """Characters per token. Raises Unanswered for a count that no text of this length has."""
    if chars > MOST_CHARS_PER_TOKEN * tokens or tokens > MOST_TOKENS_PER_CHAR * chars + TRIES * TEMPLATE_TOKENS:
        raise Unanswered(f"bad answer: the server counts {tokens} prompt tokens in {chars} characters")
    return chars / tokens


def _count(target: Target, load: LoadSpec, text: str) -> int | None:
    path, body = request_body(target, text, 1, 0.0, False, stream=False)
    try:
        answer = ask(target.base_url.rstrip("/") + path, body, within_s=load.first_token_timeout_s,
                     headers=auth(target))
        value = answer.json() if answer.status == 200 else {}
        told, tokens = error_in(value), count(usage_of(value), "prompt_tokens")
    except NoAnswer as error:
        raise Unanswered(f"POST {path}: no answer: {error}") from error
    except BadAnswer as error:
        raise Unanswered(f"POST {path}: bad answer: {error}") from error
    if told or answer.status != 200:
        raise Unanswered(f"POST {path}: HTTP {answer.status}: {(told or answer.text)[:500]}")
    return tokens
