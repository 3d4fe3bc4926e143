"""FP8 attention on the CPU: the emulation against float64, and every check of arguments."""

from __future__ import annotations

import pytest
import torch
from float64_reference import attend

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


def qkv(*, lengths=(40, 56), dims=(32, 48), heads=(4, 2), dtype=E4M3, layout="bhsd", batch=2):
    return (
        fp8_of(batch, heads[0], lengths[0], dims[0], dtype=dtype, scale=37.0, layout=layout),
        fp8_of(batch, heads[1], lengths[1], dims[0], dtype=dtype, scale=53.0, layout=layout),
        fp8_of(batch, heads[1], lengths[1], dims[1], dtype=dtype, scale=29.0, layout=layout),
    )


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


def true_values(q, k, v, scales):
    return (
        q.double() * scales.descale_q.double(),
        k.double() * scales.descale_k.double(),
        v.double() * scales.descale_v.double(),
    )


def true_weights(q, k, **options):
    unit = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    return attend(q, k, unit, **options)[0]


BOTTOM = {"causal_alignment": "bottom_right"}
CASES = {
    "dense": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, **BOTTOM},
    "window_size": {"window_size": (7, 3), "scale": 0.31},
    "causal window, bottom-right": {"is_causal": True, "window_size": (9, -1), **BOTTOM},
    "lengths": {"seq_lens_q": lens(31, 40), "seq_lens_kv": lens(17, 0)},
    "lengths, causal": {"seq_lens_kv": lens(50, 3), "is_causal": True, **BOTTOM},
    "scale": {"scale": 0.02},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_output_matches_float64_up_to_fp8_rounding(dtype, options):
    q, k, v = qkv(dtype=dtype)
    scales = scales_of(dtype)
    result = sdpa_fp8(q, k, v, scales, **options, return_lse=True)
    exact_q, exact_k, exact_v = true_values(q, k, v, scales)
    expected, lse = attend(exact_q, exact_k, exact_v, **options)
    weights = true_weights(exact_q, exact_k, **options)
    spread = weights @ exact_v.abs().repeat_interleave(2, dim=1)  # reach of each weight's rounding
    error = (result.out.double() / scales.scale_o.double() - expected).abs()
    underflow = 1e-3  # values rounded to zero or to subnormals
    assert (error <= ROUNDING[dtype] * (spread + expected.abs()) * 1.01 + underflow).all()
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.amax_s.double(), weights.amax().view(1), rtol=1e-5, atol=0)
    assert abs(result.amax_o.double() - expected.abs().amax()) <= ROUNDING[dtype] * spread.amax() + underflow
    assert result.out.dtype == dtype


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


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_overflow_saturates(dtype):
    q, k, v = qkv(dtype=dtype)
    result = sdpa_fp8(q, k, v, scales_of(dtype, scale_o=number(1e15)))
    largest = torch.finfo(dtype).max
    assert result.out.float().isfinite().all()
    assert set(result.out.float().abs().unique().tolist()) <= {0.0, largest}
    assert result.amax_o < 10  # the amax is taken before the scale


def test_too_large_exponentials_saturate():
    q, k, v = qkv()
    plain = sdpa_fp8(q, k, v, scales_of(), out_dtype=torch.float16).out.float()
    scale = scales_of().scale_s * 1e6
    cut = sdpa_fp8(q, k, v, scales_of(scale_s=scale, descale_s=1 / scale), out_dtype=torch.float16).out.float()
    assert cut.abs().amax() < plain.abs().amax() * 1e-3


def test_tiny_scales_underflow_everything_but_the_amax():
    q, k, v = qkv()
    result = sdpa_fp8(q, k, v, scales_of(scale_o=number(1e-20)))
    plain = sdpa_fp8(q, k, v, scales_of())
    assert result.out.float().abs().amax() == 0
    assert result.amax_o == plain.amax_o
    assert result.amax_s == plain.amax_s
    lost = sdpa_fp8(q, k, v, scales_of(scale_s=number(1e-20)))
    assert lost.out.float().abs().amax() == 0
    assert lost.amax_o == 0
    assert lost.amax_s == plain.amax_s


