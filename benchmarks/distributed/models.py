"""Tensor parallelism of a layer; FSDP2, tensor and context parallelism of two layers."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.distributed import times
from benchmarks.distributed.times import ALONE, Candidate, Timing, compared
from benchmarks.tools.output import Row
from cudnn_sdpa.distributed import shard
from cudnn_sdpa.nn import RotaryEmbedding, TransformerLayer, parallel_plan
from cudnn_sdpa.nn.attention import AttentionOptions

METHOD: Final = "ring"  #: of context parallelism


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        embed_dim: Features of a token.
        ffn_dim: Hidden features.
        heads: Heads of queries and of keys.
        layer_tokens: Tokens of the sequence of a layer alone.
        model_tokens: Tokens of each sequence of a model.
        compiler: The backend of `torch.compile`, which compiles the layer alone, too.
        timing: How.
    """

    embed_dim: int
    ffn_dim: int
    heads: tuple[int, int]
    layer_tokens: int
    model_tokens: int
    compiler: str
    timing: Timing


FULL = Sizes(4096, 14336, heads=(32, 8), layer_tokens=8192, model_tokens=32768, compiler="inductor", timing=times.FULL)
SMALL = Sizes(64, 128, heads=(8, 4), layer_tokens=64, model_tokens=128, compiler="aot_eager", timing=times.SMALL)


def tensor(sizes: Sizes) -> list[Row]:
    """A layer of one sequence: heads and hidden features on all ranks, between projections all tokens or a part.

    The layer is measured compiled as well: eagerly, the host dispatches each `DTensor`, which GPUs may wait for.
    """
    label = f"a layer, S={sizes.layer_tokens}"
    eager = compared(label, sizes.timing, _tensor_parallel(sizes), is_host_timed=True)
    layers = _tensor_parallel(sizes, is_compiled=True)
    return eager + compared(f"{label}, compiled", sizes.timing, layers, is_host_timed=True)


def _tensor_parallel(sizes: Sizes, *, is_compiled: bool = False) -> dict[str, Candidate]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(times.device().type, (ranks,))
    layers, xs = {ALONE: _layers(sizes, 1)}, {ALONE: _drawn(sizes, sizes.layer_tokens)}
    for name, is_sharded in (("tensor", False), ("tensor, sequence", True)):
        layers[name], x = _layers(sizes, 1, packed=False), _drawn(sizes, sizes.layer_tokens)
        parallelize_module(layers[name], mesh, parallel_plan(layers[name], sequence_parallel=is_sharded))
        xs[name] = x.chunk(ranks, dim=1)[dist.get_rank()] if is_sharded else x
    if is_compiled:
        for layer in layers.values():
            layer.compile(backend=sizes.compiler, dynamic=False)
    return {name: _trained(layer, xs[name]) for name, layer in layers.items()}


def model(sizes: Sizes) -> list[Row]:
    """Two layers on meshes of all shapes: data, context and tensor parallelism, each of a power of two."""
    found = {ALONE: _trained(_layers(sizes, 2), _drawn(sizes, sizes.model_tokens))}
    for shape in meshes(dist.get_world_size(), max_tensor=sizes.heads[1]):
        name = " × ".join(f"{way} {ranks}" for way, ranks in zip(("DP", "CP", "TP"), shape, strict=True))
        found[name] = _on_mesh(sizes, shape)
    return compared(f"two layers, S={sizes.model_tokens}", sizes.timing, found)


def meshes(ranks: int, *, max_tensor: int) -> list[tuple[int, int, int]]:
    """The shapes of meshes of so many ranks: data, context and tensor parallelism, all powers of two."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0 and size & (size - 1) == 0]
    return [(ranks // (cp * tp), cp, tp) for tp in sizes for cp in sizes if ranks % (cp * tp) == 0 and tp <= max_tensor]


def _on_mesh(sizes: Sizes, shape: tuple[int, int, int]) -> Candidate:
    """A step on a mesh: each replica has a sequence, and parameters are spread over all who have other tokens."""
    replicas, cp, tp = shape
    mesh = init_device_mesh(times.device().type, shape, mesh_dim_names=("dp", "cp", "tp"))
    stack = _layers(sizes, 2, mesh["cp"] if cp > 1 else None, packed=tp == 1)
    if tp > 1:
        parallelize_module(stack, mesh["tp"], parallel_plan(stack))
    if replicas * cp > 1:
        over = mesh["dp", "cp"]._flatten("dp_cp")
        for layer in stack:
            fully_shard(layer, mesh=over)
        fully_shard(stack, mesh=over)
    x = _drawn(sizes, sizes.model_tokens)
    return _trained(stack, shard(x, 1, mesh["cp"]) if cp > 1 else x)._replace(sequences=replicas)


def _layers(sizes: Sizes, count: int, cp_group: DeviceMesh | None = None, *, packed: bool = True) -> nn.Sequential:
    """Layers with the same weights on all ranks; tensor parallelism needs separate projections."""
    torch.manual_seed(5)
    options: AttentionOptions = {
        "num_kv_heads": sizes.heads[1],
        "is_causal": True,
        "rope": RotaryEmbedding(sizes.embed_dim // sizes.heads[0]),
    }
    if cp_group is not None:
        options |= {"cp_group": cp_group, "cp_method": METHOD}
    made = [
        TransformerLayer(
            sizes.embed_dim,
            sizes.heads[0],
            sizes.ffn_dim,
            packed=packed,
            device=times.device(),
            dtype=torch.bfloat16,
            **options,
        )
        for _ in range(count)
    ]
    return nn.Sequential(*made)


def _drawn(sizes: Sizes, tokens: int) -> Tensor:
    """The same tokens on all ranks."""
    generator = torch.Generator(times.device()).manual_seed(7)
    shape = (1, tokens, sizes.embed_dim)
    return torch.randn(shape, device=times.device(), dtype=torch.bfloat16, generator=generator)


def _trained(module: nn.Module, x: Tensor) -> Candidate:
    """A forward and a backward pass, to the gradients of parameters and tokens."""
    x = x.detach().clone().requires_grad_()
    grad = torch.ones_like(x)

    def step() -> None:
        module(x).backward(grad)
        module.zero_grad()
        x.grad = None

    return Candidate(step)
