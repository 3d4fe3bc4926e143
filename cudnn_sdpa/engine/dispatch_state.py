"""PyTorch around a call: its dispatcher, which a call may bypass, autograd, autocast and deterministic algorithms.

The dispatcher costs several microseconds. It is needed if something must intercept the operator: autograd, a tensor
subclass, a dispatch mode, a functorch transform, a TorchScript trace, or the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.graph.scalars import as_bool

TensorT = TypeVar("TensorT", Tensor, "Tensor | None")

try:  # all of these are C functions of some 50 ns; without one of them every call takes the dispatcher
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import is_legacy_batchedtensor, maybe_current_level

    _known = True
except ImportError:  # pragma: no cover - a PyTorch that has moved them
    _known = False

    def _profiler_enabled() -> bool:
        return True

    def is_legacy_batchedtensor(tensor: Tensor) -> bool:  # noqa: ARG001
        return False


class _Observers:
    """The predicate that says whether a profiler, or another observer of operators, is active."""

    are_active: Callable[[], bool] = staticmethod(_profiler_enabled)


def set_observer_predicate(are_active: Callable[[], bool]) -> None:
    """Replaces the profiler check with one that also sees other observers, of which PyTorch tells C++ alone."""
    _Observers.are_active = staticmethod(are_active)


def is_observed() -> bool:
    """Whether a profiler is to see operators, or any other observer if the native module is loaded."""
    return _Observers.are_active()


#: Whether `torch.use_deterministic_algorithms` is in force; the C function, which saves 40 ns.
is_deterministic_mode = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

#: Whether `torch.autocast` is on for any device: one C call, where asking for each device takes 0.2 µs more.
is_autocasting = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
)

is_batch = is_legacy_batchedtensor  #: what `is_grads_batched` makes of gradients; its Python type is Tensor


def can_bypass_dispatcher(*tensors: Tensor | None, may_cast: bool = True) -> bool:
    """Whether nothing but autograd needs to intercept a call with these tensors.

    Args:
        tensors: The tensors.
        may_cast: Whether autocast, if it is on, might cast one of them.
    """
    if may_cast and is_autocasting():
        return False
    return is_plain_memory(*tensors) and forward_ad._current_level < 0 and not is_observed()


def can_be_recognized(tensors: Sequence[Tensor], could_cast: Callable[[Sequence[Tensor]], bool]) -> bool:
    """Whether a call with these tensors may be launched as an earlier one of the same signature was.

    Args:
        tensors: The tensors.
        could_cast: Whether autocast, which is on, could cast one of them.
    """
    for tensor in tensors:
        if tensor.is_nested or is_batch(tensor):
            return False
    return can_bypass_dispatcher(*tensors, may_cast=is_autocasting() and could_cast(tensors))


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor's memory does not hold its elements: they are lazily negated, or zeros without memory.

    `torch._neg_view`, gradients through `torch.imag` and `torch.conj`, and PyTorch's zeros without memory are like
    this; PyTorch's dispatcher makes plain tensors of them.
    """
    return tensor.is_neg() or tensor._is_zerotensor()


def materialized(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its elements; dense zeros if it had no memory."""
    if tensor._is_zerotensor() and not tensor.requires_grad:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def is_plain_memory(*tensors: Tensor | None) -> bool:
    """Whether tensors are plain memory, and nothing intercepts operators on them."""
    for tensor in tensors:  # saves 0.6 µs over `all` and `is_lazy`, whose calls take as long as what they do
        if tensor is not None and (type(tensor) not in _BARE or tensor.is_neg() or tensor._is_zerotensor()):
            return False
    return _known and not _len_torch_dispatch_stack() and maybe_current_level() is None and _get_tracing_state() is None


def needs_operator(gradient: Tensor) -> bool:
    """Whether something other than autograd's engine must intercept a backward pass with this gradient.

    It may be differentiated again, batched, traced, compiled or profiled, or the dispatcher must materialize it.
    """
    return (
        torch.is_grad_enabled()
        or is_observed()
        or type(gradient) is not Tensor
        or not _known
        or is_batch(gradient)
        or maybe_current_level() is not None
        or bool(_len_torch_dispatch_stack())
        or torch.compiler.is_compiling()
        or gradient.is_neg()  # `is_lazy` without its call
        or gradient._is_zerotensor()
    )


_BARE = (Tensor, torch.nn.Parameter)


def has_subclass(*values: object) -> bool:
    for value in values:  # noqa: SIM110 - as above
        if isinstance(value, Tensor) and type(value) not in _BARE:
            return True
    return False


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a functorch transform is in force."""
    return not _known or forward_ad._current_level >= 0 or maybe_current_level() is not None


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:  # saves 0.4 µs over `any`
            if tensor is not None and tensor.requires_grad:
                # In inference mode gradients may be enabled in vain; Dynamo, which traces none, cannot ask.
                return torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled()
    return False


# Autograd.


class Tracked(Protocol):
    def forward(self, ctx: Any, inputs: tuple[object, ...], /) -> Tensor | tuple[Tensor, ...]:
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
    def forward(ctx: Any, tracked: Tracked, *inputs: object) -> Tensor | tuple[Tensor, ...]:
        """Runs the call; the inputs are those that autograd tracks."""
        return tracked.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _, *needs = ctx.needs_input_grad
        return None, *ctx.gradients(ctx, grads, tuple(needs))


# Settings that a call follows.


def cast_tensor(tensor: TensorT, q: Tensor) -> TensorT:
    """A tensor cast as autocast, if enabled for the device of `q`, casts inputs of lower-precision operations."""
    kind = q.device.type
    if tensor is None or kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensor
    lower = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if lower else tensor


def could_cast(tensors: Iterable[Tensor]) -> bool:
    """Whether autocast, if it is on, could cast one of these tensors: not if they have its dtype."""
    for tensor in tensors:
        kind = tensor.device.type
        follows = tensor.is_floating_point() and kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)
        if follows and tensor.dtype not in (torch.float64, torch.get_autocast_dtype(kind)):
            return True
    return False


class _WithQueries(Protocol):
    @property
    def q(self) -> Tensor: ...


def cast_fields(call: _WithQueries, *names: str) -> dict[str, Any]:
    return {name: cast_tensor(getattr(call, name), call.q) for name in names}


def is_deterministic(deterministic: object) -> bool:
    """Whether gradients must be bitwise deterministic: the given value, or PyTorch's setting."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    deterministic = as_bool(deterministic)
    if not isinstance(deterministic, bool):
        expected = "True, False, or None to follow torch.use_deterministic_algorithms"
        raise OptionError("deterministic", repr(deterministic), expected)
    return deterministic
