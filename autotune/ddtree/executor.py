"""One rank's share of the target: runs a plan over its weights and its part of the cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from autotune.ddtree.arguments import Shape
from autotune.ddtree.model import Target, add, rotate_, rotations

Bools = NDArray[np.bool_]


@dataclass(slots=True)
class Plan:
    """One pass of the target; the same on every rank. First rows are kept, then slots moved, then tokens are run."""

    first: int  # slot
    tokens: list[list[int]]  # [slots][width]
    lengths: list[int]  # tokens in the cache of each slot
    depths: list[list[int]]  # [slots][width]
    sees: Bools | None  # [slots, width, width]; None: a prompt, whose last logits alone are wanted
    keep: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))  # rows: from, to
    moves: list[tuple[int, int, int]] = field(default_factory=list)  # slots: from, to, length


class Ranks(NamedTuple):
    """Reduction of partial sums of a row-parallel product become whole: alone, or by an all-reduce over `size` ranks.

    Fused, the product is added to this rank's share of the residual stream in one kernel, so that the all-reduce
    itself returns the new residual stream; otherwise the sum is reduced first and added after. A share is exact
    where size is a power of two.
    """

    size: int = 1
    fused: bool = False

    def add(self, residual: Tensor, activations: Tensor, weight: Tensor) -> Tensor:
        if self.size == 1:
            return torch.addmm(residual, activations, weight.t())
        if self.fused:
            total = torch.addmm(residual, activations, weight.t(), beta=1 / self.size)
            dist.all_reduce(total)
            return total
        partial = torch.mm(activations, weight.t())
        dist.all_reduce(partial)
        return residual + partial


class Executor:
    """Runs plans. On the leading rank it first passes each plan to the followers, which run the same."""

    def __init__(self, target: Target, cache: Cache, ranks: Ranks, verify_tokens: int,
                 followers: Sequence[Connection] = ()) -> None:
        self.target, self.cache, self.ranks, self.followers = target, cache, ranks, followers
        self.logits = cache.rows.new_empty((verify_tokens, target.embedding.shape[0]))

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Logits [slots, width, vocabulary] ([1, 1, vocabulary] for a prompt) and taps [slots, width, taps * width].

        The logits lie in one buffer that the next run overwrites.
        """
        for follower in self.followers:
            follower.send(plan)
        cache, device = self.cache, self.logits.device
        tokens = torch.tensor(plan.tokens, device=device)
        slots, width = tokens.shape
        if plan.keep[0]:
            cache.keep(torch.tensor(plan.keep[0], device=device), torch.tensor(plan.keep[1], device=device))
        for source, destination, length in plan.moves:
            cache.move(source, destination, length)
        view = cache.prompt_view(plan.first, slots, width) if plan.sees is None else cache.view(
            plan.first, plan.lengths, plan.depths, torch.from_numpy(plan.sees))
        x, taps = self.target(tokens.flatten(), functools.partial(cache.attend, view=view), self.ranks.add)
        if plan.sees is None:
            x = x[-1:]
        logits = torch.mm(self.target.finish(x), self.target.embedding.t(), out=self.logits[: len(x)])
        return logits.view(slots, -1, logits.shape[1]), taps.view(slots, width, -1)


class View(NamedTuple):
    """Inputs and outputs of one pass: `width` new tokens in each of some consecutive slots."""

    slots: int
    width: int
    rows: Tensor  # [slots * width] rows to write
    factors: Tensor  # [slots * width, 1, 1, head width / 2] rotary factors
    keys: tuple[Tensor, ...]  # for each layer [slots, heads, end, head width], what can be seen
    values: tuple[Tensor, ...]
    mask: Tensor | None  # [slots, 1, width, end], added to the scores; None: everything is seen
    causal: bool = False  # a new sequence: every token sees itself and those before


