"""`Fp8Attention(rope=, qk_norm=)`: values and gradients against float64, the fused kernel, scales, and arguments."""

from __future__ import annotations

import copy

import pytest
import torch
from float64_reference import attend as attend_exactly
from float64_reference import rms_norm, rotated
from fp8_layers import E5M2, GRADIENT, OUTPUT, error, qkv

from cudnn_sdpa import Fp8Attention, Fp8Scaling, OptionError, ShapeError
from cudnn_sdpa.attention.fp8 import fp8_attention as attention_module
from cudnn_sdpa.attention.fp8.scaling_state import K, Q, V
from cudnn_sdpa.fused.rotary import rope_graphs
from cudnn_sdpa.nn import RMSNorm, RotaryEmbedding

pytestmark = pytest.mark.usefixtures("reference_alone")  # gradients on Hopper have head dim 128

DIM = 32


def drawn(**options):
    return qkv(lengths=(48, 48), dim=DIM, **options)


def made(qk_norm=None, *, steps=2, **embedding):
    """A layer with a history of some steps, whose norms have weights."""
    layer = Fp8Attention(is_causal=True, scaling=Fp8Scaling(calibration=1), rope=RotaryEmbedding(DIM, **embedding))
    if qk_norm is not None:
        layer = Fp8Attention(is_causal=True, scaling=Fp8Scaling(calibration=1), rope=layer.rope, qk_norm=qk_norm)
        for norm in (layer.q_norm, layer.k_norm):
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    for _ in range(steps):
        (layer(*drawn()) * 1e-3).sum().backward()
    layer.zero_grad()
    return layer


def exact(layer, q, k, v, weights=(None, None), positions=None, **embedding):
    positions = torch.arange(q.shape[2]) if positions is None else positions
    heads = []
    for x, weight in zip((q, k), weights, strict=True):
        normed = x if weight is None else rms_norm(x, weight, eps=layer.q_norm.eps)[0]
        heads.append(rotated(normed.transpose(1, 2), positions[None], **embedding).transpose(1, 2))
    return attend_exactly(*heads, v, is_causal=True)[0]


@pytest.mark.parametrize("qk_norm", [None, 0.05])
@pytest.mark.parametrize("embedding", [{}, {"rotary_dim": 16, "interleaved": True}], ids=str)
def test_values_and_gradients_match_float64(qk_norm, embedding):
    layer, tensors = made(qk_norm, **embedding), drawn()
    weights = () if qk_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
    leaves = [*tensors, *weights]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out, wanted = layer(*tensors), exact(layer, *wide[:3], weights=wide[3:] or (None, None), **embedding)
    assert error(out, wanted.detach()) < OUTPUT
    grad_out = torch.randn(out.shape) * 1e-4
    found = torch.autograd.grad(out, leaves, grad_out.to(out.dtype))
    for x, y in zip(found, torch.autograd.grad(wanted, wide, grad_out.double()), strict=True):
        assert error(x, y) < GRADIENT[E5M2]


@pytest.mark.parametrize("qk_norm", [None, 0.05])
@pytest.mark.parametrize("trains", [False, True])
def test_without_gradients_one_kernel_rotates_and_quantizes(qk_norm, trains, monkeypatch):
    layer, (q, k, v) = made(qk_norm).train(trains), drawn(requires_grad=False)
    weights = (None, None) if qk_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
    before, seen = layer.scaling.amax.clone(), []
    monkeypatch.setattr(rope_graphs.rope_fp8_rows, "check", lambda *_, **__: seen.append("fp8"))
    monkeypatch.setattr(rope_graphs.rope_rows, "check", lambda *_, **__: seen.append("half"))
    with torch.no_grad():
        out = layer(q, k, v)
        wanted = exact(layer, q.double(), k.double(), v.double(), weights)
    assert seen == ["fp8"]
    assert error(out, wanted) < OUTPUT
    assert out.stride() == q.stride()
    changed = layer.scaling.amax != before
    assert changed[[Q, K, V]].all() == trains
    layer.scaling.inputs = "current"
    with torch.no_grad():
        assert error(layer(q, k, v), wanted) < OUTPUT
    assert seen == ["fp8", "half"]


def test_amax_values_are_those_of_rotated_heads():
    layer, (q, k, v) = made(0.05), drawn(requires_grad=False)
    layer.scaling.update()
    with torch.no_grad():
        layer(q, k, v)
    positions = torch.arange(48)[None]
    for row, x, weight in ((Q, q, layer.q_norm.weight), (K, k, layer.k_norm.weight)):
        normed = rms_norm(x.double(), weight.detach().double(), eps=0.05)[0].transpose(1, 2)
        amax = rotated(normed, positions).abs().amax()
        torch.testing.assert_close(layer.scaling.amax[row].double(), amax, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("half_output", [False, True])
@pytest.mark.parametrize("name", "qkv")
def test_values_that_are_not_finite_make_all_nan(name, half_output, monkeypatch):
    layer, tensors = made().eval(), dict(zip("qkv", drawn(requires_grad=False), strict=True))
    monkeypatch.setattr(attention_module, "check_support", lambda *_, **__: half_output)
    with torch.no_grad():
        assert layer(**tensors).isfinite().all()
        tensors[name][1, 1, 5, 7] = torch.nan
        assert layer(**tensors).isnan().all()


def test_layers_share_rotations_of_other_positions():
    layer, (q, k, v) = made().eval(), drawn(requires_grad=False)
    positions = torch.randperm(1000)[:48]
    with torch.no_grad():
        out = layer(q, k, v, rotations=layer.rope(positions))
    assert error(out, exact(layer, q.double(), k.double(), v.double(), positions=positions)) < OUTPUT


def test_a_norm_that_a_caller_replaces_is_called():
    layer, (q, k, v) = made(0.05).eval(), drawn(requires_grad=False)
    with torch.no_grad():
        expected = layer(q, k, v)
        layer.q_norm, weight = torch.nn.RMSNorm(DIM, eps=0.05, dtype=q.dtype), layer.q_norm.weight
        layer.q_norm.weight.copy_(weight)
        assert error(layer(q, k, v), expected.double()) < 0.05


def test_state_copies_and_repr():
    layer = made(0.05)
    names = {name for name in layer.state_dict() if "scaling" not in name}
    assert names == {"q_norm.weight", "k_norm.weight"}
    tensors = drawn(requires_grad=False)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(layer.eval())(*tensors), layer(*tensors))
    assert isinstance(layer.q_norm, RMSNorm)
    assert "RotaryEmbedding(32" in repr(layer)


def test_autocast_casts():
    layer, tensors = made(0.05).eval(), drawn(requires_grad=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(*(x.float() for x in tensors)), layer(*tensors))


def test_compiled_code_breaks_the_graph_around_it():
    layer, tensors = made(0.05).eval(), drawn(requires_grad=False)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(*tensors), layer(*tensors))


def test_wrong_arguments_are_named():
    layer, (q, k, v) = made(), drawn(requires_grad=False)
    cos, sin = layer.rope(torch.arange(48))
    wrong = [
        ((q, k[:, :, :-1], v[:, :, :-1]), None, ShapeError, "k: "),
        ((q[..., :16], k[..., :16], v), None, ShapeError, "head dim of rope"),
        ((q[0], k, v), None, ShapeError, "q: "),
        ((q, 1, v), None, OptionError, "k: "),
        ((q, k, v), (cos[1:], sin[1:]), ShapeError, "rotations"),
        ((q, k, v), cos, OptionError, "rotations"),
    ]
    before = copy.deepcopy(layer.state_dict())
    for tensors, rotations, expected, named in wrong:
        with torch.no_grad(), pytest.raises(expected, match=named):
            layer(*tensors, rotations=rotations)
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())
    with pytest.raises(OptionError, match="no rope"):
        Fp8Attention()(q, k, v, rotations=(cos, sin))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"rope": 3}, "rope"), ({"qk_norm": 1e-6}, "qk_norm"), ({"rope": RotaryEmbedding(8), "qk_norm": -1.0}, "qk_norm")],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(OptionError, match=named):
        Fp8Attention(**options)
