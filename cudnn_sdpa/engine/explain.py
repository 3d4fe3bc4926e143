"""`explain`: what a call would run, or why it cannot, without running it."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import NoReturn

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.engine import autograd_checks, sharding
from cudnn_sdpa.engine.native import loader
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.graph import backend, known_issues
from cudnn_sdpa.graph.definition import GraphDefinition, find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.graph.target import Target, live_target, load_properties
from cudnn_sdpa.offline.planner import OfflinePlan, plan_offline
from cudnn_sdpa.plans import shape_policy
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.plan import Plan
from cudnn_sdpa.plans.program_plan import Program, ProgramOp
from cudnn_sdpa.plans.providers import CUDNN

#: The environment variable that names the GPU of calls without one.
TARGET_VARIABLE = "CUDNN_SDPA_TARGET"


@dataclass(frozen=True)
class Description:
    """The launches of one call, for `explain`.

    Attributes:
        key: Gives the key of its plan for a target and a device; raises UnsupportedError if there can be none.
        device: Index of the GPU that the tensors are on; None for tensors elsewhere.
        is_empty: Whether there is nothing to compute, hence no plan.
        extra_kernels: Kernels that run in addition to the plan, as text; none if there is nothing to compute.
        choice: Why this kernel, where there are several.
        backward: Its gradient, if an input requires grad.
        bucket: Returns the key of its bucket's plan, None if it fits none; see `shape_policy`.
        verify: Runs the call and the reference, and returns the relative error of each result, and of the gradients if
            requested.
        choose: Gives the choice on a target.
        on_target: Gives another description for a target on which other kernels run; None if it is the same.
    """

    operation: GraphDefinition
    key: Callable[[Target, int | None], PlanKey]
    device: int | None
    is_empty: bool = False
    extra_kernels: list[str] = field(default_factory=list)
    choice: str = ""
    backward: Description | None = None
    bucket: Callable[[Target, int | None], PlanKey | None] | None = None
    verify: Callable[[bool], dict[str, float]] | None = None
    choose: Callable[[Target], str] | None = None
    on_target: Callable[[Target], Description | None] | None = None

    def __post_init__(self) -> None:
        if self.is_empty:
            object.__setattr__(self, "extra_kernels", [])

    def for_target(self, target: Target) -> Description:
        found = (self.on_target and self.on_target(target)) or self
        return replace(found, choice=found.choose(target)) if found.choose else found

    @classmethod
    def refused(cls, operation: GraphDefinition, error: UnsupportedError, device: int | None) -> Description:
        def refuse(*_: object) -> NoReturn:
            raise error

        return cls(operation, refuse, device)


_describers: dict[Callable[..., object], Callable[..., Description]] = {}

#: Modules that describe the functions of each kind; imported on first use.
_DESCRIBING_MODULES = (
    "cudnn_sdpa.attention.dense.explain",
    "cudnn_sdpa.attention.varlen.explain",
    "cudnn_sdpa.attention.paged.explain",
    "cudnn_sdpa.attention.paged_varlen.explain",
    "cudnn_sdpa.attention.fp8.explain",
    "cudnn_sdpa.fused.explain",
    "cudnn_sdpa.kernels.explain",
)


def describes(
    function: Callable[..., object], ways: sharding.Strategies | None = None
) -> Callable[[Callable[..., Description]], Callable[..., Description]]:
    """Registers the decorated function as what describes calls of `function`.

    It takes the parameters of `function` by name, with their defaults filled in; what it becomes is called as
    `function` is. Calls on DTensors, which may be divided in these ways, are described as one rank makes them.
    """
    signature = inspect.signature(function)

    def register(describer: Callable[..., Description]) -> Callable[..., Description]:
        @wraps(function)
        def describe(*args: object, **kwargs: object) -> Description:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                function(*args, **kwargs)  # Python refuses this in its own words, before anything runs
                raise
            given.apply_defaults()
            arguments = given.arguments
            if ways is not None and sharding.has_dtensor(*arguments.values()):
                arguments = sharding.local_arguments(function.__name__, ways, arguments)
            return describer(**arguments)

        _describers[function] = describe
        return describe

    return register


def describer_of(function: Callable[..., object]) -> Callable[..., Description] | None:
    functions()
    own: Callable[..., Description] | None = getattr(function, "describe", None)  # graph functions describe themselves
    return _describers.get(function, own)


def named(name: str) -> Callable[..., object] | None:
    return next((each for each in functions() if each.__name__ == name), None)


def functions() -> list[Callable[..., object]]:
    """The functions that can be explained, graph functions left out."""
    for name in _DESCRIBING_MODULES:
        importlib.import_module(name)
    return list(_describers)


def described_functions() -> list[str]:
    return sorted(function.__name__ for function in functions())


@dataclass
class Explanation:
    """The answer of `explain`; `print` it or its `details`, or read the fields.

    Attributes:
        call: Name of the function.
        target: The GPU that the answer is for.
        offline: Whether that GPU is not in this machine, so that a helper process planned for it.
        supported: Whether there is a plan, or nothing to compute.
        reasons: Every known reason why there is no plan.
        suggestion: The nearest thing that works.
        key: The plan's key, as text.
        provider: Who wrote the plan's kernels: "cudnn", or "own" for the library's own.
        engine: cuDNN's engine.
        knobs: The engine's settings.
        workspace: Bytes that a launch allocates in addition to its outputs.
        build_seconds: Time for planning and compiling, or for loading.
        loaded: Whether the plan came from the plan store.
        cached: Whether the plan was in the cache before.
        bucket: Unless the shape policy is "exact", the key of the bucket's plan that serves the call until it has an
            exact-shape plan.
        extra_kernels: Kernels that run in addition to the plan.
        choice: Why this kernel serves the call, where there are several.
        known_issues: Bugs of this cuDNN that the plan works around.
        on_gpu: Why a plan built on the GPU would be better than this one, which was made without it; usually empty.
        native: On this machine's GPU, whether calls go through the native module, and why not.
        launched: There too, with `CUDNN_SDPA_RECORDED`: who launches its plan, and why, or that it is recorded.
        backward: The same of the gradient, if an input requires grad; its versions and libraries are left empty.
        errors: With `verify`, the relative error of each result against the reference in float64.
        versions: Versions of this package and its dependencies.
        libraries: The file that each NVIDIA library was loaded from, in the process that planned.
    """

    call: str
    target: str
    offline: bool
    supported: bool = True
    reasons: list[str] = field(default_factory=list)
    suggestion: str = ""
    key: str = ""
    provider: str = ""
    engine: str = ""
    knobs: dict[str, int] = field(default_factory=dict)
    workspace: int = 0
    build_seconds: float = 0.0
    loaded: bool = False
    cached: bool = False
    bucket: str = ""
    extra_kernels: list[str] = field(default_factory=list)
    choice: str = ""
    known_issues: list[str] = field(default_factory=list)
    on_gpu: str = ""
    native: str = ""
    launched: str = ""
    backward: Explanation | None = None
    errors: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)

    def decline(self, error: UnsupportedError) -> None:
        """Records why there is no plan."""
        self.supported, self.reasons, self.suggestion = False, error.reasons, error.suggestion

    def to_dict(self) -> JsonObject:
        """The fields as plain values, JSON-ready."""
        return asdict(self)

    @property
    def details(self) -> str:
        """Everything that printing shows, plus the full keys, which take hundreds of characters each."""
        return self._report(with_keys=True)

    def __str__(self) -> str:
        return self._report(with_keys=False)

    def _report(self, *, with_keys: bool) -> str:
        where = "planned without the GPU" if self.offline else "on this machine's GPU"
        lines = [f"{self.call} for {self.target}, {where}"]
        if not self.supported:
            lines += ["  not supported:", *(f"    - {reason}" for reason in self.reasons)]
            lines += [f"  what works {self.suggestion}"] if self.suggestion else []
        elif self.engine:
            knobs = " ".join(f"{name}={value}" for name, value in self.knobs.items())
            how = "loaded from the plan store" if self.loaded else "built"
            built = f"in the cache, {how} in" if self.cached else f"{how} now in"
            lines += [
                f"  provider   {self.provider}",
                f"  engine     {self.engine} {knobs}".rstrip(),
                f"  workspace  {self.workspace} bytes",
                f"  plan       {built} {self.build_seconds * 1e3:.0f} ms",
            ]
        else:
            lines.append("  nothing to compute: no plan, the result is filled in")
        lines += [f"  key        {self.key}"] if self.key and with_keys else []
        if self.bucket:
            in_full = f": {self.bucket}" if with_keys else ""
            lines.append(f'  until then the generic plan of its bucket, unless shape_policy("exact") is set{in_full}')
        lines += [f"  choice     {self.choice}"] if self.choice else []
        lines += [f"  also runs  {note}" for note in self.extra_kernels]
        lines += [f"  avoids     {issue}" for issue in self.known_issues]
        lines += [f"  but        {self.on_gpu}"] if self.on_gpu else []
        lines += [f"  through    {self.native}"] if self.native else []
        lines += [f"  launched   {self.launched}"] if self.launched else []
        lines += [f"  error      {name}: {error:.1e}" for name, error in self.errors.items()]
        lines += [] if self.backward is None else self.backward._report(with_keys=with_keys).splitlines()
        if self.versions:
            lines.append(f"  versions   {', '.join(f'{name} {version}' for name, version in self.versions.items())}")
        files: dict[str, list[str]] = {}
        for path in map(Path, self.libraries.values()):
            files.setdefault(str(path.parent), []).append(path.name)
        lines += [f"  loaded     {', '.join(names)} from {folder}" for folder, names in files.items()]
        return "\n".join(lines)


def explain(
    function: Callable[..., object] | str, *args: object, verify: bool = False, **kwargs: object
) -> Explanation:
    """Shows what a call would run: its plan's key, engine and workspace, or every reason why there is no plan.

    If an input requires grad, the same of its gradient. With DTensors, it shows the call that this rank makes.

    With CUDA tensors the plan comes from the cache, or is built and cached. With CPU tensors the answer is for a GPU
    that need not be present, planned by the real cuDNN in a helper process: an H200, or the GPU in the environment
    variable `CUDNN_SDPA_TARGET`, which may be the path of a cuDNN device-properties JSON file.

    Args:
        function: A function of this library, such as `sdpa`, or its name. PyTorch's `scaled_dot_product_attention` is
            explained as the function of the same name here.
        *args: Its arguments.
        verify: Also run it, forward and for inputs that require grad backward if that is supported, and compare with
            the reference in float64, whose memory grows with Sq × Skv.
        **kwargs: Its keyword arguments.

    Returns:
        An `Explanation`; `print` shows it, and its `details` with the keys in full.

    Raises:
        OptionError: `function` cannot be explained, or `verify` is used with dropout.
        ArgumentError: The call's arguments are wrong, as when calling it.
        TypeError: Their names or number are wrong.
        PlanBuildError: With CUDA tensors, the plan is missing and `no_plan_builds` is in force.
        OfflineError: No helper process can plan here, for example without a C compiler.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = torch.empty(1, 8, 128, 512, dtype=torch.bfloat16, requires_grad=True)
        >>> cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, q, q).backward.supported  # no gradients for so large a head dim
        False
    """
    return explained(function, args, kwargs, verify=verify)


def explained(
    function: Callable[..., object] | str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    verify: bool = False,
    target: str | None = None,
) -> Explanation:
    """The explanation for `target`, if tensors are not on a GPU."""
    if function is autograd_checks.PYTORCHS:
        function = autograd_checks.PYTORCHS.__name__
    called = named(function) if isinstance(function, str) else function
    describer = None if called is None else describer_of(called)
    if called is None or describer is None:
        name = repr(function) if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
        raise OptionError("function", name, "one of " + ", ".join(described_functions()))
    description = describer(*args, **kwargs)
    where = _target_of(description.device, target)
    description = description.for_target(where[0])
    result = _explain(called.__name__, description, *where)
    libraries = {"torch": str(Path(torch.__file__).parent), "cudnn": str(Path(str(backend.cudnn().__file__)).parent)}
    result.libraries = libraries | result.libraries
    if description.backward is not None:
        backward = description.backward.for_target(where[0])
        result.backward = _explain(f"gradient of {called.__name__}", backward, *where)
        result.backward.versions, result.backward.libraries = {}, {}
    if verify and description.verify is not None and result.supported:
        result.errors = description.verify(result.backward is not None and result.backward.supported)
    return result


def _target_of(device: int | None, name: str | None) -> tuple[Target, backend.DeviceProperties | None]:
    """The GPU that an answer is for, and its properties if that GPU is not in this machine."""
    if device is not None:
        return live_target(device), None
    of_environment = (os.environ.get(TARGET_VARIABLE) or "h200", TARGET_VARIABLE)
    properties = load_properties(*(of_environment if name is None else (name,)))
    return Target.from_properties(properties), properties


def _explain(
    name: str, description: Description, gpu: Target, properties: backend.DeviceProperties | None
) -> Explanation:
    device = description.device
    versions = {
        "cudnn_sdpa": __version__,
        "cuDNN": backend.version_string(gpu.cudnn),
        "nvidia-cudnn-frontend": gpu.frontend,
        "torch": str(torch.__version__),
    }
    result = Explanation(
        call=name,
        target=str(gpu),
        offline=device is None,
        extra_kernels=description.extra_kernels,
        choice=description.choice,
        versions=versions,
    )
    if not description.is_empty:
        try:
            _plan(result, _key(result, description, gpu, device), description.operation, properties)
        except UnsupportedError as error:
            result.decline(error)
    if device is not None:
        result.libraries |= backend.loaded_libraries()
    return result


def _plan(
    result: Explanation, key: PlanKey, operation: GraphDefinition, properties: backend.DeviceProperties | None
) -> None:
    """Describes the plan of a key: on this machine's GPU, of others' kernels than cuDNN's elsewhere, or a helper's."""
    if key.provider != operation.provider:
        operation = find_operation(key.operation)
    plan: Plan | OfflinePlan | Program
    if properties is None:
        result.cached = plan_cache.peek(key) is not None
        plan = plan_cache.get(key, partial(build_plan, operation), to_use=False)
        result.build_seconds, result.loaded, result.native = plan.build_seconds, plan.loaded, loader.status()
        result.launched = _launched(plan)
    elif isinstance(operation, ProgramOp):
        known_issues.check(key)
        plan = operation.program(key)
    else:
        plan = plan_offline(key, properties)
        result.build_seconds, result.on_gpu, result.libraries = plan.build_seconds, plan.note, plan.libraries
    result.engine, result.knobs, result.workspace = plan.engine, dict(plan.knobs), plan.workspace


def _launched(plan: Plan) -> str:
    """Whether a plan is launched as recorded; empty for own kernels, whose launches are not."""
    if not plan.can_be_recorded:
        return ""
    if loader.recorded_mode() == loader.OFF:
        return f"by {plan.launched_by}, because {loader.RECORDED_VARIABLE} is {loader.OFF}"
    if plan.recorder is not None:
        return str(plan.recorder)
    why = "C++ has not launched it yet" if loader.module() else f"calls go through {loader.status()}"
    return f"by {plan.launched_by}, because {why}"


def _key(result: Explanation, description: Description, target: Target, device: int | None) -> PlanKey:
    key = description.key(target, device)
    result.key, result.provider = str(key), key.provider or CUDNN
    result.known_issues = [str(issue) for issue in known_issues.concerning(key)]
    if description.bucket is not None and key.provider is None and shape_policy.active() != shape_policy.EXACT:
        of_bucket = description.bucket(target, device)
        result.bucket = "" if of_bucket is None else str(of_bucket)
    return key


__all__ = ["Explanation", "explain"]
