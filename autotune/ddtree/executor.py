"""One rank's share of the target: runs a plan over its weights and its part of the cache."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.ddtree.cache import Cache
from autotune.ddtree.model import Target
from autotune.ddtree.tree import Bools


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


@dataclass(frozen=True)
class Ranks:
    """How partial sums of a row-parallel product become whole: alone, or by an all-reduce over `size` ranks.

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

    def __init__(
        self, target: Target, cache: Cache, ranks: Ranks, verify_tokens: int, followers: Sequence[Connection] = ()
    ) -> None:
        self.target, self.cache, self.ranks, self.followers = target, cache, ranks, followers
        self.logits = torch.empty(
            (verify_tokens, target.embedding.shape[0]), dtype=cache.rows.dtype, device=cache.rows.device
        )

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
        if plan.sees is None:
            view = cache.prompt_view(plan.first, slots, width)
        else:
            view = cache.view(plan.first, plan.lengths, plan.depths, torch.from_numpy(plan.sees))
        x, taps = self.target(tokens.flatten(), lambda layer, qkv: cache.attend(layer, qkv, view), self.ranks.add)
        if plan.sees is None:
            x = x[-1:]
        logits = torch.mm(self.target.finish(x), self.target.embedding.t(), out=self.logits[: len(x)])
        return logits.view(slots, -1, logits.shape[1]), taps.view(slots, width, -1)
