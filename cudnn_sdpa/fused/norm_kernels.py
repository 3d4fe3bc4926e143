"""Plans of norms by kernels of this library: the threads of a row, and the kernels' argument.

The kernels know neither the number of rows nor their length: these are data. A new length takes another variant of a
kernel only where it needs other threads or other units, or where few rows fill all units of their threads or not.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.own import DTYPES, FOLDER
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

_SOURCE = FOLDER / "norm.cu"
_ARGUMENT = Struct(_SOURCE, "Norm")

#: Threads of a block at least, and at most.
_THREADS, _MAX_THREADS = 128, 1024

#: Numbers that a thread keeps of a row, forward and backward.
_HELD, _HELD_BACKWARD = 16, 8

#: The fastest of those measured for RMSNorm in half precision without a residual. Of few rows: the numbers that a
#: thread keeps, and the minimum threads of a row; up to a length, as threads of longer rows have too few registers.
_PLAIN_HELD, _PLAIN_THREADS, _MAX_PLAIN_LENGTH = 32, 256, 16384

#: Of many rows: the minimum threads of a row.
_PLAIN_THREADS_OF_MANY = 8

#: Bytes of a row with a residual beyond which it has all threads of a block: two of these fill a multiprocessor.
_LONG = 8192

#: Threads of a multiprocessor that compute gradients.
_AT_ONCE = 1024

#: Rows of gradients that one block computes one after another, and the sums over them, without another kernel.
_FEW_ROWS = 4

#: Threads of that block if they can keep a row: more begin later, and have too few registers to keep what they compute.
_FEW_THREADS = 512

#: Threads and columns of a block that adds up what others have summed.
_SUMMING, _COLUMNS = 512, 32


class Tiles(NamedTuple):
    """The division of rows among threads; the macros of `norm.cu` of the same names.

    Attributes:
        unit: Numbers of a unit.
        of_row: The threads of a row.
        held: Units that a thread keeps; 0 if a row has too many.
        threads: Threads of a block.
    """

    unit: int
    of_row: int
    held: int
    threads: int

    @classmethod
    def of(cls, layout: TensorLayout, *, numbers: int, spreads: bool = False, least: int = 32) -> Tiles:
        """The tiles of rows (rows, n).

        Args:
            layout: The rows.
            numbers: Numbers of a row that a thread keeps, at most.
            spreads: Whether a thread keeps one unit alone.
            least: The minimum threads of a row, if it has as many units.
        """
        size, length = layout.dtype.itemsize, layout.shape[1]
        unit = math.gcd(length * size, ALIGNMENT) // size
        units = length // unit
        most = min(16, numbers // unit)
        wanted = units if spreads else -(-units // most)
        of_row = min(_MAX_THREADS, max(_power(wanted), min(least, _power(units))))
        held = _power(-(-units // of_row))
        return cls(unit, of_row, held if held <= most else 0, max(of_row, _THREADS))

    @property
    def rows(self) -> int:
        return self.threads // self.of_row

    def are_filled(self, length: int) -> bool:
        """Whether each thread keeps as many units of a row of this length."""
        return self.unit * self.of_row * self.held == length

    def kernel(
        self, name: str, shared: int, x: torch.dtype, weight: torch.dtype, *, layer: bool, others: Mapping[str, int]
    ) -> Kernel:
        return _kernel(
            name,
            shared,
            DTYPE=DTYPES[x],
            WDTYPE=DTYPES[weight],
            UNIT=self.unit,
            OF_ROW=self.of_row,
            HELD=self.held,
            THREADS=self.threads,
            LAYER=int(layer),
            **others,
        )


def _power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


@functools.cache
def _kernel(name: str, shared: int, **defines: int) -> Kernel:
    return Kernel(_SOURCE, name, defines, shared)


@functools.partial(KernelOp, folder=FOLDER)
def own_norm(key: PlanKey) -> KernelProgram:
    """Normalized rows, by one kernel."""
    layouts, options = _layouts(key), key.option_values
    x, layer, fp8 = layouts["x"], bool(options["layer"]), int(str(options.get("fp8", 0)))
    if fp8:
        name = "layer_norm" if layer else "rms_norm"
        own.refuse_without_fp8(f"{name}_fp8", key.target, name)
    total = "residual" in layouts
    is_long, are_few = total and x.shape[1] * x.dtype.itemsize > _LONG, _are_few(key, x)
    is_plain = x.dtype.itemsize == 2 and not (layer or fp8 or total)
    if is_plain and are_few and x.shape[1] <= _MAX_PLAIN_LENGTH:
        tiles = Tiles.of(x, numbers=_PLAIN_HELD, least=_PLAIN_THREADS)
    elif is_plain and not are_few:
        tiles = Tiles.of(x, numbers=_HELD, least=_PLAIN_THREADS_OF_MANY)
    else:
        tiles = Tiles.of(x, numbers=_HELD, spreads=is_long or are_few)
    shared = 4 * (1 + layer + bool(fp8)) * tiles.threads // 32
    results = ["out", *["of_rows"] * bool(fp8), *["total"] * total]
    results += (["mean"] * layer + ["scale"]) * bool(options.get("trains"))
    # One barrier less for products with the weight in the pass of the sum, which take many rows a quarter longer.
    is_paired = bool(fp8 and not layer and are_few and tiles.held and tiles.rows == 1)
    others = _has(key) | {"SUM": int(total), "FP8": fp8, "PAIRED": int(is_paired), "BACKWARD": 0}
    others["WHOLE"] = int(are_few and tiles.are_filled(x.shape[1]))
    kernel = tiles.kernel("normalize", shared, x.dtype, _weight_dtype(layouts), layer=layer, others=others)
    return KernelProgram(
        calls=[KernelCall(kernel, -(-x.shape[0] // tiles.rows), tiles.threads)],
        fields=_fields(x, tiles),
        slots=_slots(key, results, {"scale": "given"} if fp8 else {}),
        knobs={"threads": tiles.of_row, "held": tiles.held},
    )


@functools.partial(KernelOp, folder=FOLDER)
def own_norm_gradients(key: PlanKey) -> KernelProgram:
    """The gradients of normalized rows: by one kernel, and one more for sums over the rows of several blocks."""
    layouts, options = _layouts(key), key.option_values
    x, layer, weight = layouts["x"], bool(options["layer"]), _weight_dtype(layouts)
    kinds, length, sums = 1 + layer, x.shape[1], "weight" in layouts
    of_one = sums and x.shape[0] <= _FEW_ROWS
    if of_one and length <= _HELD * _FEW_THREADS:
        tiles = Tiles.of(x, numbers=_HELD, spreads=False)
    else:
        tiles = Tiles.of(x, numbers=_HELD_BACKWARD, spreads=_are_few(key, x))
    blocks = min(-(-x.shape[0] // tiles.rows), _processors(key) * max(1, _AT_ONCE // tiles.threads))
    if not tiles.held:  # their sums are in memory: of many rows a fraction of x
        blocks = min(blocks, max(_processors(key), x.shape[0] // 8))
    elif of_one:
        blocks = 1
    is_alone = bool(tiles.held and sums and blocks == 1)
    shared = 4 * max((1 + layer) * tiles.threads // 32, tiles.rows * length if sums and tiles.rows > 1 else 0)
    passes = 0 if not is_alone else 1 if x.shape[0] <= tiles.rows else 2
    others = _has(key) | {"TOTAL": int("grad_total" in layouts), "ALONE": passes, "BACKWARD": 1}
    others |= {"SUM": 0, "FP8": 0, "PAIRED": 0, "WHOLE": int(_are_few(key, x) and tiles.are_filled(length))}
    kernel = functools.partial(tiles.kernel, x=x.dtype, weight=weight, layer=layer, others=others)
    calls = [
        KernelCall(kernel("gradients", shared), blocks, tiles.threads),
        KernelCall(kernel("sum_blocks", 4 * _SUMMING), -(-kinds * length // _COLUMNS), _SUMMING),
    ]
    return KernelProgram(
        calls=calls if sums and not is_alone else calls[:1],
        fields=_fields(x, tiles, blocks=blocks),
        slots=_slots(key, ["out", "grad_weight", "grad_bias"], {"mean": "saved_mean", "scale": "saved_scale"})
        | {"partial": _ARGUMENT.indices("partial")[0]},
        scratch={"partial": (blocks, kinds, length)} if sums and not is_alone else {},
        knobs={"threads": tiles.of_row, "held": tiles.held},
    )


def _layouts(key: PlanKey) -> dict[str, TensorLayout]:
    return {x.name: x.layout for x in key.inputs}


def _weight_dtype(layouts: Mapping[str, TensorLayout]) -> torch.dtype:
    return layouts.get("weight", layouts.get("bias", layouts["x"])).dtype


def _has(key: PlanKey) -> dict[str, int]:
    """The macros of a norm's operands and activation."""
    layouts, silu = _layouts(key), key.option_values["activation"] == "silu"
    return {"WEIGHT": int("weight" in layouts), "BIAS": int("bias" in layouts), "SILU": int(silu)}


def _are_few(key: PlanKey, x: TensorLayout) -> bool:
    """Whether rows are so few that more threads have more of memory on the way."""
    return x.shape[0] <= 2 * _processors(key)


def _processors(key: PlanKey) -> int:
    return int(dict(key.target.properties)["multiProcessorCount"]) or 1


def _fields(x: TensorLayout, tiles: Tiles, *, blocks: int = 0) -> Sequence[int]:
    rows, length = x.shape
    units, (of_count,) = length // tiles.unit, struct.unpack("I", struct.pack("f", 1 / length))
    return _ARGUMENT.filled(rows=rows, n=length, units=units, blocks=blocks, of_count=of_count, eps=0, shift=0)


def _slots(key: PlanKey, results: Sequence[str], fields: Mapping[str, str]) -> dict[str, int]:
    """The fields of operands, of the same names where `fields` has no other, and of results."""
    found = {x.name: fields.get(x.name, x.name) for x in key.inputs}
    found |= {x.name: field for x, field in zip(key.outputs, results, strict=False)}
    return dict(zip(found, _ARGUMENT.indices(*found.values()), strict=True))
