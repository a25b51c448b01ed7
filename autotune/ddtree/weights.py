"""Weights on disk: int8 with one scale a row, made float again when they are loaded, and cut for a rank."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autotune.ddtree.shape import Shape

FILE = "model.safetensors"


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 for each row: weight [rows, columns] gives int8 [rows, columns] and float16 scales [rows]."""
    scale = (weight.float().abs().amax(1).clamp(min=1e-6) / 127).half()
    return (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    return values.float() * scale.float()[:, None]


def save(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Writes matrices as int8 with scales, and vectors as float16."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored[name], stored[name + ".scale"] = (part.cpu().contiguous() for part in quantise(tensor.detach()))
        else:
            stored[name] = tensor.detach().half().cpu().contiguous()
    save_file(stored, str(directory / FILE))


def load(directory: Path) -> dict[str, Tensor]:
    """All tensors as float32, by name. Raises OSError or safetensors' error when the file is missing or broken."""
    stored = load_file(str(directory / FILE))
    return {
        name: dequantise(tensor, stored[name + ".scale"]) if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(".scale")
    }


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


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Name and size of every tensor of a target and its draft; `target.3.qkv` is in the target's fourth layer."""
    width = shape.width

    def layer(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
        sizes: dict[str, tuple[int, ...]] = {
            "norm1": (width,),
            "qkv": (3 * width, width),
            "out": (width, width),
            "norm2": (width,),
            "gate_up": (2 * hidden, width),
            "down": (width, hidden),
        }
        return {f"{prefix}.{name}": size for name, size in sizes.items()}

    sizes: dict[str, tuple[int, ...]] = {"embedding": (shape.vocab_size, width), "norm": (width,)}
    for index in range(shape.layers):
        sizes |= layer(f"target.{index}", shape.hidden)
    for index in range(shape.draft_layers):
        sizes |= layer(f"draft.{index}", shape.draft_hidden)
    return sizes | {
        "draft.join": (width, len(shape.taps) * width),
        "draft.join_norm": (width,),
        "draft.masks": (shape.block, width),
        "draft.norm": (width,),
    }