def test_queries_without_keys_have_zeros_and_lse_minus_infinity():
    q, k, v = qkv()
    result = sdpa_fp8(q, k, v, scales_of(), seq_lens_q=lens(3, 40), seq_lens_kv=lens(9, 0), return_lse=True)
    for rows, lse in ((result.out[0, :, 3:], result.lse[0, :, 3:]), (result.out[1], result.lse[1])):
        assert (rows.float() == 0).all()
        assert lse.isneginf().all()
    assert result.out[0, :, :3].float().abs().sum() > 0


@pytest.mark.parametrize(("lengths", "missing"), [((5, 0), "keys"), ((0, 5), "queries")])
def test_empty_inputs(lengths, missing):
    q, k, v = qkv(lengths=lengths)
    result = sdpa_fp8(q, k, v, scales_of(), return_lse=True)
    assert result.out.shape == (2, 4, lengths[0], 48), missing
    assert (result.out.float() == 0).all()
    assert result.lse.isneginf().all()
    assert (result.amax_s, result.amax_o) == (0, 0)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_output_has_the_memory_order_of_q(layout):
    q, k, v = qkv(layout=layout)
    out = sdpa_fp8(q, k, v, scales_of()).out
    order = sorted(range(4), key=q.stride().__getitem__)
    assert sorted(range(4), key=out.stride().__getitem__) == order
    gradients = backward(q, k, v, scales_of())[0]
    assert gradients.dq.stride() == q.stride()
    assert gradients.dv.stride() == v.stride()


def backward(q, k, v, scales, *, grad_dtype=E5M2, back=None, **options):
    forward = sdpa_fp8(q, k, v, scales, **options, return_lse=True)
    grad_out = fp8_of(*q.shape[:3], v.shape[3], dtype=grad_dtype, scale=19.0)
    back = backward_scales(q.dtype) if back is None else back
    return sdpa_fp8_backward(grad_out, q, k, v, forward.out, forward.lse, back, **options), grad_out, forward


def true_gradients(q, k, v, scales, grad_out, **options):
    leaves = [x.requires_grad_() for x in true_values(q, k, v, scales)]
    out, _ = attend(*leaves, **options)
    return torch.autograd.grad(out, leaves, grad_out.double() / 19.0)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_gradients_match_float64_up_to_fp8_rounding(grad_dtype, options):
    q, k, v = qkv(lengths=(40, 56))
    # Sharp scores have large gradients, which must not saturate.
    small = {"scale_dp": 75.0, "descale_dp": 1 / 75, "scale_dq": 23.0, "scale_dk": 17.0}
    back = backward_scales(**{name: number(value) for name, value in small.items()})
    found, grad_out, _ = backward(q, k, v, scales_of(), grad_dtype=grad_dtype, back=back, **options)
    expected = true_gradients(q, k, v, scales_of(), grad_out, **options)
    for name in ("dp", "dq", "dk", "dv"):
        assert getattr(found, f"amax_{name}") * getattr(back, f"scale_{name}") < torch.finfo(grad_dtype).max
    for name, exact in zip("qkv", expected, strict=True):
        scale = getattr(back, f"scale_d{name}").double()
        gradient = getattr(found, f"d{name}")
        assert gradient.dtype == grad_dtype
        error = (gradient.double() / scale - exact).norm() / exact.norm()
        assert error < 2.5 * ROUNDING[grad_dtype], name
        amax = getattr(found, f"amax_d{name}").double()
        torch.testing.assert_close(amax, exact.abs().amax().view(1), rtol=2.5 * ROUNDING[grad_dtype], atol=1e-3)


def test_amax_dp_is_the_amax_of_the_scaled_score_gradients():
    q, k, v = qkv()
    scale = 0.31
    found, grad_out, forward = backward(q, k, v, scales_of(), is_causal=True, scale=scale)
    exact_q, exact_k, exact_v = true_values(q, k, v, scales_of())
    weights = true_weights(exact_q, exact_k, is_causal=True, scale=scale)
    loss = grad_out.double() / 19.0
    mean = (loss * forward.out.double() / 23.0).sum(-1, keepdim=True)
    of_scores = weights * (loss @ exact_v.repeat_interleave(2, dim=1).transpose(-1, -2) - mean) * scale
    torch.testing.assert_close(found.amax_dp.double(), of_scores.abs().amax().view(1), rtol=1e-4, atol=1e-6)


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


