"""`record_plans`: records the plans that calls use, or would use on another GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cudnn_sdpa.engine.operation import OPERATIONS, Operation
from cudnn_sdpa.engine.operation.call import BackwardCall, CallT
from cudnn_sdpa.engine.operation.operators import backward_implementation, forward_implementations
from cudnn_sdpa.engine.tensor_checks import without_memory
from cudnn_sdpa.engine.torch_ops import implementations
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.fused.encoding import Options, Value
from cudnn_sdpa.fused.graph_op import GraphFunction, decoded
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.manifest import PlanManifest

_log = logging.getLogger("cudnn_sdpa")

Keys = Iterator[PlanKey]
#: Records a call instead of running it.
Recording = Callable[..., tuple[Tensor, ...]]
#: A function that decodes an operator's arguments and passes the call to a `Recording`, and the keys of the call.
KeysOfOperator = tuple[Callable[[Recording], Callable[..., object]], Callable[..., Keys]]


def record_plans(target: str | None = None) -> AbstractContextManager[PlanManifest]:
    """Records the plans used while active, in all threads.

    With a target no GPU is needed: for calls on CPU or meta tensors (`device="meta"`), it records the exact-shape plans
    that they would use on that GPU. This covers calls and gradients of this thread. `compile_plans` then compiles them.

    Args:
        target: A GPU, which need not be present: a name such as "h200", or the path of a file written by
            `python -m cudnn_sdpa device --json`. None records what this machine's GPU uses.

    Returns:
        A context manager whose value is a `PlanManifest`, filled on exit. CUDA-graph captures count as uses, replays do
        not.

    Raises:
        OptionError: The target is unknown or cannot be read.
        UnsupportedError: Raised by a call that has no plan on the target, such as one in float64.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = torch.randn(1, 8, 128, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> with cudnn_sdpa.record_plans(target="h200") as manifest:
        ...     cudnn_sdpa.sdpa(q, q, q, is_causal=True).sum().backward()
        >>> manifest.save("plans.json")  # doctest: +SKIP
        >>> len(manifest)  # one forward and one backward
        2
    """
    if target is None:
        return _recorded(None)
    if not isinstance(target, str):
        raise OptionError("target", repr(target), "the name of a GPU or the path of a file, or None for this GPU")
    return _recorded(_Recorder(Target.from_properties(load_properties(target))))


@contextmanager
def _recorded(recorder: _Recorder | None) -> Iterator[PlanManifest]:
    manifest = PlanManifest()
    used: list[PlanKey] = []
    try:
        with plan_cache.watch_uses() as used, recorder or nullcontext():
            yield manifest
    finally:  # also when a server is interrupted
        recorded = PlanManifest.of([*used, *(recorder.keys if recorder else ())])
        manifest.plans, manifest.recorded_on = recorded.plans, recorded.recorded_on
    if recorder is None and not used and not torch.cuda.is_available():
        _log.warning(
            "record_plans has recorded no plan: there is no GPU here, and calls on the CPU use none; "
            'record_plans(target="h200") records the plans that they would use on one'
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, target: Target) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target = target
        self.keys: list[PlanKey] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = function._schema.name.partition("::")[2] if function.namespace == "cudnn_sdpa" else ""
        if name not in _WITHOUT_PLANS and _is_without_gpu(args):
            adapt, keys_of = _keys_of_operator(name)
            with torch.no_grad():
                adapt(self._recording(keys_of))(*tree_map_only(Tensor, without_memory, args))
        return function(*args, **(kwargs or {}))

    def _recording(self, keys_of: Callable[..., Keys]) -> Recording:
        def record(*call: object) -> tuple[Tensor, ...]:
            self.keys += keys_of(self.target, *call)
            return ()  # in place of the results, which are unused

        return record


def _is_without_gpu(arguments: object) -> bool:
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return all(x.device.type in ("cpu", "meta") and not isinstance(x, FakeTensor) for x in tensors)


def _graph_keys(target: Target, function: GraphFunction, values: Sequence[Value], static: Options) -> Keys:
    tensors = [x for x in values if isinstance(x, Tensor)]
    if any(x.numel() == 0 for x in tensors):
        return
    if any(x.dtype is torch.float64 for x in tensors):
        raise UnsupportedError(function.__name__, ["cuDNN takes no float64"], "tensors converted to torch.bfloat16")
    yield function.describe(*values, **static).key(target, None)


#: Operators that run no plan.
_WITHOUT_PLANS = ("", "dropout_seed")
#: By operator; those of operations are added at their first use, since operations may be imported later.
_KEYS: dict[str, KeysOfOperator] = {
    "graph_function": (decoded, _graph_keys),
}


def _keys_of_operation(operation: Operation[CallT]) -> dict[str, KeysOfOperator]:

    def forward_keys(target: Target, call: CallT) -> Keys:
        return call.keys(target, None)

    def gradient_keys(target: Target, backward: BackwardCall[CallT]) -> Keys:
        return backward.make_readable().keys(target, None)

    def with_and_without_auxiliary(target: Target, call: CallT) -> Keys:
        """Both plans: the operator always returns all results, and its arguments do not show which are used."""
        for is_complete in (False, True):
            yield from forward_keys(target, operation.complete(call, is_complete=is_complete))

    def adapt(which: str) -> Callable[[Recording], Callable[..., object]]:
        return lambda run: forward_implementations(operation, run)[which]

    keys_of = {"forward": forward_keys, "forward_all": forward_keys, "forward_out": with_and_without_auxiliary}
    entries: dict[str, KeysOfOperator]
    entries = {name: (adapt(which), keys_of[which]) for which, name in operation.operators.items() if which in keys_of}
    if operation.backward is not None:
        entries[operation.operators["backward"]] = (partial(backward_implementation, operation), gradient_keys)
    return entries


def _keys_of_operator(name: str) -> KeysOfOperator:
    if name not in _KEYS:
        implementations(name)  # operations are imported when they are first used
        for operation in OPERATIONS.values():
            _KEYS.update(_keys_of_operation(operation))
    return _KEYS[name]
