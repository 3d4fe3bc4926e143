"""`silu_mul`, `gelu_mul` and `relu_squared` on the GPU: values and gradients against float64, in every layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_checks import difference

from cudnn_sdpa import gelu_mul, plan_cache, providers, relu_squared, silu_mul

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}
SHAPES = [(64,), (7, 4096), (3, 5, 96), (2, 8192), (1, 16), (5, 1000), (33, 14336), (70_000, 128)]
#: Sizes around which `fused.activation_tiling` changes the shape that cuDNN sees.
MANY = [(8191, 8192), (8192, 8192), (8192, 5632), (24576, 2048), (32768, 1024), (20480, 2560), (1024, 18432)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in TOLERANCE] + [(shape, torch.bfloat16) for shape in MANY],
    ids=str,
)
def test_silu_mul_in_every_layout(shape, dtype):
    size = shape[-1]
    for _ in range(2):
        both = torch.randn(*shape[:-1], 2 * size, device="cuda", dtype=dtype).requires_grad_()
        exact = both.detach().double().requires_grad_()
        gate, up = exact.chunk(2, -1)
        wanted = F.silu(gate) * up
        grad = torch.randn(shape, device="cuda", dtype=dtype)
        (of_both,) = torch.autograd.grad(wanted, exact, grad.double())
        for form in (
            lambda x: (x,),
            lambda x: x.chunk(2, -1),
            lambda x: [half.contiguous() for half in x.chunk(2, -1)],
        ):
            with torch.no_grad():
                assert difference(silu_mul(*form(both)), wanted) < TOLERANCE[dtype]
            out = silu_mul(*form(both))
            assert out.shape == shape
            assert out.is_contiguous()
            (found,) = torch.autograd.grad(out, both, grad)
            assert difference(found, of_both) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("size", [96, 1024, 33])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_broadcast_row(size, dtype):
    for place in range(2):
        for _ in range(2):
            row = torch.randn(1, size, device="cuda", dtype=dtype).requires_grad_()
            other = torch.randn(300, size, device="cuda", dtype=dtype).requires_grad_()
            pair, exact = [row.expand(300, size), other], [x.detach().double().requires_grad_() for x in (row, other)]
            expanded = [exact[0].expand(300, size), exact[1]]
            if place:
                pair, expanded = pair[::-1], expanded[::-1]
            out, wanted = silu_mul(*pair), F.silu(expanded[0]) * expanded[1]
            assert difference(out, wanted) < TOLERANCE[dtype]
            grad = torch.randn_like(other)
            found, right = (
                torch.autograd.grad(y, x, g) for y, x, g in ((out, (row, other), grad), (wanted, exact, grad.double()))
            )
            for one, another in zip(found, right, strict=True):
                assert difference(one, another) < 4 * TOLERANCE[dtype]
            with torch.no_grad():
                squared = F.relu(exact[0]).square().expand(300, size)
                assert difference(relu_squared(row.expand(300, size)), squared) < TOLERANCE[dtype]


@pytest.mark.usefixtures("cudnn_provider")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_uses_the_fast_layout(dynamic):
    step = torch.compile(lambda x: silu_mul(*x.chunk(2, -1)), fullgraph=True, dynamic=dynamic)
    for rows in (8192, 4096):
        x = torch.randn(rows, 2 * 5632, device="cuda", dtype=torch.bfloat16).requires_grad_()
        exact = x.detach().double().requires_grad_()
        gate, up = exact.chunk(2, -1)
        out, wanted = step(x), F.silu(gate) * up
        assert difference(out, wanted) < 8e-3
        grad = torch.randn_like(out)
        (found,), (right,) = (
            torch.autograd.grad(y, of, g) for y, of, g in ((out, x, grad), (wanted, exact, grad.double()))
        )
        assert difference(found, right) < 2e-2
        assert {(rows, 44, 128), (rows, 32, 176)} == {
            plan.key.inputs[-1].layout.shape
            for plan in plan_cache.plans()
            if plan.key.inputs[-1].layout.shape[0] == rows
        }


@pytest.mark.parametrize("width", [1, 2, 4, 8], ids=lambda past: f"{past} past")
@pytest.mark.parametrize("size", [99, 100, 128, 1001, 1024, 1536])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_row_strides_that_are_no_multiple_of_16_bytes(width, size, dtype):
    """cuDNN compiles kernels for these strides with narrower loads; a wrong kernel would fault here."""
    for make in (lambda: torch.randn(33, size + width, device="cuda", dtype=dtype)[:, :size],) * 2:
        gate, up = make().requires_grad_(), make().requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in (gate, up)]
        wanted = F.silu(exact[0]) * exact[1]
        assert difference(silu_mul(gate, up), wanted) < TOLERANCE[dtype]
        grad = torch.randn(33, size, device="cuda", dtype=dtype)
        found = torch.autograd.grad(silu_mul(gate, up), (gate, up), grad)
        for one, other in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
            assert difference(one, other) < 2 * TOLERANCE[dtype]
        with torch.no_grad():
            assert difference(gelu_mul(gate, up), F.gelu(exact[0]) * exact[1]) < TOLERANCE[dtype]
            assert difference(relu_squared(gate), F.relu(exact[0]).square()) < TOLERANCE[dtype]


@pytest.mark.parametrize("provider", ["own", "cudnn"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("form", ["two", "both", "gate alone"])
def test_gates_of_any_size(form, dtype, provider):
    """From 1 to the dtype's largest value, of both signs: cuDNN's own gradient of SiLU is 0 from 1e8 on."""
    largest = torch.finfo(dtype).max
    sizes = [value for value in 10.0 ** torch.arange(0.0, 39.0, 0.5) if value < largest] + [15.0, 88.5, 104.0, largest]
    gate = torch.tensor([sign * value for value in sizes for sign in (1, -1)], device="cuda").to(dtype)
    gate = gate[:, None].repeat(1, 64).requires_grad_()
    up, grad = torch.full_like(gate, 0.75), torch.full_like(gate, 1.5)
    exact, factor = gate.detach().double().requires_grad_(), up.double().requires_grad_()
    wanted = F.silu(exact) * factor
    wanted.backward(grad.double())
    up.requires_grad_(form != "gate alone")
    leaves = [torch.cat([gate, up], -1).detach().requires_grad_()] if form == "both" else [gate, up]
    with providers(provider):
        out = silu_mul(*leaves)
        out.backward(grad)
    of_gate, of_up = leaves[0].grad.chunk(2, -1) if form == "both" else (gate.grad, up.grad)
    eps = torch.finfo(dtype).eps
    bound, tiny = (16 if dtype is torch.float32 else 4) * eps, float(torch.finfo(torch.float32).smallest_normal)
    pairs = [(out.detach(), wanted.detach()), (of_gate, exact.grad)]
    for found, right in [*pairs, *([] if form == "gate alone" else [(of_up, factor.grad)])]:
        fits = right.abs() <= largest
        off = (found.double() - right).abs() - bound * right.abs() - (2e-7 if dtype is torch.float16 else 1e-7) - tiny
        assert bool((off[fits] <= 0).all()), gate[fits & (off > 0)]
    with torch.no_grad():
        found, right = gelu_mul(gate, up), F.gelu(exact) * factor
        fits = right.abs() <= largest
        assert bool(((found.double() - right).abs() <= bound * right.abs() + 2e-7)[fits].all())


def test_rows_of_one_element_with_gaps():
    both, wide = (torch.randn(5, n, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (2, 4))
    for gate, up in (both.chunk(2, -1), (wide[:, :1], both[:, 1:])):
        out = silu_mul(gate, up)
        assert difference(out, F.silu(gate.double()) * up.double()) < TOLERANCE[torch.bfloat16]
        exact = torch.autograd.grad((F.silu(gate.double()) * up.double()).sum(), both, retain_graph=True)
        assert difference(torch.autograd.grad(out.sum(), both)[0], exact[0]) < TOLERANCE[torch.bfloat16]
    with torch.no_grad():
        gate, up = both.double().chunk(2, -1)
        assert difference(silu_mul(both), F.silu(gate) * up) < TOLERANCE[torch.bfloat16]
        assert difference(gelu_mul(both), F.gelu(gate) * up) < TOLERANCE[torch.bfloat16]
        assert difference(relu_squared(wide[:, :1]), F.relu(wide[:, :1].double()).square()) < TOLERANCE[torch.bfloat16]
