"""Models with the library's functions under PyTorch's compilers, transforms and wrappers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cudnn_sdpa import (
    Fp8Scales,
    UnsupportedError,
    conv2d,
    cpu_checks,
    fp8_attention,
    layer_norm,
    providers,
    rms_norm,
    sdpa,
    sdpa_fp8,
    sdpa_paged,
    sdpa_paged_varlen,
    sdpa_varlen,
    silu_mul,
)
from cudnn_sdpa.offline.driver import compiler
from tests.threads import in_threads
from tests.unit.small_model import gradients, model_and_reference

quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def x_of(batch=2, length=9):
    return torch.randn(batch, length, 32)


@quiet
def test_a_model_has_no_graph_break():
    found = torch._dynamo.explain(model_and_reference()[0])(x_of())
    assert (found.graph_count, found.graph_break_count) == (1, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_and_inside_a_compiled_model(inside):
    ours, theirs = model_and_reference()
    x = x_of()

    def call(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(ours) if inside else call(compiled)
    torch.testing.assert_close(found, call(ours))
    torch.testing.assert_close(found, call(theirs), rtol=3e-2, atol=3e-2)


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.cudnn_sdpa.sdpa_forward_lse.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("saves", [True, False])
def test_selective_checkpointing_may_keep_attention(saves):
    ours, theirs = model_and_reference()
    x = x_of()

    def policy(_, operator, *__, **___):
        keeps = saves and operator is torch.ops.cudnn_sdpa.sdpa_forward_lse.default
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def call(x):
        return checkpoint(ours, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))

    with Counting() as counting:
        y = x.clone().requires_grad_()
        found = torch.autograd.grad(call(y).square().mean(), [y, *ours.parameters()])
    assert counting.count == (1 if saves else 2)
    torch.testing.assert_close(list(found), gradients(theirs, x), rtol=1e-4, atol=1e-5)


def test_threads_may_share_a_compiled_model():
    ours, theirs = model_and_reference()
    inputs = [x_of(length=5 + i) for i in range(6)]
    found = in_threads(lambda i: [gradients(ours, inputs[i]) for _ in range(3)][-1], len(inputs))
    for result, x in zip(found, inputs, strict=True):
        torch.testing.assert_close(result, gradients(theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@quiet
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_is_exported_for_any_size(strict, tmp_path):
    ours, theirs = (model.eval().requires_grad_(False) for model in model_and_reference())
    shapes = {"x": {0: Dim("batch", min=2), 1: Dim("length", min=2)}}
    program = export(ours, (x_of(),), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "cudnn_sdpa" in str(node.target)]
    kinds = [name.split(".")[1] for name in names]
    assert kinds == ["graph_function", "sdpa_forward", "graph_function", "graph_function"]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for x in (x_of(), x_of(5, 21)):
        torch.testing.assert_close(loaded(x), theirs(x))


@quiet
@pytest.mark.parametrize("name", ["cudnn", "own"])
def test_an_exported_model_is_served_by_the_providers_in_force(name):
    """Those where it runs, not those where it was exported."""
    ours, theirs = (model.eval().requires_grad_(False) for model in model_and_reference(dtype=torch.bfloat16))
    x = x_of().to(torch.bfloat16)
    loaded, before = export(ours, (x,)).module(), len(FakePlan.launched)
    with gpu_on_the_cpu(), cpu_checks(None), providers(name):
        torch.testing.assert_close(loaded(x), theirs(x), rtol=5e-2, atol=5e-2)
    served = FakePlan.launched[before:]
    assert len(served) == 4
    assert {key.provider for key in served} == {None if name == "cudnn" else name}


@pytest.mark.slow
@quiet
def test_ahead_of_time_compilation(tmp_path, run_python):
    if compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")
    ours, theirs = (model.eval().requires_grad_(False) for model in model_and_reference())
    shapes = {"x": {0: Dim("batch", min=2), 1: Dim("length", min=2)}}
    program = export(ours, (x_of(),), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for x in (x_of(), x_of(5, 21)):
        torch.testing.assert_close(loaded(x), theirs(x), rtol=1e-4, atol=1e-5)
    torch.save((x, theirs(x)), tmp_path / "tensors.pt")
    run_python(
        """
