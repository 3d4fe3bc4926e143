"""Plans of gated activations by kernels of this library: the units of a call, and the kernels' argument."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from cudnn_sdpa.fused import own
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, contiguous_stride
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

_SOURCE = own.FOLDER / "activation.cu"
_ARGUMENT = Struct(_SOURCE, "Gated")

SILU, GELU, RELU_SQUARED = range(3)  #: the macro KIND

_ROWS = ("gate", "up", "grad", "out", "grad_gate", "grad_up")  #: fields of the argument that are rows

#: Bytes of a unit of a call with few bytes in each tensor, and how few, forward and backward: more threads share them.
_NARROW = {"activate": (8, 132 << 11), "gradients": (4, 132 << 15)}

#: Threads of a block, and of one where units are narrow.
_THREADS, _MORE_THREADS = 128, 256


@functools.cache
def _kernel(name: str, dtype: torch.dtype, **defines: int) -> Kernel:
    return Kernel(_SOURCE, name, {"DTYPE": own.DTYPES[dtype], "WDTYPE": 0, **defines})


@functools.partial(KernelOp, folder=own.FOLDER)
def own_activation(key: PlanKey) -> KernelProgram:
    """An activation of rows, times other rows."""
    return _program(key, "activate", {"x": "gate", "grad": "up"}, ["out"])


@functools.partial(KernelOp, folder=own.FOLDER)
def own_activation_gradients(key: PlanKey) -> KernelProgram:
    """The gradients of gate and up."""
    return _program(key, "gradients", {"x": "gate"}, ["grad_gate", "grad_up"])


def _program(key: PlanKey, kernel: str, fields: Mapping[str, str], results: Sequence[str]) -> KernelProgram:
    """The program of a kernel, given the fields of operands with other names, and of results."""
    operands = [(x, fields.get(x.name, x.name)) for x in key.inputs]
    operands += list(zip(key.outputs, results, strict=False))
    layouts = {field: x.layout for x, field in operands}
    gate = layouts["gate"]
    count = math.prod(gate.shape)
    is_flat = count < 1 << 32 and all(x.stride == contiguous_stride(x.shape) for x in layouts.values())
    if is_flat:
        layouts = dict.fromkeys(layouts, TensorLayout.contiguous((1, count), gate.dtype))
    size, few = _NARROW[kernel]
    is_narrow = is_flat and count * gate.dtype.itemsize < few
    threads = _MORE_THREADS if is_narrow else _THREADS
    unit, (rows, length) = _unit(layouts.values(), size if is_narrow else ALIGNMENT), layouts["gate"].shape
    units = length // unit
    has = {"FLAT": is_flat, "UP": "up" in layouts, "GRAD_UP": "grad_up" in layouts, "EVEN": rows * units % threads == 0}
    defines = {name: int(value) for name, value in has.items()}
    kind = int(str(key.option_values["kind"]))
    made = _kernel(kernel, gate.dtype, UNIT=unit, KIND=kind, THREADS=threads, **defines)
    strides = {
        field: {"base": 0, "row": layouts[field].stride[0] // unit if field in layouts else 0} for field in _ROWS
    }
    places = _ARGUMENT.indices(*(f"{field}.base" for _, field in operands))
    return KernelProgram(
        calls=[KernelCall(made, -(-rows * units // threads), threads)],
        fields=_ARGUMENT.filled(rows=rows, units=units, **strides),
        slots=dict(zip((x.name for x, _ in operands), places, strict=True)),
        knobs={"unit": unit, "threads": threads},
    )


def _unit(layouts: Iterable[TensorLayout], most: int) -> int:
    """The most numbers of a word of up to as many bytes of which all rows are made."""
    size, found = 1, most
    for x in layouts:
        size = x.dtype.itemsize
        found = math.gcd(found, size * x.shape[1], size * x.stride[0] if x.shape[0] > 1 else 0)
    return found // size
