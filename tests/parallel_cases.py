"""Context parallelism on the ranks of a group, held against mathematics in float64 in one process.

Each rank draws the same sequences, and takes its part: CPU tensors with gloo, those of GPUs with NCCL.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from float64_reference import attend, attend_packed
from torch import Tensor

import cudnn_sdpa.distributed.all_gather as by_gathering
import cudnn_sdpa.distributed.ulysses as by_exchange
from cudnn_sdpa.distributed import context_parallel, context_parallel_varlen, shard, unshard

#: Options of dense calls, by description; ring takes those without a window.
DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, scale, softcap": {"is_causal": True, "scale": 0.3, "softcap": 2.0},
    "causal, sinks": {"is_causal": True, "sinks": True},
    "sinks": {"sinks": True, "softcap": 3.0},
    "window": {"is_causal": True, "window_size": (5, 0)},
    "window, sinks": {"is_causal": True, "window_size": (9, 0), "sinks": True, "scale": -0.4},
    "both sides": {"window_size": (3, 4)},
    "to the right": {"window_size": (-1, 3)},
    "to the left": {"window_size": (4, -1)},
    "wide": {"window_size": (100, 100), "sinks": True},
}
HEADS = ((4, 4), (8, 2))
#: Options of packed calls.
PACKED: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "plain": {},
    "causal, sinks, softcap": {"is_causal": True, "sinks": True, "softcap": 2.0},
    "window": {"is_causal": True, "window_size": (6, 0)},
    "window without a mask": {"window_size": (4, 0), "sinks": True},
}


def packings(tokens: int) -> dict[str, list[int]]:
    """Lengths of sequences, some of them empty, and with rows of no sequence at the end."""
    return {
        "mixed": [5, 0, tokens // 2 - 3, 1, 0, tokens // 2 - 5],
        "one": [tokens],
        "single tokens": [1] * (tokens - 1),
    }


def drawn(shape: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    rows = torch.randn(*shape, heads, dim, dtype=torch.float64)
    return rows.to(dtype) if len(shape) == 1 else rows.to(dtype).transpose(1, 2)


def exact_packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows of no sequence see the sinks alone."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    out, lse = attend_packed(q, k, v, ends, ends, **options)
    if options.get("sinks") is not None:
        lse[ends[-1] :] = options["sinks"].detach().double()
    return out, lse


def relative(found: Tensor, exact: Tensor) -> float:
    """The error relative to the values, or to 1e-4 where they are smaller, as gradients that are 0 but for rounding."""
    finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(found), finite):
        return float("inf")
    found, exact = found.double()[finite], exact.double()[finite]
    return float((found - exact).norm() / exact.norm().clamp_min(1e-4 * max(1, exact.numel()) ** 0.5))


def dense_cases(method: str) -> list[tuple[Any, ...]]:
    """The arguments of `errors`."""
    found: list[tuple[Any, ...]] = []
    for name, options in DENSE.items():
        if method == "ring" and "window_size" in options:
            continue
        found += [(method, options, heads, torch.float32) for heads in HEADS]
        if name in ("causal", "sinks"):
            found += [(method, options, HEADS[1], torch.float64), (method, options, HEADS[0], torch.bfloat16)]
    return found


def packed_cases(method: str, ranks: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for options in PACKED.values():
        if method == "ring" and "window_size" in options:
            continue
        packs = packings(8 * ranks).values()
        found += [(method, options, HEADS[1], torch.float32, lengths) for lengths in packs]
    return found


def exchangeable(made: list[tuple[Any, ...]], ranks: int) -> list[tuple[Any, ...]]:
    """The cases whose heads so many ranks can exchange: "ulysses" gives each rank as many heads of queries."""
    return [case for case in made if case[0] != "ulysses" or case[2][0] % ranks == 0]


def cases_in_groups_of_heads(method: str) -> list[tuple[Any, ...]]:
    """Of 4, 6 and 5 heads of keys: 4, 3 and 1 groups that are gathered; exchanged by two ranks 2, 3 and 1."""
    found: list[tuple[Any, ...]] = [(method, options, (8, 4), torch.float32) for options in DENSE.values()]
    for heads in ((12, 6), (10, 5)):
        found += [(method, DENSE[name], heads, torch.float32) for name in ("causal, sinks", "window")]
        found.append((method, PACKED["causal, sinks, softcap"], heads, torch.float32, [7, 0, 8]))
    return [*found, (method, PACKED["window"], (8, 2), torch.float32, [7, 9])]


def on_gpus(made: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same cases in the dtypes of GPUs."""
    halves = itertools.cycle((torch.bfloat16, torch.float16))
    return [(*case[:3], next(halves), *case[4:]) for case in made]


