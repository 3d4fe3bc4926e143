"""`register`: its requirements, its effects, and what it refuses."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import DECODERS, tiny
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cudnn_sdpa import DtypeError, LibraryError, OptionError, UnsupportedError, sdpa
from cudnn_sdpa.integrations import attention, masks
from cudnn_sdpa.integrations.transformers import NAME, register


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


def test_a_missing_transformers_is_named(run_python):
    run_python("""
import sys
sys.modules["transformers"] = None
from cudnn_sdpa import LibraryError
from cudnn_sdpa.integrations.transformers import register
try:
    register()
except LibraryError as error:
    assert "transformers is not installed" in str(error) and "pip install" in str(error), error
else:
    raise AssertionError("it registered with what is not there")
""")


def test_an_older_transformers_is_refused(monkeypatch):
    from transformers import masking_utils

    def sdpa_mask(batch_size, cache_position, kv_length, kv_offset=0, **kwargs):
        """The signature of 5.0."""

    monkeypatch.setattr(masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(LibraryError, match=r"\['allow_is_causal_skip', .*'q_length'.*\].*5\.17"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    with pytest.raises(LibraryError, match="no attention and mask interfaces"):
        register()


def test_registering_twice_has_no_effect():
    method = PreTrainedModel.get_correct_attn_implementation
    register()
    assert PreTrainedModel.get_correct_attn_implementation is method
    assert AttentionInterface()[NAME] is attention.attention
    assert NAME in AttentionMaskInterface().valid_keys()


def test_settings_are_checked():
    with pytest.raises(OptionError, match="inspect_padding"):
        register(inspect_padding=1)


def test_models_with_sinks_are_accepted_unlike_on_pytorchs_attention():
    model = tiny(DECODERS["gpt_oss"], "eager")
    model.set_attn_implementation(NAME)
    assert model.config._attn_implementation == NAME
    with pytest.raises(ValueError, match="does not support"):
        tiny(DECODERS["gpt_oss"], "sdpa")
    with pytest.raises(ValueError, match="not supported"):
        tiny(DECODERS["gpt_oss"], "cudnn_sdpa_of_another_kind")


def layer(is_causal=True):
    module = torch.nn.Module()
    module.is_causal = is_causal
    return module


@pytest.mark.parametrize("argument", attention.REFUSED)
def test_unsupported_options_are_refused(argument):
    q = torch.randn(1, 2, 4, 8)
    for nothing in (None, False):
        assert attention.attention(layer(), q, q, q, None, **{argument: nothing})[0].shape == (1, 4, 2, 8)
    with pytest.raises(UnsupportedError, match=attention.REFUSED[argument].split("(", maxsplit=1)[0]):
        attention.attention(layer(), q, q, q, None, **{argument: torch.zeros(1)})


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("of_layer", [True, False])
def test_without_a_mask_the_layers_is_causal_is_used(of_layer, said, queries):
    q, k, v = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 16)
    out, weights = attention.attention(layer(of_layer), q, k, v, None, scaling=0.3, is_causal=said)
    causal = queries > 1 and (of_layer if said is None else said)
    torch.testing.assert_close(out, sdpa(q, k, v, is_causal=causal, scale=0.3).transpose(1, 2))
    assert out.is_contiguous()
    assert weights is None


@pytest.mark.parametrize("kind", ["bool", "float", "bfloat16"])
def test_custom_masks_are_used_unchanged(kind):
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)
    seen = torch.rand(2, 1, 3, 5) < 0.6
    mask = seen if kind == "bool" else torch.where(seen, 0.25, -torch.inf).to(getattr(torch, kind))
    out = attention.attention(layer(), q, k, k, mask)[0]
    torch.testing.assert_close(out, sdpa(q, k, k, attn_mask=seen).transpose(1, 2))


@pytest.mark.parametrize("kind", ["bool", "float", "none"])
def test_a_step_on_a_growing_cache_is_padded_to_reuse_its_plan(kind, monkeypatch):
    seen_by_sdpa = []

    def watched(query, key, value, **options):
        mask = options.get("attn_mask")
        seen_by_sdpa.append((key.shape[2], value.shape[2], key.shape[2] if mask is None else mask.shape[3]))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(attention, "sdpa", watched)
    for keys in (255, 256, 257):
        q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 16)
        seen = torch.rand(2, 1, 1, keys) < 0.6
        mask = {"bool": seen, "float": torch.where(seen, 0.0, -torch.inf), "none": None}[kind]
        out = attention.attention(layer(), q, k, v, mask)[0]
        expected = sdpa(q, k, v, attn_mask=None if kind == "none" else seen)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    assert seen_by_sdpa == [(256,) * 3, (256,) * 3, (512,) * 3]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_integer_masks_are_refused(queries, dtype):
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 5, 8)
    with pytest.raises(DtypeError, match=r"attention_mask: got .*attention_mask\.bool\(\)"):
        attention.attention(layer(), q, k, k, torch.ones(2, 1, queries, 5, dtype=dtype))


@pytest.mark.parametrize("strict", [True, False])
def test_a_step_is_exported_for_all_lengths(strict):
    class Step(torch.nn.Module):
        is_causal = True

        def forward(self, q, k):
            return attention.attention(self, q, k, k, None)[0]

    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 10, 8)
    keys = torch.export.Dim("keys", min=2, max=600)
    program = torch.export.export(Step(), (q, k), dynamic_shapes=({}, {2: keys}), strict=strict).module()
    for length in (255, 256, 300):
        k = torch.randn(2, 2, length, 8)
        torch.testing.assert_close(program(q, k), sdpa(q, k, k).transpose(1, 2))


def test_cross_attention_and_training_queries_are_not_padded(monkeypatch):
    lengths = []

    def watched(query, key, value, **options):
        lengths.append(key.shape[2])
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(attention, "sdpa", watched)
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 7, 8)
    attention.attention(layer(False), q, k, k, None)
    attention.attention(layer(), q, k.clone().requires_grad_(), k, None)
    attention.attention(layer(), q, k, k, None, softcap=3.0)
    assert lengths == [7, 7, 7]


def apart(q, k, v, starts, *, causal=True, window_size=None):
    """Attention in float64 within each document; starts (B, S) marks their first tokens."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    document = starts.cumsum(dim=1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (document[:, :, None] == document[:, None])[:, None]
    if causal:
        seen = seen & (distance >= 0)
    if window_size is not None:
        seen = seen & (distance <= window_size)
    k, v = (x[:, :, :length].double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.double() @ k.mT * 0.3).masked_fill(~seen, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def positions_of(starts):
    """The position of each token in its document."""
    at = torch.arange(starts.shape[1]).expand(starts.shape)
    return at - at.masked_fill(~starts, 0).cummax(dim=1).values


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["causal", "both ways", "window_size", "empty cache"])
def test_restarting_positions_separate_documents(kind, batch):
    length = 23
    starts = torch.rand(batch, length) < 0.25
    starts[:, 0] = starts[0, 9:11] = True  # also a document of one token
    q = torch.randn(batch, 4, length, 8)
    k, v = torch.randn(2, batch, 2, length + 5 * (kind == "empty cache"), 8)
    mask = masks.band(3, 0, "cpu") if kind == "window_size" else None
    positions = positions_of(starts) + torch.randint(0, 4, (1,))  # documents may start at any position
    causal = kind != "both ways"
    found = attention.attention(layer(causal), q, k, v, mask, scaling=0.3, position_ids=positions)[0]
    expected = apart(q, k, v, starts, causal=causal, window_size=3 if kind == "window_size" else None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_positions_are_read_once_for_all_layers_until_they_change(monkeypatch):
    looks = []
    monkeypatch.setattr(
        attention,
        "_read_documents",
        lambda positions, look=attention._read_documents: looks.append(0) or look(positions),
    )
    q, positions = torch.randn(1, 2, 8, 8), torch.arange(8)[None]
    whole = apart(q, q, q, torch.tensor([[True] + 7 * [False]]))
    halves = apart(q, q, q, torch.tensor([2 * [True, False, False, False]]))

    def attend():
        return attention.attention(layer(), q, q, q, None, scaling=0.3, position_ids=positions)[0].double()

    for _ in range(3):
        torch.testing.assert_close(attend(), whole, rtol=1e-4, atol=1e-5)
    assert len(looks) == 1
    positions.remainder_(4)
    for _ in range(3):
        torch.testing.assert_close(attend(), halves, rtol=1e-4, atol=1e-5)
    assert len(looks) == 2
    with torch.inference_mode():  # such tensors have no version counter
        positions = torch.arange(8)[None]
        torch.testing.assert_close(attend(), whole, rtol=1e-4, atol=1e-5)
        positions.remainder_(4)
        torch.testing.assert_close(attend(), halves, rtol=1e-4, atol=1e-5)
    looks.clear()
    attention.attention(layer(), q[:, :, :1], q, q, None, position_ids=torch.zeros(1, 1, dtype=torch.long))
    assert not looks  # a single token is in one document


@pytest.mark.parametrize("how", ["not allowed", "compiled"])
def test_unreadable_positions_raise(how):
    q, positions = torch.randn(1, 2, 8, 8), torch.arange(8)[None]

    def attend(positions):
        options = {"inspect_positions": how == "compiled", "position_ids": positions, "scaling": 0.3}
        return attention.attention(layer(), q, q, q, None, **options)[0]

    function = torch.compile(attend, fullgraph=True, backend="aot_eager") if how == "compiled" else attend
    whole = apart(q, q, q, torch.tensor([[True] + 7 * [False]]))
    torch.testing.assert_close(function(positions).double(), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"position_ids restart.*use_cache=False"):
        function(positions % 4)
    assert len(attention._MESSAGE) < 256  # a GPU truncates the message


@pytest.mark.parametrize("what", ["earlier keys", "a static cache", "a position bias"])
def test_documents_mixed_with_padding_are_refused(what):
    q, k, positions = torch.randn(1, 2, 8, 8), torch.randn(1, 2, 12, 8), torch.arange(8)[None] % 4
    mask = masks.band(-1, 0, "cpu", torch.full((1,), 8, dtype=torch.int32)) if what == "a static cache" else None
    bias = torch.randn(1, 2, 8, 8) if what == "a position bias" else None
    k = q if bias is not None else k
    causal = what != "earlier keys"
    with pytest.raises(UnsupportedError, match=rf"position_ids that restart, (with|on) {what}"):
        attention.attention(layer(causal), q, k, k, mask, position_bias=bias, position_ids=positions)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q with a position bias"):
        attention.attention(layer(), q, q, q, None, position_bias=torch.randn(1, 2, 8, 8), cu_seq_lens_q=positions[0])


def test_positions_of_a_single_document_are_ignored():
    q = torch.randn(2, 2, 6, 8)
    expected = sdpa(q, q, q, is_causal=True).transpose(1, 2)
    rising, sections = torch.tensor([[5, 6, 7, 9, 12, 13]]), torch.zeros(3, 2, 6, dtype=torch.long)
    for positions in (rising, rising[0], rising.float() % 4, sections, torch.zeros(2, 7, dtype=torch.long)):
        torch.testing.assert_close(attention.attention(layer(), q, q, q, None, position_ids=positions)[0], expected)
