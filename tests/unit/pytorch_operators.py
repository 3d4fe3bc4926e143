"""What the tests of PyTorch's operators share: the ways of a call, and agreement with float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from fake_gpu import gpu_on_the_cpu
from native_way import native_way
from torch import Tensor

from cudnn_sdpa import cpu_checks
from cudnn_sdpa.integrations.pytorch import register, unregister

#: By the reference, or as on a GPU: in Python, or natively once a call is known.
WAYS = ("reference", "python", "native")


@contextlib.contextmanager
def operators_registered(way: str = "reference", **gpu: Any) -> Iterator[None]:
    """PyTorch's operators run this library on CPU tensors, whose calls take one of `WAYS`, on this fake GPU."""
    with contextlib.ExitStack() as stack:
        if way != "reference":
            stack.enter_context(native_way(on=way == "native"))
            stack.enter_context(gpu_on_the_cpu(**gpu))
        stack.enter_context(cpu_checks(None))
        register(device="cpu")
        stack.callback(unregister)
        yield


def assert_agrees(found: Tensor, wanted: Tensor) -> None:
    """Results are the same but for rounding: infinities are where they should be, errors are small in the norm."""
    assert found.shape == wanted.shape
    assert torch.equal(found.isinf(), wanted.isinf())
    assert not found.isnan().any()
    tolerance = 2e-6 if found.dtype in (torch.float64, torch.float32) else 1.5e-2
    found, wanted = (x.double().masked_fill(x.isinf(), 0.0) for x in (found, wanted))
    assert (found - wanted).norm() <= tolerance * wanted.norm() + 1e-5


def as_compiled_code_sees(x: object) -> object:
    """Sizes, strides where they mean something, and dtype of a tensor; other results are themselves."""
    if not isinstance(x, Tensor):
        return x
    return tuple(x.shape), [s for s, n in zip(x.stride(), x.shape, strict=True) if n != 1], x.dtype
