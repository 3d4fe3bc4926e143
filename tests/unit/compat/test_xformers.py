"""`compat.xformers` beside attention in float64, under masks that are decided key by key."""

from __future__ import annotations

import types

import pytest
import torch
from float64_reference import attend

from cudnn_sdpa import ArgumentError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.compat import xformers as xops

LENGTHS_Q, LENGTHS_K = [4, 2, 5], [6, 3, 7]
ROOM = 9


def random(*shape):
    return torch.randn(shape).to(torch.bfloat16)


def close(found, exact):
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def exact_of(q, k, v, sees=None, bias=None):
    """Attention of tokens before heads, where `sees(i, j, keys without a query)`."""
    n, m = q.shape[1], k.shape[1]
    mask = torch.tensor([[sees is None or sees(i, j, m - n) for j in range(m)] for i in range(n)])
    mask = torch.zeros(n, m, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    mask = mask if bias is None else mask + bias.double()
    turned = (x.double().transpose(1, 2) for x in (q, k, v))
    return attend(*turned, attn_mask=mask)[0].transpose(1, 2)


def causal(i, j, _):
    return j <= i


def causal_from_the_end(i, j, more):
    return j <= i + more


def window(left, right):
    """A window around the diagonal from the end."""
    return lambda i, j, more: -left <= j - (i + more) <= right


DENSE = {
    "LowerTriangularMask": (xops.LowerTriangularMask(), causal),
    "LowerTriangularFromBottomRightMask": (xops.LowerTriangularFromBottomRightMask(), causal_from_the_end),
    "local": (xops.LowerTriangularFromBottomRightMask().make_local_attention(3), window(2, 0)),
    "LocalAttentionFromBottomRightMask": (xops.LocalAttentionFromBottomRightMask(2, 1), window(2, 1)),
    "none": (None, None),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense(case):
    bias, sees = DENSE[case]
    q, k, v = (random(2, n, 4, 16).requires_grad_() for n in (7, 9, 9))
    out, exact = xops.memory_efficient_attention(q, k, v, bias), exact_of(q, k, v, sees)
    close(out, exact)
    grad = random(2, 7, 4, 16)
    found = torch.autograd.grad(out, (q, k, v), grad)
    for x, y in zip(found, torch.autograd.grad(exact, (q, k, v), grad.double()), strict=True):
        torch.testing.assert_close(x, y, rtol=5e-2, atol=5e-2)
    forward = xops.memory_efficient_attention_forward(q, k, v, bias)
    assert torch.equal(forward, out)
    assert not forward.requires_grad


def test_head_dims_that_are_padded():
    q, k, v = random(1, 7, 4, 36), random(1, 9, 4, 36), random(1, 9, 4, 20)
    close(xops.memory_efficient_attention(q, k, v), exact_of(q, k, v))
    packed = xops.BlockDiagonalMask.from_seqlens([7], [9])
    close(xops.memory_efficient_attention(q, k, v, packed), exact_of(q, k, v))


def test_tensors_as_biases():
    q, k, v, bias = random(2, 7, 4, 16), random(2, 9, 4, 16), random(2, 9, 4, 16), random(2, 4, 7, 9)
    close(xops.memory_efficient_attention(q, k, v, bias, scale=0.25), exact_of(q, k, v, bias=bias))
    both = xops.LowerTriangularMask().add_bias(bias)
    close(xops.memory_efficient_attention(q, k, v, both), exact_of(q, k, v, causal, bias=bias))
    of_one_head = xops.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias[:, 0])
    close(of_one_head, exact_of(*(x[:, :, :1] for x in (q, k, v)), bias=bias[:, :1])[:, :, 0])


@pytest.mark.parametrize("expanded", [True, False])
def test_groups_of_heads(expanded):
    q, kv = random(2, 7, 2, 3, 16), random(2, 2, 9, 2, 1, 16).expand(-1, -1, -1, -1, 3, -1)
    k, v = kv if expanded else kv.contiguous()
    exact = exact_of(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)).unflatten(2, (2, 3))
    close(xops.memory_efficient_attention(q, k, v), exact)


BLOCKS = {
    "BlockDiagonalMask": (lambda x: x, None),
    "causal": (lambda x: x.make_causal(), causal),
    "causal from the end": (lambda x: x.make_causal_from_bottomright(), causal_from_the_end),
    "local": (lambda x: x.make_local_attention(2), lambda i, j, _: i - 2 < j <= i),
    "local from the end": (lambda x: x.make_local_attention_from_bottomright(3), window(2, 0)),
}


