"""Calls of `sdpa_paged_varlen` bound to their plans."""

from __future__ import annotations

from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.engine.launch import Prepared


def prepare(call: PagedVarlenArguments) -> Prepared:
    raise NotImplementedError(type(call))
