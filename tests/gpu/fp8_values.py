"""Shared by the FP8 tests: fresh tensors and scales, poisoned memory, float64, and the emulation's error."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from float64_reference import attention, seen_keys
from torch import Tensor

from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.fp8 import reference
from cudnn_sdpa.attention.fp8.arguments import (
    Fp8Arguments,
    Fp8BackwardArguments,
    Fp8BackwardScales,
    Fp8Gradients,
    Fp8Output,
    Fp8Scales,
)
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward

DEVICE = "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: Relative error in the Frobenius norm of a tensor rounded once, for values spread evenly over an octave.
ROUNDING = {E4M3: 0.0265, E5M2: 0.053, torch.bfloat16: 1.7e-3, torch.float16: 2.1e-4}

#: Memory orders; every stride is a multiple of 16 elements.
LAYOUTS = {
    "bhsd": lambda b, h, s, d: torch.empty(b, h, s, d, dtype=torch.uint8),
    "bshd": lambda b, h, s, d: torch.empty(b, s, h, d, dtype=torch.uint8).transpose(1, 2),
    "sbhd": lambda b, h, s, d: torch.empty(s, b, h, d, dtype=torch.uint8).permute(1, 2, 0, 3),
    "hbsd": lambda b, h, s, d: torch.empty(h, b, s, d, dtype=torch.uint8).transpose(0, 1),
    "packed": lambda b, h, s, d: torch.empty(b, s, 3, h, d, dtype=torch.uint8)[:, :, 1].transpose(1, 2),
    "padded": lambda b, h, s, d: torch.empty(b, h + 1, s + 3, d + 16, dtype=torch.uint8)[:, :h, 3:, :d],
    "every second": lambda b, h, s, d: torch.empty(b, 2 * h, 2 * s, d, dtype=torch.uint8)[:, ::2, 1::2],
}


class Problem(NamedTuple):
    """Queries, keys and values in FP8 with the scales of a forward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: Fp8Scales


def number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32, device=DEVICE)


def drawn(low: float, high: float) -> float:
    """A value that is no power of two, so that a misplaced scale changes the rounding."""
    return low * (high / low) ** float(torch.rand(())) * 1.0009765625


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def empty(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    like = LAYOUTS[layout](*shape)
    memory = torch.zeros(like.untyped_storage().nbytes(), dtype=torch.uint8, device=DEVICE).view(dtype)
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())


def fp8_of(shape: tuple[int, ...], scale: float, *, dtype: torch.dtype = E4M3, layout: str = "bshd") -> Tensor:
    """Normal random values, quantized with a scale."""
    x = torch.randn(shape, device=DEVICE) * scale
    limit = torch.finfo(dtype).max
    return empty(layout, shape, dtype).copy_(x.clamp(-limit, limit).to(dtype))


def problem(
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (200, 333),
    dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = E4M3,
    layout: str = "bshd",
    **changes: float,
) -> Problem:
    """Tensors and scales. No scale is 1, and those of different tensors differ."""
    of_q, of_k, of_v = drawn(15, 40), drawn(45, 80), drawn(6, 14)
    of_s = drawn(torch.finfo(dtype).max / 16, torch.finfo(dtype).max / 1.1)
    q = fp8_of((batch, heads[0], sizes[0], dims[0]), of_q, dtype=dtype, layout=layout)
    k = fp8_of((batch, heads[1], sizes[1], dims[0]), of_k, dtype=dtype, layout=layout)
    v = fp8_of((batch, heads[1], sizes[1], dims[1]), of_v, dtype=dtype, layout=layout)
    made = {
        "descale_q": 1 / of_q,
        "descale_k": 1 / of_k,
        "descale_v": 1 / of_v,
        "descale_s": 1 / of_s,
        "scale_s": of_s,
        "scale_o": drawn(50, 90),
    }
    return Problem(q, k, v, Fp8Scales(*(number({**made, **changes}[name]) for name in Fp8Scales._fields)))


