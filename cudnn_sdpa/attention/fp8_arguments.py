"""Arguments and results of attention in FP8, and the checks of what the user passed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.side_tensors import check_is_dense, check_lengths, dtype_name, shape_of
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.runtime.eager import is_compiling, needs_gradient

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = (*FP8_DTYPES, torch.bfloat16, torch.float16)

#: Head dims of cuDNN's FP8 kernels are multiples of this: a row of a matrix instruction.
HEAD_DIM_STEP = 16

#: Smallest factor of the scores: kernels hide keys by a score of -inf before they scale it; see `operators.MIN_SCALE`.
MIN_SCALE = 1e-30


class Fp8Scales(NamedTuple):
    """The scales of a forward pass, each a float32 tensor of one element on the device of `q`.

    A tensor x is kept as fp8(x · scale); what is read back is fp8 · descale, so that a descale is one over the scale
    that its tensor was made with.

    Attributes:
        descale_q: What the values of q are multiplied by.
        descale_k: The same of k.
        descale_v: The same of v.
        descale_s: The same of the softmax's exponentials, one over `scale_s`.
        scale_s: What the softmax's exponentials, which are 1 at most, are multiplied by before they are rounded to the
            dtype of q. Up to the dtype's largest number: 448 for E4M3, 57344 for E5M2.
        scale_o: What the output is multiplied by before it is rounded.
    """

    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_s: Tensor
    scale_s: Tensor
    scale_o: Tensor


class Fp8BackwardScales(NamedTuple):
    """The scales of a backward pass, each a float32 tensor of one element on the device of `q`.

    Attributes:
        descale_q: What the values of q are multiplied by.
        descale_k: The same of k.
        descale_v: The same of v.
        descale_o: The same of the output, one over the forward pass's `scale_o`.
        descale_do: The same of the output's gradient.
        descale_s: The same of the probabilities, one over `scale_s`.
        descale_dp: The same of the gradient of the scores, one over `scale_dp`.
        scale_s: What the probabilities are multiplied by before they are rounded to the dtype of q.
        scale_dq: What the gradient of q is multiplied by before it is rounded.
        scale_dk: The same of k.
        scale_dv: The same of v.
        scale_dp: What the gradient of the scores is multiplied by before it is rounded to the dtype of `grad_out`.
    """

    descale_q: Tensor
    descale_k: Tensor
    descale_v: Tensor
    descale_o: Tensor
    descale_do: Tensor
    descale_s: Tensor
    descale_dp: Tensor
    scale_s: Tensor
    scale_dq: Tensor
    scale_dk: Tensor
    scale_dv: Tensor
    scale_dp: Tensor


class Fp8Output(NamedTuple):
    """The results of a forward pass.

    Attributes:
        out: The output (B, Hq, Sq, Dv), multiplied by `scale_o`.
        amax_s: The largest probability, (1,) float32, before `scale_s`.
        amax_o: The largest absolute value of the output, (1,) float32, before `scale_o`.
        lse: The log-sum-exp of the scores (B, Hq, Sq) float32, if it was asked for.
    """

    out: Tensor
    amax_s: Tensor
    amax_o: Tensor
    lse: Tensor | None


class Fp8Gradients(NamedTuple):
    """The results of a backward pass.

    Attributes:
        dq: The gradient of q, multiplied by `scale_dq`, in the dtype of `grad_out`.
        dk: The gradient of k, multiplied by `scale_dk`.
        dv: The gradient of v, multiplied by `scale_dv`.
        amax_dq: The largest absolute value of the gradient of q, (1,) float32, before `scale_dq`.
        amax_dk: The same of k.
        amax_dv: The same of v.
        amax_dp: The largest absolute value of the gradient of the scores, (1,) float32, before `scale_dp`.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    amax_dq: Tensor
    amax_dk: Tensor
    amax_dv: Tensor
    amax_dp: Tensor


class Fp8Forward(NamedTuple):
    """A forward call.

    Attributes:
        call: Tensors and options that it has in common with other dtypes.
        scales: The scales.
        out_dtype: The dtype of the output.
        tables: The page tables of keys and of values, whose tensors are pages then.
    """

    call: ForwardArguments
    scales: Fp8Scales
    out_dtype: torch.dtype
    tables: tuple[Tensor, Tensor] | None = None


class Fp8Backward(NamedTuple):
    """A backward call.

    Attributes:
        grad_out: The gradient of the output.
        out: The output.
        lse: The log-sum-exp.
        call: Tensors and options of the forward pass.
        scales: The scales.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: ForwardArguments
    scales: Fp8BackwardScales


def check_types(**tensors: Any) -> None:
    """What the operators' schemas would refuse too, but without naming the argument. Lengths may be None."""
    for name, tensor in tensors.items():
        optional = name.startswith("seq_lens")
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            raise OptionError(name, type(tensor).__name__, "a torch.Tensor" + (" or None" if optional else ""))
        if tensor.device.type not in ("cuda", "cpu", "meta"):
            raise DeviceError(name, str(tensor.device), "a CUDA device, or the CPU for the reference")
        check_is_dense(name, tensor)
        if not is_compiling() and tensor.is_neg() and tensor.dtype in FP8_DTYPES:  # no question that Dynamo can trace
            raise LayoutError(name, "a negated view", "a tensor of its own", "PyTorch negates no FP8: negate before.")


