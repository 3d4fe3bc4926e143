"""Megatron-core's `core_attention` on this library, in Megatron's own layers and beside its own attention."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import float64_reference as exact
import pytest
import torch

from cudnn_sdpa import OptionError, UnsupportedError
from cudnn_sdpa.integrations.megatron import CoreAttention

megatron = pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)  # Megatron's own

HEADS, GROUPS, DIM = 4, 2, 16
GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def layer(kind=AttnMaskType.causal, number=1, **options):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        attention_dropout=0.0,
        **options,
    )
    return CoreAttention(config, number, kind, "self", pg_collection=SimpleNamespace(tp=GROUP))


def tensors(length=12, batch=2):
    sizes = ((length, batch, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    return [torch.randn(size, requires_grad=True) for size in sizes]


def check(found, qkv, **options):
    """The output (S, B, H · D) and its gradients."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
    grad_out = torch.randn_like(found)
    of_heads = grad_out.unflatten(2, (HEADS, DIM)).permute(1, 2, 0, 3)
    want, _, grads = exact.gradients({"q": q, "k": k, "v": v}, of_heads, **options)
    torch.testing.assert_close(found.double(), want.permute(2, 0, 1, 3).flatten(2), atol=1e-5, rtol=1e-4)
    for gradient, name in zip(torch.autograd.grad(found, qkv, grad_out), "qkv", strict=True):
        torch.testing.assert_close(gradient.double(), grads[name].permute(2, 0, 1, 3), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AttnMaskType.causal, {"is_causal": True}),
        (AttnMaskType.no_mask, {}),
        (AttnMaskType.padding, {}),
        (AttnMaskType.causal_bottom_right, {"is_causal": True}),
    ],
)
def test_mask_types(kind, options):
    qkv = tensors()
    check(layer(kind)(*qkv, None), qkv, **options)
    check(layer()(*qkv, None, attn_mask_type=kind), qkv, **options)


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding, AttnMaskType.arbitrary], ids=str)
def test_a_mask_is_never_ignored(kind):
    qkv = tensors()
    hidden = torch.rand(2, 1, 12, 12) < 0.4
    hidden[:, :, :, 0] = False
    options = {"attn_mask": ~hidden, "is_causal": kind == AttnMaskType.causal}
    check(layer(kind)(*qkv, hidden), qkv, **options)


def test_a_bias_with_a_mask():
    qkv = tensors()
    bias, hidden = torch.randn(1, HEADS, 12, 12), torch.rand(2, 1, 12, 12) < 0.4
    hidden[:, :, :, 0] = False
    out = layer(AttnMaskType.padding)(*qkv, hidden, attention_bias=bias)
    check(out, qkv, attn_mask=bias.masked_fill(hidden, -torch.inf))


def test_windows_of_some_layers():
    options = {"window_size": (3, 0), "window_attn_skip_freq": 2}
    qkv = tensors()
    check(layer(number=1, **options)(*qkv, None), qkv, window_size=(3, 0))
    check(layer(number=2, **options)(*qkv, None), qkv, is_causal=True)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_sinks(kind):
    attention = layer(softmax_type=kind)
    assert (kind == "learnable") is any(True for _ in attention.parameters())
    with torch.no_grad():
        if kind == "learnable":
            attention.softmax_offset.normal_()
    qkv = tensors()
    check(attention(*qkv, None), qkv, is_causal=True, sinks=attention.softmax_offset.detach().float())


def test_scores_have_the_given_scale():
    qkv = tensors()
    attention = layer()
    attention.scale = 0.3
    check(attention(*qkv, None), qkv, is_causal=True, scale=0.3)


def test_packed_sequences():
    lengths = [5, 0, 7]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=7, max_seqlen_kv=7
    )
    q, k, v = (torch.randn(12, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
    out = layer()(q, k, v, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)
    assert out.shape == (12, HEADS * DIM)
    for begin, end in itertools.pairwise(offsets.tolist()):
        one = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        want = exact.attend(*one, is_causal=True)[0][0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(out[begin:end].double(), want, atol=1e-5, rtol=1e-4)
    packed.cu_seqlens_q_padded = offsets + 1
    with pytest.raises(UnsupportedError, match="padding between sequences"):
        layer()(q, k, v, None, packed_seq_params=packed)


def test_it_agrees_with_megatrons_own(monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    new = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: new)
    config = layer().config
    theirs = DotProductAttention(
        config, 1, AttnMaskType.padding, "self", pg_collection=SimpleNamespace(tp=GROUP)
    ).eval()
    monkeypatch.setattr(theirs.config, "sequence_parallel", True)  # no generator of a GPU
    qkv = tensors()
    hidden = torch.ones(12, 12).triu(1).bool().view(1, 1, 12, 12)
    ours = layer(AttnMaskType.causal)
    torch.testing.assert_close(ours(*qkv, None), theirs(*qkv, hidden), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours(*qkv, hidden), theirs(*qkv, hidden), atol=1e-5, rtol=1e-4)


def test_megatron_builds_it_from_a_layers_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec().submodules.self_attention.submodules
    spec.core_attention = CoreAttention
    built = build_module(
        spec.core_attention,
        config=layer().config,
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=None,
        pg_collection=SimpleNamespace(tp=GROUP),
    )
    qkv = tensors()
    check(built(*qkv, None), qkv, is_causal=True)


def test_what_it_does_not_have_is_refused():
    config = layer().config
    config.context_parallel_size = 2
    with pytest.raises(UnsupportedError, match="context_parallel_size is 2"):
        CoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(tp=GROUP))
    config.context_parallel_size, config.softmax_type = 1, "other"
    with pytest.raises(OptionError, match="softmax_type"):
        CoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(tp=GROUP))
    with pytest.raises(OptionError, match="attention_mask"):
        layer(AttnMaskType.arbitrary)(*tensors(), None)
