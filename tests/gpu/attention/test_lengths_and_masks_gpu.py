"""The kernels that compute what plans read of lengths and of `attn_mask`, against PyTorch, and in calls."""

from __future__ import annotations

import pytest
import torch
from attention_checks import assert_same, make, nothing_synchronizes
from kernel_formulas import LengthsCase, MaskCase, assert_both, bias

from cudnn_sdpa import no_plan_builds, sdpa
from cudnn_sdpa.attention.bias import BiasKernel, bias_layout
from cudnn_sdpa.engine import launch
from cudnn_sdpa.graph.layouts import ALIGNMENT
from cudnn_sdpa.plans.autotune import tensor_at

DEVICE = torch.device("cuda", 0)
POISON = 77


@pytest.fixture
def poisoned(monkeypatch):
    allocate = launch.allocate
    monkeypatch.setattr(launch, "allocate", lambda *layout: allocate(*layout).fill_(POISON))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["prefill", "decode", "softcap"])
def test_lengths_are_those_of_the_formulas(kind):
    for seed in range(100):
        case = LengthsCase.drawn(seed, softcap=kind == "softcap", device="cuda")
        kernel = case.kernel(decode=kind == "decode")
        made = kernel(**case.addresses)
        for name, tensor in case.expected(decode=kind == "decode").items():
            found = made[kernel.offsets[name] // 4 :][: tensor.numel()].view(tensor.shape)
            assert torch.equal(found, tensor), (seed, name)


@pytest.mark.usefixtures("poisoned")
def test_the_bias_is_that_of_the_formulas():
    for seed in range(500):
        case = MaskCase.drawn(seed, device="cuda")
        given = case.mask, case.q, case.skv, case.masked_rows
        kernel, address = BiasKernel(*given), case.mask.data_ptr()
        made = kernel(attn_mask=address)
        where = [made.data_ptr()]
        if kernel.reads_mask_at is not None and (address + kernel.reads_mask_at.offset) % ALIGNMENT == 0:
            where.append(address + kernel.reads_mask_at.offset)
        for found in where:
            assert torch.equal(tensor_at(found, bias_layout(*given), DEVICE), bias(*given)), seed


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kind", ["prefill", "decode", "softcap"])
def test_one_launch_makes_the_bias_and_what_plans_read_of_lengths(kind):
    for seed in range(100):
        lengths = LengthsCase.drawn(seed, softcap=kind == "softcap", device="cuda")
        assert_both(MaskCase.drawn(seed, device="cuda"), lengths, decode=kind == "decode")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 2**34,
    reason="needs 16 GiB of GPU memory",
)
def test_a_bias_of_more_than_2_to_the_32_elements():
    rows, skv = 2**17 + 3, 2**15
    mask = torch.rand(1, 1, rows, 1, device="cuda") > 0.5
    q = torch.empty(1, 1, 1, 8, dtype=torch.bfloat16, device="cuda").expand(1, 1, rows, 8)
    made = BiasKernel(mask, q, skv)(attn_mask=mask.data_ptr())
    found = made.view(torch.int16).view(rows, skv)
    wanted = torch.where(mask, 0.0, -torch.inf).to(torch.bfloat16).view(torch.int16).view(rows)
    assert torch.equal(found.amax(1), wanted)
    assert torch.equal(found.amin(1), wanted)


def calls(device="cuda"):
    """Calls whose lengths or masks are computed by a kernel before the plan, and these tensors."""
    q, k, v = (make("bhsd", 3, 4, n, 64, torch.bfloat16, device=device) for n in (100, 164, 164))
    lengths = torch.tensor([100, 0, 57], dtype=torch.int32, device=device)
    mask = torch.rand(3, 1, 100, 164, device=device) > 0.5
    return {
        "prefill": (lambda: sdpa(q, k, v, seq_lens_q=lengths, seq_lens_kv=lengths), lengths),
        "decode": (lambda: sdpa(q[:, :, :1], k, v, seq_lens_q=lengths, seq_lens_kv=lengths), lengths),
        "softcap": (lambda: sdpa(q, k, v, softcap=20.0, window_size=(31, 0), seq_lens_kv=lengths), lengths),
        "mask": (lambda: sdpa(q, k, v, attn_mask=mask), mask),
        "mask, lengths": (lambda: sdpa(q, k, v, attn_mask=mask, seq_lens_kv=lengths), mask),
    }


@pytest.mark.parametrize("name", ["prefill", "decode", "softcap", "mask", "mask, lengths"])
def test_a_cuda_graph_reads_new_values(name):
    call, data = calls()[name]
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), no_plan_builds():
        out = call()
    for _ in range(2):
        data.copy_(data.flip(0))
        out.fill_(torch.nan)
        graph.replay()
        assert_same(out, call())


def test_nothing_waits():
    warm = [call for call, _ in calls().values()]
    wanted = [call() for call in warm]
    torch.cuda.synchronize()
    with nothing_synchronizes():
        found = [call() for call in warm]
    for x, y in zip(found, wanted, strict=True):
        assert_same(x, y)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["prefill", "decode", "softcap", "mask", "mask, lengths"])
def test_tensors_on_a_gpu_that_is_not_the_current_one(name):
    call, _ = calls("cuda:1")[name]
    with torch.cuda.device(1):
        wanted = call()
    with torch.cuda.device(0):
        assert_same(call(), wanted)
        assert_same(call(), wanted)
