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
    """Runs a checked call on PyTorch's own attention if that has its options, otherwise on the reference."""
    if call.out is not None:
        memory.check_memory(call.q, call.k, call.v, call.out, call.attn_mask)
    if _is_pytorchs(call):
        out = _scaled_dot_product_attention(call)
        return out if call.out is None else call.out.copy_(out)
    inputs = (*call[:5], ReferenceArguments._make(call)._replace(out=None, with_lse=True))
    out, lse = autograd.ReferenceAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    out = out if call.out is None else call.out.copy_(out)
    return (out, lse) if call.with_lse else out


def _is_pytorchs(call: ForwardArguments) -> bool:
    """Whether PyTorch's own attention has all options of a call."""
    others = (call.sinks, call.seq_lens_q, call.seq_lens_kv, call.softcap)
    bounded = (call.window_left, call.window_right) != (UNBOUNDED, UNBOUNDED) or call.alibi
    causal = call.is_causal and (call.attn_mask is not None or call.causal_alignment != TOP_LEFT)
    # Its gradients are deterministic if PyTorch as a whole is set so, which a single call cannot do.
    deterministic = call.deterministic and needs_gradient(*call.tensors)
    # One of its kernels on the GPU takes no mask of float32 beside half precision.
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


#: Recognized by identity, which is quicker than a comparison; another 0.0 takes a longer way to the same result.
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

    The first call with given shapes, strides, dtype and options builds a cuDNN plan; every later one is a look-up
    and a launch. Nothing is read back from the GPU. CPU tensors run a plain PyTorch reference of the same
    mathematics, also in float32 and float64; what a GPU would refuse raises there too (`cpu_checks`). Differentiable
    by q, k, v, a float attn_mask and sinks.

    Grouped-query attention needs no flag: Hq may be any multiple of Hkv, and query head h uses key head
    h · Hkv // Hq. Under `torch.autocast`, float tensors are cast as for PyTorch's own attention.

    Args:
        q: Queries (B, Hq, Sq, D), float16 or bfloat16. D is a multiple of 8. Any strides with a dense last
            dimension and steps of 16 bytes: BHSD, BSHD through `transpose(1, 2)`, slices of a packed QKV.
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        is_causal: Hide later keys from each query.
        causal_alignment: Where the diagonal lies, for the causal mask and for windows. "top_left": query i stands at
            key i. "bottom_right": the last query stands at the last key, by each sequence's true lengths, as decoding
            with a cache needs it.
        window_size: (left, right): a query sees the keys from `left` before to `right` after the diagonal, as
            FlashAttention counts them; -1 is no bound. A causal mask makes right 0.
        scale: Factor of the scores, at most 65,536 in size; None is 1/sqrt(D). Data, not part of the plan. One of 0 or
            less costs a copy of q.
        attn_mask: Broadcastable to (B, Hq, Sq, Skv). Booleans, True for keys that are seen (costs a conversion to a
            bias on the GPU), or numbers of q's dtype or float32 that are added to the scores after scale and soft cap.
            On a GPU, numbers below -2e38, as finfo.min of bfloat16 and float32, hide a key as minus infinity does. A
            `CausalBias` of `torch.nn.attention.bias` is taken for the causal mask that it stands for.
        dropout_p: Share of the weights that is dropped, with random numbers from PyTorch's generator of the device.
        softcap: Limit c of the scores: c · tanh(score / c), as in Gemma 2. Data, not part of the plan.
        alibi: Add the linear biases of ALiBi, with the paper's slopes; needs a causal mask aligned top-left.
        sinks: One score for each query head, (Hq,), that takes part in the softmax and has no value. float32; half
            precision is converted, and its gradient back.
        seq_lens_q: True number of queries of each sequence, (B,) int32. Output rows past it are zeros.
        seq_lens_kv: True number of keys of each sequence, (B,) int32, from 0 to Skv. Data on the GPU: changing it
            neither builds nor waits. A length over Skv counts as Skv there, and is refused on the CPU, and where the
            environment variable `CUDNN_SDPA_DEBUG` is 1, which reads it. Keys past the length are not seen, but k and v
            must hold finite numbers there, because their rows are multiplied by 0: make a cache with `torch.zeros`.
        return_lse: Also return the log-sum-exp of the scores. It is not differentiable: a gradient into it raises.
        deterministic: Whether results are bit-exact from run to run: gradients by a kernel for that, which costs
            workspace (`explain` shows it), the output by a plan of its own (see `shape_policy`), that of a single query
            by a kernel that adds in a fixed order: the usual ones may differ in the last bit. None follows
            `torch.use_deterministic_algorithms`.
        out: Where to write the result: (B, Hq, Sq, Dv), not overlapping an input. For inference.

    Returns:
        The output (B, Hq, Sq, Dv) in q's dtype, dense, its dimensions in memory in q's order. With `return_lse` also
        the natural logarithm of the sum of the exponentials of the scores as the softmax sees them, (B, Hq, Sq)
        float32. A query that sees no key gets zeros and minus infinity, or its sink.

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
    Longformer (Beltagy et al., 2020), sinks those of gpt-oss, soft caps those of Gemma 2, linear biases those of "Train
    Short, Test Long" (Press et al., 2022).
    """
    if functional.scaled_dot_product_attention is not PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa")
    if not is_compiling() and (
        # Is it a plain call, of which `Last` knows all options? Chains of identities take a tenth of a microsecond.
        window_size is attn_mask is softcap is sinks is None  # type: ignore[comparison-overlap]
        and seq_lens_q is deterministic is out is None  # type: ignore[comparison-overlap]
        and dropout_p is NO_DROPOUT
        and alibi is False
    ):
        # The call before this one again? Saves the signature and its look-up, 1.5 µs. Whoever adds a condition here
        # adds it to `shortcuts.find` too.
        last = launch.calls.last
        try:
            again = (
                last.is_causal is is_causal
                and last.alignment == causal_alignment
                and (last.scale is scale or (last.scale_type is type(scale) and last.scale == scale))
                and last.with_lse is return_lse
                and last.has_lengths is (seq_lens_kv is not None)
                and not (q.is_nested or k.is_nested or v.is_nested)  # a guard would end the process
                and (
                    last.check(q, k, v)
                    if seq_lens_kv is None
                    else not seq_lens_kv.is_nested and last.check(q, k, v, seq_lens_kv)
                )
                and not is_profiling()
                and forward_ad._current_level < 0
            )
        except AttributeError:  # not tensors: the checks will say so
            again = False
        if again:
            result: Result = last.run(q, k, v, seq_lens_kv, None)
            return result
        if type(return_lse) is bool:
            found = fast_path.find(q, k, v, seq_lens_kv, is_causal, causal_alignment, as_float(scale), return_lse)
            if found is not None:
                return found(q, k, v, seq_lens_kv, None)
    left, right = (UNBOUNDED, UNBOUNDED) if window_size is None else arguments.window_bounds(window_size)
    scale = None if scale is None else as_float(scale)
    dropout_p = dropout_p if type(dropout_p) is float else as_float(dropout_p)
    softcap = None if softcap is None else as_float(softcap)
    call = ForwardArguments(
        *(q, k, v, attn_mask, sinks, seq_lens_q, seq_lens_kv, None),
        *(is_causal, causal_alignment, left, right, scale, dropout_p, softcap, alibi),
        *(False, return_lse, out),
    )
    return run(call, deterministic)


def run(call: ForwardArguments, deterministic: bool | None) -> Result:
    """Runs a call whose arguments have not been checked yet, by the shortest way that is right for it."""
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
    if not is_compiling():  # a compiled graph checks them when it is traced, and again when it runs
        call = autograd_checks.resolved(call)
        arguments.check_options(call)
    autograd_checks.check("sdpa", call.out, q=call.q, k=call.k, v=call.v, attn_mask=call.attn_mask, sinks=call.sinks)
    if call.dropout_p:
        call = call._replace(rng=new_seed(call.q))
    return or_else(lambda: _run(call), lambda: run_on_pytorch(call), lambda: kind_of(call))


def _run(call: ForwardArguments) -> Result:
    """Runs a call through autograd or PyTorch's dispatcher."""
    if is_in_force():
        beyond = ReferenceArguments._make(call)
        check_or_decline("sdpa", lambda: arguments.check(call), lambda: arguments.check(beyond))
    if needs_gradient(*call.tensors, call.out):
        if is_compiling():
            return _differentiable(call)
        try:
            return _differentiable(call)
        except RuntimeError:
            autograd_checks.refuse_inference_tensors(call)
            raise
    operator, inputs = torch.ops.cudnn_sdpa, call[:17]
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
        out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(*call[:17])
        lse = lse.detach() if is_compiling() else lse  # a compiled graph asks for the gradient of all that it returns
    else:
        out, lse = autograd.Attention.apply(*call[:5], call._replace(with_lse=True), None)  # type: ignore[no-untyped-call]
    return (out, lse) if call.with_lse else out
