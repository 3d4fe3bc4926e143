"""Explicit configurations of `sdpa`, forward and backward, against `float64_reference`.

`generators` has random ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_checks import make, poison
from float64_reference import DIFFERENTIABLE, attention
from torch import Tensor

import cudnn_sdpa

#: Relative error ‖x − ref‖ / ‖ref‖ of results in half precision.
FORWARD = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3}
BACKWARD = {torch.bfloat16: 1.6e-2, torch.float16: 3e-3}


@dataclass(frozen=True)
class Config:
    """One call. Options default to off."""

    number: int
    dtype: torch.dtype
    batch: int
    heads: tuple[int, int]
    sq: int
    skv: int
    dims: tuple[int, int]
    layouts: tuple[str, str, str]
    grad_layout: str
    scale: float
    is_causal: bool = False
    causal_alignment: str = "top_left"
    window_size: tuple[int, int] | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    mask: str = ""
    mask_shape: tuple[int, ...] = ()
    mask_grad: bool = False
    lengths: str = ""
    dropout_p: float = 0.0
    deterministic: bool = False
    needs: str = "qkv"
    shift: float = 0.0


def tensors(c: Config) -> dict[str, Tensor | None]:
    torch.manual_seed(c.number)
    cuda = {"device": "cuda"}
    full = (c.batch, c.heads[0], c.sq, c.skv)
    result: dict[str, Tensor | None] = {
        "q": make(c.layouts[0], c.batch, c.heads[0], c.sq, c.dims[0], c.dtype),
        "k": make(c.layouts[1], c.batch, c.heads[1], c.skv, c.dims[0], c.dtype),
        "v": make(c.layouts[2], c.batch, c.heads[1], c.skv, c.dims[1], c.dtype),
        "sinks": torch.randn(c.heads[0], **cuda) * 2 + 0.5 if c.sinks else None,
        "attn_mask": None,
    }
    if c.mask == "bool":
        mask = torch.rand(c.mask_shape, **cuda) < 0.7
        if len(c.mask_shape) > 1 and c.mask_shape[-2] == c.sq:
            mask[..., torch.randint(c.sq, (1,)).item(), :] = False  # a fully masked row
        result["attn_mask"] = mask
    elif c.mask:
        mask = torch.randn(c.mask_shape, **cuda, dtype=torch.float32 if c.mask == "float32" else c.dtype)
        if c.mask == "-inf":
            mask = mask.masked_fill(torch.rand(c.mask_shape, **cuda) < 0.3, -math.inf)
            if len(c.mask_shape) > 1 and c.mask_shape[-2] == c.sq:
                mask[..., torch.randint(c.sq, (1,)).item(), :] = -math.inf
        result["attn_mask"] = mask
    if c.shift:  # all scores, and so the LSE, are far below zero
        size = math.sqrt(c.shift / -abs(c.scale))
        result["q"][..., 0], result["k"][..., 0] = size, -math.copysign(size, c.scale)
    for name, size in (("q", c.sq), ("kv", c.skv)):
        lengths = torch.randint(0, size + 1, (c.batch,), dtype=torch.int32, **cuda)
        result[f"seq_lens_{name}"] = lengths if name in c.lengths.split() else None
    grad = torch.randn(*full[:3], c.dims[1], dtype=c.dtype, **cuda)
    if c.grad_layout == "bshd":
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    elif c.grad_layout == "expanded":
        grad = grad[:, :, :1].expand_as(grad)
    elif c.grad_layout == "stride 0":
        grad = grad[:1, :1, :1, :1].expand_as(grad)
    elif c.grad_layout == "transposed":
        grad = grad.transpose(2, 3).contiguous().transpose(2, 3)
    result["grad_out"] = grad
    return result


def expected(
    c: Config, t: dict[str, Tensor | None], keep: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output, log-sum-exp and gradients in float64."""
    x = {n: t[n].double().requires_grad_() for n in DIFFERENTIABLE if t[n] is not None and t[n].dtype != torch.bool}
    given = {n: t[n] for n in ("attn_mask", "sinks", "seq_lens_q", "seq_lens_kv") if t[n] is not None} | x
    named = {name: value for name, value in options(c).items() if name != "deterministic"}
    made = attention(**given, kept=keep, **named)
    out, lse, weights = made.out, made.lse, made.weights * made.share
    out.backward(t["grad_out"].double())
    gradients = {n: x[n].grad if x[n].grad is not None else torch.zeros_like(x[n]) for n in x}
    with torch.no_grad():
        sizes = magnitudes(c, x, weights, out, t["grad_out"].double(), keep)
    return out.detach(), lse.detach(), gradients, sizes


