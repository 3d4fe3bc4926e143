"""Plans of the library's own kernels on a GPU: arrays of the host, scratch memory, captures, what CUDA refuses."""

from __future__ import annotations

import gc
from array import array

import pytest
import torch
from scaled_sums import LEAST, ROWS, ScaledSums

from cudnn_sdpa import ExecutionError, plan_cache
from cudnn_sdpa.plans.nvrtc import Kernel

#: A kernel with an instruction of Hopper alone.
HOPPER = """
typedef long long number;

struct Call {
  number* out;
};

extern "C" __global__ void fence(const Call a) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (threadIdx.x == 0) *a.out = 7;
}
"""


def drawn(rows, columns, apart):
    return torch.randn(rows, apart, device="cuda")[:, :columns]


@pytest.fixture
def sums(tmp_path):
    plan_cache.clear()
    yield ScaledSums(tmp_path)
    plan_cache.clear()


def test_one_plan_serves_all_sizes_on_all_streams(sums):
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        for rows, columns, apart in [(1, 1, 1), (ROWS, 3, 3), (19, 40, 77)]:
            with torch.cuda.stream(stream):
                x = drawn(rows, columns, apart)
                for weights in (None, torch.randn(columns, device="cuda")):
                    for scale in (0.3, -1.7, 0.9, 5.0):  # from the second call on natively
                        sums.check(x, weights, scale)
    assert len(plan_cache.plans()) == 1


def test_calls_share_scratch_memory(sums):
    """Each result is that of its own call, though nothing synchronizes."""
    x = [drawn(ROWS, 2048, 2048) for _ in range(20)]
    for each in x:
        sums.warm_up(each)
    out = [sums(each, None, 0.1 + number) for _ in range(20) for number, each in enumerate(x)]
    for number, found in enumerate(out):
        right = (0.1 + number % 20) * x[number % 20].double().sum(1) + LEAST
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-2)


def test_a_captured_launch_outlives_its_plan(sums):
    x, weights = drawn(19, 40, 77), torch.randn(40, device="cuda")
    sums.warm_up(x, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [sums(x, weights, scale) for scale in (0.3, -1.7)]
    sums.bound.clear()
    plan_cache.clear()
    gc.collect()
    taken = [torch.full((1 << 16,), torch.nan, device="cuda") for _ in range(50)]
    for _ in range(3):
        x.normal_()
        graph.replay()
        for scale, found in zip((0.3, -1.7), out, strict=True):
            sums.assert_right(found, x, weights, scale)
    del taken


def test_scratch_memory_is_given_back(sums):
    x = drawn(ROWS, 3, 3)
    sums.warm_up(x)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        sums(x)
    assert torch.cuda.memory_allocated() == before


def test_what_cuda_refuses_is_an_error(tmp_path):
    plan_cache.clear()
    sums, x = ScaledSums(tmp_path, threads=2048), drawn(5, 6, 6)
    for _ in range(3):
        with pytest.raises(ExecutionError, match=r"CUDA could not launch scale_sums: CUDA_ERROR_\w+"):
            sums(x)
    torch.cuda.synchronize()
    plan_cache.clear()


def test_instructions_of_one_architecture(tmp_path):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("WGMMA is Hopper's")
    path = tmp_path / "fence.cu"
    path.write_text(HOPPER)
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    kernel = Kernel(path, "fence", architecture_specific=True).on(0)
    kernel.launch(1, 128, array("q", (out.data_ptr(),)), torch.cuda.current_stream().cuda_stream)
    assert out.item() == 7
