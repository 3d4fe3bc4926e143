"""FlashAttention-4's function for queries on pages as a formula, called by its C interface as the real one is.

It reads a launch's arguments from memory, and is as careless as the kernel: it trusts all tables, and multiplies values
of whole tiles, so that a NaN of a key without weight is a NaN of the result. Behind the last key tiles are 0.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fake_gpu
import pytest
import torch
from torch import Tensor

from cudnn_sdpa.attention.flash4.plans import functions, kind_of
from cudnn_sdpa.attention.flash4.programs import Kind, program_of
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.function_plan import FunctionPlan

TILE = 16  # keys

_DTYPES = {(2, 16): torch.float16, (4, 16): torch.bfloat16, (2, 32): torch.float32, (0, 32): torch.int32}
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p)
_SET_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _tensor(address: int) -> Tensor:
    """A tensor by its `DLTensor`."""
    data, device, described, shape_at, strides_at, offset = _words(address, 6)
    assert (device, offset) == (2, 0)
    rank, dtype = described & 0xFFFF, _DTYPES[described >> 32 & 0xFF, described >> 40 & 0xFF]
    shape, stride = ([*(ctypes.c_int64 * rank).from_address(x)] for x in (shape_at, strides_at))
    assert stride[-1] == 1
    assert dtype not in (torch.float16, torch.bfloat16) or not any(x * dtype.itemsize % 16 for x in stride[:-1]), stride
    count = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if math.prod(shape) else 1
    memory = torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(data), dtype=dtype)
    return memory.as_strided(shape, stride)


def _arguments(address: int, count: int) -> list[Any]:
    found: list[Any] = []
    for number in range(count):
        kind, value = _words(address + 16 * number, 2)
        if kind == 71:
            *_, items, size, _, _ = _words(value, 7)
            found.append(tuple(_arguments(items, size)))
        else:
            number_of = ctypes.c_double.from_buffer_copy(value.to_bytes(8, "little")).value
            found.append({0: None, 1: value, 3: number_of, 7: _tensor}[kind] if kind != 7 else _tensor(value))
    return found


class Library:
    """The function of a kind."""

    is_launched = True

    def __init__(self, kind: Kind) -> None:
        assert kind.is_on_pages
        self.kind, self.error = kind, ""
        self.function = _FUNCTION(self._called)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def _called(self, _: int, address: int, count: int, __: int) -> int:
        try:
            self.attend(*_arguments(address, count))
        except Exception as error:  # noqa: BLE001 - which C cannot raise
            self.error = repr(error)
            return -1
        return 0

    def attend(self, q, k, v, out, lse, scale, ends, _ends_kv, _lengths_q, lengths, table, left, right, sink, *more):
        """All arguments by position, as in the function's C interface."""
        assert lse is _ends_kv is _lengths_q is None
        kind, (_, (_, scalars), *_), size = self.kind, more, k.shape[1]
        assert (q.shape[-1], v.shape[-1], q.shape[1] // k.shape[2]) == (kind.dim, kind.dim_v, kind.group)
        if kind.is_causal:
            assert left is right is None
            right = 0
        for b in range(lengths.shape[0]):
            rows, length = slice(int(ends[b]), int(ends[b + 1])), int(lengths[b])
            new = rows.stop - rows.start
            assert 0 <= rows.start <= rows.stop <= q.shape[0]
            assert 0 <= length <= table.shape[1] * size
            keys = torch.arange(-(-length // TILE) * TILE)
            is_there = keys < length
            ids = table[b, keys.clamp_max(max(0, length - 1)) // size].long()
            assert not length or (ids.min() >= 0 and ids.max() < k.shape[0])
            k_of, v_of = (
                torch.where(is_there[:, None, None], x[ids, keys % size].double(), 0).repeat_interleave(kind.group, 1)
                for x in (k, v)
            )
            diagonal = torch.arange(new)[:, None] + length - new
            seen = is_there & (left is None or keys >= diagonal - left) & (right is None or keys <= diagonal + right)
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k_of) * scale
            if scalars is not None:
                (cap,) = scalars
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~torch.as_tensor(seen).expand_as(scores), -math.inf)
            if sink is not None:
                scores = torch.cat([scores, sink.double()[:, None, None].expand(-1, new, 1)], -1)
            weights = torch.nan_to_num(scores.softmax(-1)) if scores.shape[-1] else scores
            out[rows] = torch.einsum("hqk,khd->qhd", weights[..., : len(keys)], v_of).to(out.dtype)


def plan_of(key: PlanKey, compute: Any) -> Any:
    if key.provider != "fa4":
        return fake_gpu.FakePlan(key, compute)
    library, streams = Library(kind_of(key)), _SET_STREAM(lambda *_: 0)
    interface = SimpleNamespace(
        set_stream=lambda *_: 0,
        address_of_set_stream=ctypes.cast(streams, ctypes.c_void_p).value,
        raised=lambda: library.error,
        kept=streams,
    )
    return FunctionPlan(key, program_of(key), {"forward": library}, interface)  # type: ignore[dict-item, arg-type]


@contextlib.contextmanager
def gpu_with_flash4(are_ready: Callable[[Kind], bool] = lambda _: True) -> Iterator[None]:
    """The fake GPU, on which FlashAttention-4's kinds are compiled; the caller has its stand-in installed."""
    with pytest.MonkeyPatch.context() as patch, fake_gpu.gpu_on_the_cpu(plan_of=plan_of):
        patch.setattr(functions, "are_ready", are_ready)
        yield
