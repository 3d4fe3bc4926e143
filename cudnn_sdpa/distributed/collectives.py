"""Collectives of `torch.distributed` along the first dimension of tensors, asynchronous to kernels."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.distributed.groups import GroupRank
from cudnn_sdpa.engine.dispatch_state import materialized

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Tags by which gloo distinguishes messages between two ranks.
KEYS, GRADIENTS, HEADS = 1, 2, 3

#: The element type of copies: elements of two bytes reach a third of the memory's bandwidth.
WIDEST = torch.complex128

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Message(NamedTuple):
    """Two chunks of tokens, (2, tokens, …), sent to a rank of the group or received from it."""

    tensor: Tensor
    rank: int


class _Staged(NamedTuple):
    """Contiguous memory for a received tensor that belongs into `to`."""

    tensor: Tensor
    to: Tensor


class _Started(threading.local):
    """Messages that this thread has started within `settled`, and whether communication has failed there."""

    def __init__(self) -> None:
        self.pending: list[Pending[object]] = []
        self.has_failed = False


_started = _Started()


class Pending(Generic[T_co]):
    """Received tensors in transit. Holds the buffers, which must not be freed before the end."""

    __slots__ = ("_held", "_received", "_staged", "_works")

    def __init__(
        self,
        received: T_co,
        held: object,
        works: Sequence[dist.Work],
        staged: Sequence[_Staged] = (),
    ) -> None:
        self._received, self._works, self._staged = received, works, staged
        self._held: object = held
        _started.pending.append(self)

    def wait(self) -> T_co:
        """The received tensors. On a GPU the stream waits for them, and the host does not."""
        if self in _started.pending:
            _started.pending.remove(self)
        works, self._works = self._works, ()
        staged, self._staged = self._staged, ()
        try:
            for work in works:
                work.wait()
        except RuntimeError:
            _started.has_failed = True
            raise
        for memory, to in staged:
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
    """Starts to gather the tensors of all ranks, one after another along the first dimension."""
    x = materialized(x).contiguous()
    received = x.new_empty(x.shape[0] * group_rank.ranks, *x.shape[1:])
    return Pending(received, x, [_gather(received, x, group=group_rank.group, async_op=True)])


def reduce_scatter(x: Tensor, group_rank: GroupRank) -> Pending[Tensor]:
    """Starts to sum the tensors of all ranks; each rank receives its part of the sum along the first dimension."""
    x = materialized(x).contiguous()
    received = x.new_empty(x.shape[0] // group_rank.ranks, *x.shape[1:])
    return Pending(received, x, [_reduce(received, x, group=group_rank.group, async_op=True)])


def ring_shift(xs: Sequence[Tensor], group_rank: GroupRank, tag: int) -> Pending[list[Tensor]]:
    """Starts to send tensors to the next rank, and to receive those of the previous one."""
    xs = [materialized(x).contiguous() for x in xs]
    received = [torch.empty_like(x) for x in xs]
    sends = [dist.P2POp(dist.isend, x, group_rank.neighbor(1), group_rank.group, tag) for x in xs]
    receives = [dist.P2POp(dist.irecv, x, group_rank.neighbor(-1), group_rank.group, tag) for x in received]
    return Pending(received, xs, dist.batch_isend_irecv([*sends, *receives]))


def exchange(sends: list[Message], receives: list[Message], received: T, group_rank: GroupRank) -> Pending[T]:
    """Starts to send tensors to other ranks and to receive theirs, in the same order between any two.

    Each message is two chunks of tokens (2, tokens, …), of any strides. All ranks send each other as many bytes.

    Args:
        sends: Messages to other ranks.
        receives: Memory of the messages from other ranks.
        received: Result of `wait`.
        group_rank: The group.
    """
    global_ranks = [group_rank.neighbor(rank - group_rank.rank) for rank in range(group_rank.ranks)]
    sends = [Message(x if _has_contiguous_chunks(x) else copy(x.new_empty(x.shape), x), rank) for x, rank in sends]
    staged: list[_Staged] = []
    buffers: list[Message] = []
    for x, rank in receives:
        if not _has_contiguous_chunks(x):
            staged.append(_Staged(x.new_empty(x.shape), x))
        buffers.append(Message(x if _has_contiguous_chunks(x) else staged[-1].tensor, rank))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(operation, chunk, global_ranks[message.rank], group_rank.group, HEADS)
            for operation, messages in ((dist.isend, sends), (dist.irecv, buffers))
            for message in messages
            for chunk in message.tensor
        ]
    )
    return Pending(received, (sends, buffers), works, staged)


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
