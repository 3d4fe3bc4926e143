"""The torch operators of dense attention: CUDA (cuDNN), CPU (reference) and fake implementations.

- ``cudnn_sdpa::sdpa_forward`` gives the output, ``sdpa_forward_lse`` also the log-sum-exp.
- ``sdpa_forward_out`` and ``sdpa_forward_lse_out`` write the output into a given tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, graphs, lookup, reference
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.calls import ForwardCall, Result, bind
from cudnn_sdpa.attention.forward import MIN_SCALE, Forward
from cudnn_sdpa.runtime.cache import plan_cache
from cudnn_sdpa.runtime.layouts import dense_stride_like
from cudnn_sdpa.runtime.plan import build_plan
from cudnn_sdpa.runtime.target import live_target


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """An output for `q` and `v`: dense, its dimensions in memory in the order of `q`."""
    shape = (*q.shape[:3], v.shape[3])
    return torch.empty_strided(shape, dense_stride_like(shape, q.shape, q.stride()), dtype=q.dtype, device=q.device)


def _scale(call: ForwardArguments) -> float:
    return call.q.shape[3] ** -0.5 if call.scale is None else float(call.scale)


def _run_cuda(call: ForwardArguments) -> Result:
    if call.scale is not None and call.scale < MIN_SCALE:
        return _run_cuda(_with_positive_scale(call))
    raw = lookup.signature(*call)
    prepared: ForwardCall | None = lookup.calls.get(raw)
    if prepared is None:
        _check_for_cuda(call)
        forward = Forward.of(call)
        if forward.is_empty:
            return _fill_empty(call)
        prepared = _prepare(forward, call.q.get_device(), _scale(call))
        lookup.calls.add(raw, prepared)
    return prepared(call.q, call.k, call.v, call.seq_lens_q, call.seq_lens_kv, call.out)


def _check_for_cuda(call: ForwardArguments) -> None:
    arguments.check(call)
    arguments.check_strides(call.q, call.k, call.v)
    arguments.check_memory(call.q, call.k, call.v, call.out)


def _with_positive_scale(call: ForwardArguments) -> ForwardArguments:
    """The same call with a scale that cuDNN computes right: the sign moves into a negated copy of q."""
    _check_for_cuda(call)
    if _scale(call) > -MIN_SCALE:
        return call._replace(scale=MIN_SCALE)
    out = new_output(call.q, call.v) if call.out is None else call.out  # in the memory order of q, not of its copy
    return call._replace(q=call.q.neg(), scale=-_scale(call), out=out)


def _prepare(forward: Forward, device: int, scale: float) -> ForwardCall:
    key = forward.key(live_target(device), device)
    return bind(forward, plan_cache.get(key, lambda key: build_plan(graphs.sdpa_forward, key)), scale)


def _fill_empty(call: ForwardArguments) -> Result:
    """No query or no key: zeros, and a log-sum-exp of nothing."""
    out = (new_output(call.q, call.v) if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    return out, torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device)


def _run_cpu(call: ForwardArguments) -> Result:
    arguments.check(call)
    arguments.check_memory(call.q, call.k, call.v, call.out)
    seen = reference.visible(
        call.q.shape[2],
        call.k.shape[2],
        is_causal=call.is_causal,
        causal_alignment=call.causal_alignment,
        seq_lens_q=call.seq_lens_q,
        seq_lens_kv=call.seq_lens_kv,
    )
    result, lse = reference.attention(call.q, call.k, call.v, seen, _scale(call))
    out = (new_output(call.q, call.v) if call.out is None else call.out).copy_(result)
    return (out, lse.float()) if call.with_lse else out


def _run_fake(call: ForwardArguments) -> Result:
    arguments.check(call)
    out = new_output(call.q, call.v) if call.out is None else call.out
    return (out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)) if call.with_lse else out


_library: Any = torch.library.Library("cudnn_sdpa", "DEF")  # type: ignore[no-untyped-call]
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? seq_lens_q, Tensor? seq_lens_kv, "
    "bool is_causal, str causal_alignment, float? scale"
)


_Implementation = Callable[[ForwardArguments], Result]


def _register(name: str, inputs: str, returns: str, adapt: Callable[[_Implementation], Callable[..., Any]]) -> None:
    _library.define(f"{name}({inputs}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, adapt(_run_cuda), "CUDA")
    _library.impl(name, adapt(_run_cpu), "CPU")
    torch.library.register_fake(f"cudnn_sdpa::{name}", adapt(_run_fake), lib=_library)


def _pack(inputs: tuple[Any, ...], *, with_lse: bool, out: Tensor | None = None) -> ForwardArguments:
    return ForwardArguments._make((*inputs, with_lse, out))


def _to_result(run: _Implementation) -> Callable[..., Any]:
    return lambda *inputs: run(_pack(inputs, with_lse=False))


def _to_result_and_lse(run: _Implementation) -> Callable[..., Any]:
    return lambda *inputs: run(_pack(inputs, with_lse=True))


def _to_nothing(run: _Implementation) -> Callable[..., Any]:
    def implementation(*inputs: Any) -> None:
        run(_pack(inputs[:-1], with_lse=False, out=inputs[-1]))

    return implementation


def _to_lse(run: _Implementation) -> Callable[..., Any]:
    return lambda *inputs: run(_pack(inputs[:-1], with_lse=True, out=inputs[-1]))[1]


_register("sdpa_forward", _INPUTS, "Tensor", _to_result)
_register("sdpa_forward_lse", _INPUTS, "(Tensor, Tensor)", _to_result_and_lse)
_register("sdpa_forward_out", f"{_INPUTS}, Tensor(a!) out", "()", _to_nothing)
_register("sdpa_forward_lse_out", f"{_INPUTS}, Tensor(a!) out", "Tensor", _to_lse)
