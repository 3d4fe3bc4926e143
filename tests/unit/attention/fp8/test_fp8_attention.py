"""`fp8_attention` and `Fp8Attention` on the CPU: values and gradients against float64, and updates of scales."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from float64_reference import attend as attend_exactly
from float64_reference import gradients
from fp8_layers import E4M3, E5M2, OUTPUT, assert_near, error, lens, qkv, train
from refusals import assert_refused
from torch.utils.checkpoint import checkpoint

from cudnn_sdpa import (
    DeviceError,
    DtypeError,
    Fp8Attention,
    Fp8Scaling,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    cpu_checks,
    fp8_attention,
)
from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.attention.fp8 import fp8_attention as attention_module
from cudnn_sdpa.attention.fp8 import fp8_attention as fp8_attention_module
from cudnn_sdpa.attention.fp8 import quantize as fp8_quantize
from cudnn_sdpa.attention.fp8.quantize import Wanted, dequantize, quantize
from cudnn_sdpa.attention.fp8.scaling_state import (
    AMAX,
    DESCALE,
    DO,
    NAMES,
    SCALE,
    SCALE_S,
    SLOT,
    TINY,
    O,
    Q,
    S,
    V,
    new_table,
    number,
)
from cudnn_sdpa.graph.target import Target

pytestmark = pytest.mark.usefixtures("reference_alone")  # no GPU has kernels for all of these head dims and masks

FORWARD, BACKWARD = slice(0, DO), slice(DO, None)


CASES = {
    "dense": {},
    "causal": {"is_causal": True},
    "bottom-right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_size": {"window_size": (9, 4)},
    "causal window, bottom-right": {"is_causal": True, "window_size": (9, -1), "causal_alignment": "bottom_right"},
    "scale": {"scale": 0.31},
    "lengths": {"seq_lens_q": lens(31, 40), "seq_lens_kv": lens(50, 17), "is_causal": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("grad_dtype", [E5M2, E4M3], ids=["e5m2", "e4m3"])
def test_values_and_gradients_match_float64_up_to_fp8_rounding(options, grad_dtype):
    def current(q, k, v):
        return fp8_attention(q, k, v, grad_dtype=grad_dtype, **options)

    assert_near(train(current), grad_dtype, **options)
    scaling = Fp8Scaling(grad_dtype=grad_dtype, calibration=1)
    for _ in range(3):  # current, then delayed
        assert_near(train(lambda *x: fp8_attention(*x, scaling=scaling, **options)), grad_dtype, **options)
    assert scaling.knows_backward


def test_autograd_saves_half_the_bytes_of_bfloat16():
    kept = []
    q, k, v = qkv()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fp8_attention(q, k, v)
    large = [x for x in kept if x.dim() == 4]
    assert sorted(x.shape for x in large) == sorted(x.shape for x in (q, q, k, v))
    assert {x.element_size() for x in large} == {1}


# Updates of scales


def test_scales_map_the_history_amax_to_the_format_maximum():
    scaling, seen = Fp8Scaling(history=2, auto_update=False), []
    for growth in (1.0, 4.0, 2.0, 0.5, 0.25):
        q, k, v = (x.detach() * growth for x in qkv())
        fp8_attention(q, k, v, scaling=scaling)
        seen.append(torch.stack([x.abs().amax() for x in (q, k, v)]).float())
        assert torch.equal(scaling.amax[:3], seen[-1])
        scaling.update()
        assert (scaling.amax == 0).all()
        peak = torch.stack(seen[-2:]).amax(0)
        torch.testing.assert_close(scaling.scale[:3], 448 / peak)
        assert torch.equal(scaling.amax_history[:3, 0], seen[-1])
    assert scaling.scale[S] == SCALE_S
    assert (scaling.scale[BACKWARD] == 1).all()


def test_most_recent_algorithm_and_margin():
    scaling = Fp8Scaling(algorithm="most_recent", margin=2, history=3, auto_update=False)
    for growth in (4.0, 0.5):
        q, k, v = (x.detach() * growth for x in qkv())
        fp8_attention(q, k, v, scaling=scaling)
        scaling.update()
        torch.testing.assert_close(scaling.scale[Q], 112 / q.abs().amax().float())
    scaling.update()  # a step without calls keeps the scales
    torch.testing.assert_close(scaling.scale[Q], 112 / q.abs().amax().float())


def test_amax_of_results_is_right():
    scaling = Fp8Scaling(auto_update=False)
    _, _, (q, k, v), grad_out = train(lambda *x: fp8_attention(*x, scaling=scaling))
    exact, _, of = gradients({"q": q, "k": k, "v": v}, grad_out)
    expected = {"o": exact, "do": grad_out, "dq": of["q"], "dk": of["k"], "dv": of["v"]}
    for name, tensor in expected.items():
        amax = scaling.amax[NAMES.index(name)].double()
        torch.testing.assert_close(amax, tensor.double().abs().amax(), rtol=0.1, atol=0)
    assert 0 < scaling.amax[S] <= 1
    assert scaling.amax[NAMES.index("dp")] > 0


def test_delayed_scaling_uses_the_previous_step():
    """Values that have grown saturate, once."""
    attend = Fp8Attention(scaling=Fp8Scaling(calibration=1))
    train(attend)
    tensors = [x.detach() * 10 for x in qkv()]
    cut = attend(*tensors)
    exact = fp8_attention(*tensors)
    assert cut.abs().amax() < 0.5 * exact.abs().amax()
    for _ in range(2):  # the inputs first; the output follows a step later
        attend.scaling.update()
        found = attend(*tensors)
    assert error(found, exact.double()) < OUTPUT


def test_current_scaling_follows_the_inputs_at_once():
    attend = Fp8Attention(scaling=Fp8Scaling(inputs="current", margin=1, calibration=1))
    assert_near(train(attend))
    for growth in (1.9, 0.7, 1.5):  # within the margin of the output and the gradients
        q, k, v = qkv()
        tensors = q, k, (v.detach() * growth).requires_grad_()
        assert_near(train(attend, tensors=tensors, grad_scale=1e-4 / growth))
        assert torch.equal(attend.scaling.amax[V], tensors[2].abs().amax().float())


def test_gradients_of_any_magnitude_without_a_history():
    for grad_scale in (1e-12, 1.0, 1e6):
        for grad_dtype in (E5M2, E4M3):
            found = train(lambda *x, dtype=grad_dtype: fp8_attention(*x, grad_dtype=dtype), grad_scale=grad_scale)
            assert_near(found, grad_dtype)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["q", "k", "v", "grad_out"])
def test_non_finite_values_propagate_and_do_not_update_scales(name, value):
    attend = Fp8Attention(scaling=Fp8Scaling(history=3, auto_update=False, calibration=1))
    for _ in range(2):
        train(attend)
        attend.scaling.update()
    before = copy.deepcopy(attend.state_dict())
    tensors = dict(zip("qkv", qkv(), strict=True))
    if name != "grad_out":
        with torch.no_grad():
            tensors[name][1, 0, 5, 7] = value
    out = attend(*tensors.values())
    grad_out = torch.randn(out.shape).bfloat16()
    assert out.isnan().all() == (name != "grad_out")
    if name == "grad_out":
        grad_out[0, 1, 2, 3] = value
    grads = torch.autograd.grad(out, list(tensors.values()), grad_out if name == "grad_out" else out)
    assert all(gradient.isnan().all() for gradient in grads)
    assert not attend.scaling.amax.isfinite().all()
    attend.scaling.update()
    after = attend.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert_near(train(attend))


def test_zeros_have_a_scale():
    attend = Fp8Attention(scaling=Fp8Scaling(calibration=2))
    for _ in range(4):
        zeros = [torch.zeros_like(x).requires_grad_() for x in qkv()]
        out, grads, *_ = train(attend, tensors=zeros)
        assert (out == 0).all()
        assert all(gradient.isfinite().all() for gradient in grads)
    assert attend.scaling.scale[:S].eq(1).all()


@pytest.mark.parametrize("size", [1e-38, 3e38])
def test_scales_of_extreme_values_and_their_inverses_are_finite(size):
    scaling = Fp8Scaling(auto_update=False, margin=6)
    scaling.amax.fill_(size)
    scaling.update()
    assert scaling.scale.isfinite().all()
    tiny = torch.finfo(torch.float32).tiny
    assert (scaling.scale >= tiny).all()
    assert (1 / scaling.scale >= tiny).all()


# Steps


def test_auto_update_precedes_the_first_call_after_a_backward_pass():
    attend = Fp8Attention()
    history = attend.scaling.amax_history
    for step in range(3):
        assert int((history[Q] > 0).sum()) == max(0, step - 1)
        first, second = attend(*qkv()), attend(*qkv())
        assert int((history[Q] > 0).sum()) == step, "the second call of a step must not be one of its own"
        (first.sum() + second.sum()).backward()


def test_micro_batches_are_one_step_without_auto_update():
    attend = Fp8Attention(scaling=Fp8Scaling(auto_update=False))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), attend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_post_hook(lambda *_: Fp8Scaling.update_all(model))
    for step in range(2):
        largest = []
        for _ in range(3):
            _, _, tensors, grad_out = train(attend)
            largest.append([x.detach().abs().amax().float() for x in (*tensors, grad_out)])
            assert int((attend.scaling.amax_history > 0).any(0).sum()) == step
        optimizer.step()
        expected = torch.tensor(largest).amax(0)
        assert torch.equal(attend.scaling.amax_history[[0, 1, 2, DO], 0], expected)
        assert attend.scaling.amax_history[:, : step + 1].gt(0).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_neither_history_nor_gradients(use_reentrant):
    plain, again = (Fp8Attention(scaling=Fp8Scaling(calibration=2)) for _ in range(2))
    for step in range(4):
        torch.manual_seed(step)
        expected = train(plain)
        torch.manual_seed(step)
        q, k, v = qkv()
        out = checkpoint(again, q, k, v, use_reentrant=use_reentrant)
        grad_out = torch.randn(out.shape).to(out.dtype) * 1e-4
        torch.autograd.backward(out, grad_out)
        assert torch.equal(out, expected[0])
        assert all(torch.equal(x.grad, wanted) for x, wanted in zip((q, k, v), expected[1], strict=True))
        for name, tensor in plain.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_a_call_checkpointed_twice_in_a_step_keeps_its_scales():
    """The backward pass of the second call ends no step for the first one, which is recomputed after it."""
    attend = Fp8Attention(scaling=Fp8Scaling(calibration=1))
    train(attend)
    q, k, v = qkv()
    once = checkpoint(attend, q, k, v, use_reentrant=False)
    twice = checkpoint(attend, once, k, v, use_reentrant=False)
    scale = attend.scaling.scale.clone()
    twice.sum().backward()
    assert torch.equal(attend.scaling.scale, scale)
    assert int((attend.scaling.amax_history[Q] > 0).sum()) == 1


def test_the_backward_pass_uses_the_scales_of_its_forward_pass():
    attend = Fp8Attention(scaling=Fp8Scaling(auto_update=False, history=1, calibration=1))
    train(attend)
    attend.scaling.update()
    q, k, v = qkv()
    out = attend(q, k, v)
    grad_out = torch.randn_like(out) * 1e-4
    with torch.no_grad():
        attend(*(x * 100 for x in (q, k, v)))
    wanted = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    recorded = attend.scaling.amax.clone()
    attend.scaling.scale[FORWARD] /= 100  # as an update would
    found = torch.autograd.grad(out, (q, k, v), grad_out)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(attend.scaling.amax, recorded), "a second backward pass of the same call is nothing new"


def test_evaluation_records_nothing_and_keeps_the_scales():
    attend = Fp8Attention(scaling=Fp8Scaling(calibration=1))
    train(attend)
    attend.scaling.update()
    attend.eval()
    before = copy.deepcopy(attend.state_dict())
    for _ in range(2):
        found = train(attend)
    assert_near(found)
    with torch.no_grad():
        attend(*(x * 5 for x in qkv()))
    assert all(torch.equal(attend.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_layer_that_was_never_trained_needs_no_scales():
    q, k, v = qkv(requires_grad=False)
    assert torch.equal(Fp8Attention(is_causal=True).eval()(q, k, v), fp8_attention(q, k, v, is_causal=True))


# State


def test_state_dict_round_trip():
    first = Fp8Attention(scaling=Fp8Scaling(calibration=2))
    for _ in range(3):
        train(first)
    state = copy.deepcopy(first.state_dict())
    assert set(state) == {"scaling.scale", "scaling.amax", "scaling.amax_history"}
    second = Fp8Attention()
    second.load_state_dict(state)
    for step in range(2):
        results = []
        for attend in (first, second):
            torch.manual_seed(step)
            results.append(train(attend)[:2])
        (out, grads), (other, others) = results
        assert torch.equal(out, other)
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
        for name, tensor in first.state_dict().items():
            assert torch.equal(second.state_dict()[name], tensor), name


def test_a_fresh_state_loads_as_fresh():
    attend = Fp8Attention()
    train(attend)
    train(attend)
    attend.load_state_dict(Fp8Attention().state_dict())
    assert not attend.scaling.knows_forward
    assert not attend.scaling.knows_backward
    assert_near(train(attend))


@pytest.mark.parametrize("convert", [torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double])
def test_converting_a_model_leaves_scales_in_float32(convert):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Fp8Attention())
    train(model[1])
    train(model[1])
    before = copy.deepcopy(model[1].state_dict())
    convert(model)
    assert model[0].weight.dtype != torch.float32
    assert all(torch.equal(model[1].state_dict()[name], tensor) for name, tensor in before.items())
    assert_near(train(model[1]))
    assert {buffer.dtype for buffer in model.to("meta")[1].buffers()} == {torch.float32}


@pytest.mark.parametrize("name", ["scale", "amax", "amax_history", "limits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_of_another_dtype_is_refused(name, dtype):
    scaling = Fp8Scaling()
    scaling._buffers[name] = scaling._buffers[name].to(dtype)
    for call in (lambda: fp8_attention(*qkv(), scaling=scaling), scaling.update):
        with pytest.raises(DtypeError, match=f"scaling.{name}.*float32"):
            call()


def test_assigned_state_of_another_dtype_becomes_float32():
    trained, other = Fp8Scaling(history=4), Fp8Scaling(history=4)
    fp8_attention(*qkv(), scaling=trained)
    trained.update()
    other.load_state_dict({name: x.bfloat16() for name, x in trained.state_dict().items()}, assign=True)
    assert {x.dtype for x in other.buffers()} == {torch.float32}
    torch.testing.assert_close(other.scale, trained.scale, rtol=0.01, atol=0)


def test_layers_may_be_created_on_the_meta_device():
    trained = Fp8Scaling(history=4)
    fp8_attention(*qkv(), scaling=trained)
    trained.update()
    state = {name: x.clone() for name, x in trained.state_dict().items()}
    with torch.device("meta"):
        assigned, emptied, fresh = (Fp8Scaling(history=4) for _ in range(3))
    assigned.load_state_dict(state, assign=True)
    emptied.to_empty(device="cpu").load_state_dict(state)
    fresh.to_empty(device="cpu")
    for scaling in (assigned, emptied):
        assert all(torch.equal(x, trained.get_buffer(name)) for name, x in scaling.named_buffers())
        assert scaling.knows_forward
    assert all(torch.equal(x, Fp8Scaling(history=4).get_buffer(name)) for name, x in fresh.named_buffers())


def test_reset_clears_the_history():
    scaling = Fp8Scaling(history=4, calibration=1)
    fp8_attention(*qkv(), scaling=scaling)
    scaling.update()
    assert scaling.knows_forward
    places = [x.data_ptr() for x in scaling.buffers()]
    scaling.reset_parameters()
    assert [x.data_ptr() for x in scaling.buffers()] == places
    assert all(torch.equal(x, Fp8Scaling(history=4).get_buffer(name)) for name, x in scaling.named_buffers())
    assert not scaling.knows_forward


def test_copies_have_the_state_and_repr_has_the_options():
    attend = Fp8Attention(window_size=(3, 0), scaling=Fp8Scaling(history=5, grad_dtype=E4M3))
    train(attend)
    copied = copy.deepcopy(attend)
    train(attend)
    assert (attend.scaling.amax_history != 0).any()
    assert (copied.scaling.amax_history == 0).all()
    assert "window_size=(3, 0)" in repr(copied)
    assert "history=5" in repr(copied)
    assert "grad_dtype=torch.float8_e4m3fn" in repr(copied)


# Autocast, compile and autograd


def test_autocast_casts():
    attend = Fp8Attention(scaling=Fp8Scaling(calibration=1))
    q, k, v = (x.detach().float().requires_grad_() for x in qkv())
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attend(q, k, v)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    halves = [x.detach().bfloat16() for x in (q, k, v)]
    assert error(out, fp8_attention(*halves).double()) < OUTPUT


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # PyTorch's own, which it hides otherwise
def test_compiled_code_breaks_the_graph_around_it():
    attend = Fp8Attention()

    def layer(q, k, v):
        return attend(q * 2, k, v) + 1

    compiled = torch.compile(layer, backend="eager")
    q, k, v = qkv()
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v), layer(q, k, v))
    compiled(q, k, v).sum().backward()
    assert q.grad.abs().sum() > 0
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend="eager", fullgraph=True)(q, k, v)


@pytest.mark.parametrize("lengths", [(5, 0), (0, 5)])
def test_empty_inputs(lengths):
    out, grads, tensors, _ = train(Fp8Attention(), tensors=qkv(lengths=lengths))
    assert (out == 0).all()
    assert all((gradient == 0).all() for gradient in grads)
    assert [gradient.shape for gradient in grads] == [x.shape for x in tensors]


# Quantization in plain PyTorch


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("by_amax", [False, True])
def test_the_scale_table_records_how_tensors_were_quantized(dtype, by_amax):
    x, y = torch.randn(2, 3, 8, 16).half() * 5, torch.randn(2, 8, 3, 16).half().transpose(1, 2)
    given = None if by_amax else torch.rand(10) + 20
    table, record = new_table(x.device), torch.zeros(10)
    found = quantize((x, y), Wanted((Q, V), dtype, 100.0, current=False), table=table, given=given, record=record)
    for row, tensor, made in ((Q, x, found[0]), (V, y, found[1])):
        scale = 100 / tensor.abs().amax().float() if by_amax else given[row]
        torch.testing.assert_close(number(table, SCALE, row), scale.view(1))
        assert torch.equal(number(table, DESCALE, row), 1 / number(table, SCALE, row))
        assert number(table, AMAX, row) == record[row] == tensor.abs().amax()
        assert (made.dtype, made.stride()) == (dtype, tensor.stride())
        difference = made.double() / scale.double() - tensor.double()
        assert (difference.abs() <= (2**-4 if dtype == E4M3 else 2**-3) * tensor.double().abs() + 1e-3).all()
    if by_amax:
        assert number(table, SCALE, O) == number(table, SCALE, V)
        assert number(table, SCALE, S) == SCALE_S
    back = dequantize(found, (Q, V), dtype=torch.bfloat16, table=table, amaxes={O: torch.tensor([3.5])}, record=record)
    torch.testing.assert_close(back[0].float(), found[0].float() * number(table, DESCALE, Q), rtol=2**-8, atol=0)
    assert record[O] == 3.5


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_overflow_saturates(dtype):
    x = (
        torch.tensor([1e-30, 3.0, -3.0, 1e4, -1e4, torch.inf, -torch.inf, torch.nan])
        .bfloat16()
        .repeat(2)
        .view(1, 1, 1, 16)
    )
    table = new_table(x.device)
    (made,) = quantize(
        (x,), Wanted((Q,), dtype, 1.0, current=False), table=table, given=torch.full((10,), 100.0), record=None
    )
    top = torch.finfo(dtype).max
    found = made.float().flatten()[:8].tolist()
    assert found[:3] == [0, *torch.tensor([300.0, -300.0]).to(dtype).tolist()]
    assert found[3:7] == [top, -top, top, -top]
    assert torch.isnan(made.float().flatten()[7])
    assert number(table, AMAX, Q).isnan()


# Wrong arguments


GOOD = dict(zip("qkv", qkv(requires_grad=False), strict=True))
WRONG = {
    "no tensor": ({"q": [1]}, OptionError, "list", "Tensor"),
    "float64": ({name: x.double() for name, x in GOOD.items()}, DtypeError, "float64", "bfloat16 or float16"),
    "float32": ({name: x.float() for name, x in GOOD.items()}, DtypeError, "float32", "bfloat16 or float16"),
    "fp8": ({name: x.to(E4M3) for name, x in GOOD.items()}, DtypeError, "float8_e4m3fn", "bfloat16 or float16"),
    "two dtypes": ({"v": GOOD["v"].half()}, DtypeError, "float16", "bfloat16"),
    "two devices": ({"k": GOOD["k"].to("meta")}, DeviceError, "meta", "cpu"),
    "rank": ({"q": GOOD["q"][0]}, ShapeError, "(4, 40, 32)", "rank 4"),
    "head dim": (dict(zip("qkv", qkv(dim=24, requires_grad=False), strict=True)), ShapeError, "24", "16"),
    "heads": ({"k": GOOD["k"], "q": GOOD["q"][:, :3]}, ShapeError, "2 heads", "divisor"),
    "stride": ({"q": torch.randn(2, 4, 40, 64).bfloat16()[..., ::2]}, LayoutError, "stride 2", "dense"),
    "lengths": ({"seq_lens_kv": lens(1, 2).long()}, DtypeError, "int64", "int32"),
    "alignment": ({"causal_alignment": "left"}, OptionError, "'left'", "top_left"),
    "window_size": ({"window_size": (1, 2, 3)}, OptionError, "(1, 2, 3)", "two integers"),
    "scale": ({"scale": -1.0}, OptionError, "-1.0", "positive"),
    "scaling": ({"scaling": 1.0}, OptionError, "float", "Fp8Scaling"),
    "scaling elsewhere": ({"scaling": Fp8Scaling(device="meta")}, DeviceError, "meta", "cpu"),
    "grad_dtype": ({"grad_dtype": torch.bfloat16}, OptionError, "bfloat16", "float8_e5m2"),
    "another grad_dtype": (
        {"grad_dtype": E5M2, "scaling": Fp8Scaling(grad_dtype=E4M3)},
        OptionError,
        "float8_e5m2",
        "float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_and_change_no_state(case):
    """The first change is the wrong one."""
    changes, kind, got, expected = WRONG[case]
    scaling = Fp8Scaling()
    target = "h200" if case in ("head dim", "stride") else None  # the emulation takes any
    with cpu_checks(target):
        given = {**GOOD, "scaling": scaling, **changes}
        assert_refused(lambda: fp8_attention(**given), kind, next(iter(changes)), got, expected)
    assert (scaling.amax == 0).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("inputs", "late"), ("history", 0), ("history", 2.5), ("margin", -1), ("margin", 7), ("margin", 0.5)),
        *(("calibration", 0), ("calibration", True), ("process_group", 3), ("process_group", "gloo")),
        *(("algorithm", "mean"), ("grad_dtype", torch.float16), ("auto_update", 1)),
    ],
)
def test_wrong_options_of_scales_are_named(name, value):
    with pytest.raises(OptionError) as raised:
        Fp8Scaling(**{name: value})
    assert raised.value.argument == name
    with pytest.raises(OptionError, match="scaling"):
        Fp8Attention(scaling=value)


def test_strided_rows_are_readable_without_a_copy():
    readable = torch.empty(2, 3, 8, 64, dtype=torch.bfloat16)
    assert fp8_quantize.is_readable(readable[:, ::2, 1:, :32])
    assert fp8_quantize.is_readable(readable[:1, :1].expand(4, 3, 8, 64))
    assert not fp8_quantize.is_readable(readable[..., ::2])
    assert not fp8_quantize.is_readable(readable[..., 4:36])
    assert not fp8_quantize.is_readable(torch.empty(2, 3, 8, 68, dtype=torch.bfloat16)[..., :64])
    assert not fp8_quantize.is_readable(readable[:0])


# Behaviour on a GPU


def target(capability):
    return Target((("deviceVer", 10 * capability), ("multiProcessorCount", 100)), 91900, "1.32.0", "a GPU")


@pytest.mark.parametrize(
    ("capability", "dim", "trains", "expected"),
    [
        *((90, 128, False, False), (90, 128, True, False), (90, 64, False, False), (90, 64, True, "head dim 128")),
        *((100, 128, False, True), (100, 64, True, False), (100, 256, False, "head dim"), (120, 64, False, False)),
        *((120, 64, True, "no gradients in FP8"), (89, 128, False, "needs 9.0")),
    ],
)
def test_unsupported_gpus_raise_before_anything_runs(capability, dim, trains, expected, monkeypatch):
    """Also tests that cuDNN writes 16 bits where it can, unless gradients are needed."""
    monkeypatch.setattr(attention_module, "live_target", lambda _: target(capability))
    shapes = (2, 4, 64, dim), (2, 2, 96, dim), (2, 2, 96, dim)
    options = Softmax(is_causal=True)

    def ask():
        return attention_module._support.__wrapped__(0, shapes, (False, True), options, trains)

    if isinstance(expected, bool):
        assert ask() is expected
    else:
        with pytest.raises(UnsupportedError, match="fp8_attention") as raised:
            ask()
        assert expected in " ".join(raised.value.reasons)


def test_a_16_bit_output_updates_the_amax_too():
    q, k, v = qkv(requires_grad=False)
    results = []
    for half_output in (False, True):
        scaling = Fp8Scaling(auto_update=False)
        call = fp8_attention_module.Call({"is_causal": True}, scaling, E5M2, deterministic=False)
        made = fp8_attention_module.forward(q, k, v, call, half_output=half_output)
        exact, _ = attend_exactly(q, k, v, is_causal=True)
        assert made.out.dtype == torch.bfloat16
        assert error(made.out, exact) < OUTPUT
        results.append((error(made.out, exact), scaling.amax))
    assert results[1][0] < results[0][0], "it is rounded to FP8 all the same"
    assert torch.equal(results[0][1], results[1][1])
    q[0, 1, 2, 3] = torch.nan
    assert fp8_attention_module.forward(q, k, v, call, half_output=True).out.isnan().all()


def test_kernel_constants_match_the_scale_table():
    source = fp8_quantize.SOURCE.read_text()
    numbers = {"TENSORS": len(NAMES), "SLOT": SLOT, "Q": Q, "V": V, "S": S, "O": O, "SCALE_S": f"{SCALE_S}f"}
    for name, value in numbers.items():
        assert f"#define {name} {value}" in source
    assert float(re.search(r"#define TINY (\S+)f ", source)[1]) == TINY
