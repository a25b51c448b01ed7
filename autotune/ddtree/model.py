"""The two networks, their passes over whole sequences for training, and their weights on disk.

The target is a pre-norm decoder; the draft is a block-diffusion network that reads the target's taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotune.ddtree.arguments import Shape

Attend = Callable[[int, Tensor], Tensor]  # (layer, queries, keys and values [n, 3 * heads * head width]) -> [n, ...]
Add = Callable[[Tensor, Tensor, Tensor], Tensor]  # (residual, activations, weight) -> residual + activations @ weight.T


@dataclass(slots=True)
class Layer:
    """Weights of one layer; matrices are [outputs, inputs]. qkv holds all queries, then all keys, then all values."""

    norm1: Tensor
    qkv: Tensor
    out: Tensor
    norm2: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> Layer:
        return cls(*(tensors[f"{prefix}.{field.name}"] for field in fields(cls)))

    def __call__(self, index: int, x: Tensor, attend: Attend, add: Add) -> Tensor:
        """One layer over x [..., width]: attention, then a gated MLP (SwiGLU), each added to the residual stream."""
        x = add(x, attend(index, F.linear(normalise(x, self.norm1), self.qkv)), self.out)
        gate, up = F.linear(normalise(x, self.norm2), self.gate_up).chunk(2, -1)
        return add(x, F.silu(gate) * up, self.down)


class Target:
    """The model whose output is served: tied embedding, `layers` layers, one norm."""

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.taps = frozenset(shape.taps)
        self.embedding, self.norm = tensors["embedding"], tensors["norm"]
        self.layers = [Layer.of(tensors, f"target.{index}") for index in range(shape.layers)]

    def __call__(self, tokens: Tensor, attend: Attend, add: Add) -> tuple[Tensor, Tensor]:
        """Runs tokens [...]; gives the last residual stream [..., width] and the taps [..., taps * width]."""
        x = F.embedding(tokens, self.embedding)
        taps = []
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend, add)
            if index + 1 in self.taps:
                taps.append(x)
        return x, torch.cat(taps, -1)

    def finish(self, x: Tensor) -> Tensor:
        """The last norm: what, multiplied with the embedding, gives the logits."""
        return normalise(x, self.norm)


class Draft:
    """Gives in one pass a distribution for each of the next block - 1 positions (DFlash style).

    A context position's keys and values come from the target's taps there, so the draft needs no pass of its own over
    the prefix. Every position of the block starts from the joined taps of the last verified position plus a learned
    vector of its own; the first also from the last token. Positions see the prefix and the block up to themselves,
    so the distributions of the first positions do not depend on how many are asked for.
    """

    def __init__(self, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
        self.join, self.join_norm = tensors["draft.join"], tensors["draft.join_norm"]
        self.masks, self.norm, self.embedding = tensors["draft.masks"], tensors["draft.norm"], tensors["embedding"]
        self.layers = [Layer.of(tensors, f"draft.{index}") for index in range(shape.draft_layers)]

    def context(self, taps: Tensor) -> tuple[Tensor, list[Tensor]]:
        """From taps [n, taps * width]: the joined taps [n, width], and each layer's keys and values [n, 2 * width]."""
        joined = normalise(F.linear(taps, self.join), self.join_norm)
        width = joined.shape[-1]
        return joined, [F.linear(joined, layer.qkv[width:]) for layer in self.layers]

    def __call__(self, last: Tensor, joined: Tensor, depth: int, attend: Attend, add: Add) -> Tensor:
        """Logits [n * depth, vocabulary] after tokens last [n], given joined taps [n, width] of the position before."""
        x = self.masks[: depth + 1] + joined[:, None]
        x = torch.cat([x[:, :1] + F.embedding(last, self.embedding)[:, None], x[:, 1:]], 1).flatten(0, 1)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, attend, add)
        x = x.view(-1, depth + 1, x.shape[-1])[:, 1:].flatten(0, 1)
        return F.linear(normalise(x, self.norm), self.embedding)


def normalise(x: Tensor, weight: Tensor) -> Tensor:
    """Layer norm without bias: one kernel on both CPU and CUDA, where RMS norm is five on the CPU."""
    return torch.layer_norm(x, weight.shape, weight, None, 1e-5)


def rotations(shape: Shape, positions: int) -> Tensor:
    """Rotary factors as unit complex numbers [positions, head width / 2] (Su et al. 2021, interleaved pairs)."""
    frequency = shape.rope_base ** -(torch.arange(0, shape.head_width, 2, dtype=torch.float64) / shape.head_width)
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate x [n, ..., head width] by factors that broadcast against [n, ..., head width / 2], in x's own dtype."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(-2).type_as(x)


