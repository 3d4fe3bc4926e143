"""`merge_states`: the attention to all keys, from the results for parts of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa.engine.autograd_checks import refuse_transforms
from cudnn_sdpa.engine.dispatch_state import is_plain_memory, needs_gradient
from cudnn_sdpa.engine.sharding import has_dtensor, refuse
from cudnn_sdpa.engine.tensor_checks import check_apart, check_is_tensor, check_tensor, dtype_name, shape_of
from cudnn_sdpa.errors import DtypeError, LayoutError, OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph.layouts import ALIGNMENT, dense_stride_like, is_expanded
from cudnn_sdpa.graph.scalars import is_compiling, is_true
from cudnn_sdpa.plans.nvrtc import Kernel, Struct
from cudnn_sdpa.plans.plan import current_raw_stream

_SOURCE = Path(__file__).with_suffix(".cu")
kernels = {
    dtype: Kernel(_SOURCE, "merge_states", {"DTYPE": number})
    for number, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
}
_argument = Struct(_SOURCE, "Merge")

_MAX_PARTS = 64  #: of the kernel
_THREADS = 256
_DIMENSIONS = 3  #: that make the rows


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The attention to all keys, from the outputs and LSEs for parts of them.

    Each output is weighted by the share of its keys in the whole softmax: with L = log Σ exp(lses), the result is
    Σ exp(lse − L) · out. All is computed in float32 (float64 for such outputs) and rounded once. It serves keys that
    are spread over GPUs, split over kernels, or shared as a prefix. FlashInfer's `merge_states` is the same for
    logarithms to the base of 2; ours are natural.

    On a GPU it is one kernel for up to 64 parts of float16, bfloat16 or float32. If the strides of parts differ, those
    that are not dense in the memory order of the first one are copied before.

    It is not differentiable, because the LSE is not: `sdpa_backward` gives the gradients of each part from the result.

    Args:
        outs: The outputs, (B, Hq, Sq, Dv) each, or (Tq, Hq, Dv) of packed sequences, of one dtype.
        lses: Their LSEs, (B, Hq, Sq) or (Tq, Hq) float32, as `return_lse=True` gives them. Minus infinity for rows that
            see no key of a part; what its output holds there does not matter.
        out: Where the output is written, of any strides; apart from all outputs and LSEs. A new tensor if not given.

    Returns:
        The output, in the dtype of the outputs, and the LSE in float32. Rows that see no key at all get zeros and minus
        infinity.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: A tensor requires grad.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa import merge_states, sdpa
        >>> q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.bfloat16)
        >>> parts = [sdpa(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge_states(*zip(*parts))
        >>> torch.allclose(out, sdpa(q, k, v), atol=0.02)
        True
    """
    _check(outs, lses, out)
    result = torch.empty_like(outs[0]) if out is None else out
    if _is_for_kernel(outs, result) and is_plain_memory(*outs, *lses, result):
        return result, _merge_by_kernel(outs, lses, result)
    exact = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    total = functools.reduce(torch.logaddexp, [x.to(exact) for x in lses])
    base = torch.where(torch.isneginf(total), 0.0, total)  # any finite value: exp(-inf - base) is 0
    merged = torch.zeros(outs[0].shape, dtype=exact, device=outs[0].device)
    for part, lse in zip(outs, lses, strict=True):
        weight = torch.exp(lse.to(exact) - base).unsqueeze(-1)
        merged += torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, weight * part)
    result.copy_(merged)
    return result, total.float()


def _is_for_kernel(outs: Sequence[Tensor], result: Tensor) -> bool:
    if is_compiling() or not result.is_cuda or not result.numel() or result.dtype not in kernels:
        return False
    is_dense = result.shape[-1] == 1 or result.stride(-1) == 1
    return is_dense and len(outs) <= _MAX_PARTS and result.dim() - 1 <= _DIMENSIONS


