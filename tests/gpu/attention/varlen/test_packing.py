"""The kernel that processes packed offsets, against plain Python."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cudnn_sdpa import plan_cache, sdpa_varlen, use_plan_store
from cudnn_sdpa.attention.varlen import packing
from cudnn_sdpa.attention.varlen.packing import PackingKernel
from tests.threads import in_threads

pytestmark = pytest.mark.usefixtures("default_providers")

HEADS_Q, HEADS_KV, DIM = 4, 2, 64
MARK = 7.0

OFFSETS = {
    "plain": ((0, 5, 9, 40), (0, 3, 30, 33)),
    "empty on one side": ((0, 5, 5, 40, 64), (0, 0, 30, 33, 33)),
    "nothing at all": ((0, 0, 0), (0, 0, 0)),
    "begins late": ((10, 20), (5, 60)),
    "falls": ((0, 30, 10, 50), (0, 50, 20, 30)),
    "outside": ((-7, 30, 4000), (0, 2**31 - 1, 64)),
    "one": ((0, 64), (0, 64)),
    "many": (tuple(min(64, i // 10) for i in range(700)), tuple(min(50, i // 11) for i in range(700))),
}


def lengths_of(begins):
    return [max(0, end - begin) for begin, end in pairwise(begins)]


def expected(ends, ends_kv, rows, sequences):
    """Starts and lengths of queries and keys, and the rows of each that the plan does not write."""
    within = [[min(max(end, 0), rows) for end in x] for x in (ends, ends_kv)]
    begins_of = [x + [x[-1]] * (sequences + 1 - len(x)) for x in within]
    result = []
    for begins, others in (begins_of, begins_of[::-1]):
        lengths = lengths_of(begins)
        alone = set(range(begins[0])) | set(range(begins[-1], rows))
        for begin, length, there in zip(begins, lengths, lengths_of(others), strict=False):
            alone |= set() if there else set(range(begin, begin + length))
        result.append((begins, lengths, alone))
    return result


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", OFFSETS)
def test_starts_lengths_and_unwritten_rows(name, backward, monkeypatch):
    packers = []
    original = PackingKernel.__init__

    def noted(self, packed, plan, call):
        original(self, packed, plan, call)
        packers.append((self, packed, plan))

    monkeypatch.setattr(PackingKernel, "__init__", noted)
    plan_cache.clear()
    ends, ends_kv = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in OFFSETS[name])
    q = torch.randn(64, 2 * HEADS_Q, DIM, device="cuda", dtype=torch.bfloat16)[:, :HEADS_Q].requires_grad_()
    k, v = (torch.randn(64, HEADS_KV, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    out = sdpa_varlen(q, k, v, ends, ends_kv, 64, 64)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    packer, packed, plan = packers[backward]
    layouts = [
        ((64, operand.layout.shape[1], *operand.layout.shape[3:]), operand.layout.stride, operand)
        for operand in plan.key.outputs
    ]
    outputs = {
        operand.name: torch.empty_strided(
            shape, (stride[2], stride[1], 1), dtype=operand.layout.dtype, device="cuda"
        ).fill_(MARK)
        for shape, stride, operand in layouts
    }
    addresses = {output_name: tensor.data_ptr() for output_name, tensor in outputs.items()}
    found = packer(cu_seqlens_q=ends.data_ptr(), cu_seqlens_kv=ends_kv.data_ptr(), **addresses)
    wanted = expected(*OFFSETS[name], 64, packed.sequences)
    lengths = found.view(torch.int32)[packer.offsets["seq_len_q"] // 4 :].view(2, packed.sequences)
    assert lengths.tolist() == [lengths for _, lengths, _ in wanted]
    memory = found.tolist()
    for operand in (*plan.key.inputs, *plan.key.outputs):
        if operand.ragged:
            of_keys = operand.name.removeprefix("grad_") in ("k", "v")
            first = packer.offsets[operand.ragged] // 8
            step = operand.layout.stride[2]
            read = memory[first : first + packed.sequences + 1]
            assert read == [step * begin for begin in wanted[of_keys][0]]
    for output_name, tensor in outputs.items():
        alone = wanted[output_name in ("grad_k", "grad_v")][2]
        value = -torch.inf if output_name == "lse" else 0.0
        for row, values in enumerate(tensor.flatten(1).tolist()):
            assert set(values) == {value if row in alone else MARK}, (output_name, row)


def test_a_thread_without_a_cuda_context_may_be_first():
    q = torch.randn(64, HEADS_Q, DIM, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor((0, 64), dtype=torch.int32, device="cuda")
    wanted = sdpa_varlen(q, q, q, ends, ends, 64, 64)
    (found,) = in_threads(lambda _: sdpa_varlen(q, q, q, ends, ends, 64, 64), 1)
    assert torch.equal(found, wanted)


def test_the_kernel_is_kept_in_the_plan_store(tmp_path, monkeypatch):
    """A second process loads it; a damaged file is replaced."""
    source = packing.kernel
    compiled = []
    original = type(source).compile
    monkeypatch.setattr(type(source), "compile", lambda self, sm: compiled.append(sm) or original(self, sm))

    def load():
        return type(source)(source.path, source.name).on(0)

    with use_plan_store(tmp_path) as store:
        assert load().name == source.name
        assert load().name == source.name
        assert len(compiled) == 1
        (path,) = tmp_path.glob("*.plan")
        path.write_bytes(path.read_bytes()[:-100])
        load()
        assert len(compiled) == 2
        assert store.info().rejected == 1
        load()
        assert len(compiled) == 2


def test_rows_past_the_last_sequence_are_zeros_in_inference():
    """The kernel writes zeros into `out`, past the last sequence, and nothing outside."""
    around = torch.full((3, 128, HEADS_Q, DIM), MARK, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(128, HEADS_Q, DIM, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor((0, 50, 90), dtype=torch.int32, device="cuda")
    sdpa_varlen(q, q, q, ends, ends, 64, 64, out=around[1])
    assert (around[1, 90:] == 0).all()
    assert around[1, :90].isfinite().all()
    assert (around[::2] == MARK).all()
