"""Messages that GPUs write into each other's memory, by PyTorch's symmetric memory: `enable_symmetric_memory`.

Each rank has a buffer that the others can write to, in two halves, of which exchanges take turns. They run on a stream
of their own: a rank writes its messages into the others' buffers, all ranks wait for each other at a barrier, and each
copies what has come to where it belongs. One barrier is enough: whoever has passed it knows that all others have copied
what came in the exchange before, and the next exchange writes into the half which that one had.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cudnn_sdpa.distributed.agreement import in_agreement, is_capturing, seconds_to_wait
from cudnn_sdpa.distributed.copies import copy, copy_to_peer
from cudnn_sdpa.distributed.groups import Place, place_in
from cudnn_sdpa.errors import DeviceError, ExecutionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Messages begin at multiples of so many bytes.
ALIGNMENT = 256

#: Bytes of the halves that a group begins with.
MIN_HALF = 1 << 20

#: What is said of a group, an exchange of which has failed on this rank.
BROKEN = (
    "an exchange through symmetric memory has failed on this rank before, and the other ranks wait for it: "
    "end all processes"
)

#: What ranks that enable it, or have, must be.
EXPECTED = (
    "processes of one host, all of which have enabled symmetric memory or none; "
    "disable_symmetric_memory on all ranks makes it none"
)


class Message(NamedTuple):
    """Two chunks of tokens, (2, tokens, …), that go to a rank of the group, or come from it."""

    tensor: Tensor
    rank: int


class Buffer(NamedTuple):
    """Memory of this rank that the others can write to once they have met.

    Attributes:
        tensor: The memory.
        half: Bytes of each half.
    """

    tensor: Tensor
    half: int


class _Met:
    """The buffers of all ranks, as this rank sees them.

    Attributes:
        buffer: This rank's own.
        memory: PyTorch's view of them.
        views: The bytes of each rank's.
    """

    def __init__(self, buffer: Buffer, place: Place) -> None:
        from torch.distributed import _symmetric_memory

        self.buffer = buffer
        self.memory = _symmetric_memory.rendezvous(buffer.tensor, place.group.group_name)
        if (self.memory.rank, self.memory.world_size) != (place.rank, place.ranks):
            # PyTorch 2.9 takes a group for one that had its name
            raise RuntimeError(f"PyTorch knows rank {self.memory.rank} of {self.memory.world_size} for {place}")
        self.views = [self.memory.get_buffer(rank, (2 * buffer.half,), torch.uint8) for rank in range(place.ranks)]


class _Exchanges:
    """The exchanges of a group.

    Attributes:
        stream: Where they run.
        met: The buffers.
        count: How many exchanges there have been.
        is_broken: Whether one has failed on this rank, after which barriers would pair it with others.
        held: The messages of that one, which may be on their way.
        lock: Whoever starts one has it.
        timeout_ms: How long a GPU waits for the others.
    """

    def __init__(self, place: Place, buffer: Buffer) -> None:
        self.stream = torch.cuda.Stream(buffer.tensor.device, priority=-1)  # type: ignore[no-untyped-call]
        self.met = _Met(buffer, place)
        self.count = 0
        self.is_broken = False
        self.held: object = None
        self.lock = threading.Lock()
        self.timeout_ms = int(seconds_to_wait(place) * 1000)

    def meet(self, buffer: Buffer, place: Place) -> None:
        """Takes another buffer, as all ranks do now."""
        with self.lock:
            torch.cuda.synchronize(self.stream.device)  # once all have come here, nobody writes into the old ones
            self.met = _Met(buffer, place)

    def start(self, sent: list[Message], coming: list[Message], place: Place) -> torch.cuda.Event | None:
        """Starts an exchange, and gives the event after it; None if a message does not fit, as on all ranks.

        Raises:
            ExecutionError: One has failed before.
        """
        with self.lock:
            if self.is_broken:
                raise ExecutionError(BROKEN)
            part = self.met.buffer.half // (place.ranks - 1) // ALIGNMENT * ALIGNMENT
            if any(_bytes_of(sent, rank) > part for rank in place.others):
                return None
            self.count += 1
            self.is_broken, self.held = True, (sent, coming)
            done = self._started(sent, coming, place, part)
            self.is_broken, self.held = False, None
            return done

    def _started(self, sent: list[Message], coming: list[Message], place: Place, part: int) -> torch.cuda.Event:
        """Enqueues all of an exchange, in which a rank has that many bytes of another's half."""
        begin = self.met.buffer.half * (self.count % 2)
        by_distance = [(place.rank + distance) % place.ranks for distance in range(1, place.ranks)]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            for rank in by_distance:  # not all to the same rank at a time
                there = begin + part * _index(place.rank, rank)
                for memory, x in _placed(self.met.views[rank], there, sent, rank):
                    copy_to_peer(memory, x)
            self.met.memory.barrier(channel=0, timeout_ms=self.timeout_ms)
            for rank in by_distance:
                here = begin + part * _index(rank, place.rank)
                for memory, x in _placed(self.met.views[place.rank], here, coming, rank):
                    copy(x, memory)
            done: torch.cuda.Event = self.stream.record_event()
            return done


