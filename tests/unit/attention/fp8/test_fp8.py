"""FP8 attention on the CPU: the emulation against float64, and every check of arguments."""

from __future__ import annotations

import pytest
import torch
from refusals import assert_refused

from cudnn_sdpa import (
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    cpu_checks,
)
from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.attention.fp8 import reference
from cudnn_sdpa.attention.fp8.arguments import Fp8Arguments, Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward

pytestmark = pytest.mark.usefixtures("reference_alone")  # no GPU has kernels for all of these head dims and masks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Half a unit in the last place, relative to the value.
ROUNDING = {E4M3: 2**-4, E5M2: 2**-3, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def number(value):
    return torch.tensor([value], dtype=torch.float32)


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def fp8_of(*shape, dtype=E4M3, scale=37.0, layout="bhsd"):
    """Random values in FP8, quantized with a scale."""
    batch, heads, length, dim = shape
    x = torch.randn(batch, length, heads, dim).transpose(1, 2) if layout == "bshd" else torch.randn(shape)
    return reference.quantized(x, number(scale), dtype)


def qkv(lengths=(40, 56)):
    sizes = (4, lengths[0], 32, 37.0), (2, lengths[1], 32, 53.0), (2, lengths[1], 48, 29.0)
    return tuple(fp8_of(2, heads, length, dim, scale=scale) for heads, length, dim, scale in sizes)


def scales_of(dtype=E4M3, **changes):
    """Scales of which none is 1, for tensors of `qkv`."""
    full = torch.finfo(dtype).max / 1.75
    made = {
        "descale_q": number(1 / 37),
        "descale_k": number(1 / 53),
        "descale_v": number(1 / 29),
        "descale_s": number(1 / full),
        "scale_s": number(full),
        "scale_o": number(23.0),
    }
    return Fp8Scales(**{**made, **changes})


def backward_scales(dtype=E4M3, **changes):
    forward = scales_of(dtype)
    made = {
        **{name: getattr(forward, name) for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s")},
        "descale_o": number(1 / 23),
        "descale_do": number(1 / 19),
        "descale_dp": number(1 / 300),
        "scale_dp": number(300.0),
        "scale_dq": number(90.0),
        "scale_dk": number(70.0),
        "scale_dv": number(11.0),
    }
    return Fp8BackwardScales(**{**made, **changes})


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2, torch.bfloat16, torch.float16], ids=str)
def test_output_is_scaled_and_rounded_once(out_dtype):
    q, k, v = qkv()
    scales = scales_of()
    call = Fp8Arguments(q, k, v, *scales, out_dtype=torch.float16, softmax=Softmax(is_causal=True))
    result = sdpa_fp8(q, k, v, scales, is_causal=True, out_dtype=out_dtype)
    fine = reference.attention(call, exact=torch.float64).out.double()
    assert result.out.dtype == out_dtype
    error = (result.out.double() - fine).abs()
    assert (error <= (ROUNDING[out_dtype] + 2**-10) * fine.abs() + 2e-2).all()


def test_descales_need_not_be_reciprocals_of_scales():
    """A kernel that skips a pair of scales gives the same result if they are reciprocal."""
    q, k, v = qkv()
    plain = sdpa_fp8(q, k, v, scales_of(), out_dtype=torch.float16).out.double()
    twice = sdpa_fp8(q, k, v, scales_of(descale_s=scales_of().descale_s * 2), out_dtype=torch.float16).out.double()
    torch.testing.assert_close(twice, 2 * plain, rtol=2e-3, atol=1e-3)
    half = sdpa_fp8(q, k, v, scales_of(descale_v=scales_of().descale_v / 2), out_dtype=torch.float16).out.double()
    torch.testing.assert_close(half, plain / 2, rtol=2e-3, atol=1e-3)


def test_too_large_exponentials_saturate():
    q, k, v = qkv()
    plain = sdpa_fp8(q, k, v, scales_of(), out_dtype=torch.float16).out.float()
    scale = scales_of().scale_s * 1e6
    cut = sdpa_fp8(q, k, v, scales_of(scale_s=scale, descale_s=1 / scale), out_dtype=torch.float16).out.float()
    assert cut.abs().amax() < plain.abs().amax() * 1e-3


