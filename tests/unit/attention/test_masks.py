"""`normalize_mask` against materialized masks: it keeps the mask, and equal masks get one form."""

from __future__ import annotations

import itertools

import pytest
from float64_reference import sees

from cudnn_sdpa.attention.mask import ALIGNMENTS, Mask, normalize_mask

SIZES = list(itertools.product(range(1, 6), range(1, 6)))
BOUNDS = [-1, 0, 1, 2, 3, 6]
CALLS = [
    (is_causal, alignment, (left, right))
    for is_causal in (False, True)
    for alignment in ALIGNMENTS
    for left in BOUNDS
    for right in BOUNDS
]


def rows(is_causal, alignment, window_size, sq, skv, nq=None, nk=None):
    options = {"is_causal": is_causal, "causal_alignment": alignment, "window_size": window_size}
    nq, nk = sq if nq is None else nq, skv if nk is None else nk
    return [[sees(i, j, nq, nk, options) for j in range(skv)] for i in range(sq)]


def drawn(mask: Mask, sq, skv, nq=None, nk=None):
    rest = sq - mask.masked_rows
    nq, nk = rest if nq is None else nq, skv if nk is None else nk
    left, right, bottom_right = mask.band or (None, None, False)
    result = [[False] * skv for _ in range(mask.masked_rows)]
    for i in range(rest):
        diagonal = i + (nk - nq if bottom_right else 0)
        result.append(
            [
                i < nq
                and j < nk
                and (left is None or j >= diagonal - left)
                and (right is None or j <= diagonal + right)
                for j in range(skv)
            ]
        )
    return result


@pytest.mark.parametrize("top_left_only", [False, True])
@pytest.mark.parametrize("keep_causal", [False, True])
def test_normalization_keeps_the_mask(top_left_only, keep_causal):
    for (sq, skv), call in itertools.product(SIZES, CALLS):
        mask = normalize_mask(*call, sq, skv, top_left_only=top_left_only, keep_causal=keep_causal)
        assert drawn(mask, sq, skv) == rows(*call, sq, skv), (call, sq, skv, mask)


def test_normalization_keeps_the_mask_for_any_lengths():
    sizes = list(itertools.product(range(1, 5), repeat=2))
    for (sq, skv), call in itertools.product(sizes, CALLS):
        mask = normalize_mask(*call, sq, skv, has_lengths=True)
        for nq, nk in itertools.product(range(sq + 1), range(skv + 1)):
            assert drawn(mask, sq, skv, nq, nk) == rows(*call, sq, skv, nq, nk), (call, sq, skv, nq, nk, mask)
        assert mask.masked_rows == 0  # the lengths decide which rows are fully masked


def test_masked_rows_are_exactly_those_hidden_by_the_right_bound():
    for (sq, skv), call in itertools.product(SIZES, CALLS):
        mask = normalize_mask(*call, sq, skv)
        seen = [any(row) for row in rows(*call, sq, skv)]
        assert not any(seen[: mask.masked_rows])
        right = 0 if call[0] else call[2][1]
        if right >= 0 and mask.masked_rows < sq:  # the next row's right end is within the keys
            shift = skv - sq if call[1] == "bottom_right" else 0
            assert mask.masked_rows + shift + right >= 0


@pytest.mark.parametrize("top_left_only", [False, True])
def test_a_normalized_mask_stays_as_it_is(top_left_only):
    for (sq, skv), call in itertools.product(SIZES, CALLS):
        mask = normalize_mask(*call, sq, skv, top_left_only=top_left_only)
        if mask.masked_rows == sq:
            continue
        left, right, bottom_right = mask.band or (None, None, False)
        if (left or 0) < 0 or (right or 0) < 0:
            continue  # no window expresses this
        again = normalize_mask(
            False,
            "bottom_right" if bottom_right else "top_left",
            (-1 if left is None else left, -1 if right is None else right),
            sq - mask.masked_rows,
            skv,
            top_left_only=top_left_only,
        )
        assert again == Mask(mask.band, 0), (call, sq, skv, mask)


def test_masks_that_hide_nothing_become_none():
    for (sq, skv), call in itertools.product(SIZES, CALLS):
        if all(map(all, rows(*call, sq, skv))):
            assert normalize_mask(*call, sq, skv) == Mask(), (call, sq, skv)


def test_bounds_that_hide_keys_are_kept():
    for (sq, skv), call in itertools.product(SIZES, CALLS):
        mask = normalize_mask(*call, sq, skv)
        left, right, bottom_right = mask.band or (None, None, False)
        seen = drawn(mask, sq, skv)
        for less in ((None, right), (left, None)):
            if less != (left, right) and mask.masked_rows < sq:
                assert drawn(Mask((*less, bottom_right), mask.masked_rows), sq, skv) != seen or not any(map(any, seen))


@pytest.mark.parametrize("top_left_only", [False, True])
def test_equivalent_bounds_normalize_to_the_same_mask(top_left_only):
    for sq, skv in SIZES:

        def mask(is_causal, alignment, window_size, size=(sq, skv)):
            return normalize_mask(is_causal, alignment, window_size, *size, top_left_only=top_left_only)

        for alignment, left in itertools.product(ALIGNMENTS, BOUNDS):
            causal = mask(True, alignment, (left, -1))
            assert all(mask(True, alignment, (left, right)) == causal for right in BOUNDS)
            assert mask(False, alignment, (left, 0)) == causal
        if sq == skv:
            for is_causal, left, right in itertools.product((False, True), BOUNDS, BOUNDS):
                both = {mask(is_causal, alignment, (left, right)) for alignment in ALIGNMENTS}
                assert len(both) == 1


def test_named_examples():
    causal, window_size = (True, "bottom_right", (-1, -1)), (False, "top_left", (3, -1))
    assert normalize_mask(*causal, 1, 9) == Mask()
    assert normalize_mask(*causal, 4, 9) == Mask((None, 0, True))
    assert normalize_mask(*causal, 4, 9, top_left_only=True) == Mask((None, 5, False))
    assert normalize_mask(*causal, 9, 4) == Mask((None, 0, False), 5)
    assert normalize_mask(*causal, 9, 4, has_lengths=True) == Mask((None, 0, True))
    assert normalize_mask(True, "top_left", (-1, -1), 1, 1, keep_causal=True) == Mask((None, 0, False))
    assert normalize_mask(*window_size, 4, 9) == Mask()
    assert normalize_mask(*window_size, 5, 9) == Mask((3, None, False))
    assert normalize_mask(False, "bottom_right", (3, -1), 2, 9, top_left_only=True) == Mask((-4, None, False))