def _index(sender: int, receiver: int) -> int:
    """Which part of the receiver's buffer a sender has."""
    return sender - (sender > receiver)


def _placed(memory: Tensor, begin: int, messages: list[Message], rank: int) -> list[tuple[Tensor, Tensor]]:
    """Memory for each message of a rank, one after the other, with its tensor."""
    found = []
    for x in (x for x, other in messages if other == rank):
        size = x.numel() * x.element_size()
        found.append((memory[begin : begin + size].view(x.dtype).view(x.shape), x))
        begin += _aligned(size)
    return found


def _bytes_of(messages: list[Message], rank: int) -> int:
    return sum(_aligned(x.numel() * x.element_size()) for x, other in messages if other == rank)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


_enabled: weakref.WeakKeyDictionary[dist.ProcessGroup, _Exchanges] = weakref.WeakKeyDictionary()


def enable_symmetric_memory(group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Lets the GPUs of a group write into each other's memory, where `context_parallel` exchanges heads.

    "ulysses" then needs neither NCCL's kernels, which take multiprocessors from attention, nor copies of what it sends;
    the numbers are the same. It is for GPUs of one host that reach each other's memory, as over NVLink. All ranks
    call it, before or between steps. The memory is PyTorch's symmetric memory (`torch.distributed._symmetric_memory`,
    which PyTorch calls alpha).

    Each rank keeps a buffer outside PyTorch's allocator, for each group, of twice what it receives at a time: that is
    (1 − 1/P) of the bytes of its queries, keys and values, with keys repeated for all ranks, or of its output, if that
    is larger; of half of their heads where they travel in two groups. It grows with the calls, before their first
    message, to at most a quarter more; meanwhile there are both. While a CUDA graph is captured, NCCL is used.

    Where a rank ends, or raises between two messages, the GPUs of the others wait for it until the group's timeout.
    Then CUDA stops their processes.

    Args:
        group: A process group, a one-dimensional device mesh, or None for all processes.

    Raises:
        DeviceError: The group is not of GPUs with NCCL, or they do not reach each other's memory.
        OptionError: It is no group, its ranks are on several hosts, or some have enabled it already; or a rank has
            failed, or did not come.
        ExecutionError: There is not enough memory.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import disable_symmetric_memory, enable_symmetric_memory
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> enable_symmetric_memory()  # of one process: nothing to exchange
        >>> disable_symmetric_memory()
        >>> dist.destroy_process_group()
    """
    place = place_in(group)
    if place.ranks == 1:
        return
    is_enabled = place.group in _enabled

    def begin() -> tuple[str, Buffer | None]:
        _check_group(place)
        device = torch.device("cuda", torch.cuda.current_device())
        return f"host={socket.gethostname()}; enabled={is_enabled}", None if is_enabled else _allocated(
            MIN_HALF, device
        )

    buffer = in_agreement(place, "enable_symmetric_memory", begin, expected=EXPECTED)
    if buffer is None:
        return

    def meet() -> tuple[str, _Exchanges]:
        with _of_gpus_in_reach():
            return "met", _Exchanges(place, buffer)

    exchanges = in_agreement(place, "enable_symmetric_memory", meet)
    with _of_gpus_in_reach():
        exchanges.met.memory.barrier(channel=0, timeout_ms=exchanges.timeout_ms)
        torch.cuda.synchronize(buffer.tensor.device)
    _connect(place, buffer.tensor.device)
    _enabled[place.group] = exchanges


def disable_symmetric_memory(group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Undoes `enable_symmetric_memory`, and frees its memory. All ranks call it, between steps.

    Args:
        group: As there.

    Raises:
        OptionError: It is no group, or a rank did not come.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> from cudnn_sdpa.distributed import disable_symmetric_memory
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> disable_symmetric_memory()  # it was not enabled: nothing to do
        >>> dist.destroy_process_group()
    """
    place = place_in(group)
    exchanges = _enabled.get(place.group)
    if place.ranks > 1:
        in_agreement(place, "disable_symmetric_memory", lambda: ("disable", None))
    if exchanges is not None:
        torch.cuda.synchronize(exchanges.stream.device)
        del _enabled[place.group]


