"""`nn.Attention` and `nn.RotaryEmbedding`: positions, conversions, and what is refused. `generators` has values."""

from __future__ import annotations

import copy

import pytest
import torch
from module_values import difference, in_float64, randomize
from torch import nn

from cudnn_sdpa import DtypeError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.nn import Attention, RMSNorm, RotaryEmbedding


def mha(**options):
    module = nn.MultiheadAttention(**{"embed_dim": 32, "num_heads": 4, "batch_first": True, **options})
    for name, x in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(x)
    return module


def test_a_context_may_be_projected_before():
    module = randomize(Attention(32, 4, context_dim=24, num_kv_heads=2, bias=True))
    x, context, lengths = torch.randn(2, 9, 32), torch.randn(2, 13, 24), torch.tensor([13, 6], dtype=torch.int32)
    found = module(x, module.project_context(context), context_lens=lengths)
    assert torch.equal(found, module(x, context, context_lens=lengths))


def test_explicit_positions():
    rope = RotaryEmbedding(8)
    module = randomize(Attention(32, 4, rope=rope, is_causal=True))
    x = torch.randn(2, 9, 32)
    for positions in (torch.arange(9) * 3 + 5, torch.randint(0, 1000, (2, 9), dtype=torch.int32)):
        shared = rope(positions)
        assert torch.equal(module(x, rotations=shared), module(x, position_ids=positions))
    assert torch.equal(module(x), module(x, position_ids=torch.arange(9)))
    # Only the distance between tokens matters.
    moved = module(x, position_ids=torch.arange(9) + 100)
    torch.testing.assert_close(module(x), moved, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"interleaved": True}, {"rotary_dim": 4}, {"frequencies": [1.0, 0.3, 0.05, 0.001]}], ids=str
)
def test_rotations_are_turns_of_complex_numbers(options):
    rope, heads, positions = RotaryEmbedding(8, **options), torch.randn(2, 7, 3, 8), torch.randint(0, 100, (2, 7))
    half = options.get("rotary_dim", 8) // 2
    angles = positions[..., None] * torch.tensor(
        options.get("frequencies") or [1e4 ** -(n / half) for n in range(half)]
    )
    turned, rest = heads.split([2 * half, 8 - 2 * half], -1)
    is_apart = "interleaved" not in options
    pairs = turned.unflatten(-1, (2, half)).transpose(-1, -2) if is_apart else turned.unflatten(-1, (half, 2))
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    found = (found.transpose(-1, -2) if is_apart else found).flatten(-2)
    torch.testing.assert_close(rope.rotate(heads, rope(positions)), torch.cat([found, rest], -1), rtol=1e-4, atol=1e-4)


def test_frequencies_are_not_converted():
    rope = RotaryEmbedding(32, base=1e6)
    before = rope.frequencies.clone()
    holder = nn.ModuleList([rope]).to(torch.bfloat16)
    assert rope.frequencies.dtype == torch.float32
    assert torch.equal(rope.frequencies, before)
    assert not holder.state_dict()
    with torch.device("meta"):
        on_meta = RotaryEmbedding(32, base=1e6)
    assert on_meta.frequencies.is_meta
    assert torch.equal(on_meta(torch.arange(5))[0], rope(torch.arange(5))[0])  # uninitialized
    assert torch.equal(on_meta.to_empty(device="cpu").frequencies, before)


def test_dropout_is_applied_in_training_only():
    module = Attention(32, 4, dropout=0.5)
    x = torch.randn(2, 9, 32)
    assert not torch.equal(module(x), module(x))
    torch.manual_seed(3)
    once = module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), once)
    module.eval()
    assert difference(module(x), in_float64(module, x)) < 2e-5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conversion_of_pytorchs_attention(bias, dtype):
    theirs = mha(bias=bias, dropout=0.25, dtype=dtype)
    theirs.in_proj_weight.requires_grad_(False)
    module = Attention.from_torch(theirs.eval())
    assert module.dropout == 0.25
    assert not module.training
    assert not module.qkv_proj.weight.requires_grad
    assert module.out_proj.weight.requires_grad
    x = torch.randn(2, 9, 32, dtype=dtype)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    hidden = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1)
    expected, _ = theirs(x, x, x, key_padding_mask=padding, attn_mask=hidden)
    found = module(x, attn_mask=~padding[:, None, None] & ~hidden)  # True means masked here
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        theirs.out_proj.weight.zero_()
    assert module.out_proj.weight.abs().sum() > 0, "the weights are not its own"


@pytest.mark.parametrize("dims", [{}, {"kdim": 24, "vdim": 24}])
def test_conversion_of_pytorchs_cross_attention(dims):
    theirs = mha(**dims)
    module = Attention.from_torch(theirs, cross=True)
    x, context = torch.randn(2, 9, 32), torch.randn(2, 5, dims.get("kdim", 32))
    torch.testing.assert_close(module(x, context), theirs(x, context, context)[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "cross", "reasons"),
    [
        ({"batch_first": False}, False, ["batch_first = True"]),
        ({"add_bias_kv": True, "add_zero_attn": True}, False, ["add_bias_kv", "add_zero_attn"]),
        ({"kdim": 24, "vdim": 16}, True, ["24 features and its values 16"]),
        ({"kdim": 24, "vdim": 24}, False, ["cross=True"]),
    ],
)
def test_unconvertible_modules_say_why(options, cross, reasons):
    with pytest.raises(UnsupportedError) as error:
        Attention.from_torch(mha(**options), cross=cross)
    assert len(error.value.reasons) == len(reasons)
    for reason, text in zip(error.value.reasons, reasons, strict=True):
        assert text in reason


