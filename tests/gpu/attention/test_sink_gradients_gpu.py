"""The kernels that compute the gradient of sinks, on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from attention_checks import LAYOUTS, captured, make, nothing_synchronizes, poison

from cudnn_sdpa import sdpa, sdpa_varlen
from cudnn_sdpa.attention import sink_scores

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def drawn_rows(out, sinks):
    """The LSE of an output, its sinks included; a fifth of the rows see no key, and their output is set to zeros."""
    of_heads = sinks.view(-1, *[1] * (out.dim() - 3))
    empty = torch.rand(out.shape[:-1], device="cuda") < 0.2
    lse = torch.where(empty, of_heads, torch.logaddexp(of_heads, 4 * torch.randn(out.shape[:-1], device="cuda")))
    out.masked_fill_(empty.unsqueeze(-1), 0.0)
    return lse


def drawn_sinks(heads):
    sinks = 2 * torch.randn(heads, device="cuda")
    sinks[1::3] = -torch.inf
    return sinks


def check(grad_out, out, lse, sinks, tokens=None):
    """Twice into poisoned memory: the same bits, and near float64."""
    poison((sinks.shape[0],), dtype=torch.float32)
    first = sink_scores.gradient(grad_out, out, lse, sinks, tokens)
    with nothing_synchronizes():
        found = sink_scores.gradient(grad_out, out, lse, sinks, tokens)
    assert torch.equal(first, found)
    grad_out, out, lse, sinks = (x.double() for x in (grad_out, out, lse, sinks))
    if lse.dim() == 2:
        count = lse.shape[0] if tokens is None else int(tokens)
        grad_out, out, lse = (x[:count].transpose(0, 1).unsqueeze(0) for x in (grad_out, out, lse))
    weights = torch.where(sinks.isneginf().view(-1, 1), 0.0, torch.exp(sinks.view(-1, 1) - lse)).unsqueeze(-1)
    products = weights * grad_out * out
    sizes = products.abs().sum((0, 2, 3))
    assert ((found + products.sum((0, 2, 3))).abs() <= 2e-6 * sizes).all()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(2, 12, 333, 64), (1, 64, 1024, 128), (3, 5, 77, 20), (70, 2, 1, 256), (2, 3, 50, 321)]
)
def test_dense(shape, layout, dtype):
    out, grad_out, sinks = make(layout, *shape, dtype), make(layout, *shape, dtype), drawn_sinks(shape[1])
    lse = drawn_rows(out, sinks)
    check(grad_out, out, lse, sinks)
    check(make("bshd", *shape, dtype), out, lse.transpose(1, 2).contiguous().transpose(1, 2), sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 33, 64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [None, 0, 1, 1000, 1234])
def test_packed(tokens, dim, dtype):
    out, grad_out = torch.randn(2, 1234, 12, dim, device="cuda").to(dtype)
    sinks = drawn_sinks(12)
    lse, ends = drawn_rows(out, sinks), None
    if tokens is not None:
        ends = torch.tensor([0, 7, tokens], dtype=torch.int32, device="cuda")[-1]
        for x in (out, grad_out, lse):
            x[tokens:] = torch.nan
    check(grad_out, out, lse, sinks, ends)


@pytest.mark.parametrize("heads", [1, 40, 70_000])
def test_any_number_of_heads(heads):
    out, grad_out = torch.randn(2, 2, heads, 3, 16, device="cuda").bfloat16()
    sinks = drawn_sinks(heads)
    check(grad_out, out, drawn_rows(out, sinks), sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_addresses_and_expanded_gradients(dtype):
    memory = torch.randn(2, 1 + 2 * 4 * 65 * 64, device="cuda").to(dtype)
    out, grad_out = (x[1:].view(2, 4, 65, 64) for x in memory)
    sinks = drawn_sinks(8)[1::2]
    lse = drawn_rows(out, sinks)
    for gradient in (grad_out, grad_out[:, :, :1].expand(out.shape), grad_out[..., :1].expand(out.shape)):
        check(gradient, out, lse, sinks)
    check(torch.ones((), device="cuda", dtype=dtype).expand(out.shape), out, lse, sinks)


def test_no_copies_are_made():
    out, grad_out = torch.randn(2, 1, 64, 2048, 64, device="cuda", dtype=torch.bfloat16)
    sinks = drawn_sinks(64)
    lse = drawn_rows(out, sinks)
    check(grad_out, out, lse, sinks)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sink_scores.gradient(grad_out, out, lse, sinks)
    assert torch.cuda.max_memory_allocated() - before < out.nbytes / 10


def test_a_first_launch_in_a_capture(monkeypatch):
    for kernel in (*sink_scores.chunk_kernels.values(), sink_scores.head_kernel):
        monkeypatch.setattr(kernel, "_loaded", {})
    sink_scores._launch_of.cache_clear()
    out, grad_out = torch.randn(2, 1, 8, 100, 64, device="cuda").bfloat16()
    sinks = drawn_sinks(8)
    lse = drawn_rows(out, sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sink_scores.gradient(grad_out, out, lse, sinks)
    for _ in range(3):
        grad_out.copy_(torch.randn_like(grad_out))
        found.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, check(grad_out, out, lse, sinks))


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_captured_backward_passes(is_packed):
    q, k, v = (torch.randn(1, heads, 200, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
    sinks, grad_out = torch.randn(8, device="cuda"), torch.randn(1, 8, 200, 64, device="cuda").bfloat16()
    if is_packed:
        if torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("needs SM 90")
        q, k, v, grad_out = (x[0].transpose(0, 1).contiguous() for x in (q, k, v, grad_out))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    ends = torch.tensor([0, 60, 190], dtype=torch.int32, device="cuda")
    given = (sdpa_varlen, (ends, ends, 130, 130)) if is_packed else (sdpa, ())

    def step():
        function, more = given
        return torch.autograd.grad(function(q, k, v, *more, sinks=sinks, is_causal=True), leaves, grad_out)[-1]

    graph, found = captured(step)
    for _ in range(2):
        with torch.no_grad():
            sinks.copy_(torch.randn(8))
        graph.replay()
        torch.cuda.synchronize()
        replayed = found.clone()
        assert replayed.isfinite().all()
        torch.testing.assert_close(replayed, step(), rtol=1e-4, atol=1e-4)
