"""Attention in FP8 on the GPU: values, amax values, masks, layouts, and what every scale does."""

from __future__ import annotations

import math

import fp8_values
import pytest
import torch
from fp8_values import E4M3, E5M2, LAYOUTS, ROUNDING, Problem, error, forward, lens, number, problem

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8

DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
BOTTOM_RIGHT = {"causal_alignment": "bottom_right"}
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, **BOTTOM_RIGHT},
    "left window": {"window_size": (50, -1)},
    "window_size": {"window_size": (70, 9), "scale": 0.13},
    "causal window": {"is_causal": True, "window_size": (33, -1)},
    "window, bottom-right": {"window_size": (150, 20), **BOTTOM_RIGHT},
    "the diagonal": {"is_causal": True, "window_size": (0, -1)},
    "lengths": {"lengths": ((200, 7), (333, 150))},
    "lengths of keys, causal": {"is_causal": True, "lengths": (None, (100, 333))},
    "lengths of queries, window": {"window_size": (90, 5), "lengths": ((1, 130), None)},
    "sequences without keys or queries": {"lengths": ((0, 120), (333, 0))},
    "a sequence without keys, all queries": {"lengths": (None, (333, 0))},
    "causal window, late queries see nothing": {
        "is_causal": True,
        "window_size": (20, -1),
        "lengths": (None, (100, 30)),
    },
    "lengths past the tensors": {"lengths": ((900, 120), (200, 1000))},
}


def options_of(mask: str) -> dict[str, object]:
    options = dict(MASKS[mask])
    given = options.pop("lengths", (None, None))
    names = zip(("seq_lens_q", "seq_lens_kv"), given, strict=True)
    return options | {name: lens(*values) for name, values in names if values is not None}


def check(of: Problem, out_dtype: torch.dtype | None = None, **options: object) -> None:
    """Output, log-sum-exp and amax values against float64, with an error no larger than the emulation's."""
    given = {**options, **({"out_dtype": out_dtype} if out_dtype else {})}
    found, plain = forward(of, return_lse=True, **given), forward(of, **given)
    exact_out, exact_lse, weights = fp8_values.exact(*fp8_values.true_values(of), **options)
    emulated = fp8_values.emulated(of, out_dtype, **options)
    scale_o, dtype = of.scales.scale_o.double(), out_dtype or of.q.dtype
    own = error(emulated.out.double() / scale_o, exact_out)
    for out in (found.out, plain.out):
        assert (out.shape, out.dtype) == (exact_out.shape, dtype)
        ours = error(out.double() / scale_o, exact_out)
        assert ours <= 1.1 * own + 1e-3, f"{ours} where the format itself has {own}"
        assert (out.float()[exact_out == 0] == 0).all(), "rows that see nothing must be zeros"
    assert found.lse.dtype == torch.float32
    masked_rows = exact_lse.isneginf()
    assert (found.lse[masked_rows] == -math.inf).all()
    torch.testing.assert_close(found.lse[~masked_rows].double(), exact_lse[~masked_rows], rtol=1e-3, atol=3e-3)
    for result in (found, plain):
        if "seq_lens_q" in options:  # Hopper's kernels also process padding queries
            assert 0.995 * weights.amax() <= result.amax_s.double() <= 1.001
        else:
            torch.testing.assert_close(result.amax_s.double(), weights.amax().view(1), rtol=5e-3, atol=0)
        torch.testing.assert_close(result.amax_o, emulated.amax_o, rtol=4 * ROUNDING[of.q.dtype], atol=0)
        assert result.amax_s.shape == result.amax_o.shape == (1,)


@DTYPES
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype):
    check(problem(dtype=dtype), **options_of(mask))


@pytest.mark.parametrize("mask", ["full", "causal", "bottom-right", "causal window", "lengths"])
def test_fewer_keys_than_queries(mask):
    options = options_of(mask)
    if "seq_lens_q" in options:
        options = {"seq_lens_q": lens(333, 100), "seq_lens_kv": lens(3, 200)}
    check(problem(sizes=(333, 200)), **options)


