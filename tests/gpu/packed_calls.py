"""Explicit configurations of `sdpa_varlen`, forward and backward, against float64, one sequence at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import dense_calls
import torch
from attention_checks import poison
from torch import Tensor

import cudnn_sdpa


@dataclass(frozen=True)
class Config:
    """One call. Options default to off. `sinks` are random; or of this size, those of every other head negative."""

    number: int
    dtype: torch.dtype
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    scale: float
    same: bool
    views: str
    is_causal: bool = False
    causal_alignment: str = "bottom_right"
    window_size: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: bool | float = False
    dropout_p: float = 0.0
    deterministic: bool = False
    needs: str = "qkv"
    shift: float = 0.0


def tensors(c: Config) -> dict[str, Tensor | None]:
    torch.manual_seed(c.number)
    cuda = {"device": "cuda", "dtype": c.dtype}
    rows, columns = sum(c.lengths_q), sum(c.lengths_kv)
    q = torch.randn(rows, c.heads[0], c.dims[0], **cuda)
    if c.views == "packed":
        k, v = torch.randn(columns, 2, c.heads[1], c.dims[0], **cuda).unbind(1)
    elif c.views == "heads first":
        k, v = (torch.randn(c.heads[1], columns, dim, **cuda).transpose(0, 1) for dim in c.dims)
    else:
        k, v = (torch.randn(columns, c.heads[1], dim, **cuda) for dim in c.dims)
    if c.shift:
        size = (c.shift / -abs(c.scale)) ** 0.5
        q[..., 0], k[..., 0] = size, -size if c.scale > 0 else size
    offsets = {
        name: torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        for name, lengths in (("cu_seqlens_q", c.lengths_q), ("cu_seqlens_kv", c.lengths_kv))
    }
    if c.same:
        offsets["cu_seqlens_kv"] = offsets["cu_seqlens_q"]
    sinks = torch.randn(c.heads[0], device="cuda") * 2 + 0.5 if c.sinks else None
    if sinks is not None and c.sinks is not True:
        sinks.fill_(c.sinks)[::2].neg_()
    grad_out = torch.randn(rows, c.heads[0], c.dims[1], **cuda)
    return {"q": q, "k": k, "v": v, "sinks": sinks, "grad_out": grad_out, **offsets}


def expected(c: Config, t: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output, log-sum-exp, gradients and the sizes of their terms, in float64, from the dense reference."""
    empty = {name: torch.zeros_like(t[name], dtype=torch.float64) for name in ("q", "k", "v")}
    gradients = {**empty, "sinks": torch.zeros(c.heads[0], dtype=torch.float64, device="cuda")}
    sizes = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    out = torch.zeros_like(t["grad_out"], dtype=torch.float64)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64, device="cuda")
    row = column = 0
    for sq, skv in zip(c.lengths_q, c.lengths_kv, strict=True):
        rows, columns = slice(row, row + sq), slice(column, column + skv)
        row, column = row + sq, column + skv
        if sq and not skv and c.sinks:
            lse[rows] = t["sinks"].double()
        if not (sq and skv):
            continue
        one = dense_calls.Config(
            *(c.number, c.dtype, 1, c.heads, sq, skv, c.dims, (), "", c.scale, c.is_causal, c.causal_alignment),
            *(c.window_size, c.softcap, False, bool(c.sinks)),
        )
        where = {"q": rows, "k": columns, "v": columns, "grad_out": rows}
        part = {name: t[name][place].transpose(0, 1).unsqueeze(0) for name, place in where.items()}
        part |= {"sinks": t["sinks"], "attn_mask": None, "seq_lens_q": None, "seq_lens_kv": None}
        of_out, of_lse, found, found_sizes = dense_calls.expected(one, part, None)
        out[rows], lse[rows] = of_out[0].transpose(0, 1), of_lse[0].transpose(0, 1)
        for whole, parts in ((gradients, found), (sizes, found_sizes)):
            for name in ("q", "k", "v"):
                whole[name][where[name]] = parts[name][0].transpose(0, 1)
            if c.sinks:
                whole["sinks"] += parts["sinks"]
    return out, lse, gradients, sizes


def plain(**changes: Any) -> Config:
    """A causal call with grouped heads, some empty sequences, and these changes."""
    lengths = ((70, 0, 5, 33), (90, 8, 0, 33))
    usual = Config(0, torch.bfloat16, *lengths, (4, 2), (64, 64), 0.2, False, "dense", is_causal=True)
    return replace(usual, **changes)


def check(c: Config) -> list[str]:
    """Errors of a configuration; raises UnsupportedError if it is unsupported."""
    t = tensors(c)
    wanted = [*c.needs, *(["sinks"] if c.sinks and c.needs else [])]
    for name in wanted:
        t[name].requires_grad_()
    for name in ("q", "k", "v", "grad_out"):
        poison(tuple(t[name].shape), dtype=c.dtype)
    poison(t["q"].shape[:2], dtype=torch.float32)
    names = ("is_causal", "causal_alignment", "window_size", "scale", "dropout_p", "softcap", "deterministic")
    out, lse = cudnn_sdpa.sdpa_varlen(
        *(t[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv")),
        *(max(c.lengths_q), max(c.lengths_kv)),
        sinks=t["sinks"],
        return_lse=True,
        **{name: getattr(c, name) for name in names},
    )
    gradients = torch.autograd.grad(out, [t[name] for name in wanted], t["grad_out"]) if wanted else ()
    found = dict(zip(wanted, gradients, strict=True))
    plain = {name: None if x is None else x.detach() for name, x in t.items()}
    out_ref, lse_ref, grads_ref, sizes = expected(c, plain)
    rounding = {name: torch.finfo(c.dtype).eps / 4 * size.norm() for name, size in sizes.items()}
    return dense_calls.compare(c.dtype, (out, lse, found), (out_ref, lse_ref, grads_ref), rounding)