def magnitudes(
    c: Config, x: dict[str, Tensor], weights: Tensor, out: Tensor, grad: Tensor, keep: Tensor | None
) -> dict[str, Tensor]:
    """The gradients if no terms of their sums cancelled: the scale of rounding errors."""
    group = c.heads[0] // c.heads[1]
    share = 1.0 if keep is None else keep / (1 - c.dropout_p)
    k, v = (x[n].repeat_interleave(group, 1) for n in ("k", "v"))
    mean = (grad * out).abs().sum(-1, keepdim=True)
    of_scores = weights * ((grad.abs() @ v.abs().mT) * share + mean)
    per_head = {
        "k": of_scores.mT @ x["q"].abs() * abs(c.scale),
        "v": (weights * share).mT @ grad.abs(),
    }
    sizes = {n: g.unflatten(1, (c.heads[1], group)).sum(2) for n, g in per_head.items()}
    sizes["q"] = of_scores @ k.abs() * abs(c.scale)
    if "attn_mask" in x:
        shape = x["attn_mask"].shape
        sizes["attn_mask"] = of_scores.sum_to_size((1,) * (4 - len(shape)) + tuple(shape))
    sizes["sinks"] = mean.sum((0, 2, 3))
    return sizes


def options(c: Config) -> dict:
    """The options of the call that are not tensors."""
    names = ["scale", "is_causal", "causal_alignment", "window_size", "softcap", "alibi", "dropout_p", "deterministic"]
    return {name: getattr(c, name) for name in names}


