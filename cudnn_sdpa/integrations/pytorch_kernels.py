"""Our functions as kernels of PyTorch's operators, whose arguments differ between versions of PyTorch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.engine import fallback
from cudnn_sdpa.engine.dispatch_state import is_autocasting
from cudnn_sdpa.engine.native.calls import NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.errors import LibraryError, UnsupportedError

#: Maximum number of remembered signatures of calls made while a fallback was in force.
MAX_ALLOWED = 8192

#: Signatures of forward calls made while a fallback was in force. Their gradients may fall back, too:
#: autograd's threads, which compute those of a GPU, do not have the setting.
_allowed: set[Hashable] = set()


def kernel_before(operator: Any, key: str) -> Any:
    try:
        return torch.library.get_kernel(operator, key)
    except RuntimeError:
        return None


class Kernel:
    """One of our functions as a kernel: arguments by name, defaults for those that this PyTorch lacks.

    Every PyTorch has the function's parameters without a default. Where the function raises `UnsupportedError` and a
    fallback is in force, the replaced kernel (`before`) runs instead.
    """

    def __init__(self, function: Callable[..., object], results: int, schema: Any, before: Any) -> None:
        self._name, self._function, self._before = schema.name, function, before
        parameters = inspect.signature(function).parameters
        arguments = list(schema.arguments)
        self._names = [x.name for x in arguments if not x.kwarg_only]
        self._unknown = {x.name: x.default_value for x in arguments if x.name not in parameters}
        missing = [n for n, x in parameters.items() if x.default is x.empty and n not in [y.name for y in arguments]]
        required = [x.name for x in arguments if x.name in self._unknown and not x.has_default_value()]
        if missing or required or len(schema.returns) != results:
            raise LibraryError(
                f"{self._name} of PyTorch {torch.__version__} is not what this version of cudnn_sdpa knows: {schema}"
            )
        self._is_in_order = not self._unknown and self._names == list(parameters)[: len(self._names)]
        self._positions = [self._names.index(name) for name in ("query", "key", "value")]
        self._is_gradient = "grad_out" in self._names

    def __call__(self, keys: Any, *args: Any, **kwargs: object) -> object:
        """The operator's results; `keys` are the dispatcher's."""
        in_force = fallback.is_in_force()
        if not (in_force or (self._is_gradient and _allowed)):
            return self._run(args, kwargs)
        signature = tuple((args[index].device, args[index].dtype, args[index].shape) for index in self._positions)
        if in_force and not self._is_gradient:
            if len(_allowed) >= MAX_ALLOWED:
                _allowed.clear()
            _allowed.add(signature)
        if self._before is None or not (in_force or signature in _allowed):
            return self._run(args, kwargs)
        if self._named(args, kwargs).get("dropout_p"):
            return self._run_without_fallback(args, kwargs)
        return fallback.or_else(
            lambda: self._run(args, kwargs),
            lambda: self._before.call_boxed(keys, *args, **kwargs),
            lambda: (self._name, args[self._positions[0]].dtype),
        )

    def _named(self, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, object]:
        """The arguments by name; the dispatcher leaves trailing ones out where they are the defaults."""
        return dict(zip(self._names, args, strict=False)) | kwargs

    def _run(self, args: Sequence[object], kwargs: dict[str, object]) -> object:
        if self._is_in_order:
            return self._function(*args, **kwargs)
        named = self._named(args, kwargs)
        for name, default in self._unknown.items():
            value = named.pop(name, default)
            if isinstance(value, Tensor) or value != default:
                raise UnsupportedError(
                    f"{self._name} with {name}",
                    [f"this version of cudnn_sdpa does not know the argument, which is {value!r} and not {default!r}"],
                    f"a call without {name}",
                )
        return self._function(**named)

    def _run_without_fallback(self, args: Sequence[object], kwargs: dict[str, object]) -> object:
        try:
            return self._run(args, kwargs)
        except UnsupportedError as error:
            why = "it does not fall back with dropout, as another kernel draws other random numbers for its gradients"
            raise UnsupportedError(error.what, [*error.reasons, why], error.suggestion) from None


def launch(operation: Operation[CallT], call: CallT, calls: NativeCalls, signature: tuple[object, ...]) -> Any:
    """Runs a call of PyTorch's dispatcher, below autograd and autocast, neither of which acts again."""
    with undisturbed(operation.first_of(call)):
        return operation(call, NativeKey(calls, signature))


def launch_backward(operation: Operation[CallT], backward: BackwardCall[CallT]) -> Sequence[Tensor]:
    """Runs a backward call of PyTorch's dispatcher, below autograd; returns the needed gradients."""
    with undisturbed(operation.first_of(backward.call)):
        return operation.run_backward(backward)


@contextlib.contextmanager
def undisturbed(query: Tensor) -> Iterator[None]:
    with torch.no_grad():
        if not (is_autocasting() or fallback.is_in_force()):
            yield
            return
        with torch.autocast(query.device.type, enabled=False), fallback.fallback(None):
            yield
