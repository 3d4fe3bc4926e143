"""The sinks of packed sequences on a GPU, outside of plans: their gradient, and the LSE without keys."""

from __future__ import annotations

import torch
from fake_gpu import gpu_on_the_cpu

from cudnn_sdpa import sdpa_varlen
from cudnn_sdpa.attention import sink_scores


def test_rows_past_the_last_sequence_have_no_share():
    """Their gradient may be NaN, as that of a mean over no tokens."""
    q, k, v = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    sinks, grad_out = torch.randn(4).requires_grad_(), torch.randn(9, 4, 16)
    ends = torch.tensor([0, 3, 3, 7]).int()
    out, lse = sdpa_varlen(q, k, v, ends, ends, 4, 4, sinks=sinks, return_lse=True)
    grad_out[7:] = torch.nan
    (wanted,) = torch.autograd.grad(out, sinks, grad_out)
    results = [x.detach() for x in (grad_out, out, lse)]
    found = sink_scores.gradient(*results, sinks.detach(), ends[-1])
    torch.testing.assert_close(found, wanted)
    whole = sink_scores.gradient(*(x[:7] for x in results), sinks.detach())
    torch.testing.assert_close(whole, wanted)
    with gpu_on_the_cpu():
        halves = [x.half() for x in (q, k, v)]
        out = sdpa_varlen(*halves, ends, ends, 4, 4, sinks=sinks)
        (found,) = torch.autograd.grad(out, sinks, grad_out.half())
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_without_keys_the_lse_is_that_of_the_sinks():
    q, sinks = torch.randn(7, 4, 16).half(), torch.randn(4)
    k = v = torch.empty(0, 2, 16, dtype=torch.float16)
    ends_q, ends_kv = torch.tensor([0, 3, 7]).int(), torch.zeros(3, dtype=torch.int32)
    with gpu_on_the_cpu():
        out, lse = sdpa_varlen(q, k, v, ends_q, ends_kv, 4, 0, sinks=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks.expand(7, 4))
