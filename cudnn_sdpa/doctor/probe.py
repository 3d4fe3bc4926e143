"""The examining process: loads PyTorch, then cuDNN, makes one call, and prints a line of JSON after each.

A broken library may end this process; the lines before that are still read. Run by `cudnn_sdpa.doctor.gather`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cudnn_sdpa.doctor.facts import PARTS
from cudnn_sdpa.runtime import backend

_NVIDIA = re.compile(r"/lib(cudnn|cuda|cudart|nvrtc|cublas)\w*\.so[.\d]*$")


def main() -> None:
    """Prints what was found out, one part a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like; the answers' channel is ours alone
    answers.write("\n")  # ends what a site may have printed when Python started
    parts: dict[str, Callable[[], Any]] = dict(
        zip(PARTS, (ask_torch, ask_cudnn, mapped, make_a_call, mapped), strict=True)
    )
    for name, part in parts.items():
        answers.write(json.dumps({name: part()}) + "\n")
        answers.flush()


def ask_torch() -> dict[str, Any]:
    """PyTorch's versions, its cuDNN, and the GPUs that it sees."""
    found: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    try:
        found["cudnn"] = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        found["cudnn_error"] = _in_one_line(error)
    if torch.version.cuda:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            found["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
        except Exception as error:  # noqa: BLE001 - the same
            found["cuda_error"] = _in_one_line(error)
    return found


def _gpu(index: int) -> dict[str, Any]:
    return {"name": torch.cuda.get_device_name(index), "capability": torch.cuda.get_device_capability(index)}


def ask_cudnn() -> dict[str, Any]:
    """The frontend and the cuDNN behind it."""
    found: dict[str, Any] = {}
    try:
        found["frontend"] = backend.frontend_version()
        found["version"] = backend.cudnn_version()
    except Exception as error:  # noqa: BLE001 - the same
        found["error"] = _in_one_line(error)
    return found


def make_a_call() -> dict[str, Any]:
    """One call of `sdpa`: compared with the reference on a GPU, planned for one without."""
    from cudnn_sdpa.attention.dense import sdpa
    from cudnn_sdpa.explanation import explain

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    found: dict[str, Any] = {"on": "GPU" if on_gpu else "offline"}
    try:
        q, k, v = (torch.randn(1, 2, 64, 64).to("cuda" if on_gpu else "cpu", torch.float16) for _ in range(3))
        report = explain(sdpa, q, k, v, is_causal=True, verify=on_gpu)
        found["engine"] = report.engine
        found["difference"] = max(report.errors.values(), default=None)
        found["error"] = "; ".join(report.reasons)
    except Exception as error:  # noqa: BLE001 - the same
        found["error"] = _in_one_line(error)
    return found


def mapped() -> list[str]:
    """Files of NVIDIA's libraries in this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line[line.find("/") :] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(path for path in paths if _NVIDIA.search(path))


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
