"""`graph_op`: custom fused cuDNN operations, called like any function of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
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
from cudnn_sdpa.fused.checks import check_savable, check_strided, shown
from cudnn_sdpa.fused.fast_path import FastPath
from cudnn_sdpa.fused.torch_ops import Options, Outputs, Value, as_tuple
from cudnn_sdpa.graph.definition import GraphOp, function_digest
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES, is_expanded
from cudnn_sdpa.graph.symbolic_shapes import is_compiling
from cudnn_sdpa.graph.target import Target

#: Larger integers overflow float32.
_MAX_NUMBER = 2**127
_NUMBERS = (float, int)


class GraphFunction(GraphOp):
    """A fused cuDNN operation as a function of tensors; made by `graph_op`.

    Attributes:
        operands: Names of the builder's tensors and numbers, in its order.
        options: The static options with their defaults; `inspect.Parameter.empty` where there is none.
        reference: The equivalent function in plain PyTorch, if there is one.
        backward: Returns the gradients, if the function is differentiable.
        keeps_results: Whether `backward` gets the results; otherwise they are not saved.
        takes_needs: Whether `backward` has the parameter `needs`.
        token: The name by which the torch operator finds it.
        form: Views the operands, and thereby the results, in a shape for which cuDNN has a faster kernel; None if there
            is none. It is called when a plan is needed, with plain sizes; sizes in a compiler may be symbolic.
    """

    def __init__(
        self,
        builder: Callable[..., object],
        *,
        reference: Callable[..., object] | None = None,
        outputs: Callable[..., object] | None = None,
        backward: Callable[..., object] | None = None,
        keeps_results: bool = True,
    ) -> None:
        super().__init__(builder)
        if reference is None and outputs is None:
            expected = "reference=, the function in plain PyTorch, or outputs=, which returns empty results"
            raise OptionError(f"graph_op {builder.__name__}", "neither reference= nor outputs=", expected)
        self.__name__ = builder.__name__
        self.reference, self._outputs, self.backward = reference, outputs or reference, backward
        self.keeps_results = keeps_results
        self.form: Callable[[tuple[Any, ...]], tuple[Value, ...]] | None = None
        self.takes_needs = backward is not None and "needs" in inspect.signature(backward).parameters
        parameters = list(inspect.signature(builder).parameters.values())[1:]
        self.operands = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        for p in parameters:
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.default not in (p.empty, None):
                got, hint = f"the default {shown(p.default)}", f"Make {p.name!r} keyword-only."
                raise OptionError(f"{p.name} of {builder.__name__}", got, "an operand without a default but None", hint)
        self._optional = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is None}
        if len(self.operands) + len(self.options) != len(parameters):
            got = "a * parameter or a positional-only one"
            raise OptionError(f"the graph builder {builder.__name__}", got, "no * parameters, and names for all others")
        self.token = torch_ops.register(self, function_digest(builder, backward, reference, outputs))
        self._fast_path = FastPath()

    def __call__(self, *operands: Value, **options: object) -> Any:
        """The results for these operands: tensors, numbers, or None for optional ones.

        Raises:
            ArgumentError: An argument is wrong.
            UnsupportedError: cuDNN has no plan for it, or tensors are not on a GPU and there is no reference.
        """
        if is_compiling():
            values, static = self._bind(operands, options)
            self._check_gradient(values)
            results: Sequence[Tensor] = torch_ops.run(self, values, static)
        else:
            results = self._run_cached(operands, options) or self._run_checked(operands, options)
        return results[0] if len(results) == 1 else tuple(results)

    def _run_cached(self, operands: Sequence[Any], options: Options) -> Sequence[Tensor] | None:
        """The results of a repeated call: saves checks, keys and the dispatcher, 70 µs."""
        if options and not options.keys() <= self.options.keys():
            return None  # an operand is passed by name
        tensors = [x for x in operands if isinstance(x, Tensor)]
        try:
            numbers = tuple([float(x) for x in operands if type(x) in _NUMBERS])
        except OverflowError:  # the checks raise
            return None
        trains = needs_gradient(*tensors)
        call = self._fast_path.find(tensors, (trains, *_option_signature(operands, options)), trains=trains)
        if call is None:
            return None
        if not trains:
            return call(tensors, numbers)
        values = (*operands, *(None,) * (len(self.operands) - len(operands)))  # checked when the call was added
        results: Sequence[Tensor] = _Differentiable.apply(self, call, {**self.options, **options}, *values)  # type: ignore[no-untyped-call]
        return as_tuple(results)

    def _run_checked(self, operands: Sequence[Value], options: Options) -> Sequence[Tensor]:
        """The results of an unchecked call; later calls like it take the fast path."""
        values, static = self._bind(operands, options)
        self._check_gradient(values)
        values = tuple(plain(x) if isinstance(x, Tensor) and is_lazy(x) else x for x in values)
        results = torch_ops.run(self, values, static)
        tensors = [x for x in operands if isinstance(x, Tensor)]
        in_order = options.keys() <= self.options.keys() and bool(tensors) and tensors[0].is_cuda
        if in_order and all(x is None or isinstance(x, Tensor) or type(x) in _NUMBERS for x in operands):
            if 0 in (x.numel() for x in tensors) or not can_bypass_dispatcher(*tensors):
                return results
            trains = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            signature = (trains, *_option_signature(operands, options))
            self._fast_path.add(tensors, signature, torch_ops.prepared(self, values, static))
        return results

    def _check_gradient(self, values: Sequence[Value]) -> None:
        trains = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)
        if trains and self.backward is None:
            reasons = ["an operand requires grad, and the operation has no backward="]
            raise UnsupportedError(f"the gradient of {self.__name__}", reasons, "torch.no_grad()")

    def _bind(self, operands: Sequence[Value], options: Options) -> tuple[tuple[Value, ...], Options]:
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
                got = "a second value" if name in self.operands else "an argument that does not exist"
                raise OptionError(name, got, f"{self.__name__}({', '.join((*self.operands, *self.options))})")
        for name, value in static.items():
            if value is inspect.Parameter.empty:
                raise OptionError(name, "nothing", f"a value: {self.__name__} has no default for this option")
            torch_ops.check_option(name, value)
        values = tuple(by_name.get(name) for name in self.operands)
        self._check(values)
        autograd_checks.refuse_tangents(dict(zip(self.operands, values, strict=True)))
        autograd_checks.refuse_transforms(self.__name__, *values, loops=False)
        return values, static

    def _check(self, values: Sequence[object]) -> None:
        tensors = [x for x in values if isinstance(x, Tensor)]
        if not tensors:
            raise OptionError(self.operands[0], "no tensor at all", "a tensor among the operands")
        for name, value in zip(self.operands, values, strict=True):
            if value is None and name not in self._optional:
                raise OptionError(name, "None", "a tensor or a number")
            if isinstance(value, Tensor):
                check_strided(name, value)
                if value.device != tensors[0].device:
                    raise DeviceError(name, str(value.device), f"{tensors[0].device}, the device of the first tensor")
                if value.dtype not in CUDNN_DTYPE_NAMES:
                    raise DtypeError(name, str(value.dtype), "a dtype that cuDNN supports")
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise OptionError(name, type(value).__name__, "a tensor or a number")
            elif isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise OptionError(name, shown(value), "a number that float32 can represent")
        check_savable(**{name: x for name, x in zip(self.operands, values, strict=True) if isinstance(x, Tensor)})

    def describe(self, *operands: Value, **options: object) -> Description:
        """What a call with these arguments runs on a GPU."""
        bound, static = self._bind(operands, options)
        values = self.in_form(bound)
        tensor = next(x for x in values if isinstance(x, Tensor))
        outputs, deterministic = self.outputs(values, static), is_deterministic()

        def key(target: Target, device: int | None) -> PlanKey:
            return key_of(
                self,
                self.operands,
                values,
                outputs,
                options=static,
                target=target,
                device=device,
                deterministic=deterministic,
            )

        return Description(operation=self, key=key, device=tensor.get_device() if tensor.is_cuda else None)

    def in_form(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """The operands in the shape for which cuDNN has a faster kernel."""
        return tuple(values) if self.form is None else self.form(tuple(values))

    def outputs(self, values: Sequence[Value], static: Options) -> Outputs:
        """Meta tensors like the results."""
        assert self._outputs is not None
        meta = [_without_memory(x) if isinstance(x, Tensor) else x for x in values]
        with torch.no_grad():
            results = as_tuple(self._outputs(*meta, **static))
        for number, result in enumerate(results):
            if is_expanded(result.shape, result.stride()):
                got = f"result {number} with strides {result.stride()}"
                raise LayoutError("outputs", got, "an address of its own for every element", "Use .contiguous().")
        return results


class _Differentiable(torch.autograd.Function):
    """A call that autograd records, in eager mode: saves the dispatcher's two passes."""

    @staticmethod
    def forward(ctx: Any, function: GraphFunction, call: GraphCall, static: Options, *values: Value) -> Outputs:
        tensors = [x for x in values if isinstance(x, Tensor)]
        results = tuple(call(tensors, tuple([x for x in values if isinstance(x, (int, float))])))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *(results if function.keeps_results else ()))
        ctx.function, ctx.static = function, static
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        ctx.count, ctx.values = len(tensors), [_SAVED if isinstance(x, Tensor) else x for x in values]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: hooks may load them
        tensors = iter(saved[: ctx.count])
        values = tuple(next(tensors) if x is _SAVED else x for x in ctx.values)
        all_grads = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else readable(grad)
            for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
        ]
        _, _, _, *needs = ctx.needs_input_grad  # function, call, options, then the operands
        grad_inputs = torch_ops.gradients(
            ctx.function, all_grads, values, results=saved[ctx.count :], static=ctx.static, needs=tuple(needs)
        )
        value_gradients = (grad if x is _SAVED else None for x, grad in zip(ctx.values, grad_inputs, strict=True))
        return None, None, None, *value_gradients


