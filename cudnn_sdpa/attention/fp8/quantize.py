"""Numbers of 16 bits to FP8 and back, and new scales of amax: kernels of our own, and the same in plain PyTorch.

Both give the same bits. The kernels read each tensor once; PyTorch's functions serve CPU tensors, and whoever wants to
see operators (dispatch modes, tensor subclasses).
"""

from __future__ import annotations

import functools
import math
import struct
from array import array
from collections.abc import Sequence
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
from cudnn_sdpa.plans.nvrtc import Kernel, LoadedKernel
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

SOURCE = Path(__file__).with_name("quantize.cu")
quantize_kernel = Kernel(SOURCE, "fp8_quantize")
dequantize_kernel = Kernel(SOURCE, "fp8_dequantize")

THREADS = 256
_UNIT = 16  #: numbers that a thread converts at a time
_AT_ONCE = 4  #: units of a thread whose loads are under way together
_MOST = 3  #: tensors of a launch
_MAX_AMAXES = 4
_QUANTIZE, _SOURCE_FIELDS = 10, 10
_DEQUANTIZE, _RESULT_FIELDS = 6 + 2 * _MAX_AMAXES, 4

Shape = tuple[int, ...]


class Wanted(NamedTuple):
    """What tensors are quantized to.

    Attributes:
        rows: Which of the table's rows they have.
        dtype: float8_e4m3fn or float8_e5m2.
        limit: What the largest value shall become where the scale comes from it.
        current: Whether it does, even where scales are given.
    """

    rows: tuple[int, ...]
    dtype: torch.dtype
    limit: float
    current: bool


