"""Forward calls bound to their plans: what a launch reads besides queries, keys and values, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.bias import BiasKernel
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.attention.lengths import LENGTHS, LengthsKernel, RowLimitsKernel
from cudnn_sdpa.engine.call import Result
from cudnn_sdpa.engine.launch import Additions, Address, BoundPlan, Layout, PlainCall, items_by_name
from cudnn_sdpa.engine.memory import check_present
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride
from cudnn_sdpa.plans.plan import Plan

MIN_HALF = torch.finfo(torch.float32).min  #: replaces an LSE of -inf, because -inf - (-inf) is NaN

Run = Callable[[ForwardArguments], Result]


def bind(forward: ForwardSpec, plan: Plan, call: ForwardArguments, scale: float) -> Run:
    """What runs calls like this one on `plan`, whose GPU is the current device, with a positive scale."""
    spec, has_lse = forward.dense, forward.plan_has_lse
    results: list[Layout] = [(forward.out.shape, forward.out.stride, forward.out.dtype)]
    if has_lse:
        rows = (*forward.out.shape[:2], spec.rows)
        results.append((rows, contiguous_stride(rows), torch.float32))
    queries = {"q": spec.q, "out": forward.out}
    bound = bind_plan(
        spec,
        plan,
        call,
        operands=("q", "k", "v"),
        results=results,
        numbers=call.softmax.host_scalars(scale),
        queries=queries,
        decode=forward.is_decode and not spec.is_capped,
    )
    adds_sinks = spec.sinks and has_lse and (forward.sinks_outside or spec.can_have_masked_rows)
    if spec.mask.masked_rows or adds_sinks or forward.with_lse != has_lse:
        return _Completed(forward, bound)
    return PlainCall(bound)


def bind_plan(
    spec: DenseSpec,
    plan: Plan,
    call: ForwardArguments,
    *,
    operands: Sequence[str],
    results: Sequence[Layout],
    numbers: Mapping[str, float | None],
    queries: Mapping[str, TensorLayout],
    decode: bool = False,
) -> BoundPlan:
    """A plan with what only some calls have: bias, sinks, random numbers, lengths.

    Args:
        spec: The spec of the calls.
        plan: Their plan, whose GPU is the current device.
        call: One of them.
        operands: The operands that all have.
        results: Layouts of the results.
        numbers: The host scalars.
        queries: The operands with one row for each query, as the caller sees them. Fully masked rows are not given to
            cuDNN: these begin behind them.
        decode: Whether the plan is one of a decode engine.
    """
    rows, device, batch = spec.mask.masked_rows, plan.device, spec.q.shape[0]
    all_names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
    behind = {name: Address(name, rows * x.stride[2] * x.dtype.itemsize) for name, x in queries.items() if rows}
    more = Additions(addresses=behind)
    if call.sinks is not None and "sink" in all_names:
        more += Additions(operands=("sinks",), copied=("sinks",), addresses={"sink": Address("sinks")})
    if call.rng is not None:
        seed = {"seed": Address("rng"), "offset": Address("rng", call.rng.element_size())}
        more += Additions(operands=("rng",), anywhere=("rng",), addresses=seed)
    if spec.has_lengths:
        given = [name for name in LENGTHS if getattr(call, name) is not None]
        made: RowLimitsKernel | LengthsKernel
        if spec.is_capped:
            made = RowLimitsKernel(
                batch=batch, device=device, rows=spec.sq, band=spec.mask.band, max_q=spec.sq, max_kv=spec.skv
            )
        else:
            made = LengthsKernel(
                batch=batch, device=device, sq=spec.sq, has_kv=spec.lengths_kv, decode=decode, skv=spec.skv
            )
        more += made.additions(given)
    bound_plan = partial(BoundPlan, plan, operands, results=results, numbers=numbers)
    if call.attn_mask is None:
        return bound_plan(additions=more)
    bias = BiasKernel(call.attn_mask, call.q, spec.skv, rows)
    bound = bound_plan(additions=more + bias.additions(reads_mask=False))
    if bias.reads_mask_at is not None:
        bound = bound_plan(additions=more + bias.additions(reads_mask=True), otherwise=bound)
    return bound


class _Completed:
    """Runs calls whose results the plan does not write in full: fully masked rows, and what sinks change."""

    __slots__ = ("_bound", "_forward", "_tensors_of")

    def __init__(self, forward: ForwardSpec, bound: BoundPlan) -> None:
        self._forward = forward
        self._bound = bound
        self._tensors_of = items_by_name(bound.operands)

    def __call__(self, call: ForwardArguments) -> Result:
        """Launches the plan and completes its results."""
        forward, spec = self._forward, self._forward.dense
        masked_rows = spec.mask.masked_rows
        if call.sinks is not None:
            check_present("sinks", call.sinks)  # PyTorch's kernels would read a null pointer
        out, *others = self._bound(self._tensors_of(call), call.out)
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
    out.mul_(torch.exp(lse - total.clamp_min(MIN_HALF)).unsqueeze(-1))  # 0 where there is neither a key nor a sink
    lse.copy_(total)
