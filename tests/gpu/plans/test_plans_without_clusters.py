"""Convolutions and norms planned without a GPU, so without clusters: right, or left to the GPU."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from attention_checks import poison

from cudnn_sdpa import (
    compile_plans,
    conv2d,
    explain,
    no_plan_builds,
    plan_cache,
    record_plans,
    rms_norm,
    use_plan_store,
)
from cudnn_sdpa.fused.conv_graphs import channels_last
from cudnn_sdpa.graph.target import live_properties


def convolution(batch, channels, size, filters, extent, activation, with_bias):
    x = channels_last(torch.randn(batch, channels, size, size, device="cuda", dtype=torch.bfloat16))
    weight = torch.randn(filters, channels, extent, extent, device="cuda") * (channels * extent**2) ** -0.5
    bias = torch.randn(filters, device="cuda", dtype=torch.bfloat16) if with_bias else None
    weight, padding = channels_last(weight.bfloat16()), extent // 2
    exact = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), padding=padding)
    wanted = {None: exact, "relu": F.relu(exact), "silu": F.silu(exact)}[activation]
    call = {"padding": padding, "activation": activation}
    return (lambda: conv2d(x, weight, bias, **call)), wanted, (conv2d, (x, weight, bias), call)


def norm(rows, size, fused):
    x = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    more = {"activation": "silu"} if fused else {}
    wanted = F.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    return (lambda: rms_norm(x, weight, **more)), F.silu(wanted) if fused else wanted, (rms_norm, (x, weight), more)


CASES = {
    "large, plain": (convolution, 8, 512, 64, 512, 3, None, False),
    "large, bias": (convolution, 8, 512, 64, 512, 3, None, True),
    "large, bias, SiLU": (convolution, 8, 512, 64, 512, 3, "silu", True),
    "320, plain": (convolution, 4, 320, 96, 320, 3, None, False),
    "320, bias, ReLU": (convolution, 4, 320, 96, 320, 3, "relu", True),
    "1x1": (convolution, 32, 64, 112, 256, 1, None, False),
    "small": (convolution, 2, 64, 20, 96, 3, "silu", True),
    "norm": (norm, 4096, 4096, False),
    "norm, large": (norm, 16384, 8192, False),
    "norm, SiLU": (norm, 4096, 4096, True),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name, tmp_path, cudnn_provider):  # noqa: ARG001
    make, *sizes = CASES[name]
    call, wanted, (function, tensors, options) = make(*sizes)
    with record_plans() as manifest:
        call()
    plan_cache.clear()
    (tmp_path / "gpu.json").write_text(json.dumps(live_properties(0)))
    report = compile_plans(manifest, str(tmp_path / "gpu.json"), tmp_path / "plans", workers=1)
    here = [None if tensor is None else tensor.cpu() for tensor in tensors]
    assert explain(function, *here, **options).supported
    if report.failed:
        assert (function, report.built) == (conv2d, 0)
        assert options["activation"] in (None, "relu")  # the others have kernels without clusters
        assert "clusters" in next(iter(report.failed.values()))
        return
    with use_plan_store(tmp_path / "plans"), no_plan_builds():
        for _ in range(3):
            poison(tuple(wanted.shape), dtype=torch.bfloat16)
            out = call()
            assert out.isfinite().all()
            assert (out.double() - wanted).norm() / wanted.norm() < 1e-2
    assert [plan.loaded for plan in plan_cache.plans()] == [True]
