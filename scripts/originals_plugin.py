"""A pytest plugin that runs the originals' own tests on `cudnn_sdpa.compat`; `originals.py` starts it.

What raises `UnsupportedError`, and what our modules lack, skips the test that calls it, with the reason. On the CPU,
"cuda" means "cpu", where our functions run the reference; large tensors, streams and graphs skip a test.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import platform
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from originals import ORIGINALS, SOURCES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

import cudnn_sdpa
from cudnn_sdpa.compat import flash_attn, flash_attn_interface, flashinfer, xformers
from cudnn_sdpa.errors import DtypeError, UnsupportedError

#: Tests of what is not ours, by a part of their names.
NOT_OURS = {
    "generator_arg": "of FlashAttention's operators",
    "flash3_bw_compatibility": "of FlashAttention's operators",
    "flash_attn_combine": "it is merge_states here",
    "num_splits": "of FlashAttention's heuristics",
    "table_bounds": "of messages of FlashAttention's operators",
    "test_tensor_core_decode_rejects_mismatched_q_len": "drafts need no tensor cores here, and messages are others",
    "torch_compile_cuda_graph": "it imports flashinfer in a process of its own",
    "head_dim_512": "head dims are at most 256",
    "smem": "head dims are at most 256",
    "nvfp4": "no kernel reads NVFP4",
    "unsupported_dropout_combine": "of xFormers' operators",
    "splitk_rowwise_fp8": "of xFormers' operators",
    "wrong_strides": "of xFormers' operators",
    "dispatch_decoding": "of xFormers' operators",
    "TestAttnBias::test_f16_biasf32": "biases may have another dtype here",
}

#: The largest tensor of a test on the CPU, in elements.
LARGEST = 2**23


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--original", choices=list(WITH_OUR_NAMES))
    parser.addoption("--device", choices=("cuda", "cpu"))
    parser.addoption("--each", type=int)
    parser.addoption("--report", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if (device := config.getoption("--device")) == "cpu":
        run_on_the_cpu()
    with contextlib.suppress(ValueError):  # this folder has modules of the same names
        sys.path.remove(str(SOURCES.parent / "scripts"))
    name = config.getoption("--original")
    sys.path[:0] = [str(SOURCES / name), str(SOURCES / "einops")]
    WITH_OUR_NAMES[name](device)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Keeps so many cases of a test, chosen by hashes of their names, while millions of them are multiplied."""
    parametrize = metafunc.parametrize

    def parametrize_few(*args: Any, **options: Any) -> None:
        parametrize(*args, **options)
        by_hash = sorted(metafunc._calls, key=lambda x: zlib.crc32(x.id.encode()))
        metafunc._calls = by_hash[: metafunc.config.getoption("--each")]

    metafunc.parametrize = parametrize_few  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for part, reason in NOT_OURS.items():
        if part in item.nodeid:
            pytest.skip(reason)
    if hasattr(item, "module") and hasattr(item.module, "DISABLE_LOCAL"):
        item.module.DISABLE_LOCAL = True  # windows are parameters by now, and left are chunks, which we refuse
    if getattr(getattr(item, "callspec", None), "params", {}).get("head_dim", 0) > 256:
        pytest.skip("head dims are at most 256")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    # The test compares bits of each run, and those of single queries are the same only if that is asked for.
    torch.use_deterministic_algorithms("race_condition[1-" in item.nodeid)
    try:
        return (yield)
    except UnsupportedError as error:
        return pytest.skip(f"{error.what}: {'; '.join(error.reasons)}")
    except DtypeError as error:
        return pytest.skip(f"no kernel takes {error.got}")
    except (AssertionError, ImportError, RuntimeError) as error:
        of_cpus = ("not compiled with CUDA", "triton", "can't allocate memory")
        if item.config.getoption("--device") == "cpu" and any(x in str(error) for x in of_cpus):
            return pytest.skip(f"on a CPU: {error}")
        raise
    finally:
        torch.use_deterministic_algorithms(False)


