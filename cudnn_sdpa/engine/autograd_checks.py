"""Rejects differentiation that is not supported (tangents, transforms, double backward) instead of dropping it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cudnn_sdpa.engine.dispatch_state import is_batch, needs_gradient
from cudnn_sdpa.engine.tensor_checks import FieldsT
from cudnn_sdpa.errors import LayoutError, UnsupportedError
from cudnn_sdpa.graph.scalars import is_compiling


def refuse_second_gradient(what: str) -> NoReturn:
    raise UnsupportedError(
        f"a gradient of {what}'s gradient (double backward)",
        ["cuDNN has no kernel for it"],
        "PyTorch's own functions where gradients are differentiated again",
    )


def no_second_gradient(what: str) -> Callable[..., NoReturn]:
    """The `backward` of a graph function that computes gradients of `what`: rejects double backward."""

    def backward(grads: object, operands: object, results: object, **options: object) -> NoReturn:
        del grads, operands, results, options
        refuse_second_gradient(what)

    return backward


try:
    from torch._C._functorch import TransformType
    from torch._C._functorch import get_interpreter_stack as _interpreters
except ImportError:  # pragma: no cover - a PyTorch that has moved them raises its own error
    _interpreters = None  # type: ignore[assignment]


PYTORCHS_ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


def check(
    what: str,
    out: Tensor | None,
    /,
    *,
    loops: bool = True,
    forward_mode: str = PYTORCHS_ATTENTION,
    **inputs: Tensor | None,
) -> None:
    """Rejects calls whose results would be silently detached from their inputs.

    Args:
        what: The function, for messages.
        out: Where the result is written.
        loops: See `refuse_transforms`.
        forward_mode: What can be differentiated in forward mode instead.
        inputs: The tensors, by argument.
    """
    refuse_tangents({"out": out, **inputs}, forward_mode)
    refuse_transforms(what, *inputs.values(), out, loops=loops)
    if out is not None and needs_gradient(*inputs.values(), out):
        raise UnsupportedError(
            "out with a gradient",
            ["an input requires grad, and autograd does not track writes into a given tensor"],
            "calling it under torch.no_grad(), or without out",
        )


#: PyTorch's own `torch.nn.functional.scaled_dot_product_attention`, to detect a replacement.
PYTORCHS = torch._C._nn.scaled_dot_product_attention


def refuse_context_parallel(what: str) -> None:
    """Rejects a call within PyTorch's context parallelism, which shards sequences over processes.

    It replaces `torch.nn.functional.scaled_dot_product_attention` by a function that exchanges keys and values between
    the processes. Any other attention would see only the keys of its own process.
    """
    patched = torch.nn.functional.scaled_dot_product_attention
    if patched is not PYTORCHS and str(getattr(patched, "__module__", "")).startswith("torch.distributed."):
        raise UnsupportedError(
            f"{what} within torch.distributed.tensor.experimental.context_parallel",
            ["each process has a part of the keys, which that exchanges only for PyTorch's own attention"],
            "torch.nn.functional.scaled_dot_product_attention there, which runs on this library's plans after "
            "cudnn_sdpa.integrations.pytorch.register(); or cudnn_sdpa.distributed.context_parallel instead",
        )


def resolved(call: FieldsT) -> FieldsT:
    """A dense or packed call without negative bits, so that tensors saved for backward can be read directly.

    A tensor with that bit, such as the imaginary part of a conjugate, has the opposite sign in memory.
    """
    negative = {}
    for name, tensor in zip(call._fields, call, strict=True):
        if name != "out" and isinstance(tensor, Tensor) and tensor.is_neg():
            try:
                negative[name] = tensor.resolve_neg()
            except NotImplementedError:  # booleans and FP8
                hint = f"PyTorch negates no {tensor.dtype}."
                raise LayoutError(name, "a negated view", "a tensor of its own", hint) from None
    return call._replace(**negative) if negative else call


def refuse_gradient_through(function: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Refuses inputs of a backward function whose gradient would silently be lost."""
    wanting = [name for name, x in tensors.items() if x is not None and needs_gradient(x)]
    if wanting:
        raise UnsupportedError(
            f"the gradient of {function} (double backward)",
            [f"{name} requires grad, and autograd does not follow {function}" for name in wanting],
            "torch.no_grad(), or tensors that are detached",
        )


def refuse_inference_tensors(tensors: Mapping[str, object]) -> None:
    """Names a tensor that autograd cannot save for backward; ignores other objects."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_inference():
            raise LayoutError(
                name,
                "a tensor made under torch.inference_mode",
                "one that autograd can save for backward",
                f"Use {name}.clone() outside of inference mode, or call under torch.no_grad().",
            ) from None


def refuse_tangents(tensors: Mapping[str, object], alternative: str = "PyTorch's own functions") -> None:
    """Rejects tensors with forward-mode tangents; ignores other objects."""
    if forward_ad._current_level < 0:
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise UnsupportedError(
                "forward-mode differentiation",
                [f"{name} has a tangent, and cuDNN has no forward-mode kernel"],
                f"differentiation in reverse mode, or {alternative}",
            )


def refuse_transforms(what: str, *tensors: object, loops: bool, functionalizes: bool = True) -> None:
    """Rejects functorch transforms that the operators do not support.

    Args:
        what: The function, for the message.
        tensors: Its operands.
        loops: Whether PyTorch can run the operator under `torch.vmap`, once for each entry of the batch.
        functionalizes: Whether it can run it under `torch.func.functionalize`: not if it writes to its operands.
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
    if TransformType.Functionalize in active and not functionalizes:
        raise UnsupportedError(
            f"{what} under torch.func.functionalize",
            ["it writes to its operands, and PyTorch functionalizes no such operator there"],
            "torch.compile, which functionalizes it",
        )
    if TransformType.Vmap in active and not loops:
        raise UnsupportedError(
            f"{what} under torch.vmap",
            ["it has no rule for a batch of calls"],
            "the batch as a dimension of its tensors, or a loop",
        )


def refuse_gradient_of(name: str, gradient: Tensor | None) -> None:
    """An auxiliary result, such as the LSE, can be returned, but a loss cannot depend on it."""
    if gradient is not None:
        raise UnsupportedError(
            "a gradient of the LSE (log-sum-exp)" if name == "lse" else f"a gradient of {name}",
            ["cuDNN's backward pass takes the gradient of the output alone"],
            f"{name}.detach() in the loss",
        )


def refuse_batch(grad_out: Tensor | None) -> None:
    if grad_out is not None and is_batch(grad_out):
        raise refusal_of_batch()


def refusal_of_batch() -> UnsupportedError:
    return UnsupportedError(
        "a batch of gradients (is_grads_batched, or jacobian with vectorize)",
        ["cuDNN's backward pass takes one gradient of the output"],
        "one call of torch.autograd.grad for each of them",
    )


def no_log_sum_exp(*_: object) -> None:
    raise UnsupportedError(
        "a gradient of an operator that does not return the LSE (log-sum-exp)",
        ["the backward pass needs the LSE; there is no gradient under torch.vmap"],
        "cudnn_sdpa.sdpa or sdpa_varlen, or the operator with _lse in its name",
    )


def no_gradient_of_gradient(*_: object) -> None:
    raise UnsupportedError(
        "a gradient of attention's gradient (double backward)",
        ["cuDNN has no kernel for it"],
        "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH",
    )
