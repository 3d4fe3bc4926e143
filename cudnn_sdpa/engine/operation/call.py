"""Base classes of calls: the methods by which an operation checks, plans, launches and differentiates a call.

The class of a call has two bases. The first is a NamedTuple with the call's data: the tensors, then the options, and
last the wanted results, where there is a choice: `with_…` for auxiliary results, and `out`. The last option may be a
NamedTuple, a group of options, which the flat schemas of operators have one by one. The second base is `Call`, or
`BackwardCall`. `pipeline` has the order in which the methods are called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from cudnn_sdpa.engine.launch import Layout, Prepared
from cudnn_sdpa.engine.sharding import ShardingStrategy
from cudnn_sdpa.engine.tensor_checks import like_in_memory
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self


class _Tuple(tuple[Any, ...]):
    __slots__ = ()

    if TYPE_CHECKING:

        def __new__(cls, *values: Any, **fields: Any) -> Self: ...

        @classmethod
        def _make(cls, iterable: Any) -> Self: ...

        _fields: ClassVar[tuple[str, ...]]

        @property
        def _replace(self) -> Callable[..., Self]: ...

        def _asdict(self) -> dict[str, Any]: ...


class Call(_Tuple):
    """A forward call: the base class of its behaviour. PyTorch's compiler traces tuples, and no other class of ours."""

    __slots__ = ()

    #: The options of a group that the operators do not have; they are at their defaults.
    omitted: ClassVar[tuple[str, ...]] = ()

    def autocast(self) -> dict[str, object]:
        """The fields that `torch.autocast`, which is on, changes."""
        return {}

    def log_key(self) -> Hashable:
        """Deduplicates the fallback's warnings: the options without sizes and values."""
        return type(self)

    def extra_key(self) -> Hashable:
        """Further values in the call's signature, besides layouts and options."""
        return None

    def check_types(self) -> None:
        """Refuses, by the argument's name, types that the operators' schemas would refuse without it."""

    def check_options(self) -> None:
        """Checks the arguments that are not tensors."""

    def check(self) -> None:
        """Checks shapes, dtypes and devices. It reads no address and no value, so fake tensors pass."""

    def check_values(self) -> None:
        """Checks values, such as lengths: on the CPU, and on a GPU if `CUDNN_SDPA_DEBUG` is 1, which waits for it."""

    def check_strides(self) -> None:
        """Checks that kernels can read the strides."""

    def check_memory(self) -> None:
        """Checks addresses, and that `out` overlaps no input."""

    def check_for_gpu(self) -> None:
        """Refuses a call on the CPU that a GPU would refuse."""

    def check_gradient(self) -> None:
        """Refuses a call whose gradients are known to be unsupported: any, if nothing is differentiable."""

    def outputs(self) -> tuple[Layout, ...]:
        raise NotImplementedError

    def reference(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def by_pytorch(self) -> Tensor | None:
        """The first result by PyTorch's own function, for `fallback`; None if that lacks an option."""
        return None

    def bind(self) -> Prepared:
        """Binds the call to its plan, which is built if there is none."""
        raise NotImplementedError

    def keys(self, target: Target, device: int | None) -> Iterator[PlanKey]:
        raise NotImplementedError

    def flops(self) -> tuple[int, int]:
        raise NotImplementedError

    def strategies(self) -> Sequence[ShardingStrategy] | None:
        """How the call may be divided among ranks, if tensors are DTensors; None if it may not."""
        return None


CallT = TypeVar("CallT", bound=Call)

#: Where, in a backward call, are its tensors besides those of the forward call.
GIVEN = slice(-2)


class BackwardCall(_Tuple, Generic[CallT]):
    """A backward call: the base class of its behaviour.

    The fields are the gradients of all results that are always given, then the results that are saved, then `call`, the
    forward call with the tensors as they were saved, and `needs`: which differentiable inputs need a gradient. Options,
    values, strides and addresses are those of the forward call; other tensors are copied where kernels cannot read.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def call(self) -> CallT: ...

        @property
        def needs(self) -> tuple[bool, ...]: ...

    def check_types(self) -> None:
        self.call.check_types()

    def check(self) -> None:
        self.call.check()

    def check_for_gpu(self) -> None:
        """Refuses a backward call on the CPU that a GPU would refuse."""

    def make_readable(self) -> Self:
        return self

    def reference(self) -> list[Tensor]:
        raise NotImplementedError

    def bind(self) -> Prepared:
        """Binds a call that kernels can read to its plan, which is built if there is none."""
        raise NotImplementedError

    def keys(self, target: Target, device: int | None) -> Iterator[PlanKey]:
        """The keys of the plans of a call that kernels can read, on a target."""
        raise NotImplementedError

    @staticmethod
    def new_gradient(name: str, tensor: Tensor) -> Tensor:
        """A new tensor for the gradient of an input, which has this name."""
        del name
        return like_in_memory(tensor)

    def fake_gradients(self) -> list[Tensor]:
        """The needed gradients without values: new tensors."""
        inputs = zip(self.call._fields, self.call, self.needs, strict=False)  # what has a gradient comes first
        return [self.new_gradient(name, x) for name, x, need in inputs if need and isinstance(x, Tensor)]
