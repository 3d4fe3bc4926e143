"""`bench llama` on the CPU, small: all candidates share one model, and are compared before timing."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks import llama


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    small = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setattr(llama, "SHAPE", {**llama.SHAPE, **small, "num_attention_heads": 4, "num_key_value_heads": 2})
    monkeypatch.setattr(llama, "device_times", times_by_place)
    monkeypatch.setattr(llama, "PROMPTS", ((2, 9),))


def test_prompts_are_counted_in_tokens(on_cpu):  # noqa: ARG001
    (row,) = llama.prefill()
    assert row == {
        "B, tokens": "2, 9",
        "cudnn_sdpa tokens/s": pytest.approx(18e6),
        "pytorch sdpa tokens/s": pytest.approx(9e6),
        "pytorch flash tokens/s": pytest.approx(6e6),
        "pytorch cudnn tokens/s": pytest.approx(4.5e6),
        "× sdpa": 2.0,
    }


def test_wrong_logits_stop_the_benchmark(on_cpu, monkeypatch):  # noqa: ARG001
    from transformers import AttentionInterface

    from cudnn_sdpa.integrations.attention import attention

    def register():
        AttentionInterface.register(llama.NAME, lambda *args, **options: (attention(*args, **options)[0] * 1.5, None))

    monkeypatch.setattr(llama, "register", register)
    with pytest.raises(RuntimeError, match="logits differs from pytorch sdpa's, cudnn_sdpa"):
        llama.prefill()


def test_continuous_batching_generates_all_tokens(on_cpu, monkeypatch):  # noqa: ARG001
    from transformers import masking_utils

    if not hasattr(masking_utils, "PagedAttentionCache"):
        pytest.skip("continuous batching needs transformers 5.24")
    monkeypatch.setattr(llama, "REQUESTS", ((3, 9, 4),))
    monkeypatch.setattr(llama, "BATCH_TOKENS", 16)
    (row,) = llama.batching()
    assert row.pop("requests, prompt, new") == "3, 9, 4"
    assert row["cudnn_sdpa tokens/s"] > 0
    assert row["cudnn_sdpa, no block tables tokens/s"] > 0
    assert row["× sdpa"] == pytest.approx(row["cudnn_sdpa tokens/s"] / row["pytorch sdpa tokens/s"])
