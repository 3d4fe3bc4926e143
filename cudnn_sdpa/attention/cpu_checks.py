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

from cudnn_sdpa.attention import memory
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.engine import cpu_target, fallback
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.fast_path import describe
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.graph.target import Target

#: The dtypes of the reference alone, and the one that they stand for.
_EXACT = (torch.float32, torch.float64)
_MEANT = torch.bfloat16

#: Calls that nothing speaks against are remembered: so many.
MAX_REMEMBERED = 8192

_passed: set[Hashable] = set()

_Rules = Callable[[Any, Target], None]


def check_call(of: Any, strides: Callable[[Any], None], rules: _Rules) -> None:
    """Refuses what the GPU would refuse, once for each kind of call."""
    target = cpu_target.active()
    tensors = [x for x in _flat(of) if isinstance(x, Tensor)]
    if target is None or not all(x.device.type == "cpu" for x in tensors) or not is_plain_memory(*tensors):
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
    if len(_passed) >= MAX_REMEMBERED:
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


def check_offsets(**tensors: Tensor | None) -> None:
    """Whether tensors would begin where kernels can read them: memory itself always does."""
    for name, tensor in tensors.items():
        if tensor is not None and (past := int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT):
            memory.refuse_address(name, past)


def check_strides_of_dense(call: ForwardArguments) -> None:
    """Strides and addresses of a dense call's tensors."""
    memory.check_strides(call.q, call.k, call.v)
    check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    if call.out is not None and call.out.numel():
        memory.check_strides_of_out(call.out, for_cudnn=True)
