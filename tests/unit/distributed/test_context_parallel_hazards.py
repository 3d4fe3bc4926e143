"""Context parallelism where something goes wrong: every rank gets an error that says what, and none waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import flash4_stand_in as stand_in
import parallel_hazards as hazards
import pytest
import torch
import torch.distributed as dist
from processes import Ranks

from cudnn_sdpa.attention.arguments import Softmax
from cudnn_sdpa.distributed import agreement, parallel_attention
from cudnn_sdpa.distributed.collectives import GroupRank
from cudnn_sdpa.distributed.local_attention import Inputs, Options

METHODS = ("all_gather", "ulysses", "ring")


def test_wrong_arguments_are_named_on_every_rank(ranks):
    assert ranks(hazards.refusals) == [10, 10]


def test_what_a_method_cannot_do_names_one_that_can(ranks):
    assert ranks(hazards.suggestions) == [10, 10]


def test_ranks_that_disagree_all_say_so(ranks):
    first, second = ranks(hazards.disagreements)
    for number, named in enumerate(
        ("q=float32", "is_causal", "scale", "sinks", "method", "k=float", "gradient", "own", "fa4=1", "frontend=1")
    ):
        assert named in first[number]
        assert named in second[number]


@pytest.mark.parametrize("method", METHODS)
def test_under_debug_ranks_that_repeat_different_agreed_calls_all_say_so(ranks, method):
    first, second = ranks(hazards.agreed_kinds, method)
    for number, named in enumerate(("q=float32", "is_causal", "softcap=", "scale=")):
        assert named in first[number]
        assert named in second[number]


def test_a_refusal_is_published(ranks):
    published, own = ranks(hazards.one_refuses)
    assert own in published


@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_refusals_between_messages_leave_none_behind(ranks, method):
    """Before, the next calls waited for each other until the group's timeout."""
    forward, backward = ranks(hazards.kernels_refuse, method)[0]
    assert "no kernel has it" in forward
    assert "no kernel has it" in backward


def test_wrong_offsets_are_named_on_every_rank(ranks):
    """Before, those of a part were checked: some ranks raised and the others waited, or none raised."""
    first, second = ranks(hazards.wrong_packings)
    assert first == second
    assert len(first) == 6 * len(METHODS)


def test_gradients_without_kernels_are_refused_in_the_forward_pass(ranks):
    """Before, the backward pass raised, of some ranks alone, where the others waited until the group's timeout."""
    wanted = ["", 'method="ulysses"', "", "", "", "softcap=None, or no gradients"]
    assert ranks(hazards.gradients_without_kernels) == [wanted, wanted]


