"""`autotune` on the GPU: right results from any winner, at the first launch and all later ones."""

from __future__ import annotations

import threading

import dense_calls
import pytest
import torch
from attention_checks import TOLERANCE, error, exact, make, nothing_synchronizes

import cudnn_sdpa
from cudnn_sdpa import autotune, no_plan_builds, plan_cache, use_plan_store
from cudnn_sdpa.plans import autotune as autotune_module
from cudnn_sdpa.plans.autotune import UntunedPlan
from cudnn_sdpa.plans.plan import Plan
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("default_providers")


def last_one(candidates):
    """Replaces the choice of the fastest plan: takes the right plan that cuDNN ranks last."""
    return max(number for number, candidate in enumerate(candidates) if not candidate.reason)


@pytest.fixture(params=["fastest", "last"])
def choice(request, monkeypatch):
    """Either the fastest plan wins, or one that is rarely cuDNN's first choice."""
    if request.param == "last":
        monkeypatch.setattr(autotune_module, "fastest", last_one)
    return request.param


@pytest.fixture
def take_last(monkeypatch):
    monkeypatch.setattr(autotune_module, "fastest", last_one)


@pytest.fixture
def store(default_providers, tmp_path):  # noqa: ARG001
    with use_plan_store(tmp_path / "plans") as store:
        yield store


def inputs(sq=128):
    return [make("bshd", 2, heads, sq, 64, torch.bfloat16) for heads in (4, 2, 2)]


def assert_right(q, k, v, out=None):
    out = cudnn_sdpa.sdpa(q, k, v) if out is None else out
    assert error(out, exact(q, k, v)[0]) < TOLERANCE[torch.bfloat16]


def configurations():
    return {plan.key: (plan.engine, plan.knobs, plan.workspace) for plan in plan_cache.plans()}


def assert_settled():
    """All plans are plain, and tuned if possible."""
    for plan in plan_cache.plans():
        assert type(plan) is Plan
        assert plan.tuned == (autotune_module.not_tunable(plan.key) == ""), str(plan.key)


@pytest.mark.parametrize("name", [name for name in dense_calls.CASES if name != "softcap and lengths"])
def test_values(choice, name):
    c = dense_calls.plain(**({"sq": 64} | dense_calls.CASES[name]))
    with autotune() as report:
        assert dense_calls.check(c) == [], str(report)  # leftovers of the first launches
        assert len(report.entries) == plan_cache.info().builds
        assert_settled()
        assert dense_calls.check(c) == []
    assert len(report.entries) == plan_cache.info().builds
    for entry in report.entries:
        if name != "deterministic":  # its forward plan is tuned, and its backward plan is not
            assert bool(entry.reason) == (name == "lengths")
        assert choice == "last" or entry.winner == 0 or entry.gain > 1
    assert all(entry.key in str(report) for entry in report.entries)
    assert dense_calls.check(c) == []


@pytest.mark.usefixtures("take_last")
def test_another_plan_than_the_first_choice_can_win():
    """Without this the other tests would prove nothing."""
    leaves = [x.requires_grad_() for x in inputs(512)]
    with autotune() as report:
        torch.autograd.grad(cudnn_sdpa.sdpa(*leaves, is_causal=True).sum(), leaves)
    assert [entry.winner > 0 for entry in report.entries] == [True, True], str(report)
    for entry in report.entries:
        winner = entry.candidates[entry.winner]
        assert (winner.engine, winner.knobs) != (entry.candidates[0].engine, entry.candidates[0].knobs)
        assert all(each.microseconds > 0 for each in entry.candidates if not each.reason)
    assert sorted((e, sorted(k.items())) for e, k, _ in configurations().values()) == sorted(
        (entry.candidates[entry.winner].engine, sorted(entry.candidates[entry.winner].knobs.items()))
        for entry in report.entries
    )


