"""`RotaryEmbedding`: positions as rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from cudnn_sdpa.engine import sharding
from cudnn_sdpa.engine.tensor_checks import dtype_name, shape_of
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.fused.rotary.rope import rope
from cudnn_sdpa.fused.rotary.rope_kernels import MAX_DIM
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.nn.checks import check_counts, checked_flags

Rotations = tuple[Tensor, Tensor]


class Norms(TypedDict, total=False):
    """Options of `rope` for norms of heads."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    zero_centered: bool


class RotaryEmbedding(nn.Module):
    """RoPE: rotates pairs of features of queries and keys by angles proportional to the position.

    Position p rotates pair i by p · base^(-2i / rotary_dim). The module has no parameters and no entries in
    `state_dict`. Its frequencies stay in float32 when the module is converted, and are recreated after construction on
    the device "meta". Positions are data: other positions need no compilation, and a CUDA graph may read them.

    Layers may share one. A model can compute the rotations once, `rotations = rope(position_ids)`, and pass them to
    each layer.

    Args:
        head_dim: Head dim.
        base: Base of the frequencies; "rope_theta" in models' configurations.
        rotary_dim: Number of rotated features, the first ones of a head; None is all.
        interleaved: Whether a pair is two neighboring features, as in the paper and in Meta's weights of LLaMA.
            Otherwise it is feature i of each half, as in GPT-NeoX and Hugging Face's models.
        frequencies: Angle of each pair per position in radians, rotary_dim / 2 numbers, for models that scale them
            (LLaMA 3.1, YaRN); replaces `base`. YaRN's factor m of cosines and sines can be part of the scale if all
            features are rotated: `Attention(scale=m**2 / head_dim**0.5)`.
        device: Of the frequencies.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> rope = cudnn_sdpa.nn.RotaryEmbedding(64, base=500000.0)
        >>> q = torch.randn(2, 10, 4, 64)  # (batch, sequence, heads, head dim)
        >>> cos, sin = rope(torch.arange(10))
        >>> rotated = rope.rotate(q, (cos, sin))
        >>> torch.allclose(rotated.norm(dim=-1), q.norm(dim=-1), atol=1e-4)
        True

    From "RoFormer: Enhanced Transformer with Rotary Position Embedding" (Su et al., 2021).
    """

    frequencies: Tensor

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        frequencies: Sequence[float] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_counts(head_dim=head_dim, rotary_dim=rotary_dim)
        (interleaved,) = checked_flags(interleaved=interleaved)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise OptionError("rotary_dim", repr(rotary_dim), f"an even number up to head_dim, {head_dim}")
        if head_dim % 2 or head_dim > MAX_DIM:
            raise OptionError("head_dim", repr(head_dim), f"an even number up to {MAX_DIM}")
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < float("inf"):
            raise OptionError("base", repr(base), "a positive number")
        self.head_dim, self.base, self.rotary_dim, self.interleaved = head_dim, base, rotary_dim, interleaved
        self.explicit_frequencies = None if frequencies is None else tuple(map(float, frequencies))
        if self.explicit_frequencies is not None and len(self.explicit_frequencies) != rotary_dim // 2:
            raise OptionError(
                "frequencies", f"{len(self.explicit_frequencies)} numbers", f"{rotary_dim // 2}, one for each pair"
            )
        initial = self._new_frequencies().to(torch.get_default_device() if device is None else device)
        self.register_buffer("frequencies", initial, persistent=False)

    def _new_frequencies(self) -> Tensor:
        """The frequencies on the CPU, bitwise equal to those of Hugging Face's models."""
        if self.explicit_frequencies is not None:
            return torch.tensor(self.explicit_frequencies, dtype=torch.float32, device="cpu")
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu") / self.rotary_dim
        return 1.0 / self.base**exponents

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Moves the frequencies; conversions of dtype and `to_empty` do not change their values."""
        if self.frequencies.is_meta:  # load_state_dict(assign=True) may have materialized the other modules
            self.frequencies = self._new_frequencies()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = self._new_frequencies().to(self.frequencies.device)
        return self

    def forward(self, position_ids: Tensor) -> Rotations:
        """Cosines and sines of positions.

        Args:
            position_ids: (S,) or (B, S), integers.

        Returns:
            Both (..., S, rotary_dim / 2), float32.

        Raises:
            ArgumentError: `position_ids` is not such a tensor.
        """
        check_positions(position_ids)
        frequencies = self.frequencies
        if frequencies.device != position_ids.device:
            with torch.inference_mode(False):
                frequencies = self._new_frequencies().to(position_ids.device)
            if not is_compiling() and not position_ids.is_meta:
                self.frequencies = frequencies  # for later calls
        if sharding.has_dtensor(frequencies) and not sharding.has_dtensor(position_ids):
            frequencies = sharding.whole(frequencies)  # `distribute_module` makes buffers DTensors
        angles = position_ids.unsqueeze(-1).float() * frequencies
        return angles.cos(), angles.sin()

    def rotate(self, heads: Tensor, rotations: Rotations) -> Tensor:
        """Rotates heads by the angles of their positions, in float32; by `cudnn_sdpa.rope`.

        Args:
            heads: (B, S, H, D).
            rotations: Cosines and sines of positions (S,), (1, S) or (B, S).

        Returns:
            A tensor of the same shape and dtype, dense in the memory order of the heads.

        Raises:
            ArgumentError: The rotations do not match the heads.
        """
        return rotated(self, heads, None, rotations)[0]

    def extra_repr(self) -> str:
        angles = f"base={self.base}" if self.explicit_frequencies is None else "frequencies=(...)"
        return f"{self.head_dim}, {angles}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


def rotated(
    embedding: RotaryEmbedding, q: Tensor, k: Any, rotations: Rotations, **norms: Unpack[Norms]
) -> tuple[Tensor, Any]:
    """Rotates queries and keys (B, S, H, D) in one kernel; `norms` are the options of `rope` for weights."""
    cos, sin = checked_rotations(embedding, rotations, *q.shape[:2])
    keys: Any = None if k is None else k.transpose(1, 2)
    of_q, of_k = rope(q.transpose(1, 2), keys, cos, sin, interleaved=embedding.interleaved, **norms)
    return of_q.transpose(1, 2), None if of_k is None else of_k.transpose(1, 2)


def checked_rotations(embedding: RotaryEmbedding, rotations: Any, batch: int, tokens: int) -> Rotations:
    """Cosines and sines of so many sequences and tokens."""
    is_pair = isinstance(rotations, (tuple, list)) and len(rotations) == 2
    if not is_pair or not all(isinstance(each, Tensor) for each in rotations):
        raise OptionError("rotations", type(rotations).__name__, "cosines and sines, as a RotaryEmbedding returns")
    cos, sin = rotations
    if sin.shape != cos.shape:
        raise ShapeError("rotations", f"sines of {shape_of(sin)}", f"{shape_of(cos)}, the shape of the cosines")
    sizes = tokens, embedding.rotary_dim // 2
    if cos.shape[-2:] != sizes or cos.dim() > 3 or (cos.dim() == 3 and cos.shape[0] not in (1, batch)):
        expected = f"(S, rotary_dim / 2) = {sizes}, for each sequence or for all"
        raise ShapeError("rotations", shape_of(cos), expected)
    return cos, sin


def check_positions(position_ids: object) -> None:
    if not isinstance(position_ids, Tensor):
        raise OptionError("position_ids", type(position_ids).__name__, "a torch.Tensor")
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("position_ids", dtype_name(position_ids.dtype), "int64 or int32")
    if position_ids.dim() not in (1, 2):
        raise ShapeError("position_ids", shape_of(position_ids), "(S,) or (B, S)")
