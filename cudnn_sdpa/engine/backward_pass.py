"""The backward pass of an operation, described once: what a backward call is, how it becomes a plan, and what is saved.

A backward call is a NamedTuple: the gradients of the results, the results that were saved, the forward call, and which
gradients are needed. In which order it is checked and what runs it is in `operation`, as for forward calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, get_type_hints

from torch import Tensor

from cudnn_sdpa.engine.call import Call, CallT_co, Fields
from cudnn_sdpa.engine.launch import Prepared
from cudnn_sdpa.engine.memory import like_in_memory
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target

if TYPE_CHECKING:
    from typing_extensions import Self


class BackwardCall(Fields, Protocol[CallT_co]):
    """A backward call of an operation, a NamedTuple.

    Its fields are the gradients of all results that are always given, then the results that are saved, then `call` and
    `needs`.

    Attributes:
        call: The forward call, with the tensors as they were saved.
        needs: Which of the operation's differentiable inputs need a gradient.
    """

    def __init__(self, *values: object) -> None: ...

    @property
    def call(self) -> CallT_co: ...

    @property
    def needs(self) -> tuple[bool, ...]: ...

    @property
    def _fields(self) -> tuple[str, ...]: ...

    @property
    def _replace(self) -> Callable[..., Self]: ...


BackwardT = TypeVar("BackwardT", bound=BackwardCall[Call])


def _nothing(_: object) -> None:
    """There is nothing more to check."""


@dataclass(eq=False)
class BackwardPass(Generic[BackwardT]):
    """The backward pass of an operation, described once.

    Attributes:
        call: The NamedTuple of a backward call.
        inputs: The inputs that can have gradients; they are the first fields of a forward call.
        reference: The needed gradients in plain PyTorch.
        readable: A backward call as kernels can read it: copies what they cannot.
        prepare: Binds a backward call that kernels can read to its plan.
        keys: The keys of the plans of a backward call that kernels can read, on a target.
        new_gradient: A new tensor for the gradient of an input, given its name and the input.
        check_types: Checks the types of what a public backward function is given besides the forward call.
        check: Checks its tensors.
        check_for_gpu: Refuses a backward call on the CPU that a GPU would refuse.
    """

    call: type[BackwardT]
    inputs: tuple[str, ...]
    reference: Callable[[BackwardT], list[Tensor]]
    readable: Callable[[BackwardT], BackwardT]
    prepare: Callable[[BackwardT], Prepared]
    keys: Callable[[BackwardT, Target, int | None], Iterator[PlanKey]]
    new_gradient: Callable[[str, Tensor], Tensor] = lambda _name, tensor: like_in_memory(tensor)
    check_types: Callable[[BackwardT], None] = _nothing
    check: Callable[[BackwardT], None] = _nothing
    check_for_gpu: Callable[[BackwardT], None] = _nothing

    def __post_init__(self) -> None:
        self.fields = tuple(get_type_hints(self.call))
        #: The tensors of a backward call besides those of the forward call.
        self.tensors = self.fields[:-2]

    def saved(self, operation: str, gives: tuple[str, ...], auxiliary: tuple[str, ...]) -> slice:
        """Which results of an operation are saved: those that a backward call has.

        Raises:
            ValueError: A backward call has other fields than the results say.
        """
        gradients, results = tuple(f"grad_{name}" for name in gives), (*gives, *auxiliary)
        saved = self.tensors[len(gradients) :]
        first = results.index(saved[0]) if saved else 0
        found = slice(first, first + len(saved))
        if self.fields != (*gradients, *results[found], "call", "needs"):
            raise ValueError(f"{operation}: a backward call of other fields than {(*gradients, '…', 'call', 'needs')}")
        return found

    def fake_gradients(self, backward: BackwardT) -> list[Tensor]:
        """What the needed gradients look like, without memory."""
        needs = zip(self.inputs, backward.needs, strict=True)
        tensors = zip(needs, backward.call, strict=False)  # what has a gradient comes first
        return [self.new_gradient(name, x) for (name, need), x in tensors if need and isinstance(x, Tensor)]


class SavedCall(Protocol):
    """What was saved of a call for its gradients: autograd's `ctx`, or what the native module gives.

    Attributes:
        saved_tensors: The tensors of the call, then the results that are saved.
        options: Its options.
        may_fall_back: Whether a fallback was in force.
    """

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]: ...

    @property
    def options(self) -> tuple[object, ...]: ...

    @property
    def may_fall_back(self) -> bool: ...


class NativelySaved(NamedTuple):
    """What the native module has saved of a call."""

    saved_tensors: tuple[Tensor | None, ...]
    options: tuple[object, ...]
    may_fall_back: bool
