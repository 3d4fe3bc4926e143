"""Checks of lengths and offsets, which read values and are off unless asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention import debug


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def debugging(monkeypatch):
    monkeypatch.setattr(debug, "enabled", True)


def dense(**options):
    q = torch.randn(2, 2, 5, 8)
    return cudnn_sdpa.sdpa(q, q, q, **options)


def packed(offsets_q, offsets_kv=None, longest=4):
    q = torch.randn(10, 2, 8)
    offsets_kv = offsets_q if offsets_kv is None else offsets_kv
    return cudnn_sdpa.sdpa_varlen(q, q, q, offsets_q, offsets_kv, longest, longest)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("name", ["seq_lens_q", "seq_lens_kv"])
@pytest.mark.parametrize("wrong", [(3, 6), (-1, 2)])
def test_lengths_outside_of_the_tensor_raise(name, wrong):
    with pytest.raises(cudnn_sdpa.ShapeError, match=rf"{name}: got {wrong[0] if wrong[0] < 0 else 6} .* from 0 to 5"):
        dense(**{name: int32(*wrong)})
    assert torch.isfinite(dense(**{name: int32(0, 5)})).all()


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ((1, 4, 10), "offsets from 1 to 10; expected from 0 to 10"),
        ((0, 4, 9), "offsets from 0 to 9; expected from 0 to 10"),
        ((0, 6, 4, 10), "offsets that fall"),
        ((0, 4, 10), r"max_seqlen_q: got 4; expected at least 6"),
    ],
    ids=["start", "end", "order", "longest"],
)
def test_offsets_that_cannot_be_raise(offsets, message):
    with pytest.raises(cudnn_sdpa.ShapeError, match=message):
        packed(int32(*offsets))


@pytest.mark.usefixtures("debugging")
def test_both_offsets_are_looked_at():
    right = int32(0, 4, 8, 10)
    assert packed(right).shape == (10, 2, 8)
    with pytest.raises(cudnn_sdpa.ShapeError, match="cu_seqlens_kv"):
        packed(right, int32(0, 4, 8, 9))


def test_nothing_is_read_unless_asked_for():
    assert not debug.enabled
    assert dense(seq_lens_kv=int32(3, 6)).shape == (2, 2, 5, 8)


@pytest.mark.parametrize(("value", "expected"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_switches_it_on(value, expected, monkeypatch):
    monkeypatch.setenv("CUDNN_SDPA_DEBUG", value)
    program = "from cudnn_sdpa.attention import debug; print(debug.enabled)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected
