"""Attention over dense tensors: `sdpa`."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from cudnn_sdpa.attention import arguments, memory
from cudnn_sdpa.attention.arguments import (
    ForwardArguments,
    ReferenceArguments,
    Result,
    as_float,
    as_sinks,
    cast_for_autocast,
    kind_of,
)
from cudnn_sdpa.attention.bias import without_causal_bias
from cudnn_sdpa.attention.dense import autograd, fast_path, launch, torch_ops
from cudnn_sdpa.attention.mask import TOP_LEFT, UNBOUNDED
from cudnn_sdpa.attention.memory import new_output
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import is_deterministic
from cudnn_sdpa.engine.autograd_checks import PYTORCHS
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_profiling, needs_gradient
from cudnn_sdpa.engine.fallback import check_or_decline, is_in_force, or_else
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.graph.symbolic_shapes import is_compiling


def run_on_pytorch(call: ForwardArguments) -> Result:
    """Runs a checked call on PyTorch's own attention if it has the options, otherwise on the reference."""
    if call.out is not None:
        memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)
    if _pytorch_supports(call):
        out = _scaled_dot_product_attention(call)
        return out if call.out is None else call.out.copy_(out)
    on_reference = ReferenceArguments(*call)._replace(out=None, with_lse=True)
    out, lse = autograd.ReferenceAttention.apply(*call.differentiable, on_reference)  # type: ignore[no-untyped-call]
    out = out if call.out is None else call.out.copy_(out)
    return (out, lse) if call.with_lse else out


def _pytorch_supports(call: ForwardArguments) -> bool:
    others = (call.sinks, call.seq_lens_q, call.seq_lens_kv, call.softcap)
    bounded = (call.window_left, call.window_right) != (UNBOUNDED, UNBOUNDED) or call.alibi
    causal = call.is_causal and (call.attn_mask is not None or call.causal_alignment != TOP_LEFT)
    # Only PyTorch's global setting makes its gradients deterministic.
    deterministic = call.deterministic and needs_gradient(*call.tensors)
    # One of its GPU kernels takes no float32 mask with half-precision inputs.
    mixed = call.attn_mask is not None and call.attn_mask.dtype not in (torch.bool, call.q.dtype)
    return others == (None,) * 4 and not (bounded or causal or call.with_lse or deterministic or mixed)


def _scaled_dot_product_attention(call: ForwardArguments) -> torch.Tensor:
    """PyTorch's own attention, its output in the memory order of q."""
    q, mask, group = call.q, call.attn_mask, call.q.shape[1] // call.k.shape[1]
    k, v = (x if group == 1 else x.repeat_interleave(group, 1) for x in (call.k, call.v))
    if mask is not None and mask.dim() < 2:
        mask = mask.expand(q.shape[2], k.shape[2])
    options: dict[str, Any] = {"dropout_p": call.dropout_p, "is_causal": call.is_causal, "scale": call.scale}
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **options)
    ordered = new_output(q, call.v)
    return out if out.stride() == ordered.stride() else ordered.copy_(out)


#: Compared by identity, which is faster than by value; another 0.0 takes a slower path to the same result.
NO_DROPOUT = 0.0


@overload
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    alibi: bool = ...,
    sinks: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> Tensor: ...


