"""An engine stand-in: a real process that speaks a server's protocol and fails on command.

    python tests/fakes/standin.py --port 0 --fault hang --at load

Stages are printed as log marks in order. Faults: see FAULTS. It answers /health, /server_info, /v1/models,
/metrics and /v1/completions (streamed or not, usage in the last chunk), `--tokens-per-s` per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time

MARKS = {"device-init": "Init device", "nccl-init": "Init torch distributed begin", "load": "Load weight begin",
         "kv-alloc": "Load weight end", "graph-capture": "Capture cuda graph begin", "warmup": "Warmup begin"}
FAULTS = ("none", "exit", "silent-exit", "segfault", "killed", "hang", "error-answers", "cut-streams", "malformed-sse",
          "endless-sse", "garbage", "flood", "not-utf8", "ignore-sigterm", "grandchildren", "die-under-load",
          "hang-healthy", "keep-port", "late", "frozen", "hold-gpu")
AT_ONCE = ("exit", "silent-exit", "segfault", "killed", "hang", "flood", "not-utf8", "frozen")
"""Faults of a stage that may also come under load, at stage serving, after `--after` requests."""
SLEEPER = "import os,time; os.setsid(); time.sleep(600)  # of the stand-in on port %d"


def say(text: str) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)


def misbehave(fault: str, message: str) -> None:
    """What a fault at start does, once its stage is reached."""
    if fault == "exit":
        say(f"Traceback (most recent call last):\n  File \"server.py\", line 1, in load\nRuntimeError: {message}")
        sys.exit(1)
    if fault == "silent-exit":
        sys.exit(0)
    if fault in ("segfault", "killed"):
        os.kill(os.getpid(), signal.SIGSEGV if fault == "segfault" else signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "flood":
        line = b"x" * 1000 + b"\n"
        for _ in range(int(os.environ.get("STANDIN_FLOOD_MB", "100")) * 1000):
            sys.stdout.buffer.write(line)
        say("RuntimeError: after the flood")
        sys.exit(1)
    if fault == "not-utf8":
        sys.stdout.buffer.write(b"\xff\xfe\x80 broken \xc3\x28 bytes\nRuntimeError: not \xff text\n")
        sys.stdout.flush()
        sys.exit(1)
    if fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)  # neither answers nor ends; SIGTERM waits until it goes on
    if fault == "hold-gpu":  # memory that stays in use after the process
        with open(os.environ["FAKE_NVML"], "a") as state:
            state.write("0.used_mib 40000\n")
    if fault == "late":
        time.sleep(float(os.environ.get("STANDIN_LATE_S", "30")))


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.served = self.tokens = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode("latin-1").split(" ", 2)
                length = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode("latin-1").partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                body = await reader.readexactly(length) if length else b""
                await self.answer(method, path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault = self.args.fault if self.args.at == "serving" else "none"
        if path == "/health":
            return self.reply(writer, 200, {})
        if path == "/server_info":
            return self.reply(writer, 200, {"flags": self.args.flags, "tokens_per_s": self.args.tokens_per_s,
                                             "fault": self.args.fault, "api_key": self.args.api_key or None,
                                             "argv": sys.argv[1:]})
        if path == "/v1/models":
            return self.reply(writer, 200, {"data": [{"id": "standin"}]})
        if path == "/metrics":
            return self.reply(writer, 200, f"standin:generation_tokens_total {self.tokens}\n")
        if path != "/v1/completions" or method != "POST":
            return self.reply(writer, 404, {"error": {"message": "not here"}})
        self.served += 1
        past_start = self.served > 1  # the readiness check gets a good answer
        if fault == "die-under-load" and self.served > self.args.after:
            say("RuntimeError: CUDA error: out of memory while serving")
            os._exit(1)
        if fault in AT_ONCE and self.served > self.args.after:
            misbehave(fault, self.args.message)
        if fault == "hang-healthy" and past_start:
            await asyncio.sleep(3600)
        if fault == "error-answers" and past_start:
            return self.reply(writer, 500, {"error": {"message": "internal error"}})
        if fault == "garbage":
            return self.reply(writer, 200, "<html>this is no completion</html>")
        await self.complete(json.loads(body), writer, fault if past_start else "none")
        return None

    def reply(self, writer: asyncio.StreamWriter, status: int, content: object) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nContent-Type: application/json\r\n\r\n"
                     .encode() + data)

    async def complete(self, ask: dict[str, object], writer: asyncio.StreamWriter, fault: str) -> None:
        count = int(str(ask.get("max_tokens", 16)))
        prompt = len(str(ask.get("prompt", "")).split())
        usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        told = self.echoed()
        if not ask.get("stream"):
            self.tokens += count
            return self.reply(writer, 200, {"choices": [{"text": " ".join(f"word{i}" for i in range(count)) + told}],
                                            "usage": usage})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if told and self.served % 3 == 0:
            self.event(writer, {"error": {"message": f"no access{told}"}})
            self.chunk(writer, b"data: [DONE]\n\n")
            return writer.write(b"0\r\n\r\n")
        for index in range(count):
            if fault == "cut-streams" and index == count // 2:
                writer.transport.abort()
                return None
            if fault == "malformed-sse" and index == 1:
                self.chunk(writer, b"data: {this is not json\n\n")
            self.event(writer, {"choices": [{"index": 0, "text": "word ", "finish_reason": None}]})
            self.tokens += 1
            await writer.drain()
            await asyncio.sleep(1 / self.args.tokens_per_s)
        while fault == "endless-sse":
            self.event(writer, {"choices": [{"index": 0, "text": "word ", "finish_reason": None}]})
            await writer.drain()
            await asyncio.sleep(0.001)
        self.event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
        self.chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None

    def echoed(self) -> str:
        """Variables of the environment, as careless servers tell them."""
        return "".join(f" {os.environ.get(name)}" for name in self.args.echo.split(",") if name)

    def event(self, writer: asyncio.StreamWriter, content: object) -> None:
        self.chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")

    @staticmethod
    def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def serve(args: argparse.Namespace) -> None:
    server = await asyncio.start_server(Server(args).handle, args.host, args.port)
    if args.fault == "keep-port":  # a child in a session of its own has the listening socket, and ignores SIGTERM
        descriptor = server.sockets[0].fileno()
        os.set_inheritable(descriptor, True)
        subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                          + SLEEPER % args.port], close_fds=False)
    say("The server is fired up and ready to roll!")
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--at", default="load")
    parser.add_argument("--message", default="CUDA error: something broke")
    parser.add_argument("--after", type=int, default=6, help="die-under-load: requests served before")
    parser.add_argument("--tokens-per-s", type=float, default=200.0, help="speed of one request")
    parser.add_argument("--flags", default="", help="anything, to tell configurations apart")
    parser.add_argument("--stage-s", type=float, default=0.02)
    parser.add_argument("--api-key", default="", help="said in the log, as careless servers do")
    parser.add_argument("--admin-api-key", default="")
    parser.add_argument("--hf-token", default="")
    parser.add_argument("--say", default="", help="a file whose lines are said at the start")
    parser.add_argument("--echo", default="", help="variables whose values answers and errors hold")
    args = parser.parse_args()
    if args.fault in ("ignore-sigterm", "keep-port"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.api_key:
        say(f"server_args=ServerArgs(port={args.port}, api_key='{args.api_key}')")
    if args.say:
        with open(args.say) as lines:
            for line in lines:
                say(line.rstrip("\n"))
    for stage, mark in MARKS.items():
        say(mark)
        time.sleep(args.stage_s)
        if stage == args.at:
            misbehave(args.fault, args.message)
    if args.fault == "grandchildren":
        sleeper = SLEEPER % args.port
        for _ in range(3):
            subprocess.Popen([sys.executable, "-c", sleeper])
            subprocess.run([sys.executable, "-c", "import subprocess,sys;"
                            f"subprocess.Popen([sys.executable,'-c',{sleeper!r}],env={{}})"], check=True)
    asyncio.run(serve(args))


if __name__ == "__main__":
    main()
