"""`Fp8Attention` on a GPU: its kernels bit by bit, values, CUDA graphs, and no synchronization."""

from __future__ import annotations

import itertools

import pytest
import torch
from attention_checks import LAYOUTS, error, exact, make, nothing_synchronizes, poison

from cudnn_sdpa import Fp8Attention, Fp8Scaling, UnsupportedError, fp8_attention
from cudnn_sdpa.attention.fp8 import quantize as fp8_quantize
from cudnn_sdpa.attention.fp8.quantize import Wanted, dequantize, quantize, update_in_pytorch
from cudnn_sdpa.attention.fp8.scaling_state import DO, O, S, new_table, set_scales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The error bounds of docs/fp8.md for normally distributed values; gradients by their dtype.
OUTPUT, GRADIENT = 0.08, {E5M2: 0.22, E4M3: 0.15}
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

pytestmark = pytest.mark.skipif(CAPABILITY < (9, 0), reason="attention in FP8 needs compute capability 9.0")


def by_both(monkeypatch, run):
    """Results of this library's kernels, and of PyTorch's functions."""
    found = run()
    with monkeypatch.context() as patched:
        patched.setattr(fp8_quantize, "by_kernel", lambda *_: False)
        return found, run()


def assert_same_bits(found, expected):
    """The same values; NaN equals NaN."""
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        a, b = a.float(), b.float()  # noqa: PLW2901
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


def specials(x, kind):
    if kind in ("nan", "inf", "-inf"):
        x[-1, -1, -1, -1] = float(kind)
    elif kind == "tiny":
        x.mul_(1e-7)
    elif kind == "zeros":
        x.zero_()
    elif kind == "huge":
        x.mul_(1e4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_kernels_match_pytorch_bit_for_bit(layout, dtype, fp8, monkeypatch):
    for kind, by_amax, with_given in itertools.product(
        (None, "nan", "inf", "-inf", "tiny", "zeros", "huge"), (False, True), (False, True)
    ):
        shapes = ((2, 4, 129, 128), (2, 2, 77, 128), (2, 2, 77, 48))
        tensors = [make(layout, *shape, dtype) for shape in shapes]
        specials(tensors[1], kind)
        given = torch.rand(10, device="cuda") * 300 + 1 if with_given else None
        amaxes = {S: torch.tensor([0.7], device="cuda"), O: torch.tensor([3.25], device="cuda")}

        def run(tensors=tensors, given=given, by_amax=by_amax, amaxes=amaxes):
            table, record = new_table(tensors[0].device), torch.full((10,), 0.1, device="cuda")
            wanted = Wanted((0, 1, 2), fp8, 200.0, by_amax)
            made = quantize(tensors, wanted, table=table, given=given, record=record)
            back = dequantize(made, (0, 1, 2), dtype=dtype, table=table, amaxes=amaxes, record=record)
            return *made, *back, table, record

        assert_same_bits(*by_both(monkeypatch, run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 3.7e-3, 511.3])
def test_every_16_bit_and_8_bit_value_is_converted_like_pytorch(dtype, fp8, scale, monkeypatch):
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).view(1, 1, 2048, 32)
    bytes_ = torch.arange(256, device="cuda").to(torch.uint8).view(fp8).view(1, 1, 8, 32)

    def run():
        table = new_table(every.device)
        given = torch.full((10,), scale, device="cuda")
        made = quantize((every,), Wanted((0,), fp8, 448.0, False), table=table, given=given, record=None)
        clean = new_table(every.device)
        set_scales(clean, 0, torch.full((10,), scale, device="cuda"))
        return *made, *dequantize((bytes_,), (0,), dtype=dtype, table=clean, amaxes={}, record=None)

    assert_same_bits(*by_both(monkeypatch, run))


def test_large_tensors_are_converted_to_the_end(monkeypatch):
    x = make("bshd", 2, 33, 4099, 128, torch.bfloat16)
    run = lambda: quantize((x,), Wanted((DO,), E5M2, 1e4, True), table=new_table(x.device), given=None, record=None)  # noqa: E731
    assert_same_bits(*by_both(monkeypatch, run))


@pytest.mark.parametrize("length", [1, 2, 16, 31, 32, 33, 100])
@pytest.mark.parametrize("most_recent", [False, True])
def test_updates_match_pytorch_bit_for_bit(length, most_recent):
    limits = torch.tensor([448.0, 448, 448, 0, 448, *[57344.0] * 5], device="cuda")
    states = [[torch.zeros(10, length, device="cuda"), torch.ones(10, device="cuda")] for _ in range(2)]
    for step in range(2 * length + 6):
        amax = torch.rand(10, device="cuda") * 2.0 ** (step % 7)
        if step % 4 == 2:
            amax[step % 10] = (torch.nan, torch.inf)[step % 8 == 2]
        if step % 4 == 3:
            amax[:4] = 0
        for update, state in zip((fp8_quantize.update, update_in_pytorch), states, strict=True):
            mine = amax.clone()
            update(mine, *state, limits, most_recent=most_recent)
            assert (mine == 0).all()
        assert all(map(torch.equal, *states)), step


def problem(layout="bshd", *, lengths=(192, 256), dim=128, dtype=torch.bfloat16):
    q = make(layout, 2, 4, lengths[0], dim, dtype)
    k, v = (make(layout, 2, 2, lengths[1], dim, dtype) for _ in range(2))
    return [x.mul_(size).requires_grad_() for x, size in zip((q, k, v), (1.1, 0.9, 23.0), strict=True)]


def true_gradients(tensors, grad_out, **options):
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, _ = exact(*leaves, **options)
    return out.detach(), torch.autograd.grad(out, leaves, grad_out.double())