def errors(
    method: str,
    options: dict[str, Any],
    heads: tuple[int, int],
    dtype: torch.dtype,
    lengths: list[int] | None = None,
    device: str = "cpu",
) -> dict[str, float]:
    """The relative errors of the output, the LSE and all gradients on this rank."""
    ranks = dist.get_world_size()
    dim, shape = (2, (2, 8 * ranks)) if lengths is None else (0, (8 * ranks,))
    sizes = ((heads[0], 16), (heads[1], 16), (heads[1], 24), (heads[0], 24))
    *whole, grad_out = (drawn(shape, *size, dtype) for size in sizes)
    options = dict(options)
    sinks = torch.randn(heads[0], dtype=torch.float32) if options.pop("sinks", False) else None
    leaves = [x.detach().double().requires_grad_() for x in (*whole, *([] if sinks is None else [sinks]))]
    given = {**options, "sinks": leaves[3]} if sinks is not None else options
    exact = attend(*leaves[:3], **given) if lengths is None else exact_packed(*leaves[:3], lengths, given)
    wanted = torch.autograd.grad(exact[0], leaves, grad_out.double())

    used = whole[0].shape[dim] if lengths is None else sum(lengths)
    whole, garbage = ([x.clone() for x in some] for some in (whole, [grad_out]))
    for x in (*whole, *garbage) if lengths is not None else ():
        x[used:] = torch.nan  # rows of no sequence
    mine = [shard(x, dim).to(device).requires_grad_() for x in whole]
    own_sinks = None if sinks is None else sinks.clone().to(device).requires_grad_()
    common = {"method": method, "return_lse": True, "sinks": own_sinks, **options}
    if lengths is None:
        out, lse = context_parallel(*mine, **common)
    else:
        offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        out, lse = context_parallel_varlen(*mine, offsets, max(lengths), **common)
    inputs = [*mine, *([] if own_sinks is None else [own_sinks])]
    found = list(torch.autograd.grad(out, inputs, shard(garbage[0], dim).to(device)))
    if own_sinks is not None:
        dist.all_reduce(found[3])
    parts = {
        name: shard(x.detach(), dim) for name, x in zip(("out", "lse", "q", "k", "v"), (*exact, *wanted), strict=False)
    }
    results = {"out": out, "lse": lse, **dict(zip(("q", "k", "v"), found, strict=False))}
    for name, x, like in zip("qkv", found, mine, strict=False):
        assert x.dtype == like.dtype, name
        assert x.shape == like.shape, name
    errors = {name: relative(results[name].detach().cpu(), parts[name]) for name in parts}
    return errors | ({} if sinks is None else {"sinks": relative(found[3].cpu(), wanted[3])})


def worst_of(cases: list[tuple[Any, ...]], device: str = "cpu") -> list[tuple[float, str, Any]]:
    """The largest error of each case on this rank."""
    found = []
    for case in cases:
        torch.manual_seed(5)
        found.append(max((error, name, case) for name, error in errors(*case, device=device).items()))
    return found


