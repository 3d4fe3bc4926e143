"""The torch operator of all graph functions: CUDA (cuDNN), CPU (reference), fake and autograd implementations."""

from __future__ import annotations

import ast
import contextlib
import operator
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cudnn_sdpa.engine.dispatch_state import is_deterministic
from cudnn_sdpa.engine.launch import GraphCall, calls, describe, readable, type_of
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.graph.definition import find_operation

Outputs = tuple[Tensor, ...]
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


_INFINITY = float("inf")

#: What an option may be; a `SymInt` is an integer to whoever traces a gradient for any size.
_PLAIN = (bool, int, float, str, torch.SymInt)

#: All graph functions of this process by the name that the operator knows them by, for as long as it lives: a gradient
#: may be asked for when nobody else refers to its function any more, and no other may come by its name.
_functions: dict[str, Any] = {}


def register(function: Any, digest: str) -> str:
    """The name by which the operator will find a graph function: import path, digest, and a number if that is taken.

    The digest is of all that a compiled graph has taken over: PyTorch keeps compiled graphs on disk, and must not find
    one that was made with another gradient.
    """
    name, number = f"{function.name}@{digest}", 1
    token = name
    while token in _functions:
        number += 1
        token = f"{name}#{number}"
    _functions[token] = function
    return token


def find(token: str) -> Any:
    """The graph function with this name, its module imported if need be.

    Raises:
        OptionError: It has changed since the name was given.
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


def run(function: Any, given: Sequence[Any], static: dict[str, Any]) -> Sequence[Tensor]:
    """The results of a graph function, through PyTorch's dispatcher."""
    kinds = "".join("t" if isinstance(x, Tensor) else "-" if x is None else "n" for x in given)
    tensors = [x for x in given if isinstance(x, Tensor)]
    numbers = [float(x) for x, kind in zip(given, kinds, strict=True) if kind == "n"]
    symbols: list[Any] = []
    options = _encoded(static.values(), symbols, numbers)
    of_torch = torch.ops.cudnn_sdpa.graph_function
    found: Sequence[Tensor] = of_torch(function.token, kinds, tensors, numbers, symbols or None, options)
    return found


def prepared(function: Any, given: Sequence[Any], static: dict[str, Any]) -> GraphCall:
    """The call bound to its plan, built now if there is none.

    Raises:
        UnsupportedError: cuDNN has no plan for it.
        PlanBuildError: It is missing and may not be built now.
    """
    options = (*static.items(), *map(type_of, static.values()))
    deterministic = is_deterministic()
    signature = (function.token, function.digest, deterministic, *map(describe, given), *options)
    found: GraphCall | None = calls.get(signature)
    if found is None:
        with torch.cuda.device(next(x.device for x in given if isinstance(x, Tensor))):
            seen = function.seen(given)
            found = GraphCall(function, seen, function.outputs(seen, static), static, deterministic=deterministic)
            if function.form is not None:
                results = function.outputs(given, static)
                found = found.shaped(*((tuple(x.shape), x.stride(), x.dtype) for x in results))
        calls.add(signature, found)
    return found


def as_tuple(results: Any) -> Outputs:
    """What a function returned, one tensor or several."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def gradients(
    function: Any,
    grads: Sequence[Any],
    given: Sequence[Any],
    results: Any,
    static: dict[str, Any],
    needs: tuple[bool, ...] | None = None,
) -> Any:
    """What the backward of a function gives, one for each operand; `needs` says which are wanted, all if not given."""
    if function.backward is None:
        raise UnsupportedError(f"the gradient of {function.__name__}", ["the operation has no backward="])
    wanted = {"needs": needs or (True,) * len(given)} if function.backward_asks else {}
    found = as_tuple(function.backward(tuple(grads), tuple(given), results, **wanted, **static))
    if len(found) != len(given):
        expected = f"{len(given)}, one for each operand, None where there is none"
        raise OptionError("backward", f"{len(found)} gradients", expected)
    return found


def check_option(name: str, value: Any) -> None:
    """A plain value, such as `_encoded` can write.

    Raises:
        OptionError: It is not.
    """
    if isinstance(value, tuple):
        for item in value:
            check_option(name, item)
    elif value is not None and (not isinstance(value, _PLAIN) or isinstance(value, Enum)):
        raise OptionError(name, type(value).__name__, "None, a bool, a number, a string or a tuple of these")
    elif isinstance(value, float) and not -_INFINITY < value < _INFINITY:
        raise OptionError(name, str(value), "a finite number")


def _encoded(values: Iterable[Any], symbols: list[Any], numbers: list[float]) -> str:
    """Values of options as the text in which the operator takes them; sizes that are symbols, and floats, go beside it.

    Written so that torch.compile can follow it; to it whole numbers may be symbols until `index` asks for their value,
    and floats that vary from call to call stay symbols.
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
            known = operator.index(value) if isinstance(value, int) and not isinstance(value, bool) else value
            text += (repr(known) if isinstance(known, str) else str(known)) + ","
    return text


