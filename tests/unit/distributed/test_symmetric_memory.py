"""Symmetric memory where there are no GPUs: who is refused, where messages would lie, and how large they are."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import symmetric_memory_checks as checks
import torch

from cudnn_sdpa import ExecutionError
from cudnn_sdpa.distributed import collectives, copies, parallel_attention, symmetric_memory
from cudnn_sdpa.distributed.groups import Place
from cudnn_sdpa.distributed.local_attention import Options
from cudnn_sdpa.distributed.symmetric_memory import ALIGNMENT, Message, _Exchanges


def test_ranks_without_gpus_are_refused(ranks):
    first, second = ranks(checks.refusals)
    assert "backend can send messages without it" in first
    assert first == second


@pytest.mark.parametrize("count", ["ranks", pytest.param("four_ranks", marks=pytest.mark.slow)])
def test_no_message_is_larger_than_foreseen(count, request):
    """The buffers are made before the first message; what did not fit would go by NCCL."""
    run = request.getfixturevalue(count)
    for found in run(checks.sent_and_foreseen):
        for sent, foreseen in found:
            assert sent <= foreseen - 3 * (ALIGNMENT - 1)  # each of three is rounded up
            assert foreseen <= 2 * sent + 3 * ALIGNMENT


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_sender_has_a_part_of_its_own(ranks):
    for receiver in range(ranks):
        parts = [symmetric_memory._index(sender, receiver) for sender in range(ranks) if sender != receiver]
        assert parts == list(range(ranks - 1))


def test_sender_and_receiver_find_messages_at_the_same_place():
    """Whatever strides they have; to one rank they lie one after the other, and the next rank's begin anew."""
    memory = torch.zeros(8192, dtype=torch.uint8)
    whole = torch.randn(2, 3, 4, 8).bfloat16()
    lse = torch.randn(2, 3, 4, 1)
    sent = [Message(whole[:, :, 1:3], 1), Message(whole, 0), Message(lse, 1), Message(whole[:, :, :1], 1)]
    for place, x in symmetric_memory._placed(memory, 512, sent, 1):
        assert place.data_ptr() % ALIGNMENT == memory.data_ptr() % ALIGNMENT
        place.copy_(x)
    results = torch.full((2, 3, 4, 8), torch.nan).bfloat16()
    coming = [Message(results[:, :, :2], 5), Message(torch.empty(2, 3, 4, 1), 5), Message(results[:, :, 3:], 5)]
    for place, x in symmetric_memory._placed(memory, 512, coming, 5):
        x.copy_(place)
    assert torch.equal(results[:, :, :2], whole[:, :, 1:3])
    assert torch.equal(coming[1].tensor, lse)
    assert torch.equal(results[:, :, 3:], whole[:, :, :1])
    used = 512 + symmetric_memory._bytes_of(sent, 1)
    assert not memory[:512].any()
    assert not memory[used:].any()
    assert used % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("change", "by_engines"),
    [
        (lambda x: x[:, :, :16], 1),  # some heads of all tokens: all rows at once
        (lambda x: x.flip(0)[:, :, :16], 1),
        (lambda x: x[:, :, :7], 0),  # narrow rows
        (lambda x: x[::2, :, :16], 2),  # chunks that lie apart
        (lambda x: x, 0),  # contiguous
        (lambda x: x[:, :1].expand(4, 6, 32, 128), 0),  # rows that are one, as gradients of a sum
        (lambda x: x[:, :, :16].transpose(2, 3), 0),
        (lambda x: x.as_strided((2, 3, 16, 128), (3 * 1024, 1024, 128, 1)), 0),  # rows that overlap
    ],
)
def test_what_copy_engines_are_given(change, by_engines, monkeypatch):
    """They need contiguous rows, which do not overlap; a fake that copies as they do has the same values."""
    found = []

    def copied(to, to_pitch, source, source_pitch, *, width, rows, stream):
        assert stream == 0
        assert width <= source_pitch
        assert width <= to_pitch
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, source + row * source_pitch, width)
        found.append(rows)
        return True

    monkeypatch.setattr(copies.backend, "copy_rows", copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    x = change(torch.randn(4, 6, 32, 128).bfloat16())
    to = torch.full(x.shape, torch.nan).bfloat16()
    copies.copy_to_peer(to, x)
    assert torch.equal(to, x)
    assert len(found) == by_engines


class Stream:
    """A stream of which another thread does what is enqueued, some time later."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.waiting = queue.SimpleQueue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        delays = random.Random(3)
        while (enqueued := self.waiting.get()) is not None:
            time.sleep(delays.random() * 1e-3)
            enqueued()

    def wait_stream(self, _):
        """Nothing else is enqueued elsewhere."""

    def record_event(self):
        event = threading.Event()
        self.waiting.put(event.set)
        return event


@pytest.fixture
def asynchronous(monkeypatch):
    """CUDA's streams are those of threads, of which each rank is one."""
    current = threading.local()

    @contextlib.contextmanager
    def within(stream):
        current.stream = stream
        yield

    def copied(to, x):
        current.stream.waiting.put(lambda: to.copy_(x))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(symmetric_memory, "copy", copied)
    monkeypatch.setattr(symmetric_memory, "copy_to_peer", copied)


def exchanges_of(ranks, half):
    """Those of each rank, whose buffers all can write to."""
    views = [torch.zeros(2 * half, dtype=torch.uint8) for _ in range(ranks)]
    barrier, found = threading.Barrier(ranks), []
    for _ in range(ranks):
        exchanges = object.__new__(_Exchanges)
        exchanges.stream, exchanges.count, exchanges.is_broken = Stream(), 0, False
        exchanges.lock, exchanges.timeout_ms = threading.Lock(), 0
        waits = lambda stream=exchanges.stream, **_: stream.waiting.put(barrier.wait)  # noqa: E731
        exchanges.met = SimpleNamespace(
            buffer=SimpleNamespace(half=half), views=views, memory=SimpleNamespace(barrier=waits)
        )
        found.append(exchanges)
    return found


def value(number, sender, receiver, message):
    return float((number * 7 + sender * 31 + receiver * 17 + message) % 251)


def numbers_that_come(exchanges, rank, ranks):
    """Many exchanges, one after the other without a pause: what each message had, and should have."""
    place, begun = Place(None, rank, ranks), []
    for number in range(60):
        sent = [Message(torch.full((2, 3, 5), value(number, rank, r, m)), r) for r in place.others for m in (0, 1)]
        coming = [Message(torch.zeros(2, 6, 5)[:, ::2], r) for r in place.others for _ in (0, 1)]
        begun.append((exchanges.start(sent, coming, place), coming))
    found = []
    for number, (event, coming) in enumerate(begun):
        assert event.wait(20)
        wanted = [value(number, r, rank, m) for r in place.others for m in (0, 1)]
        found += [(x.tensor.unique().tolist(), [like]) for x, like in zip(coming, wanted, strict=True)]
    exchanges.stream.waiting.put(None)
    return found


@pytest.mark.usefixtures("asynchronous")
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_one_barrier_for_each_exchange_is_enough(ranks):
    """The exchanges' own code, with threads for ranks, and for the GPUs that do later what it enqueues."""
    with ThreadPoolExecutor(ranks) as threads:
        runs = [
            threads.submit(numbers_that_come, exchanges, rank, ranks)
            for rank, exchanges in enumerate(exchanges_of(ranks, 1 << 13))
        ]
    for run in runs:
        assert len(run.result()) == 60 * 2 * (ranks - 1)
        for found, wanted in run.result():
            assert found == wanted


@pytest.mark.usefixtures("asynchronous")
def test_a_failed_exchange_is_the_last(monkeypatch):
    """The other ranks have begun it, so that later ones would be paired with others."""
    (exchanges, _) = exchanges_of(2, 1 << 13)
    place = Place(None, 0, 2)
    message = [Message(torch.zeros(2, 3, 5), 1)]
    large = [Message(torch.zeros(2, 1 << 10, 5), 1)]
    assert exchanges.start(large, large, place) is None
    assert exchanges.count == 0

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(symmetric_memory, "copy_to_peer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exchanges.start(message, message, place)
    for given in (message, large):
        with pytest.raises(ExecutionError, match="has failed on this rank before"):
            exchanges.start(given, given, place)


def test_an_interruption_leaves_no_exchange_without_its_tensors():
    """The stream waits, without the host: else the tensors were freed, and the exchange wrote to others'."""
    waited = []
    event = SimpleNamespace(wait=lambda: waited.append("the stream"))

    def interrupted():
        with collectives.settled():
            collectives.Pending(None, None, [collectives._Written(event)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert waited == ["the stream"]


def test_ranks_on_other_kinds_of_devices_differ():
    """A group may serve both: the one would wait for the other's messages."""
    place = Place(None, 0, 2)
    options = Options(
        place, is_causal=True, window=(-1, -1), scale=None, softcap=None, dropout_p=0.0, deterministic=False
    )
    summaries = [
        parallel_attention._summary("ring", options, (x, x, x), sinks=None, packing=None)
        for x in (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8, device="meta"))
    ]
    assert [text.split("; ")[1] for text in summaries] == ["device=cpu", "device=meta"]
