"""Merges of attention states as FlashInfer has them: outputs, and LSEs to the base of 2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cudnn_sdpa.attention.merge_states import merge_states as merge_natural
from cudnn_sdpa.compat.flashinfer.arguments import called
from cudnn_sdpa.engine.tensor_checks import check_are_tensors, check_tensor

_LN2 = math.log(2)


def _merged(v: Sequence[Tensor], s: Sequence[Tensor], named: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """The merged state of outputs and LSEs, each pair with its names."""
    names = {
        ours: theirs
        for i, pair in enumerate(named)
        for ours, theirs in zip((f"outs[{i}]", f"lses[{i}]"), pair, strict=True)
    }
    out, lse = called(merge_natural, v, [x.float() * _LN2 for x in s], names=names)
    return out, lse / _LN2


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to the keys of two states.

    Args:
        v_a: An output, (tokens, heads, head dim).
        s_a: Its LSE to the base of 2, (tokens, heads) float32.
        v_b: The other output.
        s_b: Its LSE.

    Returns:
        The output in the dtype of `v_a`, and its LSE. Without any keys they are zeros and minus infinity.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import merge_state
        >>> v, s = torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[0.0], [1.0]])  # the second has twice the weight
        >>> out, lse = merge_state(v[:1], s[:1], v[1:], s[1:])
        >>> round(out.item(), 3), round(lse.item(), 3)
        (0.667, 1.585)
    """
    check_are_tensors({"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b})
    return _merged((v_a, v_b), (s_a, s_b), [("v_a", "s_a"), ("v_b", "s_b")])


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merges a state into another one.

    Args:
        v: The output to update, (tokens, heads, head dim).
        s: Its LSE to the base of 2, (tokens, heads) float32, updated, too.
        v_other: The other output.
        s_other: Its LSE.
        mask: The tokens to update, (tokens,) bool; None is all.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import merge_state_in_place
        >>> v, s = torch.zeros(2, 1, 1), torch.zeros(2, 1)
        >>> merge_state_in_place(v, s, torch.ones(2, 1, 1), torch.zeros(2, 1), torch.tensor([True, False]))
        >>> v.flatten().tolist(), s.flatten().tolist()
        ([0.5, 0.0], [1.0, 0.0])
    """
    given = {"v": v, "s": s, "v_other": v_other, "s_other": s_other, "mask": mask}
    check_are_tensors(given, optional=("mask",))
    check_tensor("s", s, v, of="v", dtype=torch.float32, shape=v.shape[:-1])
    check_tensor("mask", mask, v, of="v", dtype=torch.bool, shape=v.shape[:1], meaning="the tokens to update")
    out, lse = _merged((v, v_other), (s, s_other), [("v", "s"), ("v_other", "s_other")])
    if mask is not None:
        out, lse = torch.where(mask[:, None, None], out, v), torch.where(mask[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """The attention to the keys of all states.

    Args:
        v: The outputs, (tokens, states, heads, head dim).
        s: Their LSEs to the base of 2, (tokens, states, heads) float32.

    Returns:
        The output (tokens, heads, head dim) and its LSE (tokens, heads).

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.flashinfer import merge_states
        >>> out, lse = merge_states(torch.randn(5, 4, 8, 64), torch.zeros(5, 4, 8))  # of equal weight
        >>> out.shape, lse[0, 0].item()
        (torch.Size([5, 8, 64]), 2.0)
    """
    check_are_tensors({"v": v, "s": s})
    check_tensor("v", v, v, shape=("tokens", "states", "heads", "head dim"))
    check_tensor("s", s, v, of="v", dtype=s.dtype, shape=v.shape[:-1])
    return _merged(v.unbind(1), s.unbind(1), [(f"v[:, {i}]", f"s[:, {i}]") for i in range(v.shape[1])])