_outcomes: Counter[str] = Counter()
_skips: Counter[str] = Counter()
_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    is_expected = report.skipped and hasattr(report, "wasxfail")
    if report.when == "call" or report.outcome != "passed":
        _outcomes["xfailed" if is_expected else report.outcome] += 1
    if report.skipped and not is_expected:
        _skips[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Adds these tests to the report that `--report` names."""
    option = session.config.getoption
    if (path := option("--report")) is None or hasattr(session.config, "workerinput"):
        return
    name = option("--original")
    head = ["git", f"--git-dir={SOURCES / name / '.git'}", "rev-parse", "HEAD"]
    reports = json.loads(path.read_text()) if path.is_file() else {}
    reports[name] = {
        "versions": {
            "cudnn_sdpa": cudnn_sdpa.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "device": "CPU" if option("--device") == "cpu" else torch.cuda.get_device_name(),
            "pinned": ORIGINALS[name].commit,
            "commit": subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip() or None,
        },
        "cases of each test": option("--each"),
        "counts": dict(_outcomes),
        "failed": sorted(_failed),
        "skips": dict(_skips.most_common()),
    }
    path.write_text(json.dumps(reports, indent=2) + "\n")


def skipping(what: str) -> Callable[..., NoReturn]:
    return lambda *_, **__: pytest.skip(what)


# The device.


class CudaIsCpu(TorchFunctionMode):
    """Calls with "cuda" for the device run on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], _types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        if func in (Tensor.cuda, Tensor.pin_memory) or (func is Tensor.to and args[1:] and type(args[1]) is int):
            return args[0]
        named = {name: moved(x) for name, x in (kwargs or {}).items() if name != "pin_memory"}
        found = func(*map(moved, args), **named)
        if isinstance(found, Tensor) and found.numel() > LARGEST and found.dtype is not torch.uint8:  # not workspaces
            pytest.skip("on a CPU: a tensor is too large")
        return found


def moved(x: object) -> object:
    is_cuda = x.type == "cuda" if isinstance(x, torch.device) else isinstance(x, str) and x.startswith("cuda")
    return torch.device("cpu") if is_cuda else x


def run_on_the_cpu() -> None:
    """Has "cuda" mean the CPU from here on, and `torch.cuda` answer as if it were a GPU of compute capability 9.0."""
    properties = SimpleNamespace(name="CPU", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0)
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (80 << 30, 80 << 30),
        **dict.fromkeys(("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats")),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("Stream", "CUDAGraph", "graph", "Event"):
        setattr(torch.cuda, name, skipping(f"on a CPU: torch.cuda.{name}"))
    NOT_OURS["race_condition"] = "on a CPU: nothing races, and they repeat calls thousands of times"
    torch.Generator = GeneratorOfTheCpu  # type: ignore[misc]
    CudaIsCpu().__enter__()


class GeneratorOfTheCpu(torch.Generator):
    def __new__(cls, device: object = None) -> Self:  # noqa: ARG004
        return super().__new__(cls)


# The libraries' names.


def module_of(name: str, **members: object) -> ModuleType:
    """A new module, which `import` finds."""
    found = sys.modules[name] = ModuleType(name)
    vars(found).update(members)
    return found


def all_of(module: ModuleType) -> dict[str, Any]:
    return {name: getattr(module, name) for name in module.__all__}


def as_flash_attention(device: str) -> None:
    """FlashAttention-2 and -3; other modules of the package, such as `bert_padding`, are its own."""
    os.environ["FLASH_ATTENTION_DISABLE_FP8"] = "TRUE"
    folder = SOURCES / "flash-attention"
    sys.path.insert(0, str(folder / "hopper"))
    functions = all_of(flash_attn)
    masks = skipping("S_dmask: cuDNN does not return it")
    interface = module_of(
        "flash_attn.flash_attn_interface", USE_TRITON_ROCM=False, _get_block_size_n=masks, **functions
    )
    module_of("flash_attn", __path__=[str(folder / "flash_attn")], flash_attn_interface=interface, **functions)
    more = {"flash_attn_combine": skipping("it is merge_states here"), "get_scheduler_metadata": lambda *_, **__: None}
    module_of("flash_attn_interface", **all_of(flash_attn_interface), **more)
    importlib.import_module("test_util")  # that of hopper, and not of tests
    if device == "cpu":  # where its kernel in Triton does not run
        module_of("flash_attn.layers.rotary", apply_rotary_emb=rotary)


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0, **_: object
) -> Tensor:
    """FlashAttention's rotation of tokens (B, S, H, D) from positions on: in float32, as its kernel's."""
    begins = torch.as_tensor(seqlen_offsets).reshape(-1, 1)
    at = (begins + torch.arange(x.shape[1])).clamp(max=cos.shape[0] - 1)
    c, s = (table[at].unsqueeze(2).float() for table in (cos, sin))
    dim = 2 * cos.shape[1]
    pairs = x[..., :dim].unflatten(-1, (-1, 2)) if interleaved else x[..., :dim].unflatten(-1, (2, -1)).mT
    turned = torch.stack((pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 0] * s + pairs[..., 1] * c), dim=-1).to(x)
    return torch.cat(((turned if interleaved else turned.mT).flatten(-2), x[..., dim:]), dim=-1)


