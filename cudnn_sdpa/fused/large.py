"""Calls of graph functions on more than 2³¹ elements, in parts that run one after another.

Beyond that many, cuDNN 9.19 has no engine for norms, and other versions are untested. A call's `ShardingStrategy`, by
which ranks share it, also splits it into parts. These are views of the operands, and each writes its part of results
that are allocated once; results that are sums are summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.engine.sharding import ShardingStrategy, size_of
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused.torch_ops import Function, Options, Value
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.graph.symbolic_shapes import is_known
from cudnn_sdpa.plans.plan import allocate

#: Parts begin at multiples of this where possible, so that they are aligned whatever the length of rows.
_MULTIPLE = 64


class Split(NamedTuple):
    """Split of a large call.

    Attributes:
        way: The split dimension of each operand and result.
        size: Size of that dimension.
        part_size: Its size in each part but the last.
    """

    way: ShardingStrategy
    size: int
    part_size: int

    @property
    def parts(self) -> int:
        return -(-self.size // self.part_size)

    def part(self, function: Function, values: Sequence[Value], begin: int) -> tuple[Value, ...]:
        """The operands of the part that begins at an index."""
        return tuple([self._part(name, x, begin) for name, x in zip(function.operands, values, strict=True)])

    def _part(self, name: str, x: Value, begin: int) -> Value:
        dim = self.way.dimension(name, x) if isinstance(x, Tensor) else None
        if dim is None or not isinstance(x, Tensor) or x.shape[dim] == 1:
            return x
        view = self.of(x, dim, begin)
        is_read_there = x.is_meta or not (view.data_ptr() - x.data_ptr()) % ALIGNMENT
        return view if is_read_there else view.clone()

    def of(self, x: Tensor, dim: int, begin: int) -> Tensor:
        """The slice of a tensor for the part that begins at an index."""
        return x.narrow(dim, begin, min(self.part_size, self.size - begin))


def split_of(function: Function, values: Sequence[Value], results: Sequence[Tensor]) -> Split | None:
    """The split of a call that is too large for one plan. Parts may be too large, too.

    Raises:
        UnsupportedError: No way to split is declared.
    """
    tensors = [x for x in (*values, *results) if isinstance(x, Tensor)]
    if not any(is_known(_last(x) > known_issues.MAX_OFFSET) for x in tensors):
        return None
    named = dict(zip(function.operands, values, strict=True))
    ways = [] if function.ways is None else [way for way in function.ways(named) if not way.refused]
    for way in ways:
        size = size_of(way, named)
        if size > 1:
            divided = [(x, way.dimension(name, x)) for name, x in named.items() if isinstance(x, Tensor)]
            divided += [(x, how if isinstance(how := way.result(n), int) else None) for n, x in enumerate(results)]
            most = min(_fitting(x, dim) for x, dim in divided if dim is not None and x.shape[dim] > 1)
            return Split(way, size, most - most % _MULTIPLE if most > _MULTIPLE else max(1, most))
    reason = f"a tensor extends over more than {known_issues.MAX_OFFSET + 1} elements, as far as one plan reaches"
    declares = "graph_op(..., shard=...), by which large calls are split, or "
    raise UnsupportedError(
        f"a call of {function.__name__} this large", [reason], f"{'' if ways else declares}smaller tensors"
    )


def _last(x: Tensor) -> int:
    """The offset of the last element, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _fitting(x: Tensor, dim: int) -> int:
    """Maximum number of entries of a dimension for one plan, 0 if one is too large."""
    size, stride = x.shape[dim], x.stride(dim)
    inner = _last(x) - (size - 1) * stride
    if inner > known_issues.MAX_OFFSET:
        return 0
    return size if stride == 0 else min(size, (known_issues.MAX_OFFSET - inner) // stride + 1)


class LargeCall:
    """Launches a call in parts; `results` are the layouts of the whole results."""

    def __init__(
        self, function: Function, split: Split, values: Sequence[Value], results: Sequence[Tensor], static: Options
    ) -> None:
        self._function, self._split, self._static = function, split, static
        self._kinds = [type(None) if x is None else Tensor if isinstance(x, Tensor) else float for x in values]
        self.results: list[Layout] = [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in results]

    def run(
        self, tensors: Sequence[Tensor], numbers: tuple[float, ...], into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Results for these tensors and numbers, in `into` if it is given."""
        remaining: dict[type, Iterator[Value]] = {Tensor: iter(tensors), float: iter(numbers)}
        values = [next(remaining[kind]) if kind in remaining else None for kind in self._kinds]
        with torch.no_grad(), torch.cuda.device(tensors[0].device):
            results = [allocate(*layout) for layout in self.results] if into is None else list(into)
            sums: dict[int, Tensor] = {}
            for begin in range(0, self._split.size, self._split.part_size):
                self._run_part(values, begin, results, sums)
            for number, total in sums.items():
                results[number].copy_(total)
        return results

    def _run_part(
        self, values: Sequence[Value], begin: int, results: Sequence[Tensor], sums: dict[int, Tensor]
    ) -> None:
        function, split = self._function, self._split
        part = split.part(function, values, begin)
        call = function.prepared(part, self._static)
        parts = [
            None if isinstance(dim := split.way.result(n), str) else split.of(x, dim, begin)
            for n, x in enumerate(results)
        ]
        into = [
            x if x is not None and _is_written_there(x, layout) else allocate(*layout)
            for x, layout in zip(parts, call.results, strict=True)
        ]
        call.run([x for x in part if isinstance(x, Tensor)], tuple([x for x in part if isinstance(x, float)]), into)
        for number, (x, result) in enumerate(zip(parts, into, strict=True)):
            if x is None:
                sums[number] = sums[number] + result if number in sums else result.float()
            elif x is not result:
                x.copy_(result)


def _is_written_there(x: Tensor, layout: Layout) -> bool:
    """Whether a plan may write a result of this layout into a tensor."""
    return x.data_ptr() % ALIGNMENT == 0 and TensorLayout.of(x) == TensorLayout.of(
        torch.empty_strided(*layout[:2], dtype=layout[2], device="meta")
    )
