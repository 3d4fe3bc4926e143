"""Checks of strides and storage offsets on the CPU, for what a GPU's kernels would refuse to read."""

from __future__ import annotations

from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.engine import tensor_checks
from cudnn_sdpa.engine.tensor_checks import refuse_address
from cudnn_sdpa.graph.layouts import ALIGNMENT


def check_offsets(**tensors: Tensor | None) -> None:
    """Refuses storage offsets that kernels could not read; allocations themselves are aligned."""
    for name, tensor in tensors.items():
        if tensor is not None and (remainder := int(tensor.storage_offset()) * tensor.element_size() % ALIGNMENT):
            refuse_address(name, remainder)


def check_strides_of_dense(call: ForwardArguments) -> None:
    if not call.is_for_cudnn:
        return
    tensor_checks.check_strides(call.q, call.k, call.v)
    check_offsets(q=call.q, k=call.k, v=call.v, out=call.out)
    if call.out is not None and call.out.numel():
        tensor_checks.check_strides_of_out(call.out, for_cudnn=True)
