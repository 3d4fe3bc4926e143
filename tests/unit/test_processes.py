"""The processes that tests of several ranks share."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from processes import RankError, Ranks


def summed(number):
    tensor = torch.full((2,), number * (1 + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.tolist(), torch.rand(1).item()


def fails_on(rank):
    if dist.get_rank() == rank:
        raise LookupError("on purpose")
    dist.barrier()


def ends_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)


def test_functions_run_in_all_ranks(ranks):
    """With the same random numbers, and again after one has failed or has ended, which does not take long."""
    (first, one), (second, other) = ranks(summed, 3)
    assert first == second == [9, 9]
    assert one == other


@pytest.mark.slow
def test_failures_are_told_and_the_next_call_starts_anew():
    ranks = Ranks(2)
    try:
        for function, message in ((fails_on, "on purpose"), (ends_on, "ended with 3")):
            with pytest.raises(RankError, match=rf"rank 1:(.|\n)*{message}"):
                ranks(function, 1)
            assert ranks(summed, 1)[0][0] == [3, 3]
    finally:
        ranks.end()
