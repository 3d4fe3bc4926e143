"""Long sequences, and tensors of more than 2³¹ elements: offsets beyond 32 bits, forward and backward.

These tests take up to 70 GB of the GPU's memory and some seconds each.
"""

from __future__ import annotations

import math

import pytest
import torch

import cudnn_sdpa

pytestmark = pytest.mark.whole_gpu

DTYPE = torch.bfloat16
MANY = 2**31
ROWS = 1024  #: rows that are computed and compared at a time


@pytest.fixture(autouse=True)
def room():
    """Frees memory, which other workers may need, and skips where there is too little."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 75e9:
        pytest.skip(f"needs 75 GB of free GPU memory, and there are {free / 1e9:.0f}")
    yield
    torch.cuda.empty_cache()


def exact_head(q, k, v, grad_out, scale, is_causal):
    """Output, log-sum-exp and gradients by q, k and v of one head (S, D) in float64, some rows at a time."""
    q, k, v, grad_out = (x.double() for x in (q, k, v, grad_out))
    columns = torch.arange(k.shape[0], device=q.device)
    out, lse, grad_q, grad_k, grad_v = v.new_empty(q.shape[0], v.shape[1]), [], torch.empty_like(q), k * 0, v * 0
    for first in range(0, q.shape[0], ROWS):
        rows = slice(first, min(first + ROWS, q.shape[0]))
        seen = slice(0, rows.stop if is_causal else k.shape[0])
        scores = q[rows] @ k[seen].T * scale
        if is_causal:
            scores.masked_fill_(columns[seen] > columns[rows, None], -math.inf)
        lse.append(scores.logsumexp(-1))
        weights = scores.sub_(lse[-1][:, None]).exp_()
        out[rows] = weights @ v[seen]
        grad_v[seen] += weights.T @ grad_out[rows]
        grad_scores = grad_out[rows] @ v[seen].T
        grad_scores.sub_((grad_out[rows] * out[rows]).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_q[rows] = grad_scores @ k[seen]
        grad_k[seen] += grad_scores.T @ q[rows]
    return out, torch.cat(lse), grad_q, grad_k, grad_v


def assert_near_everywhere(actual, expected, tolerance):
    """Compares some rows at a time, so that small values at the far end count as much as large ones."""
    for number, (a, b) in enumerate(zip(actual.split(ROWS), expected.split(ROWS), strict=True)):
        error = float((a.detach().double() - b).norm() / b.norm())
        assert error < tolerance, f"relative error {error:.2e} from row {number * ROWS} on"


def assert_head(head, results, scale, is_causal=True):
    """Compares one head of (q, k, v, grad_out) and (out, lse, gradients) with float64."""
    names = ("out", "lse", "grad_q", "grad_k", "grad_v")
    for name, actual, expected in zip(names, results, exact_head(*head, scale, is_causal), strict=True):
        assert_near_everywhere(actual, expected, {"lse": 1e-5, "out": 8e-3}.get(name, 2e-2))


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=DTYPE)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_sequence_of_131072(is_causal):
    q, k, v, grad_out = (randn(1, 1, 131_072, 64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cudnn_sdpa.sdpa(*leaves, is_causal=is_causal, scale=0.1, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    head = [x.detach()[0, 0] for x in (q, k, v, grad_out)]
    assert_head(head, [x[0, 0] for x in (out, lse, *gradients)], 0.1, is_causal)


def test_packed_sequences_of_131072_and_less():
    lengths = [1, 70_000, 0, 61_071]
    q, k, v, grad_out = (randn(sum(lengths), 2, 64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out, lse = cudnn_sdpa.sdpa_varlen(
        *leaves, ends, ends, max(lengths), max(lengths), is_causal=True, scale=0.1, return_lse=True
    )
    gradients = torch.autograd.grad(out, leaves, grad_out)
    for begin, length in ((1, 70_000), (70_001, 61_071)):
        rows = slice(begin, begin + length)
        head = [x.detach()[rows, 1] for x in (q, k, v, grad_out)]
        assert_head(head, [x[rows, 1] for x in (out, lse, *gradients)], 0.1)


@pytest.mark.parametrize("step", ["q", "k"])
def test_a_plain_call_cold_and_warm(step):
    """Either queries or keys are far apart in memory; the second step takes the fast path if there is one."""
    far = (
        torch.zeros(2, 2**31 + 2**12, device="cuda", dtype=DTYPE)
        .view(2, 2, -1)[:, :, : 64 * 256]
        .unflatten(2, (256, 64))
    )
    near = [randn(2, 2, 256, 64) for _ in range(3)]
    far.copy_(randn(2, 2, 256, 64))
    tensors = {"q": near[0], "k": near[1], "v": near[2]} | {step: far}
    leaves, grad_out = [x.requires_grad_() for x in tensors.values()], randn(2, 2, 256, 64)
    for _ in range(3):
        out = cudnn_sdpa.sdpa(*leaves, scale=0.1)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        for place in ((0, 0), (1, 1)):
            head = [x.detach()[place] for x in (*leaves, grad_out)]
            _, _, *exact = exact_head(*head, 0.1, is_causal=False)
            for gradient, expected in zip(gradients, exact, strict=True):
                assert_near_everywhere(gradient[place], expected, 2e-2)


SHAPES = {
    "one head of keys for all": ("bshd", 1, (1024, 1), 17_000),
    # Batch offsets beyond 32 bits; queries far apart with adjacent heads; one key head for many query heads.
    "many batch entries": ("bhsd", 130, (32, 32), 4100),
    "one long sequence": ("bshd", 1, (128, 128), 132_000),
    "grouped heads": ("bshd", 9, (128, 8), 15_000),
}


@pytest.mark.parametrize("name", SHAPES)
def test_more_elements_than_32_bits_can_count(name):
    """The last head of the last batch entry is beyond 32 bits in every tensor, or in those of the queries."""
    layout, batch, heads, length = SHAPES[name]
    dim = 128

    def tensor(heads):
        x = randn(batch, heads, length, dim) if layout == "bhsd" else randn(batch, length, heads, dim).transpose(1, 2)
        assert x.numel() > MANY or heads < 16
        return x

    q, k, v, grad_out = tensor(heads[0]), tensor(heads[1]), tensor(heads[1]), tensor(heads[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cudnn_sdpa.sdpa(*leaves, is_causal=True, scale=0.1, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    group = heads[0] // heads[1]
    for b, first in {(batch - 1, heads[0] - group), (0, 0), (batch // 2, heads[0] // 2 // group * group)}:
        totals = None  # of the queries' heads of a group: all of them in float64 would need more memory than a GPU has
        for place in ((b, h) for h in range(first, first + group)):
            head = [x.detach()[p] for x, p in ((q, place), (k, (b, first // group)), (v, (b, first // group)))]
            exact_out, exact_lse, exact_q, *shares = exact_head(*head, grad_out[place], 0.1, is_causal=True)
            assert_near_everywhere(out[place], exact_out, 8e-3)
            assert_near_everywhere(lse[place], exact_lse, 1e-5)
            assert_near_everywhere(gradients[0][place], exact_q, 2e-2)
            totals = shares if totals is None else [total.add_(x) for total, x in zip(totals, shares, strict=True)]
        for gradient, total in zip(gradients[1:], totals, strict=True):
            assert_near_everywhere(gradient[b, first // group], total, 2e-2)


def test_values_of_more_elements_than_queries():
    """Output, its gradient and the values reach beyond 32 bits; queries and keys do not."""
    batch, heads, length = 66, 32, 8200
    q, k = (randn(batch, heads, length, 64) for _ in range(2))
    v, grad_out = (randn(batch, heads, length, 128) for _ in range(2))
    assert q.numel() < MANY < v.numel()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cudnn_sdpa.sdpa(*leaves, is_causal=True, scale=0.1, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    for place in ((0, 0), (batch - 1, heads - 1)):
        head = [x.detach()[place] for x in (q, k, v, grad_out)]
        assert_head(head, [x[place] for x in (out, lse, *gradients)], 0.1)


def test_packed_queries_that_share_one_head_of_keys():
    lengths, heads, dim = [10_000, 1, 3_000, 4_200], 1024, 128
    q, grad_out = (randn(sum(lengths), heads, dim) for _ in range(2))
    k, v = (randn(sum(lengths), 1, dim) for _ in range(2))
    assert q.numel() > MANY
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out = cudnn_sdpa.sdpa_varlen(*leaves, ends, ends, 10_000, 10_000, is_causal=True, scale=-0.1)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    rows = slice(13_001, None)
    totals = None
    for h in range(heads):
        head = [x.detach()[rows, at] for x, at in ((q, h), (k, 0), (v, 0), (grad_out, h))]
        exact_out, _, exact_q, *shares = exact_head(*head, -0.1, is_causal=True)
        assert_near_everywhere(out[rows, h], exact_out, 8e-3)
        assert_near_everywhere(gradients[0][rows, h], exact_q, 2e-2)
        totals = shares if totals is None else [total.add_(x) for total, x in zip(totals, shares, strict=True)]
    for gradient, total in zip(gradients[1:], totals, strict=True):
        assert_near_everywhere(gradient[rows, 0], total, 2e-2)


def test_more_packed_elements_than_32_bits_can_count():
    lengths, heads, dim = [40_000, 1, 50_000, 0, 43_000], 128, 128
    q, k, v, grad_out = (randn(sum(lengths), heads, dim) for _ in range(4))
    assert q.numel() > MANY
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    out, lse = cudnn_sdpa.sdpa_varlen(
        *leaves, ends, ends, max(lengths), max(lengths), is_causal=True, scale=0.1, return_lse=True
    )
    gradients = torch.autograd.grad(out, leaves, grad_out)
    for begin, length, h in ((0, 40_000, 0), (90_001, 43_000, heads - 1)):
        rows = slice(begin, begin + length)
        head = [x.detach()[rows, h] for x in (q, k, v, grad_out)]
        assert_head(head, [x[rows, h] for x in (out, lse, *gradients)], 0.1)


def test_a_mask_of_more_elements_than_32_bits_can_count():
    """A bias for each batch entry, head, query and key, and its gradient."""
    batch, heads, length, dim = 5, 8, 7400, 64
    q, k, v, grad_out = (randn(batch, heads, length, dim) for _ in range(4))
    mask = randn(batch, heads, length, length)
    assert mask.numel() > MANY
    leaves = [x.requires_grad_() for x in (q, k, v, mask)]
    out = cudnn_sdpa.sdpa(*leaves[:3], attn_mask=mask, scale=0.1)
    grad_q, _, _, grad_mask = torch.autograd.grad(out, leaves, grad_out)
    for place in ((0, 0), (batch - 1, heads - 1)):
        exact_q, exact_k, exact_v, bias = (x.detach()[place].double().requires_grad_() for x in leaves)
        expected = ((exact_q @ exact_k.T) * 0.1 + bias).softmax(-1) @ exact_v
        of_q, of_mask = torch.autograd.grad(expected, (exact_q, bias), grad_out[place].double())
        assert_near_everywhere(out[place], expected.detach(), 8e-3)
        assert_near_everywhere(grad_q[place], of_q, 2e-2)
        assert_near_everywhere(grad_mask[place], of_mask, 2e-2)
