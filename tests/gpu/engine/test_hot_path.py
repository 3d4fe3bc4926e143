"""The warm path: no synchronization, no device-to-host copy, no memory growth; dispatch modes see the operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make

import cudnn_sdpa
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.engine.operation import Operation


def warm(*tensors, **options):
    """Three calls: the first builds the plan, the others find it."""
    for _ in range(3):
        result = cudnn_sdpa.sdpa(*tensors, **options)
    assert len(SDPA.table)
    return result


def problem(sq=64):
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, 96, 64, torch.bfloat16) for _ in range(2))
    return q, k, v


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "lse": {"return_lse": True, "scale": 0.2},
    "lengths": {"lengths": True},
    "lengths and lse": {"lengths": True, "return_lse": True},
}


@pytest.mark.parametrize("sq", [1, 64, 120], ids=["decode", "prefill", "fully masked rows"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_synchronizes(name, sq):
    q, k, v = problem(sq)
    options = dict(OPTIONS[name])
    if options.pop("lengths", False):
        options["seq_lens_kv"] = torch.tensor([96, 33], dtype=torch.int32, device="cuda")
    first = warm(q, k, v, **options)
    inputs = SDPA.inputs_of(
        from_fields(ForwardArguments, q, k, v, **{name: x for name, x in options.items() if name != "return_lse"})
    )
    operators = torch.ops.cudnn_sdpa
    operator = operators.sdpa_forward_lse if "return_lse" in options else operators.sdpa_forward
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = cudnn_sdpa.sdpa(q, k, v, **options)
        through_dispatcher = operator(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    torch.testing.assert_close(through_dispatcher, first, atol=0, rtol=0)


def test_known_calls_are_not_checked_again(monkeypatch):
    """Calls that equal the last one, and others that are found by their signature; another scale is another call."""
    q, k, v = problem()
    checked, on_gpu = [], Operation.on_gpu
    monkeypatch.setattr(Operation, "on_gpu", lambda *call: checked.append(call) or on_gpu(*call))
    expected = {scale: exact(q, k, v, is_causal=True, scale=scale)[0] for scale in (0.3, 0.31)}
    calls = [(q, 0.3), (q, 0.31), (q.clone().requires_grad_(), 0.3)]
    for times in (3, 1, 1):
        for x, scale in calls:
            for _ in range(times):
                out = cudnn_sdpa.sdpa(x, k, v, is_causal=True, scale=scale)
                assert out.requires_grad is x.requires_grad
                assert error(out.detach(), expected[scale]) < TOLERANCE[torch.bfloat16]
        assert len(checked) == len(calls)


def test_device_memory_does_not_grow():
    q, k, v = problem()
    for _ in range(10):
        cudnn_sdpa.sdpa(q, k, v)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):  # other processes may allocate meanwhile; a leak grows in every round
        free = torch.cuda.mem_get_info()[0]
        for _ in range(5_000):
            cudnn_sdpa.sdpa(q, k, v)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        grown = free - torch.cuda.mem_get_info()[0]
        if grown < 4 << 20:
            break
    else:
        pytest.fail(f"{grown} bytes more in the last round")


def test_values_in_every_grad_mode():
    """Also when the same call was served in another mode before."""
    q, k, v = problem()
    expected = exact(q, k, v)[0]
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert error(warm(q, k, v), expected) < TOLERANCE[torch.bfloat16]
            inside = [tensor.clone() for tensor in (q, k, v)]
            assert error(warm(*inside), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_when_warm():
    q, k, v = problem()
    nested = torch.nested.nested_tensor([q[0], q[1]])
    for function in (cudnn_sdpa.sdpa, cudnn_sdpa.scaled_dot_product_attention):
        for _ in range(2):
            with pytest.raises(cudnn_sdpa.LayoutError, match="nested"):
                function(nested, k, v)
            warm(q, k, v)


def test_a_scale_of_any_number_type_is_served_warm():
    q, k, v = problem()
    expected = exact(q, k, v, scale=1.0)[0]
    for scale in (1, 1.0, np.float64(1.0)):
        assert error(warm(q, k, v, scale=scale), expected) < TOLERANCE[torch.bfloat16]


def test_autograd_tracks_writes_into_out():
    q, k, v = problem()
    out = torch.zeros_like(q)
    weight = torch.ones_like(q, requires_grad=True)
    for write in (lambda: cudnn_sdpa.sdpa(q, k, v, out=out), lambda: cudnn_sdpa.sdpa(q, k, v, out=out)):
        loss = (out * weight).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    wants_gradient = torch.zeros_like(q).requires_grad_()
    for tensors in ((q, k, v, wants_gradient), (q.clone().requires_grad_(), k, v, out)):
        with pytest.raises(cudnn_sdpa.UnsupportedError, match="out with a gradient"):
            cudnn_sdpa.sdpa(*tensors[:3], out=tensors[3])
    with torch.inference_mode():
        buffer = torch.full_like(q, torch.nan)
        cudnn_sdpa.sdpa(q, k, v, out=buffer)
        assert error(buffer, exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]


def test_alternating_shapes_and_one_tensor_as_key_and_value():
    q, k, v = problem()
    expected = {tuple(x.shape): exact(x, k, v)[0] for x in (q, q[:, :, :1])}
    shared = exact(q, k, k)[0]
    for _ in range(4):
        for x in (q, q[:, :, :1]):
            assert error(cudnn_sdpa.sdpa(x, k, v), expected[tuple(x.shape)]) < TOLERANCE[torch.bfloat16]
        assert error(cudnn_sdpa.sdpa(q, k, k), shared) < TOLERANCE[torch.bfloat16]


def test_forward_mode_is_refused_when_warm():
    q, k, v = problem()
    warm(q, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.randn_like(q))
        with pytest.raises(cudnn_sdpa.UnsupportedError, match="q has a tangent"):
            cudnn_sdpa.sdpa(dual, k, v)
        with torch.no_grad(), pytest.raises(cudnn_sdpa.UnsupportedError, match="q has a tangent"):
            cudnn_sdpa.sdpa(dual, k, v)
    with pytest.raises(cudnn_sdpa.UnsupportedError, match="q has a tangent"):
        torch.func.jvp(lambda q: cudnn_sdpa.sdpa(q, k, v), (q,), (torch.randn_like(q),))
    leaf = q.clone().requires_grad_()
    warm(leaf, k, v)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf, torch.randn_like(q))
        with pytest.raises(NotImplementedError, match=r"tangent|forward mode"):
            cudnn_sdpa.sdpa(dual, k, v)
    packed, ends = q[0].transpose(0, 1), torch.tensor([0, 60, 64], dtype=torch.int32, device="cuda")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(packed, torch.randn_like(packed))
        with pytest.raises(cudnn_sdpa.UnsupportedError, match="tangent"):
            cudnn_sdpa.sdpa_varlen(dual, packed, packed, ends, ends, 60, 60)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_dispatch_modes_subclasses_and_the_profiler_see_the_operator():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = problem()
    warm(q, k, v)
    with Watch():
        cudnn_sdpa.sdpa(q, k, v)
    assert any("cudnn_sdpa.sdpa_forward" in name for name in seen)
    warm(q, k, v)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cudnn_sdpa.sdpa(q, k, v)
    assert any(event.key == "cudnn_sdpa::sdpa_forward" for event in profile.key_averages())
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert torch.equal(cudnn_sdpa.sdpa(parameter, k, v), cudnn_sdpa.sdpa(q, k, v))


def test_drop_in_against_pytorch():
    q, k, v = problem()
    for options in ({}, {"is_causal": True}, {"scale": 0.4}):
        ours = cudnn_sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    flat = q[0]
    ours = cudnn_sdpa.scaled_dot_product_attention(flat, k[0, :1], v[0, :1])
    theirs = torch.nn.functional.scaled_dot_product_attention(
        flat, k[0, :1].expand(4, -1, -1), v[0, :1].expand(4, -1, -1)
    )
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_misaligned_storage_is_refused_warm_and_cold():
    q, k, v = problem()
    storage = torch.randn(q.numel() + 8, device="cuda", dtype=torch.bfloat16)
    for warm in (False, True):
        if warm:
            cudnn_sdpa.sdpa(q, k, v)
        for name, good in (("q", q), ("k", k), ("v", v)):
            bad = torch.as_strided(storage, good.shape, good.stride(), storage_offset=1)
            tensors = {"q": q, "k": k, "v": v, name: bad}
            with pytest.raises(cudnn_sdpa.LayoutError, match=rf"{name}: got an address 2 bytes past"):
                cudnn_sdpa.sdpa(**tensors)
        out = torch.as_strided(storage, q.shape, q.stride(), storage_offset=4)
        with pytest.raises(cudnn_sdpa.LayoutError, match="out: got an address 8 bytes past"):
            cudnn_sdpa.sdpa(q, k, v, out=out)
    assert error(cudnn_sdpa.sdpa(q, k, v), exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]


def test_bad_input_is_refused_warm_and_cold():
    q, k, v = problem()
    bad = {
        "float32": (q.float(), k.float(), v.float()),
        "dtype": (q, k.half(), v),
        "device": (q, k.cpu(), v),
        "heads": (q, k.repeat(1, 2, 1, 1)[:, :3], v.repeat(1, 2, 1, 1)[:, :3]),
        "head dim": (q[..., :60], k[..., :60], v),
        "stride": (q.mT.contiguous().mT, k, v),
        "step": (torch.randn(2, 4, 64, 68, device="cuda", dtype=torch.bfloat16)[..., :64], k, v),
        "rank": (q[0], k[0], v[0]),
    }
    for _ in range(2):
        for tensors in bad.values():
            with pytest.raises(cudnn_sdpa.ArgumentError):
                cudnn_sdpa.sdpa(*tensors)
        with pytest.raises(cudnn_sdpa.LayoutError, match="memory that overlaps q"):
            cudnn_sdpa.sdpa(q, k, v, out=q)
        cudnn_sdpa.sdpa(q, k, v)
    assert error(cudnn_sdpa.sdpa(q, k, v), exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]
