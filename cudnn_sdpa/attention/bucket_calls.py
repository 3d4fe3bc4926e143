"""Forward calls served by the plan of their bucket."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.buckets import Bucket
from cudnn_sdpa.attention.calls import MISALIGNED, ForwardCall, Result, _check_memory
from cudnn_sdpa.runtime.cache import next_use
from cudnn_sdpa.runtime.plan import Plan, allocate, current_device, current_raw_stream
from cudnn_sdpa.runtime.tables import DeviceTables


class Successor(Protocol):
    """What leads from a bucket's plan to the plan of a shape's own."""

    def find(self) -> ForwardCall | None:
        """The call of the shape's own plan, once that is there. Asked at each call."""


class BucketCall(ForwardCall):
    """A plain call bound to the plan of its bucket: a launch like any other, with tables of where sequences begin.

    Attributes:
        is_of_graph: Whether its tables are made in a CUDA graph, and are of no use outside.
        table_bytes: What they take of the GPU's memory.
    """

    may_be_replaced = True

    __slots__ = ("_offsets", "_successor", "_tables", "_tail", "is_of_graph", "table_bytes")

    def __init__(self, bucket: Bucket, plan: Plan, scale: float, successor: Successor | None) -> None:
        """Makes the tables, on the current stream of the plan's GPU, which must be the current one."""
        super().__init__(bucket.forward, plan, scale)
        self._successor = successor
        tables = bucket.tables(torch.device("cuda", plan.device))
        self.is_of_graph = torch.cuda.is_current_stream_capturing()
        stream = current_raw_stream(plan.device)
        self._tables = DeviceTables(tables, plan.device, stream, captured=self.is_of_graph)
        self.table_bytes = self._tables.size
        known = self._tables.addresses
        self._offsets = tuple(known[f"offsets_{name}"] for name in ("q", "k", "v", "out"))
        self._tail = (self._fixed["scale"], known["seq_len_q"], known["seq_len_kv"])

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        return self.run(call.q, call.k, call.v, None, call.out)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same with the arguments one by one; there are no lengths."""
        plan = self.plan
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self.run(q, k, v, lengths_kv, out)
        own = None if self._successor is None else self._successor.find()
        if own is not None:
            return own.run(q, k, v, None, out)
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is not None or (first | second | third) & MISALIGNED or not (first and second and third):
            _check_memory(q, k, v, out)
        if out is None:
            out = allocate(*self._out)
        self._tables.prepare(current_raw_stream(plan.device))
        plan.last_used = next_use()
        plan.launch((*self._offsets, first, second, third, *self._tail, out.data_ptr()))
        return out
