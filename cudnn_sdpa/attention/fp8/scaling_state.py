"""The tensors of `Fp8Scaling` and the table of one call's scales, on the GPU; and what the host counts of its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import dtype_name
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.errors import DeviceError, DtypeError

NAMES = ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")
Q, K, V, S, O, DO, DP, DQ, DK, DV = range(len(NAMES))  # noqa: E741 - the name of the output in this field

SCALE, DESCALE, AMAX = range(3)
SLOT = 4  #: floats that a number has to itself

#: The scale of the probabilities. They are 1 at most, so that nothing has to be learned about them. A power of two,
#: whose inverse is exact, and not 448: a kernel whose maximum of a row lags behind sees exponentials a little over 1.
SCALE_S = 256.0

#: The least that an amax counts for, so that no scale and no descale is infinite or subnormal.
TINY = 2.0**-110


def new_table(device: torch.device) -> Tensor:
    """A table, (3, 10, 4) float32, of which the first of every four floats counts; amax values of 0."""
    return torch.zeros(3, len(NAMES), SLOT, dtype=torch.float32, device=device)


def number(table: Tensor, part: int, row: int) -> Tensor:
    """One number of a table as a tensor of one element."""
    return table[part, row, :1]


def forward_scales(table: Tensor) -> Fp8Scales:
    """What `sdpa_fp8` takes, as views of a table."""
    descales = [number(table, DESCALE, row) for row in (Q, K, V, S)]
    return Fp8Scales(*descales, *(number(table, SCALE, row) for row in (S, O)))


def backward_scales(forward: Tensor, backward: Tensor) -> Fp8BackwardScales:
    """What `sdpa_fp8_backward` takes, as views of the forward pass's table and of one of its own."""
    return Fp8BackwardScales(
        descale_q=number(forward, DESCALE, Q),
        descale_k=number(forward, DESCALE, K),
        descale_v=number(forward, DESCALE, V),
        descale_o=number(forward, DESCALE, O),
        descale_do=number(backward, DESCALE, DO),
        descale_s=number(forward, DESCALE, S),
        descale_dp=number(backward, DESCALE, DP),
        scale_s=number(forward, SCALE, S),
        scale_dq=number(backward, SCALE, DQ),
        scale_dk=number(backward, SCALE, DK),
        scale_dv=number(backward, SCALE, DV),
        scale_dp=number(backward, SCALE, DP),
    )


def scale_for(limit: float | Tensor, amax: Tensor) -> Tensor:
    """The scale that takes an amax to a limit; 1 where there is nothing to go by: 0, infinity or NaN."""
    known = amax.isfinite() & (amax > 0)
    if not isinstance(limit, Tensor):  # a number by a tensor is a product with 1 / tensor, rounded twice
        limit = torch.full_like(amax, limit)
    return torch.where(known, limit / amax.clamp_min(TINY), torch.ones_like(amax))


def set_scales(table: Tensor, first: int, scales: Tensor) -> None:
    """Writes the scales of consecutive tensors, from `first` on, and one over them."""
    rows = slice(first, first + scales.numel())
    table[SCALE, rows, 0] = scales
    table[DESCALE, rows, 0] = 1 / scales


if TYPE_CHECKING:
    from typing_extensions import Self


class Fp8State(nn.Module):
    """Scales of ten tensors, the amax values that they come from, and what these shall become.

    All in float32, whatever a model is converted to, and never inference tensors, since each step writes them.

    Attributes:
        scale: The scale of each tensor, (10,).
        amax: The largest absolute values of a step, (10,).
        amax_history: Those of the steps before, (10, history), the latest first.
        limits: What the amax values shall become, (10,); 0 where the scale stays. It is not saved.
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
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        with torch.inference_mode(mode=False):
            clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone


# What the host counts of a layer's steps, so that it need not read what the GPU knows of them.


class Steps:
    """Which passes a step has had, and whether scales come from the tensors at hand or from a history.

    The first steps of a pass *calibrate*: one of them alone may have taught nothing, as its amax values may have
    been zeros, or not finite. That is on the GPU; the host goes by their number.

    Attributes:
        calibration: How many steps calibrate.
        recorded: Whether this step has had a forward pass, and a backward pass.
        sure: Whether each of them goes by the history, without another question: what a warm call reads.
    """

    __slots__ = ("_chosen", "_done", "_settled", "calibration", "recorded", "sure")

    def __init__(self, calibration: int) -> None:
        self.calibration = calibration
        self.begin_anew([False, False], [False, False])

    def begin_anew(self, has_history: list[bool], recorded: list[bool]) -> None:
        """Forgets what was counted: a pass that has a history is through with calibrating, another has not begun."""
        self.recorded = recorded
        self._done = [self.calibration if known else 0 for known in has_history]
        self._settled, self.sure = list(has_history), list(has_history)
        self._chosen = has_history[0]

    def end(self) -> None:
        """Ends a step."""
        for place, recorded in enumerate(self.recorded):
            self._done[place] += recorded
            self._settled[place] = self._done[place] >= self.calibration
        self.sure[1] = self._settled[1]  # of the forward pass `choose` decides
        self.recorded = [False, False]

    def is_over(self) -> bool:
        """Whether the next forward pass is the beginning of another step."""
        return self.recorded[1] and not is_within_backward()

    def by_history(self, *, backward: bool, is_cuda: bool) -> bool:
        """Whether a pass would take its scales from the history.

        What is captured in a CUDA graph does as soon as there may be one: else its replays would calibrate for ever.
        """
        if self._settled[backward]:
            return True
        return is_cuda and self._done[backward] > 0 and torch.cuda.is_current_stream_capturing()

    def choose(self, *, is_cuda: bool) -> bool:
        """Whether a forward pass takes its scales from the history.

        One that runs within a backward pass is a repetition, as by checkpointing, which does as the latest call did
        that was none, also if an update came in between.
        """
        found = self.by_history(backward=False, is_cuda=is_cuda)
        if found != self._chosen and not is_within_backward():
            self._chosen = found
        self.sure[0] = self._chosen and self._settled[0]
        return self._chosen


def is_within_backward() -> bool:
    """Whether a backward pass is under way on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