FUSED = {
    "silu_mul": lambda x: cudnn_sdpa.silu_mul(x, x.flip(0)),
    "rms_norm": lambda x: cudnn_sdpa.rms_norm(x, x[0]),
    "conv2d": lambda x: cudnn_sdpa.conv2d(x.view(4, 8, 8, 1024).permute(0, 3, 1, 2), FILTERS.to(x), activation="silu"),
}

FILTERS = (torch.randn(64, 3, 3, 1024).permute(0, 3, 1, 2) * 0.01).bfloat16()


@pytest.mark.usefixtures("cudnn_provider")
@pytest.mark.parametrize("name", FUSED)
def test_norms_gates_and_convolutions_are_right_and_are_loaded_from_the_store(choice, store, name):
    def assert_close():
        x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
        expected = FUSED[name](x.cpu().float())
        assert error(FUSED[name](x), expected.cuda().double()) < TOLERANCE[torch.bfloat16]

    with autotune(candidates=24) as report:
        assert_close()
        assert_settled()
    (entry,) = report.entries
    assert len(entry.candidates) > 1, str(report)
    assert choice == "fastest" or entry.winner > 0 or all(each.reason for each in entry.candidates[1:])
    won = configurations()
    plan_cache.clear()
    with no_plan_builds():
        assert_close()
    assert configurations() == won
    assert store.info().rejected == 0


@pytest.mark.usefixtures("choice")
def test_the_winner_is_loaded_from_the_store(store):
    c = dense_calls.plain(sq=64)
    with autotune():
        assert dense_calls.check(c) == []
    won = configurations()
    assert store.info().plans == len(won) == 2
    plan_cache.clear()
    with autotune() as report, no_plan_builds():
        assert dense_calls.check(c) == []
        assert configurations() == won
        assert_settled()
    assert report.entries == []
    plan_cache.clear()
    with no_plan_builds():
        assert dense_calls.check(c) == []
    assert configurations() == won
    assert (plan_cache.info().builds, plan_cache.info().loads) == (0, 2)
    assert store.info().rejected == 0


def test_a_stored_plan_that_was_not_tuned_is_built_again(store):
    q, k, v = inputs()
    assert_right(q, k, v)
    plan_cache.clear()
    with autotune() as report:
        assert_right(q, k, v)
    assert (plan_cache.info().builds, plan_cache.info().loads, len(report.entries)) == (1, 0, 1)
    plan_cache.clear()
    with autotune():
        assert_right(q, k, v)
    assert (plan_cache.info().builds, plan_cache.info().loads) == (0, 1)
    assert store.info().plans == 1


@pytest.mark.usefixtures("choice")
def test_deterministic_gradients_are_bit_exact_from_the_first_launch():
    leaves = [make("bshd", 2, heads, 1100, 64, torch.bfloat16).requires_grad_() for heads in (8, 2, 2)]
    grad_out = torch.randn_like(leaves[0])

    def step():
        out = cudnn_sdpa.sdpa(*leaves, is_causal=True, deterministic=True)
        return [x.clone() for x in (out, *torch.autograd.grad(out, leaves, grad_out))]

    with autotune() as report:
        first = step()
        assert_settled()
    assert "deterministic" in report.entries[-1].reason
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


