"""`torch_attn::_varlen_attn`, `_varlen_attn_out` and `_varlen_attn_backward`, behind `torch.nn.attention.varlen`.

Offsets are on the GPU alone, and are not read back. For a part of each sequence's keys, rows are gathered by positions
that are computed there, and no size depends on a length. Keys in pages are read where they are.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cudnn_sdpa.attention.arguments import Softmax, check_lengths, results, softmax_of
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged.arguments import MAX_DIM, NHD
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.paged_varlen.call import PagedVarlenCall, ReferencePagedVarlenCall
from cudnn_sdpa.attention.paged_varlen.reference import without_keys
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import PAGED_VARLEN
from cudnn_sdpa.attention.varlen.arguments import offsets_of_keys
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall, VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.launch import new_tensor
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.integrations.pytorch_kernels import launch, launch_backward, undisturbed

_calls, _paged_calls = NativeCalls(), NativeCalls()

_NEEDS = (True, True, True, False)  #: gradients of query, key and value

_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_kv": "cu_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_kv": "max_k",
    "k_pages": "key",
    "v_pages": "value",
    "page_table": "block_table",
    "seq_lens_kv": "seqused_k",
}

FLASH: int = SDPBackend.FLASH_ATTENTION.value
_BACKENDS = (FLASH, SDPBackend.CUDNN_ATTENTION.value)


class _Rules:
    values_have_their_head_dim = False


def detect_rules() -> None:
    """Runs PyTorch's fake `varlen_attn`: compiled code relies on the shapes of its results."""
    try:
        operator = torch.ops.torch_attn._varlen_attn
    except AttributeError:
        return
    query, value = (torch.empty(1, 1, dim, device="meta") for dim in (8, 16))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    out = operator(query, query, value, offsets, offsets, 1, 1)[0]
    _Rules.values_have_their_head_dim = out.shape[-1] == value.shape[-1]


def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's operator: the output (T, Hq, Dv), the LSE (Hq, T), and an empty state of random numbers."""
    out, lse = _attention(None, *args, **kwargs)
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=out.device)


