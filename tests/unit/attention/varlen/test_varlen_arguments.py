"""Wrong arguments of `sdpa_varlen`: typed errors in terms of rank-3 tensors and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import assert_refused

from cudnn_sdpa import (
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    sdpa_varlen,
    sdpa_varlen_backward,
)
from cudnn_sdpa.attention.varlen.arguments import VarlenArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.explain import describer_of

R, Z = torch.randn, torch.empty
OFFSETS = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
RIGHT = {
    "q": R(10, 4, 16),
    "k": R(10, 2, 16),
    "v": R(10, 2, 24),
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_kv": OFFSETS,
    "max_seqlen_q": 7,
    "max_seqlen_kv": 7,
}
LONGEST = "the length of the longest sequence"

WRONG = {
    # name: (changes, error, what the argument got, part of what was expected)
    "q of rank 4": ({"q": R(1, 10, 4, 16)}, ShapeError, "shape (1, 10, 4, 16)", "rank 3: (tokens, heads"),
    "out of rank 4": ({"out": Z(1, 10, 4, 24)}, ShapeError, "shape (1, 10, 4, 24)", "rank 3"),
    "no heads": ({"q": R(10, 0, 16)}, ShapeError, "0 heads", "at least one head"),
    "fewer values": ({"v": R(5, 2, 24)}, ShapeError, "number of tokens 5", "10, the number of tokens of k"),
    "out of q's shape": ({"out": Z(10, 4, 16)}, ShapeError, "shape (10, 4, 16)", "shape (10, 4, 24)"),
    "out of fewer tokens": ({"out": Z(9, 4, 24)}, ShapeError, "shape (9, 4, 24)", "shape (10, 4, 24)"),
    "out in half": ({"out": Z(10, 4, 24).half()}, DtypeError, "float16", "float32, the dtype of q"),
    "out elsewhere": ({"out": Z(10, 4, 24, device="meta")}, DeviceError, "meta", "cpu, the device of q"),
    "expanded out": (
        {"out": Z(10, 1, 24).expand(10, 4, 24)},
        LayoutError,
        "strides (24, 0, 1) that overlap",
        "a separate address",
    ),
    "out in steps": ({"out": Z(10, 4, 26)[..., :24]}, LayoutError, "a stride of 26", "multiples of 4 elements"),
    "out not dense": ({"out": Z(10, 24, 4).transpose(1, 2)}, LayoutError, "stride 4 in the last dimension", "1"),
    "no offsets": ({"cu_seqlens_q": None}, OptionError, "NoneType", "a torch.Tensor"),
    "offsets in int64": ({"cu_seqlens_kv": OFFSETS.long()}, DtypeError, "int64", "int32"),
    "offsets of rank 2": ({"cu_seqlens_q": OFFSETS[None]}, ShapeError, "shape (1, 4)", "(B + 1,)"),
    "other sequences": ({"cu_seqlens_kv": OFFSETS[:3]}, ShapeError, "shape (3,)", "that of cu_seqlens_q"),
    "length is a tensor": ({"max_seqlen_q": torch.tensor(7)}, OptionError, "tensor(7)", LONGEST),
    "length is a float": ({"max_seqlen_kv": 7.0}, OptionError, "7.0", LONGEST),
    "length is a bool": ({"max_seqlen_kv": True}, OptionError, "True", LONGEST),
    "length is numpy's bool": ({"max_seqlen_q": np.bool_(True)}, OptionError, "True", LONGEST),
    "length below 0": ({"max_seqlen_q": -1}, OptionError, "-1", LONGEST),
    "window of floats": ({"window_size": (1.0, 0)}, OptionError, "(1.0, 0)", "two integers (left, right)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_was_expected(case):
    changes, kind, got, expected = WRONG[case]
    assert_refused(lambda: sdpa_varlen(**RIGHT | changes), kind, *changes, got, expected)


@pytest.mark.parametrize("longest", [np.int64(7), np.int32(9), np.uint8(7), 2**31, 2**63, 2**70], ids=repr)
def test_any_integer_type_is_a_max_seqlen(longest):
    expected = sdpa_varlen(**RIGHT)
    assert torch.equal(sdpa_varlen(**RIGHT | {"max_seqlen_q": longest, "max_seqlen_kv": longest}), expected)


@pytest.mark.parametrize(("bound", "same"), [(np.int64(2), 2), (2**70, -1), (2**63 - 1, -1)], ids=repr)
def test_any_integer_type_is_a_bound(bound, same):
    expected = sdpa_varlen(**RIGHT, window_size=(same, same))
    assert torch.equal(sdpa_varlen(**RIGHT, window_size=(bound, bound)), expected)


def test_stride_checks_name_tokens_and_heads():
    """GPU-only requirements, checked for a packed call as in the operator."""
    q, k, v = (R(10, 2, 16).half() for _ in range(3))
    uneven = Z(10, 2 * 18, dtype=torch.float16).view(10, 2, 18)[..., :16]
    by_token = Z(10, 2 * 16 + 4, dtype=torch.float16)[:, :32].view(10, 2, 16)
    for tensor, unit in ((uneven, "18 from head to head"), (by_token, "36 from token to token")):
        dense = VarlenArguments(q, tensor, v, None, OFFSETS, OFFSETS, None, 7, 7).as_dense()
        with pytest.raises(LayoutError, match=f"^k: got stride {unit}; expected a multiple of 8 elements"):
            tensor_checks.check_strides(*dense[:3])
    dense = VarlenArguments(q, k, v, None, OFFSETS, OFFSETS, None, 7, 7).as_dense()
    tensor_checks.check_strides(*dense[:3])


@pytest.mark.parametrize("wrong", [1.5, 3, "offsets", [0, 4, 9], None, object(), float])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_offsets_that_are_no_tensors_are_named(name, wrong):
    """Also where the result goes into a given tensor, and for gradients alone."""
    x, ends = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse = sdpa_varlen(x, x, x, ends, ends, 5, 5, return_lse=True)
    given = {"q": x, "k": x, "v": x, "cu_seqlens_q": ends, "cu_seqlens_kv": ends} | {name: wrong}
    lengths = {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    for call in (
        lambda: sdpa_varlen(**given, **lengths),
        lambda: sdpa_varlen(**given, **lengths, out=torch.empty_like(x)),
        lambda: sdpa_varlen(**given | {"q": x.clone().requires_grad_()}, **lengths),
        lambda: sdpa_varlen_backward(x, out, lse, **given, **lengths),
        lambda: describer_of(sdpa_varlen)(**given, **lengths),
        lambda: describer_of(sdpa_varlen_backward)(x, out, lse, **given, **lengths),
    ):
        with pytest.raises(OptionError, match=f"^{name}: got {type(wrong).__name__}; expected a torch.Tensor"):
            call()
