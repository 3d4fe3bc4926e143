"""CPU time of a call's way through PyTorch's dispatcher, and of the native module's test whether it may bypass that.

The operator is registered in C++ with the arguments of `sdpa`, 3 tensors and 14 options, and does nothing; the native
module describes the same arguments and looks them up. It needs PyTorch's CPU build and a C++ compiler:

    python scripts/dispatcher_cost.py
"""

from __future__ import annotations

import subprocess
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import torch

from cudnn_sdpa.engine.native import build, loader

SOURCE = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
using Optional = std::optional<at::Tensor>;
static at::Tensor attend(
    const at::Tensor& q, const at::Tensor&, const at::Tensor&, bool, c10::string_view, const Optional&, int64_t,
    int64_t, std::optional<double>, double, std::optional<double>, bool, const Optional&, const Optional&,
    const Optional&, bool, std::optional<bool>) {
  return q;
}
TORCH_LIBRARY(measured, m) {
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, bool is_causal, str alignment, Tensor? mask, int left, int right, "
      "float? scale, float dropout_p, float? softcap, bool alibi, Tensor? sinks, Tensor? seq_lens_q, "
      "Tensor? seq_lens_kv, bool lse, bool? deterministic) -> Tensor");
}
TORCH_LIBRARY_IMPL(measured, CPU, m) { m.impl("attend", attend); }
"""


def load_operator() -> None:
    """Compiles and loads the operator."""
    with tempfile.TemporaryDirectory() as name:
        folder, libraries = Path(name), build.torch_folder() / "lib"
        (folder / "operator.cpp").write_text(SOURCE)
        options = ["-O2", "-std=c++20", "-shared", "-fPIC", *(f"-I{path}" for path in build.include_folders())]
        linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10"]
        output = folder / "operator.so"
        subprocess.run([*build.check(), *options, str(folder / "operator.cpp"), "-o", str(output), *linked], check=True)
        torch.ops.load_library(str(output))


def nanoseconds(call: Callable[[], object]) -> float:
    """The best of many rounds, without the time of an empty function."""
    empty, found = (min(timeit.repeat(each, number=5000, repeat=60)) for each in (lambda: None, call))
    return (found - empty) / 5000 * 1e9


def main() -> None:
    load_operator()
    module = loader.load(build.find() or build.compile_module())
    module.set_missed(object())
    table, operator = module.Calls(), torch.ops.measured.attend.default
    q, k, v = (torch.randn(1, 8, 64, 64) for _ in range(3))
    options = (True, "top_left", None, -1, -1, 0.125, 0.0, None, False, None, None, None, False, None)
    print(f"operator through the dispatcher        {nanoseconds(lambda: operator(q, k, v, *options)):6.0f} ns")
    print(f"bypass: description and look-up        {nanoseconds(lambda: table(q, k, v, *options)):6.0f} ns")
    q.requires_grad_()
    print(f"operator, where q requires a gradient  {nanoseconds(lambda: operator(q, k, v, *options)):6.0f} ns")
    print(f"bypass, where q requires a gradient    {nanoseconds(lambda: table(q, k, v, *options)):6.0f} ns")


if __name__ == "__main__":
    main()
