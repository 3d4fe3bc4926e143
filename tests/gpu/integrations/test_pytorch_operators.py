"""PyTorch's own attention functions on this library, on the GPU: values and gradients against float64."""

from __future__ import annotations

import inspect
import itertools

import float64_reference as exact
import pytest
import torch
from attention_checks import nothing_synchronizes
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cudnn_sdpa import plan_cache
from cudnn_sdpa.integrations.pytorch import register, unregister

DTYPES = [torch.float16, torch.bfloat16]
forward = torch.ops.aten._scaled_dot_product_cudnn_attention


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    unregister()


def qkv(*sizes, dtype, grad=True):
    return [torch.randn(size, device="cuda", dtype=dtype, requires_grad=grad) for size in sizes]


def assert_agrees(found, wanted):
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape
    assert torch.equal(found.isinf(), wanted.isinf())
    found, wanted = (x.masked_fill(x.isinf(), 0.0) for x in (found, wanted))
    assert (found - wanted).norm() < 1.5e-2 * wanted.norm() + 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scaled_dot_product_attention(dtype, is_causal, with_bias):
    if is_causal and with_bias:
        pytest.skip("PyTorch takes one of both")
    sizes = (2, 8, 256, 64)
    bias = torch.randn(2, 8, 256, 256, device="cuda", dtype=dtype) if with_bias else None
    for _ in range(3):
        q, k, v = qkv(sizes, sizes, sizes, dtype=dtype)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal)
        grad_out = torch.randn_like(out)
        tensors = {"q": q, "k": k, "v": v} | ({} if bias is None else {"attn_mask": bias})
        want, _, grads = exact.gradients(tensors, grad_out, is_causal=is_causal)
        assert_agrees(out, want)
        for gradient, name in zip(torch.autograd.grad(out, (q, k, v), grad_out), "qkv", strict=True):
            assert_agrees(gradient, grads[name])
    assert plan_cache.info().builds > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_gives_its_gradients_the_same_random_numbers(dtype):
    q, k, v = qkv((1, 4, 128, 64), (1, 4, 128, 64), (1, 4, 128, 128), dtype=dtype)
    identity = torch.eye(128, device="cuda", dtype=dtype).expand(1, 4, 128, 128).contiguous()
    torch.manual_seed(4)
    kept = forward(q, k, identity, None, True, 0.25)[0] != 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.manual_seed(4)
    out = forward(q, k, v, None, True, 0.25)[0]
    grad_out = torch.randn_like(out)
    want, _, grads = exact.gradients({"q": q, "k": k, "v": v}, grad_out, kept=kept, dropout_p=0.25)
    assert_agrees(out, want)
    for gradient, name in zip(torch.autograd.grad(out, (q, k, v), grad_out), "qkv", strict=True):
        assert_agrees(gradient, grads[name])


def packed_case(dtype, heads_kv=2):
    lengths = [70, 0, 128, 1]
    tokens = sum(lengths)
    q, k, v = qkv((tokens, 8, 64), (tokens, heads_kv, 64), (tokens, heads_kv, 64), dtype=dtype)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    return q, k, v, offsets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (16, 0)], ids=str)
def test_varlen_attn(dtype, window):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    grouped = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # PyTorch 2.11 has no such option
    for _ in range(3):
        q, k, v, offsets = packed_case(dtype, heads_kv=2 if grouped else 8)
        options = {"window_size": window} | ({"enable_gqa": True} if grouped else {})
        out = varlen.varlen_attn(q, k, v, offsets, offsets, 128, 128, **options)
        grad_out = torch.randn_like(out)
        grads = torch.autograd.grad(out, (q, k, v), grad_out)
        for begin, end in itertools.pairwise(offsets.tolist()):
            if begin == end:
                continue
            one = {n: x[begin:end].detach().transpose(0, 1).unsqueeze(0) for n, x in zip("qkv", (q, k, v), strict=True)}
            of_out = grad_out[begin:end].transpose(0, 1).unsqueeze(0)
            want, _, wanted = exact.gradients(one, of_out, window_size=window, is_causal=window == (-1, 0))
            assert_agrees(out[begin:end], want[0].transpose(0, 1))
            for gradient, name in zip(grads, "qkv", strict=True):
                assert_agrees(gradient[begin:end], wanted[name][0].transpose(0, 1))


