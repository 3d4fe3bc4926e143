"""Mask encoding: band bounds, sequence lengths or packed documents in a tensor that models hand on like a mask.

Models of transformers pass whatever a mask function returns to every layer's attention, and accept as ready what is a
tensor of four dimensions. So a structure travels as one, with a dtype that no mask has and sizes that are no mask's: a
model that computes with its mask fails, as PyTorch does not combine uint32 with booleans and integers, and `sdpa` takes
no mask of such a size.

- A band (N, 1, left + 2, right + 2), aligned bottom-right: its shape says the bounds of the window, -1 being none. N is
  the batch, and each entry holds the number of keys that are there, or N is 0, and all are.
- Packed tokens (1, 2, n, 1): causal attention among the tokens that a padding mask leaves. The numbers are the B + 1
  offsets of the sequences, packed; the place that each of the B · S tokens has; and the token in each place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPE = torch.uint32
UNBOUNDED = -1
_PACKED = 2


class Band(NamedTuple):
    """A window around the diagonal that ends at the last query and the last key; lengths are (B,) int32, or None."""

    left: int
    right: int
    seq_lens_kv: Tensor | None


class Packed(NamedTuple):
    """Offsets (B + 1,), the place of each token (B · S,), and the token in each place (B · S,), all int32."""

    offsets: Tensor
    place: Tensor
    order: Tensor


def band(left: int, right: int, device: torch.device | str, seq_lens_kv: Tensor | None = None) -> Tensor:
    """A band as a tensor; `seq_lens_kv` is (B,) int32."""
    shape = (1, left + 2, right + 2)
    if seq_lens_kv is None:
        return torch.empty((0, *shape), dtype=DTYPE, device=device)
    return seq_lens_kv.view(DTYPE).view(-1, 1, 1, 1).expand(-1, *shape)


def packed(seen: Tensor) -> Tensor:
    """What a padding mask (B, S), True for tokens, leaves; nothing is read by the host."""
    flat = seen.reshape(-1)
    until = flat.cumsum(0, dtype=torch.int32)
    index = torch.arange(flat.shape[0], device=flat.device, dtype=torch.int32)
    place = torch.where(flat, until - 1, until[-1] + index - until)
    order = torch.empty_like(index).scatter_(0, place.long(), index)
    numbers = torch.cat([until.new_zeros(1), until.view(seen.shape)[:, -1], place, order])
    return numbers.view(DTYPE).view(1, 1, -1, 1).expand(1, _PACKED, -1, 1)


def is_packed(mask: Tensor) -> bool:
    """Whether a tensor of this module says which tokens are packed, and not how far queries see."""
    return mask.shape[1] == _PACKED


def structure(mask: Tensor, query: Tensor) -> Band | Packed:
    """What a tensor of this module says to queries (B, Hq, S, D)."""
    rows, kind, left, right = mask.shape
    if kind == _PACKED:
        batch, tokens = query.shape[0], query.shape[0] * query.shape[2]
        numbers = mask[0, 0, :, 0].contiguous().view(torch.int32)
        return Packed(*torch.split(numbers, [batch + 1, tokens, tokens]))
    # transformers may have copied the mask, and then the numbers lie apart.
    lengths = mask[:, 0, 0, 0].contiguous().view(torch.int32) if rows else None
    return Band(left - 2, right - 2, lengths)


def drawn(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """The same as booleans (B or 1, 1, Sq, Skv), for what takes no structure."""
    found = structure(mask, query)
    key = torch.arange(keys, device=mask.device)
    index = torch.arange(query.shape[2], device=mask.device).view(1, 1, -1, 1)
    if isinstance(found, Packed):
        seen = (found.place < found.offsets[-1]).view(query.shape[0], 1, 1, -1)
        seen = torch.nn.functional.pad(seen, (0, keys - query.shape[2]))
        return seen & (key <= index)
    lengths = found.seq_lens_kv
    end = torch.full((1, 1, 1, 1), keys, device=mask.device) if lengths is None else lengths.view(-1, 1, 1, 1)
    diagonal = index + end - query.shape[2]
    seen = key < end
    if found.left != UNBOUNDED:
        seen = seen & (key >= diagonal - found.left)
    if found.right != UNBOUNDED:
        seen = seen & (key <= diagonal + found.right)
    return seen
