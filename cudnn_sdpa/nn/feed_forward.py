"""Feed-forward networks of transformer layers: `SwiGLU`, which is gated, and `FeedForward`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_sdpa.errors import check_choice
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.nn.checks import (
    Factory,
    check_counts,
    check_number,
    check_tokens,
    checked_flags,
    unsharded,
)
from cudnn_sdpa.nn.conversion import merge, split

#: Activations of `FeedForward`, PyTorch's own: cuDNN fuses them with convolutions, not with matrix products.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class SwiGLU(nn.Module):
    """The feed-forward network of LLaMA's layers: down(SiLU(gate(x)) · up(x)), with `silu_mul`.

    Gate and up are one projection, `gate_up_proj`, the gate's rows first: one matrix product, whose halves `silu_mul`
    reads in place. With `packed=False`, which tensor parallelism needs, they are `gate_proj` and `up_proj`, as in
    Hugging Face's models. `load_state_dict` accepts the weights of either.

    Args:
        embed_dim: Features of a token.
        hidden_dim: Hidden features.
        bias: Whether the projections have biases.
        packed: Whether gate and up are one projection; False for tensor parallelism (`parallel_plan`).
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> mlp = cudnn_sdpa.nn.SwiGLU(64, 160)
        >>> gate, up, down = torch.randn(160, 64), torch.randn(160, 64), torch.randn(64, 160)
        >>> parts = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
        >>> mlp.load_state_dict(parts)
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 64)
        >>> torch.allclose(mlp(x), (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T, atol=2e-2)
        True

    SwiGLU is from "GLU Variants Improve Transformer" (Shazeer, 2020).
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        bias: bool = False,
        packed: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(embed_dim=embed_dim, hidden_dim=hidden_dim)
        bias, packed = checked_flags(bias=bias, packed=packed)
        self.embed_dim, self.hidden_dim, self.packed = embed_dim, hidden_dim, packed
        factory: Factory = {"device": device, "dtype": dtype}
        if packed:
            self.gate_up_proj = nn.Linear(embed_dim, 2 * hidden_dim, bias=bias, **factory)
        else:
            self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, **factory)
            self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, **factory)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias, **factory)

    def reset_parameters(self) -> None:
        """Initializes the weights as `torch.nn.Linear` does."""
        for projection in self.children():
            assert isinstance(projection, nn.Linear)
            projection.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """The result (B, S, embed_dim) for tokens of the same shape."""
        check_tokens("x", x, self.embed_dim)
        if self.packed:
            hidden = silu_mul(unsharded("gate_up_proj", self.gate_up_proj(x), 2 * self.hidden_dim))
        else:
            hidden = silu_mul(self.gate_proj(x), self.up_proj(x))
        down: Tensor = self.down_proj(hidden)
        return down

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        *_, error_msgs = rest
        parts = {"gate_proj": self.hidden_dim, "up_proj": self.hidden_dim}
        if self.packed:
            merge(state_dict, prefix, into="gate_up_proj", parts=parts, error_msgs=error_msgs)
        else:
            for kind in ("weight", "bias"):
                split(state_dict, prefix, f"gate_up_proj.{kind}", {f"{name}.{kind}": n for name, n in parts.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)


class FeedForward(nn.Module):
    """The feed-forward network of vision transformers: linear2(activation(linear1(x))).

    Parameters have the same names as in `torch.nn.TransformerEncoderLayer`.

    Args:
        embed_dim: Features of a token.
        hidden_dim: Hidden features.
        activation: "gelu", with erf; "gelu_tanh", its approximation; "relu" or "silu".
        bias: Whether the projections have biases.
        dropout: Dropout probability of the hidden features in training.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> mlp = cudnn_sdpa.nn.FeedForward(64, 256)
        >>> mlp(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(embed_dim=embed_dim, hidden_dim=hidden_dim)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        (bias,) = checked_flags(bias=bias)
        check_number("dropout", dropout, below=1)
        self.embed_dim, self.hidden_dim, self.activation, self.dropout = embed_dim, hidden_dim, activation, dropout
        factory: Factory = {"device": device, "dtype": dtype}
        self.linear1 = nn.Linear(embed_dim, hidden_dim, bias=bias, **factory)
        self.linear2 = nn.Linear(hidden_dim, embed_dim, bias=bias, **factory)

    def reset_parameters(self) -> None:
        """Initializes the weights as `torch.nn.Linear` does."""
        self.linear1.reset_parameters()
        self.linear2.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """The result (B, S, embed_dim) for tokens of the same shape."""
        check_tokens("x", x, self.embed_dim)
        hidden = drop(ACTIVATIONS[self.activation](self.linear1(x)), self.dropout, self.training)
        out: Tensor = self.linear2(hidden)
        return out

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"


def drop(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(x, p) if training and p else x