def on_pages(lengths_q, lengths_kv, page_size, dim, dtype):
    """Queries, pages, offsets, numbers of keys and the table of a call; slots of no sequence are NaN."""
    columns = -(-max(lengths_kv) // page_size)
    count = len(lengths_kv) * columns + 2
    pages = [torch.full((count, page_size, 2, dim), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    table = torch.randperm(count, device="cuda")[: len(lengths_kv) * columns].view(-1, columns).int()
    for row, length in zip(table, lengths_kv, strict=True):
        j = torch.arange(length, device="cuda")
        for x in pages:
            x[row[j // page_size].long(), j % page_size] = torch.randn(length, 2, dim, device="cuda", dtype=dtype)
    used = torch.tensor(lengths_kv, dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, *itertools.accumulate(lengths_q)], dtype=torch.int32, device="cuda")
    q = torch.randn(sum(lengths_q) + 2, 8, dim, device="cuda", dtype=dtype)
    return q, pages, offsets, used, table


def assert_right_on_pages(out, q, pages, offsets, used, table):
    """Also for tokens behind the last sequence, which get zeros."""
    for number, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if begin == end:
            continue
        k, v = (x[table[number].long()].flatten(0, 1)[: int(used[number])] for x in pages)
        one = [x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], k, v)]
        want = exact.attend(*one, is_causal=True, causal_alignment="bottom_right")[0]
        assert_agrees(out[begin:end], want[0].transpose(0, 1))
    assert not out[int(offsets[-1]) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths_q", "max_q"), [([1, 1, 1], 1), ([0, 3, 8], 8), ([1, 40, 3], 40)], ids=str)
@pytest.mark.parametrize(("page_size", "dim"), [(16, 64), (24, 128), (16, 320)], ids=str)
def test_varlen_attn_on_pages(dtype, lengths_q, max_q, page_size, dim):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "block_table" not in str(torch.ops.torch_attn._varlen_attn.default._schema):
        pytest.skip("this PyTorch's varlen_attn has no pages")
    q, pages, offsets, used, table = on_pages(lengths_q, [100, 64, 77], page_size, dim, dtype)
    given = (*pages, offsets, None, max_q, 128)
    options = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": used, "block_table": table}
    whole = torch.full((*q.shape[:2], 2 * dim), torch.nan, device="cuda", dtype=dtype)
    for _ in range(3):  # cold, warm, and natively
        with nothing_synchronizes():
            out = varlen.varlen_attn(q, *given, **options)
            if hasattr(varlen, "varlen_attn_out"):
                varlen.varlen_attn_out(whole[..., :dim], q, *given, **options)
        assert_right_on_pages(out, q, pages, offsets, used, table)
        if hasattr(varlen, "varlen_attn_out"):
            assert_right_on_pages(whole[..., :dim], q, pages, offsets, used, table)
        assert whole[..., dim:].isnan().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen.varlen_attn(q, *given, **options)
    q.copy_(torch.randn_like(q))
    used.sub_(5)
    graph.replay()
    assert_right_on_pages(out, q, pages, offsets, used, table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_in_one_graph(dtype):
    def attend(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q * 2, k, v, is_causal=True) * 3

    sizes = (2, 8, 256, 64)
    q, k, v = qkv(sizes, sizes, sizes, dtype=dtype)
    out, want = torch.compile(attend, fullgraph=True)(q, k, v), attend(q, k, v)
    grad_out = torch.randn_like(out)
    assert_agrees(out, want)
    expected = torch.autograd.grad(want, (q, k, v), grad_out)
    for found, gradient in zip(torch.autograd.grad(out, (q, k, v), grad_out), expected, strict=True):
        assert_agrees(found, gradient)


@pytest.mark.parametrize("dtype", DTYPES)
def test_captured_in_a_cuda_graph(dtype):
    sizes = (2, 8, 256, 64)
    q, k, v = qkv(sizes, sizes, sizes, dtype=dtype, grad=False)
    for _ in range(3):
        forward(q, k, v, None, False, 0.0, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(q, k, v, None, False, 0.0, True)[0]
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert_agrees(out, exact.attend(q, k, v, is_causal=True)[0])


def test_taken_away_pytorchs_own_kernels_run():
    sizes = (1, 4, 128, 64)
    q, k, v = qkv(sizes, sizes, sizes, dtype=torch.bfloat16, grad=False)
    unregister()
    builds = plan_cache.info().builds
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v)
    assert plan_cache.info().builds == builds
    assert_agrees(out, exact.attend(q, k, v)[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what PyTorch's tests import
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_samples_of_pytorchs_own_tests(dtype):
    pytest.importorskip("expecttest", reason="PyTorch's tests need it")
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = [of for of in op_db if of.name == "nn.functional.scaled_dot_product_attention"]
    served = 0
    for sample in operator.sample_inputs("cuda", dtype, requires_grad=True):
        leaves = [sample.input, *sample.args]
        try:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = operator(*leaves, **sample.kwargs)
        except RuntimeError as error:  # PyTorch's cuDNN backend does not serve it, whoever implements the operator
            if "No available kernel" not in str(error):
                raise
            continue
        served += 1
        grad_out = torch.randn_like(out)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        if sample.kwargs["dropout_p"] > 0:
            assert all(x.isfinite().all() for x in (out, *gradients))
            continue
        exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
        options = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in sample.kwargs.items()}
        want = operator(*exact_leaves, **options)
        assert_agrees(out, want)
        for gradient, exact_one in zip(
            gradients, torch.autograd.grad(want, exact_leaves, grad_out.double()), strict=True
        ):
            assert_agrees(gradient, exact_one)
    assert served > 0
    assert plan_cache.info().builds > 0
