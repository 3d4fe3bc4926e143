"""What `explain` says of calls on a paged cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments, reference
from cudnn_sdpa.attention.arguments import MIN_SCALE
from cudnn_sdpa.attention.dense import explain, graphs
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged import arguments as paged_arguments
from cudnn_sdpa.attention.paged import launch, prefill, torch_ops
from cudnn_sdpa.attention.paged.arguments import HND, PagedArguments, in_heads_order
from cudnn_sdpa.attention.paged.decode_plans import MAX_DECODED, DecodeSpec, is_decode
from cudnn_sdpa.attention.paged.sdpa_paged import refuse_gradients, sdpa_paged
from cudnn_sdpa.attention.verify import Results, compare, empty_like, exact_inputs
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.target import live_target


@describes(sdpa_paged)
def describe_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = None,
    seq_lens_q: Tensor | None = None,
    page_layout: str = HND,
    is_causal: bool = True,
    causal_alignment: str = BOTTOM_RIGHT,
    window_size: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Description:
    """What `sdpa_paged` with these arguments runs on a GPU."""
    left, right = arguments.window_bounds(window_size)
    k, v = in_heads_order(k_pages, page_layout), in_heads_order(v_pages, page_layout)
    table_v = page_table if page_table_v is None else page_table_v
    call = PagedArguments(
        q=q,
        k=k,
        v=v,
        table_k=page_table,
        table_v=table_v,
        seq_lens_kv=seq_lens_kv,
        seq_lens_q=seq_lens_q,
        sinks=sinks,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_left=left,
        window_right=right,
        scale=scale,
        softcap=softcap,
        with_lse=return_lse,
        out=out,
    )
    paged_arguments.check(call)
    refused = UnsupportedError.of(refuse_gradients, call)
    if refused is not None:
        return Description(graphs.paged_decode, partial(explain.refuse, refused), explain.device_of(q))
    torch_ops.check_memory(call)
    launched, scale_notes = with_positive_scale(call)
    device = explain.device_of(q)
    described = describe_decode(launched, device) if is_decode(call) else describe_prefill(launched, device)
    if is_decode(call) and device is not None and UnsupportedError.of(described.key, live_target(device), device):
        described = describe_prefill(launched, device)
    return replace(
        described,
        extra_kernels=[*scale_notes, *described.extra_kernels],
        verify=lambda _: errors_paged(call),
    )


def with_positive_scale(call: PagedArguments) -> tuple[PagedArguments, list[str]]:
    """The call that is launched, as cuDNN takes positive scales only, and notes on what that takes."""
    if call.scale_value >= MIN_SCALE:
        return call, []
    sign = 0.0 if call.scale_value > -MIN_SCALE else -1.0
    q = _without_data(call.q) * sign
    return call._replace(q=q), [f"q is multiplied by {sign:.0f} into a copy, as the scale is not positive"]


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def describe_decode(call: PagedArguments, device: int | None) -> Description:
    """What `explain` says of a call that `paged.launch` runs."""
    reasons = launch.reasons_against_in_place(call)
    decode = DecodeSpec.of(call, in_place=not reasons)
    notes = []
    if reasons:
        why = "; ".join(reasons)
        notes.append(f"one kernel clamps page ids and lengths to the cache, and copies queries ({why})")
    if call.sinks is not None:
        notes.append("sinks are applied to the output and the log-sum-exp (cuDNN has none for single queries)")
    if call.out is not None:
        notes.append("the output is copied into out")
    return Description(
        operation=graphs.paged_decode,
        key=decode.key,
        device=device,
        is_empty=_is_empty(call),
        extra_kernels=notes,
    )


def describe_prefill(call: PagedArguments, device: int | None) -> Description:
    """What `explain` says of a call that `paged.prefill` runs, or of its first part if the batch is split."""
    at_once = prefill.sequences_at_once(call)
    parts = -(-call.q.shape[0] // at_once)
    packed, out = prefill.prefill_spec(call)
    _, heads, _, dim = call.k.shape
    rows = min(call.q.shape[0], at_once) * call.max_kv_len
    size = rows * heads * (dim + call.v.shape[3]) * call.k.element_size() / 2**20
    why = _why_prefill(call, call.q.shape[2])
    notes = [f"one kernel gathers keys and values into contiguous memory, up to {size:.0f} MiB ({why})"]
    notes += [f"the batch is split into {parts} parts of up to {at_once} sequences"] * (parts > 1)
    notes += packed.extra_kernels(with_lse=call.with_lse)
    return Description(
        operation=graphs.sdpa_forward,
        key=partial(packed.forward_key, out, call.with_lse),
        device=device,
        is_empty=_is_empty(call),
        extra_kernels=notes,
    )


def _why_prefill(call: PagedArguments, queries: int) -> str:
    if call.softcap is not None:
        return "logit soft-capping"
    return f"{queries} queries per sequence" if queries > MAX_DECODED else "the decode kernels lack this window"


def _is_empty(call: PagedArguments) -> bool:
    return 0 in call.q.shape or call.table_k.shape[1] == 0


def errors_paged(call: PagedArguments) -> dict[str, float]:
    """The errors of a call against the reference, for `verify`; there are no gradients."""
    out = call.out if call.out is None else empty_like(call.out)
    result = torch_ops.forward_cuda(call._replace(out=out)) if call.q.is_cuda else torch_ops.forward_cpu(call)
    output, lse = result if isinstance(result, tuple) else (result, None)
    exact = reference.attention(exact_inputs(torch_ops.as_dense(call), ("q", "k", "v", "sinks")))
    return compare(Results(output, lse, {}), Results(*exact, {}))
