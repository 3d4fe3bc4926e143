"""The order of tokens on ranks: of 2·P chunks of a sequence, rank r of P holds chunks r and 2P−1−r.

Under a causal mask a later chunk sees more keys, so an early and a late one together make all ranks' work equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cudnn_sdpa.distributed import collectives
from cudnn_sdpa.distributed.collectives import GroupRank, check_device, group_rank_of
from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.dispatch_state import Function
from cudnn_sdpa.engine.sharding import has_dtensor
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def chunks_of(group_rank: GroupRank) -> tuple[int, int]:
    return group_rank.rank, 2 * group_rank.ranks - 1 - group_rank.rank


def in_sequence_order(gathered: Tensor, ranks: int) -> Tensor:
    """The sequence out of the parts of all ranks, one after another along the first dimension."""
    first, second = gathered.unflatten(0, (ranks, 2, -1)).unbind(1)  # type: ignore[no-untyped-call]
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def in_rank_order(whole: Tensor, ranks: int) -> Tensor:
    """The parts of all ranks, one after another, out of the sequence; inverts `in_sequence_order`."""
    first, second = whole.unflatten(0, (2, ranks, -1)).unbind(0)  # type: ignore[no-untyped-call]
    return torch.stack([first, second.flip(0)], 1).flatten(0, 2)


def shard(x: Tensor, dim: int, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """This rank's part of a whole sequence: of 2·P chunks those of numbers r and 2P−1−r.

    Tokens, labels and positions are all sharded like this before a model whose attention is `context_parallel`. All
    other layers of a transformer treat tokens one by one and need nothing else. Differentiable.

    Args:
        x: The same tensor on each rank, such as token ids (B, S), positions (S,) or packed tokens (T, …).
        dim: The dimension of the sequence, a multiple of 2·P long: pad it.
        group: The process group, a device mesh of one dimension, or None for all processes.

    Returns:
        The part, `x.shape[dim] / P` long, contiguous.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        Of four chunks of one token, the first of two ranks gets the first and the last:

        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> shard(torch.tensor([[5, 6, 7, 8]]), dim=1)  # one process holds all
        tensor([[5, 6, 7, 8]])
        >>> dist.destroy_process_group()
    """
    group_rank, dim = group_rank_of(group), _dimension(x, dim)
    if has_dtensor(x):  # placements say which rank holds which tokens, and none is a zig-zag
        raise OptionError("x", "a DTensor", "a plain tensor of the whole sequence", "Use x.full_tensor().")
    _check_multiple("x", x, dim, 2 * group_rank.ranks)
    parts = x.chunk(2 * group_rank.ranks, dim)
    return torch.cat([parts[number] for number in chunks_of(group_rank)], dim)


def unshard(x: Tensor, dim: int, group: ProcessGroup | DeviceMesh | None = None) -> Tensor:
    """The whole sequence of the parts that `shard` gives the ranks, on each rank.

    Differentiable: the gradient of a part is the sum of what all ranks' results ask of it. If each rank computes the
    same loss of the whole, divide it by the number of ranks.

    Args:
        x: This rank's part, as long on each rank.
        dim: The dimension of the sequence.
        group: The process group, a device mesh of one dimension, or None for all processes.

    Returns:
        The whole, contiguous.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import shard, unshard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.arange(8)
        >>> torch.equal(unshard(shard(x, 0), 0), x)
        True
        >>> dist.destroy_process_group()
    """
    group_rank, dim = group_rank_of(group), _dimension(x, dim)
    if has_dtensor(x):
        raise OptionError("x", "a DTensor", "this rank's part as a plain tensor", "Use x.to_local().")
    check_device("x", x, group_rank)
    _check_multiple("x", x, dim, 2)
    return gathered(x.movedim(dim, 0), group_rank).movedim(0, dim).contiguous()


def gathered(x: Tensor, group_rank: GroupRank) -> Tensor:
    return _Gathered.apply(x, group_rank)  # type: ignore[no-any-return]


class _Gathered(Function):
    """Gathers parts; their gradients are summed, in float32 or better, and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_rank: GroupRank) -> Tensor:
        ctx.group_rank, ctx.dtype = group_rank, x.dtype
        return in_sequence_order(collectives.all_gather(x, group_rank).wait(), group_rank.ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and grad.requires_grad:
            autograd_checks.refuse_second_gradient("unshard")
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32)).resolve_conj()
        numbers = torch.view_as_real(exact) if exact.is_complex() else exact  # not every backend sums complex numbers
        part = collectives.reduce_scatter(in_rank_order(numbers, ctx.group_rank.ranks), ctx.group_rank).wait()
        return (torch.view_as_complex(part) if exact.is_complex() else part).to(ctx.dtype), None


def _dimension(x: object, dim: object) -> int:
    if not isinstance(x, Tensor):
        raise OptionError("x", type(x).__name__, "a torch.Tensor")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        raise OptionError("dim", repr(dim), f"a dimension of x, which has {x.dim()}")
    return dim % x.dim()


def _check_multiple(name: str, x: Tensor, dim: int, of: int) -> None:
    if x.shape[dim] == 0 or x.shape[dim] % of:
        expected = f"a positive multiple of {of} in dimension {dim}: two chunks for each rank"
        more = -(-max(1, x.shape[dim]) // of) * of - x.shape[dim]
        raise ShapeError(name, shape_of(x), expected, f"Pad it by {more}.")
