"""Calls of `sdpa_paged_varlen` bound to their plans."""

from __future__ import annotations

import struct
from array import array
from functools import partial

import torch

from cudnn_sdpa.attention.arguments import results, scale_of
from cudnn_sdpa.attention.mask import TOP_LEFT, UNBOUNDED
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.attention.paged_varlen.plans import SIZES, Spec, paged_varlen_forward, part_of_keys
from cudnn_sdpa.attention.paged_varlen.reference import without_keys
from cudnn_sdpa.engine.launch import Address, BoundPlan, LaunchExtras, Prepared, SingleLaunch
from cudnn_sdpa.graph.target import live_target
from cudnn_sdpa.plans.cache import build_plan, plan_cache

_OPTIONAL = ("page_table_v", "sinks", "tree_mask", "k_scale", "v_scale")


def prepare(call: PagedVarlenArguments) -> Prepared:
    """A call bound to its plan, with the sizes and strides of its tensors."""
    if call.is_empty:
        return Prepared(without_keys, None)
    device = call.q.get_device()
    target = live_target(device)
    plan = plan_cache.get(Spec.of(call, target).key(target, device), partial(build_plan, paged_varlen_forward))
    layouts = results(call)
    optional = tuple(name for name in _OPTIONAL if getattr(call, name) is not None)
    flat = ("page_table", "seq_lens_kv", "cu_seqlens_q", *optional)
    absent = [name for name in ("seq_lens_q", *_OPTIONAL) if name not in optional and name != "page_table_v"]
    addresses = {} if "page_table_v" in optional else {"page_table_v": Address("page_table")}
    with torch.cuda.device(device):
        bound = BoundPlan(
            plan,
            ("q", "k_pages", "v_pages"),
            results=layouts if call.with_lse else layouts[:1],
            numbers={"scale": scale_of(call)},
            extras=LaunchExtras(operands=flat, unaligned_ok=flat, addresses=addresses),
            fixed=dict.fromkeys(absent, 0),
            arrays={"sizes": _sizes_of(call)},
        )
    return Prepared(SingleLaunch(bound), plan)


def _sizes_of(call: PagedVarlenArguments) -> array[int]:
    """The struct `Sizes` of the kernel."""
    (_, out_stride, _), (_, lse_stride, _) = results(call)
    if call.out is not None:
        out_stride = call.out.stride()
    softmax, (table_k, table_v), tree = call.softmax, call.tables, call.tree_mask
    strides = {
        "q": dict(zip("bth", (0, *call.q.stride()), strict=False)),
        "k": dict(zip("phs", call.k.stride(), strict=False)),
        "v": dict(zip("phs", call.v.stride(), strict=False)),
        "o": dict(zip("bth", (0, *out_stride), strict=False)),
        "l": dict(zip("bth", (0, *lse_stride), strict=False)),
        "table_k": {"b": table_k.stride(0)},
        "table_v": {"b": table_v.stride(0)},
    }
    return SIZES.filled(
        batch=call.batch,
        tokens=call.q.shape[0],
        queries=0,
        heads_kv=call.k.shape[1],
        pages=call.k.shape[0],
        width=table_k.shape[1],
        **{f"{name}_{axis}": stride for name, of in strides.items() for axis, stride in of.items()},
        left=softmax.window_left if softmax.window_left != UNBOUNDED else -1,
        right=0 if softmax.is_causal else softmax.window_right if softmax.window_right != UNBOUNDED else -1,
        top_left=int(softmax.causal_alignment == TOP_LEFT),
        tree_t=0 if tree is None else tree.stride(0),
        tree_n=0 if tree is None else tree.shape[1],
        k_scale_h=int(call.k_scale is not None and call.k_scale.numel() > 1),
        v_scale_h=int(call.v_scale is not None and call.v_scale.numel() > 1),
        softcap=struct.unpack("I", struct.pack("f", softmax.softcap if softmax.is_capped else 0.0))[0],
        fixed=part_of_keys(call),
    )