#: Stands for a tensor that autograd saves.
_SAVED = object()


def _option_signature(operands: Sequence[object], options: Options) -> tuple[Hashable, ...]:
    """Everything that determines a call except its tensors and the values of its numbers."""
    return (*map(type, operands), *options.items(), *map(type_of, options.values()))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@overload
def graph_op(builder: Callable[..., object], /) -> GraphFunction: ...


@overload
def graph_op(
    *,
    reference: Callable[..., object] | None = ...,
    outputs: Callable[..., object] | None = ...,
    backward: Callable[..., object] | None = ...,
    keeps_results: bool = ...,
) -> Callable[[Callable[..., object]], GraphFunction]: ...


def graph_op(
    builder: Callable[..., object] | None = None,
    /,
    *,
    reference: Callable[..., object] | None = None,
    outputs: Callable[..., object] | None = None,
    backward: Callable[..., object] | None = None,
    keeps_results: bool = True,
) -> GraphFunction | Callable[[Callable[..., object]], GraphFunction]:
    """Makes a function of tensors from a function that builds a cuDNN graph.

    The builder is called as `builder(g, *operands, **options)`. `g` is cuDNN's graph with every operation as a method,
    and `g.types` its enumerations; operands are symbolic tensors; options, the builder's keyword-only parameters, are
    plain values. It returns one symbol or a tuple of them, the results. It runs once for each combination of layouts,
    dtypes and options; the plan is cached, stored, tuned, warmed up and explained like any other.

    Call the function with tensors in the builder's order. A parameter whose default is None may be left out; the
    builder then gets None. A number in place of a tensor is data: one float32 that cuDNN reads at each launch, and no
    part of the plan. The function works in eager mode, in CUDA graphs, and under `torch.compile` as one operator.

    The builder must depend on nothing but its arguments, so that a plan can be cached: it may use constants, other
    functions, and modules of Python, torch and numpy; anything else is refused. Define it at a module's top level, so
    that helper processes can import it.

    Args:
        builder: The builder, if the decorator is used without arguments.
        reference: The same function in plain PyTorch. It serves tensors that are not on a GPU. Unless `outputs` is
            given, it is also run on meta tensors to get the shapes, strides and dtypes of the results.
        outputs: Returns empty tensors like the results, for the same arguments.
        backward: `backward(grads, operands, results, **options)` returns one gradient for each operand, None where
            there is none. It may call other graph functions. A keyword-only parameter `needs` gets which operands
            require a gradient. Without `backward`, operands must not require grad.
        keeps_results: Whether `backward` gets the results. Otherwise `results` is empty, less memory is saved, and the
            results may be modified in place.

    Returns:
        The function; or a decorator that makes it.

    Raises:
        OptionError: The builder is not a plain function, depends on something from outside, or neither `reference` nor
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

    cuDNN's documentation of its graph operations lists what it can fuse.
    """
    make = partial(GraphFunction, reference=reference, outputs=outputs, backward=backward, keeps_results=keeps_results)
    return make if builder is None else make(builder)
