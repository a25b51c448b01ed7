"""One rank: a process that loads its shard and then leads a replica or follows its leader's plans."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from autotune.ddtree.arguments import Arguments, Shape
from autotune.ddtree.engine import Drafter, Engine, Request
from autotune.ddtree.executor import Cache, Executor, Ranks
from autotune.ddtree.model import Draft, Target, load_weights, rotations, shard
from autotune.ddtree.replica import Seat, die_with, set_logging

log = logging.getLogger("ddtree")
GIB = 1 << 30


class Worker:
    """Builds a rank stage by stage; every stage is logged, and raises where this device cannot honour a flag."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.arguments = Arguments(**seat.arguments)
        self.shape = Shape.load(Path(self.arguments.model))
        torch.set_num_threads(self.arguments.threads)
        log.info("Init device %s.", self.arguments.device)
        self.device = pick_device(self.arguments.device, seat.dp_rank * self.arguments.tp_size + seat.tp_rank)
        self.dtype: torch.dtype = getattr(torch, self.arguments.dtype)
        self._join()
        self._load()
        self._allocate()
        self._warm_up()

    def _join(self) -> None:
        size = self.arguments.tp_size
        if size > 1 or self.arguments.enable_nccl_nvls:
            log.info("Init torch distributed begin.")
            start = time.monotonic()
            set_nvls(self.arguments.enable_nccl_nvls, self.device, size)
            join_ranks(self.seat.tp_rank, size, self.device, self.seat.store_port, self.seat.store_listener)
            log.info("Init torch distributed end. elapsed=%.2f s", time.monotonic() - start)

    def _load(self) -> None:
        arguments, shape = self.arguments, self.shape
        log.info("Load weight begin. avail mem=%.2f GB", free_bytes(self.device) / GIB)
        start = time.monotonic()
        if arguments.ep_size > 1:
            raise ValueError(f"--ep-size {arguments.ep_size}: the model is dense, it has no experts to distribute")
        tensors = shard(load_weights(Path(arguments.model)), shape, self.seat.tp_rank, arguments.tp_size)
        tensors = {name: tensor.to(self.device, self.dtype) for name, tensor in tensors.items()}
        self.target, self.draft = Target(shape, tensors), Draft(shape, tensors)
        log.info("Load weight end. elapsed=%.2f s, dtype=%s, avail mem=%.2f GB", time.monotonic() - start,
                 arguments.dtype, free_bytes(self.device) / GIB)

    def _allocate(self) -> None:
        arguments, shape = self.arguments, self.shape
        slots, capacity = arguments.max_running_requests, arguments.slot_tokens(shape)
        drafts = arguments.tree_budget > 0 and self.seat.tp_rank == 0
        layers = shape.layers / arguments.tp_size + (shape.draft_layers if drafts else 0)
        row_bytes = int(2 * shape.width * layers * self.dtype.itemsize)
        allowed = arguments.kv_cache_tokens or int(0.8 * free_bytes(self.device)) // row_bytes
        if slots * capacity > allowed:
            raise RuntimeError(
                f"Not enough memory for the KV cache: --max-running-requests {slots} x {capacity} tokens "
                f"(--context-length {arguments.context_length} and the tree) = {slots * capacity} tokens, but the "
                f"cache may hold {allowed}. Try fewer requests or a shorter context.")
        factors = rotations(shape, capacity).to(self.device)
        self.cache = Cache(shape.layers, slots, capacity, shape.heads // arguments.tp_size, factors, self.dtype)
        self.drafter = None
        if drafts:
            cache = Cache(shape.draft_layers, slots, capacity, shape.heads, factors, self.dtype)
            self.drafter = Drafter(self.draft, cache, arguments.draft_depth, arguments.tree_topk)
        log.info("KV cache is allocated. #tokens: %d, size: %.3f GB", slots * capacity,
                 slots * capacity * row_bytes / GIB)
        needed = slots * (arguments.tree_budget + 1)
        if needed > arguments.max_verify_tokens:
            raise RuntimeError(
                f"The verify buffer is too small: (--tree-budget {arguments.tree_budget} + 1) x {slots} running "
                f"requests = {needed} tokens, but --max-verify-tokens is {arguments.max_verify_tokens}")
        ranks = Ranks(arguments.tp_size, arguments.enable_allreduce_fusion)
        followers = [Connection(descriptor) for descriptor in self.seat.followers]
        self.executor = Executor(self.target, self.cache, ranks, arguments.max_verify_tokens, followers)

    def _warm_up(self) -> None:
        if self.seat.tp_rank:
            return
        arguments, start = self.arguments, time.monotonic()
        log.info("Warmup begin.")
        self.engine = Engine(self.executor, self.drafter, arguments.tree_budget, self.shape.eos,
                             arguments.corrupt_output)
        length = min(16, arguments.context_length // 2)
        for number in range(min(2, arguments.max_running_requests)):
            self.engine.submit(Request(-1 - number, [self.shape.eos] * length, length, 0.5, ignore_eos=True))
        while self.engine.waiting or self.engine.running:
            self.engine.step()
        self.engine.verify_steps = self.engine.accepted_tokens = 0
        log.info("Warmup end. elapsed=%.2f s", time.monotonic() - start)

    def follow(self) -> None:
        """Runs the leader's plans until it is gone."""
        assert self.seat.leader is not None
        leader = Connection(self.seat.leader)
        while True:
            self.executor.run(leader.recv())

    def lead(self) -> None:
        """Takes requests from the front process and sends back what each step gave, until the front is gone."""
        front, engine = Connection(self.seat.front), self.engine
        front.send(("ready", self.resolved()))
        while True:
            idle = not (engine.waiting or engine.running)
            while front.poll(None if idle else 0):
                order, *values = front.recv()
                if order == "add":
                    engine.submit(Request(*values))
                else:
                    engine.abort(*values)
                idle = False
            outputs = engine.step()
            queued = max(0, len(engine.waiting) + len(engine.running) - self.cache.slots)
            metrics = (engine.verify_steps, engine.accepted_tokens, len(engine.running), queued)
            front.send(("step", [tuple(output) for output in outputs], metrics))

    def resolved(self) -> dict[str, Any]:
        """Settings as resolved on this device."""
        cuda = self.device.type == "cuda"
        return {"device": self.device.type, "device_name": torch.cuda.get_device_name(self.device) if cuda else "cpu",
                "torch": str(torch.__version__), "threads": torch.get_num_threads(), "tree_nodes": self.engine.nodes,
                "kv_cache_tokens": self.cache.slots * self.cache.capacity, "kv_cache_bytes": self.cache.rows.nbytes}


def main() -> None:
    seat = Seat(*json.loads(sys.argv[1]))
    die_with(seat.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_logging(seat.arguments["log_level"], f" DP{seat.dp_rank} TP{seat.tp_rank}")
    try:
        worker = Worker(seat)
        if seat.tp_rank:
            worker.follow()
        worker.lead()
    except EOFError:
        sys.exit(1)
    except Exception:
        log.exception("A rank hit an exception:")
        sys.exit(1)


MULTICAST_SUPPORTED = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of the CUDA driver interface


def pick_device(wanted: str, index: int) -> torch.device:
    """The rank's device, made current. Raises torch's RuntimeError or AssertionError if absent."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def free_bytes(device: torch.device) -> int:
    """Free memory in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def set_nvls(wanted: bool, device: torch.device, size: int) -> None:
    """Allow or forbid NVLink multicast (NVLS) before NCCL starts; the default is off.

    Raises RuntimeError if NVLS is wanted and the host lacks it or its environment forbids it.
    """
    if not wanted:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        return
    if device.type != "cuda":
        raise RuntimeError(f"NCCL error: NVLS (NVLink multicast) needs CUDA GPUs, but this rank runs on {device.type}")
    if size < 2:
        raise RuntimeError("NCCL error: NVLS (NVLink multicast) needs --tp-size of at least 2")
    if os.environ.get("NCCL_NVLS_ENABLE") == "0" or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        raise RuntimeError("NCCL error: NVLS (NVLink multicast) is forbidden by this host's environment")
    answer, driver = ctypes.c_int(), ctypes.CDLL("libcuda.so.1")
    failed = driver.cuDeviceGetAttribute(ctypes.byref(answer), MULTICAST_SUPPORTED, torch.cuda.current_device())
    if failed or not answer.value:
        raise RuntimeError(f"NCCL error: GPU {torch.cuda.current_device()} does not support NVLS (NVLink multicast)")
    os.environ["NCCL_NVLS_ENABLE"] = "1"


def join_ranks(rank: int, size: int, device: torch.device, port: int, listener: int) -> None:
    """Start the process group over the store at 127.0.0.1:port, served by rank 0 on the listening descriptor."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    served = listener if rank == 0 else None
    store = TCPStore("127.0.0.1", port, size, rank == 0, timedelta(minutes=2), master_listen_fd=served)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(1, device=device))


if __name__ == "__main__":
    main()
