"""The mask function for transformers: the same masks as transformers' own, without synchronization."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils as theirs

from cudnn_sdpa import DtypeError, ShapeError, sdpa
from cudnn_sdpa.integrations import attention, masks
from cudnn_sdpa.integrations.masks import mask_function

CONFIG = SimpleNamespace(sliding_window=5, attention_chunk_size=7)
WINDOW = {"mask_function": theirs.sliding_window_causal_mask_function(5), "local_size": 5}
BOTH_WAYS = {
    "mask_function": theirs.sliding_window_bidirectional_mask_function(5),
    "local_size": 5,
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
}
ENCODER = {
    "mask_function": theirs.bidirectional_mask_function,
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
}
CHUNKS = {
    "mask_function": theirs.chunked_causal_mask_function(7, torch.zeros(3, dtype=torch.long)),
    "local_size": 7,
}
GROUPS = theirs.packed_sequence_mask_function(torch.arange(40).expand(3, 40) // 4)
IMAGES = theirs.or_masks(theirs.sliding_window_causal_mask_function(5), GROUPS)
PATTERNS = {"causal": {}, "window_size": WINDOW, "chunks": CHUNKS, "encoder": ENCODER, "both ways": BOTH_WAYS}
NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

#: Numbers of queries and keys, offset of the queries, offset of the keys.
PLACES = {
    "prompt": (9, 9, 0, 0),
    "short prompt": (4, 4, 0, 0),
    "step": (1, 9, 8, 0),
    "chunk": (3, 12, 9, 0),
    "window's cache": (2, 6, 11, 7),
    "prompt on a static cache": (4, 16, 0, 0),
    "step on a static cache": (1, 16, torch.tensor(6), 0),
    "chunk on a static cache": (3, 16, torch.tensor(6), 0),
    "step on a static window's cache": (1, 5, 2, 0),
}


def ask(function, place, pattern, **more):
    queries, keys, q_offset, kv_offset = place
    sizes = {"batch_size": 3, "q_length": queries, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset}
    return function(**{**sizes, "config": CONFIG, "dtype": torch.float32, **pattern, **more})


def ours(place, pattern, *, inspect_padding=False, **more):
    made = mask_function(theirs.sdpa_mask, theirs.causal_mask_function, inspect_padding=inspect_padding)
    return ask(made, place, pattern, **more)


def as_booleans(mask, place, pattern):
    """The mask as the attention function applies it, as booleans (3, 1, Sq, Skv)."""
    queries, keys = place[:2]
    if mask is None:
        everything = torch.ones(3, 1, queries, keys, dtype=torch.bool)
        is_causal = pattern.get("allow_is_bidirectional_skip") is not True and queries > 1
        return everything.tril() if is_causal else everything
    if mask.dtype == masks.DTYPE:
        return masks.drawn(mask, torch.empty(3, 1, queries, 8), keys).expand(3, 1, queries, keys)
    assert mask.is_floating_point()
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return (mask == 0).expand(3, 1, queries, keys)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("skip", [True, False], ids=["", "no skip"])
def test_masks_match_transformers(kind, where, skip):
    place, pattern = PLACES[where], {**PATTERNS[kind], **({} if skip else NO_SKIP)}
    mask = ours(place, pattern)
    expected = ask(theirs.sdpa_mask, place, {**pattern, **NO_SKIP})
    assert torch.equal(as_booleans(mask, place, pattern), expected)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("width", ["keys", "queries"])
@pytest.mark.parametrize("inspect_padding", [False, True])
def test_masks_with_padding_match_transformers(kind, where, width, inspect_padding):
    place, pattern = PLACES[where], PATTERNS[kind]
    queries, keys, q_offset, kv_offset = place
    length = kv_offset + keys if width == "keys" else int(q_offset) + queries
    seen = torch.rand(3, length) < 0.7
    mask = ours(place, pattern, attention_mask=seen, inspect_padding=inspect_padding)
    expected = ask(theirs.sdpa_mask, place, {**pattern, **NO_SKIP}, attention_mask=seen)
    found = as_booleans(mask, place, pattern)
    if mask is not None and mask.dtype == masks.DTYPE:  # packed: padding queries see other keys
        rows = seen[:, None, :queries, None]
        found, expected = found & rows, expected & rows
    assert torch.equal(found, expected)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_padding_mask_of_ones_is_skipped_where_it_may_be_read(kind, where):
    place, pattern = PLACES[where], PATTERNS[kind]
    seen = torch.ones(3, place[3] + place[1], dtype=torch.bool)
    looked = ours(place, pattern, attention_mask=seen, inspect_padding=True)
    without = ours(place, pattern)
    assert type(looked) is type(without)
    assert torch.equal(as_booleans(looked, place, pattern), as_booleans(without, place, pattern))
    if without is not None:
        assert (looked.dtype, looked.shape) == (without.dtype, without.shape)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *(
            ("causal", "prompt"),
            ("causal", "step"),
            ("causal", "prompt on a static cache"),
            ("window_size", "short prompt"),
        ),
        *(("encoder", "prompt"), ("encoder", "chunk"), ("both ways", "short prompt")),
    ],
)
def test_plain_attention_has_no_mask(kind, where):
    assert ours(PLACES[where], PATTERNS[kind]) is None


STRUCTURES = [
    *(("causal", "chunk"), ("causal", "step on a static cache"), ("causal", "chunk on a static cache")),
    *(("window_size", "prompt"), ("window_size", "window's cache"), ("window_size", "step on a static cache")),
    *(("window_size", "step on a static window's cache"), ("both ways", "prompt")),
]
#: If the mask must not be skipped, only single queries have a structure.
WITHOUT_LEAVE = [(kind, where) for kind, where in STRUCTURES if PLACES[where][0] == 1 and kind != "both ways"]


@pytest.mark.parametrize(
    ("kind", "where", "leave"), [(*each, True) for each in STRUCTURES] + [(*each, False) for each in WITHOUT_LEAVE]
)
def test_a_structure_replaces_a_materialized_mask(kind, where, leave):
    mask = ours(PLACES[where], {**PATTERNS[kind], **({} if leave else {"allow_is_causal_skip": False})})
    assert mask.dtype == masks.DTYPE
    assert mask.untyped_storage().nbytes() <= 3 * 4


@pytest.mark.parametrize("kind", ["causal", "window_size"])
def test_a_padded_prompt_is_packed_unless_a_window_counts_padding(kind):
    seen = torch.rand(3, 9) < 0.7
    mask = ours(PLACES["prompt"], PATTERNS[kind], attention_mask=seen)
    assert mask.dtype == (masks.DTYPE if kind == "causal" else torch.float32)
    if kind == "causal":
        found = masks.structure(mask, torch.empty(3, 1, 9, 8))
        flat = seen.reshape(-1)
        assert found.offsets.tolist() == [0, *seen.sum(1).cumsum(0).tolist()]
        expected = torch.cat([flat.nonzero()[:, 0], (~flat).nonzero()[:, 0]])
        assert torch.equal(found.order.long(), expected)
        assert torch.equal(found.order[found.packed_index.long()].long(), torch.arange(27))


@pytest.mark.parametrize(
    "pattern",
    [
        {"mask_function": IMAGES, "local_size": 5, "allow_is_causal_skip": False},
        {
            "mask_function": theirs.and_masks(theirs.causal_mask_function, GROUPS),
            "allow_is_causal_skip": False,
        },
        {"mask_function": BOTH_WAYS["mask_function"], "local_size": 5, "allow_is_causal_skip": False},
    ],
    ids=["images", "packed", "both ways"],
)
@pytest.mark.parametrize("where", PLACES)
def test_other_patterns_are_materialized(pattern, where):
    mask = ours(PLACES[where], pattern)
    assert mask.dtype == torch.float32
    assert torch.equal(as_booleans(mask, PLACES[where], {}), ask(theirs.sdpa_mask, PLACES[where], pattern))


@pytest.mark.parametrize("where", PLACES)
def test_a_padding_mask_of_ones_masks_the_keys_past_it(where):
    queries, keys, q_offset, kv_offset = place = PLACES[where]
    pattern = {
        "mask_function": theirs.or_masks(theirs.causal_mask_function, theirs.bidirectional_mask_function),
        "allow_is_causal_skip": False,
    }
    seen = torch.ones(3, min(int(q_offset) + queries, kv_offset + keys), dtype=torch.bool)
    mask = ours(place, pattern, attention_mask=seen, inspect_padding=True)
    assert torch.equal(as_booleans(mask, place, {}), ask(theirs.sdpa_mask, place, pattern, attention_mask=seen))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", PATTERNS)
def test_masks_that_a_model_concatenates_have_all_keys(kind, where):
    place, pattern = PLACES[where], {**PATTERNS[kind], **NO_SKIP}
    mask = ours(place, pattern, config=SimpleNamespace(**vars(CONFIG), model_type="t5gemma2_decoder"))
    assert mask.dtype == torch.float32
    assert torch.equal(mask == 0, ask(theirs.sdpa_mask, place, pattern))


@pytest.mark.parametrize("where", ["chunk", "step on a static cache", "prompt"])
def test_a_model_that_computes_with_a_structure_fails(where):
    queries, keys = PLACES[where][:2]
    mask = ours(PLACES[where], {}, attention_mask=torch.ones(3, 9, dtype=torch.bool) if where == "prompt" else None)
    assert mask.dtype == masks.DTYPE
    q, k = torch.randn(3, 2, queries, 8), torch.randn(3, 2, keys, 8)
    bias = torch.randn(3, 2, queries, keys)
    changes = [
        lambda: mask + bias,
        lambda: mask[:, :, :, :keys] * bias,
        lambda: mask & (bias > 0),
        lambda: ~mask,
        lambda: torch.where(mask, bias, 0.0),
        lambda: bias.masked_fill(mask, 0.0),
        lambda: torch.cat([mask, bias[:, :1]], dim=-1),
        mask.bool,
        lambda: mask == 0,
        mask.float,
        lambda: mask.to(torch.int32),
    ]
    for change in changes:
        with pytest.raises((RuntimeError, ShapeError, DtypeError)):
            sdpa(q, k, k, attn_mask=change())


#: What transformers, or a model, may do to a mask without computing with it.
COPIES = {
    "contiguous": torch.Tensor.contiguous,
    "cloned": torch.Tensor.clone,
    "cloned densely": lambda mask: mask.clone(memory_format=torch.contiguous_format),
    "with the batch last in memory": lambda mask: mask.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "every second entry of a buffer": lambda mask: torch.stack([mask, mask.new_zeros(mask.shape)], dim=-1)[..., 0],
}


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("kind", ["lengths", "lengths and a window", "a window", "packed"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_structure_survives_copies(copy, kind, batch):
    queries, keys = (6, 6) if kind == "packed" else (3, 9)
    q = torch.randn(batch, 4, queries, 8)
    k, v = torch.randn(2, batch, 2, keys, 8)
    lengths = torch.randint(queries, keys + 1, (batch,), dtype=torch.int32)
    is_there = torch.ones(batch, queries, dtype=torch.bool)
    if kind == "packed":
        is_there = torch.rand(batch, queries) < 0.7
        mask = masks.packed(is_there)
    else:
        mask = masks.band(2 if "window_size" in kind else -1, 0, "cpu", None if kind == "a window" else lengths)
    copied = COPIES[copy](mask)
    for found, expected in zip(masks.structure(copied, q), masks.structure(mask, q), strict=True):
        if isinstance(expected, torch.Tensor):
            assert found.is_contiguous()
            assert torch.equal(found, expected)
        else:
            assert found == expected
    layer = torch.nn.Module()
    seen = masks.drawn(mask, q, keys) & is_there[:, None, :, None]
    scores = (q.double() @ k.double().repeat_interleave(2, dim=1).mT / 8**0.5).masked_fill(~seen, -torch.inf)
    expected = (scores.softmax(dim=-1).nan_to_num() @ v.double().repeat_interleave(2, dim=1)).transpose(1, 2)
    torch.testing.assert_close(attention.attention(layer, q, k, v, copied)[0].double(), expected, rtol=1e-4, atol=1e-5)
