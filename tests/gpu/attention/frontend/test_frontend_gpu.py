"""The kernel of cuDNN's frontend for large head dims by `providers("frontend")`: values against float64, its limits."""

from __future__ import annotations

import math

import pytest
import torch
from aot_inductor import exported, printed_with, providers_of
from attention_checks import TOLERANCE, captured, check, error, is_served_as_recorded, served_by
from compiled_functions import given_functions
from float64_reference import attend as exact
from frontend_cases import (
    CAPTURED_FIRST,
    CASES,
    FEW_KEYS,
    LONG,
    MASKS,
    MEMORY,
    SHAPES,
    WITH_SINKS,
    WITHOUT_KEYS,
    problem,
)
from native_way import is_off

from benchmarks.tools.ways import by_provider, recording, until_recorded, wait_for_native_calls
from cudnn_sdpa import UnsupportedError, explain, providers, sdpa
from cudnn_sdpa.attention.frontend.installed import installed
from cudnn_sdpa.attention.frontend.plans import functions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(installed().missing), reason=f"cuDNN's frontend: {installed().missing}"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the frontend's kernel is of compute capability 9.0",
    ),
]


@pytest.fixture(autouse=True)
def by_frontend(monkeypatch):
    monkeypatch.setattr(functions, "limit", None)  # the tests of a process have more kinds than a program should have
    with given_functions(), providers("frontend"):
        yield


@pytest.mark.parametrize(("shape", "mask"), CASES)
def test_values(shape, mask):
    q, k, v = problem(shape)
    _, by = served_by(lambda: check(q, k, v, scale=0.11, **MASKS[mask]))
    assert by == {"frontend"}


@pytest.mark.parametrize("layout", MEMORY)
def test_layouts(layout):
    q, k, v = problem(SHAPES[0], torch.float16, layout)
    check(q, k, v, is_causal=True)


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1.7])
def test_scales(scale):
    q, k, v = problem(SHAPES[0])
    check(q, k, v, scale=scale, is_causal=True)


def test_large_scores():
    """They would overflow float32 where a row's largest score is not subtracted first."""
    q, k, v = problem(SHAPES[0])
    check(q * 40, k, v, scale=1.0, is_causal=True)


@pytest.mark.parametrize("mask", WITH_SINKS)
def test_sinks(mask):
    q, k, v = problem(SHAPES[0])
    sinks = torch.randn(8, device="cuda") * 2 + 0.5
    check(q, k, v, sinks=sinks, **MASKS[mask])


@pytest.mark.skipif(is_off(), reason="only native calls are launched as recorded")
def test_recorded_launches():
    """Its kernel is launched without its function, with the same bits, for other data at other addresses."""
    options = {"scale": 0.11, "is_causal": True}
    assert wait_for_native_calls()
    with recording():
        (said,) = until_recorded(lambda: sdpa(*problem(SHAPES[0]), **options))
        assert said == "as recorded (kernels: 1, memsets: 0)"
        for _ in range(3):
            q, k, v = problem(SHAPES[0])
            out = sdpa(q, k, v, **options)
            assert is_served_as_recorded({"q": q, "k": k, "v": v, "out": out}, options)
            with by_provider():  # by its function
                assert torch.equal(sdpa(q, k, v, **options), out)
            assert error(out, exact(q, k, v, **options)[0]) < TOLERANCE[q.dtype]


def test_a_single_batch_entry():
    check(*problem(SHAPES[0], batch=1), is_causal=True)


def test_a_single_key():
    check(*problem(FEW_KEYS))


def test_rows_without_a_key():
    """Of 300 queries on 60 keys, the first 240 see none."""
    q, k, v = problem(WITHOUT_KEYS)
    check(q, k, v, is_causal=True, causal_alignment="bottom_right")


def test_exported_programs_are_served():
    program, tokens = exported("large")
    assert providers_of(program.module(), tokens) == [{"frontend"}]


def test_programs_that_aot_inductor_has_compiled_are_served(tmp_path):
    assert printed_with("frontend", "large", tmp_path).count("served by {'frontend'}") == 1


