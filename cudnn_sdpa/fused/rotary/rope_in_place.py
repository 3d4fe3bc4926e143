"""`rope_`: queries and keys rotated in place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cudnn_sdpa.engine.dispatch_state import (
    can_be_recognized,
    can_bypass_dispatcher,
    has_subclass,
    is_batch,
    is_lazy,
    is_plain_memory,
    needs_gradient,
)
from cudnn_sdpa.engine.launch import NOT_A_CALL, Address, BoundPlan, LaunchExtras
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.engine.tensor_checks import check_apart
from cudnn_sdpa.errors import LayoutError, UnsupportedError
from cudnn_sdpa.fused.checks import checked_flag
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.rotary.rope import completed, operands_of, rope
from cudnn_sdpa.fused.rotary.rope_graphs import by_own_kernels, rope_rows
from cudnn_sdpa.fused.rotary.rope_kernels import own_rope
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import overlaps_itself
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans.cache import CallTable, build_plan, plan_cache
from cudnn_sdpa.plans.manifest import recorded_as, recordings
from cudnn_sdpa.plans.plan import Plan


def rope_(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> None:
    """`rope` in place: rotated queries and keys are written over the given ones, by one kernel. For inference.

    The heads may be views of one projection, whose other numbers stay. Their features must be dense, and angles and
    weights contiguous; elsewhere, and on the CPU and under `torch.compile`, `rope` runs, and its results are copied.

    Args:
        q: (B, Hq, S, D), or (T, Hq, D) packed, as for `rope`. It must not overlap another tensor.
        k: (B, Hkv, S, D), or (T, Hkv, D), likewise; or None.
        cos: Cosines of the positions, as for `rope`.
        sin: The sines.
        q_weight: (D,), in q's dtype or float32; None: the queries are not normalized.
        k_weight: (D,), likewise; None: the keys are not normalized.
        eps: As for `rope`.
        zero_centered: As for `rope`.
        interleaved: As for `rope`.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: A tensor requires grad.
        PlanBuildError: A plan is missing under `no_plan_builds` or while a CUDA graph is captured.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> projected = torch.randn(10, 4 + 2 + 2, 64).bfloat16()
        >>> q, k, v = projected.split([4, 2, 2], 1)
        >>> cos, sin = cudnn_sdpa.nn.RotaryEmbedding(64)(torch.arange(10))
        >>> expected, _ = cudnn_sdpa.rope(q, None, cos, sin)
        >>> cudnn_sdpa.rope_(q, k, cos, sin)
        >>> torch.equal(q, expected), torch.equal(projected[:, :4], expected)
        (True, True)
    """
    if interleaved is not False:
        interleaved = checked_flag("interleaved", interleaved)
    rotation: Any = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "zero_centered": zero_centered}
    operands: tuple[Value, ...] = completed(operands_of(q, k, cos, sin, **rotation))
    options: Options = {"interleaved": interleaved}
    tensors = [x for x in operands if isinstance(x, Tensor)]
    may_be_known = not is_compiling() and is_plain_memory(*tensors) and _are_apart(operands)
    if may_be_known and _calls.find is not None and _calls.find(*operands, interleaved) is not MISSED:
        _count_write(q, k)
        return
    known = _find(operands, tensors, options) if may_be_known else None
    known = known or _first(operands, tensors, options)
    if known is None:
        with nullcontext() if is_compiling() else _recorded(operands, options):
            for x, rotated in zip((q, k), rope(q, k, cos, sin, interleaved=interleaved, **rotation), strict=True):
                if x is not None and rotated is not None:
                    x.copy_(rotated)
        return
    known.bound(tensors, numbers=tuple([x for x in operands if isinstance(x, float)]))
    _count_write(q, k)
    if _calls.find is not None:
        written = [x for x in (q, k) if x is not None]
        _calls.register((*operands, interleaved), {}, RepeatableCall(known.bound, tensors, (), written=written))


class _Known(NamedTuple):
    """The launch of a known call, as `CallTable` has it."""

    bound: BoundPlan
    plan: Plan


_calls = NativeCalls(numbers=len(rope_rows.operands))
_table: CallTable[_Known] = CallTable()


def _are_apart(operands: tuple[Value, ...]) -> bool:
    """Whether the memory of queries and keys is apart in this call: addresses are in no signature."""
    try:
        _check_apart(operands)
    except NOT_A_CALL:  # the checks name the wrong argument
        return False
    return True


def _check_apart(operands: tuple[Value, ...]) -> None:
    given = dict(zip(rope_rows.operands, operands, strict=True))
    for name in "qk":
        if isinstance(x := given.pop(name), Tensor):
            check_apart(name, x, given.items(), "Use rope, which writes to new tensors.", may_interleave=True)


def _count_write(q: Tensor, k: Tensor | None) -> None:
    """Tells autograd that queries and keys have changed."""
    increment_version([x for x in (q, k) if x is not None and not x.is_inference()])


def _find(operands: tuple[Value, ...], tensors: list[Tensor], options: Options) -> _Known | None:
    """The launch of a known call, if nothing must intercept it."""
    try:
        if not can_be_recognized(tensors, lambda _: False) or needs_gradient(*tensors):
            return None
        return _table.get(rope_rows.signature(operands, options, False))
    except NOT_A_CALL:  # the checks name the wrong argument
        return None


def _first(operands: tuple[Value, ...], tensors: list[Tensor], options: Options) -> _Known | None:
    """Checks a call; the launch of the kernel, if it serves the call."""
    values, options = rope_rows.arguments(operands, options)
    given = dict(zip(rope_rows.operands, values, strict=True))
    written = {name: x for name in "qk" if isinstance(x := given[name], Tensor)}
    for name, x in given.items():
        if isinstance(x, Tensor) and needs_gradient(x):
            reasons = [f"{name} requires grad, and rope_ overwrites what its gradient is of"]
            raise UnsupportedError("the gradient of rope_", reasons, "rope, or rope_ under torch.no_grad()")
    if not is_compiling() and is_plain_memory(*tensors):
        _check_apart(values)
    for name, x in written.items():
        if not is_compiling() and overlaps_itself(x.shape, x.stride()):  # else PyTorch's copy refuses it
            raise LayoutError(name, f"strides {x.stride()} that overlap", "a separate address for each element")
    is_on_gpu = not is_compiling() and all(x.is_cuda for x in tensors)
    if not (is_on_gpu and can_bypass_dispatcher(*tensors, may_cast=False) and _is_for_kernel(values, options)):
        return None
    device = tensors[0].get_device()
    with torch.cuda.device(device):
        plan = plan_cache.get(_key(values, options, live_target(device), device), partial(build_plan, own_rope))
    addresses = {f"output{index}": Address(name) for index, name in enumerate(written)}
    bound = BoundPlan(
        plan,
        [name for name, x in given.items() if isinstance(x, Tensor)],
        results=[],
        numbers={name: x for name, x in given.items() if isinstance(x, float)},
        extras=LaunchExtras(addresses=addresses),
    )
    known = _Known(bound, plan)
    _table.add(rope_rows.signature(operands, options, False), known)
    return known


def _is_for_kernel(values: tuple[Value, ...], options: Options) -> bool:
    """Whether the kernel serves a call on a GPU that the checks have let pass."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return (
        not has_subclass(*tensors)
        and all(x.numel() and not is_lazy(x) and not is_batch(x) for x in tensors)
        and all(x is y for x, y in zip(rope_rows.as_readable(values, options), values, strict=True))
        and rope_rows.split(values, _written(values)) is None
    )


def _written(values: tuple[Value, ...]) -> list[Tensor]:
    given = dict(zip(rope_rows.operands, values, strict=True))
    return [x for name in "qk" if isinstance(x := given[name], Tensor)]


def _key(values: tuple[Value, ...], options: Options, target: Target, device: int | None) -> PlanKey:
    given = values, _written(values), options
    _, key, _ = by_own_kernels(own_rope, rope_rows.operands, given, target=target, device=device)
    return key


def _recorded(operands: tuple[Value, ...], options: Options) -> AbstractContextManager[None]:
    """Records the kernel's plan where `rope` runs in its place."""
    if recordings.active:
        values, options = rope_rows.arguments(operands, options)
        if _is_for_kernel(values, options):
            tensors = [x for x in values if isinstance(x, Tensor)]
            return recorded_as(lambda target: _key(values, options, target, None), tensors)
    return nullcontext()
