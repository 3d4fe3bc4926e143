"""A call of `sdpa_paged`."""

from __future__ import annotations

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.call import CudnnCall, PagesCall
from cudnn_sdpa.attention.paged import arguments, launch, specs
from cudnn_sdpa.attention.paged import reference as in_pytorch
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.engine.sharding import ShardingStrategy


class PagedCall(PagedArguments, PagesCall, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa_paged`; its methods are described in `Call`."""

    __slots__ = ()

    function = "sdpa_paged"
    extra_key = specs.marks_of
    check_types = arguments.check_types
    omitted = ("dropout_p", "alibi")
    check = arguments.check
    check_values = arguments.check_values
    check_strides = arguments.check_strides
    check_memory = arguments.check_memory
    bind = launch.prepare
    keys = specs.keys
    flops = in_pytorch.flops
    reference = in_pytorch.attention

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.paged(self._asdict())


class ReferencePagedCall(PagedCall):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False
