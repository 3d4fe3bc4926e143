"""This library's kernels, compiled by the real NVRTC for GPUs that are not in the machine."""

from __future__ import annotations

import pytest

from cudnn_sdpa import LibraryError
from cudnn_sdpa.attention import bias, lengths, merge_states, sink_scores
from cudnn_sdpa.attention.fp8 import quantize
from cudnn_sdpa.attention.paged import paging
from cudnn_sdpa.attention.varlen import packing
from cudnn_sdpa.plans import nvrtc as nvrtc_module
from cudnn_sdpa.plans.nvrtc import Kernel

pytestmark = pytest.mark.usefixtures("nvrtc")


KERNELS = [
    *(packing.kernel, paging.decode_kernel, paging.gather_kernel, paging.append_kernel, paging.csr_kernel),
    *merge_states.kernels.values(),
    *(*sink_scores.chunk_kernels.values(), sink_scores.head_kernel),
    *(lengths.correct_kernel, lengths.limit_kernel, bias.kernel, *bias.kernels_with.values()),
]
#: Kernels that need instructions of compute capability 8.9.
FP8_KERNELS = [quantize.quantize_kernel, quantize.dequantize_kernel, quantize.update_kernel]


@pytest.mark.sample(4)
@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_compiles_for_every_gpu(kernel, sm):
    assert kernel.compile(sm)[:4] == b"\x7fELF"


@pytest.mark.sample(2)
@pytest.mark.parametrize("sm", [89, 90, 100, 120])
@pytest.mark.parametrize("kernel", FP8_KERNELS, ids=lambda kernel: kernel.name)
def test_every_fp8_kernel_compiles_for_every_fp8_gpu(kernel, sm):
    assert kernel.compile(sm)[:4] == b"\x7fELF"


SPECIFIC = """
extern "C" __global__ void specific() {
#if __CUDA_ARCH__ >= 900
  asm volatile(INSTRUCTION);
#endif
}
"""


def test_instructions_of_one_architecture(tmp_path):
    path = tmp_path / "specific.cu"
    path.write_text(SPECIFIC.replace("INSTRUCTION", '"wgmma.fence.sync.aligned;"'))
    specific, other = Kernel(path, "specific", architecture_specific=True), Kernel(path, "specific")
    assert specific.compile(90)[:4] == specific.compile(80)[:4] == b"\x7fELF"
    with pytest.raises(LibraryError, match="wgmma"):
        other.compile(90)
    assert specific.identity(90) not in (other.identity(90), specific.identity(80))
    path.write_text(SPECIFIC.replace("INSTRUCTION", '"setmaxnreg.inc.sync.aligned.u32 128;"'))
    for sm in (100, 103, 120):
        assert specific.compile(sm)[:4] == b"\x7fELF"


def test_compile_errors_are_explained(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text('extern "C" __global__ void wrong() { missing(); }')
    with pytest.raises(LibraryError, match=r"wrong\.cu for SM90: NVRTC_ERROR_COMPILATION(?s:.*)missing"):
        Kernel(path, "wrong").compile(90)
    with pytest.raises(LibraryError, match=r"SM10: (?s:.*)a newer one may know this GPU"):
        packing.kernel.compile(10)


def test_without_nvrtc_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(nvrtc_module, "_nvrtc_candidates", lambda: iter(["libnothing.so.99"]))
    nvrtc_module._nvrtc.cache_clear()
    with pytest.raises(LibraryError, match="pip install nvidia-cuda-nvrtc"):
        packing.kernel.compile(90)
    monkeypatch.undo()
    nvrtc_module._nvrtc.cache_clear()
    assert packing.kernel.compile(90)
