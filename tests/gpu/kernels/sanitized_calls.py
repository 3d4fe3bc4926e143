"""Calls of all attention kernels, for compute-sanitizer: `test_sanitizer.py` runs this program, one part of them each.

    compute-sanitizer --tool racecheck python tests/gpu/kernels/sanitized_calls.py 0/8

Every form, dtype and kind of mask, with and without a causal one, read 16 bytes at a time and by element, forward and
backward; on few odd numbers of queries and keys, and on more than a tile. Head dims and numbers of heads are drawn.
Tensors are made on the CPU, so that nearly all kernels that run are the library's own. The part "wrong" reads beyond
a tensor, which a tool must notice. The first part computes gradients of sinks, too.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from typing import NamedTuple

import torch

from cudnn_sdpa import kernels
from cudnn_sdpa.attention import sink_scores
from cudnn_sdpa.kernels.arguments import KernelArguments
from cudnn_sdpa.kernels.launch import bind
from cudnn_sdpa.kernels.plans import Spec

MODES = ("fused", "tiled", "naive")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASKS = ("none", "boolean", "float32", "of q's dtype")
FEW = ((1, 1), (7, 33), (3, 70), (33, 5))
MANY = ((129, 66), (66, 130), (135, 131))
VECTORS, BY_ELEMENT, BEYOND_FUSED = (64, 128, 40, 72), (33, 127, 9, 101), (136, 145)


class Call(NamedTuple):
    """A kind of call; `vectors` means head dims of the fused form, otherwise larger ones, in the other forms."""

    mode: str
    dtype: torch.dtype
    mask: str
    vectors: bool
    is_causal: bool


def calls() -> list[Call]:
    found = itertools.starmap(Call, itertools.product(MODES, DTYPES, MASKS, (True, False), (True, False)))
    return [call for call in found if call.dtype != torch.float32 or call.mask != MASKS[-1]]


def run(call: Call, chance: random.Random, device: str) -> None:
    """Makes a call for few queries and keys, and one for more than a tile."""
    dims = VECTORS if call.vectors else BY_ELEMENT if call.mode == "fused" else BEYOND_FUSED
    dim, heads, heads_kv = chance.choice(dims), *chance.choice(((4, 2), (2, 2), (3, 1)))
    for sq, skv in (chance.choice(FEW), chance.choice(MANY)):
        q = torch.randn(2, heads, sq, dim).to(device, call.dtype).requires_grad_()
        k, v = (torch.randn(2, heads_kv, skv, dim).to(device, call.dtype).requires_grad_() for _ in range(2))
        grad_out = torch.randn(2, heads, sq, dim).to(device, call.dtype)
        leaves, mask = [q, k, v], None
        if call.mask == "boolean":
            mask = (torch.rand(2, 1, sq, skv) > 0.4).to(device)
        elif call.mask != "none":
            dtype = torch.float32 if call.mask == "float32" else call.dtype
            mask = torch.randn(chance.choice(((sq, skv), (heads, 1, skv), (2, 1, sq, 1)))).to(device, dtype)
            leaves.append(mask.requires_grad_())
        out = kernels.attention(q, k, v, call.mode, mask, call.is_causal)
        for result in (out, *torch.autograd.grad(out, leaves, grad_out)):
            assert result.detach().cpu().isfinite().all(), call


def sum_sinks(device: str) -> None:
    """Gradients of sinks: rows read 16 bytes at a time and by element, heads before rows and behind them, packed."""
    for dtype, dim, heads, is_packed in itertools.product(DTYPES, (40, 64, 33, 256), (3, 8), (False, True)):
        shape = (131, heads, dim) if is_packed else (2, heads, 67, dim)
        grad_out, out = torch.randn(2, *shape).to(device, dtype)
        lse, sinks = (3 + torch.rand(shape[:-1])).to(device), torch.randn(heads).to(device)
        tokens = torch.tensor(100, dtype=torch.int32).to(device) if is_packed else None
        found = sink_scores.gradient(grad_out, out, lse, sinks, tokens)
        assert found.cpu().isfinite().all(), (dtype, dim, heads, is_packed)


def read_beyond_a_tensor() -> None:
    """Gives a kernel less memory than it reads."""
    q, k, v = (torch.zeros(1, 1, 64, 64, device="cuda") for _ in range(3))
    bound, _ = bind(Spec.of(KernelArguments(q, k, v)), 0, 1.0)
    bound([torch.zeros(8, device="cuda"), k, v])
    torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1] == "wrong":
        read_beyond_a_tensor()
    else:
        part, parts = map(int, sys.argv[1].split("/"))
        torch.manual_seed(part)
        for number, one in enumerate(calls()):
            if number % parts == part:
                run(one, random.Random(number), "cuda")
        if part == 0:
            sum_sinks("cuda")
        time.sleep(1)  # an autograd thread that still frees what it holds as the interpreter ends may abort the process
        print("all calls were made")
