"""Forward calls bound to their plans: what runs when everything that a raw signature decides is decided."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.forward import Forward
from cudnn_sdpa.runtime.cache import next_use
from cudnn_sdpa.runtime.layouts import ALIGNMENT, contiguous_stride
from cudnn_sdpa.runtime.plan import Plan, allocate

Result = Tensor | tuple[Tensor, Tensor]

_MISALIGNED = ALIGNMENT - 1
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _check_memory(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None) -> None:
    """Checks the addresses, and tells autograd that `out` is about to be written."""
    arguments.check_memory(q, k, v, out)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


class ForwardCall:
    """A forward call bound to its plan. Calling it checks only what no signature holds: addresses."""

    __slots__ = ("_elsewhere", "_forward", "_lse", "_out", "_scale", "_scale_address", "last", "plan")

    def __init__(self, forward: Forward, plan: Plan, scale: float) -> None:
        self.plan = plan
        self.last: Any = None  # by what the look-up recognizes this call when it comes again
        self._forward = forward
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._out = (forward.out.shape, forward.out.stride, forward.out.dtype)
        lse_shape = forward.out.shape[:3]
        self._lse = (lse_shape, contiguous_stride(lse_shape), torch.float32)
        self._scale = array("f", [scale])
        self._scale_address = self._scale.buffer_info()[0]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor | None, out: Tensor | None
    ) -> Result:
        """Allocates, launches and returns."""
        _check_memory(q, k, v, out)
        return self._run_on_device(q, k, v, lengths_q, lengths_kv, out)

    def _run_on_device(self, *operands: Any) -> Result:
        if self._elsewhere and _current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self._run(*operands)
        return self._run(*operands)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor | None, out: Tensor | None
    ) -> Result:
        forward, blind = self._forward, self._forward.mask.blind_rows
        out = allocate(*self._out) if out is None else out
        lse = allocate(*self._lse) if forward.with_lse else None
        visible_out, visible_lse = out, lse
        if blind:
            out[:, :, :blind].zero_()
            q, visible_out = q[:, :, blind:], out[:, :, blind:]
            if lse is not None:
                lse[:, :, :blind].fill_(-torch.inf)
                visible_lse = lse.new_empty(lse[:, :, blind:].shape)
        operands = [q, k, v, *self._lengths(lengths_q, lengths_kv), visible_out]
        operands += [] if visible_lse is None else [visible_lse]
        pointers = [operand.data_ptr() for operand in operands]
        pointers.insert(3, self._scale_address)
        self.plan.last_used = next_use()
        self.plan.launch(pointers)
        if lse is None or visible_lse is None:
            return out
        if blind:
            lse[:, :, blind:] = visible_lse
        return out, lse

    def _lengths(self, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> list[Tensor]:
        """The two lengths that cuDNN reads, corrected where its engines would leave rows wrong.

        Seen on cuDNN 9.19: decode engines (Sq = 1) ignore the queries' lengths, and the others write nothing for a
        sequence without keys. So a decode call hides the keys of an absent query, and elsewhere a sequence without
        keys becomes one without queries, whose rows cuDNN fills with zeros and -inf.
        """
        constants, sq, skv = self.plan.constants, self._forward.q.shape[2], self._forward.k.shape[2]
        if self._forward.is_decode:
            if lengths_q is not None:
                lengths_kv = lengths_q.clamp(0, 1) * (skv if lengths_kv is None else lengths_kv.clamp(0, skv))
            return [] if lengths_kv is None else [constants["seq_len_q"], lengths_kv]
        if lengths_kv is None:
            return [] if lengths_q is None else [lengths_q.clamp(0, sq), constants["seq_len_kv"]]
        present = lengths_kv.clamp(0, 1)
        return [present * (sq if lengths_q is None else lengths_q.clamp(0, sq)), lengths_kv.clamp(1, skv)]


class PlainCall(ForwardCall):
    """The shortest way, for calls with one launch and nothing else: no log-sum-exp, no lengths but a decode step's.

    It does what `ForwardCall` does without its lists, views and device guard: 3 µs less.
    """

    __slots__ = ("_one",)

    def __init__(self, forward: Forward, plan: Plan, scale: float) -> None:
        super().__init__(forward, plan, scale)
        self._one = plan.constants["seq_len_q"].data_ptr() if forward.lengths_kv else 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths_q: Tensor | None, lengths_kv: Tensor | None, out: Tensor | None
    ) -> Result:
        """Allocates, launches and returns."""
        plan = self.plan
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is not None or (first | second | third) & _MISALIGNED:
            _check_memory(q, k, v, out)
        if self._elsewhere and _current_device() != plan.device:
            return self._run_on_device(q, k, v, lengths_q, lengths_kv, out)
        if out is None:
            out = allocate(*self._out)
        plan.last_used = next_use()
        if lengths_kv is None:
            plan.launch((first, second, third, self._scale_address, out.data_ptr()))
        else:
            lengths = lengths_kv.data_ptr()
            plan.launch((first, second, third, self._scale_address, self._one, lengths, out.data_ptr()))
        return out


def bind(forward: Forward, plan: Plan, scale: float) -> ForwardCall:
    """The call of `plan` with this scale."""
    one_launch = not (forward.with_lse or forward.mask.blind_rows or forward.lengths_q)
    plain = one_launch and (forward.is_decode or not forward.lengths_kv)
    return (PlainCall if plain else ForwardCall)(forward, plan, scale)
