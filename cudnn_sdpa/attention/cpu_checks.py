"""Checks of calls on CPU tensors for what a GPU would refuse, so that a call that runs on a laptop runs on the GPU.

The checks are those of the GPU path: strides, then the key of every plan that the call would need, which the support
rules and the known bugs of this cuDNN may refuse. No plan is built. Calls are checked with tensors without data;
float32 and float64, which only the reference takes, count as bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import AttentionT, ForwardArguments, GradientT
from cudnn_sdpa.engine import cpu_target, fallback, memory
from cudnn_sdpa.engine.dispatch_state import is_plain_memory
from cudnn_sdpa.engine.fast_path import layout_signature
from cudnn_sdpa.engine.memory import refuse_address
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.graph.target import Target

#: Dtypes that only the reference takes, and the dtype that replaces them in the checks.
_REFERENCE_DTYPES = (torch.float32, torch.float64)
_GPU_DTYPE = torch.bfloat16

#: Maximum number of accepted calls that are remembered.
MAX_REMEMBERED = 8192

_passed: set[Hashable] = set()


def check_call(
    call: AttentionT,
    strides: Callable[[AttentionT], None],
    rules: Callable[[AttentionT, Target], None],
    *,
    name: Hashable = None,
) -> None:
    """Refuses a call that the GPU would refuse. A call like an accepted one is not checked again.

    Args:
        call: The call.
        strides: Checks strides and addresses.
        rules: Checks the keys of its plans.
        name: A name of the checks, by which accepted calls are remembered; None is `rules`.
    """
    target = cpu_target.active()
    tensors = [x for x in call if isinstance(x, Tensor)]
    if target is None or not all(x.device.type == "cpu" for x in tensors) or not is_plain_memory(*tensors):
        return
    lifted = fallback.is_in_force()
    kind = (type(call), rules if name is None else name, target, lifted, *map(_signature, call))
    if kind in _passed:
        return
    meta = _without_data(call)
    try:
        strides(meta)
        if not lifted:
            rules(meta, target)
    except (ArgumentError, UnsupportedError) as error:
        raise cpu_target.for_gpu(error) from None
    if len(_passed) >= MAX_REMEMBERED:
        _passed.clear()
    _passed.add(kind)


def check_backward_call(
    of: GradientT,
    call: AttentionT,
    strides: Callable[[AttentionT], None],
    rules: Callable[[GradientT, Target], None],
) -> None:
    """Refuses a backward call that the GPU would refuse. Gradient, output and LSE may have any strides."""

    def rules_of_call(call: AttentionT, target: Target) -> None:
        shape = (*call.q.shape[:-1], call.v.shape[-1])
        out = torch.empty(shape, dtype=call.q.dtype, device="meta")
        lse = torch.empty(shape[:-1], dtype=torch.float32, device="meta")
        rules(of._replace(grad_out=out, out=out, lse=lse, call=call), target)

    check_call(call, strides, rules_of_call, name=(rules, of.needs))


def _signature(field: object) -> Hashable:
    """Everything about an argument that decides whether a call is refused."""
    if not isinstance(field, Tensor):
        return tuple(map(type, field)) if isinstance(field, tuple) else type(field), field
    return layout_signature(field), field.storage_offset() % ALIGNMENT, field.requires_grad


def _without_data(call: AttentionT) -> AttentionT:
    """The call with meta tensors of the same layouts, in dtypes that GPUs take."""
    dtypes = {call.q.dtype: _GPU_DTYPE} if call.q.dtype in _REFERENCE_DTYPES else {}
    changes: dict[str, object] = {}
    for name, field in call._asdict().items():
        if isinstance(field, Tensor):
            is_cast = name in ("q", "k", "v", "k_pages", "v_pages", "out", "attn_mask")
            dtype = dtypes.get(field.dtype, field.dtype) if is_cast else field.dtype
            meta = torch.empty(0, dtype=dtype, device="meta", requires_grad=field.requires_grad)
            changes[name] = meta.as_strided(field.shape, field.stride(), field.storage_offset())
    return call._replace(**changes)


def check_offsets(**tensors: Tensor | None) -> None:
    """Refuses storage offsets that kernels could not read; allocations themselves are aligned."""
    for name, tensor in tensors.items():
        if tensor is not None and (remainder := int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT):
            refuse_address(name, remainder)


def check_strides_of_dense(call: ForwardArguments) -> None:
    """Strides and addresses of a dense call's tensors."""
    memory.check_strides(call.q, call.k, call.v)
    check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    if call.out is not None and call.out.numel():
        memory.check_strides_of_out(call.out, for_cudnn=True)
