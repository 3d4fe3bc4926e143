"""Dropout: its seed comes from PyTorch's generator, and both passes use the same mask."""

from __future__ import annotations

import dense_calls
import pytest
import torch
from attention_checks import captured, make

import cudnn_sdpa

P = [0.1, 0.5]


def leaves(sq=200, skv=130):
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16)
    k, v = (make("bshd", 2, 2, skv, 64, torch.bfloat16) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v)]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window and softcap": {"window_size": (60, 20), "softcap": 8.0},
    "sinks and mask": {"sinks": True, "attn_mask": True},
    "lengths": {"lengths": True},
}


def options(name):
    result = dict(OPTIONS[name])
    if result.pop("lengths", False):
        result["seq_lens_kv"] = torch.tensor([130, 71], dtype=torch.int32, device="cuda")
    if "sinks" in result:
        result["sinks"] = torch.randn(4, device="cuda")
        result["attn_mask"] = torch.randn(1, 4, 200, 130, dtype=torch.bfloat16, device="cuda")
    return result


@pytest.mark.parametrize("dropout_p", P)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_seed_reproduces_both_passes(name, dropout_p):
    inputs, named = leaves(), options(name)
    grad_out = torch.randn_like(inputs[0])

    def run(seed):
        torch.manual_seed(seed)
        out = cudnn_sdpa.sdpa(*inputs, dropout_p=dropout_p, deterministic=True, **named)
        torch.randn(5, device="cuda")  # random numbers drawn between the passes have no effect
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]

    first, second, third = run(5), run(6), run(5)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, c)
        assert not torch.equal(a, b)
    next_draw = cudnn_sdpa.sdpa(*inputs, dropout_p=dropout_p, **named)
    assert not torch.equal(next_draw, third[0])


def weights_after_dropout(dropout_p, function=cudnn_sdpa.sdpa, heads=(4, 4), **named):
    """The weights after dropout: all scores are 0, and the values are the unit vectors."""
    q, k = (torch.zeros(2, n, 256, 64, dtype=torch.float16, device="cuda") for n in heads)
    unit = torch.eye(256, dtype=torch.float16, device="cuda").expand(2, heads[1], 256, 256)
    return function(q, k, unit, dropout_p=dropout_p, **named)


@pytest.mark.parametrize("dropout_p", [*P, 0.9])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=["", "grouped"])
def test_dropout_rate(heads, dropout_p):
    weights = weights_after_dropout(dropout_p, heads=heads)
    dropped = (weights == 0).double()
    kept = weights[weights != 0].double()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (256 * (1 - dropout_p))), rtol=2e-3, atol=0)
    sigma = (dropout_p * (1 - dropout_p)) ** 0.5
    assert abs(float(dropped.mean()) - dropout_p) < 4 * sigma * dropped.numel() ** -0.5
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3), (1, 2, 3)):  # no key, query, head or batch entry is preferred
        shares = dropped.mean(dims)
        assert float((shares - dropout_p).abs().max()) < 5.5 * sigma * (dropped.numel() / shares.numel()) ** -0.5
    flat = dropped.flatten(0, 1).flatten(1)
    for other in range(1, flat.shape[0]):  # heads and batch entries are independent
        both = float((flat[0] * flat[other]).mean())
        assert abs(both - dropout_p**2) < 6 * sigma * flat.shape[1] ** -0.5


def test_cuda_graph_replays_draw_new_dropout_masks():
    """Values are the unit vectors, so the output is the weights, which show the mask of both passes."""
    q, k = (torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    unit = torch.eye(64, device="cuda", dtype=torch.float16).repeat(2, 2, 1, 1)
    inputs = [x.requires_grad_() for x in (q, k, unit)]
    grad_out = torch.randn_like(q)

    def step():
        out = cudnn_sdpa.sdpa(*inputs, dropout_p=0.3)
        return out.detach(), *torch.autograd.grad(out, inputs, grad_out)

    graph, results = captured(step)

    def replay():
        graph.replay()
        torch.cuda.synchronize()
        return [x.clone() for x in results]

    runs = [replay() for _ in range(4)]
    for number, run in enumerate(runs):
        assert not any(torch.equal(run[0], other[0]) for other in runs[:number])
    torch.manual_seed(9)
    runs.append(replay())
    torch.manual_seed(9)
    runs.append(replay())
    assert torch.equal(runs[-1][0], runs[-2][0])
    for out, *found in runs:
        keep = (out != 0).double()
        assert abs(float(keep.mean()) - 0.7) < 4 * (0.21 / keep.numel()) ** 0.5
        exact = [x.detach().double().requires_grad_() for x in inputs]
        weights = (exact[0] @ exact[1].mT / 8).softmax(-1) * keep / 0.7
        expected = weights @ exact[2]
        assert dense_calls.difference(out, expected.detach()) < dense_calls.FORWARD[torch.float16]
        for gradient, right in zip(found, torch.autograd.grad(expected, exact, grad_out.double()), strict=True):
            assert dense_calls.difference(gradient, right) < dense_calls.BACKWARD[torch.float16]


@pytest.mark.parametrize("nothing", [0.0, 0])
@pytest.mark.parametrize("name", OPTIONS)
def test_zero_dropout_matches_no_dropout(name, nothing):
    inputs, named = leaves(), options(name)
    grad_out = torch.randn_like(inputs[0])
    state = torch.cuda.get_rng_state()

    def run(**dropout):
        out, lse = cudnn_sdpa.sdpa(*inputs, **named, **dropout, return_lse=True, deterministic=True)
        return [out.detach(), lse, *torch.autograd.grad(out, inputs, grad_out)]

    for a, b in zip(run(), run(dropout_p=nothing), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.cuda.get_rng_state(), state)
