"""Pointwise graphs of four dimensions with broadcast operands: which are computed wrongly.

In three dimensions cuDNN misreads some broadcast operands in a batch, and such graphs are refused. This tests all such
patterns of four dimensions, in both memory orders.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_sdpa import UnsupportedError, graph_op

SIZES = (3, 24, 5, 16)
LAST = torch.channels_last
PATTERNS = [pattern for pattern in itertools.product([False, True], repeat=4) if not all(pattern)]


def like_whole(a, b):
    """Laid out as the operand that is not broadcast; if both are, as the first."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    model = next((x for x in (a, b) if x.shape == shape), a)
    is_last = model.is_contiguous(memory_format=LAST) and not model.is_contiguous()
    out = torch.empty(shape, dtype=a.dtype, device=a.device)
    return out.contiguous(memory_format=LAST) if is_last else out


@graph_op(outputs=like_whole)
def plus(g, a, b):
    return g.add(a=a, b=b)


@graph_op(outputs=like_whole)
def times(g, a, b):
    return g.mul(a=a, b=b)


OPERATIONS = {"add": (plus, torch.add), "mul": (times, torch.mul)}


def shaped(pattern, dtype, form):
    shape = [size if is_whole else 1 for size, is_whole in zip(SIZES, pattern, strict=True)]
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form)


def outcome(operation, a, b):
    """Outcome of a call: "right", why it is refused, or what is wrong."""
    function, reference = OPERATIONS[operation]
    try:
        found = function(a, b)
    except UnsupportedError as error:
        return "refused: " + error.reasons[0].splitlines()[0][:60]
    wanted = reference(a.double(), b.double())
    bound = (1e-6 if a.dtype is torch.float32 else 8e-3) * (wanted.abs() + 1e-3)
    bad = ~((found.double() - wanted).abs() <= bound)
    if not bad.any():
        return "right"
    entries = [index for index in range(bad.shape[0]) if bad[index].any()]
    return f"WRONG: {float(bad.double().mean()):.0%} of the numbers, in batch entries {entries}"


def assert_nothing_wrong(outcomes):
    table = "\n".join(f"{name}: {how}" for name, how in outcomes.items())
    print(table)
    assert not [name for name, how in outcomes.items() if how.startswith("WRONG")], "\n" + table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_broadcast_operand(operation, dtype, form):
    whole = shaped((True,) * 4, dtype, form)
    outcomes = {}
    for pattern in PATTERNS:
        other = shaped(pattern, dtype, form)
        for order, pair in (("second", (whole, other)), ("first", (other, whole))):
            outcomes[f"{tuple(other.shape)} as the {order}"] = outcome(operation, *pair)
    assert_nothing_wrong(outcomes)
    assert form is not LAST or "right" in outcomes.values()  # an H200 has no engine for contiguous ones


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST], ids=str)
def test_two_broadcast_operands(dtype, form):
    outcomes = {}
    for pattern in PATTERNS[1:]:
        rest = tuple(not is_whole for is_whole in pattern)
        a, b = shaped(pattern, dtype, form), shaped(rest, dtype, form)
        outcomes[f"{tuple(a.shape)} + {tuple(b.shape)}"] = outcome("add", a, b)
    assert_nothing_wrong(outcomes)
