"""torchtitan's override: its own layers on this library."""

from __future__ import annotations

import itertools
import sys

import float64_reference as exact
import pytest
import torch

from cudnn_sdpa import LibraryError
from cudnn_sdpa.integrations import pytorch, torchtitan

NAME = "cudnn_sdpa.integrations.torchtitan.attention"


def test_a_missing_torchtitan_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan.config.override", None)
    with pytest.raises(LibraryError, match="pip install torchtitan"):
        torchtitan.register()


@pytest.fixture
def titan():
    """torchtitan's modules, with this library's operators on the CPU."""
    pytest.importorskip(
        "torchtitan.models.common.attention", reason="torchtitan is not installed", exc_type=ImportError
    )
    torchtitan.register()
    pytorch.register(device="cpu")
    yield sys.modules["torchtitan.models.common.attention"]
    pytorch.unregister()


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def overridden(titan, **options):
    """A configuration of torchtitan's after its overrides."""
    from dataclasses import dataclass

    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.protocols.module import Module

    class Block(Module):
        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            inner: titan.VarlenAttention.Config

    root = Block.Config(inner=titan.VarlenAttention.Config(**options))
    lines = apply_overrides(OverrideConfig(imports=[NAME]), root)
    assert any(NAME in line for line in lines)
    return root.inner


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)], ids=str)
def test_its_layers_run_on_this_library(titan, window):
    config = overridden(titan, window_size=window)
    assert isinstance(config, titan.VarlenAttention.Config)
    attention = config.build()
    assert isinstance(attention, titan.VarlenAttention)
    assert torch.nn.attention.current_flash_attention_impl() == pytorch.NAME
    lengths = [5, 7, 12]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    masks = titan.VarlenMetadata(cu_seq_q=offsets, cu_seq_k=offsets, max_q=12, max_k=12)
    q, k, v = (torch.randn(2, 12, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    seen = {}

    def transformed(out, lse):
        seen["lse"] = lse
        return out * 2

    out = attention(q, k, v, attention_masks=masks, enable_gqa=True, scale=0.3)
    twice = attention(q, k, v, attention_masks=masks, enable_gqa=True, scale=0.3, out_transform=transformed)
    torch.testing.assert_close(twice, out * 2)
    assert out.shape == q.shape
    assert seen["lse"].shape == (2, 12, 4)
    packed = [x.detach().flatten(0, 1) for x in (q, k, v)]
    options = {"is_causal": True, "scale": 0.3, "window_size": window}
    for begin, end in itertools.pairwise(offsets.tolist()):
        one = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in packed]
        want, lse = exact.attend(*one, **options)
        torch.testing.assert_close(out.flatten(0, 1)[begin:end].double(), want[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(
            seen["lse"].flatten(0, 1)[begin:end].double(), lse[0].transpose(0, 1), atol=1e-3, rtol=1e-3
        )
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_layer_takes_its_place_again(titan):
    pytorch.unregister()
    overridden(titan).build()
    assert torch.nn.attention.current_flash_attention_impl() == pytorch.NAME
