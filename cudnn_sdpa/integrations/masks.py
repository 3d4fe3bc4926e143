"""The mask function of transformers: a structure where the arguments say one, else a bias; never a look at the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention.bias import bias_view
from cudnn_sdpa.graph.symbolic_shapes import is_known
from cudnn_sdpa.integrations import mask_encoding
from cudnn_sdpa.integrations.mask_encoding import UNBOUNDED

#: Models that merge masks into one, and so need each as a tensor.
JOINING = frozenset({"t5gemma2_decoder"})


class Request(NamedTuple):
    """What transformers asks of a mask function, by its own names."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: Any = 0
    kv_offset: int = 0
    mask_function: Any = None
    attention_mask: Tensor | None = None
    local_size: int | None = None
    allow_is_causal_skip: bool = True
    allow_is_bidirectional_skip: bool = False
    use_vmap: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    config: Any = None


def mask_function(draw: Callable[..., Tensor], causal: Any, *, inspect_padding: bool) -> Callable[..., Tensor | None]:
    """The mask function to register.

    Args:
        draw: transformers' own, which gives booleans (B, 1, Sq, Skv).
        causal: transformers' function of the plain causal pattern.
        inspect_padding: Whether to wait for the GPU to see that a padding mask hides nothing.
    """

    def cudnn_sdpa_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        mask_function: Any = causal,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        config: Any = None,
        **_: Any,
    ) -> Tensor | None:
        request = Request(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
            dtype=dtype,
            config=config,
        )
        is_causal = _is_causal(request, causal)
        if inspect_padding and _hides_nothing(request, is_causal):
            request = request._replace(attention_mask=None)
        if is_causal:
            found, mask = _causal(request)
        elif request.allow_is_bidirectional_skip:
            found, mask = _bidirectional(request)
        else:
            found, mask = False, None
        return mask if found else _bias(request, draw)

    return cudnn_sdpa_mask


def _is_causal(request: Request, causal: Any) -> bool:
    """Whether the pattern is causal, perhaps with a window or chunks, and nothing else."""
    if request.allow_is_causal_skip:
        return True
    if request.q_length != 1 or request.use_vmap or getattr(request.config, "model_type", None) in JOINING:
        return False
    # Of a single query on a static cache transformers wants a mask, whatever the pattern.
    return request.mask_function is causal or (request.local_size is not None and _has(request.mask_function, causal))


def _has(pattern: Any, causal: Any) -> bool:
    """Whether a pattern is one of transformers' own, a window or chunks beside the causal one."""
    if torch.compiler.is_compiling() or getattr(pattern, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return False
    parts = [cell.cell_contents for cell in pattern.__closure__]
    return len(parts) == 1 and len(parts[0]) == 2 and parts[0][1] is causal


def _window(request: Request) -> int | None:
    """How many keys before its own a query sees under a causal mask, -1 for all, None if no window says it."""
    size = request.local_size
    if size is None or (request.kv_offset == 0 and request.kv_length < size):
        return UNBOUNDED
    config = request.config
    if getattr(config, "attention_chunk_size", None) == size or getattr(config, "sliding_window", None) != size:
        return None
    return UNBOUNDED if request.kv_length <= size else size - 1


def _causal(request: Request) -> tuple[bool, Tensor | None]:
    """Whether a structure says it, and which; None is transformers' way to say causal, or nothing for one query."""
    if request.attention_mask is not None:
        return _padded(request, request.attention_mask)
    left = _window(request)
    if left is None:
        return False, None
    queries, keys, device = request.q_length, request.kv_length, request.device
    end = request.q_offset + queries - request.kv_offset
    if isinstance(request.q_offset, Tensor):
        lengths = end.to(device=device, dtype=torch.int32).reshape(1).repeat(request.batch_size)
        return True, mask_encoding.band(left, 0, device, lengths)
    if end == keys:
        is_simple = left == UNBOUNDED and (queries in (1, keys))
        return True, None if is_simple else mask_encoding.band(left, 0, device)
    if request.q_offset == 0 and request.kv_offset == 0 and queries > 1 and left == UNBOUNDED and end < keys:
        return True, None
    if end > keys:
        return False, None
    lengths = torch.full((request.batch_size,), end, dtype=torch.int32, device=device)
    return True, mask_encoding.band(left, 0, device, lengths)


def _padded(request: Request, seen: Tensor) -> tuple[bool, Tensor | None]:
    """A padding mask over a prompt: its tokens are packed, unless a window counts what is hidden between them."""
    queries = request.q_length
    if isinstance(request.q_offset, Tensor) or request.q_offset != 0 or request.kv_offset != 0:
        return False, None
    if queries == 1 or request.kv_length < queries or seen.shape[-1] < queries:
        return False, None
    if request.local_size is not None and not is_known(queries < request.local_size):
        return False, None
    return True, mask_encoding.packed(seen[:, :queries])


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
    return True, mask_encoding.band(size, size, request.device)


def _bias(request: Request, draw: Callable[..., Tensor]) -> Tensor:
    """0 for keys that are seen and -inf for others: converted once here, and not in each layer."""
    wanted = request._replace(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    seen: Tensor = draw(**wanted._asdict())
    bias = bias_view(seen).to(request.dtype).log()
    # A mask that may not be left out may be joined to another one.
    return bias if request.allow_is_causal_skip or request.allow_is_bidirectional_skip else bias.expand(seen.shape)


def _hides_nothing(request: Request, is_causal: bool) -> bool:
    """Whether a padding mask changes nothing; waits for the GPU, unless it is being captured or compiled.

    It hides what lies past its end. A causal pattern does so past the last query; another one may not.
    """
    seen = request.attention_mask
    if seen is None or torch.compiler.is_compiling():
        return False
    if seen.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    if not is_causal:
        return seen.shape[-1] >= request.kv_offset + request.kv_length and bool(seen.all())
    is_long = request.q_offset + request.q_length <= seen.shape[-1]
    return bool(seen.all() & is_long) if isinstance(is_long, Tensor) else is_long and bool(seen.all())
