"""Checks of what the user passed. Every message names the argument, what it got and what was expected."""

from __future__ import annotations

import reprlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.options import ALIGNMENTS, TOP_LEFT, UNBOUNDED
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError

CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (*CUDA_DTYPES, torch.float32, torch.float64)


class ForwardArguments(NamedTuple):
    """A forward call, in the order in which operators take its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None
    sinks: Tensor | None = None
    seq_lens_q: Tensor | None = None
    seq_lens_kv: Tensor | None = None
    rng: Tensor | None = None
    is_causal: bool = False
    causal_alignment: str = TOP_LEFT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    alibi: bool = False
    deterministic: bool = False
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The inputs whose layouts decide a plan."""
        return self[:7]

    @property
    def options(self) -> tuple[Any, ...]:
        """What is no tensor and decides the result."""
        return self[8:17]

    @property
    def is_plain(self) -> bool:
        """Whether it has none of the options that training and special models use."""
        return self[3:5] == (None, None) and self.rng is None and self[10:12] == (-1, -1) and self[13:16] == _PLAIN

    @property
    def scale_value(self) -> float:
        """The factor of the scores."""
        return self.q.shape[3] ** -0.5 if self.scale is None else float(self.scale)


_PLAIN = (0.0, None, False)


def check(call: ForwardArguments) -> None:
    """Everything that holds on every device; looks at no address and no value, so that fake tensors pass through."""
    check_options(call)
    check_qkv(call.q, call.k, call.v)
    check_lengths("seq_lens_q", call.seq_lens_q, call.q)
    check_lengths("seq_lens_kv", call.seq_lens_kv, call.q)
    check_mask(call.attn_mask, call.q, call.k)
    check_sinks(call.sinks, call.q)
    check_rng(call.rng, call.dropout_p, call.q)
    if call.out is not None:
        check_out(call.out, call.q, call.v)


def check_types(call: ForwardArguments) -> None:
    """What the dispatcher and the operators' schemas would refuse too, but without naming the argument."""
    for name in ("q", "k", "v", "attn_mask", "sinks", "seq_lens_q", "seq_lens_kv", "out"):
        tensor, optional = getattr(call, name), name not in ("q", "k", "v")
        if tensor is None and optional:
            continue
        if not isinstance(tensor, Tensor):
            raise OptionError(name, type(tensor).__name__, "a torch.Tensor" + (" or None" if optional else ""))
        _check_device_type(name, tensor)
        if tensor.is_nested:
            raise LayoutError(name, "a nested tensor", "a dense tensor", "Pad it, and give its lengths.")
        if tensor.layout != torch.strided:
            raise LayoutError(name, str(tensor.layout), "a dense tensor", f"Use {name}.to_dense().")
    if not isinstance(call.with_lse, bool):
        raise OptionError("return_lse", repr(call.with_lse), "True or False")


def _check_device_type(name: str, tensor: Tensor) -> None:
    if tensor.device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(name, str(tensor.device), "a CUDA device, or the CPU for the reference")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Ranks, sizes, dtypes and devices of query, key and value."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            hint = "Add the missing batch or head dimension with unsqueeze(0)." if tensor.dim() == 3 else ""
            raise ShapeError(name, _shape(tensor), "rank 4: (batch, heads, sequence, head dim)", hint)
    _check_dtypes_and_devices(q, k, v)
    _check_sizes(q, k, v)


