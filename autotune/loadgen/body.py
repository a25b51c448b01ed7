"""Bodies of requests: one prompt and its length, for each kind of server."""

from __future__ import annotations

import json
from typing import Any

from autotune.loadgen.prompts import Prompt, as_text, is_messages
from autotune.loadgen.spec import Target

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def request_body(target: Target, prompt: Prompt, output_tokens: int, temperature: float, ignore_eos: bool,
                 stream: bool = True) -> tuple[str, dict[str, Any]]:
    """(path, JSON body) of a request for `output_tokens` tokens."""
    if target.api == "sglang":
        sampling: dict[str, Any] = {"max_new_tokens": output_tokens, "temperature": temperature}
        if ignore_eos:
            sampling["ignore_eos"] = True
        body: dict[str, Any] = {"sampling_params": sampling, "stream": stream}
        if isinstance(prompt, str):
            body["text"] = prompt
        elif is_messages(prompt):
            body["text"] = as_text(prompt)
        else:
            body["input_ids"] = prompt
        return "/generate", {**body, **target.extra_body}
    body = {"model": target.model, "max_tokens": output_tokens, "temperature": temperature, "stream": stream}
    if ignore_eos:
        body["ignore_eos"] = True
    if stream:
        options = {"include_usage": True}
        if target.continuous_usage:
            options["continuous_usage_stats"] = True
        body["stream_options"] = options
    chat = is_messages(prompt)
    body["messages" if chat else "prompt"] = prompt
    return "/v1/chat/completions" if chat else "/v1/completions", {**body, **target.extra_body}


def encode(body: dict[str, Any]) -> bytes:
    """JSON as sent."""
    return _ENCODER.encode(body).encode()


def auth(target: Target) -> dict[str, str]:
    """Headers that identify us to the server, if it wants that."""
    return {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