def test_rows_past_the_lengths_have_no_gradient():
    q, k, v = qkv()
    options = {"seq_lens_q": lens(3, 40), "seq_lens_kv": lens(9, 0)}
    found, *_ = backward(q, k, v, scales_of(), **options)
    for gradient, kept in ((found.dq, 3), (found.dk, 9), (found.dv, 9)):
        assert (gradient[0, :, kept:].float() == 0).all()
        assert gradient[0, :, :kept].float().abs().sum() > 0
        assert (gradient[1].float() == 0).all()


GOOD = {"q": qkv()[0], "k": qkv()[1], "v": qkv()[2], "scales": scales_of()}


def with_scale(name, value):
    return {"scales": scales_of(**{name: value})}


WRONG = {
    "a list": ({"q": [1]}, OptionError, "q", "list", "Tensor"),
    "bfloat16": ({"q": torch.randn(2, 4, 8, 32).bfloat16()}, DtypeError, "q", "bfloat16", "float8_e4m3fn"),
    "rank": ({"q": GOOD["q"][0]}, ShapeError, "q", "(4, 40, 32)", "rank 4"),
    "two dtypes": ({"k": GOOD["k"].to(E5M2)}, DtypeError, "k", "float8_e5m2", "float8_e4m3fn"),
    "another dtype": ({"v": GOOD["v"].float()}, DtypeError, "v", "float32", "float8_e4m3fn"),
    "head dim": ({"v": fp8_of(2, 2, 56, 24)}, ShapeError, "v", "24", "multiple of 16"),
    "heads": ({"k": fp8_of(2, 3, 56, 32)}, ShapeError, "k", "3 heads", "divisor"),
    "keys": ({"v": fp8_of(2, 2, 55, 48)}, ShapeError, "v", "55", "56"),
    "batch": ({"k": fp8_of(1, 2, 56, 32)}, ShapeError, "k", "(1, 2, 56, 32)", "batch 2"),
    "device of k": ({"k": GOOD["k"].to("meta")}, DeviceError, "k", "meta", "cpu"),
    "stride": (
        {"q": fp8_of(2, 4, 40, 64)[..., ::2]},
        LayoutError,
        "q",
        "stride 2",
        "1: each head vector dense",
    ),
    "no scales": ({"scales": None}, OptionError, "scales", "NoneType", "Fp8Scales"),
    "scales of the other pass": (
        {"scales": backward_scales()},
        OptionError,
        "scales",
        "Fp8BackwardScales",
        "Fp8Scales",
    ),
    "a number": (with_scale("scale_s", 1.0), OptionError, "scales.scale_s", "float", "a torch.Tensor"),
    "float64": (with_scale("descale_q", number(1.0).double()), DtypeError, "scales.descale_q", "float64", "float32"),
    "bfloat16 scale": (
        with_scale("scale_o", number(1.0).bfloat16()),
        DtypeError,
        "scales.scale_o",
        "bfloat16",
        "float32",
    ),
    "a scale for each head": (
        with_scale("descale_k", torch.ones(4)),
        ShapeError,
        "scales.descale_k",
        "(4,)",
        "one element",
    ),
    "no element": (with_scale("descale_v", torch.ones(0)), ShapeError, "scales.descale_v", "(0,)", "one element"),
    "scale elsewhere": (
        with_scale("descale_s", torch.ones(1, device="meta")),
        DeviceError,
        "scales.descale_s",
        "meta",
        "cpu",
    ),
    "out_dtype": ({"out_dtype": torch.float32}, OptionError, "out_dtype", "float32", "bfloat16"),
    "out_dtype as text": ({"out_dtype": "fp8"}, OptionError, "out_dtype", "fp8", "float8_e5m2"),
    "is_causal": ({"is_causal": 1}, OptionError, "is_causal", "1", "True or False"),
    "alignment": ({"causal_alignment": "left"}, OptionError, "causal_alignment", "left", "top_left"),
    "window_size": ({"window_size": (1, 2, 3)}, OptionError, "window_size", "(1, 2, 3)", "two integers"),
    "negative scale": ({"scale": -0.5}, OptionError, "scale", "-0.5", "positive"),
    "scale of 0": ({"scale": 0.0}, OptionError, "scale", "0.0", "positive"),
    "scale on the GPU": ({"scale": number(1.0)}, OptionError, "scale", "Tensor", "float"),
    "lengths of int64": ({"seq_lens_kv": lens(1, 2).long()}, DtypeError, "seq_lens_kv", "int64", "int32"),
    "lengths of another batch": ({"seq_lens_q": lens(1)}, ShapeError, "seq_lens_q", "(1,)", "(2,)"),
    "lengths as a list": ({"seq_lens_q": [1, 2]}, OptionError, "seq_lens_q", "list", "None"),
    "return_lse": ({"return_lse": 1}, OptionError, "return_lse", "1", "True or False"),
}


