"""`register` and `unregister`: PyTorch's registry, versions of PyTorch, fallbacks to what was there before."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import gpu_on_the_cpu

from cudnn_sdpa import LibraryError, OptionError, UnsupportedError, cpu_checks, fallback, sdpa
from cudnn_sdpa.integrations import pytorch, pytorch_dense, pytorch_kernels
from cudnn_sdpa.integrations.pytorch import NAME, register, unregister
from cudnn_sdpa.integrations.pytorch_kernels import Kernel

forward = torch.ops.aten._scaled_dot_product_cudnn_attention
attention = torch.nn.attention
has_registry = hasattr(attention, "activate_flash_attention_impl")
can_restore = hasattr(attention, "restore_flash_attention_impl")
needs_registry = pytest.mark.skipif(not can_restore, reason="this PyTorch's registry takes nothing away")


@pytest.fixture(autouse=True)
def clean():
    unregister()
    pytorch_kernels._allowed.clear()
    yield
    unregister()
    pytorch_kernels._allowed.clear()


def run():
    q = k = v = torch.ones(1, 1, 8, 8)
    return forward(q, k, v, None, False)[0]


def is_there():
    try:
        return bool((run() == 1).all())
    except NotImplementedError:
        return False


def test_it_can_be_there_and_taken_away_any_number_of_times():
    for _ in range(3):
        assert not is_there()
        register(device="cpu")
        register(device="cpu")
        assert is_there()
        unregister()
        assert not is_there()
        unregister()


@needs_registry
def test_pytorchs_registry_knows_it_and_takes_it_away():
    register(device="cpu")
    assert NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() == NAME
    attention.restore_flash_attention_impl()
    assert not is_there()
    attention.activate_flash_attention_impl(NAME)
    assert is_there()
    unregister()
    assert attention.current_flash_attention_impl() is None


@needs_registry
def test_another_implementation_takes_its_place():
    removed = []
    attention.register_flash_attention_impl(
        "another", register_fn=lambda: SimpleNamespace(remove=lambda: removed.append(1))
    )
    register(device="cpu")
    attention.activate_flash_attention_impl("another")
    assert not is_there()
    register(device="cpu")
    assert removed == [1]
    assert is_there()


def test_without_a_registry_it_has_the_same_effect(monkeypatch):
    for name in ("activate_flash_attention_impl", "restore_flash_attention_impl", "register_flash_attention_impl"):
        monkeypatch.delattr(attention, name, raising=False)
    for _ in range(2):
        register(device="cpu")
        assert is_there()
        unregister()
        assert not is_there()


def test_a_registry_that_remembers_what_was_active(monkeypatch):
    """PyTorch 2.10's takes nothing away, and does not activate twice."""
    active = []

    def activate(name):
        if name not in active:
            active.append(name)
            implementations[name]()

    implementations = {}
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate, raising=False)
    monkeypatch.setattr(
        attention,
        "register_flash_attention_impl",
        lambda name, register_fn: implementations.update({name: register_fn}),
        raising=False,
    )
    monkeypatch.delattr(attention, "restore_flash_attention_impl", raising=False)
    for _ in range(2):
        register(device="cpu")
        assert is_there()
        unregister()
        assert not is_there()


@pytest.mark.parametrize("device", ["gpu", None, 0])
def test_an_unknown_device(device):
    with pytest.raises(OptionError, match="device"):
        register(device=device)
    assert not is_there()


def test_without_a_gpu_it_registers_for_gpus():
    register()
    assert not is_there()  # on the CPU


def test_importing_it_registers_nothing(run_python):
    ran = run_python("""
import cudnn_sdpa.integrations.pytorch, torch
q = torch.ones(1, 1, 8, 8)
try:
    torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, q, None, False)
except NotImplementedError as error:
    print(type(error).__name__)
""")
    assert ran.stdout == "NotImplementedError\n"


# Versions of PyTorch.


def schema(*arguments, returns=1):
    """A schema of these arguments: names, or pairs of a name and a default."""
    made = []
    for argument in arguments:
        name, *default = argument if isinstance(argument, tuple) else (argument,)
        made.append(
            SimpleNamespace(
                name=name,
                kwarg_only=name == "scale",
                default_value=default[0] if default else None,
                has_default_value=lambda known=bool(default): known,
            )
        )
    return SimpleNamespace(name="attn::op", arguments=made, returns=[None] * returns)


def function(query, key, value, is_causal=False, window=None, *, scale=None):
    return query, key, value, is_causal, window, scale


QKV = tuple(torch.zeros(1) for _ in range(3))


def test_arguments_are_bound_by_name():
    kernel = Kernel(function, 1, schema("query", "key", "value", ("window", None), ("is_causal", False)), None)
    assert kernel(None, *QKV, [1, 0], True) == (*QKV, True, [1, 0], None)
    assert kernel(None, *QKV) == (*QKV, False, None, None)
    older = Kernel(function, 1, schema("query", "key", "value"), None)
    assert older(None, *QKV) == (*QKV, False, None, None)


def test_an_unknown_argument_is_refused_unless_it_is_the_default():
    kernel = Kernel(
        function, 1, schema("query", "key", "value", ("is_causal", False), ("sinks", None), ("scale", None)), None
    )
    assert kernel(None, *QKV, True, None, scale=2.0) == (*QKV, True, None, 2.0)
    for sinks in (torch.zeros(2), 3):
        with pytest.raises(UnsupportedError, match="attn::op with sinks"):
            kernel(None, *QKV, True, sinks)


