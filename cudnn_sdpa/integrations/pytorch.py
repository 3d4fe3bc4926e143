"""`register`: this library as an implementation of PyTorch's own attention operators."""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.integrations import pytorch_dense, pytorch_varlen
from cudnn_sdpa.integrations.pytorch_kernels import Kernel, kernel_before
from cudnn_sdpa.settings import renewed_in_children

__all__ = ["NAME", "register", "unregister"]

#: The name of the implementation in PyTorch's registry.
NAME = "cudnn_sdpa"

_DEVICES = {"cuda": "CUDA", "cpu": "CPU"}  #: dispatch keys

#: The implementation of each operator, and its number of results. `torch_attn` is behind `torch.nn.attention.varlen`.
_FUNCTIONS: dict[str, dict[str, tuple[Callable[..., object], int]]] = {
    "aten": {
        "_scaled_dot_product_cudnn_attention": (pytorch_dense.attention, 9),
        "_scaled_dot_product_cudnn_attention_backward": (pytorch_dense.gradients, 3),
    },
    "torch_attn": {
        "_varlen_attn": (pytorch_varlen.attention, 3),
        "_varlen_attn_out": (pytorch_varlen.attention_into, 1),
        "_varlen_attn_backward": (pytorch_varlen.gradients, 3),
    },
}

_lock = renewed_in_children(threading.RLock())


def register(*, device: str = "cuda") -> None:
    """Makes this library the implementation of PyTorch's cuDNN attention and of `varlen_attn`, in this process.

    Afterwards the operators behind `torch.nn.functional.scaled_dot_product_attention` under
    `SDPBackend.CUDNN_ATTENTION`, and behind `torch.nn.attention.varlen.varlen_attn` and `varlen_attn_out`, run on this
    library's plans, with their gradients, under `torch.compile` and in CUDA graphs. So does code that PyTorch and
    others build on these operators: DTensor's sharding rules, context parallelism, diffusers' `_native_cudnn`. It is
    registered as "cudnn_sdpa" with `torch.nn.attention.register_flash_attention_impl` and activated, which takes away
    an implementation that was active; PyTorch 2.9 has no such registry, and gets the same operators.

    What this library does not support raises `UnsupportedError`. Under `fallback("torch")` what was there before runs
    instead, logged as other fallbacks are, except with dropout, whose random numbers two implementations do not share.

    May be called again, which changes nothing as long as they are there. `unregister` takes them away: not between a
    forward pass and its backward pass, which another implementation would then compute.

    Args:
        device: "cuda", or "cpu" to have the operators run this library's reference on CPU tensors, for tests on
            machines without a GPU.

    Raises:
        OptionError: `device` is neither.
        LibraryError: The operators of this PyTorch have other arguments than in the supported versions.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.integrations.pytorch import register, unregister
        >>> register(device="cpu")  # on a GPU: register()
        >>> q = k = v = torch.randn(1, 4, 16, 64, dtype=torch.bfloat16)
        >>> torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0].shape
        torch.Size([1, 4, 16, 64])
        >>> unregister()
    """
    if not isinstance(device, str) or device not in _DEVICES:
        raise OptionError("device", repr(device), "'cuda', or 'cpu' for tests without a GPU")
    with _lock:
        current = _Installation.current
        active = getattr(torch.nn.attention, "current_flash_attention_impl", None)
        if current is not None and current.key == _DEVICES[device] and (active is None or active() == NAME):
            return  # other threads may be using them
        unregister()
        activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
        if activate is not None:
            register_fn = functools.partial(_Installation.install, _DEVICES[device])
            torch.nn.attention.register_flash_attention_impl(NAME, register_fn=register_fn)
            activate(NAME)
        if _Installation.current is None:  # no registry, or one that remembers that it was active
            _Installation.install(_DEVICES[device])


def unregister() -> None:
    """Takes away what `register` did: the operators are again what they were. Does nothing if it is not there.

    So does `torch.nn.attention.restore_flash_attention_impl`, in PyTorch 2.11 and later, and activating another
    implementation.

    Examples:
        >>> from cudnn_sdpa.integrations.pytorch import unregister
        >>> unregister()
    """
    with _lock:
        restore = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
        if restore is not None and torch.nn.attention.current_flash_attention_impl() == NAME:
            restore()
        if _Installation.current is not None:
            _Installation.current.remove()


class _Installation:
    """Our kernels in PyTorch's dispatcher, under one dispatch key; PyTorch's registry keeps it and calls `remove`."""

    current: _Installation | None = None

    def __init__(self, key: str) -> None:
        self.key = key
        self._libraries: list[Any] = []

    @classmethod
    def install(cls, key: str) -> _Installation:
        installation = cls(key)
        kernels = [
            (namespace, name, Kernel(*function, operator.default._schema, kernel_before(operator.default, key)))
            for namespace, functions in _FUNCTIONS.items()
            for name, function in functions.items()
            if (operator := _operator(namespace, name)) is not None
        ]
        pytorch_varlen.detect_rules()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that kernels replace others, as is intended
            for namespace in _FUNCTIONS:
                library: Any = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                installation._libraries.append(library)
                for operator_namespace, name, kernel in kernels:
                    if operator_namespace == namespace:
                        library.impl(name, kernel, key, with_keyset=True, allow_override=True)
        cls.current = installation
        return installation

    def remove(self) -> None:
        libraries, self._libraries = self._libraries, []
        for library in libraries:
            library._destroy()
        if _Installation.current is self:
            _Installation.current = None


def _operator(namespace: str, name: str) -> Any:
    if namespace == "torch_attn":
        try:
            importlib.import_module("torch.nn.attention.varlen")  # defines the operators
        except ImportError:
            return None
    return getattr(getattr(torch.ops, namespace), name, None)
