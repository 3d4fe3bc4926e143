"""Steps of a `PagedKVCache` after which all sequences are equally long: their own plans, and when not to use them."""

from __future__ import annotations

import math

import dense_calls
import pytest
import torch

from cudnn_sdpa import PagedKVCache, no_plan_builds, shape_policy
from cudnn_sdpa.attention import comebacks, paged_calls, paged_equal
from cudnn_sdpa.attention.paged_equal import EqualCall
from cudnn_sdpa.offline.background import background

BF16 = torch.bfloat16
HEADS = (8, 2)
TOKENS = 40


@pytest.fixture(autouse=True)
def every_call_is_a_use(monkeypatch):
    monkeypatch.setattr(comebacks, "SECONDS_OF_A_USE", 0.0)
    comebacks.comebacks.clear()
    paged_equal._waiting.clear()
    with shape_policy("tiered"):
        yield
        assert background.wait(120)
    comebacks.comebacks.clear()


class Prompt:
    """A cache, NaN where no sequence has a token, and steps that bring sequences to one length."""

    def __init__(self, sequences=2, layout="HND", page_size=16):
        self.cache = PagedKVCache(
            pages=64, page_size=page_size, heads=HEADS[1], head_dim=64, max_length=512, page_layout=layout
        )
        self.sequences = [self.cache.add() for _ in range(sequences)]
        for pages in (self.cache.k_pages(), self.cache.v_pages()):
            pages.fill_(math.nan)
        self.step = None

    def grow(self, counts, into=None):
        self.step = self.cache.reserve(self.sequences, counts, into=into)
        size = len(self.sequences), HEADS[1], self.step.tokens, 64
        self.cache.append(self.step, *(torch.randn(size, device="cuda", dtype=BF16) for _ in range(2)))
        return self

    def queries(self):
        size = len(self.sequences), self.step.tokens, HEADS[0], 64
        return torch.randn(size, device="cuda", dtype=BF16).transpose(1, 2)

    def assert_right(self, q, **options):
        """Output and log-sum-exp against float64."""
        out, lse = self.cache.attend(self.step, q, return_lse=True, **options)
        for row, sequence in enumerate(self.sequences):
            k, v = (x.double().repeat_interleave(HEADS[0] // HEADS[1], 0) for x in self.cache.read(sequence))
            wanted, of_lse = attention(q[row].double(), k, v, **options)
            assert dense_calls.difference(out[row].double(), wanted) < dense_calls.FORWARD[BF16]
            torch.testing.assert_close(lse[row].double(), of_lse, atol=2e-3, rtol=2e-3)


def attention(q, k, v, scale=0.125, window=None, softcap=None, sinks=None):
    """Causal, aligned at the last key."""
    scores = q @ k.mT * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[1], device="cuda") - torch.arange(q.shape[1], device="cuda").view(-1, 1)
    distance = distance - (k.shape[1] - q.shape[1])
    hidden = distance > 0
    if window is not None:
        hidden |= distance < -window[0]
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)], 2)
        v = torch.cat([v, v.new_zeros(v.shape[0], 1, v.shape[2])], 1)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def own_plans():
    return len(paged_calls.calls.each(EqualCall))


def come_back(prompt, **options):
    """Attends until the length has its own plan."""
    before = own_plans()
    for _ in range(comebacks.USES_BEFORE_OWN_PLAN):
        prompt.assert_right(prompt.queries(), **options)
    assert background.wait(120)
    prompt.assert_right(prompt.queries(), **options)
    assert own_plans() == before + 1


OPTIONS = {
    "plain": {},
    "window and scale": {"window": (30, 0), "scale": 0.3},
    "soft cap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 3, HEADS[0])},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("sequences", "layout", "page_size"), [(1, "HND", 16), (3, "NHD", 64)])
def test_a_length_that_comes_back_gets_its_own_plan(sequences, layout, page_size, name):
    options = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    prompt = Prompt(sequences, layout, page_size).grow(77).grow(TOKENS)
    come_back(prompt, **options)
    for _ in range(3):
        prompt.assert_right(prompt.queries(), **options)
    q = prompt.queries()
    out = torch.full_like(q, math.nan)
    assert prompt.cache.attend(prompt.step, q, out=out, **options) is out
    torch.testing.assert_close(out, prompt.cache.attend(prompt.step, q, **options))
    other = Prompt(sequences, layout, page_size).grow(77).grow(TOKENS)  # other pages, the same plan
    with no_plan_builds():
        other.assert_right(other.queries(), **options)


def test_other_lengths_do_not_use_it():
    prompt = Prompt().grow(77).grow(TOKENS)
    come_back(prompt)
    prompt.grow(TOKENS)
    prompt.assert_right(prompt.queries())  # longer
    uneven = Prompt().grow([70, 77]).grow(TOKENS)
    assert uneven.step.common_length is None
    uneven.assert_right(uneven.queries())
    written = Prompt().grow(77).grow(TOKENS)
    written.step.seq_lens_kv.fill_(60)
    assert written.step.common_length is None
    q = written.queries()
    out = written.cache.attend(written.step, q)
    for row, sequence in enumerate(written.sequences):
        k, v = (x[:, :60].double().repeat_interleave(4, 0) for x in written.cache.read(sequence))
        assert (
            dense_calls.difference(out[row].double(), attention(q[row].double(), k, v)[0]) < dense_calls.FORWARD[BF16]
        )


def test_a_captured_step_reads_lengths_of_its_replay():
    prompt = Prompt().grow(77).grow(TOKENS)
    come_back(prompt)
    q, step = prompt.queries(), prompt.step
    prompt.cache.attend(step, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_plan_builds():
        out = prompt.cache.attend(step, q)
    prompt.grow(TOKENS, into=step)
    q.normal_()
    out.fill_(math.nan)
    graph.replay()
    for row, sequence in enumerate(prompt.sequences):
        k, v = (x.double().repeat_interleave(4, 0) for x in prompt.cache.read(sequence))
        assert (
            dense_calls.difference(out[row].double(), attention(q[row].double(), k, v)[0]) < dense_calls.FORWARD[BF16]
        )


def test_determinism_and_forbidden_builds_keep_the_plans_that_are_there():
    prompt = Prompt().grow(77).grow(TOKENS)
    prompt.assert_right(prompt.queries())
    before = own_plans()
    with no_plan_builds():
        for _ in range(5):
            prompt.assert_right(prompt.queries())
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            prompt.assert_right(prompt.queries())
    finally:
        torch.use_deterministic_algorithms(False)
    assert background.wait(120)
    assert own_plans() == before


def test_wrong_arguments_are_refused_as_before():
    prompt = Prompt().grow(77).grow(TOKENS)
    come_back(prompt)
    with pytest.raises(ValueError, match="q"):
        prompt.cache.attend(prompt.step, prompt.queries()[0])
    with pytest.raises(TypeError):
        prompt.cache.attend(prompt.step, prompt.queries().float())
    with pytest.raises(TypeError, match="colour"):
        prompt.cache.attend(prompt.step, prompt.queries(), colour=1)
    with pytest.raises(RuntimeError, match="grad"):
        prompt.cache.attend(prompt.step, prompt.queries().requires_grad_())
