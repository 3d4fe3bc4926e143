"""A plan of two of the library's own kernels that serves tensors of all sizes: these are in an array of the host.

The first kernel sums rows, with weights if there are any, into scratch memory. The second one scales the sums, and does
not wait itself for what is ahead in the stream.
"""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cudnn_sdpa import plan_cache
from cudnn_sdpa.engine.launch import BoundPlan
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls, RepeatableCall
from cudnn_sdpa.graph import target as targets
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import cache
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

SOURCE = """
#include "launch.cuh"

typedef long long number;

struct Call {
  const float* x;
  const float* weights;
  float* out;
  float* unused;
  float* sums;
  number scale;
  number sizes[3];
  number least;
};

extern "C" __global__ void sum_rows(const Call a) {
  wait_for_previous();
  for (number row = blockIdx.x; row < a.sizes[0]; row += gridDim.x) {
    float sum = 0.0f;
    for (number j = 0; j < a.sizes[1]; ++j) sum += a.x[row * a.sizes[2] + j] * (a.weights ? a.weights[j] : 1.0f);
    a.sums[row] = sum;
  }
}

extern "C" __global__ void scale_sums(const Call a) {
  union { unsigned bits; float value; } scale = {(unsigned)a.scale};
  for (number row = blockIdx.x; row < a.sizes[0]; row += gridDim.x) a.out[row] = scale.value * a.sums[row] + a.least;
}
"""

#: Number of fields, the constant in the last one, and the rows that the scratch memory has room for.
WORDS, LEAST, ROWS = 10, 3, 130


class ScaledSums:
    """`scale * (x * weights).sum(1) + LEAST` of any x (rows, columns) with dense rows.

    Attributes:
        bound: The bound plans, by what their array holds and whether there are weights.
        places: The places of fields.
    """

    def __init__(self, folder: Path, *, words: int = WORDS, threads: int = 64) -> None:
        source = folder / "sums.cu"
        source.write_text(SOURCE)
        self.calls, self.bound = NativeCalls(numbers=3), {}
        struct = Struct(source, "Call")
        names = ("x", "weights", "out", "unused", "sums", "scale", "sizes.0")
        self.places = {x.partition(".")[0]: place for x, place in zip(names, struct.indices(*names), strict=True)}
        fields = [*struct.filled(scale=0, sizes=[0, 0, 0], least=LEAST), *[0] * (words - WORDS)]
        first, second = Kernel(source, "sum_rows", shared=64), Kernel(source, "scale_sums")

        def scaled_sums(_: PlanKey) -> KernelProgram:
            calls = KernelCall(first, 7, 32), KernelCall(second, 2, threads)
            return KernelProgram(calls, fields, self.places, scratch={"unused": (5,), "sums": (ROWS,)})

        self.operation = KernelOp(scaled_sums, folder)

    def key(self) -> PlanKey:
        tensor = TensorLayout.contiguous((1,), torch.float32)
        sizes = Operand("sizes", TensorLayout.contiguous((3,), torch.int64), Role.HOST)
        inputs = [Operand("x", tensor), Operand("weights", tensor), Operand("scale", HOST_SCALAR, Role.SCALAR), sizes]
        return self.operation.key(inputs, [Operand("out", tensor)], {}, targets.live_target(0), 0)

    def bind(self, x: Tensor, weights: Tensor | None, scale: float, sizes: array[int] | None = None) -> BoundPlan:
        return BoundPlan(
            plan_cache.get(self.key(), partial(cache.build_plan, self.operation)),
            ["x"] if weights is None else ["x", "weights"],
            [((x.shape[0],), (1,), torch.float32)],
            {"scale": scale},
            fixed={"weights": 0} if weights is None else {},
            arrays={"sizes": array("q", (*x.shape, x.stride(0))) if sizes is None else sizes},
        )

    def __call__(self, x: Tensor, weights: Tensor | None = None, scale: float = 0.5) -> Tensor:
        if self.calls.find is not None and (known := self.calls.find(x, weights, scale)) is not MISSED:
            return known
        like = (x.shape, x.stride(), weights is None)
        if like not in self.bound:
            self.bound[like] = self.bind(x, weights, scale)
        bound, tensors = self.bound[like], [x] if weights is None else [x, weights]
        (out,) = bound(tensors, numbers=(scale,))
        self.calls.register((x, weights, scale), {}, RepeatableCall(bound, tensors, [0], single_output=True))
        return out

    @staticmethod
    def assert_right(out: Tensor, x: Tensor, weights: Tensor | None = None, scale: float = 0.5) -> None:
        rows = x.double() if weights is None else x.double() * weights.double()
        off = (out.double() - (scale * rows.sum(1) + LEAST)).abs()
        assert bool((off <= 1e-6 * (1 + abs(scale) * rows.abs().sum(1))).all()), off.max()

    def check(self, x: Tensor, weights: Tensor | None = None, scale: float = 0.5) -> None:
        self.assert_right(self(x, weights, scale), x, weights, scale)

    def warm_up(self, x: Tensor, weights: Tensor | None = None) -> None:
        for scale in (0.3, -1.7):
            self.check(x, weights, scale)
