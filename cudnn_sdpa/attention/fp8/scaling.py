"""`Fp8Scaling`: the scales of attention in FP8, and the amax values that they come from.

Delayed scaling as in NVIDIA's Transformer Engine (its documentation, "Using FP8 with Transformer Engine"): a tensor is
quantized with a scale from the amax values of earlier steps, so that it is read once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cudnn_sdpa.attention.arguments import FP8_DTYPES, check_flag
from cudnn_sdpa.attention.fp8.quantize import check_group, scales_of, share, update
from cudnn_sdpa.attention.fp8.scaling_state import DO, NAMES, SCALE_S, S, Steps
from cudnn_sdpa.engine.tensor_checks import dtype_name
from cudnn_sdpa.errors import DeviceError, DtypeError, OptionError, check_choice
from cudnn_sdpa.graph.scalars import as_bool, as_index, is_integer

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPE = torch.float8_e4m3fn  #: of everything in the forward pass
INPUTS = ("delayed", "current")
ALGORITHMS = ("max", "most_recent")
MAX_MARGIN = 6


def limits_of(grad_dtype: torch.dtype, margin: int = 0) -> tuple[float, float]:
    """The values that amax is scaled to, in the forward pass and of gradients."""
    return torch.finfo(DTYPE).max / 2**margin, torch.finfo(grad_dtype).max / 2**margin


class Fp8Scaling(nn.Module):
    """The scales of one attention layer in FP8, with the amax histories that they come from.

    `Fp8Attention` has one, and `fp8_attention` accepts one. Each layer needs its own.

    A training *step* ends with an update. In training mode each call records the amax values of its tensors, and a step
    keeps the maximum over its calls; a call that checkpointing repeats changes nothing. An update moves these values
    into the history and derives the scales of the next step. All of it happens on the GPU: the host reads no scale.

    - With `auto_update`, the first call in training mode after a backward pass begins with an update. Each micro-batch
      is then one step.
    - Without it, call `update()` once for each step of the optimizer, for instance by
      `optimizer.register_step_post_hook(lambda *_: Fp8Scaling.update_all(model))`.

    If an amax of a step is infinite or NaN, the update changes no scale and no history.

    The first steps, as many as `calibration` says, *calibrate*: scales come from the tensors of the call, and the
    backward plan runs two or three times, to find the amax of its results. Steps whose gradients are zeros, or not
    finite, teach no scale; if all calibrating steps are like that, scales stay 1 until a step has usable values.
    Forward and backward passes are counted separately. Two kinds of calls calibrate less: those in the capture of a
    CUDA graph take scales from the history after the first update, and those of a layer that has loaded a history
    never calibrate. In evaluation mode calls record nothing, and no step is counted.

    `state_dict` includes the state, which stays in float32 when the model is converted. A layer with another `margin`,
    `algorithm` or `grad_dtype` derives its own scales from a history that it loads.

    Args:
        inputs: How q, k, v and the output's gradient get their scales: "delayed", from the history, or "current", from
            their own amax values, which takes another pass over them. The results of attention (the output and the
            gradients) always have delayed scales.
        history: Number of steps in the history.
        margin: The amax is scaled to 2^-margin of the format's largest number, which leaves room for growing values; 0
            to 6.
        algorithm: Which steps of the history count: "max", all of them, or "most_recent", the latest one.
        grad_dtype: float8_e5m2, or float8_e4m3fn, which has twice the precision and a smaller range.
        auto_update: Whether calls update.
        calibration: Number of steps that calibrate, at least 1.
        process_group: The ranks that share their scales. Each update uses the maximum of their amax values, so all of
            them must update equally often, and all skip a step that is not finite on one of them. A
            `torch.distributed.ProcessGroup`; "world", the default group, looked up at each update; or None, so that
            each rank has its own scales.
        device: Device of the state; `to` moves it.

    Attributes:
        scale: The scale of each tensor, (10,) float32: q, k, v, the probabilities, the output, and the gradients of the
            output, the scores, q, k and v. That of the probabilities, which are 1 at most, is fixed.
        amax: The amax values of this step, (10,) float32.
        amax_history: The amax values of earlier steps, (10, history) float32, the latest first.

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
        >>> scaling.scale[:3] * 7  # amax is scaled to the largest number of E4M3
        tensor([448., 448., 448.])
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor
    limits: Tensor  # the values that amax is scaled to, (10,); 0 if the scale is fixed. Not in `state_dict`

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
        check_choice("inputs", inputs, INPUTS)
        check_choice("algorithm", algorithm, ALGORITHMS)
        check_grad_dtype(grad_dtype)
        history, margin, calibration = as_index(history), as_index(margin), as_index(calibration)
        auto_update = as_bool(auto_update)
        for name, steps in (("history", history), ("calibration", calibration)):
            if not is_integer(steps) or steps < 1:
                raise OptionError(name, repr(steps), "a number of steps, 1 or more")
        if not is_integer(margin) or not 0 <= margin <= MAX_MARGIN:
            raise OptionError("margin", repr(margin), f"an integer from 0 to {MAX_MARGIN}")
        check_flag("auto_update", auto_update)
        check_group(process_group)
        super().__init__()
        self.inputs, self.algorithm, self.grad_dtype = inputs, algorithm, grad_dtype
        self.margin, self.auto_update, self.process_group = margin, auto_update, process_group
        self._steps = Steps(calibration)
        for name, tensor in self._initial(history, device).items():
            self.register_buffer(name, tensor, persistent=name != "limits")

    def _initial(self, history: int, device: torch.device | str | None) -> dict[str, Tensor]:
        """The state at first: float32 in any model, and no inference tensors, since each step writes it."""
        forward, backward = limits_of(self.grad_dtype, self.margin)
        limits = [forward] * DO + [backward] * (len(NAMES) - DO)
        limits[S] = 0.0  # its scale is fixed
        with torch.inference_mode(mode=False):
            scale = torch.ones(len(NAMES), dtype=torch.float32, device=device)
            scale[S].fill_(SCALE_S)
            return {
                "scale": scale,
                "amax": torch.zeros_like(scale),
                "amax_history": torch.zeros(len(NAMES), history, dtype=torch.float32, device=device),
                "limits": torch.tensor(limits, dtype=torch.float32, device=device),
            }

    @property
    def calibration(self) -> int:
        """Number of steps that calibrate."""
        return self._steps.calibration

    def reset_parameters(self) -> None:
        """Forgets all steps, in place; the next steps calibrate."""
        for name, tensor in self._initial(self.amax_history.shape[1], self.scale.device).items():
            self._buffers[name].copy_(tensor)  # type: ignore[union-attr]
        self._steps.restart([False, False], [False, False])

    @property
    def knows_forward(self) -> bool:
        """Whether a forward pass now would take its scales from the history."""
        return self._steps.by_history(backward=False, is_cuda=self.scale.is_cuda)

    @property
    def knows_backward(self) -> bool:
        """Whether a backward pass now would take its scales from the history."""
        return self._steps.by_history(backward=True, is_cuda=self.scale.is_cuda)

    def begin(self) -> None:
        """Begins a forward pass: updates if a backward pass has ended the previous step."""
        if self._steps.recorded[1] and self.would_update():
            self.update()

    def would_update(self) -> bool:
        """Whether a forward pass now would begin with an update."""
        return self.training and self.auto_update and self._steps.is_over()

    def scales(self, *, backward: bool, is_cuda: bool) -> Tensor | None:
        """The scales of a pass from the history; None if they come from the tensors of the call.

        Args:
            backward: Whether it is a backward pass.
            is_cuda: Whether the tensors of the call are on a GPU; the caller knows it, and asking the state is slower.
        """
        steps = self._steps
        if steps.sure[backward]:
            return self.scale
        by_history = steps.by_history(backward=True, is_cuda=is_cuda) if backward else steps.choose(is_cuda=is_cuda)
        return self.scale if by_history else None

    def recorder(self, *, backward: bool) -> Tensor | None:
        """The tensor in which a pass records its amax values; None if it records none."""
        if not self.training:
            return None
        self._steps.recorded[backward] = True
        return self.amax

    def update(self) -> None:
        """Ends a step: moves its amax values into the history, and derives the scales from that.

        With a `process_group`, all its ranks must call this.
        """
        _update([self])

    @staticmethod
    def update_all(model: nn.Module) -> None:
        """Ends a step of every layer in a model, with one collective per process group.

        Args:
            model: Any module; all `Fp8Scaling` in it are updated.
        """
        _update([module for module in model.modules() if isinstance(module, Fp8Scaling)])

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return (
            f"inputs={self.inputs!r}, history={self.amax_history.shape[1]}, margin={self.margin}, "
            f"algorithm={self.algorithm!r}, grad_dtype={self.grad_dtype}, auto_update={self.auto_update}, "
            f"calibration={self.calibration}, process_group={self.process_group!r}"
        )

    def check(self) -> None:
        """Refuses a state that something has converted or moved: kernels read dense float32 on one device."""
        for name, tensor in self._buffers.items():
            if tensor is None or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                got = "None" if tensor is None else f"{dtype_name(tensor.dtype)} with strides {tensor.stride()}"
                raise DtypeError(f"scaling.{name}", got, "dense float32", "load_state_dict() and .to() keep it so.")
            if tensor.device != self.scale.device:
                raise DeviceError(f"scaling.{name}", str(tensor.device), f"{self.scale.device}, where scaling.scale is")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the state to another device; its dtype stays float32, which cuDNN reads."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        with torch.inference_mode(mode=False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, old in before.items():
                new = self._buffers[name]
                if new is not None and old.is_meta and not new.is_meta:  # a meta tensor has no values to keep
                    self._buffers[name] = self._initial(self.amax_history.shape[1], new.device)[name]
                elif new is not None and new.dtype != torch.float32:
                    self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, object], prefix: str, *rest: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        with torch.inference_mode(mode=False), torch.no_grad():
            for name in ("scale", "amax", "amax_history"):  # `assign=True` keeps the loaded tensors themselves
                loaded = getattr(self, name)
                own = loaded.clone() if loaded.is_inference() or loaded is state_dict.get(prefix + name) else loaded
                self._buffers[name] = own.to(torch.float32).contiguous()
            if self.limits.device != self.scale.device:
                self._buffers["limits"] = self._initial(1, self.scale.device)["limits"]
            if f"{prefix}amax_history" in state_dict and not self.amax_history.is_meta:
                self._read_history()

    def _read_history(self) -> None:
        """Derives scales and steps from a loaded history."""
        most_recent = self.algorithm != "max"
        self.scale.copy_(scales_of(self.amax_history, self.scale, self.limits, most_recent=most_recent))
        seen = (self.amax_history > 0).any(dim=1).tolist()  # the only time that the host reads it
        amax = (self.amax > 0).tolist()
        self._steps.restart(*([any(rows[:DO]), any(rows[DO:])] for rows in (seen, amax)))

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo[id(self.process_group)] = self.process_group  # a copy belongs to the same ranks
        memo[id(self)] = clone = type(self).__new__(type(self))
        with torch.inference_mode(mode=False):
            clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone

    def __getstate__(self) -> dict[str, object]:
        if self.process_group is not None and not isinstance(self.process_group, str):
            expected = "'world' or None in what is pickled, since a group is of this process"
            raise OptionError("process_group", "a ProcessGroup", expected, "Save its state_dict().")
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        with torch.inference_mode(mode=False):
            for name, loaded in self._buffers.items():
                if loaded is not None and loaded.is_inference():
                    self._buffers[name] = loaded.clone()


def check_grad_dtype(grad_dtype: object) -> None:
    if grad_dtype not in FP8_DTYPES:
        raise OptionError("grad_dtype", repr(grad_dtype), " or ".join(map(dtype_name, FP8_DTYPES)))


def _update(layers: Sequence[Fp8Scaling]) -> None:
    shared: dict[tuple[dist.ProcessGroup | str, torch.device], list[Tensor]] = {}
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