@pytest.mark.parametrize(("changes", "kind", "argument", "got", "expected"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(changes, kind, argument, got, expected):
    with cpu_checks("h200"), pytest.raises(kind) as caught:
        sdpa_fp8(**{**GOOD, **changes})
    error = caught.value
    assert error.argument == argument
    assert got in str(error.got)
    assert expected in str(error.expected)


BACK = {
    "grad_out": fp8_of(2, 4, 40, 48, dtype=E5M2),
    **{name: GOOD[name] for name in ("q", "k", "v")},
    "out": fp8_of(2, 4, 40, 48),
    "lse": torch.randn(2, 4, 40),
    "scales": backward_scales(),
}
WRONG_BACKWARD = {
    "grad_out's shape": ({"grad_out": fp8_of(2, 4, 40, 32)}, ShapeError, "grad_out"),
    "grad_out's dtype": ({"grad_out": BACK["grad_out"].bfloat16()}, DtypeError, "grad_out"),
    "out's dtype": ({"out": BACK["out"].bfloat16()}, DtypeError, "out"),
    "out's device": ({"out": BACK["out"].to("meta")}, DeviceError, "out"),
    "out's strides": ({"out": fp8_of(2, 4, 40, 96)[..., ::2]}, LayoutError, "out"),
    "lse's shape": ({"lse": torch.randn(2, 4, 40, 1)}, ShapeError, "lse"),
    "lse's dtype": ({"lse": torch.randn(2, 4, 40).double()}, DtypeError, "lse"),
    "no lse": ({"lse": None}, OptionError, "lse"),
    "scales": ({"scales": scales_of()}, OptionError, "scales"),
    "float64": ({"scales": backward_scales(scale_dp=number(1.0).double())}, DtypeError, "scales.scale_dp"),
    "a number": ({"scales": backward_scales(descale_do=2)}, OptionError, "scales.descale_do"),
    "deterministic": ({"deterministic": 1}, OptionError, "deterministic"),
}


@pytest.mark.parametrize(("changes", "kind", "argument"), WRONG_BACKWARD.values(), ids=WRONG_BACKWARD)
def test_a_wrong_argument_of_the_backward_pass_is_named(changes, kind, argument):
    with cpu_checks("h200"), pytest.raises(kind) as caught:
        sdpa_fp8_backward(**{**BACK, **changes})
    assert caught.value.argument == argument


def test_tensors_that_require_grad_are_refused():
    q, k, v = qkv()
    with pytest.raises(UnsupportedError, match=r"scales\.scale_o requires grad.*\n.*sdpa_fp8_backward"):
        sdpa_fp8(q, k, v, scales_of(scale_o=number(2.0).requires_grad_()))
    with pytest.raises(UnsupportedError, match="v requires grad"):
        sdpa_fp8(q, k, v.requires_grad_(), scales_of())
    with torch.no_grad():
        sdpa_fp8(q, k, v, scales_of())
