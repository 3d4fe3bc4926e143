"""`benchmarks fp8`: attention in FP8 with ready scales, and `Fp8Attention`, compared with attention in bfloat16.

`rotations` compares with float64, the other parts with bfloat16, before they time.

Times except those of `host` are device times; the candidates of a row are interleaved, because the GPU's clock changes
with its load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import fused, fused_peers
from benchmarks.tools import cases, peers
from benchmarks.tools.candidates import NOTHING, Timed
from benchmarks.tools.cases import Shape
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, host_times
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Gradients, Fp8Scales
from cudnn_sdpa.attention.fp8.reference import quantized
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.fused.rotary.rope import rope
from cudnn_sdpa.nn.fp8 import Fp8Attention
from cudnn_sdpa.nn.rotary import RotaryEmbedding, Rotations

SHAPES = (
    Shape(batch=4, heads_q=32, heads_kv=8, length=4096, dim=128, causal=True),
    Shape(batch=2, heads_q=32, heads_kv=8, length=8192, dim=128, causal=False),
    Shape(batch=1, heads_q=32, heads_kv=8, length=16384, dim=128, causal=True),
)
SMALL = Shape(batch=1, heads_q=8, heads_kv=8, length=128, dim=128, causal=False)
REPEATS = 40

FP8, BF16, FLASH = "sdpa_fp8", "sdpa, bfloat16", "pytorch flash, bfloat16"
LAYER = "Fp8Attention"
ROTATING, SEPARATE = f"{LAYER}(rope=)", f"rope, {LAYER}"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: The largest relative error, in the norm, of results in FP8 against those in bfloat16.
TOLERANCE = {E4M3: 0.08, E5M2: 0.15}
LAYER_TOLERANCE = 0.1


class Tensors:
    """One attention in bfloat16 and in FP8, quantized with the scales for each tensor's amax.

    Attributes:
        qkv: q, k and v in bfloat16, which require grad.
        fp8_qkv: The same in E4M3.
        grad_out: The gradient of the output in bfloat16.
        fp8_grad_out: The same in E5M2.
        scales: The scales of the forward pass.
        backward_scales: The scales of the backward pass.
    """

    def __init__(
        self, shape: Shape, qkv: tuple[Tensor, Tensor, Tensor] | None = None, grad_out: Tensor | None = None
    ) -> None:
        self.causal = shape.causal
        self.qkv = shape.tensors(requires_grad=True) if qkv is None else qkv
        self.grad_out = torch.randn_like(self.qkv[0]) if grad_out is None else grad_out
        scale_q, scale_k, scale_v = (448 / x.detach().abs().amax().float().view(1) for x in self.qkv)
        q, k, v = (
            quantized(x.detach().float(), scale, E4M3)
            for x, scale in zip(self.qkv, (scale_q, scale_k, scale_v), strict=True)
        )
        self.fp8_qkv = (q, k, v)
        scale_do = 57344 / self.grad_out.abs().amax().float().view(1)
        self.fp8_grad_out = quantized(self.grad_out.float(), scale_do, E5M2)
        descale_q, descale_k, descale_v = 1 / scale_q, 1 / scale_k, 1 / scale_v
        scale_s = torch.full_like(scale_do, 448.0)
        self.scales = Fp8Scales(
            descale_q=descale_q,
            descale_k=descale_k,
            descale_v=descale_v,
            descale_s=1 / scale_s,
            scale_s=scale_s,
            scale_o=scale_v,
        )
        scale_dp, scale_gradients = torch.full_like(scale_do, 4096.0), torch.full_like(scale_do, 2048.0)
        self.backward_scales = Fp8BackwardScales(
            descale_q=descale_q,
            descale_k=descale_k,
            descale_v=descale_v,
            descale_o=1 / self.scales.scale_o,
            descale_do=1 / scale_do,
            descale_s=1 / scale_s,
            descale_dp=1 / scale_dp,
            scale_s=scale_s,
            scale_dq=scale_gradients,
            scale_dk=scale_gradients,
            scale_dv=scale_gradients,
            scale_dp=scale_dp,
        )

    def forward(self) -> Tensor:
        """The output in FP8."""
        return sdpa_fp8(*self.fp8_qkv, self.scales, is_causal=self.causal).out

    def forward_bf16(self) -> Tensor:
        """The output in bfloat16."""
        out = sdpa(*self.qkv, is_causal=self.causal)
        assert isinstance(out, Tensor)
        return out

    def both_bf16(self) -> None:
        """Output and gradients in bfloat16, under autograd."""
        torch.autograd.grad(self.forward_bf16(), self.qkv, self.grad_out)

    def both(self) -> tuple[Tensor, ...]:
        """The output and the gradients in FP8."""
        result = sdpa_fp8(*self.fp8_qkv, self.scales, is_causal=self.causal, return_lse=True)
        assert result.lse is not None
        gradients = self.backward(result.out, result.lse)
        return result.out, gradients.dq, gradients.dk, gradients.dv

    def backward(self, out: Tensor, lse: Tensor) -> Fp8Gradients:
        """The gradients in FP8, by the output and the log-sum-exp of a forward pass."""
        q, k, v = self.fp8_qkv
        return sdpa_fp8_backward(
            self.fp8_grad_out, q, k, v, out=out, lse=lse, scales=self.backward_scales, is_causal=self.causal
        )

    def dequantized(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The output, or the output and the gradients, as float32."""
        backward = self.backward_scales
        scales = (self.scales.scale_o, backward.scale_dq, backward.scale_dk, backward.scale_dv)
        return [result.float() / scale for result, scale in zip(results, scales, strict=False)]

    def check(self) -> None:
        """Stops the benchmark if results in FP8 differ too much from those in bfloat16."""
        out = self.forward_bf16()
        expected = (out.detach(), *torch.autograd.grad(out, self.qkv, self.grad_out))
        results = self.both()
        found = zip(("out", "dq", "dk", "dv"), results, self.dequantized(results), expected, strict=True)
        for name, result, actual, exact in found:
            error = cases.relative_error(actual, exact)
            if not error < TOLERANCE[result.dtype]:
                raise RuntimeError(f"{name} in FP8 differs from bfloat16's by {error:.3g}; nothing was timed")


