"""Launches of dense calls get aligned addresses and the layouts of their keys, and so compute the right values.

Fake plans read and write CPU memory at the addresses of a launch, with nothing but their keys, in float64.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from fake_gpu import gpu_on_the_cpu, graph_of
from float64_reference import gradients
from random_tensors import somewhere

import cudnn_sdpa
from cudnn_sdpa import LayoutError, sdpa

SKV, SQ = (1, 2, 3, 7, 8, 9), (1, 2, 64, 129)


@pytest.fixture(autouse=True)
def gpu():
    with gpu_on_the_cpu():
        yield


def assert_right(tensors, rng, dtype, **options):
    """Runs both passes by launches, and compares them with float64."""
    q, v, mask = tensors["q"], tensors["v"], tensors.get("attn_mask")
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in tensors.items()}
    out, lse = sdpa(**leaves, **options, return_lse=True)
    grad_out = somewhere(torch.randn(*q.shape[:3], v.shape[3], dtype=dtype), rng)
    trained = {name: x for name, x in leaves.items() if x.requires_grad}
    found = dict(zip(trained, torch.autograd.grad(out, list(trained.values()), grad_out), strict=True))
    wanted, wanted_lse, by_tensor = gradients(tensors, grad_out, **options)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-4)
    assert found.keys() == by_tensor.keys()
    for name, exact in by_tensor.items():
        gradient = found[name]
        norm = exact.norm().clamp_min(0.1 * grad_out.double().norm())  # zero but for rounding, if there is one key
        assert (gradient.double() - exact).norm() / norm < 3e-2, name
        if name == "attn_mask":
            assert gradient.stride() == torch.empty_like(mask).stride()


@pytest.mark.sample(4)
@pytest.mark.parametrize("skv", SKV)
@pytest.mark.parametrize("sq", SQ)
def test_every_operand_has_the_address_and_layout_that_the_plan_reads(sq, skv):
    """Masks broadcast along any dimensions, in any memory, with every option that hides keys."""
    rng = random.Random(sq * 100 + skv)
    torch.manual_seed(sq * 100 + skv)
    batch, heads, heads_kv, dtype = 2, 4, 2, torch.float16
    repeated = list(itertools.product((True, False), repeat=4))
    for number, dims in enumerate((*repeated, None)):
        for is_causal, alignment in ((False, "top_left"), (True, "top_left"), (True, "bottom_right")):
            tensors = {
                "q": torch.randn(batch, heads, sq, 8, dtype=dtype),
                "k": torch.randn(batch, heads_kv, skv, 8, dtype=dtype),
                "v": torch.randn(batch, heads_kv, skv, 16, dtype=dtype),
            }
            if rng.random() < 0.4:
                tensors["sinks"] = torch.randn(9)[1:5] if rng.random() < 0.5 else torch.randn(heads)
            if rng.random() < 0.3 and dims is None:
                tensors["seq_lens_kv"] = torch.randint(0, skv + 1, (batch,), dtype=torch.int32)
            if dims is not None:
                shape = [1 if one else n for one, n in zip(dims, (batch, heads, sq, skv), strict=True)]
                kind = rng.choice([torch.bool, torch.float16, torch.float32])
                mask = torch.rand(shape) > 0.3 if kind is torch.bool else torch.randn(shape, dtype=kind)
                mask = somewhere(mask, rng)
                tensors["attn_mask"] = mask.expand(-1, heads, -1, -1) if number % 5 == 0 and dims[1] else mask
            options = {"is_causal": is_causal, "causal_alignment": alignment}
            assert_right(tensors, rng, dtype, **options)


def test_the_lse_of_the_remaining_rows_is_aligned():
    """With one sequence and one head, any slice of the LSE is contiguous, also a misaligned one."""
    rng = random.Random(1)
    for sq, skv in ((5, 2), (9, 8), (64, 7), (130, 129)):
        tensors = {
            name: torch.randn(1, 1, n, 8, dtype=torch.float16) for name, n in zip("qkv", (sq, skv, skv), strict=True)
        }
        assert_right(tensors, rng, torch.float16, is_causal=True, causal_alignment="bottom_right")


@pytest.mark.parametrize(("sq", "skv"), [(5, 9), (9, 5)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_softcap_within_any_band(alignment, sq, skv):
    rng = random.Random(sq)
    for is_causal, window_size in ((True, (-1, -1)), (True, (2, -1)), (False, (3, 1)), (False, (2, -1))):
        tensors = {name: torch.randn(2, 2, n, 8).half() for name, n in zip("qkv", (sq, skv, skv), strict=True)}
        options = {"is_causal": is_causal, "window_size": window_size, "causal_alignment": alignment}
        assert_right(tensors, rng, torch.float16, softcap=1.5, scale=0.8, **options)


def test_the_gradient_of_sinks_is_computed_in_float32():
    """Products of the output and its gradient, rounded to bfloat16 and summed, would be off by about 1 %."""
    tensors = {name: torch.randn(2, 4, 64, 64).bfloat16() for name in "qkv"} | {"sinks": torch.randn(4)}
    leaf = tensors["sinks"].requires_grad_()
    out, lse = sdpa(**tensors, return_lse=True)
    grad_out = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, [leaf], grad_out)
    weights = torch.exp(leaf.detach().double().view(-1, 1) - lse.detach().double())
    terms = weights.unsqueeze(-1) * grad_out.double() * out.detach().double()
    assert float((found + terms.sum((0, 2, 3))).abs().max()) < 2e-6 * float(terms.abs().sum((0, 2, 3)).max())


@pytest.mark.parametrize("name", ["q", "k", "v", "attn_mask"])
def test_out_in_the_memory_of_an_operand_is_refused_by_warm_calls(name):
    """A call of these layouts is known; that its memory overlaps is not part of what is known."""
    memory = {each: torch.randn(2, 2 * 4 * 8 * 8).half() for each in ("q", "k", "v", "attn_mask", "out")}
    tensors = {each: whole[0].view(2, 4, 8, 8) for each, whole in memory.items()}
    for _ in range(3):
        tensors["out"].fill_(torch.nan)
        assert sdpa(**tensors).isfinite().all()
    before = {each: x.clone() for each, x in tensors.items()}
    for begin in (0, 8, 504):
        out = memory[name].view(-1)[begin : begin + 512].view(2, 4, 8, 8)
        with pytest.raises(LayoutError, match=f"out: got memory that overlaps {name}"):
            sdpa(**{**tensors, "out": out})
    for each, x in tensors.items():
        assert torch.equal(x, before[each])
    assert torch.equal(sdpa(**{**tensors, "out": memory[name][1].view(2, 4, 8, 8)}), before["out"])


def test_without_keys_the_lse_is_that_of_the_sinks():
    q, sinks = torch.randn(2, 4, 3, 16).half(), torch.randn(4)
    k = v = torch.empty(2, 2, 0, 16, dtype=torch.float16)
    for _ in range(2):
        poisoned = torch.full_like(q, torch.nan)
        out, lse = sdpa(q, k, v, sinks=sinks, return_lse=True, out=poisoned)
        assert not out.any()
        assert torch.equal(lse, sinks.view(1, 4, 1).expand(2, 4, 3))


@pytest.mark.parametrize("which", ["q", "k", "v", "attn_mask", "sinks", "seq_lens_q", "seq_lens_kv"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("return_lse", [False, True])
def test_freed_operands_are_refused(which, rows, return_lse):
    """Cold and warm; also of a single query, whose sinks PyTorch's kernels read."""
    tensors = {"q": torch.randn(2, 2, rows, 16).half()} | {name: torch.randn(2, 2, 9, 16).half() for name in "kv"}
    others = {"attn_mask": torch.randn(rows, 9), "sinks": torch.randn(2), "lengths": torch.ones(2, dtype=torch.int32)}
    if which not in "qkv":
        tensors |= {which: others["lengths" if which.startswith("seq_lens") else which]}
    freed = {**tensors, which: tensors[which].clone()}
    freed[which].untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(cudnn_sdpa.LayoutError, match=f"{which}: got a tensor without memory"):
            sdpa(**freed, return_lse=return_lse)
        sdpa(**tensors, return_lse=return_lse)


