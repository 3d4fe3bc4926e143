"""The mask function for Transformers: an encoded structure if the arguments describe one, otherwise a bias.

Models of transformers pass the result of a mask function to every layer's attention, and accept any 4-D tensor as a
finished mask. So a structure is encoded as one, with a dtype and sizes that no mask has. A model that computes with its
mask then fails: PyTorch does not combine uint32 with booleans and integers, and `sdpa` accepts no mask of such a size.

- A band (N, 1, left + 2, right + 2), aligned bottom-right: its shape encodes the bounds of the window, -1 for none. N
  is the batch, and each entry holds a number of keys; or N is 0, and all keys are used.
- Packed tokens (1, 2, n, 1): causal attention among the tokens that a padding mask keeps. The values are the B + 1
  offsets of the packed sequences; the packed index of each of the B · S tokens; and the token at each packed index.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.bias import bias_view
from cudnn_sdpa.graph.scalars import is_known

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


#: Models that concatenate masks, and so need each as a tensor.
CONCATENATING = frozenset({"t5gemma2_decoder"})

#: transformers' pattern functions, of (batch, head, query, key).
Pattern = Callable[..., object]


class Request(NamedTuple):
    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor = 0
    kv_offset: int = 0
    mask_function: Pattern | None = None
    attention_mask: Tensor | None = None
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool = False
    use_vmap: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    config: object = None


def mask_function(
    draw: Callable[..., Tensor], causal: Pattern, *, inspect_padding: bool
) -> Callable[..., Tensor | None]:
    """The mask function to register.

    `draw` is transformers' own mask function, which returns booleans (B, 1, Sq, Skv), and `causal` its plain causal
    pattern. `inspect_padding` waits for the GPU to detect a padding mask without padding.
    """

    def cudnn_sdpa_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        arguments = dict(zip(Request._fields, args, strict=False)) | kwargs
        known = {name: arguments[name] for name in Request._fields if name in arguments}
        request = Request(**{"mask_function": causal, **known})
        is_causal = _is_causal(request, causal)
        if inspect_padding and _has_no_padding(request, is_causal):
            request = request._replace(attention_mask=None)
        if is_causal:
            is_encoded, mask = _causal(request)
        elif request.allow_is_bidirectional_skip:
            is_encoded, mask = _bidirectional(request)
        else:
            is_encoded, mask = False, None
        return mask if is_encoded else _bias(request, draw)

    return cudnn_sdpa_mask


def _is_causal(request: Request, causal: Pattern) -> bool:
    if request.allow_is_causal_skip:
        return True
    if request.q_length != 1 or request.use_vmap or getattr(request.config, "model_type", None) in CONCATENATING:
        return False
    # transformers always requests a mask for a single query on a static cache, whatever the pattern.
    pattern = request.mask_function
    return pattern is causal or (request.local_size is not None and _is_local_causal(pattern, causal))


def _is_local_causal(pattern: object, causal: Pattern) -> bool:
    """transformers' conjunction of a window or chunks with the causal pattern."""
    if torch.compiler.is_compiling() or not isinstance(pattern, FunctionType):
        return False
    if pattern.__qualname__ != "and_masks.<locals>.and_mask":
        return False
    parts = [cell.cell_contents for cell in pattern.__closure__ or ()]
    return len(parts) == 1 and len(parts[0]) == 2 and parts[0][1] is causal


def _window(request: Request) -> int | None:
    """The left bound of a causal window, -1 for none; None if no window describes the pattern."""
    size = request.local_size
    if size is None or (request.kv_offset == 0 and request.kv_length < size):
        return UNBOUNDED
    config = request.config
    if getattr(config, "attention_chunk_size", None) == size or getattr(config, "sliding_window", None) != size:
        return None
    return UNBOUNDED if request.kv_length <= size else size - 1


def _causal(request: Request) -> tuple[bool, Tensor | None]:
    """The mask of a causal pattern that can be encoded; None is plain causal, or no mask for a single query."""
    if request.attention_mask is not None:
        return _padded(request, request.attention_mask)
    left = _window(request)
    if left is None:
        return False, None
    queries, keys, device = request.q_length, request.kv_length, request.device
    end = request.q_offset + queries - request.kv_offset
    if isinstance(end, Tensor):
        lengths = end.to(device=device, dtype=torch.int32).reshape(1).repeat(request.batch_size)
        return True, band(left, 0, device, lengths)
    if end == keys:
        is_simple = left == UNBOUNDED and (queries in (1, keys))
        return True, None if is_simple else band(left, 0, device)
    if request.q_offset == 0 and request.kv_offset == 0 and queries > 1 and left == UNBOUNDED and end < keys:
        return True, None
    if end > keys:
        return False, None
    lengths = torch.full((request.batch_size,), end, dtype=torch.int32, device=device)
    return True, band(left, 0, device, lengths)


def _padded(request: Request, padding_mask: Tensor) -> tuple[bool, Tensor | None]:
    """A padding mask over a prompt: its tokens are packed, unless a window counts the padding between them."""
    queries = request.q_length
    if isinstance(request.q_offset, Tensor) or request.q_offset != 0 or request.kv_offset != 0:
        return False, None
    if queries == 1 or request.kv_length < queries or padding_mask.shape[-1] < queries:
        return False, None
    if request.local_size is not None and not is_known(queries < request.local_size):
        return False, None
    return True, packed(padding_mask[:, :queries])


def _bidirectional(request: Request) -> tuple[bool, Tensor | None]:
    if request.attention_mask is not None:
        return False, None
    size = request.local_size
    if size is None or (request.kv_offset == 0 and request.kv_length < size):
        return True, None
    is_square = request.q_length == request.kv_length and request.kv_offset == 0
    if not is_square or isinstance(request.q_offset, Tensor) or request.q_offset != 0:
        return False, None
    if getattr(request.config, "sliding_window", None) != size:
        return False, None
    return True, band(size, size, request.device)


def _bias(request: Request, draw: Callable[..., Tensor]) -> Tensor:
    """A float mask, 0 to attend and -inf otherwise: converted once here, and not in each layer."""
    without_skips = request._replace(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    attends: Tensor = draw(**without_skips._asdict())
    bias = bias_view(attends).to(request.dtype).log()
    # A mask that may not be skipped may be concatenated with another one.
    return bias if request.allow_is_causal_skip or request.allow_is_bidirectional_skip else bias.expand(attends.shape)


def _has_no_padding(request: Request, is_causal: bool) -> bool:
    """A padding mask without effect; waits for the GPU, unless during capture or compilation.

    It masks keys past its end. A causal pattern also masks those past the last query; another pattern may not.
    """
    padding_mask = request.attention_mask
    if padding_mask is None or torch.compiler.is_compiling():
        return False
    if padding_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if not is_causal:
        covers_keys = padding_mask.shape[-1] >= request.kv_offset + request.kv_length
        return covers_keys and bool(padding_mask.all())
    covers_queries = request.q_offset + request.q_length <= padding_mask.shape[-1]
    if isinstance(covers_queries, Tensor):
        return bool(padding_mask.all() & covers_queries)
    return covers_queries and bool(padding_mask.all())
