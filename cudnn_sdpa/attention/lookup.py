"""Which prepared call serves these arguments: the first level of look-up, before any check and any key.

Two ways lead to a prepared call. The last plain one served is recognized by a guard, one C call of 0.4 µs; the layers
of one model mostly look alike. Any other is found by its signature, a tuple of all that decides a call, in 2 µs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.calls import ForwardCall
from cudnn_sdpa.runtime.cache import CallTable
from cudnn_sdpa.runtime.eager import Guard, is_bare, is_plain, is_profiling, needs_gradient, tensor_guard


class Last:
    """The plain call that was served last, in plain eager mode without `seq_lens_q`, `out` and the rarer options."""

    __slots__ = ("alignment", "check", "has_lengths", "is_causal", "run", "scale", "scale_type", "with_lse")

    def __init__(
        self,
        run: Any,
        check: Guard,
        is_causal: bool | None,
        alignment: str,
        scale: float | None,
        with_lse: bool,
        has_lengths: bool,
    ) -> None:
        self.run = run
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


def signature(call: ForwardArguments) -> Hashable:
    """All that decides a call, as a flat tuple."""
    if call.is_plain:
        return plain_signature(
            *call[:3], call.seq_lens_q, call.seq_lens_kv, *call[8:10], call.scale, call.with_lse, call.out
        )
    types = tuple(map(type, call.options))  # 1, 1.0 and True are equal, but not all are accepted
    return (*map(describe, (*call.tensors, call.rng, call.out)), *call.options, call.with_lse, types)


def plain_signature(
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
    """The same for a plain call."""
    flat = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, is_causal, causal_alignment, scale, return_lse),
        *(type(is_causal), type(scale), type(return_lse)),
    )
    if seq_lens_q is None and seq_lens_kv is None and out is None:
        return flat
    return (*flat, *map(describe, (seq_lens_q, seq_lens_kv, out)))


def describe(tensor: Tensor | None) -> Hashable:
    """What of a tensor decides a call."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def find(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
) -> ForwardCall | None:
    """The prepared call for these plain arguments without `seq_lens_q` and `out`, if it may skip the dispatcher."""
    try:
        call: ForwardCall | None = calls.get(
            plain_signature(q, k, v, None, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, None)
        )
    except (AttributeError, TypeError, RuntimeError):  # not tensors, not hashable, nested: the checks will say so
        return None
    if call is None:
        return None
    tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
    known: Last | None = call.last
    if known is None or not known.check(*tensors) or is_profiling() or forward_ad._current_level >= 0:
        if not is_plain(q, k, v):
            return None
        if not _can_be_guarded(tensors):
            return call
        of_call = (is_causal, causal_alignment, scale, return_lse, seq_lens_kv is not None)
        call.last = known = Last(call.run, tensor_guard(*tensors), *of_call)
    calls.remember_last(known, call.plan)
    if not call.plan.held:
        call.last = None  # it refers back to the call, and an evicted plan must not wait for the garbage collector
    return call


def find_any(call: ForwardArguments) -> ForwardCall | None:
    """The prepared call for any arguments, if there is one and it may skip the dispatcher."""
    if call.dropout_p or not is_bare(*call.tensors, call.out) or needs_gradient(*call.tensors, call.out):
        return None
    try:
        prepared: ForwardCall | None = calls.get(signature(call))
    except (AttributeError, TypeError, RuntimeError):
        return None
    return prepared


def _can_be_guarded(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a guard may stand for these tensors.

    No guard takes one tensor twice, as with k is v, and none sees whether gradients are enabled.
    """
    return len(set(map(id, tensors))) == len(tensors) and not any(tensor.requires_grad for tensor in tensors)
