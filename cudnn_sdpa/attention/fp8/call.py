"""Calls of `sdpa_fp8` and `sdpa_fp8_backward`: two operations, neither of which autograd follows."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from cudnn_sdpa.attention import sharding
from cudnn_sdpa.attention.arguments import BEYOND_MASKS, warn_of_order
from cudnn_sdpa.attention.arguments import check_values as check_lengths
from cudnn_sdpa.attention.call import CudnnCall
from cudnn_sdpa.attention.cpu_checks import check_offsets
from cudnn_sdpa.attention.fp8 import arguments, launch, specs
from cudnn_sdpa.attention.fp8 import reference as in_pytorch
from cudnn_sdpa.attention.fp8.arguments import SCALES, Fp8Arguments, Fp8BackwardArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.errors import UnsupportedError


class Fp8Call(Fp8Arguments, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    __slots__ = ()

    omitted = (*BEYOND_MASKS, "deterministic")
    check_types = arguments.check_types
    check_options = arguments.check_options
    check = arguments.check
    check_values = arguments.check_values
    outputs = specs.results
    bind = launch.prepare
    keys = specs.keys
    flops = in_pytorch.flops

    def check_strides(self) -> None:
        tensor_checks.check_strides(self.q, self.k, self.v)

    def check_strides_for_gpu(self) -> None:
        self.check_strides()
        check_offsets(q=self.q, k=self.k, v=self.v)

    def check_gradient(self) -> NoReturn:
        _refuse_gradient("sdpa_fp8", self)

    def reference(self) -> tuple[Tensor, ...]:
        warn_of_order(self)
        return in_pytorch.results(self)

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.fp8(self._asdict() | self.softmax._asdict())


class Fp8BackwardCall(Fp8BackwardArguments, CudnnCall):  # type: ignore[misc]  # a NamedTuple's `_replace`
    __slots__ = ()

    omitted = BEYOND_MASKS
    check_types = arguments.check_types
    check_options = arguments.check_options
    check = arguments.check
    outputs = specs.results_of_backward
    bind = launch.prepare_backward
    keys = specs.keys_of_backward
    flops = in_pytorch.flops_of_backward_call
    reference = in_pytorch.results_of_backward

    def check_values(self) -> None:
        check_lengths(arguments.as_dense(self))

    def check_strides(self) -> None:
        tensor_checks.check_strides(self.q, self.k, self.v)
        tensor_checks.check_strides_of("out", self.out)

    def check_memory(self) -> None:
        lse = self.lse if self.lse.is_contiguous() else None  # otherwise it is copied
        tensor_checks.check_addresses(q=self.q, k=self.k, v=self.v, out=self.out, lse=lse)

    def check_strides_for_gpu(self) -> None:
        self.check_strides()
        check_offsets(q=self.q, k=self.k, v=self.v, out=self.out, lse=self.lse)

    def check_gradient(self) -> NoReturn:
        _refuse_gradient("sdpa_fp8_backward", self)

    def strategies(self) -> list[ShardingStrategy]:
        return sharding.fp8_backward(self._asdict())


def _refuse_gradient(what: str, call: Fp8Arguments | Fp8BackwardArguments) -> NoReturn:
    wanting = [name for name, x in call._asdict().items() if isinstance(x, Tensor) and needs_gradient(x)]
    reasons = [f"{SCALES.get(name, name)} requires grad, and autograd does not follow {what}" for name in wanting]
    raise UnsupportedError(
        f"the gradient of {what}", reasons, "torch.no_grad(), with the gradients of sdpa_fp8_backward"
    )
