"""PyTorch's compilers and wrappers on a GPU: opcheck, Inductor, CUDA graphs, export, checkpointing, DDP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import attention_checks
import pytest
import torch
from aot_inductor import printed
from attention_checks import error
from torch.nn.parallel import parallel_apply

from cudnn_sdpa import sdpa
from tests.unit import opcheck_calls
from tests.unit.opcheck_calls import CALLS, recorded, registered
from tests.unit.pytorch_equivalents import EQUIVALENTS, compilations, trained
from tests.unit.small_model import gradients, model_and_reference

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def new(*shape):
    return torch.randn(shape, device="cuda", dtype=BF16)


def exact(inputs):
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_opcheck(name):
    calls = recorded(CALLS[name], "cuda")
    assert {operator._schema.name.partition("::")[2] for operator, _ in calls} <= registered()
    for operator, arguments in calls:
        opcheck_calls.check(operator, arguments)


def test_every_operator_has_a_case():
    reached = {operator._schema.name for call in CALLS.values() for operator, _ in recorded(call, "cuda")}
    assert {name.partition("::")[2] for name in reached} == registered()


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "trained"])
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_growing_sizes_with_inductor(name, trains):
    pair = EQUIVALENTS[name]
    if trains and not pair.trains:
        with pytest.raises(NotImplementedError):
            trained(pair.ours, pair.inputs(0, new))
        return
    function = torch.compile(pair.ours, fullgraph=True)
    for step in range(4):
        inputs = pair.inputs(step, new)
        if trains:
            results, expected = trained(function, inputs), trained(pair.theirs, exact(inputs))
        else:
            results, expected = [function(*inputs)], [pair.theirs(*exact(inputs))]
        for found, wanted in zip(results, expected, strict=True):
            assert error(found, wanted) < 2e-2
    assert compilations(function) == 2  # static, then dynamic


@pytest.mark.parametrize("name", ["sdpa", "rms_norm", "silu_mul", "conv2d"])
def test_a_data_dependent_batch_size(name):
    pair = EQUIVALENTS[name]
    inputs = pair.inputs(3, new)  # a batch of 5, or of 6

    def on_some(kept, *given):
        rows = kept.nonzero().squeeze(1)
        shared = name in {"rms_norm", "conv2d"}  # weights have no batch
        return pair.ours(*(x if shared and i else x.index_select(0, rows) for i, x in enumerate(given)))

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        function = torch.compile(on_some, fullgraph=True)
        for picked in ([0, 2, 3], [1, 2, 3, 4], [4]):
            kept = torch.zeros(inputs[0].shape[0], dtype=torch.bool, device="cuda")
            kept[picked] = True
            out, expected = function(kept, *inputs), on_some(kept, *inputs)
            assert out.stride() == expected.stride()
            assert error(out, expected.double()) < 1e-2
    assert compilations(function) == 1


def close(found, wanted, bound=3e-2):
    return all(error(a, b.double()) < bound for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_trains(mode):
    ours, theirs = model_and_reference("cuda", BF16, 256)
    exactly = theirs.double()
    compiled = torch.compile(ours, fullgraph=True, mode=mode)
    gradients(ours, new(2, 64, 256))  # CUDA graphs need existing plans
    for _ in range(5):
        x = new(2, 64, 256)
        y = x.clone().requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(y).float().square().mean()
        found = [each.clone() for each in torch.autograd.grad(loss, [y, *ours.parameters()])]
        assert close(found, gradients(exactly, x.double()))


def test_inference_in_cuda_graphs():
    ours, theirs = model_and_reference("cuda", BF16, 256)
    compiled = torch.compile(ours, fullgraph=True, mode="reduce-overhead")
    exactly = theirs.double()
    with torch.no_grad():
        ours(new(2, 64, 256))
        for _ in range(5):
            x = new(2, 64, 256)
            assert error(compiled(x).clone(), exactly(x.double())) < 1e-2


def test_out_is_written_by_compiled_code():
    def into(q, k, v, out):
        sdpa(q, k, v, out=out)
        return out + 1

    q, k, v = (new(2, heads, 64, 64) for heads in (4, 2, 2))
    out = torch.full_like(q, torch.nan)
    with torch.no_grad():
        result = torch.compile(into, fullgraph=True)(q, k, v, out)
    expected, _ = attention_checks.exact(q, k, v)
    assert error(out, expected) < attention_checks.TOLERANCE[BF16]
    assert error(result - 1, expected) < 2e-2


def test_ahead_of_time_compilation(tmp_path):
    assert "loaded and right" in printed("ours", tmp_path)


def test_autocast_in_a_compiled_model():
    ours, theirs = model_and_reference("cuda", torch.float32, 256)
    x = torch.randn(2, 64, 256, device="cuda")
    with torch.autocast("cuda", BF16):
        found = torch.compile(ours, fullgraph=True)(x)
    assert error(found, theirs.double()(x.double())) < 2e-2


def test_parallel_apply():
    pairs = [model_and_reference("cuda", BF16, 256) for _ in range(4)]
    inputs = [new(2, 16 + 8 * i, 256) for i in range(4)]
    for _ in range(3):
        outs = parallel_apply([ours for ours, _ in pairs], [(x,) for x in inputs], devices=[0] * 4)
        for out, x, (_, theirs) in zip(outs, inputs, pairs, strict=True):
            assert error(out, theirs.to(BF16)(x).double()) < 2e-2


def test_distributed_training_on_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(opcheck_calls.__file__).with_name("distributed_training.py")
    # Multicast over NVLink needs a service that not every machine runs.
    variables = {**os.environ, "PYTHONWARNINGS": "ignore", "NCCL_NVLS_ENABLE": "0"}
    result = subprocess.run(
        [sys.executable, str(script), "nccl", str(port)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for name in ("ddp", "fsdp2", "fsdp2, compiled"):
        assert f"{name}: gradients agree" in result.stdout
    assert "tensor parallelism: right or refused" in result.stdout
