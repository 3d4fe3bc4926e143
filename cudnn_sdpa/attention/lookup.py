"""Which prepared call serves these arguments: the first level of look-up, before any check and any key.

Two ways lead to a prepared call. The last one served is recognized by a guard, one C call of 0.4 µs; the layers of one
model mostly look alike. Any other is found by its signature, a tuple of all that decides a call, in 2 µs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention.calls import ForwardCall
from cudnn_sdpa.runtime.cache import CallTable
from cudnn_sdpa.runtime.eager import Guard, is_plain, is_profiling, tensor_guard


class Last:
    """The call that was served last, in plain eager mode without `seq_lens_q` and `out`."""

    __slots__ = ("alignment", "call", "check", "has_lengths", "is_causal", "scale", "scale_type", "with_lse")

    def __init__(
        self,
        call: ForwardCall | None,
        check: Guard,
        is_causal: bool | None,
        alignment: str,
        scale: float | None,
        with_lse: bool,
        has_lengths: bool,
    ) -> None:
        self.call: Any = call
        self.check = check
        self.is_causal = is_causal
        self.alignment = alignment
        self.scale = scale
        self.scale_type = type(scale)
        self.with_lse = with_lse
        self.has_lengths = has_lengths


def _never(*_: Any) -> bool:
    return False


#: Prepared calls by raw signature, and the last one served.
calls: CallTable[Last] = CallTable(Last(None, _never, None, "", None, False, False))


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
) -> Hashable:
    """All that decides a call, as a flat tuple."""
    flat = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, is_causal, causal_alignment, scale, return_lse),
        *(type(is_causal), type(scale), type(return_lse)),  # 1, 1.0 and True are equal, but not all are accepted
    )
    if seq_lens_q is None and seq_lens_kv is None and out is None:
        return flat
    return (*flat, *map(_describe, (seq_lens_q, seq_lens_kv, out)))


def _describe(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
) -> ForwardCall | None:
    """The prepared call for these arguments, if there is one and it may skip the dispatcher."""
    try:
        call: ForwardCall | None = calls.get(
            signature(q, k, v, seq_lens_q, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, out)
        )
    except (AttributeError, TypeError, RuntimeError):  # not tensors, not hashable, nested: the checks will say so
        return None
    if call is None or (out is not None and (type(out) is not Tensor or out.requires_grad)):
        return None
    if seq_lens_q is not None or out is not None:
        return call if is_plain(q, k, v) else None
    tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
    known: Last | None = call.last
    if known is None or not known.check(*tensors) or is_profiling() or forward_ad._current_level >= 0:
        if not is_plain(q, k, v):
            return None
        if not _can_be_guarded(tensors):
            return call
        of_call = (is_causal, causal_alignment, scale, return_lse, seq_lens_kv is not None)
        call.last = known = Last(call, tensor_guard(*tensors), *of_call)
    calls.remember_last(known, call.plan)
    if not call.plan.held:
        call.last = None  # it refers back to the call, and an evicted plan must not wait for the garbage collector
    return call


def _can_be_guarded(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a guard may stand for these tensors.

    No guard takes one tensor twice, as with k is v, and none sees whether gradients are enabled.
    """
    return len(set(map(id, tensors))) == len(tensors) and not any(tensor.requires_grad for tensor in tensors)