import sys, torch, cudnn_sdpa
loaded = torch._inductor.aoti_load_package("model.pt2")
x, expected = torch.load("tensors.pt")
assert "cudnn_sdpa.attention" not in sys.modules
torch.testing.assert_close(loaded(x), expected, rtol=1e-4, atol=1e-5)
"""
    )


OFFSETS = torch.tensor([0, 3, 8], dtype=torch.int32)
LOOPS = {
    "sdpa": (lambda x: sdpa(x, x, x, is_causal=True), (3, 2, 4, 8, 16)),
    "sdpa_varlen": (lambda x: sdpa_varlen(x, x, x, OFFSETS, OFFSETS, 5, 5), (3, 8, 4, 16)),
    "sdpa_paged": (
        lambda x: sdpa_paged(
            *(x, torch.ones(3, 4, 2, 16), torch.ones(3, 4, 2, 16)),
            *(torch.tensor([[0, 1]]).int(), torch.tensor([3]).int()),
            page_layout="HND",
        ),
        (3, 1, 4, 1, 16),
    ),
    "sdpa_paged_varlen": (
        lambda x: sdpa_paged_varlen(
            *(x, torch.ones(3, 4, 2, 16), torch.ones(3, 4, 2, 16)),
            *(torch.tensor([[0, 1], [2, 0]]).int(), torch.tensor([3, 4]).int(), torch.tensor([0, 1, 3]).int(), 2),
            page_layout="NHD",
        ),
        (3, 4, 4, 16),
    ),
}
REFUSED = {
    "rms_norm": (lambda x: rms_norm(x, torch.ones(16)), (3, 5, 16)),
    "layer_norm": (lambda x: layer_norm(x, torch.ones(16), torch.ones(16)), (3, 5, 16)),
    "silu_mul": (lambda x: silu_mul(x, x), (3, 5, 16)),
    "conv2d": (lambda x: conv2d(x, torch.ones(8, 16, 3, 3)), (3, 2, 16, 8, 8)),
    "sdpa_fp8": (
        lambda x: sdpa_fp8(*[x.to(torch.float8_e4m3fn)] * 3, Fp8Scales(*[torch.ones(())] * 6)).out.float(),
        (3, 2, 4, 8, 16),
    ),
    "fp8_attention": (lambda x: fp8_attention(*[x.bfloat16()] * 3).float(), (3, 2, 4, 8, 16)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_varlen", "sdpa_paged", "sdpa_paged_varlen", *REFUSED])
def test_compiled_functions_refuse_forward_mode(name):
    function, shape = {**LOOPS, **REFUSED}[name]
    x, tangent = torch.randn(shape[1:]), torch.randn(shape[1:])
    compiled = torch.compile(lambda x: torch.func.jvp(function, (x,), (tangent,)), backend="aot_eager")
    with pytest.raises(UnsupportedError, match=r"forward-mode differentiation(.|\n)*has a tangent"):
        compiled(x)


def test_functional_gradients_allow_undifferentiated_calls():
    q = torch.randn(2, 4, 8, 16)
    found = torch.func.grad(lambda scale: (sdpa(q, q, q) * scale).sum())(torch.tensor(2.0))
    torch.testing.assert_close(found, sdpa(q, q, q).sum())


@pytest.mark.slow
def test_data_parallel_training_on_two_processes():
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent.with_name("distributed_training.py")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        [sys.executable, str(script), "gloo", str(port)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for name in ("ddp", "fsdp2"):
        assert f"{name}: gradients agree" in result.stdout
    assert "tensor parallelism: right or refused" in result.stdout
