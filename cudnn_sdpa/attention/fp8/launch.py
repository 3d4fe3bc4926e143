"""Calls of attention in FP8 bound to their plans, on a GPU."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory, value_checks
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense.launch import BoundCall
from cudnn_sdpa.attention.fp8 import arguments, graphs, workarounds
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Backward,
    Fp8BackwardScales,
    Fp8Forward,
    Fp8Gradients,
    Fp8Output,
    Fp8Scales,
)
from cudnn_sdpa.attention.fp8.fast_path import CachedCall
from cudnn_sdpa.attention.fp8.plans import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.fp8.workarounds import aligned, readable
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.engine.memory import MISALIGNED, check_present
from cudnn_sdpa.graph.layouts import TensorLayout, dense_stride_like
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.build import build_plan
from cudnn_sdpa.plans.cache import next_use, plan_cache
from cudnn_sdpa.plans.plan import Plan, allocate, current_device


def as_layout(layout: TensorLayout) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """The layout as `allocate` takes it."""
    return layout.shape, layout.stride, layout.dtype


def no_amax(device: torch.device) -> Tensor:
    """Zeroed memory for an amax, which kernels update with atomic maxima."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def nothing(of: Fp8Forward) -> Fp8Output:
    """The results of a forward pass without queries or without keys."""
    out = new_output(of).zero_()
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device) if of.call.with_lse else None
    return Fp8Output(out, no_amax(out.device), no_amax(out.device), lse)


def no_gradients(of: Fp8Backward) -> Fp8Gradients:
    """The results of a backward pass without queries or without keys."""
    gradients = [new_gradient(x, of.grad_out.dtype).zero_() for x in (of.call.q, of.call.k, of.call.v)]
    return Fp8Gradients(*gradients, *(no_amax(of.call.q.device) for _ in range(4)))


def new_output(of: Fp8Forward) -> Tensor:
    """An output: dense, its dimensions in memory in the order of q."""
    q = of.call.q
    shape = (*q.shape[:3], of.call.v.shape[3])
    return torch.empty_strided(
        shape, dense_stride_like(shape, q.shape, q.stride()), dtype=of.out_dtype, device=q.device
    )


