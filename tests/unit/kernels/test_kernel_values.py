"""The attention kernels, run thread by thread on the CPU, against float64: outputs and all gradients."""

from __future__ import annotations

import contextlib
import itertools
import math
import random

import pytest
import torch
from fake_gpu import EmulatedKernel, gpu_on_the_cpu
from float64_reference import attend

from cudnn_sdpa import kernels
from cudnn_sdpa.kernels.attention import ATTENTION

SIZES = (1, 7, 64, 65, 130)
DIMS = (8, 33, 64, 80, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Largest relative error of outputs and gradients.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MODES = ("fused", "tiled", "naive")


@pytest.fixture(autouse=True)
def forward_order():
    yield
    EmulatedKernel.order = 0


def made(*shape: int, dtype: torch.dtype, grad: bool = True) -> torch.Tensor:
    """Random numbers in the midst of NaN, so that reading beyond them shows."""
    whole = torch.full((*shape[:-2], shape[-2] + 16, shape[-1]), torch.nan).to(dtype)
    whole[..., 8:-8, :] = torch.randn(shape).to(dtype)
    return whole[..., 8:-8, :].requires_grad_(grad)


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """A mask that leaves some queries no key, if it is boolean."""
    batch, heads, sq, skv = shape
    if kind == "boolean":
        mask = torch.rand(batch, 1, sq, skv) > 0.3
        mask[:, :, sq // 2] = False
        return mask
    if kind == "additive":
        return torch.randn(heads, 1, skv).to(dtype).requires_grad_()
    if kind == "float":
        mask = torch.randn(batch, 1, sq, skv)
        mask[..., ::5] = -torch.inf
        return mask.requires_grad_()
    return None


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    mode: str = "fused",
    is_causal: bool = False,
    scale: float | None = None,
    bound: float | None = None,
) -> list[torch.Tensor]:
    """Compares output and gradients with float64; gives them."""
    grad_out = torch.randn(q.shape).to(q.dtype)
    leaves = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    with gpu_on_the_cpu():
        out = kernels.attention(q, k, v, mode, mask, is_causal, scale)
        found = [out, *torch.autograd.grad(out, leaves, grad_out)]
    exact = [x if x is None or x.dtype == torch.bool else x.detach().double() for x in (q, k, v, mask)]
    right = [
        x.requires_grad_()
        for x, given in zip(exact, (q, k, v, mask), strict=True)
        if given is not None and given.requires_grad
    ]
    of_exact, _ = attend(*exact[:3], attn_mask=exact[3], is_causal=is_causal, scale=scale)
    wanted = [of_exact, *torch.autograd.grad(of_exact, right, grad_out.double())]
    # One key makes gradients of q and k that are the rounding of zero: compare with what they are made of.
    size = grad_out.double().norm() * v.detach().double().norm() / max(1, v.numel()) ** 0.5
    for name, x, y in zip(("out", "q", "k", "v", "mask"), found, wanted, strict=False):
        off = (x.detach().double() - y.detach()).norm() / y.detach().norm().clamp_min(float(size) * 0.2)
        assert off < (bound or BOUNDS[q.dtype]), f"{name} is {off:.1e} off"
    return found


GRID = list(itertools.product(SIZES, SIZES, DIMS))

#: What a case has besides its sizes. The quick form is drawn more often.
CHOICES = (
    DTYPES,
    ("none", "none", "boolean", "additive", "float"),
    ("fused", *MODES),
    (False, True),
    ((2, 2), (4, 2)),
    (0, 1),
    (None, 0.2, -0.3),
)


def drawn(number):
    """Each choice by itself, so that all pairs of them occur."""
    rng = random.Random(number)
    return tuple(rng.choice(values) for values in CHOICES)


def test_all_pairs_of_choices_occur():
    cases = [drawn(number) for number in range(len(GRID))]
    for one, other in itertools.combinations(range(len(CHOICES)), 2):
        found = {(case[one], case[other]) for case in cases}
        assert found == set(itertools.product(CHOICES[one], CHOICES[other]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(GRID)))
def test_sizes_dtypes_masks_and_groups(number):
    """Each size with another dtype, mask, form, scale and order of threads."""
    torch.manual_seed(number)
    sq, skv, dim = GRID[number]
    dtype, kind, mode, is_causal, heads, EmulatedKernel.order, scale = drawn(number)
    q = made(1, heads[0], sq, dim, dtype=dtype)
    k, v = (made(1, heads[1], skv, dim, dtype=dtype) for _ in range(2))
    check(q, k, v, mask_of(kind, (1, heads[0], sq, skv), dtype), mode=mode, is_causal=is_causal, scale=scale)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_fully_masked_rows_are_zeros_with_zero_gradients(mode, dtype):
    q, k, v = (made(2, 2, 66, 16, dtype=dtype) for _ in range(3))
    mask = torch.ones(66, 66, dtype=torch.bool).tril(-2)
    out, grad_q, *_ = check(q, k, v, mask, mode=mode)
    assert not out[:, :, :2].any()
    assert not grad_q[:, :, :2].any()
    assert out[:, :, 2:].abs().amin(-1).gt(0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["none", "boolean", "additive", "float"])
@pytest.mark.parametrize(("mode", "dim", "is_causal"), [("tiled", 129, True), ("naive", 200, False)])
def test_head_dims_beyond_the_fused_form(mode, dim, is_causal, kind):
    """Gradients are tiled there, whatever the form of the forward pass."""
    dtype = DTYPES[("none", "additive", "float", "boolean").index(kind) % 3]
    q = made(2, 4, 70, dim, dtype=dtype)
    k, v = (made(2, 2, 67, dim, dtype=dtype) for _ in range(2))
    first = check(q, k, v, mask_of(kind, (2, 4, 70, 67), dtype), mode=mode, is_causal=is_causal)
    assert first[0].isfinite().all()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.float32, 136)])
