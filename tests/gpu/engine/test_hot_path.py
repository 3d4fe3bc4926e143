"""The warm path: no synchronization, no device-to-host copy, no memory growth."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from attention_checks import nothing_synchronizes, problem
from paged_batches import batch_on_pages

import cudnn_sdpa
from benchmarks.tools.ways import until_recorded
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.sdpa import SDPA


def warm(*tensors, **options):
    """Three calls: the first builds the plan, the others find it."""
    for _ in range(3):
        result = cudnn_sdpa.sdpa(*tensors, **options)
    assert len(SDPA.table)
    return result


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "lse": {"return_lse": True, "scale": 0.2},
    "lengths": {"lengths": True},
    "lengths and lse": {"lengths": True, "return_lse": True},
}


@pytest.mark.parametrize("sq", [1, 64, 120], ids=["decode", "prefill", "fully masked rows"])
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_synchronizes(name, sq):
    q, k, v = problem(sq=sq)
    options = dict(OPTIONS[name])
    if options.pop("lengths", False):
        options["seq_lens_kv"] = torch.tensor([96, 33], dtype=torch.int32, device="cuda")
    first = warm(q, k, v, **options)
    inputs = SDPA.inputs_of(
        from_fields(ForwardArguments, q, k, v, **{name: x for name, x in options.items() if name != "return_lse"})
    )
    operators = torch.ops.cudnn_sdpa
    operator = operators.sdpa_forward_lse if "return_lse" in options else operators.sdpa_forward
    torch.cuda.synchronize()
    with nothing_synchronizes():
        again = cudnn_sdpa.sdpa(q, k, v, **options)
        through_dispatcher = operator(*inputs)
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    torch.testing.assert_close(through_dispatcher, first, atol=0, rtol=0)


@pytest.mark.parametrize("return_lse", [False, True])
def test_results_are_written_where_the_caller_says(return_lse):
    """A warm call neither waits nor copies, and is refused where its own addresses do not fit."""
    q, k, v = problem(sq=64)
    packed = batch_on_pages([1, 4, 70], [300, 4, 90], dims=(64, 64), page=16, dtype=torch.bfloat16, device="cuda")
    calls = (
        lambda out: cudnn_sdpa.sdpa(q, k, v, return_lse=return_lse, out=out),
        lambda out: cudnn_sdpa.sdpa_paged_varlen(**packed, return_lse=return_lse, out=out),
    )
    for call in calls:
        expected = call(None) if return_lse else (call(None),)
        out = torch.empty_like(expected[0])
        shifted = torch.empty(out.numel() + 1, dtype=out.dtype, device="cuda")[1:].as_strided(out.shape, out.stride())
        for number in range(4):
            out.fill_(torch.nan)
            version = out._version
            with nothing_synchronizes() if number else contextlib.nullcontext():
                found = call(out) if return_lse else (call(out),)
            assert found[0] is out
            assert out._version == version + 1
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
            with pytest.raises(cudnn_sdpa.LayoutError, match=r"^out: got an address 2 bytes past"):
                call(shifted)
    with pytest.raises(cudnn_sdpa.LayoutError, match=r"^out: got memory that overlaps q;"):
        calls[0](q)


def test_device_memory_does_not_grow():
    q, k, v = problem()
    until_recorded(lambda: cudnn_sdpa.sdpa(q, k, v))  # the proof of a recording takes memory, and gives it back
    torch.cuda.synchronize()
    gc.collect()  # tensors of other tests
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):  # other processes may allocate meanwhile; a leak grows in every round
        free = torch.cuda.mem_get_info()[0]
        for _ in range(5_000):
            cudnn_sdpa.sdpa(q, k, v)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == allocated
        assert torch.cuda.memory_reserved() == reserved
        grown = free - torch.cuda.mem_get_info()[0]
        if grown < 4 << 20:
            break
    else:
        pytest.fail(f"{grown} bytes more in the last round")
