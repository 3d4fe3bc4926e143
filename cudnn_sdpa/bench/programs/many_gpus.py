"""A process of `bench distributed`: context parallelism with others; that of rank 0 prints one line of JSON.

`torchrun --nproc-per-node N -m cudnn_sdpa.bench.programs.many_gpus [small]`; the methods take turns with PyTorch's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.distributed import context_parallel, context_parallel_varlen, shard

METHODS = ("all_gather", "ulysses", "ring")


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        lengths: Lengths of dense sequences.
        tokens: Tokens of all packed sequences.
        heads: Heads of queries and of keys.
        head_dim: The head dim.
        repeats: Timed runs of each candidate.
        seconds: What a run takes at least, of several steps back to back: as in a deep model, the host is ahead
            of the GPU.
    """

    lengths: tuple[int, ...]
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    repeats: int
    seconds: float


FULL = Sizes(lengths=(65536, 131072), tokens=65536, heads=(32, 8), head_dim=128, repeats=7, seconds=0.4)
SMALL = Sizes(lengths=(256,), tokens=256, heads=(4, 2), head_dim=16, repeats=2, seconds=0.0)

#: Maximum number of steps of a timed run.
MAX_STEPS = 20

#: What is raised by a candidate that cannot run.
ERRORS = (RuntimeError, NotImplementedError, ValueError)

Row = dict[str, object]


class Candidate(NamedTuple):
    """What is timed.

    Attributes:
        step: A forward and a backward pass.
        within: The context that it needs, which is entered before the clock starts.
    """

    step: Callable[[], None]
    within: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def measure(sizes: Sizes) -> list[Row]:
    """Milliseconds and memory of a forward and a backward pass on all ranks, and on one GPU that has all tokens."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[Row] = []
    for length in sizes.lengths:
        rows += _compared(f"causal, S={length}", sizes, _dense(sizes, length, device), device)
    return rows + _compared(f"packed, {sizes.tokens} tokens", sizes, _packed(sizes, device), device)


def _drawn(sizes: Sizes, shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Equal queries, keys, values and output gradients on all ranks."""
    generator = torch.Generator(device).manual_seed(7)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (sizes.heads[0], sizes.heads[1], sizes.heads[1], sizes.heads[0])
    made = [torch.randn(*shape, n, sizes.head_dim, device=device, dtype=dtype, generator=generator) for n in heads]
    return made if len(shape) == 1 else [x.transpose(1, 2) for x in made]


def _trained(attention: Callable[..., Tensor], tensors: list[Tensor], dim: int | None) -> Candidate:
    """A forward and a backward pass with these tensors, or with this rank's parts of them."""
    *inputs, grad = tensors if dim is None else [_part(x, dim) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad)

    return Candidate(step)


def _part(x: Tensor, dim: int) -> Tensor:
    """This rank's part, in memory as a model's projections make it: (B, S, H, D), or (T, H, D) of packed sequences."""
    return shard(x.transpose(1, dim), 1).transpose(1, dim) if dim > 1 else shard(x, dim)


def _dense(sizes: Sizes, length: int, device: torch.device) -> dict[str, Candidate]:
    tensors = _drawn(sizes, (1, length), device)
    found = {"one GPU": _trained(lambda q, k, v: sdpa(q, k, v, is_causal=True), tensors, None)}
    for method in METHODS:

        def run(q: Tensor, k: Tensor, v: Tensor, method: str = method) -> Tensor:
            out: Tensor = context_parallel(q, k, v, is_causal=True, method=method)
            return out

        found[method] = _trained(run, tensors, 2)
    with contextlib.suppress(ImportError):
        found |= _pytorchs(tensors, device)
    return found


