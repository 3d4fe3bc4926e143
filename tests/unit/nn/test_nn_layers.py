"""Norms, feed-forward modules, patches, layers and the vision encoder: conversions. `generators` has values."""

from __future__ import annotations

import pytest
import torch
from module_values import randomize
from torch import nn

from cudnn_sdpa import OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.nn import (
    Attention,
    FeedForward,
    LayerNorm,
    PatchEmbed,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    TransformerLayer,
    VisionEncoder,
)


def with_random_parameters(module):
    """A PyTorch module whose biases and norms do not have their initial values."""
    for x in module.parameters():
        nn.init.normal_(x, mean=0.2 if x.dim() == 1 else 0.0, std=0.2)
    return module


def assert_equal_results(module, theirs, *tensors):
    torch.testing.assert_close(module(*tensors), theirs(*tensors), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_new_norm_has_unit_factors(zero_centered):
    x = torch.randn(3, 48)
    expected = nn.functional.rms_norm(x, (48,), eps=1e-6)
    torch.testing.assert_close(RMSNorm(48, zero_centered=zero_centered)(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("affine", [True, False])
def test_conversion_of_pytorchs_norms(eps, affine):
    x = 1e-3 * torch.randn(2, 7, 48)  # so small that eps counts
    theirs = with_random_parameters(nn.RMSNorm(48, eps, affine))
    assert_equal_results(RMSNorm.from_torch(theirs), theirs, x)
    for bias in (True, False):
        other = with_random_parameters(nn.LayerNorm(48, eps or 1e-5, affine, bias))
        assert_equal_results(LayerNorm.from_torch(other), other, x)
        loaded = LayerNorm(48, eps or 1e-5, affine, bias)
        loaded.load_state_dict(other.state_dict())
        assert_equal_results(loaded, other, x)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_zero_centered_norms(kind):
    x, plain, centered = torch.randn(3, 48), kind(48), kind(48, zero_centered=True)
    assert torch.equal(centered(x), plain(x))
    torch.nn.init.normal_(centered.weight)
    plain.weight.data.copy_(centered.weight + 1)
    torch.testing.assert_close(centered(x), plain(x))
    assert "zero_centered=True" in repr(centered)


def test_norms_over_several_dimensions_are_not_converted():
    for kind, ours in ((nn.RMSNorm, RMSNorm), (nn.LayerNorm, LayerNorm)):
        with pytest.raises(UnsupportedError, match="last 2 dimensions"):
            ours.from_torch(kind((4, 8)))
        with pytest.raises(OptionError, match="normalized_shape"):
            ours((4, 8))
        with pytest.raises(OptionError, match="module: got"):
            ours.from_torch(nn.BatchNorm1d(8))


def test_inner_dropout_is_applied_in_training_only():
    module, x = FeedForward(32, 56, dropout=0.5), torch.randn(2, 7, 32)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [4, (4, 8)])
def test_patches(bias, size):
    module = randomize(PatchEmbed(size, 24, bias=bias))
    theirs = with_random_parameters(nn.Conv2d(3, 24, size, size, bias=bias))
    images = torch.randn(2, 3, 16, 24)
    expected = theirs(images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(PatchEmbed.from_torch(theirs)(images), expected, atol=1e-5, rtol=1e-4)
    module.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(module(images), expected, atol=1e-5, rtol=1e-4)


def test_unconvertible_convolutions_say_why():
    with pytest.raises(UnsupportedError) as error:
        PatchEmbed.from_torch(nn.Conv2d(4, 8, 4, 2, padding=1, dilation=2, groups=2))
    assert len(error.value.reasons) == 4
    module = PatchEmbed(4, 8)
    for images in (torch.randn(2, 3, 15, 16), torch.randn(2, 4, 16, 16), torch.randn(3, 16, 16)):
        with pytest.raises(ShapeError, match="images"):
            module(images)
    with pytest.raises(OptionError, match="images"):
        module(None)
    with pytest.raises(OptionError, match="patch_size"):
        PatchEmbed((4, 4, 4), 8)


ACTIVATIONS = ["relu", "gelu", nn.GELU("tanh"), nn.functional.silu, torch.relu, nn.ReLU()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["relu", "gelu", "GELU tanh", "F.silu", "torch.relu", "ReLU"])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False, "layer_norm_eps": 0.01}], ids=str)
def test_conversion_of_pytorchs_layer(activation, options):
    theirs = nn.TransformerEncoderLayer(32, 4, 56, 0.25, activation, batch_first=True, **options)
    with_random_parameters(theirs).eval()
    module = TransformerLayer.from_torch(theirs)
    assert not module.training
    assert module.dropout == module.mlp.dropout == module.self_attn.dropout == 0.25
    x = torch.randn(2, 7, 32)
    assert_equal_results(module, theirs, x)
    loaded = TransformerLayer(
        32,
        4,
        56,
        norm="layer_norm",
        activation=module.mlp.activation,
        norm_first=theirs.norm_first,
        bias=options.get("bias", True),
        norm_eps=options.get("layer_norm_eps"),
    )
    loaded.load_state_dict(theirs.state_dict())
    assert_equal_results(loaded, theirs, x)
    causal = TransformerLayer.from_torch(theirs, is_causal=True)
    hidden = nn.Transformer.generate_square_subsequent_mask(7)
    torch.testing.assert_close(causal(x), theirs(x, hidden, is_causal=True), atol=1e-5, rtol=1e-4)


