"""Fuzzing of the FP8 functions: a wrong call raises a library error or matches the same values."""

from __future__ import annotations

import random

import pytest
import torch
from test_fuzz_attention import OPTIONS, SPOILERS

from cudnn_sdpa import CudnnSdpaError, Fp8BackwardScales, Fp8Scales, fp8_attention, sdpa_fp8, sdpa_fp8_backward

CALLS = 300
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


def spoiled(rng, make):
    """A call with up to two wrong arguments, and the names of its tensors."""
    function, tensors, options, names = make(rng)
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.7:
            name, kind = rng.choice(list(tensors)), rng.choice(list(SPOILERS))
            try:
                tensors[name] = SPOILERS[kind](tensors[name])
            except (AttributeError, RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
                continue  # the mutation is impossible for this tensor
        else:
            name = rng.choice(names)
            options[name] = rng.choice(OWN.get(name) or OPTIONS[name])
    return function, tensors, options


def call(function, tensors, options):
    if function is fp8_attention:
        return (function(**{**tensors, **options}),)
    kind = Fp8Scales if function is sdpa_fp8 else Fp8BackwardScales
    scales = kind(*(tensors[name] for name in kind._fields))
    return function(**{"scales": scales, **{n: x for n, x in tensors.items() if n not in kind._fields}, **options})


def plain(x):
    return None if x is None else x.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor).clone()


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore")  # warnings of prototype features: nested, sparse, quantized tensors
@pytest.mark.parametrize("make", [forward, backward, differentiable])
@pytest.mark.parametrize("trains", [False, True])
def test_wrong_calls_raise_library_errors_or_give_right_values(make, trains):
    wrong = []
    for seed in range(CALLS):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        function, tensors, options = spoiled(rng, make)
        said = f"seed {seed}: " + ", ".join(f"{name}={_said(x)}" for name, x in (tensors | options).items())
        if trains:
            for x in tensors.values():
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf and rng.random() < 0.1:
                    x.requires_grad_()
        try:
            found = call(function, tensors, options)
        except CudnnSdpaError:
            continue
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{said}\n    {type(error).__name__}: {str(error)[:200]}")
            continue
        if found[0].is_meta:
            continue
        expected = call(function, {name: plain(x) for name, x in tensors.items()}, options)
        pairs = zip(found, expected, strict=True)
        if not all(one is other or torch.equal(one.detach().float(), other.float()) for one, other in pairs):
            wrong.append(f"{said}\n    a wrong number")
    assert not wrong, f"{len(wrong)} of {CALLS}:\n" + "\n".join(wrong[:40])


def _said(x):
    if isinstance(x, torch.Tensor):
        try:
            return f"{type(x).__name__}{tuple(x.shape)} {x.dtype} {x.layout} {x.device}"
        except Exception:  # noqa: BLE001
            return type(x).__name__
    return repr(x)[:60]
