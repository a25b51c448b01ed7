"""The two networks: a pre-norm decoder as target, and a block-diffusion draft that reads the target's taps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.ddtree.shape import Shape

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
    def of(cls, tensors: Mapping[str, Tensor], prefix: str) -> "Layer":
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
    """Turns x [n, ..., head width] by factors that broadcast against [n, ..., head width / 2], in x's own dtype."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(-2).type_as(x)


def rotate_(x: Tensor, factors: Tensor) -> None:
    """As `rotate`, in place; x may be a view."""
    if x.dtype == torch.float32:
        torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(factors)
    else:
        x.copy_(rotate(x, factors))
