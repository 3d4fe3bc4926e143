"""Symmetric memory where there are no GPUs: who is refused, where messages would lie, and how large they are."""

from __future__ import annotations

import pytest
import symmetric_memory_checks as checks
import torch

from cudnn_sdpa.distributed import symmetric_memory
from cudnn_sdpa.distributed.symmetric_memory import ALIGNMENT, Message


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
            assert sent <= foreseen - 6 * (ALIGNMENT - 1)  # each of six is rounded up
            assert foreseen <= 2 * sent + 6 * ALIGNMENT


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_each_sender_has_a_part_of_its_own(ranks):
    for receiver in range(ranks):
        parts = [symmetric_memory._index(sender, receiver) for sender in range(ranks) if sender != receiver]
        assert parts == list(range(ranks - 1))


def test_sender_and_receiver_find_messages_at_the_same_place():
    """Whatever strides they have; to one rank they lie one after the other, and the next rank's begin anew."""
    memory = torch.zeros(8192, dtype=torch.uint8)
    whole = torch.randn(6, 4, 8).bfloat16()
    lse = torch.randn(3, 4, 1)
    sent = [Message(whole[:3, 1:3], 1), Message(whole[3:], 0), Message(lse, 1), Message(whole[3:, :1], 1)]
    for place, x in symmetric_memory._placed(memory, 512, sent, 1):
        assert place.data_ptr() % ALIGNMENT == memory.data_ptr() % ALIGNMENT
        place.copy_(x)
    results = torch.full((6, 4, 8), torch.nan).bfloat16()
    coming = [Message(results[:3, :2], 5), Message(torch.empty(3, 4, 1), 5), Message(results[3:, 3:], 5)]
    for place, x in symmetric_memory._placed(memory, 512, coming, 5):
        x.copy_(place)
    assert torch.equal(results[:3, :2], whole[:3, 1:3])
    assert torch.equal(coming[1].tensor, lse)
    assert torch.equal(results[3:, 3:], whole[3:, :1])
    used = 512 + symmetric_memory._bytes_of(sent, 1)
    assert not memory[:512].any()
    assert not memory[used:].any()
    assert used % ALIGNMENT == 0
