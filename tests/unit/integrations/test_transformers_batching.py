"""Continuous batching: what its attention function gets, and greedy tokens of `generate_batch` against `generate`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import DECODERS, SMALL, tiny
from transformers import ContinuousBatchingConfig, GenerationConfig, masking_utils

import cudnn_sdpa
from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.integrations import attention
from cudnn_sdpa.integrations.transformers import NAME, register

IS_SUPPORTED = hasattr(masking_utils, "PagedAttentionCache")
needs_support = pytest.mark.skipif(not IS_SUPPORTED, reason=f"transformers {transformers.__version__} is before 5.24")


@pytest.fixture(autouse=True)
def registered():
    register()


def exact(q, k, v, *, window=None, softcap=None, sinks=None):
    """Causal attention of the last tokens of one sequence in float64: q (Sq, Hq, D), k and v (Skv, Hkv, D)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.3
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (behind < 0) | (behind >= (window or len(k)))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "soft cap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window and sinks": {"window": 2, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def given(window=None, softcap=None, sinks=None):
    """The arguments of a layer of transformers."""
    return {"scaling": 0.3, "sliding_window": window, "softcap": softcap, "s_aux": sinks}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_sequences_attend_to_the_keys_that_the_cache_had(options):
    queries, keys, padding = (1, 7, 4), (9, 7, 12), 3
    q = torch.randn(sum(queries) + padding, 4, 8)
    k, v = torch.randn(2, sum(keys) + 5, 2, 8)
    k[sum(keys) :] = v[sum(keys) :] = torch.nan
    found, _ = attention.attention(
        torch.nn.Module(),
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        None,
        is_causal=True,
        cu_seq_lens_q=offsets([*queries, 0, 0]),
        cu_seq_lens_k=offsets([*keys, 0, 0]),
        max_length_q=8,
        max_length_k=16,
        position_ids=torch.zeros(1, len(q), dtype=torch.int64),
        **given(**options),
    )
    parts = zip(*(x[: sum(n)].split(n) for x, n in ((q, queries), (k, keys), (v, keys))), strict=True)
    expected = torch.cat([exact(*part, **options) for part in parts])
    torch.testing.assert_close(found[0, : len(expected)].double(), expected, rtol=1e-4, atol=1e-5)
    assert found.shape == (1, len(q), 4, 8)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_decode_step_by_block_table_writes_its_keys_and_reads_all(options):
    size, lengths = 4, (1, 4, 5, 11)
    pages = torch.full((2, 12, size, 2, 8), torch.nan)
    before = pages.clone()
    table = torch.full((6, 4), -1, dtype=torch.int32)
    table[0, :1], table[1, :1] = torch.tensor([3]), torch.tensor([7])
    table[2, :2], table[3, :3] = torch.tensor([10, 1]), torch.tensor([2, 11, 5])
    cached = [torch.randn(2, length, 2, 8) for length in lengths]
    for row, (tokens, length) in enumerate(zip(cached, lengths, strict=True)):
        for at in range(length):
            slot = table[row, at // size], at % size
            before[:, slot[0], slot[1]] = tokens[:, at]
            if at < length - 1:
                pages[:, slot[0], slot[1]] = tokens[:, at]
    q = torch.randn(6, 4, 8)
    k, v = (torch.cat([x[which, -1:] for x in cached] + [torch.randn(2, 2, 8)]) for which in (0, 1))
    found, _ = attention.attention(
        torch.nn.Module(),
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        None,
        is_causal=True,
        cu_seq_lens_q=offsets([1, 1, 1, 1, 0, 0]),  # a batch of four, padded to six
        cu_seq_lens_k=offsets([*lengths, 0, 0]),
        max_length_q=1,
        max_length_k=1,
        block_table=table,
        k_cache=pages[0],
        v_cache=pages[1],
        **given(**options),
    )
    torch.testing.assert_close(pages, before, rtol=0, atol=0, equal_nan=True)
    expected = torch.cat([exact(q[i : i + 1], *cached[i], **options) for i in range(4)])
    torch.testing.assert_close(found[0, :4].double(), expected, rtol=1e-4, atol=1e-5)
    assert found.shape == (1, 6, 4, 8)


def test_what_a_block_table_cannot_have_is_refused():
    q, offset = torch.randn(1, 2, 1, 8), offsets([1])
    given = {"block_table": offset[None], "k_cache": q, "v_cache": q, "cu_seq_lens_q": offset, "cu_seq_lens_k": offset}
    with pytest.raises(UnsupportedError, match=r"(?s)position bias.*dropout.*max_blocks_per_request=0"):
        attention.attention(torch.nn.Module(), q, q, q, None, dropout=0.1, position_bias=q, **given)


#: No model has this token, so that all generate as many.
GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=1000, pad_token_id=0)


def batch_of(model, prompts):
    """Greedy results, prompts longer than 24 tokens in chunks, on pages of 16 tokens where they can be set."""
    size = {"page_size": 16} if IS_SUPPORTED else {}
    batching = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=24, **size)
    given = {"generation_config": GREEDY, "continuous_batching_config": batching, "progress_bar": False}
    return list(model.generate_batch(prompts, **given).values())