@pytest.mark.parametrize("scale", [0.0, -1e-40, 1e-38, -0.5])
def test_the_gradient_of_a_mask_at_any_scale(scale):
    """cuDNN loses it at a tiny scale, so tiny scales are never launched."""
    tensors = {"q": torch.randn(2, 4, 7, 8), "k": torch.randn(2, 2, 9, 8), "v": torch.randn(2, 2, 9, 16)}
    tensors = {name: x.half() for name, x in (tensors | {"attn_mask": torch.randn(2, 1, 7, 9)}).items()}
    assert_right(tensors, random.Random(1), torch.float16, scale=scale)


@pytest.mark.parametrize("sq", [1, 9])
@pytest.mark.parametrize("given", [("seq_lens_q",), ("seq_lens_kv",), ("seq_lens_q", "seq_lens_kv")], ids="+".join)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_lengths_of_queries_and_of_keys_alone_and_together(sq, given, sinks):
    """Decode engines read lengths of keys only, so a sequence without queries is one without keys to them."""
    rng = random.Random(f"{sq} {given} {sinks}")
    lengths = {"seq_lens_q": [0, sq, sq], "seq_lens_kv": [9, 5, 0]}
    tensors = {name: torch.randn(3, 4, n, 8, dtype=torch.float16) for name, n in zip("qkv", (sq, 9, 9), strict=True)}
    tensors |= {name: torch.tensor(lengths[name], dtype=torch.int32) for name in given}
    tensors |= {"sinks": torch.randn(4)} if sinks else {}
    assert_right(tensors, rng, torch.float16)


