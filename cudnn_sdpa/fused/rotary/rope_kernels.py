"""Plans of rotations of heads by kernels of this library: the threads of a head, and the kernels' argument."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.own import DTYPES
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import ALIGNMENT, EXPONENT_BITS, TensorLayout
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

_FOLDER = Path(__file__).parent
_SOURCE = _FOLDER / "rope.cu"
_ARGUMENT = Struct(_SOURCE, "Rope")

#: Fields of the argument that are heads.
_HEADS = ("q", "k", "grad_q", "grad_k", "out_q", "out_k", "v", "out_v")

#: Threads of a block, and of one that adds up what others have summed, for as many columns.
_THREADS, _SUMMING, _COLUMNS = 128, 512, 32

#: Bytes of shared memory for a number of each warp.
_OF_WARPS, _OF_SUMMING = 4 * _THREADS // 32, 4 * _SUMMING // 32

#: Largest head dim, from the shared memory of the sums for weights.
MAX_DIM = 1024

#: Heads of a thread, and heads per multiprocessor from which a thread has more than one.
_AT_ONCE, _MANY = 4, 512

#: Of kernels that sum gradients of weights: the most features of a unit; heads of a thread that has at most so many
#: bytes of each; and the blocks of a multiprocessor by the features of a head in a thread, as registers allow.
_UNIT_OF_SUMS, _AT_ONCE_BACKWARD, _FEW_BYTES, _BLOCKS = 4, 2, 16, {8: 5, 16: 3, 32: 2}


class Tiles(NamedTuple):
    """The division of heads among threads; the macros of `rope.cu` of the same names.

    Attributes:
        unit: Features of a unit.
        of_row: The threads of a head.
        held: Slots of a thread.
        slots: Slots of a head.
        rotated: The first slots, which are rotated.
        heads: Heads that a thread computes.
        blocks: Blocks of a multiprocessor that sum gradients of weights.
    """

    unit: int
    of_row: int
    held: int
    slots: int
    rotated: int
    heads: int = 1
    blocks: int = 1

    @property
    def rows(self) -> int:
        return _THREADS // self.of_row


@functools.cache
def _kernel(
    name: str,
    tiles: Tiles,
    dtype: torch.dtype,
    weight: torch.dtype,
    *,
    shared: int,
    interleaved: bool,
    fp8: int,
    append: bool,
) -> Kernel:
    defines = {"DTYPE": DTYPES[dtype], "WDTYPE": DTYPES[weight], "INTERLEAVED": int(interleaved), "THREADS": _THREADS}
    defines |= {"FP8": fp8, "APPEND": int(append)}
    return Kernel(_SOURCE, name, defines | {k.upper(): x for k, x in tiles._asdict().items()}, shared)


@functools.partial(KernelOp, folder=_FOLDER)
def own_rope(key: PlanKey) -> KernelProgram:
    """Rotated heads, normalized before where there are weights."""
    return _program(key, ["rotate"], _outputs("out_q", "out_k"))


@functools.partial(KernelOp, folder=_FOLDER)
def own_rope_fp8(key: PlanKey) -> KernelProgram:
    """Rotated heads in E4M3, and the amax of queries and of keys."""
    own.refuse_without_fp8("rope_fp8", key.target, "rope")
    names = [x for x in "qk" if x in {operand.name for operand in key.inputs}]
    return _program(
        key, ["rotate", "largest_of_blocks"], _outputs(*(f"out_{x}" for x in names), *(f"{x}_amax" for x in names))
    )


@functools.partial(KernelOp, folder=_FOLDER)
def own_rope_gradients(key: PlanKey) -> KernelProgram:
    """The gradients of heads, and of the weights of those that are normalized."""
    names = {x.name for x in key.inputs}
    results = [f"out_{x}" for x in "qk" if f"grad_{x}" in names]
    results += [f"grad_{x}_weight" for x in "qk" if f"{x}_weight" in names]
    kernels = ["gradients", "sum_blocks"] if "q" in names else ["rotate_back"]
    return _program(key, kernels, _outputs(*results))


#: The fields of operands that have other names.
_APPENDED = {
    "output0": "out_q",
    "k_pages": "out_k",
    "v_pages": "out_v",
    "page_table": "table",
    "seq_lens_kv": "lengths_kv",
    "seq_lens_q": "lengths_q",
}


@functools.partial(KernelOp, folder=_FOLDER)
def own_rope_append(key: PlanKey) -> KernelProgram:
    """Rotated queries; keys, rotated likewise, and values in their slots of pages (pages, Hkv, page size, D).

    Pages are in the dtype of q or in FP8.
    """
    return _program(key, ["rotate"], _APPENDED)


def _outputs(*fields: str) -> dict[str, str]:
    return {f"output{index}": name for index, name in enumerate(fields)}


def _program(key: PlanKey, kernels: list[str], results: Mapping[str, str]) -> KernelProgram:
    """The program of kernels, given the fields of results, and of operands of other names."""
    layouts = {results.get(x.name, x.name): x.layout for x in (*key.inputs, *key.outputs)}
    weight = layouts.get("q_weight", layouts.get("k_weight"))
    given = layouts["q"] if "q" in layouts else layouts["grad_q"]
    q, cos, k = layouts["out_q"], layouts["cos"], layouts.get("out_k")
    (batch, heads_q, tokens, dim), rotary_dim = q.shape, 2 * cos.shape[-1]
    if dim > MAX_DIM:
        raise UnsupportedError("rope", [f"the head dim is {dim}; the kernel serves up to {MAX_DIM}"])
    pages, slots, table = layouts.get("out_v"), layouts.get("slot_mapping"), layouts.get("table")
    heads_k = 0 if k is None else k.shape[1]
    count = batch * tokens * (heads_q + heads_k * (1 if pages is None else 2))
    processors = int(dict(key.target.properties)["multiProcessorCount"]) or 1
    has_sums, is_fp8 = "sum_blocks" in kernels, "q_scale" in layouts
    heads = {name: layouts[name] for name in _HEADS if name in layouts}
    tiles = _tiles(heads, dim, rotary_dim, most=_UNIT_OF_SUMS if has_sums else ALIGNMENT)
    is_many = count >= _MANY * processors
    if has_sums:
        features = 2 * tiles.unit * tiles.held
        at_once = _AT_ONCE_BACKWARD if is_many and features * given.dtype.itemsize <= _FEW_BYTES else 1
        per_processor = next(blocks for most, blocks in _BLOCKS.items() if features <= most)
        tiles = tiles._replace(heads=math.gcd(heads_q, heads_k, at_once), blocks=per_processor)
        share = processors * per_processor / (heads_q + heads_k)
        blocks_q, blocks_k = (_blocks(tiles, batch * tokens, x, most=int(share * x)) for x in (heads_q, heads_k))
    else:
        tiles = tiles._replace(heads=_AT_ONCE if is_many else 1)
        blocks_q, blocks_k = _blocks(tiles, batch * tokens, count // (batch * tokens)), 0
    blocks = blocks_q + blocks_k
    made = functools.partial(
        _kernel,
        tiles=tiles,
        dtype=given.dtype,
        weight=given.dtype if weight is None else weight.dtype,
        interleaved=bool(key.option_values["interleaved"]),
        fp8=int(is_fp8) if pages is None else EXPONENT_BITS.get(pages.dtype, 0),
        append=pages is not None,
    )
    shared = 4 * tiles.rows * dim if has_sums else 2 * _OF_WARPS if is_fp8 else 0
    calls = [KernelCall(made(kernels[0], shared=shared), blocks, _THREADS)]
    if is_fp8:
        calls.append(KernelCall(made("largest_of_blocks", shared=_OF_SUMMING), 1 if k is None else 2, _SUMMING))
    if has_sums:
        calls.append(KernelCall(made("sum_blocks", shared=4 * _SUMMING), 2 * -(-dim // _COLUMNS), _SUMMING))
    fields = {name: f"{name}.base" if name in _HEADS else name for name in layouts}
    scratch = {"partial": (blocks, dim)} if has_sums else {"partial": (blocks, 2)} if is_fp8 else {}
    named = {x.name: fields[results.get(x.name, x.name)] for x in (*key.inputs, *key.outputs)}
    named |= dict.fromkeys(scratch, "partial")
    return KernelProgram(
        calls=calls,
        fields=_ARGUMENT.filled(
            batch=batch,
            tokens=tokens,
            heads_q=heads_q,
            heads_k=heads_k,
            cos_batch=tokens * cos.shape[-1] // tiles.unit if cos.shape[0] > 1 else 0,
            blocks=blocks,
            blocks_q=blocks_q,
            slot_bytes=0 if slots is None else slots.dtype.itemsize,
            table_row=0 if table is None else table.stride[0],
            columns=0 if table is None else table.shape[1],
            pages=0 if pages is None else pages.shape[0],
            page_size=0 if pages is None else pages.shape[2],
            **{f"{name}_step": _step(layouts.get(name)) for name in ("k_scale", "v_scale")},
            eps=0,
            shift=0,
            **{name: _strides(layouts.get(name), tiles.unit) for name in _HEADS},
        ),
        slots=dict(zip(named, _ARGUMENT.indices(*named.values()), strict=True)),
        scratch=scratch,
        knobs={"threads": tiles.of_row, "heads": tiles.heads, "unit": tiles.unit},
    )


def _blocks(tiles: Tiles, tokens: int, heads: int, most: int | None = None) -> int:
    """Blocks of groups of threads, one for `tiles.heads` heads of a token; up to `most`, but at least for one token."""
    groups = -(-heads // tiles.heads)
    blocks = -(-tokens * groups // tiles.rows)
    return blocks if most is None else min(blocks, max(most, -(-groups // tiles.rows)))


def _tiles(heads: Mapping[str, TensorLayout], dim: int, rotary_dim: int, most: int) -> Tiles:
    """The widest units of which all heads are made, and both halves of what is rotated and of the rest."""
    unit = math.gcd(rotary_dim // 2, (dim - rotary_dim) // 2, most)
    for x in heads.values():
        strides = [stride for size, stride in zip(x.shape[:3], x.stride[:3], strict=True) if size > 1]
        unit = math.gcd(unit, ALIGNMENT // x.dtype.itemsize, *strides)
    slots = dim // (2 * unit)
    of_row = min(32, 1 << (slots - 1).bit_length())
    return Tiles(unit, of_row, -(-slots // of_row), slots, rotated=rotary_dim // (2 * unit))


def _step(scale: TensorLayout | None) -> int:
    return 0 if scale is None or math.prod(scale.shape) == 1 else scale.stride[0]


def _strides(x: TensorLayout | None, unit: int) -> dict[str, int]:
    names = ("batch", "head", "token")
    if x is None:
        return {"base": 0, **dict.fromkeys(names, 0)}
    places = zip(names, x.shape, x.stride, strict=False)
    return {"base": 0} | {name: stride // unit if size > 1 else 0 for name, size, stride in places}
