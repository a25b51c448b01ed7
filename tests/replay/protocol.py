"""HTTP as SGLang's server speaks it: health, information, metrics, /generate and /v1/completions, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

from tests.replay.decode import Request

if TYPE_CHECKING:
    from tests.replay.standin import Standin

WORDS = ("the", "server", "reads", "a", "long", "prompt", "and", "drafts", "small", "trees", "of", "likely", "words",
         "which", "one", "pass", "verifies", "until", "power", "limits", "every", "kernel", "again")
CHARACTERS = 4.4  # of a token, as far as prompts are counted


class Connection(asyncio.Protocol):
    """One client: requests one after the other, kept alive."""

    def __init__(self, server: Standin) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.data = b""
        self.request: Request | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self.request is not None:
            self.server.engine.abort(self.request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, rest = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n")[1:]
                       if line.lower().startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        self.data = rest[length:]
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        self.answer(method, path.partition("?")[0], rest[:length])

    def answer(self, method: str, path: str, body: bytes) -> None:
        server = self.server
        if method == "POST" and path in ("/generate", "/v1/completions"):
            try:
                ask = json.loads(body)
            except ValueError:
                self.reply(400, {"object": "error", "message": "not JSON", "code": 400})
                return
            self.complete(path, ask)
        elif path in ("/health", "/health_generate"):
            self.reply(200 if server.ready else 503, {})
        elif path in ("/server_info", "/get_server_info"):
            self.reply(200, {**vars(server.args), "version": "0.5.23+replay", "status": "ready"})
        elif path in ("/model_info", "/get_model_info"):
            self.reply(200, {"model_path": server.args.model_path, "is_generation": True})
        elif path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": server.args.model_path, "object": "model"}]})
        elif path == "/metrics":
            self.reply(200, self.metrics())
        else:
            self.reply(404, {"detail": "Not Found"})

    def metrics(self) -> str:
        engine = self.server.engine
        label = f'{{model_name="{self.server.args.model_path}"}}'
        return "".join(f"sglang:{name}{label} {value}\n" for name, value in (
            ("generation_tokens_total", engine.total_tokens), ("spec_verify_calls_total", engine.total_steps),
            ("num_running_reqs", engine.running), ("num_queue_reqs", 0), ("num_retracted_reqs", 0)))

    def complete(self, path: str, ask: dict[str, Any]) -> None:
        """A completion: tokens from the engine, text as a function of the prompt."""
        server, native = self.server, path == "/generate"
        sampling = ask.get("sampling_params") or {} if native else ask
        wanted = max(1, int(sampling.get("max_new_tokens" if native else "max_tokens", 16)))
        prompt = ask.get("text", ask.get("input_ids")) if native else ask.get("prompt")
        length = len(prompt) if isinstance(prompt, list) else round(len(str(prompt)) / CHARACTERS)
        stream = bool(ask.get("stream"))
        if stream:
            server.measured = True
        elif wanted == 1:
            server.new_load()
        ttft_s = server.table.spec["ttft_s"] + length / server.table.spec["prefill_tokens_per_s"]
        text = Text(json.dumps(prompt), wanted)
        options = ask.get("stream_options") or {}
        answer = _Native(text) if native else _OpenAi(text, bool(options.get("include_usage")))
        if stream:
            self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        def emit(request: Request) -> None:
            if not stream:
                if request.done:
                    self.request = None
                    self.reply(200, answer.whole(request))
                return
            events = answer.events(request)
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            if request.done:
                self.request = None
                data += b"data: [DONE]\n\n"
            self.write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if request.done else b""))

        self.request = Request(max(1, length), wanted, server.clock.now() + ttft_s, emit,
                               replaced=stream)
        server.engine.add(self.request)

    def reply(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        kind = "text/plain" if isinstance(content, str) else "application/json"
        self.write(b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
                   % (status, kind.encode(), len(data), data))

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


class Text:
    """Greedy output: the same for the same prompt, a word a token."""

    def __init__(self, prompt: str, tokens: int) -> None:
        self.words = random.Random(prompt).choices(WORDS, k=tokens)

    def upto(self, tokens: int, since: int = 0) -> str:
        return " ".join(self.words[since:tokens])


class _Native:
    """Answers of /generate: the whole text so far and meta_info in every event."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def whole(self, request: Request) -> dict[str, Any]:
        reason = {"type": "length", "length": request.wanted} if request.done else None
        return {"text": self.text.upto(request.tokens), "meta_info": {
            "finish_reason": reason, "prompt_tokens": request.prompt_tokens, "completion_tokens": request.tokens,
            "spec_verify_ct": request.steps, "cached_tokens": 0}}

    def events(self, request: Request) -> list[dict[str, Any]]:
        return [self.whole(request)]


class _OpenAi:
    """Answers of /v1/completions: pieces of text, usage at the end."""

    def __init__(self, text: Text, usage_wanted: bool) -> None:
        self.text, self.usage_wanted, self.told = text, usage_wanted, 0

    def usage(self, request: Request) -> dict[str, Any]:
        return {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.tokens,
                "total_tokens": request.prompt_tokens + request.tokens}

    def _choice(self, request: Request) -> list[dict[str, Any]]:
        piece = self.text.upto(request.tokens, self.told)
        self.told = request.tokens
        return [{"index": 0, "text": piece, "finish_reason": "length" if request.done else None}]

    def whole(self, request: Request) -> dict[str, Any]:
        return {"object": "text_completion", "choices": self._choice(request), "usage": self.usage(request)}

    def events(self, request: Request) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [{"object": "text_completion", "choices": self._choice(request)}]
        if request.done and self.usage_wanted:
            events.append({"object": "text_completion", "choices": [], "usage": self.usage(request)})
        return events
