"""The fast path of FP8 calls, on a fake GPU: cached calls skip the checks, and no wrong call passes."""

from __future__ import annotations

import pytest
import torch
from fake_gpu import TARGET, FakeCache, FakePlan, poisoned, tensors_look_as_on_a_gpu
from test_fp8_calls import CASES, E4M3, E5M2, SCALES, lens, qkv, same, within

from cudnn_sdpa import (
    ArgumentError,
    Fp8BackwardScales,
    Fp8Scales,
    sdpa_fp8,
    sdpa_fp8_backward,
)
from cudnn_sdpa.attention.fp8 import launch, specs
from cudnn_sdpa.attention.fp8.call import Fp8BackwardCall, Fp8Call
from cudnn_sdpa.attention.fp8.sdpa_fp8 import FP8, FP8_BACKWARD
from cudnn_sdpa.engine import launch as engine_launch
from cudnn_sdpa.plans.cache import CallTable

pytestmark = pytest.mark.usefixtures("reference_alone")  # no GPU has kernels for all of these head dims and masks

FORWARD, BACKWARD = Fp8Scales(*SCALES[:6]), Fp8BackwardScales(*SCALES)


@pytest.fixture
def gpu(monkeypatch):
    """Calls a function as on a GPU; its results are poisoned first."""
    monkeypatch.setattr(engine_launch, "allocate", poisoned)
    monkeypatch.setattr(launch, "live_target", lambda _: TARGET)
    monkeypatch.setattr(launch, "plan_cache", FakeCache())
    for operation in (FP8, FP8_BACKWARD):
        monkeypatch.setattr(operation, "table", CallTable())

    def call(function, *args, **options):
        with tensors_look_as_on_a_gpu():
            return function(*args, **options)

    return call


@pytest.fixture
def checked(monkeypatch):
    seen = []
    for kind in (Fp8Call, Fp8BackwardCall):
        whole = kind.check
        monkeypatch.setattr(kind, "check", lambda call, whole=whole: seen.append(call) or whole(call))
    return seen


def equal(found, expected):
    return all(map(same, found, expected))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_call_is_checked_once(gpu, checked, case, return_lse, out_dtype):
    lengths, options = CASES[case]
    options = {**options, "out_dtype": out_dtype}
    for _ in range(4):
        q, k, v = qkv(lengths)
        scales = Fp8Scales(*(scale * 1.25 for scale in FORWARD))
        expected = sdpa_fp8(q, k, v, scales, **within(options, lengths), return_lse=return_lse)
        checked.clear()
        found = gpu(sdpa_fp8, q, k, v, scales, **options, return_lse=return_lse)
        if "seq_lens_q" in options:  # computed from the output
            torch.testing.assert_close(found.amax_o, expected.amax_o, rtol=2**-3, atol=0)
            found = found._replace(amax_o=expected.amax_o)
        assert equal(found, expected)
        assert found.out.stride() == expected.out.stride()
    assert checked == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_gradients_are_checked_once(gpu, checked, case, grad_dtype):
    lengths, options = CASES[case]
    for _ in range(4):
        q, k, v = qkv(lengths)
        made = sdpa_fp8(q, k, v, FORWARD, **within(options, lengths), return_lse=True)
        grad_out = torch.randn(q.shape).transpose(1, 2).contiguous().transpose(1, 2).to(grad_dtype)
        given = (grad_out, q, k, v, made.out, made.lse, BACKWARD)
        expected = sdpa_fp8_backward(*given, **within(options, lengths))
        checked.clear()
        found = gpu(sdpa_fp8_backward, *given, **options)
        assert equal(found, expected)
        assert [x.stride() for x in found] == [x.stride() for x in expected]
    assert checked == []


def test_each_option_is_another_cached_call(gpu):
    q, k, v = qkv((40, 56))
    cases = [
        {},
        {"is_causal": True},
        {"scale": 0.4},
        {"scale": 0.2},
        {"window_size": (5, 6)},
        {"window_size": (5, 7)},
        {"out_dtype": E5M2},
        {"return_lse": True},
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"seq_lens_q": lens(3, 9)},
        {"seq_lens_kv": lens(3, 9)},
    ]
    for _ in range(3):
        for options in cases:
            found, expected = gpu(sdpa_fp8, q, k, v, FORWARD, **options), sdpa_fp8(q, k, v, FORWARD, **options)
            assert same(found.out, expected.out)
            assert same(found.lse, expected.lse)


