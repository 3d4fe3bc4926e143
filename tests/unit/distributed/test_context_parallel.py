"""Context parallelism: every method and option against float64 in one process, on two ranks, four and eight."""

from __future__ import annotations

import parallel_cases as cases
import pytest
import torch

from cudnn_sdpa.distributed.local_attention import Part, Span, split_at_diagonal

METHODS = ("all_gather", "ulysses", "ring")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", METHODS)
def test_values_and_gradients_are_those_of_one_process(ranks, method):
    for made in (cases.dense_cases(method), cases.packed_cases(method, ranks=2)):
        cases.check(ranks(cases.worst_of, made), len(made))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_with_four_ranks(four_ranks, method):
    """Two heads of keys are repeated for four ranks by "ulysses"."""
    for made in (cases.dense_cases(method), cases.packed_cases(method, ranks=4)):
        cases.check(four_ranks(cases.worst_of, made), len(made))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_with_eight_ranks(eight_ranks, method):
    made = cases.exchangeable([*cases.dense_cases(method), *cases.packed_cases(method, ranks=8)], 8)
    cases.check(eight_ranks(cases.worst_of, made), len(made))


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_some_heads_at_a_time(ranks, method):
    made = cases.cases_in_groups_of_heads(method)
    cases.check(ranks(cases.worst_in_groups_of_heads, made), len(made))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_cases_of_gpus(ranks, method):
    """In half precision, as tests/gpu runs them with NCCL."""
    made = cases.on_gpus([*cases.dense_cases(method), *cases.packed_cases(method, ranks=2)])
    cases.check(ranks(cases.worst_of, made), len(made))
    if method != "ring":
        made = cases.on_gpus(cases.cases_in_groups_of_heads(method))
        cases.check(ranks(cases.worst_in_groups_of_heads, made), len(made))


@pytest.mark.parametrize("method", ["all_gather", "ulysses"])
def test_gradients_have_the_random_numbers_of_the_output(ranks, method):
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for found in ranks(cases.errors_of_dropout, method, dtype):
            assert max(found) < bound


def test_parts_are_put_together(ranks):
    assert all(all(found) for found in ranks(cases.round_trip))


def chunk(begin, end, *, first=0, is_causal=True, window=(-1, -1)):
    """A chunk's attention to keys from the first one to its end."""
    span = Span(first, end)
    return Part(slice(0, end - begin), slice(*span), Span(begin, end), span, is_causal=is_causal, window=window)


def test_keys_before_a_chunk_are_apart_from_its_own():
    before, own = split_at_diagonal(chunk(12, 16))
    assert (before.columns, before.keys, before.is_causal) == (slice(0, 12), (0, 12), False)
    assert (own.columns, own.keys, own.queries, own.is_causal) == (slice(12, 16), (12, 16), (12, 16), True)
    assert before.rows == own.rows == slice(0, 4)


@pytest.mark.parametrize(
    "part",
    [chunk(0, 4), chunk(2, 6), chunk(12, 16, is_causal=False), chunk(12, 16, first=4, window=(8, -1))],
    ids=["first", "few keys before", "without a mask", "window"],
)
def test_other_parts_stay_whole(part):
    assert split_at_diagonal(part) == [part]


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_summed_in_float32(ranks, method, is_packed):
    """In bfloat16, 1 is lost beside 256 and comes not back when that is taken away; "ring" adds two terms at most."""
    found = ranks(cases.gradients_of_values_that_cancel, method, is_packed)
    if method != "ring" or is_packed:
        assert found[0] == 1.0
    else:
        assert found[0] in (0.0, 1.0)
