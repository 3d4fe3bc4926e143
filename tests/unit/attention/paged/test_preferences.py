"""Which kernel `sdpa_paged` takes by measurements, and what `explain` says of it."""

from __future__ import annotations

import pytest
import torch

from cudnn_sdpa import explain, sdpa_paged

BF16 = torch.bfloat16


def explained(batch, tokens, keys, heads, dims, heads_kv=1):
    """The report of a call on an H200, of a sequence's tokens."""
    columns = keys // 64
    pages = torch.empty(batch * columns, 64, heads_kv, dims[0], dtype=BF16, device="meta")
    table = torch.empty(batch, columns, dtype=torch.int32, device="meta")
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    q = torch.empty(batch, heads, tokens, dims[0], dtype=BF16, device="meta")
    return explain(sdpa_paged, q, pages, pages[..., : dims[1]], table, lengths, page_layout="NHD")


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        ((32, 1, 4096, 32, (128, 128), 8), "own"),
        ((1, 1, 4096, 32, (128, 128), 8), "cudnn"),
        ((1, 1, 32768, 32, (128, 128), 8), "own"),
        ((4, 16, 4096, 32, (128, 128), 8), "own"),
        ((8, 512, 512, 32, (128, 128), 8), "cudnn"),
        ((8, 512, 2048, 32, (128, 128), 8), "own"),
        ((32, 1, 4096, 64, (64, 64), 8), "cudnn"),
        ((32, 3, 4096, 64, (64, 64), 8), "own"),
        ((64, 1, 8192, 16, (576, 512)), "own"),
        ((64, 1, 8192, 128, (576, 512)), "own"),
        ((1, 1, 8192, 16, (576, 512)), "cudnn"),
    ],
)
def test_a_row_of_measurements_chooses(call, kernel, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    report = explained(*call)
    assert ("paged_varlen_forward" in report.key) == (kernel == "own")
    taken = "our own kernel for pages" if kernel == "own" else "cuDNN's engines"
    assert report.choice.startswith(f"{taken}: measured ")
    assert report.choice in str(report)


def test_without_a_row_nothing_is_said(monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    assert not explained(2, 1, 4096, 4, (96, 96)).choice
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "b200")
    assert not explained(2, 1, 4096, 4, (128, 128)).choice
