"""An operation on CUDA kernels of one's own: a softmax over rows, with gradients. docs/add_a_kernel.md explains it.

    python samples/add_a_kernel/row_softmax.py

On an NVIDIA GPU it runs the kernels of row_softmax.cu, without one its reference. Results are compared with float64.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cudnn_sdpa.engine.autocast import casts
from cudnn_sdpa.engine.backward_pass import BackwardPass
from cudnn_sdpa.engine.dispatch_state import is_lazy, plain
from cudnn_sdpa.engine.launch import Additions, BoundPlan, PlainCall, Prepared
from cudnn_sdpa.engine.memory import check_is_tensor, check_present, check_tensor
from cudnn_sdpa.engine.native.calls import MISSED, NativeCalls
from cudnn_sdpa.engine.operation import Asked, Operation
from cudnn_sdpa.errors import LayoutError, ShapeError
from cudnn_sdpa.graph import target as targets
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout, contiguous_stride
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.plans import build
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel

FOLDER = Path(__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
THREADS, ROWS_OF_A_BLOCK, MAX_BLOCKS = 128, 4, 2**31 - 1

# What a call is.


class Call(NamedTuple):
    """A forward call: the tensors first, then the options."""

    x: Tensor
    scale: float


class GradientCall(NamedTuple):
    """A backward call: the gradient of the result, the result that was saved, the forward call, and what is needed."""

    grad_out: Tensor
    out: Tensor
    call: Call
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


def keys(call, target, device):
    """The keys of a forward call's plans: none if there is nothing to compute."""
    if call.x.numel():
        yield forward_key(call, target, device)


def gradient_keys(of, target, device):
    """The same for a backward call."""
    if of.out.numel():
        yield backward_key(of, target, device)


def bind(operation, key, names, result, scale):
    """A plan, built if there is none, with all that its launch needs besides tensors."""
    plan = plan_cache.get(key, lambda key: build.build_plan(operation, key))
    with torch.cuda.device(key.device):
        return BoundPlan(plan, names, [result], {"scale": scale}, Additions(anywhere=tuple(names))), plan


def prepare(call):
    """A forward call bound to its plan."""
    if not call.x.numel():
        return Prepared(lambda call: torch.empty_like(call.x), None)
    device = call.x.get_device()
    key = forward_key(call, targets.live_target(device), device)
    bound, plan = bind(softmax_forward, key, ["x"], dense(call.x), call.scale)
    return Prepared(PlainCall(bound), plan)


def prepare_gradients(of):
    """A backward call bound to its plan."""
    check(of.call)  # a hook on saved tensors may have changed them
    if not of.out.numel():
        return Prepared(lambda of: (torch.empty_like(of.out),), None)
    device = of.out.get_device()
    key = backward_key(of, targets.live_target(device), device)
    bound, plan = bind(softmax_backward, key, ["out", "grad_out"], dense(of.out), of.call.scale)
    return Prepared(PlainCall(bound, [0], of={"out": "out", "grad_out": "grad_out"}), plan)


def readable(of):
    """A backward call as the kernel can read it: the gradient in memory, in the dtype of the result."""
    grad = of.grad_out
    return of._replace(grad_out=plain(grad).to(of.out.dtype)) if is_lazy(grad) or grad.dtype != of.out.dtype else of


# The same in PyTorch, and the checks.


def reference(call):
    """The result in plain PyTorch."""
    exact = call.x.to(torch.promote_types(call.x.dtype, torch.float32))
    return (torch.softmax(exact * call.scale, -1).to(call.x.dtype).contiguous(),)


def reference_gradients(of):
    """The gradient in plain PyTorch."""
    exact = torch.promote_types(of.out.dtype, torch.float32)
    out, grad = of.out.to(exact), of.grad_out.to(exact)
    found = of.call.scale * out * (grad - (out * grad).sum(-1, keepdim=True))
    return [found.to(of.out.dtype).contiguous()]


def check_types(call):
    """What is no tensor in memory of its own is refused by name."""
    check_is_tensor("x", call.x)


def check(call):
    """Checks that read no address and no value, so fake tensors pass."""
    check_tensor("x", call.x, call.x, dtype=DTYPES, shape=("rows", "columns"))


def check_memory(call):
    """There must be memory, and elements must be whole."""
    check_present("x", call.x)
    if call.x.data_ptr() % call.x.element_size():
        raise LayoutError("x", "an address within an element", "whole elements", "Use x.clone().")


def nothing(call):
    """There is nothing more to check."""


# The operation: everything else follows from this description.

ROW_SOFTMAX = Operation(
    name="row_softmax",
    function="row_softmax",
    call=Call,
    reference_call=None,  # there is no fallback: what the kernels lack, the checks refuse
    auxiliary=(),  # no result is for the backward pass alone
    autocast=casts(),  # autocast leaves softmaxes in the dtype that they get
    is_cacheable=lambda _: True,
    kind=lambda call: call.x.dtype,
    check_types=check_types,
    check_options=nothing,
    check=check,
    check_values=nothing,
    check_strides=nothing,
    check_memory=check_memory,
    checks_values=lambda: False,
    check_for_gpu=nothing,
    check_gradient=nothing,
    results=lambda call: (dense(call.x),),
    reference=reference,
    prepare=prepare,
    keys=keys,
    flops=lambda call: (5 * call.x.numel(), 4 * call.x.numel()),
    backward=BackwardPass(
        call=GradientCall,
        inputs=("x",),
        reference=reference_gradients,
        readable=readable,
        prepare=prepare_gradients,
        keys=gradient_keys,
        new_gradient=lambda _, x: x.new_empty(x.shape),
    ),
    forward_mode="torch.softmax",
)

_calls = NativeCalls()  # those that C++ has been taught


def row_softmax(x, scale=1.0):
    """The softmax of `scale` times x (..., n) over its last dimension, in x's dtype: float32, float16 or bfloat16."""
    check_types(Call(x, scale))
    if not x.dim():
        raise ShapeError("x", "no dimensions", "a tensor (..., n)")
    rows = x.unsqueeze(0) if x.dim() == 1 else x if x.dim() == 2 else x.flatten(0, -2)  # a view, if there is one
    if _calls.find is not None and not is_compiling():
        known = _calls.find(rows, scale)
        if known is not MISSED:
            return known.view(x.shape)
    return ROW_SOFTMAX(Call(rows, float(scale)), Asked(_calls, (rows, scale))).view(x.shape)


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
