"""The HTTP front: an OpenAI-style completions interface over the replicas."""

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta
from tokenizers import Tokenizer

from autotune.ddtree import __version__
from autotune.ddtree.arguments import Arguments, Shape
from autotune.ddtree.replica import METRICS, Replica, Step, stop

log = logging.getLogger("ddtree")

# Settings of the OpenAI interface that this server has not, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "top_p": (1,), "echo": (False,), "logprobs": (),
                                       "stop": ([], ""), "suffix": ("",), "presence_penalty": (0,),
                                       "frequency_penalty": (0,), "logit_bias": ({},)}


class BadRequest(ValueError):
    """A request that cannot be served; the text is the reason."""


class StreamOptions(msgspec.Struct, frozen=True):
    """The usage in the last event of a stream, or in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Ask(msgspec.Struct):
    """One completion request."""

    prompt: str | Annotated[list[int], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] = 16
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


def read_ask(body: bytes, tokenizer: Tokenizer, arguments: Arguments, shape: Shape) -> tuple[Ask, list[int]]:
    """A request from its JSON, in which null stands for a default, and its prompt's tokens. Raises BadRequest."""
    try:
        given = {name: value for name, value in msgspec.json.decode(body, type=dict).items() if value is not None}
        ask = msgspec.convert(given, Ask)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from error
    for name in NEUTRAL.keys() & given:
        if given[name] not in NEUTRAL[name]:
            raise BadRequest(f"{name} is not supported by this server")
    prompt = ask.prompt if isinstance(ask.prompt, list) else tokenizer.encode(ask.prompt).ids or [shape.eos]
    if not all(0 <= token < shape.vocab_size for token in prompt):
        raise BadRequest(f"prompt has token numbers outside the vocabulary of {shape.vocab_size}")
    if len(prompt) + ask.max_tokens > arguments.context_length:
        raise BadRequest(f"this server's context length is {arguments.context_length} tokens, but the prompt has "
                         f"{len(prompt)} and max_tokens is {ask.max_tokens}")
    return ask, prompt


def error(status: int, message: str, kind: str = "invalid_request_error") -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


class Server:
    """Replicas, and the handlers that use them."""

    def __init__(self, arguments: Arguments, shape: Shape) -> None:
        self.arguments, self.shape = arguments, shape
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
        self.replicas: list[Replica] = []
        self.resolved: list[dict[str, Any]] = []
        self.ended, self.exit_code = asyncio.Event(), 0

    async def run(self, listener: socket.socket) -> int:
        """Serves until a signal (exit code 0) or the end of a rank (1); leaves no process behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, 0)
        app = web.Application(client_max_size=16 << 20)
        app.add_routes([web.post("/v1/completions", self.completions), web.get("/health", self.health),
                        web.get("/v1/models", self.models), web.get("/server_info", self.server_info),
                        web.get("/metrics", self.metrics)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2)
        try:
            for dp_rank in range(self.arguments.dp_size):
                self.replicas.append(Replica(self.arguments, dp_rank, self.on_death))
            await runner.setup()
            await web.SockSite(runner, listener).start()
            starting = asyncio.ensure_future(self.wait_ready())
            await self.ended.wait()
            starting.cancel()
        finally:
            for replica in self.replicas:
                replica.close()
            stop([rank for replica in self.replicas for rank in replica.ranks])
            await runner.cleanup()
        return self.exit_code

    def end(self, exit_code: int) -> None:
        if not self.ended.is_set():
            self.exit_code = exit_code
            self.ended.set()

    def on_death(self, name: str) -> None:
        if not self.ended.is_set():
            log.error("The process of rank %s has ended: the server stops.", name)
            self.end(1)

    async def wait_ready(self) -> None:
        self.resolved = list(await asyncio.gather(*(replica.ready for replica in self.replicas)))
        log.info("The server is fired up and ready to roll!")

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.resolved else 503)

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": self.arguments.model, "object": "model", "created": 0, "owned_by": "ddtree",
                 "max_model_len": self.arguments.context_length}
        return web.json_response({"object": "list", "data": [model]})

    async def server_info(self, _: web.Request) -> web.Response:
        """The arguments as resolved. `tree_nodes` is what a tree really has, which equal servers share."""
        resolved = self.resolved[0] if self.resolved else {}
        return web.json_response(
            {"version": __version__, **asdict(self.arguments), **resolved, "shape": asdict(self.shape)})

    async def metrics(self, _: web.Request) -> web.Response:
        """Counters and gauges in Prometheus' text form, summed over replicas."""
        lines = []
        for name, text in METRICS.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP ddtree:{name} {text}", f"# TYPE ddtree:{name} {kind}",
                      f"ddtree:{name} {sum(replica.metrics[name] for replica in self.replicas)}"]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if not self.resolved:
            return error(503, "the server is not ready", "service_unavailable")
        try:
            ask, prompt = read_ask(await request.read(), self.tokenizer, self.arguments, self.shape)
        except BadRequest as bad:
            return error(400, str(bad))
        answer = Answer(self, ask, prompt)
        return await answer.stream(request) if ask.stream else web.json_response(await answer.whole())


