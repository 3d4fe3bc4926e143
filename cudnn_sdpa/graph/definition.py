"""Graph definitions: Python functions of symbolic tensors and static options, with a digest of their source."""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib
import inspect
import linecache
import sys
import traceback
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.backend import BuiltGraph, DeviceOptions, GraphBuilder, Results, Symbol
from cudnn_sdpa.graph.diagnostics import locations_in_file
from cudnn_sdpa.graph.key import KeyedOperation, PlanKey, Role
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Modules whose attributes do not change; other modules' attributes would be in no key.
_MODULES = {*sys.stdlib_module_names, "torch", "numpy"}
_CONSTANTS = (bool, int, float, str, bytes, type(None))

#: Operations whose result may have one of several shapes, so that it must be declared; cuDNN checks the declaration.
_DECLARED = ("conv_dgrad", "conv_wgrad", "reduction", "reshape", "resample")


class GraphDefinition(KeyedOperation):
    """An operation: the builder of its graph, and an identity that changes when the builder does.

    The builder is called as ``builder(g, **inputs, **options)``, where `g` is cuDNN's graph, `inputs` are symbolic
    tensors and `options` plain values, all of them out of a `PlanKey`. It returns the graph's outputs, one symbol or
    a tuple, and depends on nothing else. Closures and globals may hold constants, modules and functions of the same
    kind; these are part of the identity, and a builder with any others is rejected.
    """

    def __init__(self, builder: Callable[..., object]) -> None:
        if not isinstance(builder, types.FunctionType):
            expected = "a plain function, on whose source its plans can depend"
            raise OptionError("the graph builder", type(builder).__name__, expected)
        self.__doc__ = builder.__doc__
        self._builder = builder
        #: Whether operands are channels-last where sizes of 1 make the order ambiguous.
        self.channels_last = False
        self.name = f"{builder.__module__}:{builder.__qualname__}"
        # An invalid builder fails at its definition, not at its first call.
        for _ in _identity(builder, seen=set(), complete=False):
            pass

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self._builder)

    def compile(self, key: PlanKey, g: GraphBuilder) -> BuiltGraph:
        """Builds the graph of `key` in `g`, then plans and compiles it.

        The operands' UIDs are 1, 2, … for the inputs, then the outputs, in the order of a launch's pointers. Offsets
        precede the input that they belong to, and are not passed to the builder.
        """
        if _digest(self._builder) != self.digest:
            got, expected = "other constants or functions that it uses", "the same as for its first plan"
            raise OptionError(f"the graph builder {self.name}", got, expected, "Define a new operation instead.")
        known_issues.check(key)
        is_ours = key.operation.startswith("cudnn_sdpa.")
        if not is_ours:
            inferring = InferringBuilder(**g.device_options)
            inferring.check(key, self._build(key, inferring)[1])
        if key.deterministic:
            g.only_deterministic(key.target.sm, key.target.cudnn)
        symbols, results = self._build(key, g)
        for uid, (operand, symbol) in enumerate(zip(key.outputs, results, strict=True), start=1 + len(key.inputs)):
            layout = operand.layout
            g.declare_output(
                symbol,
                uid=uid,
                shape=layout.shape,
                stride=layout.stride,
                dtype=CUDNN_DTYPE_NAMES[layout.dtype],
                ragged=symbols[operand.ragged] if operand.ragged else None,
            )
        try:
            return g.build(key.name)
        except UnsupportedError as error:
            locations = locations_in_file(g.locations, self._builder.__code__.co_filename)
            if not locations or is_ours:
                raise
            reasons = [*error.reasons, f"the graph's operations: {locations}"]  # cuDNN's message names no operation
            raise UnsupportedError(error.what, reasons, error.suggestion) from None

    def _build(self, key: PlanKey, g: GraphBuilder) -> tuple[dict[str, Symbol], tuple[Symbol, ...]]:
        symbols: dict[str, Symbol] = {}
        for uid, operand in enumerate(key.inputs, start=1):
            if operand.role is Role.HOST:
                raise UnsupportedError(key.name, [f"cuDNN reads no array in host memory: {operand}"])
            layout = operand.layout
            symbols[operand.name] = g.declare(
                operand.name,
                uid=uid,
                shape=layout.shape,
                stride=layout.stride,
                dtype=CUDNN_DTYPE_NAMES[layout.dtype],
                host_scalar=operand.role is Role.SCALAR,
                ragged=symbols[operand.ragged] if operand.ragged else None,
            )
        offsets = {operand.ragged for operand in (*key.inputs, *key.outputs)}
        try:
            arguments = {name: symbol for name, symbol in symbols.items() if name not in offsets}
            results = self._builder(g, **arguments, **key.option_values)
        except RuntimeError as error:  # of cuDNN's own builder methods
            raise UnsupportedError(key.name, [f"{error}{_location_of(error, self._builder)}"]) from None
        except (AttributeError, TypeError) as error:  # an unknown method, or wrong arguments
            got = f"{error}{_location_of(error, self._builder)}"
            expected = "calls that the graph and its operations accept"
            raise OptionError(f"the graph builder of {key.name}", got, expected) from error
        return symbols, self._checked(results, key, list(symbols.values()))

    def _checked(self, results: Results, key: PlanKey, operands: Sequence[Symbol]) -> tuple[Symbol, ...]:
        symbols = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        code = self._builder.__code__
        builder = f"the graph builder of {key.name} ({code.co_filename}, line {code.co_firstlineno})"
        count = sum(symbol is not None for symbol in symbols)
        if count != len(symbols) or count != len(key.outputs):
            raise OptionError(builder, f"{count} results", f"{len(key.outputs)}, as the reference gives")
        if len({id(symbol) for symbol in (*operands, *symbols)}) != len(operands) + len(symbols):
            got = "an operand as a result, or one symbol twice"
            raise OptionError(builder, got, "results of operations, each once")
        return symbols

    def __repr__(self) -> str:
        return f"<graph_op {self.name}>"


