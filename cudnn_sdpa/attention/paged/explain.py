"""What `explain` says of calls on a paged cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention import reference as dense_reference
from cudnn_sdpa.attention.arguments import as_float, as_sinks, with_positive_scale
from cudnn_sdpa.attention.dense import explain, graphs
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.attention.paged import plans, reference
from cudnn_sdpa.attention.paged.arguments import HND, PagedArguments
from cudnn_sdpa.attention.paged.plans import MAX_DECODED, DecodeSpec, is_decode
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED, sdpa_paged
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
    call = PagedArguments(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        page_table=page_table,
        page_table_v=None if page_table_v is page_table else page_table_v,
        seq_lens_kv=seq_lens_kv,
        seq_lens_q=seq_lens_q,
        sinks=as_sinks(sinks),
        page_layout=page_layout,
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        window_left=left,
        window_right=right,
        scale=as_float(scale),
        softcap=as_float(softcap),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        with_lse=return_lse,
        out=out,
    )
    PAGED.check_types(call)
    original, call = call, PAGED.cast(call)
    refused = UnsupportedError.of(PAGED.check_all, call)
    if refused is not None:
        return Description(graphs.paged_decode, partial(explain.refuse, refused), explain.device_of(q))
    PAGED.check_strides(call)
    PAGED.check_memory(call)
    launched, device = with_positive_scale(call), explain.device_of(q)
    described = describe_decode(launched, device) if is_decode(call) else describe_prefill(launched, device)
    if is_decode(call) and device is not None and UnsupportedError.of(described.key, live_target(device), device):
        described = describe_prefill(launched, device)
    notes = [
        *explain.notes_on_casts(original, call),
        *explain.notes_on_sinks(sinks),
        *explain.notes_on_scale(call),
        *described.extra_kernels,
    ]
    return replace(described, extra_kernels=notes, verify=lambda _: errors_paged(call))


def describe_decode(call: PagedArguments, device: int | None) -> Description:
    """What `explain` says of a call that runs as a decode step."""
    reasons = plans.reasons_against_in_place(call)
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
        is_empty=call.is_empty,
        extra_kernels=notes,
    )


def describe_prefill(call: PagedArguments, device: int | None) -> Description:
    """What `explain` says of a call that runs as prefill, or of its first part if the batch is split."""
    at_once = plans.sequences_at_once(call)
    parts = -(-call.q.shape[0] // at_once)
    packed, out = plans.prefill_spec(plans.batch_entries(call, slice(0, at_once)))
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
        is_empty=call.is_empty,
        extra_kernels=notes,
    )


def _why_prefill(call: PagedArguments, queries: int) -> str:
    if call.softcap is not None:
        return "logit soft-capping"
    return f"{queries} queries per sequence" if queries > MAX_DECODED else "the decode kernels lack this window"


def errors_paged(call: PagedArguments) -> dict[str, float]:
    """The errors of a call against the reference, for `verify`; there are no gradients."""
    out = call.out if call.out is None else empty_like(call.out)
    result = PAGED.runner(call)(call._replace(out=out))
    output, lse = result if isinstance(result, tuple) else (result, None)
    exact = dense_reference.attention(exact_inputs(reference.as_dense(call), ("q", "k", "v", "sinks")))
    return compare(Results(output, lse, {}), Results(*exact, {}))
