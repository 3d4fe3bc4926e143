"""Warm calls are recognized whatever calls came before."""

from __future__ import annotations

import itertools

import torch
from fake_gpu import gpu_on_the_cpu

from cudnn_sdpa import sdpa
from cudnn_sdpa.attention.dense.call import SdpaCall


def test_calls_with_and_without_optional_tensors_in_turn(monkeypatch):
    """A call that leaves out a tensor which a recent one has is known, too: nothing is checked again."""
    q, k, v = (torch.randn(2, 4, 8, 16, dtype=torch.float16) for _ in range(3))
    lengths_q, lengths_kv = (torch.full((2,), 5, dtype=torch.int32) for _ in range(2))
    optional = {"attn_mask": torch.rand(8, 8) > 0.2, "seq_lens_q": lengths_q, "seq_lens_kv": lengths_kv}
    subsets = [dict(x) for count in range(4) for x in itertools.combinations(optional.items(), count)]
    with gpu_on_the_cpu():
        wanted = [sdpa(q, k, v, **subset) for subset in subsets]
        checked = []
        monkeypatch.setattr(SdpaCall, "check_types", checked.append)
        for first, second in itertools.product(range(len(subsets)), repeat=2):
            for which in (first, second):
                assert torch.equal(sdpa(q, k, v, **subsets[which]), wanted[which])
    assert not checked