def forward() -> list[Row]:
    """Device time of the forward pass."""
    rows = []
    for shape in track(SHAPES, "forward", transient=True):
        tensors = Tensors(shape)
        tensors.check()
        calls: dict[str, Call] = {FP8: tensors.forward, BF16: tensors.forward_bf16}
        theirs = peers.candidate("pytorch flash", *tensors.qkv, is_causal=shape.causal)
        if theirs is not None:
            calls[FLASH] = theirs.attend
        with torch.no_grad():
            rows.append(_row(shape, device_times(calls, repeats=REPEATS), shape.flops()))
    return rows


def training() -> list[Row]:
    """Device time of forward and backward pass together; the passes in bfloat16 run under autograd."""
    rows = []
    for shape in track(SHAPES, "training", transient=True):
        tensors = Tensors(shape)
        tensors.check()
        calls: dict[str, Call] = {FP8: tensors.both, BF16: tensors.both_bf16}
        theirs = peers.candidate("pytorch flash", *tensors.qkv, is_causal=shape.causal)
        if theirs is not None:
            calls[FLASH] = partial(theirs.step, tensors.grad_out)
        flops = shape.flops() + shape.flops(backward=True)
        rows.append(_row(shape, device_times(calls, repeats=REPEATS), flops))
    return rows


def _row(shape: Shape, times: dict[str, float], flops: float) -> Row:
    row: Row = {"B, Hq, Hkv, S, D": shape.label}
    row |= {f"{name} µs": times.get(name, "–") for name in (FP8, BF16, FLASH)}
    row |= {f"{name} TFLOP/s": flops / times[name] / 1e6 for name in (FP8, BF16)}
    row["bfloat16 / FP8"] = times[BF16] / times[FP8]
    row["flash / FP8"] = times[FLASH] / times[FP8] if FLASH in times else "–"
    return row


def host() -> list[Row]:
    """CPU time of warm calls of a tiny attention."""
    tensors = Tensors(SMALL)
    result = sdpa_fp8(*tensors.fp8_qkv, tensors.scales, return_lse=True)
    assert result.lse is not None
    out, lse = result.out, result.lse
    calls: dict[str, Call] = {
        BF16: tensors.forward_bf16,
        FP8: tensors.forward,
        "sdpa_fp8, return_lse": lambda: sdpa_fp8(*tensors.fp8_qkv, tensors.scales, return_lse=True),
        "sdpa_fp8_backward": lambda: tensors.backward(out, lse),
    }
    with torch.no_grad():
        times = host_times(calls, per_round=300, rounds=10)
    return [{"call": name, "µs": time, "× bfloat16": time / times[BF16]} for name, time in times.items()]


def layer() -> list[Row]:
    """The time that quantization and scaling in `Fp8Attention` add to both passes and to the forward pass."""
    rows = []
    for shape in track(SHAPES, "Fp8Attention", transient=True):
        tensors = Tensors(shape)
        layer = Fp8Attention(is_causal=shape.causal).to(cases.DEVICE)

        def both(layer: Fp8Attention = layer, tensors: Tensors = tensors) -> None:
            torch.autograd.grad(layer(*tensors.qkv), tensors.qkv, tensors.grad_out)

        for _ in range(layer.scaling.calibration + 1):  # after these the scales follow the amax history
            both()
        cases.check_agreement(
            ["out"], [layer(*tensors.qkv)], [tensors.forward_bf16()], "bfloat16's", tolerance=LAYER_TOLERANCE
        )
        rows.append(_overhead(shape, "both", {LAYER: both, FP8: tensors.both, BF16: tensors.both_bf16}))
        layer.eval()
        with torch.no_grad():
            calls: dict[str, Call] = {LAYER: partial(layer, *tensors.qkv), FP8: tensors.forward}
            rows.append(_overhead(shape, "forward", {**calls, BF16: tensors.forward_bf16}))
    return rows


