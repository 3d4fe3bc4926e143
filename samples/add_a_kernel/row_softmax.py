"""An operation on CUDA kernels of one's own: a softmax over rows, with gradients. docs/add_a_kernel.md explains it.

    python samples/add_a_kernel/row_softmax.py

On an NVIDIA GPU it runs the kernels of row_softmax.cu, without one its reference. Results are compared with float64.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_lazy, materialized
from cudnn_sdpa.engine.launch import BoundPlan, LaunchExtras, Prepared, SingleLaunch
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import NativeKey, Operation
from cudnn_sdpa.engine.operation.call import BackwardCall, Call
from cudnn_sdpa.engine.tensor_checks import check_is_tensor, check_present, check_tensor
from cudnn_sdpa.errors import LayoutError, ShapeError
from cudnn_sdpa.graph import target as targets
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride
from cudnn_sdpa.graph.scalars import is_compiling
from cudnn_sdpa.plans import cache
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel

FOLDER = Path(__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
THREADS, ROWS_OF_A_BLOCK, MAX_BLOCKS = 128, 4, 2**31 - 1

# The data of a call.


class Arguments(NamedTuple):
    """The data of a forward call: the tensors first, then the options."""

    x: Tensor
    scale: float


class BackwardArguments(NamedTuple):
    """The data of a backward call: the gradient of the result, the saved result, the forward call, what is needed."""

    grad_out: Tensor
    out: Tensor
    call: Arguments
    needs: tuple[bool, ...]


# What a plan is: kernels, their grids and their argument, out of nothing but the key.

#: The fields of the struct `Call` of row_softmax.cu.
FIELDS = [f"{name}.{part}" for name in ("x", "out", "grad_out", "grad_x") for part in ("base", "row", "column")]
FIELDS += ["rows", "columns", "scale"]
#: Where addresses go, and the bits of the scale.
PLACES = {
    **{name: FIELDS.index(f"{name}.base") for name in ("x", "out", "grad_out", "grad_x")},
    "scale": len(FIELDS) - 1,
}


@functools.cache
def kernel(name, dtype):
    """A kernel of row_softmax.cu, compiled for a dtype; all plans share it."""
    return Kernel(FOLDER / "row_softmax.cu", name, {"DTYPE": DTYPES.index(dtype)})


def program(key, name):
    """What a plan launches."""
    layouts = {x.name: x.layout for x in (*key.inputs, *key.outputs) if x.role is Role.TENSOR}
    fields = dict.fromkeys(FIELDS, 0)
    for operand, layout in layouts.items():
        fields[f"{operand}.row"], fields[f"{operand}.column"] = layout.stride
    like = layouts["out"]
    fields["rows"], fields["columns"] = like.shape
    blocks = min(-(-like.shape[0] // ROWS_OF_A_BLOCK), MAX_BLOCKS)
    call = KernelCall(kernel(name, like.dtype), blocks, THREADS)
    return KernelProgram([call], list(fields.values()), PLACES)


@functools.partial(KernelOp, folder=FOLDER)
def softmax_forward(key):
    """The softmax of each row."""
    return program(key, "row_softmax")


@functools.partial(KernelOp, folder=FOLDER)
def softmax_backward(key):
    """The gradient of x."""
    return program(key, "row_softmax_gradient")


# Which plan a call needs, and what its launch needs besides.


def dense(x):
    """The layout of a result."""
    return tuple(x.shape), contiguous_stride(x.shape), x.dtype


def forward_key(call, target, device):
    """The key of a forward call's plan; the scale is data, and in no key."""
    inputs = [Operand("x", TensorLayout.of(call.x)), Operand("scale", HOST_SCALAR, Role.SCALAR)]
    return softmax_forward.key(inputs, [Operand("out", TensorLayout(*dense(call.x)))], {}, target, device)


def backward_key(of, target, device):
    """The key of a backward call's plan."""
    tensors = [Operand("out", TensorLayout.of(of.out)), Operand("grad_out", TensorLayout.of(of.grad_out))]
    inputs = [*tensors, Operand("scale", HOST_SCALAR, Role.SCALAR)]
    return softmax_backward.key(inputs, [Operand("grad_x", TensorLayout(*dense(of.out)))], {}, target, device)


def bind(operation, key, names, result, scale):
    """A plan, built if there is none, with all that its launch needs besides tensors."""
    plan = plan_cache.get(key, lambda key: cache.build_plan(operation, key))
    with torch.cuda.device(key.device):
        return BoundPlan(plan, names, [result], {"scale": scale}, LaunchExtras(unaligned_ok=tuple(names))), plan


# What the library asks of a call. Autocast leaves softmaxes in the dtype that they get.


