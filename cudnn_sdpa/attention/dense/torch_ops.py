"""The torch operators of dense attention: CUDA (cuDNN), CPU (reference), fake and autograd implementations.

- ``cudnn_sdpa::sdpa_forward`` returns the output, ``sdpa_forward_lse`` also the LSE; only the latter is differentiable.
- ``sdpa_forward_out`` and ``sdpa_forward_lse_out`` write the output into a given tensor.
- ``sdpa_backward`` returns the needed gradients in the order q, k, v, attn_mask, sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cudnn_sdpa.attention import arguments, memory, reference, value_checks
from cudnn_sdpa.attention.arguments import MIN_SCALE, ForwardArguments, Result
from cudnn_sdpa.attention.cpu_checks import check_call, check_strides_of_dense
from cudnn_sdpa.attention.dense import large_backward, launch, launch_backward, tiers
from cudnn_sdpa.attention.dense.launch import ForwardCall
from cudnn_sdpa.attention.dense.launch_backward import BackwardArguments, Needs
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.attention.memory import new_output
from cudnn_sdpa.engine.memory import like_in_memory, multiplied
from cudnn_sdpa.engine.torch_ops import define
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target, live_target

#: Smallest scale with which cuDNN computes the gradient of attn_mask right in float16. Its kernels round that gradient
#: multiplied by the scale and divide afterwards (seen on 9.19: 10 % off at 1e-6, 0 at 1e-8).
MIN_SCALE_OF_MASK_GRADIENT = 2**-6

_Implementation = Callable[[ForwardArguments], Result]


def run_cuda(call: ForwardArguments) -> Result:
    """A forward pass on the GPU."""
    if value_checks.enabled:
        _check_values(call)
    if call.scale is not None and call.scale < MIN_SCALE:
        return run_cuda(_with_positive_scale(call))
    raw = launch.signature(call)
    prepared: ForwardCall | None = launch.calls.get(raw)
    if prepared is None or (call.deterministic and prepared.may_be_replaced):
        _check_for_cuda(call)
        forward = ForwardSpec.of(call)
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
    """The same call with a positive scale, which cuDNN computes right: the sign moves into a negated copy of q."""
    _check_for_cuda(call)
    out = new_output(call.q, call.v) if call.out is None else call.out  # in the memory order of q, not of its copy
    if call.scale_value > -MIN_SCALE:
        return call._replace(q=like_in_memory(call.q).zero_(), scale=1.0, out=out)
    return call._replace(q=multiplied(call.q, -1.0), scale=-call.scale_value, out=out)


def _fill_empty(call: ForwardArguments) -> Result:
    """No query or no key: an output of zeros, and an LSE of the sinks alone."""
    out = (new_output(call.q, call.v) if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device)
    if call.sinks is not None:
        lse.copy_(call.sinks.view(1, -1, 1).expand_as(lse))
    return out, lse


def _check_values(call: ForwardArguments) -> None:
    value_checks.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.k.shape[2])


def run_cpu(call: ForwardArguments) -> Result:
    """A forward pass by the reference; on a GPU for a mask over one key, which cuDNN misreads."""
    arguments.check(call)
    _check_values(call)
    check_dense(call)
    memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)
    result, lse = reference.attention(call)
    out = (new_output(call.q, call.v) if call.out is None else call.out).copy_(result)
    return (out, lse.float()) if call.with_lse else out


def _run_fake(call: ForwardArguments) -> Result:
    arguments.check(call)
    out = new_output(call.q, call.v) if call.out is None else call.out
    return (out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)) if call.with_lse else out


def run_backward_cuda(args: BackwardArguments) -> list[Tensor]:
    """A backward pass on the GPU."""
    args = args._replace(
        grad_out=launch_backward.readable(args.grad_out, args.out), lse=memory.aligned("lse", args.lse)
    )
    prepared = launch_backward.find(args)
    if prepared is not None:
        return prepared(args)
    call = args.call
    problem = DenseSpec.of(call)
    if problem.is_empty:
        return _select_needed(args, [tensor.zero_() for tensor in _new_gradients(call)])
    if problem.is_single or problem.has_no_plan:
        return run_backward_cpu(args)
    if large_backward.is_too_large(*call.qkv, args.out, args.grad_out):
        large_backward.check(call, mask_gradient=args.needs.attn_mask)
        return large_backward.gradients(args, run_backward_cuda)
    if call.scale is not None and call.scale < MIN_SCALE:
        return _negative_scale_backward(args)
    if args.needs.attn_mask and loses_mask_gradient(call):
        return _scaled_queries_backward(args)
    return launch_backward.prepare(args)(args)


def loses_mask_gradient(call: ForwardArguments) -> bool:
    """Whether cuDNN would round the gradient of attn_mask to zero, so that the scale must move into a copy of q."""
    return call.q.dtype == torch.float16 and MIN_SCALE <= abs(call.scale_value) < MIN_SCALE_OF_MASK_GRADIENT


def check_gradient(call: ForwardArguments) -> None:
    """Refuses a call whose backward pass is known to be unsupported, already in the forward pass.

    Raises:
        UnsupportedError: With every reason.
    """
    if not call.q.is_cuda:
        arguments.check(call)
        check_dense_gradient(call)
        return
    mask_gradient = call.attn_mask is not None and call.attn_mask.requires_grad
    name = (launch.signature(call._replace(with_lse=True)), mask_gradient, call.deterministic)
    if name in launch.differentiable:
        return
    _check_for_cuda(call)
    device = call.q.get_device()
    large_backward.check_gradient(call, live_target(device), device)
    if len(launch.differentiable) > MAX_REMEMBERED:
        launch.differentiable.clear()
    launch.differentiable.add(name)


MAX_REMEMBERED = 8192


def forward_runner(q: Tensor) -> _Implementation:
    """The forward implementation for the device of `q`."""
    return run_cuda if q.is_cuda else _run_fake if q.is_meta else run_cpu


def backward_runner(q: Tensor) -> Callable[[BackwardArguments], list[Tensor]]:
    """The backward implementation for the device of `q`."""
    return run_backward_cuda if q.is_cuda else _run_backward_fake if q.is_meta else run_backward_cpu


def _negative_scale_backward(args: BackwardArguments) -> list[Tensor]:
    call = args.call
    if call.scale_value > -MIN_SCALE:  # scores that are all 0 do not depend on q and k
        zeros = like_in_memory(call.q).zero_()  # with a tiny scale, cuDNN rounds the gradient of attn_mask to zero
        result = run_backward_cuda(args._replace(call=call._replace(q=zeros, scale=1.0)))
        for gradient in result[: args.needs.q + args.needs.k]:  # those of q and k come first
            gradient.zero_()
        return result
    result = run_backward_cuda(args._replace(call=call._replace(q=multiplied(call.q, -1.0), scale=-call.scale_value)))
    if args.needs.q:
        result[0].neg_()
    return result


def _scaled_queries_backward(args: BackwardArguments) -> list[Tensor]:
    scale = args.call.scale_value
    scaled = multiplied(args.call.q, scale)
    result = run_backward_cuda(args._replace(call=args.call._replace(q=scaled, scale=1.0)))
    if args.needs.q:
        result[0].mul_(scale)
    return result


def run_backward_cpu(args: BackwardArguments) -> list[Tensor]:
    """A backward pass by the reference; on a GPU for one query on one key, which cuDNN does not support."""
    call = args.call
    exact = reference.gradients(args.grad_out, args.out, call, args.lse)
    results = []
    for new, gradient in zip(_new_gradients(call), (g for g in exact if g is not None), strict=True):
        shape = (1,) * (gradient.dim() - new.dim()) + tuple(new.shape)  # only a mask's gradient is larger
        results.append(new.copy_(gradient.sum_to_size(shape).reshape(new.shape)))
    return _select_needed(args, results)


def _run_backward_fake(args: BackwardArguments) -> list[Tensor]:
    return _select_needed(args, _new_gradients(args.call))


def _new_gradients(call: ForwardArguments) -> list[Tensor]:
    """Uninitialized gradients of all differentiable inputs, each in the memory order of its input."""
    optional = [torch.empty_like(tensor) for tensor in (call.attn_mask, call.sinks) if tensor is not None]
    return [*map(like_in_memory, call.qkv), *optional]


def _select_needed(args: BackwardArguments, gradients: list[Tensor]) -> list[Tensor]:
    remaining, inputs = iter(gradients), args.call.differentiable
    pairs = [(need, next(remaining)) for need, tensor in zip(args.needs, inputs, strict=True) if tensor is not None]
    return [gradient for need, gradient in pairs if need]


_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, Tensor? seq_lens_q, Tensor? seq_lens_kv, "
    "Tensor? rng"
)
_OPTIONS = (
    "bool is_causal, str causal_alignment, SymInt window_left, SymInt window_right, float? scale, float dropout_p, "
    "float? softcap, bool alibi, bool deterministic"
)


def _register(name: str, inputs: str, returns: str, adapt: Callable[[_Implementation], Callable[..., object]]) -> None:
    define(name, inputs, returns, adapt(run_cuda), adapt(run_cpu), adapt(_run_fake))


def _to_result(run: _Implementation) -> Callable[..., Result]:
    return lambda *inputs: run(ForwardArguments.of_operator(inputs))


def _to_result_and_lse(run: _Implementation) -> Callable[..., Result]:
    return lambda *inputs: run(ForwardArguments.of_operator(inputs, with_lse=True))


def _to_nothing(run: _Implementation) -> Callable[..., None]:
    def implementation(*inputs: Any) -> None:
        *call, out = inputs
        run(ForwardArguments.of_operator(call, out=out))

    return implementation


def _to_lse(run: _Implementation) -> Callable[..., Tensor]:
    def implementation(*inputs: Any) -> Tensor:
        *call, out = inputs
        _, lse = run(ForwardArguments.of_operator(call, with_lse=True, out=out))
        return lse

    return implementation


def _to_gradients(run: Callable[[BackwardArguments], list[Tensor]]) -> Callable[..., list[Tensor]]:
    def implementation(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
        *call_inputs, needs = inputs
        call = ForwardArguments.of_operator(call_inputs, with_lse=True)
        return run(
            BackwardArguments(
                grad_out=grad_out, out=out, lse=lse, call=call, deterministic=call.deterministic, needs=Needs(*needs)
            )
        )

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


# Floating-point operations of a call, for `torch.utils.flop_counter.FlopCounterMode`.


def flops_of_forward(scores: int, head_dim: int, head_dim_v: int) -> int:
    """FLOPs of the scores, and of the weights times the values."""
    return 2 * scores * (head_dim + head_dim_v)


def flops_of_backward(scores: int, head_dim: int, head_dim_v: int) -> int:
    """FLOPs of the recomputed scores, and of the gradients of the weights, v, q and k."""
    return 2 * scores * (3 * head_dim + 2 * head_dim_v)


def dense_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """The number of scores, and the head dims."""
    batch, heads, sq, head_dim = q.shape
    return batch * heads * sq * k.shape[2], head_dim, v.shape[3]


@register_flop_formula(
    [
        torch.ops.cudnn_sdpa.sdpa_forward,
        torch.ops.cudnn_sdpa.sdpa_forward_lse,
        torch.ops.cudnn_sdpa.sdpa_forward_out,
        torch.ops.cudnn_sdpa.sdpa_forward_lse_out,
    ],
    get_raw=True,
)
def _count_forward(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> int:
    return flops_of_forward(*dense_sizes(q, k, v))


@register_flop_formula(torch.ops.cudnn_sdpa.sdpa_backward, get_raw=True)
def _count_backward(*inputs: Any, **_: object) -> int:
    _grad_out, _out, _lse, q, k, v, *_others = inputs
    return flops_of_backward(*dense_sizes(q, k, v))


def check_dense(call: ForwardArguments) -> None:
    """Refuses a call of `sdpa` that the GPU would refuse.

    Raises:
        LayoutError: cuDNN cannot read the strides or the storage offset.
        UnsupportedError: cuDNN has no kernel for it.
    """
    if call.is_for_cudnn:
        check_call(call, check_strides_of_dense, _plan_of_dense)


def check_dense_gradient(call: ForwardArguments) -> None:
    """The same for the gradients of `sdpa`."""
    if call.is_for_cudnn:
        check_call(call, check_strides_of_dense, _gradient_of_dense)


def _plan_of_dense(call: ForwardArguments, target: Target) -> None:
    forward = ForwardSpec.of(call)
    if not (forward.is_empty or forward.problem.has_no_plan):
        known_issues.check(forward.key(target, None))


def _gradient_of_dense(call: ForwardArguments, target: Target) -> None:
    large_backward.check_gradient(call, target, None)