class Answer:
    """One completion on its way: from a replica's steps to JSON."""

    def __init__(self, server: Server, ask: Ask, prompt: list[int]) -> None:
        self.server, self.ask, self.prompt = server, ask, prompt
        self.unread: list[int] = []  # tokens of an unfinished character
        self.completion_tokens = self.verify_steps = 0
        self.head: dict[str, Any] = {}

    async def steps(self) -> AsyncGenerator[Step, None]:
        """The replica's steps. A client that leaves cancels this, and the request is aborted."""
        ask, server = self.ask, self.server
        replica = min(server.replicas, key=lambda each: (len(each.queues), each.metrics["prompt_tokens_total"]))
        number, finish = next(Replica.numbers), None
        seed = ask.seed if ask.seed is not None else hash((server.arguments.seed, number))
        queue = replica.submit(number, self.prompt, ask.max_tokens, ask.temperature, seed, ask.ignore_eos)
        self.head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()),
                     "model": server.arguments.model}
        try:
            while finish is None:
                tokens, finish, self.verify_steps = await queue.get()
                self.completion_tokens += len(tokens)
                yield tokens, finish, self.verify_steps
        finally:
            replica.forget(number, finished=finish is not None)

    def text(self, tokens: list[int], *, last: bool) -> str:
        """Text of the next tokens; bytes of an unfinished character wait for the rest."""
        self.unread += tokens
        text: str = self.server.tokenizer.decode(self.unread)
        if text.endswith("\ufffd") and not last and len(self.unread) < 16:
            return ""
        self.unread = []
        return text

    def usage(self) -> dict[str, int]:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.completion_tokens,
                "total_tokens": prompt + self.completion_tokens}

    def meta(self) -> dict[str, int]:
        """Acceptance length is completion_tokens / spec_verify_ct; without a tree there is none."""
        meta = self.usage()
        if self.server.arguments.tree_budget:
            meta["spec_verify_ct"] = self.verify_steps
        return meta

    def choice(self, text: str, finish: str | None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]

    async def whole(self) -> dict[str, Any]:
        parts, why = [], None
        async with aclosing(self.steps()) as steps:
            async for tokens, finish, _ in steps:
                parts.append(self.text(tokens, last=finish is not None))
                why = finish
        choices = self.choice("".join(parts), why)
        return {**self.head, "choices": choices, "usage": self.usage(), "meta_info": self.meta()}

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        options = self.ask.stream_options
        async with aclosing(self.steps()) as steps:
            async for tokens, finish, _ in steps:
                chunk = {**self.head, "choices": self.choice(self.text(tokens, last=finish is not None), finish)}
                if options.include_usage:
                    chunk["usage"] = self.usage() if options.continuous_usage_stats else None
                if finish:
                    chunk["meta_info"] = self.meta()
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if options.include_usage:
            chunk = {**self.head, "choices": [], "usage": self.usage(), "meta_info": self.meta()}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
