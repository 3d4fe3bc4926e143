"""Attention in FP8: `sdpa_fp8` and `sdpa_fp8_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.fp8 import arguments as fp8_arguments
from cudnn_sdpa.attention.fp8 import fast_path, launch, torch_ops, workarounds
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Backward,
    Fp8BackwardScales,
    Fp8Forward,
    Fp8Gradients,
    Fp8Output,
    Fp8Scales,
)
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.autocast import is_deterministic
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling


def sdpa_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Fp8Scales,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
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
    optional = (seq_lens_q, seq_lens_kv, page_table, page_table_v)
    options = (is_causal, causal_alignment, window_size, scale, out_dtype, return_lse)
    is_eager = not is_compiling()
    if is_eager and type(scales) is Fp8Scales:
        known = fast_path.find(launch.calls, (q, k, v, *scales), optional, options)
        if known is not None:
            result: Fp8Output = known.run(q, k, v, scales, *optional)
            return result
    of = forward_of(
        q=q,
        k=k,
        v=v,
        scales=scales,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_size=window_size,
        scale=scale,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        page_table=page_table,
        page_table_v=page_table_v,
        out_dtype=out_dtype,
        return_lse=return_lse,
    )
    check_untracked("sdpa_fp8", of.scales, q=q, k=k, v=v)
    if is_eager and q.is_cuda and can_bypass_dispatcher(q, k, v, *optional, *scales):
        prepared = launch.prepare_forward(of)
        if prepared is None:
            return launch.nothing(of)
        result = prepared(of)
        fast_path.remember(launch.calls, (q, k, v, *scales), optional, options, prepared)
        return result
    out, amax_s, amax_o, *lse = torch.ops.cudnn_sdpa.sdpa_fp8_forward(
        q,
        k,
        v,
        list(scales),
        seq_lens_q,
        seq_lens_kv,
        *torch_ops.options_of(of.call),
        page_table,
        page_table_v,
        of.out_dtype,
        return_lse,
    )
    return Fp8Output(out, amax_s, amax_o, lse[0] if return_lse else None)


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
    causal_alignment: str = "top_left",
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
    tensors, lengths = (grad_out, q, k, v, out, lse), (seq_lens_q, seq_lens_kv)
    is_eager = not is_compiling()
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = (is_causal, causal_alignment, window_size, scale, deterministic)
    if is_eager and type(scales) is Fp8BackwardScales:
        known = fast_path.find(launch.backward_calls, (*tensors, *scales), lengths, options)
        if known is not None:
            result: Fp8Gradients = known.run(tensors, scales, *lengths)
            return result
    named = {"grad_out": grad_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    of = backward_of(
        **named,
        scales=scales,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_size=window_size,
        scale=scale,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        deterministic=deterministic,
    )
    check_untracked("sdpa_fp8_backward", of.scales, **named)
    if is_eager and q.is_cuda and can_bypass_dispatcher(*tensors, *lengths, *scales):
        return _run_backward(of, options)
    gradients = torch.ops.cudnn_sdpa.sdpa_fp8_backward(
        *tensors, list(scales), *lengths, *torch_ops.options_of(of.call), of.call.deterministic
    )
    return Fp8Gradients(*gradients)


def _run_backward(of: Fp8Backward, options: tuple[Any, ...]) -> Fp8Gradients:
    """Runs a checked call, and caches it if cuDNN can read its tensors without copies."""
    readable = workarounds.readable(of)
    prepared = launch.prepare_backward(readable)
    if prepared is None:
        return launch.no_gradients(of)
    gradients = prepared(readable)
    if readable.grad_out is of.grad_out and readable.lse is of.lse:
        call = of.call
        required = (of.grad_out, call.q, call.k, call.v, of.out, of.lse, *of.scales)
        lengths = (call.seq_lens_q, call.seq_lens_kv)
        fast_path.remember(launch.backward_calls, required, lengths, options, prepared)
    return gradients


def forward_of(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Fp8Scales,
    is_causal: bool,
    causal_alignment: str,
    window_size: tuple[int, int] | None,
    scale: float | None,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    page_table: Tensor | None,
    page_table_v: Tensor | None,
    out_dtype: torch.dtype | None,
    return_lse: bool,
) -> Fp8Forward:
    """A forward call, checked."""
    fp8_arguments.check_types(q=q, k=k, v=v, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv)
    fp8_arguments.check_scales_type(scales, Fp8Scales)
    if not isinstance(return_lse, bool):
        raise OptionError("return_lse", repr(return_lse), "True or False")
    left, right = arguments.window_bounds(window_size)
    call = ForwardArguments(
        q=q,
        k=k,
        v=v,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_left=left,
        window_right=right,
        scale=scale,
        with_lse=return_lse,
    )
    tables = fp8_arguments.tables_of(page_table, page_table_v)
    of = Fp8Forward(call, scales, q.dtype if out_dtype is None else out_dtype, tables)
    fp8_arguments.check_forward_on_pages(of)
    return of


def backward_of(
    *,
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scales: Fp8BackwardScales,
    is_causal: bool,
    causal_alignment: str,
    window_size: tuple[int, int] | None,
    scale: float | None,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    deterministic: bool | None,
) -> Fp8Backward:
    """A backward call, checked."""
    fp8_arguments.check_types(
        grad_out=grad_out, q=q, k=k, v=v, out=out, lse=lse, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv
    )
    fp8_arguments.check_scales_type(scales, Fp8BackwardScales)
    left, right = arguments.window_bounds(window_size)
    call = ForwardArguments(
        q=q,
        k=k,
        v=v,
        seq_lens_q=seq_lens_q,
        seq_lens_kv=seq_lens_kv,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_left=left,
        window_right=right,
        scale=scale,
        deterministic=is_deterministic(deterministic),
        with_lse=True,
    )
    of = Fp8Backward(grad_out=grad_out, out=out, lse=lse, call=call, scales=scales)
    fp8_arguments.check_backward(of)
    return of


def check_untracked(what: str, scales: Fp8Scales | Fp8BackwardScales, **tensors: Tensor) -> None:
    """Refuses inputs that autograd would have to track.

    Raises:
        UnsupportedError: A tensor or a scale requires grad, or has a tangent.
    """
    named_scales = {f"scales.{name}": scale for name, scale in scales._asdict().items()}
    fp8_arguments.check_no_gradient(what, **tensors, **named_scales)
    autograd_checks.refuse_tangents({**tensors, **named_scales}, "attention in bfloat16")
    autograd_checks.refuse_transforms(what, *tensors.values(), *scales, loops=False)
