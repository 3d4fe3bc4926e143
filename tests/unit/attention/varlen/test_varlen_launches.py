"""Launches for packed sequences, on the fake GPU."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend_packed

from cudnn_sdpa import sdpa_varlen


@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("scale", [0.4, -0.4, 0.0])
def test_gradients_of_any_scale(scale, heads_kv):
    """cuDNN takes positive scales: others go into the queries, and so into two of the gradients."""
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 9], [0, 5, 6, 11])]
    q, k, v = (torch.randn(n, h, 16).half().requires_grad_() for n, h in ((9, 4), (11, heads_kv), (11, heads_kv)))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = attend_packed(*exact, *ends, scale=scale)[0]
    for _ in range(2):
        with gpu_on_the_cpu():
            out = sdpa_varlen(q, k, v, *ends, 6, 5, scale=scale)
            grad_out = torch.randn_like(out)
            found = torch.autograd.grad(out, (q, k, v), grad_out)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
        right = torch.autograd.grad(wanted, exact, grad_out.double(), retain_graph=True)
        for name, one, other in zip("qkv", found, right, strict=True):
            assert float((one.double() - other).norm()) <= 2e-2 * float(other.norm()), name
