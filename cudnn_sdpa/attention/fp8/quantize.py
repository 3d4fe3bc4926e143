"""Quantization from 16 bits to FP8 and back, and scales from amax: CUDA kernels, and their plain PyTorch equivalents.

Both give the same bits. The kernels read each tensor once; the PyTorch functions serve CPU tensors, and dispatch modes
and tensor subclasses, which need operators.
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from cudnn_sdpa.attention.fp8 import reference
from cudnn_sdpa.attention.fp8.scaling_state import AMAX, DESCALE, SCALE_S, O, S, V, number, scale_for, set_scales
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.layouts import ALIGNMENT, dense_stride_like
from cudnn_sdpa.plans.nvrtc import Kernel, LoadedKernel, Struct
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

SOURCE = Path(__file__).with_name("quantize.cu")
quantize_kernel = Kernel(SOURCE, "fp8_quantize")
dequantize_kernel = Kernel(SOURCE, "fp8_dequantize")
_quantize, _dequantize = Struct(SOURCE, "Quantize"), Struct(SOURCE, "Dequantize")

THREADS = 256
_UNIT = 16  #: elements that a thread converts at a time
_AT_ONCE = 4  #: units per thread whose loads are in flight together
_MAX_AMAXES = 4

Shape = tuple[int, ...]


class Wanted(NamedTuple):
    """How tensors are quantized.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        limit: The value that amax is scaled to, if the scale comes from amax.
        current: Whether it comes from amax even if scales are given (current scaling).
    """

    rows: tuple[int, ...]
    dtype: torch.dtype
    limit: float
    current: bool


def quantize(
    tensors: Sequence[Tensor], wanted: Wanted, *, table: Tensor, given: Tensor | None, record: Tensor | None
) -> list[Tensor]:
    """Quantizes up to three tensors (B, H, S, D), each into a dense one in its memory order, and fills the table.

    With given scales it takes one pass over the tensors. Scales from amax take another pass first.

    Args:
        tensors: float16 or bfloat16, all alike, on one device.
        wanted: How to quantize.
        table: Filled with amax values, scales and descales.
        given: The scales of all ten tensors, (10,), or None: those of these tensors come from their amax, that of the
            output is that of v, and the others are 1.
        record: (10,), if given: updated to the maximum of itself and amax.
    """
    by_amax = given is None or wanted.current
    if by_kernel(*tensors) and all(map(is_readable, tensors)):
        kernel = _quantizer(
            tensors[0].get_device(), tensors[0].dtype, wanted, *((tuple(x.shape), x.stride()) for x in tensors)
        )
        if not by_amax:
            return kernel(tensors, table, given, record, measures=True, converts=True)
        kernel(tensors, table, given, record, measures=True, converts=False)
        return kernel(tensors, table, given, record, measures=False, converts=True)
    for row, tensor in zip(wanted.rows, tensors, strict=True):
        amax = reference.amax_of(tensor)
        number(table, AMAX, row).copy_(amax)
        record_all({row: amax}, record)
    set_scales(table, 0, _scales(wanted, table, given, by_amax=by_amax))
    made = [new_like(tensor, wanted.dtype) for tensor in tensors]
    for row, tensor, to in zip(wanted.rows, tensors, made, strict=True):
        to.copy_(reference.quantized(tensor.float(), table[0, row, 0], wanted.dtype))
    return made


def dequantize(
    tensors: Sequence[Tensor],
    rows: Sequence[int],
    *,
    dtype: torch.dtype,
    table: Tensor,
    amaxes: dict[int, Tensor],
    record: Tensor | None,
) -> list[Tensor]:
    """Dequantizes up to three dense FP8 tensors to 16 bits; to NaN if an amax of the call is not finite.

    Args:
        tensors: In FP8, all alike, on one device.
        rows: Their rows in the table.
        dtype: float16 or bfloat16.
        table: The scales, and the amax of the inputs.
        amaxes: The amax values that cuDNN wrote, by row.
        record: (10,), if given: updated to the maximum of itself and these.
    """
    if by_kernel(*tensors):
        kernel = _dequantizer(
            device=tensors[0].get_device(), fp8=tensors[0].dtype, dtype=dtype, rows=tuple(rows), measured=tuple(amaxes)
        )
        return kernel(tensors, table, amaxes, record)
    record_all(amaxes, record)
    defect = defect_of(table, amaxes)
    made = [new_like(tensor, dtype) for tensor in tensors]
    for row, tensor, to in zip(rows, tensors, made, strict=True):
        to.copy_(tensor.float() * (number(table, DESCALE, row) + defect))
    return made


def defect_of(table: Tensor, amaxes: dict[int, Tensor]) -> Tensor:
    """0, or NaN if an amax of the table or of these is not finite, which saturation hides; (1,)."""
    return sum((0 * amax for amax in amaxes.values()), (0 * table[AMAX, :, 0]).sum().view(1))


def record_all(amaxes: dict[int, Tensor], record: Tensor | None) -> None:
    """Updates a record to the maximum of itself and amax values, by row; NaN propagates."""
    if record is not None:
        for row, amax in amaxes.items():
            torch.maximum(record[row : row + 1], amax, out=record[row : row + 1])


def is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read the tensor's layout, 16 bytes at a time."""
    if not tensor.numel():
        return False
    alignment = ALIGNMENT // tensor.element_size()
    sizes_and_strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.shape[-1] % _UNIT == 0
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(size == 1 or stride % alignment == 0 for size, stride in sizes_and_strides)
    )


