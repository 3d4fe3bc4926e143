"""`Fp8Scaling`: the scales of attention in FP8, and the amax values that they come from.

Delayed scaling as in NVIDIA's Transformer Engine (its documentation, "Using FP8 with Transformer Engine"): a tensor is
quantized with a scale from the amax values of steps before, so that it is read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cudnn_sdpa.attention.arguments import dtype_name, is_integer
from cudnn_sdpa.attention.fp8.arguments import FP8_DTYPES
from cudnn_sdpa.attention.fp8.quantize import check_group, scales_of, share, update
from cudnn_sdpa.attention.fp8.scaling_state import DO, Fp8State, Steps
from cudnn_sdpa.errors import OptionError

DTYPE = torch.float8_e4m3fn  #: of everything in the forward pass
INPUTS = ("delayed", "current")
ALGORITHMS = ("max", "most_recent")
MAX_MARGIN = 6


def limits_of(grad_dtype: torch.dtype, margin: int = 0) -> tuple[float, float]:
    """What the amax values shall become: of tensors of the forward pass, and of gradients."""
    return torch.finfo(DTYPE).max / 2**margin, torch.finfo(grad_dtype).max / 2**margin


class Fp8Scaling(Fp8State):
    """The scales of one attention layer in FP8, with the amax histories that they come from.

    It is what `Fp8Attention` keeps, and what `fp8_attention` may be given. Each layer needs one of its own.

    A *step* is what lies between two updates. In training mode the amax values of a step are recorded, over as many
    calls as it has; a call that is repeated, as checkpointing does, changes nothing. An update moves them into the
    history and derives the scales of the next step. All of it happens on the GPU: the host never reads a scale.

    - With `auto_update` the first call in training mode after a backward pass is the beginning of a step, so that each
      micro-batch is one.
    - Without it, a step ends where you call `update()`, once for each step of the optimizer: for instance by
      `optimizer.register_step_post_hook(lambda *_: Fp8Scaling.update_all(model))`.

    If one amax of a step is infinite or NaN, its update changes no scale and no history.

    The first steps, `calibration` of them, *calibrate*: scales come from the tensors at hand, and a backward pass,
    whose results cannot be known beforehand, runs more than once. So it does not matter if some of them taught nothing,
    as gradients were zeros, or were not finite; if all of them were, scales stay 1 until one is better. Forward and
    backward passes are counted apart. What a CUDA graph captures takes scales from the history as soon as there has
    been one update, and so does a layer whose loaded state has a history, in all calls. In evaluation mode nothing is
    recorded, and no step is counted.

    The state is kept in `state_dict`, in float32 whatever the model is converted to. A layer with another `margin`,
    `algorithm` or `grad_dtype` derives its own scales from a history that it loads.

    Args:
        inputs: How q, k, v and the output's gradient get their scales: "delayed", from the history, or "current", from
            their own amax values, which takes another pass over them. What attention computes (the output and the
            gradients) always has delayed ones.
        history: How many steps the history has.
        margin: The amax becomes 2^-margin of what the format holds: room for values that grow, 0 to 6.
        algorithm: Which steps count: "max", all of the history, or "most_recent", the latest one.
        grad_dtype: float8_e5m2, or float8_e4m3fn, which has twice the precision and a smaller range.
        auto_update: Whether updates happen by themselves.
        calibration: How many steps scale by the tensors at hand before the history is relied on, 1 or more.
        process_group: The ranks that shall have the same scales: each update takes the amax values of all of them,
            so that they must update equally often, and drop a step together. A `torch.distributed.ProcessGroup`; or
            "world", the default group, looked up at each update; or None, each rank for itself.
        device: Where the state is; it moves with `to`.

    Attributes:
        scale: The scale of each tensor, (10,) float32: q, k, v, the probabilities, the output, and the gradients of the
            output, the scores, q, k and v. That of the probabilities, which are 1 at most, is fixed.
        amax: The largest absolute values of this step, (10,) float32.
        amax_history: Those of the steps before, (10, history) float32, the latest first.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention
        >>> from cudnn_sdpa.attention.fp8.scaling import Fp8Scaling
        >>> scaling = Fp8Scaling(history=4)
        >>> q = k = v = torch.full((1, 2, 32, 16), 7.0, dtype=torch.bfloat16)
        >>> out = fp8_attention(q, k, v, scaling=scaling)
        >>> scaling.update()
        >>> scaling.scale[:3] * 7  # the amax becomes the largest of E4M3
        tensor([448., 448., 448.])
    """

    def __init__(
        self,
        *,
        inputs: str = "delayed",
        history: int = 16,
        margin: int = 0,
        algorithm: str = "max",
        grad_dtype: torch.dtype = torch.float8_e5m2,
        auto_update: bool = True,
        calibration: int = 4,
        process_group: dist.ProcessGroup | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _check_choice("inputs", inputs, INPUTS)
        _check_choice("algorithm", algorithm, ALGORITHMS)
        check_grad_dtype(grad_dtype)
        for name, steps in (("history", history), ("calibration", calibration)):
            if not is_integer(steps) or steps < 1:
                raise OptionError(name, repr(steps), "a number of steps, 1 or more")
        if not is_integer(margin) or not 0 <= margin <= MAX_MARGIN:
            raise OptionError("margin", repr(margin), f"an integer from 0 to {MAX_MARGIN}")
        if not isinstance(auto_update, bool):
            raise OptionError("auto_update", repr(auto_update), "True or False")
        check_group(process_group)
        super().__init__(history, limits_of(grad_dtype, margin), device)
        self.inputs, self.algorithm, self.grad_dtype = inputs, algorithm, grad_dtype
        self.margin, self.auto_update, self.process_group = margin, auto_update, process_group
        self._steps = Steps(calibration)

    @property
    def calibration(self) -> int:
        """How many steps scale by the tensors at hand."""
        return self._steps.calibration

    def reset_parameters(self) -> None:
        """Forgets all steps, in place; the next ones find their scales anew."""
        super().reset_parameters()
        self._steps.begin_anew([False, False], [False, False])

    @property
    def knows_forward(self) -> bool:
        """Whether a forward pass now takes its scales from the history."""
        return self._steps.by_history(backward=False, is_cuda=self.scale.is_cuda)

    @property
    def knows_backward(self) -> bool:
        """Whether a backward pass does."""
        return self._steps.by_history(backward=True, is_cuda=self.scale.is_cuda)

    def begin(self) -> None:
        """What happens before a call: an update, if a backward pass has ended the step before."""
        if self._steps.recorded[1] and self.would_update():
            self.update()

    def would_update(self) -> bool:
        """Whether a call now begins with an update."""
        return self.training and self.auto_update and self._steps.is_over()

    def scales(self, *, backward: bool, is_cuda: bool) -> Tensor | None:
        """The scales of a pass from the history; None if they come from the tensors at hand.

        Args:
            backward: Which pass.
            is_cuda: Whether the tensors at hand are on a GPU: quicker asked of them than of the state.
        """
        steps = self._steps
        if steps.sure[backward]:
            return self.scale
        by_history = steps.by_history(backward=True, is_cuda=is_cuda) if backward else steps.choose(is_cuda=is_cuda)
        return self.scale if by_history else None

    def recorder(self, *, backward: bool) -> Tensor | None:
        """Where a pass records its amax values; None if it does not."""
        if not self.training:
            return None
        self._steps.recorded[backward] = True
        return self.amax

    def update(self) -> None:
        """Ends a step: its amax values enter the history, from which the scales follow.

        With a `process_group` every rank of it must call it.
        """
        _update([self])

    @staticmethod
    def update_all(model: nn.Module) -> None:
        """Ends a step of every layer in a model; what ranks share travels together.

        Args:
            model: Any module; those within it that are of this class are updated.
        """
        _update([module for module in model.modules() if isinstance(module, Fp8Scaling)])

    def extra_repr(self) -> str:
        """The arguments that it was made with."""
        return (
            f"inputs={self.inputs!r}, history={self.amax_history.shape[1]}, margin={self.margin}, "
            f"algorithm={self.algorithm!r}, grad_dtype={self.grad_dtype}, auto_update={self.auto_update}, "
            f"calibration={self.calibration}, process_group={self.process_group!r}"
        )

    def _take_over(self) -> None:
        most_recent = self.algorithm != "max"
        self.scale.copy_(scales_of(self.amax_history, self.scale, self.limits, most_recent=most_recent))
        seen = (self.amax_history > 0).any(dim=1).tolist()  # the one time that the host reads it
        amax = (self.amax > 0).tolist()
        self._steps.begin_anew(*([any(rows[:DO]), any(rows[DO:])] for rows in (seen, amax)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Scaling:
        memo[id(self.process_group)] = self.process_group  # a copy belongs to the same ranks
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and not isinstance(self.process_group, str):
            expected = "'world' or None in what is pickled, since a group is of this process"
            raise OptionError("process_group", "a ProcessGroup", expected, "Save its state_dict().")
        return dict(self.__dict__)


def check_grad_dtype(grad_dtype: Any) -> None:
    """Whether gradients can be made in this dtype."""
    if grad_dtype not in FP8_DTYPES:
        raise OptionError("grad_dtype", repr(grad_dtype), " or ".join(map(dtype_name, FP8_DTYPES)))


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(name, repr(value), " or ".join(map(repr, choices)))


def _update(layers: Sequence[Fp8Scaling]) -> None:
    """Ends a step of each."""
    shared: dict[Any, list[Tensor]] = {}
    for layer in layers:
        layer.check()
        if layer.process_group is not None:
            shared.setdefault((layer.process_group, layer.amax.device), []).append(layer.amax)
    with torch.no_grad():
        for (group, _), amaxes in shared.items():
            share(amaxes, group)
        for layer in layers:
            most_recent = layer.algorithm != "max"
            update(layer.amax, layer.amax_history, layer.scale, layer.limits, most_recent=most_recent)
            layer._steps.end()
