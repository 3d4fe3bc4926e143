"""A call of `sdpa_paged_varlen`."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.call import AttentionCall
from cudnn_sdpa.attention.cpu_checks import check_offsets
from cudnn_sdpa.attention.paged_varlen import arguments, launch, plans
from cudnn_sdpa.attention.paged_varlen import reference as in_pytorch
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.dispatch_state import cast_tensor
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.errors import UnsupportedError


class PagedVarlenCall(PagedVarlenArguments, AttentionCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa_paged_varlen`; its methods are described in `Call`."""

    __slots__ = ()

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

    def autocast(self) -> dict[str, object]:
        """The queries in autocast's dtype, if pages have that dtype, or one in FP8."""
        q: Tensor = cast_tensor(self.q, self.q)
        return {"q": q} if q.dtype == self.k_pages.dtype or self.k_pages.dtype in FP8_DTYPES else {}

    def check_strides_for_gpu(self) -> None:
        self.check_strides()
        check_offsets(q=self.q, k_pages=self.k_pages, v_pages=self.v_pages, out=self.out)
        if self.out is not None and self.out.numel():
            tensor_checks.check_strides_of_out(self.out, for_cudnn=True)

    def check_gradient(self) -> NoReturn:
        raise UnsupportedError(
            "sdpa_paged_varlen with a gradient",
            ["an input requires grad, and attention on a paged cache is for inference only"],
            "calling it under torch.no_grad(), or sdpa_varlen for training",
        )

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.paged_varlen(self._asdict())


class ReferencePagedVarlenCall(PagedVarlenCall):
    """A call that the PyTorch reference runs, on any device, without the kernel's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False
