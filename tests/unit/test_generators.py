"""Random valid calls of every operation on CPU tensors, against float64: the same calls in every run.

A failure prints the command that repeats it.
"""

from __future__ import annotations

import generators
import pytest
import torch
from float64_reference import Precision, attention, attention_bounds, seen_keys, sees

#: Number of calls of each operation, in CI and in longer runs.
COUNTS = {"sdpa": 40, "conv2d": 14, "sdpa_fp8": 14, "sdpa_varlen": 14}
USUAL = 12


def faults(name: str, seeds: range) -> list[str]:
    """Errors of calls, each with the command that repeats it."""
    found = []
    for seed in seeds:
        outcome = generators.attempt(name, seed)
        if outcome.kind in ("wrong", "crashed"):
            found.append("\n    ".join([f"{generators.line(name, seed, 'cpu')}  # {outcome.kind}", *outcome.problems]))
    return found


@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_calls_are_right_or_declined(name):
    found = faults(name, range(COUNTS.get(name, USUAL)))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 500, 50))
@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_many_calls_are_right_or_declined(name, first):
    found = faults(name, range(first, first + 50))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_a_call_is_a_function_of_its_seed(name):
    if generators.OPERATIONS[name].session.__func__ is not generators.Operation.session:
        pytest.skip("it is no single call")
    for seed in range(12):
        assert generators.draw(name, seed) == generators.draw(name, seed)
    assert len({str(generators.draw(name, seed)) for seed in range(12)}) > 8


def test_generated_calls_cover_every_corner_case():
    cases = [generators.draw("sdpa", seed, "cuda") for seed in range(800)]
    masks = [case.tensors["attn_mask"] for case in cases if "attn_mask" in case.tensors]
    assert {len(mask.shape) for mask in masks} == {0, 1, 2, 3, 4}
    for position, name in ((2, "q"), (2, "k"), (1, "k"), (0, "q")):
        assert any(case.tensors[name].shape[position] == 1 for case in cases)
    assert any(mask.shape and mask.shape[-1] == 1 for mask in masks)
    assert any(len(mask.shape) > 1 and mask.layout.order[-1] != len(mask.shape) - 1 for mask in masks)
    assert {case.mode for case in cases} >= {
        "eager",
        "aot_eager",
        "inductor",
        "autocast",
        "checkpoint",
    }
    assert {case.grad for case in cases} == set(generators.GRADIENTS)
    assert {case.third for case in cases} == set(generators.THIRD)
    assert any(mask.values.filler == -1e9 and mask.values.row for mask in masks)
    kernels = [generators.draw("conv2d", seed, "cuda").tensors["weight"].shape[2:] for seed in range(200)]
    assert {(1, 3), (3, 1), (1, 1), (5, 1)} <= set(kernels)


def test_bounds_detect_small_errors():
    """A factor of 1.05 on the weights of one row exceeds the bound of bfloat16 rounding."""
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(3))
    made = attention(q, k, v)
    bound = attention_bounds(made, q, k, v, torch.randn_like(v), Precision.of(torch.bfloat16))["out"]
    assert generators.compared("out", made.out * 1.001, made.out, bound) == []
    off = made.out.clone()
    off[0, 1, 3] *= 1.2
    assert len(generators.compared("out", off, made.out, bound)) == 1
    off[0, 1, 3] = torch.nan
    assert len(generators.compared("out", off, made.out, bound)) == 1


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window_size", [None, (0, -1), (2, 1), (-1, 0)])
def test_vectorized_visibility_matches_single_positions(alignment, window_size):
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "causal_alignment": alignment, "window_size": window_size}
        options |= {"seq_lens_q": torch.tensor([3, 5, 0]), "seq_lens_kv": torch.tensor([7, 2, 4])}
        found = seen_keys(3, 5, 7, options)
        for b, (nq, nk) in enumerate(((3, 7), (5, 2), (0, 4))):
            assert found[b, 0].tolist() == [[sees(i, j, nq, nk, options) for j in range(7)] for i in range(5)]
