"""Sequence lengths: data on the GPU, from 0 to the full length, right row by row."""

from __future__ import annotations

import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


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


#: Calls with some queries that see no key: numbers of queries, and options for them.
WITHOUT_KEYS = {
    "lengths of keys": ((1, 64), lambda _: {"seq_lens_kv": lengths(0, 96, 33)}),
    "lengths of queries": ((1, 64), lambda sq: {"seq_lens_q": lengths(sq, 0, sq // 2)}),
    "boolean mask": ((1, 64), lambda sq: {"attn_mask": mask_of_every_second_query(sq)}),
    "mask of minus infinity": ((1, 64), lambda sq: {"attn_mask": mask_of_every_second_query(sq).float().log()}),
    "window behind the keys": ((160,), lambda _: {"is_causal": True, "window_size": (10, 0)}),
    "causal, more queries than keys": ((160,), lambda _: {"is_causal": True, "causal_alignment": "bottom_right"}),
}


def mask_of_every_second_query(sq: int) -> torch.Tensor:
    mask = torch.rand(3, 1, sq, 96, device="cuda") < 0.7
    mask[1, :, ::2] = False
    return mask


@pytest.mark.parametrize(("name", "sq"), [(name, sq) for name, (counts, _) in WITHOUT_KEYS.items() for sq in counts])
def test_the_lse_of_a_query_without_keys_is_its_sink(name, sq):
    """Plans that read the sinks may write minus infinity there, and so do plans whose sinks are applied afterwards."""
    q = make("bshd", 3, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 3, 2, 96, 64, torch.bfloat16) for _ in range(2))
    given = {"sinks": torch.randn(4, device="cuda") + 0.5, **WITHOUT_KEYS[name][1](sq)}
    wanted, wanted_lse = exact(q, k, v, **given)
    sees_none = wanted_lse == given["sinks"].double().view(1, -1, 1)
    assert sees_none.any()
    for _ in range(3):
        out, lse = cudnn_sdpa.sdpa(q, k, v, **given, return_lse=True)
        assert not out[sees_none].any()
        assert error(out, wanted) < TOLERANCE[torch.bfloat16]
        assert lse.isfinite().all()
        assert error(lse, wanted_lse) < 1e-4
        assert error(cudnn_sdpa.sdpa(q, k, v, **given), wanted) < TOLERANCE[torch.bfloat16]
