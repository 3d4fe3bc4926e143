"""Random calls of own kernels besides attention's, for compute-sanitizer: `test_sanitizer.py` runs this program.

    compute-sanitizer --tool memcheck python tests/gpu/kernels/sanitized_fused_calls.py 0/8

Norms, gates, rotations, their gradients, appends, merges and page tables, as `generators.py` draws and compares them.
Own kernels serve where they can.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import generators

from cudnn_sdpa import providers

#: Names, and how many calls of each are made.
CALLS = {
    **dict.fromkeys(("rms_norm", "layer_norm", "rope", "silu_mul", "gelu_mul", "relu_squared"), 48),
    **dict.fromkeys(("rms_norm_fp8", "layer_norm_fp8", "rope_", "rope_fp8"), 24),
    **dict.fromkeys(("append_paged_kv", "rope_append_paged_kv", "merge_states", "page_table_of_csr"), 24),
}


if __name__ == "__main__":
    part, parts, device = *map(int, sys.argv[1].split("/")), (sys.argv[2:] or ["cuda"])[0]
    each = [(name, seed) for name, count in CALLS.items() for seed in range(count)]
    with providers("own", "cudnn"):
        for name, seed in each[part::parts]:
            if seed % 25 == 13:  # of torch.compile
                continue
            outcome = generators.attempt(name, seed, device)
            assert outcome.kind in ("right", "declined"), (name, seed, outcome)
    print("all calls were made")
