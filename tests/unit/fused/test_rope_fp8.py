"""`rope_fp8`: its kernels on the fake GPU and its reference on the CPU, against float64; amax values, arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from fake_gpu import TARGET, EmulatedKernel, gpu_on_the_cpu
from float64_reference import rope as right
from random_tensors import is_dense, is_in_order_of

import cudnn_sdpa
from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError, rope_fp8
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.plans.nvrtc import Kernel

#: Head dim, rotated features, heads of queries and of keys.
SHAPES = [(64, 64, 3, 2), (96, 32, 2, 1), (256, 256, 1, 1), (1024, 512, 1, 1), (12, 4, 4, 2), (16, 16, 2, 0)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALES = {"q_scale": torch.tensor(0.0061), "k_scale": torch.tensor([0.0032])}


def drawn(dim, rotary_dim, heads_q, heads_k, *, dtype, packed=False, tokens=5):
    """Heads as views of one projection, angles, and scales by which some values saturate."""
    whole = torch.randn(*((tokens,) if packed else (2, tokens)), heads_q + heads_k, dim).to(dtype)
    q, k = (x if packed else x.transpose(1, 2) for x in whole.split([heads_q, heads_k], -2))
    angles = 4 * torch.randn(*(() if packed or heads_q % 2 else (2,)), tokens, rotary_dim // 2)
    given = {"q": q.clone() if q.data_ptr() % 16 else q, "cos": angles.cos(), "sin": angles.sin(), **SCALES}
    return given | {"k": k.clone() if k.data_ptr() % 16 else k} if heads_k else given | {"k": None, "k_scale": None}


def weights_of(dim, dtype, names):
    return {f"{name}_weight": torch.rand(dim).to(dtype) - 0.3 for name in names}


def check(given, **options):
    """Compares results with float64: each value is one of the nearest two of E4M3."""
    found = rope_fp8(**given, **options)
    scales = {name: given[f"{name}_scale"] for name in "qk"}
    exact = {name: x for name, x in given.items() if not name.endswith("scale")}
    wanted = right(**{n: x if x is None else x.double() for n, x in exact.items()}, **options)
    for name, y in zip("qk", wanted, strict=False):
        out, amax = getattr(found, name), getattr(found, f"{name}_amax")
        assert is_dense(out)
        assert is_in_order_of(out, given[name])
        torch.testing.assert_close(amax.double(), y.abs().amax().view(1), rtol=1e-5, atol=0.0)
        values = (y / scales[name].double()).clamp(-448, 448)
        off, half = (out.double() - values).abs(), (values.abs() * 2**-4).clamp_min(2.0**-10)
        assert (off <= 1.001 * half).all()
    if given["k"] is None:
        assert found.k is found.k_amax is None
    return found


CASES = list(itertools.product(SHAPES, DTYPES, (False, True), (False, True), ("", "q", "qk")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_match_float64(number):
    (dim, rotary_dim, *heads), dtype, packed, interleaved, normed = CASES[number]
    given = drawn(dim, rotary_dim, *heads, dtype=dtype, packed=packed)
    given |= weights_of(dim, torch.float32 if number % 3 == 0 else dtype, normed if heads[1] else normed[:1])
    for where in (gpu_on_the_cpu(), contextlib.nullcontext()):
        with where:
            check(given, interleaved=interleaved, zero_centered=number % 2 == 0, eps=0.01)


@pytest.mark.parametrize("order", [0, 1])
def test_many_heads_of_a_thread(order, monkeypatch):
    """Four heads, the last of a token fewer; more blocks than threads that look for the largest of their amaxes."""
    properties = tuple((name, 1 if name == "multiProcessorCount" else x) for name, x in TARGET.properties)
    monkeypatch.setattr(EmulatedKernel, "order", order)
    given = drawn(8, 4, 5, 2, dtype=torch.bfloat16, tokens=9000) | weights_of(8, torch.bfloat16, "q")
    given["q"][-1, -1, -1] *= 30
    with gpu_on_the_cpu(target=dataclasses.replace(TARGET, properties=properties)):
        check(given)


@pytest.mark.parametrize("where", [gpu_on_the_cpu, contextlib.nullcontext])
def test_zeros_and_nan(where):
    given = drawn(64, 64, 3, 2, dtype=torch.bfloat16)
    given["q"] = torch.zeros_like(given["q"])
    given["k"][1, 0, 2, 5] = torch.nan
    with where():
        found = rope_fp8(**given)
    assert not found.q.float().any()
    assert found.q_amax == 0
    assert found.k_amax.isnan()
    assert found.k.float().isnan().sum() == 2


def test_a_call_without_elements():
    given = drawn(16, 16, 2, 1, dtype=torch.bfloat16)
    empty = {name: x[:0] for name, x in given.items() if name in ("q", "k")}
    angles = {name: given[name][:1] for name in ("cos", "sin")}
    found = rope_fp8(**given | empty | angles)
    assert found.q.shape == (0, 2, 5, 16)
    assert found.q_amax == found.k_amax == 0


def test_a_known_call_reads_other_scales():
    given = drawn(32, 16, 2, 1, dtype=torch.float16)
    with gpu_on_the_cpu():
        for factor in (1.0, 0.37, 11.0):
            check(given | {name: x * factor for name, x in SCALES.items()})


@pytest.mark.slow
def test_kernels_compile_for_all_gpus_with_fp8():
    kernels = []
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        emulated = Kernel.on
        patch.setattr(Kernel, "on", lambda kernel, device: kernels.append(kernel) or emulated(kernel, device))
        check(drawn(64, 64, 2, 1, dtype=torch.bfloat16) | weights_of(64, torch.float32, "qk"), interleaved=True)
    assert [kernel.name for kernel in kernels] == ["rotate", "largest_of_blocks"]
    for kernel, sm in itertools.product(kernels, (89, 90, 100)):
        assert kernel.compile(sm)


def test_gpus_without_fp8_refuse():
    ampere = dataclasses.replace(TARGET, properties=(("deviceVer", 800), ("multiProcessorCount", 108)))
    with gpu_on_the_cpu(target=ampere), pytest.raises(UnsupportedError, match=r"rope_fp8(.|\n)*8\.9"):
        rope_fp8(**drawn(64, 64, 2, 1, dtype=torch.bfloat16))


def test_the_amax_of_a_large_call_is_that_of_all_parts(monkeypatch):
    monkeypatch.setattr(known_issues, "MAX_OFFSET", 400)
    given = drawn(16, 12, 4, 2, dtype=torch.bfloat16)
    given["q"][0, 0, 0, -1] = 50.0
    with gpu_on_the_cpu():
        assert check(given).q_amax == 50.0


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    given = drawn(16, 16, 2, 1, dtype=torch.bfloat16) | weights_of(16, torch.bfloat16, "qk")
    compiled = torch.compile(rope_fp8, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(**given), rope_fp8(**given), strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.0, atol=0.0)
        assert x.stride() == y.stride()


def test_explain_says_who_serves_and_what_is_copied():
    given = drawn(64, 64, 2, 1, dtype=torch.bfloat16)
    given["q"] = torch.randn(2, 2, 64, 5).bfloat16().transpose(2, 3)
    text = str(cudnn_sdpa.explain(rope_fp8, **given))
    assert "cuDNN has no rotation" in text
    assert "q is copied" in text


WRONG = {
    "no scale": ({"q_scale": None}, OptionError, "q_scale"),
    "no scale of keys": ({"k_scale": None}, OptionError, "k_scale"),
    "a scale without keys": ({"k": None}, OptionError, "k_scale"),
    "a number": ({"q_scale": 0.01}, OptionError, "q_scale"),
    "a scale of each token": ({"q_scale": torch.ones(5)}, ShapeError, "q_scale"),
    "a half scale": ({"k_scale": torch.ones(1).half()}, DtypeError, "k_scale"),
    "another dtype of k": ({"k": torch.zeros(2, 1, 5, 16).half()}, DtypeError, "k"),
    "too many angles": ({"cos": torch.zeros(5, 9), "sin": torch.zeros(5, 9)}, ShapeError, "cos"),
    "a weight of another length": ({"q_weight": torch.ones(8)}, ShapeError, "q_weight"),
    "eps": ({"q_weight": torch.ones(16), "eps": -1.0}, OptionError, "eps"),
    "eps without a weight": ({"eps": -1.0}, OptionError, "eps"),
    "an eps that is no number, without a weight": ({"eps": "1e-6"}, OptionError, "eps"),
    "interleaved": ({"interleaved": 2}, OptionError, "interleaved"),
    "zero_centered": ({"zero_centered": "no"}, OptionError, "zero_centered"),
    "a gradient": ({"q": torch.zeros(2, 3, 5, 16, requires_grad=True)}, UnsupportedError, "requires grad"),
    "a gradient of angles": ({"cos": torch.ones(5, 8, requires_grad=True)}, UnsupportedError, "requires grad"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    changed, error, named = WRONG[name]
    given = {
        "q": torch.zeros(2, 3, 5, 16),
        "k": torch.zeros(2, 1, 5, 16),
        "cos": torch.ones(5, 8),
        "sin": torch.ones(5, 8),
        **SCALES,
    }
    rope_fp8(**given)
    with pytest.raises(error, match=named):
        rope_fp8(**{**given, **changed})
