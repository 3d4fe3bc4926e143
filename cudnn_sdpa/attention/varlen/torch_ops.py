"""The torch operators of attention over packed sequences: CUDA (cuDNN), CPU (reference) and fake implementations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from cudnn_sdpa.attention import memory, reference, value_checks
from cudnn_sdpa.attention.arguments import MIN_SCALE, ForwardArguments, Result
from cudnn_sdpa.attention.cpu_checks import check_call, check_strides_of_dense
from cudnn_sdpa.attention.dense import large_backward
from cudnn_sdpa.attention.dense.torch_ops import flops_of_backward, flops_of_forward
from cudnn_sdpa.attention.memory import like_in_memory
from cudnn_sdpa.attention.varlen import arguments, launch
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.launch import VarlenBackwardArguments
from cudnn_sdpa.engine.torch_ops import define
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import TensorLayout, dense_like
from cudnn_sdpa.graph.target import Target


def forward_cuda(call: VarlenArguments) -> Result:
    """A forward pass on the GPU."""
    if value_checks.enabled:
        _check_values(call)
    if call.scale is not None and call.scale < MIN_SCALE:
        sign = 0.0 if call.scale > -MIN_SCALE else -1.0
        out = launch.new_output(call) if call.out is None else call.out  # in the memory order of q
        return forward_cuda(call._replace(q=call.q * sign, scale=max(-call.scale, MIN_SCALE), out=out))
    dense = call.as_dense()
    memory.check_strides(dense.q, dense.k, dense.v)
    memory.check_memory(call.q, call.k, call.v, call.out)
    if call.out is not None and not call.out.is_inference():
        torch.autograd.graph.increment_version(call.out)
    if 0 in call.q.shape or 0 in call.k.shape:
        return _empty(call)
    return launch.run_forward(call)


def _empty(call: VarlenArguments) -> Result:
    out = (launch.new_output(call) if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    lse = torch.full(call.q.shape[:2], -torch.inf, dtype=torch.float32, device=out.device)
    return out, lse if call.sinks is None else torch.maximum(lse, call.sinks)


def backward_cuda(args: VarlenBackwardArguments) -> list[Tensor]:
    """A backward pass on the GPU."""
    call = args.call
    if 0 in call.q.shape or 0 in call.k.shape:
        return [
            like_in_memory(x).zero_()
            for x in (*call[:3], *((call.sinks,) if args.sink_gradient else ()))
            if x is not None
        ]
    if large_backward.is_too_large(*call[:3], args.out, args.grad_out):
        return _in_pieces(args)
    if call.scale is not None and call.scale < MIN_SCALE:
        sign = 0.0 if call.scale > -MIN_SCALE else -1.0
        positive = call._replace(q=call.q * sign, scale=max(-call.scale, MIN_SCALE))
        grad_q, grad_k, *others = launch.run_backward(args._replace(call=positive))
        return [grad_q * sign, grad_k * abs(sign), *others]
    return launch.run_backward(args)


def check_gradient(call: VarlenArguments) -> None:
    """Refuses a call whose backward pass is known to have no kernel: now, and not when the loss is differentiated.

    Raises:
        UnsupportedError: With every reason.
    """
    if not call.q.is_cuda:
        check_varlen_gradient(call)
        return
    if large_backward.is_too_large(*call[:3]):
        large_backward.check(call.as_dense(), mask_gradient=False)
    launch.check_gradient(call)


def _in_pieces(args: VarlenBackwardArguments) -> list[Tensor]:
    """The gradients of a call that is too large for one plan: some heads at a time."""
    call, dense = args.call, args.call.as_dense()
    large_backward.check(dense, mask_gradient=False)

    def run(piece: large_backward.Part) -> list[Tensor]:
        rows = {"q": call.q, "grad_out": args.grad_out, "out": args.out, "lse": args.lse}
        q, grad_out, out, lse = (memory.aligned(name, x[:, piece.heads]) for name, x in rows.items())
        k, v = (large_backward.compact(x[:, piece.heads_kv]) for x in (call.k, call.v))
        sinks = None if call.sinks is None else call.sinks[piece.heads]
        part = call._replace(q=q, k=k, v=v, sinks=sinks)
        found = backward_cuda(args._replace(grad_out=grad_out, out=out, lse=lse, call=part))
        return [*(x.transpose(0, 1).unsqueeze(0) for x in found[:3]), *found[3:]]

    found = large_backward.merge(dense[:3], run, sinks=args.sink_gradient)
    return [*(x[0].transpose(0, 1) for x in found[:3]), *found[3:]]


def forward_runner(q: Tensor) -> Any:
    """What computes a forward pass where `q` is; where there is no memory, it only says what the result looks like."""
    return forward_cuda if q.is_cuda else _forward_fake if q.is_meta else forward_cpu


def backward_runner(q: Tensor) -> Any:
    """The same of a backward pass."""
    return backward_cuda if q.is_cuda else _backward_fake if q.is_meta else backward_cpu


def _check_values(call: VarlenArguments) -> None:
    value_checks.check_offsets("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0], call.max_seqlen_q)
    value_checks.check_offsets("cu_seqlens_kv", call.cu_seqlens_kv, call.k.shape[0], call.max_seqlen_kv)


def _sequences(call: VarlenArguments) -> list[tuple[slice, slice]]:
    offsets_q, offsets_kv = call.cu_seqlens_q.tolist(), call.cu_seqlens_kv.tolist()
    pairs = zip(offsets_q, offsets_q[1:], offsets_kv, offsets_kv[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def _one(call: VarlenArguments, rows: slice, columns: slice, number: int) -> ForwardArguments:
    """One sequence as a dense call of the reference."""
    part = call._replace(q=call.q[rows], k=call.k[columns], v=call.v[columns], out=None)
    return part.as_dense()._replace(rng=None if call.rng is None else call.rng + number)


def forward_cpu(call: VarlenArguments) -> Result:
    """A forward pass by the reference, one sequence after the other."""
    arguments.check(call)
    _check_values(call)
    check_varlen(call)
    memory.check_memory(call.q, call.k, call.v, call.out)
    out, lse = _empty(call._replace(with_lse=True))
    for number, (rows, columns) in enumerate(_sequences(call)):
        of_one, lse_of_one = reference.attention(_one(call, rows, columns, number))
        out[rows] = of_one[0].transpose(0, 1).to(out.dtype)
        lse[rows] = lse_of_one[0].transpose(0, 1).float()
    return (out, lse) if call.with_lse else out


def backward_cpu(args: VarlenBackwardArguments) -> list[Tensor]:
    """A backward pass by the reference, one sequence after the other."""
    call = args.call
    gradients = [like_in_memory(tensor).zero_() for tensor in call[:3]]
    grad_sinks = torch.zeros(call.q.shape[1], dtype=torch.float64, device=call.q.device)
    for number, (rows, columns) in enumerate(_sequences(call)):
        grad_out, out, lse = (x[rows].transpose(0, 1).unsqueeze(0) for x in (args.grad_out, args.out, args.lse))
        *found, _, by_sinks = reference.gradients(grad_out, out, _one(call, rows, columns, number), lse)
        for whole, part, where in zip(gradients, found, (rows, columns, columns), strict=True):
            whole[where] = part[0].transpose(0, 1).to(whole.dtype)
        grad_sinks += 0 if by_sinks is None else by_sinks
    return [*gradients, *([grad_sinks.float()] if args.sink_gradient else [])]


def _forward_fake(call: VarlenArguments) -> Result:
    arguments.check(call)
    out = launch.new_output(call) if call.out is None else call.out
    return (out, call.q.new_empty(call.q.shape[:2], dtype=torch.float32)) if call.with_lse else out


def _backward_fake(args: VarlenBackwardArguments) -> list[Tensor]:
    sinks = args.call.sinks if args.sink_gradient else None
    return [like_in_memory(x) for x in (*args.call[:3], sinks) if x is not None]


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_kv, Tensor? rng, "
    "SymInt max_seqlen_q, SymInt max_seqlen_kv, bool is_causal, str causal_alignment, SymInt window_left, "
    "SymInt window_right, float? scale, float dropout_p, float? softcap, bool shared_cu_seqlens, bool deterministic"
)


def _plain(run: Any) -> Any:
    return lambda *inputs: run(VarlenArguments._make((*inputs, False, None)))


def _with_lse(run: Any) -> Any:
    return lambda *inputs: run(VarlenArguments._make((*inputs, True, None)))


def _into_out(run: Any) -> Any:
    return lambda *inputs: run(VarlenArguments._make((*inputs[:-1], True, inputs[-1])))[1]


def _backward(run: Any) -> Any:
    def implementation(grad_out: Tensor, out: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
        call = VarlenArguments._make((*inputs[:-1], True, None))
        found: list[Tensor] = run(VarlenBackwardArguments(grad_out, out, lse, call, inputs[-1]))
        return found

    return implementation


for _name, _inputs, _returns, _adapt in (
    ("varlen_forward", _INPUTS, "Tensor", _plain),
    ("varlen_forward_lse", _INPUTS, "(Tensor, Tensor)", _with_lse),
    ("varlen_forward_out", f"{_INPUTS}, Tensor(a!) out", "Tensor", _into_out),
):
    define(_name, _inputs, _returns, _adapt(forward_cuda), _adapt(forward_cpu), _adapt(_forward_fake))
define(
    "varlen_backward",
    f"Tensor grad_out, Tensor out, Tensor lse, {_INPUTS}, bool sink_gradient",
    "Tensor[]",
    _backward(backward_cuda),
    _backward(backward_cpu),
    _backward(_backward_fake),
)


def check_varlen(call: VarlenArguments) -> None:
    """The same of `sdpa_varlen`."""
    if call.is_for_cudnn:
        check_call(call, _strides_of_varlen, _plan_of_varlen)


def check_varlen_gradient(call: VarlenArguments) -> None:
    """The same of its gradients."""
    if call.is_for_cudnn:
        check_call(call, _strides_of_varlen, _gradient_of_varlen)


def _strides_of_varlen(call: VarlenArguments) -> None:
    check_strides_of_dense(call.as_dense())


def _is_empty(call: VarlenArguments) -> bool:
    return 0 in call.q.shape or 0 in call.k.shape


def _plan_of_varlen(call: VarlenArguments, target: Target) -> None:
    if not _is_empty(call):
        key = launch.packed(call).forward_key(launch.output_layout(call), call.with_lse, target, None)
        known_issues.check(key)


def _gradient_of_varlen(call: VarlenArguments, target: Target) -> None:
    if _is_empty(call):
        return
    if large_backward.is_too_large(*call[:3]):
        large_backward.check(call.as_dense(), mask_gradient=False)
    out, q = launch.output_layout(call), dense_like(TensorLayout.of(call.q))  # others are copied
    call = call._replace(q=torch.empty_strided(q.shape, q.stride, dtype=q.dtype, device="meta"))
    known_issues.check(launch.packed(call).backward_key(out, out, call.deterministic, target, None))


@register_flop_formula(
    [
        torch.ops.cudnn_sdpa.varlen_forward,
        torch.ops.cudnn_sdpa.varlen_forward_lse,
        torch.ops.cudnn_sdpa.varlen_forward_out,
    ],
    get_raw=True,
)
def _count_forward(*inputs: Any, **_: Any) -> int:
    q, _k, v, _sinks, offsets_q, offsets_kv, _rng, max_seqlen_q, max_seqlen_kv = inputs[:9]
    return flops_of_forward(*_packed_sizes(q, v, (offsets_q, offsets_kv), (max_seqlen_q, max_seqlen_kv)))


@register_flop_formula(torch.ops.cudnn_sdpa.varlen_backward, get_raw=True)
def _count_backward(*inputs: Any, **_: Any) -> int:
    q, _k, v, _sinks, offsets_q, offsets_kv, _rng, max_seqlen_q, max_seqlen_kv = inputs[3:12]
    return flops_of_backward(*_packed_sizes(q, v, (offsets_q, offsets_kv), (max_seqlen_q, max_seqlen_kv)))


def _packed_sizes(
    q: Tensor, v: Tensor, offsets: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> tuple[int, int, int]:
    """The same for packed sequences, by their lengths where these can be read, which waits for the GPU."""
    rows, columns = map(_sequence_lengths, offsets, longest)
    scores = sum(a * b for a, b in zip(rows, columns, strict=True))
    return q.shape[1] * scores, q.shape[2], v.shape[2]


def _sequence_lengths(offsets: Tensor, longest: int) -> list[int]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    if offsets.is_meta or isinstance(offsets, (FakeTensor, FunctionalTensor)):
        return [longest] * (offsets.shape[0] - 1)
    lengths: list[int] = offsets.diff().tolist()
    return lengths