def test_compiled_functions_are_served():
    q, k, v = problem(SHAPES[0])
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True) * 3, fullgraph=True)
    out, by = served_by(lambda: compiled(q, k, v))
    assert by == {"frontend"}
    assert error(out, 3 * exact(q, k, v, is_causal=True)[0]) < 1e-2


def test_what_is_behind_the_last_key_is_not_read():
    """Keys end within a tile; what follows them in memory is NaN."""
    q, k, v = problem(SHAPES[0])
    wide = [torch.full((2, 364, 2, 512), math.nan, dtype=x.dtype, device="cuda").transpose(1, 2) for x in (k, v)]
    views = [each[:, :, :300].copy_(x) for each, x in zip(wide, (k, v), strict=True)]
    check(q, *views, is_causal=True)


def test_a_captured_call_reads_new_data():
    q, k, v = problem(SHAPES[0])
    sdpa(q, k, v, is_causal=True)
    graph, out = captured(lambda: sdpa(q, k, v, is_causal=True))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    out.fill_(math.nan)
    graph.replay()
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[q.dtype]


def test_a_first_launch_may_be_captured():
    """As after `warmup`: the plan was built, and its kernel is loaded by the launch."""
    q, k, v = problem(CAPTURED_FIRST)
    assert explain(sdpa, q, k, v, is_causal=True).supported
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sdpa(q, k, v, is_causal=True)
    out.fill_(math.nan)
    graph.replay()
    assert error(out, exact(q, k, v, is_causal=True)[0]) < TOLERANCE[q.dtype]


def test_streams():
    """A launch is on the current stream of PyTorch's."""
    q, k, v = problem(LONG)
    sdpa(q, k, v, is_causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        k.copy_(torch.randn_like(k))
        out = sdpa(q, k, v, is_causal=True)
    side.synchronize()
    expected = exact(q[:, :, -300:], k, v, is_causal=True, causal_alignment="bottom_right")[0]
    assert error(out[:, :, -300:], expected) < TOLERANCE[q.dtype]


def test_known_calls_are_served_alike():
    q, k, v = problem(SHAPES[0])
    for scale in (0.1, 0.05, 0.1, 0.2):
        out = sdpa(q, k, v, scale=scale, is_causal=True)
        assert error(out, exact(q, k, v, scale=scale, is_causal=True)[0]) < TOLERANCE[q.dtype]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"seq_lens_kv": [90, 300]}, "lengths"),
        ({"deterministic": True}, "deterministic"),
        ({"softcap": 20.0}, "soft cap"),
    ],
)
def test_what_it_lacks_is_refused_or_cudnns(options, reason):
    q, k, v = problem(SHAPES[0])
    options = dict(options)
    if "seq_lens_kv" in options:
        options["seq_lens_kv"] = torch.tensor(options["seq_lens_kv"], dtype=torch.int32, device="cuda")
    with pytest.raises(UnsupportedError, match=reason):
        sdpa(q, k, v, **options)
    with providers("frontend", "cudnn"):
        assert reason in explain(sdpa, q, k, v, **options).choice


def test_gradients_are_refused_before_the_forward_pass():
    q, k, v = problem(SHAPES[0])
    with pytest.raises(UnsupportedError, match="no gradients"):
        sdpa(q.requires_grad_(), k, v, is_causal=True)


def test_explain_says_who_serves():
    q, k, v = problem(SHAPES[0])
    found = explain(sdpa, q, k, v, is_causal=True)
    assert found.provider == "frontend"
    assert "sdpa_fwd_prefill_sm90" in found.engine
    assert "providers('frontend')" in found.choice


def test_gradients_are_those_of_own_kernels():
    """They read the log-sum-exp that this kernel has written."""
    tensors = [x.requires_grad_() for x in problem(SHAPES[0])]
    with providers("frontend", "own"):
        out, by = served_by(lambda: sdpa(*tensors, is_causal=True, scale=0.11))
        assert by == {"frontend"}
        grad_out = torch.randn_like(out)
        found, by = served_by(lambda: torch.autograd.grad(out, tensors, grad_out))
        assert by == {"own"}
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    right = exact(*doubles, is_causal=True, scale=0.11)[0]
    for one, other in zip(found, torch.autograd.grad(right, doubles, grad_out.double()), strict=True):
        assert error(one, other) < 8e-3
