"""Gradients of attention in FP8 on the GPU."""

from __future__ import annotations

import fp8_values
import pytest
import torch
from fp8_values import E4M3, E5M2, LAYOUTS, ROUNDING, Problem, backward, error, lens, problem
from test_fp8_values import MASKS, options_of

from cudnn_sdpa import UnsupportedError, no_plan_builds
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="cuDNN has no FP8 gradients for this GPU",
)
NAMES = "qkv"
#: Relative error of gradients against float64, in the Frobenius norm, for normal random values and good scales.
BOUND = {E4M3: 0.06, E5M2: 0.11}


def check(of: Problem, grad_dtype: torch.dtype = E5M2, **options: object) -> None:
    """Gradients and their amax values against float64, with an error no larger than the emulation's."""
    found, grad_out, made, scales = backward(of, grad_dtype, **options)
    wanted = fp8_values.true_gradients(of, grad_out, scales, **options)
    emulated = fp8_values.emulated_gradients(of, grad_out, made.out, made.lse, scales, **options)
    visible = fp8_values.seen(of.q, of.k, options)
    for name, tensor, exact in zip(NAMES, of[:3], wanted, strict=True):
        gradient, scale = getattr(found, f"d{name}"), getattr(scales, f"scale_d{name}").double()
        assert (gradient.shape, gradient.dtype) == (tensor.shape, grad_dtype)
        order = sorted(range(4), key=lambda i: -tensor.stride(i))
        assert gradient.permute(order).is_contiguous()
        own = error(getattr(emulated, f"d{name}").double() / scale, exact)
        ours = error(gradient.double() / scale, exact)
        assert ours <= 1.1 * own + 2e-3, f"d{name}: {ours} where the format itself has {own}"
        rows = visible.any(-1 if name == "q" else -2).expand(-1, tensor.shape[1], -1)
        assert (gradient.float()[~rows] == 0).all(), "what is not seen must get zeros"
        amax, expected = getattr(found, f"amax_d{name}"), getattr(emulated, f"amax_d{name}")
        assert amax.shape == (1,)
        torch.testing.assert_close(amax, expected, rtol=1.5 * ROUNDING[grad_dtype], atol=0)  # dS may round either way
    torch.testing.assert_close(found.amax_dp, emulated.amax_dp, rtol=2e-2, atol=0)


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, grad_dtype):
    check(problem(), grad_dtype, **options_of(mask))


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_documented_bound(is_causal, grad_dtype):
    of = problem(sizes=(512, 512))
    found, grad_out, _, scales = backward(of, grad_dtype, is_causal=is_causal)
    for name, exact in zip(NAMES, fp8_values.true_gradients(of, grad_out, scales, is_causal=is_causal), strict=True):
        scale = getattr(scales, f"scale_d{name}").double()
        assert error(getattr(found, f"d{name}").double() / scale, exact) < BOUND[grad_dtype], name
        amax = getattr(found, f"amax_d{name}").double()
        torch.testing.assert_close(amax, exact.abs().amax().view(1), rtol=0.1, atol=0)


def test_queries_and_keys_in_e5m2():
    check(problem(dtype=E5M2), is_causal=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    check(problem(layout=layout), is_causal=True)


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (8, 1), (6, 3), (32, 8)], ids=str)
def test_groups(heads):
    check(problem(heads=heads, sizes=(65, 97)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 100), (2, 1), (17, 1), (7, 3), (127, 129), (129, 127), (128, 128), (513, 200), (192, 200)], ids=str
)
def test_sizes(sizes, is_causal):
    check(problem(sizes=sizes), is_causal=is_causal)


def test_head_dims_that_hopper_lacks_are_refused():
    of = problem(dims=(64, 64))
    made = fp8_values.forward(of, return_lse=True)
    grad_out = fp8_values.fp8_of(tuple(of.q.shape), 20.0)
    scales = fp8_values.backward_scales(of, descale_do=1 / 20.0)
    if torch.cuda.get_device_capability()[0] == 9:
        with pytest.raises(UnsupportedError, match="padded with zeros to head dim 128"):
            sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, scales)


def test_heads_padded_to_128_have_the_same_gradients():
    """The error for a head dim without a kernel suggests this padding."""
    small = problem(dims=(64, 64))
    padded = [torch.cat([x.view(torch.uint8), torch.zeros_like(x.view(torch.uint8))], -1).view(E4M3) for x in small[:3]]
    of = Problem(*padded, small.scales)
    found, grad_out, _, scales = backward(of, E5M2, scale=64**-0.5)
    cut = [grad_out.double()[..., :64] * scales.descale_do.double()]
    leaves = [x.requires_grad_() for x in fp8_values.true_values(small)]
    wanted = torch.autograd.grad(fp8_values.exact(*leaves)[0], leaves, cut)
    for name, exact in zip(NAMES, wanted, strict=True):
        scale = getattr(scales, f"scale_d{name}").double()
        assert error(getattr(found, f"d{name}").double()[..., :64] / scale, exact) < BOUND[E5M2], name