def _scales(wanted: Wanted, table: Tensor, given: Tensor | None, *, by_amax: bool) -> Tensor:
    scales = torch.ones_like(table[0, :, 0]) if given is None else given.clone()
    if by_amax:
        for row in wanted.rows:
            scales[row] = scale_for(wanted.limit, table[AMAX, row, 0])
    if given is None:
        scales[S].fill_(SCALE_S)
        scales[O] = scales[V]
    return scales


def by_kernel(*tensors: Tensor) -> bool:
    """Whether the CUDA kernels serve these tensors: on a GPU, without dispatch modes or tensor subclasses."""
    return all(tensor.is_cuda and tensor.numel() for tensor in tensors) and is_plain_memory(*tensors)


def new_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)


def _blocks(device: int, units: int) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-units // (THREADS * _AT_ONCE)), 8 * processors))


class _Quantizer:
    __slots__ = ("_blocks", "_converts", "_device", "_fields", "_indices", "_kernel", "_made", "_measures")

    def __init__(self, device: int, dtype: torch.dtype, wanted: Wanted, *layouts: tuple[Shape, Shape]) -> None:
        self._device = device
        self._kernel: LoadedKernel = quantize_kernel.on(device)
        (limit,) = struct.unpack("<i", struct.pack("<f", wanted.limit))
        results = [dense_stride_like(shape, shape, stride) for shape, stride in layouts]
        self._made = [(shape, made, wanted.dtype) for (shape, _), made in zip(layouts, results, strict=True)]
        walks = [_walk(*layout, made) for layout, made in zip(layouts, results, strict=True)]
        self._fields = _quantize.filled(
            tensors=len(layouts),
            is_bfloat16=dtype == torch.bfloat16,
            is_e5m2=wanted.dtype == torch.float8_e5m2,
            limit=limit,
            measures=0,
            converts=0,
            by_amax=wanted.current,
            of=[{**walk, "row": row} for walk, row in zip(walks, wanted.rows, strict=True)],
        )
        of = (f"of.{which}.{name}" for name in ("from", "to") for which in range(len(layouts)))
        self._indices = _quantize.indices("table", "given", "record", *of)
        self._measures, self._converts = _quantize.indices("measures", "converts")
        self._blocks = _blocks(device, max(walk["units"] for walk in walks))

    def __call__(
        self,
        tensors: Sequence[Tensor],
        table: Tensor,
        given: Tensor | None,
        record: Tensor | None,
        *,
        measures: bool,
        converts: bool,
    ) -> list[Tensor]:
        with torch.cuda.device(self._device):
            made = [allocate(*layout) for layout in self._made] if converts else []
            fields = self._fields[:]
            fields[self._measures], fields[self._converts] = measures, converts
            for place, x in zip(self._indices, (table, given, record, *tensors, *made), strict=False):
                if x is not None:
                    fields[place] = x.data_ptr()
            self._kernel.launch(self._blocks, THREADS, fields, current_raw_stream(self._device))
        return made


class _Dequantizer:
    __slots__ = ("_device", "_dtype", "_fields", "_indices", "_kernel", "_units")

    def __init__(self, device: int, fp8: torch.dtype, dtype: torch.dtype, rows: Shape, measured: Shape) -> None:
        self._device, self._dtype = device, dtype
        self._kernel: LoadedKernel = dequantize_kernel.on(device)
        self._fields = _dequantize.filled(
            tensors=len(rows),
            is_bfloat16=dtype == torch.bfloat16,
            is_e5m2=fp8 == torch.float8_e5m2,
            measured=len(measured),
            row=[*measured, *(0,) * (_MAX_AMAXES - len(measured))],
            of=[{"units": 0, "row": row} for row in rows],
        )
        amaxes = (f"amax.{slot}" for slot in range(len(measured)))
        of = (f"of.{which}.{name}" for name in ("from", "to") for which in range(len(rows)))
        self._indices = _dequantize.indices("table", "record", *amaxes, *of)
        self._units = _dequantize.indices(*(f"of.{which}.units" for which in range(len(rows))))

    def __call__(
        self, tensors: Sequence[Tensor], table: Tensor, amaxes: dict[int, Tensor], record: Tensor | None
    ) -> list[Tensor]:
        with torch.cuda.device(self._device):
            made = [allocate(tuple(tensor.shape), tensor.stride(), self._dtype) for tensor in tensors]
            fields, units = self._fields[:], 0
            for place, x in zip(self._indices, (table, record, *amaxes.values(), *tensors, *made), strict=True):
                if x is not None:
                    fields[place] = x.data_ptr()
            for place, tensor in zip(self._units, tensors, strict=False):
                fields[place] = count = tensor.numel() // _UNIT
                units = max(units, count)
            self._kernel.launch(_blocks(self._device, units), THREADS, fields, current_raw_stream(self._device))
        return made


