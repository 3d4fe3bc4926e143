"""Fixed cases of a kind of FlashAttention-4's kernels, which `autotune` compares with float64 before it times any.

A comparison of one launch shows little of lengths and masks: cases have odd lengths, whose last tiles are partial, and
queries on both sides of a mask's bounds.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments, Softmax
from cudnn_sdpa.attention.flash4.compiler import window_of
from cudnn_sdpa.attention.flash4.plans import flash4_backward, flash4_forward, functions
from cudnn_sdpa.attention.flash4.programs import ENGINE, BackwardTiles, Kind
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.errors import ExecutionError, LibraryError
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans import default_store
from cudnn_sdpa.plans.autotune import differs
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.store import StoredPlan

_NUMBERS = {"scale": 0.21, "softcap": 3.0}


@dataclass(frozen=True)
class _Passed:
    """The identity of the record that a kind's cases have passed."""

    kind: Kind

    def identity(self) -> dict[str, object]:
        return {"passed": list(self.kind), "operation": flash4_forward.digest}


_passed: set[Kind] = set()


def fault(kind: Kind, device: int) -> str:
    """The results of the fixed cases that are wrong, in words; empty if none is. Kinds that pass are in the store."""
    store = default_store.active()
    if kind in _passed or (store is not None and store.load(_Passed(kind)) is not None):
        return ""
    for queries, keys in _lengths(kind):
        if wrong := _wrong_results(kind, queries, keys, device):
            return f"{', '.join(wrong)} of {queries} queries and {keys} keys differ from float64"
    _passed.add(kind)
    if store is not None:
        store.save(_Passed(kind), StoredPlan.of_text(_Passed(kind), ENGINE, "passed"))
    return ""


def _lengths(kind: Kind) -> list[tuple[int, int]]:
    """Numbers of queries and keys: under a mask not fewer, or queries might see no key, which no launch has."""
    if not kind.is_backward:
        return [(300, 300), (90, 333), (1, 70)]
    tiles = BackwardTiles.of(kind.dim, window_of(kind))
    queries = tiles.queries - 7 if kind.few_queries else tiles.queries + 9
    keys = tiles.keys - 3 if kind.few_keys else tiles.keys + queries + 5
    has_mask = kind.is_causal or kind.has_left or kind.has_right
    return [(queries, keys)] if queries <= keys or not has_mask else []


def _wrong_results(kind: Kind, queries: int, keys: int, device: int) -> list[str]:
    """The names of results that differ from float64 on random data."""
    heads_kv, dtype = 2, getattr(torch, kind.dtype)
    generator = torch.Generator(f"cuda:{device}").manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)

    def rows(heads: int, length: int, dim: int) -> Tensor:
        return random(2, length, heads, dim).transpose(1, 2)

    heads = heads_kv * kind.group
    given = {
        "q": rows(heads, queries, kind.dim),
        "k": rows(heads_kv, keys, kind.dim),
        "v": rows(heads_kv, keys, kind.dim_v),
    }
    sinks = random(heads, dtype=torch.float32) if kind.has_sinks else None
    left, right = window_of(kind)
    softmax = Softmax(
        is_causal=kind.is_causal,
        causal_alignment=BOTTOM_RIGHT,
        window_left=UNBOUNDED if left is None else left,
        window_right=UNBOUNDED if right is None or kind.is_causal else right,
        scale=_NUMBERS["scale"],
        softcap=_NUMBERS["softcap"] if kind.is_capped else None,
    )
    q, k, v = (given[name].double() for name in "qkv")
    exact = ForwardArguments(q, k, v, sinks=None if sinks is None else sinks.double(), softmax=softmax)
    out, lse = reference.attention(exact)
    made = {"out": rows(heads, queries, kind.dim_v)}
    if kind.has_lse:
        made["lse"] = torch.empty(2, heads, queries, 1, dtype=torch.float32, device=generator.device)
    expected = {"out": out, "lse": lse.unsqueeze(-1)}
    if kind.is_backward:
        given |= {"out": made["out"].copy_(out), "grad_out": rows(heads, queries, kind.dim_v)}
        given["lse"] = made["lse"].copy_(lse.unsqueeze(-1))
        grad_q, grad_k, grad_v, *_ = reference.gradients(given["grad_out"].double(), out, exact, lse)
        made = {f"grad_{name}": torch.empty_like(given[name]) for name in "qkv"}
        expected = {"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    elif sinks is not None:
        given["sink"] = sinks.view(1, -1, 1, 1)
    _launch(kind, given, made, device)
    return [name for name, x in made.items() if differs(x, expected[name])]


def _launch(kind: Kind, given: dict[str, Tensor], made: dict[str, Tensor], device: int) -> None:
    numbers = {name: array("f", [_NUMBERS[name]]) for name in ("scale", *["softcap"] * kind.is_capped)}
    inputs = [Operand(name, TensorLayout.of(x)) for name, x in given.items()]
    inputs += [Operand(name, HOST_SCALAR, Role.SCALAR) for name in numbers]
    outputs = [Operand(name, TensorLayout.of(x)) for name, x in made.items()]
    operation = flash4_backward if kind.is_backward else flash4_forward
    options: dict[str, object] = {"window": window_of(kind)}
    key = operation.key(inputs, outputs, options, live_target(device), device=device)
    plan = plan_cache.get(key, partial(build_plan, operation), to_use=False)
    for x in made.values():
        x.fill_(torch.nan)
    addresses = [x.buffer_info()[0] for x in numbers.values()]
    with torch.cuda.device(device):
        plan.launch([*(x.data_ptr() for x in given.values()), *addresses, *(x.data_ptr() for x in made.values())])


def is_right(kind: Kind, device: int) -> bool:
    """Whether a kind passes its fixed cases, of which there must be one.

    One that does not, or cannot be launched, serves no call of this process any more.
    """
    if not _lengths(kind):
        return False
    try:
        if why := fault(kind, device):
            functions.refuse(kind, f"of its fixed cases, {why}")
    except LibraryError:  # it cannot be compiled
        return False
    except ExecutionError as error:
        functions.refuse(kind, str(error))
    return not functions.failure(kind)
