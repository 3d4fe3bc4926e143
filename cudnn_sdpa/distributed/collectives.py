"""Collectives of `torch.distributed` along the first dimension of tensors, asynchronous to kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import materialized
from cudnn_sdpa.errors import DeviceError, OptionError


class GroupRank(NamedTuple):
    """A process group, and this process's rank among its `ranks` processes."""

    group: dist.ProcessGroup
    rank: int
    ranks: int

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank]

    def neighbor(self, distance: int) -> int:
        """The global rank of the process at this distance after the own rank."""
        return int(dist.get_global_rank(self.group, (self.rank + distance) % self.ranks))


def group_rank_of(group: object) -> GroupRank:
    """The rank in a process group, in a one-dimensional device mesh, or (None) among all processes."""
    expected = "a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None for all processes"
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError("group", "no process group", expected, "Call torch.distributed.init_process_group before.")
    if hasattr(group, "get_group") and hasattr(group, "ndim") and hasattr(group, "get_coordinate"):
        if group.ndim != 1:
            raise OptionError("group", f"a mesh of {group.ndim} dimensions", expected, 'Take one: mesh["cp"].')
        if group.get_coordinate() is None:
            raise OptionError("group", "a mesh without this process", expected)
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        got = "a group without this process" if group is dist.GroupMember.NON_GROUP_MEMBER else type(group).__name__
        raise OptionError("group", got, expected)
    rank = dist.get_rank(group)
    if rank < 0:
        raise OptionError("group", "a group without this process", expected)
    return GroupRank(group, rank, dist.get_world_size(group))


def check_device(name: str, tensor: Tensor, group_rank: GroupRank) -> None:
    served = {device.type for device in getattr(group_rank.group, "_device_types", ())}
    if served and tensor.device.type not in served:
        backend = dist.get_backend(group_rank.group)
        hint = "Move it, or make the group with a backend for that device."
        expected = f"{' or '.join(sorted(served))}, the devices of the group's backend {backend}"
        raise DeviceError(name, str(tensor.device), expected, hint)


_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Tags by which gloo distinguishes messages between two ranks.
KEYS, GRADIENTS, HEADS = 1, 2, 3

#: The element type of copies: elements of two bytes reach a third of the memory's bandwidth.
WIDEST = torch.complex128

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Started(threading.local):
    """Messages that this thread has started within `settled`, and whether communication has failed there."""

    def __init__(self) -> None:
        self.pending: list[Pending[object]] = []
        self.has_failed = False


_started = _Started()


class Pending(Generic[T_co]):
    """Received tensors in transit. Holds the buffers, which must not be freed before the end.

    Pairs of a tensor and its source are copied by `wait`: those of `own` before it waits for messages, which they
    overlap, those of `staged` after.
    """

    __slots__ = ("_held", "_own", "_received", "_staged", "_works")

    def __init__(
        self,
        received: T_co,
        held: object,
        works: Sequence[dist.Work],
        own: Sequence[tuple[Tensor, Tensor]] = (),
        staged: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._received, self._works, self._own, self._staged = received, works, own, staged
        self._held: object = held
        _started.pending.append(self)

    def wait(self) -> T_co:
        """The received tensors. On a GPU the stream waits for them, and the host does not."""
        if self in _started.pending:
            _started.pending.remove(self)
        works, self._works = self._works, ()
        own, self._own = self._own, ()
        staged, self._staged = self._staged, ()
        for to, x in own:
            copy(to, x)
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            _started.has_failed = True
            raise
        for to, memory in staged:
            copy(to, memory)
        self._held = None
        return self._received


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Completes all started messages if its body raises, as for a refused kernel: a later call would receive them.

    The other ranks have started the same messages, or will, before they need more of this rank. An interruption
    (`KeyboardInterrupt`) does not wait.
    """
    outside = _started.pending, _started.has_failed
    _started.pending, _started.has_failed = [], False
    try:
        yield
    except Exception:
        while _started.pending and not _started.has_failed:
            with contextlib.suppress(RuntimeError):
                _started.pending[0].wait()
        raise
    finally:
        _started.pending, _started.has_failed = outside


def all_gather(x: Tensor, group_rank: GroupRank) -> Pending[Tensor]:
    x = materialized(x).contiguous()
    received = x.new_empty(x.shape[0] * group_rank.ranks, *x.shape[1:])
    return Pending(received, x, [_gather(received, x, group=group_rank.group, async_op=True)])


def reduce_scatter(x: Tensor, group_rank: GroupRank) -> Pending[Tensor]:
    x = materialized(x).contiguous()
    received = x.new_empty(x.shape[0] // group_rank.ranks, *x.shape[1:])
    return Pending(received, x, [_reduce(received, x, group=group_rank.group, async_op=True)])


def ring_shift(xs: Sequence[Tensor], group_rank: GroupRank, tag: int) -> Pending[list[Tensor]]:
    xs = [materialized(x).contiguous() for x in xs]
    received = [torch.empty_like(x) for x in xs]
    sends = [dist.P2POp(dist.isend, x, group_rank.neighbor(1), group_rank.group, tag) for x in xs]
    receives = [dist.P2POp(dist.irecv, x, group_rank.neighbor(-1), group_rank.group, tag) for x in received]
    return Pending(received, xs, dist.batch_isend_irecv([*sends, *receives]))


def exchange(shares: Mapping[int, Sequence[tuple[Tensor, Tensor]]], received: T, group_rank: GroupRank) -> Pending[T]:
    """Starts to send tensors to other ranks and to receive theirs, in the same order between any two.

    Each rank's share is pairs of what it sends here and what is sent to it, both two chunks of tokens (2, tokens, …),
    of any strides. This rank's own share is copied. All ranks send each other as many bytes. `wait` returns `received`.
    """
    sends: list[tuple[Tensor, int]] = []
    buffers: list[tuple[Tensor, int]] = []
    staged: list[tuple[Tensor, Tensor]] = []
    for rank in group_rank.others:
        peer = group_rank.neighbor(rank - group_rank.rank)
        for to, x in shares[rank]:
            sends.append((x if _has_contiguous_chunks(x) else copy(x.new_empty(x.shape), x), peer))
            buffers.append((to if _has_contiguous_chunks(to) else to.new_empty(to.shape), peer))
            if buffers[-1][0] is not to:
                staged.append((to, buffers[-1][0]))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(operation, chunk, peer, group_rank.group, HEADS)
            for operation, messages in ((dist.isend, sends), (dist.irecv, buffers))
            for x, peer in messages
            for chunk in x
        ]
    )
    return Pending(received, (sends, buffers), works, own=shares[group_rank.rank], staged=staged)


def copy(to: Tensor, x: Tensor) -> Tensor:
    """Copies a tensor to memory of its shape, in elements of 16 bytes if layouts and addresses allow it."""
    if all(map(_is_wide, (to, x))):
        to.view(WIDEST).copy_(x.view(WIDEST))
        return to
    return to.copy_(x)


def _has_contiguous_chunks(x: Tensor) -> bool:
    return all(chunk.is_contiguous() for chunk in x)


def _is_wide(x: Tensor) -> bool:
    number = WIDEST.itemsize // x.element_size()
    steps = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return x.stride(-1) == 1 and x.data_ptr() % WIDEST.itemsize == 0 and all(step % number == 0 for step in steps)
