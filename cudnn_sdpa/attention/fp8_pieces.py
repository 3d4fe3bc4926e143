"""Gradients in FP8 that are computed a few batch entries at a time.

Under a causal mask cuDNN's FP8 kernel for Hopper takes longer for each entry the more there are. With 32 heads and 4096
tokens an H200 with cuDNN 9.19 needs 0.66 ms for one and 4.35 ms for four; four launches need 2.64 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.fp8_arguments import Fp8Backward, Fp8BackwardScales, Fp8Gradients
from cudnn_sdpa.attention.fp8_repairs import at_even_address
from cudnn_sdpa.runtime.plan import allocate


class PiecedBackward:
    """A backward call that launches the plan of some of its batch entries until all are done.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_entries", "_layouts", "_piece", "last", "plan")

    def __init__(self, piece: Any, layouts: list[Any]) -> None:
        """`piece` is the `BackwardCall` of the entries that go together; `layouts` are those of whole gradients."""
        self._piece, self._layouts = piece, layouts
        self._entries = piece.problem.q.shape[0]
        self.plan = piece.plan
        self.last: Any = None

    def __call__(self, of: Fp8Backward) -> Fp8Gradients:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        result: Fp8Gradients = self._piece.on_device(self._run, of)
        return result

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        scales: Fp8BackwardScales,
        lengths_q: Tensor | None,
        lengths_kv: Tensor | None,
    ) -> Fp8Gradients:
        """The same for `grad_out` that can be read, q, k, v, `out` and a dense `lse`."""
        grad_out, q, k, v, out, lse = tensors
        call = ForwardArguments(q, k, v, seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
        return self(Fp8Backward(at_even_address(grad_out), out, lse, call, scales))

    def _run(self, of: Fp8Backward) -> Fp8Gradients:
        batch, entries = of.call.q.shape[0], self._entries
        gradients = [allocate(*layout) for layout in self._layouts]
        largest = torch.zeros(batch // entries, 4, dtype=torch.float32, device=of.call.q.device)
        for number, first in enumerate(range(0, batch, entries)):
            some = slice(first, first + entries)
            self._piece.write(_cut(of, some), [*(x[some] for x in gradients), *_single(largest[number])])
        return Fp8Gradients(*gradients, *_single(largest.amax(0)))


def _single(numbers: Tensor) -> list[Tensor]:
    return [numbers[place : place + 1] for place in range(len(numbers))]


def _cut(of: Fp8Backward, some: slice) -> Fp8Backward:
    """Some of the batch entries of a call."""
    call = of.call
    lengths_q, lengths_kv = (None if x is None else x[some] for x in (call.seq_lens_q, call.seq_lens_kv))
    call = call._replace(q=call.q[some], k=call.k[some], v=call.v[some])
    call = call._replace(seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
    return of._replace(grad_out=of.grad_out[some], out=of.out[some], lse=of.lse[some], call=call)