@pytest.mark.parametrize(
    "other",
    [schema("query", "key", "value", "sinks"), schema("query", "key"), schema("query", "key", "value", returns=2)],
    ids=["a new argument", "one less", "another result"],
)
def test_an_operator_that_nobody_knows_is_refused_when_it_is_registered(other):
    with pytest.raises(LibraryError, match="is not what this version of cudnn_sdpa knows"):
        Kernel(function, 1, other, None)


def test_a_failed_registration_leaves_nothing(monkeypatch):
    monkeypatch.setitem(pytorch._FUNCTIONS["aten"], "_scaled_dot_product_cudnn_attention", (pytorch_dense.attention, 8))
    with pytest.raises(LibraryError):
        register(device="cpu")
    monkeypatch.undo()
    assert not is_there()
    register(device="cpu")
    assert is_there()


# Fallbacks.


@pytest.fixture
def before():
    """A kernel that was there before: it gives what no other does, and counts its calls."""
    calls = []

    def forward(query, key, *_, **__):
        calls.append("forward")
        out, lse = query * 0 + 7, query.new_zeros((*query.shape[:3], 1))
        numbers = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        return out, lse, None, None, query.shape[2], key.shape[2], *numbers, None

    def backward(_, query, key, value, *__, **___):
        calls.append("backward")
        return query * 0 + 1, key * 0 + 2, value * 0 + 3

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", backward, "CPU")
    yield calls
    library._destroy()


@pytest.fixture
def on_gpu():
    """Calls are as on a GPU: an H200."""
    with gpu_on_the_cpu(), cpu_checks(None):
        yield


def unsupported():
    """Tensors whose gradients cuDNN does not compute on an H200."""
    return [torch.randn(1, 2, 8, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def test_what_was_there_before_runs_only_if_asked_for(before, on_gpu, caplog):  # noqa: ARG001
    register(device="cpu")
    q, k, v = unsupported()
    with pytest.raises(UnsupportedError, match="head dim"):
        forward(q, k, v, None, True)
    assert before == []
    with fallback("torch"), caplog.at_level(logging.WARNING, "cudnn_sdpa"):
        out = forward(q, k, v, None, True)[0]
    assert before == ["forward"]
    assert (out == 7).all()
    assert "running on PyTorch instead" in caplog.text
    with pytest.raises(UnsupportedError):
        forward(q, k, v, None, True)


def test_supported_calls_do_not_fall_back(before):
    register(device="cpu")
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with fallback("torch"):
        out = forward(q, k, v, None, True)[0]
    torch.testing.assert_close(out, sdpa(q, k, v))
    out.sum().backward()
    assert before == []


def test_gradients_may_fall_back_where_the_forward_pass_might(before, monkeypatch):
    """Autograd's threads do not have the setting."""
    register(device="cpu")
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with fallback("torch"):
        out = forward(q, k, v, None, True)[0]
    other = forward(q[:, :, :4], k, v, None, True)[0]

    def declines(_):
        raise UnsupportedError("gradients", ["nobody has them"])

    monkeypatch.setattr(pytorch_dense.SdpaBackwardCall, "check", declines)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.unique().item() for x in grads] == [1, 2, 3]
    assert before == ["backward"]
    with pytest.raises(UnsupportedError, match="nobody has them"):
        other.sum().backward()


def test_dropout_does_not_fall_back(before, on_gpu):  # noqa: ARG001
    register(device="cpu")
    q, k, v = unsupported()
    with fallback("torch"), pytest.raises(UnsupportedError, match="does not fall back"):
        forward(q, k, v, None, True, 0.5)
    assert before == []


def test_wrong_arguments_do_not_fall_back(before):
    register(device="cpu")
    q = torch.randn(1, 2, 8, 16)
    with fallback("torch"), pytest.raises(ValueError, match="key"):
        forward(q, q[..., :8], q, None, False)
    assert before == []


def test_without_anything_before_it_raises(on_gpu):  # noqa: ARG001
    register(device="cpu")
    q, k, v = unsupported()
    with fallback("torch"), pytest.raises(UnsupportedError, match="head dim"):
        forward(q, k, v, None, True)


def test_what_was_there_before_is_there_again(before):
    register(device="cpu")
    assert is_there()
    unregister()
    assert (run() == 7).all()
    assert before == ["forward"]


def test_the_memory_of_fallbacks_is_bounded(before, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(pytorch_kernels, "MAX_ALLOWED", 3)
    register(device="cpu")
    with fallback("torch"):
        for length in range(8, 16):
            q = torch.randn(1, 1, length, 8)
            forward(q, q, q, None, False)
    assert 1 <= len(pytorch_kernels._allowed) <= 3


def test_registering_again_takes_nothing_from_other_threads():
    register(device="cpu")
    is_over, failed, right = threading.Event(), [], [0, 0]

    def call(thread):
        while not is_over.is_set():
            if is_there():
                right[thread] += 1
            else:
                failed.append(thread)

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    while not failed and min(right) < 20:
        register(device="cpu")
    is_over.set()
    for thread in threads:
        thread.join()
    assert failed == []
