"""`RotaryEmbedding`: positions as rotations of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import dtype_name, shape_of
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.nn.checks import check_counts, check_flags

Rotations = tuple[Tensor, Tensor]


class RotaryEmbedding(nn.Module):
    """RoPE: turns pairs of features of queries and keys by angles that grow with the position.

    Position p turns pair i by p · base^(-2i / rotary_dim). It has no parameters, and nothing in `state_dict`; its
    frequencies stay in float32 whatever dtype a module gets, and come back by themselves on a module that was made
    on the device "meta". Positions are data: other ones compile nothing anew, and a CUDA graph may read them.

    Layers may share one. A model that computes the rotations once, `rotations = rope(position_ids)`, hands them to
    each layer.

    Args:
        head_dim: Size of a head.
        base: Of the angles; "rope_theta" in models' configurations.
        rotary_dim: How many features, from the first on, are turned; all of a head if not given.
        interleaved: Whether a pair is two neighbors, as in the paper and in Meta's own weights of LLaMA. If not, it is
            feature i of the first half and i of the second, as in GPT-NeoX and in Hugging Face's models.
        frequencies: By how many radians a position turns each pair, rotary_dim / 2 numbers, for models that scale them
            (LLaMA 3.1, YaRN); `base` is not used then. YaRN's factor m of cosines and sines, where all features are
            turned, is one of the scores: `Attention(scale=m**2 / head_dim**0.5)`.
        device: Where it is used.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> rope = cudnn_sdpa.nn.RotaryEmbedding(64, base=500000.0)
        >>> q = torch.randn(2, 10, 4, 64)  # (batch, sequence, heads, head dim)
        >>> cos, sin = rope(torch.arange(10))
        >>> turned = rope.rotate(q, (cos, sin))
        >>> torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), atol=1e-4)
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
        check_flags(interleaved=interleaved)
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise OptionError("rotary_dim", repr(rotary_dim), f"an even number up to head_dim, {head_dim}")
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < float("inf"):
            raise OptionError("base", repr(base), "a positive number")
        self.head_dim, self.base, self.rotary_dim, self.interleaved = head_dim, base, rotary_dim, interleaved
        self.given = None if frequencies is None else tuple(map(float, frequencies))
        if self.given is not None and len(self.given) != rotary_dim // 2:
            raise OptionError("frequencies", f"{len(self.given)} numbers", f"{rotary_dim // 2}, one for each pair")
        made = self._made()
        made = made.to(torch.get_default_device() if device is None else device)
        self.register_buffer("frequencies", made, persistent=False)

    def _made(self) -> Tensor:
        """The frequencies, by the formula of Hugging Face's models, to the bit."""
        if self.given is not None:
            return torch.tensor(self.given, dtype=torch.float32, device="cpu")
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu") / self.rotary_dim
        return 1.0 / self.base**exponents

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Moves it; what makes numbers of a module lower or empty makes none of these."""
        if self.frequencies.is_meta:  # weights may have come by load_state_dict(assign=True)
            self.frequencies = self._made()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = self._made().to(self.frequencies.device)
        return self

    def forward(self, position_ids: Tensor) -> Rotations:
        """Cosines and sines of positions.

        Args:
            position_ids: (S,) or (B, S), integers.

        Returns:
            Both (..., S, rotary_dim / 2), float32.

        Raises:
            ArgumentError: They are something else.
        """
        check_positions(position_ids)
        frequencies = self.frequencies
        if frequencies.device != position_ids.device:
            with torch.inference_mode(False):
                frequencies = self._made().to(position_ids.device)
            if not is_compiling() and not position_ids.is_meta:
                self.frequencies = frequencies  # made but once
        angles = position_ids.unsqueeze(-1).float() * frequencies
        return angles.cos(), angles.sin()

    def rotate(self, heads: Tensor, rotations: Rotations) -> Tensor:
        """Turns heads by the rotations of their positions, in float32.

        Args:
            heads: (B, S, H, D).
            rotations: Cosines and sines of positions (S,), (1, S) or (B, S).

        Returns:
            A dense tensor of the same shape and dtype.

        Raises:
            ArgumentError: They do not fit.
        """
        is_pair = isinstance(rotations, (tuple, list)) and len(rotations) == 2
        if not is_pair or not all(isinstance(each, Tensor) for each in rotations):
            raise OptionError(
                "rotations", type(rotations).__name__, "cosines and sines, as a RotaryEmbedding gives them"
            )
        cos, sin = rotations
        if sin.shape != cos.shape:
            raise ShapeError("rotations", f"sines of {shape_of(sin)}", f"{shape_of(cos)}, as the cosines have")
        sizes = heads.shape[1], self.rotary_dim // 2
        if cos.shape[-2:] != sizes or cos.dim() > 3 or (cos.dim() == 3 and cos.shape[0] not in (1, heads.shape[0])):
            expected = f"(S, rotary_dim / 2) = {tuple(sizes)}, of each sequence or of all"
            raise ShapeError("rotations", shape_of(cos), expected)
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        turned, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        precise = turned if heads.dtype == torch.float64 else turned.float()
        if self.interleaved:
            one, other = precise[..., ::2], precise[..., 1::2]
            result = torch.stack((one * cos - other * sin, other * cos + one * sin), dim=-1).flatten(-2)
        else:
            one, other = precise.chunk(2, dim=-1)
            result = torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
        result = result.to(heads.dtype)
        return result if self.rotary_dim == self.head_dim else torch.cat((result, rest), dim=-1)

    def extra_repr(self) -> str:
        """The arguments that it was made with."""
        angles = f"base={self.base}" if self.given is None else "frequencies=(...)"
        return f"{self.head_dim}, {angles}, rotary_dim={self.rotary_dim}, interleaved={self.interleaved}"


def check_positions(position_ids: Any) -> None:
    """Positions are integers in a tensor of one or two dimensions."""
    if not isinstance(position_ids, Tensor):
        raise OptionError("position_ids", type(position_ids).__name__, "a torch.Tensor")
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError("position_ids", dtype_name(position_ids.dtype), "int64 or int32")
    if position_ids.dim() not in (1, 2):
        raise ShapeError("position_ids", shape_of(position_ids), "(S,) or (B, S)")
