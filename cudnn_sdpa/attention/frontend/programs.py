"""The arguments of the attention kernel of cuDNN's frontend for large head dims, by kind of call and layouts.

The kernel is that of the frontend's engine `sdpa_fwd_prefill_sm90`, of compute capability 9.0. `compiler.py` has the
frontend's own code make it, and gives it a host function that takes these arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from cudnn_sdpa.attention.mask import Band
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans.function_plan import FunctionCall, FunctionProgram, NumberArgument, TensorArgument

#: The engine's name in `explain`: that of the frontend's.
ENGINE = "sdpa_fwd_prefill_sm90 of cuDNN's frontend"

#: The name of the one function of a kind.
FORWARD = "forward"

#: Rows of a tile of queries.
TILE = 64

#: The operands in which the kernel reads or writes rows (B, H, S, D), in the order of its arguments.
ROWS = ("q", "k", "v", "out")

#: Letters of the dimensions of rows but the last, which is contiguous.
_DIMENSIONS = "bhs"


class Kind(NamedTuple):
    """The calls that a compiled kernel serves: of one shape and mask, whatever the distances of their rows.

    Attributes:
        dtype: The name of the dtype.
        left, right, bottom_right: The mask's band, whose bounds are None without one.
        order_q, order_k, order_v, order_out: See `order_of`.
    """

    dtype: str
    batch: int
    heads: int
    heads_kv: int
    sq: int
    skv: int
    dim: int
    dim_v: int
    left: int | None
    right: int | None
    bottom_right: bool
    has_lse: bool
    has_sinks: bool
    order_q: str
    order_k: str
    order_v: str
    order_out: str

    def __str__(self) -> str:
        details = {
            f"window ({self.left}, {self.right})": (self.left, self.right) != (None, None),
            "bottom-right": self.bottom_right,
            "sinks": self.has_sinks,
            "log-sum-exp": self.has_lse,
        }
        q, k = (f"({self.batch}, {h}, {s}, {self.dim})" for h, s in ((self.heads, self.sq), (self.heads_kv, self.skv)))
        what = f"calls in {self.dtype}, q {q}, k {k}, Dv={self.dim_v}"
        return ", ".join([what, *(name for name, holds in details.items() if holds)])

    @classmethod
    def of(cls, layouts: Mapping[str, TensorLayout], band: Band | None) -> Kind:
        """The kind of a call with these operands, each (B, H, S, D)."""
        q, v = layouts["q"], layouts["v"]
        left, right, bottom_right = band or (None, None, False)
        return cls(
            dtype=str(q.dtype).removeprefix("torch."),
            batch=q.shape[0],
            heads=q.shape[1],
            heads_kv=v.shape[1],
            sq=q.shape[2],
            skv=v.shape[2],
            dim=q.shape[3],
            dim_v=v.shape[3],
            left=left,
            right=right,
            bottom_right=bottom_right,
            has_lse="lse" in layouts,
            has_sinks="sink" in layouts,
            **{f"order_{name}": order_of(layouts[name]) for name in ROWS},
        )

    @property
    def packs_heads(self) -> bool:
        """Whether a tile has the queries of all heads that share a key head.

        It has if that takes fewer tiles, which is the frontend's choice, too.
        """
        group = self.heads // self.heads_kv
        tiles, packed = -(-self.sq // TILE) * group, -(-self.sq * group // TILE)
        return group > 1 and TILE % group == 0 and packed < tiles


def program_of(key: PlanKey) -> FunctionProgram:
    layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
    return program(layouts, key.option_values["band"])  # type: ignore[arg-type]


def program(layouts: Mapping[str, TensorLayout], band: Band | None) -> FunctionProgram:
    """The program of a call with these operands."""
    kind = Kind.of(layouts, band)
    batch, heads, sq = layouts["q"].shape[:3]
    lse = TensorArgument("lse", (batch, heads, sq), (heads * sq, sq, 1), torch.float32) if kind.has_lse else None
    sink = TensorArgument("sink", (heads,), (1,), torch.float32) if kind.has_sinks else None
    rows = (TensorArgument(name, layouts[name].shape, strides_of(layouts[name]), layouts[name].dtype) for name in ROWS)
    call = FunctionCall(FORWARD, (*rows, lse, sink, NumberArgument("scale")))
    return FunctionProgram(ENGINE, [call], knobs={"pack_gqa": int(kind.packs_heads)})


def strides_of(layout: TensorLayout) -> tuple[int, ...]:
    """The strides as the kernel gets them: those of dimensions of size 1, which mean nothing, are the head dim."""
    *sizes, dim = layout.shape
    return *(dim if size == 1 else stride for size, stride in zip(sizes, layout.stride[:3], strict=True)), 1


def order_of(layout: TensorLayout) -> str:
    """The dimensions but the last, beginning with the one whose entries are closest together: "hsb", "shb"."""
    strides = strides_of(layout)
    return "".join(_DIMENSIONS[i] for i in sorted(range(3), key=lambda i: (strides[i], layout.shape[i], i)))
