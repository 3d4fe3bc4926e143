"""When a call may bypass PyTorch's dispatcher: only if nothing observes or transforms it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_observed, needs_gradient


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def tensors(*, requires_grad=False):
    return [torch.randn(2, 4, 7, 16, requires_grad=requires_grad) for _ in range(3)]


def replaced(position, change):
    result = tensors()
    result[position] = change(result[position])
    return result


def is_plain(*tensors):
    return can_bypass_dispatcher(*tensors) and not needs_gradient(*tensors)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_plain_tensors_bypass_the_dispatcher(mode):
    with mode():
        assert is_plain(*tensors())
        assert is_plain(*tensors()[:2], torch.randn(2, 4, 7, 16).transpose(1, 2))


@pytest.mark.parametrize("position", range(3))
def test_gradients_need_the_dispatcher_unless_disabled(position):
    inputs = replaced(position, lambda tensor: tensor.requires_grad_())
    assert not is_plain(*inputs)
    with torch.no_grad():
        assert is_plain(*inputs)


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    "change", [lambda t: t.as_subclass(Subclass), torch.nn.Parameter], ids=["subclass", "parameter"]
)
def test_subclasses_need_the_dispatcher(position, change):
    assert not is_plain(*replaced(position, change))


def test_dispatch_modes_need_the_dispatcher():
    with Watching():
        assert not is_plain(*tensors())
    with FakeTensorMode():
        assert not is_plain(*tensors())
    assert is_plain(*tensors())


def test_functional_transforms_need_the_dispatcher():
    others, seen = tensors()[:2], []

    def function(q):
        seen.append(is_plain(q, *others))
        return q * 2

    torch.vmap(function)(torch.randn(3, 2, 4, 7, 16))
    torch.func.grad(lambda q: function(q).sum())(tensors()[0])
    torch.func.jvp(function, (tensors()[0],), (tensors()[0],))
    torch.func.functionalize(function)(tensors()[0])
    assert seen == [False] * 4
    assert is_plain(*tensors())


def test_dual_tensors_need_the_dispatcher():
    q, k, v = tensors()
    with forward_ad.dual_level():
        assert not is_plain(forward_ad.make_dual(q, torch.randn_like(q)), k, v)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_traces_need_the_dispatcher():
    seen = []

    def function(q):
        seen.append(is_plain(q, q, q))
        return q * 2

    torch.jit.trace(function, (tensors()[0],), check_trace=False)
    assert seen == [False]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_the_profiler_needs_the_dispatcher():
    assert not is_observed()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert is_observed()
        assert not is_plain(*tensors())
    assert not is_observed()
