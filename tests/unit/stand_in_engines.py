"""Plans whose kernels are Python and whose GPU memory is this process's, for tests of `autotune` without a GPU."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from cudnn_sdpa.graph import handles
from cudnn_sdpa.graph.definition import GraphOp, graph_op
from cudnn_sdpa.graph.heuristics import Other
from cudnn_sdpa.graph.key import Operand
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import autotune_timing, build, plan

TARGET = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 92800, "1.32.0", "a GPU")
SHAPE = (2, 3, 4)


@graph_op
def halve(g, x, *, deterministic=False):  # noqa: ARG001 - an option like any other
    return g.mul(x, 0.5)


def key(*, inputs=(), outputs=1, **options):
    layout = TensorLayout.contiguous(SHAPE, torch.float32)
    results = [Operand(f"out{number}", layout) for number in range(outputs)]
    return halve.key([Operand("x", layout), *inputs], results, options, TARGET, 0)


def operands(outputs=1):
    return torch.randn(SHAPE), *(torch.full(SHAPE, 7.0) for _ in range(outputs))


def launch(made, *tensors):
    made.launch([tensor.data_ptr() for tensor in tensors])


def halved(x, outs, _):
    """What the plans of the tests compute; the last argument counts the launches."""
    for out in outs:
        out.copy_(x * 0.5)


class Engine:
    """A built graph whose launch is a function of the input, the outputs and the number of launches."""

    def __init__(self, name, microseconds=10.0, run=halved, *, workspace=0):
        self.engine, self.knobs, self.workspace = name, {"TILE": int(microseconds)}, workspace
        self.microseconds, self.run, self.launches = microseconds, run, 0

    def serialize(self):
        return self.engine.encode() * 100

    def launcher(self, _):
        def launch(address, count, *_):
            self.launches += 1
            pointers = (ctypes.c_uint64 * count).from_address(address)
            x, *outs = (autotune_timing.tensor_at(each, key().outputs[0].layout, None) for each in pointers)
            self.run(x, outs, self.launches)

        return launch


class Machine:
    """Stands in for the GPU and for cuDNN.

    Attributes:
        stream: The current stream.
        capturing: Whether it is being captured.
        timed: How many plans were timed, each time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing, self.timed = 0, False, []
        self.patch = monkeypatch.setattr
        self.slots = {0: handles.Slot.__new__(handles.Slot)}
        self.slots[0].raw = self.slots[0].stream = self.slots[0].scratch = 0
        self.patch(handles.Slot, "bind", lambda slot, stream: setattr(slot, "stream", stream))
        self.patch(handles.thread, "slots", self.slots)
        self.patch(torch.cuda, "device", lambda _: contextlib.nullcontext())
        self.patch(torch._C, "_cuda_isCurrentStreamCapturing", lambda: self.capturing)
        for module in (plan, autotune_timing):
            self.patch(module, "current_raw_stream", lambda _: self.stream)
        self.patch(build, "_handle_for", lambda _: "handle")
        self.patch(plan, "allocate", lambda shape, _, dtype: torch.empty(shape, dtype=dtype))
        self.patch(plan.backend, "GraphBuilder", lambda **_: "builder")
        self.patch(plan.backend, "execution_error", lambda error, _: error)
        self.patch(autotune_timing, "device_times", self.times)
        tensor_at = autotune_timing.tensor_at
        self.patch(autotune_timing, "tensor_at", lambda at, layout, _: tensor_at(at, layout, torch.device("cpu")))

    def times(self, launches):
        self.timed.append(len(launches))
        return [launch.func.__self__.built.microseconds for launch in launches]

    def proposes(self, first, *others):
        """What cuDNN proposes from now on: engines, or why one cannot be built."""
        known = [Other(("eng0", {}) if isinstance(each, str) else (each.engine, each.knobs), each) for each in others]
        self.patch(GraphOp, "compile", lambda *_: first)
        self.patch(build, "build_others", lambda _operation, _key, _first, most, **_: known[:most])
