"""The torch operator of all graph functions: CUDA (cuDNN), CPU (reference), fake and autograd implementations."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa.engine.launch import Layout, readable_gradient
from cudnn_sdpa.engine.sharding import Strategies
from cudnn_sdpa.engine.torch_ops import SCHEMAS, Implementations, implement
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.graph.definition import find_operation

if TYPE_CHECKING:
    from cudnn_sdpa.engine.explain import Description

#: An operand of a graph function: a tensor, a number that cuDNN reads at launch, or None for an optional one.
Value: TypeAlias = Tensor | float | None

#: The static options of a call, by name.
Options: TypeAlias = dict[str, object]

Outputs: TypeAlias = tuple[Tensor, ...]

#: Results of a reference, and of a backward.
Results: TypeAlias = Tensor | tuple[Tensor, ...] | list[Tensor]
Gradients: TypeAlias = "Tensor | tuple[Tensor | None, ...] | list[Tensor | None] | GraphCall | None"

ResultT = TypeVar("ResultT", Tensor, Tensor | None)


class Prepared(Protocol):
    """A call bound to its plan, or split."""

    @property
    def results(self) -> Sequence[Layout]: ...

    def run(
        self, tensors: Sequence[Tensor], numbers: tuple[float, ...], into: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor]: ...


class Saved(Protocol):
    """State of a call for its backward pass."""

    def save(self, ctx: Any, values: tuple[Value, ...], results: Sequence[Tensor]) -> None: ...


class Function(Protocol):
    """The part of `GraphFunction`, whose module imports this one, that the operator, `Recorder` and `large` use."""

    __name__: str
    name: str
    token: str
    operands: tuple[str, ...]
    options: Options
    reference: Callable[..., Results] | None
    backward: Callable[..., Gradients] | None
    takes_needs: bool
    flops: Callable[..., int] | None
    ways: Strategies | None

    def run(self, operands: tuple[Value, ...], options: Mapping[str, object]) -> Any: ...

    def as_readable(self, values: Sequence[Value], static: Options) -> tuple[Value, ...]: ...

    def outputs(self, values: Sequence[Value], static: Options) -> Outputs: ...

    def _describe(self, values: tuple[Value, ...], static: Options, device: int | None) -> Description: ...

    def prepared(self, values: tuple[Value, ...], static: Options) -> Prepared: ...

    def saved(self, values: Sequence[Value], static: Options) -> Saved: ...


@dataclass(frozen=True)
class GraphCall:
    """A call of a graph function, returned unrun by a `backward`; made by `GraphFunction.call`.

    Calling it runs the function.

    Attributes:
        names: The operands whose gradients the results are, in the order of the results; None for the first operands.
    """

    function: Function
    operands: tuple[Value, ...]
    options: Mapping[str, object]
    names: tuple[str, ...] | None = None

    def of(self, *names: str) -> GraphCall:
        """A call whose results are the gradients of these operands of the differentiated function."""
        return replace(self, names=names)

    def __call__(self) -> Any:
        return self.function.run(self.operands, self.options)


_INFINITY = float("inf")

#: Types of options; a `SymInt` is an integer where a gradient is traced for any size.
_PLAIN = (bool, int, float, str, torch.SymInt)

#: All graph functions of this process by their tokens. They are never removed: a gradient may be computed after all
#: other references to its function are gone, and no other function may get its token.
_functions: dict[str, Function] = {}


def register(function: Function, digest: str) -> str:
    """Registers a graph function; returns its token: import path, digest, and a number if that is taken.

    The digest covers everything that a compiled graph depends on: PyTorch stores compiled graphs on disk, and must not
    load one that was made with another gradient.
    """
    name, number = f"{function.name}@{digest}", 1
    token = name
    while token in _functions:
        number += 1
        token = f"{name}#{number}"
    _functions[token] = function
    return token


def find(token: str) -> Function:
    """The graph function with this token; its module is imported if necessary.

    Raises:
        OptionError: The function has changed since the token was made.
    """
    function = _functions.get(token)
    if function is None:
        with contextlib.suppress(AttributeError, ImportError, TypeError):
            find_operation(token.partition("@")[0])
        function = _functions.get(token)
    if function is None:
        got, expected = "another builder, reference or gradient", "the same as when this graph was compiled"
        raise OptionError(
            f"the graph function {token}", got, expected, "Compile again; torch.compiler.reset() forgets."
        )
    return function


def run(function: Function, values: Sequence[Value], static: Options) -> Sequence[Tensor]:
    """Runs a graph function through PyTorch's dispatcher."""
    kinds = "".join("t" if isinstance(x, Tensor) else "-" if x is None else "n" for x in values)
    tensors = [x for x in values if isinstance(x, Tensor)]
    numbers = [float(x) for x in values if x is not None and not isinstance(x, Tensor)]
    symbols: list[torch.SymInt] = []
    options = _encoded(static.values(), symbols, numbers)
    torch_op = torch.ops.cudnn_sdpa.graph_function
    # In the order of the schema: torch.compile traces this call.
    results: Sequence[Tensor] = torch_op(function.token, kinds, tensors, numbers, symbols or None, options)
    return results


