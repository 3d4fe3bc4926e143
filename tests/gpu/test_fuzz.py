"""Random calls against float64: the same ones in every run.

A failure prints the command that repeats it alone, such as `python tests/gpu/fuzz.py 17`.
"""

from __future__ import annotations

import re

import fuzz
import fuzz_varlen
import pytest
import torch

from cudnn_sdpa import UnsupportedError
from cudnn_sdpa.attention import passes, support
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.problem import Problem
from cudnn_sdpa.attention.support import BACKWARD, FORWARD, refusal
from cudnn_sdpa.runtime.target import live_target

SIZE = 20
DENSE, VARLEN = range(0, 600, SIZE), range(0, 200, SIZE)

DENSE_NUMBERS = range(DENSE.start, DENSE.stop)


def broken(reason: str) -> list[support.Rule]:
    """The rules of this library that give a reason."""
    patterns = {rule: ".*".join(map(re.escape, re.split(r"\{\w+\}", rule.reason))) for rule in support.RULES}
    return [rule for rule, pattern in patterns.items() if re.fullmatch(pattern, reason)]


def is_explained(error: UnsupportedError) -> bool:
    """Whether a decline has reasons, and all are rules of this library or come from a plan that cuDNN refused."""
    by_cudnn = error.what.startswith(("sdpa_forward", "sdpa_backward"))
    return bool(error.reasons) and all(reason.strip() and (by_cudnn or broken(reason)) for reason in error.reasons)


def check_chunk(fuzzer, first: int, at_least: int) -> None:
    """Runs a chunk. More than one plan that cuDNN itself refuses would mean that a rule is missing."""
    failures, unexplained, by_cudnn, ran = [], [], [], 0
    for number in range(first, first + SIZE):
        c = fuzzer.draw(number)
        try:
            wrong = fuzzer.check(c)
        except UnsupportedError as error:
            if not is_explained(error):
                unexplained.append(f"{c}\n    declined: {error}")
            elif not any(map(broken, error.reasons)):
                by_cudnn.append(f"{c}\n    declined: {error}")
            continue
        except Exception as error:  # noqa: BLE001 - reported with what repeats it
            wrong = [f"{type(error).__name__}: {error}"[:500]]
        ran += 1
        if wrong:
            failures.append(f"{c}\n    wrong: {'; '.join(wrong)}")
    assert not failures, "\n".join([f"{len(failures)} wrong", *failures])
    assert not unexplained, "\n".join(unexplained)
    assert len(by_cudnn) <= SIZE // 20, "\n".join(by_cudnn)
    assert ran >= at_least


@pytest.mark.parametrize("first", DENSE)
def test_dense(first):
    check_chunk(fuzz, first, at_least=12)


@pytest.mark.parametrize("first", VARLEN)
def test_varlen(first):
    check_chunk(fuzz_varlen, first, at_least=18)


def ruled_out(c: fuzz.Config) -> UnsupportedError | None:
    """What the rules say about a configuration, without running it."""

    def like(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=c.dtype, device="meta")

    left, right = c.window or (-1, -1)
    call = ForwardArguments(
        like(c.batch, c.heads[0], c.sq, c.dims[0]),
        like(c.batch, c.heads[1], c.skv, c.dims[0]),
        like(c.batch, c.heads[1], c.skv, c.dims[1]),
        attn_mask=like(*c.mask_shape) if c.mask else None,
        sinks=like(c.heads[0]) if c.sinks else None,
        seq_lens_q=like(c.batch) if "q" in c.lengths.split() else None,
        seq_lens_kv=like(c.batch) if "kv" in c.lengths.split() else None,
        is_causal=c.is_causal,
        causal_alignment=c.causal_alignment,
        window_left=left,
        window_right=right,
        dropout_p=c.dropout_p,
        softcap=c.softcap,
        alibi=c.alibi,
    )
    problem, target = Problem.of(call), live_target(0)
    refused = refusal(problem.case(FORWARD, target), "forward")
    if refused is None and (c.needs or c.mask_grad):
        more = {"bias_gradient": c.mask_grad, "deterministic": c.deterministic}
        refused = refusal(problem.case(BACKWARD, target, **more), "backward")
    return refused


def test_nearly_all_that_cudnn_has_plans_for_is_run(monkeypatch):
    """A rule that no plan contradicts costs nothing; one against a wrong plan counts as a plan that is not run."""
    ran, has_wrong_plan, has_plan = 0, [], []
    for c in map(fuzz.draw, DENSE_NUMBERS):
        refused = ruled_out(c)
        if refused is None:
            ran += 1
        elif any(rule.wrong for reason in refused.reasons for rule in broken(reason)):
            has_wrong_plan.append(f"{c}\n    declined: {refused}")
        else:
            with monkeypatch.context() as without_rules:
                without_rules.setattr(passes, "refusal", lambda *_: None)
                if UnsupportedError.of(fuzz.check, c) is None:
                    has_plan.append(f"{c}\n    declined: {refused}")
    assert not has_plan, "\n".join(has_plan)
    assert ran >= 0.95 * (ran + len(has_wrong_plan)), "\n".join(has_wrong_plan)
    assert ran >= 0.85 * len(DENSE_NUMBERS)
