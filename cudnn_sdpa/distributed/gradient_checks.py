"""Calls without gradients, refused before the first message: in the backward pass the other ranks would wait.

Tensors without data stand for those of the calls that the backward pass will make. This rank's calls are checked, and
some of other ranks', so that all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import from_fields
from cudnn_sdpa.attention.dense.call import SdpaBackwardCall, SdpaCall
from cudnn_sdpa.attention.varlen.arguments import offsets_of_keys
from cudnn_sdpa.attention.varlen.call import VarlenBackwardCall, VarlenCall
from cudnn_sdpa.distributed import all_gather, ring, ulysses
from cudnn_sdpa.distributed.local_attention import Options, Part, PartCall, arguments_of, new_results, without_data
from cudnn_sdpa.engine import cpu_target, fallback
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.launch import layout_signature
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, live_target

CALLS: dict[str, Callable[[Options, Tensor, Tensor, Tensor], Iterator[PartCall]]]
CALLS = {"all_gather": all_gather.calls, "ulysses": ulysses.calls, "ring": ring.calls}

#: Arguments of suggestions that context parallelism lacks.
MISSING = ("attn_mask", "seq_lens")

#: Maximum number of accepted calls that are remembered.
MAX_REMEMBERED = 8192

_known: set[Hashable] = set()


def is_known(summary: str, options: Options, qkv: Iterable[Tensor]) -> bool:
    return _signature(summary, options, qkv) in _known


def remember(summary: str, options: Options, qkv: Iterable[Tensor]) -> None:
    if len(_known) >= MAX_REMEMBERED:
        _known.clear()
    _known.add(_signature(summary, options, qkv))


def _signature(summary: str, options: Options, qkv: Iterable[Tensor]) -> Hashable:
    return (
        summary,
        options.group_rank.ranks,
        *map(layout_signature, qkv),
        cpu_target.active_name(),
        fallback.is_in_force(),
    )


def refusal(
    method: str,
    options: Options,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
) -> UnsupportedError | None:
    """The error with which a rank's backward pass would be refused; None if there is none."""
    device = qkv[0].get_device() if qkv[0].is_cuda else None
    target = cpu_target.active() if device is None else live_target(device)
    if target is None or fallback.is_in_force() or not is_plain_memory(*qkv):
        return None
    q, k, v = map(without_data, qkv)
    offsets = None if cu_seqlens is None else torch.zeros_like(cu_seqlens, device="cpu")  # "meta" is slow in Python
    is_alone = options.group_rank.ranks == 1
    if is_alone:
        whole = Part.whole(q.shape[options.dim], is_causal=options.is_causal, window=options.window)
        calls = iter([PartCall(whole, q, k, v)])
    else:
        calls = CALLS[method](options, q, k, v)
    if not (is_alone or options.dropout_p):  # `gradient_of_sinks` computes theirs
        sinks = None
    seen: set[Hashable] = set()
    for call in calls:
        part = call.part
        signature = part.is_causal, part.window, part.queries == part.keys, *map(layout_signature, call[1:])
        if signature not in seen:
            seen.add(signature)
            try:
                for key in _keys(options, call, sinks, offsets, target=target, device=device):
                    known_issues.check(key)
            except UnsupportedError as error:
                return error
    return None


def what_works(refused: UnsupportedError) -> str:
    return "; ".join(x for x in refused.suggestion.split("; ") if not any(name in x for name in MISSING))


def _keys(
    options: Options,
    call: PartCall,
    sinks: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    target: Target,
    device: int | None,
) -> Iterator[PlanKey]:
    part, q, k, v = call
    fields = arguments_of(options, part, q=q, k=k, v=v, cu_seqlens=cu_seqlens)
    del fields["window_size"]
    left, right = part.window
    fields |= {"window_left": left, "window_right": right, "dropout_p": options.dropout_p, "sinks": sinks}
    out, lse = new_results(q, v)
    outputs = {"grad_out": out, "out": out, "lse": lse}
    needs = True, True, True
    if cu_seqlens is None:
        needs_all = (*needs, False, sinks is not None)
        dense = SdpaBackwardCall(**outputs, call=from_fields(SdpaCall, **fields), needs=needs_all)
        return dense.make_readable().keys(target, device)
    fields["cu_seqlens_kv"] = offsets_of_keys(fields["cu_seqlens_q"], fields["cu_seqlens_kv"])
    packed = from_fields(VarlenCall, **fields, rng=None)
    backward = VarlenBackwardCall(**outputs, call=packed, needs=(*needs, sinks is not None))
    return backward.make_readable().keys(target, device)
