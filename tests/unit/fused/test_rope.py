"""`rope`: its kernels on the fake GPU and its reference on the CPU, against float64; arguments and transforms."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from fake_gpu import TARGET, EmulatedKernel, gpu_on_the_cpu
from float64_reference import rope as right
from random_tensors import is_dense, is_in_order_of

import cudnn_sdpa
from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError, rope
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.plans.nvrtc import Kernel

BOUNDS = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-6}

#: Head dim, rotated features, heads of queries and of keys.
SHAPES = [
    (64, 64, 3, 2),
    (96, 32, 2, 1),
    (16, 16, 5, 1),
    (40, 24, 2, 2),
    (256, 256, 1, 1),
    (1024, 512, 1, 1),
    (12, 4, 4, 2),
]


@pytest.fixture
def reversed_order():
    EmulatedKernel.order = 1
    yield
    EmulatedKernel.order = 0


def one_processor(**more):
    """A GPU on which many heads are many for each multiprocessor."""
    properties = tuple((name, 1 if name == "multiProcessorCount" else x) for name, x in TARGET.properties)
    return {"target": dataclasses.replace(TARGET, properties=properties), **more}


def drawn(dim, rotary_dim, heads_q, heads_k, *, dtype, packed=False, tokens=5):
    """Heads as views of one projection with values, and angles."""
    heads = heads_q + 2 * heads_k
    whole = torch.randn(*((tokens,) if packed else (2, tokens)), heads, dim).to(dtype)
    q, k, _ = whole.split([heads_q, heads_k, heads_k], -2)
    angles = 4 * torch.randn(*(() if packed or heads_q % 2 else (2,)), tokens, rotary_dim // 2)
    q, k = (x if packed else x.transpose(1, 2) for x in (q, k))
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}


def weights_of(dim, dtype, names):
    return {f"{name}_weight": torch.rand(dim).to(dtype) - 0.3 for name in names}


def difference(x, y):
    return (x.double() - y).norm() / y.norm()


def check(given, options, bound):
    """Compares results and gradients with float64; gives the results."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if name not in ("cos", "sin")}
    out = rope(**{**given, **leaves}, **options)
    grads = [torch.randn_like(x) for x in out]
    found = torch.autograd.grad(out, list(leaves.values()), grads)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    angles = {name: given[name].double() for name in ("cos", "sin")}
    wanted = right(**exact, **angles, **options)
    of_wanted = torch.autograd.grad(wanted, list(exact.values()), [x.double() for x in grads])
    pairs = [*zip(("out_q", "out_k"), out, wanted, strict=True), *zip(leaves, found, of_wanted, strict=True)]
    for name, x, y in pairs:
        off = difference(x, y)
        assert off < bound * (1 if name.startswith("out") else 2), f"{name} is {off:.1e} off"
    for x, y, name in zip(out, found, "qk", strict=False):
        assert is_dense(x)
        assert is_dense(y)
        assert is_in_order_of(x, given[name])
        assert is_in_order_of(y, given[name])
    return out


CASES = list(itertools.product(SHAPES, BOUNDS, (False, True), (False, True), ("", "q", "qk")))


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernels_match_float64(number):
    (dim, rotary_dim, *heads), dtype, packed, interleaved, normed = CASES[number]
    torch.manual_seed(number)
    given = drawn(dim, rotary_dim, *heads, dtype=dtype, packed=packed)
    if normed:
        given |= weights_of(dim, torch.float32 if number % 3 == 0 else dtype, normed)
    options = {"interleaved": interleaved, "zero_centered": number % 2 == 0, "eps": 0.01}
    # Rows of 24 bytes begin at no multiple of 16.
    if any(given[name].data_ptr() % 16 for name in "qk"):
        given |= {name: given[name].clone() for name in "qk"}
    with gpu_on_the_cpu():
        check(given, options, BOUNDS[dtype])