class Absent(type):
    """The class of what our module lacks: names that can be imported, and skip the test that calls them."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        pytest.skip(f"{cls.__name__} is not ours")


def absent(name: str) -> Absent:
    return type.__call__(Absent, name, (), {})  # type: ignore[no-any-return]


class GPUArchitectureError(RuntimeError):
    """FlashInfer's, which some of its tests catch."""


class ModuleOfAll(ModuleType):
    """`flashinfer` or a module of it, all of which have all names."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("decode", "prefill", "page", "cascade", "utils", "triton"):
            return importlib.import_module(f"flashinfer.{name}")
        known = {
            "get_compute_capability": torch.cuda.get_device_capability,
            "has_flashinfer_jit_cache": lambda: True,  # nothing is to be compiled before
            "GPUArchitectureError": GPUArchitectureError,
            **all_of(flashinfer),
        }
        return known.get(name, absent(f"{self.__name__}.{name}"))


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages, whatever their names are, and makes them."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_here = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleOfAll(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass


def as_flashinfer(_device: str) -> None:
    sys.meta_path.insert(0, Finder("flashinfer"))


def as_xformers(device: str) -> None:
    """xFormers with our functions whatever the operator is: its biases and references are its own."""
    if importlib.util.find_spec("scipy") is None:
        sys.meta_path.insert(0, Finder("scipy"))
    sys.modules.setdefault("flash_attn", None)  # type: ignore[arg-type]  # xFormers takes flash-attn-4's for version 2
    import xformers.ops as theirs

    fmha = theirs.fmha
    biases = {getattr(fmha.attn_bias, name) for name in xformers.__all__ if name[0].isupper()}
    common = {
        "SUPPORTED_DEVICES": {device},
        "SUPPORTED_DTYPES": {torch.float16, torch.bfloat16},
        "SUPPORTED_MAX_K": 256,
        "SUPPORTED_ATTN_BIAS_TYPES": (type(None), Tensor, *sorted(biases - {fmha.attn_bias.AttentionBias}, key=str)),
        "CUDA_MAXIMUM_COMPUTE_CAPABILITY": None,
        "_TEST_K": [32, 128],
        "is_available": classmethod(lambda _: True),
    }
    # The kernel for pages rounds weights of up to 2^8, and xFormers' weights of up to 1: errors may be one unit larger.
    tolerances = {**fmha.cutlass.FwOp.ERROR_RTOL, torch.float16: 2.0**-10}
    ours = {**common, "NAME": "cudnn_sdpa", "ERROR_RTOL": tolerances}
    fmha.ALL_FW_OPS[:] = [type("FwOp", (fmha.cutlass.FwOp,), ours)]
    fmha.ALL_BW_OPS[:] = [type("BwOp", (fmha.cutlass.BwOp,), {**common, "NAME": "cudnn_sdpaB"})]
    reasons = fmha.common.AttentionOpBase.not_supported_reasons.__func__
    of_devices = ("device=", "bf16 is", "operator wasn't built", "requires device", "xFormers wasn't build")
    fmha.common.AttentionOpBase.not_supported_reasons = classmethod(
        lambda cls, inputs: [x for x in reasons(cls, inputs) if not x.startswith(of_devices)]
    )
    lacking = ("forward_requires_grad", "backward", "partial")
    functions: dict[str, Any] = {f"memory_efficient_attention_{x}": skipping(f"{x} is not ours") for x in lacking}
    for name in ("memory_efficient_attention", "memory_efficient_attention_forward"):
        functions[name] = without_operator(getattr(xformers, name))
    for module in (fmha, theirs):
        vars(module).update(functions)
    if importlib.util.find_spec("triton") is None:
        module_of("triton", __version__="3.0.0")


def without_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: object, op: object = None, **options: object) -> Tensor:  # noqa: ARG001
        return function(*args, **options)

    return run


WITH_OUR_NAMES: dict[str, Callable[[str], None]] = {
    "flash-attention": as_flash_attention,
    "flashinfer": as_flashinfer,
    "xformers": as_xformers,
}
