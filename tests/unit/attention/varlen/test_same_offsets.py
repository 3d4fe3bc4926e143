"""Offsets with the same numbers in two tensors."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa.attention.varlen.same_offsets import of_keys


def offsets(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_the_same_numbers_are_those_of_the_queries():
    q = offsets(0, 3, 9)
    assert of_keys(q, q) is q
    same = q.clone()
    assert of_keys(q, same) is q
    assert of_keys(q, same) is q
    for other in (offsets(0, 4, 9), offsets(0, 3, 9, 9)):
        assert of_keys(q, other) is other


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_later_is_read_again(mode):
    with mode():
        q, kv = offsets(0, 3, 9), offsets(0, 3, 9)
        assert of_keys(q, kv) is q
        kv[1] = 4
        assert of_keys(q, kv) is kv
        q.copy_(kv)
        assert of_keys(q, kv) is q


def test_compiled_code_reads_nothing():
    @torch.compile(backend="eager", fullgraph=True)
    def f(q, kv):
        return of_keys(q, kv) is kv, q + kv

    is_that_of_keys, _ = f(offsets(0, 3), offsets(0, 3))
    assert is_that_of_keys
