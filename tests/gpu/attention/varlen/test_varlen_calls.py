"""`sdpa_varlen` with torch.compile."""

from __future__ import annotations

import dense_calls
import pytest
import torch
from test_varlen import DIM, HEADS, assert_right, expected, offsets, tensors

from cudnn_sdpa import sdpa_varlen

LENGTHS = [60, 0, 100, 40]


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