def as_tuple(results: ResultT | tuple[ResultT, ...] | list[ResultT]) -> tuple[ResultT, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def gradients(
    function: Function,
    grads: Sequence[Tensor | None],
    values: Sequence[Value],
    *,
    results: Sequence[Tensor],
    static: Options,
    needs: tuple[bool, ...] | None = None,
) -> tuple[tuple[Tensor | None, ...], GraphCall | None]:
    """The needed gradients by a function's backward, one for each operand, and the call that it returned, if any.

    Args:
        function: The function.
        grads: Gradients of its results.
        values: Its operands.
        results: Its results; empty if it does not keep them.
        static: Its options.
        needs: Whether each operand requires a gradient; None is all.

    Raises:
        UnsupportedError: The function has no backward.
        OptionError: Its backward returns another number of gradients, or a call of other results.
    """
    if function.backward is None:
        raise UnsupportedError(f"the gradient of {function.__name__}", ["the operation has no backward="])
    needs = needs or (True,) * len(values)
    needed = {"needs": needs} if function.takes_needs else {}
    returned = function.backward(tuple(grads), tuple(values), results, **needed, **static)
    call, grad_inputs = (
        (returned, _made(function, returned)) if isinstance(returned, GraphCall) else (None, as_tuple(returned))
    )
    if len(grad_inputs) != len(values):
        expected = f"{len(values)}, one for each operand, None where there is none"
        raise OptionError("backward", f"{len(grad_inputs)} gradients", expected)
    return tuple([x if need else None for x, need in zip(grad_inputs, needs, strict=True)]), call


def _made(function: Function, call: GraphCall) -> tuple[Tensor | None, ...]:
    """Runs the call that a function's backward returned; gives one gradient for each operand."""
    results: tuple[Tensor, ...] = as_tuple(call())
    by_position = dict(zip(gradient_positions(function, call, len(results)), results, strict=True))
    return tuple([by_position.get(position) for position in range(len(function.operands))])


def gradient_positions(function: Function, call: GraphCall, count: int) -> list[int]:
    """Positions of the operands whose gradients are the results of a call that a backward returned.

    Raises:
        OptionError: There are more or fewer results, or an operand does not exist or is named twice.
    """
    names = function.operands[:count] if call.names is None else call.names
    if len(names) != count or len(set(names)) != count or not set(names) <= set(function.operands):
        named = "" if call.names is None else f" as the gradients of {', '.join(names) or 'nothing'}"
        got = f"a call of {call.function.__name__} with {count} result{'s' * (count != 1)}{named}"
        raise OptionError("backward", got, f"a result for each operand named, of {', '.join(function.operands)}")
    return [function.operands.index(name) for name in names]


def checked_option(name: str, value: object) -> object:
    """An option as a plain value, which `_encoded` supports: `numpy.float64`, for one, is a float of another type.

    Raises:
        OptionError: The value is not plain.
    """
    if isinstance(value, tuple):
        return tuple([checked_option(name, item) for item in value])
    if value is not None and (not isinstance(value, _PLAIN) or isinstance(value, Enum)):
        raise OptionError(name, type(value).__name__, "None, a bool, a number, a string or a tuple of these")
    if isinstance(value, float) and not -_INFINITY < value < _INFINITY:
        raise OptionError(name, str(value), "a finite number")
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    return float.__float__(value) if isinstance(value, float) else int.__int__(cast(int, value))


def _encoded(values: Iterable[object], symbols: list[torch.SymInt], numbers: list[float]) -> str:
    """Options as text for the operator; symbolic sizes and floats are appended to the lists and referred to by index.

    torch.compile traces this: integers may be symbolic until `index` gets their value, and floats that vary between
    calls stay symbolic.
    """
    text = ""
    for value in values:
        if isinstance(value, tuple):
            text += "(" + _encoded(value, symbols, numbers) + "),"
        elif isinstance(value, torch.SymInt):
            text += f"_{len(symbols)},"
            symbols.append(value)
        elif isinstance(value, float):
            text += f"f{len(numbers)},"
            numbers.append(float(value))
        else:
            plain = operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value
            text += (repr(plain) if isinstance(plain, str) else str(plain)) + ","
    return text


def _decoded_options(text: str, symbols: Sequence[int], numbers: Sequence[float]) -> tuple[object, ...]:
    values: tuple[object, ...] = ast.literal_eval(_Substitution(symbols, numbers).apply(text))
    return values


class _Substitution(ast.NodeTransformer):
    """Replaces the references of `_encoded` by their sizes and floats."""

    def __init__(self, symbols: Sequence[int], numbers: Sequence[float]) -> None:
        self._lists: Mapping[str, Sequence[float]] = {"_": symbols, "f": numbers}

    def apply(self, text: str) -> ast.expr:
        expression: ast.expr = self.visit(ast.parse(f"({text})", mode="eval").body)
        return expression

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(self._lists[node.id[0]][int(node.id[1:])])


def run_gpu(function: Function, values: Sequence[Value], static: Options) -> Sequence[Tensor]:
    """The operator on the GPU: its plan is found or built, and launched."""
    if any(isinstance(x, Tensor) and x.numel() == 0 for x in values) and function.reference is not None:
        return run_reference(function, values, static)  # cuDNN has no empty tensors
    # In a compiled function, gradients from autograd may be misaligned, and tensors differ in strides from the trace.
    named = zip(function.operands, values, strict=True)
    values = [readable_gradient(x) if name.startswith("grad") and isinstance(x, Tensor) else x for name, x in named]
    values = function.as_readable(values, static)
    tensors = [x for x in values if isinstance(x, Tensor)]
    numbers = tuple([x for x in values if isinstance(x, (int, float))])
    return function.prepared(values, static).run(tensors, numbers)


def run_reference(function: Function, values: Sequence[Value], static: Options) -> Outputs:
    if function.reference is None:
        reasons = ["its operands are not on an NVIDIA GPU, and it has no reference="]
        raise UnsupportedError(function.__name__, reasons, "tensors on a GPU")
    results = as_tuple(function.reference(*values, **static))
    like = function.outputs(values, static)
    found, wanted = ([tuple(x.shape) if isinstance(x, Tensor) else x for x in each] for each in (results, like))
    if found != wanted:
        raise OptionError(
            f"reference of {function.__name__}", f"results of shapes {found}", f"those of outputs=, {wanted}"
        )
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=y.device).copy_(y)
        for x, y in zip(like, results, strict=True)
    )


