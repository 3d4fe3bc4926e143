"""The helper process: reads plan requests as JSON lines and answers with JSON lines.

Started by `cudnn_sdpa.offline.planner` in the environment of `cudnn_sdpa.offline.driver`, not by hand.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import backend
from cudnn_sdpa.graph.backend import DeviceProperties
from cudnn_sdpa.graph.definition import GraphDefinition, find_operation
from cudnn_sdpa.graph.heuristics import HeuristicsBuilder, ModeABuilder
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import JsonObject
from cudnn_sdpa.graph.target import Target

#: cuDNN's message for kernels whose clusters it cannot place.
_NEEDS_CLUSTERS = "target_sm_count"

_CLUSTER_NOTE = (
    "on the GPU cuDNN has much faster kernels for it that use clusters of thread blocks, and how many of these run at "
    "once is unknown without the GPU"
)


def preload() -> None:
    """Loads NVRTC and cuBLASLt from the pip packages, which cuDNN does not search."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for pattern in ("*/lib/libnvrtc-builtins.so*", "*/lib/libnvrtc.so*", "*/lib/libcublasLt.so*"):
            for library in sorted(Path(root).glob(pattern)):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def answer(request: JsonObject) -> dict[str, object]:
    """Plans and compiles a request; with `heuristics`, the answer has only the engine that cuDNN proposes."""
    if "ready" in request:
        return {}
    target = Target.from_properties(request["properties"])
    key = PlanKey.from_json(request["key"], target)
    operation = find_operation(key.operation)
    if operation.digest != key.digest:
        return {"error": "the operation's source has changed since this process started", "reasons": None}
    heuristics = request.get("heuristics", False)
    builder = HeuristicsBuilder if heuristics else backend.GraphBuilder
    start = time.perf_counter()
    try:
        built = operation.compile(key, builder(properties=request["properties"]))
    except UnsupportedError as error:
        return {"error": str(error), "reasons": error.reasons}
    if heuristics:
        return {"engine": built.engine}
    return {
        "engine": built.engine,
        "knobs": built.knobs,
        "workspace": built.workspace,
        "build_seconds": time.perf_counter() - start,
        "libraries": backend.loaded_libraries(),
        "note": _CLUSTER_NOTE if _lacks_clusters(operation, key, request["properties"]) else "",
        "plan": base64.b64encode(built.serialize()).decode(),
    }


def _lacks_clusters(operation: GraphDefinition, key: PlanKey, properties: DeviceProperties) -> bool:
    """All proposals of the heuristics for a graph need the GPU's cluster placement.

    Fallback engines were 20 to 30 times slower for convolutions on an H200. cuDNN's messages about its proposals differ
    between versions. They do not matter for convolutions without an activation or with ReLU, nor for gradients: on the
    GPU these proposals were always chosen.
    """
    if not replace(key, device=0).is_gpu_specific:
        return False
    try:
        operation.compile(key, ModeABuilder(properties=properties))
    except UnsupportedError as error:
        is_plain = key.operation.startswith("cudnn_sdpa.fused.conv_graphs:") and (
            key.option_values.get("activation") in (None, "relu")
        )
        return is_plain or any(_NEEDS_CLUSTERS in reason for reason in error.reasons)
    return False


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps libraries' prints out of the answers
    answers.write("\n")  # ends output of site hooks at Python's start
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = answer(request)
        except Exception as error:  # noqa: BLE001 - any error is an answer
            result = {"error": f"{type(error).__name__}: {error}", "reasons": None}
        answers.write(json.dumps({**result, "number": request["number"]}) + "\n")
        answers.flush()
