"""When a call may bypass PyTorch's dispatcher: only if nothing observes or transforms it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher, is_observed, needs_gradient, tensor_guard


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


class TestGuard:
    """A guard passes calls that are like the one it was made for, in the same state of PyTorch."""

    def test_tensors_of_the_same_layout_pass(self):
        guard = tensor_guard(*tensors())
        assert all(guard(*tensors()) for _ in range(3))

    @pytest.mark.parametrize("position", range(3))
    @pytest.mark.parametrize(
        "change",
        {
            "shape": lambda t: t[:, :, 1:],
            "stride": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "dtype": lambda t: t.half(),
            "device": lambda t: t.to("meta"),
            "requires_grad": lambda t: t.requires_grad_(),
            "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
            "subclass": lambda t: t.as_subclass(Subclass),
            "conjugate": lambda t: torch.complex(t, t).conj(),
            "negative": lambda t: torch.imag(torch.complex(t, t).conj()),
        }.items(),
        ids=lambda change: change[0],
    )
    def test_other_tensors_do_not_pass(self, position, change):
        guard = tensor_guard(*tensors())
        assert not guard(*replaced(position, change[1]))
        assert guard(*tensors())

    @pytest.mark.parametrize("wrong", [None, 3.5, [1.5]])
    def test_non_tensors_do_not_pass(self, wrong):
        guard = tensor_guard(*tensors())
        assert not guard(*replaced(1, lambda _: wrong))

    def test_another_state_of_pytorch_does_not_pass(self):
        guard = tensor_guard(*tensors())
        same, seen = tensors(), []
        with Watching():
            seen.append(guard(*same))
        with torch.inference_mode():
            seen.append(guard(*tensors()))
        torch.vmap(lambda q: seen.append(guard(q, *same[:2])) or q)(torch.randn(3, 2, 4, 7, 16))
        torch.func.jvp(lambda q: seen.append(guard(q, *same[:2])) or q, (same[0],), (same[1],))
        with FakeTensorMode() as mode:
            seen.append(guard(*map(mode.from_tensor, same)))
        assert seen == [False] * 5
        assert guard(*same)
