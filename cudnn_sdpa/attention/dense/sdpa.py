"""Attention over dense tensors, and its backward pass as a function: `sdpa` and `sdpa_backward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import SoftmaxOptions, softmax_of
from cudnn_sdpa.attention.backward_arguments import SdpaGradients, backward_call_of, gradients_of
from cudnn_sdpa.attention.bias import without_causal_bias
from cudnn_sdpa.attention.dense.call import ReferenceSdpaCall, SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.attention.sink_scores import as_sinks
from cudnn_sdpa.engine import autograd_checks, value_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.graph.scalars import as_bool, is_compiling

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SdpaOptions(SoftmaxOptions, total=False):
    """The options of `sdpa` but `return_lse`."""

    attn_mask: Tensor | None
    alibi: bool
    seq_lens_q: Tensor | None
    seq_lens_kv: Tensor | None
    deterministic: bool | None
    dropout_p: float
    out: Tensor | None


@overload
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[SdpaOptions]
) -> Tensor: ...


@overload
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[SdpaOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[SdpaOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
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
    launch it. Nothing synchronizes with the GPU. CPU tensors run a PyTorch reference; calls that a GPU would refuse
    raise there too (`cpu_checks`). Differentiable with respect to q, k, v, a float attn_mask and sinks.

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
            GPU), or float (additive), in q's dtype or float32, added to the scores after scale and soft-capping. Values
            below -2.36e38, such as finfo.min of bfloat16 and float32, mask a key as minus infinity does. A `CausalBias`
            of `torch.nn.attention.bias` is treated as the causal mask that it represents.
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
        >>> q = torch.randn(2, 8, 16, 64, dtype=torch.bfloat16, requires_grad=True)  # on a GPU: device="cuda"
        >>> k = v = torch.randn(2, 2, 16, 64, dtype=torch.bfloat16)
        >>> cudnn_sdpa.sdpa(q, k, v, is_causal=True, window_size=(4, 0)).sum().backward()
        >>> q.grad.shape
        torch.Size([2, 8, 16, 64])

    The formula is that of "Attention Is All You Need" (Vaswani et al., 2017), section 3.2.1; windows are those of
    Longformer (Beltagy et al., 2020), sinks those of gpt-oss, logit soft-capping that of Gemma 2, ALiBi that of "Train
    Short, Test Long" (Press et al., 2022).
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa")
    given = (
        q,
        k,
        v,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        attn_mask,
        dropout_p,
        softcap,
        alibi,
        sinks,
        seq_lens_q,
        seq_lens_kv,
        return_lse,
        deterministic,
        out,
    )
    if not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return known  # type: ignore[no-any-return]
    call = call_of(*given)
    result: Tensor | tuple[Tensor, Tensor] = SDPA(call, NativeKey(_calls, given))
    return result


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    causal_alignment: Alignment,
    window_size: tuple[int, int] | None,
    scale: float | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    softcap: float | None,
    alibi: bool,
    sinks: Tensor | None,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    return_lse: bool,
    deterministic: bool | None,
    out: Tensor | None,
) -> SdpaCall:
    """The call that arguments of `sdpa` make; they have not been checked."""
    mask = (is_causal, causal_alignment, window_size, scale)
    call = SdpaCall(
        q=q,
        k=k,
        v=v,
        attn_mask=attn_mask,
        sinks=as_sinks(sinks) if isinstance(sinks, Tensor) and sinks.dtype != torch.float32 else sinks,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        softmax=softmax_of(*mask, softcap=softcap, deterministic=deterministic, dropout_p=dropout_p, alibi=alibi),
        with_lse=return_lse if type(return_lse) is bool else as_bool(return_lse),
        out=out,
    )
    if attn_mask is not None and type(attn_mask) is not Tensor:
        call = without_causal_bias(call)
    return call


_calls = NativeCalls()

SDPA = Operation(
    name="sdpa",
    function="sdpa",
    call=SdpaCall,
    reference_call=ReferenceSdpaCall,
    backward=SdpaBackwardCall,
    differentiable=("q", "k", "v", "attn_mask", "sinks"),
)


def sdpa_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    sinks: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
    wanted: Sequence[str] | None = None,
) -> SdpaGradients:
    """The gradients of `sdpa`, given its output and its LSE; also those of a part of the keys.

    `out` and `lse` may be those of more keys than `k` and `v` hold, as where keys travel between GPUs or a prefix is
    shared: the gradients of k and v are then those of this part, and the gradients of q of all parts add up to its
    gradient. `merge_states` makes `out` and `lse` of the results of the parts. Autograd calls `sdpa`'s backward pass by
    itself; this is for a backward pass of your own.

    With P = exp(scores − lse), dP = grad_out vᵀ and D = rowsum(grad_out ∘ out), it is dv = Pᵀ grad_out and
    dS = P ∘ (dP − D), from which dq and dk follow ("FlashAttention-2", Dao, 2023, section 2.3.2).

    Options are those of the forward call. There is no `dropout_p`: `sdpa` does not return its random numbers. Autograd
    does not follow the call, and autocast casts nothing: tensors are as the forward pass had them.

    Args:
        grad_out: The gradient of the output (B, Hq, Sq, Dv), in q's dtype. It is copied if cuDNN cannot read its
            layout, and so are `out` and `lse`.
        out: The output (B, Hq, Sq, Dv), in q's dtype.
        lse: Its LSE (B, Hq, Sq) float32, natural logarithm, as `sdpa` returns it with `return_lse=True`.
        q: Queries (B, Hq, Sq, D).
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        is_causal: As in the forward pass.
        causal_alignment: As in the forward pass.
        window_size: As in the forward pass.
        scale: As in the forward pass.
        attn_mask: As in the forward pass, for these keys.
        softcap: As in the forward pass.
        alibi: As in the forward pass.
        sinks: As in the forward pass, (Hq,). Where keys are in parts, give them with one part alone, so that their
            gradient counts once; the LSE contains them for all.
        seq_lens_q: As in the forward pass.
        seq_lens_kv: As in the forward pass, for these keys.
        deterministic: Whether gradients are bit-exact; None follows `torch.use_deterministic_algorithms`.
        wanted: The inputs whose gradients are computed, of "q", "k", "v", "attn_mask" (if it is float) and "sinks";
            None is all that there are.

    Returns:
        `SdpaGradients(dq, dk, dv, dmask, dsinks)`, each in the dtype and memory order of its input, None where not
        wanted or not there.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        Attention to two halves of the keys, and its gradients:

        >>> import torch
        >>> from cudnn_sdpa import merge_states, sdpa, sdpa_backward
        >>> q, k, v, grad_out = torch.randn(4, 1, 2, 8, 16, dtype=torch.bfloat16)
        >>> halves = list(zip(k.chunk(2, 2), v.chunk(2, 2)))
        >>> outs, lses = zip(*(sdpa(q, *half, return_lse=True) for half in halves))
        >>> out, lse = merge_states(outs, lses)
        >>> first, second = (sdpa_backward(grad_out, out, lse, q, *half) for half in halves)
        >>> whole = sdpa_backward(grad_out, out, lse, q, k, v)
        >>> torch.allclose(first.dq + second.dq, whole.dq, atol=0.05)
        True
        >>> torch.allclose(torch.cat([first.dk, second.dk], 2), whole.dk, atol=0.05)
        True
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_backward")
    call = call_of(
        q=q,
        k=k,
        v=v,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_size=window_size,
        scale=scale,
        attn_mask=attn_mask,
        dropout_p=0.0,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        return_lse=True,
        deterministic=deterministic,
        out=None,
    )
    of = backward_call_of(SDPA, call, grad_out=grad_out, out=out, lse=lse, wanted=wanted)
    return gradients_of(SDPA.run_backward(of), SDPA.differentiable, of.needs, sinks)
