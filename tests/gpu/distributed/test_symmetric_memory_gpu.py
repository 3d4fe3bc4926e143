"""Exchanges of heads through the memory of other GPUs, against NCCL's, against float64, and where ranks part."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import parallel_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cudnn_sdpa.distributed import (
    context_parallel,
    context_parallel_varlen,
    copies,
    disable_symmetric_memory,
    enable_symmetric_memory,
    shard,
    symmetric_memory,
    ulysses,
)
from cudnn_sdpa.distributed.groups import place_in
from cudnn_sdpa.errors import ExecutionError, OptionError

GPUS = torch.cuda.device_count()


def _reaches(count):
    return count <= GPUS and all(
        torch.cuda.can_device_access_peer(one, other) for one in range(count) for other in range(count) if one != other
    )


RANKS = [
    pytest.param(count, marks=pytest.mark.skipif(not _reaches(count), reason=f"needs {count} GPUs, each in reach"))
    for count in (2, 4)
]


def _joined(rank, ranks, store, seconds=300):
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    torch.cuda.set_device(rank)
    timeout = timedelta(seconds=seconds)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)


def _left():
    dist.barrier()
    dist.destroy_process_group()


def _run(function, ranks, store):
    """Whether all ranks come to their end; raises what one of them does."""
    processes = mp.start_processes(function, args=(ranks, store), nprocs=ranks, start_method="spawn", join=False)
    while not processes.join():
        pass
    return [process.exitcode for process in processes.processes] == [0] * ranks


def _is_full():
    return torch.cuda.get_device_capability()[0] in (9, 10)  # others lack gradients of packed sequences and softcap


def _options_in_float64(rank, ranks, store):
    _joined(rank, ranks, store)
    enable_symmetric_memory()

    def possible(made):
        made = [case for case in made if _is_full() or (len(case) == 4 and "softcap" not in case[1])]
        return cases.on_gpus(cases.exchangeable(made, ranks))

    made = possible([*cases.dense_cases("ulysses"), *cases.packed_cases("ulysses", ranks=ranks)])
    cases.check([cases.worst_of(made, device="cuda")], len(made), of_halves=3e-2)
    if ranks == 2:
        made = possible(cases.cases_in_groups_of_heads("ulysses"))
        cases.check([cases.worst_in_groups_of_heads(made, device="cuda")], len(made), of_halves=3e-2)
    if _is_full():
        assert max(cases.errors_of_dropout("ulysses", torch.bfloat16, device="cuda")) < 5e-2
    assert symmetric_memory._enabled[place_in(None).group].count > 2 * len(made)
    _left()


@pytest.mark.parametrize("ranks", RANKS)
def test_every_option(ranks, tmp_path):
    assert _run(_options_in_float64, ranks, tmp_path / "store")


def _step(inputs, grad, dim, group, **options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    if dim == 2:
        out = context_parallel(*leaves, method="ulysses", group=group, deterministic=True, **options)
    else:
        out = context_parallel_varlen(*leaves, method="ulysses", group=group, deterministic=True, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def _bits(rank, ranks, store):
    """Many steps back to back, of many sizes, on two streams: each has the bits of the same step by NCCL."""
    _joined(rank, ranks, store)
    other = dist.new_group()
    enable_symmetric_memory(other)
    ulysses.MIN_BYTES, ulysses.MAX_DENSE_GROUPS = 1 << 12, 2
    torch.manual_seed(3)
    steps = []
    sizes = ((256, 1, (8, 8)), (2048, 2, (16, 8)), (512, 3, (8, 4)), (8192, 1, (16, 2)), (512, 1, (64, 8)))
    for tokens, batch, heads in sizes:
        for is_strided in (False, True):
            shape = (batch, tokens, 1, 128)
            whole = [torch.randn(*shape[:2], n, 128, device="cuda").bfloat16() for n in (heads[0], heads[1], heads[1])]
            whole.append(torch.randn(*shape[:2], heads[0], 128, device="cuda").bfloat16())
            parts = [shard(x, 1).transpose(1, 2) for x in whole]
            *inputs, grad = parts if is_strided else [x.contiguous() for x in parts]
            steps.append((inputs, grad, 2, {"is_causal": True}))
            steps.append((inputs, grad[:, :, :1].expand_as(grad), 2, {"is_causal": True}))  # as of a sum
            if _is_full():
                rows = [shard(x.flatten(0, 1), 0).contiguous() for x in whole]
                at = torch.tensor([0, 7, 7, tokens // 2, batch * tokens - 3], dtype=torch.int32, device="cuda")
                packing = {"cu_seqlens": at, "max_seqlen": batch * tokens}
                steps.append((rows[:3], rows[3], 0, {"is_causal": True, **packing}))
    engines, copy_rows = [], copies.backend.copy_rows
    copies.backend.copy_rows = lambda *given, **named: engines.append(named) or copy_rows(*given, **named)
    wanted = [_step(*step[:3], None, **step[3]) for step in steps]
    assert not engines
    torch.cuda.synchronize()
    grown = []
    streams = torch.cuda.current_stream(), torch.cuda.Stream()
    for turn in range(6):
        found = []
        for number, step in enumerate(steps):
            with torch.cuda.stream(streams[(number + turn) % 2]):
                found.append(_step(*step[:3], other, **step[3]))
        torch.cuda.synchronize()
        for step, results, like in zip(steps, found, wanted, strict=True):
            for name, x, y in zip(("out", "dq", "dk", "dv"), results, like, strict=True):
                assert torch.equal(x, y), (name, turn, [list(z.shape) for z in step[0]])
        grown.append(symmetric_memory.nbytes(place_in(other)))
    assert engines
    assert grown[0] > 2 * symmetric_memory.MIN_HALF
    assert len(set(grown)) == 1
    _left()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_bits_of_nccl(ranks, tmp_path):
    assert _run(_bits, ranks, tmp_path / "store")


def _captured(rank, ranks, store):
    """While a graph is captured, NCCL exchanges, whose messages the graph can send again."""
    _joined(rank, ranks, store)
    enable_symmetric_memory()
    q = shard(torch.randn(1, 512, 8, 128, device="cuda").bfloat16(), 1).transpose(1, 2)
    run = lambda: context_parallel(q, q, q, is_causal=True, method="ulysses")  # noqa: E731
    with torch.no_grad():
        before = run()
        count = symmetric_memory.state(place_in(None))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        assert symmetric_memory.state(place_in(None)) == count
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, before)
            assert torch.equal(run(), before)  # between replays, again through memory
    torch.cuda.synchronize()
    del graph
    _left()


def _of_one_mind(rank, ranks, store):
    """Ranks that have not all enabled it are told so, and begin anew."""
    _joined(rank, ranks, store, seconds=60)
    q = torch.randn(1, 8, 64, 64, device="cuda").bfloat16()
    run = lambda: context_parallel(q, q, q, is_causal=True, method="ulysses")  # noqa: E731
    enable_symmetric_memory()
    enable_symmetric_memory()  # again: nothing
    wanted = run()
    if rank:
        del symmetric_memory._enabled[place_in(None).group]
    with pytest.raises(OptionError, match=r"symmetric_memory=.* here, symmetric_memory=.* there"):
        run()
    with pytest.raises(OptionError, match=r"enabled=.* here, enabled=.*disable_symmetric_memory on all ranks"):
        enable_symmetric_memory()
    disable_symmetric_memory()
    assert torch.equal(run(), wanted)
    enable_symmetric_memory()
    assert torch.equal(run(), wanted)
    assert symmetric_memory._enabled[place_in(None).group].count == 2
    disable_symmetric_memory()
    if rank:
        symmetric_memory._allocated = _refused
    with pytest.raises(ExecutionError if rank else OptionError, match="no memory here"):
        enable_symmetric_memory()
    assert torch.equal(run(), wanted)
    _left()


@pytest.mark.parametrize("ranks", RANKS[:1])
def test_while_a_graph_is_captured(ranks, tmp_path):
    assert _run(_captured, ranks, tmp_path / "store")


@pytest.mark.parametrize("ranks", RANKS[:1])
def test_ranks_that_disagree(ranks, tmp_path):
    assert _run(_of_one_mind, ranks, tmp_path / "store")


def _waiting(rank, ranks, store):
    """A step, once taken, of a group whose GPUs wait 8 s for each other, among processes that would wait 300 s.

    Its kernels are loaded then: CUDA loads none while a GPU waits.
    """
    _joined(rank, ranks, store)
    group = dist.new_group(timeout=timedelta(seconds=8))
    enable_symmetric_memory(group)
    q = torch.randn(1, 8, 512, 64, device="cuda").bfloat16().requires_grad_()
    step = lambda: context_parallel(q, q, q, is_causal=True, method="ulysses", group=group)  # noqa: E731
    step().sum().backward()
    torch.cuda.synchronize()
    return step


def _ends_in_time(function):
    """Ends this process, in which CUDA can do no more, with 0 if CUDA's error came when it should."""
    start = time.monotonic()
    try:
        function()
        torch.cuda.synchronize()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        print(f"after {seconds:.0f} s: {type(error).__name__}: {error}", flush=True)
        os._exit(0 if 4 < seconds < 40 else 3)
    os._exit(4)


