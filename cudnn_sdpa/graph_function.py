"""`graph_op`: fused cuDNN operations of one's own, called like any function of tensors."""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from cudnn_sdpa.errors import DeviceError, DtypeError, OptionError, UnsupportedError
from cudnn_sdpa.runtime.describe import Description, register
from cudnn_sdpa.runtime.graph_call import GraphCall, calls, describe, key_of
from cudnn_sdpa.runtime.graph_op import GraphOp, find_operation
from cudnn_sdpa.runtime.layouts import CUDNN_DTYPE_NAMES

Outputs = tuple[Tensor, ...]
Call = tuple["GraphFunction", tuple[Any, ...], dict[str, Any]]


class GraphFunction(GraphOp):
    """A fused cuDNN operation as a function of tensors; made by `graph_op`.

    Attributes:
        operands: Names of the builder's tensors and numbers, in its order.
        options: The static options with their defaults; `inspect.Parameter.empty` where there is none.
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        *,
        reference: Callable[..., Any] | None = None,
        outputs: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(builder)
        if reference is None and outputs is None:
            raise TypeError(
                f"graph_op {builder.__name__} needs reference=, the same in plain PyTorch, or outputs=, a function "
                "that gives empty tensors like its results"
            )
        self.__name__ = builder.__name__
        self.reference, self._outputs, self.backward = reference, outputs or reference, backward
        parameters = list(inspect.signature(builder).parameters.values())[1:]
        self.operands = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self._optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is None}
        if len(self.operands) + len(self.options) != len(parameters):
            raise TypeError(f"the graph builder {builder.__name__} may have no * parameters")
        register(self, self.describe)

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """The results on these operands: tensors, or None for optional ones, or numbers.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: cuDNN has no plan for it, or there is no reference for tensors elsewhere.
        """
        given, static = self._bind(operands, options)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            found = _with_gradient(self, given, static)
        else:
            found = _through_operator(self, given, static)
        return found[0] if len(found) == 1 else tuple(found)

    def _bind(self, operands: Sequence[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands in the builder's order, and all options."""
        if len(operands) > len(self.operands):
            raise TypeError(f"{self.__name__} takes {len(self.operands)} operands, not {len(operands)}")
        by_name = dict(zip(self.operands, operands, strict=False))
        static = dict(self.options)
        for name, value in options.items():
            if name in static:
                static[name] = value
            elif name in self.operands and name not in by_name:
                by_name[name] = value
            else:
                raise TypeError(f"{self.__name__} takes no argument {name!r} here")
        for name, value in static.items():
            if value is inspect.Parameter.empty:
                raise TypeError(f"{self.__name__} misses its option {name!r}")
            _check_static(name, value)
        given = tuple(by_name.get(name) for name in self.operands)
        self._check(given)
        return given, static

    def _check(self, given: tuple[Any, ...]) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        if not tensors:
            raise OptionError(self.operands[0], "no tensor at all", "a tensor among the operands")
        for name, value in zip(self.operands, given, strict=True):
            if value is None and name not in self._optional:
                raise OptionError(name, "None", "a tensor or a number")
            if isinstance(value, Tensor):
                if value.device != tensors[0].device:
                    raise DeviceError(name, str(value.device), f"{tensors[0].device}, the device of the first tensor")
                if value.dtype not in CUDNN_DTYPE_NAMES:
                    raise DtypeError(name, str(value.dtype), "a dtype that cuDNN has")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise OptionError(name, type(value).__name__, "a tensor or a number")

    def describe(self, *operands: Any, **options: Any) -> Description:
        """What a call with these arguments runs on a GPU."""
        given, static = self._bind(operands, options)
        tensor = next(x for x in given if isinstance(x, Tensor))
        key = partial(key_of, self, self.operands, given, self.outputs(given, static), static)
        return Description(operation=self, key=key, device=tensor.get_device() if tensor.is_cuda else None)

    def outputs(self, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
        """Tensors without data, like the results."""
        assert self._outputs is not None
        bare = [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in given]
        with torch.no_grad():
            return _as_tuple(self._outputs(*bare, **static))


@overload
def graph_op(builder: Callable[..., Any], /) -> GraphFunction: ...


@overload
def graph_op(
    *,
    reference: Callable[..., Any] | None = ...,
    outputs: Callable[..., Any] | None = ...,
    backward: Callable[..., Any] | None = ...,
) -> Callable[[Callable[..., Any]], GraphFunction]: ...


def graph_op(
    builder: Callable[..., Any] | None = None,
    /,
    *,
    reference: Callable[..., Any] | None = None,
    outputs: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> GraphFunction | Callable[[Callable[..., Any]], GraphFunction]:
    """Makes a function of tensors out of the builder of a cuDNN graph."""
    if builder is None:
        return lambda builder: GraphFunction(builder, reference=reference, outputs=outputs, backward=backward)
    return GraphFunction(builder, reference=reference, outputs=outputs, backward=backward)


def _as_tuple(results: Any) -> Outputs:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _check_static(name: str, value: Any) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_static(name, item)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise OptionError(name, type(value).__name__, "None, a bool, a number, a string or a tuple of these")


def _encoded(values: Iterable[Any]) -> str:
    """Values of options as the text in which the operator takes them.

    Written so that torch.compile can follow it; whole numbers may be symbols to it until `index` asks for their value.
    """
    text = ""
    for value in values:
        if isinstance(value, tuple):
            text += "(" + _encoded(value) + "),"
        else:
            known = operator.index(value) if isinstance(value, int) else value
            text += (repr(known) if isinstance(known, str) else str(known)) + ","
    return text


def _decoded_options(text: str) -> tuple[Any, ...]:
    values: tuple[Any, ...] = ast.literal_eval(f"({text})")
    return values


# --- what runs where ---------------------------------------------------------------------------------------------


def _on_gpu(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    signature = (function.name, function.digest, *map(describe, given), *static.items(), *map(type, static.values()))
    prepared = calls.get(signature)
    if prepared is None:
        prepared = GraphCall(function, given, function.outputs(given, static), static)
        calls.add(signature, prepared)
    return prepared(given)


def _on_cpu(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    if function.reference is None:
        reasons = ["its operands are not on an NVIDIA GPU, and it has no reference= in plain PyTorch"]
        raise UnsupportedError(function.__name__, reasons, "tensors on a GPU")
    found = _as_tuple(function.reference(*given, **static))
    like = function.outputs(given, static)
    return tuple(torch.empty_like(x, device=y.device).copy_(y) for x, y in zip(like, found, strict=True))


def _through_operator(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> Sequence[Tensor]:
    kinds = "".join("t" if isinstance(x, Tensor) else "-" if x is None else "n" for x in given)
    tensors = [x for x in given if isinstance(x, Tensor)]
    numbers = [float(x) for x, kind in zip(given, kinds, strict=True) if kind == "n"]
    run = torch.ops.cudnn_sdpa.graph_function
    found: Sequence[Tensor] = run(function.name, kinds, tensors, numbers, _encoded(static.values()))
    return found


def _call(name: str, kinds: str, tensors: Sequence[Tensor], numbers: Sequence[float], options: str) -> Call:
    """What the operator was given, as the function, its operands and its options."""
    function = find_operation(name)
    assert isinstance(function, GraphFunction)
    values = {"t": iter(tensors), "n": iter(numbers)}
    given = tuple(None if kind == "-" else next(values[kind]) for kind in kinds)
    return function, given, dict(zip(function.options, _decoded_options(options), strict=True))


def _decoded(run: Callable[..., Outputs]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: list(run(*_call(*arguments)))


def _without_data(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    where = next(x.device for x in given if isinstance(x, Tensor))
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where) for x in function.outputs(given, static)
    )


def _with_gradient(function: GraphFunction, given: Sequence[Any], static: dict[str, Any]) -> Sequence[Tensor]:
    if function.backward is None:
        reasons = ["an operand requires grad, and the operation has no backward="]
        raise UnsupportedError(f"the gradient of {function.__name__}", reasons, "torch.no_grad()")
    return _through_operator(function, given, static)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    name, kinds, tensors, numbers, options = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest, ctx.count = (name, kinds, numbers, options), len(tensors)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    name, kinds, numbers, options = ctx.rest
    tensors, results = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
    function, given, static = _call(name, kinds, tensors, numbers, options)
    if function.backward is None:
        raise UnsupportedError(f"the gradient of {function.__name__}", ["the operation has no backward="])
    found = _as_tuple(function.backward(tuple(grads), given, results, **static))
    if len(found) != len(given):
        expected = f"{len(given)}, one for each operand, None where there is none"
        raise OptionError("backward", f"{len(found)} gradients", expected)
    of_tensors = [gradient for gradient, kind in zip(found, kinds, strict=True) if kind == "t"]
    return None, None, of_tensors, None if numbers else [], None  # an empty list counts as one of tensors


_library: Any = torch.library.Library("cudnn_sdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "graph_function(str name, str kinds, Tensor[] tensors, float[] numbers, str options) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("graph_function", _decoded(_on_gpu), "CUDA")
_library.impl("graph_function", _decoded(_on_cpu), "CPU")
torch.library.register_fake("cudnn_sdpa::graph_function", _decoded(_without_data), lib=_library)
torch.library.register_autograd("cudnn_sdpa::graph_function", _backward, setup_context=_keep, lib=_library)
