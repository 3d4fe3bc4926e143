"""Random right calls on the fake GPU: what leads to a launch is right for every option, layout and subset of gradients.

Each call is drawn as for a GPU and held against float64, as on a real one in `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import generators
import pytest
from fake_gpu import checked_plan, gpu_on_the_cpu
from native_way import native_way

from cudnn_sdpa.graph import known_issues

#: The operations whose plans are cuDNN's, and that on a kernel whose instructions are a GPU's.
NAMES = (
    *("sdpa", "scaled_dot_product_attention", "sdpa_varlen", "sdpa_backward", "sdpa_varlen_backward", "sdpa_paged"),
    *("sdpa_paged_varlen", "sdpa_fp8", "sdpa_fp8_backward"),
    *("rms_norm", "layer_norm", "silu_mul", "gelu_mul", "relu_squared", "conv2d", "graph_op"),
)
#: Calls of one test.
SIZE = 5
#: The first call; the real GPU runs others.
FIRST = 20_000


@pytest.mark.sample(len(NAMES))
@pytest.mark.parametrize("first", range(FIRST, FIRST + 20 * SIZE, SIZE))
@pytest.mark.parametrize("name", NAMES)
def test_calls_are_right_or_declined(name, first):
    check(name, first)


#: The limits of one launch, as sizes of drawn calls: batch entries and heads, and elements.
LIMITS = [(1, 2**31 - 1), (2, 2**31 - 1), (65535, 30_000), (3, 10_000)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", range(FIRST, FIRST + 8 * SIZE, SIZE))
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", [x for x in NAMES if "sdpa" in x.replace("sdpa_paged_varlen", "") or "attention" in x])
def test_calls_beyond_the_limits_of_a_launch_are_right_or_declined(monkeypatch, name, limits, first):
    """Most calls are split; no launch exceeds the limits, which plans are checked against."""
    least = 8 if name == "sdpa_paged" else 1  # so many queries of a sequence are rows of a decode step
    monkeypatch.setattr(known_issues, "MAX_GRID", max(limits[0], least))
    monkeypatch.setattr(known_issues, "MAX_OFFSET", limits[1])
    check(name, first)


def check(name, first):
    """Runs the calls of a test, and further ones until one is not declined: cuDNN's FP8 gradients serve few."""
    faults, ran = [], 0
    for seed in range(first, first + 10 * SIZE):
        if seed >= first + SIZE and ran:
            break
        case = generators.draw(name, seed, "cuda")
        with native_way(on=seed % 3 != 0), gpu_on_the_cpu(plan_of=checked_plan):
            # Tables of buckets lie in memory that PyTorch does not know.
            outcome = generators.run(replace(case, policy="exact"), "cpu")
        ran += outcome.kind == "right"
        if outcome.kind != "right" and (outcome.kind != "declined" or not all(outcome.reasons)):
            faults.append("\n    ".join([f"{name} {seed}: {outcome.kind}", str(case), *outcome.problems]))
    assert not faults, "\n".join(faults)
    assert ran
