"""Attention sinks: a score of each query head that takes part in the softmax and has no value.

Most plans read them. Where cuDNN has none, they are applied to the output from the LSE. In both cases plans give an LSE
of minus infinity to queries that see no key, which becomes that of the sink. Gradients come from the output as well, by
kernels of our own.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.launch import Address, LaunchExtras
from cudnn_sdpa.engine.tensor_checks import Fields, check_present
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import allocate, current_raw_stream

LOWEST_LSE = torch.finfo(torch.float32).min  #: replaces an LSE of -inf, because -inf - (-inf) is NaN


class SinkUse(Enum):
    """Where the sinks of a call enter its results: nowhere, in the plan, or after it, from the LSE."""

    ABSENT = "absent"
    IN_PLAN = "in the plan"
    AFTER_PLAN = "after the plan"


class WithSinks(Protocol):
    @property
    def sinks(self) -> Tensor | None: ...


def as_sinks(sinks: Tensor | None) -> Tensor | None:
    """Sinks in float32, which the kernels read; anything but a half-precision tensor is returned unchanged."""
    if isinstance(sinks, Tensor) and sinks.dtype in (torch.float16, torch.bfloat16):
        return sinks.float()
    return sinks


# A plan that reads them.


def operand(heads: int) -> Operand:
    return Operand("sink", TensorLayout.contiguous((1, heads, 1, 1), torch.float32))


#: Launch extras of such a plan.
EXTRAS = LaunchExtras(operands=("sinks",), copy_if_unaligned=("sinks",), addresses={"sink": Address("sinks")})


# After a plan.


def complete(call: WithSinks, out: Tensor, lse: Tensor, use: SinkUse, *, overflows: bool = False) -> None:
    """Changes the results of a plan in place: its LSE where a query sees no key, or all if it read no sinks.

    Args:
        call: The call.
        out: The output (B, H, S, D), or (T, H, D) of packed sequences.
        lse: The LSE (B, H, S) or (T, H).
        use: Whether the plan read the sinks.
        overflows: Whether its LSE is infinite where a sink is far above all scores, as in kernels whose running maximum
            is of scores alone. The sink is then the LSE to all digits, and the output is right: 0.
    """
    if call.sinks is None:
        return
    if overflows:
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    if use is not SinkUse.AFTER_PLAN:
        raise_lse(call, lse)
        return
    check_present("sinks", call.sinks)  # PyTorch's kernels would read a null pointer
    total = torch.logaddexp(lse, like_rows(call.sinks, lse))
    out.mul_(torch.exp(lse - total.clamp_min(LOWEST_LSE)).unsqueeze(-1))  # 0 where there is neither a key nor a sink
    lse.copy_(total)


def raise_lse(call: WithSinks, lse: Tensor) -> None:
    """Raises an LSE in place to the sinks, which is exact for queries that see no key and changes no other."""
    if call.sinks is not None:
        torch.maximum(lse, like_rows(call.sinks, lse), out=lse)


def like_rows(sinks: Tensor, lse: Tensor) -> Tensor:
    """The sinks in a shape that broadcasts to an LSE, whose heads are its second dimension."""
    return sinks.view(-1, *[1] * (lse.dim() - 2))


# Their gradient.


class _CallWithSinks(WithSinks, Fields, Protocol): ...


class _BackwardCall(Protocol):
    @property
    def call(self) -> _CallWithSinks: ...
    @property
    def needs(self) -> tuple[bool, ...]: ...
    @property
    def grad_out(self) -> Tensor: ...
    @property
    def out(self) -> Tensor: ...
    @property
    def lse(self) -> Tensor: ...


def is_needed(of: _BackwardCall) -> bool:
    """Whether a backward call needs the gradient of the sinks. What can have one comes first in a forward call."""
    return of.call.sinks is not None and of.needs[of.call._fields.index("sinks")]


def needed_gradient(of: _BackwardCall, cu_seqlens: Tensor | None = None) -> list[Tensor]:
    """The gradient of the sinks if a backward call needs it, which is of packed sequences if these are given."""
    sinks = of.call.sinks
    if sinks is None or not is_needed(of):
        return []
    return [gradient(of.grad_out, of.out, of.lse, sinks, tokens=None if cu_seqlens is None else cu_seqlens[-1])]


_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS = 256
_AT_ONCE = 2  #: rows whose loads a thread has in flight together
_BLOCKS = 4  #: that run on a multiprocessor at once

#: The kernels that sum parts of the rows, by the dtype of the output.
chunk_kernels = {
    dtype: Kernel(_SOURCE, "sum_chunks", {"DTYPE": number}, shared=4 * _THREADS)
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
}
head_kernel = Kernel(_SOURCE, "sum_heads", {"DTYPE": 2})  #: the same for all dtypes
_argument = Struct(_SOURCE, "SinkGradient")


class _Rows(NamedTuple):
    """The arguments of `gradient`."""

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor
    tokens: Tensor | None


def gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, tokens: Tensor | None = None) -> Tensor:
    """The gradient of the sinks: minus the sum of the sink's weight times grad_out · out.

    On a GPU two kernels compute it, which read each tensor once; the same tensors give the same bits. cuDNN's own takes
    2.5 times as long as plain PyTorch, and with dropout it is too small by a factor of (1 - p) (seen on 9.19).

    Args:
        grad_out: The gradient of the output (B, H, S, D), or (T, H, D) of packed sequences.
        out: The output.
        lse: The LSE (B, H, S) or (T, H).
        sinks: The sinks (H,).
        tokens: How many tokens there are, on the device, if fewer than T: the gradient of the rest may be NaN.
    """
    check_present("sinks", sinks)  # a kernel would read a null pointer
    given = _Rows(grad_out=grad_out, out=out, lse=lse, sinks=sinks, tokens=tokens)
    if _is_for_kernels(given):
        return _gradient_by_kernels(given)
    mean = (grad_out.float() * out).sum(-1)
    if tokens is not None:
        rows = torch.arange(mean.shape[0], device=mean.device).unsqueeze(1)
        mean.masked_fill_(rows >= tokens, 0.0)
    weights = torch.exp(like_rows(sinks, lse) - lse.clamp_min(LOWEST_LSE))  # also right for a sink of -inf
    return -(weights * mean).sum((0, 2) if lse.dim() == 3 else 0)


def _is_for_kernels(given: _Rows) -> bool:
    grad_out, out, lse, sinks, tokens = given
    return (
        not is_compiling()
        and out.is_cuda
        and out.numel() > 0
        and out.dtype in chunk_kernels
        and grad_out.dtype == out.dtype
        and lse.dtype == sinks.dtype == torch.float32
        and (tokens is None or tokens.dtype == torch.int32)
        and is_plain_memory(*given)
    )


def _gradient_by_kernels(given: _Rows) -> Tensor:
    grad_out, out, lse, sinks, tokens = given
    device, dtype, heads = out.get_device(), out.dtype, sinks.shape[0]
    strides = out.stride(), grad_out.stride(), lse.stride(), sinks.stride(0)
    is_aligned = not (out.data_ptr() | grad_out.data_ptr()) % ALIGNMENT
    made = _launch_of(device, dtype, tuple(out.shape), *strides, is_aligned=is_aligned)
    fields = made.fields[:]  # of this call alone: many threads call at once
    with torch.cuda.device(device):
        partial = allocate((heads, made.chunks), (made.chunks, 1), torch.float32)
        result = allocate((heads,), (1,), torch.float32)
        for place, x in zip(_places(), (out, grad_out, lse, sinks, partial, result, tokens), strict=True):
            fields[place] = 0 if x is None else x.data_ptr()
        stream = current_raw_stream(device)
        chunk_kernels[dtype].on(device).launch(made.blocks, _THREADS, fields, stream)
        head_kernel.on(device).launch(-(-heads // (_THREADS // 32)), _THREADS, fields, stream)
    return result


@functools.cache
def _places() -> list[int]:
    """The indices of the addresses in the kernels' argument."""
    return _argument.indices("out.base", "grad_out.base", "lse.base", "sinks", "partial", "gradient", "tokens")


