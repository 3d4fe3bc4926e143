"""Which calls rows of the published table are for; without a GPU or FlashAttention-4."""

from __future__ import annotations

import inspect

import flash4_stand_in as stand_in
import pytest
import torch

from benchmarks.providers import LONGER, SMALL
from cudnn_sdpa import explain, providers, sdpa, sdpa_varlen
from cudnn_sdpa.attention.dense.sdpa import call_of
from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.attention.flash4.preferences import WINDOW, preference_of, preferences
from cudnn_sdpa.attention.varlen.sdpa_varlen import call_of as packed_call_of
from cudnn_sdpa.attention.varlen.specs import PackedBackward, PackedForward
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
from cudnn_sdpa.graph.target import Target, load_properties


def tensors(heads, queries, dim, keys=None, batch=(1,)):
    sizes = (heads[0], queries), *[(heads[1], keys or queries)] * 2
    return [torch.empty(*batch, h, n, dim, dtype=torch.bfloat16, device="meta") for h, n in sizes]


def specs(*args, **options):
    """Of both passes."""
    given = inspect.signature(sdpa).bind(*args, **options)
    given.apply_defaults()
    forward = ForwardSpec.of(call_of(**given.arguments))
    return forward, BackwardSpec(forward.dense, forward.out, forward.out, bias_gradient=False)


def choices(both, gpu="h200"):
    """The providers of both passes; None of a call without a row."""
    rows = [preference_of(spec, Target.from_properties(load_properties(gpu))) for spec in both]
    return tuple(row if row is None else "fa4" if row.prefers_flash4 else "cudnn" for row in rows)


@pytest.mark.parametrize("left", [0, 63, 2895, 2896, 4095, 5791, 5792])
def test_a_window_is_for_rows_of_its_size(left):
    """That of 4,096 keys."""
    found = choices(specs(*tensors((32, 8), 16384, 128), window_size=(left, 0)))
    assert found == (("fa4" if 2896 <= left <= 5791 else None),) * 2


@pytest.mark.parametrize("window", [(-1, 4000), (4095, 7), (4095, 4095), (4095, -1)])
def test_a_band_beyond_the_diagonal_has_no_row(window):
    q, k, v = tensors((32, 8), 16384, 128)
    assert choices(specs(q, k, v, window_size=window)) == (None, None)
    assert choices(specs(q, k, v, window_size=(-1, 0))) == ("fa4", "fa4")


def test_rows_of_other_head_dims_have_other_windows():
    of = {left: choices(specs(*tensors((16, 8), 8192, 256), window_size=(left, 0))) for left in (63, 1023)}
    assert of == {63: (None, None), 1023: ("fa4", "cudnn")}


@pytest.mark.parametrize("left", [127, 1000])
def test_packed_windows_are_for_rows_of_their_size(left):
    q, k, v = (x.transpose(0, 1) for x in tensors((64, 8), 32768, 64, batch=()))
    ends = torch.empty(13, dtype=torch.int32, device="meta")
    given = inspect.signature(sdpa_varlen).bind(q, k, v, ends, ends, 8000, 8000, window_size=(left, 0))
    given.apply_defaults()
    forward = PackedForward.of(packed_call_of(**given.arguments))
    both = forward, PackedBackward(forward.packed, forward.out, forward.out)
    assert choices(both) == (None, "fa4" if left == 127 else None)


@pytest.mark.parametrize("options", [{"is_causal": True, "softcap": 50.0}, {"window_size": (1023, 0)}])
def test_bounds_are_those_from_the_last_query_and_key(options):
    """With a soft cap a spec has them from the first ones."""
    given = tensors((16, 8), 8000, 256, keys=8192)
    assert None not in choices(specs(*given, causal_alignment="bottom_right", **options))
    assert choices(specs(*given, causal_alignment="top_left", **options)) == (None, None)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_calls_that_show_the_hosts_time_are_of_both_providers(gpu):
    """Of `benchmarks providers --part host`: otherwise the column "fastest" is cuDNN's beside itself."""
    for shape, provider in ((SMALL, None), (LONGER, "fa4")):
        given = tensors((shape.heads_q, shape.heads_kv), shape.length, shape.dim, batch=(shape.batch,))
        assert choices(specs(*given, is_causal=shape.causal), gpu) == (provider, provider)


def test_rows_of_windows_have_their_size():
    for call, rows in preferences().items():
        assert all((row.left is not None) is (call.mask == WINDOW) for row in rows)


def test_the_page_names_rows_of_slower_gradients(repository):
    page = (repository / "docs" / "providers.md").read_text().partition("## Who is faster")[2].partition("![")[0]
    for call, rows in preferences().items():
        for row in rows if call.is_backward and (call.dims[0] != 256 or call.is_capped) else ():
            assert row.fa4_us < row.cudnn_us or f"({row.fa4_us / row.cudnn_us:.3g})" in page, row


def test_a_choice_names_the_file_of_its_row(tmp_path, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "h200")
    stand_in.write(tmp_path)
    with stand_in.on_the_search_path(tmp_path), providers("fastest"):
        found = explain(sdpa, *tensors((32, 8), LONGER.length, LONGER.dim), is_causal=True)
    assert found.provider == "fa4"
    assert "1 × 512, on an NVIDIA H200; docs/benchmarks/providers-h200.json)" in found.choice
