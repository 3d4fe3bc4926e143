"""Random valid calls of every operation on a GPU, against float64: the same calls in every run.

A failure prints the command that repeats it. More: `python tests/generators.py all --count 5000 --device cuda`.
"""

from __future__ import annotations

import os
import re

import generators
import pytest
import torch
from random_tensors import FP8

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense import specs
from cudnn_sdpa.attention.dense.specs import DenseSpec
from cudnn_sdpa.attention.support import rules
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD, refusal
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.providers import VARIABLE

SIZE = 15

#: Number of calls of each operation, and how many of `SIZE` must run at least.
COUNTS = {
    "sdpa": (150, 8),
    "sdpa_varlen": (90, 10),
    "scaled_dot_product_attention": (60, 8),
    "sdpa_backward": (60, 8),
    "sdpa_varlen_backward": (45, 8),
    "merge_states": (30, 14),
    "rope": (45, 10),
    "rope_": (45, 10),
    "rms_norm_fp8": (60, 10),
    "layer_norm_fp8": (45, 10),
    "rope_fp8": (60, 10),
    "append_paged_kv": (60, 8),
    "rope_append_paged_kv": (60, 8),
    "page_table_of_csr": (30, 8),
    "sdpa_paged": (60, 8),
    "sdpa_paged_varlen": (60, 12),
    "PagedKVCache": (30, 14),
    "sdpa_fp8": (45, 3),
    "sdpa_fp8_backward": (45, 2),
    "fp8_attention": (45, 3),
    "rms_norm": (45, 6),
    "layer_norm": (60, 8),
    "silu_mul": (45, 5),
    "gelu_mul": (15, 5),
    "relu_squared": (15, 5),
    "conv1d": (60, 5),
    "conv2d": (60, 5),
    "conv3d": (60, 5),
    "graph_op": (30, 8),
    "kernels.attention": (45, 13),
    "nn.Attention": (45, 4),
    "nn.FeedForward": (15, 8),
    "nn.Fp8Attention": (30, 2),
    "nn.KVCache": (30, 12),
    "nn.LayerNorm": (30, 6),
    "nn.PatchEmbed": (30, 4),
    "nn.RMSNorm": (30, 6),
    "nn.RotaryEmbedding": (15, 12),
    "nn.SwiGLU": (15, 5),
    "nn.TransformerLayer": (30, 3),
    "nn.VisionEncoder": (15, 3),
}
CHUNKS = [(name, first) for name, (count, _) in COUNTS.items() for first in range(0, count, SIZE)]


def broken(reason: str) -> list[rules.Rule]:
    """The library's rules that give this reason."""
    patterns = {rule: ".*".join(map(re.escape, re.split(r"\{\w+\}", rule.reason))) for rule in rules.RULES}
    return [rule for rule, pattern in patterns.items() if re.fullmatch(pattern, reason)]


def test_every_operation_is_covered():
    assert COUNTS.keys() == generators.OPERATIONS.keys()


@pytest.mark.parametrize(("name", "first"), CHUNKS)
def test_calls_are_right_or_declined(name, first):
    """Refusals have reasons; nearly all of those of dense and packed attention are rules of this library."""
    faults, unexplained, by_cudnn, ran = [], [], [], 0
    for seed in range(first, first + SIZE):
        outcome = generators.attempt(name, seed, "cuda")
        line = generators.line(name, seed, "cuda")
        if outcome.kind in ("wrong", "crashed"):
            faults.append("\n    ".join([f"{line}  # {outcome.kind}", *outcome.problems]))
        ran += outcome.kind == "right"
        reasons = "; ".join(outcome.reasons)
        if outcome.kind == "declined" and not all(reason.strip() for reason in outcome.reasons or [""]):
            unexplained.append(f"{line}  # declined without a reason: {reasons}")
        if outcome.kind == "declined" and name in ("sdpa", "sdpa_varlen") and outcome.by != "refused":
            planned = outcome.by.startswith(("sdpa_forward", "sdpa_backward"))
            if not any(map(broken, outcome.reasons)):
                (by_cudnn if planned else unexplained).append(f"{line}  # declined: {reasons}")
    assert not faults, "\n".join([f"{len(faults)} faults", *faults])
    assert not unexplained, "\n".join(unexplained)
    assert len(by_cudnn) <= 1, "\n".join(by_cudnn)
    assert ran >= COUNTS[name][1] or VARIABLE in os.environ  # those that are named may have no kernels for pages


def ruled_out(case: generators.Case) -> UnsupportedError | None:
    """The error that the rules give for a call of `sdpa`, without running it."""
    options, tensors = case.options, {name: spec.make("meta") for name, spec in case.tensors.items()}
    side = {n: torch.empty(len(x), dtype=torch.int32, device="meta") for n, x in case.facts.items() if "len" in n}
    left, right = options["window_size"] or (-1, -1)
    call = from_fields(
        ForwardArguments,
        **tensors,
        **side,
        is_causal=options["is_causal"],
        causal_alignment=options["causal_alignment"],
        window_left=left,
        window_right=right,
        dropout_p=options.get("dropout_p", 0.0),
        softcap=options["softcap"],
        alibi=options.get("alibi", False),
    )
    spec, target = DenseSpec.of(call), live_target(0)
    refused = refusal(spec.configuration(FORWARD, target), "forward")
    if refused is None and case.wanted:
        more = {"bias_gradient": "attn_mask" in case.wanted, "deterministic": bool(options["deterministic"])}
        refused = refusal(spec.configuration(BACKWARD, target, **more), "backward")
    return refused


def test_nearly_every_call_with_a_plan_runs(monkeypatch):
    """A rule refuses no call that has a right plan. A rule against wrong plans counts as a call that does not run."""
    ran, has_wrong_plan, has_plan, seeds = 0, [], [], range(COUNTS["sdpa"][0])
    for seed in seeds:
        case = generators.draw("sdpa", seed, "cuda")
        is_other = case.mode == "autocast" or "fallback" in case.settings or "bias" in case.facts
        if case.refusable or is_other or 0 in (case.tensors["q"].shape + case.tensors["k"].shape):
            continue
        refused = ruled_out(case)
        line = f"{case.line('cuda')}  # declined: {refused}"
        if refused is None:
            ran += 1
        elif any(rule.wrong for reason in refused.reasons for rule in broken(reason)):
            has_wrong_plan.append(line)
        else:
            with monkeypatch.context() as without_rules:
                without_rules.setattr(specs, "refuse", lambda *_: None)
                if generators.attempt("sdpa", seed, "cuda").kind != "declined":
                    has_plan.append(line)
    assert not has_plan, "\n".join(has_plan)
    assert ran >= 0.9 * (ran + len(has_wrong_plan)), "\n".join(has_wrong_plan)
    assert ran >= 0.7 * len(seeds)


def test_fp8_calls_are_generated():
    assert {generators.draw("sdpa_fp8", seed, "cuda").dtype for seed in range(20)} <= set(FP8)
