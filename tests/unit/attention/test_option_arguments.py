"""Wrong masks, sinks, windows, dropout and other options: typed errors that name the argument and what is expected."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from fake_gpu import TARGET
from refusals import assert_refused

from cudnn_sdpa import (
    ArgumentError,
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    scaled_dot_product_attention,
    sdpa,
    sdpa_varlen,
)
from cudnn_sdpa.attention import arguments as checks
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.attention.dense.specs import ForwardSpec

R, Z = torch.randn, torch.empty
QKV = {"q": R(2, 4, 8, 16), "k": R(2, 2, 12, 16), "v": R(2, 2, 12, 24)}
FULL = "(B, Hq, Sq, Skv) = (2, 4, 8, 12)"
WINDOW = "two integers (left, right)"
SHARE = "a number from 0 up to, not including, 1"

WRONG = {
    # name: (changes, error, part of what the argument got, part of what was expected)
    "mask of other queries": ({"attn_mask": R(9, 12)}, ShapeError, "(9, 12)", FULL),
    "mask of other keys": ({"attn_mask": R(8, 11)}, ShapeError, "(8, 11)", FULL),
    "mask of other heads": ({"attn_mask": R(2, 1, 1)}, ShapeError, "(2, 1, 1)", FULL),
    "mask of other batch": ({"attn_mask": R(3, 1, 1, 12)}, ShapeError, "(3, 1, 1, 12)", FULL),
    "mask of rank 5": ({"attn_mask": R(1, 2, 4, 8, 12)}, ShapeError, "(1, 2, 4, 8, 12)", FULL),
    "mask transposed": ({"attn_mask": R(12, 8)}, ShapeError, "(12, 8)", FULL),
    "empty mask": ({"attn_mask": R(8, 0)}, ShapeError, "(8, 0)", FULL),
    "mask of integers": ({"attn_mask": Z(8, 12).int()}, DtypeError, "int32", "bool or float32"),
    "mask in half": ({"attn_mask": R(8, 12).half()}, DtypeError, "float16", "bool or float32"),
    "mask in double": ({"attn_mask": R(8, 12).double()}, DtypeError, "float64", "bool or float32"),
    "mask elsewhere": ({"attn_mask": Z(8, 12, device="meta")}, DeviceError, "meta", "cpu, the device of q"),
    "mask is a list": ({"attn_mask": [[True]]}, OptionError, "list", "a torch.Tensor or None"),
    "mask is a word": ({"attn_mask": "causal"}, OptionError, "str", "a torch.Tensor or None"),
    "sparse mask": ({"attn_mask": R(8, 12).to_sparse()}, LayoutError, "sparse", "a dense tensor"),
    "too many sinks": ({"sinks": R(8)}, ShapeError, "(8,)", "shape (4,): one score per head of q"),
    "sinks of the keys' heads": ({"sinks": R(2)}, ShapeError, "(2,)", "shape (4,)"),
    "sinks of rank 2": ({"sinks": R(1, 4)}, ShapeError, "(1, 4)", "shape (4,)"),
    "one sink": ({"sinks": torch.tensor(0.5)}, ShapeError, "()", "shape (4,)"),
    "sinks in double": ({"sinks": R(4).double()}, DtypeError, "float64", "float32"),
    "sinks elsewhere": ({"sinks": Z(4, device="meta")}, DeviceError, "meta", "cpu, the device of q"),
    "sinks strided": ({"sinks": R(8)[::2]}, LayoutError, "stride 2", "a dense tensor"),
    "sinks expanded": ({"sinks": R(1).expand(4)}, LayoutError, "stride 0", "a dense tensor"),
    "sinks is a list": ({"sinks": [0.5] * 4}, OptionError, "list", "a torch.Tensor or None"),
    "sinks is a number": ({"sinks": 0.5}, OptionError, "float", "a torch.Tensor or None"),
    "dropout below 0": ({"dropout_p": -0.1}, OptionError, "-0.1", SHARE),
    "dropout of all": ({"dropout_p": 1.0}, OptionError, "1.0", SHARE),
    "dropout of 1": ({"dropout_p": 1}, OptionError, "1", SHARE),
    "dropout in percent": ({"dropout_p": 10}, OptionError, "10", SHARE),
    "dropout NaN": ({"dropout_p": math.nan}, OptionError, "nan", SHARE),
    "dropout inf": ({"dropout_p": math.inf}, OptionError, "inf", SHARE),
    "dropout is a bool": ({"dropout_p": True}, OptionError, "bool", SHARE),
    "dropout is None": ({"dropout_p": None}, OptionError, "NoneType", SHARE),
    "dropout is text": ({"dropout_p": "0.1"}, OptionError, "str", SHARE),
    "dropout is a tensor": ({"dropout_p": torch.tensor(0.1)}, OptionError, "Tensor", SHARE),
    "softcap 0": ({"softcap": 0.0}, OptionError, "0.0", "at least 1e-18, or None for no soft-capping"),
    "softcap beyond use": ({"softcap": 3e38}, OptionError, "3e+38", "of at most 1e+18 in size"),
    "softcap below use": ({"softcap": 1e-30}, OptionError, "1e-30", "a positive number of at least 1e-18"),
    "softcap negative": ({"softcap": -30.0}, OptionError, "-30.0", "a positive number"),
    "softcap NaN": ({"softcap": math.nan}, OptionError, "nan", "a finite float32 number"),
    "softcap inf": ({"softcap": math.inf}, OptionError, "inf", "a finite float32 number"),
    "softcap is a bool": ({"softcap": True}, OptionError, "bool", "a float, or None for no soft-capping"),
    "softcap is text": ({"softcap": "30"}, OptionError, "str", "a float, or None for no soft-capping"),
    "softcap is a tensor": ({"softcap": torch.tensor(3.0)}, OptionError, "Tensor", "a float"),
    "one bound": ({"window_size": (3,)}, OptionError, "(3,)", WINDOW),
    "three bounds": ({"window_size": (3, 2, 1)}, OptionError, "(3, 2, 1)", WINDOW),
    "window is a number": ({"window_size": 3}, OptionError, "3", WINDOW),
    "window is a tensor of no dimension": ({"window_size": torch.tensor(3)}, OptionError, "tensor(3)", WINDOW),
    "no bounds": ({"window_size": ()}, OptionError, "()", WINDOW),
    "window of floats": ({"window_size": (3.0, 0)}, OptionError, "(3.0, 0)", WINDOW),
    "window of bools": ({"window_size": (3, True)}, OptionError, "(3, True)", WINDOW),
    "window of None": ({"window_size": (3, None)}, OptionError, "(3, None)", WINDOW),
    "window below -1": ({"window_size": (-2, 0)}, OptionError, "(-2, 0)", WINDOW),
    "window below -1 to the right": ({"window_size": (0, -2)}, OptionError, "(0, -2)", WINDOW),
    "window of two letters": ({"window_size": "ab"}, OptionError, "('a', 'b')", WINDOW),
    "window is a bool": ({"window_size": False}, OptionError, "False", WINDOW),
    "alibi=1": ({"alibi": 1}, OptionError, "1", "True or False"),
    "alibi=None": ({"alibi": None}, OptionError, "None", "True or False"),
    "alibi as slopes": ({"alibi": R(4)}, OptionError, "tensor", "True or False"),
    "deterministic=1": ({"deterministic": 1}, OptionError, "1", "True, False, or None"),
    "deterministic is text": ({"deterministic": "warn"}, OptionError, "warn", "True, False, or None"),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_named_with_what_was_expected(case, requires_grad):
    changes, kind, got, expected = WRONG[case]
    call = {**{name: x.detach().requires_grad_(requires_grad) for name, x in QKV.items()}, **changes}
    assert_refused(lambda: sdpa(**call), kind, *changes, got, expected)


@pytest.mark.parametrize(
    ("case", "hint"),
    [
        ("mask of integers", "attn_mask.to(q.dtype)"),
        ("sinks in double", "sinks.to(torch.float32)"),
        ("sinks strided", "sinks.contiguous()"),
        ("alibi as slopes", "attn_mask"),
        ("softcap is a tensor", "softcap.item()"),
        ("sparse mask", "attn_mask.to_dense()"),
    ],
)
def test_errors_suggest_a_remedy(case, hint):
    with pytest.raises(ArgumentError) as caught:
        sdpa(**{**QKV, **WRONG[case][0]})
    assert hint in caught.value.hint
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "right",
    [
        *({"window_size": [3, 1]}, {"window_size": torch.Size([3, 1])}, {"window_size": (-1, -1)}, {"dropout_p": 0}),
        *({"softcap": 3}, {"softcap": 1e-3}, {"dropout_p": 0.999}, {"deterministic": None}, {"deterministic": True}),
        *(
            {"attn_mask": R(())},
            {"attn_mask": R(2, 4, 8, 12) > 0},
            {"sinks": R(4, 1)[:, 0]},
            {"window_size": (2**40, 0)},
        ),
        *({"window_size": (2**70, 0)}, {"window_size": (np.int64(3), np.int32(1))}, {"window_size": (np.int64(-1), 0)}),
    ],
    ids="+".join,
)
def test_options_at_their_limits(right):
    result = sdpa(**{**QKV, **right})
    assert result.shape == (2, 4, 8, 24)
    assert result.isfinite().all()


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("bound", [2**31, 2**63 - 1, 2**63, 2**70])
def test_a_bound_beyond_all_lengths_is_unbounded(bound, alignment):
    wide, none = (
        sdpa(**QKV, window_size=window_size, causal_alignment=alignment) for window_size in ((bound, bound), (-1, -1))
    )
    assert torch.equal(wide, none)
    right, none = (
        sdpa(**QKV, window_size=window_size, causal_alignment=alignment) for window_size in ((2, bound), (2, -1))
    )
    assert torch.equal(right, none)


@pytest.mark.parametrize("bound", [np.float32(1), np.bool_(True), torch.tensor(1), 1j, "1", -(2**70)], ids=repr)
def test_a_non_integer_bound_is_refused(bound):
    for window_size in ((bound, 0), (0, bound)):
        with pytest.raises(OptionError, match="window_size: got"):
            sdpa(**QKV, window_size=window_size)


def test_a_float32_mask_with_half_precision_inputs():
    q, k, v = (x.half() for x in QKV.values())
    mask = R(8, 12)
    torch.testing.assert_close(
        sdpa(q, k, v, attn_mask=mask), sdpa(q, k, v, attn_mask=mask.half()), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("rng", "error", "got"),
    [
        (None, OptionError, "None"),
        (torch.tensor([3, 5], dtype=torch.int32), DtypeError, "int32"),
        (torch.tensor([3, 5, 7]), ShapeError, "(3,)"),
        (torch.tensor([3, 5, 7, 9])[::2], LayoutError, "stride 2"),
        (torch.empty(2, dtype=torch.int64, device="meta"), DeviceError, "meta"),
    ],
    ids=["none", "dtype", "size", "stride", "device"],
)
def test_the_state_of_dropout_is_checked_by_the_operator(rng, error, got):
    call = checks.from_fields(checks.ForwardArguments, **QKV, dropout_p=0.5, rng=rng)
    with pytest.raises(error, match="rng: got") as caught:
        torch.ops.cudnn_sdpa.sdpa_forward(*SDPA.inputs_of(call))
    assert got in str(caught.value.got)


def test_the_drop_in_names_its_own_arguments():
    q, k = R(2, 4, 8, 16), R(2, 4, 12, 16)
    with pytest.raises(DtypeError, match="attn_mask: got int32; expected bool or float32") as caught:
        scaled_dot_product_attention(q, k, k, attn_mask=Z(8, 12).int())
    assert "attn_mask.to(query.dtype)" in caught.value.hint
    with pytest.raises(OptionError, match="dropout_p"):
        scaled_dot_product_attention(q, k, k, dropout_p=1.0)
    with pytest.raises(OptionError, match="attn_mask: got list"):
        scaled_dot_product_attention(q, k, k, attn_mask=[True])
    with pytest.raises(OptionError, match="is_causal: got True in addition to attn_mask"):
        scaled_dot_product_attention(q, k, k, attn_mask=R(8, 12), is_causal=True)


@pytest.mark.parametrize("dims", [(64, 64), (60, 64), (64, 60)], ids=str)
def test_head_dims_of_queries_and_of_values_are_multiples_of_8(dims):
    """Where calls are checked, and where keys of plans are made, which `support` asks without a call."""
    q, v = (torch.randn(2, 4, 16, dim, dtype=torch.bfloat16) for dim in dims)
    offsets = torch.tensor([0, 16], dtype=torch.int32)
    rows, values = q[0].transpose(0, 1), v[0].transpose(0, 1)
    spec = ForwardSpec.of(checks.ForwardArguments(q, q, v))
    calls = lambda: sdpa(q, q, v), lambda: sdpa_varlen(rows, rows, values, offsets, offsets, 16, 16)
    if dims == (64, 64):
        assert all(call().isfinite().all() for call in calls)
        assert spec.key(TARGET, None).outputs[0].layout.shape == (2, 4, 16, 64)
        return
    name, wrong = next((name, dim) for name, dim in zip("qv", dims, strict=True) if dim % 8)
    for call in calls:
        with pytest.raises(ShapeError, match=f"{name}: got head dim {wrong}; expected a positive multiple of 8"):
            call()
    with pytest.raises(UnsupportedError, match=f"multiples of 8, not {dims[0]} and {dims[1]}"):
        spec.key(TARGET, None)


def test_a_padding_mask_is_recognized():
    q = R(3, 2, 16, 8)
    with pytest.raises(ShapeError, match=r"Is it a padding mask \(B, Skv\)\? Use attn_mask\[:, None, None\]"):
        sdpa(q, q, q, attn_mask=torch.ones(3, 16, dtype=torch.bool))
    with pytest.raises(ShapeError) as caught:
        sdpa(q, q, q, attn_mask=torch.ones(5, 16, dtype=torch.bool))
    assert "padding" not in str(caught.value)
