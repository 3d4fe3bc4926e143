"""Random calls of cuDNN's plans, launched as recorded, for compute-sanitizer: `test_sanitizer.py` runs this program.

    compute-sanitizer --tool memcheck python tests/gpu/kernels/sanitized_recorded_calls.py 0/8

Attention with its gradients, on pages and packed, norms and convolutions, as `generators.py` draws and compares them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import generators

from benchmarks.tools.ways import wait_for_native_calls
from cudnn_sdpa import providers
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.engine.recorded import recorder
from cudnn_sdpa.graph.private_memory import relaxed_capture

#: Names, and how many calls of each are made.
CALLS = {"sdpa": 24, "sdpa_varlen": 12, "sdpa_paged": 6, "rms_norm": 6, "conv2d": 6}


def record_at_once(work: Callable[[], None]) -> None:
    """In place of the thread that records: compute-sanitizer stops for good if another one allocates in a capture."""
    with relaxed_capture():
        work()


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1].split("/"))
    os.environ |= {loader.VARIABLE: loader.ON, loader.RECORDED_VARIABLE: loader.ON}
    wait_for_native_calls()
    recorder._Background.submit = record_at_once
    each, launched = [(name, seed) for name, count in CALLS.items() for seed in range(count)], Counter[str]()
    with providers("cudnn"):
        for name, seed in each[part::parts]:
            if seed % 25 == 13:  # of torch.compile
                continue
            outcome = generators.attempt(name, seed, "cuda")
            assert outcome.kind in ("right", "declined"), (name, seed, outcome)
            launched.update(who.startswith("as recorded") for who in outcome.launched)
    print(f"{launched[True]} plans were launched as recorded, {launched[False]} by cuDNN; all calls were made")
