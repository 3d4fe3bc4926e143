"""A call of `kernels.attention`, and its backward call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from torch import Tensor

from cudnn_sdpa.attention import bias, sharding
from cudnn_sdpa.attention.arguments import warn_of_order
from cudnn_sdpa.engine.dispatch_state import cast_fields
from cudnn_sdpa.engine.operation.call import BackwardCall, Call
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.kernels import arguments, launch, plans
from cudnn_sdpa.kernels import reference as in_pytorch
from cudnn_sdpa.kernels.arguments import Gradient, KernelArguments


class KernelAttentionCall(KernelArguments, Call):  # type: ignore[misc]  # a NamedTuple's `_replace`
    __slots__ = ()

    check_types = arguments.check_types
    check_options = arguments.check_options
    check = arguments.check
    check_memory = arguments.check_memory
    outputs = plans.results
    bind = launch.prepare
    keys = plans.keys
    flops = in_pytorch.flops

    def autocast(self) -> dict[str, object]:
        return cast_fields(self, "q", "k", "v", "mask")

    def log_key(self) -> Hashable:
        return self.q.dtype, self.mode

    def reference(self) -> tuple[Tensor, ...]:
        warn_of_order(self)
        return in_pytorch.attention(self)

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.kernels(self._asdict())


class KernelAttentionBackwardCall(Gradient, BackwardCall[KernelAttentionCall]):  # type: ignore[misc]  # `call`, `_replace`
    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def call(self) -> KernelAttentionCall: ...

    make_readable = launch.readable
    reference = in_pytorch.gradients
    bind = launch.prepare_gradients
    keys = plans.keys

    @staticmethod
    def new_gradient(name: str, tensor: Tensor) -> Tensor:
        return bias.new_gradient("attn_mask" if name == "mask" else name, tensor)
