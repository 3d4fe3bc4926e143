"""Calibration, loading and ownership of FP8 scales, on the CPU."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import pickle

import fake_gpu
import pytest
import torch
from fake_gpu import BLOCK
from float64_reference import gradients
from fp8_layers import E4M3, E5M2, GRADIENT, OUTPUT, assert_near, error, qkv, train
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import Fp8Attention, Fp8Scaling, OptionError, ShapeError, fp8_attention
from cudnn_sdpa.attention.fp8 import fp8_attention as fp8_attention_module
from cudnn_sdpa.attention.fp8 import quantize, scaling_state
from cudnn_sdpa.attention.fp8.quantize import scales_of, update_in_pytorch
from cudnn_sdpa.attention.fp8.scaling_state import DO, NAMES, SCALE_S, S

pytestmark = pytest.mark.usefixtures("reference_alone")  # no GPU has kernels for all of these head dims and masks

FORWARD, BACKWARD = slice(0, DO), slice(DO, None)


def layer(**options):
    return Fp8Attention(scaling=Fp8Scaling(**options))


@pytest.fixture
def launches(monkeypatch):
    """Number of backward passes that cuDNN would run."""
    made = []
    original = fp8_attention_module._gradients
    monkeypatch.setattr(fp8_attention_module, "_gradients", lambda *x: made.append(1) or original(*x))
    return made


# Calibration


@pytest.mark.parametrize("calibration", [1, 2, 4])
@pytest.mark.parametrize("grad_dtype", [E5M2, E4M3], ids=["e5m2", "e4m3"])
def test_calibration_steps_use_current_scaling(calibration, grad_dtype, launches):
    attend = layer(calibration=calibration, grad_dtype=grad_dtype)
    for step in range(calibration + 2):
        launches.clear()
        tensors, grad_scale = qkv(), 10.0 ** -(step % 3 + 3)
        plain = fp8_attention(*tensors, grad_dtype=grad_dtype)
        found = train(attend, tensors=tensors, grad_scale=grad_scale)
        calibrates = step < calibration
        assert torch.equal(found[0], plain) == calibrates
        assert len(launches) == (1 if not calibrates else 2 if grad_dtype == E5M2 else 3)
        assert attend.scaling.knows_forward != calibrates
        if calibrates:
            assert_near(found, grad_dtype)


def test_calibration_steps_follow_any_change_of_magnitude():
    attend = layer(calibration=3)
    for growth in (1.0, 300.0, 1e-3):
        tensors = [(x.detach() * growth).requires_grad_() for x in qkv()]
        q, k, v = tensors[0].detach() / growth**2, tensors[1], tensors[2]
        assert_near(train(attend, tensors=(q.requires_grad_(), k, v), grad_scale=growth))


def test_forward_and_backward_passes_calibrate_separately():
    attend = layer(calibration=2, auto_update=False)
    for _ in range(2):
        with torch.no_grad():
            attend(*qkv())
        attend.scaling.update()
    assert attend.scaling.knows_forward
    assert not attend.scaling.knows_backward
    for _ in range(2):
        assert_near(train(attend, grad_scale=1e-9))
        attend.scaling.update()
    assert attend.scaling.knows_backward


def test_micro_batches_of_a_step_calibrate_together():
    attend = layer(calibration=1, auto_update=False)
    for _ in range(3):
        assert not attend.scaling.knows_backward
        assert_near(train(attend))
    attend.scaling.update()
    assert attend.scaling.knows_backward


def test_evaluation_uses_current_scaling_until_calibration_ends():
    """A history of skipped steps would be empty."""
    attend = layer(calibration=2)
    for step in range(3):
        train(attend)
        before = copy.deepcopy(attend.state_dict())
        attend.eval()
        q, k, v = (x.detach() for x in qkv())
        assert torch.equal(attend(q, k, v), fp8_attention(q, k, v)) == (step < 2)
        assert all(torch.equal(attend.state_dict()[name], x) for name, x in before.items())
        attend.train()
        assert attend.scaling._steps.recorded == [True, True]


@pytest.mark.parametrize("bad", ["zeros", "inf", "nan"])
@pytest.mark.parametrize("grad_dtype", [E5M2, E4M3], ids=["e5m2", "e4m3"])
def test_first_gradients_may_be_zero_or_non_finite(bad, grad_dtype):
    attend = layer(calibration=4, grad_dtype=grad_dtype)
    for _ in range(3):
        tensors = qkv()
        out = attend(*tensors)
        grad_out = torch.zeros_like(out) if bad == "zeros" else torch.full_like(out, float(bad))
        for gradient in torch.autograd.grad(out, tensors, grad_out):
            assert (gradient == 0).all() if bad == "zeros" else gradient.isnan().all()
    for _ in range(4):  # one more calibration step, then the history is used
        assert_near(train(attend, grad_scale=1e-8), grad_dtype)
    assert attend.scaling.knows_backward


def test_gradients_survive_a_zero_initialized_projection():
    """The first gradient of attention is then zero, and the next ones are tiny."""
    attend = Fp8Attention()
    projection = torch.nn.Linear(32, 32, bias=False)
    torch.nn.init.zeros_(projection.weight)
    optimizer = torch.optim.SGD(projection.parameters(), lr=1e-7)
    for step in range(7):
        tensors = qkv()
        out = attend(*tensors)
        out.retain_grad()
        projection(out.float()).sub(1).square().mean().backward()
        if step:
            assert 0 < out.grad.abs().amax() < 2.0**-16, "what E5M2 holds with a scale of 1"
        _, _, exact = gradients(dict(zip("qkv", tensors, strict=True)), out.grad)
        for name, x in zip("qkv", tensors, strict=True):
            assert error(x.grad, exact[name]) < GRADIENT[E5M2] if step else (x.grad == 0).all()
        optimizer.step()
        optimizer.zero_grad()
    assert attend.scaling.knows_backward


@pytest.mark.parametrize("auto_update", [True, False])
def test_a_grad_scaler_may_overflow_during_calibration(auto_update):
    """Skipped steps do not update scales; gradients of the following steps are right at once."""
    attend = layer(auto_update=auto_update)
    weights, largest = torch.nn.Parameter(torch.ones(3, 32)), torch.finfo(torch.float16).max
    optimizer = torch.optim.SGD([weights], lr=1e-3 / largest)
    scaler = torch.amp.GradScaler("cpu")
    size = largest / scaler.get_scale()  # so that only scaled gradients overflow
    dropped = right = 0
    for _ in range(12):
        before = {name: x.clone() for name, x in attend.scaling.named_buffers() if name != "amax"}
        leaves = [(x.detach() * weight).half() for x, weight in zip(qkv(), weights, strict=True)]
        out = attend(*leaves)
        for x in (out, *leaves):
            x.retain_grad()
        scaler.scale((out.float() * torch.randn(out.shape) * size).sum()).backward()
        scaler.step(optimizer)
        found = [x.grad for x in leaves]
        if not out.grad.isfinite().all():
            dropped += 1
            assert all(gradient.isnan().all() for gradient in found)
        elif all(gradient.isfinite().all() for gradient in found):
            right += 1
            assert_near((out, found, [x.detach() for x in leaves], out.grad))
        attend.scaling.update()
        if not out.grad.isfinite().all():
            assert all(torch.equal(attend.scaling.get_buffer(name), x) for name, x in before.items())
        scaler.update()
        optimizer.zero_grad()
    assert 1 <= dropped <= 4, "not all that calibrate"
    assert right >= 4
    assert weights.isfinite().all()
    assert attend.scaling.knows_backward


# Repeated calls


def test_a_checkpointed_call_recomputes_with_its_own_scales():
    """An update between a call and its backward pass ends calibration, but not for that call."""
    attend = layer(calibration=1, auto_update=False)
    q, k, v = qkv()
    out = checkpoint(attend, q, k, v, use_reentrant=False)
    attend.scaling.update()
    attend.scaling.scale[FORWARD] *= 1000  # useless scales
    grad_out = torch.randn_like(out) * 1e-3
    found = torch.autograd.grad(out, (q, k, v), grad_out)
    assert_near((out, found, (q, k, v), grad_out))
    with torch.no_grad():
        assert error(attend(q, k, v), fp8_attention(q, k, v).double()) > OUTPUT, "the next call goes by the history"


def test_captures_use_the_history_as_soon_as_it_exists(monkeypatch):
    capturing = [False]
    monkeypatch.setattr(scaling_state.torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    steps = scaling_state.Steps(4)

    def choices():
        return steps.choose(is_cuda=True), steps.by_history(backward=True, is_cuda=True)

    capturing[0] = True
    assert choices() == (False, False), "there has been no step"
    capturing[0] = False
    assert choices() == (False, False)
    steps.recorded = [True, True]
    steps.end()
    assert choices() == (False, False)
    capturing[0] = True
    assert choices() == (True, True)
    assert not steps.by_history(backward=True, is_cuda=False)
    capturing[0] = False
    assert choices() == (False, False), "calls after a capture calibrate on"
    for _ in range(3):
        steps.recorded = [True, False]
        steps.end()
    assert choices() == (True, False)


# Loading


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("margin", "grad_dtype"), [(0, E5M2), (0, E4M3), (3, E5M2), (2, E4M3)], ids=str)
def test_a_loaded_history_gives_scales_for_the_loading_layers_options(algorithm, margin, grad_dtype):
    trained = layer(calibration=1, history=5)
    for size in (1.0, 9.0, 0.5):
        train(trained, grad_scale=size)
    trained.scaling.update()
    other = layer(history=5, margin=margin, grad_dtype=grad_dtype, algorithm=algorithm)
    place = other.scaling.scale.data_ptr()
    other.load_state_dict(trained.state_dict())
    assert other.scaling.scale.data_ptr() == place
    history = trained.scaling.amax_history
    peak = history.amax(1) if algorithm == "max" else history[:, 0]
    largest = torch.tensor([448.0] * DO + [torch.finfo(grad_dtype).max] * (len(NAMES) - DO)) / 2**margin
    expected = largest / peak
    expected[S] = SCALE_S
    torch.testing.assert_close(other.scaling.scale, expected)
    assert other.scaling.knows_backward
    tensors = [(x.detach() / 2**margin).requires_grad_() for x in qkv()]
    assert_near(train(other, tensors=tensors, grad_scale=0.2), grad_dtype)


@pytest.mark.parametrize("most_recent", [False, True])
def test_scales_from_a_history_match_updates_bit_for_bit(most_recent):
    limits = torch.tensor([448.0, 448, 448, 0, 448, *[57344.0] * 5])
    history, scale = torch.zeros(10, 6), torch.full((10,), 3.25)
    for step in range(15):
        amax = torch.rand(10) * 2.0 ** (step % 7)
        amax[step % 10 :] *= step % 3 > 0
        if step % 5 == 4:
            amax[step % 10] = (torch.nan, torch.inf)[step % 2]
        update_in_pytorch(amax, history, scale, limits, most_recent=most_recent)
        found = scales_of(history, torch.where(history.amax(1) > 0, 7.0, scale), limits, most_recent=most_recent)
        assert torch.equal(found[limits > 0], scale[limits > 0]), step


def test_loading_keeps_scales_without_history_and_does_not_write_to_assigned_state():
    trained = Fp8Scaling(history=4)
    fp8_attention(*qkv(), scaling=trained)
    trained.update()
    state = {name: x.clone() for name, x in trained.state_dict().items()}
    state["scale"][BACKWARD] = 5.5
    given = {name: x.clone() for name, x in state.items()}
    for assign in (False, True):
        other = Fp8Scaling(history=4, margin=1)
        other.load_state_dict(state, assign=assign)
        assert (other.scale[BACKWARD] == 5.5).all()
        torch.testing.assert_close(other.scale[:3], trained.scale[:3] / 2)
        assert all(torch.equal(state[name], x) for name, x in given.items())
        other.amax.fill_(1.0)
        assert all(torch.equal(state[name], x) for name, x in given.items())


def test_a_state_with_zero_gradients_continues_calibration():
    first = layer(calibration=1)
    out = first(*(tensors := qkv()))
    torch.autograd.grad(out, tensors, torch.zeros_like(out))
    first.scaling.update()
    second = layer()
    second.load_state_dict(first.state_dict())
    assert second.scaling.knows_forward
    assert not second.scaling.knows_backward
    assert_near(train(second, grad_scale=1e-9))


# Ownership


def test_two_layers_cannot_share_a_scaling():
    scaling = Fp8Scaling()
    attend = Fp8Attention(scaling=scaling)
    with pytest.raises(OptionError, match="scaling: got that of another Fp8Attention"):
        Fp8Attention(scaling=scaling)
    assert Fp8Attention(scaling=copy.deepcopy(scaling)).scaling is not scaling
    del attend
    gc.collect()
    assert Fp8Attention(scaling=scaling).scaling is scaling, "the other one is gone"


def test_copies_of_layers_have_their_own_scaling():
    model = torch.nn.Sequential(layer(calibration=2, history=3))
    train(model[0])
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copied, loaded):
        assert other[0].scaling is not model[0].scaling
        assert other[0].scaling.calibration == 2
        assert torch.equal(other[0].scaling.amax, model[0].scaling.amax)
        with pytest.raises(OptionError, match="another"):
            Fp8Attention(scaling=other[0].scaling)
        for _ in range(3):
            assert_near(train(other[0]))
        assert other[0].scaling.knows_backward
    assert not model[0].scaling.knows_forward


def test_layers_made_moved_copied_and_loaded_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        made, moved, assigned, reset, emptied = (layer(calibration=1, margin=1) for _ in range(5))
        moved, copied = moved.to("cpu", torch.float64), copy.deepcopy(made)
        inferred = {name: x.clone() for name, x in made.state_dict().items()}
        assert all(x.is_inference() for x in inferred.values())
        assigned.load_state_dict(inferred, assign=True)
        reset.scaling.reset_parameters()
        emptied.to_empty(device="cpu").scaling.reset_parameters()
        first = made(*qkv(requires_grad=False))
        made.scaling.update()
    assert first.isfinite().all()
    for attend in (made, moved, copied, assigned, reset, emptied):
        assert not any(x.is_inference() for x in attend.buffers())
        for _ in range(3):
            assert_near(train(attend))


def test_a_refused_call_records_nothing():
    layer, tensors = Fp8Attention(), qkv()
    train(layer, tensors=tensors)
    before = {name: x.clone() for name, x in layer.scaling.state_dict().items()}
    wrong = torch.full((2,), 99, dtype=torch.int32)
    with pytest.raises(ShapeError, match="seq_lens_kv: got 99 for batch entry 0"):
        layer(1000 * tensors[0], *tensors[1:], seq_lens_kv=wrong)
    for name, x in layer.scaling.state_dict().items():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)


def test_a_layer_that_is_unpickled_in_inference_mode_can_be_trained():
    layer, tensors = Fp8Attention(), qkv()
    train(layer, tensors=tensors)
    with torch.inference_mode():
        loaded = pickle.loads(pickle.dumps(layer))
    (out, *_), (expected, *_) = train(loaded, tensors=tensors), train(layer, tensors=tensors)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not loaded.scaling.amax_history.is_inference()


# The kernel that updates the state, run thread by thread.

#: What fp8_update needs besides `emulation/block.h`. The conversions in the file are instructions of a GPU.
FOR_FP8 = """
#define asm(...)
#define __shared__ static
struct uint4 { unsigned x, y, z, w; };
static float __uint_as_float(unsigned bits) { return float_of_bits(bits); }
static unsigned __float_as_uint(float x) { return bits_of_float(x); }
static unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
static unsigned atomicMax(unsigned* to, unsigned x) { unsigned was = *to; *to = max(was, x); return was; }
static unsigned __reduce_max_sync(unsigned, unsigned x) {
  auto* all = exchange(&x, 1);
  for (int i = 0; i < 32; ++i) x = max(x, all[i][emulation::parity[emulation::current]][0]);
  return x;
}
"""


@pytest.fixture(scope="module")
def update_kernel():
    header = BLOCK.read_text() + FOR_FP8
    library = fake_gpu._library(
        quantize.SOURCE, header, ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", f"-I{fake_gpu.nvrtc.HEADERS}"]
    )

    def run(amax, history, scale, limits, *, most_recent):
        fields = [*(x.data_ptr() for x in (amax, history, scale, limits)), history.shape[1], most_recent]
        library.run_blocks(library.fp8_update, (ctypes.c_uint64 * 96)(*fields), 1, 320, 0)

    return run


@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 33, 70])
def test_the_kernel_updates_history_and_scales_from_finite_amax_values_only(update_kernel, length, most_recent):
    history, scale, limits = torch.zeros(10, length), torch.rand(10) + 0.5, torch.full((10,), 448.0)
    limits[3] = 0.0  # a fixed scale
    wanted_history, wanted_scale = history.clone(), scale.clone()
    for step in range(2 * length + 3):
        amax = torch.rand(10) * 10 + 0.1
        if step % 3 == 1:
            amax[torch.randint(10, ())] = (torch.inf, torch.nan)[step % 2]
        else:
            wanted_history = torch.cat([amax.unsqueeze(1), wanted_history[:, :-1]], 1)
            peak = amax if most_recent else wanted_history.amax(1)
            wanted_scale = torch.where(limits > 0, limits / peak, wanted_scale)
        given = amax.clone()
        update_kernel(given, history, scale, limits, most_recent=most_recent)
        assert not given.any()
        assert torch.equal(history, wanted_history), step
        torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
