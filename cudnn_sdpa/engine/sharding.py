"""Calls on `torch.distributed.tensor.DTensor`s: each rank runs the call on its own parts, and nothing is communicated.

Divisions are data: an operation lists its `ShardingStrategy`s, each for one mesh dimension. A call takes, in each mesh
dimension, the strategy that its tensors are sharded for; replicated tensors follow without communication. The local
tensors make a call of their own, and its results become DTensors. A tensor that every rank has whole gets a gradient
that is a part of a sum, `Partial()`, where ranks have different parts of the result.

A call that is sharded otherwise is refused, with the redistribution that would make it right: communication is the
caller's to choose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from cudnn_sdpa.errors import DeviceError, OptionError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from cudnn_sdpa.engine.launch import Result

TensorT = TypeVar("TensorT", bound=Tensor)
ParameterT = TypeVar("ParameterT", bound=Tensor | None)
#: The results of a function: always one, or as many as it has.
FoundT = TypeVar("FoundT", Tensor, "Result")

#: The result is the largest of what the ranks have.
MAX = "max"

#: The result is the sum of what the ranks have.
SUM = "sum"

_PLAIN = (Tensor, torch.nn.Parameter)


class ShardingStrategy(NamedTuple):
    """A division of a call among the ranks of a mesh dimension.

    Attributes:
        name: The thing that each rank has a part of, for messages.
        inputs: The dimension in which each operand is divided; the others are replicated. A negative one is counted
            from the end, for an operand that broadcasts: without that dimension, or with size 1, it is replicated.
        results: The dimension in which each result is divided, or `MAX`, or `SUM`; one number for all results.
        divisible: Operands whose size in that dimension must be a multiple of the number of ranks.
        non_empty: Operands of which each rank must have a part that is not empty.
        refused: Why this call cannot be divided so; empty if it can.
        alternative: A function for such calls, besides a redistribution.
    """

    name: str
    inputs: Mapping[str, int]
    results: int | tuple[int | str, ...]
    divisible: tuple[str, ...] = ()
    non_empty: tuple[str, ...] = ()
    refused: str = ""
    alternative: str = ""

    def dimension(self, name: str, tensor: Tensor) -> int | None:
        """The dimension in which an operand is divided; None if each rank has it whole."""
        dim = self.inputs.get(name)
        if dim is None or dim >= 0:
            return dim
        return None if -dim > tensor.dim() or tensor.shape[dim] == 1 else dim + tensor.dim()

    def result(self, number: int) -> int | str:
        return self.results if isinstance(self.results, int) else self.results[number]


#: The strategies of a call, the usual first, given its operands and options by name.
Strategies = Callable[[Mapping[str, object]], Sequence[ShardingStrategy]]

#: In which dimension a tensor is sharded over a mesh dimension: None if it is replicated, text for anything else.
_Placed = int | str | None


def along(whole: Mapping[str, int], *, sums: int = 0) -> Strategies:
    """The strategies of a function of rows: any dimension of these operands but their last ones.

    Results are divided as the operands are; operands that are not named, or of another rank than the first, are
    replicated, and so are those of size 1 there, which are broadcast.

    Args:
        whole: How many of an operand's last dimensions each rank must have whole, by name.
        sums: How many results, after the first, are sums of what the ranks have.
    """
    first = next(iter(whole))

    def strategies(arguments: Mapping[str, object]) -> list[ShardingStrategy]:
        operands = {name: x for name in whole if isinstance(x := arguments.get(name), Tensor)}
        rank = operands[first].dim() if first in operands else 0
        operands = {name: x for name, x in operands.items() if x.dim() == rank}
        found = []
        for dim in range(rank):
            able = {name: x for name, x in operands.items() if dim < rank - whole[name]}
            if first in able:
                wide = [name for name, x in able.items() if x.shape[dim] > 1]
                results: int | tuple[int | str, ...] = (dim, *(SUM,) * sums) if sums else dim
                found.append(ShardingStrategy(f"dimension {dim}", dict.fromkeys(wide or able, dim), results))
        return found

    return strategies


#: Whether gradients of `to_local` depend on nothing: a second backward pass would leave some out, without an error.
_CUTS_GRAPH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _refuse_graph_of_gradient(gradient: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        reasons = [f"PyTorch {torch.__version__} loses the graph of gradients of DTensors' local tensors"]
        raise UnsupportedError("create_graph=True with calls on DTensors", reasons, "create_graph=False")
    return gradient


def _as_recorded(tensor: TensorT) -> TensorT:
    """The tensor; where no gradients are recorded, one of the same memory that requires none.

    In inference mode PyTorch until 2.11 can make or redistribute no DTensor of one that requires grad.
    """
    if torch.is_grad_enabled() or not tensor.requires_grad:
        return tensor
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return cast("TensorT", tensor.detach())
    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    local = DTensor.from_local(tensor.to_local(), mesh, placements, run_check=False, shape=shape, stride=stride)
    return cast("TensorT", local)


def has_dtensor(*values: object) -> bool:
    """Whether a value is a DTensor; imports `torch.distributed.tensor` only for a tensor of a subclass."""
    return any(isinstance(value, Tensor) and type(value) not in _PLAIN and _is_dtensor(value) for value in values)


def _is_dtensor(value: object) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


def whole(x: Tensor) -> Tensor:
    full: Tensor = x.full_tensor()  # type: ignore[attr-defined]
    return full


class ShardedCall(NamedTuple):
    """How one call is divided among the ranks of a mesh.

    Attributes:
        chosen: The strategy in each mesh dimension; None where all tensors are replicated.
    """

    mesh: DeviceMesh
    chosen: tuple[ShardingStrategy | None, ...]
    sizes: tuple[int, ...]

    def local(self, name: str, tensor: object) -> object:
        """This rank's part of an operand, differentiable; other values as they are."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if not isinstance(tensor, Tensor):
            return tensor
        wanted: list[Placement] = []
        gradient: list[Placement] = []
        for strategy in self.chosen:
            dim = None if strategy is None else strategy.dimension(name, tensor)
            wanted.append(Replicate() if dim is None else Shard(dim))
            gradient.append(Replicate() if strategy is None else Partial() if dim is None else Shard(dim))
        if not isinstance(tensor, DTensor):
            tensor = _as_recorded(tensor)
            if not tensor.requires_grad:
                return tensor
            tensor = DTensor.from_local(tensor, self.mesh, wanted, run_check=False)  # whole: its gradient is summed
        if tuple(tensor.placements) != tuple(wanted):
            tensor = _as_recorded(tensor).redistribute(placements=wanted)  # each rank takes its part of what it has
        found: Tensor = tensor.to_local(grad_placements=gradient)
        if _CUTS_GRAPH and found.requires_grad and not torch.compiler.is_compiling():
            found.register_hook(_refuse_graph_of_gradient)  # type: ignore[no-untyped-call]
        # PyTorch leaves an uneven part as a view of its padding, and calls the DTensor contiguous.
        return found.contiguous() if tensor.is_contiguous() else found

    def wrapped(self, found: FoundT) -> FoundT:
        if isinstance(found, Tensor):
            return self._wrap(0, found)
        return tuple([self._wrap(number, x) for number, x in enumerate(found)])

    def _wrap(self, number: int, tensor: Tensor) -> DTensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placements: list[Placement] = []
        shape = list(tensor.shape)
        ranks: dict[int, int] = {}
        for index, strategy in enumerate(self.chosen):
            how = None if strategy is None else strategy.result(number)
            if how is None:
                placements.append(Replicate())
            elif isinstance(how, str):
                placements.append(Partial(how))
            else:
                placements.append(Shard(how))
                shape[how] = self.sizes[index]
                ranks[how] = ranks.get(how, 1) * self.mesh.size(index)
        if all(shape[dim] % count == 0 for dim, count in ranks.items()):
            # PyTorch computes the global shape; in compiled code, which knows sizes by symbols, it must.
            return DTensor.from_local(tensor, self.mesh, placements, run_check=False)
        stride, size = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (tensor.stride(dim), -dim)):  # the local memory order
            stride[dim], size = size, size * max(1, shape[dim])
        return DTensor.from_local(
            tensor, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    def check_results(self, what: str, local: Mapping[str, object], found: Result) -> None:
        """Checks that results are divided as their strategies say, which users may declare."""
        for number, result in enumerate([found] if isinstance(found, Tensor) else found):
            for strategy in self.chosen:
                dim = None if strategy is None else strategy.result(number)
                if strategy is None or not isinstance(dim, int):
                    continue
                size = size_of(strategy, local)
                if result.dim() <= dim or result.shape[dim] != size:
                    shape = tuple(result.shape)
                    reason = (
                        f"results should have size {size} in dimension {dim}, as the operands do, and one is {shape}"
                    )
                    raise UnsupportedError(f"{what} on DTensors divided in {strategy.name}", [reason], _LOCAL_MAP)

    @property
    def is_replicated(self) -> bool:
        return any(strategy is None and self.mesh.size(index) > 1 for index, strategy in enumerate(self.chosen))

    def part(self) -> int:
        coordinate: Sequence[int] = self.mesh.get_coordinate() or []
        found = 0
        for index, strategy in enumerate(self.chosen):
            if strategy is not None:
                found = found * self.mesh.size(index) + coordinate[index]
        return found


#: For functions that do not say how their operands may be divided.
_LOCAL_MAP = "torch.distributed.tensor.experimental.local_map around it"


def sharded_call(
    what: str, strategies: Sequence[ShardingStrategy] | None, tensors: Mapping[str, object]
) -> ShardedCall:
    """How a call with these tensors, of which some are DTensors, is divided.

    Args:
        what: The function, for messages.
        strategies: Its strategies; None if it does not say how it may be divided.
        tensors: Its operands by name; other values are ignored.

    Raises:
        OptionError: The tensors are of several meshes.
        DeviceError: A plain tensor is on another kind of device.
        UnsupportedError: It cannot be divided so: with every reason, and the redistribution that would work.
    """
    from torch.distributed.tensor import DTensor

    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    sharded = {name: x for name, x in given.items() if isinstance(x, DTensor)}
    leading = next(iter(sharded))
    mesh = sharded[leading].device_mesh
    for name, other in sharded.items():
        if other.device_mesh != mesh:
            raise OptionError(name, f"a DTensor of {other.device_mesh}", f"one of {mesh}, the mesh of {leading}")
    for name, x in given.items():
        if name not in sharded and x.device.type != mesh.device_type:
            raise DeviceError(name, str(x.device), f"{mesh.device_type}, as the mesh of {leading} has")
    if mesh.get_coordinate() is None:
        reasons = [f"this rank is not in the mesh of {leading}, and has no part of the tensors"]
        raise UnsupportedError(f"{what} on DTensors", reasons, "calling it on the ranks of the mesh alone")
    if strategies is None:
        reasons = ["it does not say in which dimensions its operands may be divided"]
        raise UnsupportedError(f"{what} on DTensors", reasons, f"graph_op(..., shard=...), or {_LOCAL_MAP}")
    search = _Search(what, strategies, mesh, given, placed={name: _placed(x) for name, x in sharded.items()})
    chosen = search.chosen()
    if chosen is None:
        raise search.refusal()
    sizes = [0 if strategy is None else size_of(strategy, given) for strategy in chosen]
    return ShardedCall(mesh, chosen, tuple(sizes))


def refuse(what: str, reason: str) -> NoReturn:
    """Refuses a function on DTensors."""
    raise UnsupportedError(f"{what} on DTensors", [reason], _LOCAL_MAP)


def _placed(tensor: DTensor) -> list[_Placed]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[_Placed] = []
    for placement in tensor.placements:  # until PyTorch 2.11 torch.compile does not know the `type` of one made there
        is_strided = isinstance(placement, _StridedShard)  # in some versions of PyTorch a kind of `Shard`
        if isinstance(placement, Shard) and not is_strided:
            found.append(placement.dim % tensor.dim())
        else:
            found.append(None if isinstance(placement, Replicate) else repr(placement))
    return found


def size_of(strategy: ShardingStrategy, tensors: Mapping[str, object]) -> int:
    """The global size that a strategy divides: that of its first operand."""
    for name in strategy.inputs:
        tensor = tensors.get(name)
        if isinstance(tensor, Tensor) and (dim := strategy.dimension(name, tensor)) is not None:
            return tensor.shape[dim]
    return 0


class _Search(NamedTuple):
    what: str
    strategies: Sequence[ShardingStrategy]
    mesh: DeviceMesh
    tensors: Mapping[str, Tensor]
    placed: Mapping[str, list[_Placed]]

    def chosen(self) -> tuple[ShardingStrategy | None, ...] | None:
        possible = [self._possible(index) for index in range(self.mesh.ndim)]
        for found in itertools.product(*possible):
            if not self._obstacles(found):
                return tuple(found)
        return None

    def _possible(self, index: int) -> list[ShardingStrategy | None]:
        """The strategies in a mesh dimension; None alone where all tensors are replicated."""
        if all(at[index] is None for at in self.placed.values()):
            return [None]
        return [strategy for strategy in self._usable() if self._fits(strategy, index)]

    def _usable(self) -> list[ShardingStrategy]:
        return [strategy for strategy in self.strategies if not strategy.refused]

    def _fits(self, strategy: ShardingStrategy, index: int) -> bool:
        """Whether tensors are sharded for a strategy, or follow without communication."""
        return all(
            at[index] is None or at[index] == strategy.dimension(name, self.tensors[name])
            for name, at in self.placed.items()
        )

    def _obstacles(self, chosen: Sequence[ShardingStrategy | None]) -> list[str]:
        """Obstacles to strategies taken together: sizes, and plain tensors that would have to be divided."""
        found: list[str] = []
        for strategy in chosen:
            if strategy is None:
                continue
            shares = [self.mesh.size(index) for index, other in enumerate(chosen) if other is strategy]
            ranks = 1
            for share in shares:  # PyTorch's compiler traces this
                ranks *= share
            uneven = [name for name in strategy.divisible if self._size(strategy, name) % ranks]
            short = [name for name in strategy.non_empty if not min(_parts(self._size(strategy, name), shares))]
            for names, how in ((uneven, "in whole numbers"), (short, "so that each has one")):
                for name in names:
                    what = f"{self._size(strategy, name)} {strategy.name}"
                    found.append(f"{name} has {what}, which {ranks} ranks cannot share {how}")
            for name, x in self.tensors.items():
                dim = None if name in self.placed else strategy.dimension(name, x)
                if dim is not None:
                    why = f"which is taken as replicated, and {strategy.name} divide its dimension {dim}"
                    found.append(f"{name} is a plain tensor, {why}: expected a DTensor")
        return found

    def _size(self, strategy: ShardingStrategy, name: str) -> int:
        dim = strategy.dimension(name, self.tensors[name])
        return 0 if dim is None else self.tensors[name].shape[dim]

    def refusal(self) -> UnsupportedError:
        reasons: list[str] = []
        instead: list[str] = []
        for index in range(self.mesh.ndim):
            placed = {name: at[index] for name, at in self.placed.items() if at[index] is not None}
            if not placed:
                continue
            fitting = [strategy for strategy in self.strategies if self._fits(strategy, index)]
            for strategy in fitting:
                if strategy.refused:
                    reasons.append(f"{self._described(placed, index)}: {strategy.refused}")
                    instead += [strategy.alternative] if strategy.alternative else []
                else:
                    reasons += self._obstacles([strategy if at == index else None for at in range(self.mesh.ndim)])
            if not fitting:
                reasons.append(f"{self._described(placed, index)}; expected {self._expected(placed)}")
        first = [next(iter(self._possible(index)), None) for index in range(self.mesh.ndim)]
        reasons = list(dict.fromkeys(reasons)) or self._obstacles(first)
        suggestions = [", ".join(self._redistributions()), *instead]
        suggestion = " or ".join(dict.fromkeys([text for text in suggestions if text]))
        return UnsupportedError(f"{self.what} on DTensors placed like these", reasons, suggestion)

    def _described(self, placed: Mapping[str, _Placed], index: int) -> str:
        names = self.mesh.mesh_dim_names
        over = f" over mesh dimension {names[index]!r}" if names else f" over mesh dimension {index}"
        return " and ".join(f"{name} is {_text(at)}" for name, at in placed.items()) + over

    def _expected(self, placed: Mapping[str, _Placed]) -> str:
        name = next(iter(placed))
        dims = {strategy.dimension(name, self.tensors[name]): strategy.name for strategy in self._usable()}
        allowed = [f"{name} {_text(dim)} ({what})" for dim, what in dims.items() if dim is not None]
        return ", ".join([*allowed, f"{name} Replicate()"]) + ", and others alike"

    def _redistributions(self) -> list[str]:
        """The fewest redistributions that make the call right, as code."""
        able: list[tuple[int, int, list[str]]] = []
        for chosen in itertools.product([None, *self._usable()], repeat=self.mesh.ndim):
            changes = self._redistributions_to(chosen)
            if changes is not None:
                able.append((len(changes), chosen.count(None), changes))
        return min(able, key=lambda each: each[:2], default=(0, 0, []))[2]

    def _redistributions_to(self, chosen: Sequence[ShardingStrategy | None]) -> list[str] | None:
        changes = []
        for name, x in self.tensors.items():
            at = self.placed.get(name)
            dims = [None if strategy is None else strategy.dimension(name, x) for strategy in chosen]
            if at is None:
                if any(dim is not None for dim in dims):
                    places = ", ".join(map(_text, dims))
                    mesh = f"{next(iter(self.placed))}.device_mesh"
                    if x.requires_grad:  # a tensor that is distributed is a new leaf
                        whole = ", ".join(["Replicate()"] * len(dims))
                        on_mesh = f"DTensor.from_local({name}, {mesh}, [{whole}])"
                        changes.append(f"{on_mesh}.redistribute(placements=[{places}])")
                    else:
                        changes.append(f"distribute_tensor({name}, {mesh}, [{places}])")
                continue
            wanted = [_text(None if old is None else dim) for old, dim in zip(at, dims, strict=True)]
            if wanted != [_text(old) for old in at]:
                changes.append(f"{name}.redistribute(placements=[{', '.join(wanted)}])")
        sizes = [text for text in self._obstacles(chosen) if "plain tensor" not in text]
        return None if sizes else changes


def _parts(size: int, ranks: Sequence[int]) -> set[int]:
    """The sizes of all ranks' parts of a dimension that is sharded over mesh dimensions, one after the other."""
    sizes = {size}
    for number in ranks:
        chunks = {whole: -(-whole // number) for whole in sizes}
        sizes = {min(chunk, max(0, whole - at * chunk)) for whole, chunk in chunks.items() for at in range(number)}
    return sizes


def _text(at: _Placed) -> str:
    return "Replicate()" if at is None else f"Shard({at})" if isinstance(at, int) else at


def run(
    what: str,
    strategies: Sequence[ShardingStrategy] | None,
    tensors: Mapping[str, object],
    call: Callable[[dict[str, Any], ShardedCall], FoundT],
) -> FoundT:
    """The results, as DTensors, of a call of which some tensors are DTensors.

    Args:
        what: See `sharded_call`.
        strategies: See `sharded_call`.
        tensors: See `sharded_call`.
        call: The local call, given all operands as this rank has them.
    """
    sharded = sharded_call(what, strategies, tensors)
    local = {name: sharded.local(name, x) for name, x in tensors.items()}
    found = call(local, sharded)
    sharded.check_results(what, local, found)
    return sharded.wrapped(found)


def local_arguments(what: str, strategies: Strategies | None, arguments: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of this rank's call, for `explain`; tuples of tensors, such as scales, are replicated."""
    named: dict[str, Any] = {name: value for name, value in arguments.items() if hasattr(value, "_fields")}
    flat = dict(arguments)
    for name, value in named.items():
        flat |= {f"{name}.{field}": x for field, x in value._asdict().items()}
    sharded = sharded_call(what, None if strategies is None else strategies(arguments), flat)
    found = {name: sharded.local(name, x) for name, x in flat.items()}
    for name, value in named.items():
        found[name] = value._make([found.pop(f"{name}.{field}") for field in value._fields])
    return found


def with_summed_gradient(parameter: ParameterT) -> ParameterT:
    """A parameter whose gradient, if it is a DTensor that every rank has whole, is summed over ranks at once.

    A sum that is left `Partial()` is right, too, but until 2.11 PyTorch's `clip_grad_norm_` scales it wrongly, and its
    optimizers sum it several times in a step.
    """
    if not torch.is_grad_enabled() or parameter is None or not has_dtensor(parameter):
        return parameter
    summed: Any = parameter
    return cast("ParameterT", summed.redistribute(placements=summed.placements))  # nothing to do forward


def parameter_of_heads(parameter: Tensor, weight: Tensor | None, x: Tensor) -> Tensor:
    """The values of the heads that this rank has, of a parameter with one value for each head; differentiable.

    Args:
        parameter: The values of all heads, in each rank; or a DTensor, of which each rank has its own.
        weight: The weight of the projection that gives the heads, whose rows tensor parallelism may have sharded.
        x: The heads (B, H, S, D).
    """
    if not has_dtensor(parameter, x) and (x.shape[1] == parameter.shape[0] or not has_dtensor(weight)):
        return parameter
    from torch.distributed.tensor import DTensor

    whole: Tensor = _replicated(parameter, x, weight)
    assert isinstance(whole, DTensor)
    if isinstance(x, DTensor):
        return whole
    if isinstance(weight, DTensor) and x.shape[1] != whole.shape[0]:
        whole = whole.redistribute(placements=weight.placements)
    return whole.to_local()


def parameter_of_all_heads(parameter: Tensor, weight: Tensor | None, x: Tensor) -> Tensor:
    """A parameter that all heads share; its gradient is summed over ranks that have some of the heads.

    The arguments are those of `parameter_of_heads`, but the heads are (B, S, H, D).
    """
    if not has_dtensor(parameter, weight, x):
        return parameter
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole: Tensor = with_summed_gradient(_replicated(parameter, x, weight))
    assert isinstance(whole, DTensor)
    if isinstance(x, DTensor) or not isinstance(weight, DTensor):
        return whole
    is_divided = x.shape[2] * x.shape[3] != weight.shape[0]  # otherwise heads were gathered, and all ranks have all
    placements = [Partial() if is_divided and at.is_shard() else Replicate() for at in weight.placements]
    return whole.to_local(grad_placements=placements)


def _replicated(parameter: Tensor, *others: Tensor | None) -> Any:
    """A parameter as a DTensor, on the mesh of the first other one if it is none, of which every rank has all."""
    from torch.distributed.tensor import DTensor, Replicate

    whole = _as_recorded(parameter)
    if isinstance(whole, DTensor):
        return whole
    mesh = next(x.device_mesh for x in others if isinstance(x, DTensor))
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
