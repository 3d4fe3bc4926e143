"""What `fallback("kernels")` runs in place of calls of `sdpa` that cuDNN declines."""

from __future__ import annotations

from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.kernels.arguments import FUSED, MAX_FUSED_DIM, TILED, Mode
from cudnn_sdpa.kernels.attention import attention

#: The arguments of `sdpa` that `kernels.attention` has. It is always deterministic.
KNOWN = frozenset(("q", "k", "v", "attn_mask", "is_causal", "causal_alignment", "scale", "deterministic"))


def instead_of_sdpa(call: ForwardArguments) -> Tensor | None:
    """What `kernels.attention` computes for a call of `sdpa`; None if that lacks an option or a result.

    Head dims above those of the fused form take the tiled one, whose memory grows with Sq × Skv.
    """
    softmax = call.softmax
    aligned = not softmax.is_causal or softmax.causal_alignment == TOP_LEFT or call.q.shape[2] == call.k.shape[2]
    dim = call.q.shape[3]
    if not call.has_only(KNOWN) or not aligned or call.v.shape[3] != dim:
        return None
    mode: Mode = FUSED if dim <= MAX_FUSED_DIM else TILED
    q, k, v = call.qkv
    return attention(q, k, v, mode=mode, mask=call.attn_mask, is_causal=softmax.is_causal, scale=softmax.scale)
