"""Random configurations of `sdpa` on CPU tensors against attention written row by row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_sdpa import sdpa


@st.composite
def calls(draw):
    """Inputs in any memory order, and options."""
    batch, heads_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sq, skv = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    dim, dim_v = 8 * draw(st.integers(1, 3)), 8 * draw(st.integers(1, 3))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(2, 2**31)))

    def tensor(*shape):
        order = draw(st.permutations(range(3)))
        sizes = [shape[i] for i in order]
        padding = draw(st.integers(0, 2))
        dense = torch.randn(*sizes, shape[3] + 8 * padding, dtype=torch.float64, generator=generator)
        return dense[..., : shape[3]].permute(*(order.index(i) for i in range(3)), 3).to(dtype)

    def lengths(longest):
        values = st.lists(st.integers(0, longest), min_size=batch, max_size=batch)
        drawn = draw(st.none() | values)
        return None if drawn is None else torch.tensor(drawn, dtype=torch.int32)

    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "scale": draw(st.none() | st.floats(-2.0, 2.0)),
        "seq_lens_q": lengths(sq),
        "seq_lens_kv": lengths(skv),
    }
    q = tensor(batch, heads_kv * group, sq, dim)
    k, v = tensor(batch, heads_kv, skv, dim), tensor(batch, heads_kv, skv, dim_v)
    return q, k, v, options


@settings(max_examples=120, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_any_configuration_matches_rows_computed_one_by_one(expected_attention, assert_rounded, call):
    q, k, v, options = call
    out, lse = sdpa(q, k, v, return_lse=True, **options)
    expected_out, expected_lse = expected_attention(q, k, v, **options)
    assert_rounded(out, expected_out)
    assert_rounded(lse, expected_lse)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_out_receives_what_is_returned_otherwise(call):
    q, k, v, options = call
    expected = sdpa(q, k, v, **options)
    out = torch.full(expected.shape, torch.nan, dtype=expected.dtype)
    assert sdpa(q, k, v, out=out, **options) is out
    assert torch.equal(out, expected)
