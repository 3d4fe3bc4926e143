"""Faults of cuDNN in graphs around attention, and in those of users; see `known_issues`."""

from __future__ import annotations

from cudnn_sdpa.runtime.key import PlanKey, Role
from cudnn_sdpa.runtime.known_issue import KnownIssue


def _stretched(key: PlanKey) -> bool:
    """Whether an operand of three dimensions is repeated along two of them, in a batch of several."""
    shapes = [op.layout.shape for op in key.inputs if op.role is Role.TENSOR and len(op.layout.shape) == 3]
    whole = [max(sizes) for sizes in zip(*shapes, strict=True)]
    is_batch = bool(whole) and whole[0] > 1 and max(whole[1:]) > 1
    return is_batch and any(sum(size > 1 for size in shape) == 1 for shape in shapes)


def _skips(key: PlanKey) -> bool:
    """Whether an operand of three dimensions has one row for each batch entry, and gaps between these rows."""
    layouts = [op.layout for op in key.inputs if op.role is Role.TENSOR and len(op.layout.shape) == 3]
    rows = max((x.shape[1] for x in layouts), default=1)
    return rows > 1 and any(x.shape[0] > 1 == x.shape[1] and x.stride[0] not in (0, x.shape[2]) for x in layouts)


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
        "an operand of three dimensions with one row for each batch entry and gaps between them is misread",
        "seen on 9.19 with an H200",
        "refused: make the operand contiguous",
        _skips,
    ),
    KnownIssue(
        "places beyond 2^31 elements are not known to be reached",
        "attention's gradients miss them on 9.19 with an H200",
        "refused: cut the tensors into parts",
        lambda key: _reach(key) >= 2**31,
    ),
)