@pytest.mark.parametrize(("lengths", "missing"), [((5, 0), "keys"), ((0, 5), "queries")])
def test_empty_inputs(lengths, missing):
    q, k, v = qkv(lengths)
    result = sdpa_fp8(q, k, v, scales_of(), return_lse=True)
    assert result.out.shape == (2, 4, lengths[0], 48), missing
    assert (result.out.float() == 0).all()
    assert result.lse.isneginf().all()
    assert (result.amax_s, result.amax_o) == (0, 0)


def test_each_scale_of_the_backward_pass_matters():
    q, k, v = qkv()
    forward = sdpa_fp8(q, k, v, scales_of(), return_lse=True)
    grad_out = fp8_of(2, 4, 40, 48, dtype=E5M2, scale=19.0)

    def run(**changes):
        return sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, backward_scales(**changes))

    plain, given = run(), backward_scales()
    for name in Fp8BackwardScales._fields:
        changed = run(**{name: getattr(given, name) * 4})
        assert any(not torch.equal(a.float(), b.float()) for a, b in zip(plain, changed, strict=True)), name
    assert torch.equal(run(descale_dp=given.descale_dp * 4).amax_dq, plain.amax_dq * 4)
    assert torch.equal(run(scale_dq=given.scale_dq * 4).amax_dq, plain.amax_dq)
    saturated = run(scale_dv=number(1e9)).dv.float()
    assert saturated.isfinite().all()
    assert saturated.abs().amax() == torch.finfo(E5M2).max


GOOD = {"q": qkv()[0], "k": qkv()[1], "v": qkv()[2], "scales": scales_of()}


def with_scale(changes, scales):
    """The changes, with all scales in place of `scales.<name>`."""
    ((name, value),) = changes.items()
    return {"scales": scales(**{name.partition(".")[2]: value})} if "." in name else changes


WRONG = {
    "a list": ({"q": [1]}, OptionError, "list", "Tensor"),
    "bfloat16": ({"q": torch.randn(2, 4, 8, 32).bfloat16()}, DtypeError, "bfloat16", "float8_e4m3fn"),
    "rank": ({"q": GOOD["q"][0]}, ShapeError, "(4, 40, 32)", "rank 4"),
    "two dtypes": ({"k": GOOD["k"].to(E5M2)}, DtypeError, "float8_e5m2", "float8_e4m3fn"),
    "another dtype": ({"v": GOOD["v"].float()}, DtypeError, "float32", "float8_e4m3fn"),
    "head dim": ({"v": fp8_of(2, 2, 56, 24)}, ShapeError, "24", "multiple of 16"),
    "heads": ({"k": fp8_of(2, 3, 56, 32)}, ShapeError, "3 heads", "divisor"),
    "keys": ({"v": fp8_of(2, 2, 55, 48)}, ShapeError, "55", "56"),
    "batch": ({"k": fp8_of(1, 2, 56, 32)}, ShapeError, "(1, 2, 56, 32)", "batch 2"),
    "device of k": ({"k": GOOD["k"].to("meta")}, DeviceError, "meta", "cpu"),
    "stride": ({"q": fp8_of(2, 4, 40, 64)[..., ::2]}, LayoutError, "stride 2", "1: each head vector dense"),
    "no scales": ({"scales": None}, OptionError, "NoneType", "Fp8Scales"),
    "scales of the other pass": ({"scales": backward_scales()}, OptionError, "Fp8BackwardScales", "Fp8Scales"),
    "a number": ({"scales.scale_s": 1.0}, OptionError, "float", "a torch.Tensor"),
    "float64": ({"scales.descale_q": number(1.0).double()}, DtypeError, "float64", "float32"),
    "bfloat16 scale": ({"scales.scale_o": number(1.0).bfloat16()}, DtypeError, "bfloat16", "float32"),
    "a scale for each head": ({"scales.descale_k": torch.ones(4)}, ShapeError, "(4,)", "one element"),
    "no element": ({"scales.descale_v": torch.ones(0)}, ShapeError, "(0,)", "one element"),
    "scale elsewhere": ({"scales.descale_s": torch.ones(1, device="meta")}, DeviceError, "meta", "cpu"),
    "out_dtype": ({"out_dtype": torch.float32}, OptionError, "float32", "bfloat16"),
    "out_dtype as text": ({"out_dtype": "fp8"}, OptionError, "fp8", "float8_e5m2"),
    "is_causal": ({"is_causal": 1}, OptionError, "1", "True or False"),
    "alignment": ({"causal_alignment": "left"}, OptionError, "left", "top_left"),
    "window_size": ({"window_size": (1, 2, 3)}, OptionError, "(1, 2, 3)", "two integers"),
    "negative scale": ({"scale": -0.5}, OptionError, "-0.5", "positive"),
    "scale of 0": ({"scale": 0.0}, OptionError, "0.0", "positive"),
    "scale on the GPU": ({"scale": number(1.0)}, OptionError, "Tensor", "float"),
    "lengths of int64": ({"seq_lens_kv": lens(1, 2).long()}, DtypeError, "int64", "int32"),
    "lengths of another batch": ({"seq_lens_q": lens(1)}, ShapeError, "(1,)", "(2,)"),
    "lengths as a list": ({"seq_lens_q": [1, 2]}, OptionError, "list", "None"),
    "return_lse": ({"return_lse": 1}, OptionError, "1", "True or False"),
}


