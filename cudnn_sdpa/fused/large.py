"""Calls of graph functions on more than 2³¹ elements, in parts that run one after another.

Beyond that many, cuDNN 9.19 has no engine for norms, and other versions are untested. A call's `ShardingStrategy`, by
which ranks share it, also splits it into parts. These are views of the operands, and each writes its part of results
that are allocated once; results that are sums are summed in float32, and of amax values the largest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.launch import BoundPlan, Layout, new_tensor
from cudnn_sdpa.engine.sharding import MAX, ShardingStrategy, Strategies, size_of
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused.encoding import Value, joined
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.graph.scalars import is_known
from cudnn_sdpa.plans.plan import allocate

#: Parts begin at multiples of this where possible, so that they are aligned whatever the length of rows.
_MULTIPLE = 64


class Split(NamedTuple):
    """Split of a large call.

    Attributes:
        way: The split dimension of each operand and result.
    """

    way: ShardingStrategy
    size: int
    part_size: int

    @property
    def parts(self) -> int:
        return -(-self.size // self.part_size)

    def part(self, operands: Mapping[str, Value], begin: int) -> tuple[Value, ...]:
        return tuple([self._part(name, x, begin) for name, x in operands.items()])

    def _part(self, name: str, x: Value, begin: int) -> Value:
        dim = self.way.dimension(name, x) if isinstance(x, Tensor) else None
        if dim is None or not isinstance(x, Tensor) or x.shape[dim] == 1:
            return x
        view = self.of(x, dim, begin)
        is_read_there = x.is_meta or not (view.data_ptr() - x.data_ptr()) % ALIGNMENT
        return view if is_read_there else view.clone()

    def of(self, x: Tensor, dim: int, begin: int) -> Tensor:
        return x.narrow(dim, begin, min(self.part_size, self.size - begin))


def split_of(
    function: str, ways: Strategies | None, operands: Mapping[str, Value], results: Sequence[Tensor]
) -> Split | None:
    """The split of a call that is too large for one plan. Parts may be too large, too."""
    tensors = [x for x in (*operands.values(), *results) if isinstance(x, Tensor)]
    if not any(is_known(_last(x) > known_issues.MAX_OFFSET) for x in tensors):
        return None
    divisions = [] if ways is None else [way for way in ways(operands) if not way.refused]
    for way in divisions:
        size = size_of(way, operands)
        if size > 1:
            divided = [(x, way.dimension(name, x)) for name, x in operands.items() if isinstance(x, Tensor)]
            divided += [(x, how if isinstance(how := way.result(n), int) else None) for n, x in enumerate(results)]
            most = min(_fitting(x, dim) for x, dim in divided if dim is not None and x.shape[dim] > 1)
            return Split(way, size, most - most % _MULTIPLE if most > _MULTIPLE else max(1, most))
    reason = f"a tensor extends over more than {known_issues.MAX_OFFSET + 1} elements, as far as one plan reaches"
    declares = "graph_op(..., shard=...), by which large calls are split, or "
    raise UnsupportedError(
        f"a call of {function} this large", [reason], f"{'' if divisions else declares}smaller tensors"
    )


def _last(x: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _fitting(x: Tensor, dim: int) -> int:
    """Maximum number of entries of a dimension for one plan, 0 if one is too large."""
    size, stride = x.shape[dim], x.stride(dim)
    inner = _last(x) - (size - 1) * stride
    if inner > known_issues.MAX_OFFSET:
        return 0
    return size if stride == 0 else min(size, (known_issues.MAX_OFFSET - inner) // stride + 1)


@dataclass(frozen=True)
class LargeCall:
    """Launches a call in parts.

    Attributes:
        bind: Binds a part, given its operands, to its plan.
        names: The names of the operands.
        kinds: Their kinds, from `operand_kinds`.
        results: The layouts of the whole results.
    """

    bind: Callable[[tuple[Value, ...]], BoundPlan | LargeCall]
    split: Split
    names: Sequence[str]
    kinds: str
    results: Sequence[Layout]

    def __call__(
        self, tensors: Sequence[Tensor], *, numbers: tuple[float, ...], into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        operands = dict(zip(self.names, joined(self.kinds, tensors, numbers), strict=True))
        with torch.no_grad(), torch.cuda.device(tensors[0].device):
            results = [allocate(*layout) for layout in self.results] if into is None else list(into)
            sums: dict[int, Tensor] = {}
            for begin in range(0, self.split.size, self.split.part_size):
                self._run_part(operands, begin, results, sums)
            for number, total in sums.items():
                results[number].copy_(total)
        return results

    def _run_part(
        self, operands: Mapping[str, Value], begin: int, results: Sequence[Tensor], sums: dict[int, Tensor]
    ) -> None:
        split = self.split
        part = split.part(operands, begin)
        launch = self.bind(part)
        parts = [
            None if isinstance(dim := split.way.result(n), str) else split.of(x, dim, begin)
            for n, x in enumerate(results)
        ]
        into = [
            x if x is not None and _is_written_there(x, layout) else allocate(*layout)
            for x, layout in zip(parts, launch.results, strict=True)
        ]
        numbers = tuple([x for x in part if isinstance(x, float)])
        launch([x for x in part if isinstance(x, Tensor)], into=into, numbers=numbers)
        for number, (x, result) in enumerate(zip(parts, into, strict=True)):
            if x is None:
                merge = torch.maximum if split.way.result(number) == MAX else torch.add
                sums[number] = merge(sums[number], result) if number in sums else result.float()
            elif x is not result:
                x.copy_(result)


def _is_written_there(x: Tensor, layout: Layout) -> bool:
    return x.data_ptr() % ALIGNMENT == 0 and TensorLayout.of(x) == TensorLayout.of(new_tensor(layout, "meta"))