def new_gradient(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient of a tensor: dense, in its memory order."""
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=tensor.device)


# Gradients in FP8 that are computed a few batch entries at a time.


class SplitBackward:
    """A backward call that launches one plan several times, each time for some of its batch entries.

    Attributes:
        plan: The plan.
        last: What a `CallTable` resets.
    """

    __slots__ = ("_entries", "_layouts", "_part", "last", "plan")

    def __init__(self, part: Any, layouts: list[Any]) -> None:
        """`part` is the `BackwardCall` of the entries of one launch; `layouts` are those of the full gradients."""
        self._part, self._layouts = part, layouts
        self._entries = part.problem.q.shape[0]
        self.plan = part.plan
        self.last: Any = None

    def __call__(self, of: Fp8Backward) -> Fp8Gradients:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        result: Fp8Gradients = self._part.on_device(self._run, of)
        return result

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        scales: Fp8BackwardScales,
        lengths_q: Tensor | None,
        lengths_kv: Tensor | None,
    ) -> Fp8Gradients:
        """The same with separate arguments: a `grad_out` that cuDNN can read, q, k, v, `out` and a dense `lse`."""
        grad_out, q, k, v, out, lse = tensors
        call = ForwardArguments(q, k, v, seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
        return self(Fp8Backward(grad_out=aligned(grad_out), out=out, lse=lse, call=call, scales=scales))

    def _run(self, of: Fp8Backward) -> Fp8Gradients:
        batch, entries = of.call.q.shape[0], self._entries
        gradients = [allocate(*layout) for layout in self._layouts]
        amaxes = torch.zeros(batch // entries, 4, dtype=torch.float32, device=of.call.q.device)
        for number, first in enumerate(range(0, batch, entries)):
            some = slice(first, first + entries)
            self._part.write(_split(of, some), [*(x[some] for x in gradients), *_single(amaxes[number])])
        return Fp8Gradients(*gradients, *_single(amaxes.amax(0)))


def _single(values: Tensor) -> list[Tensor]:
    return [values[index : index + 1] for index in range(len(values))]


def _split(of: Fp8Backward, some: slice) -> Fp8Backward:
    """Some of the batch entries of a call."""
    call = of.call
    lengths_q, lengths_kv = (None if x is None else x[some] for x in (call.seq_lens_q, call.seq_lens_kv))
    call = call._replace(q=call.q[some], k=call.k[some], v=call.v[some])
    call = call._replace(seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
    return of._replace(grad_out=of.grad_out[some], out=of.out[some], lse=of.lse[some], call=call)


calls: CallTable[CachedCall | None] = CallTable(None)
backward_calls: CallTable[CachedCall | None] = CallTable(None)


class Fp8Call(BoundCall):
    """The common part of forward and backward calls."""

    __slots__ = ("_is_hopper", "_length_addresses", "is_plain", "last")

    def __init__(self, problem: Any, plan: Plan, scale: float) -> None:
        super().__init__(problem, plan, scale=scale)
        self._is_hopper = plan.key.target.sm // 10 == 9
        # A plain call takes full lengths only, and launches nothing but the plan.
        self.is_plain = not (problem.mask.masked_rows or problem.has_lengths)
        self._length_addresses = [self._fixed[name] for name in ("seq_len_q", "seq_len_kv") if name in self._fixed]
        self.last = None  # what a `CallTable` resets

    def is_elsewhere(self) -> bool:
        """Whether the plan's GPU is not the current one."""
        return self._elsewhere and current_device() != self.plan.device

    def launch_at(self, inputs: list[int], scales: Any, outputs: list[Tensor]) -> None:
        """Launches a plain call: addresses of inputs, scales, and outputs in the order of the key."""
        self.plan.last_used = next_use()
        addresses_of_scales = [scale.data_ptr() for scale in scales]
        if not all(addresses_of_scales):
            for name, scale in scales._asdict().items():
                check_present(f"scales.{name}", scale)
        results = [x.data_ptr() for x in outputs]
        self.plan.launch([*inputs, self._fixed["scale"], *addresses_of_scales, *self._length_addresses, *results])

    def new_amax(self, device: torch.device) -> Tensor:
        """Memory for an amax. Hopper's plans overwrite it; others may take the maximum with what it holds."""
        return allocate((1,), (1,), torch.float32) if self._is_hopper else no_amax(device)

    def inputs(self, call: ForwardArguments, scales: Any) -> dict[str, Tensor]:
        """The inputs by name: queries without fully masked rows, keys, values, scales and lengths."""
        masked_rows = self.problem.mask.masked_rows
        q = call.q[:, :, masked_rows:] if masked_rows else call.q
        return {"q": q, "k": call.k, "v": call.v, **scales._asdict(), **workarounds.lengths(call, self.problem.skv)}


class ForwardCall(Fp8Call):
    """A forward call bound to its plan."""

    __slots__ = ("_lse", "_out", "forward")

    def __init__(self, forward: ForwardSpec, plan: Plan, scale: float) -> None:
        super().__init__(forward.problem, plan, scale)
        self.forward = forward
        self._out = as_layout(forward.out)
        lse = TensorLayout.contiguous(forward.out.shape[:3], torch.float32)
        self._lse = as_layout(lse) if forward.with_lse else None

    def __call__(self, of: Fp8Forward) -> Fp8Output:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v)
        result: Fp8Output = self.on_device(self._run, of)
        return result

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: Fp8Scales,
        lengths_q: Tensor | None,
        lengths_kv: Tensor | None,
        table_k: Tensor | None,
        table_v: Tensor | None,
    ) -> Fp8Output:
        """The same with separate arguments; a plain call is launched without dictionaries."""
        addresses = [q.data_ptr(), k.data_ptr(), v.data_ptr()]
        q_address, k_address, v_address = addresses
        is_readable = all(addresses) and not (q_address | k_address | v_address) & MISALIGNED
        if not (self.is_plain and is_readable) or self.is_elsewhere():
            call = ForwardArguments(q, k, v, seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
            return self(Fp8Forward(call, scales, self._out[2], arguments.tables_of(table_k, table_v)))
        out, amax_s, amax_o = allocate(*self._out), self.new_amax(q.device), self.new_amax(q.device)
        lse = None if self._lse is None else allocate(*self._lse)
        self.launch_at(addresses, scales, [out, amax_s, amax_o] if lse is None else [out, amax_s, amax_o, lse])
        return Fp8Output(out, amax_s, amax_o, lse)

    def _run(self, of: Fp8Forward) -> Fp8Output:
        masked_rows, device = self.problem.mask.masked_rows, of.call.q.device
        out = allocate(*self._out)
        amax_s, amax_o = (self.new_amax(device) for _ in range(2))
        tensors = self.inputs(of.call, of.scales) | arguments.readable_tables(of)
        tensors |= {"out": out[:, :, masked_rows:] if masked_rows else out, "amax_s": amax_s, "amax_o": amax_o}
        lse = None
        if self.forward.with_lse:
            lse = out.new_empty(out.shape[:3], dtype=torch.float32)
            tensors["lse"] = lse.new_empty((*lse.shape[:2], lse.shape[2] - masked_rows)) if masked_rows else lse
        self.launch(tensors)
        if masked_rows:
            out[:, :, :masked_rows].zero_()
            if lse is not None:
                lse[:, :, :masked_rows] = -torch.inf
                lse[:, :, masked_rows:] = tensors["lse"]
        if self.problem.lengths_q or of.tables is not None:
            workarounds.mask_absent_rows(of.call, out, lse)
            amax_o = workarounds.amax_of(out, of.scales.scale_o, amax_o)
        return Fp8Output(out, amax_s, amax_o, lse)


class BackwardCall(Fp8Call):
    """A backward call bound to its plan."""

    __slots__ = ("_gradients", "_rows", "backward")

    def __init__(self, backward: BackwardSpec, plan: Plan, scale: float) -> None:
        super().__init__(backward.problem, plan, scale)
        self.backward = backward
        self._rows = backward.padded_rows(plan.key.target)
        self._gradients = [as_layout(layout) for layout in backward.gradients()]
        self.is_plain = self.is_plain and self._rows == backward.problem.rows

    def __call__(self, of: Fp8Backward) -> Fp8Gradients:
        """Allocates, launches and returns."""
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        result: Fp8Gradients = self.on_device(self._run, of)
        return result

    def _run(self, of: Fp8Backward) -> Fp8Gradients:
        outputs = self._outputs(of.call.q.device)
        self.write(of, outputs)
        return Fp8Gradients(*outputs)

    def _outputs(self, device: torch.device) -> list[Tensor]:
        return [*(allocate(*layout) for layout in self._gradients), *(self.new_amax(device) for _ in range(4))]

    def run(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        scales: Fp8BackwardScales,
        lengths_q: Tensor | None,
        lengths_kv: Tensor | None,
    ) -> Fp8Gradients:
        """The same with separate arguments: a `grad_out` that cuDNN can read, q, k, v, `out` and a dense `lse`."""
        grad_out, q, k, v, out, lse = tensors
        addresses = [x.data_ptr() for x in (q, k, v, out, grad_out, lse)]
        is_readable = all(addresses) and not any(address & MISALIGNED for address in addresses)
        if not (self.is_plain and is_readable) or self.is_elsewhere():
            call = ForwardArguments(q, k, v, seq_lens_q=lengths_q, seq_lens_kv=lengths_kv)
            return self(Fp8Backward(grad_out=aligned(grad_out), out=out, lse=lse, call=call, scales=scales))
        outputs = self._outputs(q.device)
        self.launch_at(addresses, scales, outputs)
        return Fp8Gradients(*outputs)

    def write(self, of: Fp8Backward, outputs: Sequence[Tensor]) -> None:
        """Launches the plan on the current device, into these outputs."""
        problem, masked_rows = self.problem, self.problem.mask.masked_rows
        grad_q, grad_k, grad_v, *amaxes = outputs
        tensors = self.inputs(of.call, of.scales)
        tensors |= {"out": of.out, "grad_out": of.grad_out, "lse": of.lse, "grad_q": grad_q}
        if masked_rows:
            grad_q[:, :, :masked_rows].zero_()
            for name in ("out", "grad_out", "lse", "grad_q"):
                tensors[name] = tensors[name][:, :, masked_rows:]
            tensors["lse"] = tensors["lse"].clone(memory_format=torch.contiguous_format)  # for an aligned address
        grad_q_rows = tensors["grad_q"]
        if self._rows != problem.rows:
            for name in ("q", "out", "grad_out", "lse"):
                tensors[name] = workarounds.pad_rows(tensors[name], self._rows)
            tensors["grad_q"] = torch.empty_like(tensors["q"], dtype=grad_q.dtype)
        tensors |= {"grad_k": grad_k, "grad_v": grad_v}
        tensors |= zip(("amax_dq", "amax_dk", "amax_dv", "amax_dp"), amaxes, strict=True)
        self.launch(tensors)
        if self._rows != problem.rows:
            grad_q_rows.copy_(tensors["grad_q"][:, :, : problem.rows])


def run_forward(of: Fp8Forward) -> Fp8Output:
    """A forward pass on the GPU that its tensors are on."""
    prepared = prepare_forward(of)
    return nothing(of) if prepared is None else prepared(of)


def prepare_forward(of: Fp8Forward) -> ForwardCall | None:
    """The bound call; None if there is nothing to compute."""
    if value_checks.enabled:
        check_values(of)
    tables = () if of.tables is None else tuple(map(describe, of.tables))
    signature = ("forward", of.out_dtype, tables, *_signature(of.call, of.scales))
    prepared: ForwardCall | None = calls.get(signature)
    if prepared is None:
        arguments.check_forward_on_pages(of)
        memory.check_strides(of.call.q, of.call.k, of.call.v)
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v)
        forward = ForwardSpec.of(of)
        if forward.problem.is_empty:
            return None
        device = of.call.q.get_device()
        key = forward.key(live_target(device), device)
        plan = plan_cache.get(key, lambda key: build_plan(graphs.sdpa_fp8_forward, key))
        prepared = ForwardCall(forward, plan, of.call.scale_value)
        calls.add(signature, prepared)
    return prepared


