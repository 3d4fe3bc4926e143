"""Random tensors: first a spec (shape, dtype, memory layout, kind of values), then values.

The spec comes from a `random.Random` and is the same on every device. Fresh values can be drawn any time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Layout:
    """The memory layout of a tensor in its storage.

    Attributes:
        order: Dimensions from the outermost to the innermost.
        before: Elements of the storage before the tensor, in each dimension.
        after: Elements of the storage after it, in each dimension.
        step: The slicing step of each dimension.
        expanded: Dimensions with stride 0.
        lone: The (unused) stride of dimensions of size 1; None keeps PyTorch's.
        offset: Elements of the storage before the whole tensor.
        negative: Whether it is a view with the negative bit.
    """

    order: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    step: tuple[int, ...]
    expanded: tuple[int, ...] = ()
    lone: int | None = None
    offset: int = 0
    negative: bool = False


@dataclass(frozen=True)
class Values:
    """The kind of values.

    Attributes:
        kind: "normal", "bool", or "integers".
        scale: The standard deviation of normal values.
        shift: The mean of normal values.
        hidden: The share of values that are `filler`, or of booleans that are False.
        filler: The value that masks a key.
        row: Whether one row of the second-last dimension is `filler` entirely.
        limits: The range of integers.
    """

    kind: str = "normal"
    scale: float = 1.0
    shift: float = 0.0
    hidden: float = 0.0
    filler: float = -math.inf
    row: bool = False
    limits: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    values: Values = Values()

    def __str__(self) -> str:
        like = self.make("meta")
        dtype = str(self.dtype).removeprefix("torch.")
        more = [f"offset {self.layout.offset}"] if self.layout.offset else []
        more += ["negative bit"] if self.layout.negative else []
        more += [f"fill {self.values.filler}"] if self.values.hidden or self.values.row else []
        return f"{dtype}{list(self.shape)} strides {list(like.stride())}" + "".join(f", {x}" for x in more)

    def make(self, device: str, generator: torch.Generator | None = None) -> Tensor:
        """The tensor, with fresh values from the CPU generator."""
        at, rank = self.layout, len(self.shape)
        sizes = [1 if d in at.expanded else n for d, n in enumerate(self.shape)]
        spans = [at.before[d] + at.after[d] + (n - 1) * at.step[d] + 1 if n else 0 for d, n in enumerate(sizes)]
        memory = self._memory(math.prod(spans) + at.offset, device, generator)
        dense = memory[at.offset :].view([spans[d] for d in at.order])
        tensor = dense.permute([at.order.index(d) for d in range(rank)])
        for d, n in enumerate(sizes):
            if n:
                tensor = tensor.narrow(d, at.before[d], spans[d] - at.before[d] - at.after[d])
                tensor = tensor[(slice(None),) * d + (slice(None, None, at.step[d]),)]
        if self.values.row and rank > 1 and sizes[-2] > 1 and device != "meta":
            tensor[..., int(torch.randint(sizes[-2], (), generator=generator)), :] = self._filler
        tensor = tensor.expand(self.shape)
        if at.lone is not None and 1 in self.shape and tensor.numel():
            strides = [at.lone if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
            tensor = tensor.as_strided(tensor.shape, strides, tensor.storage_offset())
        return torch._neg_view(tensor) if at.negative else tensor

    @property
    def _filler(self) -> float:
        if self.dtype == torch.bool:
            return False
        filler = self.values.filler
        filler = max(filler, float(torch.finfo(self.dtype).min)) if math.isfinite(filler) else filler
        return -filler if self.layout.negative else filler

    def _memory(self, count: int, device: str, generator: torch.Generator | None) -> Tensor:
        if device == "meta":
            return torch.empty(count, dtype=self.dtype, device=device)
        v = self.values
        if v.kind == "integers":
            return torch.randint(*v.limits, (count,), generator=generator).to(self.dtype).to(device)
        if v.kind == "bool":
            return (torch.rand(count, generator=generator) >= v.hidden).to(device)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        numbers = torch.randn(count, generator=generator, dtype=wide) * v.scale + v.shift
        if self.dtype in FP8:
            limit = torch.finfo(self.dtype).max
            return numbers.clamp(-limit, limit).to(self.dtype).to(device)
        numbers = numbers.to(self.dtype)
        if v.hidden:
            numbers[torch.rand(count, generator=generator) < v.hidden] = self._filler
        return numbers.to(device)


def dense(shape: tuple[int, ...], dtype: torch.dtype, **values: object) -> Spec:
    none = (0,) * len(shape)
    layout = Layout(tuple(range(len(shape))), none, none, (1,) * len(shape))
    return Spec(tuple(shape), dtype, layout, Values(**values))  # type: ignore[arg-type]


def drawn(
    r: random.Random,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    unit: int = 1,
    last_dense: bool = False,
    expands: float = 0.15,
    fixed: tuple[int, ...] = (),
    slices: bool = True,
    **values: object,
) -> Spec:
    """A tensor anywhere in memory.

    Args:
        r: The source of randomness.
        shape: Its shape.
        dtype: Its dtype.
        unit: Strides of dimensions of two or more, and the offset, are multiples of this; then the last dimension is
            innermost, and a multiple of it.
        last_dense: Whether the last dimension is the innermost and dense.
        expands: The probability that a dimension has stride 0.
        fixed: Dimensions that are not expanded.
        slices: Whether it may be a slice of a larger tensor.
        **values: Fields of `Values`.
    """
    rank = len(shape)
    order = list(range(rank))
    last_dense = (last_dense or unit > 1) and rank > 0
    how = r.random()
    if how > 0.35:  # otherwise row-major
        if how < 0.6 and rank > 2:  # channels last, or heads next to the head dim
            order = [0, *range(2, rank), 1] if not last_dense else [0, *range(2, rank - 1), 1, rank - 1]
        elif last_dense:
            order = [*r.sample(order[:-1], rank - 1), rank - 1]
        else:
            r.shuffle(order)
    before, after, step = [0] * rank, [0] * rank, [1] * rank
    if slices and r.random() < 0.35:
        for d in range(rank):
            if r.random() < 0.5:
                size = unit if d == rank - 1 else 1
                before[d], after[d] = size * r.choice([0, 0, 1, 2]), size * r.choice([0, 1, 3])
                if not (last_dense and d == rank - 1):
                    step[d] = r.choice([1, 1, 1, 2])
    expanded = ()
    if r.random() < expands:
        expanded = tuple(d for d in range(rank - 1 if last_dense else rank) if d not in fixed and r.random() < 0.4)
    lone = r.choice([0, 1, 3, 1000]) if r.random() < 0.25 else None
    if last_dense and rank and shape[-1] == 1:
        lone = None
    offset = unit * r.choice([1, 2, 5]) if slices and r.random() < 0.15 else 0
    layout = Layout(tuple(order), tuple(before), tuple(after), tuple(step), expanded, lone, offset)
    return Spec(tuple(shape), dtype, layout, Values(**values))  # type: ignore[arg-type]


def negated(spec: Spec) -> Spec:
    """The same as a view with the negative bit."""
    return replace(spec, layout=replace(spec.layout, negative=True))


def aligned(spec: Spec) -> Spec:
    unit = max(1, 16 // spec.dtype.itemsize)
    offset = spec.layout.offset + -spec.make("meta").storage_offset() % unit
    return replace(spec, layout=replace(spec.layout, offset=offset))


#: Kinds of grad_out.
GRADIENTS = (
    *("dense", "dense", "dense", "permuted", "permuted", "expanded", "stride 0", "transposed", "sliced"),
    *("negative", "zero tensor"),
)


def gradient_like(kind: str, result: Tensor, generator: torch.Generator) -> Tensor:
    shape, rank = result.shape, result.dim()
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(result.dtype).to(result.device)
    if kind == "permuted" and rank > 2:
        return numbers.transpose(1, -2).contiguous().transpose(1, -2)
    if kind == "transposed" and rank > 1:
        return numbers.mT.contiguous().mT
    if kind == "expanded" and rank > 1 and shape[-2]:
        return numbers[..., :1, :].expand_as(numbers)
    if kind == "stride 0" and result.numel():
        return numbers[(slice(0, 1),) * rank].expand_as(numbers)
    if kind == "sliced" and rank:
        wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator, dtype=torch.float64)
        return wide.to(result.dtype).to(result.device)[..., 2:-1]
    if kind == "negative":
        return torch._neg_view(numbers)
    if kind == "zero tensor":
        return torch._efficientzerotensor(shape, dtype=result.dtype, device=result.device)
    return numbers


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense and non-overlapping, in any memory order."""
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != span:
            return False
        span *= size
    return True


