"""`explain(…, verify=True)` detects wrong results, and runs the explained call; here with the CPU reference."""

from __future__ import annotations

import pytest
import torch

import cudnn_sdpa.engine.explain  # noqa: F401 - the descriptions
from cudnn_sdpa import OptionError, sdpa, sdpa_varlen
from cudnn_sdpa.attention import reference
from cudnn_sdpa.attention.arguments import ForwardArguments
from cudnn_sdpa.attention.dense import explain as dense_explain
from cudnn_sdpa.attention.varlen import explain as varlen_explain
from cudnn_sdpa.attention.varlen import reference as varlen_reference
from cudnn_sdpa.engine.explain import describer_of

FAULT = 0.01  #: an error far above rounding
LENGTHS_Q, LENGTHS_KV = (5, 0, 7, 3), (4, 2, 9, 0)


def offsets(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def tensors(*shapes, dtype=torch.float32, grad=True):
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def dense(dtype=torch.float32, grad=True, **options):
    q, k, v, mask, sinks = tensors((2, 4, 9, 16), (2, 2, 13, 16), (2, 2, 13, 8), (4, 9, 13), (4,), grad=grad)
    inputs = [x.detach().to(dtype).requires_grad_(grad) for x in (q, k, v)]
    return describer_of(sdpa)(*inputs, attn_mask=mask, sinks=sinks, **{"return_lse": True, "scale": 0.3} | options)


def packed(dtype=torch.float32, grad=True, **options):
    q, k, v = tensors((sum(LENGTHS_Q), 4, 16), *[(sum(LENGTHS_KV), 2, 16)] * 2, dtype=dtype, grad=grad)
    ends = (offsets(LENGTHS_Q), offsets(LENGTHS_KV), max(LENGTHS_Q), max(LENGTHS_KV))
    sinks = torch.randn(4).requires_grad_(grad)
    return describer_of(sdpa_varlen)(q, k, v, *ends, sinks=sinks, **{"return_lse": True, "is_causal": True} | options)


RESULTS = {
    dense: ["out", "lse", "grad q", "grad k", "grad v", "grad attn_mask", "grad sinks"],
    packed: ["out", "lse", "grad q", "grad k", "grad v", "grad sinks"],
}


@pytest.mark.parametrize("call", RESULTS)
@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_right_results_have_small_errors(call, dtype, rounding):
    errors = call(dtype).verify(True)
    assert list(errors) == RESULTS[call]
    assert all(0 <= error < rounding for error in errors.values()), errors
    assert errors["out"] > 0


#: Position of each result in the return value of `reference`.
PLACES = {
    "out": ("attention", 0),
    "lse": ("attention", 1),
    **{f"grad {name}": ("gradients", n) for n, name in enumerate(["q", "k", "v", "attn_mask", "sinks"])},
}


def scaled(x):
    return x * 1.05


def one_row_lost(x):
    """Zeroes the quarter with the largest value: a row of tiny values would not be noticed."""
    x = x.clone()
    if quarter := x.numel() // 4:
        begin = min(int(x.abs().argmax()), x.numel() - quarter)
        x.view(-1)[begin : begin + quarter] = 0
    return x


def one_number_is_nan(x):
    x = x.clone()
    x.view(-1)[-1:] = torch.nan
    return x


@pytest.mark.parametrize("fault", [scaled, one_row_lost, one_number_is_nan])
@pytest.mark.parametrize(("call", "result"), [(call, result) for call, names in RESULTS.items() for result in names])
def test_a_wrong_result_has_a_large_error(monkeypatch, call, result, fault):
    function, number = PLACES[result]
    right = getattr(reference, function)

    def wrong(*arguments):
        """Corrupts the result of the call, but not the float64 result it is compared with."""
        found = list(right(*arguments))
        call = next(x for x in arguments if isinstance(x, ForwardArguments))
        if call.q.dtype != torch.float64:
            found[number] = fault(found[number])
        return tuple(found)

    monkeypatch.setattr(reference, function, wrong)
    errors = call().verify(True)
    assert errors[result] > FAULT
    of_forward = result in ("out", "lse")  # the gradients use it
    others = [name for name in errors if name != result and not (of_forward and name.startswith("grad"))]
    assert all(errors[name] < 1e-5 for name in others), errors


def test_errors_across_sequences_are_detected(monkeypatch):
    right = varlen_reference.sequences

    def sequences(call):
        """Leaves out the first, but not of the float64 call that results are compared with."""
        return list(right(call))[int(call.q.dtype != torch.float64) :]

    monkeypatch.setattr(varlen_reference, "sequences", sequences)
    errors = packed().verify(True)
    assert all(error > FAULT for error in errors.values()), errors


def test_rows_past_the_last_sequence_are_not_compared(monkeypatch):
    run = varlen_explain.VARLEN

    def leave_out(call):
        out, lse = run(call)
        return out.index_fill(0, torch.tensor([10, 11]), torch.nan), lse

    q, ends = torch.randn(12, 2, 16), offsets((3, 7))
    described = describer_of(sdpa_varlen)(q, q, q, ends, ends, 7, 7, return_lse=True)
    monkeypatch.setattr(varlen_explain, "VARLEN", leave_out)
    errors = described.verify(False)
    assert all(error < 1e-5 for error in errors.values())


@pytest.mark.parametrize("call", RESULTS)
@pytest.mark.parametrize(("grad", "return_lse"), [(False, False), (False, True), (True, False), (True, True)])
def test_verify_runs_the_explained_call(monkeypatch, call, grad, return_lse):
    seen = []
    described = call(grad=grad, return_lse=return_lse)
    for module, name in ((dense_explain, "SDPA"), (varlen_explain, "VARLEN")):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda of, run=run: (seen.append(of), run(of))[1])
    errors = described.verify(grad)
    assert [of.with_lse for of in seen] == [return_lse or grad]  # a call that trains has one
    assert seen[0].q.requires_grad == grad
    expected = RESULTS[call] if grad else ["out", "lse"] if return_lse else ["out"]
    assert list(errors) == expected