@pytest.mark.parametrize("method", METHODS)
def test_the_gradients_that_are_checked_are_those_that_are_computed(ranks, method):
    for of_ranks in zip(*ranks(hazards.calls_of_gradients, method), strict=True):
        made, checked = zip(*of_ranks, strict=True)
        assert set().union(*made) == set().union(*checked)
        assert all(of_rank <= known for of_rank, known in zip(made, checked, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_keys_that_no_kernel_reads_are_copied(ranks, method):
    """Before, "ring" refused them in its first step, on one rank alone."""
    assert all(error < 1e-4 for error in ranks(hazards.keys_that_no_kernel_reads, method))


def test_gradients_of_complex_parts(ranks):
    dtypes = [torch.complex64, torch.complex128, torch.float64, torch.bfloat16]
    assert ranks(hazards.complex_parts) == [dtypes, dtypes]


def test_layouts_are_refused_before_anything_is_sent(ranks):
    assert ranks(hazards.strides) == [2, 2]


@pytest.mark.parametrize("method", METHODS)
def test_settings_and_transforms(ranks, method):
    for run in (
        hazards.results_are_as_of_one_process,
        hazards.second_gradients,
        hazards.gradients_of_lse,
        hazards.checkpoints,
        hazards.autocast,
    ):
        ranks(run, method)
    ranks(hazards.falls_back, method)
    if method != "ring":
        for share in ranks(hazards.dropout, method):
            assert abs(share - 0.75) < 0.02
    ranks(hazards.module, method)


def test_tensors_with_another_memory(ranks):
    for errors in ranks(hazards.special_tensors):
        assert len(errors) == 4
        assert max(errors.values()) < 1e-5, errors


def test_transforms_are_refused_on_all_ranks(ranks):
    for of_grad, of_vmap in ranks(hazards.other_differentiation):
        assert "torch.func.grad" in of_grad
        assert "torch.vmap" in of_vmap


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_code_breaks_its_graph_there(ranks, method):
    assert all(error < 1e-5 for error in ranks(hazards.compiled, method))


@pytest.mark.slow
def test_a_rank_that_does_not_arrive(ranks):
    assert "no answer of rank 1" in ranks(hazards.one_is_absent)[0]


class Group:
    """As much of a process group as is asked for."""

    def __init__(self, name, store):
        self.group_name = name
        self.store = store

    def get_group_store(self):
        return self.store


def places(store, ranks=2):
    return [GroupRank(Group(f"{rank} of {ranks} in this process", store), rank, ranks) for rank in range(ranks)]


def test_ranks_on_other_kinds_of_devices_differ():
    """A group may serve both: the one would wait for the other's messages."""
    options = Options(GroupRank(None, 0, 2), Softmax(is_causal=True))
    summaries = [
        parallel_attention._summary("ring", options, Inputs(x, x, x))
        for x in (torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8, device="meta"))
    ]
    assert [text.split("; ")[1] for text in summaries] == ["device=cpu", "device=meta"]


def test_installations_of_named_providers_alone_are_compared(run_python, tmp_path):
    stand_in.write(tmp_path)
    run_python("""
import sys
from cudnn_sdpa import providers
from cudnn_sdpa.distributed import agreement
with providers("own", "default"):
    assert agreement._installations() == []
assert not {"cudnn_sdpa.attention.flash4", "cudnn_sdpa.attention.frontend"} & sys.modules.keys()
for names in (("fa4", "cudnn"), ("own", "fastest")):
    with providers(*names):
        (found,) = agreement._installations()
        assert found.startswith(("fa4=4.", "fastest=4.")), found
assert not {"flash_attn", "cudnn"} & sys.modules.keys()
""")


def refused():
    raise ValueError("not here")


def one_after_the_other(group_rank, summaries):
    return [outcome(group_rank, summarize) for summarize in summaries]


def at_once(ranks, summaries):
    """The outcomes of the same calls on all ranks."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one_after_the_other, ranks, [summaries] * len(ranks)))


def test_only_the_first_call_of_a_kind_is_compared():
    """Later ones wait for nobody, and the store is as empty as before."""
    store = dist.HashStore()
    ranks = places(store)
    signatures = [lambda: ("one", 1), lambda: ("other", 2)]
    assert at_once(ranks, signatures) == [[1, 2]] * 2
    for group_rank in ranks:
        assert one_after_the_other(group_rank, signatures * 2) == [1, 2] * 2
    assert at_once(ranks, [refused, lambda: ("third", 3)]) == [["ValueError: not here", 3]] * 2
    assert store.num_keys() == 0


def test_a_group_that_is_made_again_finds_no_old_records():
    """Its store, and the names of its records, are those of the group before."""
    store = dist.HashStore()
    for kind in ("one", "other", "one"):
        assert at_once(places(store), [lambda kind=kind: (kind, 1), refused]) == [[1, "ValueError: not here"]] * 2


def test_ranks_forget_the_same_kinds(monkeypatch):
    monkeypatch.setattr(agreement, "MAX_SIGNATURES", 2)
    ranks = places(dist.HashStore())
    at_once(ranks, [lambda number=number: (str(number), number) for number in (1, 2, 1, 3, 1, 3)])
    for group_rank in ranks:
        assert agreement._agreements[group_rank.group].signatures == {"f; 3", "f; 1"}


def test_while_a_graph_is_captured_nothing_is_compared(monkeypatch):
    store = dist.HashStore()
    ranks = places(store)
    monkeypatch.setattr(agreement, "is_capturing", lambda: True)
    assert one_after_the_other(ranks[0], [lambda: ("one", 5), refused]) == [5, "ValueError: not here"]
    assert store.num_keys() == 0
    monkeypatch.setattr(agreement, "is_capturing", lambda: False)
    assert at_once(ranks, [lambda: ("one", 5)]) == [[5]] * 2


@pytest.mark.parametrize("first_call", ["agreed", "refused", "another"])
def test_a_rank_that_reads_late_finds_what_the_other_published(first_call, monkeypatch):
    """The other has gone on: to a call that both refuse, and does not wait there, and to the next one."""
    store = dist.HashStore()
    first, second = places(store)
    may_read, records = threading.Event(), agreement._Rendezvous.records

    def late(rendezvous, function):
        if rendezvous.group_rank.rank == 1:
            assert may_read.wait(20)
        return records(rendezvous, function)

    monkeypatch.setattr(agreement._Rendezvous, "records", late)
    rest = [refused, lambda: ("third", 3)]
    with ThreadPoolExecutor(2) as threads:
        behind = threads.submit(one_after_the_other, second, [lambda: ("first", 1), *rest])
        summary = {"agreed": lambda: ("first", 1), "refused": refused, "another": lambda: ("other", 1)}[first_call]
        ahead = threads.submit(one_after_the_other, first, [summary, *rest])
        store.wait([agreement._Rendezvous(store, first, 2).names[0]], timedelta(seconds=20))
        may_read.set()
        ahead, behind = ahead.result(20), behind.result(20)
    assert ahead[1:] == behind[1:] == ["ValueError: not here", 3]
    if first_call == "agreed":
        assert ahead[0] == behind[0] == 1
    else:
        assert ("rank 0 refused this call of f" if first_call == "refused" else "otherwise than rank") in behind[0]
        assert ahead[0] != 1
    assert store.num_keys() == 0


def outcome(group_rank, summarize):
    """What a call gives, or its error."""
    try:
        return agreement.in_agreement(group_rank, "f", summarize)
    except (ValueError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def outcomes(arrivals, calls, timeout=20.0):
    """What a call of each rank gives, which come to it after so many seconds."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))

    def of_rank(group_rank, seconds, summarize):
        time.sleep(seconds)
        return outcome(group_rank, summarize)

    with ThreadPoolExecutor(len(arrivals)) as threads:
        return list(threads.map(of_rank, places(store, len(arrivals)), arrivals, calls))


def test_what_one_of_three_ranks_gives_up_nobody_agrees_on():
    """The second has read the first one's note when that gives up, waiting for the third. Before, it agreed."""
    first, second, third = outcomes((0.0, 0.6, 1.3), [lambda: ("one", 1)] * 3, timeout=1.0)
    assert "no answer of rank 2" in first
    assert "rank 0 refused this call of f" in second
    assert "no answer of rank 2" in second
    assert "no answer of rank 2" in third


def interrupted():
    raise KeyboardInterrupt("by hand")


@pytest.mark.parametrize("late", [0, 1])
def test_an_interruption_is_published(late):
    calls = [interrupted, lambda: ("one", 1)]
    first, second = outcomes((0.3, 0.0) if late == 0 else (0.0, 0.3), calls)
    assert first == "KeyboardInterrupt: by hand"
    assert "rank 0 refused this call of f" in second
    assert "KeyboardInterrupt: by hand" in second


@pytest.mark.slow
@pytest.mark.parametrize("has_arrived", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_dies(method, has_arrived):
    """The other one gets an error within the group's timeout."""
    pair = Ranks(2)
    try:
        with pytest.raises(AssertionError, match=r"the other rank was told(.|\n)*ended with 7"):
            pair(partial(hazards.one_dies, has_arrived=has_arrived), method)
    finally:
        pair.end()
