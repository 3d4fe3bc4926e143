"""`graph_op`: custom fused cuDNN operations, called like any function of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor

from cudnn_sdpa.engine import autograd_checks
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_deterministic, is_lazy, needs_gradient, plain
from cudnn_sdpa.engine.explain import Description
from cudnn_sdpa.engine.launch import GraphCall, key_of, readable, type_of
from cudnn_sdpa.errors import DeviceError, DtypeError, LayoutError, OptionError, UnsupportedError
from cudnn_sdpa.fused import torch_ops
from cudnn_sdpa.fused.checks import check_kept, check_strided, shown
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.torch_ops import Outputs, as_tuple
from cudnn_sdpa.graph.definition import GraphOp, function_digest
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES, is_expanded
from cudnn_sdpa.graph.symbolic_shapes import is_compiling

_LARGEST = 2**127
_NUMBERS = (float, int)


class GraphFunction(GraphOp):
    """A fused cuDNN operation as a function of tensors; made by `graph_op`.

    Attributes:
        operands: Names of the builder's tensors and numbers, in its order.
        options: The static options with their defaults; `inspect.Parameter.empty` where there is none.
        reference: The same in plain PyTorch, if there is one.
        backward: What gives its gradients, if it has any.
        keeps_results: Whether that gets the results; otherwise they are not kept for it.
        backward_asks: Whether that wants to know which are wanted.
        token: The name by which the torch operator finds it.
        form: How cuDNN is shown the operands where that is quicker, if it is: the same memory in another shape, and so
            are the results. It is asked when a plan is needed, with sizes that are known, which a compiler's are not.
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        *,
        reference: Callable[..., Any] | None = None,
        outputs: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        keeps_results: bool = True,
    ) -> None:
        super().__init__(builder)
        if reference is None and outputs is None:
            expected = "reference=, the same in plain PyTorch, or outputs=, which gives empty tensors like its results"
            raise OptionError(f"graph_op {builder.__name__}", "neither reference= nor outputs=", expected)
        self.__name__ = builder.__name__
        self.reference, self._outputs, self.backward = reference, outputs or reference, backward
        self.keeps_results = keeps_results
        self.form: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
        self.backward_asks = backward is not None and "needs" in inspect.signature(backward).parameters
        parameters = list(inspect.signature(builder).parameters.values())[1:]
        self.operands = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        for p in parameters:
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None):
                got, hint = f"the default {shown(p.default)}", f"Make {p.name!r} keyword-only."
                raise OptionError(f"{p.name} of {builder.__name__}", got, "an operand without a default but None", hint)
        self._optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is None}
        if len(self.operands) + len(self.options) != len(parameters):
            got = "a parameter with * or one that has no name"
            raise OptionError(f"the graph builder {builder.__name__}", got, "no * parameters, and none without a name")
        self.token = torch_ops.register(self, function_digest(builder, backward, reference, outputs))
        self._shortcuts = FastPath()

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """The results on these operands: tensors, or None for optional ones, or numbers.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: cuDNN has no plan for it, or there is no reference for tensors elsewhere.
        """
        if is_compiling():
            given, static = self._bind(operands, options)
            self._check_gradient(given)
            found: Sequence[Tensor] = torch_ops.run(self, given, static)
        else:
            found = self._again(operands, options) or self._run(operands, options)
        return found[0] if len(found) == 1 else tuple(found)

    def _again(self, operands: Sequence[Any], options: dict[str, Any]) -> Sequence[Tensor] | None:
        """The results of a call like one before: saves checks, keys and the dispatcher, 70 µs."""
        if options and not options.keys() <= self.options.keys():
            return None  # an operand was given by name
        tensors = [x for x in operands if isinstance(x, Tensor)]
        try:
            numbers = tuple([float(x) for x in operands if type(x) in _NUMBERS])
        except OverflowError:  # the checks will say so
            return None
        trains = needs_gradient(*tensors)
        call = self._shortcuts.find(tensors, (trains, *_name_of(operands, options)), trains=trains)
        if call is None:
            return None
        if not trains:
            return call(tensors, numbers)
        given = (*operands, *(None,) * (len(self.operands) - len(operands)))  # checked when the call was learned
        return _as_results(_Followed.apply(self, call, {**self.options, **options}, *given))  # type: ignore[no-untyped-call]

    def _run(self, operands: Sequence[Any], options: dict[str, Any]) -> Sequence[Tensor]:
        """The results of a call that has to be checked; another one like it will be known."""
        given, static = self._bind(operands, options)
        self._check_gradient(given)
        given = tuple(plain(x) if isinstance(x, Tensor) and is_lazy(x) else x for x in given)
        found = torch_ops.run(self, given, static)
        tensors = [x for x in operands if isinstance(x, Tensor)]
        in_order = options.keys() <= self.options.keys() and bool(tensors) and tensors[0].is_cuda
        if in_order and all(x is None or isinstance(x, Tensor) or type(x) in _NUMBERS for x in operands):
            if 0 in (x.numel() for x in tensors) or not can_bypass_dispatcher(*tensors):
                return found
            trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            name = (trains, *_name_of(operands, options))
            self._shortcuts.add(tensors, name, torch_ops.prepared(self, given, static))
        return found

    def _check_gradient(self, given: Sequence[Any]) -> None:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
        if wanted and self.backward is None:
            reasons = ["an operand requires grad, and the operation has no backward="]
            raise UnsupportedError(f"the gradient of {self.__name__}", reasons, "torch.no_grad()")

    def _bind(self, operands: Sequence[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands in the builder's order, and all options."""
        if len(operands) > len(self.operands):
            got = f"{len(operands)} of them"
            raise OptionError(f"operands of {self.__name__}", got, f"no more than {', '.join(self.operands)}")
        by_name = dict(zip(self.operands, operands, strict=False))
        static = dict(self.options)
        for name, value in options.items():
            if name in static:
                static[name] = value
            elif name in self.operands and name not in by_name:
                by_name[name] = value
            else:
                got = "a second value" if name in self.operands else "an argument that it does not have"
                raise OptionError(name, got, f"{self.__name__}({', '.join((*self.operands, *self.options))})")
        for name, value in static.items():
            if value is inspect.Parameter.empty:
                raise OptionError(name, "nothing", f"a value: {self.__name__} has no default for this option")
            torch_ops.check_option(name, value)
        given = tuple(by_name.get(name) for name in self.operands)
        self._check(given)
        autograd_checks.refuse_tangents(dict(zip(self.operands, given, strict=True)))
        autograd_checks.refuse_transforms(self.__name__, *given, loops=False)
        return given, static

    def _check(self, given: tuple[Any, ...]) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        if not tensors:
            raise OptionError(self.operands[0], "no tensor at all", "a tensor among the operands")
        for name, value in zip(self.operands, given, strict=True):
            if value is None and name not in self._optional:
                raise OptionError(name, "None", "a tensor or a number")
            if isinstance(value, Tensor):
                check_strided(name, value)
                if value.device != tensors[0].device:
                    raise DeviceError(name, str(value.device), f"{tensors[0].device}, the device of the first tensor")
                if value.dtype not in CUDNN_DTYPE_NAMES:
                    raise DtypeError(name, str(value.dtype), "a dtype that cuDNN has")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise OptionError(name, type(value).__name__, "a tensor or a number")
            elif isinstance(value, int) and abs(value) > _LARGEST:
                raise OptionError(name, shown(value), "a number that float32 holds")
        check_kept(**{name: x for name, x in zip(self.operands, given, strict=True) if isinstance(x, Tensor)})

    def describe(self, *operands: Any, **options: Any) -> Description:
        """What a call with these arguments runs on a GPU."""
        bound, static = self._bind(operands, options)
        given = self.seen(bound)
        tensor = next(x for x in given if isinstance(x, Tensor))
        outputs, exactly = self.outputs(given, static), is_deterministic()
        key = partial(key_of, self, self.operands, given, outputs, static, deterministic=exactly)
        return Description(operation=self, key=key, device=tensor.get_device() if tensor.is_cuda else None)

    def seen(self, given: Sequence[Any]) -> tuple[Any, ...]:
        """The operands as cuDNN sees them."""
        return tuple(given) if self.form is None else self.form(tuple(given))

    def outputs(self, given: Sequence[Any], static: dict[str, Any]) -> Outputs:
        """Tensors without data, like the results."""
        assert self._outputs is not None
        bare = [_without_memory(x) if isinstance(x, Tensor) else x for x in given]
        with torch.no_grad():
            found = as_tuple(self._outputs(*bare, **static))
        for number, result in enumerate(found):
            if is_expanded(result.shape, result.stride()):
                got = f"result {number} with strides {result.stride()}"
                raise LayoutError("outputs", got, "no two elements in one place", "Use .contiguous().")
        return found


class _Followed(torch.autograd.Function):
    """A call that autograd follows, in eager mode: saves the dispatcher's two passes."""

    @staticmethod
    def forward(ctx: Any, function: GraphFunction, call: GraphCall, static: dict[str, Any], *given: Any) -> Outputs:
        tensors = [x for x in given if isinstance(x, Tensor)]
        results = tuple(call(tensors, tuple([x for x in given if isinstance(x, (int, float))])))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(results if function.keeps_results else ()))
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        ctx.count, ctx.rest = len(tensors), (function, static, [None if isinstance(x, Tensor) else (x,) for x in given])
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        function, static, rest = ctx.rest
        saved = ctx.saved_tensors  # once: hooks may bring them back from elsewhere
        tensors = iter(saved[: ctx.count])
        given = tuple(next(tensors) if x is None else x[0] for x in rest)
        whole = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else readable(grad)
            for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        found = torch_ops.gradients(function, whole, given, saved[ctx.count :], static, ctx.needs_input_grad[3:])
        return None, None, None, *(None if x else gradient for x, gradient in zip(rest, found, strict=True))


def _as_results(found: Any) -> Sequence[Tensor]:
    return found if isinstance(found, tuple) else (found,)


def _name_of(operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """All that decides a call beside its tensors and the values of its numbers."""
    return (*map(type, operands), *options.items(), *map(type_of, options.values()))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@overload
def graph_op(builder: Callable[..., Any], /) -> GraphFunction: ...


@overload
def graph_op(
    *,
    reference: Callable[..., Any] | None = ...,
    outputs: Callable[..., Any] | None = ...,
    backward: Callable[..., Any] | None = ...,
    keeps_results: bool = ...,
) -> Callable[[Callable[..., Any]], GraphFunction]: ...


def graph_op(
    builder: Callable[..., Any] | None = None,
    /,
    *,
    reference: Callable[..., Any] | None = None,
    outputs: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    keeps_results: bool = True,
) -> GraphFunction | Callable[[Callable[..., Any]], GraphFunction]:
    """Makes a function of tensors out of a function that builds a cuDNN graph.

    The builder is called as `builder(g, *operands, **options)`. `g` is cuDNN's graph with every operation as a method,
    and `g.types` its enumerations; operands are symbolic tensors; options, the builder's keyword-only parameters, are
    plain values. It returns one symbol or a tuple of them, the results. It is run once for each combination of
    layouts, dtypes and options; the plan is cached, stored, tuned, warmed up and explained like any other.

    What is made is called with tensors in the builder's order. A parameter whose default is None may be left out, and
    the builder gets None. Where a number is given in place of a tensor, it is data: one float32 that cuDNN reads at
    each launch, and no part of the plan. It works in eager mode, in CUDA graphs, and under `torch.compile` as one
    operator.

    The builder must depend on nothing but its arguments, so that a plan can be kept: constants, other functions, and
    modules of Python, torch and numpy may be used, anything else is refused. Define it at a module's top level, where
    helper processes can import it.

    Args:
        builder: The builder, where the decorator is used without arguments.
        reference: The same function in plain PyTorch. It serves tensors that are not on a GPU; and unless `outputs`
            is given its results on tensors without data say which shapes, strides and dtypes the results have.
        outputs: Gives empty tensors like the results, for the same arguments.
        backward: `backward(grads, operands, results, **options)` gives one gradient for each operand, None where there
            is none. It may call other graph functions. With a keyword-only parameter `needs` it is told which operands
            require one. Without it, operands must not require grad.
        keeps_results: Whether `backward` gets the results. Without them less memory is kept, and they may be changed in
            place; `results` is empty then.

    Returns:
        The function; or a decorator that makes it.

    Raises:
        OptionError: The builder is no plain function, depends on something from outside, or neither `reference` nor
            `outputs` is given.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> def reference(x, bias, scale):
        ...     return torch.relu(x * scale + bias)
        >>> @cudnn_sdpa.graph_op(reference=reference)
        ... def scale_bias_relu(g, x, bias, scale):
        ...     return g.relu(input=g.add(a=g.mul(a=x, b=scale), b=bias))
        >>> scale_bias_relu(torch.ones(1, 2, 8), torch.zeros(1, 1, 8), 3.0).sum()
        tensor(48.)

    cuDNN's documentation of its graph operations says what it fuses.
    """
    more: dict[str, Any] = {"reference": reference, "outputs": outputs, "backward": backward}
    if builder is None:
        return lambda builder: GraphFunction(builder, **more, keeps_results=keeps_results)
    return GraphFunction(builder, **more, keeps_results=keeps_results)