@pytest.mark.parametrize("call", RESULTS)
def test_unneeded_gradients_are_not_verified(call):
    assert list(call().verify(False)) == ["out", "lse"]


@pytest.mark.parametrize("call", RESULTS)
def test_without_gradients_none_are_computed(call):
    with torch.no_grad():
        described = call(return_lse=False)
        assert described.backward is None
        assert list(described.verify(False)) == ["out"]


@pytest.mark.parametrize("call", RESULTS)
def test_dropout_cannot_be_compared(call):
    with pytest.raises(OptionError, match=r"dropout_p: got 0\.25; expected 0"):
        call(dropout_p=0.25).verify(True)


def test_verify_does_not_modify_its_inputs():
    q, out = torch.randn(1, 2, 8, 16), torch.full((1, 8, 2, 16), 7.0).transpose(1, 2)
    errors = describer_of(sdpa)(q, q, q, out=out).verify(False)
    assert errors["out"] < 1e-5
    assert (out == 7).all()
    leaf = q.clone().requires_grad_()
    describer_of(sdpa)(leaf, leaf, leaf).verify(True)
    assert leaf.grad is None


@pytest.mark.parametrize("call", RESULTS)
def test_autocast_rounding_of_inputs_is_not_an_error(call):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        errors = call().verify(True)
    assert list(errors) == RESULTS[call]
    assert 1e-6 < errors["out"] < 1e-2  # it is computed in bfloat16
    assert errors["lse"] < 1e-5
    assert all(error < 1e-2 for error in errors.values())


def test_a_mask_is_compared_in_its_own_shape():
    q, k, v = tensors(*[(2, 4, 9, 16)] * 3)
    for shape in ((9,), (9, 9), (4, 1, 9), (2, 1, 9, 9)):
        errors = describer_of(sdpa)(q, k, v, attn_mask=torch.randn(shape).requires_grad_()).verify(True)
        assert errors["grad attn_mask"] < 1e-5
