"""The arguments of a call over packed sequences, and checks of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import arguments
from cudnn_sdpa.attention.arguments import ForwardArguments, ReferenceArguments, check_is_dense, dtype_name, shape_of
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, UNBOUNDED
from cudnn_sdpa.errors import ArgumentError, DeviceError, DtypeError, LayoutError, OptionError, ShapeError


class VarlenArguments(NamedTuple):
    """A forward call over packed sequences, in the order in which operators take its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    rng: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    is_causal: bool = False
    causal_alignment: str = BOTTOM_RIGHT
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    scale: float | None = None
    dropout_p: float = 0.0
    softcap: float | None = None
    shared_cu_seqlens: bool = False
    deterministic: bool = False
    with_lse: bool = False
    out: Tensor | None = None

    # The groups of fields below are slices: built from names, they would cost a warm call 0.1 µs each.

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self[:3]

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """q, k, v and sinks: the inputs that can have a gradient."""
        return self[:4]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The inputs from q to cu_seqlens_kv."""
        return self[:6]

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The inputs from q to rng, which the backward pass needs."""
        return self[:7]

    @property
    def options(self) -> tuple[Any, ...]:
        """The options from max_seqlen_q to deterministic: what is not a tensor and decides the result."""
        return self[7:18]

    @property
    def operator_inputs(self) -> tuple[Any, ...]:
        """The inputs from q to deterministic, which every operator takes first, in the order of its schema."""
        return self[:18]

    @classmethod
    def of_operator(
        cls, inputs: Iterable[Any], *, with_lse: bool = False, out: Tensor | None = None
    ) -> VarlenArguments:
        """The call with these `operator_inputs`."""
        return cls._make((*inputs, with_lse, out))

    @property
    def scale_value(self) -> float:
        """The softmax scale."""
        return self.q.shape[2] ** -0.5 if self.scale is None else float(self.scale)

    def as_dense(self) -> ForwardArguments:
        """A dense call of one sequence with the same options, for shared checks and the reference."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in self.qkv)
        out = None if self.out is None else self.out.transpose(0, 1).unsqueeze(0)
        kind = ForwardArguments if self.is_for_cudnn else ReferenceArguments
        return kind(
            q=q,
            k=k,
            v=v,
            sinks=self.sinks,
            rng=self.rng,
            is_causal=self.is_causal,
            causal_alignment=self.causal_alignment,
            window_left=self.window_left,
            window_right=self.window_right,
            scale=self.scale,
            dropout_p=self.dropout_p,
            softcap=self.softcap,
            deterministic=self.deterministic,
            with_lse=self.with_lse,
            out=out,
        )

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims apply, as for `ForwardArguments`."""
        return True


class ReferenceVarlenArguments(VarlenArguments):
    """A call that the PyTorch reference runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    @property
    def is_for_cudnn(self) -> bool:
        """See `VarlenArguments`."""
        return False


def check_options(call: VarlenArguments) -> None:
    """The options, which are not tensors."""
    dense = ForwardArguments(
        q=call.q,
        k=call.k,
        v=call.v,
        is_causal=call.is_causal,
        causal_alignment=call.causal_alignment,
        window_left=call.window_left,
        window_right=call.window_right,
        scale=call.scale,
        dropout_p=call.dropout_p,
        softcap=call.softcap,
    )
    arguments.check_options(dense)


def check(call: VarlenArguments) -> None:
    """Checks that apply on every device. They read no address and no value, so fake tensors pass."""
    for name in ("q", "k", "v", "out"):
        tensor = getattr(call, name)
        if tensor is not None and tensor.dim() != 3:
            hint = "sdpa takes tensors of rank 4." if tensor.dim() == 4 else ""
            raise ShapeError(name, shape_of(tensor), "rank 3: (tokens, heads, head dim)", hint)
    try:
        arguments.check(call._replace(out=None).as_dense())
    except ArgumentError as error:
        raise error.renamed({"sequence length": "number of tokens"}) from None
    if call.out is not None:
        arguments.check_out(call.out, call.q, call.v, for_cudnn=arguments.has_limits(call))
    for name in ("q", "kv"):
        check_cumulative(f"cu_seqlens_{name}", getattr(call, f"cu_seqlens_{name}"), call.q)
        max_seqlen = getattr(call, f"max_seqlen_{name}")
        if not arguments.is_integer(max_seqlen) or max_seqlen < 0:
            hint = "A tensor would need a device-to-host copy." if isinstance(max_seqlen, Tensor) else ""
            raise OptionError(
                f"max_seqlen_{name}", repr(max_seqlen), "the length of the longest sequence, an int", hint
            )
    if call.cu_seqlens_q.shape != call.cu_seqlens_kv.shape:
        expected = f"{tuple(call.cu_seqlens_q.shape)}, the shape of cu_seqlens_q"
        raise ShapeError("cu_seqlens_kv", shape_of(call.cu_seqlens_kv), expected)


def check_cumulative(name: str, offsets: Any, q: Tensor) -> None:
    """Cumulative sequence lengths: int32, (B + 1,), dense, on the device of q."""
    if not isinstance(offsets, Tensor):
        raise OptionError(name, type(offsets).__name__, "a torch.Tensor of B + 1 int32")
    check_is_dense(name, offsets)
    if offsets.dtype != torch.int32:
        raise DtypeError(name, dtype_name(offsets.dtype), "int32", f"Convert with {name}.to(torch.int32).")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        expected = "shape (B + 1,): 0, then the end of each of the B sequences"
        raise ShapeError(name, shape_of(offsets), expected)
    if offsets.device != q.device:
        raise DeviceError(name, str(offsets.device), f"{q.device}, the device of q")
    if offsets.shape[0] > 1 and offsets.stride(0) != 1:
        raise LayoutError(name, f"stride {offsets.stride(0)}", "a dense tensor", f"Use {name}.contiguous().")
