"""`torch_attn::_varlen_attn`, `_varlen_attn_out` and `_varlen_attn_backward`, behind `torch.nn.attention.varlen`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall, VarlenCall
from cudnn_sdpa.attention.varlen.sdpa_varlen import VARLEN
from cudnn_sdpa.engine import value_checks
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.memory import shape_of
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.integrations import pytorch_pages
from cudnn_sdpa.integrations.pytorch_kernels import launch, launch_backward

_calls = NativeCalls()


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
    """Differences between the operators of PyTorch's versions.

    Attributes:
        values_have_their_head_dim: Whether the head dim of values may differ from that of queries.
    """

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


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - heads are grouped wherever there are fewer of keys
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int = FLASH,
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's operator: the output (T, Hq, Dv), the LSE (Hq, T), and an empty state of random numbers."""
    out, lse = _attention(
        query,
        key,
        value,
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        max_q=max_q,
        max_k=max_k,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
        backend=backend,
    )
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def attention_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,  # noqa: ARG001
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    backend: int = FLASH,
) -> Tensor:
    """PyTorch's operator: writes the output into `out`, and returns the LSE (Hq, T)."""
    _, lse = _attention(
        query,
        key,
        value,
        cu_seq_q=cu_seq_q,
        cu_seq_k=cu_seq_k,
        max_q=max_q,
        max_k=max_k,
        is_causal=is_causal,
        scale=scale,
        window_size=window_size,
        seqused_k=seqused_k,
        block_table=block_table,
        num_splits=num_splits,
        backend=backend,
        out=out,
    )
    return lse


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool,
    scale: float | None,
    window_size: Sequence[int] | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
    backend: int,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if num_splits is not None:
        raise UnsupportedError(
            f"num_splits={num_splits}",
            ["cuDNN decides how a kernel divides the keys, and promises no results that are the same in any batch"],
            "num_splits=None",
        )
    if backend not in _BACKENDS:
        raise OptionError("backend", repr(backend), f"FLASH_ATTENTION or CUDNN_ATTENTION of SDPBackend: {_BACKENDS}")
    _check_value_dim(query, value)
    try:
        call = VarlenCall(
            q=query,
            k=key,
            v=value,
            sinks=None,
            cu_seqlens_q=cu_seq_q,
            cu_seqlens_kv=None,
            rng=None,
            max_seqlen_q=max_q,
            max_seqlen_kv=max_k,
            softmax=_softmax(window_size, is_causal=is_causal, scale=scale),
            with_lse=True,
            out=out,
        )
        if block_table is not None:
            result, lse = pytorch_pages.attention(call, block_table, seqused_k)
        else:
            call = call._replace(cu_seqlens_kv=_offsets_of_keys(cu_seq_q, cu_seq_k))
            if seqused_k is not None:
                call = pytorch_pages.with_used_keys(call, seqused_k)
            result, lse = _run(call)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    return result, lse.transpose(0, 1).contiguous()


def _run(call: VarlenCall) -> tuple[Tensor, Tensor]:
    signature = VARLEN.flat(call)
    if _calls.find is not None and not value_checks.enabled:
        with torch.no_grad():
            known = _calls.find(*signature)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    if needs_gradient(call.q, call.k, call.v) and call.out is None:
        call.check()
        VARLEN.check_gradient(call)  # so that the forward pass raises, and not the backward pass
    result: tuple[Tensor, Tensor] = launch(VARLEN, call, _calls, signature)
    return result


def _softmax(window_size: Sequence[int] | None, *, is_causal: bool, scale: float | None) -> Softmax:
    left, right = UNBOUNDED, UNBOUNDED
    if window_size is not None:
        if len(window_size) != 2:
            raise OptionError("window_size", repr(list(window_size)), "two integers (left, right), -1 for no bound")
        left, right = window_size
    deterministic = torch.are_deterministic_algorithms_enabled()
    return Softmax(bool(is_causal), BOTTOM_RIGHT, left, right, scale=scale, deterministic=deterministic)


def _offsets_of_keys(cu_seq_q: Tensor, cu_seq_k: Tensor | None) -> Tensor | None:
    """The offsets of keys in a call's form: None if they are those of queries."""
    if cu_seq_k is None:
        raise OptionError("cu_seq_k", "None", "the offsets of keys, as there is no block_table")
    is_same = cu_seq_k is cu_seq_q or (
        cu_seq_k.data_ptr() == cu_seq_q.data_ptr()  # two Python objects of one tensor, as autograd saves it
        and cu_seq_k.numel() > 0
        and cu_seq_k.shape == cu_seq_q.shape
        and cu_seq_k.stride() == cu_seq_q.stride()
        and cu_seq_k.dtype == cu_seq_q.dtype
    )
    return None if is_same else cu_seq_k


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
    window_size: Sequence[int] | None = None,
    backend: int = FLASH,  # noqa: ARG001 - that of the forward pass
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's operator: the gradients of query, key and value. `out` and `lse` may be those of more keys."""
    try:
        call = VarlenCall(
            q=query,
            k=key,
            v=value,
            sinks=None,
            cu_seqlens_q=cu_seq_q,
            cu_seqlens_kv=_offsets_of_keys(cu_seq_q, cu_seq_k),
            rng=None,
            max_seqlen_q=max_q,
            max_seqlen_kv=max_k,
            softmax=_softmax(window_size, is_causal=is_causal, scale=scale),
            with_lse=True,
        )
        if lse.dim() != 2:
            raise ShapeError("lse", shape_of(lse), "two dimensions: (heads, tokens)")
        if query.dim() == 3 and lse.shape != query.shape[1::-1]:
            raise ShapeError("lse", shape_of(lse), f"shape {tuple(query.shape[1::-1])}: (heads, tokens)")
        backward = VarlenBackwardCall(grad_out, out, lse.detach().transpose(0, 1).contiguous(), call, needs=_NEEDS)
        grad_q, grad_k, grad_v = launch_backward(VARLEN, backward)
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed(_NAMES) from None
    return grad_q, grad_k, grad_v
