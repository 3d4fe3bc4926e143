"""Kernels of attention and norms, compiled by the real NVRTC for absent GPUs: no warning, few spilled registers."""

from __future__ import annotations

import re

import generators
import pytest
import torch
from sample_modules import sample

from cudnn_sdpa.engine.explain import describer_of
from cudnn_sdpa.fused import own
from cudnn_sdpa.fused.norm_kernels import own_norm, own_norm_gradients
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels.arguments import Gradient, KernelArguments
from cudnn_sdpa.kernels.plans import Spec, attention_backward, attention_forward

pytestmark = pytest.mark.usefixtures("nvrtc")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def kernels_of(sm, dtype, dim, *, mode="fused", is_causal=True, mask=None, aligned=True):
    """The kernels of a call's forward and backward plans."""
    target = Target((("deviceVer", 10 * sm), ("multiProcessorCount", 100)), 91900, "1", "a GPU")
    shape = (1, 2, 256, dim if aligned else dim - 1)
    q, k, v, out = (torch.empty(shape, dtype=dtype, device="meta") for _ in range(4))
    call = KernelArguments(q, k, v, mask, mode, is_causal)
    statistics = torch.empty(*shape[:3], 2, device="meta")
    of = Gradient(out, out, statistics, call, (True, True, True, mask is not None and mask.is_floating_point()))
    forward = attention_forward.program(Spec.of(call).key(target, None))
    backward = attention_backward.program(Spec.of_gradient(of).key(target, None))
    return [call.kernel for call in (*forward.calls, *backward.calls)]


def check(kernel, sm, *, spills=0):
    """Compiles it; NVRTC's messages have what ptxas says of registers and nothing else."""
    assert kernel.shared <= {80: 163, 90: 227, 100: 227}.get(sm, 99) << 10
    code, log = kernel.compile_verbosely(sm, "--ptxas-options=-v")
    assert code[:4] == b"\x7fELF"
    others = [line for line in log.splitlines() if line and not line.startswith("ptxas")]
    assert others == []
    assert "warning" not in log.lower()
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    assert spilled <= spills, log


@pytest.mark.sample(1)
@pytest.mark.parametrize("sm", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_fused_kernels(sm, dtype, dim):
    for kernel in kernels_of(sm, dtype, dim):
        check(kernel, sm, spills=96)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [torch.bool, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_and_reading_by_element(dtype, mask):
    if mask not in (torch.bool, torch.float32, dtype):
        pytest.skip("masks are boolean, float32 or of q's dtype")
    for kernel in kernels_of(90, dtype, 64, mask=torch.empty(256, 256, dtype=mask, device="meta"), aligned=False):
        check(kernel, 90, spills=256)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["tiled", "naive"])
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_kernels_that_keep_all_scores(sm, mode):
    for kernel in kernels_of(sm, torch.float32, 64, mode=mode)[:3]:
        check(kernel, sm, spills=64)


@pytest.mark.slow
@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_large_head_dims(sm, dtype):
    compiled = kernels_of(sm, dtype, 200, mode="tiled", mask=torch.empty(256, 256, dtype=dtype, device="meta"))
    assert {kernel.path.name for kernel in compiled} == {"tiled.cu", "delta.cu", "tiled_backward.cu"}
    for kernel in compiled:
        check(kernel, sm, spills=128)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 2))
def test_generated_calls(first):
    """The plans that `explain` names of random calls, for the oldest and the newest GPUs."""
    for seed in range(first, first + 2):
        explained = generators.OPERATIONS["kernels.attention"].explained(generators.draw("kernels.attention", seed))
        if explained is None or explained[1][0].dtype == torch.float64:
            continue
        function, args, kwargs = explained
        described = describer_of(function)(*args, **kwargs)
        sm = (80, 100)[seed % 2]
        target = Target((("deviceVer", 10 * sm), ("multiProcessorCount", 100)), 91900, "1", "a GPU")
        for description in filter(None, (described, described.backward)):
            if not description.is_empty:
                for call in description.operation.program(description.key(target, None)).calls:
                    check(call.kernel, sm, spills=512)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sample_that_adds_a_kernel(sm, dtype):
    kernel = sample("add_a_kernel/row_softmax.py").kernel
    for name in ("row_softmax", "row_softmax_gradient"):
        check(kernel(name, dtype), sm)


@pytest.mark.sample(2)
@pytest.mark.parametrize("sm", [80, 90, 100])
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("shape", [(1, 4096), (64, 8192), (64, 1001), (131072, 128)])
def test_norms(sm, layer, shape):
    """With and without a weight and SiLU, of rows that fill their threads' units and others."""
    target = Target((("deviceVer", 10 * sm), ("multiProcessorCount", 132)), 91900, "1", "a GPU")
    x, weight = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (shape, shape[1:]))
    for has_weight, activation in ((True, None), (True, "silu"), (False, None)):
        weights = {"weight": weight, "bias": weight} if layer else {"weight": weight}
        weights = weights if has_weight else {}
        options = {"layer": layer, "activation": activation, "trains": True}
        for operation, given in ((own_norm, {}), (own_norm_gradients, {"grad": x})):
            results = [x, *weights.values()] if given else [x]
            inputs = {**given, "x": x, **weights, "scale": 1.0}
            key = own.key_of(operation, inputs, results, options, target=target, device=None)
            for call in operation.program(key).calls:
                check(call.kernel, sm, spills=64)
