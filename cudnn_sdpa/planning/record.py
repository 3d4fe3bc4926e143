"""`record_plans`: records the plans that calls use, or would use on another GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from cudnn_sdpa.plans.manifest import PlanManifest, Recording, recordings

_log = logging.getLogger("cudnn_sdpa")


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
    before = recordings.active
    if recorder:
        recordings.active = (*before, recorder.recording)
    try:
        with plan_cache.watch_uses() as used, recorder or nullcontext():
            yield manifest
    finally:  # also when a server is interrupted
        recordings.active = before
        recorded = PlanManifest.of([*used, *(recorder.recording.keys if recorder else ())])
        manifest.plans, manifest.recorded_on = recorded.plans, recorded.recorded_on
    if recorder is None and not used and not torch.cuda.is_available():
        _log.warning(
            "record_plans has recorded no plan: there is no GPU here, and calls on the CPU use none; "
            'record_plans(target="h200") records the plans that they would use on one'
        )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the keys of operators' calls, which run as they would without it.

    Attributes:
        operators: The operators that record their calls in place of running them. Those of operations are added at
            their first use, since operations may be imported later.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target, self.recording = target, Recording(target)
        self.operators: dict[str, Callable[..., object]] = {"graph_function": decoded(self._graph)}

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        name = function._schema.name.partition("::")[2] if function.namespace == "cudnn_sdpa" else ""
        if name not in WITHOUT_PLANS and not self.recording.is_paused and _is_without_gpu(args):
            if name not in self.operators:
                implementations(name)  # operations are imported when they are first used
                for operation in OPERATIONS.values():
                    self.operators.update(self._of_operation(operation))
            with torch.no_grad():
                self.operators[name](*tree_map_only(Tensor, without_memory, args))
        return function(*args, **(kwargs or {}))

    def _record(self, keys: Iterable[PlanKey]) -> tuple[Tensor, ...]:
        self.recording.keys += keys
        return ()  # in place of the results, which are unused

    def _graph(self, function: GraphFunction, values: Sequence[Value], static: Options) -> tuple[Tensor, ...]:
        tensors = [x for x in values if isinstance(x, Tensor)]
        if any(x.numel() == 0 for x in tensors):
            return ()
        if any(x.dtype is torch.float64 for x in tensors):
            raise UnsupportedError(function.__name__, ["cuDNN takes no float64"], "tensors converted to torch.bfloat16")
        return self._record([function.describe(*values, **static).key(self.target, None)])

    def _of_operation(self, operation: Operation[CallT]) -> dict[str, Callable[..., object]]:
        def forward(call: CallT) -> tuple[Tensor, ...]:
            calls = [call]
            if operation.takes_out and call[-1] is not None:
                # The operator always returns all results, and its arguments do not show which are used.
                calls = [operation.complete(call, is_complete=is_complete) for is_complete in (False, True)]
            return self._record(key for each in calls for key in each.keys(self.target, None))

        def gradients(backward: BackwardCall[CallT]) -> tuple[Tensor, ...]:
            return self._record(backward.make_readable().keys(self.target, None))

        found: dict[str, Callable[..., object]] = {**forward_implementations(operation, forward)}
        if operation.backward is not None:
            found["backward"] = backward_implementation(operation, gradients)
        return {operation.operators[which]: run for which, run in found.items()}


def _is_without_gpu(arguments: object) -> bool:
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return all(x.device.type in ("cpu", "meta") and not isinstance(x, FakeTensor) for x in tensors)


#: Operators that run no plan.
WITHOUT_PLANS = ("", "append_paged_kv", "dropout_seed")
