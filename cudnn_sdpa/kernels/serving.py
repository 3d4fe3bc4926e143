"""Calls of `sdpa` that the library's own kernels serve, where `providers` names them: reasons against, and keys."""

from __future__ import annotations

from dataclasses import replace

from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels.arguments import FUSED, GPU_DTYPES, MAX_FUSED_DIM, TILED, Needs
from cudnn_sdpa.kernels.plans import FIRST_SM, Spec, expanded

#: Bands of the masks that they have, which hide no key, or all later ones from the first query and the first key on.
_BANDS = (None, (None, 0, False))


def reasons_of(spec: ForwardSpec | BackwardSpec, target: Target) -> list[str]:
    """Why own kernels cannot serve a call; empty if they can. An option that is not known here is lacked."""
    dense = spec.dense
    q, k, v = dense.q, dense.k, dense.v
    plain = DenseSpec(q, k, v, dense.mask, attn_mask=dense.attn_mask, bias=dense.bias)
    reasons = {
        f"they need compute capability 8.0, and the GPU has {target.sm / 10:.1f}": target.sm < FIRST_SM,
        f"they take float32, float16 and bfloat16, and q has {str(q.dtype).removeprefix('torch.')}": (
            q.dtype not in GPU_DTYPES
        ),
        f"their head dims of q and v are one, and not {q.shape[3]} and {v.shape[3]}": q.shape[3] != v.shape[3],
        "their causal masks begin at the first query and the first key, and they have no window": (
            dense.mask.band not in _BANDS or dense.mask.masked_rows > 0
        ),
        "they have no lengths, sinks, soft cap, dropout or ALiBi": replace(dense, deterministic=False) != plain,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    return found or known_issues.reasons_against(key_of(spec, target, None))


def spec_of(spec: ForwardSpec | BackwardSpec) -> Spec:
    """The call of own kernels that serves a call: its rows keep their log-sum-exp, as those of all providers do."""
    dense, mask = spec.dense, spec.dense.attn_mask
    found = Spec(
        q=dense.q,
        k=dense.k,
        v=dense.v,
        mask=None if mask is None else expanded(mask, dense.q.shape, dense.skv),
        out=spec.out,
        mode=FUSED if dense.q.shape[3] <= MAX_FUSED_DIM else TILED,
        is_causal=dense.mask.band is not None,
        with_statistics=isinstance(spec, BackwardSpec) or spec.plan_has_lse,
        keeps_lse=True,
    )
    if isinstance(spec, BackwardSpec):
        found = replace(found, grad_out=spec.grad_out, needs=Needs(q=True, k=True, v=True, mask=spec.bias_gradient))
    return replace(found, vectors=found.can_read_vectors)


def key_of(spec: ForwardSpec | BackwardSpec, target: Target, device: int | None) -> PlanKey:
    return spec_of(spec).key(target, device)


def notes_on(spec: ForwardSpec | BackwardSpec) -> list[str]:
    """The memory and the copies of a call, for `explain`."""
    own, what = spec_of(spec), "scores" if isinstance(spec, ForwardSpec) else "weights and their gradients"
    notes = [] if own.mode == FUSED else [f"all {what} are kept in float32, in the workspace"]
    return notes + (["operands are read element by element"] if own.mode == FUSED and not own.vectors else [])
