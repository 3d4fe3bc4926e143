"""An operation in one file: RMSNorm of x plus a residual, with gradients. docs/add_an_operation.md goes through it.

    python samples/add_an_operation.py

On an NVIDIA GPU it runs on cuDNN, without one on its reference. The results are compared with float64.
"""

from __future__ import annotations

import torch

import cudnn_sdpa


def as_rows(operands, results, options):
    """Tensors (..., n) as (rows, 1, 1, n), and (n,) as (1, 1, 1, n): the same memory as cuDNN's norm reads it."""

    def rows(x):
        return x.view(-1, 1, 1, x.shape[-1]) if isinstance(x, torch.Tensor) else x

    return [rows(x) for x in operands], [rows(x) for x in results], options


def dense(*operands, **options):  # noqa: ARG001 - no option matters
    """The operands, without gaps between rows; others are copied."""
    return [x.contiguous() if isinstance(x, torch.Tensor) else x for x in operands]


def gradients_reference(grad, total, weight, scale):
    rows, weighted = total.float() * scale, grad.float() * weight.float()
    grad_x = scale * (weighted - rows * (weighted * rows).mean(-1, keepdim=True))
    return grad_x.to(total.dtype), (grad.float() * rows).sum_to_size(weight.shape).to(weight.dtype)


@cudnn_sdpa.graph_op(reference=gradients_reference, readable=dense, views=as_rows)
def add_rms_norm_gradients(g, grad, total, weight, scale):
    """The gradients of the sum and of the weight."""
    grad_total, grad_weight, _ = g.rmsnorm_backward(
        grad=grad, input=total, scale=weight, inv_variance=scale, has_dbias=False
    )
    return grad_total, grad_weight


def reference(x, weight, residual, eps, *, trains):
    total = (x.float() + residual.float()).to(x.dtype)
    scale = (total.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    out = (total.float() * scale * weight.float()).to(x.dtype)
    return (out, total, scale) if trains else (out, total)


def backward(grads, operands, results, *, trains):  # noqa: ARG001 - it is always True here
    (grad_out, grad_total), (_, weight, _, _), (total, scale) = grads, operands, results
    grad_sum, grad_weight = add_rms_norm_gradients(grad_out, total, weight, scale)
    grad_sum = grad_sum + grad_total
    return grad_sum, grad_weight, grad_sum, None


@cudnn_sdpa.graph_op(
    reference=reference,
    backward=backward,
    keeps_results=slice(1, None),  # the sum and the scale, which backward reads
    auxiliary=1,  # the scale is for backward alone
    reads=lambda operands, needs: (False, True, False, False),  # noqa: ARG005 - of the operands, only the weight
    readable=dense,
    views=as_rows,
)
def add_rms_norm(g, x, weight, residual, eps, *, trains):
    """(x + residual) / sqrt(mean((x + residual)²) + eps) · weight, and the sum."""
    phases = g.types.norm_forward_phase
    total = g.add(a=x, b=residual)
    out, scale = g.rmsnorm(
        norm_forward_phase=phases.TRAINING if trains else phases.INFERENCE, input=total, scale=weight, epsilon=eps
    )
    return (out, total, scale) if trains else (out, total)


def in_float64(x, weight, residual, eps):
    """The same function in float64, for comparison."""
    total = x.double() + residual.double()
    return total * (total.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double(), total


def main():
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    shapes = {"x": (2, 16, 256), "weight": (256,), "residual": (2, 16, 256)}
    x, weight, residual = (torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes.values())
    results, exact = add_rms_norm(x, weight, residual, 1e-6), in_float64(x, weight, residual, 1e-6)
    grads = [torch.randn_like(result) for result in results]
    found = torch.autograd.grad(results, (x, weight, residual), grads)
    wanted = torch.autograd.grad(exact, (x, weight, residual), [grad.double() for grad in grads])
    names = ("out", "sum", *(f"gradient of {name}" for name in shapes))
    for name, one, other in zip(names, (*results, *found), (*exact, *wanted), strict=True):
        error = ((one.double() - other).norm() / other.norm()).item()
        print(f"{name:<22} relative error {error:.1e}")
        assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5), name


if __name__ == "__main__":
    main()