def _check_dtypes_and_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_device_type("q", q)
    allowed = CPU_DTYPES if q.device.type == "cpu" else CUDA_DTYPES
    if q.dtype not in allowed:
        raise DtypeError(
            "q",
            _name(q.dtype),
            " or ".join(map(_name, allowed)) + f" on {q.device.type}",
            "Convert with q.to(torch.bfloat16)." if q.is_floating_point() else "",
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise DtypeError(name, _name(tensor.dtype), f"{_name(q.dtype)}, the dtype of q")
        if tensor.device != q.device:
            raise DeviceError(
                name, str(tensor.device), f"{q.device}, the device of q", f"Move it with {name}.to(q.device)."
            )


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads_q, _, head_dim = q.shape
    _, heads_kv, skv, _ = k.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != batch:
            raise ShapeError(
                name,
                _shape(tensor),
                f"batch {batch}, as q has ({_shape(q)})",
                f"{name}.expand repeats a batch of 1 without a copy.",
            )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] == 0:
            raise ShapeError(name, _shape(tensor), "at least one head")
        if tensor.shape[3] == 0 or tensor.shape[3] % 8 != 0:
            raise ShapeError(
                name, f"head dim {tensor.shape[3]}", "a positive multiple of 8", "Pad it with torch.nn.functional.pad."
            )
    if k.shape[3] != head_dim:
        raise ShapeError("k", f"head dim {k.shape[3]}", f"{head_dim}, the head dim of q")
    if heads_q % heads_kv != 0:
        raise ShapeError("k", f"{heads_kv} heads", f"a divisor of q's {heads_q} heads (grouped-query attention)")
    if v.shape[1] != heads_kv:
        raise ShapeError("v", f"{v.shape[1]} heads", f"{heads_kv}, the number of heads of k")
    if v.shape[2] != skv:
        raise ShapeError("v", f"sequence length {v.shape[2]}", f"{skv}, the sequence length of k")


def check_lengths(name: str, lengths: Tensor | None, q: Tensor) -> None:
    """A tensor of sequence lengths: one int32 for each batch entry, dense, where q is."""
    if lengths is None:
        return
    if lengths.dtype != torch.int32:
        raise DtypeError(name, _name(lengths.dtype), "int32", f"Convert with {name}.to(torch.int32).")
    if lengths.dim() != 1 or lengths.shape[0] != q.shape[0]:
        raise ShapeError(name, _shape(lengths), f"shape ({q.shape[0]},): one length for each batch entry")
    if lengths.device != q.device:
        raise DeviceError(name, str(lengths.device), f"{q.device}, the device of q")
    if lengths.shape[0] > 1 and lengths.stride(0) != 1:
        raise LayoutError(name, f"stride {lengths.stride(0)}", "a dense tensor", f"Use {name}.contiguous().")


