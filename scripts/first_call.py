"""What a process pays before it works: imports and the first causal call, each measured in new processes.

    python scripts/first_call.py                        # a table
    python scripts/first_call.py --json first_call.json
    python scripts/first_call.py --repeats 9

It needs PyTorch, and runs in a clone that is not installed. Without a GPU only the imports are measured. Times are
medians, of the clock and of the processor (of all threads), in milliseconds. `whole` is a program's first call;
`apart` does before it, one by one, what the first call would do.

Bytecode is written to a temporary folder by a process that is not measured, as pip writes it when it installs a
package; that process also compiles the native module, and puts the files of PyTorch and cuDNN into the system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: B, Hq, Hkv, S, D.
SHAPE = (1, 32, 8, 1024, 128)

#: Stages of a process by name, in order: milliseconds of the clock and of the processor.
Stages = dict[str, tuple[float, float]]


class Timed:
    """Times stages of this process."""

    def __init__(self) -> None:
        self.stages: Stages = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        clock, processor = time.perf_counter(), time.process_time()
        yield
        self.stages[name] = ((time.perf_counter() - clock) * 1e3, (time.process_time() - processor) * 1e3)


def imports() -> Stages:
    """PyTorch, then this package, then the first access to `sdpa`."""
    timed = Timed()
    with timed.stage("import torch"):
        import torch  # noqa: F401
    with timed.stage("import cudnn_sdpa"):
        import cudnn_sdpa
    with timed.stage("cudnn_sdpa.sdpa"):
        _ = cudnn_sdpa.sdpa
    return timed.stages


def whole() -> Stages:
    """The first call of a program, with nothing before it but the CUDA context."""
    timed = Timed()
    q, k, v = start_torch(timed)
    with timed.stage("import cudnn_sdpa"):
        import cudnn_sdpa
    with timed.stage("first call"):
        cudnn_sdpa.sdpa(q, k, v, is_causal=True)
        synchronize()
    return timed.stages


def apart() -> Stages:
    """The same, with what the first call would do before it."""
    timed = Timed()
    q, k, v = start_torch(timed)
    with timed.stage("import cudnn_sdpa"):
        import cudnn_sdpa
    with timed.stage("our modules"):
        sdpa = cudnn_sdpa.sdpa
        from cudnn_sdpa.engine.native import loader
        from cudnn_sdpa.graph import backend, handles, target
        from cudnn_sdpa.plans.cache import plan_cache
    with timed.stage("the frontend"):
        import cudnn  # noqa: F401
    with timed.stage("loading cuDNN"):
        backend.cudnn()
    device = q.get_device()
    with timed.stage("cuDNN's handles"):
        handles.build_handle(device)
        with handles.loading_handle(device):
            pass
    with timed.stage("the GPU's properties"):
        target.live_target(device)
    with timed.stage("the native module"):
        loader.start()
        loader.wait()
    with timed.stage("the plan and its launch"):
        sdpa(q, k, v, is_causal=True)
        synchronize()
    info = plan_cache.info()
    timed.stages["plans built, loaded"] = (info.builds, info.loads)
    with timed.stage("second call"):
        sdpa(q, k, v, is_causal=True)
        synchronize()
    return timed.stages


def pytorchs(backend: str) -> Stages:
    """The first call of one of PyTorch's own backends."""
    timed = Timed()
    q, k, v = start_torch(timed)
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)), timed.stage("first call"):
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        synchronize()
    return timed.stages


PARTS: dict[str, Callable[[], Stages]] = {
    "imports": imports,
    "whole": whole,
    "apart": apart,
    "pytorch cuDNN": lambda: pytorchs("CUDNN_ATTENTION"),
    "pytorch FLASH": lambda: pytorchs("FLASH_ATTENTION"),
}


def start_torch(timed: Timed) -> Any:
    """Imports PyTorch, creates the CUDA context, and makes q, k and v."""
    with timed.stage("import torch"):
        import torch
    with timed.stage("CUDA context"):
        b, hq, hkv, s, d = SHAPE
        q = torch.randn(b, hq, s, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, hkv, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        torch.cuda.synchronize()
    return q, k, v


def synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def versions() -> dict[str, object]:
    """What was measured, and on what."""
    import importlib.metadata
    import platform

    import torch

    import cudnn_sdpa

    has_gpu = torch.cuda.is_available()
    try:
        frontend = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        frontend = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn_sdpa": cudnn_sdpa.__version__,
        "nvidia-cudnn-frontend": frontend,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def in_a_new_process(part: str, bytecode: str, store: str, **environment: str) -> dict[str, Any]:
    """What a part of this script prints, in a new process with this plan store."""
    variables = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONPYCACHEPREFIX": bytecode,
        "CUDNN_SDPA_PLAN_DIR": store,
        **environment,
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if result.returncode:
        return {"error": result.stderr.strip().splitlines()[-1] if result.stderr.strip() else str(result.returncode)}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of each stage; the error of a process instead, if there is one."""
    wrong = next((run for run in runs if "error" in run), None)
    if wrong is not None:
        return wrong
    by_stage = {stage: zip(*(run[stage] for run in runs), strict=True) for stage in runs[0]}
    return {stage: [round(statistics.median(times), 1) for times in both] for stage, both in by_stage.items()}


def measure(repeats: int) -> dict[str, Any]:
    """The medians of all parts."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode, warm = f"{folder}/bytecode", f"{folder}/plans"
        found: dict[str, Any] = {"versions": in_a_new_process("versions", bytecode, warm), "repeats": repeats}
        has_gpu = found["versions"].get("gpu") is not None
        rows = {"imports": ("imports", "off")}
        if has_gpu:
            rows |= {
                "whole, warm store": ("whole", warm),
                "apart, warm store": ("apart", warm),
                "whole, empty store": ("whole", ""),
                "apart, empty store": ("apart", ""),
                "pytorch cuDNN": ("pytorch cuDNN", "off"),
                "pytorch FLASH": ("pytorch FLASH", "off"),
            }
        else:
            print("No GPU: only the imports are measured.", file=sys.stderr)
        for part in {part for part, _ in rows.values()}:  # not measured
            in_a_new_process(part, bytecode, warm, CUDNN_SDPA_NATIVE="on" if has_gpu else "off")
        for name, (part, store) in rows.items():
            runs = [
                in_a_new_process(part, bytecode, store or f"{folder}/{name}, {number}") for number in range(repeats)
            ]
            found[name] = medians(runs)
        return found


def main() -> None:
    """Measures, or is one of the processes that are measured."""
    parser = argparse.ArgumentParser(description="What a process pays before it works.")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each part")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--part", choices=[*PARTS, "versions"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        print(json.dumps(versions() if given.part == "versions" else PARTS[given.part]()))
        return
    found = measure(given.repeats)
    for name, stages in found.items():
        print(name if isinstance(stages, dict) else f"{name}: {stages}")
        for stage, times in stages.items() if isinstance(stages, dict) else ():
            print(f"  {stage:28}", *(f"{x:9.1f}" for x in times) if isinstance(times, list) else (times,))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
