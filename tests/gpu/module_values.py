"""Modules of `cudnn_sdpa.nn` with random parameters, and their results in float64.

These run on the CPU; `generators` holds them against formulas that share nothing with the library.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import cudnn_sdpa


def in_float64(module: nn.Module, *tensors: Tensor, **options: Any) -> Tensor:
    """The result of a module in float64, on the CPU."""
    exact = copy.deepcopy(module).cpu().double()
    with cudnn_sdpa.cpu_checks(None), torch.no_grad():
        return exact(*(x.detach().cpu().double() for x in tensors), **options)


def gradients_in_float64(module: nn.Module, *tensors: Tensor, grad: Tensor) -> list[Tensor]:
    """The gradients of the inputs and of the parameters, on the CPU."""
    exact = copy.deepcopy(module).cpu().double()
    leaves = [x.detach().cpu().double().requires_grad_() for x in tensors]
    with cudnn_sdpa.cpu_checks(None):
        return list(torch.autograd.grad(exact(*leaves), [*leaves, *exact.parameters()], grad.cpu().double()))


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where there is a NaN."""
    found, expected = (x.detach().cpu().double() for x in (found, expected))
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def randomize(module: nn.Module) -> nn.Module:
    """Randomizes all parameters, so that no bias, sink or norm has its initial value."""
    with torch.no_grad():
        for name, x in module.named_parameters():
            if x.dim() == 1:
                x.copy_(0.5 * torch.randn_like(x) + ("norm" in name or name == "weight"))
    return module
