"""Calibration of `Fp8Attention`: CUDA graphs, gradients that overflow, and scales shared by two GPUs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from attention_checks import error, exact, make, poison
from torch import distributed as dist

from cudnn_sdpa import Fp8Attention, Fp8Scaling, fp8_attention
from cudnn_sdpa.attention.fp8 import fp8_attention as fp8_attention_module

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: The error bounds of docs/fp8.md for normally distributed values; gradients by their dtype.
OUTPUT, GRADIENT = 0.08, {E5M2: 0.22, E4M3: 0.15}
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)

pytestmark = pytest.mark.skipif(CAPABILITY[0] not in (9, 10), reason="cuDNN has no FP8 gradients for this GPU")


def problem(dtype=torch.bfloat16):
    q = make("bshd", 2, 4, 192, 128, dtype)
    k, v = (make("bshd", 2, 2, 256, 128, dtype) for _ in range(2))
    return [x.mul_(size).requires_grad_() for x, size in zip((q, k, v), (1.1, 0.9, 23.0), strict=True)]


def layer(**options):
    return Fp8Attention(is_causal=True, scaling=Fp8Scaling(**options)).cuda()


def step(attend, tensors, grad_out):
    poison(tensors[0].shape, dtype=torch.bfloat16)
    out = attend(*tensors)
    return out.detach(), *torch.autograd.grad(out, tensors, grad_out)


def assert_near(found, tensors, grad_out, grad_dtype=E5M2):
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    out, _ = exact(*leaves, is_causal=True)
    assert error(found[0], out.detach()) < OUTPUT
    wanted = torch.autograd.grad(out, leaves, grad_out.double())
    for name, gradient, of in zip("qkv", found[1:], wanted, strict=True):
        assert error(gradient, of) < GRADIENT[grad_dtype], name


@pytest.fixture
def launches(monkeypatch):
    made = []
    original = fp8_attention_module._gradients
    monkeypatch.setattr(fp8_attention_module, "_gradients", lambda *x: made.append(1) or original(*x))
    return made


@pytest.mark.parametrize("grad_dtype", [E5M2, E4M3], ids=["e5m2", "e4m3"])
@pytest.mark.parametrize("bad", [0.0, torch.inf])
def test_first_gradients_may_be_zero_or_non_finite(bad, grad_dtype, launches):
    attend = layer(grad_dtype=grad_dtype)
    for _ in range(3):
        tensors = problem()
        _, *found = step(attend, tensors, torch.full_like(tensors[0], bad))
        assert all((x.isnan() if bad else x == 0).all() for x in found)
    for at in range(4):
        tensors = problem()
        grad_out = torch.randn_like(tensors[0]) * 1e-8
        launches.clear()
        assert_near(step(attend, tensors, grad_out), tensors, grad_out, grad_dtype)
        assert len(launches) == (1 if at else 2 if grad_dtype == E5M2 else 3)


def test_a_capture_after_two_steps_has_one_backward_pass_and_updates_scales_like_eager_steps(launches):
    """The captured layer calibrated for two of its four steps, the eager one for both of its two."""
    captured, eager = layer(history=3), layer(history=3, calibration=2)
    static = problem()
    static_grad = torch.randn_like(static[0])
    data = [([x.detach() * 1.5**n for x in problem()], torch.randn_like(static_grad) * 0.7**n) for n in range(6)]
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(2):
            step(captured, static, static_grad)
    torch.cuda.current_stream().wait_stream(warm)
    for _ in range(2):
        step(eager, static, static_grad)
    launches.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured(*static)
        results = (out, *torch.autograd.grad(out, static, static_grad))
    assert len(launches) == 1
    assert not captured.scaling.knows_backward, "outside the graph it calibrates on"
    for tensors, grad_out in data:
        with torch.no_grad():
            for x, value in zip((*static, static_grad), (*tensors, grad_out), strict=True):
                x.copy_(value)
            for x in results:
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        expected = step(eager, [x.clone().requires_grad_() for x in tensors], grad_out)
        assert torch.equal(results[0], expected[0])
        for found, wanted in zip(results[1:], expected[1:], strict=True):  # dq is a sum in any order
            assert error(found, wanted.double()) < 0.03
        for name in ("amax_history", "scale"):
            found, wanted = (getattr(attend.scaling, name) for attend in (captured, eager))
            torch.testing.assert_close(found, wanted, rtol=0.05, atol=0)
    tensors = problem()
    grad_out = torch.randn_like(tensors[0])
    assert_near(step(captured, tensors, grad_out), tensors, grad_out)


@pytest.mark.parametrize("auto_update", [True, False])
def test_a_float16_grad_scaler_may_overflow_during_calibration(auto_update):
    attend = layer(auto_update=auto_update)
    weights, largest = torch.nn.Parameter(torch.ones(3, 128, device="cuda")), torch.finfo(torch.float16).max
    optimizer = torch.optim.SGD([weights], lr=1e-3 / largest)
    scaler = torch.amp.GradScaler("cuda")
    size = largest / scaler.get_scale() / 2  # so that only scaled gradients overflow
    dropped = right = 0
    for _ in range(18):
        before = {name: x.clone() for name, x in attend.scaling.named_buffers() if name != "amax"}
        leaves = [(x.detach() * weight).half() for x, weight in zip(problem(), weights, strict=True)]
        out = attend(*leaves)
        for x in (out, *leaves):
            x.retain_grad()
        scaler.scale((out.float() * torch.randn_like(out, dtype=torch.float32) * size).sum()).backward()
        scaler.step(optimizer)
        found = [x.grad for x in leaves]
        overflows = not out.grad.isfinite().all()
        if overflows:
            dropped += 1
            assert all(gradient.isnan().all() for gradient in found)
        elif all(gradient.isfinite().all() for gradient in found):
            right += 1
            assert_near((out.detach(), *found), leaves, out.grad)
        attend.scaling.update()
        if overflows:
            assert all(torch.equal(attend.scaling.get_buffer(name), x) for name, x in before.items())
        scaler.update()
        optimizer.zero_grad()
    assert 1 <= dropped <= 4, "not all that calibrate"
    assert right >= 4
    assert weights.isfinite().all()
    assert attend.scaling.knows_backward


# Two GPUs


def train_on(rank, store, folder):
    """A few steps of a rank. In every second step its values are twice as large as the other rank's."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        torch.manual_seed(rank)
        attend = layer(calibration=1, margin=2, auto_update=False, process_group="world")
        found = []
        for at in range(5):
            q, k, v = problem()
            tensors = q, k, (v.detach() * (2 if at % 2 == rank else 1)).requires_grad_()
            grad_out = torch.randn_like(q)
            if at == 3 and rank == 1:
                grad_out[0, 1, 2, 3] = torch.nan
            result = step(attend, tensors, grad_out)
            if at != 3:
                assert_near(result, tensors, grad_out)
            amax = attend.scaling.amax.clone()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if at else "default")  # the first one sets NCCL up
            attend.scaling.update()
            torch.cuda.set_sync_debug_mode("default")
            state = {name: x.cpu() for name, x in attend.scaling.state_dict().items()}
            found.append((amax.cpu(), state))
        torch.save(found, folder / f"{rank}.pt")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_same_scales(tmp_path):
    torch.multiprocessing.spawn(train_on, (tmp_path / "store", tmp_path), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    history = torch.zeros(10, 16)
    for at, ((amax, state), (other_amax, other_state)) in enumerate(zip(*ranks, strict=True)):
        if at != 3:  # one rank had a NaN, so that both drop the step
            history = torch.cat([torch.maximum(amax, other_amax).unsqueeze(1), history[:, :-1]], dim=1)
        assert not torch.equal(amax, other_amax)
        for of_rank in (state, other_state):
            assert torch.equal(of_rank["amax_history"], history)
        assert torch.equal(state["scale"], other_state["scale"])


def test_calls_without_scaling_calibrate_each_time(launches):
    tensors = problem()
    grad_out = torch.randn_like(tensors[0])
    found = step(lambda *x: fp8_attention(*x, is_causal=True), tensors, grad_out)
    assert_near(found, tensors, grad_out)
    assert len(launches) == 2
