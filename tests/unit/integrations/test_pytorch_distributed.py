"""PyTorch's DTensor rules, ring attention and context parallelism over this library's kernels, in several processes."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention",
    reason="this PyTorch's context parallelism has another interface",
)

import pytorch_ring as ring

PARTS = {ring.shard_operators: 3, ring.rotate: 8, ring.in_context: 1}


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", PARTS)
def test_two_processes_agree_with_one(ranks, part):
    assert ranks(ring.run, part) == [PARTS[part]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_four_processes_agree_with_one(four_ranks, part):
    assert four_ranks(ring.run, part) == [PARTS[part]] * 4
