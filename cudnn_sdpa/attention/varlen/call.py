"""A call of `sdpa_varlen`, and its backward call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.call import CudnnBackwardCall, CudnnCall
from cudnn_sdpa.attention.cpu_checks import check_strides_of_dense
from cudnn_sdpa.attention.varlen import arguments, launch, specs
from cudnn_sdpa.attention.varlen import reference as in_pytorch
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments, VarlenGradientCall
from cudnn_sdpa.engine.dispatch_state import cast_fields
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target


class VarlenCall(VarlenArguments, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    """A call of `sdpa_varlen`; its methods are described in `Call`."""

    __slots__ = ()

    check_types = arguments.check_types
    omitted = ("alibi",)
    check = arguments.check
    check_values = arguments.check_values
    check_strides = arguments.check_strides
    check_gradient_keys = specs.check_gradient
    bind = launch.prepare
    keys = specs.keys
    flops = in_pytorch.flops
    reference = in_pytorch.attention

    def autocast(self) -> dict[str, object]:
        return cast_fields(self, "q", "k", "v")

    def check_strides_for_gpu(self) -> None:
        check_strides_of_dense(self.as_dense())

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.varlen(self._asdict())


class ReferenceVarlenCall(VarlenCall):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    is_for_cudnn = False


class VarlenBackwardCall(VarlenGradientCall, CudnnBackwardCall[VarlenCall]):  # type: ignore[misc]  # `call`, `_replace`
    """A backward call of `sdpa_varlen`; its methods are described in `BackwardCall`."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def call(self) -> VarlenCall: ...

    make_readable = launch.readable
    reference = in_pytorch.gradients
    bind = launch.prepare_gradients
    keys = specs.gradient_keys

    def check_keys(self, target: Target) -> None:
        if self.call.is_empty:
            return
        call = specs.dense_queries(self.call)  # others are copied
        for key in self._replace(call=call).keys(target, None):
            known_issues.check(key)
