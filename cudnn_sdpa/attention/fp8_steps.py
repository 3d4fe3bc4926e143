"""What the host counts of a layer's steps, so that it need not read what the GPU knows of them."""

from __future__ import annotations

import torch


class Steps:
    """Which passes a step has had, and whether scales come from the tensors at hand or from a history.

    The first steps of a pass *calibrate*: one of them alone may have taught nothing, as its largest values may have
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
