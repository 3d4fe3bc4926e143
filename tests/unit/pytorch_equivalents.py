"""Functions of the library and their PyTorch equivalents, with inputs of growing sizes, for tests of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from cudnn_sdpa import (
    conv2d,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    sdpa,
    sdpa_paged,
    sdpa_paged_varlen,
    sdpa_varlen,
    silu_mul,
)


class Equivalents(NamedTuple):
    """A function, its PyTorch equivalent, and a function that makes their inputs."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: Callable[[int, Any], tuple[Any, ...]]
    trains: bool = True


def _qkv(step: int, new: Any) -> tuple[Tensor, ...]:
    return tuple(new(2 + step, 4, 8 + 3 * step, 64) for _ in range(3))


def _packed(step: int, new: Any) -> tuple[Any, ...]:
    tokens = 20 + 4 * step
    offsets = torch.tensor([0, 5, tokens], dtype=torch.int32, device=new(1).device)
    return (*(new(tokens, 4, 64) for _ in range(3)), offsets, tokens - 5)


def _paged(step: int, new: Any) -> tuple[Any, ...]:
    batch, device = 2 + step, new(1).device
    table = torch.arange(batch * 2, dtype=torch.int32, device=device).view(batch, 2)
    lengths = torch.full((batch,), 11, dtype=torch.int32, device=device)
    return new(batch, 4, 1, 64), new(12, 2, 16, 64), new(12, 2, 16, 64), table, lengths


def _packed_on_pages(step: int, new: Any) -> tuple[Any, ...]:
    """One new token of each sequence, and a padding token."""
    q, *others = _paged(step, new)
    ends = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return torch.cat([q[..., 0, :], q[:1, :, 0]]), *others, ends, 1 + step


def _dense_rows(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, ends: Tensor, longest: int) -> Tensor:
    rows = _dense_pages(q[: ends.shape[0] - 1].unsqueeze(2), k, v, table, lengths).squeeze(2)
    return torch.cat([rows, torch.zeros_like(q[:1]) * longest])


def _dense_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    rows = [pages[table.long()].transpose(1, 2).flatten(2, 3) for pages in (k, v)]
    mask = torch.arange(32, device=q.device) < lengths[:, None, None, None]
    return F.scaled_dot_product_attention(q, *rows, attn_mask=mask, enable_gqa=True)


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    rows = torch.arange(q.shape[0], device=q.device)
    of = torch.bucketize(rows, offsets[1:], right=True)
    seen = (of[:, None] == of) & (rows[:, None] >= rows) & (longest > 0)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, attn_mask=seen).transpose(0, 1)


EQUIVALENTS = {
    "sdpa": Equivalents(
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _qkv,
    ),
    "drop-in": Equivalents(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _qkv,
    ),
    "sdpa_varlen": Equivalents(
        lambda q, k, v, offsets, longest: sdpa_varlen(
            q, k, v, offsets, offsets, longest, longest, is_causal=True, causal_alignment="top_left"
        ),
        _by_sequence,
        _packed,
    ),
    "sdpa_paged": Equivalents(partial(sdpa_paged, page_layout="HND"), _dense_pages, _paged, trains=False),
    "sdpa_paged_varlen": Equivalents(
        partial(sdpa_paged_varlen, page_layout="HND"), _dense_rows, _packed_on_pages, trains=False
    ),
    "rms_norm": Equivalents(
        lambda x, w: rms_norm(x, w, 1e-6),
        lambda x, w: F.rms_norm(x, (64,), w, 1e-6),
        lambda step, new: (new(3 + step, 5 + step, 64), new(64)),
    ),
    "layer_norm": Equivalents(
        layer_norm,
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
        lambda step, new: (new(3 + step, 5 + step, 64), new(64), new(64)),
    ),
    "silu_mul": Equivalents(
        silu_mul,
        lambda gate, up: F.silu(gate) * up,
        lambda step, new: (new(3 + step, 5 + step, 64), new(3 + step, 5 + step, 64)),
    ),
    "conv2d": Equivalents(
        lambda x, w, b: conv2d(x, w, b, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda step, new: (new(2 + step, 16, 8 + 2 * step, 10 + 2 * step), new(24, 16, 3, 3), new(24)),
    ),
}


def compilations(function: Any) -> int:
    """Number of compiled versions of a function."""
    return len(_debug_get_cache_entry_list(function._torchdynamo_orig_callable.__code__))


def trained(function: Any, inputs: tuple[Any, ...]) -> list[Tensor]:
    """The result and its gradients for all floating-point tensors."""
    leaves = [x.detach().requires_grad_() if _is_real(x) else x for x in inputs]
    out = function(*leaves)
    # A weighted sum: with the uniform grad_out of a mean, transposed gradients would go unnoticed.
    weights = torch.linspace(0.5, 1.5, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), [x for x in leaves if _is_real(x)])]


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
