"""The torch operators of attention on a paged cache: CUDA (cuDNN), CPU (reference) and fake implementations."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import memory, reference, value_checks
from cudnn_sdpa.attention.arguments import MIN_SCALE, ForwardArguments, Result
from cudnn_sdpa.attention.cpu_checks import check_call, check_offsets
from cudnn_sdpa.attention.memory import new_output
from cudnn_sdpa.attention.paged import arguments, launch
from cudnn_sdpa.attention.paged.arguments import PagedArguments
from cudnn_sdpa.attention.paged.decode_plans import DecodeSpec, is_decode
from cudnn_sdpa.attention.paged.prefill import prefill_spec, run_prefill
from cudnn_sdpa.engine.fast_path import describe
from cudnn_sdpa.engine.torch_ops import define
from cudnn_sdpa.errors import ArgumentError, LayoutError, UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target

#: Kinds of decode steps that cuDNN has no kernel for on this GPU; they run as prefill does.
_declined: set[Hashable] = set()
MAX_DECLINED = 1000


def forward_cuda(call: PagedArguments) -> Result:
    """A forward pass on the GPU."""
    if call.out is not None and not call.out.is_inference():
        torch.autograd.graph.increment_version(call.out)
    check_memory(call)
    if value_checks.enabled:
        _check_values(call)
    if 0 in call.q.shape or call.table_k.shape[1] == 0:
        return _empty_result(call)
    if call.scale is not None and call.scale < MIN_SCALE:
        sign = 0.0 if call.scale > -MIN_SCALE else -1.0
        out = new_output(call.q, call.v) if call.out is None else call.out  # in the memory order of q
        return forward_cuda(call._replace(q=call.q * sign, scale=max(-call.scale, MIN_SCALE), out=out))
    if is_decode(call):
        deterministic = torch.are_deterministic_algorithms_enabled()
        kind = (deterministic, describe(call.q), describe(call.k), describe(call.v), *call.options, call.with_lse)
        if kind not in _declined:
            try:
                return launch.run_decode(call)
            except UnsupportedError:
                if len(_declined) >= MAX_DECLINED:
                    _declined.clear()
                _declined.add(kind)
    return run_prefill(call)


def check_memory(call: PagedArguments) -> None:
    """Checks that cuDNN's kernels can read the strides and addresses."""
    try:
        memory.check_strides(call.q, call.k, call.v)
        memory.check_memory(call.q, call.k, call.v, call.out)
    except LayoutError as error:
        raise error.renamed(arguments.NAMES) from None


def _empty_result(call: PagedArguments) -> Result:
    """The results without queries, or without room for keys: zeros, and the log-sum-exp of the sinks alone."""
    out = (new_output(call.q, call.v) if call.out is None else call.out).zero_()
    if not call.with_lse:
        return out
    lse = torch.full(out.shape[:3], -torch.inf, dtype=torch.float32, device=out.device)
    return out, lse if call.sinks is None else torch.maximum(lse, call.sinks.view(1, -1, 1))


def _check_values(call: PagedArguments) -> None:
    value_checks.check_lengths("seq_lens_kv", call.seq_lens_kv, call.max_kv_len)
    value_checks.check_lengths("seq_lens_q", call.seq_lens_q, call.q.shape[2])
    for name, table in (("page_table", call.table_k), ("page_table_v", call.table_v)):
        value_checks.check_pages(
            name=name, table=table, lengths=call.seq_lens_kv, page_size=call.page_size, pages=call.k.shape[0]
        )


def forward_cpu(call: PagedArguments) -> Result:
    """A forward pass by the reference implementation."""
    arguments.check(call)
    memory.check_memory(call.q, call.k, call.v, call.out)
    _check_values(call)
    check_paged(call)
    if 0 in call.q.shape or call.table_k.shape[1] == 0:
        return _empty_result(call)
    result, lse = reference.attention(as_dense(call))
    out = (new_output(call.q, call.v) if call.out is None else call.out).copy_(result)
    return (out, lse.float()) if call.with_lse else out


def as_dense(call: PagedArguments) -> ForwardArguments:
    """The same call on contiguous keys and values, zeros in unused slots; on any device."""
    lengths = call.seq_lens_kv.clamp(0, call.max_kv_len)
    is_owned = torch.arange(call.max_kv_len, device=lengths.device) < lengths.unsqueeze(1)
    rows: list[Tensor] = []
    for pages, table in ((call.k, call.table_k), (call.v, call.table_v)):
        gathered = pages[table.clamp(0, pages.shape[0] - 1).long()].transpose(1, 2).flatten(2, 3)
        rows.append(torch.where(is_owned[:, None, :, None], gathered, gathered.new_zeros(())))
    present = None if call.seq_lens_q is None else call.seq_lens_q.clamp(0, call.q.shape[2])
    return call.as_dense(call.q, *rows, seq_lens_q=present, seq_lens_kv=lengths, with_lse=call.with_lse)


def _forward_fake(call: PagedArguments) -> Result:
    arguments.check(call)
    out = new_output(call.q, call.v) if call.out is None else call.out
    return (out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)) if call.with_lse else out


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor table_k, Tensor table_v, Tensor seq_lens_kv, Tensor? seq_lens_q, "
    "Tensor? sinks, bool is_causal, str causal_alignment, SymInt window_left, SymInt window_right, float? scale, "
    "float? softcap"
)


#: mypy takes a splat to fill every field.
_PagedArguments: Any = PagedArguments


def _plain(run: Any) -> Any:
    return lambda *inputs: run(_PagedArguments(*inputs, with_lse=False))


def _with_lse(run: Any) -> Any:
    return lambda *inputs: run(_PagedArguments(*inputs, with_lse=True))


def _into_out(run: Any) -> Any:
    def implementation(*inputs_and_out: Any) -> Tensor:
        *inputs, out = inputs_and_out
        lse: Tensor = run(_PagedArguments(*inputs, with_lse=True, out=out))[1]
        return lse

    return implementation


for _name, _inputs, _returns, _adapt in (
    ("paged_forward", _INPUTS, "Tensor", _plain),
    ("paged_forward_lse", _INPUTS, "(Tensor, Tensor)", _with_lse),
    ("paged_forward_out", f"{_INPUTS}, Tensor(a!) out", "Tensor", _into_out),
):
    define(_name, _inputs, _returns, _adapt(forward_cuda), _adapt(forward_cpu), _adapt(_forward_fake))


def check_paged(call: PagedArguments) -> None:
    """Checks that the CPU target's GPU would run a call of `sdpa_paged`."""
    check_call(call, _strides_of_paged, _plan_of_paged)


def _strides_of_paged(call: PagedArguments) -> None:
    try:
        memory.check_strides(call.q, call.k, call.v)
        check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    except ArgumentError as error:
        raise error.renamed(arguments.NAMES) from None
    if call.out is not None and call.out.numel():
        memory.check_strides_of_out(call.out, for_cudnn=True)


def _plan_of_paged(call: PagedArguments, target: Target) -> None:
    if 0 in call.q.shape or call.table_k.shape[1] == 0:
        return
    if is_decode(call):
        decode = DecodeSpec.of(call, in_place=False)
        if UnsupportedError.of(decode.key, target, None) is None:
            return
    packed, out = prefill_spec(call)
    known_issues.check(packed.forward_key(out, call.with_lse, target, None))
