"""Modules under PyTorch's distributed wrappers, in one process."""

from __future__ import annotations

import textwrap

import pytest

HEAD = """
import sys, torch, torch.distributed as dist, warnings
from cudnn_sdpa import nn

torch.manual_seed(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)

def make():
    rope = nn.RotaryEmbedding(8)
    return nn.TransformerLayer(32, 4, 48, num_kv_heads=2, is_causal=True, sinks=True, rope=rope)

x, grad = torch.randn(2, 9, 32), torch.randn(2, 9, 32)
plain = make()
expected = plain(x)
wanted = torch.autograd.grad(expected, list(plain.parameters()), grad)
"""
TAIL = """
dist.destroy_process_group()
print("right")
"""

DDP = """
import copy
wrapped = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
out = wrapped(x)
out.backward(grad)
assert torch.equal(out, expected)
for one, other in zip(wrapped.parameters(), wanted, strict=True):
    torch.testing.assert_close(one.grad, other)
"""

FSDP = """
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

with torch.device("meta"):
    sharded = make()
fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
sharded.to_empty(device="cpu")
set_model_state_dict(sharded, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
out = sharded(x)
out.backward(grad)
torch.testing.assert_close(out, expected)
for one, other in zip(sharded.parameters(), wanted, strict=True):
    torch.testing.assert_close(one.grad.full_tensor(), other)
"""


@pytest.mark.sample(1)
@pytest.mark.usefixtures("reference_alone")  # the layers have sinks, which cuDNN lacks before 9.13
@pytest.mark.parametrize("body", [DDP, FSDP], ids=["ddp", "fsdp2"])
def test_wrapped_modules_compute_the_same(body, run_python, tmp_path):
    code = "".join(textwrap.dedent(part) for part in (HEAD, body, TAIL))
    assert run_python(code, str(tmp_path / "rendezvous")).stdout.splitlines()[-1] == "right"
