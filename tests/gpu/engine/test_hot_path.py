"""The warm path: no synchronization, no device-to-host copy, no memory growth."""

from __future__ import annotations

import pytest
import torch
from attention_checks import nothing_synchronizes, problem

import cudnn_sdpa
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


def test_device_memory_does_not_grow():
    q, k, v = problem()
    for _ in range(10):
        cudnn_sdpa.sdpa(q, k, v)
    torch.cuda.synchronize()
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
