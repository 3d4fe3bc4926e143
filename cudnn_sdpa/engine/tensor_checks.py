"""Checks of tensors: their facts, strides, addresses and overlap; and new tensors for gradients."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, SupportsIndex, TypeGuard, TypeVar, overload

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, ShapeError
from cudnn_sdpa.graph.layouts import ALIGNMENT, dense_stride_like, overlaps_itself
from cudnn_sdpa.graph.scalars import is_compiling, is_true

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias
    from typing_extensions import Self

#: Bits that no aligned address has.
MISALIGNED = ALIGNMENT - 1

#: Memory usually has higher addresses. A lower address may be the offset of a tensor in storage that was freed.
LOWEST = 1 << 40


class Fields(Protocol):
    """The data of a call, a NamedTuple: its tensors, its options, and what is wanted of it."""

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> object: ...

    @overload
    def __getitem__(self, places: slice, /) -> tuple[object, ...]: ...

    def __iter__(self) -> Iterator[object]: ...

    @property
    def _fields(self) -> tuple[str, ...]: ...

    @property
    def _replace(self) -> Callable[..., Self]: ...


FieldsT = TypeVar("FieldsT", bound=Fields)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def check_is_tensor(name: str, x: object, *, optional: bool = False, hint: str = "") -> None:
    """Checks that an argument is a strided tensor on a GPU, the CPU or "meta"; or None, where `optional`."""
    check_are_tensors({name: x}, (name,) if optional else (), hint)


def check_are_tensors(arguments: Mapping[str, object], optional: Container[str] = (), hint: str = "") -> None:
    has_memory = not is_compiling() and is_plain_memory()
    for name, x in arguments.items():
        if x is None and name in optional:
            continue
        if not isinstance(x, Tensor):
            expected = "a torch.Tensor or None" if name in optional else "a torch.Tensor"
            raise OptionError(name, type(x).__name__, expected, hint)
        if x.device.type not in ("cuda", "cpu", "meta"):
            raise DeviceError(name, str(x.device), "a CUDA device, or the CPU for the reference")
        if x.is_nested:
            more = "Pad it and mask the padding, or use its parts."
            raise LayoutError(name, "a nested tensor", "a dense tensor", more)
        if x.layout != torch.strided:
            raise LayoutError(name, str(x.layout), "a dense tensor", f"Use {name}.to_dense().")
        if x.is_quantized:
            raise DtypeError(name, dtype_name(x.dtype), "a dtype that is not quantized", f"Use {name}.dequantize().")
        if type(x) is not Tensor:
            check_has_values(name, x)
        if has_memory:
            check_present(name, x)


def check_tensor(
    name: str,
    x: Tensor | None,
    like: Tensor,
    *,
    of: str = "q",
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    shape: Sequence[int | str] = (),
    meaning: str = "",
    dense: bool = False,
    hint: str = "",
) -> None:
    """Checks a tensor beside another one. It reads no address and no value, so fake tensors pass; None passes, too.

    Args:
        name: Its name.
        x: The tensor.
        like: The tensor whose device it must have.
        of: The name of that.
        dtype: The dtypes that it may have; by default only that of `like`.
        shape: Its sizes; a text names one that may be any. By default it may have any shape.
        meaning: What the shape stands for.
        dense: Whether its last dimension must be contiguous.
        hint: What to do about a wrong shape or dtype, where that is not to convert it.
    """
    if x is None:
        return
    if shape and not _has_shape(x, shape):
        sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        is_rank = all(isinstance(size, str) for size in shape)
        expected = f"rank {len(shape)}: ({sizes})" if is_rank else f"shape ({sizes})"
        raise ShapeError(name, shape_of(x), f"{expected}: {meaning}" if meaning else expected, hint)
    allowed = (like.dtype,) if dtype is None else dtype if isinstance(dtype, tuple) else (dtype,)
    if x.dtype not in allowed:
        expected = " or ".join(dict.fromkeys(map(dtype_name, allowed)))
        expected = f"{expected}, the dtype of {of}" if dtype is None else expected
        raise DtypeError(name, dtype_name(x.dtype), expected, hint or f"Convert it with {name}.to({allowed[0]}).")
    if x.device != like.device:
        move = f"Move it with {name}.to({str(like.device)!r})."
        raise DeviceError(name, str(x.device), f"{like.device}, the device of {of}", move)
    if dense and is_true(x.shape[-1] > 1) and x.stride(-1) != 1:
        got = f"stride {x.stride(-1)} in the last dimension"
        raise LayoutError(name, got, "1, a dense tensor", f"Use {name}.contiguous().")


def _has_shape(x: Tensor, shape: Sequence[int | str]) -> bool:
    if x.dim() != len(shape):
        return False
    for found, size in zip(x.shape, shape, strict=True):
        if not isinstance(size, str) and is_true(found != size):
            return False
    return True


def check_address(name: str, tensor: Tensor) -> None:
    """Refuses a tensor without memory, or at an address that kernels cannot read."""
    address = tensor.data_ptr()
    if address < LOWEST:
        check_present(name, tensor)
    if address % ALIGNMENT != 0:
        refuse_address(name, address % ALIGNMENT)


def is_causal_bias(tensor: object) -> TypeGuard[CausalBias]:
    """Whether this is a `CausalBias` of PyTorch's: a tensor whose memory was never written."""
    kind = type(tensor)
    return kind.__name__ == "CausalBias" and kind.__module__.startswith("torch.")


