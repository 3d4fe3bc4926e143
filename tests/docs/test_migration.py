"""The functions that the migration page has readers paste: FlashAttention-2's signatures, and values in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from float64_reference import attend
from test_docstrings import ROOT, blocks

import cudnn_sdpa

OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
#: The parameters of FlashAttention-2's functions, in their order.
SIGNATURES = {
    "flash_attn_func": ("q", "k", "v", *OPTIONS, "return_attn_probs"),
    "flash_attn_varlen_func": ("q", "k", "v", *LENGTHS, *OPTIONS, "return_attn_probs", "block_table"),
}
#: Values of their options up to `deterministic`, in their order, and the options of the mathematics.
CALLS = {
    "defaults": ((), {}),
    "dropout's place": ((0.0,), {}),
    "scale, causal": ((0.0, 0.4, True), {"scale": 0.4, "is_causal": True}),
    "window": ((0.0, None, False, (3, 2)), {"window_size": (3, 2)}),
    "causal window, soft cap": (
        (0.0, 0.2, True, (5, 0), 2.5),
        {"scale": 0.2, "is_causal": True, "window_size": (5, 0), "softcap": 2.5},
    ),
    "deterministic": ((0.0, None, True, (-1, -1), 0.0, None, True), {"is_causal": True}),
}


@pytest.fixture(scope="module")
def page():
    """What the page defines; its blocks have run, with their own assertions."""
    namespace = {"__name__": "page"}
    for code in blocks(ROOT / "docs" / "migration.md"):
        exec(code, namespace)  # noqa: S102 - code of the documentation
    return namespace


def random(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def assert_close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def exact_of(q, k, v, **options):
    """Attention of tokens before heads, aligned as by FlashAttention; the LSE is (batch, heads, queries)."""
    turned = [x.double().transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(*turned, causal_alignment="bottom_right", **options)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attention_2(page, name):
    parameters = inspect.signature(page[name]).parameters
    assert tuple(parameters) == SIGNATURES[name]
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    expected = dict(zip(OPTIONS, (0.0, None, False, (-1, -1), 0.0, None, False), strict=True))
    expected |= {"return_attn_probs": False} | ({"block_table": None} if "varlen" in name else {})
    assert defaults == expected


@pytest.mark.parametrize("call", CALLS)
def test_dense_calls_with_options_by_position(page, call):
    given, options = CALLS[call]
    q, k, v = random(2, 9, 6, 32), random(2, 14, 3, 32), random(2, 14, 3, 32)
    exact, of_lse = exact_of(q, k, v, **options)
    assert_close(page["flash_attn_func"](q, k, v, *given), exact)
    out, lse, probabilities = page["flash_attn_func"](q, k, v, *given, return_attn_probs=True)
    assert_close(out, exact)
    assert_close(lse, of_lse)
    assert probabilities is None
    assert_close(page["flash_attn_kvpacked_func"](q, torch.stack([k, v], 2), *given), exact)
    qkv = random(2, 9, 3, 4, 32)
    assert_close(page["flash_attn_qkvpacked_func"](qkv, *given), exact_of(*qkv.unbind(2), **options)[0])


@pytest.mark.parametrize("call", CALLS)
def test_packed_calls_with_options_by_position(page, call):
    given, options = CALLS[call]
    q, k, v = random(12, 6, 32), random(20, 3, 32), random(20, 3, 32)
    ends_q, ends_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 12], [0, 8, 20]))

    def exact(q, k, v, ends_q, ends_k):
        parts = [
            exact_of(q[a:b][None], k[c:d][None], v[c:d][None], **options)
            for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)
        ]
        return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    wanted, of_lse = exact(q, k, v, ends_q, ends_k)
    lengths = ends_q, ends_k, 7, 12
    assert_close(page["flash_attn_varlen_func"](q, k, v, *lengths, *given), wanted)
    out, lse, _ = page["flash_attn_varlen_func"](q, k, v, *lengths, *given, return_attn_probs=True)
    assert_close(out, wanted)
    assert_close(lse, of_lse)
    assert_close(page["flash_attn_varlen_kvpacked_func"](q, torch.stack([k, v], 1), *lengths, *given), wanted)
    qkv = random(12, 3, 4, 32)
    found = page["flash_attn_varlen_qkvpacked_func"](qkv, ends_q, 7, *given)
    assert_close(found, exact(*qkv.unbind(1), ends_q, ends_q)[0])


@pytest.mark.parametrize("per_sequence", [False, True])
def test_slopes(page, per_sequence):
    """A bias of -slope · |i + Sk - Sq - j|."""
    q, k, v = random(2, 9, 6, 32), random(2, 14, 3, 32), random(2, 14, 3, 32)
    slopes = torch.rand(2, 6) if per_sequence else torch.rand(6)
    out = page["flash_attn_func"](q, k, v, 0.0, None, True, (-1, -1), 0.0, slopes)
    bias = torch.empty(2, 6, 9, 14, dtype=torch.float64)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, bias.shape)).tolist():
        bias[b, h, i, j] = -float(slopes[b, h] if per_sequence else slopes[h]) * abs(i + 14 - 9 - j)
    assert_close(out, exact_of(q, k, v, is_causal=True, attn_mask=bias)[0])


def test_dropout_is_passed_on(page):
    q, k, v = random(1, 64, 2, 32), random(1, 64, 2, 32), random(1, 64, 2, 32)
    torch.manual_seed(1)
    out = page["flash_attn_func"](q, k, v, 0.5)
    assert float((out.double() - exact_of(q, k, v)[0]).norm() / exact_of(q, k, v)[0].norm()) > 0.3
    ends, packed = torch.tensor([0, 64], dtype=torch.int32), [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(cudnn_sdpa.OptionError, match="dropout_p"):
        page["flash_attn_varlen_func"](*packed, ends, ends, 64, 64, 1.5)


@pytest.mark.parametrize("name", ["alibi_slopes", "block_table"])
def test_what_packed_calls_lack_is_refused(page, name):
    q, ends = random(8, 2, 32), torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=name):
        page["flash_attn_varlen_func"](q, q, q, ends, ends, 8, 8, **{name: torch.ones(2)})
