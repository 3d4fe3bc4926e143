"""The arguments of `kernels.attention`, and checks of them."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import check_flag, check_mask, check_qkv, check_scale, dtype_error
from cudnn_sdpa.attention.bias import alignment_of_causal_bias, refuse_two_masks
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_elements, is_causal_bias
from cudnn_sdpa.errors import ArgumentError, ShapeError, check_choice
from cudnn_sdpa.graph.scalars import is_true

Mode = Literal["fused", "tiled", "naive"]
FUSED: Final = "fused"
TILED: Final = "tiled"
NAIVE: Final = "naive"
MODES = (FUSED, TILED, NAIVE)

#: Largest head dim of the fused form.
MAX_FUSED_DIM = 128

GPU_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class KernelArguments(NamedTuple):
    """A forward call, in the order in which operators take its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    mode: str = FUSED
    is_causal: bool = False
    scale: float | None = None
    with_statistics: bool = False

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.mask

    @property
    def scale_value(self) -> float:
        return float(self.q.shape[3]) ** -0.5 if self.scale is None else float(self.scale)


KernelT = TypeVar("KernelT", bound=KernelArguments)


class Needs(NamedTuple):
    q: bool
    k: bool
    v: bool
    mask: bool


class Gradient(NamedTuple):
    """A backward call; see `BackwardCall`. The forward pass has kept `statistics` of each row's softmax."""

    grad_out: Tensor
    out: Tensor
    statistics: Tensor
    call: KernelArguments
    needs: tuple[bool, ...]


def check_types(call: KernelArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    check_are_tensors({"q": call.q, "k": call.k, "v": call.v, "mask": call.mask}, ("mask",))


def without_causal_bias(call: KernelT) -> KernelT:
    """The call with the causal mask that PyTorch's `CausalBias` stands for; a boolean one aligned bottom-right."""
    if not is_causal_bias(call.mask):
        return call
    if call.is_causal:
        refuse_two_masks("mask", "is_causal")
    rows, columns = call.mask.seq_len_q, call.mask.seq_len_kv
    if alignment_of_causal_bias("mask", call.mask, call.q, call.k) == TOP_LEFT or rows == columns:
        return call._replace(mask=None, is_causal=True)
    device = call.q.device if isinstance(call.q, Tensor) else None
    return call._replace(mask=torch.ones(rows, columns, dtype=torch.bool, device=device).tril(columns - rows))


def check_options(call: KernelArguments) -> None:
    check_choice("mode", call.mode, MODES)
    check_flag("is_causal", call.is_causal)
    check_scale(call.scale)


def check(call: KernelArguments) -> None:
    """Checks of a call of the kernels. They read no address and no value, so fake tensors pass."""
    check_operands(call)
    q = call.q
    if q.dtype not in GPU_DTYPES and (q.device.type != "cpu" or cpu_target.checks_dtypes()):
        raise dtype_error("q", q.dtype, GPU_DTYPES, device=q.device, hint="Convert with q.float().")


def check_operands(call: KernelArguments) -> None:
    """The checks that hold for the reference, too, which takes any dtype on any device."""
    check_options(call)
    q, k, v = call.q, call.k, call.v
    check_qkv(q, k, v, for_cudnn=False)
    dim = q.shape[3]
    if is_true(v.shape[3] != dim):
        raise ShapeError("v", f"head dim {v.shape[3]}", f"{dim}, the head dim of q and k")
    if call.mode == FUSED and is_true(dim > MAX_FUSED_DIM):
        hint = f"mode={TILED!r} takes any head dim."
        raise ShapeError("q", f"head dim {dim}", f"at most {MAX_FUSED_DIM} in the fused form", hint)
    try:
        check_mask(call.mask, q, k)
    except ArgumentError as error:
        raise error.renamed({"attn_mask": "mask"}) from None


def check_memory(call: KernelArguments) -> None:
    """Addresses: tensors must have memory, and elements must be whole."""
    check_elements(q=call.q, k=call.k, v=call.v, mask=call.mask)
