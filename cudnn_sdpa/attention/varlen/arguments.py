"""The arguments of a call over packed sequences, and checks of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import Axes, ForwardArguments, ReferenceArguments, Softmax
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT
from cudnn_sdpa.engine import tensor_checks, value_checks
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_tensor, shape_of
from cudnn_sdpa.errors import ArgumentError, OptionError, ShapeError
from cudnn_sdpa.graph.scalars import LARGEST, is_integer, is_true


class VarlenArguments(NamedTuple):
    """A forward call over packed sequences, in the order in which operators take its arguments.

    Attributes:
        cu_seqlens_kv: None if the offsets of queries are those of keys, too: the same tensor was given twice.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor | None
    rng: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    softmax: Softmax = Softmax(causal_alignment=BOTTOM_RIGHT)
    with_lse: bool = False
    out: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.v, self.sinks

    @property
    def offsets(self) -> tuple[Tensor, Tensor]:
        return self.cu_seqlens_q, self.cu_seqlens_q if self.cu_seqlens_kv is None else self.cu_seqlens_kv

    @property
    def is_empty(self) -> bool:
        return 0 in self.q.shape or 0 in self.k.shape

    def as_dense(self) -> ForwardArguments:
        """A dense call of one sequence with the same options, for shared checks and the reference."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in self.qkv)
        out = None if self.out is None else self.out.transpose(0, 1).unsqueeze(0)
        kind = ForwardArguments if self.is_for_cudnn else ReferenceArguments
        # By `_make`: in compiled code, PyTorch 2.9 knows the properties of what that gives alone.
        return kind._make((q, k, v, None, self.sinks, None, None, self.rng, self.softmax, self.with_lse, out))

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims apply, as for `ForwardArguments`."""
        return True


PACKED_AXES = Axes(entries={}, heads={"q": 1, "sinks": 0}, heads_kv={"k": 1, "v": 1})


class VarlenGradientCall(NamedTuple):
    """A backward call of packed attention; see `BackwardCall`.

    Attributes:
        call: The forward call, with the tensors as they were saved.
        needs: Which of the differentiable inputs need a gradient.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    call: VarlenArguments
    needs: tuple[bool, ...]


def offsets_of_keys(cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> Tensor | None:
    """`cu_seqlens_kv` as a call holds it: None if it is the tensor of the queries."""
    if cu_seqlens_kv is cu_seqlens_q:
        return None
    if cu_seqlens_kv is None:
        raise OptionError("cu_seqlens_kv", "NoneType", "a torch.Tensor")
    return cu_seqlens_kv


def check(call: VarlenArguments) -> None:
    """Checks of tensors that apply on every device. They read no address and no value, so fake tensors pass."""
    for name in ("q", "k", "v", "out"):
        tensor = getattr(call, name)
        hint = "sdpa takes tensors of rank 4." if tensor is not None and tensor.dim() == 4 else ""
        check_tensor(name, tensor, call.q, shape=("tokens", "heads", "head dim"), hint=hint)
    try:
        arguments.check(call._replace(out=None).as_dense())
    except ArgumentError as error:
        raise error.renamed({"sequence length": "number of tokens"}) from None
    if call.out is not None:
        arguments.check_out(call.out, call.q, call.v, for_cudnn=arguments.has_limits(call))
    for name, offsets in zip(("q", "kv"), call.offsets, strict=True):
        check_cumulative(f"cu_seqlens_{name}", offsets, call.q)
        check_max_seqlen(f"max_seqlen_{name}", getattr(call, f"max_seqlen_{name}"))
    offsets_q, offsets_kv = call.offsets
    meaning = "that of cu_seqlens_q"
    check_tensor("cu_seqlens_kv", offsets_kv, offsets_q, of="cu_seqlens_q", shape=offsets_q.shape, meaning=meaning)


def check_types(call: VarlenArguments) -> None:
    """Types that the operators' schemas would refuse as well, but without naming the argument."""
    required = {"q": call.q, "k": call.k, "v": call.v, "cu_seqlens_q": call.cu_seqlens_q}
    optional = {"cu_seqlens_kv": call.cu_seqlens_kv, "sinks": call.sinks, "out": call.out}
    arguments.check_operands(required, optional, call.with_lse)


def check_cumulative(name: str, offsets: Tensor, q: Tensor) -> None:
    """Cumulative sequence lengths: int32, (B + 1,), dense, on the device of q."""
    check_is_tensor(name, offsets)
    meaning = "0, then the end of each of the B sequences"
    check_tensor(name, offsets, q, dtype=torch.int32, shape=("B + 1",), meaning=meaning, dense=True)
    if offsets.shape[0] < 1:
        raise ShapeError(name, shape_of(offsets), f"shape (B + 1,): {meaning}")


def check_max_seqlen(name: str, max_seqlen: object) -> None:
    if not is_integer(max_seqlen) or is_true(max_seqlen < 0) or is_true(max_seqlen > LARGEST):
        hint = "A tensor would need a device-to-host copy." if isinstance(max_seqlen, Tensor) else ""
        raise OptionError(name, repr(max_seqlen), f"the length of the longest sequence, an int up to {LARGEST}", hint)


def check_values(call: VarlenArguments) -> None:
    max_seqlens = call.max_seqlen_q, call.max_seqlen_kv
    rows = zip(("cu_seqlens_q", "cu_seqlens_kv"), call.offsets, (call.q, call.k), max_seqlens, strict=True)
    for name, offsets, tensor, max_seqlen in rows:
        value_checks.check_offsets(name, offsets, tensor.shape[0], max_seqlen)


def check_strides(call: VarlenArguments) -> None:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in call.qkv)
    tensor_checks.check_strides(q, k, v)