@pytest.mark.usefixtures("choice")
def test_the_winner_is_captured():
    q, k, v = inputs()
    with autotune():
        assert_right(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cudnn_sdpa.sdpa(q, k, v)
    for _ in range(3):
        for tensor in (q, k, v):
            tensor.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert_right(q, k, v, out)


@pytest.mark.usefixtures("take_last")
def test_a_call_bound_to_the_first_choice_stays_right():
    """A gradient whose forward pass ran before the backward plan was replaced."""
    leaves = [x.requires_grad_() for x in inputs(512)]
    with autotune():
        outs = [cudnn_sdpa.sdpa(*leaves, is_causal=True) for _ in range(3)]
        grad_out = torch.randn_like(outs[0])
        found = [torch.autograd.grad(out, leaves, grad_out) for out in outs]
        assert_settled()
    found += [torch.autograd.grad(cudnn_sdpa.sdpa(*leaves, is_causal=True), leaves, grad_out)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = wide[0] @ wide[1].repeat_interleave(2, 1).mT / 8
    hidden = torch.ones(512, 512, dtype=torch.bool, device="cuda").triu(1)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ wide[2].repeat_interleave(2, 1)
    expected = torch.autograd.grad(out, wide, grad_out.double())
    for gradients in found:
        assert all(error(a, b) < dense_calls.BACKWARD[torch.bfloat16] for a, b in zip(gradients, expected, strict=True))


@pytest.mark.usefixtures("take_last")
def test_a_first_launch_into_a_cuda_graph():
    q, k, v = inputs()
    with autotune() as report:
        cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, k, v)  # builds without launching
        (plan,) = plan_cache.plans()
        first = (plan.engine, plan.knobs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = cudnn_sdpa.sdpa(q, k, v)
        assert plan_cache.plans() == [plan]
        assert (type(plan), plan.fastest, report.entries) == (UntunedPlan, None, [])
        assert_right(q, k, v)
        (found,) = plan_cache.plans()
        assert (type(found), found.tuned) == (Plan, True)
        assert (found.engine, found.knobs) != first
    del plan, found
    plan_cache.clear()
    for _ in range(3):  # the graph still launches the plan that it was captured with
        for tensor in (q, k, v):
            tensor.normal_()
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(q, k, v, out)


@pytest.mark.usefixtures("choice")
def test_two_threads_launch_the_same_new_plan():
    problems = [inputs() for _ in range(2)]
    expected = [exact(*problem)[0] for problem in problems]
    torch.cuda.synchronize()

    def work(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [cudnn_sdpa.sdpa(*problems[index]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
            return max(error(out, expected[index]) for out in outs)

    with autotune() as report:
        errors = in_threads(work, 2)
    assert max(errors) < TOLERANCE[torch.bfloat16]
    assert plan_cache.info().builds == len(report.entries) == 1
    assert_settled()


def test_tuning_in_one_thread_does_not_harm_a_capture_in_another():
    q, k, v = inputs()
    assert_right(q, k, v)
    ready, capturing, done, failures = threading.Event(), threading.Event(), threading.Event(), []

    def other():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                mine = inputs(192)
                room = [torch.empty_like(mine[0]) for _ in range(4)]  # PyTorch's allocator must not request more
                del room
                ready.set()
                capturing.wait()
                cudnn_sdpa.sdpa(*mine)
        except Exception as failure:  # noqa: BLE001
            failures.append(failure)
        ready.set()
        done.set()

    with autotune() as report:
        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            out = cudnn_sdpa.sdpa(q, k, v)
            capturing.set()
            done.wait()
        thread.join()
    assert not failures, failures
    assert [entry.reason for entry in report.entries] == [""]
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_right(q, k, v, out)


def test_only_the_first_launch_synchronizes():
    q, k, v = inputs()
    with autotune():
        assert_right(q, k, v)
        with nothing_synchronizes():
            out = cudnn_sdpa.sdpa(q, k, v)
    assert_right(q, k, v, out)


def test_nothing_is_tuned_where_synchronizing_is_an_error():
    q, k, v = inputs()
    with autotune() as report:
        cudnn_sdpa.explain(cudnn_sdpa.sdpa, q, k, v)
        with nothing_synchronizes():
            out = cudnn_sdpa.sdpa(q, k, v)
    assert_right(q, k, v, out)
    assert "synchroniz" in report.entries[0].reason
    assert [plan.tuned for plan in plan_cache.plans()] == [False]


def test_tuning_writes_only_the_output():
    q, k, v = inputs()
    memory = torch.full((2, 128, 6, 64), 7.0, dtype=torch.bfloat16, device="cuda")
    out = memory[:, :, 1:5].transpose(1, 2)
    with autotune() as report:
        cudnn_sdpa.sdpa(q, k, v, out=out)
    assert report.entries[0].reason == ""
    assert_right(q, k, v, out)
    assert (memory[:, :, 0] == 7).all()
    assert (memory[:, :, 5] == 7).all()
