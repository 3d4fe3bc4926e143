"""What is measured: shapes and their floating-point operations, random tensors, and whether two results agree."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = "cuda"

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
        return ", ".join(map(str, self[:-1])) + (", causal" if self.causal else "")

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
    Shape(4, 32, 32, 2048, 128, True),
    Shape(4, 32, 8, 4096, 128, True),
    Shape(2, 32, 8, 8192, 128, True),
    Shape(1, 32, 8, 16384, 128, True),
    Shape(2, 32, 8, 8192, 128, False),
    Shape(4, 16, 16, 4096, 64, True),
    Shape(64, 32, 8, 512, 128, True),
    Shape(2, 16, 16, 4096, 256, True),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much `bench attention` measures.

    Attributes:
        kernels: Shapes of kernels.
        options: The shape on which options are compared.
        tokens: Tokens of a packing.
        longest: Upper bounds of the lengths in a packing; the lower bound is a sixteenth of it.
        training: The shape of the step whose memory is measured.
        repeats: How many times each candidate is timed.
    """

    kernels: tuple[Shape, ...]
    options: Shape
    tokens: int
    longest: tuple[int, ...]
    training: Shape
    repeats: int


FULL = Sizes(
    kernels=KERNEL_SHAPES,
    options=Shape(2, 32, 8, 4096, 128, True),
    tokens=32768,
    longest=(512, 2048, 8192),
    training=Shape(1, 32, 8, 16384, 128, True),
    repeats=40,
)
QUICK = Sizes(
    kernels=(Shape(1, 8, 8, 1024, 64, True), Shape(1, 8, 2, 1024, 128, False)),
    options=Shape(1, 8, 2, 2048, 128, True),
    tokens=4096,
    longest=(1024,),
    training=Shape(1, 8, 2, 2048, 128, True),
    repeats=5,
)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def random_lengths(total: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of sequences that are `total` tokens together: the same ones in every run."""
    generator = random.Random(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(max(1, longest // 16), longest)))
    return lengths


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference by the norm of what is expected."""
    reference = expected.detach().float()
    return float((actual.detach().float() - reference).norm() / reference.norm())


def check_agreement(
    names: Sequence[str],
    actual: Sequence[Tensor],
    expected: Sequence[Tensor],
    whose: str,
    tolerance: float = TOLERANCE,
) -> None:
    """Stops the benchmark if results differ: wrong numbers have no speed.

    Raises:
        RuntimeError: One of them is further from what is expected than `tolerance`.
    """
    for name, one, other in zip(names, actual, expected, strict=True):
        error = relative_error(one, other)
        if not error < tolerance:  # NaN fails too
            raise RuntimeError(
                f"{name} differs from {whose} by {error:.3g} in the norm, over {tolerance}; nothing was timed"
            )