def state(place: Place) -> str:
    """What ranks must agree about: whether it is enabled, the number of exchanges, which pairs them, and the size.

    Raises:
        ExecutionError: An exchange has failed on this rank.
    """
    exchanges = _enabled.get(place.group)
    if exchanges is not None and exchanges.is_broken:
        raise ExecutionError(BROKEN)
    return "off" if exchanges is None else f"{exchanges.count} exchanges by {exchanges.met.buffer.half} bytes"


def wider_buffer(place: Place, device: torch.device, in_bytes: int) -> Buffer | None:
    """Memory for messages of so many bytes from each rank, if what there is does not do; all ranks then `meet`.

    Raises:
        DeviceError: The tensors are on another GPU than this rank's buffer.
        ExecutionError: There is not enough.
    """
    exchanges = _enabled.get(place.group)
    if exchanges is None or device.type != "cuda" or is_capturing():
        return None
    if device != exchanges.stream.device:
        expected = f"{exchanges.stream.device}, where this rank has enabled symmetric memory"
        raise DeviceError("q", str(device), expected, "Call torch.cuda.set_device before enable_symmetric_memory.")
    half = in_bytes * (place.ranks - 1)
    if half <= exchanges.met.buffer.half:
        return None
    step = 1 << max(20, half.bit_length() - 3)  # at most a quarter more, so that it rarely grows
    return _allocated(-(-half // step) * step, device)


def meet(place: Place, buffer: Buffer) -> None:
    """Takes a wider buffer, as all ranks do at the same time.

    Raises:
        DeviceError: The others do not reach it.
        OptionError: A rank has failed to.
    """

    def widen() -> tuple[str, None]:
        with _of_gpus_in_reach():
            _enabled[place.group].meet(buffer, place)
        return "wider", None

    in_agreement(place, "symmetric memory", widen)


def nbytes(place: Place) -> int:
    """Bytes of this rank's buffer."""
    exchanges = _enabled.get(place.group)
    return 0 if exchanges is None else 2 * exchanges.met.buffer.half


def start(sent: list[Message], coming: list[Message], place: Place) -> torch.cuda.Event | None:
    """Starts an exchange of tensors, contiguous or not, and gives the event after it; None: take another way."""
    exchanges = _enabled.get(place.group)
    if exchanges is None or not sent[0].tensor.is_cuda or is_capturing():
        return None
    return exchanges.start(sent, coming, place)


def _check_group(place: Place) -> None:
    """Refuses a group without GPUs, without NCCL, or where PyTorch's symmetric memory is another than CUDA's.

    Raises:
        DeviceError: It is one.
    """
    backends = dist.get_backend_config(place.group)
    if not torch.cuda.is_available() or "cuda:nccl" not in backends:
        devices = "" if torch.cuda.is_available() else " without GPUs"
        expected = "a group of GPUs with NCCL"
        raise DeviceError("group", f"{backends}{devices}", expected, "Its backend can send messages without it.")
    from torch.distributed import _symmetric_memory

    kind = _symmetric_memory.get_backend(torch.device("cuda"))
    if kind not in ("CUDA", None):
        expected = '"CUDA", whose barriers work'
        hint = "Call torch.distributed._symmetric_memory.set_backend, or unset TORCH_SYMMMEM, before any allocation."
        raise DeviceError("group", f"PyTorch's symmetric memory by {kind}", expected, hint)


@contextlib.contextmanager
def _of_gpus_in_reach() -> Iterator[None]:
    """Raises `DeviceError` for what PyTorch raises."""
    try:
        yield
    except RuntimeError as error:
        got = f"GPUs whose memory cannot be shared: {str(error).splitlines()[0]}"
        expected = "GPUs of one host, one for each rank, that reach each other's memory"
        raise DeviceError("group", got, expected) from error


def _connect(place: Place, device: torch.device) -> None:
    """Sends each rank a message by the backend, which makes its connections then, and cannot in a CUDA graph."""
    sent, coming = (torch.zeros(place.ranks, device=device) for _ in range(2))
    operations = []
    for distance in range(1, place.ranks):
        rank, other = (place.rank + distance) % place.ranks, place.neighbor(distance)
        operations.append(dist.P2POp(dist.isend, sent[rank], other, place.group))
        operations.append(dist.P2POp(dist.irecv, coming[rank], other, place.group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _allocated(half: int, device: torch.device) -> Buffer:
    from torch.distributed import _symmetric_memory

    empty: Any = _symmetric_memory.empty  # annotated with private types
    try:
        return Buffer(empty(2 * half, dtype=torch.uint8, device=device), half)
    except RuntimeError as error:
        raise ExecutionError(f"no symmetric memory of {2 * half} bytes on {device}: {error}") from error
