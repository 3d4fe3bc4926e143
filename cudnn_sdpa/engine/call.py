"""The data of a call, and how autograd follows one in Python.

A call is a NamedTuple: its tensors, its options, and what is wanted of it. Calls that the native module launches have a
node of its own in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine.tensor_checks import without_memory

if TYPE_CHECKING:
    from typing_extensions import Self

Result = Tensor | tuple[Tensor, ...]  #: the results of a call: alone if it is one


class Fields(Protocol):
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


def without_data(call: FieldsT) -> FieldsT:
    fields = zip(call._fields, call, strict=True)
    return call._replace(**{name: without_memory(x) for name, x in fields if isinstance(x, Tensor)})


class Tracked(Protocol):
    def forward(self, ctx: Any, inputs: tuple[object, ...], /) -> Result:
        """Runs the call. Saves what its gradients need, and sets `ctx.gradients` to the function that computes them.

        That gives the gradient of each input from `ctx`, the gradients of the results, and which are needed. Autograd's
        graph holds it, so it must hold no plan.
        """


def views_of_leaves(*values: object) -> list[Tensor]:
    """Views that hold the nodes which accumulate the gradients of leaves, while something applies an autograd function.

    PyTorch's `Function.apply` waits for the mutex of each leaf with the GIL, and an operator may wait for the GIL with
    that mutex, while it makes the leaf's node: then both threads wait forever. A view is made by an operator, which
    waits without the GIL, and as long as it lives no other makes that node. PyTorch's `get_gradient_edge` makes one,
    too.
    """
    if not torch.is_grad_enabled():
        return []
    return [x.view_as(x) for x in values if isinstance(x, Tensor) and x.requires_grad and x.is_leaf]


class Function(torch.autograd.Function):
    @classmethod
    def apply(cls, *inputs: object) -> Any:
        _views = views_of_leaves(*inputs)
        return super().apply(*inputs)  # type: ignore[no-untyped-call]


class Differentiable(Function):
    """The autograd function of all calls in eager mode. It saves the two passes through PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, tracked: Tracked, *inputs: object) -> Result:
        """Runs the call; the inputs are those that autograd tracks."""
        return tracked.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *needs = ctx.needs_input_grad
        return None, *ctx.gradients(ctx, grads, tuple(needs))
