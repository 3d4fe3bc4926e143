"""The backward pass of attention in MXFP8: its arithmetic in PyTorch, and keys of its plans. Not run on hardware.

It was planned for a B200 without one, as the forward pass in `mxfp8` was, and is not public. Its matrix products sum
along head dims and along sequences, and blocks lie along what is summed. So queries, keys and the output's gradient are
there twice, quantized from the same numbers; values have blocks along the head dim here, not along keys as in the
forward pass. Output and its gradient are there in half precision too, for the row sums of their product.

The frontend's header gives scales along the sequence the strides of 128 head dims, also for head dim 192. Whether a
kernel goes by them is not known: with F8_128x4 it need not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.attention import fp8_passes, mxfp8, mxfp8_graphs, reference
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.case import BACKWARD, Case
from cudnn_sdpa.attention.fp8_arguments import FP8_DTYPES
from cudnn_sdpa.attention.fp8_reference import largest
from cudnn_sdpa.attention.mxfp8 import Blocks, dequantized, quantized
from cudnn_sdpa.attention.passes import FIRST_RIGHT_LAST_TILE, LAST_TILE, dense_like
from cudnn_sdpa.attention.problem import Problem
from cudnn_sdpa.attention.reference import finite, repeated, summed
from cudnn_sdpa.attention.support import Rule, refusal
from cudnn_sdpa.errors import DtypeError, ShapeError
from cudnn_sdpa.runtime.key import Operand, PlanKey
from cudnn_sdpa.runtime.layouts import TensorLayout
from cudnn_sdpa.runtime.target import Target

HALF_DTYPES = (torch.bfloat16, torch.float16)
SCALE_OF_WEIGHTS = 256.0  #: what probabilities are multiplied by before they are rounded

RULES = (
    *mxfp8.NEEDS,
    Rule(
        lambda case: case.dtype != torch.float8_e4m3fn,
        "gradients in MXFP8 have no kernel for q, k and v in {dtype_name}",
        "q, k and v in float8_e4m3fn; the output's gradient may be float8_e5m2",
    ),
    Rule(
        lambda case: case.largest_head_dim > 128 and (case.head_dim, case.head_dim_v) != (192, 128),
        "gradients in MXFP8 have no kernel for head dims {head_dim} and {head_dim_v}",
        "head dims of up to 128, or 192 and 128",
    ),
    Rule(
        lambda case: case.bottom_right and (case.sq % 64 != 0 or case.skv % 64 != 0),
        "bottom-right gradients in MXFP8 need multiples of 64 queries and keys, not {sq} and {skv}",
        "queries and keys padded to multiples of 64, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        lambda case: case.bottom_right and case.sq > case.skv,
        "bottom-right gradients in MXFP8 need as many keys as queries, {sq}, and not {skv}",
        "keys and values padded to as many as queries, with seq_lens_q and seq_lens_kv",
    ),
    Rule(
        lambda case: case.sq == case.skv == 1,
        "cuDNN has no gradients of one query on one key",
        "nothing: the gradient of v is the output's, and those of q and k are zero",
    ),
)


class BothWays(NamedTuple):
    """A tensor in MXFP8 twice.

    Attributes:
        along_dims: With blocks along the head dim.
        along_rows: With blocks along the sequence.
    """

    along_dims: Blocks
    along_rows: Blocks

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> BothWays:
        """Quantizes a tensor; see `mxfp8.quantized`."""
        return cls(quantized(x, dtype), quantized(x, dtype, along=-2))


class Operands(NamedTuple):
    """What a backward pass reads.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values, with blocks along the head dim.
        out: The output of the forward pass, not quantized.
        grad_out: Its gradient, not quantized.
        do: The gradient in MXFP8.
        lse: The log-sum-exp of the scores (B, Hq, Sq).
    """

    q: BothWays
    k: BothWays
    v: Blocks
    out: Tensor
    grad_out: Tensor
    do: BothWays
    lse: Tensor


class Gradients(NamedTuple):
    """The results, in the dtype of `out`, and their largest absolute values, (1,) float32."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    amax_dq: Tensor
    amax_dk: Tensor
    amax_dv: Tensor


def gradients(of: Operands, call: ForwardArguments, exact: torch.dtype = torch.float64) -> Gradients:
    """The gradients, with the options of `call`.

    With P = exp(scores − lse), D the row sums of O ∘ dO in half precision, and x_t for blocks along the sequence:

    - dV = fp8(P · 256)ᵀ dO_t / 256
    - dS = P ∘ (dO Vᵀ − D) · scale
    - dQ = mx(dS) K_t, with blocks of dS along keys
    - dK = mx(dS)ᵀ Q_t, with blocks of dS along queries

    P is rounded to the dtype of q, dS to that of `do`.

    The frontend's header has P and dS in float32. That they are rounded, and to what, follows NVIDIA's own tests
    (`test/python/sdpa/mxfp8_ref.py`), which quantize dS with TransformerEngine, whose scales are rounded up; here they
    are those of `mxfp8.quantized`. These tests have one FP8 dtype for all. What a kernel does has not been seen. Heads
    of a group are summed before results are rounded.

    Args:
        of: The operands.
        call: Its tensors give shapes alone.
        exact: The dtype of the computation.
    """
    q, k = (dequantized(x.along_dims, exact) for x in (of.q, of.k))
    v, do = dequantized(of.v, exact), dequantized(of.do.along_dims, exact)
    q_t, k_t, do_t = (dequantized(x.along_rows, exact, along=-2) for x in (of.q, of.k, of.do))
    masked = reference.scores(call._replace(q=q, k=k, v=v)).masked.to(exact)
    weights = torch.exp(masked - finite(of.lse.to(exact)).unsqueeze(-1))
    rounded = (weights * SCALE_OF_WEIGHTS).to(of.q.along_dims.values.dtype).to(exact) / SCALE_OF_WEIGHTS
    dv = summed(rounded.mT @ do_t, v)
    mean = (of.out.to(exact) * of.grad_out.to(exact)).sum(-1, keepdim=True)
    ds = weights * (do @ repeated(v, q, exact).mT - mean) * call.scale_value
    by_keys, by_queries = BothWays.of(ds, of.do.along_dims.values.dtype)
    dq = dequantized(by_keys, exact) @ repeated(k_t, q, exact)
    dk = summed(dequantized(by_queries, exact, along=-2).mT @ q_t, k)
    results = (dq, dk, dv)
    dq, dk, dv = (x.to(of.out.dtype) for x in results)
    return Gradients(dq, dk, dv, *map(largest, results))


