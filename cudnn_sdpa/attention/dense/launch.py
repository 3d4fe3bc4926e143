"""Forward calls bound to their plans, and the table that finds them by raw signature."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments, Result
from cudnn_sdpa.attention.bias import bias_of
from cudnn_sdpa.attention.dense.plans import DenseSpec, ForwardSpec
from cudnn_sdpa.attention.memory import MISALIGNED
from cudnn_sdpa.engine.dispatch_state import Guard
from cudnn_sdpa.engine.fast_path import CallTable, describe
from cudnn_sdpa.graph.determinism import has_only_repeatable
from cudnn_sdpa.graph.layouts import contiguous_stride
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import next_use
from cudnn_sdpa.plans.plan import Plan, allocate, current_device

SMALLEST = torch.finfo(torch.float32).min  #: in place of a log-sum-exp of -inf, which taken from itself is NaN


def _check_memory(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, mask: Tensor | None = None) -> None:
    """Checks the addresses, and tells autograd that `out` is about to be written."""
    memory.check_memory(q, k, v, out, mask)
    if out is not None and not out.is_inference():
        torch.autograd.graph.increment_version(out)


class BoundCall:
    """A plan with what a call of it needs beside tensors: host numbers, constants, the order of the pointers."""

    __slots__ = ("_elsewhere", "_fixed", "_names", "_numbers", "_template", "plan", "problem")

    def __init__(self, problem: DenseSpec, plan: Plan, **numbers: float | None) -> None:
        self.problem = problem
        self.plan = plan
        self._elsewhere = torch.cuda.device_count() > 1  # whether another GPU can be the current one
        self._numbers = {name: array("f", [value]) for name, value in numbers.items() if value is not None}
        self._fixed = {name: numbers.buffer_info()[0] for name, numbers in self._numbers.items()}
        self._fixed |= {name: tensor.data_ptr() for name, tensor in plan.constants.items()}
        self._names = [operand.name for operand in (*plan.key.inputs, *plan.key.outputs)]
        # A copy with some places filled in, one statement each, takes 0.2 µs less than an array made of pointers.
        self._template = array("Q", [self._fixed.get(name, 0) for name in self._names])

    def launch(self, tensors: dict[str, Tensor], addresses: dict[str, int] | None = None) -> None:
        """Launches the plan on these operands; constants and host numbers are known.

        Raises:
            LayoutError: One has no memory.
        """
        known = {**self._fixed, **addresses} if addresses else self._fixed.copy()
        for name, tensor in tensors.items():
            known[name] = tensor.data_ptr()
        operands = [known[name] for name in self._names]
        if not all(operands):
            for name, tensor in tensors.items():
                memory.check_present(name, tensor)
        self.plan.last_used = next_use()
        self.plan.launch(operands)

    def on_device(self, run: Any, *operands: Any) -> Any:
        """`run(*operands)` with the plan's GPU as the current one."""
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return run(*operands)
        return run(*operands)

    def side_tensors(self, call: ForwardArguments) -> tuple[dict[str, Tensor], dict[str, int]]:
        """The operands of both passes beside queries, keys, values and lengths: tensors, and mere addresses."""
        tensors, addresses = {}, {}
        if call.attn_mask is not None:
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
    """A forward call bound to its plan. Calling it checks only what no signature holds: addresses.

    Attributes:
        may_be_replaced: Whether another plan may take over between two calls, so that their results differ by rounding.
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
        self._last: Any = None
        self.training: Any = None  # what `training` keeps for plain calls that autograd follows

    @property
    def last(self) -> Any:
        """By what the look-up recognizes this call when it comes again."""
        return self._last

    @last.setter
    def last(self, value: Any) -> None:
        self._last = value
        if value is None and self.training is not None:  # what refers back to this call must not keep its plan
            self.training.last = None
            self.training = None

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        q, k, v, mask = call[:4]
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        has_memory = first and second and third and (mask is None or mask.data_ptr())
        if not has_memory or (first | second | third) & MISALIGNED or call.out is not None:
            _check_memory(q, k, v, call.out, mask)
        if self._elsewhere:
            result: Result = self.on_device(self._run, call)
            return result
        return self._run(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same for a plain call without `seq_lens_q`, with the arguments one by one."""
        if self._one_launch and out is None:
            return self.run_plain(q, k, v)
        return self(ForwardArguments(q, k, v, seq_lens_kv=lengths_kv, out=out))

    def run_plain(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a plain call without lengths and blind rows; saves 4 µs of dictionaries."""
        first, second, third = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (first | second | third) & MISALIGNED or not (first and second and third):
            _check_memory(q, k, v, None)
        if self._elsewhere and current_device() != self.plan.device:
            with torch.cuda.device(self.plan.device):
                return self.run_plain(q, k, v)
        out, lse = allocate(*self._out), allocate(*self._lse)
        operands, plan = self._template[:], self.plan
        operands[0] = first
        operands[1] = second
        operands[2] = third
        operands[4] = out.data_ptr()
        operands[5] = lse.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return out, lse

    def _run(self, call: ForwardArguments) -> Result:
        blind = self.problem.mask.masked_rows
        q, out = call.q, allocate(*self._out) if call.out is None else call.out
        lse = allocate(*self._lse) if self._has_lse else None
        visible_out, visible_lse = out, lse
        if blind:
            out[:, :, :blind].zero_()
            q, visible_out = q[:, :, blind:], out[:, :, blind:]
            if lse is not None:
                lse[:, :, :blind].fill_(-torch.inf)
                visible_lse = lse.new_empty(lse[:, :, blind:].shape)
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
            elif self.problem.can_have_masked_rows:  # queries without keys see the sink alone
                torch.maximum(visible_lse, call.sinks.view(1, -1, 1), out=visible_lse)
            if blind:
                lse[:, :, :blind] = call.sinks.view(1, -1, 1)
        if blind and lse is not None and visible_lse is not None:
            lse[:, :, blind:] = visible_lse
        return (out, lse) if self.forward.with_lse and lse is not None else out

    def _lengths(self, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
        if self.forward.is_decode and not self.problem.softcap:
            return decode_lengths(self.problem, lengths_q, lengths_kv)
        return lengths(self.problem, lengths_q, lengths_kv)


class PlainCall(ForwardCall):
    """The shortest way, for calls with one launch and nothing else: no log-sum-exp, no lengths but a decode step's.

    It does what `ForwardCall` does without its dictionaries, views and device guard: 4 µs less.
    """

    __slots__ = ("_skv",)

    def __init__(self, forward: ForwardSpec, plan: Plan, scale: float) -> None:
        super().__init__(forward, plan, scale)
        self._skv = forward.problem.skv

    def __call__(self, call: ForwardArguments) -> Result:
        """Allocates, launches and returns."""
        return self.run(call.q, call.k, call.v, call.seq_lens_kv, call.out)

    def run(self, q: Tensor, k: Tensor, v: Tensor, lengths_kv: Tensor | None, out: Tensor | None) -> Result:
        """The same with the arguments one by one."""
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
        operands[0] = first
        operands[1] = second
        operands[2] = third
        operands[-1] = out.data_ptr()
        if lengths_kv is not None:
            if lengths_kv.data_ptr() == 0:
                memory.check_lengths_present(None, lengths_kv)
            within = lengths_kv.clamp_max(self._skv)  # cuDNN's decode engines would read on
            operands[5] = within.data_ptr()
        plan.last_used = next_use()
        plan.launch(operands)
        return out


def lengths(problem: DenseSpec, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
    """The two lengths that cuDNN reads, corrected where its engines would leave rows wrong.

    Seen on cuDNN 9.19: nothing is written for a sequence without keys. So such a sequence becomes one without queries,
    whose rows cuDNN fills with zeros and -inf.
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
    """The first and the last key that each query sees: what a soft cap's graph reads in place of lengths."""
    given = lengths_kv if lengths_q is None else lengths_q
    if given is None:
        return {}
    device, sq, skv = given.device, problem.sq, problem.skv
    of_q = sq if lengths_q is None else lengths_q.clamp(0, sq).view(-1, 1)
    of_kv = skv if lengths_kv is None else lengths_kv.clamp(0, skv).view(-1, 1)
    left, right, bottom_right = problem.mask.band or (None, None, False)
    rows = torch.arange(sq, dtype=torch.int32, device=device).expand(given.shape[0], sq)
    diagonal = rows + (of_kv - of_q) if bottom_right else rows
    last = rows.new_full(rows.shape, skv) if right is None else diagonal + right
    # No tensor is made of a number here: that would be a copy from the host, and wait for the GPU.
    last = torch.minimum(last, of_kv - 1) if isinstance(of_kv, Tensor) else last.clamp_max(of_kv - 1)
    first = torch.zeros_like(rows) if left is None else (diagonal - left).clamp_min(0)
    return {"lowest": first.contiguous(), "highest": last.masked_fill(rows >= of_q, -1)}


def decode_lengths(problem: DenseSpec, lengths_q: Tensor | None, lengths_kv: Tensor | None) -> dict[str, Tensor]:
    """The same for a single query: cuDNN's decode engines ignore the queries' lengths, so an absent one sees no key."""
    memory.check_lengths_present(lengths_q, lengths_kv)
    within = None if lengths_kv is None else lengths_kv.clamp(0, problem.skv)
    if lengths_q is not None:
        within = lengths_q.clamp(0, 1) * (problem.skv if within is None else within)
    return {} if within is None else {"seq_len_kv": within}


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Adds the sinks, in place, to an output and a log-sum-exp that were computed without them."""
    total = torch.logaddexp(lse, sinks.view(1, -1, 1))
    out.mul_(torch.exp(lse - total.clamp_min(SMALLEST)).unsqueeze(-1))  # 0 where there are neither keys nor a sink
    lse.copy_(total)


def bind(forward: ForwardSpec, plan: Plan, scale: float, softcap: float | None = None) -> ForwardCall:
    """The call of `plan` with these numbers."""
    problem = forward.problem
    one_launch = not (forward.plan_has_lse or problem.mask.masked_rows or problem.lengths_q or problem.needs_lengths)
    if one_launch and problem.has_no_sides and (forward.is_decode or not problem.lengths_kv):
        return PlainCall(forward, plan, scale)
    return ForwardCall(forward, plan, scale, softcap)


# The prepared calls of this process by raw signature: the first level of look-up, before any check and any key.


Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, None], Result]


class CachedCall:
    """The plain call that was served last, in plain eager mode without `seq_lens_q`, `out` and the rarer options."""

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


def _matches_nothing(*_: Any) -> bool:
    return False


#: By signature of the forward pass with a log-sum-exp, whether there is a gradient by the mask, and determinism: calls
#: whose backward pass is known to have nothing that speaks against it.
differentiable: set[tuple[Hashable, bool, bool]] = set()

#: Prepared calls by raw signature, and the last one served.
calls: CallTable[CachedCall] = CallTable(CachedCall(None, _matches_nothing, None, "", None, False, False))


def signature(call: ForwardArguments) -> Hashable:
    """All that decides a call, as a flat tuple."""
    if call.deterministic and may_differ(call.q):
        return "must repeat", signature(call._replace(deterministic=False))
    if call.is_plain:
        return plain_signature(
            *call[:3], call.seq_lens_q, call.seq_lens_kv, *call[8:10], call.scale, call.with_lse, call.out
        )
    options = call.options[:-1]  # all but `deterministic`
    types = tuple(map(type, (*options, call.with_lse)))  # 1, 1.0 and True are equal, but not all are accepted
    layouts = [  # `describe` without its calls, 0.5 µs
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for tensor in (*call.tensors, call.rng, call.out)
    ]
    return (*layouts, *options, call.with_lse, types)


def may_differ(q: Tensor) -> bool:
    """Whether determinism concerns the forward pass: whether there are kernels that give other bits in another run."""
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