def check_has_values(name: str, tensor: Tensor) -> None:
    if is_causal_bias(tensor):
        hint = "It may be the mask of sdpa, scaled_dot_product_attention and kernels.attention."
        raise LayoutError(name, "a CausalBias, a tensor without values", "a tensor with values", hint)


def check_present(name: str, tensor: Tensor) -> None:
    """Refuses a plain tensor without memory for its elements.

    Tensors of subclasses and of functorch's transforms hold it elsewhere.
    """
    if not (tensor.is_cuda or tensor.is_cpu) or type(tensor).__torch_dispatch__ is not _PLAIN or not tensor.numel():
        return
    if is_functorch_wrapped_tensor(tensor):
        return
    if tensor.data_ptr() == 0 or ends_behind(tensor, tensor.untyped_storage().nbytes()):
        raise LayoutError(
            name,
            "a tensor without memory",
            "one with allocated storage",
            "Its storage was freed (resize_(0), as sharding frees weights) or shrunk, or it is a ZeroTensor.",
        )


def ends_behind(tensor: Tensor, size: int) -> bool:
    """Whether the last element of a tensor that has some lies behind the first `size` bytes of its storage."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(size < (tensor.storage_offset() + last + 1) * tensor.element_size())


_PLAIN = Tensor.__torch_dispatch__  #: of classes whose instances are plain memory


def refuse_address(name: str, remainder: int, hint: str = "") -> NoReturn:
    raise LayoutError(
        name,
        f"an address {remainder} bytes past a multiple of {ALIGNMENT}",
        f"storage aligned to {ALIGNMENT} bytes",
        hint or f"Use {name}.clone().",
    )


def check_strides(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Strides that cuDNN's kernels can read: a dense last dimension, and other strides that are multiples of 16 bytes.

    The tensors are (B, H, S, D), those of packed sequences as one sequence.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_strides_of(name, tensor)


def check_strides_of(name: str, tensor: Tensor, hint: str = "") -> None:
    """Strides of one tensor, for `check_strides`; shape checks refuse ranks other than 4."""
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
                hint or f"Use {name}.contiguous().",
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


def check_elements(**tensors: Tensor | None) -> None:
    """Refuses tensors without memory, and on CUDA addresses within an element; kernels read others one by one."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_cuda or tensor.data_ptr() < LOWEST:
            check_present(name, tensor)
        if tensor.is_cuda and tensor.data_ptr() % tensor.element_size():
            got = f"an address {tensor.data_ptr() % tensor.element_size()} bytes past an element's"
            raise LayoutError(name, got, "an address that is a multiple of the element size", f"Use {name}.clone().")


