"""The torch operators of attention in FP8: CUDA (cuDNN), CPU (emulation) and fake implementations.

- ``cudnn_sdpa::sdpa_fp8_forward`` returns the output, amax_s, amax_o and, on request, the LSE.
- ``cudnn_sdpa::sdpa_fp8_backward`` returns the gradients of q, k and v, their amax values, and that of the scores'
  gradient.

Scales are passed in the order of `Fp8Scales` and `Fp8BackwardScales`. Neither operator can be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.cpu_checks import check_call, check_offsets
from cudnn_sdpa.attention.dense.torch_ops import dense_sizes, flops_of_backward, flops_of_forward
from cudnn_sdpa.attention.fp8 import arguments, launch, plans, reference, workarounds
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Backward,
    Fp8BackwardScales,
    Fp8Forward,
    Fp8Gradients,
    Fp8Output,
    Fp8Scales,
)
from cudnn_sdpa.engine.torch_ops import define
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target


def run_forward_cpu(of: Fp8Forward) -> Fp8Output:
    """A forward pass by the emulation."""
    arguments.check_forward_on_pages(of)
    launch.check_values(of)
    check_fp8(of)
    of = arguments.gathered(of)
    found = reference.attention(of)
    assert found.lse is not None
    lse = found.lse.float() if of.call.with_lse else None
    return found._replace(out=launch.new_output(of).copy_(found.out), lse=lse)


def run_backward_cpu(of: Fp8Backward) -> Fp8Gradients:
    """A backward pass by the emulation."""
    arguments.check_backward(of)
    launch.check_lengths(of.call)
    check_fp8_backward(of)
    found, dtype = reference.gradients(of), of.grad_out.dtype
    dq, dk, dv = (
        launch.new_gradient(x, dtype).copy_(y)
        for x, y in zip((of.call.q, of.call.k, of.call.v), (found.dq, found.dk, found.dv), strict=True)
    )
    return found._replace(dq=dq, dk=dk, dv=dv)


def _run_forward_fake(of: Fp8Forward) -> Fp8Output:
    arguments.check_forward_on_pages(of)
    out = launch.new_output(of)
    lse = out.new_empty(out.shape[:3], dtype=torch.float32) if of.call.with_lse else None
    amax_s, amax_o = (out.new_empty(1, dtype=torch.float32) for _ in range(2))
    return Fp8Output(out, amax_s, amax_o, lse)


def _run_backward_fake(of: Fp8Backward) -> Fp8Gradients:
    arguments.check_backward(of)
    dq, dk, dv = (launch.new_gradient(x, of.grad_out.dtype) for x in (of.call.q, of.call.k, of.call.v))
    amax_dq, amax_dk, amax_dv, amax_dp = (of.lse.new_empty(1) for _ in range(4))
    return Fp8Gradients(dq=dq, dk=dk, dv=dv, amax_dq=amax_dq, amax_dk=amax_dk, amax_dv=amax_dv, amax_dp=amax_dp)


def options_of(call: ForwardArguments) -> tuple[Any, ...]:
    """The options of a call that both operators take, in their order."""
    return call.is_causal, call.causal_alignment, call.window_left, call.window_right, call.scale


def _scales_of(kind: Any, scales: list[Tensor]) -> Any:
    if len(scales) != len(kind._fields):
        raise OptionError("scales", f"{len(scales)} tensors", f"{len(kind._fields)}, those of {kind.__name__}")
    return kind(*scales)


def _forward(run: Callable[[Fp8Forward], Fp8Output]) -> Callable[..., list[Tensor]]:
    def implementation(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: list[Tensor],
        seq_lens_q: Tensor | None,
        seq_lens_kv: Tensor | None,
        is_causal: bool,
        causal_alignment: str,
        window_left: int,
        window_right: int,
        scale: float | None,
        page_table: Tensor | None,
        page_table_v: Tensor | None,
        out_dtype: torch.dtype,
        with_lse: bool,
    ) -> list[Tensor]:
        call = ForwardArguments(
            q=q,
            k=k,
            v=v,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            window_left=window_left,
            window_right=window_right,
            scale=scale,
            with_lse=with_lse,
        )
        tables = arguments.tables_of(page_table, page_table_v)
        results = run(Fp8Forward(call, _scales_of(Fp8Scales, scales), out_dtype, tables))
        return [tensor for tensor in results if tensor is not None]

    return implementation


def _backward(run: Callable[[Fp8Backward], Fp8Gradients]) -> Callable[..., list[Tensor]]:
    def implementation(
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scales: list[Tensor],
        seq_lens_q: Tensor | None,
        seq_lens_kv: Tensor | None,
        is_causal: bool,
        causal_alignment: str,
        window_left: int,
        window_right: int,
        scale: float | None,
        deterministic: bool,
    ) -> list[Tensor]:
        call = ForwardArguments(
            q=q,
            k=k,
            v=v,
            seq_lens_q=seq_lens_q,
            seq_lens_kv=seq_lens_kv,
            is_causal=is_causal,
            causal_alignment=causal_alignment,
            window_left=window_left,
            window_right=window_right,
            scale=scale,
            deterministic=deterministic,
            with_lse=True,
        )
        backward = Fp8Backward(
            grad_out=grad_out, out=out, lse=lse, call=call, scales=_scales_of(Fp8BackwardScales, scales)
        )
        return list(run(backward))

    return implementation


_REST = (
    "Tensor[] scales, Tensor? seq_lens_q, Tensor? seq_lens_kv, bool is_causal, str causal_alignment, "
    "SymInt window_left, SymInt window_right, float? scale"
)
define(
    "sdpa_fp8_forward",
    f"Tensor q, Tensor k, Tensor v, {_REST}, Tensor? page_table, Tensor? page_table_v, ScalarType out_dtype, "
    "bool with_lse",
    "Tensor[]",
    _forward(launch.run_forward),
    _forward(run_forward_cpu),
    _forward(_run_forward_fake),
)
define(
    "sdpa_fp8_backward",
    f"Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_REST}, bool deterministic",
    "Tensor[]",
    _backward(launch.run_backward),
    _backward(run_backward_cpu),
    _backward(_run_backward_fake),
)


def check_fp8(of: Fp8Forward) -> None:
    """Checks that the CPU target's GPU would run a call of `sdpa_fp8`."""
    check_call(of, _strides_of_fp8, _plan_of_fp8)


