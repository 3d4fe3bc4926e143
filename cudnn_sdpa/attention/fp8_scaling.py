"""`Fp8Scaling`: the scales of attention in FP8, and the largest values that they come from.

Delayed scaling as in NVIDIA's Transformer Engine (its documentation, "Using FP8 with Transformer Engine"): a tensor is
quantized with a scale from the largest values of steps before, so that it is read once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import is_integer
from cudnn_sdpa.attention.fp8_arguments import FP8_DTYPES
from cudnn_sdpa.attention.fp8_quantization import SOURCE, THREADS, by_kernel
from cudnn_sdpa.attention.fp8_tables import DO, NAMES, SCALE_S, S, scale_for
from cudnn_sdpa.attention.side_tensors import dtype_name
from cudnn_sdpa.errors import DeviceError, DtypeError, OptionError
from cudnn_sdpa.runtime.kernels import Kernel
from cudnn_sdpa.runtime.plan import current_raw_stream

update_kernel = Kernel(SOURCE, "fp8_update")

DTYPE = torch.float8_e4m3fn  #: of everything in the forward pass
INPUTS = ("delayed", "current")
ALGORITHMS = ("max", "most_recent")
MOST_MARGIN = 6


def limits_of(grad_dtype: torch.dtype, margin: int = 0) -> tuple[float, float]:
    """What the largest values shall become: of tensors of the forward pass, and of gradients."""
    return torch.finfo(DTYPE).max / 2**margin, torch.finfo(grad_dtype).max / 2**margin


class Fp8Scaling(nn.Module):
    """The scales of one attention layer in FP8, with the histories of largest values that they come from.

    It is what `Fp8Attention` keeps, and what `fp8_attention` may be given. Each layer needs one of its own.

    A *step* is what lies between two updates. In training mode the largest values of a step are recorded, over as many
    calls as it has; a call that is repeated, as checkpointing does, changes nothing. An update moves them into the
    history and derives the scales of the next step. All of it happens on the GPU: the host never reads a scale.

    - With `auto_update` the first call in training mode after a backward pass is the beginning of a step, so that each
      micro-batch is one.
    - Without it, a step ends where you call `update()`, once for each step of the optimizer: for instance by
      `optimizer.register_step_post_hook(lambda *_: Fp8Scaling.update_all(model))`.

    If one of a step's largest values is infinite or NaN, its update changes no scale and no history. Until a first
    update there is nothing to go by: then scales come from the tensors at hand, and a backward pass, whose results
    cannot be known beforehand, runs more than once. In evaluation mode nothing is recorded.

    The state is kept in `state_dict`, in float32 whatever the model is converted to.

    Args:
        inputs: How q, k, v and the output's gradient get their scales: "delayed", from the history, or "current", from
            their own largest values, which takes another pass over them. What attention computes (the output and the
            gradients) always has delayed ones.
        history: How many steps the history has.
        margin: The largest value becomes 2^-margin of what the format holds: room for values that grow, 0 to 6.
        algorithm: Which steps count: "max", all of the history, or "most_recent", the latest one.
        grad_dtype: float8_e5m2, or float8_e4m3fn, which has twice the precision and a smaller range.
        auto_update: Whether updates happen by themselves.
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
        >>> from cudnn_sdpa.attention.fp8_attention import fp8_attention
        >>> from cudnn_sdpa.attention.fp8_scaling import Fp8Scaling
        >>> scaling = Fp8Scaling(history=4)
        >>> q = k = v = torch.full((1, 2, 32, 16), 7.0, dtype=torch.bfloat16)
        >>> out = fp8_attention(q, k, v, scaling=scaling)
        >>> scaling.update()
        >>> scaling.scale[:3] * 7  # the largest value becomes the largest of E4M3
        tensor([448., 448., 448.])
    """

    scale: Tensor
    amax: Tensor
    amax_history: Tensor
    limits: Tensor

    def __init__(
        self,
        *,
        inputs: str = "delayed",
        history: int = 16,
        margin: int = 0,
        algorithm: str = "max",
        grad_dtype: torch.dtype = torch.float8_e5m2,
        auto_update: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_choice("inputs", inputs, INPUTS)
        _check_choice("algorithm", algorithm, ALGORITHMS)
        check_grad_dtype(grad_dtype)
        if not is_integer(history) or history < 1:
            raise OptionError("history", repr(history), "a number of steps, 1 or more")
        if not is_integer(margin) or not 0 <= margin <= MOST_MARGIN:
            raise OptionError("margin", repr(margin), f"an integer from 0 to {MOST_MARGIN}")
        if not isinstance(auto_update, bool):
            raise OptionError("auto_update", repr(auto_update), "True or False")
        self.inputs, self.algorithm, self.grad_dtype = inputs, algorithm, grad_dtype
        self.margin, self.auto_update = margin, auto_update
        for name, tensor in self._fresh(history, device).items():
            self.register_buffer(name, tensor, persistent=name != "limits")
        self._recorded = [False, False]  # in this step: a forward pass, a backward pass
        self._known = [False, False]  # whether their scales come from a history

    def _fresh(self, history: int, device: Any) -> dict[str, Tensor]:
        """The state of a layer that has seen nothing."""
        forward, backward = limits_of(self.grad_dtype, self.margin)
        limits = [forward] * DO + [backward] * (len(NAMES) - DO)
        limits[S] = 0.0  # its scale stays
        scale = torch.ones(len(NAMES), dtype=torch.float32, device=device)
        scale[S].fill_(SCALE_S)
        return {
            "scale": scale,
            "amax": torch.zeros_like(scale),
            "amax_history": torch.zeros(len(NAMES), history, dtype=torch.float32, device=device),
            "limits": torch.tensor(limits, dtype=torch.float32, device=device),
        }

    def reset_parameters(self) -> None:
        """Forgets all steps, in place; the next one finds its scales anew."""
        for name, tensor in self._fresh(self.amax_history.shape[1], self.scale.device).items():
            self._buffers[name].copy_(tensor)  # type: ignore[union-attr]
        self._recorded, self._known = [False, False], [False, False]

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

    @property
    def knows_forward(self) -> bool:
        """Whether the scales of the forward pass come from a history."""
        return self._known[0]

    @property
    def knows_backward(self) -> bool:
        """Whether those of the backward pass do."""
        return self._known[1]

    def begin(self) -> None:
        """What happens before a call: an update, if a backward pass has ended the step before."""
        if self.training and self.auto_update and self._recorded[1] and not is_within_backward():
            self.update()

    def recorder(self, *, backward: bool) -> Tensor | None:
        """Where a pass records its largest values; None if it does not."""
        if not self.training:
            return None
        self._recorded[backward] = True
        return self.amax

    def update(self) -> None:
        """Ends a step: its largest values become part of the history, and scales of that."""
        self.check()
        with torch.no_grad():
            _update(self.amax, self.amax_history, self.scale, self.limits, most_recent=self.algorithm != "max")
        self._known = [known or recorded for known, recorded in zip(self._known, self._recorded, strict=True)]
        self._recorded = [False, False]

    @staticmethod
    def update_all(model: nn.Module) -> None:
        """Ends a step of every layer in a model.

        Args:
            model: Any module; those within it that are of this class are updated.
        """
        for module in model.modules():
            if isinstance(module, Fp8Scaling):
                module.update()

    def extra_repr(self) -> str:
        """The arguments that it was made with."""
        return (
            f"inputs={self.inputs!r}, history={self.amax_history.shape[1]}, margin={self.margin}, "
            f"algorithm={self.algorithm!r}, grad_dtype={self.grad_dtype}, auto_update={self.auto_update}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Scaling:
        """Moves the state; other than its device nothing of it changes, as cuDNN reads scales in float32."""
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
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
        for name in ("scale", "amax", "amax_history"):  # `assign=True` takes tensors as they are
            self._buffers[name] = getattr(self, name).to(torch.float32).contiguous()
        if self.limits.device != self.scale.device:
            self._buffers["limits"] = self._fresh(1, self.scale.device)["limits"]
        history = self.amax_history
        if f"{prefix}amax_history" in state_dict and not history.is_meta:
            seen = (history > 0).any(dim=1).tolist()  # the one time that the host reads it
            self._known = [any(seen[:DO]), any(seen[DO:])]
            amax = (self.amax > 0).tolist()
            self._recorded = [any(amax[:DO]), any(amax[DO:])]


def is_within_backward() -> bool:
    """Whether a backward pass is under way on this thread, so that a forward pass is one that checkpointing repeats."""
    return bool(torch._C._current_graph_task_id() != -1)


def check_grad_dtype(grad_dtype: Any) -> None:
    """Whether gradients can be made in this dtype."""
    if grad_dtype not in FP8_DTYPES:
        raise OptionError("grad_dtype", repr(grad_dtype), " or ".join(map(dtype_name, FP8_DTYPES)))


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(name, repr(value), " or ".join(map(repr, choices)))


def _update(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    if by_kernel(amax):
        device = amax.get_device()
        addresses = [tensor.data_ptr() for tensor in (amax, history, scale, limits)]
        fields = array("q", [*addresses, history.shape[1], most_recent])
        with torch.cuda.device(device):
            update_kernel.on(device).launch(1, THREADS, fields, current_raw_stream(device))
    else:
        update_in_pytorch(amax, history, scale, limits, most_recent=most_recent)


def update_in_pytorch(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """What the kernel `fp8_update` does, in place.

    Args:
        amax: Of the step, (10,); zeros afterwards.
        history: (10, length), the latest step first.
        scale: (10,).
        limits: What the largest values shall become, (10,); 0 where the scale stays.
        most_recent: Whether the latest step alone counts.
    """
    counts = amax.isfinite().all()
    moved = torch.cat([amax.unsqueeze(1), history[:, :-1]], dim=1)
    history.copy_(torch.where(counts, moved, history))
    peak = history[:, 0] if most_recent else history.amax(1)
    scale.copy_(torch.where(counts & (peak > 0) & (limits > 0), scale_for(limits, peak), scale))
    amax.zero_()
