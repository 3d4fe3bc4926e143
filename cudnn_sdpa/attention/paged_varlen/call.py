"""A call of `sdpa_paged_varlen`."""

from __future__ import annotations

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.call import PagesCall
from cudnn_sdpa.attention.paged_varlen import arguments, launch, plans
from cudnn_sdpa.attention.paged_varlen import reference as in_pytorch
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.engine.sharding import ShardingStrategy


class PagedVarlenCall(PagedVarlenArguments, PagesCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa_paged_varlen`; its methods are described in `Call`."""

    __slots__ = ()

    function = "sdpa_paged_varlen"
    check_types = arguments.check_types
    omitted = ("dropout_p", "alibi", "deterministic")
    check_options = arguments.check_options
    check = arguments.check
    check_values = arguments.check_values
    check_strides = arguments.check_strides
    check_memory = arguments.check_memory
    bind = launch.prepare
    keys = plans.keys
    flops = in_pytorch.flops
    reference = in_pytorch.attention

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.paged_varlen(self._asdict())


class ReferencePagedVarlenCall(PagedVarlenCall):
    """A call that the PyTorch reference runs, on any device, without the kernel's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False
