"""A call of `sdpa_paged`."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.call import CudnnCall
from cudnn_sdpa.attention.cpu_checks import check_offsets
from cudnn_sdpa.attention.paged import arguments, launch, specs
from cudnn_sdpa.attention.paged import reference as in_pytorch
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.dispatch_state import cast_tensor
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.errors import UnsupportedError


class PagedCall(PagedArguments, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa_paged`; its methods are described in `Call`."""

    __slots__ = ()

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

    def autocast(self) -> dict[str, object]:
        """The queries in autocast's dtype, if pages have that dtype, or one in FP8."""
        q: Tensor = cast_tensor(self.q, self.q)
        return {"q": q} if q.dtype == self.k_pages.dtype or self.k_pages.dtype in FP8_DTYPES else {}

    def check_strides_for_gpu(self) -> None:
        self.check_strides()
        with arguments.named():
            check_offsets(q=self.q, k=self.k, v=self.v, out=self.out)
        if self.out is not None and self.out.numel():
            tensor_checks.check_strides_of_out(self.out, for_cudnn=True)

    def check_gradient(self) -> NoReturn:
        raise UnsupportedError(
            "sdpa_paged with a gradient",
            ["an input requires grad, and attention on a paged cache is for inference only"],
            "calling it under torch.no_grad(), or sdpa_varlen for training",
        )

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.paged(self._asdict())


class ReferencePagedCall(PagedCall):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False
