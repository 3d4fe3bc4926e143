"""Parses the arguments of the library's functions from the command line: `q=2,8,1024,64 is_causal=true`."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence

import torch

import cudnn_sdpa.engine.explain  # noqa: F401 - registers the functions that can be explained
from cudnn_sdpa.engine import explain
from cudnn_sdpa.errors import OptionError

_WORDS = {"true": True, "false": False, "none": None}


def function_of(name: str) -> Callable[..., object]:
    """The function of the library with this name.

    Raises:
        OptionError: No function of this name can be explained.
    """
    function = explain.named(name)
    if function is None:
        names = explain.described_functions()
        raise OptionError("FUNCTION", repr(name), "one of " + ", ".join(names), _nearest(name, names))
    return function


def _nearest(name: str, names: Iterable[str]) -> str:
    """A hint at a similar name; empty if there is none."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"Did you mean {found[0]}?" if found else ""


def arguments_of(
    function: Callable[..., object], words: Sequence[str], dtype: str, *, requires_grad: bool
) -> dict[str, object]:
    """Parses words: shapes become tensors without values, everything else Python literals.

    Args:
        function: The function to call.
        words: Each `name=value`; the shape of a tensor may end with its dtype, `cu_seqlens_q=17:int32`.
        dtype: Dtype of tensors without one.
        requires_grad: Whether floating-point tensors require grad.

    Raises:
        OptionError: A word cannot be parsed, the function has no such argument, or one is missing.
    """
    parameters = inspect.signature(function).parameters
    arguments: dict[str, object] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise OptionError("ARGUMENT", repr(word), "NAME=VALUE, such as q=2,8,1024,64 or is_causal=true")
        if name not in parameters:
            raise OptionError("ARGUMENT", repr(word), "one of " + ", ".join(parameters), _nearest(name, parameters))
        if name in arguments:
            raise OptionError("ARGUMENT", repr(word), f"{name} once")
        is_tensor = "Tensor" in str(parameters[name].annotation) and text.lower() != "none"
        arguments[name] = _tensor(name, text, dtype, requires_grad) if is_tensor else _value(text)
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in arguments]
    if missing:
        raise OptionError("ARGUMENT", f"no {missing[0]}", f"{missing[0]}=VALUE, a required argument")
    return arguments


def _tensor(name: str, text: str, default_dtype: str, requires_grad: bool) -> torch.Tensor:
    sizes, _, own_dtype = text.partition(":")
    dtype = getattr(torch, own_dtype or default_dtype, None)
    if not isinstance(dtype, torch.dtype):
        name = name if own_dtype else "dtype"
        raise OptionError(name, repr(own_dtype or default_dtype), "a dtype such as bfloat16")
    shape = _value(f"{sizes},") if sizes.strip() else ()
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise OptionError(name, repr(text), "a shape such as 2,8,1024,64, or 17:int32 with a dtype")
    try:
        tensor = torch.empty(shape, dtype=dtype)  # its memory is never touched
    except RuntimeError:
        raise OptionError(name, repr(text), "a tensor that fits in memory") from None
    return tensor.requires_grad_(requires_grad and tensor.is_floating_point())


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two for thousands of signs or brackets
        return text