@pytest.mark.parametrize("mask", ["full", "causal", "lengths of keys, causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, mask):
    of = problem(layout=layout)
    check(of, **options_of(mask))
    out = sdpa_fp8(*of).out
    assert out.permute(sorted(range(4), key=lambda i: -of.q.stride(i))).is_contiguous()


@DTYPES
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_dtypes_of_the_output(dtype, out_dtype):
    check(problem(dtype=dtype), out_dtype, is_causal=True)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_outputs_that_are_not_fp8_need_blackwell(out_dtype):
    of = problem()
    if torch.cuda.get_device_capability()[0] == 10:
        check(of, out_dtype, is_causal=True)
    else:
        with pytest.raises(UnsupportedError, match=r"out\.to\(torch\.bfloat16\) / scales\.scale_o"):
            sdpa_fp8(*of, out_dtype=out_dtype)


@pytest.mark.parametrize("heads", [(1, 1), (5, 5), (8, 1), (71, 1), (6, 3), (32, 8)], ids=str)
def test_groups(heads):
    check(problem(heads=heads, batch=3, sizes=(65, 97)), is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 1), (2, 1000), (17, 1), (7, 3), (3, 7), (127, 129), (129, 127), (128, 128), (513, 200)], ids=str
)
def test_sizes(sizes, is_causal):
    check(problem(sizes=sizes), is_causal=is_causal)


def test_long_rows():
    check(problem(batch=1, sizes=(300, 20_000)))
    check(problem(batch=1, heads=(2, 1), sizes=(4096, 4096)), is_causal=True)


HEAD_DIMS = [*((d, d) for d in range(16, 257, 16)), (192, 128), (64, 128), (128, 64), (192, 256), (256, 128)]


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_head_dims(dims):
    if torch.cuda.get_device_capability()[0] == 9 or max(dims) <= 128:
        check(problem(dims=dims), is_causal=True)
    else:
        with pytest.raises(UnsupportedError, match="head dim"):
            sdpa_fp8(*problem(dims=dims))


@pytest.mark.parametrize("dims", [(128, 144), (64, 256)], ids=str)
def test_values_too_wide_for_their_keys_are_refused(dims):
    """cuDNN has a plan, but it accesses memory outside of its operands."""
    with pytest.raises(UnsupportedError, match="head dim"):
        sdpa_fp8(*problem(dims=dims))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.7, 3])
def test_scale_is_data(scale):
    of = problem()
    sdpa_fp8(*of)
    sdpa_fp8(*of, return_lse=True)
    with cudnn_sdpa.no_plan_builds():
        check(of, scale=scale)


def test_scales_are_data_and_each_matters():
    """Descales that are not reciprocals of scales reveal a kernel that skips a pair of them."""
    of = problem()
    base = forward(of, return_lse=True)
    forward(of)
    with cudnn_sdpa.no_plan_builds():
        for name in ("descale_s", "descale_v", "scale_o"):
            changed = of._replace(scales=of.scales._replace(**{name: getattr(of.scales, name) * 2}))
            found = forward(changed, return_lse=True)
            assert error(found.out.double(), 2 * base.out.double()) < 1e-3, name
            assert torch.equal(found.lse, base.lse)
            assert float(found.amax_o / base.amax_o) == pytest.approx(1 if name == "scale_o" else 2, rel=1e-3)
        for name in ("descale_q", "descale_k"):
            check(of._replace(scales=of.scales._replace(**{name: getattr(of.scales, name) * 1.7})), is_causal=False)
        twice = of._replace(scales=of.scales._replace(scale_s=of.scales.scale_s / 2))
        assert error(forward(twice, return_lse=True).out.double(), base.out.double() / 2) < 0.03


def test_many_random_scales():
    for _ in range(20):
        check(problem(sizes=(60, 90), heads=(2, 2)), is_causal=True)


@DTYPES
def test_overflow_saturates(dtype):
    of = problem(dtype=dtype, scale_o=1e15)
    found = forward(of).out.float()
    largest = torch.finfo(dtype).max
    assert set(found.abs().unique().tolist()) <= {0.0, largest}
    assert float(forward(of).amax_o) < 10  # the amax is taken before the scale


@DTYPES
def test_too_large_exponentials_saturate(dtype):
    of = problem(dtype=dtype)
    far = 50 * torch.finfo(dtype).max
    cut = of._replace(scales=of.scales._replace(scale_s=number(far), descale_s=number(1 / far)))
    found, emulated = forward(cut), fp8_values.emulated(cut)
    assert found.out.float().isfinite().all()
    assert float(found.amax_o) < float(forward(of).amax_o)
    assert float(found.amax_o / emulated.amax_o) == pytest.approx(1, rel=0.5)


