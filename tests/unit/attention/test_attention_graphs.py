"""The graphs of attention, forward and backward, compute what float64 does, with every option and pairs of them.

Plans evaluate what the builders of their keys build; `contract` does the same for examples of all kinds of calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract import operations
from contract.operations import Example, dense, exact_dense, with_lengths, with_mask, with_sinks
from fake_gpu import FakePlan, gpu_on_the_cpu
from graph_interpreter import Symbol
from torch import Tensor

from cudnn_sdpa import cpu_checks, sdpa


def with_both_lengths() -> dict[str, Tensor]:
    return {**with_lengths(), "seq_lens_q": torch.tensor([4, 9], dtype=torch.int32)}


def with_a_dropped_mask() -> dict[str, Tensor]:
    return {**with_mask(), "seq_lens_kv": torch.tensor([13, 5], dtype=torch.int32)}


BOTTOM_RIGHT = {"causal_alignment": "bottom_right"}
DROPOUT: dict[str, Any] = {"dropout_p": 1 / operations.ONE_OF}
CAPPED = {"softcap": 1.5, "scale": 0.4}

#: Those whose plans drop the same weights in every call.
DROPS = {"compute": operations.attention_with_dropout, "is_random": True}

CASES = {
    "plain": Example(sdpa, dense, exact_dense),
    "causal": Example(sdpa, dense, exact_dense, options={"is_causal": True, "scale": 0.6}),
    "causal, bottom-right": Example(sdpa, dense, exact_dense, options={"is_causal": True, **BOTTOM_RIGHT}),
    "window": Example(sdpa, dense, exact_dense, options={"window_size": (2, 3)}),
    "window, bottom-right": Example(sdpa, dense, exact_dense, options={"window_size": (2, 1), **BOTTOM_RIGHT}),
    "left window": Example(sdpa, dense, exact_dense, options={"window_size": (2, 0)}),
    "lengths": Example(sdpa, with_both_lengths, exact_dense),
    "lengths, causal": Example(sdpa, with_both_lengths, exact_dense, options={"is_causal": True, **BOTTOM_RIGHT}),
    "lengths, window": Example(sdpa, with_lengths, exact_dense, options={"window_size": (3, 1)}),
    "mask": Example(sdpa, with_mask, exact_dense, differentiable=("q", "k", "v", "attn_mask")),
    "mask, no key to the left": Example(
        sdpa, with_mask, exact_dense, differentiable=("q", "k", "v", "attn_mask"), options={"window_size": (0, 3)}
    ),
    "mask without gradient, lengths": Example(sdpa, with_a_dropped_mask, exact_dense),
    "sinks, causal": Example(
        sdpa, with_sinks, exact_dense, differentiable=operations.SINKS, options={"is_causal": True}
    ),
    "alibi": Example(sdpa, dense, exact_dense, options={"alibi": True, "is_causal": True}),
    "softcap": Example(sdpa, dense, exact_dense, options=CAPPED),
    "softcap, causal": Example(sdpa, dense, exact_dense, options={**CAPPED, "is_causal": True}),
    "softcap, window": Example(sdpa, dense, exact_dense, options={**CAPPED, "window_size": (2, 1)}),
    "softcap, left window": Example(sdpa, dense, exact_dense, options={**CAPPED, "window_size": (3, -1)}),
    "softcap, lengths": Example(sdpa, with_both_lengths, exact_dense, options=CAPPED),
    "softcap, lengths, window": Example(
        sdpa, with_both_lengths, exact_dense, options={**CAPPED, "window_size": (3, 2), **BOTTOM_RIGHT}
    ),
    "dropout": Example(sdpa, dense, operations.exact_dropout, options=DROPOUT, **DROPS),
    "dropout, lengths": Example(sdpa, with_lengths, operations.exact_dropout, options=DROPOUT, **DROPS),
    "dropout, causal": Example(sdpa, dense, operations.exact_dropout, options={**DROPOUT, "is_causal": True}, **DROPS),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_right(name):
    example = CASES[name]
    before = len(FakePlan.launched)
    with gpu_on_the_cpu(example.compute), cpu_checks(None):
        tensors = example.tensors(grad=True)
        out = example(tensors)
        if example.differentiable:
            grad_out = torch.randn_like(out)
            example.assert_gradients(example.gradients(tensors, grad_out), tensors, grad_out)
    example.assert_out(out, tensors)
    assert len(FakePlan.launched) > before, "no graph was evaluated"


def test_a_builder_cannot_read_what_nothing_has_written():
    with pytest.raises(AssertionError, match="no operation has written"):
        _ = Symbol(None, (2, 3)).value
