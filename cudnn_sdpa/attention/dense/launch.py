"""Forward calls bound to their plans, and the table that finds them by raw signature."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments, Result
from cudnn_sdpa.attention.bias import bias_of
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.engine.dispatch_state import Guard
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.engine.memory import MISALIGNED, check_present
from cudnn_sdpa.graph.determinism import has_only_repeatable
from cudnn_sdpa.graph.layouts import contiguous_stride
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import next_use
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

# Positions of operands in a plain call's pointers. The output is the last one, or the one before the LSE.
Q, K, V = 0, 1, 2
OUT, LSE = 4, 5  #: of a plan with an LSE and without lengths; the scale is at 3
SEQ_LEN_KV = 5  #: of a plan with lengths

SMALLEST = torch.finfo(torch.float32).min  #: replaces an LSE of -inf, because -inf - (-inf) is NaN


def _check_memory(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, mask: Tensor | None = None) -> None:
    """Checks addresses and bumps the autograd version of `out`, which the call writes."""
    memory.check_memory(q, k, v, out, mask)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


ResultT = TypeVar("ResultT")


class BoundCall:
    """A plan with the host scalars, constants and pointer order that a launch needs in addition to tensors."""

    __slots__ = ("_elsewhere", "_fixed", "_names", "_scalars", "_template", "plan", "problem")

    def __init__(self, problem: DenseSpec, plan: Plan, **scalars: float | None) -> None:
        self.problem = problem
        self.plan = plan
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._scalars = {name: array("f", [value]) for name, value in scalars.items() if value is not None}
        self._fixed = {name: scalar.buffer_info()[0] for name, scalar in self._scalars.items()}
        self._fixed |= {name: tensor.data_ptr() for name, tensor in plan.constants.items()}
        self._names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        # A copy with some pointers filled in, one statement each, takes 0.2 µs less than a new array.
        self._template = array("Q", [self._fixed.get(name, 0) for name in self._names])

    def launch(self, tensors: dict[str, Tensor], addresses: dict[str, int] | None = None) -> None:
        """Launches the plan on these operands; constants and host scalars are added.

        Raises:
            LayoutError: One has no memory.
        """
        known = {**self._fixed, **addresses} if addresses else self._fixed.copy()
        for name, tensor in tensors.items():
            known[name] = tensor.data_ptr()
        operands = [known[name] for name in self._names]
        if not all(operands):
            for name, tensor in tensors.items():
                check_present(name, tensor)
        self.plan.last_used = next_use()
        self.plan.launch(operands)

    def on_device(self, run: Callable[..., ResultT], *operands: object) -> ResultT:
        """`run(*operands)` with the plan's GPU as the current one."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return run(*operands)
        return run(*operands)

    def side_tensors(self, call: ForwardArguments) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The optional operands of both passes: tensors (bias, sinks), and addresses (seed, offset)."""
        tensors, addresses = {}, {}
        if call.attn_mask is not None:
            if call.attn_mask.data_ptr() == 0:  # freed since the forward pass: its conversion would read it
                check_present("attn_mask", call.attn_mask)
            problem = self.problem
            tensors["bias"] = bias_of(call.attn_mask, call.q, problem.skv, problem.mask.masked_rows)
        if call.sinks is not None:
            sinks, address = call.sinks, call.sinks.data_ptr()
            if not address or address & MISALIGNED:
                sinks = memory.aligned("sinks", sinks)
            if "sink" in self._names:
                tensors["sink"] = sinks
        if call.rng is not None:
            addresses["seed"] = call.rng.data_ptr()
            addresses["offset"] = addresses["seed"] + call.rng.element_size()
        return tensors, addresses


class ForwardCall(BoundCall):
    """A forward call bound to its plan. Calling it checks only addresses, which no signature contains.

    Attributes:
        may_be_replaced: Whether another plan may replace this one between two calls, so results may differ in rounding.
    """

    may_be_replaced = False

    __slots__ = ("_has_lse", "_last", "_lse", "_one_launch", "_out", "_sinks_outside", "forward", "training")

    def __init__(self, forward: ForwardSpec, plan: Plan, scale: float, softcap: float | None = None) -> None:
        super().__init__(forward.problem, plan, scale=scale, softcap=softcap)
        self.forward = forward
        self._out = (forward.out.shape, forward.out.stride, forward.out.dtype)
        lse_shape = forward.out.shape[:3]
        self._lse = (lse_shape, contiguous_stride(lse_shape), torch.float32)
        self._has_lse, self._sinks_outside = forward.plan_has_lse, forward.sinks_outside
        problem = forward.problem
        lengths = problem.has_lengths or problem.needs_lengths
        self._one_launch = forward.with_lse and problem.has_no_sides and not (problem.mask.masked_rows or lengths)
        self._last: CachedCall | None = None
        self.training: Any = None  # the `fast_path.TrainingCall` of this call

    @property
    def last(self) -> CachedCall | None:
        """The `CachedCall` that recognizes this call."""
        return self._last

    @last.setter
    def last(self, value: CachedCall | None) -> None:
        self._last = value
        if value is None and self.training is not None:  # it refers back to this call and would keep its plan alive
            self.training.last = None
            self.training = None

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        q, k, v, mask = call.q, call.k, call.v, call.attn_mask
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        has_memory = first and second and third and (mask is None or mask.data_ptr())
        if not has_memory or (first | second | third) & MISALIGNED or call.out is not None:
            _check_memory(q, k, v, call.out, mask)
        if self._elsewhere:
            result: Result = self.on_device(self._run, call)
            return result
        return self._run(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same for a plain call without `seq_lens_q`, with separate arguments."""
        if self._one_launch and out is None:
            return self.run_plain(q, k, v)
        return self(ForwardArguments(q, k, v, seq_lens_kv=lengths_kv, out=out))

    def run_plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and LSE of a plain call without lengths and fully masked rows; saves 4 µs of dictionaries."""
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (first | second | third) & MISALIGNED or not (first and second and third):
            _check_memory(q, k, v, None)
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run_plain(q, k, v)
        out, lse = allocate(*self._out), allocate(*self._lse)
        operands, plan = self._template[:], self.plan
        operands[Q] = first
        operands[K] = second
        operands[V] = third
        operands[OUT] = out.data_ptr()
        operands[LSE] = lse.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return out, lse

    def _run(self, call: ForwardArguments) -> Result:
        masked_rows = self.problem.mask.masked_rows
        q, out = call.q, allocate(*self._out) if call.out is None else call.out
        lse = allocate(*self._lse) if self._has_lse else None
        visible_out, visible_lse = out, lse
        if masked_rows:
            out[:, :, :masked_rows].zero_()
            q, visible_out = q[:, :, masked_rows:], out[:, :, masked_rows:]
            if lse is not None:
                lse[:, :, :masked_rows].fill_(-torch.inf)
                visible_lse = lse.new_empty(lse[:, :, masked_rows:].shape)
        tensors, addresses = self.side_tensors(call)
        tensors |= {"q": q, "k": call.k, "v": call.v, "out": visible_out}
        if visible_lse is not None:
            tensors["lse"] = visible_lse
        if call.seq_lens_q is not None or call.seq_lens_kv is not None:
            tensors |= self._lengths(call.seq_lens_q, call.seq_lens_kv)
        self.launch(tensors, addresses)
        if call.sinks is not None and lse is not None and visible_lse is not None:
            if self._sinks_outside:
                apply_sinks(visible_out, visible_lse, call.sinks)
            elif self.problem.can_have_masked_rows:  # fully masked rows see only the sink
                torch.maximum(visible_lse, call.sinks.view(1, -1, 1), out=visible_lse)
            if masked_rows:
                lse[:, :, :masked_rows] = call.sinks.view(1, -1, 1)
        if masked_rows and lse is not None and visible_lse is not None:
            lse[:, :, masked_rows:] = visible_lse
        return (out, lse) if self.forward.with_lse and lse is not None else out

    def _lengths(self, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
        if self.forward.is_decode and not self.problem.softcap:
            return decode_lengths(self.problem, lengths_q, lengths_kv)
        return lengths(self.problem, lengths_q, lengths_kv)


class PlainCall(ForwardCall):
    """A call of a single launch: no LSE, and no lengths except those of a decode step.

    It does what `ForwardCall` does without dictionaries, views and a device guard: 4 µs less.
    """

    __slots__ = ("_skv",)

    def __init__(self, forward: ForwardSpec, plan: Plan, scale: float) -> None:
        super().__init__(forward, plan, scale)
        self._skv = forward.problem.skv

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        return self.run(call.q, call.k, call.v, call.seq_lens_kv, call.out)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same with separate arguments."""
        plan = self.plan
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if out is not None or (first | second | third) & MISALIGNED or not (first and second and third):
            _check_memory(q, k, v, out)
        if self._elsewhere and current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self.run(q, k, v, lengths_kv, out)
        if out is None:
            out = allocate(*self._out)
        operands = self._template[:]
        operands[Q] = first
        operands[K] = second
        operands[V] = third
        operands[-1] = out.data_ptr()
        if lengths_kv is not None:
            if lengths_kv.data_ptr() == 0:
                memory.check_lengths_present(None, lengths_kv)
            clamped = lengths_kv.clamp_max(self._skv)  # cuDNN's decode engines would read out of bounds
            operands[SEQ_LEN_KV] = clamped.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return out


