"""A stand-in for SGLang on 8 GPUs: a real process tree with its command line, log, protocol and ways to die.

`python -m sglang.launch_server ...` arrives here in a replay (site/). What it does is in table.yaml.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from tests.fakes import standin as fakes
from tests.replay import arguments, logs
from tests.replay.clock import VARIABLE, Clock
from tests.replay.decode import Engine
from tests.replay.gpus import Gpus
from tests.replay.table import Table, at

GLANCE_S = 0.06  # real seconds that every stage lasts, so that whoever reads the log sees it
ADJUST_S = 0.2
CHANGED = 0.004  # share by which power must change to be written
REPORT_S = 5.0
CHARACTERS = "4.4"  # of a token, as far as prompts are counted
REPLAYED_S = 8.0  # about how long a measurement takes that really runs, in told seconds


class Standin:
    """One server from its start to its end."""

    def __init__(self, argv: list[str]) -> None:
        clock = Clock.shared()
        if clock is None:
            sys.exit(f"this is a replay's stand-in for SGLang: it needs {VARIABLE} (make replay sets it)")
        clock.uninstall()
        self.clock, self.began = clock, clock.now()
        self.args = arguments.parse(argv)
        self.config = arguments.server_part(self.args)
        self.table = Table.load()
        spec = self.table.spec
        self.launch = clock.next_launch()
        self.gpus = Gpus(pathlib.Path(os.environ[VARIABLE]), clock, spec["gpus"])
        self.names = arguments.ranks(self.args)
        self.ranks: list[int] = []
        self.watts = self.table.curve("watts", self.config)
        self.rates = self.table.curve("tokens_per_s", self.config)
        self.accept_length = spec["accept_length"].get(self.config["tree_budget"], 3.0)
        self.luck = random.Random(f"luck {self.launch}")

    # The log and the clock

    def say(self, text: str, writer: str = "") -> None:
        logs.say(text, self.clock.now() - self.began, writer)

    def each(self, text: str) -> None:
        """A line of every rank."""
        for name in self.names:
            self.say(text, name)

    def reach(self, told_s: float) -> None:
        """Let told time pass until `told_s` after the start."""
        time.sleep(GLANCE_S)
        self.pass_to(told_s)

    def pass_to(self, told_s: float) -> None:
        self.clock.put_forward(max(0.0, told_s - (self.clock.now() - self.began)))

    # The start

    def start(self) -> None:
        """Everything until the port is opened; a configuration that crashes does not return from it."""
        spec, reaches = self.table.spec, self.table.spec["reaches_s"]
        rule = self.table.crash(self.config) or {}
        self.clock.allow(math.inf)
        signal.signal(signal.SIGQUIT, self.child_failed)
        signal.signal(signal.SIGTERM, self.terminated)
        self.gpus.set(spec["gpus"]["idle_w"] * spec["gpus"]["count"], 0, [])
        self.reach(reaches["args"])
        print("[replay] This is a stand-in: what follows is made up in the style of SGLang's log.", flush=True)
        self.say(f"server_args={vars(self.args)}")
        self.reach(reaches["nccl"])
        self.ranks = [self.rank(i) for i in range(len(self.names))]
        self.each("Init torch distributed begin.")
        self.reach(reaches["load"])
        held = spec["gpus"]["held_w"] * spec["gpus"]["count"]
        self.gpus.set(held, 4096, self.ranks)
        self.each("Init torch distributed ends. elapsed=9.84 s, mem usage=3.21 GB")
        self.each("Load weight begin. avail mem=263.74 GB")
        self.die_if(rule, "load")
        for shard in range(1, logs.SHARDS + 1):
            self.pass_to(reaches["load"] + (reaches["loaded"] - reaches["load"]) * shard / logs.SHARDS)
            print(f"Loading safetensors checkpoint shards: {100 * shard // logs.SHARDS:3d}% Completed | "
                  f"{shard}/{logs.SHARDS}", flush=True)
        self.reach(reaches["loaded"])
        self.gpus.set(held, spec["weights_mib"], self.ranks)
        self.each("Load weight end. elapsed=93.41 s, type=KimiK25ForConditionalGeneration, avail mem=187.20 GB, "
                  "mem usage=76.54 GB.")
        self.reach(reaches["kv"])
        self.each("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2194432, KV size: 143.65 GB")
        self.reach(reaches["capture"])
        self.each(f"Capture decode CUDA graph begin. backend=full, bs up to {self.args.cuda_graph_max_bs_decode}, "
                  "avail mem=41.83 GB")
        self.die_if(rule, "graph_capture")
        self.reach(reaches["captured"])
        self.each("Capture decode CUDA graph end. elapsed=365.70 s, mem usage=3.12 GB, avail mem=38.71 GB.")
        self.reach(reaches["open"])

    def rank(self, index: int) -> int:
        """One more process of the tree, which waits for its end; its pid."""
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # until its handler is there
        pid = os.fork()
        if pid:
            return pid
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)

        def die(number: int, frame: object) -> None:
            rule = self.table.crash(self.config, sys.maxsize)
            assert rule is not None
            logs.say(logs.death(rule["log"], index), self.clock.now() - self.began, self.names[index])
            os.kill(os.getppid(), signal.SIGQUIT)
            os._exit(1)

        signal.signal(signal.SIGUSR1, die)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    def die_if(self, rule: Mapping[str, Any], stage: str) -> None:
        """One rank meets its fault if this is the stage; SGLang's main process then ends the whole tree."""
        if rule.get("stage") == stage:
            self.reach(rule["after_s"])
            self.strike()
            time.sleep(30)

    def strike(self) -> None:
        """The fault of this configuration arises in one of the ranks."""
        os.kill(self.luck.choice(self.ranks), signal.SIGUSR1)

    def child_failed(self, number: int, frame: object) -> None:
        """As SGLang's main process does when a rank has died: everything is killed, itself included (status 137)."""
        self.say("Received sigquit from a child process. It usually means the child failed.")
        self.say(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
        self.end_ranks()
        os.kill(os.getpid(), signal.SIGKILL)

    def terminated(self, number: int, frame: object) -> None:
        self.say("SIGTERM received. Shutting down.")
        self.end_ranks()
        os._exit(0)

    def end_ranks(self) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.clock.allow(math.inf)
        self.gpus.idle()


class Serving(fakes.Server):
    """The server of a stand-in: its port is open, its requests are answered at the table's speed."""

    def __init__(self, standin: Standin) -> None:
        args = standin.args
        super().__init__(fakes.arguments(["--host", args.host, "--port", str(args.port), "--chars", CHARACTERS,
                                          "--speculative"]))
        self.standin, self.clock, self.table = standin, standin.clock, standin.table
        self.engine = Engine(self.clock, standin.rates, standin.accept_length, f"engine {standin.launch}", self.give_to)
        self.generating = self.engine.run()
        self.idle = False
        self.power_noise, self.drawn_w = 1.0, 0.0
        self.reported = self.clock.now(), 0  # when, and the tokens until then
        self.warm, self.measured = False, True  # measured: since luck was drawn last
        say = standin.say
        say(f"INFO:     Started server process [{os.getpid()}]")
        say("INFO:     Application startup complete.")
        say(f"INFO:     Uvicorn running on http://{args.host}:{args.port} (Press CTRL+C to quit)")
        self.at(time.monotonic() + GLANCE_S, self.warmed_up)

    def warmed_up(self) -> None:
        self.standin.pass_to(self.table.spec["reaches_s"]["ready"])
        self.warm = True
        self.standin.say("The server is fired up and ready to roll!")
        self.generate()
        self.follow()

    def generate(self) -> None:
        """Let the engine go on, now and whenever it has to."""
        wait_s = next(self.generating)
        self.idle = wait_s == math.inf
        if not self.idle:
            self.at(time.monotonic() + wait_s, self.generate)

    def begin(self, c: fakes.Connection, s: fakes.Stream) -> None:
        """Give a request to the engine, which answers when its prompt has been read."""
        if s.stream:
            self.measured = True
            self.open(c, s)
        elif s.wanted == 1:
            self.new_load()
        c.stream = s
        spec = self.table.spec
        s.begins = self.clock.now() + spec["ttft_s"] + s.prompt_tokens / spec["prefill_tokens_per_s"]
        self.engine.add(s)
        if self.idle:
            self.idle = False
            self.at(time.monotonic(), self.generate)

    def give_to(self, s: fakes.Stream, tokens: int) -> None:
        c = s.connection
        if s.stream:
            self.give(c, s, tokens)
            return
        s.tokens += tokens
        if s.tokens >= s.wanted:
            c.stream = None
            self.whole(c, s)

    def drop(self, c: fakes.Connection) -> None:
        if c.stream is not None:
            self.engine.abort()
        super().drop(c)

    def get(self, c: fakes.Connection, path: str) -> None:
        args, engine = self.standin.args, self.engine
        if path == "/metrics":
            label = f'{{model_name="{args.model_path}"}}'
            text = "".join(f"sglang:{name}{label} {value}\n" for name, value in (
                ("generation_tokens_total", engine.total_tokens), ("spec_verify_calls_total", engine.total_steps),
                ("num_running_reqs", engine.running), ("num_queue_reqs", 0), ("num_retracted_reqs", 0)))
            self.send(c, fakes.answer(200, "text/plain", text.encode()))
        elif path == "/server_info":
            self.plain(c, 200, {**vars(args), "version": "0.5.23+replay", "status": "ready"})
        elif path == "/v1/models":
            self.plain(c, 200, {"object": "list", "data": [{"id": args.model_path, "object": "model"}]})
        elif path == "/health_generate":
            self.plain(c, 200 if self.warm else 503, {})
        else:
            super().get(c, path)

    def follow(self) -> None:
        """Keep the GPUs' power in step with the load, report it in the log, and meet the faults of serving."""
        spec, standin = self.table.spec["gpus"], self.standin
        running = self.engine.running
        rule = self.table.crash(standin.config, running)
        if rule is not None and rule["stage"] == "serving":
            standin.strike()
            return
        watts = at(standin.watts, running) * self.power_noise if running else spec["held_w"] * spec["count"]
        if abs(watts - self.drawn_w) > CHANGED * watts:
            standin.gpus.set(watts)
            self.drawn_w = watts
        now, (told, tokens) = self.clock.now(), self.reported
        if running and now - told >= REPORT_S:
            rate = (self.engine.total_tokens - tokens) / (now - told)
            standin.say(f"Decode batch, #running-req: {running}, accept len: {self.engine.accept_length:.2f}, "
                        f"cuda graph: True, gen throughput (token/s): {rate:.2f}, #queue-req: 0", standin.names[0])
            self.reported = now, self.engine.total_tokens
        self.at(time.monotonic() + ADJUST_S / self.clock.pace, self.follow)

    def new_load(self) -> None:
        """A load begins with a request for one token: its luck is drawn, and what a window of the table's length would
        take beyond what is really replayed is told by putting the clock forward."""
        if not self.measured:
            return
        self.measured = False
        spread, luck = self.table.spec["noise_cv"], self.standin.luck
        self.engine.noise = 1 + luck.gauss(0, spread)
        self.power_noise = 1 + luck.gauss(0, spread / 2)
        self.clock.put_forward(max(0.0, self.table.spec["measure_s"] - REPLAYED_S))


def main() -> None:
    server = Standin(sys.argv[1:])
    server.start()
    Serving(server).run()
