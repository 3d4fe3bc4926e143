"""Sequence lengths: data on the GPU, from 0 to the full length, right row by row."""

from __future__ import annotations

import pytest
import torch
from attention_checks import check, exact, make

import cudnn_sdpa

MASKS = {
    "full": {},
    "top-left": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
}


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", ["both", "q", "kv"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_prefill(layout, given, mask):
    q = make(layout, 7, 4, 100, 64, torch.bfloat16)
    k, v = (make(layout, 7, 2, 164, 64, torch.bfloat16) for _ in range(2))
    options = {}
    if given != "kv":
        options["seq_lens_q"] = lengths(100, 99, 57, 0, 63, 0, 1)
    if given != "q":
        options["seq_lens_kv"] = lengths(164, 50, 0, 77, 1, 0, 129)
    check(q, k, v, scale=0.2, **options, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("given", ["both", "q", "kv"])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(8, 8), (8, 2), (8, 1)])
def test_decode(heads_q, heads_kv, given, mask):
    q = make("bhsd", 6, heads_q, 1, 128, torch.float16)
    k, v = (make("bhsd", 6, heads_kv, 300, 128, torch.float16) for _ in range(2))
    options = {}
    if given != "kv":
        options["seq_lens_q"] = lengths(1, 1, 1, 0, 1, 0)
    if given != "q":
        options["seq_lens_kv"] = lengths(300, 37, 0, 5, 1, 0)
    check(q, k, v, scale=0.2, **options, **MASKS[mask])


@pytest.mark.parametrize("sq", [2, 5, 16])
def test_a_few_queries_on_a_cache(sq):
    """Speculative decoding: several queries aligned with the end of each sequence's cache."""
    q = make("bhsd", 4, 8, sq, 128, torch.bfloat16)
    k, v = (make("bhsd", 4, 2, 257, 128, torch.bfloat16) for _ in range(2))
    check(q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=lengths(257, sq, 100, 1))


def test_lengths_are_data():
    q = make("bhsd", 3, 8, 1, 64, torch.bfloat16)
    k, v = (make("bhsd", 3, 2, 128, 64, torch.bfloat16) for _ in range(2))
    steps = lengths(1, 50, 120)
    cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=steps)
    with cudnn_sdpa.no_plan_builds():
        for _ in range(8):
            out = cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=steps)
            torch.testing.assert_close(out.double(), exact(q, k, v, seq_lens_kv=steps)[0], atol=2e-2, rtol=2e-2)
            steps += 1


def test_lengths_beyond_the_tensor_are_clamped():
    """Memory past the end of k and v is neither read nor written."""
    big_q = make("bhsd", 2, 4, 80, 64, torch.bfloat16)
    big_k, big_v = (make("bhsd", 2, 4, 200, 64, torch.bfloat16) for _ in range(2))
    q, k, v = big_q[:, :, :50], big_k[:, :, :100], big_v[:, :, :100]
    big_k[:, :, 100:], big_v[:, :, 100:] = 30.0, 1000.0
    for x in (q, q[:, :, :1]):
        n = x.shape[2]
        for options in ({}, {"is_causal": True, "causal_alignment": "bottom_right"}):
            expected, _ = exact(x, k, v, **options)
            buffer = torch.full((2, 4, 80, 64), 7.0, device="cuda", dtype=torch.bfloat16)
            out = cudnn_sdpa.sdpa(
                x,
                k,
                v,
                seq_lens_kv=lengths(150, 101),
                seq_lens_q=lengths(n + 9, n + 1),
                out=buffer[:, :, :n],
                **options,
            )
            torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
            assert (buffer[:, :, n:] == 7.0).all()


def test_lengths_at_any_address():
    """A slice of a larger tensor of lengths is only aligned to 4 bytes."""
    q = make("bhsd", 3, 4, 40, 64, torch.bfloat16)
    k, v = (make("bhsd", 3, 4, 70, 64, torch.bfloat16) for _ in range(2))
    many = lengths(9, 33, 70, 12, 55)
    for start in range(3):
        check(q, k, v, seq_lens_kv=many[start : start + 3])
        check(q[:, :, :1], k, v, seq_lens_kv=many[start : start + 3])


@pytest.mark.parametrize("rubbish", [3e38, -1e30, 12345.0])
def test_values_past_the_length_do_not_leak(rubbish):
    """Finite values past a sequence's end in a cache do not affect the result."""
    k, v = (make("bhsd", 2, 2, 200, 64, torch.bfloat16) for _ in range(2))
    ends = lengths(77, 130)
    for b, end in enumerate(ends.tolist()):
        k[b, :, end:] = rubbish
        v[b, :, end:] = rubbish
    for sq in (1, 3, 64):
        q = make("bhsd", 2, 4, sq, 64, torch.bfloat16)
        out = cudnn_sdpa.sdpa(q, k, v, seq_lens_kv=ends)
        expected, _ = exact(q, k, v, seq_lens_kv=ends)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_more_queries_than_keys_aligned_at_each_sequences_last_key():
    q = make("bhsd", 3, 4, 60, 64, torch.bfloat16)
    k, v = (make("bhsd", 3, 4, 40, 64, torch.bfloat16) for _ in range(2))
    check(q, k, v, is_causal=True, causal_alignment="bottom_right", seq_lens_kv=lengths(40, 13, 0))
