"""A call over packed sequences bound to its plan: what is left to do when all that a signature decides is decided."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.packed import Packed
from cudnn_sdpa.attention.packing import Packer, is_of_keys, row_limits
from cudnn_sdpa.attention.passes import dense_like
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.runtime.cache import next_use
from cudnn_sdpa.runtime.key import Operand
from cudnn_sdpa.runtime.plan import Plan, allocate, current_device


class VarlenCall:
    """A call, forward or backward, bound to its plan.

    Attributes:
        packed: The call without its data.
        plan: The plan.
        last: What a `CallTable` resets; the look-up keeps elsewhere by what it recognizes a call.
        gradients: What `varlen_shortcuts` keeps of its backward passes.
        written: Shape, stride and dtype of the outputs as cuDNN writes them.
        moved: The same of gradients as the caller gets them, where that is in another memory order; by number.
    """

    __slots__ = (
        *("__weakref__", "_elsewhere", "_numbers", "_of_outputs", "_of_packing", "_of_tensors", "_pack"),
        *("_template", "gradients", "last", "moved", "packed", "plan", "written"),
    )

    def __init__(self, packed: Packed, plan: Plan, call: VarlenArguments, tensors: tuple[str, ...]) -> None:
        """Binds it.

        Args:
            packed: The call without its data.
            plan: The plan.
            call: The call, or one like it.
            tensors: Names of the operands that `launch` gets, in its order.
        """
        self.packed = packed
        self.plan = plan
        self.last: Any = None
        self.gradients: Any = None
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._numbers = {"scale": array("f", [call.scale_value])}
        if call.softcap is not None:
            self._numbers["softcap"] = array("f", [call.softcap])
        self._pack = Packer(packed, plan, call)
        operands = (*plan.key.inputs, *plan.key.outputs)
        names = [operand.name for operand in operands]
        place = {name: number for number, name in enumerate(names)}
        fixed = {name: number.buffer_info()[0] for name, number in self._numbers.items()}
        self._template = [fixed.get(name, 0) for name in names]
        self._of_packing = [(place[name], offset) for name, offset in self._pack.offsets.items() if name in place]
        self._of_tensors = [place[name] for name in tensors]
        self._of_outputs = [place[output.name] for output in plan.key.outputs]
        self.written = [_unpacked(output, call) for output in plan.key.outputs]
        wanted = {"grad_q": packed.q, "grad_k": packed.k, "grad_v": packed.v}
        self.moved: dict[int, Any] = {}
        for number, output in enumerate(plan.key.outputs):
            if output.name in wanted:
                layout = dense_like(wanted[output.name])
                if layout.stride != self.written[number][1]:
                    self.moved[number] = (layout.shape, layout.stride, layout.dtype)

    def launch(self, call: VarlenArguments, tensors: tuple[Tensor, ...], outputs: list[Tensor]) -> None:
        """Launches the plan; rows of the outputs that belong to nobody, or see no key, are written, too."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                self.launch(call, tensors, outputs)
            return
        addresses = [output.data_ptr() for output in outputs]
        ends = call.cu_seqlens_q.data_ptr()
        ends_kv = ends if call.one_packing else call.cu_seqlens_kv.data_ptr()
        if not (ends and ends_kv):
            memory.check_present("cu_seqlens_q", call.cu_seqlens_q)
            memory.check_present("cu_seqlens_kv", call.cu_seqlens_kv)
        packing = self._pack(ends, ends_kv, addresses)
        start, pointers = packing.data_ptr(), self._template.copy()
        for place, offset in self._of_packing:
            pointers[place] = start + offset
        for place, tensor in zip(self._of_tensors, tensors, strict=True):
            pointers[place] = tensor.data_ptr()
        for place, address in zip(self._of_outputs, addresses, strict=True):
            pointers[place] = address
        kept = self._add_sides(call, packing, pointers)
        self.plan.last_used = next_use()
        self.plan.launch(pointers)
        del kept  # until now: their memory must not go to the plan's workspace

    def _add_sides(self, call: VarlenArguments, packing: Tensor, pointers: list[int]) -> Any:
        """Adds the pointers of what only some calls have, and gives what they point to."""
        if call.sinks is None and call.rng is None and not self.packed.softcap:
            return None
        names = [operand.name for operand in self.plan.key.inputs]
        sinks = None if call.sinks is None else memory.aligned("sinks", call.sinks)
        if sinks is not None and "sink" in names:
            pointers[names.index("sink")] = sinks.data_ptr()
        if call.rng is not None:
            pointers[names.index("seed")] = call.rng.data_ptr()
            pointers[names.index("offset")] = call.rng.data_ptr() + call.rng.element_size()
        limits = row_limits(self.packed, self._pack.lengths(packing)) if self.packed.softcap else {}
        for name, tensor in limits.items():
            pointers[names.index(name)] = tensor.data_ptr()
        return sinks, limits

    def outputs(self) -> list[Tensor]:
        """New memory for the outputs, on the plan's device."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.outputs()
        return [allocate(*layout) for layout in self.written]


def _unpacked(output: Operand, call: VarlenArguments) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Shape, stride and dtype of an output, as the caller sees it."""
    _, heads, _, dim = output.layout.shape
    _, head, row, _ = output.layout.stride
    rows = (call.k if is_of_keys(output) else call.q).shape[0]
    of_lse = output.name == "lse"
    return (
        (rows, heads) if of_lse else (rows, heads, dim),
        (row, head) if of_lse else (row, head, 1),
        output.layout.dtype,
    )