def _packed(sizes: Sizes, device: torch.device) -> dict[str, Candidate]:
    """Documents of random lengths, the same on each rank."""
    tensors = _drawn(sizes, (sizes.tokens,), device)
    generator = torch.Generator().manual_seed(11)
    bounds = torch.randperm(sizes.tokens - 1, generator=generator)[: max(2, sizes.tokens // 4096)].add(1).sort().values
    ends = torch.cat([torch.tensor([0]), bounds, torch.tensor([sizes.tokens])])
    offsets, max_seqlen = ends.int().to(device), int(ends.diff().max())

    def on_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_varlen(
            q,
            k,
            v,
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            is_causal=True,
        )

    found = {"one GPU": _trained(on_one, tensors, None)}
    for method in METHODS:

        def run(q: Tensor, k: Tensor, v: Tensor, method: str = method) -> Tensor:
            out: Tensor = context_parallel_varlen(
                q, k, v, offsets, max_seqlen=max_seqlen, is_causal=True, method=method
            )
            return out

        found[method] = _trained(run, tensors, 0)
    return found


def _pytorchs(tensors: list[Tensor], device: torch.device) -> dict[str, Candidate]:
    """PyTorch's own context parallelism, with its load balance, within its context, which shards the tensors before.

    Keys are repeated for all heads of queries only if PyTorch refuses grouped ones.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as pytorchs

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parts = [x.clone(memory_format=torch.contiguous_format) for x in tensors]
    with pytorchs(mesh, buffers=parts, buffer_seq_dims=[2] * 4, no_restore_buffers=set(parts)):
        pass
    q, k, v, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts)  # in memory as those of the others

    @contextlib.contextmanager
    def within() -> Iterator[None]:
        attention = torch.nn.functional.scaled_dot_product_attention
        positions = torch.arange(tensors[0].shape[2], device=device)  # the context needs a tensor to shard
        try:
            with pytorchs(mesh, buffers=[positions], buffer_seq_dims=[0]), _kernels(device):
                yield
        finally:  # after an error, PyTorch 2.9 leaves its own there
            torch.nn.functional.scaled_dot_product_attention = attention

    def candidate(k: Tensor, v: Tensor, enable_gqa: bool) -> Candidate:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def step() -> None:
            attention: Callable[..., Tensor] = torch.nn.functional.scaled_dot_product_attention
            torch.autograd.grad(attention(*leaves, is_causal=True, enable_gqa=enable_gqa), leaves, grad)

        return Candidate(step, within)

    grouped = candidate(k, v, enable_gqa=True)
    try:
        with grouped.within():
            grouped.step()
    except ERRORS:
        times = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(times, 1) for x in (k, v))
        return {"pytorch, repeated keys": candidate(k, v, enable_gqa=False)}
    return {"pytorch": grouped}


@contextlib.contextmanager
def _kernels(device: torch.device) -> Iterator[None]:
    """PyTorch's kernels that its context parallelism knows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        yield


def _compared(label: str, sizes: Sizes, candidates: dict[str, Candidate], device: torch.device) -> list[Row]:
    """A row for each candidate, which has no number that was not measured; they run in turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    peaks: dict[str, float | None] = {}
    failed: dict[str, str] = {}
    steps: dict[str, int] = {}
    for name, candidate in candidates.items():
        try:
            with candidate.within():
                candidate.step()
        except ERRORS as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        peaks[name] = _peak(candidate, device)
        wanted = math.ceil(sizes.seconds / _seconds(candidate, device, steps=1))
        steps[name] = max(1, min(MAX_STEPS, wanted))
    for _ in range(sizes.repeats):
        for name in (name for name in times if name not in failed):
            times[name].append(_seconds(candidates[name], device, steps[name]))
    alone = statistics.median(times["one GPU"]) if times["one GPU"] else None
    rows: list[Row] = []
    for name, found in times.items():
        ranks = 1 if name == "one GPU" else dist.get_world_size()
        row: Row = {"call": f"{label}: {name}", "GPUs": ranks}
        if name in failed:
            rows.append({**row, "not run": failed[name]})
            continue
        seconds = statistics.median(found)
        row["ms"] = seconds * 1e3
        if alone is not None:
            row["of linear scaling"] = alone / seconds / ranks
        if (peak := peaks[name]) is not None:
            row["memory, MiB"] = peak
        rows.append(row)
    return rows


def _seconds(candidate: Candidate, device: torch.device, steps: int) -> float:
    """The time of a step, of several back to back, on the slowest rank, which all begin together."""
    with candidate.within():
        _synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            candidate.step()
        _synchronize(device)
        seconds = (time.perf_counter() - start) / steps
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _peak(candidate: Candidate, device: torch.device) -> float | None:
    """MiB that a step allocates beyond its tensors; None on the CPU, where nobody counts."""
    with candidate.within():
        if device.type != "cuda":
            candidate.step()
            return None
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        candidate.step()
        _synchronize(device)
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str]) -> None:
    """Joins the group that torchrun describes, measures, and prints."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rows = measure(SMALL if "small" in arguments else FULL)
    if dist.get_rank() == 0:
        print(json.dumps({"rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
