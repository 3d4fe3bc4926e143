"""Shared by the GPU tests: fresh tensors, poisoned memory, and attention in float64."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from float64_reference import attend as exact
from torch import Tensor

import cudnn_sdpa

T = TypeVar("T")

#: Largest relative error ‖x − ref‖ / ‖ref‖ of half precision.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}

LAYOUTS = {
    "bhsd": torch.randn,
    "bshd": lambda b, h, s, d, **kw: torch.randn(b, s, h, d, **kw).transpose(1, 2),
    "sbhd": lambda b, h, s, d, **kw: torch.randn(s, b, h, d, **kw).permute(1, 2, 0, 3),
    "hbsd": lambda b, h, s, d, **kw: torch.randn(h, b, s, d, **kw).transpose(0, 1),
    "packed": lambda b, h, s, d, **kw: torch.randn(b, s, 3, h, d, **kw)[:, :, 1].transpose(1, 2),
    "padded": lambda b, h, s, d, **kw: torch.randn(b, h + 1, s + 3, d + 8, **kw)[:, :h, 3:, :d],
    "every second": lambda b, h, s, d, **kw: torch.randn(b, 2 * h, 2 * s, d, **kw)[:, ::2, 1::2],
}


def served_by(call: Callable[[], T]) -> tuple[T, set[str | None]]:
    """The result of a call, and the providers of the plans that it used; None is cuDNN."""
    with cudnn_sdpa.plan_cache.watch_uses() as keys:
        found = call()
    return found, {key.provider for key in keys}


def make(layout: str, b: int, h: int, s: int, d: int, dtype: torch.dtype, device: str = "cuda") -> Tensor:
    return LAYOUTS[layout](b, h, s, d, dtype=dtype, device=device)


def problem(device: str = "cuda", sq: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped heads in bfloat16, and fewer queries than keys."""
    q = make("bshd", 2, 4, sq, 64, torch.bfloat16, device)
    k, v = (make("bshd", 2, 2, 96, 64, torch.bfloat16, device) for _ in range(2))
    return q, k, v


def captured(step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A CUDA graph of a step, and its results, which replays write; steps on another stream come first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def poison(*shapes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Fills the allocator's next blocks of these shapes with NaN."""
    torch.cuda.synchronize()
    tensors = [torch.full(shape, math.nan, dtype=dtype, device="cuda") for shape in shapes for _ in range(3)]
    torch.cuda.synchronize()
    del tensors


def is_served_as_recorded(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> bool:
    """Whether a call of these operands, by name, is launched as the one plan that is held was recorded."""
    (plan,) = cudnn_sdpa.plan_cache.plans()
    values = {name: array("f", [x]) for name, x in numbers.items() if isinstance(x, float)}
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    addresses |= {name: x.buffer_info()[0] for name, x in values.items()}
    native: Any = plan.recorder.native  # type: ignore[attr-defined]
    operands = (*plan.key.inputs, *plan.key.outputs)
    return bool(native.is_serving and native.serves([addresses[each.name] for each in operands]))


@contextlib.contextmanager
def nothing_synchronizes() -> Iterator[None]:
    """Raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where there is a NaN."""
    difference = actual.double() - expected
    return float(difference.norm() / expected.norm().clamp_min(1e-12))


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative error of finite results in the Frobenius norm."""
    assert found.isfinite().all()
    return error(found.detach(), wanted.detach().double())


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Equal up to the last bit: cuDNN's kernels for single queries sum in any order."""
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5)


def check(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Runs `sdpa` into poisoned memory, with and without LSE, and compares with float64."""
    shape = (*q.shape[:3], v.shape[3])
    expected, expected_lse = exact(q, k, v, **options)
    poison(shape, q.shape[:3], dtype=torch.float32)
    poison(shape, dtype=q.dtype)
    plain = cudnn_sdpa.sdpa(q, k, v, **options)
    poison(shape, dtype=q.dtype)
    poison(q.shape[:3], dtype=torch.float32)
    out, lse = cudnn_sdpa.sdpa(q, k, v, return_lse=True, **options)
    for result in (plain, out):
        assert result.shape == shape
        assert result.dtype == q.dtype
        assert error(result, expected) < TOLERANCE[q.dtype]
        assert (result[expected == 0] == 0).all(), "rows that see nothing must be zeros"
    assert lse.dtype == torch.float32
    masked_rows = expected_lse.isneginf()
    assert (lse[masked_rows] == -math.inf).all()
    assert error(lse[~masked_rows], expected_lse[~masked_rows]) < 1e-5
    return plain
