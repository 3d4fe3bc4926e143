"""Shapes and their floating-point operations, random tensors, a large copy, and a check that two results agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"

#: Bytes of a copy that is large enough to run at the GPU's bandwidth.
COPIED = 1 << 30

#: Relative error, in the norm, up to which two bfloat16 results are the same.
TOLERANCE = 2e-2


class Shape(NamedTuple):
    """A self-attention: B, Hq, Hkv, S, D and whether it is causal."""

    batch: int
    heads_q: int
    heads_kv: int
    length: int
    dim: int
    causal: bool

    @property
    def label(self) -> str:
        """The column "B, Hq, Hkv, S, D" of a table."""
        *sizes, causal = self
        return ", ".join(map(str, sizes)) + (", causal" if causal else "")

    def flops(self, *, backward: bool = False) -> float:
        """Floating-point operations of one pass; a backward pass has five matrix products, a forward pass two."""
        products = 4 * self.batch * self.heads_q * self.length**2 * self.dim
        return products * (0.5 if self.causal else 1.0) * (2.5 if backward else 1.0)

    def tensors(self, *, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v."""
        q = normal(self.batch, self.heads_q, self.length, self.dim)
        k, v = (normal(self.batch, self.heads_kv, self.length, self.dim) for _ in range(2))
        for tensor in (q, k, v):
            tensor.requires_grad_(requires_grad)
        return q, k, v


KERNEL_SHAPES = (
    Shape(batch=4, heads_q=32, heads_kv=32, length=2048, dim=128, causal=True),
    Shape(batch=4, heads_q=32, heads_kv=8, length=4096, dim=128, causal=True),
    Shape(batch=2, heads_q=32, heads_kv=8, length=8192, dim=128, causal=True),
    Shape(batch=1, heads_q=32, heads_kv=8, length=16384, dim=128, causal=True),
    Shape(batch=2, heads_q=32, heads_kv=8, length=8192, dim=128, causal=False),
    Shape(batch=4, heads_q=16, heads_kv=16, length=4096, dim=64, causal=True),
    Shape(batch=64, heads_q=32, heads_kv=8, length=512, dim=128, causal=True),
    Shape(batch=2, heads_q=16, heads_kv=16, length=4096, dim=256, causal=True),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shapes and repeats of `benchmarks attention`.

    Attributes:
        kernels: Shapes of kernels.
        options: The shape on which options are compared.
        tokens: Total tokens of a packed batch.
        max_seqlens: Upper bounds of the sequence lengths, one packed batch each; the lower bound is a sixteenth of it.
        training: The shape of the step whose memory is measured.
        repeats: Number of timed calls of each candidate.
    """

    kernels: tuple[Shape, ...]
    options: Shape
    tokens: int
    max_seqlens: tuple[int, ...]
    training: Shape
    repeats: int


FULL = Sizes(
    kernels=KERNEL_SHAPES,
    options=Shape(batch=2, heads_q=32, heads_kv=8, length=4096, dim=128, causal=True),
    tokens=32768,
    max_seqlens=(512, 2048, 8192),
    training=Shape(batch=1, heads_q=32, heads_kv=8, length=16384, dim=128, causal=True),
    repeats=40,
)
QUICK = Sizes(
    kernels=(
        Shape(batch=1, heads_q=8, heads_kv=8, length=1024, dim=64, causal=True),
        Shape(batch=1, heads_q=8, heads_kv=2, length=1024, dim=128, causal=False),
    ),
    options=Shape(batch=1, heads_q=8, heads_kv=2, length=2048, dim=128, causal=True),
    tokens=4096,
    max_seqlens=(1024,),
    training=Shape(batch=1, heads_q=8, heads_kv=2, length=2048, dim=128, causal=True),
    repeats=5,
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers on the GPU."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def random_lengths(total: int, max_seqlen: int, seed: int = 0) -> list[int]:
    """Sequence lengths whose sum is `total`, the same ones in every run."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(max(1, max_seqlen // 16), max_seqlen)))
    return lengths


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the norm of the expected tensor."""
    reference = expected.detach().float()
    return float((actual.detach().float() - reference).norm() / reference.norm())


def check_agreement(
    names: Sequence[str],
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    reference: str,
    tolerance: float = TOLERANCE,
) -> None:
    """Stops the benchmark if results differ: a wrong result is not worth timing.

    Raises:
        RuntimeError: The relative error of a tensor is not below `tolerance`.
    """
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        error = relative_error(ours, theirs)
        if not error < tolerance:  # NaN fails too
            raise RuntimeError(
                f"{name} differs from {reference} by {error:.3g} in the norm, over {tolerance}; nothing was timed"
            )


def large_copy() -> Callable[[], object]:
    """A copy that is large enough to run at the GPU's bandwidth."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