def _decoded_options(text: str, symbols: Sequence[Any], numbers: Sequence[float]) -> tuple[Any, ...]:
    values: tuple[Any, ...] = ast.literal_eval(_Filled(symbols, numbers).of(text))
    return values


class _Filled(ast.NodeTransformer):
    """Puts sizes and floats in the places that `_encoded` has left for them."""

    def __init__(self, symbols: Sequence[Any], numbers: Sequence[float]) -> None:
        self._beside = {"_": symbols, "f": numbers}

    def of(self, text: str) -> ast.expr:
        """The text as an expression of constants."""
        expression: ast.expr = self.visit(ast.parse(f"({text})", mode="eval").body)
        return expression

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant(self._beside[node.id[0]][int(node.id[1:])])


def _on_gpu(function: Any, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    tensors, numbers = [x for x in given if isinstance(x, Tensor)], [x for x in given if isinstance(x, (int, float))]
    if any(x.numel() == 0 for x in tensors) and function.reference is not None:  # cuDNN has no empty tensors
        return _on_cpu(function, given, static)
    if function.operands[0] == "grad":  # what autograd hands over may lie anywhere, in a compiled function too
        tensors[0] = readable(tensors[0])
        given = (tensors[0], *given[1:])
    return tuple(prepared(function, given, static)(tensors, tuple(numbers)))


def _on_cpu(function: Any, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    if function.reference is None:
        reasons = ["its operands are not on an NVIDIA GPU, and it has no reference="]
        raise UnsupportedError(function.__name__, reasons, "tensors on a GPU")
    found = as_tuple(function.reference(*given, **static))
    like = function.outputs(given, static)
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=y.device).copy_(y)
        for x, y in zip(like, found, strict=True)
    )


def _call(
    name: str,
    kinds: str,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    symbols: Sequence[Any] | None,
    options: str,
) -> Call:
    """What the operator was given, as the function, its operands and its options."""
    function = find(name)
    values = {"t": iter(tensors), "n": iter(numbers)}
    given = tuple(None if kind == "-" else next(values[kind]) for kind in kinds)
    return function, given, dict(zip(function.options, _decoded_options(options, symbols or (), numbers), strict=True))


def _decoded(implementation: Callable[..., Outputs]) -> Callable[..., list[Tensor]]:
    return lambda *arguments: list(implementation(*_call(*arguments)))


def _without_data(function: Any, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
    where = next(x.device for x in given if isinstance(x, Tensor))
    return tuple(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=where) for x in function.outputs(given, static)
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    name, kinds, tensors, numbers, symbols, options = inputs
    kept = output if find(name).keeps_results else ()
    ctx.save_for_backward(*tensors, *kept)
    ctx.rest, ctx.count = (name, kinds, numbers, symbols, options), len(tensors)


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Any:
    name, kinds, numbers, symbols, options = ctx.rest
    saved = ctx.saved_tensors  # once: hooks may bring them back from elsewhere, and checkpoints count
    tensors, results = saved[: ctx.count], saved[ctx.count :]
    function, given, static = _call(name, kinds, tensors, numbers, symbols, options)
    found = gradients(function, grads, given, results, static, _needs(ctx.needs_input_grad[2], kinds))
    of_tensors = [gradient for gradient, kind in zip(found, kinds, strict=True) if kind == "t"]
    return None, None, of_tensors, None if numbers else [], None, None  # an empty list counts as one of tensors


def _needs(of_tensors: Any, kinds: str) -> tuple[bool, ...]:
    """Which operands require a gradient, of all, where this is known of the tensors among them."""
    needed = iter(of_tensors)
    return tuple(kind == "t" and bool(next(needed)) for kind in kinds)


_library: Any = torch.library.Library("cudnn_sdpa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "graph_function(str name, str kinds, Tensor[] tensors, float[] numbers, SymInt[]? symbols, str options)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("graph_function", _decoded(_on_gpu), "CUDA")
_library.impl("graph_function", _decoded(_on_cpu), "CPU")
torch.library.register_fake("cudnn_sdpa::graph_function", _decoded(_without_data), lib=_library)
torch.library.register_autograd("cudnn_sdpa::graph_function", _backward, setup_context=_keep, lib=_library)
