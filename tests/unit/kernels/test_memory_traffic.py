"""Counts of memory traffic: what the kernels read and write, thread by thread; the formulas of notebook and page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fake_gpu import EmulatedKernel, gpu_on_the_cpu

from cudnn_sdpa import kernels
from cudnn_sdpa.kernels.plans import TILE, fused_rows

NOTEBOOK = Path(__file__).parents[3] / "samples" / "11_attention_kernels.ipynb"
_cells = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
_names = {"NamedTuple": NamedTuple, "TILE": TILE, "fused_rows": fused_rows, "torch": torch}
exec(next(text for text in _cells if "def forward_traffic" in text), _names)  # noqa: S102 - of this repository
forward_traffic = _names["forward_traffic"]

MODES = ("naive", "tiled", "fused")


def counted(mode, *, batch, heads, sq, skv, dim):
    """Bytes that the emulated kernels read and write."""
    q, k, v = (torch.randn(batch, heads, size, dim) for size in (sq, skv, skv))
    EmulatedKernel.traffic[:] = 0, 0
    with gpu_on_the_cpu():
        kernels.attention(q, k, v, mode)
    return tuple(EmulatedKernel.traffic)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "heads": 2, "sq": 128, "skv": 256, "dim": 64},
        {"batch": 2, "heads": 1, "sq": 70, "skv": 131, "dim": 33},  # read by element, in tiles that are not full
        {"batch": 1, "heads": 1, "sq": 129, "skv": 65, "dim": 96},
    ],
    ids=["whole tiles", "parts of tiles", "a larger head dim"],
)
def test_bytes_read_and_written(mode, sizes):
    assert counted(mode, **sizes) == forward_traffic(mode, **sizes)[:2]


@pytest.mark.parametrize("mode", MODES)
def test_the_page_has_these_formulas(mode, repository):
    page = (repository / "docs" / "kernels.md").read_text()
    read, written, kept = re.search(rf"^\| {mode} \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE).groups()
    sizes = {"batch": 3, "heads": 2, "sq": 256, "skv": 384, "dim": 64}
    out = 4 * 3 * 2 * 256 * 64
    names = {"N": 3 * 2 * 256 * 384, "D": 64, "q": out, "out": out, "nothing": 0}
    found = [eval(text.replace("·", "*"), {}, names) for text in (read, written, kept)]  # noqa: S307 - of this page
    assert tuple(found) == forward_traffic(mode, **sizes)


def test_scores_are_kept_by_all_but_the_fused_form():
    """Memory grows with the square of the length, or with the length."""
    for mode, factor in (("naive", 4), ("tiled", 4), ("fused", 0)):
        once, twice = (forward_traffic(mode, batch=1, heads=1, sq=n, skv=n, dim=64).kept for n in (512, 1024))
        assert twice == factor * once


def test_smaller_shared_memory_means_more_passes():
    sizes = {"batch": 1, "heads": 1, "sq": 1024, "skv": 1024, "dim": 64}
    assert forward_traffic("fused", **sizes, sm=86).read > forward_traffic("fused", **sizes, sm=90).read