def quantize(
    tensors: Sequence[Tensor], wanted: Wanted, table: Tensor, given: Tensor | None, record: Tensor | None
) -> list[Tensor]:
    """Quantizes up to three tensors (B, H, S, D), each into a dense one in its memory order, and fills the table.

    With given scales it takes one pass over the tensors. Scales that come from the largest values take another before.

    Args:
        tensors: float16 or bfloat16, all alike, on one device.
        wanted: What to.
        table: Gets the largest values, scales and descales.
        given: The scales of all ten tensors, (10,), or None: those of these tensors come from their largest values,
            that of the output is that of the values, and the others are 1.
        record: (10,): raised to the largest values, if given.
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
        amax = reference.largest(tensor)
        number(table, AMAX, row).copy_(amax)
        record_all({row: amax}, record)
    set_scales(table, 0, _scales(wanted, table, given, by_amax=by_amax))
    made = [_dense_like(tensor, wanted.dtype) for tensor in tensors]
    for row, tensor, to in zip(wanted.rows, tensors, made, strict=True):
        to.copy_(reference.quantized(tensor.float(), table[0, row, 0], wanted.dtype))
    return made


def dequantize(
    tensors: Sequence[Tensor],
    rows: Sequence[int],
    dtype: torch.dtype,
    table: Tensor,
    amaxes: dict[int, Tensor],
    record: Tensor | None,
) -> list[Tensor]:
    """Makes 16-bit numbers of up to three dense FP8 tensors; NaN if a largest value of the call is not finite.

    Args:
        tensors: In FP8, all alike, on one device.
        rows: Which of the table's rows they have.
        dtype: float16 or bfloat16.
        table: Scales, and the largest values of what went in.
        amaxes: The largest values that cuDNN gave, by row.
        record: (10,): raised to these, if given.
    """
    if by_kernel(*tensors):
        kernel = _dequantizer(tensors[0].get_device(), tensors[0].dtype, dtype, tuple(rows), tuple(amaxes))
        return kernel(tensors, table, amaxes, record)
    record_all(amaxes, record)
    defect = sum((0 * amax for amax in amaxes.values()), defect_of(table))
    made = [_dense_like(tensor, dtype) for tensor in tensors]
    for row, tensor, to in zip(rows, tensors, made, strict=True):
        to.copy_(tensor.float() * (number(table, DESCALE, row) + defect))
    return made


def defect_of(table: Tensor) -> Tensor:
    """0, or NaN if something that went into a call is not finite, which saturation hides; (1,)."""
    return (0 * table[AMAX, :, 0]).sum().view(1)


def record_all(amaxes: dict[int, Tensor], record: Tensor | None) -> None:
    """Raises what is recorded to largest values, by row; NaN is the largest of all."""
    if record is not None:
        for row, amax in amaxes.items():
            torch.maximum(record[row : row + 1], amax, out=record[row : row + 1])


def is_readable(tensor: Tensor) -> bool:
    """Whether a kernel can read it where it lies: 16 bytes at a time."""
    if not tensor.numel():
        return False
    step = ALIGNMENT // tensor.element_size()
    stride = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.stride(-1) == 1
        and tensor.shape[-1] % _UNIT == 0
        and tensor.data_ptr() % ALIGNMENT == 0
        and all(size == 1 or of % step == 0 for size, of in stride)
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
    """Whether our own kernels do it: on a GPU, where nobody wants to see operators."""
    return all(tensor.is_cuda and tensor.numel() for tensor in tensors) and is_plain_memory(*tensors)


def _dense_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)


def _blocks(device: int, units: int) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-units // (THREADS * _AT_ONCE)), 8 * processors))


class _Quantizer:
    """Calls of `fp8_quantize` that look alike."""

    __slots__ = ("_blocks", "_device", "_fields", "_kernel", "_made")

    def __init__(self, device: int, dtype: torch.dtype, wanted: Wanted, layouts: Sequence[tuple[Shape, Shape]]) -> None:
        self._device = device
        self._kernel: LoadedKernel = quantize_kernel.on(device)
        (limit,) = struct.unpack("<i", struct.pack("<f", wanted.limit))
        fields = [0, 0, 0, len(layouts), dtype == torch.bfloat16, wanted.dtype == torch.float8_e5m2, limit, 0, 0]
        fields.append(wanted.current)
        self._made = []
        for (shape, stride), row in zip(layouts, wanted.rows, strict=True):
            made = dense_stride_like(shape, shape, stride)
            self._made.append((shape, made, wanted.dtype))
            fields += [0, 0, *_walk(shape, stride, made), row]
        self._blocks = _blocks(device, max(fields[_QUANTIZE + 2 :: _SOURCE_FIELDS]))
        missing = _MOST - len(layouts)
        self._fields = array("q", [*fields, *(0,) * (missing * _SOURCE_FIELDS)])

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
        """Launches it, on the current stream."""
        fields = self._fields[:]
        with torch.cuda.device(self._device):
            made = [allocate(*layout) for layout in self._made] if converts else []
            fields[0], fields[7], fields[8] = table.data_ptr(), measures, converts
            fields[1] = 0 if given is None else given.data_ptr()
            fields[2] = 0 if record is None else record.data_ptr()
            for place, tensor in enumerate(tensors):
                fields[_QUANTIZE + place * _SOURCE_FIELDS] = tensor.data_ptr()
            for place, tensor in enumerate(made):
                fields[_QUANTIZE + place * _SOURCE_FIELDS + 1] = tensor.data_ptr()
            self._kernel.launch(self._blocks, THREADS, fields, current_raw_stream(self._device))
        return made


class _Dequantizer:
    """Calls of `fp8_dequantize` that look alike."""

    __slots__ = ("_device", "_dtype", "_fields", "_kernel")

    def __init__(self, device: int, fp8: torch.dtype, dtype: torch.dtype, rows: Shape, measured: Shape) -> None:
        self._device, self._dtype = device, dtype
        self._kernel: LoadedKernel = dequantize_kernel.on(device)
        missing = (0,) * (_MAX_AMAXES - len(measured))
        fields = [0, 0, len(rows), dtype == torch.bfloat16, fp8 == torch.float8_e5m2, len(measured)]
        fields += [*(0,) * _MAX_AMAXES, *measured, *missing]
        for row in rows:
            fields += [0, 0, 0, row]
        self._fields = array("q", [*fields, *(0,) * ((_MOST - len(rows)) * _RESULT_FIELDS)])

    def __call__(
        self, tensors: Sequence[Tensor], table: Tensor, amaxes: dict[int, Tensor], record: Tensor | None
    ) -> list[Tensor]:
        """Launches it, on the current stream."""
        fields, units = self._fields[:], 0
        with torch.cuda.device(self._device):
            made = [allocate(tuple(tensor.shape), tensor.stride(), self._dtype) for tensor in tensors]
            fields[0] = table.data_ptr()
            fields[1] = 0 if record is None else record.data_ptr()
            for place, amax in enumerate(amaxes.values()):
                fields[6 + place] = amax.data_ptr()
            for place, (tensor, to) in enumerate(zip(tensors, made, strict=True)):
                first, count = _DEQUANTIZE + place * _RESULT_FIELDS, tensor.numel() // _UNIT
                fields[first], fields[first + 1], fields[first + 2] = tensor.data_ptr(), to.data_ptr(), count
                units = max(units, count)
            self._kernel.launch(_blocks(self._device, units), THREADS, fields, current_raw_stream(self._device))
        return made


def _walk(shape: Shape, stride: Shape, made: Shape) -> list[int]:
    """How a kernel goes through a tensor in the order of its result: units, those of a row, sizes, steps in bytes."""
    sizes_and_steps: list[list[int]] = []
    for size, step in ((shape[dim], 2 * stride[dim]) for dim in sorted(range(3), key=made.__getitem__, reverse=True)):
        if size == 1:
            continue
        if sizes_and_steps and sizes_and_steps[-1][1] == size * step:  # two dimensions that are one
            sizes_and_steps[-1] = [sizes_and_steps[-1][0] * size, step]
        else:
            sizes_and_steps.append([size, step])
    of_row, units = shape[3] // _UNIT, shape[0] * shape[1] * shape[2] * shape[3] // _UNIT
    if len(sizes_and_steps) == 1 and sizes_and_steps[0][1] == 2 * shape[3]:
        return [units, units, 1, 1, 0, 0, 0]
    sizes_and_steps = [[1, 0]] * (3 - len(sizes_and_steps)) + sizes_and_steps
    (_, outer), (middle, between), (inner, within) = sizes_and_steps
    return [units, of_row, middle, inner, outer, between, within]


@functools.lru_cache(maxsize=1024)
def _quantizer(device: int, dtype: torch.dtype, wanted: Wanted, *layouts: tuple[Shape, Shape]) -> _Quantizer:
    return _Quantizer(device, dtype, wanted, layouts)


@functools.lru_cache(maxsize=1024)
def _dequantizer(device: int, fp8: torch.dtype, dtype: torch.dtype, rows: Shape, measured: Shape) -> _Dequantizer:
    return _Dequantizer(device, fp8, dtype, rows, measured)


# What ends a step of `Fp8Scaling`: largest values are shared among ranks, enter the history, and become scales.


update_kernel = Kernel(SOURCE, "fp8_update")

#: What says "the default group" where there need not be one yet.
WORLD = "world"


def check_group(group: Any) -> None:
    """Whether largest values can be shared among these ranks.

    Raises:
        OptionError: It is no group, or one that this rank is not in.
    """
    if group is None or group == WORLD or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise OptionError(
        "process_group", repr(group), f"{WORLD!r}, a torch.distributed.ProcessGroup of this rank, or None"
    )


def share(amaxes: Sequence[Tensor], group: Any) -> None:
    """Raises largest values to those of all ranks of a group, in place; infinity where a rank's is not finite.

    Args:
        amaxes: (10,) each, on one device; on each rank as many, in the same order.
        group: A process group, or `WORLD`.

    Raises:
        OptionError: There is no default group.
    """
    if group == WORLD and not (dist.is_available() and dist.is_initialized()):
        hint = "Call torch.distributed.init_process_group() before the first step ends."
        raise OptionError("process_group", repr(WORLD), "a default process group, and there is none", hint)
    largest = torch.cat(list(amaxes)).nan_to_num_(nan=math.inf, posinf=math.inf)  # what MAX makes of NaN is open
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=None if group == WORLD else group)
    for amax, shared in zip(amaxes, largest.view(len(amaxes), -1).unbind(), strict=True):
        amax.copy_(shared)


def update(amax: Tensor, history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> None:
    """`update_in_pytorch`, by a kernel of our own where one can."""
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


def scales_of(history: Tensor, scale: Tensor, limits: Tensor, *, most_recent: bool) -> Tensor:
    """The scales that updates to a history have left, (10,), for a layer with these limits.

    Args:
        history: (10, length).
        scale: What stays where the history has nothing, (10,).
        limits: As for an update.
        most_recent: Whether the latest step counts alone: the latest one in which there was something.
    """
    if most_recent:
        latest = (history > 0).to(torch.uint8).argmax(1, keepdim=True)
        peak = history.gather(1, latest).squeeze(1)
    else:
        peak = history.amax(1)
    return torch.where((peak > 0) & (limits > 0), scale_for(limits, peak), scale)
