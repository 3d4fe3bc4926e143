"""The prepared calls of this process by raw signature: the first level of look-up, before any check and any key.

A signature is a tuple of all that decides a call; making one and looking it up takes 2 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.calls import Result
from cudnn_sdpa.runtime.call_table import CallTable
from cudnn_sdpa.runtime.eager import Guard
from cudnn_sdpa.runtime.repeatability import has_only_repeatable
from cudnn_sdpa.runtime.target import live_target

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, None], Result]


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


#: By signature of the forward pass with a log-sum-exp, whether there is a gradient by the mask, and determinism: calls
#: whose backward pass is known to have nothing that speaks against it.
differentiable: set[tuple[Hashable, bool, bool]] = set()

#: Prepared calls by raw signature, and the last one served.
calls: CallTable[Last] = CallTable(Last(None, _never, None, "", None, False, False))


def signature(call: ForwardArguments) -> Hashable:
    """All that decides a call, as a flat tuple."""
    if call.deterministic and may_differ(call.q):
        return "must repeat", signature(call._replace(deterministic=False))
    if call.is_plain:
        return plain_signature(
            *call[:3], call.seq_lens_q, call.seq_lens_kv, *call[8:10], call.scale, call.with_lse, call.out
        )
    options = call.options[:-1]  # all but `deterministic`
    types = tuple(map(type, (*options, call.with_lse)))  # 1, 1.0 and True are equal, but not all are accepted
    layouts = [  # `describe` without its calls, 0.5 µs
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in (*call.tensors, call.rng, call.out)
    ]
    return (*layouts, *options, call.with_lse, types)


def may_differ(q: Tensor) -> bool:
    """Whether determinism concerns the forward pass: whether there are kernels that give other bits in another run."""
    sm = live_target(q.get_device()).sm if q.is_cuda else 0
    return not has_only_repeatable(sm, q.shape[2])


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