class Cache:
    """Keys and values of `layers` layers for `slots` requests of at most `capacity` tokens each.

    `factors` [capacity, head width / 2] also says which device. Raises RuntimeError (torch's own) when it is full.
    """

    def __init__(self, layers: int, slots: int, capacity: int, heads: int, factors: Tensor, dtype: torch.dtype) -> None:
        self.heads, self.slots, self.capacity, self.factors = heads, slots, capacity, factors
        self.head_width = factors.shape[-1] * 2
        size = (layers, slots * capacity, 2, heads, self.head_width)
        self.rows = torch.zeros(size, dtype=dtype, device=factors.device)
        self.layers = self.rows.unbind(0)
        # [keys or values, layers, slots, heads, capacity, head width]
        self.seen = self.rows.view(layers, slots, capacity, 2, heads, -1).permute(3, 0, 1, 4, 2, 5)
        self.columns = torch.arange(capacity, device=factors.device)
        self.starts = torch.arange(slots, device=factors.device)[:, None] * capacity  # the first row of each slot

    def view(self, first: int, lengths: list[int], depths: list[list[int]], sees: Tensor) -> View:
        """The pass that adds the same number of tokens to slots of the given lengths, at positions length + depth.

        depths is [slots][width]; sees [slots, width, width] is true where a new token sees another.
        """
        slots, width = len(depths), len(depths[0])
        device = self.factors.device
        # A multiple of eight, as the faster attention kernels on CUDA want a mask to be.
        end = min(-(-(max(lengths) + width) // 8) * 8, self.capacity)
        positions = [length + depth for length, row in zip(lengths, depths, strict=True) for depth in row]
        factors = self.factors[torch.tensor(positions, device=device)][:, None, None]
        if slots == 1:
            length = lengths[0]
            start = first * self.capacity + length
            rows, mask = torch.arange(start, start + width, device=device), None
            if width == 1:
                end = length + 1
            else:
                mask = torch.zeros((1, 1, width, end), dtype=self.rows.dtype, device=device)
                mask[0, 0, :, length:] = -torch.inf
                mask[0, 0, :, length : length + width].masked_fill_(sees[0].to(device), 0.0)
        else:
            begin = torch.tensor(lengths, device=device)[:, None]
            new = begin + self.columns[:width]
            rows = (new + self.starts[first : first + slots]).flatten()
            hidden = (self.columns[:end] >= begin).unsqueeze(1).repeat(1, width, 1)
            hidden.scatter_(2, new.unsqueeze(1).expand(-1, width, -1), sees.to(device).logical_not())
            mask = torch.zeros(hidden.shape, dtype=self.rows.dtype, device=device)
            mask = mask.masked_fill_(hidden, -torch.inf).unsqueeze(1)
        return View(slots, width, rows, factors, *self.seen_until(first, slots, end), mask)

    def prompt_view(self, first: int, slots: int, length: int) -> View:
        """The pass that fills empty slots with `length` tokens each, every token seeing itself and those before."""
        rows = self.columns[:length] + self.starts[first : first + slots]
        factors = self.factors[:length].repeat(slots, 1)[:, None, None]
        return View(slots, length, rows.flatten(), factors, *self.seen_until(first, slots, length), None, causal=True)

    def seen_until(self, first: int, slots: int, end: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of every layer, as a `View` has them."""
        keys, values = self.seen[:, :, first : first + slots, :, :end]
        return keys.unbind(0), values.unbind(0)

    def attend(self, layer: int, qkv: Tensor, view: View) -> Tensor:
        """Writes the new keys and values and attends: qkv [n, 3 * heads * head width] gives [n, heads * head width]."""
        parts = qkv.view(-1, 3, self.heads, self.head_width)
        rotate_(parts[:, :2], view.factors)
        self.layers[layer].index_copy_(0, view.rows, parts[:, 1:])
        queries = parts[:, 0].view(view.slots, view.width, self.heads, self.head_width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, view.keys[layer], view.values[layer], view.mask,
                                               is_causal=view.causal)
        return mixed.transpose(1, 2).reshape(-1, self.heads * self.head_width)

    def write(self, layer: int, keys_values: Tensor, rows: Tensor, factors: Tensor) -> None:
        """Writes keys and values [n, 2 * heads * head width] that another network gave, keys not yet rotated."""
        parts = keys_values.view(-1, 2, self.heads, self.head_width)
        rotate_(parts[:, 0], factors)
        self.layers[layer].index_copy_(0, rows, parts)

    def keep(self, source: Tensor, destination: Tensor) -> None:
        """Copies rows source [n] to rows destination [n] in every layer, as if all were read before any is written."""
        self.rows[:, destination] = self.rows[:, source]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        start, target = source * self.capacity, destination * self.capacity
        self.rows[:, target : target + length] = self.rows[:, start : start + length]


@torch.inference_mode()
def continue_text(target: Target, shape: Shape, prompts: Tensor, new: int, temperatures: Sequence[float]) -> Tensor:
    """The target's own `new` tokens after prompts [batch, n], as [batch, n + new]; temperatures take turns by row."""
    (batch, length), device = prompts.shape, prompts.device
    capacity = length + new
    factors = rotations(shape, capacity).to(device)
    cache = Cache(shape.layers, batch, capacity, shape.heads, factors, target.embedding.dtype)
    tokens = torch.empty((batch, capacity), dtype=torch.long, device=device)
    tokens[:, :length] = prompts
    heat = torch.tensor(temperatures, device=device).repeat(batch)[:batch, None]
    view = cache.prompt_view(0, batch, length)
    for end in range(length, capacity):
        x, _ = target(tokens[:, end - view.width : end].flatten(), functools.partial(cache.attend, view=view), add)
        logits = F.linear(target.finish(x[view.width - 1 :: view.width]), target.embedding).float()
        sampled = (logits / heat.clamp(min=1e-3)).softmax(-1).multinomial(1)
        tokens[:, end] = torch.where(heat > 0, sampled, logits.argmax(-1, keepdim=True))[:, 0]
        turn = factors[end : end + 1].expand(batch, -1)[:, None, None]
        view = View(batch, 1, cache.starts[:, 0] + end, turn, *cache.seen_until(0, batch, end + 1), None)
    return tokens
