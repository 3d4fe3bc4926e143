"""Calls without gradients, refused before the first message: in the backward pass the other ranks would wait.

Tensors without data stand for those of the calls that the backward pass will make. This rank's calls are checked, and
some of other ranks', so that all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import torch

from cudnn_sdpa.attention.dense.call import SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.varlen.arguments import offsets_of_keys
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall, VarlenCall
from cudnn_sdpa.distributed import all_gather, ring, ulysses
from cudnn_sdpa.distributed.local_attention import (
    Inputs,
    Options,
    Part,
    new_results,
    softmax_of,
    tensors_of,
    without_data,
)
from cudnn_sdpa.engine import cpu_target, fallback
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.launch import layout_signature
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, live_target

CALLS: dict[str, Callable[[Options, Inputs], Iterator[tuple[Part, Inputs]]]]
CALLS = {"all_gather": all_gather.calls, "ulysses": ulysses.calls, "ring": ring.calls}

#: Arguments of suggestions that context parallelism lacks.
MISSING = ("attn_mask", "seq_lens")

#: Maximum number of accepted calls that are remembered.
MAX_REMEMBERED = 8192

known: set[Hashable] = set()  #: signatures of accepted calls


def first_refusal(method: str, options: Options, inputs: Inputs, summary: str) -> UnsupportedError | None:
    """The `refusal` of a call, without a check if one of its signature has been accepted."""
    layouts = map(layout_signature, inputs.qkv)
    signature = summary, options.group_rank.ranks, *layouts, cpu_target.active_name(), fallback.is_in_force()
    if signature in known:
        return None
    refused = refusal(method, options, inputs)
    if refused is None:
        if len(known) >= MAX_REMEMBERED:
            known.clear()
        known.add(signature)
    return refused


def refusal(method: str, options: Options, inputs: Inputs) -> UnsupportedError | None:
    """The error with which a rank's backward pass would be refused; None if there is none."""
    device = inputs.q.get_device() if inputs.q.is_cuda else None
    target = cpu_target.active() if device is None else live_target(device)
    if target is None or fallback.is_in_force() or not is_plain_memory(*inputs.qkv):
        return None
    q, k, v = map(without_data, inputs.qkv)
    offsets = inputs.cu_seqlens
    offsets = None if offsets is None else torch.zeros_like(offsets, device="cpu")  # "meta" is slow in Python
    is_alone = options.group_rank.ranks == 1
    if not (is_alone or options.softmax.dropout_p):
        inputs = inputs.without_sinks()  # no kernel computes their gradient
    inputs = inputs._replace(q=q, k=k, v=v, cu_seqlens=offsets)
    calls = iter([(Part.whole(options, q), inputs)]) if is_alone else CALLS[method](options, inputs)
    seen: set[Hashable] = set()
    for part, tensors in calls:
        signature = part.is_causal, part.window, part.queries == part.keys, *map(layout_signature, tensors.qkv)
        if signature not in seen:
            seen.add(signature)
            try:
                for key in _keys(options, part, tensors, target=target, device=device):
                    known_issues.check(key)
            except UnsupportedError as error:
                return error
    return None


def what_works(refused: UnsupportedError) -> str:
    return "; ".join(x for x in refused.suggestion.split("; ") if not any(name in x for name in MISSING))


def _keys(options: Options, part: Part, inputs: Inputs, *, target: Target, device: int | None) -> Iterator[PlanKey]:
    arguments = {**tensors_of(options, part, inputs), "softmax": softmax_of(options, part, inputs)}
    out, lse = new_results(inputs.q, inputs.v)
    outputs = {"grad_out": out, "out": out, "lse": lse}
    if options.is_packed:
        arguments["cu_seqlens_kv"] = offsets_of_keys(arguments["cu_seqlens_q"], arguments["cu_seqlens_kv"])
        packed = VarlenCall(**arguments, rng=None, with_lse=True)
        needs = tuple(x is not None for x in packed.differentiable)
        return VarlenBackwardCall(**outputs, call=packed, needs=needs).make_readable().keys(target, device)
    dense = SdpaCall(**arguments)
    needs = tuple(x is not None for x in dense.differentiable)
    return SdpaBackwardCall(**outputs, call=dense, needs=needs).make_readable().keys(target, device)
