"""`bench peers` on CPU tensors, with a fake clock, and stand-ins for FlashAttention that compute the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import decode, peers
from benchmarks.peers import CUDNN, FLASH, OURS, V3, V4, Configuration
from benchmarks.tools import candidates, cases
from benchmarks.tools import peers as tools_peers
from benchmarks.tools.cases import Shape
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen

pytestmark = pytest.mark.usefixtures("reference_alone")  # small heads, which have no FP8 gradients on Hopper

PLAIN = Configuration("plain", (4, 2), (40, 40), dim=16)
NARROW = Configuration("narrow", (4, 2), (33,), dim=16, left=7, sinks=True)
CAPPED = Configuration("capped", (4, 2), (33,), dim=16, softcap=5.0)
LATE = Configuration("late", (4, 2), (9,), keys=40, dim=16)
WIDE = Configuration("wide", (2, 2), (24,), dim=16, dim_v=8, causal=False)
PACKED = Configuration("packed", (4, 2), (20, 5, 13), dim=16, packed=True)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch, times_by_place, peers_on_cpu):  # noqa: ARG001
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(candidates, "device_times", times_by_place)
    monkeypatch.setattr(cases, "COPIED", 1000)
    monkeypatch.setattr(peers, "DECODE", ((2, 40),))
    monkeypatch.setattr(peers, "PROBLEM", Shape(2, 4, 2, 48, 32, True))
    monkeypatch.setattr(peers, "ROWS", 7)
    forward = (PLAIN, NARROW, CAPPED, LATE, WIDE, PACKED)
    monkeypatch.setattr(peers, "FORWARD", forward)
    monkeypatch.setattr(peers, "TRAINING", forward)
    monkeypatch.setattr(tools_peers, "pytorch_varlen", lambda: pytorch_varlen)  # which has no CPU kernel
    for name in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed


def attention(q, k, v, *, causal, window_size, softcap=None, sinks=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sinks = None if sinks is None else sinks.float()
    options = {"causal_alignment": "bottom_right", "window_size": window_size, "softcap": softcap, "sinks": sinks}
    return sdpa(q, k, v, is_causal=causal, **options).transpose(1, 2)


def packed_attention(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size, **options
):
    return sdpa_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal=causal,
        window_size=window_size,
        **options,
    )


def pytorch_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
    assert enable_gqa
    return sdpa_varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


def unbounded_is_none(function):
    """FlashAttention-4's convention: its window has None where others have -1, and its sinks another name."""

    def call(q, k, v, *, window_size, learnable_sink=None, **options):
        assert -1 not in window_size
        bounds = tuple(-1 if bound is None else bound for bound in window_size)
        out = function(q, k, v, window_size=bounds, sinks=learnable_sink, **options)
        return out, torch.zeros(())

    return call


@pytest.fixture
def installed(monkeypatch, cached_attention):
    third = SimpleNamespace(
        flash_attn_func=attention, flash_attn_varlen_func=packed_attention, flash_attn_with_kvcache=cached_attention
    )
    fourth = SimpleNamespace(
        flash_attn_func=unbounded_is_none(attention), flash_attn_varlen_func=unbounded_is_none(packed_attention)
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=fourth))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fourth)
    return third


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("measure", [peers.forward, peers.training])
def test_all_agree_with_float64(measure):
    rows = {row["call"]: row for row in measure()}
    assert list(rows) == ["plain", "narrow", "capped", "late", "wide", "packed"]
    for name, row in rows.items():
        assert row["why not"] == "–", row
        pytorchs = {"narrow": [], "capped": [], "packed": [FLASH]}.get(name, [CUDNN, FLASH])
        assert [each for each in (CUDNN, FLASH) if row[f"{each} µs"] != "–"] == pytorchs
        assert [row[f"{each} / ours"] for each in (V3, V4)] == [2 + len(pytorchs), 3 + len(pytorchs)]  # the fake clock


@pytest.mark.usefixtures("installed")
def test_the_overview_comes_from_one_run():
    rows = peers.overview()
    assert all("why not" not in row for row in rows), rows
    problems = {row["problem"]: [each for each in rows if each["problem"] == row["problem"]] for row in rows}
    assert list(problems) == ["forward", "training", "decode, 2 × 40"]
    names = [OURS, CUDNN, FLASH, V3, V4, peers.PREPARED, peers.LAYER, peers.FUNCTION]
    for which, share in (("forward", 1.0), ("training", 3.5)):
        assert [row["candidate"] for row in problems[which]] == names
        for place, row in enumerate(problems[which], start=1):
            assert row["TFLOP/s"] == pytest.approx(share * peers.PROBLEM.flops() / place / 1e6)
    *decoded, copied = problems["decode, 2 × 40"]
    assert [row["candidate"] for row in decoded] == [decode.PAGED, decode.VARLEN, V3, decode.CONTIGUOUS]
    assert decoded[1]["TB/s"] == pytest.approx(2 * 40 * 8 * 128 * 2 * 2 / 1e6)  # the first on the clock
    assert copied["TB/s"] == pytest.approx(2 * 1000 / 7 / 1e6)


@pytest.mark.parametrize("measure", [peers.forward, peers.training])
def test_wrong_results_are_not_timed(installed, measure):
    installed.flash_attn_func = lambda q, k, v, **options: attention(q, k, v * 1.05, **options)
    for row in measure():
        if row["call"] != PACKED.name:
            assert row[f"{V3} µs"] == "–"
            assert f"{V3}: RuntimeError: {V3} differs from float64" in row["why not"]


def test_a_wrong_gradient_is_not_timed(installed):
    installed.flash_attn_func = lambda q, k, v, **options: attention(q, k.detach() + 0 * k, v, **options)
    (row,) = [row for row in peers.training() if row["call"] == PLAIN.name]
    assert f"{V3} differs from float64" in row["why not"]
    assert row[f"{V4} / ours"] == 4


@pytest.mark.parametrize("asked", [PLAIN, NARROW, CAPPED, LATE, WIDE, PACKED, replace(WIDE, causal=True, left=3)])
def test_the_reference_is_attention(asked):
    """Rows of the sampled head, in blocks, equal PyTorch's math on all of its scores."""
    given = peers.Inputs(asked)
    q, k, v = (given.sample(x).double() for x in given.qkv)
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) / asked.dim**0.5
    if asked.softcap:
        scores = asked.softcap * (scores / asked.softcap).tanh()
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    if asked.causal:
        scores[:, distance < 0] = -torch.inf
    if asked.left is not None:
        scores[:, distance > asked.left] = -torch.inf
    if asked.sinks:
        scores = torch.cat([scores, given.sinks[: q.shape[1], None, None].expand(-1, len(q), 1)], -1)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1)[..., : len(k)], v[:, 0])
    torch.testing.assert_close(peers.in_float64(given, gradients=False)[0], expected)
