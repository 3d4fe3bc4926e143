"""Descriptions of calls of packed queries on a paged cache for `explain`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cudnn_sdpa.attention import sharding, sink_scores
from cudnn_sdpa.attention.dense import explain
from cudnn_sdpa.attention.paged_varlen import plans, reference
from cudnn_sdpa.attention.paged_varlen.call import PagedVarlenCall
from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import PAGED_VARLEN, call_of, sdpa_paged_varlen
from cudnn_sdpa.attention.verify import Results, compare, empty_like
from cudnn_sdpa.engine.explain import Description, describes


@describes(sdpa_paged_varlen, sharding.paged_varlen)
def describe_paged_varlen(**given: Any) -> Description:
    checked = PAGED_VARLEN.checked(call_of(**given), PAGED_VARLEN.cast)
    call, device = checked.cast, explain.device_of(checked.call.q)
    if checked.refused is not None:
        return Description.refused(plans.paged_varlen_forward, checked.refused, device)

    spec = plans.PagedForward(call)
    described = Description(
        operation=plans.paged_varlen_forward,
        key=partial(plans.chosen_key, spec),
        device=device,
        is_empty=call.is_empty,
        extra_kernels=[*explain.notes_on_casts(checked.call, call), *sink_scores.notes_on_conversion(given)],
        verify=lambda _: errors_paged_varlen(call),
    )
    return described if described.is_empty else explain.with_choice(described, spec)


def errors_paged_varlen(call: PagedVarlenCall) -> dict[str, float]:
    """The errors of a call against the reference, for `verify`; there are no gradients."""
    out = call.out if call.out is None else empty_like(call.out)
    result = PAGED_VARLEN.runner(call)(call._replace(out=out))
    output, lse = result if isinstance(result, tuple) else (result, None)
    exact = call._replace(q=call.q.detach().double(), out=None)
    if call.k_pages.dtype == call.q.dtype:
        exact = exact._replace(k_pages=call.k_pages.double(), v_pages=call.v_pages.double())
    return compare(Results(output, lse, {}), Results(*reference.attention(exact, torch.float64), {}))
