"""`sdpa_varlen` with `out=`, LSE, autograd, autocast and torch.compile."""

from __future__ import annotations

import dense_calls
import pytest
import torch
from test_varlen import DIM, HEADS, assert_right, expected, offsets, tensors

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError, sdpa_varlen

LENGTHS = [60, 0, 100, 40]


ORDERS = {
    "dense": torch.empty_like,
    "heads first": lambda x: x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1),
    "slice": lambda x: x.new_empty(x.shape[0], x.shape[1] + 2, x.shape[2] + 8)[:, 1:-1, : x.shape[2]],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_out(return_lse, order):
    q, k, v = tensors(200)
    ends = offsets(*LENGTHS)
    out = ORDERS[order](q).fill_(torch.nan)
    stride = out.stride()
    result = sdpa_varlen(q, k, v, ends, ends, 100, 100, is_causal=True, scale=0.2, out=out, return_lse=return_lse)
    assert (result[0] if return_lse else result) is out
    assert out.stride() == stride
    reference = expected(LENGTHS, LENGTHS, q, k, v, is_causal=True)
    assert_right([out], reference)
    if return_lse:
        assert dense_calls.difference(result[1], reference[1]) < 1e-5
    with pytest.raises(cudnn_sdpa.LayoutError, match="memory that overlaps q"):
        sdpa_varlen(q, k, v, ends, ends, 100, 100, out=q)
    with pytest.raises(UnsupportedError, match="out with a gradient"):
        sdpa_varlen(q.requires_grad_(), k, v, ends, ends, 100, 100, out=out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "automatic", "dynamic"])
@pytest.mark.parametrize("shared_cu_seqlens", [False, True])
def test_torch_compile(shared_cu_seqlens, dynamic):
    torch._dynamo.reset()

    def attend(q, k, v, ends, ends_kv, longest):
        out, lse = sdpa_varlen(q * 2.0, k, v, ends, ends_kv, longest, longest, is_causal=True, return_lse=True)
        return out.flatten(1) + 1.0, lse

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for lengths in (LENGTHS, [100, 100, 20, 30], [3, 4, 500, 1]):
        tokens, ends = sum(lengths), offsets(*lengths)
        ends_kv = ends if shared_cu_seqlens else ends.clone()
        leaves = [x.requires_grad_() for x in tensors(tokens)]
        out, lse = compiled(*leaves, ends, ends_kv, max(lengths))
        grad_out = torch.randn_like(out)
        found = torch.autograd.grad(out, leaves, grad_out)
        options = {"is_causal": True, "scale": 2 * DIM**-0.5}
        reference = expected(lengths, lengths, *leaves, grad_out.view(tokens, HEADS[0], DIM), **options)
        assert_right([out - 1], (reference[0].flatten(1), *reference[1:]))
        assert dense_calls.difference(lse, reference[1]) < 1e-5
        for name, gradient in zip("qkv", found, strict=True):
            assert dense_calls.difference(gradient, reference[2][name]) < 2e-2


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_with_cuda_graphs():
    torch._dynamo.reset()
    ends = offsets(*LENGTHS)

    def attend(q, k, v, ends):
        return sdpa_varlen(q * 1.0, k, v, ends, ends, 200, 200, is_causal=True, scale=0.2) * 1.0

    q, k, v = tensors(200)
    attend(q, k, v, ends)  # plans are made before a capture
    compiled = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for lengths in (LENGTHS, LENGTHS, LENGTHS, [1, 199, 0, 0], [200, 0, 0, 0]):
        ends.copy_(offsets(*lengths))
        q.normal_()
        assert_right([compiled(q, k, v, ends)], expected(lengths, lengths, q, k, v, is_causal=True))
