"""Fuzzing of the FP8 functions: a wrong call raises a library error or matches the same values."""

from __future__ import annotations

import pytest
import torch
from test_fuzz_attention import OPTIONS, assert_named_or_right

from cudnn_sdpa import Fp8BackwardScales, Fp8Scales, fp8_attention, sdpa_fp8, sdpa_fp8_backward

KNOWN = ("is_causal", "causal_alignment", "window_size", "scale")
OWN = {
    "out_dtype": [torch.float32, torch.int8, "fp8", 1, torch.float16, torch.bfloat16],
    "scales": [None, 1.0, (), (1.0,) * 12, [torch.ones(1)] * 6, [torch.ones(1)] * 12, Fp8Scales(*[None] * 6), "scales"],
    "grad_dtype": [torch.float32, torch.int8, "fp8", 1, torch.float8_e4m3fn],
    "scaling": [1, "fp8", torch.ones(1), Fp8Scales(*[torch.ones(1)] * 6)],
    "seq_lens_q": [3, [9, 4], (9, 4), "x"],
}


def forward(rng):
    q, k, v = (torch.randn(2, heads, length, 128).to(torch.float8_e4m3fn) for heads, length in ((4, 9), (2, 7), (2, 7)))
    tensors = {"q": q, "k": k, "v": v, **{name: torch.ones(1) for name in Fp8Scales._fields}}
    if rng.random() < 0.5:
        tensors["seq_lens_q"] = torch.tensor([9, 4], dtype=torch.int32)
        tensors["seq_lens_kv"] = torch.tensor([3, 7], dtype=torch.int32)
    return sdpa_fp8, tensors, {"return_lse": True}, (*KNOWN, "return_lse", "out_dtype", "scales", "seq_lens_q")


def backward(rng):
    _, tensors, *_ = forward(rng)
    lengths = {name: x for name, x in tensors.items() if name.startswith("seq")}
    q, k, v = (tensors[name] for name in "qkv")
    found = sdpa_fp8(q, k, v, Fp8Scales(*[torch.ones(1)] * 6), return_lse=True, **lengths)
    tensors = {"grad_out": torch.randn(2, 4, 9, 128).to(torch.float8_e5m2), "q": q, "k": k, "v": v, "out": found.out}
    tensors |= {"lse": found.lse, **lengths, **{name: torch.ones(1) for name in Fp8BackwardScales._fields}}
    return sdpa_fp8_backward, tensors, {}, (*KNOWN, "deterministic", "scales", "seq_lens_q")


def differentiable(rng):
    _, tensors, *_ = forward(rng)
    tensors = {name: x.bfloat16() if name in "qkv" else x for name, x in tensors.items() if "scale" not in name}
    return fp8_attention, tensors, {}, (*KNOWN, "grad_dtype", "scaling", "seq_lens_q")


def call(function, tensors, options):
    if function is fp8_attention:
        return (function(**{**tensors, **options}),)
    kind = Fp8Scales if function is sdpa_fp8 else Fp8BackwardScales
    scales = kind(*(tensors[name] for name in kind._fields))
    return function(**{"scales": scales, **{n: x for n, x in tensors.items() if n not in kind._fields}, **options})


def plain(x):
    return None if x is None else x.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor).clone()


def matches_plain_tensors(found, function, tensors, options):
    expected = call(function, {name: plain(x) for name, x in tensors.items()}, options)
    pairs = zip(found, expected, strict=True)
    return all(one is other or torch.equal(one.detach().float(), other.float()) for one, other in pairs)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore")  # warnings of prototype features: nested, sparse, quantized tensors
@pytest.mark.parametrize("make", [forward, backward, differentiable])
@pytest.mark.parametrize("trains", [False, True])
def test_wrong_calls_raise_library_errors_or_give_right_values(make, trains):
    options = {"share": 0.7, "trained": 0.1 if trains else 0.0, "values": OPTIONS | OWN}
    assert_named_or_right(make, call, matches_plain_tensors, count=300, **options)
