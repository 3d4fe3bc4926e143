"""`bench fp8`: attention in FP8 beside the same in bfloat16, with every scale ready, and the high-level layer.

All times are taken on the GPU, the candidates of a row interleaved: the chip's clock moves with its load.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.reference import quantized
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.bench.tools import cases, peers
from cudnn_sdpa.bench.tools.cases import Shape
from cudnn_sdpa.bench.tools.timing import Call, device_times, host_times
from cudnn_sdpa.nn.fp8 import Fp8Attention

SHAPES = (
    Shape(batch=4, heads_q=32, heads_kv=8, length=4096, dim=128, causal=True),
    Shape(batch=2, heads_q=32, heads_kv=8, length=8192, dim=128, causal=False),
    Shape(batch=1, heads_q=32, heads_kv=8, length=16384, dim=128, causal=True),
)
SMALL = Shape(batch=1, heads_q=8, heads_kv=8, length=128, dim=128, causal=False)
REPEATS = 40

FP8, HALF, FLASH = "sdpa_fp8", "sdpa, bfloat16", "pytorch flash, bfloat16"
EASY = "Fp8Attention"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: Relative error, in the norm, up to which results in FP8 are those in bfloat16.
TOLERANCE = {E4M3: 0.08, E5M2: 0.15}


class Problem:
    """One attention in bfloat16 and in FP8, quantized with the scales that its amax asks for.

    Attributes:
        half: Queries, keys and values in bfloat16, which require grad.
        full: The same in E4M3.
        grad_out: The gradient of the output in bfloat16.
        full_grad: The same in E5M2.
        scales: Of the forward pass.
        backward_scales: Of the backward pass.
    """

    def __init__(self, shape: Shape) -> None:
        self.causal = shape.causal
        self.half = shape.tensors(requires_grad=True)
        self.grad_out = torch.randn_like(self.half[0])
        of_inputs = [448 / x.detach().abs().amax().float().view(1) for x in self.half]
        q, k, v = (quantized(x.detach().float(), scale, E4M3) for x, scale in zip(self.half, of_inputs, strict=True))
        self.full = (q, k, v)
        of_grad = 57344 / self.grad_out.abs().amax().float().view(1)
        self.full_grad = quantized(self.grad_out.float(), of_grad, E5M2)
        descale_q, descale_k, descale_v = (1 / scale for scale in of_inputs)
        of_s = torch.full_like(of_grad, 448.0)
        self.scales = Fp8Scales(descale_q, descale_k, descale_v, 1 / of_s, of_s, of_inputs[2])
        of_dp, of_gradients = torch.full_like(of_grad, 4096.0), torch.full_like(of_grad, 2048.0)
        self.backward_scales = Fp8BackwardScales(
            descale_q=descale_q,
            descale_k=descale_k,
            descale_v=descale_v,
            descale_o=1 / self.scales.scale_o,
            descale_do=1 / of_grad,
            descale_s=1 / of_s,
            descale_dp=1 / of_dp,
            scale_s=of_s,
            scale_dq=of_gradients,
            scale_dk=of_gradients,
            scale_dv=of_gradients,
            scale_dp=of_dp,
        )

    def forward(self) -> Tensor:
        """The output in FP8."""
        return sdpa_fp8(*self.full, self.scales, is_causal=self.causal).out

    def forward_half(self) -> Tensor:
        """The output in bfloat16."""
        out = sdpa(*self.half, is_causal=self.causal)
        assert isinstance(out, Tensor)
        return out

    def both_half(self) -> None:
        """Output and gradients in bfloat16, under autograd."""
        torch.autograd.grad(self.forward_half(), self.half, self.grad_out)

    def both(self) -> tuple[Tensor, ...]:
        """The output and the gradients in FP8."""
        made = sdpa_fp8(*self.full, self.scales, is_causal=self.causal, return_lse=True)
        assert made.lse is not None
        found = sdpa_fp8_backward(
            self.full_grad, *self.full, made.out, made.lse, self.backward_scales, is_causal=self.causal
        )
        return made.out, found.dq, found.dk, found.dv

    def check(self) -> None:
        """Stops the benchmark if results in FP8 are not those in bfloat16."""
        out = self.forward_half()
        wanted = (out.detach(), *torch.autograd.grad(out, self.half, self.grad_out))
        back = self.backward_scales
        scales = (self.scales.scale_o, back.scale_dq, back.scale_dk, back.scale_dv)
        for name, found, exact, scale in zip(("out", "dq", "dk", "dv"), self.both(), wanted, scales, strict=True):
            error = cases.relative_error(found.float() / scale, exact)
            if not error < TOLERANCE[found.dtype]:
                raise RuntimeError(f"{name} in FP8 differs from bfloat16's by {error:.3g}; nothing was timed")


def forward() -> list[dict[str, Any]]:
    """Device time of the forward pass."""
    rows = []
    for shape in track(SHAPES, "forward", transient=True):
        problem = Problem(shape)
        problem.check()
        calls: dict[str, Call] = {FP8: problem.forward, HALF: problem.forward_half}
        theirs = peers.candidate("pytorch flash", *problem.half, is_causal=shape.causal)
        if theirs is not None:
            calls[FLASH] = theirs.attend
        with torch.no_grad():
            rows.append(_row(shape, device_times(calls, repeats=REPEATS), shape.flops()))
    return rows


def training() -> list[dict[str, Any]]:
    """Device time of the forward and the backward pass together; that of bfloat16 runs under autograd."""
    rows = []
    for shape in track(SHAPES, "training", transient=True):
        problem = Problem(shape)
        problem.check()
        calls: dict[str, Call] = {FP8: problem.both, HALF: problem.both_half}
        theirs = peers.candidate("pytorch flash", *problem.half, is_causal=shape.causal)
        if theirs is not None:
            calls[FLASH] = partial(theirs.step, problem.grad_out)
        flops = shape.flops() + shape.flops(backward=True)
        rows.append(_row(shape, device_times(calls, repeats=REPEATS), flops))
    return rows


def _row(shape: Shape, times: dict[str, float], flops: float) -> dict[str, Any]:
    row: dict[str, Any] = {"B, Hq, Hkv, S, D": shape.label}
    row |= {f"{name} µs": times.get(name, "–") for name in (FP8, HALF, FLASH)}
    row |= {f"{name} TFLOP/s": flops / times[name] / 1e6 for name in (FP8, HALF)}
    row["bfloat16 / FP8"] = times[HALF] / times[FP8]
    row["flash / FP8"] = times[FLASH] / times[FP8] if FLASH in times else "–"
    return row


def host() -> list[dict[str, Any]]:
    """Host time of warm calls of a tiny attention."""
    problem = Problem(SMALL)
    made = sdpa_fp8(*problem.full, problem.scales, return_lse=True)
    assert made.lse is not None
    rest = (*problem.full, made.out, made.lse, problem.backward_scales)
    calls: dict[str, Call] = {
        HALF: problem.forward_half,
        FP8: problem.forward,
        "sdpa_fp8, return_lse": lambda: sdpa_fp8(*problem.full, problem.scales, return_lse=True),
        "sdpa_fp8_backward": lambda: sdpa_fp8_backward(problem.full_grad, *rest),
    }
    with torch.no_grad():
        times = host_times(calls, per_round=300, rounds=10)
    return [{"call": name, "µs": time, "× bfloat16": time / times[HALF]} for name, time in times.items()]


def easy() -> list[dict[str, Any]]:
    """What quantization and scaling by `Fp8Attention` add to the passes above."""
    rows = []
    for shape in track(SHAPES, "Fp8Attention", transient=True):
        problem = Problem(shape)
        layer = Fp8Attention(is_causal=shape.causal).to(cases.DEVICE)

        def both(layer: Fp8Attention = layer, problem: Problem = problem) -> None:
            torch.autograd.grad(layer(*problem.half), problem.half, problem.grad_out)

        for _ in range(layer.scaling.calibration + 1):  # from then on it goes by its history
            both()
        cases.check_agreement(["out"], [layer(*problem.half)], [problem.forward_half()], "bfloat16's", 0.1)
        rows.append(_overhead(shape, "both", {EASY: both, FP8: problem.both, HALF: problem.both_half}))
        layer.eval()
        with torch.no_grad():
            calls: dict[str, Call] = {EASY: partial(layer, *problem.half), FP8: problem.forward}
            rows.append(_overhead(shape, "forward", {**calls, HALF: problem.forward_half}))
    return rows


def _overhead(shape: Shape, passes: str, calls: dict[str, Call]) -> dict[str, Any]:
    times = device_times(calls, repeats=REPEATS)
    return {
        "B, Hq, Hkv, S, D": shape.label,
        "passes": passes,
        **{f"{name} µs": time for name, time in times.items()},
        "over sdpa_fp8": times[EASY] / times[FP8] - 1,
        "bfloat16 / Fp8Attention": times[HALF] / times[EASY],
    }