def test_unconvertible_layers_say_why():
    theirs = nn.TransformerEncoderLayer(32, 4, 56, activation=torch.tanh, batch_first=True)
    theirs.dropout2.p = 0.5
    with pytest.raises(UnsupportedError) as error:
        TransformerLayer.from_torch(theirs)
    assert len(error.value.reasons) == 2
    with pytest.raises(UnsupportedError, match="batch_first = True"):
        TransformerLayer.from_torch(nn.TransformerEncoderLayer(32, 4, 56))
    uneven = nn.TransformerEncoderLayer(32, 4, 56, batch_first=True)
    uneven.linear1.bias = None
    with pytest.raises(UnsupportedError, match="others have none"):
        TransformerLayer.from_torch(uneven)
    other = nn.TransformerEncoderLayer(32, 4, 56, batch_first=True)
    other.norm1 = nn.RMSNorm(32)
    assert isinstance(TransformerLayer.from_torch(other).norm1, RMSNorm)
    other.norm1 = nn.Identity()
    with pytest.raises(OptionError, match=r"module\.norm1"):
        TransformerLayer.from_torch(other)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_hugging_face_are_loaded(bias):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        attention_bias=bias, mlp_bias=bias, attn_implementation="eager", rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = with_random_parameters(llama.LlamaDecoderLayer(config, 0)).eval()
    rope = RotaryEmbedding(16, base=llama.LlamaRotaryEmbedding(config).inv_freq[1].item() ** -8)
    options = {"num_kv_heads": 2, "is_causal": True, "norm_eps": 1e-5, "rope": rope, "bias": bias}
    module = TransformerLayer(64, 4, 96, **options)
    module.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 64)
    positions = torch.arange(9)[None]
    embeddings = llama.LlamaRotaryEmbedding(config)(x, positions)
    hidden = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected = theirs(x, attention_mask=hidden, position_ids=positions, position_embeddings=embeddings)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(module(x), expected, atol=3e-5, rtol=1e-3)


