"""The table of a call's scales, on the GPU, and the host's counts of a layer's steps."""

from __future__ import annotations

import torch
from torch import Tensor

from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Scales

NAMES = ("q", "k", "v", "s", "o", "do", "dp", "dq", "dk", "dv")
Q, K, V, S, O, DO, DP, DQ, DK, DV = range(len(NAMES))  # noqa: E741 - the name of the output in this field

SCALE, DESCALE, AMAX = range(3)
SLOT = 4  #: floats per number of a table: cuDNN wants each scale aligned to 16 bytes

#: The scale of the probabilities, fixed because they are at most 1. A power of two, whose inverse is exact, and below
#: 448, because a kernel that has not seen the maximum of a row yet computes exponentials a little over 1.
SCALE_S = 256.0

#: Lower bound of an amax, so that no scale and no descale is infinite or subnormal.
TINY = 2.0**-110


def new_table(device: torch.device) -> Tensor:
    """A table, (3, 10, 4) float32, with amax values of 0; only the first of every four floats is used."""
    return torch.zeros(3, len(NAMES), SLOT, dtype=torch.float32, device=device)


def number(table: Tensor, part: int, row: int) -> Tensor:
    """One number of a table as a tensor of one element."""
    return table[part, row, :1]


#: The part and the row of a table in which each scale is.
_PLACES = {
    kind: [
        (DESCALE if part == "descale" else SCALE, NAMES.index(of)) for part, of in (x.split("_") for x in kind._fields)
    ]
    for kind in (Fp8Scales, Fp8BackwardScales)
}


def forward_scales(table: Tensor) -> Fp8Scales:
    return Fp8Scales(*[number(table, *place) for place in _PLACES[Fp8Scales]])


def backward_scales(forward: Tensor, backward: Tensor) -> Fp8BackwardScales:
    """The scales of a backward pass, given its table and that of its forward pass."""
    places = _PLACES[Fp8BackwardScales]
    return Fp8BackwardScales(*[number(forward if row < DO else backward, part, row) for part, row in places])


def scale_for(limit: float | Tensor, amax: Tensor) -> Tensor:
    """The scale that maps an amax to a limit; 1 if the amax is 0, infinite or NaN."""
    known = amax.isfinite() & (amax > 0)
    if not isinstance(limit, Tensor):  # PyTorch would divide it as limit · (1 / amax), which rounds twice
        limit = torch.full_like(amax, limit)
    return torch.where(known, limit / amax.clamp_min(TINY), torch.ones_like(amax))


def set_scales(table: Tensor, first: int, scales: Tensor) -> None:
    """Writes the scales and descales of consecutive tensors, from `first` on."""
    rows = slice(first, first + scales.numel())
    table[SCALE, rows, 0] = scales
    table[DESCALE, rows, 0] = 1 / scales


# The host's counts of a layer's steps: it need not read the GPU's state.


class Steps:
    """Which passes a step has had, and whether scales come from the tensors of the call or from the history.

    The first steps of a pass *calibrate*. Several do, because one step alone may have amax values that are zero or not
    finite. Only the GPU knows that; the host counts steps.

    Attributes:
        recorded: Whether this step has had a forward pass, and whether a backward pass.
        sure: Whether a forward pass, and a backward pass, takes its scales from the history without further checks; a
            warm call reads nothing else.
    """

    __slots__ = ("_chosen", "_done", "_settled", "calibration", "recorded", "sure")

    def __init__(self, calibration: int) -> None:
        self.calibration = calibration
        self.restart([False, False], [False, False])

    def restart(self, has_history: list[bool], recorded: list[bool]) -> None:
        """Resets the counts: a pass with a history has finished calibrating, one without begins."""
        self.recorded = recorded
        self._done = [self.calibration if known else 0 for known in has_history]
        self._settled, self.sure = list(has_history), list(has_history)
        self._chosen = has_history[0]

    def end(self) -> None:
        for place, recorded in enumerate(self.recorded):
            self._done[place] += recorded
            self._settled[place] = self._done[place] >= self.calibration
        self.sure[1] = self._settled[1]  # for the forward pass, `choose` decides
        self.recorded = [False, False]

    def is_over(self) -> bool:
        return self.recorded[1] and not is_within_backward()

    def by_history(self, *, backward: bool, is_cuda: bool) -> bool:
        """Whether a pass would take its scales from the history.

        In the capture of a CUDA graph one step of history is enough: otherwise all replays would calibrate.
        """
        if self._settled[backward]:
            return True
        return is_cuda and self._done[backward] > 0 and torch.cuda.is_current_stream_capturing()

    def choose(self, *, is_cuda: bool) -> bool:
        """Whether a forward pass takes its scales from the history.

        A forward pass within a backward pass is a repetition by checkpointing. It does what the last forward pass that
        was not a repetition did, also if an update came in between.
        """
        found = self.by_history(backward=False, is_cuda=is_cuda)
        if found != self._chosen and not is_within_backward():
            self._chosen = found
        self.sure[0] = self._chosen and self._settled[0]
        return self._chosen


def is_within_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
