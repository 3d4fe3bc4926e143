"""A process of `benchmarks replacements`: calls of many new lengths with one replacement; it prints one line of JSON.

python -m benchmarks.programs.new_shapes pytorch ""     # or cudnn-frontend "", cudnn_sdpa exact
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Literal, cast

from torch import Tensor

from benchmarks.programs import many_lengths
from benchmarks.tools import cases, peers
from benchmarks.tools.replacements import replaced_by
from cudnn_sdpa.plans.shape_policy import Policy, shape_policy


def measure(name: str, policy: Policy | Literal[""]) -> dict[str, object]:
    """The time of all calls and the longest wait for one; or why there are none."""
    many_lengths._prepare_process()
    inputs = many_lengths.Inputs()
    lengths = many_lengths.lengths(many_lengths.COUNT, seed=1)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(replaced_by(name))
        except ImportError as error:
            return {"why": str(error)}
        stack.enter_context(peers.only(peers.CUDNN))
        if policy:
            stack.enter_context(shape_policy(policy))
        found = many_lengths.one_pass(attend, inputs, lengths)
        outs = [attend(*inputs(length)) for length in lengths[: many_lengths.CHECKED]]
    with peers.only("pytorch flash"):
        for length, out in zip(lengths, outs, strict=False):
            cases.check_agreement(["out"], [out], [attend(*inputs(length))], f"PyTorch's at length {length}")
    return {**found, "why": None}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's function."""
    return peers.pytorch(q, k, v, is_causal=True)()


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], cast("Policy", sys.argv[2]))))