def check_scales_type(scales: Any, kind: type[tuple[Tensor, ...]]) -> None:
    """Whether the scales are what they should be, each of them a tensor."""
    if not isinstance(scales, kind):
        raise OptionError("scales", type(scales).__name__, f"cudnn_sdpa.{kind.__name__}")
    for name, scale in scales._asdict().items():  # type: ignore[attr-defined]
        if not isinstance(scale, Tensor):
            hint = "Make one with torch.tensor([1.0], dtype=torch.float32, device=q.device)."
            raise OptionError(f"scales.{name}", type(scale).__name__, _A_SCALE, hint)
        check_is_dense(f"scales.{name}", scale)


_A_SCALE = "a float32 tensor of one element"


def check_forward(of: Fp8Forward) -> None:
    """Everything that holds on every device; looks at no address and no value, so that fake tensors pass through."""
    _check_call(of.call)
    _check_scales(of.scales, of.call.q)
    if of.out_dtype not in OUT_DTYPES:
        expected = ", ".join(map(dtype_name, OUT_DTYPES))
        raise OptionError("out_dtype", repr(of.out_dtype), f"one of {expected}, or None for the dtype of q")


def check_backward(of: Fp8Backward) -> None:
    """The same of a backward call."""
    q, v = of.call.q, of.call.v
    _check_call(of.call)
    shape = (*q.shape[:3], v.shape[3])
    for name, tensor in (("grad_out", of.grad_out), ("out", of.out)):
        if tensor.shape != shape:
            raise ShapeError(name, shape_of(tensor), f"shape {tuple(shape)}, that of the output")
        if tensor.dtype not in FP8_DTYPES:
            hint = f"Quantize it: ({name} * scale).to({q.dtype}), after a clamp to what that dtype holds."
            raise DtypeError(name, dtype_name(tensor.dtype), _FP8, hint)
    if of.lse.dtype != torch.float32:
        raise DtypeError("lse", dtype_name(of.lse.dtype), "float32, as sdpa_fp8 gives it with return_lse=True")
    if of.lse.shape != shape[:3]:
        raise ShapeError("lse", shape_of(of.lse), f"shape {tuple(shape[:3])}: (batch, heads, queries)")
    for name, tensor in (("grad_out", of.grad_out), ("out", of.out), ("lse", of.lse)):
        if tensor.device != q.device:
            raise DeviceError(name, str(tensor.device), f"{q.device}, the device of q")
    _check_scales(of.scales, q)


_FP8 = "float8_e4m3fn or float8_e5m2"


def _check_call(call: ForwardArguments) -> None:
    arguments.check_options(call)
    if call.scale is not None and not call.scale >= MIN_SCALE:
        raise OptionError("scale", repr(call.scale), "a positive number, or None for 1/sqrt(head dim)")
    for name in ("q", "k", "v"):
        tensor = getattr(call, name)
        if tensor.dim() != 4:
            hint = "Add the missing batch or head dimension with unsqueeze(0)." if tensor.dim() == 3 else ""
            raise ShapeError(name, shape_of(tensor), "rank 4: (batch, heads, sequence, head dim)", hint)
    if call.q.dtype not in FP8_DTYPES:
        hint = "Quantize it to FP8; cudnn_sdpa.sdpa takes float16 and bfloat16."
        raise DtypeError("q", dtype_name(call.q.dtype), _FP8, hint)
    # Dynamo cannot follow a setting that the environment gives; on the CPU the operator asks for it, when it runs.
    has_limits = call.q.device.type != "cpu" if is_compiling() else arguments.has_limits(call)
    arguments.check_sizes(call.q, call.k, call.v, HEAD_DIM_STEP if has_limits else 1)
    for name in ("k", "v"):
        tensor = getattr(call, name)
        if tensor.dtype != call.q.dtype:
            raise DtypeError(name, dtype_name(tensor.dtype), f"{dtype_name(call.q.dtype)}, the dtype of q")
        if tensor.device != call.q.device:
            hint = f"Move it with {name}.to(q.device)."
            raise DeviceError(name, str(tensor.device), f"{call.q.device}, the device of q", hint)
    check_lengths("seq_lens_q", call.seq_lens_q, call.q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, call.q)


def _check_scales(scales: Fp8Scales | Fp8BackwardScales, q: Tensor) -> None:
    for field, scale in scales._asdict().items():
        name = f"scales.{field}"
        if scale.dtype != torch.float32:
            hint = "Convert it with .float(): cuDNN would read other bits as a number of its own."
            raise DtypeError(name, dtype_name(scale.dtype), _A_SCALE, hint)
        if scale.numel() != 1:
            hint = "cuDNN has one scale for each whole tensor."
            raise ShapeError(name, shape_of(scale), _A_SCALE, hint)
        if scale.device != q.device:
            hint = "Move it once with .to(q.device): it is read on the GPU, never by the host."
            raise DeviceError(name, str(scale.device), f"{q.device}, the device of q", hint)


def check_no_gradient(what: str, **tensors: Tensor | None) -> None:
    """Refuses inputs whose gradient would silently be lost.

    Raises:
        UnsupportedError: One of them requires grad.
    """
    wanting = [name for name, tensor in tensors.items() if needs_gradient(tensor)]
    if wanting:
        reasons = [f"{name} requires grad, and autograd does not follow {what}" for name in wanting]
        raise UnsupportedError(
            f"the gradient of {what}", reasons, "torch.no_grad(), with the gradients of sdpa_fp8_backward"
        )
