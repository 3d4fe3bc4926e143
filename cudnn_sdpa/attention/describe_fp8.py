"""Descriptions of calls in FP8 for `explain`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention import fp8, fp8_graphs, memory
from cudnn_sdpa.attention.describe import device_of, refuse
from cudnn_sdpa.attention.fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.fp8_arguments import Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8_passes import Backward, Forward
from cudnn_sdpa.attention.fp8_repairs import readable
from cudnn_sdpa.attention.options import TOP_LEFT
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.runtime.describe import Description, describes
from cudnn_sdpa.runtime.key import PlanKey
from cudnn_sdpa.runtime.target import Target


@describes(sdpa_fp8)
def describe_sdpa_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Fp8Scales,
    *,
    is_causal: bool = False,
    causal_alignment: str = TOP_LEFT,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    page_table_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
) -> Description:
    """What `sdpa_fp8` with these arguments runs on a GPU; tensors may also be on the CPU."""
    of = fp8.forward_of(
        *(q, k, v, scales, is_causal, causal_alignment, window, scale, seq_lens_q, seq_lens_kv),
        *(page_table, page_table_v, out_dtype, return_lse),
    )
    memory.check_strides(q, k, v)
    memory.check_addresses(q=q, k=k, v=v)
    operation = fp8_graphs.sdpa_fp8_forward
    refused = UnsupportedError.of(fp8.check_untracked, "sdpa_fp8", scales, q=q, k=k, v=v)
    if refused is not None:
        return Description(operation, partial(refuse, refused), device_of(q))
    forward = Forward.of(of)
    is_empty = forward.problem.is_empty
    notes = [] if is_empty else forward.extra_kernels()
    return Description(operation, forward.key, device_of(q), is_empty=is_empty, extra_kernels=notes)


@describes(sdpa_fp8_backward)
def describe_sdpa_fp8_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scales: Fp8BackwardScales,
    *,
    is_causal: bool = False,
    causal_alignment: str = TOP_LEFT,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
    deterministic: bool | None = None,
) -> Description:
    """The same of `sdpa_fp8_backward`."""
    of = fp8.backward_of(
        *(grad_out, q, k, v, out, lse, scales, is_causal, causal_alignment, window, scale, seq_lens_q, seq_lens_kv),
        deterministic,
    )
    memory.check_strides(q, k, v)
    memory.check_strides_of("out", out)
    memory.check_addresses(q=q, k=k, v=v, out=out, lse=lse)
    operation = fp8_graphs.sdpa_fp8_backward
    tensors = {"grad_out": grad_out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    refused = UnsupportedError.of(fp8.check_untracked, "sdpa_fp8_backward", scales, **tensors)
    if refused is not None:
        return Description(operation, partial(refuse, refused), device_of(q))
    backward = Backward.of(readable(of))
    is_empty = backward.problem.is_empty
    notes = [] if is_empty else backward.extra_kernels()

    def key(target: Target, device: int | None) -> PlanKey:
        return backward.piece(target).key(target, device)

    return Description(operation, key, device_of(q), is_empty=is_empty, extra_kernels=notes)
