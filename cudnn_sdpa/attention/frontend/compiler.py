"""A helper process's program: compiles the frontend's attention kernel of one kind, without a GPU.

The frontend's own adapter checks a call's support, chooses the kernel's parameters and makes the kernel. Only the
function that launches it is another one: it takes tensors, and the current stream, as `function_plan` passes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_sdpa.attention.frontend.programs import FORWARD, ROWS, Kind
from cudnn_sdpa.offline.function_compiler import answer, library_of

#: Set before `cutlass` is imported: it asks no GPU.
ENVIRONMENT = {"CUTE_DSL_ARCH": "sm_90a"}

#: The file of the kernel in the frontend, and the name under which it is loaded.
_TEMPLATE = ("sm90/prefill_d512_f16.py", "cudnn_sdpa")

#: Axes of a (B, H, S, D) tensor by their letters in a kind.
_AXES = {"b": 0, "h": 1, "s": 2}


def compile_kind(kind: Kind) -> dict[str, bytes]:
    """The function of a kind as a shared library."""
    from cudnn.sdpa.fwd import api_dsl

    with _as_on_hopper(), FakeTensorMode():
        adapter = api_dsl.SdpaFwdDslSm90(**_samples(kind), **options_of(kind))
        adapter.check_support()
    template = api_dsl._load_kernel_template(_TEMPLATE[0], adapter.params, tag=_TEMPLATE[1])
    made: list[Any] = []
    template.compile_host = lambda kernel, *_: made.append(kernel)  # instead of the frontend's launcher
    template._compile.__wrapped__(
        kind.batch,
        kind.heads,
        kind.heads_kv,
        kind.sq,
        kind.skv,
        *adapter._strides,
        adapter._lse_stride,
        target="sm_90a",
        d_qk=kind.dim,
        d_v=kind.dim_v,
    )
    (kernel,) = made
    _check_orders(kernel, kind)
    return {FORWARD: library_of(_function(kernel, kind))}


def options_of(kind: Kind) -> dict[str, Any]:
    """The adapter's options. A mask that ends at the last key needs a right bound there: one that masks nothing."""
    right = kind.right
    if right is None and kind.bottom_right:
        right = kind.sq + kind.skv
    return {
        "is_causal": right is not None,
        "causal_bottom_right": kind.bottom_right,
        "window_size_left": kind.left,
        "window_size_right": right,
        "scale_softmax": 1.0,  # any that is positive
        "has_sink": kind.has_sinks,
        "pack_gqa": kind.packs_heads,
    }


def example(kind: Kind) -> dict[str, Tensor]:
    """Operands (B, H, S, D) of a call of this kind, by name."""
    dtype = getattr(torch, kind.dtype)
    sizes = {
        "q": (kind.heads, kind.sq, kind.dim),
        "k": (kind.heads_kv, kind.skv, kind.dim),
        "v": (kind.heads_kv, kind.skv, kind.dim_v),
        "out": (kind.heads, kind.sq, kind.dim_v),
    }
    made = {}
    for name, (heads, length, dim) in sizes.items():
        shape, strides, distance = (kind.batch, heads, length), [0, 0, 0, 1], dim
        for letter in getattr(kind, f"order_{name}"):
            strides[_AXES[letter]] = distance
            distance *= shape[_AXES[letter]]
        made[name] = torch.empty_strided((*shape, dim), strides, dtype=dtype, device="cuda:0")
    if kind.has_lse:
        made["lse"] = torch.empty(kind.batch, kind.heads, kind.sq, 1, device="cuda:0")
    if kind.has_sinks:
        made["sink"] = torch.empty(1, kind.heads, 1, 1, device="cuda:0")
    return made


def _samples(kind: Kind) -> dict[str, Tensor | None]:
    tensors = example(kind)
    lse = tensors["lse"].squeeze(3) if kind.has_lse else None
    return {**{f"sample_{name}": tensors[name] for name in "qkv"}, "sample_o": tensors["out"], "sample_lse": lse}


@contextmanager
def _as_on_hopper() -> Iterator[None]:
    """The adapter asks for the current GPU, and there is none."""
    from cudnn.frost import buffers

    before = buffers.current_sm, buffers.current_device_id
    buffers.current_sm, buffers.current_device_id = lambda *_: 90, lambda *_: 0
    try:
        yield
    finally:
        buffers.current_sm, buffers.current_device_id = before


def _check_orders(kernel: Any, kind: Kind) -> None:
    """Raises ValueError if the kernel was made for another order of dimensions in memory than the kind says."""
    for name, axes in zip(ROWS, kernel.tma_orders, strict=True):
        order = getattr(kind, f"order_{name}")
        if kind.packs_heads and name in ("q", "out"):  # whose boxes have one order
            order = "hsb"
        expected = (3, *(_AXES[letter] for letter in order))
        if tuple(axes) != expected:
            raise ValueError(f"the kernel reads the dimensions of {name} in the order {axes} instead of {expected}")


def _function(kernel: Any, kind: Kind) -> Any:
    """The kernel with its launcher, compiled."""
    import cutlass
    from cutlass import cute

    dtype = {"float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[kind.dtype]

    def rows(heads: int, length: int, dim: int) -> Any:
        strides: Any = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
        shape = (kind.batch, heads, length, dim)
        return cute.runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)

    def floats(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return cute.runtime.make_fake_tensor(cutlass.Float32, shape, stride=strides, assumed_align=4)

    lse = sinks = None
    if kind.has_lse:
        lse = floats((kind.batch, kind.heads, kind.sq), (kind.heads * kind.sq, kind.sq, 1))
    if kind.has_sinks:
        sinks = floats((kind.heads,), (1,))
    tensors = [
        rows(kind.heads, kind.sq, kind.dim),
        rows(kind.heads_kv, kind.skv, kind.dim),
        rows(kind.heads_kv, kind.skv, kind.dim_v),
        rows(kind.heads, kind.sq, kind.dim_v),
        lse,
        sinks,
    ]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch=sm_90a"
    return cute.compile(launcher(kernel), *tensors, cutlass.Float32(0), stream, options=options)


def launcher(kernel: Any) -> Any:
    """The host function of a kernel that reads no lengths, and nothing that is packed."""
    import cutlass
    from cutlass import cute

    @cute.jit
    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, scale: Any, stream: Any) -> None:
        nowhere = cute.make_ptr(cutlass.Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
        lengths = cute.make_tensor(nowhere, cute.make_layout((kernel.b,), stride=(1,)))
        kernel(q, k, v, out, lse, sinks, lengths, lengths, scale, cutlass.Int32(0), None, None, None, stream)

    return launch


def main() -> None:
    answer(lambda kind: compile_kind(Kind(*kind)))
