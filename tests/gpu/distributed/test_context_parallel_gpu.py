"""Context parallelism over NCCL on two, four and eight GPUs, against one."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import parallel_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiled_functions import given_functions
from float64_reference import attend

import cudnn_sdpa
from cudnn_sdpa.attention.flash4.installed import installed
from cudnn_sdpa.distributed import context_parallel, context_parallel_varlen, shard

GPUS = torch.cuda.device_count()
RANKS = [
    pytest.param(count, marks=pytest.mark.skipif(count > GPUS, reason=f"needs {count} GPUs")) for count in (2, 4, 8)
]
TOKENS = 2048
METHODS = ("all_gather", "ulysses", "ring")


def _error(found, exact):
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def _agrees(function, whole, grad_out, dim, one):
    leaves = [x.detach().requires_grad_() for x in whole]
    exact = one(*leaves)
    wanted = torch.autograd.grad(exact, leaves, grad_out)
    mine = [shard(x, dim).detach().requires_grad_() for x in whole]
    for _ in range(2):
        out = function(*mine)
        found = torch.autograd.grad(out, mine, shard(grad_out, dim))
    assert _error(out, shard(exact.detach(), dim)) < 1e-2
    for x, like in zip(found, wanted, strict=True):
        assert _error(x, shard(like, dim)) < 2e-2


def _joined(rank, ranks, store):
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # says which of CUDA's functions has failed
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)


def _left(rank, store):
    """Notes that a rank has compared everything."""
    dist.barrier()
    dist.destroy_process_group()
    Path(f"{store}.{rank}").touch()


def _drawn():
    torch.manual_seed(3)
    return [torch.randn(1, TOKENS, n, 128, device="cuda").bfloat16().transpose(1, 2) for n in (8, 8, 2, 2)]


def _rank(rank, ranks, store, method):
    _joined(rank, ranks, store)
    q, grad, k, v = _drawn()
    options = [{}, {"is_causal": True}] + ([] if method == "ring" else [{"is_causal": True, "window_size": (300, 0)}])
    for given in options:

        def parallel(*qkv, given=given):
            return context_parallel(*qkv, method=method, **given)

        _agrees(parallel, (q, k, v), grad, 2, lambda *qkv, given=given: cudnn_sdpa.sdpa(*qkv, **given))
    if torch.cuda.get_device_capability()[0] >= 9:
        at = torch.tensor([0, 100, 100, 1500, 2040], dtype=torch.int32, device="cuda")
        rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v, grad)]

        def packed(*qkv):
            return context_parallel_varlen(*qkv, at, 1400, method=method, is_causal=True)

        one = lambda *qkv: cudnn_sdpa.sdpa_varlen(*qkv, at, at, 1400, 1400, is_causal=True)  # noqa: E731
        _agrees(packed, rows[:3], rows[3], 0, one)
        mine = [shard(x, 0) for x in rows[:3]]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # no host waits for offsets
        packed(*mine)
        torch.cuda.set_sync_debug_mode("default")
    _left(rank, store)


def _rank_by_flash4(rank, ranks, store, method):
    _joined(rank, ranks, store)
    q, grad, k, v = _drawn()
    for given in ({}, {"is_causal": True}):

        def one(*qkv, given=given):
            return attend(*(x.double() for x in qkv), **given)[0].bfloat16()

        with given_functions():
            with cudnn_sdpa.providers("fa4"):  # which waits until the kinds of both passes are compiled
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                torch.autograd.grad(cudnn_sdpa.sdpa(*leaves, **given), leaves, grad)
            with cudnn_sdpa.providers("fa4", "cudnn"), cudnn_sdpa.plan_cache.watch_uses() as keys:
                _agrees(partial(context_parallel, method=method, **given), (q, k, v), grad, 2, one)
        assert {key.provider for key in keys} == {"fa4"}
        assert {key.name for key in keys} == {"flash4_forward", "flash4_backward"}
    _left(rank, store)


def _rank_with_options(rank, ranks, store, method):
    """The code that tests/unit runs with gloo: all options, the LSE, groups of heads, and dropout."""
    _joined(rank, ranks, store)
    is_full = torch.cuda.get_device_capability()[0] in (9, 10)  # others lack gradients of packed sequences and softcap

    def possible(made):
        made = [case for case in made if is_full or (len(case) == 4 and "softcap" not in case[1])]
        return cases.on_gpus(cases.exchangeable(made, ranks))

    made = possible([*cases.dense_cases(method), *cases.packed_cases(method, ranks=ranks)])
    cases.check([cases.worst_of(made, device="cuda")], len(made), of_halves=3e-2)
    if method != "ring" and ranks == 2:
        made = possible(cases.cases_in_groups_of_heads(method))
        cases.check([cases.worst_in_groups_of_heads(made, device="cuda")], len(made), of_halves=3e-2)
    if method != "ring" and is_full:
        assert max(cases.errors_of_dropout(method, torch.bfloat16, device="cuda")) < 5e-2
    _left(rank, store)


def _run(function, ranks, method, store):
    """The ranks that have compared everything."""
    mp.start_processes(function, args=(ranks, store, method), nprocs=ranks, start_method="spawn")
    return [rank for rank in range(ranks) if Path(f"{store}.{rank}").exists()]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("method", METHODS)
def test_many_gpus_compute_what_one_does(method, ranks, tmp_path):
    assert _run(_rank, ranks, method, tmp_path / "store") == list(range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_option_on_many_gpus(method, ranks, tmp_path):
    assert _run(_rank_with_options, ranks, method, tmp_path / "store") == list(range(ranks))


@pytest.mark.skipif(bool(installed().missing), reason=f"FlashAttention-4: {installed().missing}")
@pytest.mark.skipif(
    not GPUS or torch.cuda.get_device_capability() != (9, 0),
    reason="FlashAttention-4 is tested on compute capability 9.0",
)
@pytest.mark.parametrize("ranks", RANKS[:1])
def test_flash4_serves_the_steps_of_a_ring(ranks, tmp_path):
    assert _run(_rank_by_flash4, ranks, "ring", tmp_path / "store") == list(range(ranks))