def rotate_(x: Tensor, factors: Tensor) -> None:
    """In-place `rotate`; x may be a view."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(factors)
    else:
        x.copy_(rotate(x, factors))


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
        mixed = F.scaled_dot_product_attention(rotate(query, turn).transpose(1, 2), rotate(key, turn).transpose(1, 2),
                                               value.transpose(1, 2), is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    return target(tokens, attend, add)


def run_draft(draft: Draft, shape: Shape, tokens: Tensor, taps: Tensor, anchors: Tensor, factors: Tensor) -> Tensor:
    """Logits [batch, anchors, block - 1, vocabulary] of blocks that start at positions anchors [batch, count]."""
    (batch, count), length = anchors.shape, taps.shape[1]
    positions = anchors[..., None] + torch.arange(shape.block, device=tokens.device)
    joined, context = draft.context(taps)
    before = joined.gather(1, (anchors - 1)[..., None].expand(-1, -1, joined.shape[2])).flatten(0, 1)
    order = torch.arange(count * shape.block, device=tokens.device)
    block, place = order // shape.block, order % shape.block
    inside = (block[:, None] == block) & (place[:, None] >= place)
    seen = torch.arange(length, device=tokens.device) < anchors.repeat_interleave(shape.block, 1)[..., None]
    mask = torch.cat([seen, inside.expand(batch, -1, -1)], 2)[:, None]
    turn = factors[positions.flatten(1)][..., None, :]

    def attend(index: int, qkv: Tensor) -> Tensor:
        query, key, value = heads(qkv.view(batch, -1, qkv.shape[1]), shape, 3)
        old_key, old_value = heads(context[index], shape, 2)
        keys = torch.cat([rotate(old_key, factors[:length, None]), rotate(key, turn)], 1)
        values = torch.cat([old_value, value], 1)
        mixed = F.scaled_dot_product_attention(rotate(query, turn).transpose(1, 2), keys.transpose(1, 2),
                                               values.transpose(1, 2), mask)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    last = tokens.gather(1, anchors).flatten()
    return draft(last, before, shape.block - 1, attend, add).view(batch, count, shape.block - 1, -1)


FILE = "model.safetensors"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 for each row: weight [rows, columns] gives int8 [rows, columns] and float16 scales [rows]."""
    scale = (weight.float().abs().amax(1).clamp(min=1e-6) / 127).half()
    return (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale.float()[:, None]


def rounded(tensor: Tensor) -> Tensor:
    """The tensor after a round trip through `save_weights`."""
    return dequantise(*quantise(tensor)) if tensor.dim() == 2 else tensor.half().float()


def save_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes matrices as int8 with scales, and vectors as float16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored[name], stored[name + ".scale"] = (part.cpu().contiguous() for part in quantise(tensor.detach()))
        else:
            stored[name] = tensor.detach().half().cpu().contiguous()
    save_file(stored, str(directory / FILE))


def load_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors as float32, by name. Raises OSError or safetensors' error when the file is missing or broken."""
    stored = load_file(str(directory / FILE))
    return {name: dequantise(tensor, stored[name + ".scale"]) if tensor.dtype == torch.int8 else tensor.float()
            for name, tensor in stored.items() if not name.endswith(".scale")}


def shard(tensors: Mapping[str, Tensor], shape: Shape, rank: int, size: int) -> dict[str, Tensor]:
    """Rank's part of the target: whole heads and a slice of each MLP. Raises ValueError when they don't divide."""
    if shape.heads % size:
        raise ValueError(f"the number of attention heads ({shape.heads}) must be divisible by --tp-size ({size})")
    if shape.hidden % size:
        raise ValueError(f"the MLP width ({shape.hidden}) must be divisible by --tp-size ({size})")

    def cut(name: str, tensor: Tensor) -> Tensor:
        if not name.startswith("target.") or size == 1:
            return tensor
        groups = {"qkv": 3, "gate_up": 2}.get(name.rpartition(".")[2])
        if groups:
            return tensor.view(groups, size, -1, tensor.shape[1])[:, rank].flatten(0, 1)
        return tensor.chunk(size, 1)[rank] if name.endswith((".out", ".down")) else tensor

    return {name: cut(name, tensor).contiguous() for name, tensor in tensors.items()}


def initial(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Random tensors to begin a training with, the same every time; `target.3.qkv` is in the target's fourth layer."""
    width = shape.width
    sizes: dict[str, tuple[int, ...]] = {"embedding": (shape.vocab_size, width), "norm": (width,)}
    for part, layers, hidden in (("target", shape.layers, shape.hidden),
                                 ("draft", shape.draft_layers, shape.draft_hidden)):
        for index in range(layers):
            layer = {"norm1": (width,), "qkv": (3 * width, width), "out": (width, width), "norm2": (width,),
                     "gate_up": (2 * hidden, width), "down": (width, hidden)}
            sizes |= {f"{part}.{index}.{name}": size for name, size in layer.items()}
    sizes |= {"draft.join": (width, len(shape.taps) * width), "draft.join_norm": (width,),
              "draft.masks": (shape.block, width), "draft.norm": (width,)}
    torch.manual_seed(0)
    tensors = {}
    for name, size in sizes.items():
        deep = (2 * shape.layers) ** -0.5 if name.endswith((".out", ".down")) else 1.0
        spread = 0.04 if name in ("embedding", "draft.masks") else 0.8 * deep / size[-1] ** 0.5
        tensors[name] = (torch.ones(size) if len(size) == 1 else torch.randn(size) * spread).to(device)
    return tensors