def test_images_of_another_size_are_refused():
    module = VisionEncoder((16, 24), 8, embed_dim=32, num_layers=2, num_heads=4)
    with pytest.raises(ShapeError, match="image_size"):
        module(torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("final", [None, nn.LayerNorm(32), nn.RMSNorm(32)], ids=["none", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("with_class", [True, False])
def test_conversion_of_pytorchs_vision_modules(final, with_class):
    layer = nn.TransformerEncoderLayer(32, 4, 56, activation="gelu", batch_first=True, norm_first=True)
    encoder = with_random_parameters(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False)).eval()
    embed = with_random_parameters(nn.Conv2d(3, 32, 8, 8))
    positions = torch.randn(1, 6 + with_class, 32)
    class_token = torch.randn(32) if with_class else None
    module = VisionEncoder.from_torch(embed, positions, encoder, image_size=(16, 24), class_token=class_token)
    images = torch.randn(2, 3, 16, 24)
    tokens = embed(images).flatten(2).transpose(1, 2)
    if with_class:
        tokens = torch.cat([class_token.expand(2, 1, 32), tokens], dim=1)
    torch.testing.assert_close(module(images), encoder(tokens + positions), atol=2e-5, rtol=1e-4)
    with pytest.raises(ShapeError, match="position_embedding"):
        VisionEncoder.from_torch(embed, positions.mT, encoder, image_size=(16, 24), class_token=class_token)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: TransformerLayer(32, 4, 0), "ffn_dim"),
        (lambda: TransformerLayer(32, 4, 56, norm="batch_norm"), "norm"),
        (lambda: TransformerLayer(32, 4, 56, activation="tanh"), "activation"),
        (lambda: TransformerLayer(32, 4, 56, norm_first=1), "norm_first"),
        (lambda: TransformerLayer(32, 4, 56, dropout=-0.1), "dropout"),
        (lambda: TransformerLayer(32, 4, 56, context_dim=32), "context_dim"),
        (lambda: TransformerLayer(32, 4, 56, norm_eps="1"), "eps"),
        (lambda: RMSNorm(0), "normalized_shape"),
        (lambda: RMSNorm(8, zero_centered="yes"), "zero_centered"),
        (lambda: SwiGLU(8, -1), "hidden_dim"),
        (lambda: FeedForward(8, 8, activation="swiglu"), "activation"),
        (lambda: VisionEncoder(30, 8, embed_dim=32, num_layers=1, num_heads=4), "image_size"),
        (lambda: VisionEncoder(32, 8, embed_dim=32, num_layers=0, num_heads=4), "num_layers"),
        (lambda: VisionEncoder(32, 8, embed_dim=32, num_layers=1, num_heads=4, norm="none"), "norm"),
    ],
)
def test_wrong_options_are_named(make, name):
    with pytest.raises(OptionError) as error:
        make()
    assert error.value.argument == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rms_norm_matches_pytorch_with_its_state(dtype):
    x = 1e-4 * torch.randn(4, 64, dtype=dtype)  # so small that eps counts
    for options in ({}, {"eps": None}, {"eps": 1e-5}):
        theirs, ours = (kind(64, **options, dtype=dtype) for kind in (nn.RMSNorm, RMSNorm))
        ours.load_state_dict(randomize(theirs).state_dict())
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(RMSNorm.from_torch(theirs)(x), theirs(x))


def test_default_eps_is_the_documented_one():
    for norm, eps in (("rms_norm", 1e-6), ("layer_norm", 1e-5)):
        assert TransformerLayer(64, 4, 96, norm=norm).norm1.eps == eps
        assert TransformerLayer(64, 4, 96, norm=norm, norm_eps=1e-3).norm2.eps == 1e-3


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_module_with_hooks_is_not_converted(kind):
    module = nn.MultiheadAttention(64, 4, batch_first=True)
    getattr(module.out_proj, kind)(lambda *_: None)
    with pytest.raises(UnsupportedError, match="a hook is registered"):
        Attention.from_torch(module)


def test_conversion_refuses_options_that_the_module_defines():
    with pytest.raises(OptionError, match="options: got bias; expected is_causal"):
        Attention.from_torch(nn.MultiheadAttention(64, 4, batch_first=True), bias=False)


def test_rotations_must_be_a_matching_pair():
    rope, heads = RotaryEmbedding(16), torch.randn(2, 5, 4, 16)
    cos, sin = rope(torch.arange(5))
    with pytest.raises(ShapeError, match=r"rotations: got sines of shape \(1, 8\)"):
        rope.rotate(heads, (cos, sin[:1]))
    for wrong in (cos, None, (cos, sin, cos)):
        with pytest.raises(OptionError, match="rotations: got"):
            rope.rotate(heads, wrong)


def test_frequencies_are_recomputed_once_after_assigning_weights(monkeypatch):
    source = randomize(TransformerLayer(64, 4, 96, is_causal=True, rope=RotaryEmbedding(16)))
    with torch.device("meta"):
        layer = TransformerLayer(64, 4, 96, is_causal=True, rope=RotaryEmbedding(16))
    layer.load_state_dict(source.state_dict(), assign=True)
    made, real = [], RotaryEmbedding._new_frequencies
    monkeypatch.setattr(RotaryEmbedding, "_new_frequencies", lambda self: made.append(self) or real(self))
    x = torch.randn(2, 7, 64)
    with torch.inference_mode():
        layer(x)
    for _ in range(3):
        torch.testing.assert_close(layer(x), source(x))
    assert len(made) == 1
    layer(x.requires_grad_()).sum().backward()
    with torch.device("meta"):
        other = TransformerLayer(64, 4, 96, is_causal=True, rope=RotaryEmbedding(16))
    other.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(other.to("cpu")(x), source(x))
