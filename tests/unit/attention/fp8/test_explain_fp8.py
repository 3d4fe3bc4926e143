"""`explain` of `fp8_attention` reports what the call does."""

from __future__ import annotations

import pytest
import torch
from fp8_layers import E4M3, E5M2, lens, train

from cudnn_sdpa import DtypeError, Fp8Scaling, explain, fp8_attention
from cudnn_sdpa.attention.fp8 import fp8_attention as fp8_attention_module
from cudnn_sdpa.attention.fp8.explain import describe_sdpa_fp8, describe_sdpa_fp8_backward
from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.planning.support import target_of

H200, B200 = target_of(90, "9.19.0"), target_of(100, "9.19.0")


def qkv(*, lengths=(40, 56), requires_grad=True, dtype=torch.bfloat16):
    """Tensors of head dim 128, each in a different memory order, with the keys among unused rows."""
    q = torch.randn(2, lengths[0], 4, 128).to(dtype).transpose(1, 2)
    k = torch.randn(2, 2, lengths[1] + 3, 144).to(dtype)[:, :, 3:, :128]
    v = torch.randn(lengths[1], 2, 2, 128).to(dtype).permute(1, 2, 0, 3)
    return [x.detach().requires_grad_(requires_grad) for x in (q, k, v)]


def describe(*args, **options):
    return describer_of(fp8_attention)(*args, **options)


@pytest.fixture
def asked(monkeypatch):
    """The plan keys that calls would request on an H200, forward and backward."""
    keys = {"forward": [], "backward": []}

    def listen(name, describer, found):
        original = getattr(fp8_attention_module, name)

        def run(*args, **options):
            found.append(describer(*args, **options).key(H200, None))
            return original(*args, **options)

        monkeypatch.setattr(fp8_attention_module, name, run)

    listen("sdpa_fp8", describe_sdpa_fp8, keys["forward"])
    listen("sdpa_fp8_backward", describe_sdpa_fp8_backward, keys["backward"])
    return keys


CASES = {
    "dense": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_size": {"window_size": (9, 4)},
    "lengths": {"seq_lens_q": lens(31, 40), "seq_lens_kv": lens(30, 17)},
    "gradients in E4M3": {"grad_dtype": E4M3, "is_causal": True},
}


@pytest.mark.usefixtures("reference_alone")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [(40, 56), (64, 32)], ids=str)
def test_explained_plans_are_those_of_the_call(name, lengths, asked):
    tensors = qkv(lengths=lengths)
    description = describe(*tensors, **CASES[name])
    out = fp8_attention(*tensors, **CASES[name])
    torch.autograd.grad(out, tensors, torch.randn_like(out))
    assert asked["forward"] == [description.key(H200, None)]
    assert set(asked["backward"]) == {description.backward.key(H200, None)}
    with torch.no_grad():
        description = describe(*tensors, **CASES[name])
        fp8_attention(*tensors, **CASES[name])
    assert description.backward is None
    assert asked["forward"][1] == description.key(H200, None)


def dtype_of_output(description, target):
    return next(operand.layout.dtype for operand in description.key(target, None).outputs if operand.name == "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_plan_writes_16_bits_where_cudnn_can(dtype):
    with torch.no_grad():
        inference = describe(*qkv(dtype=dtype))
    assert (dtype_of_output(inference, B200), dtype_of_output(inference, H200)) == (dtype, E4M3)
    assert any("on data-center Blackwell, where cuDNN writes it directly" in note for note in inference.extra_kernels)
    training = describe(*qkv(dtype=dtype))
    assert dtype_of_output(training, B200) == E4M3
    assert not any("Blackwell" in note for note in training.extra_kernels)


def notes(scaling=None, **options):
    description = describe(*qkv(), scaling=scaling, **options)
    return " | ".join(description.extra_kernels), " | ".join(description.backward.extra_kernels)


def test_extra_kernels_follow_the_scaling_state():
    scaling = Fp8Scaling(calibration=1)
    forward, backward = notes(scaling)
    assert "computes the amax of q, k and v, and another quantizes" in forward
    assert "runs two times" in backward
    assert "ends the previous step" not in forward
    train(lambda *x: fp8_attention(*x, scaling=scaling), tensors=qkv())
    assert "one kernel ends the previous step" in notes(scaling)[0]
    assert "reduction" not in notes(scaling)[0]
    scaling.update()
    forward, backward = notes(scaling)
    assert "one kernel quantizes q, k and v with scales from the history" in forward
    assert "one kernel quantizes the output's gradient with a scale from the history" in backward
    assert "times" not in backward
    assert "ends the previous step" not in forward
    scaling.inputs = "current"
    forward, backward = notes(scaling)
    assert "another quantizes" in forward
    assert "another quantizes" in backward
    assert "times" not in backward
    assert "runs three times" in notes(grad_dtype=E4M3)[1]
    assert "amax outputs are zeroed" in notes()[0], "what sdpa_fp8 runs is there too"
    shared = Fp8Scaling(process_group="world")
    train(lambda *x: fp8_attention(*x, scaling=shared), tensors=qkv())
    assert "reduced over all ranks" in notes(shared)[0]


def test_explaining_changes_no_state():
    scaling = Fp8Scaling(calibration=1)
    train(lambda *x: fp8_attention(*x, scaling=scaling), tensors=qkv())
    before = {name: x.clone() for name, x in scaling.named_buffers()}
    describe(*qkv(), scaling=scaling)
    assert all(torch.equal(scaling.get_buffer(name), x) for name, x in before.items())
    assert scaling.would_update()


def test_autocast_casts_are_listed():
    tensors = [x.detach().float().requires_grad_() for x in qkv()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        description = describe(*tensors)
    assert "q is cast to bfloat16, under autocast" in description.extra_kernels
    assert "the gradient of k is cast back, under autocast" in description.backward.extra_kernels
    with pytest.raises(DtypeError, match="q"):
        describe(*tensors)


def test_empty_calls_and_calls_without_a_plan(monkeypatch):
    assert describe(*qkv(lengths=(40, 0))).is_empty
    monkeypatch.setenv("CUDNN_SDPA_TARGET", "h200")
    small = [x.detach()[..., :64].clone().requires_grad_() for x in qkv()]
    result = explain(fp8_attention, *small, grad_dtype=E5M2)
    assert result.call == "fp8_attention"
    assert not result.backward.supported
    assert any("head dim 128" in reason for reason in result.backward.reasons)
    assert result.backward.call == "gradient of fp8_attention"
