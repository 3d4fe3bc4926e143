"""x times a scalar, plus a broadcast operand: all ranks and patterns of sizes of 1, dense, with gaps, expanded.

cuDNN silently misreads some of these (see `known_issues`); each must be right or refused.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_sdpa import UnsupportedError, graph_op


@graph_op(outputs=lambda x, bias, scale: torch.empty_like(x, memory_format=torch.preserve_format))  # noqa: ARG005
def scaled(g, x, bias, scale):
    return g.add(a=g.mul(a=x, b=scale), b=bias)


#: Sizes, and the order of their dimensions in memory, outermost first.
SHAPES = {
    "rank 2": ((48, 64), (0, 1)),
    "rank 3": ((2, 48, 64), (0, 1, 2)),
    "rank 3, batch of 5": ((5, 24, 32), (0, 1, 2)),
    "rank 3, columns first": ((2, 64, 48), (0, 2, 1)),
    "rank 3, rows outermost": ((3, 16, 64), (1, 0, 2)),
    "rank 4": ((2, 8, 6, 16), (0, 1, 2, 3)),
    "rank 4, channels last": ((2, 16, 6, 8), (0, 2, 3, 1)),
    "rank 5, channels last": ((2, 16, 3, 4, 8), (0, 2, 3, 4, 1)),
}


def lying(sizes, order, dtype, more):
    """A slice of a tensor in this memory order that has `more(n)` elements along each dimension of size n."""
    sizes_in_memory = [sizes[dim] for dim in order]
    whole = torch.randn([more(place, n) for place, n in enumerate(sizes_in_memory)], device="cuda").to(dtype)
    for place, n in enumerate(sizes_in_memory):
        whole = whole.narrow(place, 0, n)
    return whole.permute([order.index(dim) for dim in range(len(order))])


def operands(sizes, order, dtype):
    """Operands of all patterns and layouts, with names."""
    last = len(sizes) - 1
    ways = {
        "dense": lambda place, n: n,  # noqa: ARG005
        "gaps everywhere": lambda place, n: 2 * n if place == last else n + 1,
        "gaps within": lambda place, n: n + 16 if place == last else n,
        "gaps where sizes are 1": lambda place, n: 2 if n == 1 and place != last else n,
        "gaps behind a size of 1 at the end": lambda place, n: 8 if n == 1 and place == last else n,
    }
    for pattern in itertools.product([False, True], repeat=len(sizes)):
        shape = tuple(n if is_whole else 1 for n, is_whole in zip(sizes, pattern, strict=True))
        seen = set()
        for name, more in ways.items():
            bias = lying(shape, order, dtype, more)
            if bias.stride() not in seen:
                seen.add(bias.stride())
                yield f"{shape}, {name}", bias
        dense = lying(shape, order, dtype, ways["dense"])
        if not all(pattern):
            yield f"{shape}, expanded", dense.expand(sizes)
        if not pattern[0] and any(pattern):
            yield f"{shape}, expanded along the batch", dense.expand(sizes[0], *shape[1:])


def outcome(x, bias):
    """Outcome of a call: "right", why it is refused, or what is wrong."""
    try:
        found = scaled(x, bias, 1.37)
    except UnsupportedError as error:
        return "refused: " + error.reasons[0].splitlines()[0][:70]
    wanted = x.double() * 1.37 + bias.double()
    size = x.double().abs() * 1.37 + bias.double().abs()
    bad = ~((found.double() - wanted).abs() <= 4 * torch.finfo(x.dtype).eps * size + 1e-6)
    if not bad.any():
        return "right"
    return f"WRONG: {float(bad.double().mean()):.0%} of the numbers, first at {bad.nonzero()[0].tolist()}"


@pytest.mark.parametrize(
    ("has_gaps", "dtype"), [(False, torch.float16), (True, torch.float32)], ids=["x is dense", "x has gaps"]
)
@pytest.mark.parametrize("name", SHAPES)
def test_every_broadcast_is_right_or_refused(name, has_gaps, dtype):
    sizes, order = SHAPES[name]
    last = len(sizes) - 1
    outcomes = {}
    for what, bias in operands(sizes, order, dtype):
        x = lying(sizes, order, dtype, lambda place, n: n + 16 if has_gaps and place == last else n)
        outcomes[f"{what}, strides {bias.stride()}"] = outcome(x, bias)
    table = "\n".join(f"{name}: {how}" for name, how in outcomes.items())
    print(table)
    assert not [name for name, how in outcomes.items() if how.startswith("WRONG")], "\n" + table
    assert len(outcomes) > len(sizes)
