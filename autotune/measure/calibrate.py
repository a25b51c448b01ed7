"""How many characters a token of this server has, so that text prompts get the wanted length in tokens."""

from __future__ import annotations

import httpx

from autotune.measure.body import auth, request_body
from autotune.measure.prompts import PromptSet
from autotune.measure.spec import LoadSpec, Target

TRIES = 3


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
    with httpx.Client(timeout=load.first_token_timeout_s, trust_env=False, verify=False, headers=auth(target)) as http:
        tokens = _count(http, target, prompts.sample(0, load.context_tokens))
        if not tokens:
            return None
        ratio = load.context_tokens / tokens
        chars = counted = 0
        for index in range(1, TRIES + 1):
            text = prompts.sample(index, max(1, round(ratio * load.context_tokens)))
            chars += len(text)
            counted += _count(http, target, text) or 0
        return chars / counted if counted else None


def _count(http: httpx.Client, target: Target, text: str) -> int | None:
    path, body = request_body(target, text, 1, 0.0, False, stream=False)
    try:
        answer = http.post(target.base_url.rstrip("/") + path, json=body)
        value = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error
    if answer.status_code != 200 or not isinstance(value, dict) or "error" in value:
        raise Unanswered(f"HTTP {answer.status_code}: {answer.text[:500]}")
    usage = value.get("usage") or value.get("meta_info") or {}
    tokens = usage.get("prompt_tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None
