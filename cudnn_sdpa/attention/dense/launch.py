"""Forward calls bound to their plans: what a launch reads besides queries, keys and values, and what follows it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments, Result
from cudnn_sdpa.attention.bias import BiasKernel
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.attention.lengths import LengthsKernel, RowLimitsKernel, addresses_of
from cudnn_sdpa.engine.launch import BoundPlan, Layout
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride
from cudnn_sdpa.plans.plan import Plan

SMALLEST = torch.finfo(torch.float32).min  #: replaces an LSE of -inf, because -inf - (-inf) is NaN

Run = Callable[[ForwardArguments], Result]


def bind(forward: ForwardSpec, plan: Plan, call: ForwardArguments, scale: float) -> Run:
    """What runs calls like this one on `plan`, whose GPU is the current device, with a positive scale."""
    spec = forward.dense
    results: list[Layout] = [(forward.out.shape, forward.out.stride, forward.out.dtype)]
    if forward.plan_has_lse:
        rows = (*forward.out.shape[:2], spec.rows)
        results.append((rows, contiguous_stride(rows), torch.float32))
    queries, decode = {"q": spec.q, "out": forward.out}, forward.is_decode and not spec.softcap
    before = OtherOperands.of(spec, plan, call, queries, decode=decode)
    bound = BoundPlan(
        plan=plan,
        inputs=("q", "k", "v"),
        results=results,
        numbers={"scale": scale, "softcap": call.softcap},
        before=before,
    )
    adds_sinks = spec.sinks and forward.plan_has_lse and (forward.sinks_outside or spec.can_have_masked_rows)
    if spec.mask.masked_rows or adds_sinks or forward.with_lse != forward.plan_has_lse:
        return _Completed(forward, bound)
    if before is None and call.out is None:  # as in all calls like this one
        if forward.with_lse:
            return lambda call: tuple(bound.run((call.q, call.k, call.v)))  # type: ignore[return-value]
        return lambda call: bound.run((call.q, call.k, call.v))[0]
    if forward.with_lse:
        return lambda call: tuple(bound(call, (call.q, call.k, call.v), call.out))  # type: ignore[return-value]
    return lambda call: bound(call, (call.q, call.k, call.v), call.out)[0]


class OtherOperands:
    """Fills in the pointers of what only some calls have: bias, sinks, random numbers, lengths.

    Fully masked rows are not given to cuDNN: tensors of queries begin behind them.
    """

    __slots__ = ("_behind", "_bias", "_lengths", "_places")

    def __init__(
        self, spec: DenseSpec, plan: Plan, call: ForwardArguments, queries: Mapping[str, TensorLayout], *, decode: bool
    ) -> None:
        """Binds it.

        Args:
            spec: The spec of the calls.
            plan: Their plan, whose GPU is the current device.
            call: One of them.
            queries: The operands with one row for each query, as the caller sees them.
            decode: Whether the plan is one of a decode engine.
        """
        rows, device = spec.mask.masked_rows, plan.device
        operands = (*plan.key.inputs, *plan.key.outputs)
        self._places = {operand.name: place for place, operand in enumerate(operands)}
        self._behind = [
            (self._places[name], rows * x.stride[2] * x.dtype.itemsize) for name, x in queries.items() if rows
        ]
        self._bias = None if call.attn_mask is None else BiasKernel(call.attn_mask, call.q, spec.skv, rows)
        self._lengths: LengthsKernel | RowLimitsKernel | None = None
        batch = spec.q.shape[0]
        if spec.has_lengths and spec.softcap:
            self._lengths = RowLimitsKernel(
                batch=batch, rows=spec.sq, band=spec.mask.band, device=device, max_q=spec.sq, max_kv=spec.skv
            )
        elif spec.has_lengths:
            self._lengths = LengthsKernel(
                batch=batch, sq=spec.sq, skv=spec.skv, has_kv=spec.lengths_kv, device=device, decode=decode
            )

    @classmethod
    def of(
        cls, spec: DenseSpec, plan: Plan, call: ForwardArguments, queries: Mapping[str, TensorLayout], *, decode: bool
    ) -> OtherOperands | None:
        """The same; None for calls that have nothing of this."""
        options = (spec.bias, spec.sinks, spec.dropout_p, spec.has_lengths, spec.mask.masked_rows)
        if not any(options):
            return None
        return cls(spec, plan, call, queries, decode=decode)

    def __call__(self, call: ForwardArguments, pointers: array[int], _outputs: list[Tensor]) -> object:
        """Fills them in, and gives what they point to."""
        places, kept = self._places, []
        for place, distance in self._behind:
            pointers[place] += distance
        if self._bias is not None and call.attn_mask is not None:
            pointers[places["bias"]], bias = self._bias(call.attn_mask)
            kept.append(bias)
        if call.sinks is not None:
            sinks = memory.aligned("sinks", call.sinks)
            if "sink" in places:
                pointers[places["sink"]] = sinks.data_ptr()
            kept.append(sinks)
        if call.rng is not None:
            pointers[places["seed"]] = call.rng.data_ptr()
            pointers[places["offset"]] = call.rng.data_ptr() + call.rng.element_size()
        if self._lengths is not None:
            made = self._lengths(*addresses_of(call.seq_lens_q, call.seq_lens_kv))
            for name, offset in self._lengths.offsets.items():
                pointers[places[name]] = made.data_ptr() + offset
            kept.append(made)
        return kept


class _Completed:
    """Runs calls whose results the plan does not write in full: fully masked rows, and what sinks change."""

    __slots__ = ("_bound", "_forward")

    def __init__(self, forward: ForwardSpec, bound: BoundPlan) -> None:
        self._forward = forward
        self._bound = bound

    def __call__(self, call: ForwardArguments) -> Result:
        """Launches the plan and completes its results."""
        forward, spec = self._forward, self._forward.dense
        masked_rows = spec.mask.masked_rows
        out, *others = self._bound(call, (call.q, call.k, call.v), call.out)
        if masked_rows:
            out[:, :, :masked_rows].zero_()
        if not others:
            return out
        (lse,) = others
        sinks = None if call.sinks is None else call.sinks.view(1, -1, 1)
        if sinks is not None and forward.sinks_outside:
            apply_sinks(out[:, :, masked_rows:], lse, sinks)
        elif sinks is not None and spec.can_have_masked_rows:  # fully masked rows see only the sink
            torch.maximum(lse, sinks, out=lse)
        if masked_rows:
            masked = lse.new_full((*lse.shape[:2], masked_rows), -torch.inf)
            lse = torch.cat([masked if sinks is None else torch.maximum(masked, sinks), lse], 2)
        return (out, lse) if forward.with_lse else out


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds the sinks, (1, Hq, 1), in place to an output and an LSE that were computed without them."""
    total = torch.logaddexp(lse, sinks)
    out.mul_(torch.exp(lse - total.clamp_min(SMALLEST)).unsqueeze(-1))  # 0 where there is neither a key nor a sink
    lse.copy_(total)
