"""The GPU that calls on CPU tensors are checked against: what it rejects raises on the CPU too."""

from __future__ import annotations

import functools
import importlib.metadata
import os

from cudnn_sdpa.errors import ArgumentError, OptionError, UnsupportedError
from cudnn_sdpa.graph.target import Target, bundled_capabilities
from cudnn_sdpa.settings import Override, Overrides

#: Environment variable that names the GPU.
VARIABLE = "CUDNN_SDPA_CPU_CHECKS"
DEFAULT = "h200"
#: Values of the variable that disable the checks, in addition to an empty one.
OFF = ("none", "off")
#: What follows the name of a GPU, after a comma, to accept dtypes that it refuses.
ANY_DTYPE = "any-dtype"

#: The cuDNN version assumed if none is installed: the one with documented GPU results.
ASSUMED_CUDNN = 91900


class CpuChecksUse(Override["str | None"]):
    """The result of `cpu_checks`: ignore it, or use it in a `with` statement to restore the previous setting.

    Attributes:
        target: The name of the GPU that CPU tensors are checked against, with ",any-dtype" behind it if their dtypes
            are not; None for no checks.
    """

    def __init__(self, target: str | None) -> None:
        self.target = target
        super().__init__(_overrides, target)

    def __enter__(self) -> str | None:
        self._enter()
        return self.target


class _Setting:
    """The setting of this process, as `cpu_checks` takes it; empty if the environment names no GPU that is known."""

    value: str | None = ""


def cpu_checks(target: str | None) -> CpuChecksUse:
    """Sets the GPU that attention calls on CPU tensors are checked against.

    The CPU reference in plain PyTorch accepts more than any kernel. So that code that works on the CPU also works on a
    GPU, layouts and options that cuDNN rejects on the named GPU raise the same errors on the CPU, by the rules of
    `support`. The cuDNN version is that of the installed wheel, or 9.19. Wrong values, such as lengths beyond a tensor,
    always raise on the CPU.

    So attention takes bfloat16 and float16 on the CPU, as on a GPU. With ",any-dtype" behind the name, float32 and
    float64 count as bfloat16, to debug mathematics at higher precision.

    The rules do not apply while `fallback("torch")` is in force. Norms, gated activations, convolutions and users'
    graphs have none but for addresses, which must be multiples of 16 bytes: missing kernels show when a plan is built.

    The setting is process-wide, and ends with the `with` statement if it is used in one. Without a call, the
    environment variable `CUDNN_SDPA_CPU_CHECKS` names the GPU, which is read when the package is imported; "none",
    "off" or an empty value is None.

    Args:
        target: The name of a GPU, such as "h200", "a100" or "b200", or for any dtype "h200,any-dtype"; None to accept
            everything that the reference can compute.

    Returns:
        A context manager whose value is the name.

    Raises:
        OptionError: The GPU is unknown.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> q = k = v = torch.randn(1, 2, 8, 64)  # float32
        >>> cudnn_sdpa.sdpa(q, k, v)
        Traceback (most recent call last):
        cudnn_sdpa.errors.DtypeError: q: got float32; expected float16 or bfloat16 on h200. ...
        >>> with cudnn_sdpa.cpu_checks("h200,any-dtype"):
        ...     cudnn_sdpa.sdpa(q, k, v).shape
        torch.Size([1, 2, 8, 64])
        >>> q = k = v = torch.randn(1, 2, 8, 12)  # a head dim that no kernel has
        >>> with cudnn_sdpa.cpu_checks(None):
        ...     cudnn_sdpa.sdpa(q, k, v).shape
        torch.Size([1, 2, 8, 12])
    """
    return CpuChecksUse(_checked("target", target))


def active_name() -> str | None:
    value = _value()
    return None if value is None else value.partition(",")[0]


def checks_dtypes() -> bool:
    value = _value()
    return value is not None and ANY_DTYPE not in value


def _value() -> str | None:
    if _Setting.value == "":
        _Setting.value = of_environment()  # raises as long as it names none
    return _Setting.value


def _put(value: str | None) -> None:
    _Setting.value = value


def of_environment() -> str | None:
    """The name that the environment has for it."""
    return _checked(VARIABLE, os.environ.get(VARIABLE, DEFAULT) or None)


def _read_environment() -> None:
    """Sets what the environment names: at import, as Dynamo could trace neither a lock nor the environment later."""
    try:
        _put(of_environment())
    except OptionError:  # raised by the first call, as an import should not fail for a setting
        _put("")


_overrides = Overrides(lambda: _Setting.value, _put)


def active() -> Target | None:
    name = active_name()
    return None if name is None else target_of(name)


def _checked(argument: str, name: object) -> str | None:
    if name is None or (isinstance(name, str) and name.lower() in OFF):
        return None
    gpu, comma, any_dtype = (part.strip().lower() for part in (name if isinstance(name, str) else "").partition(","))
    if gpu not in bundled_capabilities() or any_dtype != (ANY_DTYPE if comma else ""):
        known = ", ".join(map(repr, bundled_capabilities()))
        expected = f"one of {known}, with ',{ANY_DTYPE}' behind it to accept any dtype, or none for no checks"
        raise OptionError(argument, repr(name), expected)
    return gpu + comma + any_dtype


@functools.cache
def target_of(name: str) -> Target:
    properties = (("deviceVer", 10 * bundled_capabilities()[name]), ("multiProcessorCount", 0))
    return Target(properties, installed_cudnn(), "", f"{name} (checked on the CPU)")


@functools.cache
def installed_cudnn() -> int:
    """The version of cuDNN's wheel as a number, 91900 for 9.19.0, without loading it."""
    for wheel in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            major, minor, patch = (int(part) for part in importlib.metadata.version(wheel).split(".")[:3])
        except (importlib.metadata.PackageNotFoundError, ValueError):
            continue
        return 10000 * major + 100 * minor + patch
    return ASSUMED_CUDNN


def note() -> str:
    name = active_name()
    return "" if name is None else f"(CPU tensors are checked for {name}; {VARIABLE}=none lifts this)"


def note_on_dtypes() -> str:
    name = active_name()
    return f"(The dtypes of CPU tensors are checked for {name}; {VARIABLE}={name},{ANY_DTYPE} lifts this)"


def for_gpu(error: ArgumentError | UnsupportedError) -> ArgumentError | UnsupportedError:
    if isinstance(error, UnsupportedError):
        return type(error)(f"{error.what} {note()}", error.reasons, error.suggestion)
    return type(error)(error.argument, error.got, error.expected, f"{error.hint} {note()}".lstrip())


_read_environment()