def exact_in_parts(q, parts, sees):
    """Of packed queries (1, T, H, K), and keys and values of each sequence."""
    return torch.cat(
        [exact_of(x, k[None], v[None], sees) for x, (k, v) in zip(q.split(LENGTHS_Q, 1), parts, strict=True)], 1
    )


@pytest.mark.parametrize("case", BLOCKS)
def test_packed(case):
    make, sees = BLOCKS[case]
    bias = make(xops.BlockDiagonalMask.from_seqlens(LENGTHS_Q, LENGTHS_K, device="cpu"))
    q, kv = random(1, sum(LENGTHS_Q), 4, 16).requires_grad_(), random(2, 1, sum(LENGTHS_K), 4, 16)
    out = xops.memory_efficient_attention(q, *kv, bias)
    exact = exact_in_parts(q, zip(*(x[0].split(LENGTHS_K) for x in kv), strict=True), sees)
    close(out, exact)
    grad = random(*out.shape)
    found, wanted = torch.autograd.grad(out, q, grad), torch.autograd.grad(exact, q, grad.double())
    torch.testing.assert_close(found[0], wanted[0], rtol=5e-2, atol=5e-2)


PADDED = {
    "BlockDiagonalPaddedKeysMask": (xops.BlockDiagonalPaddedKeysMask.from_seqlens, None),
    "causal": (xops.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens, causal_from_the_end),
    "local": (
        lambda *x: xops.BlockDiagonalPaddedKeysMask.from_seqlens(*x).make_local_attention(2, 1),
        window(2, 1),
    ),
    "causal local": (
        lambda *x: xops.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(*x, 3),
        window(2, 0),
    ),
}


@pytest.mark.parametrize("case", PADDED)
def test_padded_keys(case):
    make, sees = PADDED[case]
    bias = make(LENGTHS_Q, ROOM, LENGTHS_K).to("cpu")
    q, kv = random(1, sum(LENGTHS_Q), 4, 16), random(2, 3, ROOM, 4, 16)
    parts = [(kv[0, b, :n].clone(), kv[1, b, :n].clone()) for b, n in enumerate(LENGTHS_K)]
    for b, n in enumerate(LENGTHS_K):
        kv[:, b, n:] = torch.nan
    found = xops.memory_efficient_attention(q, *kv.flatten(1, 2).unsqueeze(1), bias)
    close(found, exact_in_parts(q, parts, sees))
    with pytest.raises(UnsupportedError, match="dropout"):
        xops.memory_efficient_attention(q, *kv.flatten(1, 2).unsqueeze(1), bias, p=0.5)


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        (xops.PagedBlockDiagonalPaddedKeysMask, None),
        (xops.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask, causal_from_the_end),
    ],
)
def test_pages(kind, sees):
    table = torch.tensor([[5, 2], [1, 0], [4, 3]], dtype=torch.int32)
    q, pages = random(1, sum(LENGTHS_Q), 4, 16), random(2, 6, 4, 4, 16)
    parts = [[of[row].flatten(0, 1)[:n] for of in pages] for row, n in zip(table.long(), LENGTHS_K, strict=True)]
    exact, kv = exact_in_parts(q, parts, sees), pages.flatten(1, 2).unsqueeze(1)
    bias = kind.from_seqlens(LENGTHS_Q, LENGTHS_K, table, 4, device="cpu")
    close(xops.memory_efficient_attention(q, *kv, bias), exact)
    padded = xops.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS_Q, ROOM, LENGTHS_K, device="cpu")
    close(xops.memory_efficient_attention(q, *kv, padded.make_paged(table, 4, kind)), exact)


def test_lists_of_tensors():
    tensors = [random(2, 3, 4, 16), random(1, 5, 4, 16)]
    bias, packed = xops.BlockDiagonalCausalMask.from_tensor_list(tensors)
    out = bias.split(xops.memory_efficient_attention(packed, packed, packed, bias))
    for found, x in zip(out, tensors, strict=True):
        close(found, exact_of(x, x, x, causal))
    keys = [random(2, 6, 4, 16), random(1, 2, 4, 16)]
    bias, q, k, v = xops.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys, keys)
    out = bias.split_queries(xops.memory_efficient_attention(q, k, v, bias))
    for found, x, y in zip(out, tensors, keys, strict=True):
        close(found, exact_of(x, y, y))
    assert all(map(torch.equal, bias.split_kv(k), keys))
    with pytest.raises(ShapeError, match="tensor"):
        bias.split_kv(q)


