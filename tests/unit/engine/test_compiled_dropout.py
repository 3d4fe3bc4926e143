"""Dropout in compiled code: both passes use the same mask, however little the compiler saves."""

from __future__ import annotations

import pytest
import torch
from torch._functorch import config

from cudnn_sdpa import UnsupportedError, sdpa, sdpa_varlen

B, H, S, D = 2, 2, 8, 8
ENDS = torch.tensor([0, S, 2 * S], dtype=torch.int32)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def dense(x):
    q = x.view(B, S, H, D).transpose(1, 2)
    return sdpa(q, q, q, dropout_p=0.5).transpose(1, 2).reshape(B, S, H * D)


def packed(x):
    q = x.reshape(B * S, H, D)
    return sdpa_varlen(q, q, q, ENDS, ENDS, S, S, dropout_p=0.5).view(B, S, H * D)


def layers(attend):
    def run(x, *weights):
        for weight in weights:
            x = torch.sin(x + attend(torch.nn.functional.gelu(x @ weight)))
        return x

    return run


def assert_gradients_are_of_the_same_numbers(run, budget):
    """Compares them with finite differences of the same compiled code after the same seed."""
    leaves = [torch.randn(B, S, H * D, dtype=torch.float64, requires_grad=True)]
    leaves += [torch.randn(H * D, H * D, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    directions, grad_out = [torch.randn_like(x) for x in leaves], torch.randn(B, S, H * D, dtype=torch.float64)

    def after_seed(step):
        torch.manual_seed(7)
        moved = [(x.detach() + step * d).requires_grad_() for x, d in zip(leaves, directions, strict=True)]
        return run(*moved), moved

    with config.patch(activation_memory_budget=budget):
        out, moved = after_seed(0.0)
        found = torch.autograd.grad(out, moved, grad_out)
        ahead, behind = ((after_seed(step)[0].detach() * grad_out).sum() for step in (1e-6, -1e-6))
    along = sum((x * d).sum() for x, d in zip(found, directions, strict=True))
    torch.testing.assert_close(along, (ahead - behind) / 2e-6, rtol=1e-3, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("attend", [dense, packed])
@pytest.mark.parametrize("budget", [0.99, 0.7, 0.5, 0.2])
def test_the_partitioner_saves_the_seed(attend, budget):
    run = torch.compile(layers(attend), backend="aot_eager_decomp_partition", fullgraph=True)
    assert_gradients_are_of_the_same_numbers(run, budget)


@pytest.mark.slow
@pytest.mark.parametrize("attend", [dense, packed])
def test_inductor_saves_the_seed(attend):
    assert_gradients_are_of_the_same_numbers(torch.compile(layers(attend), fullgraph=True), 0.4)


def test_checkpointed_code_recomputes_with_the_same_mask():
    def run(x, *weights):
        return torch.utils.checkpoint.checkpoint(layers(dense), x, *weights, use_reentrant=False)

    assert_gradients_are_of_the_same_numbers(torch.compile(run, backend="aot_eager_decomp_partition"), 1.0)


def test_a_memory_budget_of_zero_is_refused():
    x, weight = torch.randn(B, S, H * D, requires_grad=True), torch.randn(H * D, H * D)
    run = torch.compile(layers(dense), backend="aot_eager_decomp_partition", fullgraph=True)
    with config.patch(activation_memory_budget=0), pytest.raises(Exception, match="memory budget of 0") as caught:
        run(x, weight)
    assert isinstance(caught.value, UnsupportedError) or "UnsupportedError" in repr(caught.value.__cause__)


def test_the_generators_seed_is_respected():
    run = torch.compile(dense, backend="aot_eager", fullgraph=True)
    x = torch.randn(B, S, H * D)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(run(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    torch.manual_seed(1)
    assert torch.equal(dense(x), outs[0])  # the seed of eager mode
