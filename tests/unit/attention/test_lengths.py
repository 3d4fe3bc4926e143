"""The kernels that compute what plans read of actual sequence lengths, against PyTorch, on the fake GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_gpu import gpu_on_the_cpu
from float64_reference import attend
from kernel_formulas import LengthsCase, row_limits

from cudnn_sdpa import LayoutError, sdpa
from cudnn_sdpa.attention.lengths import RowLimitsKernel
from cudnn_sdpa.engine import launch
from cudnn_sdpa.graph.layouts import ALIGNMENT


@pytest.fixture(autouse=True)
def gpu():
    with gpu_on_the_cpu():
        yield


def assert_made(kernel, made, expected):
    assert set(kernel.offsets) == set(expected)
    for name, tensor in expected.items():
        offset = kernel.offsets[name]
        assert offset % ALIGNMENT == 0
        found = made[offset // 4 :][: tensor.numel()].view(tensor.shape)
        assert torch.equal(found, tensor), name


@pytest.mark.parametrize("kind", ["prefill", "decode", "softcap"])
def test_lengths_are_those_of_the_formulas(kind):
    for seed in range(300):
        case = LengthsCase.drawn(seed, softcap=kind == "softcap")
        kernel = case.kernel(decode=kind == "decode")
        made = kernel(**case.addresses)
        assert_made(kernel, made, case.expected(decode=kind == "decode"))


@pytest.mark.parametrize("softcap", [False, True])
def test_a_batch_of_no_sequences_writes_nothing(softcap):
    case = LengthsCase.drawn(0, softcap=softcap, batch=0)
    made = case.kernel()(**case.addresses)
    assert made.numel() == 0


def test_limits_of_packed_sequences_have_rows_beyond_the_longest():
    lengths = torch.tensor([[5, 0, 9, 3], [4, 7, 0, 20]], dtype=torch.int32)
    for band in (None, (2, None, True), (None, 0, True), (3, 1, False)):
        kernel = RowLimitsKernel(batch=4, rows=16, band=band, device=0)
        made = kernel(seq_lens_q=lengths[0].data_ptr(), seq_lens_kv=lengths[1].data_ptr())
        assert_made(kernel, made, row_limits(*lengths, sq=64, skv=64, rows=16, band=band))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("others", [(), ("seq_lens_q", "seq_lens_kv")])
@pytest.mark.parametrize("name", ["seq_lens_q", "seq_lens_kv"])
def test_freed_lengths_are_refused_by_name(name, others, softcap, is_warm):
    q, k = (torch.randn(3, 2, rows, 8).half() for rows in (5, 9))
    lengths = {each: torch.ones(3, dtype=torch.int32) for each in {name, *others}}

    def call():
        return sdpa(q, k, k, **lengths, softcap=softcap)

    if is_warm:
        assert call().isfinite().all()
    lengths[name].untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=f"^{name}: got a tensor without memory"):
        call()


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_threads_share_no_argument_of_a_kernel(softcap, monkeypatch):
    """Another thread runs after the argument has been filled and before the kernel is launched."""
    stream_of, found = launch.current_raw_stream, {}

    def call(name, then=lambda: None):
        q, k = (torch.randn(3, 2, rows, 8).half() for rows in (5, 9))
        lengths = torch.randint(1, 10, (3,), dtype=torch.int32)
        waiting.append(then)
        out = sdpa(q, k, k, seq_lens_kv=lengths, softcap=softcap)
        found[name] = out, attend(q.double(), k.double(), k.double(), seq_lens_kv=lengths, softcap=softcap)[0]

    def other_thread():
        thread = threading.Thread(target=call, args=("inner",))
        thread.start()
        thread.join()

    def between(device):
        if waiting:
            waiting.pop()()
        return stream_of(device)

    waiting = []
    call("cold")
    monkeypatch.setattr(launch, "current_raw_stream", between)
    for _ in range(3):
        waiting.clear()
        found.clear()
        call("outer", other_thread)
        assert found.keys() == {"outer", "inner"}
        for out, exact in found.values():
            torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
