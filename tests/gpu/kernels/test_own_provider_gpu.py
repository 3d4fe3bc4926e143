"""`providers` on a GPU: the named provider's kernels serve `sdpa` and `sdpa_paged`, with values and gradients."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import (
    ArgumentError,
    cpu_checks,
    kernels,
    plan_cache,
    providers,
    scaled_dot_product_attention,
    sdpa,
    sdpa_paged,
)

pytestmark = pytest.mark.gpu


def used(call):
    """The result of a call, and the providers of the plans that it used."""
    with plan_cache.watch_uses() as keys:
        found = call()
    return found, {key.provider for key in keys}


@pytest.mark.parametrize("function", [sdpa, scaled_dot_product_attention])
@pytest.mark.parametrize("dim", [40, 33, 160])
def test_float32_with_gradients(function, dim):
    q, k, v = (torch.randn(2, h, n, dim, device="cuda", requires_grad=True) for h, n in ((4, 130), (2, 77), (2, 77)))
    mask = torch.randn(130, 77, device="cuda", requires_grad=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    right = kernels.reference_attention(*exact, scale=0.3)
    grad_out = torch.randn_like(q)
    wanted = torch.autograd.grad(right, exact, grad_out.double())
    options = {} if function is sdpa else {"enable_gqa": True}

    def attend():
        out = function(q, k, v, attn_mask=mask, scale=0.3, **options)
        return out, *torch.autograd.grad(out, (q, k, v, mask), grad_out)

    with providers("cudnn", "own"):
        for _ in range(3):
            found, by = used(attend)
            assert by == {"own"}
            for one, other in zip(found, (right, *wanted), strict=True):
                assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 1e-5
    with pytest.raises(ArgumentError, match=r"float32|head dim 33"):
        attend()


def test_the_first_provider_serves():
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with cpu_checks(None):
        exact = sdpa(q.double().cpu(), k.double().cpu(), v.double().cpu(), is_causal=True)
    for names, by in ((("own", "cudnn"), {"own"}), (("cudnn", "own"), {None}), (("fastest",), {None})):
        with providers(*names):
            for _ in range(3):
                found, served = used(lambda: sdpa(q, k, v, is_causal=True))
                assert served == by, names
                assert float((found.double().cpu() - exact).norm() / exact.norm()) < 5e-3


def test_pages():
    pages = torch.randn(40, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
    table, lengths = (
        torch.randperm(40, device="cuda").int().view(4, 10),
        torch.tensor([640, 1, 0, 333], device="cuda").int(),
    )
    q = torch.randn(4, 8, 3, 128, device="cuda", dtype=torch.bfloat16)

    def attend(*tensors):
        return sdpa_paged(*tensors, page_layout="NHD")

    with cpu_checks(None):
        exact = attend(q.double().cpu(), *(pages.double().cpu(),) * 2, table.cpu(), lengths.cpu())
    for names, by in ((("own",), {"own"}), (("cudnn",), {None}), (("own", "cudnn"), {"own"}), (("fastest",), None)):
        with providers(*names):
            for _ in range(3):
                found, served = used(lambda: attend(q, pages, pages, table, lengths))
                assert by is None or served == by, names
                assert float((found.double().cpu() - exact).norm() / exact.norm()) < 5e-3