@pytest.mark.parametrize("masked_by", ["lengths", "attn_mask", "window"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["", "softcap"])
def test_gradients_of_fully_masked_rows_are_not_nan(masked_by, softcap):
    """A kernel that compares a bias or a capped score of minus infinity with such an LSE computes NaN."""
    tensors = {name: torch.randn(2, 4, n, 8, dtype=torch.float16) for name, n in zip("qkv", (9, 7, 7), strict=True)}
    options = {"softcap": softcap} if softcap else {}
    if masked_by == "lengths":
        tensors["seq_lens_kv"] = torch.tensor([7, 0], dtype=torch.int32)
    elif masked_by == "attn_mask":
        tensors["attn_mask"] = torch.rand(2, 1, 9, 7) > 0.3
        tensors["attn_mask"][:, :, 3:5] = False
    else:
        options |= {"window_size": (0, 0), "causal_alignment": "top_left"}
    assert_right(tensors, random.Random(masked_by), torch.float16, **options)


def test_dropout_gets_the_seed_and_the_offset_that_were_drawn(monkeypatch):
    """In both passes, each where it belongs."""
    seen, drawn = [], []

    def compute(key, x):
        seen.append((key.name, int(x["seed"]), int(x["offset"])))
        return graph_of(key, x)

    randint = torch.randint
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=torch.float16).requires_grad_() for _ in range(3))
    monkeypatch.setattr(torch, "randint", lambda *a, **b: drawn.append(randint(*a, **b)) or drawn[-1])
    with gpu_on_the_cpu(compute):
        for lengths in (None, torch.tensor([9, 4], dtype=torch.int32)):
            seen.clear(), drawn.clear()
            sdpa(q, k, v, dropout_p=0.25, seq_lens_kv=lengths).sum().backward()
            (numbers,) = [x.tolist() for x in drawn if x.shape == (2,)]
            assert seen == [(name, *numbers) for name in ("sdpa_forward", "sdpa_backward")]