def test_each_scale_matters_and_is_data():
    of = problem()
    base, grad_out, made, scales = backward(of)
    with no_plan_builds():
        for name in Fp8BackwardScales._fields:
            changed = scales._replace(**{name: getattr(scales, name) * 1.7})
            found = sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, changed)
            wanted = fp8_values.emulated_gradients(of, grad_out, made.out, made.lse, changed)
            for field, a, b in zip(found._fields, found, wanted, strict=True):
                assert error(a, b) < 0.03, f"{field} with another {name}"
            assert any(not torch.equal(a.float(), b.float()) for a, b in zip(base, found, strict=True)), name


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_overflow_saturates(dtype):
    changes = {"scale_dq": 1e9, "scale_dk": 1e9, "scale_dv": 1e9, "scale_dp": 1e9, "descale_dp": 1e-9}
    found, *_ = backward(problem(), dtype, changes=changes)
    for gradient in found[:3]:
        assert gradient.float().isfinite().all()
        assert gradient.float().abs().amax() == torch.finfo(dtype).max
    assert all(x.isfinite() for x in found[3:])


def test_tiny_scales_underflow_everything_but_the_amax():
    of = problem()
    found, _, made, scales = backward(of, changes={"scale_dq": 1e-20, "scale_dk": 1e-20, "scale_dv": 1e-20})
    assert all((gradient.float() == 0).all() for gradient in found[:3])
    assert all(float(amax) > 0 for amax in found[3:])
    lost, *_ = backward(of, changes={"scale_dp": 1e-20})
    assert float(lost.amax_dq) == float(lost.amax_dk) == 0
    assert float(lost.amax_dv) > 0
    assert made.lse is not None
    assert scales is not None


def test_gradients_of_any_layout():
    of = problem()
    _, grad_out, made, scales = backward(of)
    rest = (*of[:3], made.out, made.lse, scales)
    plain = sdpa_fp8_backward(grad_out, *rest)
    wide = torch.empty(*grad_out.shape[:3], 256, dtype=torch.uint8, device=grad_out.device).view(E5M2)[..., ::2]
    for other in (wide.copy_(grad_out), grad_out.mT.contiguous().mT, grad_out.contiguous()):
        again = sdpa_fp8_backward(other, *rest)
        assert all(error(a, b) < 1e-3 for a, b in zip(again, plain, strict=True))
    expanded = grad_out[:, :, :1].expand_as(grad_out)
    found = sdpa_fp8_backward(expanded, *rest)
    wanted = sdpa_fp8_backward(expanded.contiguous(), *rest)
    assert all(error(a, b) < 1e-3 for a, b in zip(found, wanted, strict=True))


def test_very_negative_lse():
    """On cuDNN 9.19 gradients in bfloat16 are NaN then, unless actual sequence lengths are given."""
    of = problem(sizes=(192, 200), heads=(2, 2))
    direction = torch.randn(2, 2, 1, 128, device=of.q.device).sign() * 60
    of.q.copy_(direction.to(E4M3))
    of.k.copy_((-direction).to(E4M3))
    found, grad_out, made, scales = backward(of, scale=1.5)
    assert made.lse is not None
    assert (made.lse < -100).all()
    assert all(x.float().isfinite().all() for x in found)
    wanted = fp8_values.true_gradients(of, grad_out, scales, scale=1.5)
    scale = scales.scale_dv.double()
    assert error(found.dv.double() / scale, wanted[2]) < BOUND[E5M2]


def test_empty():
    of = problem()
    none = of._replace(k=of.k[:, :, :0], v=of.v[:, :, :0])
    found, *_ = backward(none)
    assert (found.dq.float() == 0).all()
    assert found.dk.shape == (2, 2, 0, 128)
    assert all(float(x) == 0 for x in found[3:])


def test_deterministic_gradients_are_bit_exact():
    of = problem(heads=(8, 2), sizes=(700, 1100))
    made = sdpa_fp8(*of, is_causal=True, return_lse=True)
    grad_out = fp8_values.fp8_of(tuple(of.q.shape), 300.0, dtype=E5M2)
    scales = fp8_values.backward_scales(of, descale_do=1 / 300)
    runs = [
        sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, scales, is_causal=True, deterministic=True)
        for _ in range(10)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(run, runs[0], strict=True))
    forwards = [sdpa_fp8(*of, is_causal=True, return_lse=True) for _ in range(10)]
    for run in forwards:
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(run, made, strict=True))


def test_padding_rows_are_ignored():
    of = problem()
    ends_q, ends_kv = lens(150, 31), lens(200, 333)
    clean, grad_out, made, scales = backward(of, seq_lens_q=ends_q, seq_lens_kv=ends_kv)
    for tensor, ends in ((of.q, ends_q), (of.k, ends_kv), (of.v, ends_kv)):
        for entry, end in enumerate(ends.tolist()):
            tensor[entry, :, end:].view(torch.uint8).fill_(0x7E)  # 448
    again = sdpa_fp8(*of, seq_lens_q=ends_q, seq_lens_kv=ends_kv, return_lse=True)
    for name in ("out", "amax_o", "lse"):  # the largest probability may be a padding query's
        assert torch.equal(getattr(again, name).float(), getattr(made, name).float()), name
    found = sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, scales, seq_lens_q=ends_q, seq_lens_kv=ends_kv)
    assert all(x.float().isfinite().all() for x in found)
    assert all(error(a, b) < 0.02 for a, b in zip(found, clean, strict=True))
