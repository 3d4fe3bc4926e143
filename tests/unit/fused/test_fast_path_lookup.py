"""The fast path of graph functions: which calls find a cached call, and which must not; no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from custom_graphs import halves, scaled
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cudnn_sdpa import layer_norm, rms_norm, silu_mul
from cudnn_sdpa.fused.fast_path import FastPath, _signature
from cudnn_sdpa.fused.graph_op import _option_signature

OPTIONS = (True, None, 1.0)


def tensors(*, requires_grad=False):
    return [torch.randn(4, 8, requires_grad=requires_grad), torch.randn(8, requires_grad=requires_grad)]


def known(*calls):
    """A fast path with cached calls of these tensors and options, as calls on a GPU would add them."""
    fast_path, call = FastPath(), stand_in()
    for operands, options in calls:
        fast_path._calls.add(_signature(operands, options, deterministic=False), call)
    return fast_path, call


def stand_in(*, deterministic=False):
    return SimpleNamespace(plan=SimpleNamespace(held=True, key=SimpleNamespace(deterministic=deterministic)), last=None)


@pytest.fixture(params=[False, True], ids=["", "served last"])
def fast_path(request):
    """With one cached call, of `tensors()` and `OPTIONS`, which may be the last one."""
    result, call = known((tensors(), OPTIONS))
    if request.param:
        assert result.find(tensors(), OPTIONS) is call
        assert result._calls.last is not None
    return result


def test_a_repeated_call_is_found():
    fast_path, call = known((tensors(), OPTIONS))
    for _ in range(3):
        assert fast_path.find(tensors(), OPTIONS) is call
    of_parameters = [torch.nn.Parameter(x, requires_grad=False) for x in tensors()]
    assert fast_path.find(of_parameters, OPTIONS) is call


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: [x[:3], w],
        lambda x, w: [x.t().contiguous().t(), w],
        lambda x, w: [x.half(), w],
        lambda x, w: [x, w.half()],
        lambda x, w: [x.to("meta"), w.to("meta")],
        lambda x, w: [x],  # noqa: ARG005
        lambda x, w: [x, w, w],
        lambda x, w: [w, x],
        lambda x, w: [],  # noqa: ARG005
    ],
    ids=["shape", "strides", "dtype", "other dtype", "device", "fewer", "more", "order", "none"],
)
def test_other_tensors_are_other_calls(fast_path, change):
    assert fast_path.find(change(*tensors()), OPTIONS) is None
    assert fast_path.find(tensors(), OPTIONS) is not None


@pytest.mark.parametrize("options", [(True, None, 2.0), (False, None, 1.0), (True, None), "other", None])
def test_other_options_are_other_calls(fast_path, options):
    assert fast_path.find(tensors(), options) is None


@pytest.mark.parametrize("wrong", [None, 1.0, "x", [1.0]])
def test_non_tensors_are_not_found(fast_path, wrong):
    assert fast_path.find([wrong, tensors()[1]], OPTIONS) is None
    assert fast_path.find([tensors()[0], wrong], OPTIONS) is None
    assert fast_path.find(tensors(), [wrong]) is None  # nor unhashable options


def test_a_training_call_is_another_call(fast_path):
    assert fast_path.find(tensors(requires_grad=True), OPTIONS) is None
    with torch.no_grad():
        assert fast_path.find(tensors(requires_grad=True), OPTIONS) is not None


def test_a_change_of_the_grad_mode_is_seen():
    training, idle = (OPTIONS, True), (OPTIONS, False)
    fast_path, call = known((tensors(), training), (tensors(), idle))
    leaves = tensors(requires_grad=True)
    for _ in range(3):
        assert fast_path.find(leaves, training, trains=True) is call
        with torch.no_grad():
            assert fast_path.find(leaves, idle) is call
            assert fast_path.find(leaves, training, trains=True) is None
        assert fast_path.find(leaves, idle) is None
        with torch.inference_mode():
            assert fast_path.find(leaves, training, trains=True) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_last_call_is_found_by_two_tensors():
    fast_path, call = known((tensors(), OPTIONS))
    assert fast_path.find_last(*tensors(), OPTIONS) is None  # no last call yet
    assert fast_path.find(tensors(), OPTIONS) is call
    for _ in range(2):
        assert fast_path.find_last(*tensors(), OPTIONS) is call
    x, weight = tensors()
    assert fast_path.find_last(x, weight, (True, None, 2.0)) is None
    for other in ((x[:3], weight), (x, weight.half()), (x, None), (None, weight), (x, 3.0), (x, x)):
        assert fast_path.find_last(*other, OPTIONS) is None
    assert fast_path.find_last(*tensors(requires_grad=True), OPTIONS) is None
    with torch.no_grad():
        assert fast_path.find_last(*tensors(), OPTIONS) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_path.find_last(*tensors(), OPTIONS) is None
    with torch.profiler.profile():
        assert fast_path.find_last(*tensors(), OPTIONS) is None
    with forward_ad.dual_level():
        assert fast_path.find_last(*tensors(), OPTIONS) is None
    nested = torch.nested.nested_tensor([torch.randn(8), torch.randn(8)])
    assert fast_path.find_last(nested, weight, OPTIONS) is None
    assert fast_path.find_last(*tensors(), OPTIONS) is call


def test_determinism_is_another_call(fast_path, deterministic_algorithms):
    exactly = stand_in(deterministic=True)
    for known in (None, exactly):
        for _ in range(2):
            with deterministic_algorithms():
                assert fast_path.find(tensors(), OPTIONS) is known
            assert fast_path.find(tensors(), OPTIONS) not in (None, exactly)
        fast_path._calls.add(_signature(tensors(), OPTIONS, deterministic=True), exactly)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def forward_mode():
    return forward_ad.dual_level()


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("watcher", [Watching, profiled, forward_mode, autocast], ids=lambda watcher: watcher.__name__)
def test_observed_calls_are_not_found(fast_path, watcher):
    given = tensors()
    with watcher():
        for _ in range(2):
            assert fast_path.find(given, OPTIONS) is None
    assert fast_path.find(given, OPTIONS) is not None


@pytest.mark.parametrize(
    "make", [lambda x: x.as_subclass(Subclass), torch._neg_view], ids=["subclass", "negated when read"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_tensors_that_are_not_plain_memory_are_not_found(fast_path, make, place):
    given = tensors()
    given[place] = make(given[place])
    assert fast_path.find(given, OPTIONS) is None
    assert fast_path.find(tensors(), OPTIONS) is not None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_found(fast_path, layout):
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
    assert fast_path.find([nested, tensors()[1]], OPTIONS) is None
    assert fast_path.find([tensors()[0], nested], OPTIONS) is None


def test_sparse_tensors_are_not_found(fast_path):
    x, weight = tensors()
    assert fast_path.find([x.to_sparse(), weight], OPTIONS) is None


def test_calls_under_functorch_are_not_found(fast_path):
    found, weight = [], tensors()[1]

    def look(x):
        found.append(fast_path.find([x, weight], OPTIONS))
        found.append(fast_path.find(tensors(), OPTIONS))
        return x.sum()

    x = torch.randn(3, 4, 8)
    torch.func.vmap(look, randomness="different")(x)
    torch.func.grad(look)(x[0])
    assert found == [None] * 4


def test_one_tensor_as_two_operands_is_found_but_is_not_the_last_call():
    x = torch.randn(4, 8)
    fast_path, call = known(([x, x], OPTIONS))
    for _ in range(3):
        assert fast_path.find([x, x], OPTIONS) is call
        assert fast_path._calls.last is None
    other = torch.randn(4, 8)
    for _ in range(2):
        assert fast_path.find([x, other], OPTIONS) is call
        assert fast_path.find([x, x], OPTIONS) is call


def test_a_call_of_an_evicted_plan_is_not_the_last_call():
    fast_path, call = known((tensors(), OPTIONS))
    call.plan.held = False
    fast_path.find(tensors(), OPTIONS)
    assert fast_path._calls.last is None
    fast_path._calls._drop(call.plan)
    assert fast_path.find(tensors(), OPTIONS) is None


def test_different_calls_are_distinguished():
    wide = [torch.randn(4, 16), torch.randn(16)]
    fast_path, call = known((tensors(), OPTIONS))
    other = stand_in()
    fast_path._calls.add(_signature(wide, OPTIONS, deterministic=False), other)
    for _ in range(3):
        assert fast_path.find(tensors(), OPTIONS) is call
        assert fast_path.find(wide, OPTIONS) is other


def test_cpu_tensors_and_subclasses_are_not_added():
    fast_path, call = FastPath(), stand_in()
    fast_path.add(tensors(), OPTIONS, call)
    fast_path.add([x.as_subclass(Subclass) for x in tensors()], OPTIONS, call)
    assert len(fast_path._calls) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"power": 1}, {"power": True}),
        ({"power": 1}, {"power": 1.0}),
        ({"power": 0}, {"power": False}),
        ({"power": 1}, {"name": "1"}),
        ({"power": (1, 2)}, {"power": (1, 3)}),
        ({"power": (1, 2)}, {"power": (True, 2)}),
        ({"power": (1, 2)}, {"power": (1.0, 2)}),
        ({"power": ((1,), 2)}, {"power": ((True,), 2)}),
    ],
    ids=str,
)
def test_options_with_equal_values_and_other_types_are_other_calls(one, other):
    x, bias = torch.ones(2, 8), torch.ones(1, 8)
    names = [_option_signature((x, bias, 1.0), options) for options in (one, other)]
    fast_path, _ = known(([x, bias], names[0]))
    for _ in range(2):
        assert fast_path.find([x, bias], names[0]) is not None
        assert fast_path.find([x, bias], names[1]) is None


def test_operands_in_other_positions_are_other_calls():
    x, y = torch.ones(2, 8), torch.ones(2, 8)
    calls = [(x, y, 1.0), (x, None, 1.0), (x, 1.0, y), (x, y), (x, y, 1), (y,)]
    names = {_option_signature(operands, {}) for operands in calls}
    assert len(names) == 6
    assert _option_signature((x, y, 1.0), {}) == _option_signature((y, x, 2.0), {})
    assert _option_signature((x, y, True), {}) != _option_signature((x, y, 1), {})


def test_cpu_tensors_add_no_entries():
    x, weight = torch.randn(4, 8), torch.randn(8)
    for _ in range(2):
        scaled(x, weight, 0.5)
        halves(x)
        rms_norm(x, weight)
        layer_norm(x, weight, weight)
        silu_mul(x)
    assert len(scaled._fast_path._calls) == len(halves._fast_path._calls) == 0
    assert scaled._fast_path._calls.last is None