#: Queries that are compared with float64, about as many, of each head.
COMPARED = 64


def rotations() -> list[Row]:
    """What `Fp8Attention` adds to `sdpa_fp8` without gradients: alone, with rotations in its kernel, and behind it."""
    rows = []
    for shape in track(SHAPES, "rotations", transient=True):
        tensors = Tensors(shape)
        tensors.check()
        embedding = RotaryEmbedding(shape.dim).to(cases.DEVICE)
        angles = embedding(torch.arange(shape.length, device=cases.DEVICE))
        rows += [_rotated(shape, tensors, embedding, angles, normed=normed) for normed in (False, True)]
    return rows


def _rotated(shape: Shape, tensors: Tensors, embedding: RotaryEmbedding, angles: Rotations, *, normed: bool) -> Row:
    q, k, v = tensors.qkv
    rotating = Fp8Attention(is_causal=shape.causal, rope=embedding, qk_norm=fused.EPS if normed else None)
    rotating.to(cases.DEVICE, q.dtype)
    cos, sin = angles
    norms, weights = [x for x in (rotating.q_norm, rotating.k_norm) if x is not None], []
    for norm in norms:
        assert norm.weight is not None
        weights.append(norm.weight.detach().uniform_(0.7, 1.3))
    named: dict[str, Any] = dict(zip(("q_weight", "k_weight"), weights, strict=False))
    alone, behind = (Fp8Attention(is_causal=shape.causal).to(cases.DEVICE) for _ in range(2))

    def separate() -> Tensor:
        of_q, of_k = rope(q, k, cos, sin, eps=fused.EPS, **named)
        out: Tensor = behind(of_q, of_k, v)
        return out

    with torch.no_grad():
        both = torch.cat((q, k), 1).transpose(1, 2).double()
        sizes = [shape.heads_q, shape.heads_kv]
        of_q, of_k = fused_peers.pytorch_rope(both, *(x.double() for x in weights), cos=cos, sin=sin, sizes=sizes)
        asked = torch.arange(0, shape.length, max(1, shape.length // COMPARED), device=cases.DEVICE)
        exact = _exact(q.double(), k.double(), v.double(), asked, causal=shape.causal)
        exact_rotated = _exact(of_q, of_k, v.double(), asked, causal=shape.causal)
    layers: dict[str, tuple[Fp8Attention, Callable[[], Tensor], Tensor]] = {
        LAYER: (alone, partial(alone, q, k, v), exact),
        ROTATING: (rotating, partial(rotating, q, k, v, rotations=angles), exact_rotated),
        SEPARATE: (behind, separate, exact_rotated),
    }
    timed = Timed()

    def add(name: str, call: Callable[[], Tensor], expected: Tensor) -> None:
        def compared(found: Sequence[Tensor]) -> Sequence[Tensor]:
            (out,) = tensors.dequantized(found) if name == FP8 else found
            return (out[:, :, asked],)

        timed.add(name, lambda: (call(),), compared, [expected], LAYER_TOLERANCE)

    add(FP8, tensors.forward, exact)
    for name, (layer, call, expected) in layers.items():
        for _ in range(layer.scaling.calibration + 1):
            torch.autograd.grad(call(), tensors.qkv, tensors.grad_out)
        layer.eval()
        if not layer.scaling.knows_forward:
            raise RuntimeError(f"{name} has no scales of earlier steps after {layer.scaling.calibration + 1} of them")
        with torch.no_grad():
            add(name, call, expected)
    with torch.no_grad():
        times = timed.measure()
    row: Row = {"B, Hq, Hkv, S, D": shape.label, "rotation": "norms and rope" if normed else "rope"}
    row |= {f"{name} µs": times.get(name, NOTHING) for name in (FP8, *layers)}
    for name in layers:
        row[f"{name}, over sdpa_fp8 µs"] = times[name] - times[FP8] if {name, FP8} <= times.keys() else NOTHING
    return {**row, "why not": timed.why_not}


def _exact(q: Tensor, k: Tensor, v: Tensor, asked: Tensor, *, causal: bool) -> Tensor:
    """The output of some queries."""
    mask = asked.unsqueeze(1) >= torch.arange(k.shape[2], device=asked.device) if causal else None
    return scaled_dot_product_attention(q[:, :, asked], k, v, attn_mask=mask, enable_gqa=True)


def _overhead(shape: Shape, passes: str, calls: dict[str, Call]) -> Row:
    times = device_times(calls, repeats=REPEATS)
    return {
        "B, Hq, Hkv, S, D": shape.label,
        "passes": passes,
        **{f"{name} µs": time for name, time in times.items()},
        "over sdpa_fp8": times[LAYER] / times[FP8] - 1,
        "bfloat16 / Fp8Attention": times[BF16] / times[LAYER],
    }
