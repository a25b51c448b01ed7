"""The key-value cache: one row a token, one slot a request, and attention of a batch of trees over it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autotune.engines.ddtree.model import rotate


@dataclass(frozen=True, slots=True)
class View:
    """What one pass reads and writes: `width` new tokens in each of the slots first .. first + slots - 1."""

    first: int
    slots: int
    width: int
    end: int  # positions of a slot that can be seen
    rows: Tensor  # [slots * width] rows to write
    factors: Tensor  # [slots * width, 1, 1, head width / 2] rotary factors
    mask: Tensor | None  # [slots, 1, width, end], added to the scores; None: everything is seen
    causal: bool = False  # a new sequence: every token sees itself and those before


class Cache:
    """Keys and values of `layers` layers for `slots` requests of at most `capacity` tokens each.

    Raises RuntimeError (torch's own) when the device cannot hold them.
    """

    def __init__(self, layers: int, slots: int, capacity: int, heads: int, factors: Tensor, dtype: torch.dtype) -> None:
        self.heads, self.slots, self.capacity, self.factors = heads, slots, capacity, factors
        self.head_width = factors.shape[-1] * 2
        size = (layers, slots * capacity, 2, heads, self.head_width)
        self.rows = torch.zeros(size, dtype=dtype, device=factors.device)
        self.columns = torch.arange(capacity, device=factors.device)

    @property
    def bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def view(self, first: int, lengths: list[int], sees: Tensor, depths: Tensor) -> View:
        """The pass that adds sees.shape[1] tokens to slots of the given lengths, at positions length + depth.

        sees [slots, width, width] is true where a new token sees another; depths is [slots, width].
        """
        slots, width = depths.shape
        end = max(lengths) + width
        device = self.factors.device
        if slots == 1:
            start = torch.tensor(lengths[0])
            rows = self.columns[lengths[0] : end] + first * self.capacity
            mask = None
            if width > 1:
                mask = torch.zeros((1, 1, width, end), dtype=self.rows.dtype, device=device)
                mask[0, 0, :, lengths[0] :].masked_fill_(~sees[0], -torch.inf)
        else:
            start = torch.tensor(lengths, device=device)[:, None]
            new = start + self.columns[:width]
            rows = (new + torch.arange(first, first + slots, device=device)[:, None] * self.capacity).flatten()
            seen = (self.columns[:end] < start).unsqueeze(1).repeat(1, width, 1)
            seen.scatter_(2, new.unsqueeze(1).expand(-1, width, -1), sees)
            mask = torch.zeros(seen.shape, dtype=self.rows.dtype, device=device)
            mask = mask.masked_fill_(~seen, -torch.inf).unsqueeze(1)
        factors = self.factors[(start + depths).flatten()][:, None, None]
        return View(first, slots, width, end, rows, factors, mask)

    def prompt_view(self, slot: int, length: int) -> View:
        """The pass that fills an empty slot with `length` tokens, each seeing itself and those before."""
        rows = self.columns[:length] + slot * self.capacity
        return View(slot, 1, length, length, rows, self.factors[:length, None, None], None, causal=True)

    def attend(self, layer: int, qkv: Tensor, view: View) -> Tensor:
        """Writes the new keys and values and attends: qkv [n, 3 * heads * head width] gives [n, heads * head width]."""
        parts = qkv.view(-1, 3, self.heads, self.head_width)
        parts[:, :2] = rotate(parts[:, :2], view.factors)
        rows = self.rows[layer]
        rows.index_copy_(0, view.rows, parts[:, 1:])
        slots = rows.view(self.slots, self.capacity, 2, self.heads, self.head_width)
        seen = slots[view.first : view.first + view.slots, : view.end].permute(2, 0, 3, 1, 4)
        queries = parts[:, 0].view(view.slots, view.width, self.heads, self.head_width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(queries, seen[0], seen[1], view.mask, is_causal=view.causal)
        return mixed.transpose(1, 2).reshape(-1, self.heads * self.head_width)

    def write(self, layer: int, keys_values: Tensor, rows: Tensor, factors: Tensor) -> None:
        """Writes keys and values [n, 2 * heads * head width] that another network gave, keys not yet rotated."""
        parts = keys_values.view(-1, 2, self.heads, self.head_width)
        parts[:, 0] = rotate(parts[:, 0], factors)
        self.rows[layer].index_copy_(0, rows, parts)

    def keep(self, source: Tensor, destination: Tensor) -> None:
        """Copies rows source [n] to rows destination [n] in every layer, as if all were read before any is written."""
        self.rows[:, destination] = self.rows[:, source]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` positions of one slot to another."""
        start, target = source * self.capacity, destination * self.capacity
        self.rows[:, target : target + length] = self.rows[:, start : start + length]
