"""What plans read of `attn_mask`: the mask, or what our kernel makes of it, against PyTorch, on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import CPU, CpuKernel, gpu_on_the_cpu
from float64_reference import attend
from kernel_formulas import LengthsCase, MaskCase, assert_both, bias
from native_way import native_way
from real_plans import real_plans

from cudnn_sdpa import LayoutError, plan_cache, providers, sdpa
from cudnn_sdpa.attention.bias import BiasKernel, bias_layout
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.autotune import tensor_at


@pytest.fixture(autouse=True)
def gpu():
    with gpu_on_the_cpu():
        yield


@pytest.fixture
def launched(monkeypatch):
    """The names of the library's kernels, as they are launched."""
    names, launch = [], CpuKernel.launch

    def noted(kernel, *given):
        names.append(kernel.name)
        launch(kernel, *given)

    monkeypatch.setattr(CpuKernel, "launch", noted)
    return names


def bias_at(address, case):
    """The bias as a plan reads it."""
    assert address % ALIGNMENT == 0
    return tensor_at(address, bias_layout(case.mask, case.q, case.skv, case.masked_rows), CPU)


def test_the_bias_is_that_of_the_formulas():
    kinds = set()
    for seed in range(2000):
        case = MaskCase.drawn(seed)
        kernel = BiasKernel(case.mask, case.q, case.skv, case.masked_rows)
        expected = bias(case.mask, case.q, case.skv, case.masked_rows)
        made = kernel(attn_mask=case.mask.data_ptr())
        found = bias_at(made.data_ptr(), case)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), seed
        at = kernel.reads_mask_at
        address = 1 if at is None else case.mask.data_ptr() + at.offset
        is_read = address % ALIGNMENT == 0
        if is_read:
            assert torch.equal(bias_at(address, case), expected), seed
        kinds.add((case.mask.dtype, is_read, found.is_contiguous()))
    floats = {(dtype, *rest) for dtype in (torch.float16, torch.bfloat16, torch.float32) for rest in FLOAT_KINDS}
    assert kinds == {(torch.bool, False, True), *floats}


#: Whether the bias is the mask itself, and whether it is contiguous.
FLOAT_KINDS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize("kind", ["prefill", "decode", "softcap"])
def test_one_launch_makes_the_bias_and_what_plans_read_of_lengths(kind):
    for seed in range(500):
        assert_both(MaskCase.drawn(seed), LengthsCase.drawn(seed, softcap=kind == "softcap"), decode=kind == "decode")


#: Calls with a mask and lengths, and the kernels that are launched for a call and its gradients.
BOTH = {
    "boolean": (torch.bool, {}, ["make_bias_and_lengths"] * 2),
    "float": (torch.float16, {}, ["correct_lengths"] * 2),
    "soft cap": (torch.bool, {"softcap": 3.0}, ["make_bias_and_limits"] * 2),
}


@pytest.mark.parametrize("way", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_boolean_mask_and_lengths_are_read_by_one_launch(kind, way, launched):
    dtype, options, names = BOTH[kind]
    with native_way(on=way), real_plans(), providers("cudnn"):
        plan_cache.clear()
        for _ in range(6):
            q, k, v = (torch.randn(3, 2, n, 16).half().requires_grad_() for n in (9, 13, 13))
            lengths = {"seq_lens_q": torch.tensor([9, 4, 0]).int(), "seq_lens_kv": torch.tensor([13, 0, 5]).int()}
            lengths = {name: x[torch.randperm(3)] for name, x in lengths.items()}
            mask = torch.rand(3, 1, 9, 16)[..., :13]
            mask = mask > 0.3 if dtype == torch.bool else mask.to(dtype)
            launched.clear()
            out = sdpa(q, k, v, attn_mask=mask, **lengths, **options)
            grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            assert launched == names
            leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
            exact = attend(*leaves, attn_mask=mask, **lengths, **options)[0]
            expected = torch.autograd.grad(exact, leaves, torch.ones_like(exact))
            for found, right in zip((out, *grads), (exact, *expected), strict=True):
                torch.testing.assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


def test_any_byte_but_0_is_true():
    mask = torch.tensor([[0, 1, 2, 128, 255, 0, 3]], dtype=torch.uint8).view(torch.bool)
    case = MaskCase(mask, torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), 7, 0)
    made = BiasKernel(case.mask, case.q, case.skv)(attn_mask=mask.data_ptr())
    found = bias_at(made.data_ptr(), case).flatten()
    assert found.isinf().tolist() == [True, False, False, False, False, True, False]


@pytest.mark.parametrize("masked_rows", [0, 2])
def test_one_kind_of_call_takes_masks_at_any_address(masked_rows, launched):
    """A mask that is readable where it lies, then one that is not, then the first again: only that is converted."""
    sq, skv = 16 + masked_rows, 16
    q, k = torch.randn(2, 2, sq, 8).half(), torch.randn(2, 2, skv, 8).half()
    whole = torch.randn(2 * 2 * sq * skv + 1).half()
    aligned, misaligned = whole[:-1].view(2, 2, sq, skv), whole[1:].view(2, 2, sq, skv)
    for mask in (aligned, misaligned, aligned):
        launched.clear()
        out = sdpa(q, k, k, attn_mask=mask, is_causal=True, causal_alignment="bottom_right")
        assert launched == (["make_bias"] if mask is misaligned else [])
        seen = torch.ones(sq, skv, dtype=torch.bool).tril(skv - sq)
        scores = q.double() @ k.double().mT * 8**-0.5 + mask.double()
        wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) @ k.double()
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_an_empty_mask_writes_nothing(dtype):
    q, mask = torch.zeros(0, 2, 5, 8, dtype=torch.float16), torch.ones(0, 2, 5, 16, dtype=dtype)
    made = BiasKernel(mask, q, 16)(attn_mask=mask.data_ptr())
    assert made.numel() == 0


@pytest.mark.parametrize("masked_rows", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_freed_mask_is_refused_by_name(dtype, masked_rows, is_warm, launched):
    """Also where the plan reads the mask behind its beginning, so at no null pointer."""
    q, k = (torch.zeros(1, 2, rows, 8, dtype=torch.float16) for rows in (16 + masked_rows, 16))
    mask = torch.ones(1, 2, 16 + masked_rows, 16, dtype=dtype)

    def call():
        return sdpa(q, k, k, attn_mask=mask, is_causal=True, causal_alignment="bottom_right")

    if is_warm:
        call()
    launched.clear()
    mask.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=r"^attn_mask: got a tensor without memory"):
        call()
    assert launched == []
