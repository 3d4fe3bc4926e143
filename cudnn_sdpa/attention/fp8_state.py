"""The tensors of `Fp8Scaling`: made, moved, copied, loaded and checked so that kernels may read them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.fp8_tables import DO, NAMES, SCALE_S, S
from cudnn_sdpa.attention.side_tensors import dtype_name
from cudnn_sdpa.errors import DeviceError, DtypeError

if TYPE_CHECKING:
    from typing_extensions import Self


class Fp8State(nn.Module):
    """Scales of ten tensors, the largest values that they come from, and what these shall become.

    All in float32, whatever a model is converted to, and never inference tensors, since each step writes them.

    Attributes:
        scale: The scale of each tensor, (10,).
        amax: The largest absolute values of a step, (10,).
        amax_history: Those of the steps before, (10, history), the latest first.
        limits: What the largest values shall become, (10,); 0 where the scale stays. It is not saved.
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor
    limits: Tensor

    def __init__(self, history: int, limits: tuple[float, float], device: Any) -> None:
        super().__init__()
        self._limits = limits  # of the tensors of the forward pass, and of gradients
        for name, tensor in self._fresh(history, device).items():
            self.register_buffer(name, tensor, persistent=name != "limits")

    def _fresh(self, history: int, device: Any) -> dict[str, Tensor]:
        """The state of a layer that has seen nothing."""
        forward, backward = self._limits
        limits = [forward] * DO + [backward] * (len(NAMES) - DO)
        limits[S] = 0.0  # its scale stays
        with torch.inference_mode(mode=False):
            scale = torch.ones(len(NAMES), dtype=torch.float32, device=device)
            scale[S].fill_(SCALE_S)
            return {
                "scale": scale,
                "amax": torch.zeros_like(scale),
                "amax_history": torch.zeros(len(NAMES), history, dtype=torch.float32, device=device),
                "limits": torch.tensor(limits, dtype=torch.float32, device=device),
            }

    def reset_parameters(self) -> None:
        """Forgets all steps, in place; the next ones find their scales anew."""
        for name, tensor in self._fresh(self.amax_history.shape[1], self.scale.device).items():
            self._buffers[name].copy_(tensor)  # type: ignore[union-attr]

    def check(self) -> None:
        """Whether the state is such that kernels may read it.

        Raises:
            DtypeError: Somebody has made other numbers of it than float32.
            DeviceError: Parts of it lie apart.
        """
        for name, tensor in self._buffers.items():
            if tensor is None or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                got = "None" if tensor is None else f"{dtype_name(tensor.dtype)} with strides {tensor.stride()}"
                raise DtypeError(f"scaling.{name}", got, "dense float32", "load_state_dict() and .to() keep it so.")
            if tensor.device != self.scale.device:
                raise DeviceError(f"scaling.{name}", str(tensor.device), f"{self.scale.device}, where scaling.scale is")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the state; other than its device nothing of it changes, as cuDNN reads scales in float32."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        with torch.inference_mode(mode=False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, old in before.items():
                new = self._buffers[name]
                if new is not None and old.is_meta and not new.is_meta:  # what it had there was no state
                    self._buffers[name] = self._fresh(self.amax_history.shape[1], new.device)[name]
                elif new is not None and new.dtype != torch.float32:
                    self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        with torch.inference_mode(mode=False), torch.no_grad():
            for name in ("scale", "amax", "amax_history"):  # `assign=True` takes tensors as they are
                loaded = getattr(self, name)
                own = loaded.clone() if loaded.is_inference() or loaded is state_dict.get(prefix + name) else loaded
                self._buffers[name] = own.to(torch.float32).contiguous()
            if self.limits.device != self.scale.device:
                self._buffers["limits"] = self._fresh(1, self.scale.device)["limits"]
            if f"{prefix}amax_history" in state_dict and not self.amax_history.is_meta:
                self._take_over()

    def _take_over(self) -> None:
        """What follows from a history that was loaded."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        with torch.inference_mode(mode=False):
            twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin
