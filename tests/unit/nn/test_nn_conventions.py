"""PyTorch's conventions for modules: state, copies, devices, dtypes, compilation, autocast."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from module_values import difference, in_float64, randomize
from torch import nn as torch_nn

import cudnn_sdpa
from cudnn_sdpa import nn

ROPE = {"head_dim": 8, "base": 100.0}

#: A constructor for each module, and the shapes of its inputs.
MODULES = {
    "Attention": (
        lambda **kw: nn.Attention(
            32, 4, num_kv_heads=2, bias=True, is_causal=True, sinks=True, rope=nn.RotaryEmbedding(**ROPE), **kw
        ),
        (2, 9, 32),
    ),
    "cross": (lambda **kw: nn.Attention(32, 4, context_dim=24, **kw), (2, 9, 32), (2, 5, 24)),
    "RMSNorm": (lambda **kw: nn.RMSNorm(32, **kw), (2, 9, 32)),
    "LayerNorm": (lambda **kw: nn.LayerNorm(32, **kw), (2, 9, 32)),
    "SwiGLU": (lambda **kw: nn.SwiGLU(32, 48, **kw), (2, 9, 32)),
    "FeedForward": (lambda **kw: nn.FeedForward(32, 48, **kw), (2, 9, 32)),
    "PatchEmbed": (lambda **kw: nn.PatchEmbed(8, 32, **kw), (2, 3, 16, 24)),
    "TransformerLayer": (
        lambda **kw: nn.TransformerLayer(
            32, 4, 48, num_kv_heads=2, is_causal=True, rope=nn.RotaryEmbedding(**ROPE), **kw
        ),
        (2, 9, 32),
    ),
    "VisionEncoder": (
        lambda **kw: nn.VisionEncoder(16, 8, embed_dim=32, num_layers=2, num_heads=4, **kw),
        (2, 3, 16, 16),
    ),
}


@pytest.fixture(params=MODULES)
def case(request):
    make, *shapes = MODULES[request.param]
    return make, [torch.randn(shape) for shape in shapes]


def test_exactly_these_classes_are_public_and_documented():
    assert cudnn_sdpa.nn is nn
    assert nn.__all__ == sorted(nn.__all__)
    names = {name for name, value in vars(nn).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert names == set(nn.__all__)
    assert nn.Fp8Attention is cudnn_sdpa.Fp8Attention
    for name in nn.__all__:
        assert len(inspect.getdoc(getattr(nn, name)).splitlines()[0]) > 20
        if name != "KVStep":
            assert ">>> " in inspect.getdoc(getattr(nn, name)), name


def test_state_dict_round_trip(case):
    make, tensors = case
    module, other = randomize(make()), make()
    assert not torch.equal(module(*tensors), other(*tensors))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(*tensors), other(*tensors))
    assert set(module.state_dict()) == {name for name, _ in module.named_parameters()}


def test_copies_and_pickles_compute_the_same_and_share_nothing(case):
    make, tensors = case
    module = randomize(make())
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    expected = module(*tensors)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(*tensors), expected)
        assert repr(other) == repr(module)
        with torch.no_grad():
            for x in other.parameters():
                x.add_(1)
        assert torch.equal(module(*tensors), expected)


def test_device_and_dtype_arguments(case):
    make, tensors = case
    module = make(device="meta", dtype=torch.bfloat16)
    assert all(x.is_meta and x.dtype == torch.bfloat16 for x in module.parameters())
    default = make(dtype=torch.bfloat16)
    found = default(*(x.bfloat16() for x in tensors))
    assert found.dtype == torch.bfloat16
    assert difference(found, in_float64(default, *(x.bfloat16() for x in tensors))) < 2e-2


def test_modules_made_on_meta_are_initialized_later(case):
    make, tensors = case
    with torch.device("meta"):
        module = make()
    assert all(x.is_meta for x in (*module.parameters(), *module.buffers()))
    module.to_empty(device="cpu")
    for x in module.parameters():
        torch_nn.init.constant_(x, torch.nan)
    module.reset_parameters()
    assert all(x.isfinite().all() for x in module.parameters())
    with torch.device("meta"):
        assigned = make()
    assigned.load_state_dict(module.state_dict(), assign=True)
    found = module(*tensors)
    assert difference(found, in_float64(module, *tensors)) < 5e-5
    assert torch.equal(assigned(*tensors), found)


def test_reset_parameters_initializes_like_a_new_module(case):
    make, _ = case
    torch.manual_seed(4)
    module = make()
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    module.reset_parameters()
    for name, x in module.named_parameters():
        old = before[name]
        if x.numel() > 500:
            assert not torch.equal(x, old), name
            torch.testing.assert_close(x.std(), old.std(), atol=0, rtol=0.2)
        assert (x.std() == 0) == (old.std() == 0), name


def test_dtype_conversion_keeps_float32_buffers(case):
    make, tensors = case
    module = randomize(make())
    lower = copy.deepcopy(module).to(torch.bfloat16)
    found = lower(*(x.bfloat16() for x in tensors))
    assert difference(found, module(*tensors)) < 3e-2
    for buffer in lower.buffers():
        assert buffer.dtype == torch.float32


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph_with_gradients(case, dynamic):
    torch._dynamo.reset()
    make, tensors = case
    module = randomize(make())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for _ in range(2):
        fresh = [torch.randn_like(x) for x in tensors]
        leaves = [[x.clone().requires_grad_() for x in fresh] for _ in range(2)]
        outs = [compiled(*leaves[0]), module(*leaves[1])]
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
        grad = torch.randn_like(outs[0])
        gradients = [
            torch.autograd.grad(out, [*of, *module.parameters()], grad) for out, of in zip(outs, leaves, strict=True)
        ]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3)


def test_wrong_calls_are_named_in_compiled_code():
    torch._dynamo.reset()
    compiled = torch.compile(nn.Attention(32, 4), backend="eager")
    with pytest.raises(Exception, match="x: got shape"):
        compiled(torch.randn(2, 9, 31))


def test_growing_positions_compile_once():
    torch._dynamo.reset()
    module = randomize(nn.Attention(32, 4, rope=nn.RotaryEmbedding(8), is_causal=True))
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        for start in range(0, 5000, 700):
            positions = torch.arange(start, start + 9)
            torch.testing.assert_close(compiled(x, position_ids=positions), module(x, position_ids=positions))
    assert len(frames) == 1


def test_repr():
    text = repr(nn.TransformerLayer(32, 4, 48, num_kv_heads=2, window_size=(3, 0), rope=nn.RotaryEmbedding(8)))
    for part in ("num_kv_heads=2", "window_size=(3, 0)", "base=10000.0", "eps=1e-06", "norm_first=True"):
        assert part in text
    text = repr(nn.VisionEncoder(16, 8, embed_dim=32, num_layers=1, num_heads=4))
    for part in ("image_size=(16, 16)", "patch_size=(8, 8)", "activation='gelu'", "bias=True"):
        assert part in text
