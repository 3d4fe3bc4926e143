"""Context parallelism: every method and option against float64 in one process, on two ranks and on four."""

from __future__ import annotations

from typing import Any

import parallel_cases as cases
import pytest
import torch

HEADS = ((4, 4), (8, 2))


def dense_cases(method: str, ranks: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for name, options in cases.DENSE.items():
        if method == "ring" and "window_size" in options:
            continue
        found += [(method, options, heads, torch.float32) for heads in HEADS]
        if name in ("causal", "sinks"):
            found += [(method, options, HEADS[1], torch.float64), (method, options, HEADS[0], torch.bfloat16)]
    assert ranks <= 4
    return found


def packed_cases(method: str, ranks: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for options in cases.PACKED.values():
        if method == "ring" and "window_size" in options:
            continue
        packings = cases.packings(8 * ranks).values()
        found += [(method, options, HEADS[1], torch.float32, lengths) for lengths in packings]
    return found


def check(found: list[list[tuple[float, str, Any]]], number: int) -> None:
    """All errors of all ranks are those of rounding."""
    assert [len(of_rank) for of_rank in found] == [number] * len(found)
    for error, name, case in (one for of_rank in found for one in of_rank):
        bound = {torch.float32: 2e-5, torch.float64: 1e-5, torch.bfloat16: 2e-2}[case[3]]
        assert error < bound, (error, name, case)


@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("kind", [dense_cases, packed_cases])
def test_values_and_gradients_are_those_of_one_process(ranks, method, kind):
    made = kind(method, 2)
    check(ranks(cases.worst_of, made), len(made))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
@pytest.mark.parametrize("kind", [dense_cases, packed_cases])
def test_the_same_with_four_ranks(four_ranks, method, kind):
    """Two heads of keys are repeated for four ranks by "ulysses"."""
    made = kind(method, 4)
    check(four_ranks(cases.worst_of, made), len(made))


def test_some_heads_at_a_time(ranks):
    made = [("all_gather", options, (8, 4), torch.float32) for options in cases.DENSE.values()]
    made += [("all_gather", cases.PACKED["window"], (8, 2), torch.float32, [7, 9])]
    check(ranks(cases.worst_in_groups_of_heads, made), len(made))


def test_parts_are_put_together(ranks):
    assert all(all(found) for found in ranks(cases.round_trip))
