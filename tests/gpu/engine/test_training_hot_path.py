"""The warm path of training: gradients after any other call, no synchronization, whole steps in a CUDA graph."""

from __future__ import annotations

import dense_calls
import pytest
import torch
from attention_checks import captured, nothing_synchronizes, problem

import cudnn_sdpa
from benchmarks.tools.ways import until_recorded


def warm(*tensors):
    """Three calls: the first builds the plan, the second finds it, and the third is served as the last call."""
    for _ in range(3):
        result = cudnn_sdpa.sdpa(*tensors)
    return result


CASES = {
    **dense_calls.CASES,
    "bottom-right": {"causal_alignment": "bottom_right"},
    "boolean mask": {"is_causal": False, "mask": "bool", "mask_shape": (2, 1, 64, 96)},
    "mask of a row": {"mask": "float32", "mask_shape": (1, 96), "mask_grad": True},
    "lengths of queries": {"lengths": "q"},
    "softcap and lengths of keys": {"softcap": 5.0, "lengths": "kv"},
    "softcap and lengths of queries": {"softcap": 5.0, "lengths": "q"},
    "negative scale": {"scale": -0.2},
    "expanded gradient": {"grad_layout": "expanded"},
}


class Step:
    """A forward and a backward pass over fixed tensors."""

    def __init__(self, c):
        self.c = c
        self.t = dense_calls.tensors(c)
        self.wanted = ["q", "k", "v", *(["attn_mask"] if c.mask_grad else []), *(["sinks"] if c.sinks else [])]
        for name in self.wanted:
            self.t[name].requires_grad_()
        self.inputs = {name: x for name, x in self.t.items() if name != "grad_out"}

    def __call__(self, **more):
        result = cudnn_sdpa.sdpa(**self.inputs, **dense_calls.options(self.c), **more)
        out = result[0] if isinstance(result, tuple) else result
        gradients = torch.autograd.grad(out, [self.t[name] for name in self.wanted], self.t["grad_out"])
        lse = result[1] if isinstance(result, tuple) else None
        return out.detach(), lse, dict(zip(self.wanted, gradients, strict=True))

    def wrong(self, results):
        """Errors of the results, for unchanged tensors."""
        plain = {name: None if x is None else x.detach() for name, x in self.t.items()}
        *reference, sizes = dense_calls.expected(self.c, plain, None)
        rounding = {name: torch.finfo(self.c.dtype).eps / 4 * size.norm() for name, size in sizes.items()}
        return dense_calls.compare(self.c.dtype, results, tuple(reference), rounding)


@pytest.mark.parametrize("return_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_synchronizes(name, return_lse):
    step = Step(dense_calls.plain(**CASES[name]))
    if "dropout_p" not in CASES[name]:
        assert step.wrong(step(return_lse=True)) == []
    for _ in range(3):
        step(return_lse=return_lse)
    torch.cuda.synchronize()
    with nothing_synchronizes(), cudnn_sdpa.no_plan_builds():
        for _ in range(2):
            step(return_lse=return_lse)
        with torch.no_grad():
            cudnn_sdpa.sdpa(**step.inputs, **dense_calls.options(step.c), return_lse=True)


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout"])
def test_a_captured_step_replays_for_other_data(name):
    """Forward and backward in one CUDA graph, replayed after everything but the layouts has changed."""
    c = dense_calls.plain(**CASES[name])
    step = Step(c)
    graph, results = captured(lambda: step(return_lse=True))
    for number in range(3):
        other = dense_calls.tensors(dense_calls.replace(c, number=number + 1))
        with torch.no_grad():
            for key, x in step.t.items():
                if x is not None and key != "grad_out":
                    x.copy_(other[key])
            for x in (*results[:2], *results[2].values()):
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert step.wrong(results) == []


def test_device_memory_does_not_grow():
    leaves = [x.requires_grad_() for x in problem()]

    def step(count):
        for _ in range(count):
            cudnn_sdpa.sdpa(*leaves).sum().backward()
            cudnn_sdpa.sdpa(*leaves, softcap=9.0).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    until_recorded(lambda: step(1))  # the proof of a recording takes memory, and gives it back to PyTorch
    before = step(20)
    assert step(2000) == before