def test_other_classes_are_not_converted():
    class Own(nn.MultiheadAttention):
        pass

    with pytest.raises(OptionError, match="may compute something else"):
        Attention.from_torch(Own(32, 4, batch_first=True))
    with pytest.raises(OptionError, match=r"expected torch\.nn\.MultiheadAttention"):
        Attention.from_torch(nn.Linear(3, 3))
    wrapped = mha()
    wrapped.out_proj = nn.Sequential(wrapped.out_proj)
    with pytest.raises(OptionError, match=r"out_proj: got (.*)Sequential; expected torch\.nn\.Linear\."):
        Attention.from_torch(wrapped)
    uneven = mha()
    uneven.out_proj.bias = None
    with pytest.raises(UnsupportedError, match="others have none"):
        Attention.from_torch(uneven)


def test_separate_weights_are_loaded():
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32}
    given = {f"{name}.{kind}": torch.randn(rows, *([32] if kind == "weight" else [])) for name, rows in sizes.items()
             for kind in ("weight", "bias")}  # fmt: skip
    module = Attention(32, 4, num_kv_heads=2, bias=True)
    module.load_state_dict(given)
    for kind in ("weight", "bias"):
        expected = torch.cat([given[f"{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")])
        assert torch.equal(getattr(module.qkv_proj, kind), expected)
        assert torch.equal(getattr(module.out_proj, kind), given[f"o_proj.{kind}"])
    assert len(given) == 8, "the caller's dictionary was changed"

    cross = Attention(32, 4, num_kv_heads=2, bias=True, context_dim=32)
    cross.load_state_dict(given)
    assert torch.equal(cross.kv_proj.weight, torch.cat([given["k_proj.weight"], given["v_proj.weight"]]))
    holder = nn.ModuleDict({"attention": Attention(32, 4, num_kv_heads=2, bias=True)})
    holder.load_state_dict({f"attention.{name}": x for name, x in given.items()})
    assert torch.equal(holder["attention"].qkv_proj.weight, module.qkv_proj.weight)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "separate"])
@pytest.mark.parametrize("dims", [None, {}, {"kdim": 24, "vdim": 24}], ids=["self", "cross", "cross with other dims"])
def test_state_dicts_of_pytorchs_attention_are_loaded(dims, packed):
    theirs = mha(**(dims or {}))
    module = Attention(32, 4, bias=True, packed=packed, context_dim=None if dims is None else theirs.kdim)
    module.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32)
    context = x if dims is None else torch.randn(2, 7, theirs.kdim)
    found = module(x) if dims is None else module(x, context)
    torch.testing.assert_close(found, theirs(x, context, context)[0], atol=1e-5, rtol=1e-4)


def test_cross_attention_with_separate_value_inputs_is_not_loaded():
    module = Attention(32, 4, bias=True, context_dim=24)
    message = r"parts of kv_proj: got k_proj\.weight 32 × 24, v_proj\.weight 32 × 16; expected as many columns in all"
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(mha(kdim=24, vdim=16).state_dict())


def test_separate_weights_of_other_sizes_are_not_mixed_up():
    module = Attention(32, 4, num_kv_heads=2, head_dim=8)
    rows = {"q_proj": 16, "k_proj": 24, "v_proj": 24}  # as many in all
    given = {f"{name}.weight": torch.randn(n, 32) for name, n in rows.items()}
    with pytest.raises(RuntimeError, match=r"q_proj\.weight: got 16 rows; expected 32"):
        module.load_state_dict({**given, "out_proj.weight": torch.randn(32, 32)})
    del given["v_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv_proj"):
        module.load_state_dict({**given, "out_proj.weight": torch.randn(32, 32)})


