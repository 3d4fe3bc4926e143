"""Shared by the gradient tests: runs a call with its gradients, and compares with float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from float64_reference import DIFFERENTIABLE, gradients
from torch import Tensor

from cudnn_sdpa import sdpa

#: Relative to each element, and to the largest. The LSE is kept in float32, which limits the precision of float64
#: gradients.
TOLERANCES = {torch.float64: (1e-5, 1e-6), torch.float32: (2e-4, 1e-5)}


def with_gradients(
    tensors: dict[str, Tensor], grad_out: Tensor, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, LSE and gradients of `sdpa` for all floating-point inputs."""
    leaves = {name: x.detach() for name, x in tensors.items()}
    wanted = [name for name in DIFFERENTIABLE if name in leaves and leaves[name].is_floating_point()]
    for name in wanted:
        leaves[name].requires_grad_()
    out, lse = sdpa(**leaves, **options, return_lse=True)
    found = torch.autograd.grad(out, [leaves[name] for name in wanted], grad_out)
    return out.detach(), lse, dict(zip(wanted, found, strict=True))


def assert_right(tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Compares output, LSE and all gradients of a call, for a random grad_out; returns them."""
    q, v = tensors["q"], tensors["v"]
    grad_out = torch.randn(*q.shape[:3], v.shape[3], dtype=torch.float64).to(q.dtype)
    out, lse, found = with_gradients(tensors, grad_out, **options)
    out_expected, lse_expected, expected = gradients(tensors, grad_out, **options)
    rtol, atol = TOLERANCES[q.dtype]
    torch.testing.assert_close(out.double(), out_expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(lse.double(), lse_expected, rtol=1e-5, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.shape == tensors[name].shape
        assert gradient.dtype == tensors[name].dtype
        close = {"rtol": rtol, "atol": atol * (1 + float(expected[name].abs().amax() if gradient.numel() else 0))}
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(gradient.double(), expected[name], **close, msg=message)
    return {"out": out, "lse": lse, **found}