def test_biases_of_an_installed_xformers_are_known_by_name():
    """A class of xFormers' name and fields, from its module."""
    theirs = type("BlockDiagonalCausalMask", (), {"__module__": "mslk.attention.fmha.attn_bias"})()
    ours = xops.BlockDiagonalCausalMask.from_seqlens(LENGTHS_Q, device="cpu")
    theirs.q_seqinfo = theirs.k_seqinfo = types.SimpleNamespace(**vars(ours.q_seqinfo))
    q = random(1, sum(LENGTHS_Q), 4, 16)
    found = xops.memory_efficient_attention(q, q, q, theirs)
    assert torch.equal(found, xops.memory_efficient_attention(q, q, q, ours))
    other = type("BlockDiagonalGappyKeysMask", (), {"__module__": "mslk.attention.fmha.attn_bias"})()
    with pytest.raises(UnsupportedError, match="BlockDiagonalGappyKeysMask") as caught:
        xops.memory_efficient_attention(q, q, q, other)
    assert "materialize" not in str(caught.value)
    type(other).materialize = lambda _, shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
    with pytest.raises(UnsupportedError, match=r"attn_bias\.materialize\(shape, dtype, device\)"):
        xops.memory_efficient_attention(q, q, q, other)
    shape = 1, 4, q.shape[1], q.shape[1]
    advised = xops.memory_efficient_attention(q, q, q, other.materialize(shape, q.dtype, q.device))
    assert torch.equal(advised, xops.memory_efficient_attention(q, q, q))

    class Own(xops.LowerTriangularMask):
        pass

    with pytest.raises(UnsupportedError, match="Own"):
        xops.memory_efficient_attention(q, q, q, Own())


@pytest.mark.parametrize(
    ("bias", "keys"),
    [
        (None, 12),
        (xops.LowerTriangularMask(), 12),
        (xops.LocalAttentionFromBottomRightMask(2, 1), 12),
        (xops.BlockDiagonalMask.from_seqlens(LENGTHS_Q, LENGTHS_K, device="cpu").make_local_attention(2), 16),
        (xops.BlockDiagonalPaddedKeysMask.from_seqlens(LENGTHS_Q, ROOM, LENGTHS_K, device="cpu"), 3 * ROOM),
    ],
    ids=lambda x: type(x).__name__,
)
def test_compiled_without_a_break(bias, keys):
    q, k, v = (random(1, n, 4, 16) for n in (sum(LENGTHS_Q), keys, keys))
    compiled = torch.compile(xops.memory_efficient_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, bias), xops.memory_efficient_attention(q, k, v, bias))


Q = torch.zeros(1, 11, 4, 16)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"op": "flash"}, UnsupportedError, "op"),
        ({"output_dtype": torch.float16}, UnsupportedError, "output_dtype"),
        ({"p": 1.5}, ArgumentError, "^p: "),
        ({"attn_bias": torch.zeros(3, 3)}, ArgumentError, "^attn_bias: "),
        ({"attn_bias": xops.BlockDiagonalMask.from_seqlens([3, 4], device="cpu")}, ShapeError, "^query: .*7"),
        ({"query": Q[0, 0]}, ShapeError, "^query: "),
        ({"key": None}, OptionError, "^key: "),
    ],
)
def test_wrong_arguments_are_named(options, error, words):
    with pytest.raises(error, match=words):
        xops.memory_efficient_attention(**{"query": Q, "key": Q, "value": Q, **options})


def test_no_bias_is_stored_and_no_error_says_so():
    for bias in (xops.LowerTriangularMask(), xops.BlockDiagonalMask.from_seqlens([3], device="cpu")):
        assert not hasattr(bias, "materialize")
        with pytest.raises(UnsupportedError, match=rf"(?s){type(bias).__name__}\.materialize.*the bias itself"):
            bias.materialize((3, 3))
    with pytest.raises(UnsupportedError, match=r"attn_bias of class builtins\.str") as caught:
        xops.memory_efficient_attention(Q, Q, Q, "causal")
    assert "materialize" not in str(caught.value)


def test_wrong_biases_are_refused():
    with pytest.raises(OptionError, match="window_size"):
        xops.BlockDiagonalMask.from_seqlens([3], device="cpu").make_local_attention(0)
    with pytest.raises(OptionError, match="window_left"):
        xops.LocalAttentionFromBottomRightMask(-1, 2)
    with pytest.raises(OptionError, match="kv_seqlen"):
        xops.BlockDiagonalMask.from_seqlens([3, 4], [3], device="cpu")
    with pytest.raises(OptionError, match="kv_seqlen"):
        xops.BlockDiagonalPaddedKeysMask.from_seqlens([3], 4, [5], device="cpu")


def test_names_are_where_xformers_has_them():
    assert xops.fmha.attn_bias.BlockDiagonalMask is xops.fmha.BlockDiagonalMask is xops.BlockDiagonalMask