@pytest.mark.parametrize(("changes", "kind", "got", "expected"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(changes, kind, got, expected):
    with cpu_checks("h200"):
        given = {**GOOD, **with_scale(changes, scales_of)}
        assert_refused(lambda: sdpa_fp8(**given), kind, *changes, got, expected)


BACK = {
    "grad_out": fp8_of(2, 4, 40, 48, dtype=E5M2),
    **{name: GOOD[name] for name in ("q", "k", "v")},
    "out": fp8_of(2, 4, 40, 48),
    "lse": torch.randn(2, 4, 40),
    "scales": backward_scales(),
}
WRONG_BACKWARD = {
    "grad_out's shape": ({"grad_out": fp8_of(2, 4, 40, 32)}, ShapeError),
    "grad_out's dtype": ({"grad_out": BACK["grad_out"].bfloat16()}, DtypeError),
    "out's dtype": ({"out": BACK["out"].bfloat16()}, DtypeError),
    "out's device": ({"out": BACK["out"].to("meta")}, DeviceError),
    "out's strides": ({"out": fp8_of(2, 4, 40, 96)[..., ::2]}, LayoutError),
    "lse's shape": ({"lse": torch.randn(2, 4, 40, 1)}, ShapeError),
    "lse's dtype": ({"lse": torch.randn(2, 4, 40).double()}, DtypeError),
    "no lse": ({"lse": None}, OptionError),
    "scales": ({"scales": scales_of()}, OptionError),
    "float64": ({"scales.scale_dp": number(1.0).double()}, DtypeError),
    "a number": ({"scales.descale_do": 2}, OptionError),
    "deterministic": ({"deterministic": 1}, OptionError),
}


@pytest.mark.parametrize(("changes", "kind"), WRONG_BACKWARD.values(), ids=WRONG_BACKWARD)
def test_a_wrong_argument_of_the_backward_pass_is_named(changes, kind):
    with cpu_checks("h200"):
        given = {**BACK, **with_scale(changes, backward_scales)}
        assert_refused(lambda: sdpa_fp8_backward(**given), kind, *changes)


def test_tensors_that_require_grad_are_refused():
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match=r"scales\.scale_o requires grad.*\n.*sdpa_fp8_backward"):
        sdpa_fp8(q, k, v, scales_of(scale_o=number(2.0).requires_grad_()))
    with pytest.raises(UnsupportedError, match="v requires grad"):
        sdpa_fp8(q, k, v.requires_grad_(), scales_of())
    with torch.no_grad():
        sdpa_fp8(q, k, v, scales_of())
