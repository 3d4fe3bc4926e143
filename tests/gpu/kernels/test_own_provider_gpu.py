"""`providers` on a GPU: the named provider's kernels serve `sdpa` and `sdpa_paged`, with values and gradients."""

from __future__ import annotations

import pytest
import torch
from aot_inductor import exported, printed_with, providers_of
from attention_checks import difference, served_by

from cudnn_sdpa import (
    ArgumentError,
    cpu_checks,
    kernels,
    providers,
    scaled_dot_product_attention,
    sdpa,
    sdpa_paged,
)

pytestmark = pytest.mark.gpu


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
            found, by = served_by(attend)
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
                found, served = served_by(lambda: sdpa(q, k, v, is_causal=True))
                assert served == by, names
                assert float((found.double().cpu() - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("native", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_provider_takes_what_the_other_saved(dtype, native):
    """Also in known calls, with masks. Beside -1e9 float32 leaves a row equal scores, and its log-sum-exp no digits."""
    q, k, v = (torch.randn(2, h, 130, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    mask = torch.randn(130, 130, device="cuda", dtype=dtype)
    mask[5] = -1e9
    is_lost = torch.arange(130, device="cuda").unsqueeze(1) == 5
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in exact[1:])
    scores = exact[0] @ keys.mT / 8 + mask.double()
    right = (scores - scores.detach() * is_lost).softmax(-1) @ values
    passes = [("own", "own")] if dtype == torch.float32 else [("own", "own"), ("cudnn", "own"), ("own", "cudnn")]
    for forward, backward in passes:
        grad_out = torch.randn_like(q)
        if backward == "cudnn":  # which makes the row's weights of that log-sum-exp
            grad_out.masked_fill_(is_lost, 0)
        for _ in range(native):
            with providers(forward):
                out, by = served_by(lambda: sdpa(q, k, v, attn_mask=mask))
            assert by == {None if forward == "cudnn" else "own"}
            with providers(backward):
                found, by = served_by(lambda out=out, grad=grad_out: torch.autograd.grad(out, (q, k, v), grad))
            assert by == {None if backward == "cudnn" else "own"}
        wanted = torch.autograd.grad(right, exact, grad_out.double(), retain_graph=True)
        for one, other in zip((out, *found), (right, *wanted), strict=True):
            assert difference(one, other) < (1e-5 if dtype == torch.float32 else 1e-2)


def test_cuda_graphs_and_layouts():
    """Odd strides and addresses are read; a graph has the kernels of both passes."""
    q = torch.randn(2 * 4 * 130 * 33 + 1, device="cuda")[1:].view(2, 130, 4, 33).transpose(1, 2).detach()
    k, v = (torch.randn(1, 2, 77, 33, device="cuda").expand(2, 2, 77, 33) for _ in range(2))
    right = kernels.reference_attention(q.double(), k.double(), v.double(), is_causal=True)
    with providers("cudnn", "own"):
        for _ in range(3):
            out, by = served_by(lambda: sdpa(q, k, v, is_causal=True))
        assert by == {"own"}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sdpa(q, k, v, is_causal=True)
        captured.fill_(torch.nan)
        graph.replay()
    for found in (out, captured):
        assert float((found.double() - right).norm() / right.norm()) < 1e-5


def test_compiled_code():
    q, k, v = (torch.randn(2, 4, 130, 40, device="cuda", requires_grad=True) for _ in range(3))
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), fullgraph=True)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = kernels.reference_attention(*exact, is_causal=True)
    with providers("cudnn", "own"):
        out, by = served_by(lambda: compiled(q, k, v))
        found, by_backward = served_by(lambda: torch.autograd.grad(out.sum(), (q, k, v)))
    assert by == by_backward == {"own"}
    for one, other in zip((out, *found), (right, *torch.autograd.grad(right.sum(), exact)), strict=True):
        assert float((one.detach().double() - other.detach()).norm() / other.detach().norm()) < 1e-5


def test_exported_programs():
    with providers("own"):
        program, tokens = exported("attention")
        assert providers_of(program.module(), tokens) == [{"own"}] * 2


def test_programs_that_aot_inductor_has_compiled(tmp_path):
    assert printed_with("own", "attention", tmp_path).count("served by {'own'}") == 2


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
                found, served = served_by(lambda: attend(q, pages, pages, table, lengths))
                assert by is None or served == by, names
                assert float((found.double().cpu() - exact).norm() / exact.norm()) < 5e-3
