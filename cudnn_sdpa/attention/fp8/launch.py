"""FP8 calls bound to their plans, on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import parts
from cudnn_sdpa.attention.arguments import warn_of_order
from cudnn_sdpa.attention.dense.launch import has_readable_layout
from cudnn_sdpa.attention.dense.specs import DenseSpec
from cudnn_sdpa.attention.fp8 import graphs, specs, workarounds
from cudnn_sdpa.attention.fp8.arguments import (
    SCALES,
    Fp8Arguments,
    Fp8BackwardArguments,
    Fp8BackwardScales,
    Fp8Scales,
    as_dense,
)
from cudnn_sdpa.attention.fp8.specs import AMAX, BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.parts import Part
from cudnn_sdpa.engine.launch import BoundPlan, LaunchExtras, Layout, Prepared, SingleLaunch, new_tensor
from cudnn_sdpa.engine.operation import OPERATIONS
from cudnn_sdpa.engine.tensor_checks import LOWEST, check_address, check_present
from cudnn_sdpa.graph.key import PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.plan import allocate, current_device

Results = tuple[Tensor, ...]


def as_layout(layout: TensorLayout) -> Layout:
    return layout.shape, layout.stride, layout.dtype


def prepare(call: Fp8Arguments) -> Prepared:
    warn_of_order(call)
    spec = ForwardSpec.of(call)
    dense, masked_rows = spec.dense, spec.dense.mask.masked_rows
    if dense.is_empty:
        return Prepared(_fill_empty, None)
    device = call.q.get_device()
    key = spec.key(live_target(device), device)
    plan = plan_cache.get(key, partial(build_plan, graphs.sdpa_fp8_forward))
    lse = TensorLayout.contiguous((*spec.out.shape[:2], dense.rows), torch.float32)
    plain = BoundPlan(
        plan=plan,
        operands=("q", "k", "v"),
        results=[as_layout(spec.out), AMAX, AMAX, as_layout(lse)][: len(key.outputs)],
        numbers={"scale": as_dense(call).scale_value},
        extras=_scales(Fp8Scales._fields, key),
        arguments=SCALES,
    )
    bound = _Bound(plain, Fp8Scales._fields, tensors=3, dense=dense)

    def run(call: Fp8Arguments) -> Results:
        return tuple(bound(call, (call.q, call.k, call.v)))

    def run_and_mask(call: Fp8Arguments) -> Results:
        """cuDNN also computes rows past the lengths, and counts them in the amax of the output."""
        out, amax_s, amax_o, *lse = bound(call, (call.q, call.k, call.v))
        workarounds.mask_absent_rows(call, out, lse[0] if lse else None)
        return out, amax_s, workarounds.amax_of(out, call.scale_o, amax_o), *lse

    def run_visible(call: Fp8Arguments) -> Results:
        """The plan computes the queries that see a key, which are the last ones."""
        check_address("q", call.q)  # later, of a slice, no address would show it
        out = new_tensor(as_layout(spec.out), call.q.device)
        out[:, :, :masked_rows].zero_()
        tensors = call.q[:, :, masked_rows:], call.k, call.v
        _, amax_s, amax_o, *lse = bound(call, tensors, out[:, :, masked_rows:])
        if not lse:
            return out, amax_s, amax_o
        whole = lse[0].new_empty(out.shape[:3])
        whole[:, :, :masked_rows] = -torch.inf
        whole[:, :, masked_rows:] = lse[0]
        return out, amax_s, amax_o, whole

    is_masked_after = dense.lengths_q or spec.pages is not None
    if bound.is_direct and not masked_rows and not is_masked_after:
        return Prepared(SingleLaunch(plain, range(len(plain.results))), plan)
    return Prepared(run_visible if masked_rows else run_and_mask if is_masked_after else run, plan)


def _fill_empty(call: Fp8Arguments) -> Results:
    out, amax_s, amax_o, lse = (new_tensor(layout, call.q.device).zero_() for layout in specs.results(call))
    return (out, amax_s, amax_o, lse.fill_(-torch.inf)) if call.with_lse else (out, amax_s, amax_o)


def _scales(names: Sequence[str], key: PlanKey) -> LaunchExtras:
    """The scales, which need not be aligned, and what `_made` gives."""
    made = [x for x in key.inputs if x.name.startswith(("seq_len_", "table_")) and x.role is not Role.FILL]
    sides = tuple(x.name for x in made)
    return LaunchExtras(operands=(*names, *sides), unaligned_ok=(*names, *sides))


def _made(call: Fp8Arguments | Fp8BackwardArguments, dense: DenseSpec) -> dict[str, Tensor]:
    if not dense.has_lengths:
        return {}
    made = workarounds.lengths(call, dense.skv)
    return made | workarounds.readable_tables(call) if isinstance(call, Fp8Arguments) else made


class _Bound:
    """Launches a plan with the scales of a call, and the lengths and page tables that are made for it."""

    __slots__ = ("_amaxes", "_scales", "_sides", "bound", "dense")

    def __init__(self, bound: BoundPlan, scales: Sequence[str], tensors: int, dense: DenseSpec) -> None:
        """Binds it, given the names of the scales, and the number of the operands before them."""
        self.bound, self.dense, self._scales = bound, dense, attrgetter(*scales)
        self._sides = bound.operands[tensors + len(scales) :]
        key = bound.plan.key
        amaxes = [place for place, x in enumerate(key.outputs) if x.name.startswith("amax_")]
        #: They are zeroed first, as kernels may take the maximum with what they hold; Hopper's overwrite it.
        self._amaxes = [] if key.target.sm // 10 == 9 else amaxes

    @property
    def is_direct(self) -> bool:
        """Whether there is nothing to make and to zero, so that the plan alone may be launched."""
        return not (self._sides or self._amaxes)

    def __call__(
        self,
        call: Fp8Arguments | Fp8BackwardArguments,
        tensors: Sequence[Tensor],
        out: Tensor | None = None,
        into: list[Tensor] | None = None,
    ) -> list[Tensor]:
        bound = self.bound
        with _on(bound.plan.device):
            made = _made(call, self.dense)
            if into is None and self._amaxes:
                first, *others = bound.results
                into = [allocate(*first) if out is None else out, *(allocate(*layout) for layout in others)]
            if into is not None:
                for place in self._amaxes:
                    into[place].zero_()
            return bound((*tensors, *self._scales(call), *(made[name] for name in self._sides)), out, into)


def _on(device: int) -> AbstractContextManager[object]:
    is_elsewhere = torch.cuda.device_count() > 1 and current_device() != device
    return torch.cuda.device(device) if is_elsewhere else nullcontext()


# The backward pass.


def prepare_backward(call: Fp8BackwardArguments) -> Prepared:
    whole = BackwardSpec.of(call)
    if whole.dense.is_empty:
        return Prepared(_zero_gradients, None)
    if specs.split_backward(call):
        return Prepared(_run_in_parts, None)
    device = call.q.get_device()
    spec = whole.part(target := live_target(device))
    key = spec.key(target, device)
    plan = plan_cache.get(key, partial(build_plan, graphs.sdpa_fp8_backward))
    dense, rows = spec.dense, spec.padded_rows(target)
    gradients = [as_layout(layout) for layout in whole.gradients()]
    plain = BoundPlan(
        plan=plan,
        operands=("q", "k", "v", "out", "grad_out", "lse"),
        results=[*(as_layout(layout) for layout in spec.gradients()), *[AMAX] * 4],
        numbers={"scale": as_dense(call).scale_value},
        extras=_scales(Fp8BackwardScales._fields, key) + LaunchExtras(copy_if_unaligned=("grad_out",)),
        arguments=SCALES,
    )
    bound = _Bound(plain, Fp8BackwardScales._fields, tensors=6, dense=dense)
    is_whole = spec is whole and rows == dense.rows == dense.sq
    copied = {} if has_readable_layout(call.grad_out) else {"grad_out": whole.grad_out}
    if not call.lse.is_contiguous():
        copied["lse"] = TensorLayout.contiguous(tuple(call.lse.shape), torch.float32)
    if is_whole and bound.is_direct and not copied:
        return Prepared(SingleLaunch(plain, range(len(plain.results)), of={}), plan)

    def run(call: Fp8BackwardArguments) -> Results:
        call = _readable(call, copied)
        return tuple(bound(call, (call.q, call.k, call.v, call.out, call.grad_out, call.lse)))

    if is_whole:
        return Prepared(run, plan)

    def run_rows(call: Fp8BackwardArguments) -> Results:
        """As many launches as there are parts of the batch, of rows that see a key, perhaps padded."""
        call, entries = _readable(call, copied), spec.dense.q.shape[0]
        if call.grad_out.data_ptr() < LOWEST:
            check_present("grad_out", call.grad_out)  # where it is not aligned, it is copied
        for name in ("q", "k", "v", "out", "lse"):
            check_address(name, getattr(call, name))  # before PyTorch's kernels read them, or slices are made
        device, batch = call.q.device, call.q.shape[0]
        found = [new_tensor(layout, device) for layout in gradients]
        if spec is whole:
            found += [new_tensor(AMAX, device) for _ in range(4)]
            _launch_rows(bound, call, found, rows - dense.rows)
            return tuple(found)
        amaxes = torch.zeros(batch // entries, 4, dtype=torch.float32, device=device)
        for number, first in enumerate(range(0, batch, entries)):
            part = slice(first, first + entries)
            of_part = specs.part_of(call, Part(part, slice(None), slice(None)))
            outputs = [*(x[part] for x in found), *_single(amaxes[number])]
            _launch_rows(bound, of_part, outputs, rows - dense.rows)
        return *found, *_single(amaxes.amax(0))

    return Prepared(run_rows, plan)


def _run_in_parts(call: Fp8BackwardArguments) -> Results:
    *gradients, _, _, _, _ = specs.results_of_backward(call)
    dims = (("entries", "heads"), ("entries", "heads_kv"), ("entries", "heads_kv"))
    wholes = [parts.Whole(layout, places) for layout, places in zip(gradients, dims, strict=True)]
    wholes += [parts.Whole(AMAX, (None,), is_amax=True)] * 4

    def run(part: Part) -> Results:
        return tuple(OPERATIONS["sdpa_fp8_backward"].on_gpu(specs.part_of(call, part)))  # which remembers its binding

    return tuple(parts.merge(specs.split_backward(call), run, wholes, call.q.device))


def _zero_gradients(call: Fp8BackwardArguments) -> Results:
    return tuple(new_tensor(layout, call.q.device).zero_() for layout in specs.results_of_backward(call))


def _readable(call: Fp8BackwardArguments, copied: Mapping[str, TensorLayout]) -> Fp8BackwardArguments:
    """The call with copies, in these layouts, of operands whose own cuDNN cannot read."""
    made: dict[str, Any] = {name: workarounds.copied(name, getattr(call, name), x) for name, x in copied.items()}
    return call._replace(**made) if made else call


def _launch_rows(bound: _Bound, call: Fp8BackwardArguments, outputs: Sequence[Tensor], padding: int) -> None:
    """Launches the rows that see a key, padded on Hopper, into given outputs."""
    masked_rows = bound.dense.mask.masked_rows
    q, out, grad_out, lse, grad_q = call.q, call.out, call.grad_out, call.lse, outputs[0]
    if masked_rows:
        grad_q[:, :, :masked_rows].zero_()
        q, out, grad_out, lse, grad_q = (x[:, :, masked_rows:] for x in (q, out, grad_out, lse, grad_q))
        lse = lse.clone(memory_format=torch.contiguous_format)  # for an aligned address
    visible = grad_q
    if padding:
        q, out, grad_out, lse = (workarounds.pad_rows(x, x.shape[2] + padding) for x in (q, out, grad_out, lse))
        grad_q = torch.empty_like(q, dtype=grad_q.dtype)
    bound(call, (q, call.k, call.v, out, grad_out, lse), into=[grad_q, *outputs[1:]])
    if padding:
        visible.copy_(grad_q[:, :, : visible.shape[2]])


def _single(values: Tensor) -> list[Tensor]:
    return [values[index : index + 1] for index in range(len(values))]