def _walk(shape: Shape, strides: Shape, made: Shape) -> dict[str, Any]:
    """How a kernel traverses a tensor in the order of its result; strides are in bytes."""
    sizes_and_strides: list[list[int]] = []
    for dim in sorted(range(3), key=made.__getitem__, reverse=True):
        size, stride = shape[dim], 2 * strides[dim]
        if size == 1:
            continue
        if sizes_and_strides and sizes_and_strides[-1][1] == size * stride:  # two dimensions that merge into one
            sizes_and_strides[-1] = [sizes_and_strides[-1][0] * size, stride]
        else:
            sizes_and_strides.append([size, stride])
    row_units, units = shape[3] // _UNIT, math.prod(shape) // _UNIT
    if len(sizes_and_strides) == 1 and sizes_and_strides[0][1] == 2 * shape[3]:  # one row, of everything
        sizes_and_strides, row_units = [], units
    (_, outer), (middle, next_outer), (inner, innermost) = [[1, 0]] * (3 - len(sizes_and_strides)) + sizes_and_strides
    strides = (outer, next_outer, innermost)
    return {"units": units, "of_row": row_units, "middle": middle, "inner": inner, "strides": strides}


_quantizer: Callable[..., _Quantizer] = functools.lru_cache(maxsize=1024)(_Quantizer)
_dequantizer: Callable[..., _Dequantizer] = functools.lru_cache(maxsize=1024)(_Dequantizer)


# The end of a step of `Fp8Scaling`: amax values are reduced over ranks, enter the history, and become scales.


update_kernel = Kernel(SOURCE, "fp8_update")

#: The default group, which need not exist yet.
WORLD = "world"


def check_group(group: object) -> None:
    if group is None or group == WORLD or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise OptionError(
        "process_group", repr(group), f"{WORLD!r}, a torch.distributed.ProcessGroup of this rank, or None"
    )


def share(amaxes: Sequence[Tensor], group: object) -> None:
    """Reduces amax values to the maximum over all ranks of a group, in place; infinity if a rank's is not finite.

    Args:
        amaxes: (10,) each, on one device; the same number and order on each rank.
        group: A process group, or `WORLD`.
    """
    if group == WORLD and not (dist.is_available() and dist.is_initialized()):
        hint = "Call torch.distributed.init_process_group() before the first step ends."
        raise OptionError("process_group", repr(WORLD), "a default process group, and there is none", hint)
    combined = torch.cat(list(amaxes)).nan_to_num_(nan=math.inf, posinf=math.inf)  # MAX of NaN is undefined
    dist.all_reduce(combined, op=dist.ReduceOp.MAX, group=None if group == WORLD else group)
    for amax, shared in zip(amaxes, combined.view(len(amaxes), -1).unbind(), strict=True):
        amax.copy_(shared)


def update(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """`update_in_pytorch`, by our CUDA kernel where possible."""
    if by_kernel(amax):
        device = amax.get_device()
        addresses = [tensor.data_ptr() for tensor in (amax, history, scale, limits)]
        fields = array("q", [*addresses, history.shape[1], most_recent])
        with torch.cuda.device(device):
            update_kernel.on(device).launch(1, THREADS, fields, current_raw_stream(device))
    else:
        update_in_pytorch(amax, history, scale, limits, most_recent=most_recent)


def update_in_pytorch(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """The equivalent of the kernel `fp8_update`, in place.

    Args:
        amax: The step's amax values, (10,); zeros afterwards.
        history: (10, length), the latest step first.
        scale: (10,).
        limits: The values that amax is scaled to, (10,); 0 if the scale is fixed.
        most_recent: Whether only the latest step counts.
    """
    counts = amax.isfinite().all()
    moved = torch.cat([amax.unsqueeze(1), history[:, :-1]], dim=1)
    history.copy_(torch.where(counts, moved, history))
    peak = history[:, 0] if most_recent else history.amax(1)
    scale.copy_(torch.where(counts & (peak > 0) & (limits > 0), scale_for(limits, peak), scale))
    amax.zero_()


def scales_of(history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> Tensor:
    """The scales that follow from a history, (10,), for a layer with these limits.

    Args:
        history: (10, length).
        scale: The scales of tensors whose history is empty, (10,).
        limits: As for an update.
        most_recent: Whether only the latest step counts: the latest one with a nonzero amax.
    """
    if most_recent:
        latest = (history > 0).to(torch.uint8).argmax(1, keepdim=True)
        peak = history.gather(1, latest).squeeze(1)
    else:
        peak = history.amax(1)
    return torch.where((peak > 0) & (limits > 0), scale_for(limits, peak), scale)