def backward_key(
    call: ForwardArguments,
    out: Tensor,
    grad_out: Tensor,
    target: Target,
    device: int | None,
    do_dtype: torch.dtype = torch.float8_e4m3fn,
) -> PlanKey:
    """The key of the plan of a call on FP8 tensors; scales are in tiles.

    `call.q`, `call.k` and `call.v` have blocks along the head dim; the other copies lie as `mxfp8.quantized` makes
    them. Queries that see no key are left out beforehand: blocks along queries begin at the first of the others.

    Raises:
        DtypeError: Tensors are not FP8, or of several dtypes, or the output is not in half precision.
        ShapeError: A head dim is no multiple of 16, or an output has another shape.
        UnsupportedError: There is none.
    """
    _check(call, out, grad_out, do_dtype)
    problem = fp8_passes.problem_of(call)
    case: Case = problem.case(BACKWARD, target, deterministic=True)
    refused = refusal(case, "gradients in MXFP8", RULES)
    if refused is not None:
        raise refused
    outputs = [
        Operand(name, _gradient(layout, out.dtype))
        for name, layout in (("grad_q", problem.visible(problem.q)), ("grad_k", problem.k), ("grad_v", problem.v))
    ]
    outputs += fp8_passes.numbers(("amax_dq", "amax_dk", "amax_dv"))
    halves = [Operand(name, problem.visible(TensorLayout.of(x))) for name, x in (("out", out), ("grad_out", grad_out))]
    inputs = _inputs(problem, halves, do_dtype, full_lengths=problem.needs_lengths or _pads(problem, target))
    return mxfp8_graphs.sdpa_mxfp8_backward.key(inputs, outputs, {"band": problem.mask.band}, target, device)


def _inputs(problem: Problem, halves: list[Operand], do_dtype: torch.dtype, *, full_lengths: bool) -> list[Operand]:
    scale, *lengths = problem.operands(decode=False, sinks=False, full_lengths=full_lengths)
    q, k = problem.visible(problem.q), problem.k
    do = TensorLayout.contiguous(halves[0].layout.shape, do_dtype)
    layouts = {"q": q, "q_t": _copy(q), "k": k, "k_t": _copy(k), "v": problem.v, "do": do, "do_t": do}
    scales = {name: mxfp8.scales_of(x, along=-2 if name.endswith("_t") else -1) for name, x in layouts.items()}
    return [
        *(Operand(name, layout) for name, layout in layouts.items()),
        *halves,
        Operand("lse", TensorLayout.contiguous((*q.shape[:3], 1), torch.float32)),
        scale,
        *(Operand(f"descale_{name}", layout) for name, layout in scales.items()),
        *lengths,
    ]


def _check(call: ForwardArguments, out: Tensor, grad_out: Tensor, do_dtype: torch.dtype) -> None:
    mxfp8.check(call)
    if do_dtype not in FP8_DTYPES:
        raise DtypeError("do_dtype", str(do_dtype), "torch.float8_e4m3fn or torch.float8_e5m2")
    for name, x in (("k", call.k), ("v", call.v)):
        if x.dtype != call.q.dtype:
            raise DtypeError(name, str(x.dtype), f"{call.q.dtype}, the dtype of q")
    shape = (*call.q.shape[:3], call.v.shape[3])
    for name, x in (("out", out), ("grad_out", grad_out)):
        if x.dtype not in HALF_DTYPES or x.dtype != out.dtype:
            raise DtypeError(name, str(x.dtype), "bfloat16 or float16, as the forward pass gives it; grad_out like out")
        if x.shape != shape:
            raise ShapeError(name, f"shape {tuple(x.shape)}", f"shape {tuple(shape)}, that of the output")


def _pads(problem: Problem, target: Target) -> bool:
    """Whether full lengths are given so that what fills up the last tiles is hidden: see `known_issues`."""
    partial = problem.rows % LAST_TILE != 0 or problem.skv % LAST_TILE != 0
    return partial and target.cudnn < FIRST_RIGHT_LAST_TILE


def _copy(x: TensorLayout) -> TensorLayout:
    return TensorLayout.contiguous(x.shape, x.dtype)


def _gradient(x: TensorLayout, dtype: torch.dtype) -> TensorLayout:
    """The layout of a gradient, in the memory order of its tensor."""
    made = dense_like(x)
    return TensorLayout(made.shape, made.stride, dtype)