def bad_calls():
    q, k, v = qkv((40, 56))
    storage = torch.zeros(q.numel() + 16, dtype=torch.uint8).view(E4M3)
    return {
        "float64": ((q, k, v, FORWARD._replace(scale_o=FORWARD.scale_o.double())), {}),
        "two elements": ((q, k, v, FORWARD._replace(scale_o=torch.ones(2))), {}),
        "a number": ((q, k, v, FORWARD._replace(scale_o=2.0)), {}),
        "a tuple": ((q, k, v, tuple(FORWARD)), {}),
        "another dtype": ((q, k.view(E5M2), v, FORWARD), {}),
        "address": ((storage[8:-8].as_strided(q.shape, q.stride(), 8), k, v, FORWARD), {}),
        "is_causal=1": ((q, k, v, FORWARD), {"is_causal": 1}),
        "scale as a tensor": ((q, k, v, FORWARD), {"scale": torch.tensor(0.5)}),
        "window of tensors": ((q, k, v, FORWARD), {"window_size": (torch.tensor(5), 5)}),
        "window as a list": ((q, k, v, FORWARD), {"window_size": [1, 2, 3]}),
        "lengths of int64": ((q, k, v, FORWARD), {"seq_lens_kv": lens(1, 2).long()}),
        "a list": (([1], k, v, FORWARD), {}),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input_is_refused_warm_and_cold(gpu, name):
    good = (*qkv((40, 56)), FORWARD)
    args, options = bad_calls()[name]
    warm = (
        {"is_causal": True}
        if "is_causal" in options
        else {"scale": 0.5, "window_size": (5, 5), "seq_lens_kv": lens(1, 2)}
    )
    for _ in range(3):
        with pytest.raises(ArgumentError):
            gpu(sdpa_fp8, *args, **options)
        gpu(sdpa_fp8, *good)
        gpu(sdpa_fp8, *good, **{name: warm[name] for name in options if name in warm})


def test_an_unreadable_grad_out_is_copied_in_each_call(gpu):
    q, k, v = qkv((40, 56))
    made = sdpa_fp8(q, k, v, FORWARD, return_lse=True)
    wide = torch.randn(2, 4, 40, 256).to(E5M2)
    for grad_out in (wide[..., :128], wide[..., ::2], wide[..., :128], wide[..., ::2]):
        given = (grad_out, q, k, v, made.out, made.lse, BACKWARD)
        assert equal(gpu(sdpa_fp8_backward, *given), sdpa_fp8_backward(*given))
    turned = made.lse.transpose(1, 2).contiguous().transpose(1, 2)
    given = (wide[..., :128], q, k, v, made.out, turned, BACKWARD)
    for _ in range(2):
        assert equal(gpu(sdpa_fp8_backward, *given), sdpa_fp8_backward(*given))


@pytest.fixture
def misaligned(monkeypatch):
    """Names of operands whose addresses were no multiple of 16 when a plan was launched."""
    found, launch = [], FakePlan.launch

    def watched(plan, addresses):
        operands = (*plan.key.inputs, *plan.key.outputs)
        large = [op.layout.shape[2] > 1 for op in operands]  # cuDNN reads one-element tensors at any address
        found.extend(
            op.name for op, at, is_large in zip(operands, addresses, large, strict=True) if is_large and at % 16
        )
        launch(plan, addresses)

    monkeypatch.setattr(FakePlan, "launch", watched)
    return found


def moved(x):
    """The same values, one byte past a multiple of 16."""
    memory = torch.empty(x.numel() + 32, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + 1
    return memory[start : start + x.numel()].view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_misaligned_grad_out_is_copied_warm(gpu, misaligned, is_causal, monkeypatch):
    monkeypatch.setattr(specs, "_LONG", 16)  # causal calls are split into batch entries
    monkeypatch.setattr(specs, "_ENOUGH_TILES", 1)
    q, k, v = qkv((48, 48))
    made = sdpa_fp8(q, k, v, FORWARD, is_causal=is_causal, return_lse=True)
    grad_out = torch.randn(2, 4, 48, 128).to(E5M2)
    given = (q, k, v, made.out, made.lse, BACKWARD)
    expected = sdpa_fp8_backward(grad_out, *given, is_causal=is_causal)
    wide = torch.cat([grad_out.view(torch.uint8), torch.full((2, 4, 48, 16), 0x42, dtype=torch.uint8)], -1).view(E5M2)
    with_gaps = wide[..., :128], moved(wide)[..., :128]  # a copy keeps the gaps, which the plan has
    for gradient in (grad_out, grad_out.clone(), moved(grad_out), grad_out, *with_gaps):
        found = gpu(sdpa_fp8_backward, gradient, *given, is_causal=is_causal)
        assert all(map(same, found, expected))
    assert misaligned == []


def test_the_lse_without_fully_masked_rows_is_aligned(gpu, misaligned):
    q, k = torch.randn(1, 1, 49, 128).to(E4M3), torch.randn(1, 1, 48, 128).to(E4M3)
    mask = {"is_causal": True, "causal_alignment": "bottom_right"}
    made = sdpa_fp8(q, k, k.clone(), FORWARD, **mask, return_lse=True)
    grad_out = torch.randn(1, 1, 49, 128).to(E5M2)
    given = (grad_out, q, k, k.clone(), made.out, made.lse, BACKWARD)
    expected = sdpa_fp8_backward(*given, **mask)
    assert all(map(same, gpu(sdpa_fp8_backward, *given, **mask), expected))
    assert misaligned == []


def test_a_window_may_be_a_list(gpu):
    q, k, v = qkv((40, 56))
    expected = sdpa_fp8(q, k, v, FORWARD, window_size=(9, 4))
    for _ in range(2):
        assert same(gpu(sdpa_fp8, q, k, v, FORWARD, window_size=[9, 4]).out, expected.out)
