"""Engines in this process, and their models."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from autotune.ddtree.arguments import PACKAGED_MODEL, Shape
from autotune.ddtree.engine import Drafter, Engine, Request
from autotune.ddtree.executor import Cache, Executor, Ranks
from autotune.ddtree.model import Draft, Target, initial, load_weights, rotations

Model = tuple[Shape, Mapping[str, Tensor]]


@cache
def tiny_model(vocab_size: int = 12) -> Model:
    """Random weights and a few words: exact distributions can be summed, and guesses are often right."""
    shape = Shape(vocab_size, 16, 2, 24, 3, (1, 3), 1, 24, 6, 256, 10000.0, 0)
    generator = torch.Generator().manual_seed(7)
    return shape, {name: torch.ones_like(tensor) if tensor.dim() == 1
                   else torch.randn(tensor.shape, generator=generator) * 0.45
                   for name, tensor in initial(shape, torch.device("cpu")).items()}


@cache
def packaged_model() -> Model:
    return Shape.load(PACKAGED_MODEL), load_weights(PACKAGED_MODEL)


def make_engine(model: Model, budget: int, topk: int = 4, depth: int = 5, slots: int = 4, context: int = 200,
                corrupt: float = 0.0) -> Engine:
    torch.set_num_threads(1)
    shape, tensors = model
    capacity = -(-(context + max(budget, shape.block) + 1) // 8) * 8
    factors = rotations(shape, capacity)
    store = Cache(shape.layers, slots, capacity, shape.heads, factors, torch.float32)
    executor = Executor(Target(shape, tensors), store, Ranks(), slots * (budget + 1))
    drafter = None
    if budget:
        store = Cache(shape.draft_layers, slots, capacity, shape.heads, factors, torch.float32)
        drafter = Drafter(Draft(shape, tensors), store, depth, topk)
    return Engine(executor, drafter, budget, shape.eos, corrupt)


def complete(engine: Engine, requests: list[Request]) -> dict[int, list[int]]:
    """Run the requests to their end and return the output tokens of each."""
    for request in requests:
        engine.submit(request)
    made = defaultdict[int, list[int]](list)
    while engine.waiting or engine.running:
        for output in engine.step():
            made[output.id] += output.tokens
    return made
