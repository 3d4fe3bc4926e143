"""Weights of other modules: what may be converted, and under which names it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.errors import OptionError, UnsupportedError

#: PyTorch's attention has an output projection of a class of its own, which computes the same.
LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def check_type(name: str, module: Any, *kinds: type) -> None:
    """Something is exactly of one of some classes: one derived from them may compute something else.

    Raises:
        OptionError: It is not.
        UnsupportedError: Hooks would be lost.
    """
    if type(module) not in kinds:
        expected = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds if hasattr(nn, kind.__name__))
        hint = "A class derived from it may compute something else." if isinstance(module, kinds) else ""
        raise OptionError(name, f"{type(module).__module__}.{type(module).__qualname__}", expected, hint)
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    refuse("this conversion", {"a hook is registered on it or on a part of it, and would be lost": hooked})


def refuse(what: str, reasons: dict[str, bool], suggestion: str = "") -> None:
    """Raises with all reasons that hold, if any does.

    Raises:
        UnsupportedError: One holds.
    """
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise UnsupportedError(what, found, suggestion)


def copy_parameter(target: Tensor | None, *sources: Tensor | None) -> None:
    """Copies parameters, one below the other, into one; or none into none.

    Raises:
        UnsupportedError: They do not fit.
    """
    given = [source for source in sources if source is not None]
    uneven = (target is None) == bool(given)
    refuse("this conversion", {"some of its projections have biases and others have none": uneven})
    if target is None:
        return
    shape = (sum(len(source) for source in given), *given[0].shape[1:])
    reason = f"weights have shape {tuple(shape)}, and {tuple(target.shape)} is expected"
    refuse("this conversion", {reason: shape != tuple(target.shape)})
    with torch.no_grad():
        target.copy_(torch.cat(given))
    target.requires_grad_(all(source.requires_grad for source in given))


def copy_linear(target: nn.Linear, source: nn.Linear) -> None:
    """Copies weight and bias."""
    copy_parameter(target.weight, source.weight)
    copy_parameter(target.bias, source.bias)


def merge(state_dict: dict[str, Any], prefix: str, into: str, parts: dict[str, int], error_msgs: list[str]) -> None:
    """Puts weights, and biases, that come one by one under the name of the projection that holds them all.

    Args:
        state_dict: Is changed. If it has the projection itself, or not all parts, it stays as it is.
        prefix: Of the names of the module.
        into: The projection.
        parts: The names of its parts from the first row on, and how many rows each has.
        error_msgs: Where `load_state_dict` collects what is wrong.
    """
    for kind in ("weight", "bias"):
        whole = f"{prefix}{into}.{kind}"
        names = [f"{prefix}{part}.{kind}" for part in parts]
        if whole in state_dict or not all(name in state_dict for name in names):
            continue
        found: Sequence[Tensor] = [state_dict.pop(name) for name in names]
        for name, tensor, rows in zip(names, found, parts.values(), strict=True):
            if tensor.shape[0] != rows:
                error_msgs.append(f"size mismatch for {name}: got {tensor.shape[0]} rows; expected {rows}.")
        if len({tensor.shape[1:] for tensor in found}) > 1:
            shapes = ", ".join(f"{name} {' × '.join(map(str, x.shape))}" for name, x in zip(names, found, strict=True))
            error_msgs.append(f"size mismatch for the parts of {into}: got {shapes}; expected as many columns in all.")
            continue
        state_dict[whole] = torch.cat(list(found))


def rename(state_dict: dict[str, Any], prefix: str, names: dict[str, str]) -> None:
    """Gives tensors whose names, or beginnings of names, are those of another library the names of ours."""
    for old, new in names.items():
        for name in [name for name in state_dict if name.startswith(prefix + old)]:
            renamed = prefix + new + name.removeprefix(prefix + old)
            if renamed not in state_dict:
                state_dict[renamed] = state_dict.pop(name)


def split(state_dict: dict[str, Any], prefix: str, whole: str, parts: dict[str, int]) -> None:
    """Puts the first rows of a tensor under one name, and the rest under others; what does not fit stays.

    Args:
        state_dict: Is changed.
        prefix: Of the names of the module.
        whole: The name of the tensor.
        parts: Their names, and how many rows each has.
    """
    name, renamed = prefix + whole, [prefix + part for part in parts]
    tensor = state_dict.get(name)
    if tensor is None or any(part in state_dict for part in renamed) or len(tensor) != sum(parts.values()):
        return
    del state_dict[name]
    state_dict.update(zip(renamed, torch.split(tensor, list(parts.values())), strict=True))
