"""`autotune` without a GPU: the setting, the report, and the first launch of a plan."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from fake_gpu import TARGET, Engine, Machine, halve, halved, key, launch, operands

from cudnn_sdpa import OptionError, autotune
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import ForwardSpec
from cudnn_sdpa.graph.key import Operand, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.plans import autotune as autotune_module
from cudnn_sdpa.plans.autotune import Alternative, AutotuneCandidate, AutotuneEntry, AutotuneReport, UntunedPlan
from cudnn_sdpa.plans.cache import build_plan
from cudnn_sdpa.plans.plan import Plan


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


# The setting and the report.


def test_autotune_ends_with_the_context_and_nests():
    assert not autotune_module.in_force
    with autotune() as outer:
        assert autotune_module.max_candidates() == autotune_module.DEFAULT_CANDIDATES
        with autotune(candidates=3) as inner:
            assert autotune_module.max_candidates() == 3
            autotune_module.note(key(), [AutotuneCandidate("eng1", {})])
        assert autotune_module.max_candidates() == autotune_module.DEFAULT_CANDIDATES
        autotune_module.note(key(), [AutotuneCandidate("eng2", {})])
    assert not autotune_module.in_force
    autotune_module.note(key(), [AutotuneCandidate("eng3", {})])
    assert [entry.candidates[0].engine for entry in outer.entries] == ["eng1", "eng2"]
    assert [entry.candidates[0].engine for entry in inner.entries] == ["eng1"]


def test_autotune_may_be_exited_in_any_order_and_by_an_exception():
    first, second = autotune(candidates=2), autotune(candidates=3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert autotune_module.max_candidates() == 3
    second.__exit__(None, None, None)
    assert not autotune_module.in_force
    with pytest.raises(KeyError), autotune():
        raise KeyError
    assert not autotune_module.in_force


def test_autotune_holds_in_all_threads():
    seen = []
    with autotune():
        thread = threading.Thread(target=lambda: seen.append(bool(autotune_module.in_force)))
        thread.start()
        thread.join()
    assert seen == [True]


@pytest.mark.parametrize("candidates", [1, 0, -1, 2.0, True, "8", None])
def test_candidates_are_an_integer_of_at_least_two(candidates):
    with pytest.raises(OptionError) as caught, autotune(candidates=candidates):
        pass
    assert str(caught.value) == f"candidates: got {candidates!r}; expected an integer of at least 2."
    assert not autotune_module.in_force


def test_the_report_lists_plans_and_their_candidates():
    candidates = (
        AutotuneCandidate("eng9", {"TILE_N": 2, "TILE_M": 3}, 52.34),
        AutotuneCandidate("eng8", {"TILE_N": 1}, 41.2),
        AutotuneCandidate("eng7", {}, None, "it cannot be launched: no"),
    )
    compared = AutotuneEntry("attend(q) -> (out)", candidates, winner=1)
    left = AutotuneEntry("attend(k) -> (out)", (AutotuneCandidate("eng9", {}),), reason="it is deterministic")
    assert compared.gain == pytest.approx(52.34 / 41.2)
    assert left.gain == 1.0
    assert str(AutotuneReport([compared, left])).splitlines() == [
        "attend(q) -> (out): gain 1.27",
        "    eng9 TILE_N=2 TILE_M=3: 52.3 µs",
        "  > eng8 TILE_N=1: 41.2 µs",
        "    eng7: it cannot be launched: no",
        "attend(k) -> (out): not compared: it is deterministic",
    ]


# Which plans are tuned.


def test_plans_whose_speed_depends_on_lengths_are_not_tuned():
    q = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16, device="meta")
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    rng = torch.empty(2, dtype=torch.int64, device="meta")

    def forward(**options):
        return ForwardSpec.of(from_fields(ForwardArguments, q, q, q, **options)).key(TARGET, 0)

    assert autotune_module.not_tunable(forward(is_causal=True)) == ""
    assert autotune_module.not_tunable(forward(dropout_p=0.1, rng=rng)) == ""
    assert "seq_len_kv" in autotune_module.not_tunable(forward(seq_lens_kv=lengths))


@pytest.mark.parametrize("of", [key(deterministic=True), dataclasses.replace(key(), deterministic=True)], ids=str)
def test_deterministic_plans_are_not_tuned(machine, of):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 1))
    with autotune() as report:
        made = build_plan(halve, of)
    assert (type(made), made.engine) == (Plan, "eng1")
    assert report.entries[0].reason == "it is deterministic, and times would decide its rounding"
    assert autotune_module.not_tunable(key(deterministic=False)) == ""


def test_constant_lengths_are_not_data():
    integers = TensorLayout.contiguous((2, 1, 1, 1), torch.int32)
    filled, given = Operand("lengths", integers, Role.FILL, 64), Operand("lengths", integers)
    assert autotune_module.not_tunable(key(inputs=[filled])) == ""
    assert autotune_module.not_tunable(key(inputs=[given])).startswith("its work depends on the values of lengths")


def test_packed_sequences_are_not_tuned():
    offsets = Operand("offsets", TensorLayout.contiguous((3, 1, 1, 1), torch.int64))
    assert "offsets" in autotune_module.not_tunable(key(inputs=[offsets]))


def test_untunable_operations_get_ordinary_plans(machine):
    machine.proposes(Engine("eng1"), Engine("eng2"))
    lengths = Operand("lengths", TensorLayout.contiguous((2,), torch.int32))
    with autotune() as report:
        made = build_plan(halve, key(inputs=[lengths]))
    assert (type(made), made.tuned) == (Plan, False)
    assert "lengths" in report.entries[0].reason


def test_without_autotune_nothing_else_is_built(machine):
    machine.proposes(Engine("eng1"), Engine("eng2"))
    made = build_plan(halve, key())
    assert (type(made), made.tuned) == (Plan, False)


# The first launch.


def tuned(of=None, x=None):
    """The plan after a first launch, its entry in the report, and whether the results of the launch are right."""
    of = key() if of is None else of
    with autotune() as report:
        made = build_plan(halve, of)
        fresh, *outs = operands(len(of.outputs))
        x = fresh if x is None else x
        launch(made, x, *outs)
    (entry,) = report.entries
    right = all(torch.equal(out.nan_to_num(9), (x * 0.5).nan_to_num(9)) for out in outs)
    return made.fastest, entry, right


def test_the_fastest_takes_over(machine):
    engines = Engine("eng1", 30), Engine("eng2", 10, workspace=64), Engine("eng3", 20)
    machine.proposes(*engines)
    with autotune() as report:
        made = build_plan(halve, key())
        assert (type(made), made.engine, made.fastest, report.entries) == (UntunedPlan, "eng1", None, [])
        x, out = operands()
        launch(made, x, out)
        assert torch.equal(out, x * 0.5)
        found = made.fastest
        assert (type(found), found.tuned, found.build_seconds) == (Plan, True, made.build_seconds)
        assert (found.engine, found.knobs, found.workspace, found.built) == ("eng2", {"TILE": 10}, 64, engines[1])
        (entry,) = report.entries
        assert (entry.key, entry.winner, entry.gain, entry.reason) == (str(key()), 1, 3.0, "")
        assert [(each.engine, each.microseconds) for each in entry.candidates] == [
            ("eng1", 30),
            ("eng2", 10),
            ("eng3", 20),
        ]
        before = [engine.launches for engine in engines]
        launch(made, x, out)
        assert [engine.launches for engine in engines] == [before[0], before[1] + 1, before[2]]
        assert len(report.entries) == 1


@pytest.mark.parametrize(("microseconds", "wins"), [(5, True), (9.9, False), (20, False)])
def test_another_providers_plan_takes_over_if_it_is_faster(machine, monkeypatch, microseconds, wins):
    """It takes its operands by name; cuDNN's fastest stays in the cache, for calls that must be cuDNN's."""
    settled, other = [], Engine("eng9", microseconds)
    machine.proposes(Engine("eng1", 10), Engine("eng2", 30))

    of = key()
    turned = Plan(dataclasses.replace(of, outputs=of.outputs[::-1], provider="other"), other, {})
    alternative = Alternative(of, turned, lambda *how: settled.append(how))
    monkeypatch.setattr(autotune_module, "offered", {of: lambda: [alternative]})
    with autotune() as report:
        made, replaced = build_plan(halve, of), []
        made.on_tuned = lambda _, plan: replaced.append(plan)
        x, out = operands()
        launch(made, x, out)
    assert torch.equal(out, x * 0.5)
    assert not autotune_module.offered
    assert settled == [(wins, "")]
    assert [plan.engine for plan in replaced] == ["eng1"]
    assert (type(made.fastest) is Alternative) is wins
    assert [each.engine for each in report.entries[0].candidates] == ["eng1", "eng2", "eng9"]
    assert replaced[0].tuned is not wins
    before = other.launches
    launch(made, x, out)
    assert other.launches == before + wins


def test_a_wrong_plan_of_another_provider_is_dropped(machine, monkeypatch):
    settled = []
    machine.proposes(Engine("eng1", 30))

    of, wrong = key(outputs=2), Engine("eng9", 1, lacks_a_row)
    plan = Plan(dataclasses.replace(of, provider="other"), wrong, {})
    alternative = Alternative(of, plan, lambda *how: settled.append(how))
    monkeypatch.setattr(autotune_module, "offered", {of: lambda: [alternative]})
    made, entry, right = tuned(of)
    assert (made.engine, entry.winner, right) == ("eng1", 0, True)
    assert settled == [(False, "its results differ from the first choice's")]
    assert entry.candidates[1].reason == settled[0][1]


def test_a_single_proposal_is_tuned(machine):
    machine.proposes(Engine("eng1", 10))
    made, entry, right = tuned()
    assert (type(made), made.tuned, entry.reason, right) == (Plan, True, "", True)


def test_the_first_choice_stays_if_it_is_the_fastest(machine):
    machine.proposes(Engine("eng1", 10), Engine("eng2", 11))
    made, entry, right = tuned()
    assert (type(made), made.engine, made.tuned, entry.winner, right) == (Plan, "eng1", True, 0, True)


def test_no_more_candidates_are_built_than_requested(machine):
    machine.proposes(*(Engine(f"eng{n}", 10) for n in range(6)))
    with autotune(candidates=3) as report:
        launch(build_plan(halve, key()), *operands())
    assert [each.engine for each in report.entries[0].candidates] == ["eng0", "eng1", "eng2"]


def lacks_a_row(x, outs, launches):
    halved(x, outs, launches)
    outs[0][1, 2] = 0


def writes_only_a_part(x, outs, _):
    for out in outs:
        out[0].copy_(x[0] * 0.5)


def is_wrong_in_the_second(x, outs, launches):
    halved(x, outs, launches)
    outs[1].mul_(1.01)


def writes_nothing(*_):
    pass


def cannot_be_launched(*_):
    raise RuntimeError("refused")


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lacks_a_row, "differ from the first choice's"),
        (is_wrong_in_the_second, "differ from the first choice's"),
        (writes_only_a_part, "differ from the first choice's"),
        (writes_nothing, "differ from the first choice's"),
        (cannot_be_launched, "refused"),
    ],
)
def test_wrong_candidates_are_dropped(machine, run, why):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 1, run), Engine("eng3", 20))
    made, entry, right = tuned(key(outputs=2))
    assert (made.engine, entry.winner, right) == ("eng3", 2, True)
    assert why in entry.candidates[1].reason
    assert entry.candidates[1].microseconds is None
    assert machine.timed == [2]


def test_the_first_choice_stays_if_no_other_is_right(machine):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 1, cannot_be_launched))
    made, entry, right = tuned()
    assert (type(made), made.engine, made.tuned, right) == (Plan, "eng1", True, True)
    assert "refused" in entry.candidates[1].reason


def test_memory_that_the_first_choice_does_not_write_is_restored(machine):
    """Callers may fill this memory beforehand, so a plan that writes it is different."""
    machine.proposes(Engine("eng1", 30, writes_only_a_part), Engine("eng2", 1))
    with autotune():
        made = build_plan(halve, key())
        x, out = operands()
        launch(made, x, out)
    assert made.fastest.engine == "eng1"
    assert torch.equal(out[0], x[0] * 0.5)
    assert (out[1] == 7).all()


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_uninformative_results_leave_the_plan_untuned(machine, value):
    machine.proposes(Engine("eng1", 30), Engine("eng2", 1))
    made, entry, right = tuned(x=torch.full_like(operands()[0], value))
    assert (type(made), made.engine, made.tuned, right) == (Plan, "eng1", False, True)
    assert "all zeros" in entry.reason


def test_a_first_choice_that_fails_to_launch_raises_its_own_error(machine):
    machine.proposes(Engine("eng1", 30, cannot_be_launched), Engine("eng2", 1))
    with autotune() as report:
        made = build_plan(halve, key())
        with pytest.raises(RuntimeError, match="refused"):
            launch(made, *operands())
    assert made.fastest.built is made.built
    assert report.entries[0].reason == "refused"


def test_nothing_is_tuned_after_the_context(machine):
    machine.proposes(Engine("eng1", 30), other := Engine("eng2", 1))
    with autotune() as report:
        made = build_plan(halve, key())
    x, out = operands()
    launch(made, x, out)
    assert (type(made.fastest), made.fastest.engine, made.fastest.tuned) == (Plan, "eng1", False)
    assert (other.launches, report.entries) == (0, [])
    assert torch.equal(out, x * 0.5)
