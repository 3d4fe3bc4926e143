"""Equivalent options share a plan, that of their simplest form."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import plan_offline

CAUSAL = (None, 0, False)
LAST = (None, 0, True)

# Queries, keys, one form of the options, the simplest form, and the band that the first form spells out.
MEANINGS = {
    "a window as wide as the sequence": (256, 256, {"window_size": (255, 255)}, {}, (255, 255, False)),
    "a window wider than the sequence": (200, 256, {"window_size": (5000, 5000)}, {}, (5000, 5000, False)),
    "causal within a window as wide": (
        256,
        256,
        {"is_causal": True, "window_size": (255, -1)},
        {"is_causal": True},
        None,
    ),
    "a window that ends at the diagonal": (256, 256, {"window_size": (-1, 0)}, {"is_causal": True}, None),
    "one query, the last": (1, 4096, {"is_causal": True, "causal_alignment": "bottom_right"}, {}, LAST),
    "one query with a window over all keys": (
        1,
        4096,
        {"is_causal": True, "causal_alignment": "bottom_right", "window_size": (4095, 0)},
        {},
        (4095, 0, True),
    ),
    "both alignments of a square": (
        256,
        256,
        {"is_causal": True, "causal_alignment": "bottom_right"},
        {"is_causal": True},
        LAST,
    ),
    "both alignments of a window in a square": (
        256,
        256,
        {"window_size": (64, 16), "causal_alignment": "bottom_right"},
        {"window_size": (64, 16)},
        (64, 16, True),
    ),
}


def keys(sq, skv, options, target) -> list[PlanKey]:
    q, k = (torch.empty(2, 8, length, 128, dtype=torch.bfloat16, device="meta") for length in (sq, skv))
    forward = ForwardSpec.of(from_fields(ForwardArguments, q, k, k, with_lse=sq > 1, **bounds(options)))
    if sq == 1:
        return [forward.key(target, None)]
    backward = BackwardSpec(forward.dense, forward.out, forward.out, bias_gradient=False)
    return [forward.key(target, None), backward.key(target, None)]


def bounds(options):
    left, right = options.get("window_size", (-1, -1))
    return {name: value for name, value in options.items() if name != "window_size"} | {
        "window_left": left,
        "window_right": right,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MEANINGS)
def test_equivalent_options_share_a_plan_and_its_engine(h200, name):
    sq, skv, one, simple, word_by_word = MEANINGS[name]
    target = Target.from_properties(h200)
    assert keys(sq, skv, one, target) == keys(sq, skv, simple, target)
    key = keys(sq, skv, one, target)[0]
    plan = plan_offline(key, h200)
    if word_by_word is None:
        return
    options = {**key.option_values, "band": word_by_word}
    literal = plan_offline(dataclasses.replace(key, options=PlanKey.typed(options)), h200)
    same = (plan.engine, plan.knobs) == (literal.engine, literal.knobs)
    assert same is (sq > 1), f"{plan.engine} {plan.knobs} against {literal.engine} {literal.knobs}"