class _Launch(NamedTuple):
    """The launch of calls that look alike.

    Attributes:
        fields: The kernels' argument, without addresses.
        blocks: Those of the kernel that sums chunks.
        chunks: Into how many the rows of a head are divided.
    """

    fields: array[int]
    blocks: int
    chunks: int


@functools.lru_cache(maxsize=1024)
def _launch_of(
    device: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    out: tuple[int, ...],
    grad_out: tuple[int, ...],
    lse: tuple[int, ...],
    sink: int,
    *,
    is_aligned: bool,
) -> _Launch:
    """The launch for an output of this shape, given strides in elements."""
    is_packed, size = len(shape) == 3, dtype.itemsize
    batch, heads, length, dim = (1, shape[1], shape[0], shape[2]) if is_packed else shape
    tensors = {"out": _in_bytes(out, size), "grad_out": _in_bytes(grad_out, size), "lse": _in_bytes((*lse, 0), 4)}
    vectors = tensors["out"], tensors["grad_out"]
    between = [x for found in vectors for x, n in zip(found, (batch, heads, length), strict=False) if n > 1]
    is_dense = all(found[3] == size for found in vectors)
    is_wide = is_aligned and is_dense and not any(x % ALIGNMENT for x in (*between, size * dim))
    unit = ALIGNMENT if is_wide else size
    units = size * dim // unit
    lanes = min(32, 1 << (units - 1).bit_length())
    groups = _THREADS // lanes
    _, of_head, of_row, _ = tensors["out"]
    side_by_side = math.gcd(heads, groups) if of_head < of_row else 1  # groups of threads read neighbors in memory
    at_once, of_heads, rows = groups // side_by_side, heads // side_by_side, batch * length
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    chunks = max(1, min(-(-rows // (at_once * _AT_ONCE)), _BLOCKS * processors // of_heads))
    batches, places = divmod(chunks * at_once, length)
    fields = _argument.filled(
        **{
            name: {
                "batch": of_batch,
                "head": of_head,
                "row": of_row,
                "unit": unit if is_wide else of_element,
                "step": batches * of_batch + places * of_row,
                "wrap": of_batch - length * of_row,
            }
            for name, (of_batch, of_head, of_row, of_element) in tensors.items()
        },
        sink=sink,
        heads=heads,
        rows=rows,
        length=length,
        units=units,
        is_wide=is_wide,
        lanes=lanes,
        side_by_side=side_by_side,
        chunks=chunks,
        apart=chunks * at_once,
        places=places,
    )
    return _Launch(fields, blocks=of_heads * chunks, chunks=chunks)


def _in_bytes(strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Bytes from one batch entry, head, row and element to the next; packed tensors are one entry, (T, H, D)."""
    if len(strides) == 3:
        row, head, element = strides
        strides = 0, head, row, element
    return tuple(size * x for x in strides)


# Notes for `explain`.


def notes_on_results(use: SinkUse, why_after: str, *, raises_lse: bool = False) -> list[str]:
    """The completion of a plan's results; `why_after` says why a plan cannot read the sinks."""
    if use is SinkUse.AFTER_PLAN:
        return [f"the sinks are applied to the output from the log-sum-exp ({why_after})"]
    is_raised = use is SinkUse.IN_PLAN and raises_lse
    return ["the log-sum-exp is raised to the sinks where it is lower, for queries that see no key"] * is_raised


def notes_on_gradient(of: _BackwardCall) -> list[str]:
    note = "the gradient of the sinks is computed from the output and its gradient by kernels of this library"
    return [note] if is_needed(of) else []


def notes_on_conversion(given: Mapping[str, Any]) -> list[str]:
    """The conversion of sinks in half precision, which kernels read in float32, given a function's arguments."""
    sinks = given["sinks"]
    return ["sinks are converted to float32"] if sinks is not None and sinks.dtype != torch.float32 else []


def notes_on_converted_gradient(given: Mapping[str, Any], of: _BackwardCall) -> list[str]:
    return ["the gradient of sinks is converted back"] if is_needed(of) and notes_on_conversion(given) else []
