"""The support rules, compared with cuDNN's planner for five kinds of GPUs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.dense import specs as dense_specs
from cudnn_sdpa.attention.fp8 import specs as fp8_specs
from cudnn_sdpa.attention.support.rules import RULES, Configuration, Rule
from cudnn_sdpa.attention.varlen import specs as varlen_specs
from cudnn_sdpa.engine.explain import Description
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.offline.planner import engine_offline, plan_offline
from cudnn_sdpa.planning.support import descriptions

#: By SM, the GPU properties given to cuDNN that differ from an H200's.
GPUS = {
    80: {"multiProcessorCount": 108, "maxSharedMemoryPerBlockOptin": 166912},
    89: {"multiProcessorCount": 142, "maxSharedMemoryPerBlockOptin": 101376, "maxThreadsPerSM": 1536},
    90: {},
    100: {"multiProcessorCount": 148},
    120: {"multiProcessorCount": 170, "maxSharedMemoryPerBlockOptin": 101376, "maxThreadsPerSM": 1536},
}
GRID = 200
FULL = 4
COMMON_DIMS = [(64, 64), (128, 128), (128, 64), (72, 72), (192, 128), (256, 256)]
DIMS = [*COMMON_DIMS, (8, 8), (40, 40), (96, 32), (136, 136), (64, 128), (192, 192), (256, 128), (512, 512), (576, 512)]
SIZES = [(256, 384), (256, 256), (128, 320), (320, 128), (1, 256), (256, 1), (1, 1), (100, 77), (77, 100), (129, 2049)]
WINDOWS = [(64, 0), (64, 32), (64, -1), (-1, 32), (0, 0), (10, -1), (700, 10), (300, 400)]


@pytest.fixture
def gpu(h200, request) -> dict[str, Any]:
    return {**h200, "deviceVer": 10 * request.param, "deviceName": f"SM {request.param}", **GPUS[request.param]}


def sample(draw: random.Random) -> Description | None:
    """A random configuration that uses each option sometimes; None for one that needs no plan."""

    def chance(share: float) -> bool:
        return draw.random() < share

    packed = chance(0.3)
    options: dict[str, Any] = {"is_causal": chance(0.5), "causal_alignment": draw.choice(["top_left", "bottom_right"])}
    options |= {"window_size": draw.choice(WINDOWS)} if chance(0.3) else {}
    options |= {"dropout_p": 0.1} if chance(0.2) else {}
    options |= {"softcap": 20.0} if chance(0.2) else {}
    options |= {"sinks": chance(0.2), "deterministic": chance(0.3)}
    if not packed:
        options |= {"attn_mask": draw.choice([True, "grad"])} if chance(0.25) else {}
        options |= {"seq_lens_q": True, "seq_lens_kv": True} if chance(0.25) else {}
        options |= {"alibi": chance(0.15)}
    return last_of(
        draw,
        "sdpa_varlen" if packed else "sdpa",
        draw.choice(["forward", "backward", "backward"]),
        draw.choice([torch.float16, torch.bfloat16]),
        draw.choice(COMMON_DIMS if chance(0.5) else DIMS),
        options,
    )


def last_of(
    draw: random.Random,
    operation: str,
    direction: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    options: dict[str, Any],
) -> Description | None:
    """The spec to plan: that of the gradients, if there are any."""
    (head_dim, head_dim_v), (sq, skv) = dims, draw.choice(SIZES[:3] if draw.random() < 0.5 else SIZES)
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v, "sq": sq, "skv": skv}
    found = descriptions(operation, direction, dtype, **sizes, options=options)[-1]
    return None if found.is_empty else found


FP8_DIMS = [
    (128, 128),
    (128, 128),
    (64, 64),
    (96, 96),
    (192, 128),
    (256, 256),
    (16, 48),
    (128, 64),
    (64, 192),
    (208, 208),
]
FP8_OUTPUTS = [None, torch.float8_e5m2, torch.bfloat16, torch.float16]


def sample_fp8(draw: random.Random) -> Description | None:
    is_backward = draw.random() < 0.5
    options: dict[str, Any] = {"is_causal": draw.random() < 0.5}
    options |= {"causal_alignment": draw.choice(["top_left", "bottom_right"])}
    options |= {"window_size": draw.choice(WINDOWS)} if draw.random() < 0.3 else {}
    options |= {"seq_lens_q": True, "seq_lens_kv": True} if draw.random() < 0.4 else {}
    options |= {"deterministic": draw.random() < 0.3} if is_backward else {"out_dtype": draw.choice(FP8_OUTPUTS)}
    direction = "backward" if is_backward else "forward"
    dtype = draw.choice([torch.float8_e4m3fn, torch.float8_e5m2])
    return last_of(draw, "sdpa_fp8", direction, dtype, draw.choice(FP8_DIMS), options)


def key_and_rules(plan: Description, target: Target) -> tuple[PlanKey, Configuration, list[Rule]]:
    """The key, built despite the rules, and the rules' reasons."""
    asked: list[tuple[Configuration, list[Rule]]] = []

    def note(case: Configuration, _what: str, rules: Sequence[Rule] = RULES) -> None:
        asked.append((case, [rule for rule in rules if rule.applies(case)]))

    with pytest.MonkeyPatch.context() as patch:
        for module in (dense_specs, varlen_specs, fp8_specs):
            patch.setattr(module, "refuse", note)
        key = plan.key(target, None)
    return key, *asked[-1]


def disagreement(plan: Description, properties: dict[str, Any]) -> str:
    """How the rules and cuDNN disagree; empty if they agree, or if a plan would be wrong and is not requested."""
    key, case, broken = key_and_rules(plan, Target.from_properties(properties))
    if any(rule.wrong for rule in broken) or UnsupportedError.of(known_issues.check, key) is not None:
        return ""
    try:
        engine = engine_offline(key, properties)
    except UnsupportedError as error:
        return "" if broken else f"no rule says why cuDNN declines {case}:\n{error}"
    if not broken or UnsupportedError.of(plan_offline, key, properties) is not None:  # proposed, but does not compile
        return ""
    return f"cuDNN proposes {engine} in spite of {[rule.reason for rule in broken]} for {case}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampled", [sample, sample_fp8], ids=["half", "fp8"])
@pytest.mark.parametrize("gpu", GPUS, indirect=True, ids="SM {}".format)
def test_rules_agree_with_the_heuristics(gpu, sampled):
    draw = random.Random(20 + gpu["deviceVer"])
    plans = [plan for _ in range(GRID) if (plan := sampled(draw)) is not None]
    assert len(plans) > 0.9 * GRID
    found = [text for plan in plans if (text := disagreement(plan, gpu))]
    assert not found, f"{len(found)} of {GRID}:\n" + "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, indirect=True, ids="SM {}".format)
def test_calls_that_no_rule_rejects_compile(gpu):
    draw = random.Random(3 + gpu["deviceVer"])
    target, compiled = Target.from_properties(gpu), 0
    while compiled < FULL:
        plan = sample(draw)
        if plan is not None and not key_and_rules(plan, target)[2]:
            key = plan.key(target, None)
            if UnsupportedError.of(known_issues.check, key) is not None:
                continue
            made = plan_offline(key, gpu)  # raises cuDNN's reasons
            assert made.engine.startswith("eng")
            compiled += 1
