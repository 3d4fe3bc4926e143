"""The kernel that converts `attn_mask` to the bias that cuDNN reads, against PyTorch, on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import CPU, gpu_on_the_cpu
from kernel_formulas import MaskCase, bias

from cudnn_sdpa import LayoutError
from cudnn_sdpa.attention.bias import BiasKernel, bias_layout
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.autotune import tensor_at


@pytest.fixture(autouse=True)
def gpu():
    with gpu_on_the_cpu():
        yield


def bias_at(address, case):
    """The bias as a plan reads it."""
    assert address % ALIGNMENT == 0
    return tensor_at(address, bias_layout(case.mask, case.q, case.skv, case.masked_rows), CPU)


def test_the_bias_is_that_of_the_formulas():
    kinds = set()
    for seed in range(2000):
        case = MaskCase.drawn(seed)
        address, held = BiasKernel(case.mask, case.q, case.skv, case.masked_rows)(case.mask)
        expected = bias(case.mask, case.q, case.skv, case.masked_rows)
        found = bias_at(address, case)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), seed
        kinds.add((case.mask.dtype, held is case.mask, found.is_contiguous()))
    floats = {(dtype, *rest) for dtype in (torch.float16, torch.bfloat16, torch.float32) for rest in FLOAT_KINDS}
    assert kinds == {(torch.bool, False, True), *floats}


#: Whether the bias is the mask itself, and whether it is contiguous.
FLOAT_KINDS = [(False, False), (False, True), (True, False), (True, True)]


def test_any_byte_but_0_is_true():
    mask = torch.tensor([[0, 1, 2, 128, 255, 0, 3]], dtype=torch.uint8).view(torch.bool)
    case = MaskCase(mask, torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), 7, 0)
    address, _ = BiasKernel(case.mask, case.q, case.skv)(case.mask)
    assert bias_at(address, case).flatten().isinf().tolist() == [True, False, False, False, False, True, False]


def test_one_kernel_serves_masks_at_other_addresses():
    """A mask that is readable where it lies, then one that is not, then the first again."""
    q, whole = torch.zeros(2, 2, 5, 8, dtype=torch.float16), torch.randn(2 * 2 * 5 * 16 + 1).half()
    aligned, misaligned = whole[:-1].view(2, 2, 5, 16), whole[1:].view(2, 2, 5, 16)
    kernel = BiasKernel(aligned, q, 16, 2)
    for mask in (aligned, misaligned, aligned):
        address, held = kernel(mask)
        assert (held is mask) is (mask is aligned)
        assert torch.equal(bias_at(address, MaskCase(mask, q, 16, 2)), mask[:, :, 2:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_an_empty_mask_writes_nothing(dtype):
    q, mask = torch.zeros(0, 2, 5, 8, dtype=torch.float16), torch.ones(0, 2, 5, 16, dtype=dtype)
    _, held = BiasKernel(mask, q, 16)(mask)
    assert held.numel() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_a_freed_mask_is_refused_by_name(dtype):
    q, mask = torch.zeros(1, 2, 5, 8, dtype=torch.float16), torch.ones(1, 2, 5, 16, dtype=dtype)
    kernel = BiasKernel(mask, q, 16, 3)
    mask.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match="attn_mask: got a tensor without memory"):
        kernel(mask)
