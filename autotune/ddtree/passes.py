"""Differentiable passes of target and draft over whole sequences, sampling, and the optimiser loop, for training.

Used by `train` (the packaged model) and `llama` (the same target as a Hugging Face checkpoint, with a draft model).
"""

import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.ddtree.arguments import Shape
from autotune.ddtree.executor import Cache, View
from autotune.ddtree.model import Draft, Target, dequantise, quantise, rotate, rotations


def add(residual: Tensor, activations: Tensor, weight: Tensor) -> Tensor:
    return residual + F.linear(activations, weight)


def heads(qkv: Tensor, shape: Shape, parts: int) -> Tensor:
    """[batch, n, parts * width] as [parts, batch, n, heads, head width]."""
    return qkv.view(*qkv.shape[:2], parts, shape.heads, shape.head_width).movedim(2, 0)


def run_target(target: Target, shape: Shape, tokens: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Whole sequences [batch, n] at once: the last residual stream and the taps."""

    def attend(_: int, qkv: Tensor) -> Tensor:
        query, key, value = heads(qkv, shape, 3)
        turn = factors[: tokens.shape[1], None]
        mixed = F.scaled_dot_product_attention(
            rotate(query, turn).transpose(1, 2),
            rotate(key, turn).transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
        )
        return mixed.transpose(1, 2).flatten(2)

    return target(tokens, attend, add)


def run_draft(draft: Draft, shape: Shape, tokens: Tensor, taps: Tensor, anchors: Tensor, factors: Tensor) -> Tensor:
    """Logits [batch, anchors, block - 1, vocabulary] of blocks that start at positions anchors [batch, count]."""
    batch, count = anchors.shape
    positions = anchors[..., None] + torch.arange(shape.block, device=tokens.device)
    joined, context = draft.context(taps)
    before = joined.gather(1, (anchors - 1)[..., None].expand(-1, -1, joined.shape[2])).flatten(0, 1)
    length = taps.shape[1]
    flat = positions.flatten(1)
    order = torch.arange(count * shape.block, device=tokens.device)
    block, place = order // shape.block, order % shape.block
    inside = (block[:, None] == block) & (place[:, None] >= place)
    seen = torch.arange(length, device=tokens.device) < anchors.repeat_interleave(shape.block, 1)[..., None]
    mask = torch.cat([seen, inside.expand(batch, -1, -1)], 2)[:, None]
    turn = factors[flat][..., None, :]

    def attend(index: int, qkv: Tensor) -> Tensor:
        query, key, value = heads(qkv.view(batch, -1, qkv.shape[1]), shape, 3)
        old_key, old_value = heads(context[index], shape, 2)
        keys = torch.cat([rotate(old_key, factors[:length, None]), rotate(key, turn)], 1)
        values = torch.cat([old_value, value], 1)
        mixed = F.scaled_dot_product_attention(
            rotate(query, turn).transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), mask
        )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    last = tokens.gather(1, anchors).flatten()
    return draft(last, before, shape.block - 1, attend, add).view(batch, count, shape.block - 1, -1)


def optimise(
    parameters: list[Tensor], loss: Callable[[], Tensor], peak: float, seconds: float, device: torch.device, name: str
) -> int:
    """AdamW with warm-up and cosine decay over `seconds` of wall time; returns the number of steps."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device.type == "cuda")
    start, step, mean = time.monotonic(), 0, torch.zeros((), device=device)
    while (done := (time.monotonic() - start) / seconds) < 1:
        for group in adam.param_groups:
            group["lr"] = peak * min(1.0, (step + 1) / 150) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()
        step += 1
        mean = mean * 0.98 + value.detach() * 0.02
        if step % 10 == 0 and device.type == "cuda":
            torch.cuda.synchronize()
        if step % 500 == 0:
            say(f"{name}: step {step}, loss {mean.item() / (1 - 0.98**step):.3f}, {done:.0%}")
    for parameter in parameters:
        parameter.requires_grad_(False)
    say(f"{name}: {step} steps, loss {mean.item() / (1 - 0.98**step):.3f}")
    return step


def rounded(tensor: Tensor) -> Tensor:
    """The tensor after a round trip through `save_weights`."""
    return dequantise(*quantise(tensor)) if tensor.dim() == 2 else tensor.half().float()


@torch.inference_mode()
def continue_text(target: Target, shape: Shape, prompts: Tensor, new: int, temperatures: Sequence[float]) -> Tensor:
    """The target's own `new` tokens after prompts [batch, n], as [batch, n + new]; temperatures take turns by row."""
    batch, length = prompts.shape
    capacity = length + new
    device = prompts.device
    factors = rotations(shape, capacity).to(device)
    cache = Cache(shape.layers, batch, capacity, shape.heads, factors, target.embedding.dtype)
    tokens = torch.empty((batch, capacity), dtype=torch.long, device=device)
    tokens[:, :length] = prompts
    heat = torch.tensor(temperatures, device=device).repeat(batch)[:batch, None]
    view = cache.prompt_view(0, batch, length)
    start = torch.arange(batch, device=device) * capacity
    for end in range(length, capacity):

        def attend(layer: int, qkv: Tensor, view: View = view) -> Tensor:
            return cache.attend(layer, qkv, view)

        x, _ = target(tokens[:, end - view.width : end].flatten(), attend, add)
        logits = F.linear(target.finish(x[view.width - 1 :: view.width]), target.embedding).float()
        sampled = (logits / heat.clamp(min=1e-3)).softmax(-1).multinomial(1)
        tokens[:, end] = torch.where(heat > 0, sampled, logits.argmax(-1, keepdim=True))[:, 0]
        turn = factors[end : end + 1].expand(batch, -1)[:, None, None]
        view = View(batch, 1, start + end, turn, *cache.seen_until(0, batch, end + 1), None)
    return tokens


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