def worst_in_groups_of_heads(cases: list[tuple[Any, ...]], device: str = "cpu") -> list[tuple[float, str, Any]]:
    """The same with small messages of some heads."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in (
            (by_gathering, "MIN_BYTES", 1),
            (by_gathering, "MAX_PACKED_GROUPS", 4),
            (by_exchange, "MIN_BYTES", 1),
            (by_exchange, "MAX_GROUPS", 4),
            (by_exchange, "MAX_DENSE_GROUPS", 4),
        ):
            patch.setattr(module, name, value)
        return worst_of(cases, device)


def check(found: list[list[tuple[float, str, Any]]], number: int, of_halves: float = 2e-2) -> None:
    """All errors of all ranks are those of rounding."""
    assert [len(of_rank) for of_rank in found] == [number] * len(found)
    bounds = {torch.float32: 2e-5, torch.float64: 1e-5, torch.bfloat16: of_halves, torch.float16: of_halves}
    for error, name, case in (one for of_rank in found for one in of_rank):
        assert error < bounds[case[3]], (error, name, case)


def errors_of_dropout(method: str, dtype: torch.dtype, device: str = "cpu") -> list[float]:
    """By how much the output and the gradient of the values are of other random numbers, relatively.

    The output is linear in the values: its product with any gradient is that of the values with theirs.
    """
    ranks, found = dist.get_world_size(), []
    for lengths in (None, [5, 0, 4 * ranks - 3, 4 * ranks - 5]):
        dim, shape = (2, (2, 8 * ranks)) if lengths is None else (0, (8 * ranks,))
        torch.manual_seed(5)
        whole = [drawn(shape, *size, dtype) for size in ((8, 16), (2, 16), (2, 16), (8, 16))]
        q, k, v, grad_out = (shard(x, dim).to(device) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        sinks = torch.randn(8).to(device)
        torch.manual_seed(100 + dist.get_rank())
        # of packed sequences, all-gather has dropout under a mask with softcap alone
        options: dict[str, Any] = {"is_causal": True, "softcap": 3.0, "method": method, "sinks": sinks}

        def run(
            dropout_p: float, leaves: Any = leaves, lengths: Any = lengths, options: dict[str, Any] = options
        ) -> Tensor:
            if lengths is None:
                return context_parallel(*leaves, dropout_p=dropout_p, **options)
            offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
            return context_parallel_varlen(*leaves, offsets, max(lengths), dropout_p=dropout_p, **options)

        out = run(0.3)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        assert all(x.isfinite().all() for x in gradients)
        assert relative(out.detach().cpu(), run(0.0).detach().cpu()) > 0.1
        products = [(x.detach().double() * y.detach().double()) for x, y in ((out, grad_out), (gradients[2], v))]
        sums = torch.stack([*(x.sum() for x in products), products[0].square().sum()])
        dist.all_reduce(sums)
        found.append(float((sums[0] - sums[1]).abs() / sums[2].sqrt()))
    return found


def round_trip() -> list[bool]:
    """`unshard` of `shard`, and its gradient."""
    ranks, found = dist.get_world_size(), []
    for dim, shape in ((0, (4 * ranks,)), (1, (2, 2 * ranks, 3)), (-1, (2, 6 * ranks))):
        x = torch.randn(shape, requires_grad=True)
        part = shard(x, dim)
        whole = unshard(part, dim)
        weights = torch.randn(shape)
        (gradient,) = torch.autograd.grad((whole * weights).sum(), x)
        theirs = shard(torch.ones(shape), dim).numel() * ranks == x.numel()
        expected = torch.zeros(shape)
        mine = torch.zeros(shape).requires_grad_()
        (kept,) = torch.autograd.grad(shard(mine, dim).sum(), mine)
        expected = weights * ranks * kept
        found += [torch.equal(whole, x), theirs, torch.allclose(gradient, expected)]
    return found


def gradients_of_values_that_cancel(method: str, is_packed: bool) -> float:
    """The gradient of the first value, to which rank 0 adds 256 and 1 and rank 1 -256; scores are all 0.

    Queries 15, 31 and 63 of 64 see powers of two of keys, so that all terms are exact in bfloat16.
    """
    shape = (64, 2, 16) if is_packed else (1, 2, 64, 16)
    dim = 0 if is_packed else 2
    zeros, grad_out = torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
    for row, of_first in ((15, 256.0), (31, -256.0), (63, 1.0)):
        grad_out.select(dim, row).fill_(of_first * (row + 1))
    q, k, v = (shard(zeros, dim).clone().requires_grad_() for _ in range(3))
    if is_packed:
        out = context_parallel_varlen(
            q, k, v, torch.tensor([0, 64], dtype=torch.int32), 64, is_causal=True, method=method
        )
    else:
        out = context_parallel(q, k, v, is_causal=True, method=method)
    (gradient,) = torch.autograd.grad(out, v, shard(grad_out, dim))
    first = gradient.select(dim, 0)
    assert (first == first.flatten()[0]).all()
    return float(first.flatten()[0])