def backward_scales(of: Problem, *, descale_do: float, **changes: float) -> Fp8BackwardScales:
    """The scales of the backward pass of a problem."""
    of_dp = drawn(100, 300)
    made = {
        **{name: float(value) for name, value in of.scales._asdict().items() if name != "scale_o"},
        "descale_o": 1 / float(of.scales.scale_o),
        "descale_do": descale_do,
        "descale_dp": 1 / of_dp,
        "scale_dp": of_dp,
        "scale_dq": drawn(20, 45),
        "scale_dk": drawn(10, 19),
        "scale_dv": drawn(5, 12),
    }
    return Fp8BackwardScales(*(number({**made, **changes}[name]) for name in Fp8BackwardScales._fields))


def poison(*sizes: int) -> None:
    """Fills the allocator's next blocks of these sizes with bytes that are NaN in every floating dtype."""
    if DEVICE == "cpu":
        return
    torch.cuda.synchronize()
    tensors = [torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE) for size in sizes for _ in range(3)]
    torch.cuda.synchronize()
    del tensors


def forward(of: Problem, **options: Any) -> Fp8Output:
    rows = of.q.shape[:3].numel()
    poison(rows * of.v.shape[3], 4 * rows, 4)
    return sdpa_fp8(*of, **options)


def within(q: Tensor, k: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options with lengths that do not exceed the tensors."""
    longest = {"seq_lens_q": q.shape[2], "seq_lens_kv": k.shape[2]}
    return {n: x.clamp(max=longest[n]) if n in longest and x is not None else x for n, x in options.items()}


def seen(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Which key each query sees, (B, 1, Sq, Skv)."""
    return seen_keys(q.shape[0], q.shape[2], k.shape[2], within(q, k, options), q.device)


def true_values(of: Problem) -> list[Tensor]:
    """The dequantized q, k and v, in float64."""
    descales = of.scales[:3]
    return [x.double() * descale.double() for x, descale in zip(of[:3], descales, strict=True)]


def exact(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and probabilities in float64."""
    made = attention(q, k, v, **within(q, k, options))
    return made.out, made.lse, made.weights


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where there is a NaN."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def flat(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call for the emulation."""
    left, right = options.get("window_size") or (-1, -1)
    others = {name: value for name, value in options.items() if name != "window_size"}
    return {**others, "window_left": left, "window_right": right}


def emulated(of: Problem, out_dtype: torch.dtype | None = None, **options: Any) -> Fp8Output:
    call = from_fields(Fp8Arguments, *of[:3], *of.scales, out_dtype=out_dtype, **flat(options))
    return reference.attention(call, exact=torch.float64)


def emulated_gradients(
    of: Problem, grad_out: Tensor, out: Tensor, lse: Tensor, scales: Fp8BackwardScales, **options: Any
) -> Fp8Gradients:
    call = from_fields(Fp8BackwardArguments, grad_out, *of[:3], out, lse, *scales, **flat(options))
    return reference.gradients(call, exact=torch.float64)


def backward(
    of: Problem, grad_dtype: torch.dtype = E5M2, *, changes: dict[str, float] | None = None, **options: Any
) -> tuple[Fp8Gradients, Tensor, Fp8Output, Fp8BackwardScales]:
    """`sdpa_fp8_backward` into poisoned memory: its results and its inputs."""
    made = forward(of, return_lse=True, **options)
    of_grad = drawn(10, 30) if grad_dtype == E4M3 else drawn(300, 900)
    grad_out = fp8_of((*of.q.shape[:3], of.v.shape[3]), of_grad, dtype=grad_dtype)
    scales = backward_scales(of, descale_do=1 / of_grad, **(changes or {}))
    poison(*(x.numel() for x in of[:3]), 4)
    assert made.lse is not None
    options.pop("out_dtype", None)
    found = sdpa_fp8_backward(grad_out, *of[:3], made.out, made.lse, scales, **options)
    return found, grad_out, made, scales


def true_gradients(of: Problem, grad_out: Tensor, scales: Fp8BackwardScales, **options: Any) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in true_values(of)]
    out, *_ = exact(*leaves, **options)
    return list(torch.autograd.grad(out, leaves, grad_out.double() * scales.descale_do.double()))
