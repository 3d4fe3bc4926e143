"""Queries and keys as (batch, sequence, heads, head dim), which with grouped heads fit, too: a warning."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend
from native_way import native_way

import cudnn_sdpa
from cudnn_sdpa import LayoutWarning, cpu_checks, kernels
from cudnn_sdpa.attention import arguments

SCALES = cudnn_sdpa.Fp8Scales(*[torch.ones(1)] * 6)


def fp8(q, k, v, **options):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    return cudnn_sdpa.sdpa_fp8(q, k, v, SCALES, **options).out


FUNCTIONS = {
    "sdpa": cudnn_sdpa.sdpa,
    "drop-in": cudnn_sdpa.scaled_dot_product_attention,
    "kernels": kernels.attention,
    "fp8_attention": cudnn_sdpa.fp8_attention,
    "sdpa_fp8": fp8,
}


def tensors(q, k):
    """Of shape (batch, …, …, head dim); keys have two of the sizes."""
    return [torch.randn(2, *sizes, 64).bfloat16() for sizes in (q, k, k)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sequences_before_heads(name, is_causal):
    q, k, v = tensors((128, 32), (128, 8))
    with pytest.warns(LayoutWarning, match=r"32 and 8 heads.*32 queries attend to 8 keys.*transpose\(1, 2\)") as caught:
        wrong = FUNCTIONS[name](q, k, v, is_causal=is_causal)
    assert {warning.filename for warning in caught} == {__file__}
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out = FUNCTIONS[name](*turned, **({"enable_gqa": True} if name == "drop-in" else {}), is_causal=is_causal)
    exact, _ = attend(*(x.double() for x in turned), is_causal=is_causal)
    assert float((out.double() - exact).norm() / exact.norm()) < 0.1
    assert float((wrong.transpose(1, 2).double() - exact).norm() / exact.norm()) > 0.5, "nothing else tells"


#: (heads, queries) and (heads, keys) that models have.
RIGHT = {
    "self-attention": ((128, 64), (128, 64)),
    "grouped heads": ((32, 128), (8, 128)),
    "a decode step": ((128, 1), (128, 96)),
    "drafts": ((64, 8), (64, 80)),
    "an image and a prompt": ((24, 4096), (24, 256)),
    "few tokens and fewer": ((16, 8), (16, 4)),
    "other lengths": ((128, 33), (128, 8)),
    "one key": ((16, 15), (16, 1)),
    "more queries than models have heads": ((256, 192), (256, 96)),
    "no keys": ((64, 16), (64, 0)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_shapes_of_models_are_not_warned_of(name):
    assert cudnn_sdpa.sdpa(*tensors(*RIGHT[name])).isfinite().all()  # warnings are errors


def test_whoever_turned_the_tensors_or_has_a_mask_or_sinks_knows_the_order():
    q, k, v = tensors((128, 32), (128, 8))
    by_linear_layer = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    turned = cudnn_sdpa.sdpa(*by_linear_layer)  # warnings are errors
    masked = cudnn_sdpa.sdpa(q, k, v, attn_mask=torch.ones(32, 8, dtype=torch.bool))
    assert cudnn_sdpa.sdpa(q, k, v, sinks=torch.randn(128)).isfinite().all()
    with pytest.warns(LayoutWarning):
        wrong = cudnn_sdpa.sdpa(q, k, v)
    assert turned.equal(wrong)
    torch.testing.assert_close(masked, wrong)


def test_sequences_before_heads_in_one_projection():
    packed = torch.randn(2, 64, 16 + 2 * 4, 64).bfloat16()
    with pytest.warns(LayoutWarning, match="16 and 4 heads"):
        cudnn_sdpa.sdpa(*packed.split((16, 4, 4), dim=2))


def test_the_warning_is_given_once_for_all_lengths():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for length in (64, 65, 128, 64):
            cudnn_sdpa.sdpa(*tensors((length, 32), (length, 8)))
    assert [warning.category for warning in caught] == [LayoutWarning]


@pytest.mark.parametrize("native", [False, True])
def test_a_warm_call_is_not_looked_at(native, monkeypatch):
    given, looked = tensors((64, 16), (64, 4)), []
    check = arguments._warn_if_transposed
    monkeypatch.setattr(arguments, "_warn_if_transposed", lambda *x: looked.append(1) or check(*x))
    with native_way(on=native) if native else nullcontext(), gpu_on_the_cpu(), cpu_checks(None):
        with pytest.warns(LayoutWarning):
            cudnn_sdpa.sdpa(*given)
        for _ in range(4):
            cudnn_sdpa.sdpa(*given)
    assert len(looked) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_warns_where_it_runs(dynamic):
    compiled = torch.compile(cudnn_sdpa.sdpa, fullgraph=True, backend="eager", dynamic=dynamic)
    with pytest.warns(LayoutWarning):
        assert compiled(*tensors((64, 16), (64, 4))).shape == (2, 64, 16, 64)
