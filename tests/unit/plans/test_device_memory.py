"""Small device tensors that outlive a call, with host memory in place of GPU memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import device_memory
from tests.threads import in_threads

LAYOUT = TensorLayout.contiguous((2, 3, 1), torch.int32)


@pytest.fixture(autouse=True)
def memory_of_this_machine(monkeypatch):
    monkeypatch.setattr(device_memory, "_arenas", {})
    monkeypatch.setattr(device_memory, "_constants", {})
    monkeypatch.setattr(device_memory, "private_memory", lambda _, size: torch.full((size,), 77, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))


def test_threads_share_one_constant_of_the_right_values():
    first, *others = in_threads(lambda _: device_memory._constant(0, LAYOUT, 7), 4, seconds=10)
    assert all(other is first for other in others)
    assert first.shape == (2, 3, 1)
    assert first.dtype == torch.int32
    assert first.unique().tolist() == [7]


def test_constants_of_other_values_devices_and_layouts_have_separate_memory():
    kinds = [(0, LAYOUT, 7), (0, LAYOUT, 9), (1, LAYOUT, 7), (0, TensorLayout.contiguous((2, 3, 1), torch.int64), 7)]
    tensors = [device_memory._constant(*kind) for kind in kinds]
    assert [tensor.unique().tolist() for tensor in tensors] == [[7], [9], [7], [7]]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(kinds)


def test_memory_is_aligned_and_not_shared():
    one, other = (device_memory.take_memory(0, size) for size in (300, 5))
    assert (one.numel(), other.numel()) == (512, 256)
    one.fill_(1)
    other.fill_(2)
    assert one.unique().tolist() == [1]
    assert other.unique().tolist() == [2]


def test_memory_that_is_taken_while_more_is_allocated_is_not_shared(monkeypatch):
    """By a finalizer or a signal's handler on the same thread, and on the one that allocates."""
    allocate, taken = device_memory.private_memory, []

    def nested(_: object = None) -> None:
        taken.append(device_memory.take_memory(0, 256))

    def calls_first(device, size):
        monkeypatch.setattr(device_memory, "private_memory", allocate)
        nested()
        in_threads(nested, 1, seconds=10)
        return allocate(device, size)

    monkeypatch.setattr(device_memory, "private_memory", calls_first)
    for _ in range(3):
        nested()
    assert len(taken) == 5
    assert len({tensor.data_ptr() for tensor in taken}) == 5
    kept = [device_memory.take_memory(0, device_memory.CHUNK) for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in (*taken, *kept)}) == 7


class Event:
    """An event that notes which streams wait for it."""

    def __init__(self):
        self.recorded, self.waiting, self.synchronized = 0, [], 0

    def record(self):
        self.recorded += 1

    def wait(self, stream):
        self.waiting.append(stream)

    def synchronize(self):
        self.synchronized += 1


def test_tables_are_read_on_another_stream_after_they_are_written(monkeypatch):
    """Its launches wait for the kernels that write them, once, and keep the memory until they have read it."""
    event, current, users = Event(), ["first"], []
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: users.append(stream))
    table = torch.randint(9, (3, 5), dtype=torch.int32)
    tables = device_memory.DeviceTables({"a": table, "b": table[:2] + 1}, device=0, stream=1)
    assert (event.recorded, event.waiting, users) == (1, [], ["first"])
    for name, wanted in (("a", table), ("b", table[:2] + 1)):
        stored = (ctypes.c_int32 * wanted.numel()).from_address(tables.addresses[name])
        assert list(stored) == wanted.flatten().tolist()
    tables.prepare(1)
    assert (event.waiting, users) == ([], ["first"])
    for number, name in ((2, "second"), (3, "third"), (2, "second")):
        current[0] = name
        tables.prepare(number)
    assert event.waiting == ["second", "third"]
    assert users == ["first", "second", "third"]
    assert event.synchronized == 0