def test_tiny_scales_underflow_everything_but_the_amax():
    of = problem()
    base = forward(of)
    lost = forward(of._replace(scales=of.scales._replace(scale_o=number(1e-20))))
    assert (lost.out.float() == 0).all()
    assert (float(lost.amax_o), float(lost.amax_s)) == (float(base.amax_o), float(base.amax_s))
    rounded_away = forward(of._replace(scales=of.scales._replace(scale_s=number(1e-20))))
    assert (rounded_away.out.float() == 0).all()
    assert float(rounded_away.amax_o) == 0


def test_amax_is_of_this_call_alone():
    of = problem()
    large = of._replace(scales=of.scales._replace(descale_v=of.scales.descale_v * 1000))
    small = forward(of)
    for _ in range(3):
        sdpa_fp8(*large)
        again = sdpa_fp8(*of)
        assert (float(again.amax_o), float(again.amax_s)) == (float(small.amax_o), float(small.amax_s))


def test_scales_at_addresses_of_4_bytes():
    of = problem()
    buffer = torch.cat([number(3.0), *of.scales, number(7.0)])
    views = cudnn_sdpa.attention.fp8.sdpa_fp8.Fp8Scales(*(buffer[i + 1] for i in range(6)))
    assert any(x.data_ptr() % 16 for x in views)
    base, found = forward(of, return_lse=True), forward(of._replace(scales=views), return_lse=True)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(base, found, strict=True))


def test_empty():
    of = problem()
    none = of._replace(k=of.k[:, :, :0], v=of.v[:, :, :0])
    found = forward(none, return_lse=True)
    assert (found.out.float() == 0).all()
    assert found.lse.isneginf().all()
    assert (float(found.amax_s), float(found.amax_o)) == (0, 0)
    assert sdpa_fp8(of.q[:, :, :0], *of[1:]).out.shape == (2, 4, 0, 128)
    assert sdpa_fp8(*(x[:0] for x in of[:3]), of.scales).out.shape == (0, 4, 200, 128)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_propagates_only_to_dependent_results(name):
    of = problem()
    getattr(of, name).view(torch.uint8)[0, 0, 5, 7] = 0x7F
    found, emulated = forward(of, return_lse=True), fp8_values.emulated(of)
    assert torch.equal(found.out.float().isnan().any(-1), emulated.out.float().isnan().any(-1))
    clean = ~emulated.out.float().isnan()
    assert error(found.out.float()[clean], emulated.out.float()[clean]) < 0.06


def test_a_single_query_is_refused_before_blackwell():
    of = problem(sizes=(1, 300))
    if torch.cuda.get_device_capability()[0] == 9:
        with pytest.raises(UnsupportedError, match="single query"):
            sdpa_fp8(*of)
        wide = of._replace(q=of.q.expand(-1, -1, 2, -1))  # as the message suggests
        found = sdpa_fp8(*wide, seq_lens_q=lens(1, 1)).out
        expected = fp8_values.exact(*fp8_values.true_values(of))[0]
        assert error(found[:, :, :1].double() / of.scales.scale_o.double(), expected) < 0.06
        assert (found[:, :, 1:].float() == 0).all()


def test_bottom_right_windows_with_lengths_are_right_or_refused():
    """With more queries than keys and the left bound, Hopper's kernel attends to keys past a length."""
    of, lengths = problem(sizes=(130, 333)), {"seq_lens_q": lens(130, 100), "seq_lens_kv": lens(64, 150)}
    for left in (3, 100, 129, 200):
        options = {"window_size": (left, -1), **BOTTOM_RIGHT, **lengths}
        if left < 129 and torch.cuda.get_device_capability()[0] == 9:
            with pytest.raises(UnsupportedError, match="more queries than keys plus the left bound"):
                sdpa_fp8(*of, **options)
        else:
            check(of, **options)


def test_bottom_right_with_lengths_is_refused_on_hopper():
    of = problem()
    options = {"is_causal": True, **BOTTOM_RIGHT, "seq_lens_kv": lens(300, 200)}
    if torch.cuda.get_device_capability()[0] == 9:
        with pytest.raises(UnsupportedError, match="bottom-right"):
            sdpa_fp8(*of, **options)
    else:
        check(of, **options)
