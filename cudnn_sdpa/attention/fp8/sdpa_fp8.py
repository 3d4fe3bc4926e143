"""Attention in FP8: `sdpa_fp8` and `sdpa_fp8_backward`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention.arguments import softmax_of
from cudnn_sdpa.attention.fp8 import arguments as fp8_arguments
from cudnn_sdpa.attention.fp8.arguments import (
    SCALES,
    Fp8BackwardScales,
    Fp8Gradients,
    Fp8Output,
    Fp8Scales,
)
from cudnn_sdpa.attention.fp8.call import Fp8BackwardCall, Fp8Call
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.engine import autograd_checks, value_checks
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.graph.scalars import as_bool, is_compiling


def sdpa_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Fp8Scales,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    page_table_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Fp8Output:
    """Attention of queries, keys and values in FP8, with all scales and amax values.

    The scores are `q kᵀ · scale · descale_q · descale_k`. With e = exp(scores − the row's maximum) and l the row's sum
    of e, the output O is `fp8(e · scale_s) v · descale_s · descale_v / l`, and `out` is `fp8(O · scale_o)`. Here fp8
    rounds and saturates: a value beyond the range of the dtype becomes its largest number. Scales and amax values stay
    on the GPU, and no call waits for them. On the CPU an emulation runs, which rounds where cuDNN rounds. The formulas
    are those of the cuDNN frontend's graph; see "Attention" in its documentation.

    Args:
        q: Queries (B, Hq, Sq, D), float8_e4m3fn or float8_e5m2; D is a multiple of 16. The last dimension is dense,
            other strides are multiples of 16 bytes.
        k: Keys (B, Hkv, Skv, D) in q's dtype; Hq is a multiple of Hkv.
        v: Values (B, Hkv, Skv, Dv) in q's dtype.
        scales: The scales, each a float32 tensor of one element on the device of q.
        is_causal: Mask later keys for each query.
        causal_alignment: "top_left" aligns the first query with the first key, "bottom_right" the last with the last.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores, positive; None is 1/sqrt(D).
        seq_lens_q: Actual sequence lengths of the queries, (B,) int32. Output rows past them are zeros.
        seq_lens_kv: Actual sequence lengths of the keys, (B,) int32.
        page_table: Pages of each sequence, (B, max_pages) int32; it needs `seq_lens_kv`. k and v are then
            pages (pages, Hkv, page size, D), also as a view of that shape, and key j of a sequence is in slot
            `j % page_size` of its page `j // page_size`.
        page_table_v: The pages of the values; None if they are those of the keys.
        out_dtype: float8_e4m3fn, float8_e5m2, bfloat16 or float16; None is the dtype of q. `scale_o` applies to each.
        return_lse: Also return the LSE (log-sum-exp) of the scores, which `sdpa_fp8_backward` needs.

    Returns:
        `Fp8Output(out, amax_s, amax_o, lse)`: the output (B, Hq, Sq, Dv) in q's memory order; the amax of the
        probabilities and of the output, before their scales, (1,) float32 each; and the LSE (B, Hq, Sq) float32, or
        None. A fully masked row gets zeros and an LSE of minus infinity. With `seq_lens_q`, Hopper's `amax_s` also
        covers the rows past the lengths: it may be too large, up to 1.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import Fp8Scales, sdpa_fp8
        >>> x = torch.randn(1, 4, 64, 32)
        >>> to_fp8 = 448 / x.abs().amax().view(1)  # E4M3 holds numbers of up to 448
        >>> q = k = v = (x * to_fp8).to(torch.float8_e4m3fn)
        >>> full = torch.tensor([448.0])
        >>> scales = Fp8Scales(1 / to_fp8, 1 / to_fp8, 1 / to_fp8, descale_s=1 / full, scale_s=full, scale_o=to_fp8)
        >>> result = sdpa_fp8(q, k, v, scales, is_causal=True)
        >>> exact = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> error = (result.out.float() / to_fp8 - exact).norm() / exact.norm()
        >>> bool(error < 0.05)
        True
    """
    if functional.scaled_dot_product_attention is not autograd_checks.PYTORCHS:
        autograd_checks.refuse_context_parallel("sdpa_fp8")
    if type(scales) is not Fp8Scales:
        fp8_arguments.check_scales_type(scales, Fp8Scales)
    given = (
        q,
        k,
        v,
        *scales,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        seq_lens_q,
        seq_lens_kv,
        page_table,
        page_table_v,
        out_dtype,
        return_lse,
    )
    if not (is_compiling() or value_checks.enabled or _calls.find is None):
        known = _calls.find(*given)
        if known is not MISSED:
            return Fp8Output._make(known if return_lse else (*known, None))
    call = Fp8Call(
        *(q, k, v, *scales),
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        page_table=page_table,
        page_table_v=None if page_table_v is page_table else page_table_v,
        out_dtype=out_dtype,
        softmax=softmax_of(is_causal, causal_alignment, window_size, scale, deterministic=False),
        with_lse=as_bool(return_lse),
    )
    found = FP8(call, NativeKey(_calls, given))
    return Fp8Output._make(found if return_lse else (*found, None))


def sdpa_fp8_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scales: Fp8BackwardScales,
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "top_left",
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
) -> Fp8Gradients:
    """The gradients of `sdpa_fp8`, with all scales and amax values.

    With P = exp(scores − lse), dO the dequantized `grad_out`, and dS = P ∘ (dO vᵀ − rowsum(dO ∘ O)) · scale, the
    gradients are dv = `fp8(P · scale_s)ᵀ dO`, dq = `fp8(dS · scale_dp) k` and dk = `fp8(dS · scale_dp)ᵀ q`, all
    descaled. P is rounded to the dtype of q, dS to that of `grad_out`. Each gradient is returned times its own scale,
    in the dtype of `grad_out`. The formulas are those of the cuDNN frontend's `sdpa_fp8_bwd.h`, which calls dS dP.

    Args:
        grad_out: The gradient of the output (B, Hq, Sq, Dv), float8_e4m3fn or float8_e5m2. It is copied if cuDNN
            cannot read its layout.
        q: Queries (B, Hq, Sq, D), as in the forward pass.
        k: Keys (B, Hkv, Skv, D).
        v: Values (B, Hkv, Skv, Dv).
        out: The output of the forward pass, in FP8.
        lse: Its LSE (B, Hq, Sq) float32.
        scales: The scales, each a float32 tensor of one element on the device of q. `descale_o` is one over the
            forward pass's `scale_o`.
        is_causal: As in the forward pass.
        causal_alignment: As in the forward pass.
        window_size: As in the forward pass.
        scale: As in the forward pass.
        seq_lens_q: As in the forward pass. Gradients past them are zeros.
        seq_lens_kv: As in the forward pass.
        deterministic: Whether gradients are bit-exact; None follows `torch.use_deterministic_algorithms`.

    Returns:
        `Fp8Gradients(dq, dk, dv, amax_dq, amax_dk, amax_dv, amax_dp)`: the gradients, each in the memory order of its
        tensor, and their amax values before their scales, (1,) float32 each.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason; or an input requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import Fp8BackwardScales, Fp8Scales, sdpa_fp8, sdpa_fp8_backward
        >>> q = k = v = torch.randn(1, 4, 64, 128).to(torch.float8_e4m3fn)
        >>> one, many = torch.ones(1), torch.tensor([256.0])
        >>> forward = sdpa_fp8(q, k, v, Fp8Scales(one, one, one, 1 / many, many, one), return_lse=True)
        >>> grad_out = torch.randn(1, 4, 64, 128).to(torch.float8_e5m2)
        >>> scales = Fp8BackwardScales(one, one, one, one, one, 1 / many, 1 / many, many, one, one, one, many)
        >>> gradients = sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, scales)
        >>> gradients.dq.shape, gradients.dq.dtype, gradients.amax_dq.shape
        (torch.Size([1, 4, 64, 128]), torch.float8_e5m2, torch.Size([1]))
    """
    if type(scales) is not Fp8BackwardScales:
        fp8_arguments.check_scales_type(scales, Fp8BackwardScales)
    given = (
        grad_out,
        q,
        k,
        v,
        out,
        lse,
        *scales,
        is_causal,
        causal_alignment,
        window_size,
        scale,
        seq_lens_q,
        seq_lens_kv,
        deterministic,
    )
    if not (is_compiling() or value_checks.enabled or _calls_of_backward.find is None):
        known = _calls_of_backward.find(*given)
        if known is not MISSED:
            return Fp8Gradients._make(known)
    softmax = softmax_of(is_causal, causal_alignment, window_size, scale, deterministic=deterministic)
    tensors = grad_out, q, k, v, out, lse, *scales, seq_lens_q, seq_lens_kv
    call = Fp8BackwardCall._make((*tensors, softmax))
    return Fp8Gradients._make(FP8_BACKWARD(call, NativeKey(_calls_of_backward, given)))


_calls, _calls_of_backward = NativeCalls(), NativeCalls()

FP8 = Operation(
    name="sdpa_fp8",
    function="sdpa_fp8",
    call=Fp8Call,
    outputs=("out", "amax_s", "amax_o"),
    names=SCALES,
    loops=False,
    forward_mode="attention in bfloat16",
)

FP8_BACKWARD = Operation(
    name="sdpa_fp8_backward",
    forward="sdpa_fp8_backward",
    function="sdpa_fp8_backward",
    call=Fp8BackwardCall,
    outputs=Fp8Gradients._fields,
    aux_outputs=(),
    names=SCALES,
    loops=False,
    forward_mode="attention in bfloat16",
)
