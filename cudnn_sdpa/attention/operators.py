"""The torch operators of dense attention: CUDA (cuDNN), CPU (reference), fake and autograd implementations.

- ``cudnn_sdpa::sdpa_forward`` gives the output, ``sdpa_forward_lse`` also the log-sum-exp; only the latter can be
  differentiated.
- ``sdpa_forward_out`` and ``sdpa_forward_lse_out`` write the output into a given tensor.
- ``sdpa_backward`` gives those gradients that are wanted, in the order q, k, v, attn_mask, sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, backward, cpu_checks, debug, lookup, memory, pieces, reference, tiers
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.backward import BackwardArguments, Needs
from cudnn_sdpa.attention.calls import ForwardCall, Result
from cudnn_sdpa.attention.passes import Forward
from cudnn_sdpa.attention.problem import Problem
from cudnn_sdpa.runtime.layouts import dense_stride_like
from cudnn_sdpa.runtime.target import live_target

#: Smallest scale that is handed to cuDNN; every float16 or bfloat16 score is 0 in all digits below it. Its kernels hide
#: keys by a score of -inf before they scale, so that with a scale of 0 or less a hidden key becomes NaN or +inf (seen
#: on cuDNN 9.19: wrong numbers).
MIN_SCALE = 1e-30

#: Smallest scale with which cuDNN computes the gradient of attn_mask in float16. Its kernels round that gradient while
#: it is multiplied by the scale, and divide it by the scale afterwards (seen on 9.19: 10 % off at 1e-6, 0 at 1e-8).
MIN_SCALE_OF_MASK_GRADIENT = 2**-6

_Implementation = Callable[[ForwardArguments], Result]


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """An output for `q` and `v`: dense, its dimensions in memory in the order of `q`."""
    shape = (*q.shape[:3], v.shape[3])
    return torch.empty_strided(shape, dense_stride_like(shape, q.shape, q.stride()), dtype=q.dtype, device=q.device)


def like_in_memory(tensor: Tensor) -> Tensor:
    """A dense tensor for the gradient of `tensor`, its dimensions in memory in the same order."""
    if tensor.dim() < 3 or tensor.stride(-1) == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)


def run_cuda(call: ForwardArguments) -> Result:
    """A forward pass on the GPU."""
    if debug.enabled:
        _check_values(call)
    if call.scale is not None and call.scale < MIN_SCALE:
        return run_cuda(_with_positive_scale(call))
    raw = lookup.signature(call)
    prepared: ForwardCall | None = lookup.calls.get(raw)
    if prepared is None or (call.deterministic and prepared.may_be_replaced):
        _check_for_cuda(call)
        forward = Forward.of(call)
        if forward.is_empty:
            return _fill_empty(call)
        if forward.problem.has_no_plan:
            return run_cpu(call)
        prepared = tiers.prepare(forward, call, raw)
    return prepared(call)


def _check_for_cuda(call: ForwardArguments) -> None:
    arguments.check(call)
    memory.check_strides(call.q, call.k, call.v)
    memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)


def _with_positive_scale(call: ForwardArguments) -> ForwardArguments:
    """The same call with a scale that cuDNN computes right: the sign moves into a negated copy of q."""
    _check_for_cuda(call)
    out = new_output(call.q, call.v) if call.out is None else call.out  # in the memory order of q, not of its copy
    if call.scale_value > -MIN_SCALE:
        return call._replace(q=torch.zeros_like(call.q), scale=1.0, out=out)
    return call._replace(q=call.q.neg(), scale=-call.scale_value, out=out)


def _fill_empty(call: ForwardArguments) -> Result:
    """No query or no key: zeros, and a log-sum-exp of nothing but the sinks."""
    out = (new_output(call.q, call.v) if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device)
    if call.sinks is not None:
        lse.copy_(call.sinks.view(1, -1, 1).expand_as(lse))
    return out, lse


def _check_values(call: ForwardArguments) -> None:
    debug.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    debug.check_lengths("seq_lens_kv", call.seq_lens_kv, call.k.shape[2])


def run_cpu(call: ForwardArguments) -> Result:
    """A forward pass by the reference; on a GPU for what cuDNN misreads."""
    arguments.check(call)
    _check_values(call)
    cpu_checks.check_dense(call)
    memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)
    result, lse = reference.attention(call)
    out = (new_output(call.q, call.v) if call.out is None else call.out).copy_(result)
    return (out, lse.float()) if call.with_lse else out


def _run_fake(call: ForwardArguments) -> Result:
    arguments.check(call)
    out = new_output(call.q, call.v) if call.out is None else call.out
    return (out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)) if call.with_lse else out


def run_backward_cuda(of: BackwardArguments) -> list[Tensor]:
    """A backward pass on the GPU."""
    of = of._replace(grad_out=backward.readable(of.grad_out, of.out), lse=memory.aligned("lse", of.lse))
    prepared = backward.find(of)
    if prepared is not None:
        return prepared(of)
    call = of.call
    problem = Problem.of(call)
    if problem.is_empty:
        return _wanted(of, [tensor.zero_() for tensor in _new_gradients(call)])
    if problem.is_single or problem.has_no_plan:
        return run_backward_cpu(of)
    if pieces.is_too_large(*call[:3], of.out, of.grad_out):
        pieces.check(call, mask_gradient=of.needs.attn_mask)
        return pieces.gradients(of, run_backward_cuda)
    if call.scale is not None and call.scale < MIN_SCALE:
        return _negative_scale_backward(of)
    if of.needs.attn_mask and loses_mask_gradient(call):
        return _scaled_queries_backward(of)
    return backward.prepare(of)(of)


def loses_mask_gradient(call: ForwardArguments) -> bool:
    """Whether cuDNN would round the gradient of attn_mask away, so that the scale must move into a copy of q."""
    return call.q.dtype == torch.float16 and MIN_SCALE <= abs(call.scale_value) < MIN_SCALE_OF_MASK_GRADIENT


def check_gradient(call: ForwardArguments) -> None:
    """Refuses a call whose backward pass is known to have no kernel: now, and not when the loss is differentiated.

    Raises:
        UnsupportedError: With every reason.
    """
    if not call.q.is_cuda:
        arguments.check(call)
        cpu_checks.check_dense_gradient(call)
        return
    of_mask = call.attn_mask is not None and call.attn_mask.requires_grad
    name = (lookup.signature(call._replace(with_lse=True)), of_mask, call.deterministic)
    if name in lookup.differentiable:
        return
    _check_for_cuda(call)
    device = call.q.get_device()
    pieces.check_gradient(call, live_target(device), device)
    if len(lookup.differentiable) > MOST_REMEMBERED:
        lookup.differentiable.clear()
    lookup.differentiable.add(name)


MOST_REMEMBERED = 8192


def forward_runner(q: Tensor) -> _Implementation:
    """What computes a forward pass where `q` is; where there is no memory, it only says what the result looks like."""
    return run_cuda if q.is_cuda else _run_fake if q.is_meta else run_cpu


def backward_runner(q: Tensor) -> Callable[[BackwardArguments], list[Tensor]]:
    """The same of a backward pass."""
    return run_backward_cuda if q.is_cuda else _run_backward_fake if q.is_meta else run_backward_cpu


def _negative_scale_backward(of: BackwardArguments) -> list[Tensor]:
    call = of.call
    if call.scale_value > -MIN_SCALE:  # scores that are all 0 do not depend on q and k
        zeros = like_in_memory(call.q).zero_()  # with a tiny scale, cuDNN loses the gradient of attn_mask
        result = run_backward_cuda(of._replace(call=call._replace(q=zeros, scale=1.0)))
        for gradient in result[: of.needs.q + of.needs.k]:
            gradient.zero_()
        return result
    negated = like_in_memory(call.q).copy_(call.q).neg_()
    result = run_backward_cuda(of._replace(call=call._replace(q=negated, scale=-call.scale_value)))
    if of.needs.q:
        result[0].neg_()
    return result


def _scaled_queries_backward(of: BackwardArguments) -> list[Tensor]:
    scale = of.call.scale_value
    scaled = like_in_memory(of.call.q).copy_(of.call.q).mul_(scale)
    result = run_backward_cuda(of._replace(call=of.call._replace(q=scaled, scale=1.0)))
    if of.needs.q:
        result[0].mul_(scale)
    return result


def run_backward_cpu(of: BackwardArguments) -> list[Tensor]:
    """A backward pass by the reference; on a GPU for what is too small for cuDNN."""
    call = of.call
    exact = reference.gradients(of.grad_out, of.out, call, of.lse)
    results = []
    for new, gradient in zip(_new_gradients(call), (g for g in exact if g is not None), strict=True):
        shape = (1,) * (gradient.dim() - new.dim()) + tuple(new.shape)  # only a mask's gradient is larger
        results.append(new.copy_(gradient.sum_to_size(shape).reshape(new.shape)))
    return _wanted(of, results)


def _run_backward_fake(of: BackwardArguments) -> list[Tensor]:
    return _wanted(of, _new_gradients(of.call))


def _new_gradients(call: ForwardArguments) -> list[Tensor]:
    """Memory for the gradients by all tensors that can have one, each in the memory order of its tensor."""
    sides = [torch.empty_like(tensor) for tensor in (call.attn_mask, call.sinks) if tensor is not None]
    return [*map(like_in_memory, call[:3]), *sides]


def _wanted(of: BackwardArguments, gradients: list[Tensor]) -> list[Tensor]:
    needs = iter(gradients)
    call = of.call
    present = (call.q, call.k, call.v, call.attn_mask, call.sinks)
    pairs = [(need, next(needs)) for need, tensor in zip(of.needs, present, strict=True) if tensor is not None]
    return [gradient for need, gradient in pairs if need]


_library: Any = torch.library.Library("cudnn_sdpa", "DEF")  # type: ignore[no-untyped-call]
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, Tensor? seq_lens_q, Tensor? seq_lens_kv, "
    "Tensor? rng"
)
_OPTIONS = (
    "bool is_causal, str causal_alignment, SymInt window_left, SymInt window_right, float? scale, float dropout_p, "
    "float? softcap, bool alibi, bool deterministic"
)


def define(name: str, inputs: str, returns: str, cuda: Any, cpu: Any, fake: Any) -> None:
    """Registers the operator ``cudnn_sdpa::name`` with its three implementations."""
    _library.define(f"{name}({inputs}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, cuda, "CUDA")
    _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"cudnn_sdpa::{name}", fake, lib=_library)


def _register(name: str, inputs: str, returns: str, adapt: Callable[[_Implementation], Callable[..., Any]]) -> None:
    define(name, inputs, returns, adapt(run_cuda), adapt(run_cpu), adapt(_run_fake))


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


def _to_gradients(run: Callable[[BackwardArguments], list[Tensor]]) -> Callable[..., Any]:
    def implementation(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
        call = _pack(inputs[:-1], with_lse=True)
        return run(BackwardArguments(grad_out, out, lse, call, call.deterministic, Needs(*inputs[-1])))

    return implementation


_INPUTS = f"{_TENSORS}, {_OPTIONS}"
_register("sdpa_forward", _INPUTS, "Tensor", _to_result)
_register("sdpa_forward_lse", _INPUTS, "(Tensor, Tensor)", _to_result_and_lse)
_register("sdpa_forward_out", f"{_INPUTS}, Tensor(a!) out", "()", _to_nothing)
_register("sdpa_forward_lse_out", f"{_INPUTS}, Tensor(a!) out", "Tensor", _to_lse)
define(
    "sdpa_backward",
    f"Tensor grad_out, Tensor out, Tensor lse, {_INPUTS}, bool[] needs",
    "Tensor[]",
    _to_gradients(run_backward_cuda),
    _to_gradients(run_backward_cpu),
    _to_gradients(_run_backward_fake),
)
