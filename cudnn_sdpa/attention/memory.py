"""Checks of strides, alignment and overlap, and the results of calls without keys."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.engine.memory import LOWEST, check_present, refuse_address
from cudnn_sdpa.errors import LayoutError
from cudnn_sdpa.graph.layouts import ALIGNMENT


def check_strides(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Strides that cuDNN's kernels can read: a dense last dimension, and other strides that are multiples of 16 bytes.

    The tensors are (B, H, S, D), those of packed sequences as one sequence.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strides_of(name, tensor)


def check_strides_of(name: str, tensor: Tensor) -> None:
    """The same for one tensor; shape checks refuse ranks other than 4."""
    if tensor.dim() != 4:
        return
    if tensor.stride(-1) != 1:
        raise LayoutError(
            name,
            f"stride {tensor.stride(-1)} in the last dimension",
            "1: each head vector dense",
            f"Use {name}.contiguous().",
        )
    alignment = ALIGNMENT // tensor.element_size()
    for dim, unit in enumerate(("batch entry", "head", "token")):
        if tensor.shape[dim] != 1 and tensor.stride(dim) % alignment != 0:
            raise LayoutError(
                name,
                f"stride {tensor.stride(dim)} from {unit} to {unit}",
                f"a multiple of {alignment} elements ({ALIGNMENT} bytes)",
                f"Use {name}.contiguous().",
            )


def check_addresses(hint: str = "", **tensors: object) -> None:
    """Refuses tensors without memory, and misaligned addresses on CUDA; tensor subclasses pass."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_cuda:
            address = tensor.data_ptr()
            if address < LOWEST:
                check_present(name, tensor)
            if address % ALIGNMENT != 0:
                refuse_address(name, address % ALIGNMENT, hint)
        else:
            check_present(name, tensor)


def check_lengths_present(lengths_q: Tensor | None, lengths_kv: Tensor | None) -> None:
    """The same for lengths on a GPU, in a warm call: PyTorch's own kernels would read a null pointer."""
    if lengths_q is not None and lengths_q.data_ptr() < LOWEST:
        check_present("seq_lens_q", lengths_q)
    if lengths_kv is not None and lengths_kv.data_ptr() < LOWEST:
        check_present("seq_lens_kv", lengths_kv)


def check_memory(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, mask: Tensor | None = None) -> None:
    """Addresses and overlap: the only checks of a warm call, because no key contains addresses."""
    check_addresses(q=q, k=k, v=v)
    if mask is not None and (not mask.is_cuda or mask.data_ptr() < LOWEST):
        check_present("attn_mask", mask)
    if out is None:
        return
    if isinstance(out, Tensor):
        check_addresses("Let the function allocate it.", out=out)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("attn_mask", mask)):
        if tensor is not None and _share_memory(out, tensor):
            hint = "Allocate it with torch.empty_like(q)."
            raise LayoutError("out", f"memory that overlaps {name}", "a separate buffer", hint)


def aligned(name: str, tensor: Tensor) -> Tensor:
    """The tensor, contiguous and at an aligned address; copied if it is not, as a slice may not be.

    Raises:
        LayoutError: It has no memory.
    """
    address = tensor.data_ptr()
    if address and address % ALIGNMENT == 0 and tensor.is_contiguous():  # nearly always
        return tensor
    dense = tensor.contiguous()
    address = dense.data_ptr()
    if address == 0:
        check_present(name, dense)
    return dense if address % ALIGNMENT == 0 else dense.clone()


def check_strides_of_out(out: Tensor, *, for_cudnn: bool) -> None:
    """`out` must be writable: dense head vectors, strides that cuDNN's kernels take, no two elements at one address."""
    alignment = ALIGNMENT // out.element_size() if for_cudnn else 1
    if out.stride(-1) != 1:
        raise LayoutError("out", f"stride {out.stride(-1)} in the last dimension", "1")
    span = out.shape[-1]
    for stride, size in sorted((out.stride(dim), out.shape[dim]) for dim in range(out.dim() - 1)):
        if size == 1:
            continue
        if stride % alignment != 0:
            raise LayoutError("out", f"a stride of {stride}", f"multiples of {alignment} elements ({ALIGNMENT} bytes)")
        if stride < span:
            raise LayoutError("out", f"strides {out.stride()} that overlap", "a separate address for each element")
        span = stride * (size - 1) + span


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors overlap. Interleaved but disjoint views count as sharing."""
    if a.numel() == 0 or b.numel() == 0:
        return False
    first_a, first_b = a.data_ptr(), b.data_ptr()
    return first_a < first_b + _extent(b) and first_b < first_a + _extent(a)


def _extent(tensor: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


class _WithResults(Protocol):
    @property
    def q(self) -> Tensor: ...
    @property
    def out(self) -> Tensor | None: ...
    @property
    def with_lse(self) -> bool: ...


def fill_without_keys(
    call: _WithResults, layouts: tuple[Layout, Layout], sinks: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """The results where there are no queries or no keys: zeros, and the LSE of the sinks alone.

    Args:
        call: The call; only its `out` and `with_lse` are used, and the device of q.
        layouts: Those of the output and the LSE.
        sinks: The sinks in a shape that broadcasts to the LSE.
    """
    (shape, stride, dtype), (rows, strides, _) = layouts
    device = call.q.device
    out: Tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device) if call.out is None else call.out
    out.zero_()
    if not call.with_lse:
        return out
    lse = torch.empty_strided(rows, strides, dtype=torch.float32, device=device).fill_(-torch.inf)
    return out, lse if sinks is None else torch.maximum(lse, sinks, out=lse)
