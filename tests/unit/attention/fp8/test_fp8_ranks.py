"""FP8 scales shared by ranks: two processes on the CPU, connected by gloo."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from fp8_layers import assert_near, qkv, train
from torch import distributed as dist

from cudnn_sdpa import Fp8Attention, Fp8Scaling, OptionError
from cudnn_sdpa.attention.fp8.scaling_state import DO

RANKS, STEPS = 2, 4
BAD = 2  #: the step in which one rank has a non-finite value

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs PyTorch with gloo"),
    pytest.mark.usefixtures("reference_alone"),  # Hopper has gradients for only head dim 128
]


def layer(group, **options):
    return Fp8Attention(scaling=Fp8Scaling(process_group=group, calibration=1, margin=2, history=STEPS, **options))


def work(rank, store, folder, auto_update, bad):
    """The work of a rank: a few steps of three layers, the last of which shares nothing."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    groups = ("world", dist.new_group([0, 1]), None)
    model = torch.nn.ModuleList(layer(group, auto_update=auto_update) for group in groups)
    found = []
    for step in range(STEPS):
        # tensors of different magnitudes on the ranks, which take turns with the larger ones
        q, k, v = qkv()
        tensors = q, k, (v.detach() * (1.7 if step % RANKS == rank else 1.0)).requires_grad_()
        if step == BAD and rank == 1:
            with torch.no_grad():
                tensors[0][0, 1, 2, 3] = bad
        amaxes = []
        for attend in model:
            result = train(attend, tensors=tensors)
            if step != BAD:
                assert_near(result)
            amaxes.append(attend.scaling.amax.clone())
        if not auto_update:
            Fp8Scaling.update_all(model)
        found.append((torch.stack(amaxes), [copy.deepcopy(attend.scaling.state_dict()) for attend in model]))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("auto_update", "bad"), [(False, torch.nan), (True, torch.inf)])
def test_ranks_share_scales_and_skip_a_step_together(auto_update, bad, tmp_path):
    torch.multiprocessing.spawn(work, (tmp_path / "store", tmp_path, auto_update, bad), nprocs=RANKS)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    history = torch.zeros(2, 2 * DO, STEPS)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        (amaxes, states), (other_amaxes, other_states) = of_ranks
        for shared in range(2):
            for name in ("scale", "amax_history"):
                assert torch.equal(states[shared][name], other_states[shared][name])
            if not auto_update:
                if step != BAD:
                    largest = torch.maximum(amaxes[shared], other_amaxes[shared])
                    history[shared] = torch.cat([largest.unsqueeze(1), history[shared, :, :-1]], dim=1)
                assert torch.equal(states[shared]["amax_history"], history[shared])
        assert not torch.equal(amaxes, other_amaxes)
        if step:  # automatic updates happen at the next call
            assert not torch.equal(states[2]["scale"], other_states[2]["scale"]), "each for itself"
    assert (ranks[0][-1][1][0]["amax_history"] > 0).any(0).sum() == STEPS - 1 - auto_update


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_rank_changes_nothing(group):
    plain, alone, whole = layer(None), layer(group), layer("world")
    for step in range(3):
        for attend in (plain, alone, whole):
            torch.manual_seed(step)
            train(attend)
    for attend in (alone, whole):
        assert all(torch.equal(attend.state_dict()[name], x) for name, x in plain.state_dict().items())


def test_copies_keep_the_process_group_and_files_do_not(group):
    attend = layer(group)
    train(attend)
    assert set(attend.state_dict()) == {"scaling.scale", "scaling.amax", "scaling.amax_history"}
    copied = copy.deepcopy(torch.nn.Sequential(attend))
    assert copied[0].scaling.process_group is group
    copied[0].scaling.update()
    with pytest.raises(OptionError, match=r"process_group: got a ProcessGroup.*world.*state_dict"):
        pickle.dumps(attend)
    whole = pickle.loads(pickle.dumps(layer("world")))
    assert whole.scaling.process_group == "world"
    train(whole)
    whole.scaling.update()
    assert (whole.scaling.amax_history[:, 0] > 0).all()


def test_an_update_without_a_default_group_raises():
    attend = layer("world")
    train(attend)
    before = attend.scaling.amax.clone()
    with pytest.raises(OptionError, match=r"process_group: got 'world'.*init_process_group"):
        attend.scaling.update()
    assert torch.equal(attend.scaling.amax, before)


def test_a_group_that_this_rank_is_not_in_is_refused(group):
    with pytest.raises(OptionError, match=r"process_group.*of this rank"):
        Fp8Scaling(process_group=dist.GroupMember.NON_GROUP_MEMBER)
    assert Fp8Scaling(process_group=group).process_group is group
