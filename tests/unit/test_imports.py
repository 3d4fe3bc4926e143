"""What `import cudnn_sdpa` imports, and that all is there at the first use of it."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch

import cudnn_sdpa
from cudnn_sdpa.engine import torch_ops

#: The modules of this package that importing it loads; any more is time that every process pays.
LOADED = {
    *("cudnn_sdpa", "cudnn_sdpa._version", "cudnn_sdpa._start"),
    *("cudnn_sdpa.engine", "cudnn_sdpa.engine.torch_ops"),
}

#: Most modules of this package that the first access to `sdpa` has loaded.
MAX_LOADED_BY_SDPA = 85


def test_importing_loads_what_registers_the_operators_and_nothing_else(run_python):
    result = run_python(
        """
import sys, torch
before = set(sys.modules)
import cudnn_sdpa
print(*sorted(set(sys.modules) - before))
before = set(sys.modules)
cudnn_sdpa.sdpa
print(*sorted(set(sys.modules) - before))
"""
    )
    first, second = (line.split() for line in result.stdout.splitlines())
    assert set(first) == LOADED
    own = [name for name in second if name.startswith("cudnn_sdpa.")]
    assert len(LOADED) + len(own) <= MAX_LOADED_BY_SDPA
    slow = {"statistics", "secrets", "torch.utils.flop_counter", "torch._functorch.config", "cudnn", "triton"}
    assert not slow & {*second}


def test_the_operators_are_complete_after_the_import_alone(run_python):
    """The first use is PyTorch's dispatcher, as in a saved program: kernels, layouts, gradients, FLOPs."""
    run_python(
        """
import sys, torch, cudnn_sdpa
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("cudnn_sdpa::")]
for name in names:
    if name != "cudnn_sdpa::dropout_seed":
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CUDA", "CPU", "Meta")), name
assert len(names) == 23

q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
options = None, None, None, None, None, True, "top_left", -1, 0, None, 0.0, None, False, False
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    assert "cudnn_sdpa.attention" not in sys.modules
    out, lse = torch.ops.cudnn_sdpa.sdpa_forward_lse(q, q, q, *options)
    out.float().sum().backward()
assert counter.get_total_flops() > 0 and q.grad.isfinite().all() and q.grad.any()
assert torch.equal(cudnn_sdpa.sdpa(q, q, q, is_causal=True), out)

assert "cudnn_sdpa.attention.paged" not in sys.modules and "cudnn_sdpa.fused" not in sys.modules
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    q = torch.empty(8, 2, 16, dtype=torch.bfloat16)
    cu = torch.empty(2, dtype=torch.int32)
    found = torch.ops.cudnn_sdpa.varlen_forward(
        q, q, q, None, cu, cu, None, 8, 8, True, "top_left", -1, 0, None, 0.0, None, False
    )
assert found.shape == (8, 2, 16)
""",
    )


def test_a_counter_that_is_imported_first_has_the_formulas(run_python):
    run_python(
        """
import torch, torch.utils.flop_counter as counter, cudnn_sdpa
assert torch.ops.cudnn_sdpa.sdpa_forward in counter.flop_registry
"""
    )


def test_to_look_for_the_counter_does_not_lose_the_formulas(run_python):
    run_python(
        """
import importlib.util, torch, cudnn_sdpa
assert importlib.util.find_spec("torch.utils.flop_counter") is not None
import torch.utils.flop_counter as counter
assert torch.ops.cudnn_sdpa.graph_function in counter.flop_registry
"""
    )


def test_a_saved_program_needs_the_import_alone(run_python, tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, q):
            return cudnn_sdpa.sdpa(q, q, q, is_causal=True) + cudnn_sdpa.silu_mul(q, q)

    q = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16)
    torch.export.save(torch.export.export(Layer(), (q,)), tmp_path / "layer.pt2")
    torch.save((q, Layer()(q)), tmp_path / "tensors.pt")
    run_python(
        """
import sys, torch, cudnn_sdpa
program = torch.export.load("layer.pt2")
q, expected = torch.load("tensors.pt")
assert "cudnn_sdpa.attention" not in sys.modules
torch.testing.assert_close(program.module()(q), expected)
"""
    )


