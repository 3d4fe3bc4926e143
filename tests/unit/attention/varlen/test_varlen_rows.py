"""Rows of no packed sequence, which cuDNN's kernels write neither in the output nor in gradients."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend_packed

from cudnn_sdpa import sdpa_varlen

OFFSETS = {
    # name: (offsets of queries, of keys)
    "more queries": ([0, 7, 20], [0, 4, 9]),
    "more keys": ([0, 4, 9], [0, 7, 20]),
    "begin late": ([3, 9, 20], [8, 14, 15]),
    "alone": ([0, 6, 6, 11], [0, 0, 5, 9]),
    "none": ([0, 0], [0, 0]),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_rows_of_no_sequence_are_zeros(name):
    q, k, v = (torch.randn(24, *shape).half().requires_grad_() for shape in ((4, 16), (2, 16), (2, 24)))
    grad_out = torch.randn(24, 4, 24).half()
    with gpu_on_the_cpu():  # where new memory is full of NaN
        ends = [torch.tensor(x, dtype=torch.int32) for x in OFFSETS[name]]
        out = sdpa_varlen(q, k, v, *ends, 20, 20)
        found = torch.autograd.grad(out, (q, k, v), grad_out)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = attend_packed(*leaves, *ends)[0]
    torch.testing.assert_close(out.double(), wanted, rtol=4e-3, atol=4e-3)
    gradients = torch.autograd.grad(wanted, leaves, grad_out.double(), materialize_grads=True)
    for gradient, of_exact, bounds in zip(found, gradients, (0, 1, 1), strict=True):
        torch.testing.assert_close(gradient.double(), of_exact, rtol=2e-2, atol=2e-2)
        first, *_, last = OFFSETS[name][bounds]
        assert not gradient[:first].any()
        assert not gradient[last:].any()
