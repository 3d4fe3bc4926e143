"""A call of `sdpa`, and its backward call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cudnn_sdpa.attention import arguments, bias, sharding
from cudnn_sdpa.attention.arguments import ForwardArguments, GradientCall, warn_of_order
from cudnn_sdpa.attention.call import CudnnBackwardCall, CudnnCall
from cudnn_sdpa.attention.cpu_checks import check_strides_of_dense
from cudnn_sdpa.attention.dense import forward, launch, parts
from cudnn_sdpa.attention.dense import reference as in_pytorch
from cudnn_sdpa.engine.dispatch_state import cast_fields
from cudnn_sdpa.engine.sharding import ShardingStrategy


class SdpaCall(ForwardArguments, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa`; its methods are described in `Call`."""

    __slots__ = ()

    is_for_cudnn = property(arguments.is_for_cudnn)
    check_types = arguments.check_types
    check = arguments.check
    check_values = arguments.check_values
    check_strides = arguments.check_dense_strides
    check_memory = arguments.check_dense_memory
    check_strides_for_gpu = check_strides_of_dense
    check_gradient_keys = parts.check_gradient
    by_pytorch = in_pytorch.by_pytorch
    bind = forward.prepare
    keys = parts.keys
    flops = in_pytorch.flops

    def autocast(self) -> dict[str, object]:
        return cast_fields(self, "q", "k", "v", "attn_mask")

    def reference(self) -> tuple[Tensor, ...]:
        warn_of_order(self)
        return in_pytorch.attention(self)

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.dense(self._asdict() | self.softmax._asdict())


class ReferenceSdpaCall(SdpaCall):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False


class SdpaBackwardCall(GradientCall, CudnnBackwardCall[SdpaCall]):  # type: ignore[misc]  # `call`, `_replace`
    """A backward call of `sdpa`; its methods are described in `BackwardCall`."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def call(self) -> SdpaCall: ...

    new_gradient = staticmethod(bias.new_gradient)
    make_readable = launch.readable
    reference = in_pytorch.gradients
    bind = launch.prepare_gradients
    keys = parts.gradient_keys
