"""Random combinations of all options, with gradients, against float64 mathematics."""

from __future__ import annotations

import math

import torch
from checks import assert_right
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def calls(draw):
    """Inputs in any memory order, and any combination of options."""
    batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sq, skv = draw(st.integers(1, 8)), draw(st.integers(0, 8))
    dim, dim_v = 8 * draw(st.integers(1, 2)), 8 * draw(st.integers(1, 2))
    heads = heads_kv * group
    generator = torch.Generator().manual_seed(draw(st.integers(2, 2**31)))

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def tensor(*shape):
        order = draw(st.permutations(range(3)))
        dense = random(*(shape[i] for i in order), shape[3])
        return dense.permute(*(order.index(i) for i in range(3)), 3)

    def lengths(longest):
        values = st.lists(st.integers(0, longest), min_size=batch, max_size=batch)
        return torch.tensor(draw(values), dtype=torch.int32)

    tensors = {
        "q": tensor(batch, heads, sq, dim),
        "k": tensor(batch, heads_kv, skv, dim),
        "v": tensor(batch, heads_kv, skv, dim_v),
    }
    kind = draw(st.sampled_from(["none", "bool", "float", "-inf"]))
    if kind != "none":
        shape = [n if draw(st.booleans()) else 1 for n in (batch, heads, sq, skv)][draw(st.integers(0, 4)) :]
        mask, hidden = random(*shape), torch.rand(shape, generator=generator) < 0.3
        mask = mask.masked_fill(hidden, -math.inf) if kind == "-inf" else mask
        tensors["attn_mask"] = ~hidden if kind == "bool" else mask
    if draw(st.booleans()):
        tensors["sinks"] = random(heads).float() * 2
    for name, size in (("seq_lens_q", sq), ("seq_lens_kv", skv)):
        if draw(st.integers(0, 3)) == 0:
            tensors[name] = lengths(size)
    bound = st.integers(-1, 5)
    options = {
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "window": draw(st.none() | st.tuples(bound, bound)),
        "scale": draw(st.none() | st.floats(-1.5, 1.5)),
        "softcap": draw(st.none() | st.floats(0.3, 9.0)),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])),
    }
    if options["causal_alignment"] == "top_left":
        options["alibi"] = draw(st.booleans())
    return tensors, options


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_any_combination_has_the_right_values_and_gradients(call):
    tensors, options = call
    found = assert_right(tensors, **options)
    assert not any(x.isnan().any() for x in found.values())
