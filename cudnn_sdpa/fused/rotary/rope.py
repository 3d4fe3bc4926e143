"""`rope` and `rope_fp8`: rotary position embedding of queries and keys, after a norm of each head."""

from __future__ import annotations

from typing import Any, NamedTuple, overload

from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.engine.sharding import has_dtensor
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.fused.checks import checked_flag
from cudnn_sdpa.fused.encoding import Value
from cudnn_sdpa.fused.norm_graphs import MAX_EPS, checked_eps
from cudnn_sdpa.fused.rotary.rope_graphs import rope_fp8_rows, rope_rows
from cudnn_sdpa.graph.scalars import is_compiling


@overload
def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = ...,
    k_weight: Tensor | None = ...,
    eps: float = ...,
    zero_centered: bool = ...,
    interleaved: bool = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def rope(
    q: Tensor,
    k: None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = ...,
    k_weight: None = ...,
    eps: float = ...,
    zero_centered: bool = ...,
    interleaved: bool = ...,
) -> tuple[Tensor, None]: ...


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Queries and keys rotated by the angles of their positions, in one kernel; before that normalized. Differentiable.

    A pair of features (x, y) becomes (x cos − y sin, y cos + x sin). With a weight, each head is first divided by its
    root mean square and multiplied by the weight, as in Qwen3 and Gemma 3: `rms_norm` over the head dim. All is
    computed in float32 and rounded once. Heads may be views of one projection; they are read in place.

    Args:
        q: (B, Hq, S, D), or (T, Hq, D) packed; float16, bfloat16 or float32, or float64 if `cpu_checks` accepts any
            dtype. D is even, up to 1,024.
        k: (B, Hkv, S, D), or (T, Hkv, D), of the same dtype; or None.
        cos: Cosines of the positions, (S, n), (1, S, n) or (B, S, n), or (T, n) packed; float32, as
            `nn.RotaryEmbedding` returns them. The first 2n features are rotated, the others stay.
        sin: The sines, likewise.
        q_weight: (D,), in q's dtype or float32; None: the queries are not normalized.
        k_weight: (D,), likewise, in the dtype of `q_weight`; None: the keys are not normalized.
        eps: Added to the mean of the squares; data, not part of the plan. It is checked without a weight, too.
        zero_centered: Whether the weights are stored minus 1, as in Gemma.
        interleaved: Whether a pair is two neighboring features, as in the paper and in Meta's weights of LLaMA;
            otherwise it is feature i of each half of the rotated ones, as in GPT-NeoX and Hugging Face's models.

    Returns:
        New tensors like q and k, dense in their memory order, features innermost; None for a k of None.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: cos or sin requires grad.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q, k = torch.randn(2, 4, 10, 64), torch.randn(2, 2, 10, 64)
        >>> cos, sin = cudnn_sdpa.nn.RotaryEmbedding(64)(torch.arange(10))
        >>> rotated_q, rotated_k = cudnn_sdpa.rope(q, k, cos, sin)
        >>> torch.allclose(rotated_q.norm(dim=-1), q.norm(dim=-1), atol=1e-4), rotated_k.shape
        (True, torch.Size([2, 2, 10, 64]))
        >>> normed_q, _ = cudnn_sdpa.rope(q, k, cos, sin, q_weight=torch.ones(64), k_weight=torch.ones(64))
        >>> torch.allclose(normed_q.square().mean(-1), torch.ones(2, 4, 10), atol=1e-4)
        True

    From "RoFormer: Enhanced Transformer with Rotary Position Embedding" (Su et al., 2021), and "Query-Key Normalization
    for Transformers" (Henry et al., 2020).
    """
    # In each call: a call like an earlier one, with gradients of other tensors, is not checked.
    if isinstance(cos, Tensor) and isinstance(sin, Tensor) and needs_gradient(cos, sin):
        reasons = ["cos or sin requires grad, and there are no gradients of angles"]
        raise UnsupportedError("the gradient of rope", reasons, "cos.detach() and sin.detach()")
    if interleaved is not False:
        interleaved = checked_flag("interleaved", interleaved)
    operands = operands_of(q, k, cos, sin, q_weight=q_weight, k_weight=k_weight, eps=eps, zero_centered=zero_centered)
    if k is not None and type(q) is not Tensor and has_dtensor(q, k):  # divided alike, with other numbers of heads
        rope_rows.arguments(operands, {"interleaved": interleaved})  # checks both together
        norms: Any = {"eps": eps, "zero_centered": zero_centered, "interleaved": interleaved}
        of_q, _ = rope(q, None, cos, sin, q_weight=q_weight, **norms)
        return of_q, rope(k, None, cos, sin, q_weight=k_weight, **norms)[0]
    found: Any = rope_rows.run(operands, {"interleaved": interleaved})
    return (found, None) if k is None else found


class RopeInFp8(NamedTuple):
    """Rotated queries and keys in FP8; their values are `q` times `q_scale`, and `k` times `k_scale`.

    Attributes:
        q: Queries of the shape given, dense in their memory order, features innermost, float8_e4m3fn.
        k: Keys, likewise; None for a k of None.
        q_amax: The largest absolute value of the rotated queries before they are scaled, (1,) float32.
        k_amax: That of the keys; None for a k of None.
    """

    q: Tensor
    k: Tensor | None
    q_amax: Tensor
    k_amax: Tensor | None


def rope_fp8(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_scale: Tensor,
    k_scale: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    interleaved: bool = False,
) -> RopeInFp8:
    """`rope` in E4M3 for attention in FP8: norms, rotation and quantization in one kernel. For inference.

    Heads are computed in float32, divided by their scale and rounded once, to the nearest number, ties to even; larger
    values saturate at 448 times the scale, and NaN stays NaN. Scales are those of earlier steps (delayed scaling), or
    of a calibration, and `q_amax` and `k_amax` are for the next ones. `sdpa_fp8` takes the scales as `descale_q` and
    `descale_k`. A second small kernel finds the amax values.

    Args:
        q: (B, Hq, S, D), or (T, Hq, D) packed, as for `rope`.
        k: (B, Hkv, S, D), or (T, Hkv, D); or None.
        cos: Cosines of the positions, as for `rope`.
        sin: The sines.
        q_scale: () or (1,), float32, on q's device.
        k_scale: The same for the keys; None for a k of None.
        q_weight: (D,), in q's dtype or float32; None: the queries are not normalized.
        k_weight: (D,), likewise; None: the keys are not normalized.
        eps: As for `rope`.
        zero_centered: As for `rope`.
        interleaved: As for `rope`.

    Returns:
        Queries and keys, and their amax values.

    Raises:
        ArgumentError: An argument is wrong; the subclass and the message say which and how.
        UnsupportedError: A tensor requires grad, or the GPU has no FP8 (before compute capability 8.9).

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q, k = torch.randn(2, 4, 10, 64), torch.randn(2, 2, 10, 64)
        >>> cos, sin = cudnn_sdpa.nn.RotaryEmbedding(64)(torch.arange(10))
        >>> scale = torch.tensor([5 / 448])
        >>> found = cudnn_sdpa.rope_fp8(q, k, cos, sin, q_scale=scale, k_scale=scale)
        >>> torch.allclose(found.k.float() * scale, cudnn_sdpa.rope(q, k, cos, sin)[1], atol=0.2)
        True
    """
    if interleaved is not False:
        interleaved = checked_flag("interleaved", interleaved)
    norms: Any = {"eps": eps, "zero_centered": zero_centered}
    operands = fp8_operands_of(
        q, k, cos, sin, q_scale=q_scale, k_scale=k_scale, q_weight=q_weight, k_weight=k_weight, **norms
    )
    if k is not None and type(q) is not Tensor and has_dtensor(q, k):  # divided alike, with other numbers of heads
        rope_fp8_rows.arguments(operands, {"interleaved": interleaved})  # checks both together
        norms["interleaved"] = interleaved
        of_q = rope_fp8(q, None, cos, sin, q_scale=q_scale, q_weight=q_weight, **norms)
        of_k = rope_fp8(k, None, cos, sin, q_scale=k_scale, q_weight=k_weight, **norms)  # type: ignore[arg-type]
        return RopeInFp8(of_q.q, of_k.q, of_q.q_amax, of_k.q_amax)
    found: Any = rope_fp8_rows.run(operands, {"interleaved": interleaved})
    if k is None:
        return RopeInFp8(found[0], None, found[1], None)
    return RopeInFp8(*found)


def fp8_operands_of(*heads: Any, q_scale: Any, k_scale: Any, **norms: Any) -> tuple[Value, ...]:
    """The operands of the graph function in FP8."""
    operands = operands_of(*heads, **norms)
    return (*operands, *(None,) * (8 - len(operands)), q_scale, k_scale)


def completed(operands: tuple[Value, ...]) -> tuple[Value, ...]:
    """All operands of a rotation."""
    values = [float(x) if isinstance(x, int) else x for x in operands]
    return (*values, *(None,) * (len(rope_rows.operands) - len(values)))


def operands_of(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> tuple[Value, ...]:
    """The operands of the graph function."""
    if zero_centered is not False:
        zero_centered = checked_flag("zero_centered", zero_centered)
    if is_compiling() or type(eps) is not float or not 0.0 <= eps <= MAX_EPS:  # checked in each call: eps is data
        eps = checked_eps(eps)
    if q_weight is None and k_weight is None:
        return (q, cos, sin) if k is None else (q, cos, sin, k)
    return (q, cos, sin, k, q_weight, k_weight, eps, 1.0 if zero_centered else None)
