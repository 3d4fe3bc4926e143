"""Tensors on two GPUs are told apart by the indices of their devices, without a GPU: by tensors without memory."""

from __future__ import annotations

import pytest
import torch
from contract.operations import OPERATIONS
from torch._subclasses.fake_tensor import FakeTensorMode

import cudnn_sdpa
from cudnn_sdpa import DeviceError
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.sdpa import SDPA
from cudnn_sdpa.engine.launch import check_one_device, layout_signature
from cudnn_sdpa.fused.checks import check_beside
from cudnn_sdpa.fused.norm_graphs import rms_norm_rows


@pytest.fixture
def two():
    with FakeTensorMode():
        yield tuple(torch.empty(2, 8, device=f"cuda:{index}") for index in range(2))


def test_checks_compare_indices(two):
    first, second = two
    check_one_device("ab", (first, first))
    check_beside("b", first, "a", first)
    with pytest.raises(DeviceError, match="b: got cuda:1; expected cuda:0, the device of a"):
        check_one_device("ab", (first, second))
    with pytest.raises(DeviceError, match="b: got cuda:1; expected cuda:0, the device of a"):
        check_beside("b", second, "a", first)


def test_calls_of_another_gpu_are_not_known_ones(two):
    first, second = two
    assert layout_signature(first) == layout_signature(first.clone())
    assert layout_signature(first) != layout_signature(second)


def test_a_call_on_another_gpu_has_another_signature(two):
    """Or it would be launched on the GPU of the first, with that one's plan."""
    calls = [SdpaCall(*[torch.empty(1, 2, 8, 16, device=x.device)] * 3) for x in two]
    assert SDPA.signature(calls[0]) == SDPA.signature(calls[0]._replace(q=calls[0].k))
    assert SDPA.signature(calls[0]) != SDPA.signature(calls[1])
    rows = [rms_norm_rows.signature((x, None, 1e-6), {}, trains=False) for x in two]
    assert rows[0] != rows[1]


def empty_like(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


#: Calls on pages index such tensors before the check, which a PyTorch without CUDA cannot.
NAMES = [name for name, example in OPERATIONS.items() if len(example.make()) > 1 and "page_table" not in example.make()]


@pytest.mark.parametrize("name", NAMES)
def test_calls_with_a_tensor_on_another_gpu_are_refused(name):
    example = OPERATIONS[name]
    made = example.make()
    with cudnn_sdpa.cpu_checks(None), FakeTensorMode():
        on = [{n: empty_like(x, f"cuda:{index}") for n, x in made.items()} for index in range(2)]
        for moved in made:
            with pytest.raises(DeviceError, match="cuda:1"):
                example({**on[0], moved: on[1][moved]})
