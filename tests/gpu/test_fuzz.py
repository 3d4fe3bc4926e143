"""Random calls against float64: the same ones in every run.

A failure prints the command that repeats it alone, such as `python tests/gpu/fuzz.py 17`.
"""

from __future__ import annotations

import re

import fuzz
import fuzz_varlen
import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.attention import support
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.problem import Problem
from cudnn_sdpa.attention.support import BACKWARD, FORWARD, refusal
from cudnn_sdpa.runtime.target import live_target

SIZE = 20
DENSE, VARLEN = range(0, 600, SIZE), range(0, 200, SIZE)

#: Reasons of this library's own rules, in which {names} stand for facts.
RULES = [re.compile(".*".join(re.escape(part) for part in re.split(r"\{\w+\}", rule.reason))) for rule in support.RULES]


def is_explained(error: cudnn_sdpa.UnsupportedError) -> bool:
    """Whether a decline has reasons, and all are rules of this library or come from a plan that cuDNN refused."""
    by_cudnn = error.what.startswith(("sdpa_forward", "sdpa_backward"))
    return bool(error.reasons) and all(
        reason.strip() and (by_cudnn or any(rule.fullmatch(reason) for rule in RULES)) for reason in error.reasons
    )


def run_chunk(fuzzer, first: int, at_least: int) -> None:
    """Runs a chunk. More than one plan that cuDNN itself refuses would mean that a rule is missing."""
    failures, unexplained, by_cudnn, ran = [], [], [], 0
    for number in range(first, first + SIZE):
        c = fuzzer.draw(number)
        try:
            wrong = fuzzer.check(c)
        except cudnn_sdpa.UnsupportedError as error:
            if not is_explained(error):
                unexplained.append(f"{c}\n    declined: {error}")
            elif not any(rule.fullmatch(reason) for rule in RULES for reason in error.reasons):
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
    run_chunk(fuzz, first, at_least=12)


@pytest.mark.parametrize("first", VARLEN)
def test_varlen(first):
    run_chunk(fuzz_varlen, first, at_least=18)


def ruled_out(c: fuzz.Config) -> cudnn_sdpa.UnsupportedError | None:
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


def test_the_rules_leave_most_configurations_to_be_run():
    """Of what is drawn, which has far more combinations of options than there are users of them."""
    numbers = range(DENSE.start, DENSE.stop)
    declined = [str(refused) for refused in map(ruled_out, map(fuzz.draw, numbers)) if refused is not None]
    assert len(declined) <= 0.15 * len(numbers), "\n".join(declined)