def is_in_order_of(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor has the memory order of another one; a tensor with strides of 0 has no order.

    If the last dimension of `like` is not dense, only the dimensions before it count: results always have dense rows.
    """
    if any(n > 1 and not stride for n, stride in zip(like.shape, like.stride(), strict=True)):
        return True
    if like.dim() and like.shape[-1] > 1 and like.stride(-1) != 1:
        tensor, like = tensor.select(-1, 0), like.select(-1, 0)
    dims = [d for d in range(like.dim()) if tensor.shape[d] > 1 and like.shape[d] > 1 and like.stride(d) > 0]
    spans = {d: (like.shape[d] - 1) * like.stride(d) for d in dims}
    return not any(
        like.stride(a) > spans[b] and not tensor.stride(a) > tensor.stride(b) for a in dims for b in dims if a != b
    )


def somewhere(tensor: Tensor, rng: random.Random) -> Tensor:
    """A copy in other memory: at any address, with or without padded rows, with heads last or not."""
    shape, kind = tensor.shape, rng.randrange(4)
    if kind == 0:
        return tensor.clone()
    if kind == 1:
        return tensor.new_empty(tensor.numel() + 3)[3:].view(shape).copy_(tensor)
    if kind == 2 or tensor.dim() < 4:
        return tensor.new_empty(*shape[:-1], shape[-1] + 16)[..., : shape[-1]].copy_(tensor)
    return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