@overload
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    alibi: bool = ...,
    sinks: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = ...,
    causal_alignment: str = ...,
    window_size: tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    softcap: float | None = ...,
    alibi: bool = ...,
    sinks: Tensor | None = ...,
    seq_lens_q: Tensor | None = ...,
    seq_lens_kv: Tensor | None = ...,
    return_lse: bool,
    deterministic: bool | None = ...,
    out: Tensor | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(scale · q kᵀ + mask) v.

    The first call with given shapes, strides, dtype and options builds a cuDNN plan; later calls look it up and
    launch it. Nothing synchronizes with the GPU. CPU tensors run a PyTorch reference, also in float32 and float64;
    calls that a GPU would refuse raise there too (`cpu_checks`). Differentiable with respect to q, k, v, a float
    attn_mask and sinks.

    Grouped-query attention needs no flag: Hq may be any multiple of Hkv, and query head h uses key head
    h · Hkv // Hq. Under `torch.autocast`, float tensors are cast as for PyTorch's own attention.

    Args:
        q: Queries (B, Hq, Sq, D), float16 or bfloat16. D is a multiple of 8. The last dimension is dense, other
            strides are multiples of 16 bytes: BHSD, BSHD through `transpose(1, 2)`, slices of a packed QKV.
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        is_causal: Mask later keys for each query.
        causal_alignment: Alignment of the diagonal, for the causal mask and for windows. "top_left": query i is aligned
            with key i. "bottom_right": the last query is aligned with the last key, by each sequence's actual lengths,
            as for decoding with a cache.
        window_size: (left, right): a query sees the keys from `left` before to `right` after the diagonal, as in
            FlashAttention; -1 is unbounded. A causal mask makes right 0.
        scale: Softmax scale, of magnitude at most 65,536; None is 1/sqrt(D). Data, not part of the plan. A scale of 0
            or less costs a copy of q.
        attn_mask: Broadcastable to (B, Hq, Sq, Skv). Boolean, True for keys that take part (converted to a bias on the
            GPU), or float (additive), in q's dtype or float32, added to the scores after scale and soft-capping. On a
            GPU, values below -2e38, such as finfo.min of bfloat16 and float32, mask a key as minus infinity does. A
            `CausalBias` of `torch.nn.attention.bias` is treated as the causal mask that it represents.
        dropout_p: Dropout probability, with random numbers from PyTorch's generator of the device.
        softcap: Logit soft-capping, c · tanh(score / c), as in Gemma 2. Data, not part of the plan.
        alibi: Add the linear biases of ALiBi, with the paper's slopes; needs a causal mask aligned top-left.
        sinks: Attention sinks (Hq,): one score per query head that takes part in the softmax and has no value. float32;
            half precision is converted, and its gradient back.
        seq_lens_q: Actual sequence lengths of the queries, (B,) int32. Output rows past them are zeros.
        seq_lens_kv: Actual sequence lengths of the keys, (B,) int32, from 0 to Skv. Data on the GPU: other values need
            no other plan and no synchronization. A length over Skv counts as Skv there; it is refused on the CPU, and
            if the environment variable `CUDNN_SDPA_DEBUG` is 1, which reads it. Keys past the length are masked, but k
            and v must be finite there, because their rows are multiplied by 0: allocate a cache with `torch.zeros`.
        return_lse: Also return the LSE (log-sum-exp) of the scores. Not differentiable: a gradient into it raises.
        deterministic: Whether results are bit-exact from run to run. Gradients then use a deterministic kernel, which
            costs workspace (`explain` shows it); the output uses an exact-shape plan (see `shape_policy`), for a single
            query with a kernel that adds in a fixed order. None follows `torch.use_deterministic_algorithms`.
        out: Where to write the result: (B, Hq, Sq, Dv), not overlapping an input. For inference.

    Returns:
        The output (B, Hq, Sq, Dv) in q's dtype, dense, in q's memory order. With `return_lse` also the LSE of the
        scores as the softmax sees them, natural logarithm, (B, Hq, Sq) float32. A fully masked row gets zeros and an
        LSE of minus infinity, or of its sink.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.
        ExecutionError: The capturing thread has no cuDNN handle yet, or cuDNN refused the launch.
        LibraryError: cuDNN cannot be loaded.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = torch.randn(2, 8, 16, 64, requires_grad=True)  # on a GPU: device="cuda", dtype=torch.bfloat16
        >>> k = v = torch.randn(2, 2, 16, 64)
        >>> cudnn_sdpa.sdpa(q, k, v, is_causal=True, window_size=(4, 0)).sum().backward()
        >>> q.grad.shape
        torch.Size([2, 8, 16, 64])

    The formula is that of "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.1; windows are those of
    Longformer (Beltagy et al., 2020), sinks those of gpt-oss, logit soft-capping that of Gemma 2, ALiBi that of "Train
    Short, Test Long" (Press et al., 2022).
    """
    if functional.scaled_dot_product_attention is not PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa")
    if not is_compiling() and (
        # A plain call, all of whose options `CachedCall` holds? Chained identity tests take 0.1 µs.
        window_size is attn_mask is softcap is sinks is None  # type: ignore[comparison-overlap]
        and seq_lens_q is deterministic is out is None  # type: ignore[comparison-overlap]
        and dropout_p is NO_DROPOUT
        and alibi is False
    ):
        # The same as the call before? Saves the signature and its look-up, 1.5 µs. A condition added here must be added
        # to `fast_path.find`, too.
        last = launch.calls.last
        try:
            is_like_last = (
                last.is_causal is is_causal
                and last.alignment == causal_alignment
                and (last.scale is scale or (last.scale_type is type(scale) and last.scale == scale))
                and last.with_lse is return_lse
                and last.has_lengths is (seq_lens_kv is not None)
                and not (q.is_nested or k.is_nested or v.is_nested)  # a guard would abort the process
                and (
                    last.check(q, k, v)
                    if seq_lens_kv is None
                    else not seq_lens_kv.is_nested and last.check(q, k, v, seq_lens_kv)
                )
                and not is_profiling()
                and forward_ad._current_level < 0
            )
        except AttributeError:  # not tensors: the checks report it
            is_like_last = False
        if is_like_last:
            result: Result = last.run(q, k, v, seq_lens_kv, None)
            return result
        if type(return_lse) is bool:
            cached = fast_path.find(q, k, v, seq_lens_kv, is_causal, causal_alignment, as_float(scale), return_lse)
            if cached is not None:
                return cached(q, k, v, seq_lens_kv, None)
    left, right = (UNBOUNDED, UNBOUNDED) if window_size is None else arguments.window_bounds(window_size)
    scale = None if scale is None else as_float(scale)
    dropout_p = dropout_p if type(dropout_p) is float else as_float(dropout_p)
    softcap = None if softcap is None else as_float(softcap)
    call = ForwardArguments(  # by position, in the order of the fields: keywords would cost 0.7 µs
        q,
        k,
        v,
        attn_mask,
        sinks,
        seq_lens_q,
        seq_lens_kv,
        None,  # rng
        is_causal,
        causal_alignment,
        left,
        right,
        scale,
        dropout_p,
        softcap,
        alibi,
        False,  # deterministic: `run` decides
        return_lse,
        out,
    )
    return run(call, deterministic)


def run(call: ForwardArguments, deterministic: bool | None) -> Result:
    """Runs a call whose arguments are not checked yet, on the fast path if it qualifies."""
    if call.sinks is not None and getattr(call.sinks, "dtype", None) is not torch.float32:
        call = call._replace(sinks=as_sinks(call.sinks))
    if call.attn_mask is not None and type(call.attn_mask) is not Tensor:
        call = without_causal_bias(call)
    if type(call.with_lse) is bool and not is_compiling():
        prepared = fast_path.find_any(call, deterministic)
        if prepared is not None:
            return prepared(call)
    arguments.check_types(call)
    call = cast_for_autocast(call)._replace(deterministic=is_deterministic(deterministic))
    if not is_compiling():  # a compiled graph checks them while tracing, and again when it runs
        call = autograd_checks.resolved(call)
        arguments.check_options(call)
    autograd_checks.check("sdpa", call.out, q=call.q, k=call.k, v=call.v, attn_mask=call.attn_mask, sinks=call.sinks)
    if call.dropout_p:
        call = call._replace(rng=new_seed(call.q))
    return or_else(lambda: _run(call), lambda: run_on_pytorch(call), lambda: kind_of(call))


def _run(call: ForwardArguments) -> Result:
    """Runs a call through autograd or PyTorch's dispatcher."""
    if is_in_force():
        on_reference = ReferenceArguments(*call)
        check_or_decline("sdpa", lambda: arguments.check(call), lambda: arguments.check(on_reference))
    if needs_gradient(*call.tensors, call.out):
        if is_compiling():
            return _differentiable(call)
        try:
            return _differentiable(call)
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(call)
            raise
    operator, inputs = torch.ops.cudnn_sdpa, call.operator_inputs
    if call.out is None:
        forward = operator.sdpa_forward_lse if call.with_lse else operator.sdpa_forward
        result: Result = forward(*inputs)
        return result
    if call.with_lse:
        return call.out, operator.sdpa_forward_lse_out(*inputs, call.out)
    operator.sdpa_forward_out(*inputs, call.out)
    return call.out


def _differentiable(call: ForwardArguments) -> Result:
    if not is_compiling():
        torch_ops.check_gradient(call)
    if is_compiling() or not can_bypass_dispatcher(*call.tensors):
        out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(*call.operator_inputs)
        lse = lse.detach() if is_compiling() else lse  # a compiled graph differentiates all that it returns
    else:
        with_lse = call._replace(with_lse=True)
        out, lse = autograd.Attention.apply(*call.differentiable, with_lse, None)  # type: ignore[no-untyped-call]
    return (out, lse) if call.with_lse else out
