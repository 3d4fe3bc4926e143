"""Context parallelism by each method and by PyTorch, beside one GPU with all tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.distributed import times
from benchmarks.distributed.times import ALONE, ERRORS, Candidate, Timing, compared
from benchmarks.tools.output import Row
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.distributed import context_parallel, context_parallel_varlen, shard

METHODS = ("all_gather", "ulysses", "ring")


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        tokens_each: Tokens of each rank where more ranks get more.
        tokens: Tokens of all ranks where they share the same.
        heads: Heads of queries and of keys.
        head_dim: The head dim.
        timing: How.
    """

    tokens_each: int
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    timing: Timing


FULL = Sizes(tokens_each=32768, tokens=131072, heads=(32, 8), head_dim=128, timing=times.FULL)
SMALL = Sizes(tokens_each=64, tokens=256, heads=(4, 2), head_dim=16, timing=times.SMALL)


def weak(sizes: Sizes) -> list[Row]:
    """Weak scaling: each rank has as many tokens, whatever the number of ranks."""
    return _measured(sizes, sizes.tokens_each * dist.get_world_size())


def strong(sizes: Sizes) -> list[Row]:
    """Strong scaling: all ranks together have as many tokens, whatever their number."""
    return _measured(sizes, sizes.tokens)


def _measured(sizes: Sizes, tokens: int) -> list[Row]:
    """Milliseconds and memory of a forward and a backward pass on all ranks, and on one GPU that has all tokens."""
    dense = compared(f"causal, S={tokens}", sizes.timing, _dense(sizes, tokens))
    return dense + compared(f"packed, {tokens} tokens", sizes.timing, _packed(sizes, tokens))


def _drawn(sizes: Sizes, *shape: int) -> list[Tensor]:
    """Equal queries, keys, values and output gradients on all ranks."""
    device = times.device()
    generator = torch.Generator(device).manual_seed(7)
    heads = (sizes.heads[0], sizes.heads[1], sizes.heads[1], sizes.heads[0])
    made = [
        torch.randn(*shape, n, sizes.head_dim, device=device, dtype=torch.bfloat16, generator=generator) for n in heads
    ]
    return made if len(shape) == 1 else [x.transpose(1, 2) for x in made]


def _trained(attention: Callable[..., Tensor], tensors: list[Tensor], dim: int | None) -> Candidate:
    """A forward and a backward pass with these tensors, or with this rank's parts of them."""
    *inputs, grad = tensors if dim is None else [_part(x, dim) for x in tensors]
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> None:
        torch.autograd.grad(attention(*leaves), leaves, grad)

    return Candidate(step)


def _by_each_method(
    attention: Callable[..., Tensor], tensors: list[Tensor], dim: int
) -> Iterator[tuple[str, Candidate]]:
    for method in METHODS:
        yield method, _trained(functools.partial(attention, method=method), tensors, dim)


def _part(x: Tensor, dim: int) -> Tensor:
    """This rank's part, in memory as a model's projections make it: (B, S, H, D), or (T, H, D) of packed sequences."""
    return shard(x.transpose(1, dim), 1).transpose(1, dim) if dim > 1 else shard(x, dim)


def _dense(sizes: Sizes, length: int) -> dict[str, Candidate]:
    tensors = _drawn(sizes, 1, length)
    found = {ALONE: _trained(lambda q, k, v: sdpa(q, k, v, is_causal=True), tensors, None)}
    found |= _by_each_method(functools.partial(context_parallel, is_causal=True), tensors, 2)
    with contextlib.suppress(ImportError):
        found |= _pytorchs(tensors)
    return found


def _packed(sizes: Sizes, tokens: int) -> dict[str, Candidate]:
    """Documents of random lengths, the same on each rank."""
    tensors = _drawn(sizes, tokens)
    generator = torch.Generator().manual_seed(11)
    bounds = torch.randperm(tokens - 1, generator=generator)[: max(2, tokens // 4096)].add(1).sort().values
    ends = torch.cat([torch.tensor([0]), bounds, torch.tensor([tokens])])
    offsets, max_seqlen = ends.int().to(times.device()), int(ends.diff().max())

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

    found = {ALONE: _trained(on_one, tensors, None)}
    packing = {"cu_seqlens": offsets, "max_seqlen": max_seqlen}
    found |= _by_each_method(functools.partial(context_parallel_varlen, **packing, is_causal=True), tensors, 0)
    return found


def _pytorchs(tensors: list[Tensor]) -> dict[str, Candidate]:
    """PyTorch's own context parallelism, with its load balance, within its context, which shards the tensors before.

    Keys are repeated for all heads of queries only if PyTorch refuses grouped ones.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as pytorchs

    device = times.device()
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
            with pytorchs(mesh, buffers=[positions], buffer_seq_dims=[0]), _kernels():
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
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        return {"pytorch, repeated keys": candidate(k, v, enable_gqa=False)}
    return {"pytorch": grouped}


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """PyTorch's kernels that its context parallelism knows."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        yield
