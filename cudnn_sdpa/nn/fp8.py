"""`Fp8Attention`: attention in FP8 as a layer."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from cudnn_sdpa.attention.fp8.arguments import check_tensors
from cudnn_sdpa.attention.fp8.fp8_attention import attend, fp8_attention
from cudnn_sdpa.attention.fp8.scaling import Fp8Scaling
from cudnn_sdpa.attention.mask import Alignment
from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.sharding import parameter_of_all_heads
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.fused.rotary.rope import rope, rope_fp8
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.nn.checks import check_number
from cudnn_sdpa.nn.norms import RMSNorm, are_alike
from cudnn_sdpa.nn.rotary import RotaryEmbedding, Rotations, checked_rotations

#: The layer of each `Fp8Scaling`. Copied and unpickled ones have none at first.
_owners: weakref.WeakKeyDictionary[Fp8Scaling, weakref.ref[Fp8Attention]] = weakref.WeakKeyDictionary()


class Fp8Attention(nn.Module):
    """Attention computed in FP8, on tensors in bfloat16 or float16, as a layer with its scales. Differentiable.

    It calls `fp8_attention` with its own `Fp8Scaling`. In training mode each training step updates the scales, and
    `state_dict` includes them.

    With `rope` it first rotates queries and keys, and with `qk_norm` normalizes their heads before. Without gradients,
    and with scales of earlier steps, one kernel does both and quantizes (`rope_fp8`); otherwise `rope` comes first.

    Args:
        is_causal: Whether later keys are masked.
        causal_alignment: "top_left" aligns the first query with the first key, "bottom_right" the last with the last.
        window_size: (left, right) bounds around the diagonal; -1 is unbounded.
        scale: Factor applied to the scores, positive; None is 1/sqrt(D).
        scaling: The layer's `Fp8Scaling`, which no other layer may use; None creates one with the default options.
        rope: Rotates queries and keys by their positions. Layers may share one.
        qk_norm: Epsilon of a norm of each query and key head before the rotation, of the head dim of `rope`; its
            weights are `q_norm.weight` and `k_norm.weight`. None is no norm.

    Raises:
        OptionError: An argument is wrong, or `scaling` belongs to another `Fp8Attention`.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.nn.fp8 import Fp8Attention
        >>> attend = Fp8Attention(is_causal=True)
        >>> for step in range(3):
        ...     q, k, v = torch.randn(3, 1, 4, 64, 128, dtype=torch.bfloat16).requires_grad_()
        ...     attend(q, k, v).square().sum().backward()
        >>> attend.scaling.amax_history.count_nonzero(dim=1)  # two steps are over
        tensor([2, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    """

    def __init__(
        self,
        *,
        is_causal: bool = False,
        causal_alignment: Alignment = "top_left",
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
        scaling: Fp8Scaling | None = None,
        rope: RotaryEmbedding | None = None,
        qk_norm: float | None = None,
    ) -> None:
        super().__init__()
        if scaling is not None and not isinstance(scaling, Fp8Scaling):
            raise OptionError("scaling", type(scaling).__name__, "cudnn_sdpa.Fp8Scaling or None")
        if scaling is not None and _owner_of(scaling) is not None:
            expected = "one for this layer only: the amax values of two layers would be mixed"
            hint = "Make another Fp8Scaling with the same options, or copy this one with copy.deepcopy."
            raise OptionError("scaling", "that of another Fp8Attention", expected, hint)
        if rope is not None and not isinstance(rope, RotaryEmbedding):
            raise OptionError("rope", type(rope).__name__, "cudnn_sdpa.nn.RotaryEmbedding or None")
        if qk_norm is not None:
            check_number("qk_norm", qk_norm)
            if rope is None:
                raise OptionError("qk_norm", repr(qk_norm), "None without rope, whose head dim the norms have")
        self.is_causal, self.causal_alignment = is_causal, causal_alignment
        self.window_size, self.scale = window_size, scale
        self.scaling = Fp8Scaling() if scaling is None else scaling
        _owners[self.scaling] = weakref.ref(self)
        self.rope = rope
        self.q_norm = None if rope is None or qk_norm is None else RMSNorm(rope.head_dim, qk_norm)
        self.k_norm = None if rope is None or qk_norm is None else RMSNorm(rope.head_dim, qk_norm)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if _owner_of(self.scaling) is None:
            _owners[self.scaling] = weakref.ref(self)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        seq_lens_q: Tensor | None = None,
        seq_lens_kv: Tensor | None = None,
        rotations: Rotations | None = None,
    ) -> Tensor:
        """Attention of queries (B, Hq, Sq, D), keys (B, Hkv, Skv, D) and values (B, Hkv, Skv, Dv).

        Args:
            q: Queries, bfloat16 or float16.
            k: Keys; as many as queries with `rope`.
            v: Values.
            seq_lens_q: Actual sequence lengths of the queries, (B,) int32. Output rows past them are zeros.
            seq_lens_kv: Actual sequence lengths of the keys, (B,) int32.
            rotations: The result of `rope(position_ids)`, which layers may share; None is that of positions 0 to
                S - 1.

        Returns:
            The output (B, Hq, Sq, Dv) in q's dtype and memory order; with `rope`, features are always innermost.
        """
        options = {
            "is_causal": self.is_causal,
            "causal_alignment": self.causal_alignment,
            "window_size": self.window_size,
            "scale": self.scale,
            "seq_lens_q": seq_lens_q,
            "seq_lens_kv": seq_lens_kv,
        }
        if self.rope is not None:
            return (_rotated_eagerly if is_compiling() else _rotated)(self, (q, k, v), options, rotations)
        if rotations is not None:
            raise OptionError("rotations", type(rotations).__name__, "None: this module has no rope")
        return fp8_attention(q, k, v, scaling=self.scaling, **options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return (
            f"is_causal={self.is_causal}, causal_alignment={self.causal_alignment!r}, window_size={self.window_size}, "
            f"scale={self.scale}"
        )


class _Rotation(NamedTuple):
    """`rope`, or `rope_fp8`, with arguments of both."""

    given: dict[str, Any]

    @property
    def needs_gradient(self) -> bool:
        return needs_gradient(self.given.get("q_weight"), self.given.get("k_weight"))

    def in_half(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope(q, k, **self.given)

    def in_fp8(self, q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found: Any = rope_fp8(q, k, q_scale=q_scale, k_scale=k_scale, **self.given)  # also of keys
        return found  # type: ignore[no-any-return]


def _rotated(
    layer: Fp8Attention, qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], rotations: Rotations | None
) -> Tensor:
    """Attention of queries and keys that are rotated, and normalized before if there are norms."""
    q, k, v = qkv
    embedding = layer.rope
    assert embedding is not None
    check_tensors({"q": q, "k": k, "v": v})
    for name, x in (("q", q), ("k", k)):
        if x.dim() != 4 or x.shape[-1] != embedding.head_dim or x.shape[2] != q.shape[2]:
            expected = f"(B, H, S, {embedding.head_dim}), with the head dim of rope, and one length for both"
            raise ShapeError(name, shape_of(x), expected)
    if rotations is None:
        rotations = embedding(torch.arange(q.shape[2], device=q.device))
    cos, sin = checked_rotations(embedding, rotations, q.shape[0], q.shape[2])
    given: dict[str, Any] = {"cos": cos, "sin": sin, "interleaved": embedding.interleaved}
    if layer.q_norm is not None and layer.k_norm is not None:
        if are_alike(layer.q_norm, layer.k_norm):
            given |= {"eps": layer.q_norm.eps, "zero_centered": layer.q_norm.zero_centered}
            weights = (("q_weight", layer.q_norm.weight, q), ("k_weight", layer.k_norm.weight, k))
            given |= {name: parameter_of_all_heads(x, None, heads) for name, x, heads in weights if x is not None}
        else:
            q, k = layer.q_norm(q), layer.k_norm(k)
    return attend(q, k, v, options, scaling=layer.scaling, rotation=_Rotation(given))


#: For torch.compile, which cannot trace our kernels and the histories.
_rotated_eagerly = _disable_dynamo(_rotated)


def _owner_of(scaling: Fp8Scaling) -> Fp8Attention | None:
    owner = _owners.get(scaling)
    return None if owner is None else owner()
