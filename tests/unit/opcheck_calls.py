"""Calls of public functions that together reach every operator of the library, in inference and in training.

`recorded` runs one and returns the operators that it called with their arguments, for PyTorch's opcheck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cudnn_sdpa import (
    Fp8BackwardScales,
    Fp8Scales,
    append_paged_kv,
    conv1d,
    conv2d,
    conv3d,
    gelu_mul,
    kernels,
    layer_norm,
    relu_squared,
    rms_norm,
    scaled_dot_product_attention,
    sdpa,
    sdpa_fp8,
    sdpa_fp8_backward,
    sdpa_paged,
    sdpa_paged_varlen,
    sdpa_varlen,
    silu_mul,
)

E4M3 = torch.float8_e4m3fn
Call = Callable[["Inputs"], Any]

#: Operators of a sample, which are there if another test of the same process has imported it.
OF_SAMPLES = {"row_softmax_forward", "row_softmax_backward"}


def registered() -> set[str]:
    """Names of all operators of the library but one, which is decomposed into one of PyTorch's before dispatch."""
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name.partition("::")[2] for schema in schemas if schema.name.startswith("cudnn_sdpa::")}
    return names - {"dropout_seed"} - OF_SAMPLES


class Inputs:
    """Random tensors on a device, in a dtype that is supported there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16

    def __call__(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).requires_grad_(grad)

    def bshd(self, batch: int, heads: int, length: int, dim: int) -> Tensor:
        return self(batch, length, heads, dim).transpose(1, 2)

    def ints(self, *values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def qkv(self, *, grad: bool = False, sq: int = 24, skv: int = 40) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(
            self(2, length, heads, 64).transpose(1, 2).detach().requires_grad_(grad)
            for heads, length in ((4, sq), (2, skv), (2, skv))
        )

    def packed(self, *, grad: bool = False) -> tuple[Any, ...]:
        offsets = self.ints(0, 9, 9, 30)
        return (*(self(30, heads, 64, grad=grad) for heads in (4, 2, 2)), offsets, offsets, 21, 21)

    def paged(self, sq: int = 1) -> tuple[Tensor, ...]:
        pages = [self(6, 2, 16, 64) for _ in range(2)]
        table = self.ints([3, 1, 5], [0, 4, 2])
        return self(2, 4, sq, 64), *pages, table, self.ints(40, 17)

    def packed_on_pages(self) -> tuple[Any, ...]:
        _, *pages = self.paged()
        return self(9, 4, 64), *pages, self.ints(0, 1, 8), 7

    def fp8(self) -> tuple[Tensor, ...]:
        return tuple(self(1, 2, 64, 128).to(E4M3) for _ in range(3))  # Hopper has gradients for head dim 128

    def scales(self, kind: type, **values: float) -> Any:
        ones = {name: 1.0 + 0.1 * index for index, name in enumerate(kind._fields)}
        return kind(**{name: torch.tensor(value, device=self.device) for name, value in {**ones, **values}.items()})


class HalfInputs(Inputs):
    """Inputs in a dtype that cuDNN supports, on any device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.dtype = torch.bfloat16


def _backward(result: Any) -> None:
    out = result[0] if isinstance(result, tuple) else result
    out.backward(torch.randn_like(out))


def _into_out(function: Any, given: tuple[Any, ...], **options: Any) -> None:
    function(*given, out=torch.full_like(given[0], torch.nan), **options)


def _fp8_gradients(new: Inputs) -> None:
    q, k, v = new.fp8()
    forward = sdpa_fp8(q, k, v, new.scales(Fp8Scales), is_causal=True, return_lse=True)
    grad = new(*q.shape).to(torch.float8_e5m2)
    scales = new.scales(Fp8BackwardScales)
    sdpa_fp8_backward(grad, q, k, v, forward.out, forward.lse, scales, is_causal=True)