def _merge_by_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor) -> Tensor:
    """Writes the output of parts on a GPU by one kernel; returns the LSE."""
    if outs[0].stride(-1) != 1:
        outs = [outs[0].contiguous(), *outs[1:]]
    outs, lses = _alike(outs), _alike(lses)
    *rows, dim = out.shape
    total = torch.empty(rows, dtype=torch.float32, device=out.device)
    size, sizes = out.element_size(), [1] * (_DIMENSIONS - len(rows)) + rows
    strides = {
        name: [0] * (_DIMENSIONS - len(rows)) + [x.element_size() * stride for stride in x.stride()[: len(rows)]]
        for name, x in (("from", outs[0]), ("lse", lses[0]), ("into", out))
    }
    addresses = [x.data_ptr() for x in outs]
    numbers = [*addresses, out.data_ptr(), size * dim, *strides["from"], *strides["into"]]
    is_wide = not any(number % ALIGNMENT for number in numbers)
    count = math.prod(rows)
    fields = _argument.filled(
        parts=len(outs), rows=count, middle=sizes[1], inner=sizes[2], dim=dim, is_wide=is_wide, **strides
    )
    places = _argument.indices("outs.0", "lses.0", "out", "total")
    given = (addresses, [x.data_ptr() for x in lses], [out.data_ptr()], [total.data_ptr()])
    for first, values in zip(places, given, strict=True):
        for place, address in enumerate(values, first):
            fields[place] = address
    units, device = count * dim * (size if is_wide else ALIGNMENT) // ALIGNMENT, out.get_device()
    with torch.cuda.device(device):
        kernel = kernels[out.dtype].on(device)
        kernel.launch(min(-(-units // _THREADS), 4096), _THREADS, fields, current_raw_stream(device))
    torch.autograd.graph.increment_version([x for x in (out,) if not x.is_inference()])
    return total


def _alike(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts if all have the same strides; or else with copies of those that lack the dense ones of the first."""
    first = parts[0]
    if all(x.stride() == first.stride() for x in parts):
        return list(parts)
    dense = dense_stride_like(first.shape, first.shape, first.stride())  # its own may give one address to many elements

    def alike(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, dense, dtype=x.dtype, device=x.device).copy_(x)

    return [x if x.stride() == dense else alike(x) for x in parts]


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor | None) -> None:
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (tuple, list)) or not given:
            got = type(given).__name__ if not isinstance(given, (tuple, list)) else "none"
            raise OptionError(name, got, "a tuple or list of at least one tensor")
        for number, tensor in enumerate(given):
            check_is_tensor(f"{name}[{number}]", tensor)
    check_is_tensor("out", out, optional=True)
    refuse_transforms("merge_states", *outs, *lses, out, loops=False)
    if has_dtensor(*outs, *lses, out):
        refuse("merge_states", "it is a function of the parts that one rank has")
    if len(outs) != len(lses):
        raise OptionError("lses", f"{len(lses)} tensors", f"{len(outs)}, one for each output")
    first = outs[0]
    if first.dim() < 2:
        raise ShapeError("outs[0]", shape_of(first), "(B, Hq, Sq, Dv) or (Tq, Hq, Dv)")
    if not first.is_floating_point() or first.element_size() < 2:
        raise DtypeError("outs[0]", dtype_name(first.dtype), "bfloat16, float16, float32 or float64")
    parts = {f"outs[{number}]": x for number, x in enumerate(outs)}
    for name, x in parts.items() if out is None else (*parts.items(), ("out", out)):
        _check_one(name, x, first, dtype=first.dtype, shape=first.shape)
    for number, lse in enumerate(lses):
        _check_one(f"lses[{number}]", lse, first, dtype=torch.float32, shape=first.shape[:-1])
    if out is not None:
        _check_memory(out, parts | {f"lses[{number}]": x for number, x in enumerate(lses)})


def _check_memory(out: Tensor, others: dict[str, Tensor]) -> None:
    if is_true(out.numel() > 0) and is_expanded(out.shape, out.stride()):
        raise LayoutError("out", f"strides {out.stride()} that overlap", "a separate address for each element")
    if not is_compiling() and is_plain_memory(*others.values(), out):
        check_apart("out", out, others.items())


def _check_one(name: str, tensor: Tensor, first: Tensor, *, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    meaning = f"for outs[0] of shape {tuple(first.shape)}"
    check_tensor(name, tensor, first, of="outs[0]", dtype=dtype, shape=shape, meaning=meaning)
    if needs_gradient(tensor):
        raise UnsupportedError(
            "the gradient of merge_states",
            [f"{name} requires grad, and the LSE is not differentiable"],
            "torch.no_grad(), with the gradients of each part by sdpa_backward",
        )