def dropped(c: Config, t: dict[str, Tensor | None]) -> Tensor:
    """Which weights cuDNN keeps, read from values that are unique to each key."""
    state = torch.cuda.get_rng_state()
    size = -(-c.skv // 8) * 8
    parts = []
    for first in range(0, size, 128):
        unit = torch.zeros(c.batch, c.heads[1], c.skv, 128, dtype=c.dtype, device="cuda")
        for column in range(first, min(first + 128, c.skv)):
            unit[:, :, column, column - first] = 1
        torch.cuda.set_rng_state(state)
        same = {"is_causal": c.is_causal, "causal_alignment": c.causal_alignment, "window_size": c.window_size}
        same = {} if c.lengths else same  # queries are left out of the plan only without lengths
        out = cudnn_sdpa.sdpa(t["q"] * 0, t["k"], unit, dropout_p=c.dropout_p, **same)
        parts.append(out > 0)
    torch.cuda.set_rng_state(state)
    return torch.cat(parts, -1)[..., : c.skv]


def difference(actual: Tensor, reference: Tensor, rounding: Tensor | float = 0.0) -> float:
    """Relative error in the Frobenius norm, beyond rounding; NaN if there is one."""
    smallest = torch.finfo(actual.dtype).smallest_normal * math.sqrt(max(1, reference.numel()))
    off = (actual.detach().double() - reference).norm() - rounding - smallest
    return float(off.clamp_min(0) / (reference.norm() + rounding).clamp_min(1e-12))


def plain(**changes: Any) -> Config:
    """A causal call with grouped heads and these changes."""
    usual = Config(0, torch.bfloat16, 2, (4, 2), 64, 96, (64, 64), ("bshd",) * 3, "dense", 0.2, is_causal=True)
    return replace(usual, **changes)


#: Options of `plain` whose plans differ.
CASES = {
    "plain": {"is_causal": False},
    "causal": {},
    "fully masked rows": {"causal_alignment": "bottom_right", "sq": 120},
    "window_size": {"is_causal": False, "window_size": (30, 5)},
    "mask": {"is_causal": False, "mask": "float", "mask_shape": (2, 4, 64, 96), "mask_grad": True},
    "sinks": {"sinks": True},
    "lengths": {"lengths": "q kv"},
    "softcap": {"softcap": 5.0},
    "softcap and lengths": {"softcap": 5.0, "lengths": "q kv"},
    "linear biases": {"alibi": True},
    "dropout": {"dropout_p": 0.2},
    "deterministic": {"deterministic": True},
    "single query": {"sq": 1, "is_causal": False},
    "odd lengths": {"sq": 77, "skv": 131},
    "head dim 128": {"sq": 512, "skv": 512, "dims": (128, 128)},
    "wide heads": {"dims": (192, 128)},
}


def check(c: Config, t: dict[str, Tensor | None] | None = None) -> list[str]:
    """Errors of a configuration, on its own inputs or others; raises UnsupportedError if it is unsupported."""
    t = tensors(c) if t is None else t
    inputs = ["q", "k", "v", "attn_mask", "sinks"]
    wanted = [*c.needs, *(["attn_mask"] if c.mask_grad else []), *(["sinks"] if c.sinks and c.needs else [])]
    for name in wanted:
        t[name].requires_grad_()
    leaves = {name: t[name] for name in [*inputs, "seq_lens_q", "seq_lens_kv"]}
    for shape in [t[n].shape for n in inputs if t[n] is not None] + [t["grad_out"].shape]:
        poison(tuple(shape), dtype=c.dtype)
    poison(t["q"].shape[:3], dtype=torch.float32)
    torch.manual_seed(c.number + 1)
    keep = None
    if c.dropout_p:
        with torch.no_grad():
            keep = dropped(c, t)
    out, lse = cudnn_sdpa.sdpa(**leaves, **options(c), return_lse=True)
    gradients = torch.autograd.grad(out, [t[name] for name in wanted], t["grad_out"]) if wanted else ()
    found = dict(zip(wanted, gradients, strict=True))
    plain = {name: None if x is None else x.detach() for name, x in t.items()}
    out_ref, lse_ref, grads_ref, sizes = expected(c, plain, keep)
    rounding = {name: torch.finfo(c.dtype).eps / 4 * size.norm() for name, size in sizes.items()}
    return compare(c.dtype, (out, lse, found), (out_ref, lse_ref, grads_ref), rounding)


Results = tuple[Tensor, Tensor, dict[str, Tensor]]


def compare(dtype: torch.dtype, actual: Results, reference: Results, rounding: dict[str, Tensor]) -> list[str]:
    """Errors of an output, an LSE and gradients."""
    (out, lse, gradients), (out_ref, lse_ref, gradients_ref) = actual, reference
    wrong = []
    masked_rows = lse_ref.isneginf()
    if not (lse[masked_rows] == -math.inf).all():
        wrong.append(f"lse of fully masked rows {lse[masked_rows][:4].tolist()}")
    if not difference(lse[~masked_rows], lse_ref[~masked_rows]) < 1e-4:
        wrong.append(f"lse {difference(lse[~masked_rows], lse_ref[~masked_rows]):.2e}")
    if not difference(out, out_ref) < FORWARD[dtype]:
        wrong.append(f"out {difference(out, out_ref):.2e}")
    if not (out[out_ref.abs().sum(-1) == 0] == 0).all():
        wrong.append("out of fully masked rows")
    for name, gradient in gradients.items():
        off = difference(gradient, gradients_ref[name], rounding[name])
        if not off < BACKWARD[dtype] or gradient.shape != gradients_ref[name].shape:
            wrong.append(f"grad {name} {off:.2e}")
    return wrong