def attention_into(*args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's operator: writes the output into `out`, and returns the LSE (Hq, T)."""
    return _attention(*args, **kwargs)[1]


def _attention(
    out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - heads are grouped wherever there are fewer of keys
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int = FLASH,
) -> tuple[Tensor, Tensor]:
    if num_splits is not None:
        instead = "" if block_table is None else ", or sdpa_paged_varlen with batch_invariant=True"
        raise UnsupportedError(
            f"num_splits={num_splits}",
            ["the kernel decides how it divides the keys, and promises no results that are the same in any batch"],
            f"num_splits=None{instead}",
        )
    if backend not in _BACKENDS:
        raise OptionError("backend", repr(backend), f"FLASH_ATTENTION or CUDNN_ATTENTION of SDPBackend: {_BACKENDS}")
    _check_value_dim(query, value)
    try:
        softmax = softmax_of(is_causal, BOTTOM_RIGHT, window_size, scale)
        if block_table is not None:
            side = block_table, seqused_k, cu_seq_q
            result, lse = _on_pages((query, key, value), *side, max_q=max_q, softmax=softmax, out=out)
        else:
            offsets = cu_seq_q, _offsets_of_keys(cu_seq_q, cu_seq_k)
            call = _call((query, key, value), offsets, (max_q, max_k), softmax=softmax, out=out)
            result, lse = _run(call if seqused_k is None else _with_used_keys(call, seqused_k))
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    return result, lse.transpose(0, 1).contiguous()


#: The operators' arguments, which `Kernel` reads.
_INTO = inspect.signature(_attention)
attention_into.__signature__ = _INTO  # type: ignore[attr-defined]
attention.__signature__ = _INTO.replace(parameters=list(_INTO.parameters.values())[1:])  # type: ignore[attr-defined]


def _call(
    qkv: tuple[Tensor, Tensor, Tensor],
    offsets: tuple[Tensor, Tensor],
    lengths: tuple[int, int],
    softmax: Softmax,
    out: Tensor | None = None,
) -> VarlenCall:
    q, k, v = qkv
    return VarlenCall(
        *(q, k, v, None),
        cu_seqlens_q=offsets[0],
        cu_seqlens_kv=offsets_of_keys(*offsets),
        rng=None,
        max_seqlen_q=lengths[0],
        max_seqlen_kv=lengths[1],
        softmax=softmax,
        with_lse=True,
        out=out,
    )


def _run(call: VarlenCall) -> tuple[Tensor, Tensor]:
    signature = VARLEN.flat(call)
    known = _known(_calls, signature)
    if known is not MISSED:
        return known  # type: ignore[no-any-return]
    if needs_gradient(call.q, call.k, call.v) and call.out is None:
        call.check()
        VARLEN.check_gradient(call)  # so that the forward pass raises, and not the backward pass
    result: tuple[Tensor, Tensor] = launch(VARLEN, call, _calls, signature)
    return result


def _known(calls: NativeCalls, signature: tuple[object, ...]) -> Any:
    """The results of a call that the native module knows, or `MISSED`."""
    if calls.find is None or value_checks.enabled:
        return MISSED
    with torch.no_grad():
        return calls.find(*signature)


def _offsets_of_keys(cu_seq_q: Tensor, cu_seq_k: Tensor | None) -> Tensor:
    """The offsets of keys: the Python object of those of queries if both are one tensor."""
    if cu_seq_k is None:
        raise OptionError("cu_seq_k", "None", "the offsets of keys, as there is no block_table")
    is_same = cu_seq_k is cu_seq_q or (
        cu_seq_k.data_ptr() == cu_seq_q.data_ptr()  # two Python objects of one tensor, as autograd saves it
        and cu_seq_k.numel() > 0
        and cu_seq_k.shape == cu_seq_q.shape
        and cu_seq_k.stride() == cu_seq_q.stride()
        and cu_seq_k.dtype == cu_seq_q.dtype
    )
    return cu_seq_q if is_same else cu_seq_k


def _check_value_dim(query: Tensor, value: Tensor) -> None:
    """Refuses a head dim of values that the fake operator of this PyTorch would compile wrongly."""
    if value.shape[-1] != query.shape[-1] and not _Rules.values_have_their_head_dim:
        raise UnsupportedError(
            "varlen_attn with values of another head dim",
            [f"{value.shape[-1]} where query has {query.shape[-1]}: PyTorch {torch.__version__} knows one for both"],
            "cudnn_sdpa.sdpa_varlen",
        )


def gradients(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,  # noqa: ARG001 - there is no dropout
    scale: float | None = None,
    window_size: tuple[int, int] | None = None,
    backend: int = FLASH,  # noqa: ARG001 - that of the forward pass
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's operator: the gradients of query, key and value. `out` and `lse` may be those of more keys."""
    try:
        offsets = cu_seq_q, _offsets_of_keys(cu_seq_q, cu_seq_k)
        softmax = softmax_of(is_causal, BOTTOM_RIGHT, window_size, scale)
        call = _call((query, key, value), offsets, (max_q, max_k), softmax=softmax)
        if lse.dim() != 2:
            raise ShapeError("lse", shape_of(lse), "two dimensions: (heads, tokens)")
        if query.dim() == 3 and lse.shape != query.shape[1::-1]:
            raise ShapeError("lse", shape_of(lse), f"shape {tuple(query.shape[1::-1])}: (heads, tokens)")
        backward = VarlenBackwardCall(grad_out, out, lse.detach().transpose(0, 1).contiguous(), call, needs=_NEEDS)
        grad_q, grad_k, grad_v = launch_backward(VARLEN, backward)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    return grad_q, grad_k, grad_v


def _on_pages(
    qkv: tuple[Tensor, Tensor, Tensor],
    block_table: Tensor,
    seqused_k: Tensor | None,
    cu_seq_q: Tensor,
    *,
    max_q: int,
    softmax: Softmax,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output (T, Hq, Dv) and the LSE (T, Hq) of packed queries on keys in pages (pages, page size, Hkv, D)."""
    if seqused_k is None:
        raise OptionError("seqused_k", "None", "the number of keys of each sequence, as there is a block_table")
    call = PagedVarlenCall(
        *qkv,
        page_table=block_table,
        page_table_v=None,
        seq_lens_kv=seqused_k,
        cu_seqlens_q=cu_seq_q,
        sinks=None,
        tree_mask=None,
        k_scale=None,
        v_scale=None,
        max_seqlen_q=max_q,
        page_layout=NHD,
        softmax=softmax._replace(deterministic=False),  # results are the same from run to run
        with_lse=True,
        out=out,
    )
    if max(call.q.shape[-1], call.v_pages.shape[-1]) > MAX_DIM:
        return _padded(call)
    signature = PAGED_VARLEN.flat(call)
    known = _known(_paged_calls, signature)
    found: tuple[Tensor, Tensor] = launch(PAGED_VARLEN, call, _paged_calls, signature) if known is MISSED else known
    return found


def _padded(call: PagedVarlenCall) -> tuple[Tensor, Tensor]:
    """Attention with head dims beyond those of the kernel for packed queries, by `sdpa_paged`.

    Each sequence has its queries in rows of its own, (B, max_q), of which the last may be unused.
    """
    ReferencePagedVarlenCall(*call).check()
    call.check_values()
    if call.is_empty or call.max_seqlen_q == 0:
        out, lse = without_keys(call)
        return out, lse
    tokens, batch, width = call.q.shape[0], call.batch, call.max_seqlen_q
    device, begins = call.q.device, call.cu_seqlens_q[:-1]
    with undisturbed(call.q):
        rows = (begins.unsqueeze(1) + torch.arange(width, dtype=torch.int32, device=device)).clamp_(0, tokens - 1)
        out, lse = sdpa_paged(
            call.q[rows].transpose(1, 2),
            k_pages=call.k_pages,
            v_pages=call.v_pages,
            page_table=call.page_table,
            seq_lens_kv=call.seq_lens_kv,
            seq_lens_q=call.cu_seqlens_q.diff().clamp_(0, width),
            page_layout=NHD,
            is_causal=call.softmax.is_causal,
            window_size=(call.softmax.window_left, call.softmax.window_right),
            scale=call.softmax.scale,
            return_lse=True,
        )
        sequence, position = _positions(call.cu_seqlens_q, tokens)
        row = torch.add(position, sequence, alpha=width).clamp_(0, batch * width - 1)
        token = torch.arange(tokens, device=device)
        is_of_none = (token < call.cu_seqlens_q[0]) | (token >= call.cu_seqlens_q[-1])
        result = out.transpose(1, 2).flatten(0, 1)[row].masked_fill_(is_of_none[:, None, None], 0.0)
        of_rows = lse.transpose(1, 2).flatten(0, 1)[row].masked_fill_(is_of_none[:, None], -torch.inf)
        layout = results(call)[0]
        into = new_tensor(layout, device) if call.out is None else call.out
        return result if call.out is None and result.stride() == layout[1] else into.copy_(result), of_rows


def _with_used_keys(call: VarlenCall, seqused_k: Tensor) -> VarlenCall:
    """A call on the first `seqused_k` keys of each sequence, (B,) int32, gathered into packed sequences.

    Keys and values behind them may hold anything.
    """
    call.check()
    offsets, tokens = call.offsets[1], call.k.shape[0]
    slots = offsets.diff()
    check_lengths("seqused_k", seqused_k, slots, "cu_seq_k")
    value_checks.check_offsets("cu_seqlens_kv", offsets, tokens, tokens)
    if seqused_k.device.type == "cpu" and bool(((seqused_k < 0) | (seqused_k > slots)).any()):
        expected = f"from 0 to the number of keys of each sequence, {slots.tolist()}"
        raise ShapeError("seqused_k", f"lengths {seqused_k.tolist()}", expected)
    if tokens == 0 or slots.shape[0] == 0:
        return call
    with undisturbed(call.q):
        used = _offsets_of(torch.minimum(seqused_k.clamp_min(0), slots))
        sequence, position = _positions(used, tokens)
        row = (offsets[sequence] + position).clamp_(0, tokens - 1)
        return call._replace(k=call.k[row], v=call.v[row], cu_seqlens_kv=used)


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _positions(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sequence index and position within it of each packed row; rows past the end repeat the last."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    row = torch.minimum(row, (offsets[-1] - 1).clamp_min(0))
    sequence = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=offsets.shape[0] - 2)
    return sequence, row - offsets[sequence]
