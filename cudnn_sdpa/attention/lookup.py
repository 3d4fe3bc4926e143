"""Which prepared call serves these arguments: the first level of look-up, before any check and any key.

Two ways lead to a prepared call. The last one served is recognized by a guard, one C call of 0.4 µs; the layers of one
model mostly look alike. Any other is found by its signature, a tuple of all that decides a call, in 2 µs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from cudnn_sdpa.attention.calls import ForwardCall
from cudnn_sdpa.runtime.cache import CallTable
from cudnn_sdpa.runtime.eager import Guard, is_plain, tensor_guard

#: Prepared calls by raw signature.
calls = CallTable()


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


#: Replaced as a whole, so that a thread sees the old one or the new one.
last = _NOTHING = Last(None, _never, None, "", None, False, False)


def _forget_last() -> None:
    global last  # noqa: PLW0603
    last = _NOTHING


calls.on_drop = _forget_last


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
    global last  # noqa: PLW0603
    try:
        call: ForwardCall | None = calls.get(
            signature(q, k, v, seq_lens_q, seq_lens_kv, is_causal, causal_alignment, scale, return_lse, out)
        )
    except (AttributeError, TypeError):  # not tensors, or not hashable: the checks will say so
        return None
    if call is None or not is_plain(q, k, v):
        return None
    if seq_lens_q is None and out is None:
        tensors = (q, k, v) if seq_lens_kv is None else (q, k, v, seq_lens_kv)
        if call.guard is None or (call is last.call and call.guard is not _never):  # new, or PyTorch's state changed
            guard = tensor_guard(*tensors)
            call.guard = guard if guard(*tensors) else _never  # no guard takes one tensor twice, as with k is v
        last = Last(call, call.guard, is_causal, causal_alignment, scale, return_lse, seq_lens_kv is not None)
    return call