def check_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> None:
    """`attn_mask`: boolean or added to the scores, broadcastable to (B, Hq, Sq, Skv)."""
    if mask is None:
        return
    full = (*q.shape[:3], k.shape[2])
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        expected = f"bool, {_name(q.dtype)} as q has, or float32"
        raise DtypeError("attn_mask", _name(mask.dtype), expected, "Convert it with attn_mask.to(q.dtype).")
    if mask.device != q.device:
        raise DeviceError("attn_mask", str(mask.device), f"{q.device}, the device of q")
    sizes = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.dim() > 4 or any(size not in (1, of_full) for size, of_full in sizes):
        raise ShapeError("attn_mask", _shape(mask), f"a shape that broadcasts to (B, Hq, Sq, Skv) = {full}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Attention sinks: one float32 score for each query head."""
    if sinks is None:
        return
    if sinks.dtype != torch.float32:
        raise DtypeError("sinks", _name(sinks.dtype), "float32", "Convert with sinks.float().")
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[1]:
        raise ShapeError("sinks", _shape(sinks), f"shape ({q.shape[1]},): one score for each head of q")
    if sinks.device != q.device:
        raise DeviceError("sinks", str(sinks.device), f"{q.device}, the device of q")
    if sinks.shape[0] > 1 and sinks.stride(0) != 1:
        raise LayoutError("sinks", f"stride {sinks.stride(0)}", "a dense tensor", "Use sinks.contiguous().")


def check_rng(rng: Tensor | None, dropout_p: float, q: Tensor) -> None:
    """The state that dropout starts from: seed and offset, drawn by the public functions."""
    if rng is None:
        if dropout_p > 0:
            raise OptionError("rng", "None", "seed and offset as a tensor of two int64, for dropout")
        return
    if rng.dtype != torch.int64:
        raise DtypeError("rng", _name(rng.dtype), "int64")
    if rng.shape != (2,) or rng.stride(0) != 1:
        raise ShapeError("rng", _shape(rng), "a dense tensor of shape (2,)")
    if rng.device != q.device:
        raise DeviceError("rng", str(rng.device), f"{q.device}, the device of q")


def check_options(call: ForwardArguments) -> None:
    """The arguments that are no tensors."""
    if not isinstance(call.is_causal, bool):
        raise OptionError("is_causal", repr(call.is_causal), "True or False")
    if call.causal_alignment not in ALIGNMENTS:
        raise OptionError("causal_alignment", repr(call.causal_alignment), " or ".join(map(repr, ALIGNMENTS)))
    if not isinstance(call.alibi, bool):
        raise OptionError("alibi", repr(call.alibi), "True or False", "Give slopes of your own as attn_mask.")
    for bound in (call.window_left, call.window_right):
        if not isinstance(bound, (int, torch.SymInt)) or isinstance(bound, bool) or bound < UNBOUNDED:
            raise OptionError("window", repr((call.window_left, call.window_right)), _WINDOW)
    _check_number("scale", call.scale, "1/sqrt(head dim)")
    _check_number("softcap", call.softcap, "no cap")
    if call.softcap is not None and not call.softcap > 0:
        raise OptionError("softcap", repr(call.softcap), "a positive number, or None for no cap")
    if isinstance(call.dropout_p, bool) or not isinstance(call.dropout_p, (int, float)):
        raise OptionError("dropout_p", type(call.dropout_p).__name__, "a number from 0 up to, not including, 1")
    if not 0 <= call.dropout_p < 1:
        raise OptionError("dropout_p", repr(call.dropout_p), "a number from 0 up to, not including, 1")


_WINDOW = "None or two integers (left, right): keys before and after the diagonal, -1 for no bound"


def window_bounds(window: Any) -> tuple[int, int]:
    """The two bounds of the argument `window`."""
    if window is None:
        return UNBOUNDED, UNBOUNDED
    try:
        left, right = window
    except (TypeError, ValueError):
        raise OptionError("window", repr(window), _WINDOW) from None
    return left, right


def _check_number(name: str, value: Any, without: str) -> None:
    if value is None or isinstance(value, torch.SymFloat):
        return
    expected = f"a float, or None for {without}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        on_gpu = f"A {name} on the GPU would have to be read back; use {name}.item()."
        raise OptionError(name, type(value).__name__, expected, on_gpu if isinstance(value, Tensor) else "")
    if not abs(value) <= torch.finfo(torch.float32).max:
        raise OptionError(name, reprlib.repr(value), f"a finite float32 number, or None for {without}")


def check_out(out: Tensor, q: Tensor, v: Tensor) -> None:
    """An output that the caller allocated: shape, dtype, device and strides."""
    shape = (*q.shape[:3], v.shape[3])
    if out.shape != shape:
        raise ShapeError("out", _shape(out), f"shape {shape}")
    if out.dtype != q.dtype:
        raise DtypeError("out", _name(out.dtype), f"{_name(q.dtype)}, the dtype of q")
    if out.device != q.device:
        raise DeviceError("out", str(out.device), f"{q.device}, the device of q")
    if out.numel() != 0:
        memory.check_strides_of_out(out)


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def check_no_tangent(**tensors: Tensor | None) -> None:
    """Refuses to compute a result that would silently be cut off from forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if tensor is not None and _has_tangent(tensor):
            raise UnsupportedError(
                "forward-mode differentiation",
                [f"{name} has a tangent, and cuDNN has no kernel that follows it"],
                "differentiation in reverse mode, or torch.nn.functional.scaled_dot_product_attention",
            )
