"""`rope_`: its kernel on the fake GPU, and copied results of `rope` elsewhere, against float64; overlap, arguments."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from float64_reference import rope as right
from native_way import native_way

import cudnn_sdpa
from cudnn_sdpa import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError, rope_
from cudnn_sdpa.fused.rotary import rope_in_place
from cudnn_sdpa.plans.nvrtc import Kernel

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}

#: Head dim, rotated features, heads of queries and of keys.
SHAPES = [(64, 64, 3, 2), (96, 32, 2, 1), (256, 256, 4, 4), (24, 8, 5, 0), (16, 12, 8, 1)]


def drawn(dim, rotary_dim, heads_q, heads_k, *, dtype=torch.bfloat16, order="packed"):
    """Queries, keys and values, side by side in one tensor, and angles."""
    counts = [heads_q, heads_k, heads_k + 1]
    sizes, at = {
        "packed": ((9, sum(counts), dim), 1),
        "batch, tokens, heads": ((2, 5, sum(counts), dim), 2),
        "batch, heads, tokens": ((2, sum(counts), 5, dim), 1),
    }[order]
    whole = torch.randn(sizes).to(dtype)
    q, k, _ = whole.split(counts, at)
    if order == "batch, tokens, heads":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = 3 * torch.randn(*(2,)[: whole.dim() - 3], 9 if order == "packed" else 5, rotary_dim // 2)
    given = {"q": q, "k": k if heads_k else None, "cos": angles.cos(), "sin": angles.sin()}
    return whole, whole.narrow(at, heads_q + heads_k, heads_k + 1), given


def check(given, rest, **options):
    wide = {name: x if x is None else x.double() for name, x in given.items()}
    before, expected = rest.clone(), right(**wide, **options)
    assert rope_(**given, **options) is None
    for name, exact in zip("qk", expected, strict=False):
        assert (given[name].double() - exact).norm() < BOUNDS[given[name].dtype] * exact.norm()
    assert torch.equal(rest, before), "the rest of the projection stays"


CASES = list(itertools.product(SHAPES, BOUNDS, ("packed", "batch, tokens, heads", "batch, heads, tokens")))


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_match_float64(number):
    shape, dtype, order = CASES[number]
    normed = ("", "q", "qk" if shape[3] else "q")[number % 3]
    weights = {f"{name}_weight": (torch.rand(shape[0]) - 0.3).to(dtype) for name in normed}
    for where, interleaved in itertools.product((gpu_on_the_cpu, contextlib.nullcontext), (False, True)):
        _, rest, given = drawn(*shape, dtype=dtype, order=order)
        before = len(FakePlan.launched)
        with where():
            check(given | weights, rest, interleaved=interleaved, eps=0.01, zero_centered=number % 2 == 0)
        assert len(FakePlan.launched) == before + (where is gpu_on_the_cpu)


@pytest.mark.parametrize("native", [False, True])
def test_known_calls_are_one_launch(native, monkeypatch):
    weight = torch.rand(64)
    with native_way(on=native), gpu_on_the_cpu():
        for eps in (1e-3, 1, 0.5):
            _, rest, given = drawn(64, 64, 3, 2)
            before, versions = len(FakePlan.launched), [given[name]._version for name in "qk"]
            check(given | {"q_weight": weight}, rest, eps=eps)
            assert len(FakePlan.launched) == before + 1
            assert all(given[name]._version > version for name, version in zip("qk", versions, strict=True))
        _, rest, given = drawn(64, 64, 3, 2)
        for eps in (-1.0, torch.nan, 1e300):
            with pytest.raises(OptionError, match="eps"):
                rope_(**given, q_weight=weight, eps=eps)
        with pytest.raises(LayoutError, match="q"):
            rope_(**given | {"k": given["q"][:, :2]}, q_weight=weight)
        if native:
            monkeypatch.setattr(rope_in_place, "_find", None)  # a call that the module knows asks for nothing else
        check(given | {"q_weight": weight}, rest)


@pytest.mark.parametrize("change", ["spread features", "spread angles", "a spread weight", "no token"])
def test_elsewhere_results_are_copied(change):
    _, rest, given = drawn(64, 64, 3, 2)
    if change == "spread features":
        whole = torch.randn(9, 6, 128).bfloat16()[..., ::2]
        given |= dict(zip("qk", whole.split([3, 2, 1], 1)[:2], strict=True))
    elif change == "spread angles":
        given |= {name: given[name].repeat(1, 2)[:, ::2] for name in ("cos", "sin")}
    elif change == "a spread weight":
        given["k_weight"] = torch.rand(128)[::2]
    else:
        given = {name: x[:0] for name, x in given.items()}
    with gpu_on_the_cpu():
        if change == "no token":
            rope_(**given)
        else:
            check(given, rest)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    whole, _, given = drawn(64, 64, 3, 2)
    expected = cudnn_sdpa.rope(**given)

    def rotate(whole, cos, sin):
        q, k, _ = whole.split([3, 2, 3], 1)
        rope_(q, k, cos, sin)

    torch.compile(rotate, fullgraph=True, backend="aot_eager")(whole, given["cos"], given["sin"])
    for name, x in zip("qk", expected, strict=True):
        torch.testing.assert_close(given[name], x)


def test_the_kernel_compiles_for_all_gpus_supported():
    kernels = []
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        emulated = Kernel.on
        patch.setattr(Kernel, "on", lambda kernel, device: kernels.append(kernel) or emulated(kernel, device))
        rope_(**drawn(64, 64, 3, 2)[2])
    assert kernels
    for kernel, sm in itertools.product(kernels, (80, 90, 100)):
        assert kernel.compile(sm)


def overlapping():
    """Pairs of queries and keys of which elements are at one address."""
    memory = torch.randn(9 * 8 * 64).bfloat16()
    rows, whole = memory[: 9 * 64].view(9, 1, 64), memory.view(9, 8, 64)
    return {
        "the same": (whole, whole),
        "of one head": (whole[:, :4], whole[:, 3:6]),
        "half a head": (whole[..., :32], memory[16:].as_strided((9, 2, 32), (512, 64, 1))),
        "another stride of tokens": (whole[:, :2], memory[128:].as_strided((9, 1, 64), (256, 64, 1))),
        "tokens later": (memory[: 5 * 64].as_strided((9, 1, 64), (32, 64, 1)), rows[:, :1]),
    }


@pytest.mark.parametrize("name", overlapping())
@pytest.mark.parametrize("where", [gpu_on_the_cpu, contextlib.nullcontext])
def test_memory_that_overlaps_is_refused(name, where):
    q, k = overlapping()[name]
    before = q.clone()
    angles = torch.randn(9, q.shape[-1] // 2)
    with where(), pytest.raises(LayoutError, match=r"q(.|\n)*overlaps k(.|\n)*rope"):
        rope_(q, k, angles.cos(), angles.sin())
    assert torch.equal(q, before)


def test_angles_and_weights_in_the_memory_of_heads_are_refused():
    memory = torch.randn(9 * 64)
    q, angles = memory.view(9, 1, 64), torch.ones(9, 32)
    with pytest.raises(LayoutError, match="overlaps sin"):
        rope_(q, None, angles, memory[:288].view(9, 32))
    with pytest.raises(LayoutError, match="overlaps q_weight"):
        rope_(q, None, angles, angles, q_weight=memory[-64:])
    with pytest.raises(LayoutError, match="strides"):
        rope_(torch.ones(1, 1, 64).expand(9, 1, 64), None, angles, angles)


@pytest.mark.parametrize("name", ["q", "k", "k_weight", "cos"])
@pytest.mark.parametrize("where", [gpu_on_the_cpu, contextlib.nullcontext])
def test_a_gradient_is_refused_but_not_without_grad_mode(name, where):
    _, rest, given = drawn(16, 16, 2, 1)
    given |= {"k_weight": torch.rand(16)}
    before = given["q"].clone()
    given[name] = given[name].clone().requires_grad_()
    with where():
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=rf"{name} requires grad(.|\n)*rope"):
                rope_(**given)
        assert torch.equal(given["q"], before)
        with torch.no_grad():
            check(given, rest)


WRONG = {
    "an odd head dim": ({"q": torch.zeros(5, 3, 15)}, ShapeError, "q"),
    "another dtype of k": ({"k": torch.zeros(5, 1, 16)}, DtypeError, "k"),
    "keys of other tokens": ({"k": torch.zeros(4, 1, 16).half()}, ShapeError, "k"),
    "angles of other positions": ({"cos": torch.zeros(4, 8)}, ShapeError, "cos"),
    "no angles": ({"sin": None}, OptionError, "sin"),
    "no queries": ({"q": None}, OptionError, "q"),
    "interleaved": ({"interleaved": 2}, OptionError, "interleaved"),
    "eps without a weight": ({"eps": -1.0}, OptionError, "eps"),
    "an eps that is no number, without a weight": ({"eps": "1e-6"}, OptionError, "eps"),
    "a weight without keys": ({"k": None, "k_weight": torch.ones(16)}, OptionError, "k_weight"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("where", [gpu_on_the_cpu, contextlib.nullcontext])
def test_wrong_arguments_are_named(name, where):
    changed, error, named = WRONG[name]
    given = {"q": torch.zeros(5, 3, 16).half(), "k": torch.zeros(5, 1, 16).half()}
    given |= {"cos": torch.ones(5, 8), "sin": torch.ones(5, 8)}
    with where():
        rope_(**given)
        with pytest.raises(error, match=named):
            rope_(**{**given, **changed})


@pytest.mark.parametrize("strides", [(32, 4, 1), (0, 8, 1), (32, 8, 0), (8, 16, 1)])
def test_heads_whose_own_elements_overlap_are_refused(strides):
    q, angles = torch.zeros(2048).as_strided((3, 4, 8), strides), torch.ones(3, 4)
    with pytest.raises(LayoutError, match=r"q: got strides .* that overlap"):
        rope_(q, None, angles, angles)
