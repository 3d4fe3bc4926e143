"""Transformers models on this library's attention match transformers' eager attention, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")

from hf_models import DECODERS, ENCODERS, PAIRS, inputs_of, padded, tiny
from transformers import DynamicCache, StaticCache

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.integrations.transformers import register


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


def assert_near(ours, theirs, where=...):
    torch.testing.assert_close(ours[where], theirs[where], rtol=2e-4, atol=2e-5)


def both(make, **kw):
    """The same model on this library, and on transformers' eager attention, which supports softcaps and sinks."""
    return tiny(make, "cudnn_sdpa", **kw), tiny(make, "eager", **kw)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_decoders_logits_with_padding_and_step_by_step(name):
    ours, theirs = both(DECODERS[name])
    ids = torch.randint(3, 96, (4, 14))
    mask = padded(14)
    expected = theirs(ids).logits
    assert_near(ours(ids).logits, expected)
    assert_near(ours(ids, attention_mask=mask).logits, theirs(ids, attention_mask=mask).logits, mask.bool())
    for cache in (DynamicCache(), DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=20)):
        steps = [ours(part, past_key_values=cache).logits for part in ids.split((8, 1, 1, 3, 1), dim=1)]
        assert_near(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize("padding", ["some", "ones", "none"])
@pytest.mark.parametrize(
    ("name", "cache", "batch"),
    [
        *(("llama", cache, batch) for cache, batch in (("dynamic", 2), ("static", 1), ("static", 2), ("static", 3))),
        *((name, cache, 2) for name in ("gemma2", "gpt_oss") for cache in ("dynamic", "static")),
    ],
)
@torch.no_grad()
def test_a_decoder_generates_the_same_tokens(name, cache, batch, padding):
    register(inspect_padding=padding != "some")
    ours, theirs = both(DECODERS[name])
    ids, mask = torch.randint(3, 96, (batch, 9)), torch.ones(batch, 9, dtype=torch.long)
    if padding == "some":
        mask[0, :4] = 0
    results = [
        model.generate(
            ids,
            attention_mask=None if padding == "none" else mask,
            max_new_tokens=4,
            do_sample=False,
            cache_implementation=cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for model in (ours, theirs)
    ]
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_near(torch.stack(results[0].logits), torch.stack(results[1].logits))


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_an_encoders_output(name):
    ours, theirs = both(ENCODERS[name])
    inputs = inputs_of(name)
    field = "logits_per_image" if name == "clip" else "last_hidden_state"
    where = inputs["attention_mask"].bool() if name in ("bert", "modernbert") else ...
    assert_near(getattr(ours(**inputs), field), getattr(theirs(**inputs), field), where)


@pytest.mark.parametrize("name", PAIRS)
@torch.no_grad()
def test_an_encoder_and_a_decoder(name):
    ours, theirs = both(PAIRS[name])
    inputs = inputs_of(name)
    assert_near(ours(**inputs).logits, theirs(**inputs).logits)
    steps = inputs.pop("decoder_input_ids")
    encoded = ours.get_encoder()(**inputs)
    hidden = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    expected = theirs(encoder_outputs=encoded, decoder_input_ids=steps, **hidden).logits
    found, past = [], None
    for part in steps.split((4, 1, 2), dim=1):
        out = ours(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=past, use_cache=True, **hidden)
        past = out.past_key_values
        found.append(out.logits)
    assert_near(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("cache", ["none", "dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2"])
@torch.no_grad()
def test_packed_sequences_by_position_ids(name, cache):
    ours, theirs = both(DECODERS[name])
    ids = torch.randint(3, 96, (1, 16))
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    expected = torch.cat([theirs(part).logits for part in ids.split((7, 9), dim=1)], dim=1)
    past = {
        "none": None,
        "dynamic": DynamicCache(config=ours.config),
        "static": StaticCache(config=ours.config, max_cache_len=40),
    }[cache]
    given = {"position_ids": positions, "use_cache": past is not None, "past_key_values": past}
    assert_near(ours(ids, **given).logits, expected)
    if past is None:  # transformers reads the positions and materializes a mask
        return
    with pytest.raises(UnsupportedError, match=r"position_ids that restart, (with earlier keys|on a static)"):
        ours(ids, **given)
    register(inspect_padding=False)
    with pytest.raises(RuntimeError, match="position_ids restart"):
        ours(ids, position_ids=positions)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "t5"])
def test_training_has_the_same_loss_and_gradients(name):
    makers = {**DECODERS, **PAIRS}
    ours, theirs = (model.train() for model in both(makers[name], **({"dropout_rate": 0.0} if name == "t5" else {})))
    ids, mask = torch.randint(3, 96, (4, 14)), padded(14)
    after_hidden = torch.cat([mask[:, :1], mask[:, :-1]], dim=1) == 0  # predictions of padding are meaningless
    labels = ids.masked_fill((mask == 0) | after_hidden, -100)
    losses = [model(input_ids=ids, attention_mask=mask, labels=labels).loss for model in (ours, theirs)]
    assert_near(*losses)
    for loss in losses:
        loss.backward()
    for (place, parameter), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None, place
        else:
            scale = expected.grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-3, atol=1e-4 * scale + 1e-8, msg=place)


