"""Calls of an operation on DTensors: each rank runs its part of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cudnn_sdpa.engine import fallback, sharding
from cudnn_sdpa.engine.launch import Result
from cudnn_sdpa.engine.operation.call import CallT
from cudnn_sdpa.engine.operation.description import OperationDescription
from cudnn_sdpa.engine.tensor_checks import without_memory
from cudnn_sdpa.engine.torch_ops import new_seed
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph.scalars import is_compiling


def run(operation: OperationDescription[CallT], run_local: Callable[[CallT], Any], call: CallT) -> Result:
    """The results of a call, whose local part `run_local` runs.

    The whole call is checked first, so that all ranks raise the same.
    """
    if operation.out_of(call) is not None:
        reasons = ["out would have to be sharded as the result is, which each call decides"]
        raise UnsupportedError(f"{operation.function} with out on DTensors", reasons, "the call without out")
    call.check_types()
    if not is_compiling():
        call.check_options()
    layouts = [None if x is None else without_memory(x) for x in call[operation.tensors_at]]
    # By `_make`: in compiled code, PyTorch 2.9 knows the properties of what that gives alone.
    whole = (operation.reference_call or operation.call)._make((*layouts, *call[operation.others_at]))
    if operation.draws(call):
        whole = whole._replace(rng=torch.empty(2, dtype=torch.int64, device="meta"))
    try:
        whole.check()
    except (ArgumentError, UnsupportedError) as error:
        raise error.renamed({"meta": operation.first_of(call).device.type}) from None

    def run_part(arguments: Mapping[str, object], sharded: sharding.ShardedCall) -> Result:
        local = operation.call._make([arguments[name] for name in operation.fields])
        found: Result = run_local(_with_own_random_numbers(operation, local, sharded))
        return found

    arguments = dict(zip(operation.fields, call, strict=True))
    try:
        return sharding.run(operation.function, call.strategies(), arguments, run_part)
    except UnsupportedError as error:
        raise (error.renamed(operation.names) if operation.names else error) from None


def _with_own_random_numbers(
    operation: OperationDescription[CallT], call: CallT, sharded: sharding.ShardedCall
) -> CallT:
    """A rank's part of a call, with random numbers of its own, also where ranks share a seed."""
    if not operation.draws(call):
        return call
    reasons = []
    if sharded.is_replicated:
        reasons.append("ranks that compute the same would draw different random numbers")
    if operation.reference_call is not None and fallback.is_in_force():
        reasons.append("PyTorch's own attention, which the fallback may run, draws the same in each rank")
    if reasons:
        suggestion = "tensors sharded over all mesh dimensions and no fallback, or dropout_p=0.0"
        raise UnsupportedError(f"{operation.function} with dropout_p on DTensors like these", reasons, suggestion)
    return call._replace(rng=new_seed(operation.first_of(call)) + sharded.part())
