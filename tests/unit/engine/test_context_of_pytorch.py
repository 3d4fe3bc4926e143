"""Under PyTorch's context parallelism, which patches only PyTorch's attention, calls are refused."""

from __future__ import annotations

import torch

import cudnn_sdpa

CODE = """
import sys, torch, torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
import cudnn_sdpa as c
import cudnn_sdpa.kernels

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
rows = torch.randn(16, 2, 8)
ends = torch.tensor([0, 16], dtype=torch.int32)
layer = c.nn.Attention(16, 2)
half = torch.randn(1, 2, 16, 16).bfloat16()
fp8, one = half.to(torch.float8_e4m3fn), torch.ones(1)
pages, table, lengths = torch.randn(2, 2, 16, 8), torch.tensor([[1]]).int(), torch.tensor([16]).int()
cache = c.PagedKVCache(pages=1, page_size=16, heads=2, head_dim=8, dtype=torch.float32, device="cpu")
step = cache.reserve([cache.add()], 16)
cache.append(step, k, v)
compiled = torch.compile(lambda q, k, v: c.sdpa(q, k, v, is_causal=True), backend="eager", fullgraph=True)
calls = {
    "sdpa": lambda: c.sdpa(q, k, v, is_causal=True),
    "options": lambda: c.sdpa(q, k, v, window_size=(3, 0), return_lse=True)[0],
    "drop-in": lambda: c.scaled_dot_product_attention(q, k, v),
    "packed": lambda: c.sdpa_varlen(rows, rows, rows, ends, ends, 16, 16),
    "module": lambda: layer(torch.ones(1, 16, 16)),
    "compiled": lambda: compiled(q, k, v),
    "fp8": lambda: c.sdpa_fp8(fp8, fp8, fp8, c.Fp8Scales(*[one] * 6)).out.float(),
    "fp8, differentiable": lambda: c.fp8_attention(half, half, half),
    "fp8 module": lambda: c.Fp8Attention()(half, half, half),
    "paged": lambda: c.sdpa_paged(q, pages, pages, table, lengths, page_layout="HND"),
    "packed on pages": lambda: c.sdpa_paged_varlen(
        rows, pages, pages, table, lengths, ends, 16, page_layout="HND"
    ),
    "cache": lambda: cache.attend(step, q),
    "own kernels": lambda: c.kernels.attention(q, k, v, is_causal=True),
    "own kernels, module": lambda: c.kernels.CUDAAttention()(q, k, v),
}
before = {name: call() for name, call in calls.items()}
with context_parallel(mesh, buffers=[torch.ones(2, 16)], buffer_seq_dims=[1]):
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            refused = isinstance(error, c.UnsupportedError) or "UnsupportedError" in str(error)
            can_bypass_dispatcher = "UnsupportedError(())" in str(error)  # Dynamo of PyTorch 2.9 says no more of it
            assert refused and ("context_parallel" in str(error) or can_bypass_dispatcher), (name, error)
        else:
            raise AssertionError(f"{name} was not refused")
for name, call in calls.items():
    assert torch.equal(call(), before[name]), name
dist.destroy_process_group()
print("right")
"""


def test_calls_are_refused_under_context_parallelism_only(run_python, tmp_path):
    """Cold and warm, compiled and in modules; afterwards calls work again."""
    done = run_python(CODE, str(tmp_path / "rendezvous"))
    assert done.stdout.strip().endswith("right"), done.stderr


def test_other_replacements_of_pytorchs_attention_are_ignored(monkeypatch):
    """For example the drop-in."""
    functional = torch.nn.functional
    q = torch.randn(1, 2, 16, 8)
    wanted = functional.scaled_dot_product_attention(q, q, q)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", cudnn_sdpa.scaled_dot_product_attention)
    torch.testing.assert_close(functional.scaled_dot_product_attention(q, q, q), wanted)