def test_dropout_is_applied_in_training_only():
    model = tiny(DECODERS["llama"], "cudnn_sdpa", attention_dropout=0.5)
    ids = torch.randint(3, 96, (2, 10))
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_of_packed_documents_with_offsets_of_a_collator():
    """`DataCollatorWithFlattening` makes two tensors of the same offsets."""
    model = tiny(DECODERS["llama"], "cudnn_sdpa", attention_dropout=0.5).train()
    offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets.clone(), "max_length_q": 6, "max_length_k": 6}
    ids = torch.randint(3, 96, (1, 10))
    one, other = (model(ids, use_cache=False, **given).logits for _ in range(2))
    assert not torch.equal(one, other)
    changed = ids.clone()
    changed[0, :4] = 5
    torch.manual_seed(3)
    one = model(ids, use_cache=False, **given).logits
    torch.manual_seed(3)
    assert torch.equal(model(changed, use_cache=False, **given).logits[:, 4:], one[:, 4:])


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_on_a_static_cache_compile_once():
    ours, theirs = both(DECODERS["llama"])
    ids = torch.randint(3, 96, (2, 12))
    cache = StaticCache(config=ours.config, max_cache_len=16)
    logits = [ours(ids[:, :6], past_key_values=cache).logits]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(ours, fullgraph=True, backend=counter)
    logits += [step(ids[:, at : at + 1], past_key_values=cache).logits for at in range(6, 12)]
    assert_near(torch.cat(logits, dim=1), theirs(ids).logits)
    assert counter.frame_count == 1


@pytest.mark.slow
@torch.no_grad()
def test_compiled_prompts_of_many_lengths_share_a_graph():
    ours, theirs = both(DECODERS["mistral"])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    for length in (9, 17):
        ids = torch.randint(3, 96, (2, length))
        assert_near(compiled(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@torch.no_grad()
def test_packed_sequences_by_flash_attention_arguments(name):
    ours = tiny(DECODERS[name], "cudnn_sdpa")
    ids = torch.randint(3, 96, (1, 16))
    offsets = torch.tensor([0, 7, 16], dtype=torch.int32)
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
    expected = torch.cat([ours(ids[:, :7]).logits, ours(ids[:, 7:]).logits], dim=1)
    for cached in (False, True):
        found = ours(ids, position_ids=positions, use_cache=cached, **given).logits
        assert_near(found, expected)
    # An offset of all positions rotates all tokens equally.
    assert_near(ours(ids, use_cache=False, **given).logits, expected)
    with pytest.raises(UnsupportedError, match="a batch of more than one"):
        ours(ids.expand(2, -1), use_cache=False, **given)
    with pytest.raises(UnsupportedError, match="without cu_seq_lens_k"):
        ours(ids, use_cache=False, cu_seq_lens_q=offsets)


class Padded(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask, use_cache=False).logits


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_padded_prompts_with_windows_are_exported_for_all_lengths(name):
    model = tiny(DECODERS[name], "cudnn_sdpa")
    batch, length = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("length", min=2, max=64)
    shapes = {name: {0: batch, 1: length} for name in ("ids", "mask")}
    ids = torch.randint(3, 96, (3, 14))
    program = torch.export.export(Padded(model), (ids, torch.ones_like(ids)), dynamic_shapes=shapes).module()
    for size in (3, 20):
        ids, mask = torch.randint(3, 96, (4, size)), torch.ones(4, size, dtype=torch.int64)
        mask[1, -2:] = 0
        seen = mask.bool()
        assert_near(program(ids, mask)[seen], model(ids, attention_mask=mask).logits[seen])


@pytest.mark.slow
@torch.no_grad()
def test_padded_prompts_with_windows_compile_once():
    ours, theirs = both(DECODERS["mistral"])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Padded(ours), fullgraph=True, dynamic=True, backend=counter)
    for length in (3, 4, 9, 17, 5):
        ids, mask = torch.randint(3, 96, (2, length)), torch.ones(2, length, dtype=torch.int64)
        mask[1, -1:] = 0
        seen = mask.bool()
        assert_near(compiled(ids, mask)[seen], theirs(ids, attention_mask=mask, use_cache=False).logits[seen])
    assert counter.frame_count == 1
