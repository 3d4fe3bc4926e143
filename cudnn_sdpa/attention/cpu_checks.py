"""What a GPU would refuse, asked of calls on CPU tensors, so that what runs on a laptop runs on the GPU.

The rules are those of the GPU's own way: strides, then the key of every plan that the call would need, which is refused
by the rules of `support` and by the faults of this cuDNN. Nothing is planned. Calls are seen without data; float32 and
float64, which only the reference takes, are seen as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.attention import fallback, fp8_passes, fp8_repairs, memory, paged_arguments, pieces, varlen_calls
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.fp8_arguments import Fp8Backward, Fp8Forward
from cudnn_sdpa.attention.lookup import describe
from cudnn_sdpa.attention.paged_arguments import PagedArguments
from cudnn_sdpa.attention.paged_long import without_data as gathered_without_data
from cudnn_sdpa.attention.paged_plans import PagedDecode, is_decode
from cudnn_sdpa.attention.passes import Forward, dense_like
from cudnn_sdpa.attention.varlen_arguments import VarlenArguments
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.runtime import cpu_target, known_issues
from cudnn_sdpa.runtime.eager import may_be_read
from cudnn_sdpa.runtime.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.runtime.target import Target

#: The dtypes of the reference alone, and the one that they stand for.
_EXACT = (torch.float32, torch.float64)
_MEANT = torch.bfloat16

#: Calls that nothing speaks against are remembered: so many.
MOST_REMEMBERED = 8192

_passed: set[Hashable] = set()

_Rules = Callable[[Any, Target], None]


def check_dense(call: ForwardArguments) -> None:
    """Refuses a call of `sdpa` that the GPU would refuse.

    Raises:
        LayoutError: Strides or an offset that cuDNN cannot read.
        UnsupportedError: There is no kernel for it.
    """
    if call.is_for_cudnn:
        _check(call, _strides_of_dense, _plan_of_dense)


def check_dense_gradient(call: ForwardArguments) -> None:
    """The same of the gradients of a call of `sdpa`."""
    if call.is_for_cudnn:
        _check(call, _strides_of_dense, _gradient_of_dense)


def check_varlen(call: VarlenArguments) -> None:
    """The same of `sdpa_varlen`."""
    if call.is_for_cudnn:
        _check(call, _strides_of_varlen, _plan_of_varlen)


def check_varlen_gradient(call: VarlenArguments) -> None:
    """The same of its gradients."""
    if call.is_for_cudnn:
        _check(call, _strides_of_varlen, _gradient_of_varlen)


def check_paged(call: PagedArguments) -> None:
    """The same of `sdpa_paged`."""
    _check(call, _strides_of_paged, _plan_of_paged)


def check_fp8(of: Fp8Forward) -> None:
    """The same of `sdpa_fp8`."""
    _check(of, _strides_of_fp8, _plan_of_fp8)


def check_fp8_backward(of: Fp8Backward) -> None:
    """The same of `sdpa_fp8_backward`."""
    _check(of, _strides_of_fp8_backward, _plan_of_fp8_backward)


def _check(of: Any, strides: Callable[[Any], None], rules: _Rules) -> None:
    """Refuses what the GPU would refuse, once for each kind of call."""
    target = cpu_target.active()
    tensors = [x for x in _flat(of) if isinstance(x, Tensor)]
    if target is None or not all(x.device.type == "cpu" for x in tensors) or not may_be_read(*tensors):
        return
    lifted = fallback.is_in_force()
    name = (rules, target, lifted, *map(_described, _flat(of)))
    if name in _passed:
        return
    bare = _without_data(of, of.q if hasattr(of, "q") else of.call.q)
    try:
        strides(bare)
        if not lifted:
            rules(bare, target)
    except (ArgumentError, UnsupportedError) as error:
        raise cpu_target.for_gpu(error) from None
    if len(_passed) >= MOST_REMEMBERED:
        _passed.clear()
    _passed.add(name)


def _flat(of: Any) -> list[Any]:
    """The arguments of a call, those of calls within it too."""
    found: list[Any] = []
    for part in of:
        found += _flat(part) if isinstance(part, tuple) else [part]
    return found


def _described(part: Any) -> Hashable:
    """All of an argument that decides whether a call is refused."""
    if not isinstance(part, Tensor):
        return type(part), part
    return describe(part), part.storage_offset() % ALIGNMENT, part.requires_grad


def _without_data(of: Any, q: Tensor) -> Any:
    """The call with tensors that lie in memory in the same way, have no data, and are of a dtype that GPUs take."""
    kinds = {q.dtype: _MEANT} if q.dtype in _EXACT else {}
    parts: list[Any] = []
    for name, part in zip(of._fields, of, strict=True):
        if isinstance(part, Tensor):
            is_meant = name in ("q", "k", "v", "out", "attn_mask")
            dtype = kinds.get(part.dtype, part.dtype) if is_meant else part.dtype
            bare = torch.empty(0, dtype=dtype, device="meta", requires_grad=part.requires_grad)
            parts.append(bare.as_strided(part.shape, part.stride(), part.storage_offset()))
        elif isinstance(part, tuple):
            parts.append(_without_data(part, q) if hasattr(part, "_fields") else part)
        else:
            parts.append(part)
    return type(of)._make(parts)


def _check_offsets(**tensors: Tensor | None) -> None:
    """Whether tensors would begin where kernels can read them: memory itself always does."""
    for name, tensor in tensors.items():
        if tensor is not None and (past := int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT):
            memory.refuse_address(name, past)


def _strides_of_dense(call: ForwardArguments) -> None:
    memory.check_strides(call.q, call.k, call.v)
    _check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    if call.out is not None and call.out.numel():
        memory.check_strides_of_out(call.out, for_cudnn=True)


def _plan_of_dense(call: ForwardArguments, target: Target) -> None:
    forward = Forward.of(call)
    if not (forward.is_empty or forward.problem.has_no_plan):
        known_issues.check(forward.key(target, None))


def _gradient_of_dense(call: ForwardArguments, target: Target) -> None:
    pieces.check_gradient(call, target, None)


def _strides_of_varlen(call: VarlenArguments) -> None:
    _strides_of_dense(call.as_dense())


def _is_empty(call: VarlenArguments) -> bool:
    return 0 in call.q.shape or 0 in call.k.shape


def _plan_of_varlen(call: VarlenArguments, target: Target) -> None:
    if not _is_empty(call):
        key = varlen_calls.packed(call).forward_key(varlen_calls.output_layout(call), call.with_lse, target, None)
        known_issues.check(key)


def _gradient_of_varlen(call: VarlenArguments, target: Target) -> None:
    if _is_empty(call):
        return
    if pieces.is_too_large(*call[:3]):
        pieces.check(call.as_dense(), mask_gradient=False)
    out, q = varlen_calls.output_layout(call), dense_like(TensorLayout.of(call.q))  # others are copied
    call = call._replace(q=torch.empty_strided(q.shape, q.stride, dtype=q.dtype, device="meta"))
    known_issues.check(varlen_calls.packed(call).backward_key(out, out, call.deterministic, target, None))


def _strides_of_paged(call: PagedArguments) -> None:
    try:
        memory.check_strides(call.q, call.k, call.v)
        _check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    except ArgumentError as error:
        raise error.renamed(paged_arguments.NAMES) from None
    if call.out is not None and call.out.numel():
        memory.check_strides_of_out(call.out, for_cudnn=True)


def _plan_of_paged(call: PagedArguments, target: Target) -> None:
    if 0 in call.q.shape or call.table_k.shape[1] == 0:
        return
    if is_decode(call):
        decode = PagedDecode.of(call, in_place=False)
        if UnsupportedError.of(decode.key, target, None) is None:
            return
    packed, out = gathered_without_data(call)
    known_issues.check(packed.forward_key(out, call.with_lse, target, None))


def _strides_of_fp8(of: Fp8Forward) -> None:
    memory.check_strides(*of.call[:3])
    _check_offsets(q=of.call.q, k=of.call.k, v=of.call.v)


def _plan_of_fp8(of: Fp8Forward, target: Target) -> None:
    forward = fp8_passes.Forward.of(of)
    if not forward.problem.is_empty:
        known_issues.check(forward.key(target, None))


def _strides_of_fp8_backward(of: Fp8Backward) -> None:
    memory.check_strides(*of.call[:3])
    memory.check_strides_of("out", of.out)
    _check_offsets(q=of.call.q, k=of.call.k, v=of.call.v, out=of.out, lse=of.lse)


def _plan_of_fp8_backward(of: Fp8Backward, target: Target) -> None:
    backward = fp8_passes.Backward.of(fp8_repairs.readable(of))
    if not backward.problem.is_empty:
        known_issues.check(backward.piece(target).key(target, None))
