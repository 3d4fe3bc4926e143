"""Where packed sequences begin and end, as plans read it: computed on the GPU by one kernel of our own.

cuDNN wants the length of each sequence, and for each tensor where each sequence begins in it. It writes no row of a
sequence that has no keys, and none past the last sequence; the same kernel writes those, before the launch.
"""

from __future__ import annotations

from pathlib import Path

import torch

from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.attention.varlen.specs import VarlenSpec
from cudnn_sdpa.engine.launch import Address, OwnKernel
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import Plan

SOURCE = Path(__file__).with_name("packing.cu")
kernel, _argument = Kernel(SOURCE, "fill_packing"), Struct(SOURCE, "Packing")

MADE = "packing"  #: what addresses call the memory that the kernel fills

#: Operands of plans that read rows where sequences begin, and not offsets in each tensor.
BEGINS = ("begins_q", "begins_kv")

THREADS = 256
_MAX_TABLES = 10

_ZERO, _MINUS_INFINITY = 0, 0xFF800000  # as words of 4 bytes


class PackingKernel(OwnKernel):
    """Computes packings for the calls of one plan that look alike, and writes rows that the plan does not.

    Attributes:
        offsets: Where the offsets of each operand are in the memory that the kernel fills, in bytes.
    """

    __slots__ = ("offsets",)

    def __init__(self, packed: VarlenSpec, plan: Plan, call: VarlenArguments) -> None:
        ragged = [operand for operand in (*plan.key.inputs, *plan.key.outputs) if operand.ragged]
        tables = list(dict.fromkeys(map(_table, ragged)))
        sequences, outputs = packed.sequences, plan.key.outputs
        lengths = len(tables) * (sequences + 1)
        self.offsets = {f"offsets_{x.name}": 8 * (sequences + 1) * tables.index(_table(x)) for x in ragged}
        self.offsets |= {"seq_len_q": 8 * lengths, "seq_len_kv": 8 * lengths + 4 * sequences}
        size = lengths + sequences
        has_begins = any(operand.name == BEGINS[0] for operand in plan.key.inputs)
        if has_begins:
            self.offsets |= {name: 8 * size + 4 * (sequences + 1) * place for place, name in enumerate(BEGINS)}
            size += sequences + 1
        rows = call.q.shape[0], call.k.shape[0]
        unused = [0] * (_MAX_TABLES - len(tables))
        values = {
            "given": call.cu_seqlens_q.shape[0] - 1,
            "made": sequences,
            "rows_q": rows[0],
            "rows_kv": rows[1],
            "tables": len(tables),
            "outputs": len(outputs),
            "everything": _fills_everything(packed, plan),
            "stride": [*(row for row, _ in tables), *unused],
            "is_of_keys": [*(of_keys for _, of_keys in tables), *unused],
            "output": [rows_of(output) for output in outputs],
        }
        addresses = {
            "ends_q": Address("cu_seqlens_q"),
            "ends_kv": Address("cu_seqlens_q" if call.cu_seqlens_kv is None else "cu_seqlens_kv"),
            "lengths_q": Address(MADE, self.offsets["seq_len_q"]),
            "lengths_kv": Address(MADE, self.offsets["seq_len_kv"]),
            "begins": Address(MADE),
        }
        if has_begins:
            addresses |= {name: Address(MADE, self.offsets[name]) for name in BEGINS}
        addresses |= {f"output.{number}.base": Address(output.name) for number, output in enumerate(outputs)}
        processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
        super().__init__(
            kernel,
            name=MADE,
            buffer_layout=((size,), (1,), torch.int64),
            blocks=max(1, min(4 * processors, max(rows))),
            threads=THREADS,
            argument=_argument,
            values=values,
            addresses=addresses,
            device=plan.device,
        )


def _fills_everything(packed: VarlenSpec, plan: Plan) -> bool:
    """Whether all rows are filled, because cuDNN may not write those of queries that the band leaves no key.

    On Hopper it does, as the tests show. Where queries and keys have the same lengths there is no such query.
    """
    return packed.mask.band is not None and not packed.shared_cu_seqlens and plan.key.target.sm != 90


def is_of_keys(operand: Operand) -> bool:
    """Whether it has a row for each key, and not for each query."""
    return operand.name.removeprefix("grad_") in ("k", "v")


def _table(operand: Operand) -> tuple[int, bool]:
    """Elements from row to row and the kind of rows, which decide where sequences begin in a tensor."""
    return operand.layout.stride[2], is_of_keys(operand)


def rows_of(output: Operand) -> dict[str, int]:
    """The rows of an output, as the kernel fills them."""
    *_, dim = output.layout.shape
    if len(output.layout.shape) == 2:  # an LSE (H, T)
        (heads, _), (head, row), dim = output.layout.shape, output.layout.stride, 1
    elif output.ragged:
        (_, heads, _, _), (_, head, row, _) = output.layout.shape, output.layout.stride
    else:
        (_, heads, _), (row, head, _) = output.layout.shape, output.layout.stride
    size, value = output.layout.dtype.itemsize, _MINUS_INFINITY if output.name == "lse" else _ZERO
    words = {"words": dim * size // 4, "value": value, "of_keys": is_of_keys(output)}
    return {"row": row * size, "head": head * size, "heads": heads, **words}