class InferringBuilder(GraphBuilder):
    """Plans nothing; records the operation behind each symbol, and infers the shapes of results that a user declares.

    cuDNN rejects most impossible shapes. Pointwise operations accept any result shape, though, and read and write out
    of bounds if it is larger than their operands.
    """

    def __init__(self, **device_options: Unpack[DeviceOptions]) -> None:
        self._made_by: dict[int, str] = {}
        super().__init__(**device_options)

    def __getattr__(self, name: str) -> Any:
        method: object = super().__getattr__(name)
        if not callable(method):
            return method

        def call(*operands: object, **options: object) -> object:
            results = method(*operands, **options)
            for symbol in results if isinstance(results, (tuple, list)) else (results,):
                self._made_by[id(symbol)] = name
            return results

        return call

    def check(self, key: PlanKey, results: Sequence[Symbol]) -> None:
        for uid, (operand, symbol) in enumerate(zip(key.outputs, results, strict=True), start=1 + len(key.inputs)):
            layout = operand.layout
            dtype = CUDNN_DTYPE_NAMES[layout.dtype]
            if self._made_by.get(id(symbol), "").startswith(_DECLARED):
                self.declare_output(symbol, uid=uid, shape=layout.shape, stride=layout.stride, dtype=dtype)
            else:
                symbol.set_output(True).set_uid(uid).set_data_type(getattr(self.types.data_type, dtype))
        try:
            self._graph.validate()
        except Exception:  # noqa: BLE001 - building the graph raises it again
            return
        for number, (operand, symbol) in enumerate(zip(key.outputs, results, strict=True)):
            inferred, declared = tuple(symbol.get_dim()), operand.layout.shape
            if inferred and inferred != declared:
                expected = f"shape {inferred}, which its graph gives"
                hint = "reference= or outputs= declares the shapes of results."
                raise ShapeError(f"result {number} of {key.name}", f"shape {declared}", expected, hint)


def _location_of(error: Exception, builder: types.FunctionType) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == builder.__code__.co_filename]
    return f" ({inside[-1].filename}, line {inside[-1].lineno}: {inside[-1].line})" if inside else ""


def find_operation(name: str, *, only_imported: bool = False) -> GraphDefinition:
    """The operation with the import path `name`, "package.module:name".

    With `only_imported`, modules of other packages must be imported already, so that names from files run no code.
    """
    module, _, attribute = name.partition(":")
    if only_imported and module.partition(".")[0] != __name__.partition(".")[0] and module not in sys.modules:
        raise ImportError(f"the module {module} has not been imported")
    operation = getattr(importlib.import_module(module), attribute)
    if not isinstance(operation, GraphDefinition):
        raise OptionError(name, f"{type(operation).__name__}, not a graph_op", "a graph_op")
    return operation