@pytest.mark.usefixtures("reversed_order")
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
@pytest.mark.parametrize("shape", [(16, 8, 5, 2), (16, 8, 6, 4), (40, 24, 2, 2), (16, 16, 1, 150)], ids=str)
def test_many_heads_of_a_thread(normed, shape):
    """Four heads forward, the last of a token fewer; backward two if that divides all heads, of many tokens in turn."""
    tokens = 300 if shape[-1] < 100 else 3
    given = drawn(*shape, dtype=torch.bfloat16, tokens=tokens) | weights_of(shape[0], torch.bfloat16, normed)
    with gpu_on_the_cpu(**one_processor()):
        check(given, {}, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("shape", [(96, 32, 3, 1), (256, 256, 2, 2), (640, 512, 1, 1), (1024, 1024, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_tokens_of_each_size_of_head(dtype, shape):
    given = drawn(*shape, dtype=dtype, tokens=70) | weights_of(shape[0], torch.float32, "qk")
    with gpu_on_the_cpu(**one_processor()):
        check(given, {"interleaved": shape[2] > 1}, BOUNDS[dtype])


def test_gradients_of_heads_without_a_norm_do_not_depend_on_them():
    given = drawn(64, 64, 2, 1, dtype=torch.float32) | weights_of(64, torch.float32, "q")
    k = torch.full_like(given["k"], torch.nan).requires_grad_()
    with gpu_on_the_cpu():
        _, out = rope(**{**given, "k": k})
        grad = torch.randn_like(out)
        (found,) = torch.autograd.grad(out, k, grad)
    wanted = right(grad.double(), None, given["cos"].double(), -given["sin"].double())[0]
    assert difference(found, wanted) < BOUNDS[torch.float32]


@pytest.mark.slow
def test_kernels_compile_for_all_gpus_supported():
    kernels = []
    on = Kernel.on
    with gpu_on_the_cpu(), pytest.MonkeyPatch.context() as patch:
        emulated = Kernel.on
        patch.setattr(Kernel, "on", lambda kernel, device: kernels.append(kernel) or emulated(kernel, device))
        for names, interleaved in (("", False), ("qk", True)):
            given = drawn(64, 64, 2, 1, dtype=torch.bfloat16) | weights_of(64, torch.float32, names)
            check(given, {"interleaved": interleaved}, BOUNDS[torch.bfloat16])
    assert Kernel.on is on
    assert {kernel.name for kernel in kernels} == {"rotate", "rotate_back", "gradients", "sum_blocks"}
    for kernel, sm in itertools.product(kernels, (80, 90, 100)):
        assert kernel.compile(sm)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("normed", ["", "k", "qk"])
def test_the_reference_matches_float64(dtype, packed, normed):
    given = drawn(24, 16, 3, 1, dtype=dtype, packed=packed) | weights_of(24, dtype, normed)
    check(given, {"interleaved": packed, "zero_centered": True}, BOUNDS[dtype])


def test_it_is_a_norm_and_a_rotation():
    given = drawn(64, 64, 2, 2, dtype=torch.float32)
    weight = torch.rand(64)
    q, k = rope(**given, q_weight=weight, eps=1e-3)
    normalized = cudnn_sdpa.rms_norm(given["q"], weight, 1e-3)
    torch.testing.assert_close(q, rope(normalized, None, given["cos"], given["sin"])[0])
    torch.testing.assert_close(k, rope(given["k"], None, given["cos"], given["sin"])[0])
    back = rope(k, None, given["cos"], -given["sin"])[0]
    torch.testing.assert_close(back, given["k"])


@pytest.mark.usefixtures("reference_alone")
def test_second_gradients_of_rotations_alone():
    given = {name: x.double() for name, x in drawn(8, 6, 2, 1, dtype=torch.float32, tokens=2).items()}
    leaves = tuple(given.pop(name).requires_grad_() for name in "qk")
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, **given), leaves)
    assert torch.autograd.gradgradcheck(lambda q, k: rope(q, k, **given), leaves)
    weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
    out = rope(*leaves, **given, q_weight=weight)[0]
    (gradient,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(UnsupportedError, match="double backward"):
        gradient.sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled():
    given = drawn(16, 16, 2, 1, dtype=torch.bfloat16) | weights_of(16, torch.bfloat16, "qk")
    given["q"] = given["q"].detach().requires_grad_()
    compiled = torch.compile(rope, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(**given), rope(**given), strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()


def test_explain_says_who_serves():
    given = drawn(64, 64, 2, 1, dtype=torch.bfloat16) | weights_of(64, torch.bfloat16, "qk")
    given["q"] = given["q"].detach().requires_grad_()
    with gpu_on_the_cpu():
        text = str(cudnn_sdpa.explain(rope, **given))
    assert "cuDNN has no rotation" in text


def test_eps_of_a_known_call_is_checked():
    given = drawn(16, 16, 2, 1, dtype=torch.bfloat16) | weights_of(16, torch.bfloat16, "q")
    with gpu_on_the_cpu():
        for eps in (1e-3, 1, 0.5):
            assert difference(rope(**given, eps=eps)[0], right(**given, eps=eps)[0]) < BOUNDS[torch.bfloat16]
        del given["q_weight"]
        rope(**given)
        for weight, eps in itertools.product(({}, {"q_weight": torch.rand(16)}), (-1.0, torch.nan, torch.inf, 1e300)):
            with pytest.raises(OptionError, match="eps"):
                rope(**given, **weight, eps=eps)


@pytest.mark.parametrize("heads", [(4, 2), (2, 4)])
def test_a_large_call_is_split_in_tokens_not_in_heads(heads, monkeypatch):
    """Queries and keys have other numbers of heads."""
    monkeypatch.setattr(known_issues, "MAX_OFFSET", 400)
    given = drawn(16, 12, *heads, dtype=torch.bfloat16) | weights_of(16, torch.bfloat16, "qk")
    of_one = {name: x[:1, :, :1] for name, x in given.items() if name in ("q", "k")}
    angles = {name: given[name][:1, :1] for name in ("cos", "sin")}
    with gpu_on_the_cpu():
        check(given, {}, BOUNDS[torch.bfloat16])
        monkeypatch.setattr(known_issues, "MAX_OFFSET", 20)
        with pytest.raises(UnsupportedError, match="smaller tensors"):
            rope(**of_one, **angles)


WRONG = {
    "q of two dimensions": ({"q": torch.zeros(4, 16)}, ShapeError, "q"),
    "an odd head dim": ({"q": torch.zeros(2, 3, 5, 7)}, ShapeError, "even head dim"),
    "another dtype of k": ({"k": torch.zeros(2, 1, 5, 16).half()}, DtypeError, "k"),
    "another length of k": ({"k": torch.zeros(2, 1, 4, 16)}, ShapeError, "k"),
    "angles of other positions": ({"cos": torch.zeros(4, 8), "sin": torch.zeros(4, 8)}, ShapeError, "cos"),
    "too many angles": ({"cos": torch.zeros(5, 9), "sin": torch.zeros(5, 9)}, ShapeError, "cos"),
    "no angle": ({"cos": torch.zeros(5, 0), "sin": torch.zeros(5, 0)}, ShapeError, "cos"),
    "angles of another batch": ({"cos": torch.zeros(3, 5, 8), "sin": torch.zeros(3, 5, 8)}, ShapeError, "cos"),
    "half angles": ({"cos": torch.zeros(5, 8).half()}, DtypeError, "cos"),
    "other sines": ({"sin": torch.zeros(5, 7)}, ShapeError, "sin"),
    "no tensor": ({"cos": 1.0}, OptionError, "cos"),
    "a weight of another length": ({"q_weight": torch.ones(8)}, ShapeError, "q_weight"),
    "weights of two dtypes": ({"q_weight": torch.ones(16), "k_weight": torch.ones(16).half()}, DtypeError, "k_weight"),
    "a weight without keys": ({"k": None, "k_weight": torch.ones(16)}, OptionError, "k_weight"),
    "eps": ({"q_weight": torch.ones(16), "eps": -1.0}, OptionError, "eps"),
    "eps without a weight": ({"eps": -1.0}, OptionError, "eps"),
    "an eps that is no number, without a weight": ({"eps": "1e-6"}, OptionError, "eps"),
    "interleaved": ({"interleaved": 2}, OptionError, "interleaved"),
    "zero_centered": ({"zero_centered": "no"}, OptionError, "zero_centered"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    changed, error, named = WRONG[name]
    given = {
        "q": torch.zeros(2, 3, 5, 16),
        "k": torch.zeros(2, 1, 5, 16),
        "cos": torch.ones(5, 8),
        "sin": torch.ones(5, 8),
    }
    with pytest.raises(error, match=named):
        rope(**{**given, **changed})


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_angles_have_no_gradient(name):
    given = drawn(16, 16, 2, 1, dtype=torch.bfloat16)
    given[name].requires_grad_()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"cos\.detach"):
            rope(**given)
    with torch.no_grad():
        rope(**given)