#: Calls of attention, by description.
ATTENTION: dict[str, Call] = {
    "sdpa": lambda new: sdpa(*new.qkv(), is_causal=True),
    "sdpa, with options": lambda new: sdpa(
        *new.qkv(), window_size=(9, 3), scale=0.2, seq_lens_kv=new.ints(40, 21), return_lse=True
    ),
    "sdpa, with a mask and sinks": lambda new: sdpa(
        *new.qkv(), attn_mask=new(4, 24, 40), sinks=new(4, dtype=torch.float32), return_lse=True
    ),
    "sdpa, into a tensor": lambda new: _into_out(sdpa, new.qkv(), is_causal=True),
    "sdpa, into a tensor, with lse": lambda new: _into_out(sdpa, new.qkv(), return_lse=True),
    "sdpa, trained": lambda new: _backward(sdpa(*new.qkv(grad=True), is_causal=True)),
    "sdpa, trained with a mask and sinks": lambda new: _backward(
        sdpa(*new.qkv(grad=True), attn_mask=new(4, 24, 40, grad=True), sinks=new(4, dtype=torch.float32, grad=True))
    ),
    "drop-in": lambda new: scaled_dot_product_attention(*new.qkv(), is_causal=True, enable_gqa=True),
    "varlen": lambda new: sdpa_varlen(*new.packed(), is_causal=True),
    "varlen, with lse": lambda new: sdpa_varlen(*new.packed(), is_causal=True, return_lse=True),
    "varlen, into a tensor": lambda new: _into_out(sdpa_varlen, new.packed(), is_causal=True),
    "varlen, trained": lambda new: _backward(sdpa_varlen(*new.packed(grad=True), is_causal=True)),
    "paged": lambda new: sdpa_paged(*new.paged(), page_layout="HND"),
    "tokens on pages": lambda new: append_paged_kv(
        *(new(3, 2, 64) for _ in range(2)), *new.paged()[1:3], new.ints(7, 90, -1), page_layout="HND"
    ),
    "paged, a chunk with lse": lambda new: sdpa_paged(
        *new.paged(7), page_layout="HND", return_lse=True, seq_lens_q=new.ints(7, 3)
    ),
    "paged, in FP8": lambda new: sdpa_paged(
        new.paged()[0],
        *(x.to(E4M3) for x in new.paged()[1:3]),
        *new.paged()[3:],
        page_layout="HND",
        k_scale=new(dtype=torch.float32),
        return_lse=True,
    ),
    "paged, into a tensor": lambda new: _into_out(sdpa_paged, new.paged(), page_layout="HND"),
    "packed on pages": lambda new: sdpa_paged_varlen(*new.packed_on_pages(), page_layout="HND"),
    "packed on pages, a tree with lse": lambda new: sdpa_paged_varlen(
        *new.packed_on_pages(), page_layout="HND", tree_mask=new(9, 8, dtype=torch.float32) > 0, return_lse=True
    ),
    "packed on pages, into a tensor": lambda new: _into_out(
        sdpa_paged_varlen, new.packed_on_pages(), page_layout="HND", sinks=new(4, dtype=torch.float32)
    ),
}
FP8: dict[str, Call] = {
    "fp8": lambda new: sdpa_fp8(*new.fp8(), new.scales(Fp8Scales), is_causal=True),
    "fp8, gradients": _fp8_gradients,
}
#: Graph functions, which share one operator.
FUSED: dict[str, Call] = {
    "rms_norm": lambda new: rms_norm(new(6, 64), new(64)),
    "rms_norm, trained": lambda new: _backward(rms_norm(new(6, 64, grad=True), new(64, grad=True))),
    "layer_norm": lambda new: layer_norm(new(6, 64), new(64), new(64)),
    "layer_norm, fused": lambda new: layer_norm(new(6, 64), new(64), residual=new(6, 64), activation="silu"),
    "layer_norm, trained": lambda new: _backward(
        layer_norm(new(6, 64, grad=True), new(64, grad=True), new(64, grad=True))
    ),
    "silu_mul": lambda new: silu_mul(new(6, 64), new(6, 64)),
    "silu_mul, trained": lambda new: _backward(silu_mul(new(6, 64, grad=True), new(6, 64, grad=True))),
    "gelu_mul": lambda new: gelu_mul(new(6, 64), new(6, 64)),
    "relu_squared": lambda new: relu_squared(new(6, 64)),
    "conv1d": lambda new: conv1d(new(2, 16, 20), new(8, 16, 3), new(8), padding=1),
    "conv2d": lambda new: conv2d(new(2, 16, 8, 8), new(8, 16, 3, 3), new(8), padding=1, activation="silu"),
    "conv2d, trained": lambda new: _backward(
        conv2d(new(2, 16, 8, 8, grad=True), new(8, 16, 3, 3, grad=True), new(8, grad=True), padding=1)
    ),
    "conv3d": lambda new: conv3d(new(1, 8, 6, 6, 6), new(8, 8, 3, 3, 3)),
}
#: Attention by the library's own kernels.
KERNELS: dict[str, Call] = {
    "kernels": lambda new: kernels.attention(*new.qkv(), is_causal=True),
    "kernels, tiled, with a mask": lambda new: kernels.attention(*new.qkv(), "tiled", new(4, 24, 40), scale=0.3),
    "kernels, trained": lambda new: _backward(kernels.attention(*new.qkv(grad=True), is_causal=True)),
    "kernels, trained with a mask": lambda new: _backward(
        kernels.attention(*new.qkv(grad=True), mask=new(4, 24, 40, grad=True))
    ),
}
CALLS: dict[str, Call] = {**ATTENTION, **FP8, **FUSED, **KERNELS}


class _Recorder(TorchDispatchMode):
    """Records the library's operators with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cudnn_sdpa":
            assert not kwargs
            self.calls.append((function, tree_map_only(Tensor, _copied, args)))
        return function(*args, **(kwargs or {}))


def _copied(tensor: Tensor) -> Tensor:
    in_backward = torch._C._current_graph_task_id() != -1  # the arguments do not require grad
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copied.copy_(tensor.detach()).requires_grad_(tensor.requires_grad and not in_backward)


def recorded(call: Call, device: str) -> list[tuple[Any, tuple[Any, ...]]]:
    """The operators that a call reaches, each with its arguments."""
    inputs = Inputs(device)
    with _Recorder() as recorder:
        call(inputs)
    return recorder.calls


def check(operator: Any, arguments: tuple[Any, ...]) -> None:
    """Runs opcheck: schema, autograd, fake tensors, and tracing with symbolic shapes."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    is_fp8 = any(x.dtype == E4M3 for x in tensors)
    if is_fp8:
        checks.remove("test_schema")  # it needs an addition that PyTorch lacks for FP8
    if operator._schema.name.endswith(("forward_lse", "forward_statistics")) and any(x.requires_grad for x in tensors):
        checks.remove("test_aot_dispatch_dynamic")  # there is no gradient of the second result
    # Sums have a different order in every run; FP8 can only be compared exactly.
    tolerances = {"rtol": 2e-2, "atol": 2e-2} if tensors[0].is_cuda and not is_fp8 else {}
    results = torch.library.opcheck(operator, arguments, test_utils=tuple(checks), **tolerances)
    assert set(results.values()) == {"SUCCESS"}
