"""Styles of `parallel_plan` beyond PyTorch's own; imported only with `torch.distributed`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from cudnn_sdpa.errors import OptionError


class GatheredTokens(ParallelStyle):
    """Converts the tokens that a module reads to DTensors, whole on each process, once for all projections.

    So their gradients are added before a single sum over processes. PyTorch's `PrepareModuleInput` does that for a
    fixed number of positional arguments; these are x and, for cross-attention, the context, by position or name. Plain
    tokens are whole (`Replicate()`), or a part of the sequence on each process (`Shard(1)`).
    """

    def __init__(self, placement: Placement, names: tuple[str, ...] = ("x", "context")) -> None:
        super().__init__()
        self.placement, self.names = placement, names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = len(self.names)

        def gather(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args = (*[self._gathered(x, device_mesh) for x in args[:count]], *args[count:])
            if not args and self.names[0] not in kwargs:  # projections would treat a part of the sequence as the whole
                got = f"arguments named {', '.join(kwargs)}" if kwargs else "no argument"
                raise OptionError(self.names[0], got, f"tokens by position or as {self.names[0]}")
            named = {name: self._gathered(kwargs[name], device_mesh) for name in self.names if name in kwargs}
            return args, kwargs | named

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module

    def _gathered(self, x: object, mesh: DeviceMesh) -> object:
        if not isinstance(x, Tensor):  # no context, or its keys and values
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.placement], run_check=False)
        if x.placements != (Replicate(),):
            x = x.redistribute(placements=[Replicate()])
        return x

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.placement}, {self.names})"