def test_compiled_code_may_be_the_first_to_use_a_name(run_python):
    result = run_python(
        """
import sys, torch, cudnn_sdpa
@torch.compile(fullgraph=True, backend="aot_eager")
def layer(x):
    return cudnn_sdpa.rms_norm(cudnn_sdpa.sdpa(x, x, x, is_causal=True))
x = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16, requires_grad=True)
assert "cudnn_sdpa.attention" not in sys.modules
layer(x).float().sum().backward()
print(x.grad.shape)
"""
    )
    assert result.stdout == "torch.Size([1, 2, 8, 16])\n"


def test_threads_may_use_names_first_at_once(run_python):
    run_python(
        """
import threading, torch, cudnn_sdpa
names = [*cudnn_sdpa.__all__, "nn", "kernels", "errors", "integrations", "distributed"] * 2
found, start = {}, threading.Barrier(len(names))
def use(number):
    start.wait()
    found[number] = getattr(cudnn_sdpa, names[number])
threads = [threading.Thread(target=use, args=(number,)) for number in range(len(names))]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == len(names), [name for number, name in enumerate(names) if number not in found]
assert all(found[number] is getattr(cudnn_sdpa, name) for number, name in enumerate(names))
"""
    )


def test_all_public_names_come_with_a_star(run_python):
    run_python(
        """
from cudnn_sdpa import *
import cudnn_sdpa
assert {name for name in cudnn_sdpa.__all__ if name != "__version__"} <= globals().keys()
assert set(cudnn_sdpa.__all__) <= set(dir(cudnn_sdpa))
"""
    )


def test_names_that_are_not_public_are_missing():
    for name in ("nonsense", "import_module", "typing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module 'cudnn_sdpa' has no attribute '{name}'"):
            getattr(cudnn_sdpa, name)


@pytest.mark.parametrize("name", ["sdpa", "ShapeError", "SdpaGradients", "PlanManifest"])
def test_public_names_are_pickled_by_name(run_python, name):
    data = pickle.dumps(getattr(cudnn_sdpa, name))
    run_python(f"import pickle; found = pickle.loads({data!r}); import cudnn_sdpa; assert found is cudnn_sdpa.{name}")


def test_an_operation_with_another_schema_is_refused():
    implementations = torch_ops.Implementations(cuda=len, cpu=len, fake=len, flops=len)
    with pytest.raises(ValueError, match=r"sdpa_forward is registered by another schema"):
        torch_ops.implement("sdpa_forward", "sdpa_forward(Tensor q) -> Tensor", implementations)
    schema, _ = torch_ops.registered["sdpa_forward"]
    with pytest.raises(ValueError, match=r"sdpa_forward is registered by another schema .* or without gradients"):
        torch_ops.implement("sdpa_forward", schema, implementations)


def test_each_operation_sets_what_its_operators_run():
    for name in torch_ops.registered:
        assert callable(torch_ops.implementations(name).cuda)
    assert sys.modules.keys() >= torch_ops.SCHEMAS.keys()


def test_packages_are_listed_before_they_are_imported(run_python):
    run_python(
        "import cudnn_sdpa; assert {'distributed', 'errors', 'integrations', 'kernels', 'nn'} <= set(dir(cudnn_sdpa))"
    )


@pytest.mark.parametrize("library", ["megatron", "torchtitan", "transformers"])
def test_an_integration_does_not_import_its_library(library, run_python):
    run_python(f"""
import sys
import cudnn_sdpa.integrations.{library}
assert not any(name.split(".")[0] == {library!r} for name in sys.modules)
""")