def _dies(rank, ranks, store):
    """A rank ends between its passes: the other's GPU waits for it in the backward pass, until the timeout."""
    out = _waiting(rank, ranks, store)()
    torch.cuda.synchronize()
    if rank:
        os._exit(0)
    _ends_in_time(lambda: out.sum().backward())


def _raises(rank, ranks, store):
    """A rank raises between two messages: all say so at the next call, and the other's GPU waits until the timeout."""
    run = _waiting(rank, ranks, store)
    if rank:
        attend, ulysses.attend = ulysses.attend, _refused
        with pytest.raises(ExecutionError, match="no memory here"):
            run()
        ulysses.attend = attend
    else:
        run()
    with pytest.raises(OptionError, match=r"symmetric_memory=. exchanges by \d+ bytes here"):
        run()
    if rank:
        os._exit(0)
    _ends_in_time(int)


def _breaks(rank, ranks, store):
    """A rank raises within an exchange: it refuses more, the other is told so, and its GPU waits until the timeout."""
    run = _waiting(rank, ranks, store)
    if rank:
        symmetric_memory.copy_to_peer = _refused
        with pytest.raises(ExecutionError, match="no memory here"):
            run()
    else:
        run()
    with pytest.raises(ExecutionError if rank else OptionError, match="exchange through symmetric memory has failed"):
        run()
    if rank:
        os._exit(0)
    _ends_in_time(int)


def _refused(*_, **__):
    raise ExecutionError("no memory here")


@pytest.mark.parametrize("function", [_dies, _raises, _breaks], ids=lambda function: function.__name__)
@pytest.mark.parametrize("ranks", RANKS[:1])
def test_a_rank_that_leaves_the_others_alone(ranks, function, tmp_path):
    assert _run(function, ranks, tmp_path / "store")
