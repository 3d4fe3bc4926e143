"""Calls of the kernel for pages, for compute-sanitizer: `test_sanitizer.py` runs this program, one part of them each.

    compute-sanitizer --tool memcheck python tests/gpu/kernels/sanitized_paged_calls.py 0/8

Head dims, dtypes, masks and trees; decodes, chunks and split keys; tables, lengths and offsets that make sense, and
others. Each tensor is as small as it can be, and made on the CPU, so that nearly all kernels that run are this one.
"""

from __future__ import annotations

import random
import sys
from itertools import accumulate

import torch

from cudnn_sdpa import sdpa_paged_varlen

DIMS = ((64, 64), (80, 96), (128, 128), (192, 128), (256, 256), (8, 16))
CACHES = (None, torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = ("plain", "tree", "window", "soft cap", "batch-invariant")
BATCHES = (([1, 1, 2], [5, 300, 64]), ([3, 40, 0, 1], [130, 41, 9, 65]), ([1, 4], [2500, 2100]))


def run(dims: tuple[int, int], cache: torch.dtype | None, kind: str, chance: random.Random) -> None:
    """Makes a call for each batch, and one with values that make no sense."""
    if cache is not None and (any(dim % 16 for dim in dims) or torch.cuda.get_device_capability() < (8, 9)):
        return
    group, page, dtype = (
        chance.choice((1, 3, 4, 8)),
        chance.choice((1, 5, 16, 24)),
        chance.choice((torch.float16, torch.bfloat16)),
    )
    for new, lengths in BATCHES:
        tokens, width = sum(new), max(-(-length // page) for length in lengths)
        q = torch.randn(tokens, 2 * group, dims[0]).to("cuda", dtype)
        pages = [torch.randn(width, page, 2, dim).to(cache or dtype).cuda() for dim in dims]
        given = {
            "page_table": torch.randint(width, (len(new), width), dtype=torch.int32),
            "seq_lens_kv": torch.tensor(lengths, dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([*accumulate(new, initial=0)], dtype=torch.int32),
        }
        options: dict[str, object] = {"max_seqlen_q": max(new), "page_layout": "NHD", "return_lse": True}
        options["sinks"] = torch.randn(2 * group).cuda()
        if kind == "tree":
            options["tree_mask"] = (torch.rand(tokens, max(new)) < 0.7).cuda()
        elif kind == "window":
            options |= {"window_size": (37, 2), "is_causal": False}
        elif kind == "soft cap":
            options["softcap"] = 2.5
        elif kind == "batch-invariant":
            options["batch_invariant"] = True
        wild = {name: torch.randint(-(2**31), 2**31 - 1, x.shape).to(torch.int32) for name, x in given.items()}
        ends = torch.tensor(([0, tokens] * len(new))[: len(new) + 1], dtype=torch.int32)  # of sequences that overlap
        for made in (given, wild, {**given, "cu_seqlens_q": ends, "seq_lens_kv": given["seq_lens_kv"] + 9999}):
            on_gpu = {name: x.cuda() for name, x in made.items()}
            out, _ = sdpa_paged_varlen(q, *pages, **on_gpu, **options)
            found = out.cpu()
            assert made is not given or found.isfinite().all(), (dims, cache, kind)


if __name__ == "__main__":
    part, parts = map(int, sys.argv[1].split("/"))
    torch.manual_seed(part)
    calls = [
        (dims, cache, KINDS[(i + j + k) % len(KINDS)])
        for i, dims in enumerate(DIMS)
        for j, cache in enumerate(CACHES)
        for k in (0, 2)
    ]
    for number, call in enumerate(calls):
        if number % parts == part:
            run(*call, random.Random(number))
    print("all calls were made")
