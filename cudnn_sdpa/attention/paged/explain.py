"""Descriptions of calls on a paged cache for `explain`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cudnn_sdpa.attention import reference as dense_reference
from cudnn_sdpa.attention import sharding, sink_scores
from cudnn_sdpa.attention.arguments import as_launched
from cudnn_sdpa.attention.dense import explain, graphs
from cudnn_sdpa.attention.paged import reference, specs
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.call import PagedCall
from cudnn_sdpa.attention.paged.sdpa_paged import PAGED, call_of, sdpa_paged
from cudnn_sdpa.attention.paged.specs import MAX_DECODED, DecodeSpec, is_decode
from cudnn_sdpa.attention.paged_varlen import plans as own_kernel
from cudnn_sdpa.attention.paged_varlen.plans import paged_varlen_forward
from cudnn_sdpa.attention.paged_varlen.preferences import provider_of
from cudnn_sdpa.attention.sink_scores import SinkUse
from cudnn_sdpa.attention.verify import Results, compare, empty_like, exact_inputs
from cudnn_sdpa.engine.explain import Description, describes
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans.providers import OWN


@describes(sdpa_paged, sharding.paged)
def describe_paged(**given: Any) -> Description:
    checked = PAGED.checked(call_of(**given), PAGED.cast)
    original, call, refused = checked.call, checked.cast, checked.refused
    if refused is not None:
        return Description.refused(graphs.paged_decode, refused, explain.device_of(call.q))
    before = [*explain.notes_on_casts(original, call), *sink_scores.notes_on_conversion(given)]

    def verify(_: bool) -> dict[str, float]:
        return errors_paged(call)

    device = explain.device_of(call.q)
    by_own_kernel = Description(
        operation=paged_varlen_forward,
        key=partial(own_kernel.key_of, call),
        device=device,
        is_empty=call.is_empty,
        extra_kernels=before,
        verify=verify,
    )

    def by_cudnn() -> Description:
        launched = as_launched(call)
        described = describe_decode(launched, device) if is_decode(call) else describe_prefill(launched, device)
        if is_decode(call) and device is not None and UnsupportedError.of(described.key, live_target(device), device):
            described = describe_prefill(launched, device)
        notes = [*before, *explain.notes_on_scale(call), *described.extra_kernels]
        return replace(described, extra_kernels=notes, verify=verify)

    described = by_own_kernel if call.is_beyond_cudnn else by_cudnn()

    def on_target(target: Target) -> Description:
        try:
            provider, why = provider_of(call, target)
        except UnsupportedError as error:
            return Description.refused(graphs.paged_decode, error, device)
        return replace(by_own_kernel if provider == OWN else described, choice=why)

    return replace(described, on_target=on_target)


def describe_decode(call: PagedArguments, device: int | None) -> Description:
    split = specs.split_decode(call)
    call = specs.batch_entries(call, split[0].entries) if split else call
    reasons = specs.reasons_against_in_place(call)
    decode = DecodeSpec.of(call, in_place=not reasons)
    notes = [explain.note_on_parts("the call", len(split))] if split else []
    if reasons:
        why = "; ".join(reasons)
        notes.append(f"one kernel clamps page ids and lengths to the cache, and copies queries ({why})")
    use = SinkUse.AFTER_PLAN if call.has_sinks else SinkUse.ABSENT
    notes += sink_scores.notes_on_results(use, "cuDNN has none for single queries")
    if call.out is not None or split:
        notes.append("the output is copied into out")
    return Description(
        operation=graphs.paged_decode,
        key=decode.key,
        device=device,
        is_empty=call.is_empty,
        extra_kernels=notes,
    )


def describe_prefill(call: PagedArguments, device: int | None) -> Description:
    """Describes prefill, or its first part if the batch is split."""
    at_once, number = specs.sequences_at_once(call), len(specs.split_prefill(call))
    packed, out = specs.prefill_spec(specs.batch_entries(call, slice(0, at_once)))
    _, heads, _, dim = call.k.shape
    rows = min(call.q.shape[0], at_once) * call.max_kv_len
    size = rows * heads * (dim + call.v.shape[3]) * call.k.element_size() / 2**20
    why = _why_prefill(call, call.q.shape[2])
    notes = [f"one kernel gathers keys and values into contiguous memory, up to {size:.0f} MiB ({why})"]
    notes += [f"the batch is split into {number} parts of up to {at_once} sequences"] * (number > 1)
    notes += packed.extra_kernels(with_lse=call.with_lse)
    return Description(
        operation=graphs.sdpa_forward,
        key=partial(packed.forward_key, out, call.with_lse),
        device=device,
        is_empty=call.is_empty,
        extra_kernels=notes,
    )


def _why_prefill(call: PagedArguments, queries: int) -> str:
    if call.softmax.is_capped:
        return "logit soft-capping"
    if queries > MAX_DECODED:
        return f"{queries} queries per sequence"
    heads = call.k.shape[1]
    return f"{heads} heads" if heads > known_issues.MAX_GRID else "the decode kernels lack this window"


def errors_paged(call: PagedCall) -> dict[str, float]:
    """The errors of a call against the reference, for `verify`; there are no gradients."""
    out = call.out if call.out is None else empty_like(call.out)
    result = PAGED.runner(call)(call._replace(out=out))
    output, lse = result if isinstance(result, tuple) else (result, None)
    exact = dense_reference.attention(exact_inputs(reference.as_dense(call)))
    return compare(Results(output, lse, {}), Results(*exact, {}))