def test_masks_have_gradients_of_all_keys_that_causality_masks(dtype, dim):
    """Also of those that no query of a tile sees: zeros in memory that was full of NaN."""
    q = made(1, 2, 5, dim, dtype=dtype)
    k, v = (made(1, 2, 140, dim, dtype=dtype) for _ in range(2))
    mask = torch.randn(1, 2, 5, 140).requires_grad_()
    *_, grad_mask = check(q, k, v, mask, mode="fused" if dim < 129 else "tiled", is_causal=True)
    assert not grad_mask.triu(1).any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("mode", ["fused", "tiled", "naive"])
@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [
        (torch.float32, -2.3e38),
        *((dtype, torch.finfo(dtype).min) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        (torch.float32, -torch.inf),
        (torch.bfloat16, -torch.inf),
    ],
)
def test_values_that_mask_a_key(dtype, lowest, mode, on_gpu):
    """A row that higher values cover as a whole is the mean of the values, as in PyTorch's own attention."""
    dim = 160 if mode == "naive" else 16  # whose gradients are those of the tiled form
    q, k, v = (made(1, 1, 6, dim, dtype=dtype) for _ in range(3))
    mask = torch.zeros(6, 6, dtype=dtype)
    mask[2], mask[3, 1:], mask[4, 2] = lowest, lowest, lowest
    mask.requires_grad_()
    with gpu_on_the_cpu() if on_gpu else contextlib.nullcontext():
        out = kernels.attention(q, k, v, mode, mask)
        found = torch.autograd.grad(out.sum(), (q, k, v, mask))
    bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 5e-5}
    torch.testing.assert_close(out, kernels.reference_attention(q, k, v, mask), **bounds)
    if lowest * math.log2(math.e) < torch.finfo(torch.float32).min:
        assert not out[0, 0, 2].any()
        assert not found[0][0, 0, 2].any()
        assert not found[3][2].any()
        return
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    right = torch.nn.functional.scaled_dot_product_attention(*exact[:3], exact[3])
    torch.testing.assert_close(out.double(), right, **bounds)
    for one, other in zip(found, torch.autograd.grad(right.sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, **bounds)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_rows_that_a_float_mask_hides_are_zeros_with_zero_gradients(lowest):
    q, k, v = (made(1, 1, 6, 16, dtype=torch.float32) for _ in range(3))
    mask = torch.randn(6, 6)
    mask[2] = lowest
    out, grad_q, *_ = check(q, k, v, mask.masked_fill(mask == lowest, -torch.inf))
    with gpu_on_the_cpu():
        again = kernels.attention(q, k, v, "fused", mask)
    assert torch.equal(out, again)
    assert not out[0, 0, 2].any()
    assert not grad_q[0, 0, 2].any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("mode", ["fused", "tiled", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_of_masks(dtype, mode, on_gpu):
    """Times log2(e), they end float32's range."""
    dim = 160 if mode == "naive" else 16
    q, k, v = (made(1, 1, 6, dim, dtype=dtype) for _ in range(3))
    mask = torch.zeros(6, 6, dtype=torch.float32)
    mask[1], mask[2, 3], mask[3, 1:3], mask[4, 0], mask[4, 1] = 3e38, 3e38, 2.5e38, 3e38, -3e38
    with gpu_on_the_cpu() if on_gpu else contextlib.nullcontext():
        out = kernels.attention(q, k, v, mode, mask)
        found = torch.autograd.grad(out.sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = exact[0] @ exact[1].mT * dim**-0.5
    right = torch.softmax(scores + mask.double(), -1) @ exact[2]  # scores next to such values do not count
    bounds = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 5e-5}
    torch.testing.assert_close(out.double(), right, **bounds)
    for one, other in zip(found, torch.autograd.grad(right.sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, **bounds)


def test_gradients_of_expanded_head_vectors_have_the_layout_that_compiled_code_expects():
    q, k, v = (torch.randn(1, 5, 2, 1).transpose(1, 2).expand(1, 2, 5, 8).requires_grad_() for _ in range(3))
    with gpu_on_the_cpu():
        found = torch.autograd.grad(kernels.attention(q, k, v).sum(), (q, k, v))
    assert {x.stride() for x in found} == {ATTENTION.backward.new_gradient("q", q).stride()} == {(80, 40, 8, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_of_threads_changes_no_bit(dtype):
    """If it did, a barrier would be missing."""
    torch.manual_seed(0)
    tensors = [made(1, 2, 97, 64, dtype=dtype) for _ in range(3)]
    results = []
    for EmulatedKernel.order in (0, 1):
        torch.manual_seed(1)
        results.append(check(*tensors, is_causal=True))
    assert all(map(torch.equal, *results))


def test_large_scores_and_a_mask_of_very_negative_numbers():
    """Beside -1e9 nothing is left of a score in float32: a row that it covers is the mean of the values."""
    q, k, v = (made(1, 1, 70, 64, dtype=torch.float32) for _ in range(3))
    check(q, k, v, scale=40.0, bound=3e-4)  # scores above 1000 have an absolute error of 1e-4 in float32
    mask = torch.zeros(70, 70)
    mask[3] = -1e9
    with gpu_on_the_cpu():
        out = kernels.attention(q, k, v, mask=mask)
        (grad_v,) = torch.autograd.grad(out[0, 0, 3].sum(), v)
    torch.testing.assert_close(out[0, 0, 3], v[0, 0].mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grad_v, torch.full_like(grad_v, 1 / 70), rtol=1e-4, atol=1e-6)


def test_results_are_the_same_from_run_to_run_without_scratch_for_scores():
    q, k, v = (made(1, 4, 40, 32, dtype=torch.float32) for _ in range(3))
    torch.manual_seed(0)
    first = check(q, k, v)
    torch.manual_seed(0)
    assert all(map(torch.equal, first, check(q, k, v)))
