"""Calls of `sdpa_paged_varlen` bound to their plans."""

from __future__ import annotations

import struct
from array import array
from functools import partial

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import results, scale_of
from cudnn_sdpa.attention.mask import TOP_LEFT, UNBOUNDED
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.attention.paged_varlen.plans import (
    SIZES,
    OnPages,
    PagedForward,
    chosen_key,
    key_of,
    paged_varlen_forward,
    part_of_keys,
)
from cudnn_sdpa.attention.paged_varlen.reference import without_keys
from cudnn_sdpa.engine.launch import Address, BoundPlan, LaunchExtras, Prepared, SingleLaunch
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.providers import FLASH4

_OPTIONAL = ("page_table_v", "seq_lens_q", "sinks", "tree_mask", "k_scale", "v_scale")


def prepare(call: PagedVarlenArguments) -> Prepared:
    """A call bound to its plan."""
    if call.is_empty:
        return Prepared(without_keys, None)
    spec, device = PagedForward(call), call.q.get_device()
    key = chosen_key(spec, live_target(device), device)
    if key.provider == FLASH4:
        other = providers.other(FLASH4)
        key = other.ready(spec, key)
        if key.provider == FLASH4:
            prepared: Prepared = other.bind(spec, key)
            return prepared
    return bind(call)


def bind(call: OnPages) -> Prepared:
    """A call with queries and pages, bound to its plan, with the sizes and strides of its tensors."""
    device = call.q.get_device()
    plan = plan_cache.get(key_of(call, live_target(device), device), partial(build_plan, paged_varlen_forward))
    layouts = results(call)
    names = ("page_table", "seq_lens_kv", "cu_seqlens_q", *_OPTIONAL)
    flat = tuple(name for name in names if getattr(call, name, None) is not None)
    addresses = {} if "page_table_v" in flat else {"page_table_v": Address("page_table")}
    with torch.cuda.device(device):
        bound = BoundPlan(
            plan,
            ("q", "k_pages", "v_pages"),
            results=layouts if call.with_lse else layouts[:1],
            numbers={"scale": scale_of(call)},
            extras=LaunchExtras(operands=flat, unaligned_ok=flat, addresses=addresses),
            fixed={name: 0 for name in names if name not in flat and name not in addresses},
            arrays={"sizes": _sizes_of(call)},
        )
    return Prepared(SingleLaunch(bound), plan)


def _sizes_of(call: OnPages) -> array[int]:
    """The struct `Sizes` of the kernel."""
    (_, out_stride, _), (_, lse_stride, _) = results(call)
    if call.out is not None:
        out_stride = call.out.stride()
    softmax, (table_k, table_v) = call.softmax, call.tables
    no_tensor: Tensor | None = None
    if isinstance(call, PagedArguments):
        batch, _, queries, _ = call.q.shape
        tokens, axes, tree, fixed = batch * queries, "bht", no_tensor, 0
    else:
        batch, queries, tokens, axes = call.batch, 0, call.q.shape[0], "th"
        tree, fixed = call.tree_mask, part_of_keys(call)
    strides = {
        **{f"{name}_b": 0 for name in "qol"},
        **{f"q_{x}": stride for x, stride in zip(axes, call.q.stride(), strict=False)},
        **{f"o_{x}": stride for x, stride in zip(axes, out_stride, strict=False)},
        **{f"l_{x}": stride for x, stride in zip(axes, lse_stride, strict=True)},
        **{f"k_{x}": stride for x, stride in zip("phs", call.k.stride(), strict=False)},
        **{f"v_{x}": stride for x, stride in zip("phs", call.v.stride(), strict=False)},
        "table_k_b": table_k.stride(0),
        "table_v_b": table_v.stride(0),
    }
    return SIZES.filled(
        batch=batch,
        tokens=tokens,
        queries=queries,
        heads_kv=call.k.shape[1],
        pages=call.k.shape[0],
        width=table_k.shape[1],
        **strides,
        left=-1 if softmax.window_left == UNBOUNDED else softmax.window_left,
        right=0 if softmax.is_causal else -1 if softmax.window_right == UNBOUNDED else softmax.window_right,
        top_left=int(softmax.causal_alignment == TOP_LEFT),
        tree_t=0 if tree is None else tree.stride(0),
        tree_n=0 if tree is None else tree.shape[1],
        k_scale_h=_step_of(call.k_scale),
        v_scale_h=_step_of(call.v_scale),
        softcap=struct.unpack("I", struct.pack("f", softmax.softcap if softmax.is_capped else 0.0))[0],
        fixed=fixed,
    )


def _step_of(scale: Tensor | None) -> int:
    """Elements from the scale of a head to that of the next; 0 if all heads share one."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
