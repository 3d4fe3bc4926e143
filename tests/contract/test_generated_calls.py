"""Random right calls on the fake GPU: what leads to a launch is right for every option, layout and subset of gradients.

Each call is drawn as for a GPU and held against float64, as on a real one in `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace

import generators
import pytest
from fake_gpu import Compute, dense_attention, fp8_attention, gpu_on_the_cpu, paged_attention
from native_way import native_way

#: What the plans of an operation compute; None for what the reference of their graph function computes.
COMPUTE: dict[str, Compute | None] = {
    **dict.fromkeys(("sdpa", "scaled_dot_product_attention", "sdpa_varlen"), dense_attention),
    **dict.fromkeys(("sdpa_backward", "sdpa_varlen_backward"), dense_attention),
    "sdpa_paged": paged_attention,
    **dict.fromkeys(("sdpa_fp8", "sdpa_fp8_backward"), fp8_attention),
    **dict.fromkeys(("rms_norm", "layer_norm", "silu_mul", "gelu_mul", "relu_squared", "conv2d", "graph_op")),
}
#: Calls of one test.
SIZE = 5
#: The first call; the real GPU runs others.
FIRST = 20_000


@pytest.mark.sample(len(COMPUTE))
@pytest.mark.parametrize("first", range(FIRST, FIRST + 20 * SIZE, SIZE))
@pytest.mark.parametrize("name", COMPUTE)
def test_calls_are_right_or_declined(name, first):
    faults, ran = [], 0
    for seed in range(first, first + SIZE):
        case = generators.draw(name, seed, "cuda")
        with native_way(on=seed % 3 != 0), gpu_on_the_cpu(COMPUTE[name]):
            # Tables of buckets lie in memory that PyTorch does not know.
            outcome = generators.run(replace(case, policy="exact"), "cpu")
        ran += outcome.kind == "right"
        if outcome.kind != "right" and (outcome.kind != "declined" or not all(outcome.reasons)):
            faults.append("\n    ".join([f"{name} {seed}: {outcome.kind}", str(case), *outcome.problems]))
    assert not faults, "\n".join(faults)
    assert ran >= SIZE // 4