class Wrapped(nn.Module):
    """A projection within another module, as of LoRA, which has no weight of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_projections_may_be_wrapped():
    attention, x = randomize(Attention(32, 4, packed=False, sinks=True)), torch.randn(2, 9, 32)
    wanted = attention(x)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(attention, name, Wrapped(getattr(attention, name)))
    assert torch.equal(attention(x), wanted)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"embed_dim": 0}, "embed_dim"),
        ({"num_heads": 5}, "num_heads"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": -8}, "head_dim"),
        ({"bias": 1}, "bias"),
        ({"sinks": "yes"}, "sinks"),
        ({"is_causal": None}, "is_causal"),
        ({"window_size": 5}, "window_size"),
        ({"scale": "1"}, "scale"),
        ({"softcap": -2.0}, "softcap"),
        ({"dropout": 1.0}, "dropout"),
        ({"rope": 10000.0}, "rope"),
        ({"rope": RotaryEmbedding(16)}, "rope"),
        ({"context_dim": 8, "is_causal": True}, "is_causal"),
        ({"context_dim": 8, "window_size": (1, 1)}, "window_size"),
        ({"context_dim": 8, "rope": RotaryEmbedding(8)}, "rope"),
        ({"context_dim": 8, "qk_norm": 1e-6}, "qk_norm"),
        ({"context_dim": 0}, "context_dim"),
    ],
)
def test_wrong_options_are_named(options, name):
    with pytest.raises(OptionError) as error:
        Attention(**{"embed_dim": 32, "num_heads": 4, **options})
    assert error.value.argument == name


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"head_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 10}, "rotary_dim"),
        ({"base": 0}, "base"),
        ({"interleaved": 2}, "interleaved"),
        ({"frequencies": [1.0]}, "frequencies"),
    ],
)
def test_wrong_options_of_rotations_are_named(options, name):
    with pytest.raises(OptionError) as error:
        RotaryEmbedding(**{"head_dim": 8, **options})
    assert error.value.argument == name


def test_wrong_calls_are_named():
    plain, turned = Attention(32, 4), Attention(32, 4, rope=RotaryEmbedding(8))
    cross = Attention(32, 4, context_dim=24)
    x = torch.randn(2, 9, 32)
    calls = {
        "x": [(plain, (torch.randn(2, 9, 31),), {}), (plain, (torch.randn(9, 32),), {}), (plain, ([1],), {})],
        "context": [
            (plain, (x, x), {}),
            (cross, (x,), {}),
            (cross, (x, x), {}),
            (cross, (x, (x,)), {}),
            (cross, (x, Attention(32, 4, num_kv_heads=2, context_dim=24).project_context(x[..., :24])), {}),
            (cross, (x, torch.randn(3, 9, 24)), {}),
        ],
        "context_lens": [
            (plain, (x,), {"context_lens": torch.ones(2)}),
            (cross, (x, torch.randn(2, 7, 24)), {"context_lens": torch.ones(2)}),
        ],
        "position_ids": [
            (plain, (x,), {"position_ids": torch.arange(9)}),
            (turned, (x,), {"position_ids": torch.arange(8)}),
            (turned, (x,), {"position_ids": torch.rand(9)}),
            (turned, (x,), {"position_ids": [1]}),
        ],
        "rotations": [
            (plain, (x,), {"rotations": turned.rope(torch.arange(9))}),
            (turned, (x,), {"rotations": turned.rope(torch.arange(8))}),
        ],
        "step": [(plain, (x,), {"step": "next"})],
        "seq_lens": [
            (plain, (x,), {"seq_lens": torch.ones(3, dtype=torch.int32)}),
            (plain, (x,), {"seq_lens": torch.ones(2, dtype=torch.int64)}),
            (plain, (x,), {"seq_lens": [9, 9]}),
        ],
    }
    for name, cases in calls.items():
        for module, tensors, options in cases:
            with pytest.raises((OptionError, ShapeError, DtypeError)) as error:
                module(*tensors, **options)
            assert error.value.argument == name
    with pytest.raises(OptionError, match="self-attention"):
        plain.project_context(x)


@pytest.mark.parametrize("kind", ["zero-centered", "another eps", "default eps", "hooked", "another kind"])
def test_norms_of_heads_that_a_caller_replaces(kind):
    rope = RotaryEmbedding(16)
    attention = Attention(64, 4, num_kv_heads=2, rope=rope, qk_norm=1e-3, is_causal=True)
    x, seen = torch.randn(2, 7, 64), []
    with torch.no_grad():
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.uniform_(0.5, 1.5)
    plain = attention(x)
    changed = copy.deepcopy(attention)
    if kind == "zero-centered":
        for name in ("q_norm", "k_norm"):
            norm = RMSNorm(16, 1e-3, zero_centered=True)
            norm.weight.data.copy_(getattr(attention, name).weight - 1)
            setattr(changed, name, norm)
        torch.testing.assert_close(changed(x), plain)
    elif kind == "another eps":
        changed.k_norm.eps = 100.0
        assert (changed(x) - plain).abs().max() > 1e-3
    elif kind == "default eps":
        x = 1e-4 * x  # beside which no eps and that of the dtype differ
        changed.q_norm.eps = changed.k_norm.eps = None
        attention.q_norm.eps = attention.k_norm.eps = torch.finfo(torch.float32).eps
        torch.testing.assert_close(changed(x), attention(x))
        attention.q_norm.eps = attention.k_norm.eps = 0.0
        assert (changed(x) - attention(x)).abs().max() > 1e-7
    elif kind == "hooked":
        changed.q_norm.register_forward_hook(lambda *_: seen.append("called"))
        torch.testing.assert_close(changed(x), plain)
        assert seen == ["called"]
    else:
        changed.q_norm = torch.nn.Identity()
        assert (changed(x) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("head_dim", [65, 2048])
def test_head_dims_that_are_not_rotated(head_dim):
    with pytest.raises(OptionError, match="even number up to 1024"):
        RotaryEmbedding(head_dim, rotary_dim=64)
