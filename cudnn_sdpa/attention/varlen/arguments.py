"""A call over packed sequences, and checks of what the user passed."""

from __future__ import annotations

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

    @property
    def options(self) -> tuple[Any, ...]:
        """What is no tensor."""
        return self[7:18]

    @property
    def scale_value(self) -> float:
        """The factor of the scores."""
        return self.q.shape[2] ** -0.5 if self.scale is None else float(self.scale)

    def as_dense(self) -> ForwardArguments:
        """A dense call of one sequence with the same options: for checks that both have, and for the reference."""
        q, k, v, out = (x if x is None else x.transpose(0, 1).unsqueeze(0) for x in (*self[:3], self.out))
        assert q is not None
        assert k is not None
        assert v is not None
        kind = ForwardArguments if self.is_for_cudnn else ReferenceArguments
        return kind(
            *(q, k, v, None, self.sinks, None, None, self.rng),
            *(self.is_causal, self.causal_alignment, self.window_left, self.window_right, self.scale),
            dropout_p=self.dropout_p,
            softcap=self.softcap,
            deterministic=self.deterministic,
            with_lse=self.with_lse,
            out=out,
        )

    @property
    def is_for_cudnn(self) -> bool:
        """Whether cuDNN's limits of dtypes and head dims hold, as for `ForwardArguments`."""
        return True


class ReferenceVarlenArguments(VarlenArguments):
    """A call that plain PyTorch runs, on any device, without cuDNN's limits of dtypes and head dims."""

    __slots__ = ()

    @property
    def is_for_cudnn(self) -> bool:
        """See `VarlenArguments`."""
        return False


def check_options(call: VarlenArguments) -> None:
    """The arguments that are no tensors."""
    numbers = ForwardArguments(
        *(call.q, call.k, call.v),
        is_causal=call.is_causal,
        causal_alignment=call.causal_alignment,
        window_left=call.window_left,
        window_right=call.window_right,
        scale=call.scale,
        dropout_p=call.dropout_p,
        softcap=call.softcap,
    )
    arguments.check_options(numbers)


def check(call: VarlenArguments) -> None:
    """Everything that holds on every device; looks at no address and no value, so that fake tensors pass through."""
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
        longest = getattr(call, f"max_seqlen_{name}")
        if not arguments.is_integer(longest) or longest < 0:
            hint = "A tensor would have to be read back." if isinstance(longest, Tensor) else ""
            raise OptionError(f"max_seqlen_{name}", repr(longest), "the length of the longest sequence, an int", hint)
    if call.cu_seqlens_q.shape != call.cu_seqlens_kv.shape:
        expected = f"{tuple(call.cu_seqlens_q.shape)}, the shape of cu_seqlens_q"
        raise ShapeError("cu_seqlens_kv", shape_of(call.cu_seqlens_kv), expected)


def check_cumulative(name: str, offsets: Any, q: Tensor) -> None:
    """Where sequences begin and end: int32, (B + 1,), dense, where q is."""
    if not isinstance(offsets, Tensor):
        raise OptionError(name, type(offsets).__name__, "a torch.Tensor of B + 1 int32")
    check_is_dense(name, offsets)
    if offsets.dtype != torch.int32:
        raise DtypeError(name, dtype_name(offsets.dtype), "int32", f"Convert with {name}.to(torch.int32).")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        expected = "shape (B + 1,): 0, then where each of the B sequences ends"
        raise ShapeError(name, shape_of(offsets), expected)
    if offsets.device != q.device:
        raise DeviceError(name, str(offsets.device), f"{q.device}, the device of q")
    if offsets.shape[0] > 1 and offsets.stride(0) != 1:
        raise LayoutError(name, f"stride {offsets.stride(0)}", "a dense tensor", f"Use {name}.contiguous().")