def lengths(problem: DenseSpec, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
    """The lengths that cuDNN reads, corrected for sequences without keys.

    cuDNN 9.19 writes nothing for such a sequence. It is passed as one without queries, whose rows cuDNN fills with
    zeros and -inf.
    """
    sq, skv = problem.sq, problem.skv
    memory.check_lengths_present(lengths_q, lengths_kv)
    if problem.softcap:
        return row_limits(problem, lengths_q, lengths_kv)
    if lengths_kv is None:
        return {} if lengths_q is None else {"seq_len_q": lengths_q.clamp(0, sq)}
    present = lengths_kv.clamp(0, 1)
    return {
        "seq_len_q": present * (sq if lengths_q is None else lengths_q.clamp(0, sq)),
        "seq_len_kv": lengths_kv.clamp(1, skv),
    }


def row_limits(problem: DenseSpec, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
    """The first and the last key that each query sees, which a graph with soft-capping reads instead of lengths."""
    lengths = lengths_kv if lengths_q is None else lengths_q
    if lengths is None:
        return {}
    device, sq, skv = lengths.device, problem.sq, problem.skv
    limit_q = sq if lengths_q is None else lengths_q.clamp(0, sq).view(-1, 1)
    limit_kv = skv if lengths_kv is None else lengths_kv.clamp(0, skv).view(-1, 1)
    left, right, bottom_right = problem.mask.band or (None, None, False)
    rows = torch.arange(sq, dtype=torch.int32, device=device).expand(lengths.shape[0], sq)
    diagonal = rows + (limit_kv - limit_q) if bottom_right else rows
    last = rows.new_full(rows.shape, skv) if right is None else diagonal + right
    # No tensor is made from a Python scalar here: that would be a host-to-device copy and synchronize.
    last = torch.minimum(last, limit_kv - 1) if isinstance(limit_kv, Tensor) else last.clamp_max(limit_kv - 1)
    first = torch.zeros_like(rows) if left is None else (diagonal - left).clamp_min(0)
    return {"lowest": first.contiguous(), "highest": last.masked_fill(rows >= limit_q, -1)}


def decode_lengths(problem: DenseSpec, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
    """The same for a single query. cuDNN's decode engines ignore seq_lens_q, so without a query there are no keys."""
    memory.check_lengths_present(lengths_q, lengths_kv)
    clamped = None if lengths_kv is None else lengths_kv.clamp(0, problem.skv)
    if lengths_q is not None:
        clamped = lengths_q.clamp(0, 1) * (problem.skv if clamped is None else clamped)
    return {} if clamped is None else {"seq_len_kv": clamped}


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds the sinks, in place, to an output and an LSE that were computed without them."""
    total = torch.logaddexp(lse, sinks.view(1, -1, 1))
    out.mul_(torch.exp(lse - total.clamp_min(SMALLEST)).unsqueeze(-1))  # 0 where there is neither a key nor a sink
    lse.copy_(total)


def bind(forward: ForwardSpec, plan: Plan, scale: float, softcap: float | None = None) -> ForwardCall:
    """The call bound to `plan` with this scale and soft-capping."""
    problem = forward.problem
    one_launch = not (forward.plan_has_lse or problem.mask.masked_rows or problem.lengths_q or problem.needs_lengths)
    if one_launch and problem.has_no_sides and (forward.is_decode or not problem.lengths_kv):
        return PlainCall(forward, plan, scale)
    return ForwardCall(forward, plan, scale, softcap)


# The cached calls of this process by raw signature: the first level of look-up, before any check and any key.


Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, None], Result]


class CachedCall:
    """A plain eager call and the guard that recognizes another like it: no `seq_lens_q`, no `out`, no rarer options."""

    __slots__ = ("alignment", "check", "has_lengths", "is_causal", "run", "scale", "scale_type", "with_lse")

    def __init__(
        self,
        run: Any,
        check: Guard,
        is_causal: bool | None,
        alignment: str,
        scale: float | None,
        with_lse: bool,
        has_lengths: bool,
    ) -> None:
        self.run = run
        self.check = check
        self.is_causal = is_causal
        self.alignment = alignment
        self.scale = scale
        self.scale_type = type(scale)
        self.with_lse = with_lse
        self.has_lengths = has_lengths


def _matches_nothing(*_: object) -> bool:
    return False


#: Calls whose backward pass is known to be supported: signature of the forward pass with an LSE, whether the mask needs
#: a gradient, and determinism.
differentiable: set[tuple[Hashable, bool, bool]] = set()

_NO_CALL = CachedCall(
    run=None, check=_matches_nothing, is_causal=None, alignment="", scale=None, with_lse=False, has_lengths=False
)

#: Cached calls by raw signature, and the last plain one.
calls: CallTable[CachedCall] = CallTable(_NO_CALL)


def signature(call: ForwardArguments) -> Hashable:
    """Everything that decides the plan of a call, as a flat tuple."""
    if call.deterministic and may_differ(call.q):
        return "must repeat", signature(call._replace(deterministic=False))
    if call.is_plain:
        return plain_signature(
            call.q,
            call.k,
            call.v,
            call.seq_lens_q,
            call.seq_lens_kv,
            call.is_causal,
            call.causal_alignment,
            call.scale,
            call.with_lse,
            call.out,
        )
    options = call.options[:-1]  # all but `deterministic`: a slice saves 0.2 µs
    types = tuple(map(type, (*options, call.with_lse)))  # 1, 1.0 and True are equal, but not all are accepted
    layouts = [  # `describe` inlined, saves 0.5 µs
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in (*call.tensors, call.rng, call.out)
    ]
    return (*layouts, *options, call.with_lse, types)


def may_differ(q: Tensor) -> bool:
    """Whether cuDNN has nondeterministic kernels for the forward pass of these queries."""
    sm = live_target(q.get_device()).sm if q.is_cuda else 0
    return not has_only_repeatable(sm, q.shape[2])


def plain_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_lens_q: Tensor | None,
    seq_lens_kv: Tensor | None,
    is_causal: bool,
    causal_alignment: str,
    scale: float | None,
    return_lse: bool,
    out: Tensor | None,
) -> Hashable:
    """The same for a plain call."""
    flat = (
        *(q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device),
        *(v.shape, v.stride(), v.dtype, v.device, is_causal, causal_alignment, scale, return_lse),
        *(type(is_causal), type(scale), type(return_lse)),
    )
    if seq_lens_q is None and seq_lens_kv is None and out is None:
        return flat
    return (*flat, *map(describe, (seq_lens_q, seq_lens_kv, out)))