CASES = {
    "dense": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.05, "is_causal": True},
    "lengths": {"seq_lens_q": (150, 192), "seq_lens_kv": (256, 100)},
}


def options_of(case):
    return {
        name: torch.tensor(value, dtype=torch.int32, device="cuda") if isinstance(value, tuple) else value
        for name, value in CASES[case].items()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("grad_dtype", [E5M2, E4M3], ids=["e5m2", "e4m3"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_values_and_gradients(case, grad_dtype, layout):
    options, scaling = options_of(case), Fp8Scaling(grad_dtype=grad_dtype, calibration=1, device="cuda")
    for state in (None, scaling, scaling, scaling):
        tensors = problem(layout)
        poison(tensors[0].shape, dtype=torch.bfloat16)
        poison(tensors[0].shape, dtype=E4M3)
        out = fp8_attention(*tensors, scaling=state, grad_dtype=grad_dtype, **options)
        grad_out = torch.randn_like(out) * 1e-4
        found = torch.autograd.grad(out, tensors, grad_out)
        expected, gradients = true_gradients(tensors, grad_out, **options)
        assert error(out.detach(), expected) < OUTPUT
        assert (out.dtype, out.stride()) == (torch.bfloat16, tensors[0].stride())
        for name, gradient, wanted in zip("qkv", found, gradients, strict=True):
            assert error(gradient, wanted) < GRADIENT[grad_dtype], name
    assert scaling.knows_backward


def test_kernels_match_the_emulation_up_to_summation_order():
    on_gpu, on_cpu = (Fp8Attention(is_causal=True, scaling=Fp8Scaling(calibration=1)) for _ in range(2))
    on_gpu.cuda()
    for _ in range(3):
        tensors = problem()
        here = [x.detach().cpu().requires_grad_() for x in tensors]
        grad_out = torch.randn(tensors[0].shape).bfloat16() * 1e-3
        results = []
        for attend, leaves in ((on_gpu, tensors), (on_cpu, here)):
            out = attend(*leaves)
            results.append((out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(out.device))))
        for found, wanted, bound in zip(*results, (0.04, 0.08, 0.08, 0.06), strict=True):
            assert error(found.cpu(), wanted.double()) < bound
        torch.testing.assert_close(on_gpu.scaling.amax.cpu(), on_cpu.scaling.amax, rtol=0.1, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inference(dtype):
    q, k, v = (x.detach() for x in problem(dtype=dtype))
    expected, _ = exact(q, k, v, is_causal=True)
    for attend in (fp8_attention, lambda *x, **options: Fp8Attention(**options).cuda().eval()(*x)):
        poison(q.shape, dtype=dtype)
        out = attend(q, k, v, is_causal=True)
        assert out.dtype == dtype
        assert error(out, expected) < OUTPUT
    q[1, 2, 3, 4] = torch.inf
    assert fp8_attention(q, k, v).isnan().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_values_propagate_and_do_not_update_scales(value):
    attend = Fp8Attention(scaling=Fp8Scaling(auto_update=False, calibration=1)).cuda()
    for _ in range(2):
        attend(*problem()).square().mean().backward()
        attend.scaling.update()
    before = {name: tensor.clone() for name, tensor in attend.state_dict().items()}
    tensors = problem()
    out = attend(*tensors)
    grad_out = torch.randn_like(out)
    grad_out[0, 1, 2, 3] = value
    assert out.isfinite().all()
    assert all(gradient.isnan().all() for gradient in torch.autograd.grad(out, tensors, grad_out))
    attend.scaling.update()
    assert all(torch.equal(attend.state_dict()[name], tensor) for name, tensor in before.items())


def step(attend, tensors, grad_out):
    out = attend(*tensors)
    return out, *torch.autograd.grad(out, tensors, grad_out)


def test_nothing_synchronizes():
    attend, plain, fresh_layer = (
        Fp8Attention(is_causal=True, scaling=Fp8Scaling(calibration=steps)).cuda() for steps in (1, 1, 4)
    )
    tensors = problem()
    grad_out = torch.randn_like(tensors[0])
    for _ in range(2):
        step(attend, tensors, grad_out)
        step(plain, tensors, grad_out)
    fp8_attention(*(x.detach() for x in tensors))
    with nothing_synchronizes():
        found = step(attend, tensors, grad_out)
        fresh = step(lambda *x: fp8_attention(*x, is_causal=True), tensors, grad_out)  # calibrates
        fp8_attention(*(x.detach() for x in tensors))
        attend.scaling.update()
        for _ in range(6):  # the first four calibrate
            step(fresh_layer, tensors, grad_out)
    assert_same_bits(found[:1], step(plain, tensors, grad_out)[:1])
    assert error(fresh[0].detach(), found[0].detach().double()) < OUTPUT


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_our_kernels_run_under_the_profiler_and_autocast():
    tensors = [x.detach().float() for x in problem()]
    fp8_attention(*(x.bfloat16() for x in tensors))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = fp8_attention(*tensors)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profile.key_averages())
    assert out.dtype == torch.bfloat16
    assert "fp8_quantize" in names


@pytest.mark.skipif(CAPABILITY[0] != 9, reason="of Hopper")
def test_head_dims_without_gradients_are_refused_before_anything_runs():
    scaling = Fp8Scaling(device="cuda")
    tensors = problem(dim=64)
    with pytest.raises(UnsupportedError, match="head dim 128"):
        fp8_attention(*tensors, scaling=scaling)
    assert (scaling.amax == 0).all()
    with torch.no_grad():
        out = fp8_attention(*tensors, scaling=scaling)
    assert error(out, exact(*(x.detach() for x in tensors))[0]) < OUTPUT
