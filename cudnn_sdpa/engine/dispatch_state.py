"""Whether a call may bypass PyTorch's dispatcher.

The dispatcher costs several microseconds. It is needed if something must intercept the operator: autograd, a tensor
subclass, a dispatch mode, a functorch transform, a TorchScript trace, or the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

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
is_deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

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
