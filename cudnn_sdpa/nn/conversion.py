"""Conversion of other modules' weights: checks, copies, and names in state dicts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cudnn_sdpa.errors import OptionError, raise_if_unsupported

#: `torch.nn.Linear`, and the class of PyTorch's output projection, which computes the same.
LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)


def check_type(name: str, module: nn.Module, *kinds: type) -> None:
    """Refuses a subclass, which may compute something else, and hooks, which would be lost."""
    if type(module) not in kinds:
        expected = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds if hasattr(nn, kind.__name__))
        hint = "A subclass may compute something else." if isinstance(module, kinds) else ""
        raise OptionError(name, f"{type(module).__module__}.{type(module).__qualname__}", expected, hint)
    hooked = any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    raise_if_unsupported("this conversion", {"a hook is registered on it or on a submodule, and would be lost": hooked})


def copy_parameter(target: Tensor | None, *sources: Tensor | None) -> None:
    """Copies parameters, concatenated along the first dimension, into one; without a target there must be no source."""
    present = [source for source in sources if source is not None]
    uneven = (target is None) == bool(present)
    raise_if_unsupported("this conversion", {"some of its projections have biases and others have none": uneven})
    if target is None:
        return
    shape = (sum(len(source) for source in present), *present[0].shape[1:])
    reason = f"weights have shape {tuple(shape)}, and {tuple(target.shape)} is expected"
    raise_if_unsupported("this conversion", {reason: shape != tuple(target.shape)})
    with torch.no_grad():
        target.copy_(torch.cat(present))
    target.requires_grad_(all(source.requires_grad for source in present))


def copy_linear(target: nn.Linear, source: nn.Linear) -> None:
    copy_parameter(target.weight, source.weight)
    copy_parameter(target.bias, source.bias)


def merge(
    state_dict: dict[str, Tensor], prefix: str, *, into: str, parts: dict[str, int], error_msgs: list[str]
) -> None:
    """Concatenates separate weights and biases into those of one projection.

    `parts` are names in the order of the rows, each with its number of rows. The state stays as it is if it has the
    projection already or lacks a part.
    """
    for kind in ("weight", "bias"):
        merged = f"{prefix}{into}.{kind}"
        names = [f"{prefix}{part}.{kind}" for part in parts]
        if merged in state_dict or not all(name in state_dict for name in names):
            continue
        tensors: list[Tensor] = [state_dict.pop(name) for name in names]
        for name, tensor, rows in zip(names, tensors, parts.values(), strict=True):
            if tensor.shape[0] != rows:
                error_msgs.append(f"size mismatch for {name}: got {tensor.shape[0]} rows; expected {rows}.")
        if len({tensor.shape[1:] for tensor in tensors}) > 1:
            pairs = zip(names, tensors, strict=True)
            shapes = ", ".join(f"{name} {' × '.join(map(str, x.shape))}" for name, x in pairs)
            error_msgs.append(f"size mismatch for the parts of {into}: got {shapes}; expected as many columns in all.")
            continue
        state_dict[merged] = torch.cat(tensors)


def rename(state_dict: dict[str, Tensor], prefix: str, names: dict[str, str]) -> None:
    """Renames tensors by the beginnings of their names: another library's to ours."""
    for old, new in names.items():
        for name in [name for name in state_dict if name.startswith(prefix + old)]:
            renamed = prefix + new + name.removeprefix(prefix + old)
            if renamed not in state_dict:
                state_dict[renamed] = state_dict.pop(name)


def split(state_dict: dict[str, Tensor], prefix: str, merged: str, parts: dict[str, int]) -> None:
    """Splits the rows of a tensor into several; one with another number of rows stays."""
    name, part_names = prefix + merged, [prefix + part for part in parts]
    tensor = state_dict.get(name)
    if tensor is None or any(part in state_dict for part in part_names) or len(tensor) != sum(parts.values()):
        return
    del state_dict[name]
    state_dict.update(zip(part_names, torch.split(tensor, list(parts.values())), strict=True))
