"""What autograd would have to follow, and cannot (tangents, transforms, second gradients): refused, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.engine.dispatch_state import needs_gradient
from cudnn_sdpa.errors import LayoutError, UnsupportedError
from cudnn_sdpa.graph.symbolic_shapes import is_compiling


def refuse_second_gradient(what: str) -> NoReturn:
    """Refuses the gradient of a gradient.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(
        f"a gradient of {what}'s gradient (double backward)",
        ["cuDNN has no kernel for it"],
        "PyTorch's own functions where gradients are differentiated again",
    )


def no_second_gradient(what: str) -> Callable[..., Any]:
    """What a graph function that computes gradients of `what` has as its `backward`."""

    def backward(grads: Any, operands: Any, results: Any, **options: Any) -> NoReturn:
        del grads, operands, results, options
        refuse_second_gradient(what)

    return backward


try:
    from torch._C._functorch import TransformType
    from torch._C._functorch import get_interpreter_stack as _interpreters
except ImportError:  # pragma: no cover - a PyTorch that has moved them says something of its own
    _interpreters = None  # type: ignore[assignment]


def check(what: str, out: Tensor | None, **inputs: Tensor | None) -> None:
    """Refuses results that would silently be cut off from their inputs.

    Raises:
        UnsupportedError: A tensor has a tangent of forward-mode differentiation, a transform of functorch wants a
            gradient, or what is written into `out` would need one.
    """
    _check_no_tangent(**inputs, out=out)
    refuse_transforms(what, *inputs.values(), out, loops=True)
    if out is not None and needs_gradient(*inputs.values(), out):
        raise UnsupportedError(
            "out with a gradient",
            ["an input requires grad, and autograd does not follow what is written into a given tensor"],
            "calling it under torch.no_grad(), or without out",
        )


CallT = TypeVar("CallT", bound=Any)  #: the arguments of a call, a named tuple

#: What `torch.nn.functional.scaled_dot_product_attention` is, unless somebody has put another function in its place.
PYTORCHS = torch._C._nn.scaled_dot_product_attention


def refuse_context_parallel(what: str) -> None:
    """Refuses a call within PyTorch's context parallelism, which gives each process a part of the sequences.

    It replaces `torch.nn.functional.scaled_dot_product_attention` by a function that exchanges keys and values between
    the processes. Any other attention would see the keys of its own process alone.

    Raises:
        UnsupportedError: `context_parallel` is in force.
    """
    patched = torch.nn.functional.scaled_dot_product_attention
    if patched is not PYTORCHS and str(getattr(patched, "__module__", "")).startswith("torch.distributed."):
        raise UnsupportedError(
            f"{what} within torch.distributed.tensor.experimental.context_parallel",
            ["each process has a part of the keys, which that exchanges only for PyTorch's own attention"],
            "torch.nn.functional.scaled_dot_product_attention there, or cudnn_sdpa outside of the context",
        )


def resolved(call: CallT) -> CallT:
    """A call, dense or packed, without negative bits: what is saved for its gradients is read where it lies.

    What PyTorch gives such a bit, the imaginary part of a conjugate for instance, has the other sign in memory.
    """
    inputs = [(name, getattr(call, name, None)) for name in ("q", "k", "v", "attn_mask", "sinks")]
    negative = {name: x.resolve_neg() for name, x in inputs if x is not None and x.is_neg()}
    result: CallT = call._replace(**negative) if negative else call
    return result


def refuse_inference_tensors(call: Any) -> None:
    """Says which tensor of a call autograd could not keep for the gradients; looked for once it has failed to.

    Raises:
        LayoutError: One was made under `torch.inference_mode`.
    """
    names = ("q", "k", "v", "attn_mask", "sinks", "seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv")
    for name in names:
        tensor = getattr(call, name, None)
        if tensor is not None and tensor.is_inference():
            raise LayoutError(
                name,
                "a tensor made under torch.inference_mode",
                "one that autograd can keep for the gradients",
                f"Use {name}.clone() outside of inference mode, or call under torch.no_grad().",
            ) from None


def _check_no_tangent(**tensors: Tensor | None) -> None:
    refuse_tangents(tensors, "torch.nn.functional.scaled_dot_product_attention")


def refuse_tangents(tensors: Mapping[str, Any], alternative: str = "PyTorch's own functions") -> None:
    """Refuses tensors with tangents of forward-mode differentiation; what is no tensor is passed over.

    Raises:
        UnsupportedError: One has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and _has_tangent(tensor):
            raise UnsupportedError(
                "forward-mode differentiation",
                [f"{name} has a tangent, and cuDNN has no kernel that follows it"],
                f"differentiation in reverse mode, or {alternative}",
            )


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def refuse_transforms(what: str, *tensors: Any, loops: bool) -> None:
    """Refuses functorch's transforms that the operators have no rule for.

    Args:
        what: The function, for the message.
        tensors: Its operands.
        loops: Whether PyTorch can run the operator under `torch.vmap`, once for each entry of the batch.

    Raises:
        UnsupportedError: There is such a transform.
    """
    stack = None if is_compiling() or _interpreters is None else _interpreters()
    if stack is None:
        return
    active = {interpreter.key() for interpreter in stack}
    if TransformType.Grad in active and needs_gradient(*(x for x in tensors if isinstance(x, Tensor))):
        raise UnsupportedError(
            f"{what} under torch.func.grad, vjp or jacrev",
            ["its gradient is not known to functorch's transforms"],
            "torch.autograd.grad, or loss.backward()",
        )
    if TransformType.Vmap in active and not loops:
        raise UnsupportedError(
            f"{what} under torch.vmap",
            ["it has no rule for a batch of calls"],
            "the batch as a dimension of its tensors, or a loop",
        )