def generated(model, prompts):
    return [result.generated_tokens for result in batch_of(model, prompts)]


@needs_support
@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_batch_generates_the_tokens_of_generate(name, tables, monkeypatch):
    from transformers.generation.continuous_batching import initialization

    if tables:  # which transformers has on GPUs alone
        cuda = SimpleNamespace(is_available=lambda: True)
        monkeypatch.setattr(initialization, "torch", SimpleNamespace(cuda=cuda))
    steps = []
    monkeypatch.setattr(
        attention, "_by_block_table", lambda *args, step=attention._by_block_table: steps.append(0) or step(*args)
    )
    ours, theirs = (tiny(DECODERS[name], implementation) for implementation in (NAME, "eager"))
    prompts = [torch.randint(3, 96, (length,)).tolist() for length in (5, 17, 3, 40)]
    expected = [
        theirs.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert generated(ours, prompts) == expected
    assert ours.config._attn_implementation == NAME
    has_only_full_attention = name in ("llama", "qwen3")
    assert bool(steps) == (tables and has_only_full_attention)


@needs_support
@pytest.mark.parametrize(
    ("head_dim", "dtype", "cause"),
    [
        (16, torch.float32, "dtype is float32: load it with dtype=torch.bfloat16, or"),
        (12, torch.bfloat16, "head dim 12"),
    ],
)
def test_a_request_that_fails_is_told_what_works_in_the_thread_of_batches(head_dim, dtype, cause, monkeypatch):
    monkeypatch.setitem(SMALL, "head_dim", head_dim)
    model = tiny(DECODERS["llama"], NAME).to(dtype)
    prompts = [torch.randint(3, 96, (5,)).tolist()]
    with cudnn_sdpa.cpu_checks("h200"), cudnn_sdpa.fallback("torch"):  # which is not in force in that thread
        (failed,) = batch_of(model, prompts)
        assert cause in failed.error
        for words in ("fallback", "autocast", "functional.pad", "query.to(", "kernels.attention"):
            assert words not in failed.error
        assert 'model.set_attn_implementation("sdpa")' in failed.error
        model.set_attn_implementation("sdpa")
        (done,) = batch_of(model, prompts)
    assert done.error is None
    assert len(done.generated_tokens) == GREEDY.max_new_tokens


@needs_support
def test_registering_twice_wraps_once_and_others_are_asked_as_before():
    from transformers.generation.continuous_batching import cache, continuous_api, initialization, input_outputs

    kinds = input_outputs.ContinuousBatchingIOs, input_outputs.ContinuousBatchingAsyncIOs
    asks = [module.is_flash_attention_requested for module in (cache, continuous_api, initialization)]
    inputs = [kind.get_model_kwargs for kind in kinds]
    assert {function.__module__ for function in inputs} == {register.__module__}
    register()
    assert [module.is_flash_attention_requested for module in (cache, continuous_api, initialization)] == asks
    assert [kind.get_model_kwargs for kind in kinds] == inputs
    for ask in asks:
        for name, is_flash in ((NAME, True), ("flash_attention_3", True), ("sdpa", False), (None, False)):
            assert ask(requested_attention_implementation=name) is is_flash
            assert ask(SimpleNamespace(_attn_implementation=name)) is is_flash
    assert initialization.is_flash_attention_requested(SimpleNamespace(_attn_implementation=NAME), version=[2, 3])
    assert not initialization.is_flash_attention_requested(SimpleNamespace(_attn_implementation="sdpa"), version=[2, 3])


@pytest.mark.skipif(IS_SUPPORTED, reason="this transformers is supported")
def test_an_older_transformers_refuses():
    with pytest.raises(ValueError, match=NAME):
        generated(tiny(DECODERS["llama"], NAME), [[3, 4, 5]])