def check_lengths_present(lengths_q: Tensor | None, lengths_kv: Tensor | None) -> None:
    """Lengths on a GPU have memory, in a warm call: PyTorch's own kernels would read a null pointer."""
    if lengths_q is not None and lengths_q.data_ptr() < LOWEST:
        check_present("seq_lens_q", lengths_q)
    if lengths_kv is not None and lengths_kv.data_ptr() < LOWEST:
        check_present("seq_lens_kv", lengths_kv)


def check_out_apart(out: Tensor, call: Fields) -> None:
    """The address of `out`, the last field of a call, and that its range overlaps that of no other tensor."""
    check_addresses("Let the function allocate it.", out=out)
    check_apart("out", out, zip(call._fields, call[:-1], strict=False), "Allocate it with torch.empty_like(q).")


def check_apart(
    name: str, tensor: Tensor, others: Iterable[tuple[str, object]], hint: str = "", *, may_interleave: bool = False
) -> None:
    """Refuses a tensor, which is written to, whose range overlaps that of others.

    That is so for interleaved views, too, unless they may be: those of one projection have no element in common.
    """
    begin, end = tensor.data_ptr(), _end(tensor)
    if begin == 0 or not tensor.numel():  # it has no data
        return
    for other, x in others:
        if not isinstance(x, Tensor) or x.data_ptr() >= end or begin >= _end(x) or not x.numel():
            continue
        if not (may_interleave and _interleave(tensor, x)):
            raise LayoutError(name, f"memory that overlaps {other}", "a separate buffer", hint)


def _interleave(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are apart in each period of some length, as views of one projection are in each row."""
    strides = [
        [
            (size - 1, stride * x.element_size())
            for size, stride in zip(x.shape, x.stride(), strict=True)
            if size > 1 and stride
        ]
        for x in (one, other)
    ]
    apart = other.data_ptr() - one.data_ptr()
    for _, period in strides[0]:
        begin = apart % period
        one_end, other_end = (
            x.element_size() + sum(count * stride for count, stride in of if stride % period)
            for x, of in zip((one, other), strides, strict=True)
        )
        if one_end <= begin and begin + other_end <= period:
            return True
    return False


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
    for stride, size in sorted(zip(out.stride()[:-1], out.shape[:-1], strict=True)):
        if size != 1 and stride % alignment != 0:
            raise LayoutError("out", f"a stride of {stride}", f"multiples of {alignment} elements ({ALIGNMENT} bytes)")
    if overlaps_itself(out.shape, out.stride()):
        raise LayoutError("out", f"strides {out.stride()} that overlap", "a separate address for each element")


def _end(tensor: Tensor) -> int:
    """The address behind the last element; that of the first, or a lower one, of an empty tensor."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements += (size - 1) * stride
    address: int = tensor.data_ptr()
    return address + elements * tensor.element_size()


def multiplied(q: Tensor, factor: float) -> Tensor:
    """A dense copy of `q` times a number, in its memory order.

    What `q * factor` makes of an expanded tensor may have a last dimension that is not dense.
    """
    check_present("q", q)  # PyTorch's kernel would read a null pointer
    return torch.mul(q.detach(), factor, out=like_in_memory(q))


def without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def without_data(call: FieldsT) -> FieldsT:
    fields = zip(call._fields, call, strict=True)
    return call._replace(**{name: without_memory(x) for name, x in fields if isinstance(x, Tensor)})


def like_in_memory(tensor: Tensor) -> Tensor:
    """A new dense tensor for the gradient of `tensor`, in its memory order."""
    if tensor.dim() < 3 or (tensor.stride(-1) == 0 and tensor.shape[-1] != 1):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    stride = dense_stride_like(tensor.shape, tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