def run_backward(of: Fp8Backward) -> Fp8Gradients:
    """A backward pass on the GPU that its tensors are on."""
    if of.grad_out.dim() == of.out.dim() == 4 and of.grad_out.shape == of.out.shape:
        of = readable(of)  # other shapes are refused below
    prepared = prepare_backward(of)
    return no_gradients(of) if prepared is None else prepared(of)


def prepare_backward(of: Fp8Backward) -> BackwardCall | SplitBackward | None:
    """The bound call for a `readable` call; None if there is nothing to compute."""
    if value_checks.enabled:
        check_lengths(of.call)
    tensors = map(describe, (of.grad_out, of.out, of.lse))
    signature = ("backward", *tensors, *_signature(of.call, of.scales))
    prepared: BackwardCall | SplitBackward | None = backward_calls.get(signature)
    if prepared is None:
        arguments.check_backward(of)
        memory.check_strides(of.call.q, of.call.k, of.call.v)
        memory.check_strides_of("out", of.out)
        memory.check_addresses(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)
        backward = BackwardSpec.of(of)
        if backward.problem.is_empty:
            return None
        device = of.call.q.get_device()
        part = backward.part(target := live_target(device))
        plan = plan_cache.get(part.key(target, device), lambda key: build_plan(graphs.sdpa_fp8_backward, key))
        prepared = bound = BackwardCall(part, plan, of.call.scale_value)
        if part is not backward:
            prepared = SplitBackward(bound, [as_layout(layout) for layout in backward.gradients()])
        backward_calls.add(signature, prepared)
    return prepared


def check_values(of: Fp8Forward) -> None:
    """Checks lengths and page ids."""
    call = arguments.without_pages(of)
    check_lengths(call)
    if of.tables is not None and call.seq_lens_kv is not None:
        for name, table in zip(("page_table", "page_table_v"), of.tables, strict=True):
            value_checks.check_pages(
                name=name, table=table, lengths=call.seq_lens_kv, page_size=of.call.k.shape[2], pages=of.call.k.shape[0]
            )


def check_lengths(call: ForwardArguments) -> None:
    """Checks that lengths fit their tensors: on the CPU, and under `CUDNN_SDPA_DEBUG`."""
    value_checks.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.k.shape[2])


def _signature(call: ForwardArguments, scales: Any) -> tuple[Hashable, ...]:
    """Everything that determines a call, except the dtype of its output or the tensors of its gradient."""
    options = (*call.options, call.with_lse)
    tensors = (*call.tensors, *scales)
    return (*map(describe, tensors), *options, *map(type, options))