def function_digest(*functions: object) -> str:
    """A digest of these functions, of everything that they use, and of the package's version.

    A function that uses an object without an identity gets a digest that is new in every process.
    """
    digest = hashlib.sha256(__version__.encode())
    for function in functions:
        digest.update(b"\0")
        if not isinstance(function, types.FunctionType):
            name = getattr(function, "__name__", "")
            is_pytorch = function is None or getattr(torch.nn.functional, name, getattr(torch, name, None)) is function
            digest.update((f"{name}" if is_pytorch else uuid.uuid4().hex).encode())
        elif (function.__module__ or "").partition(".")[0] == __name__.partition(".")[0]:
            # Its file holds the graph functions that its gradient calls; the package's version covers the rest.
            digest.update((_source(function.__code__) + _file(function.__code__.co_filename)).encode())
        else:
            try:
                for part in _identity(function, seen=set(), complete=True):
                    digest.update(b"\0" + part.encode())
            except TypeError:
                digest.update(uuid.uuid4().hex.encode())
    return digest.hexdigest()[:16]


def _digest(builder: types.FunctionType) -> str:
    digest = hashlib.sha256(__version__.encode())
    for part in _identity(builder, seen=set(), complete=True):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()[:16]


def _identity(function: types.FunctionType, seen: set[types.FunctionType], *, complete: bool) -> Iterator[str]:
    """Text that changes whenever `function` may compute something else; `complete` refuses names not yet defined."""
    if function in seen:
        return
    seen.add(function)
    code = function.__code__
    yield _source(code)
    if code.co_name == "<lambda>":  # whose source is its whole line
        yield repr((code.co_code, code.co_consts, code.co_names))
    signature = inspect.signature(function, follow_wrapped=False)
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    outside = {name: cell.cell_contents for name, cell in cells}
    for name in _loaded_globals(code):
        if name in function.__globals__:
            outside[name] = function.__globals__[name]
        elif complete and not hasattr(builtins, name):
            got, expected = f"uses {name!r}, which is not defined", "names that are defined when it is first used"
            raise OptionError(f"the graph builder {function.__qualname__}", got, expected)
    for name, value in sorted({**defaults, **outside}.items()):
        yield name
        yield from _identity_of_value(function, name, value, seen, complete=complete)


def _identity_of_value(
    function: types.FunctionType, name: str, value: object, seen: set[types.FunctionType], *, complete: bool
) -> Iterator[str]:
    if isinstance(value, GraphDefinition) and hasattr(value, "token"):
        yield value.token
    elif isinstance(value, types.FunctionType):
        yield from _identity(value, seen, complete=complete)
    elif isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in _MODULES:
        yield value.__name__
    elif isinstance(value, _CONSTANTS):
        yield repr(value)
    elif isinstance(value, (tuple, frozenset)) and all(isinstance(item, _CONSTANTS) for item in value):
        yield repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
    else:
        raise OptionError(
            f"the graph builder {function.__qualname__}",
            f"a builder that uses {name!r}, a {type(value).__name__} from outside",
            "only constants, functions, and modules of Python, torch and numpy: a plan must depend on its key alone",
            "Pass the value as an option instead.",
        )


@functools.cache
def _file(name: str) -> str:
    return "".join(linecache.getlines(name))


@functools.cache
def _source(code: types.CodeType) -> str:
    """The source when the file was first read; much faster than `inspect.getsource`."""
    linecache.checkcache(code.co_filename)  # the file may have been edited and reloaded
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : _last_line(code)]
    # "<string>" is the name of many sources, and Python 3.13 has lines for it.
    return _code_text(code) if code.co_filename.startswith("<") else "".join(lines) or _code_text(code)


def _code_text(code: types.CodeType) -> str:
    """A text that identifies code without a source file, such as that of an interactive prompt or `exec`."""
    constants = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return repr((code.co_code, constants, code.co_names, getattr(code, "co_exceptiontable", b"")))


def _last_line(code: types.CodeType) -> int:
    inner = [_last_line(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return max([code.co_firstlineno, *inner, *(line for _, _, line in code.co_lines() if line is not None)])


@functools.cache
def _loaded_globals(code: types.CodeType) -> frozenset[str]:
    """The global names that code looks up; cached, since this takes milliseconds and code does not change."""
    names = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME" and str(instruction.argval).partition(".")[0] not in _MODULES:
            raise OptionError(
                f"the graph builder {code.co_name}",
                f"a builder that imports {instruction.argval!r}",
                "imports of Python, torch and numpy only: anything else would be in no key",
                "Pass the value as an option instead.",
            )
    return frozenset(names).union(*(_loaded_globals(c) for c in code.co_consts if isinstance(c, types.CodeType)))
