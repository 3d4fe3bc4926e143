"""The arguments of FlashAttention-4's functions, by kind of call and layouts, on GPUs of compute capability 9.0.

Functions and their arguments are those of `flash_attn/cute/interface.py` in the version that `installed.TESTED` names.
`compiler.py` compares each kind with what that file itself passes on.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride
from cudnn_sdpa.plans.function_plan import (
    SIZES,
    Argument,
    FunctionCall,
    FunctionProgram,
    NumberArgument,
    TensorArgument,
)
from cudnn_sdpa.plans.plan import side_by_side

#: Of a call's mask: the numbers of keys before and behind the diagonal that a query sees, which ends at the last query
#: and the last key; None is unbounded.
Window = tuple[int | None, int | None]

CAUSAL: Window = (None, 0)

SCALE = NumberArgument("scale")

#: Operands of packed calls: where the sequences of queries and of keys begin, and the last one ends (B + 1,) int32.
BEGINS_Q, BEGINS_KV = "begins_q", "begins_kv"

#: Operands of packed queries on pages: the page table (B, max_pages), and numbers of keys (B,), int32.
PAGE_TABLE, LENGTHS = "page_table", "lengths"


class Kind(NamedTuple):
    """The calls that a compiled function serves, whatever their lengths, batch and number of heads.

    Attributes:
        dtype: The name of the dtype.
        group: Query heads of a key head.
        few_queries, few_keys: Whether a backward pass has one tile of them.
        is_packed: Whether sequences are packed.
        is_on_pages: Whether their keys are in pages.
    """

    is_backward: bool
    dtype: str
    dim: int
    dim_v: int
    group: int
    is_causal: bool
    has_left: bool
    has_right: bool
    has_lse: bool
    has_sinks: bool
    is_capped: bool
    few_queries: bool
    few_keys: bool
    is_packed: bool
    is_on_pages: bool = False

    def __str__(self) -> str:
        dims = f"{self.dim}" if self.dim == self.dim_v else f"{self.dim} and {self.dim_v}"
        details = {
            f"{self.group} query heads for a key head": self.group > 1,
            "causal": self.is_causal,
            "window": self.has_left or self.has_right,
            "sinks": self.has_sinks,
            "soft cap": self.is_capped,
            "log-sum-exp": self.has_lse and not self.is_backward,
            "one tile of queries": self.few_queries,
            "one tile of keys": self.few_keys,
            "on pages": self.is_on_pages,
            "packed": self.is_packed and not self.is_on_pages,
        }
        what = f"{'gradients' if self.is_backward else 'calls'} in {self.dtype}, D={dims}"
        return ", ".join([what, *(name for name, holds in details.items() if holds)])

    @classmethod
    def of(cls, layouts: Mapping[str, TensorLayout], window: Window) -> Kind:
        """The kind of a call with these operands: (B, H, S, D), (T, H, D) of packed sequences, (pages, H, S, D)."""
        q, k, v = (layouts[name] for name in "qkv")
        is_causal, is_backward, is_packed = window == CAUSAL, "grad_q" in layouts, BEGINS_Q in layouts
        tiles, rows = BackwardTiles.of(q.shape[-1], window), 0 if is_packed else 2
        return cls(
            is_backward=is_backward,
            dtype=str(q.dtype).removeprefix("torch."),
            dim=q.shape[-1],
            dim_v=v.shape[-1],
            group=q.shape[1] // k.shape[1],
            is_causal=is_causal,
            has_left=window[0] is not None,
            has_right=window[1] is not None and not is_causal,
            has_lse="lse" in layouts,
            has_sinks="sink" in layouts,
            is_capped="softcap" in layouts,
            few_queries=is_backward and q.shape[rows] <= tiles.queries,
            few_keys=is_backward and k.shape[rows] <= tiles.keys,
            is_packed=is_packed,
            is_on_pages=PAGE_TABLE in layouts,
        )


class BackwardTiles(NamedTuple):
    """The tiles of a backward pass: numbers of queries and keys, and what the head dim is rounded up to."""

    queries: int
    keys: int
    multiple: int

    @classmethod
    def of(cls, dim: int, window: Window) -> BackwardTiles:
        if dim <= 64:
            return cls(128, 128, 32)
        if dim <= 96:
            return cls(64, 128, 32)
        if dim <= 128:
            return cls(80 if window == (None, None) else 64, 128, 32)
        return cls(64, 96 if dim <= 192 else 48, 64)


def program_of(key: PlanKey) -> FunctionProgram:
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    return program(layouts, key.option_values["window"])  # type: ignore[arg-type]


def program(layouts: Mapping[str, TensorLayout], window: Window) -> FunctionProgram:
    """The program of a call with these operands."""
    return (_backward if "grad_q" in layouts else _forward)(layouts, window)


#: The engine's name in `explain`.
ENGINE = "FlashAttention-4"


def _forward(layouts: Mapping[str, TensorLayout], window: Window) -> FunctionProgram:
    q, k, v, out = (_rows(name, layouts[name]) for name in ("q", "k", "v", "out"))
    lse = _lse(layouts["lse"]) if "lse" in layouts else None
    sink = TensorArgument("sink", layouts["sink"].shape[1:2], (1,), torch.float32) if "sink" in layouts else None
    sequences = (*_ints(layouts, BEGINS_Q, BEGINS_KV), None, *_ints(layouts, LENGTHS, PAGE_TABLE))
    arguments = (q, k, v, out, lse, SCALE, *sequences, *_bounds(window), sink, None, _more(layouts), None, None)
    call = FunctionCall("forward", _of_any_size(arguments) if SIZES in layouts else arguments)
    return FunctionProgram(ENGINE, [call])


def _backward(layouts: Mapping[str, TensorLayout], window: Window) -> FunctionProgram:
    names = ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
    q, k, v, out, grad_out, grad_q, grad_k, grad_v = (_rows(name, layouts[name]) for name in names)
    (*_, dim), (*_, dim_v) = layouts["q"].shape, layouts["v"].shape
    heads, heads_kv = layouts["q"].shape[1], layouts["k"].shape[1]
    begins, tiles = _ints(layouts, BEGINS_Q, BEGINS_KV), BackwardTiles.of(dim, window)
    rows, keys = _padded(layouts["q"], begins, tiles.queries), _padded(layouts["k"], begins, tiles.keys)
    batch = () if BEGINS_Q in layouts else layouts["q"].shape[:1]
    shapes = {
        "grad_q": (*batch, heads, rows * _rounded(dim, tiles.multiple)),
        "delta": (*batch, heads, rows),
        "lse": (*batch, heads, rows),
    }
    if heads > heads_kv:
        shapes["grad_k"] = (*batch, heads_kv, keys * _rounded(dim, tiles.multiple))
        shapes["grad_v"] = (*batch, heads_kv, keys * _rounded(dim_v, tiles.multiple))
    offsets, workspace = side_by_side(4 * math.prod(shape) for shape in shapes.values())
    made = {
        name: TensorArgument("", shape, contiguous_stride(shape), torch.float32, offset=offset)
        for (name, shape), offset in zip(shapes.items(), offsets, strict=True)
    }
    sums = made["grad_q"], made.get("grad_k", grad_k), made.get("grad_v", grad_v)
    before = (out, grad_out, made["delta"], _lse(layouts["lse"]), made["lse"], sums[0])
    main = (q, k, v, grad_out, made["lse"], made["delta"], *sums, SCALE, *begins, None, None, *_bounds(window))
    of_queries, of_keys = (begins[0], None, None, None), (begins[1], None, None, None)
    calls = [
        FunctionCall("before", (*before, begins[0], *(None,) * 4, 1.0, None, None)),
        FunctionCall("main", (*main, *(None,) * 3, _more(layouts), None, None)),
        FunctionCall("grad_q", (sums[0], grad_q, SCALE, *of_queries)),
    ]
    if "grad_k" not in made:
        return FunctionProgram(ENGINE, calls, workspace)
    calls.append(FunctionCall("grad_k", (sums[1], grad_k, SCALE, *of_keys)))
    calls.append(FunctionCall("grad_v", (sums[2], grad_v, 1.0, *of_keys)))
    first = made["grad_k"].offset
    return FunctionProgram(ENGINE, calls, workspace, zeroed=(first, workspace - first))


def sizes_of(layouts: Mapping[str, TensorLayout], window: Window) -> array[int]:
    """The operand `SIZES` of a forward pass: shapes and strides of these operands."""
    (call,) = program(layouts, window).calls
    tensors = [x for x in call.arguments if isinstance(x, TensorArgument)]
    return array("q", [number for x in tensors for number in (*x.shape, *x.stride)])


def operands_of_any_size(operands: Sequence[Operand], window: Window) -> list[Operand]:
    """The operands of a plan for all sizes of these of a forward pass, which its kind alone determines."""
    layouts = {operand.name: operand.layout for operand in operands}
    heads_kv = layouts["k"].shape[1]

    def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1, shape[1] // heads_kv, *(1,) * (len(shape) - 3), shape[-1]) if len(shape) > 2 else (1,) * len(shape)

    made = [
        replace(x, layout=TensorLayout.contiguous(shape_of(x.layout.shape), x.layout.dtype))
        if x.role is Role.TENSOR
        else x
        for x in operands
    ]
    return [*made, Operand(SIZES, TensorLayout.contiguous((len(sizes_of(layouts, window)),), torch.int64), Role.HOST)]


def _of_any_size(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """The arguments with sizes that a launch reads, those of one tensor behind those of another."""
    at, made = 0, list[Argument]()
    for argument in arguments:
        if isinstance(argument, TensorArgument):
            made.append(replace(argument, sizes=at))
            at += 2 * len(argument.shape)
        else:
            made.append(argument)
    return tuple(made)


def _more(layouts: Mapping[str, TensorLayout]) -> Argument:
    """The arguments of functions of scores: no tensors, and the soft cap."""
    return None, (NumberArgument("softcap"),) if "softcap" in layouts else None


def _bounds(window: Window) -> Window:
    """The bounds as `flash_attn.cute` passes them on; a causal mask alone has a kernel of its own."""
    return (None, None) if window == CAUSAL else window


def _rows(name: str, layout: TensorLayout) -> TensorArgument:
    """An operand (B, H, S, D) as (B, S, H, D); (T, H, D) as it is."""
    if len(layout.shape) == 3:
        return TensorArgument(name, layout.shape, layout.stride, layout.dtype)
    batch, heads, rows, dim = layout.shape
    of_batch, of_head, of_row, one = layout.stride
    return TensorArgument(name, (batch, rows, heads, dim), (of_batch, of_row, of_head, one), layout.dtype)


def _lse(layout: TensorLayout) -> TensorArgument:
    """The LSE (B, H, S, 1) as (B, H, S); (H, T) as it is."""
    shape = layout.shape if len(layout.shape) == 2 else layout.shape[:3]
    return TensorArgument("lse", shape, contiguous_stride(shape), torch.float32)


def _ints(layouts: Mapping[str, TensorLayout], *names: str) -> list[TensorArgument | None]:
    """Operands of integers, as far as a call has them."""
    return [
        TensorArgument(x, layouts[x].shape, layouts[x].stride, torch.int32) if x in layouts else None for x in names
    ]


def _padded(layout: TensorLayout, begins: Sequence[TensorArgument | None], tile: int) -> int:
    """The rows of a sum in the workspace: in whole tiles, those of each packed sequence behind a tile's gap."""
    if begins[0] is None:
        return _rounded(layout.shape[2], tile)
    return (layout.shape[0] + begins[0].shape[0] * tile - 1) // tile * tile


def _rounded(count: int, tile: int) -> int:
    return -(-count // tile) * tile
