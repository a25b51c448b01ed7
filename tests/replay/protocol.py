"""HTTP as SGLang's server speaks it: health, information, metrics, /generate and /v1/completions, streamed or not."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

from tests.fakes.standin import answer, taken
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
        if (found := taken(self.data)) is not None:
            method, path, body, self.data = found
            self.answer(method, path.partition("?")[0], body)

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
        options = ask.get("stream_options") or {}
        answers = Answers(json.dumps(prompt), wanted, native, bool(options.get("include_usage")))
        if stream:
            self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

        def emit(request: Request) -> None:
            if not stream:
                if request.done:
                    self.request = None
                    self.reply(200, answers.whole(request))
                return
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in answers.events(request))
            if request.done:
                self.request = None
                data += b"data: [DONE]\n\n"
            self.write(b"%x\r\n%b\r\n%b" % (len(data), data, b"0\r\n\r\n" if request.done else b""))

        self.request = Request(max(1, length), wanted, server.clock.now() + ttft_s, emit, replaced=stream)
        server.engine.add(self.request)

    def reply(self, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.write(answer(status, "text/plain" if isinstance(content, str) else "application/json", data))

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)


class Answers:
    """Greedy output, a word a token: the same for the same prompt, in the format of /generate or /v1/completions."""

    def __init__(self, prompt: str, tokens: int, native: bool, usage_wanted: bool) -> None:
        self.words = random.Random(prompt).choices(WORDS, k=tokens)
        self.native, self.usage_wanted, self.sent = native, usage_wanted, 0

    def whole(self, request: Request) -> dict[str, Any]:
        """/generate: the whole text so far and meta_info; /v1/completions: the text since the last call and usage."""
        counts = {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.tokens}
        since, self.sent = self.sent, request.tokens
        if self.native:
            reason = {"type": "length", "length": request.wanted} if request.done else None
            return {"text": " ".join(self.words[:request.tokens]), "meta_info": {
                **counts, "finish_reason": reason, "spec_verify_ct": request.steps, "cached_tokens": 0}}
        choice = {"index": 0, "text": " ".join(self.words[since:request.tokens]),
                  "finish_reason": "length" if request.done else None}
        return {"object": "text_completion", "choices": [choice],
                "usage": {**counts, "total_tokens": sum(counts.values())}}

    def events(self, request: Request) -> list[dict[str, Any]]:
        """Events of a stream; usage of /v1/completions comes in one of its own at the end."""
        event = self.whole(request)
        usage = event.pop("usage", None)
        if not (usage and request.done and self.usage_wanted):
            return [event]
        return [event, {"object": "text_completion", "choices": [], "usage": usage}]