def check_fp8_backward(of: Fp8Backward) -> None:
    """Checks that the CPU target's GPU would run a call of `sdpa_fp8_backward`."""
    check_call(of, _strides_of_fp8_backward, _plan_of_fp8_backward)


def _strides_of_fp8(of: Fp8Forward) -> None:
    memory.check_strides(of.call.q, of.call.k, of.call.v)
    check_offsets(q=of.call.q, k=of.call.k, v=of.call.v)


def _plan_of_fp8(of: Fp8Forward, target: Target) -> None:
    forward = plans.ForwardSpec.of(of)
    if not forward.problem.is_empty:
        known_issues.check(forward.key(target, None))


def _strides_of_fp8_backward(of: Fp8Backward) -> None:
    memory.check_strides(of.call.q, of.call.k, of.call.v)
    memory.check_strides_of("out", of.out)
    check_offsets(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)


def _plan_of_fp8_backward(of: Fp8Backward, target: Target) -> None:
    backward = plans.BackwardSpec.of(workarounds.readable(of))
    if not backward.problem.is_empty:
        known_issues.check(backward.part(target).key(target, None))


@register_flop_formula(torch.ops.cudnn_sdpa.sdpa_fp8_forward, get_raw=True)
def _count_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return flops_of_forward(*dense_sizes(q, k, v))


@register_flop_formula(torch.ops.cudnn_sdpa.sdpa_fp8_backward, get_raw=True)
def _count_backward(_grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return flops_of_backward(*dense_sizes(q, k, v))