class Softmax(Arguments, Call):
    """A forward call."""

    __slots__ = ()

    def check_types(self):
        """What is no tensor is refused by name."""
        check_is_tensor("x", self.x)

    def check(self):
        """Checks that read no address and no value, so fake tensors pass."""
        check_tensor("x", self.x, self.x, dtype=DTYPES, shape=("rows", "columns"))

    def check_memory(self):
        """There must be memory, and elements must be whole."""
        check_present("x", self.x)
        if self.x.data_ptr() % self.x.element_size():
            raise LayoutError("x", "an address within an element", "whole elements", "Use x.clone().")

    def outputs(self):
        """The layouts of the results."""
        return (dense(self.x),)

    def reference(self):
        """The results in plain PyTorch."""
        exact = self.x.to(torch.promote_types(self.x.dtype, torch.float32))
        return (torch.softmax(exact * self.scale, -1).to(self.x.dtype).contiguous(),)

    def keys(self, target, device):
        """The keys of the plans: none if there is nothing to compute."""
        if self.x.numel():
            yield forward_key(self, target, device)

    def bind(self):
        """The call bound to its plan."""
        if not self.x.numel():
            return Prepared(lambda call: torch.empty_like(call.x), None)
        device = self.x.get_device()
        key = forward_key(self, targets.live_target(device), device)
        bound, plan = bind(softmax_forward, key, ["x"], dense(self.x), self.scale)
        return Prepared(SingleLaunch(bound), plan)

    def flops(self):
        """Floating-point operations of both passes."""
        return 5 * self.x.numel(), 4 * self.x.numel()


class SoftmaxBackward(BackwardArguments, BackwardCall):
    """A backward call."""

    __slots__ = ()

    def make_readable(self):
        """The call as the kernel can read it: the gradient in memory, in the dtype of the result."""
        grad, dtype = self.grad_out, self.out.dtype
        return self._replace(grad_out=materialized(grad).to(dtype)) if is_lazy(grad) or grad.dtype != dtype else self

    def reference(self):
        """The gradient in plain PyTorch."""
        exact = torch.promote_types(self.out.dtype, torch.float32)
        out, grad = self.out.to(exact), self.grad_out.to(exact)
        found = self.call.scale * out * (grad - (out * grad).sum(-1, keepdim=True))
        return [found.to(self.out.dtype).contiguous()]

    def keys(self, target, device):
        """The keys of the plans."""
        if self.out.numel():
            yield backward_key(self, target, device)

    def bind(self):
        """The call bound to its plan."""
        self.call.check()  # a hook on saved tensors may have changed them
        if not self.out.numel():
            return Prepared(lambda of: (torch.empty_like(of.out),), None)
        device = self.out.get_device()
        key = backward_key(self, targets.live_target(device), device)
        bound, plan = bind(softmax_backward, key, ["out", "grad_out"], dense(self.out), self.call.scale)
        return Prepared(SingleLaunch(bound, [0], of={"out": "out", "grad_out": "grad_out"}), plan)

    @staticmethod
    def new_gradient(name, tensor):  # noqa: ARG004 - there is one input
        """A new tensor for the gradient of x."""
        return tensor.new_empty(tensor.shape)


# The operation: everything else follows from this description.

ROW_SOFTMAX = Operation(
    name="row_softmax",
    function="row_softmax",
    call=Softmax,
    backward=SoftmaxBackward,
    differentiable=("x",),
    aux_outputs=(),  # no result is for the backward pass alone
    forward_mode="torch.softmax",
)

_calls = NativeCalls()  # those that C++ recognizes


def row_softmax(x, scale=1.0):
    """The softmax of `scale` times x (..., n) over its last dimension, in x's dtype: float32, float16 or bfloat16."""
    check_is_tensor("x", x)
    if not x.dim():
        raise ShapeError("x", "no dimensions", "a tensor (..., n)")
    rows = x.unsqueeze(0) if x.dim() == 1 else x if x.dim() == 2 else x.flatten(0, -2)  # a view, if there is one
    if _calls.find is not None and not is_compiling():
        known = _calls.find(rows, scale)
        if known is not MISSED:
            return known.view(x.shape)
    return ROW_SOFTMAX(Softmax(rows, float(scale)), NativeKey(_calls, (rows, scale))).view(x.shape)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype, bound in zip(DTYPES, (1e-5, 2e-3, 1e-2), strict=True):
        x = torch.randn(6, 40, 257, device=device, dtype=dtype, requires_grad=True)
        out, exact = row_softmax(x, 0.7), torch.softmax(x.double() * 0.7, -1)
        grad = torch.randn_like(out)
        (found,), (wanted,) = (torch.autograd.grad(y, x, g) for y, g in ((out, grad), (exact, grad.double())))
        for name, one, other in (("out", out, exact), ("gradient of x", found, wanted)):
            error = ((one.double() - other).norm() / other.norm()).item()
            print(f"{dtype!s:<15} {name:<14} relative error {error:.1e}")
            assert error < bound, name


if __name__ == "__main__":
    main()