def fake_results(function: Function, values: Sequence[Value], static: Options) -> Outputs:
    """The operator on tensors without memory."""
    device = next(x.device for x in values if isinstance(x, Tensor))
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in function.outputs(values, static)
    )


def _decode(
    token: str,
    kinds: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    symbols: Sequence[int] | None,
    options: str,
) -> tuple[Function, tuple[Value, ...], Options]:
    function = find(token)
    iterators: dict[str, Iterator[Value]] = {"t": iter(tensors), "n": iter(numbers)}
    values = tuple(None if kind == "-" else next(iterators[kind]) for kind in kinds)
    static = zip(function.options, _decoded_options(options, symbols or (), numbers), strict=True)
    return function, values, dict(static)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the calls of graph functions while active, as (function, operands, options)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Function, tuple[Value, ...], Options]] = []

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if function is torch.ops.cudnn_sdpa.graph_function.default:
            self.calls.append(_decode(*args))
        return function(*args, **(kwargs or {}))


def decoded(implementation: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: list(implementation(*_decode(*arguments)))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    function, values, static = _decode(*inputs)
    function.saved(values, static).save(ctx, values, output)
    _, kinds, _, numbers, *_ = inputs
    ctx.kinds, ctx.has_numbers = kinds, bool(numbers)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[object, ...]:
    _, _, tensors_need, *_ = ctx.needs_input_grad  # in the order of the schema: name, kinds, tensors, ...
    needs = _needs(tensors_need, ctx.kinds)
    grad_inputs = ctx.tracked.gradients(ctx, ctx.tracked.function.without_auxiliary(grads, trains=True), needs)
    tensor_gradients = [gradient for gradient, kind in zip(grad_inputs, ctx.kinds, strict=True) if kind == "t"]
    # One for each argument of the operator: token, kinds, tensors, numbers, symbols, options. PyTorch takes an empty
    # list of numbers for a list of tensors.
    return None, None, tensor_gradients, None if ctx.has_numbers else [], None, None


def _needs(tensors_need: Iterable[bool], kinds: str) -> tuple[bool, ...]:
    """Which operands require a gradient; numbers never do."""
    needed = iter(tensors_need)
    return tuple(kind == "t" and bool(next(needed)) for kind in kinds)


def _count_flops(*inputs: Any, out_val: object = None, **_: object) -> int:
    del out_val
    function, values, static = _decode(*inputs)
    return 0 if function.flops is None else function.flops(*values, **static)


implement(
    "graph_function",
    SCHEMAS[__name__][0],
    Implementations(
        cuda=decoded(run_gpu),
        cpu=decoded(run_reference),
        fake=decoded(fake_results),
        flops=_count_flops,
        backward=_backward,
        setup_context=_setup_context,
    ),
)
