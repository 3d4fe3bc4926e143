"""Faults of cuDNN in graphs around attention, and in those of users; see `known_issues`."""

from __future__ import annotations

from cudnn_sdpa.runtime.key import PlanKey, Role
from cudnn_sdpa.runtime.known_issue import KnownIssue
from cudnn_sdpa.runtime.layouts import TensorLayout


def _stretched(key: PlanKey) -> bool:
    """Whether an operand of three dimensions is repeated along two of them, in a batch of several."""
    shapes = [op.layout.shape for op in key.inputs if op.role is Role.TENSOR and len(op.layout.shape) == 3]
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    is_batch = bool(whole) and whole[0] > 1 and max(whole[1:]) > 1
    return is_batch and any(sum(size > 1 for size in shape) == 1 for shape in shapes)


def _users(key: PlanKey) -> list[TensorLayout]:
    """The tensors of a user's graph; of the library's own graphs none, which pass only what is read right."""
    if key.operation.startswith("cudnn_sdpa."):
        return []
    return [op.layout for op in key.inputs if op.role is Role.TENSOR]


def _is_flat(key: PlanKey) -> bool:
    """Whether all tensors of a user's graph have fewer than three dimensions."""
    layouts = _users(key)
    return bool(layouts) and max(len(x.shape) for x in layouts) < 3


def _is_broadcast_with_gaps(key: PlanKey) -> bool:
    """Whether a tensor that is broadcast is not dense; of three dimensions, not row-major."""
    layouts = _users(key)
    rank = max((len(x.shape) for x in layouts), default=0)
    layouts = [x for x in layouts if len(x.shape) == rank]
    whole = [max(sizes) for sizes in zip(*(x.shape for x in layouts), strict=True)]
    return any(_is_broadcast(x, whole) and not _is_read_whole(x) for x in layouts)


def _is_broadcast(x: TensorLayout, whole: list[int]) -> bool:
    expanded = any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride, strict=True))
    return expanded or any(n == 1 < size for n, size in zip(x.shape, whole, strict=True))


def _is_read_whole(x: TensorLayout) -> bool:
    """Whether cuDNN reads a broadcast tensor right: one element, or a dense tensor."""
    steps = [(step, n) for n, step in zip(x.shape, x.stride, strict=True) if n > 1]
    in_order = steps[::-1] if len(x.shape) == 3 else sorted(steps)
    span = 1
    for step, n in in_order:
        if step != span:
            return False
        span *= n
    return True


def _reach(key: PlanKey) -> int:
    """How far the last element of an operand or a result is from the first, at most."""
    layouts = [operand.layout for operand in (*key.inputs, *key.outputs)]
    return max(sum((n - 1) * step for n, step in zip(x.shape, x.stride, strict=True)) for x in layouts)


ISSUES = (
    KnownIssue(
        "an operand of three dimensions that has but one is misread in a batch of several: wrong numbers",
        "seen on 9.19 with an H200",
        "refused: view the batch as rows, (1, batch · rows, n), or repeat the operand along one more dimension",
        _stretched,
    ),
    KnownIssue(
        "a graph of tensors of one or two dimensions computes something else",
        "seen on 9.19 with an H200",
        "refused: view them as tensors of three dimensions, (1, rows, n)",
        _is_flat,
    ),
    KnownIssue(
        "an operand that is broadcast is misread unless it is dense, and of three dimensions row-major",
        "seen on 9.19 with an H200",
        "refused: pass it with sizes of 1 in place of strides of 0, and contiguous",
        _is_broadcast_with_gaps,
    ),
    KnownIssue(
        "places beyond 2^31 elements are not known to be reached",
        "attention's gradients miss them on 9.19 with an H200",
        "refused: cut the tensors into parts",
        lambda key: _reach(key) >= 2**31,
    ),
)
