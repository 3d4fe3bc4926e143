"""Mask encoding: band bounds, sequence lengths or packed tokens in a tensor that models pass on like a mask.

Models of transformers pass the result of a mask function to every layer's attention, and accept any 4-D tensor as a
finished mask. So a structure is encoded as one, with a dtype and sizes that no mask has. A model that computes with its
mask then fails: PyTorch does not combine uint32 with booleans and integers, and `sdpa` accepts no mask of such a size.

- A band (N, 1, left + 2, right + 2), aligned bottom-right: its shape encodes the bounds of the window, -1 for none. N
  is the batch, and each entry holds a number of keys; or N is 0, and all keys are used.
- Packed tokens (1, 2, n, 1): causal attention among the tokens that a padding mask keeps. The values are the B + 1
  offsets of the packed sequences; the packed index of each of the B · S tokens; and the token at each packed index.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

DTYPE = torch.uint32
UNBOUNDED = -1
_PACKED = 2


class Band(NamedTuple):
    """A window around the bottom-right diagonal; lengths are (B,) int32, or None."""

    left: int
    right: int
    seq_lens_kv: Tensor | None


class Packed(NamedTuple):
    """Offsets (B + 1,), each token's packed index (B · S,), and the token at each packed index (B · S,), all int32."""

    offsets: Tensor
    packed_index: Tensor
    order: Tensor


def band(left: int, right: int, device: torch.device | str, seq_lens_kv: Tensor | None = None) -> Tensor:
    """A band as a tensor; `seq_lens_kv` is (B,) int32."""
    shape = (1, left + 2, right + 2)
    if seq_lens_kv is None:
        return torch.empty((0, *shape), dtype=DTYPE, device=device)
    return seq_lens_kv.view(DTYPE).view(-1, 1, 1, 1).expand(-1, *shape)


def packed(padding_mask: Tensor) -> Tensor:
    """The tokens of a padding mask (B, S), True for tokens; nothing is read back."""
    is_token = padding_mask.reshape(-1)
    count = is_token.cumsum(0, dtype=torch.int32)
    position = torch.arange(is_token.shape[0], device=is_token.device, dtype=torch.int32)
    index = torch.where(is_token, count - 1, count[-1] + position - count)
    order = torch.empty_like(position).scatter_(0, index.long(), position)
    values = torch.cat([count.new_zeros(1), count.view(padding_mask.shape)[:, -1], index, order])
    return values.view(DTYPE).view(1, 1, -1, 1).expand(1, _PACKED, -1, 1)


def is_packed(mask: Tensor) -> bool:
    """Whether an encoded mask holds packed tokens rather than a band."""
    return mask.shape[1] == _PACKED


def structure(mask: Tensor, query: Tensor) -> Band | Packed:
    """Decodes a mask for queries (B, Hq, S, D)."""
    rows, kind, left, right = mask.shape
    if kind == _PACKED:
        batch, tokens = query.shape[0], query.shape[0] * query.shape[2]
        values = mask[0, 0, :, 0].contiguous().view(torch.int32)
        return Packed(*torch.split(values, [batch + 1, tokens, tokens]))
    # transformers may have copied the mask, which leaves gaps between the lengths.
    lengths = mask[:, 0, 0, 0].contiguous().view(torch.int32) if rows else None
    return Band(left - 2, right - 2, lengths)


def drawn(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """Draws an encoded mask as a boolean one (B or 1, 1, Sq, Skv)."""
    decoded = structure(mask, query)
    key = torch.arange(keys, device=mask.device)
    row = torch.arange(query.shape[2], device=mask.device).view(1, 1, -1, 1)
    if isinstance(decoded, Packed):
        is_token = (decoded.packed_index < decoded.offsets[-1]).view(query.shape[0], 1, 1, -1)
        is_token = torch.nn.functional.pad(is_token, (0, keys - query.shape[2]))
        return is_token & (key <= row)
    lengths = decoded.seq_lens_kv
    end = torch.full((1, 1, 1, 1), keys, device=mask.device) if lengths is None else lengths.view(-1, 1, 1, 1)
    diagonal = row + end - query.shape[2]
    attends = key < end
    if decoded.left != UNBOUNDED:
        attends = attends & (key >= diagonal - decoded.left)
    if decoded.right != UNBOUNDED:
        attends = attends & (key <= diagonal + decoded.right)
    return attends
