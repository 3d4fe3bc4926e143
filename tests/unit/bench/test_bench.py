"""The benchmarks without a GPU: their logic on CPU tensors, with a fake clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention
from benchmarks.tools import cases, hand_graphs, peers, training
from benchmarks.tools.cases import Shape
from cudnn_sdpa import UnsupportedError

SMALL = replace(
    cases.QUICK,
    kernels=(Shape(1, 4, 4, 16, 8, True), Shape(2, 4, 2, 24, 8, False)),
    options=Shape(2, 4, 2, 16, 8, True),
    tokens=200,
    max_seqlens=(48,),
    training=Shape(1, 4, 2, 16, 8, True),
)


@pytest.fixture
def on_cpu(monkeypatch, times_by_place, cases_on_cpu, peers_on_cpu):  # noqa: ARG001
    """The benchmarks on the CPU."""
    monkeypatch.setattr(attention, "device_times", times_by_place)
    monkeypatch.setattr(training, "host_times", times_by_place)


def same_columns(rows):
    return all(list(row) == list(rows[0]) for row in rows)


def test_flops_count_the_matrix_products():
    shape = Shape(2, 8, 2, 10, 4, False)
    products = 2 * 8 * 10 * 10 * 4  # multiplications of one matrix product
    assert shape.flops() == 2 * 2 * products
    assert shape.flops(backward=True) == 5 * 2 * products
    assert shape._replace(causal=True).flops() == shape.flops() / 2


def test_random_lengths_fill_a_packing_and_are_reproducible():
    lengths = cases.random_lengths(1000, 64)
    assert sum(lengths) == 1000
    assert all(4 <= length <= 64 for length in lengths[:-1])
    assert len(set(lengths)) > 5
    assert lengths == cases.random_lengths(1000, 64)


@pytest.mark.parametrize("error", [0.03, float("nan")])
def test_different_results_stop_the_benchmark(error):
    expected = torch.ones(8)
    cases.check_agreement(["out"], [expected * 1.01], [expected], "theirs")
    with pytest.raises(RuntimeError, match="grad_q differs from theirs"):
        cases.check_agreement(["out", "grad_q"], [expected, expected * (1 + error)], [expected] * 2, "theirs")


def test_one_row_for_each_shape_and_pass(on_cpu):  # noqa: ARG001
    rows = attention.kernels(SMALL)
    assert [row["pass"] for row in rows] == ["forward", "backward"] * 2
    assert same_columns(rows)
    assert rows[0]["B, Hq, Hkv, S, D"] == "1, 4, 4, 16, 8, causal"
    assert rows[0]["sdpa / pytorch cudnn"] == 0.5
    assert rows[3]["pytorch flash TFLOP/s"] == SMALL.kernels[1].flops(backward=True) / 3 / 1e6
    assert {row["K/V heads repeated for"] for row in rows} == {"–"}


def test_a_backend_without_grouped_queries_gets_repeated_heads(on_cpu, monkeypatch):  # noqa: ARG001
    attend = peers.scaled_dot_product_attention

    def no_groups(*args, enable_gqa, **options):
        if enable_gqa:
            raise RuntimeError("No available kernel. Aborting execution.")
        return attend(*args, **options)

    monkeypatch.setattr(peers, "scaled_dot_product_attention", no_groups)
    rows = attention.kernels(SMALL)
    assert rows[0]["K/V heads repeated for"] == "–"
    assert rows[2]["K/V heads repeated for"] == rows[3]["K/V heads repeated for"] == "pytorch cudnn, pytorch flash"


def test_a_backend_without_a_kernel_leaves_an_empty_cell(on_cpu, monkeypatch):  # noqa: ARG001
    whole = peers.candidate
    monkeypatch.setattr(
        peers, "candidate", lambda name, *qkv, **given: None if "cudnn" in name else whole(name, *qkv, **given)
    )
    rows = attention.kernels(SMALL)
    assert same_columns(rows)
    assert rows[0]["pytorch cudnn µs"] == rows[0]["sdpa / pytorch cudnn"] == "–"
    monkeypatch.setattr(peers, "candidate", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        attention.kernels(SMALL)


def test_wrong_gradients_stop_the_benchmark(on_cpu, monkeypatch):  # noqa: ARG001
    right = attention.sdpa
    monkeypatch.setattr(attention, "sdpa", lambda q, k, v, **given: right(q, k, v + 0.1 * v.detach(), **given))
    with pytest.raises(RuntimeError, match="out differs from pytorch cudnn's on 1, 4, 4, 16, 8, causal"):
        attention.kernels(SMALL)


def test_one_row_for_each_option_with_the_reason_if_unsupported(on_cpu, monkeypatch):  # noqa: ARG001
    right = attention.sdpa

    def without_softcap_gradient(q, k, v, **given):
        if "softcap" in given and torch.is_grad_enabled():
            raise UnsupportedError("softcap", ["no engine\nfor it"], "none")
        return right(q, k, v, **given)

    monkeypatch.setattr(attention, "sdpa", without_softcap_gradient)
    rows = attention.options(SMALL)
    assert same_columns(rows)
    assert [row["option"] for row in rows] == list(attention._options(SMALL.options))
    by_name = {row["option"]: row for row in rows}
    assert by_name["plain"]["forward / plain"] == 1
    assert by_name["softcap=50"]["forward / plain"] == 6
    assert by_name["softcap=50"]["forward+backward / plain"] == "–"
    assert by_name["softcap=50"]["why not"] == "forward+backward: no engine for it"
    assert all(row["why not"] == "–" for name, row in by_name.items() if name != "softcap=50")


class PackedForward:
    """Replaces the frontend: PyTorch, one sequence after the other."""

    def __init__(self, qkv, *, cu_seqlens, max_seqlen, with_lse):
        assert int(cu_seqlens.diff().max()) == max_seqlen
        assert isinstance(with_lse, bool)
        outs = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            one = (x[start:end].transpose(0, 1).unsqueeze(0) for x in qkv)
            out = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1))
        self.out, self.launch = torch.cat(outs), lambda: None


class PackedBackward:
    factor = 1.0

    def __init__(self, qkv, *, forward, grad_out, cu_seqlens, max_seqlen):
        inputs = [x.detach().requires_grad_() for x in qkv]
        out = PackedForward(inputs, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, with_lse=True).out
        torch.testing.assert_close(out, forward.out)
        self.gradients = torch.autograd.grad(out, inputs, grad_out * self.factor)
        self.launch = lambda: None


def test_packed_sequences(on_cpu, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(hand_graphs, "PackedForward", PackedForward)
    monkeypatch.setattr(hand_graphs, "PackedBackward", PackedBackward)
    forward, in_training, backward = attention.varlen(SMALL)
    assert [row["pass"] for row in (forward, in_training, backward)] == ["forward", "forward in training", "backward"]
    lengths = cases.random_lengths(SMALL.tokens, SMALL.max_seqlens[0])
    assert forward["sequences"] == f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens"
    assert forward["sdpa_varlen / frontend"] == 0.5
    assert forward["sdpa_varlen TFLOP/s"] == 2 * 32 * 128 * sum(n * n for n in lengths) / 1e6
    assert backward["sdpa_varlen TFLOP/s"] == 2.5 * forward["sdpa_varlen TFLOP/s"]
    monkeypatch.setattr(PackedBackward, "factor", 1.1)
    with pytest.raises(RuntimeError, match="grad_q differs from the frontend's"):
        attention.varlen(SMALL)


def test_packed_sequences_are_omitted_where_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cudnn_sdpa.attention.varlen.sdpa_varlen", None)
    assert attention.varlen(SMALL) == []
    assert "no sdpa_varlen" in capsys.readouterr().out


def test_memory_counts_the_step_only(on_cpu, monkeypatch):  # noqa: ARG001
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_000_100)
    rows = attention.memory(SMALL)
    names = ["sdpa", "pytorch cudnn", "pytorch flash", "output and gradients alone"]
    assert [row["forward and backward"] for row in rows] == names
    assert rows[0]["MB"] == 2.0
    assert rows[-1]["MB"] == 4 * (2 * 4 + 2 * 2) * 16 * 8 / 1e6


def test_a_training_step_and_its_parts(on_cpu, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(training.SDPA, "_gradients_on_gpu", training.SDPA.backward.reference)
    monkeypatch.setattr(training, "_launches", lambda *_: training.Launches(lambda: None, lambda: None))  # no plans
    rows = training.training()
    assert same_columns(rows)
    names = [row["forward and backward"] for row in rows]
    ours = ["sdpa", "drop-in", "sdpa, window", "sdpa_varlen", "rms_norm", "silu_mul"]
    assert names[: len(ours)] == ours
    peers = ["pytorch flash", "pytorch cudnn", "pytorch rms_norm", "pytorch silu, mul", "empty autograd.Function"]
    assert names[len(ours) :][: len(peers)] == peers
    assert len(rows) == 16
    assert all(row["in Python µs"] is not None for row in rows[: len(ours)])


def test_the_floor_allocates_the_results_of_attention():
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out = training.Empty.apply(q, k, v)
    assert out.shape == q.shape
    out.backward(torch.randn_like(out))
    assert all(x.grad.shape == x.shape for x in (q, k, v))


def test_hand_written_graphs_number_operands_in_pointer_order(monkeypatch):
    """Checks the frontend graphs without a GPU; offline tests plan them with real cuDNN."""
    symbols = []

    class Symbol:
        def __getattr__(self, name):
            return lambda value: vars(self).update({name: value}) or self

    class Graph:
        def tensor(self, **given):
            symbols.append(given)
            return given["name"]

        def sdpa(self, *operands, **options):
            assert operands == ("q", "k", "v")
            assert options["seq_len_q"] == "seq_len_q"
            return Symbol(), Symbol()

        def __getattr__(self, name):
            return lambda *_: 1

    names = SimpleNamespace(BFLOAT16="bf16", FLOAT="f32", INT32="i32", INT64="i64")
    frontend = SimpleNamespace(
        data_type=names,
        diagonal_alignment=SimpleNamespace(BOTTOM_RIGHT=1),
        heur_mode=SimpleNamespace(A=0),
        pygraph=lambda **_: Graph(),
    )
    slot = SimpleNamespace(bind=lambda _: None, raw=0)
    executors = []
    built = lambda *_: SimpleNamespace(executor=executors.append)  # noqa: E731
    monkeypatch.setattr(hand_graphs, "backend", SimpleNamespace(cudnn=lambda: frontend, BuiltGraph=built))
    threads = SimpleNamespace(slots={-1: slot})
    monkeypatch.setattr(hand_graphs, "handles", SimpleNamespace(build_handle=lambda _: None, thread=threads))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    q, k = torch.randn(10, 4, 8).bfloat16(), torch.randn(10, 2, 8).bfloat16()
    cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    graph = hand_graphs.PackedForward((q, k, k.clone()), cu_seqlens=cu_seqlens, max_seqlen=7, with_lse=True)
    by_name = {symbol["name"]: symbol for symbol in symbols}
    assert graph.tensors[by_name["q"]["uid"]] is q
    assert executors == [list(range(1, 1 + len(graph.tensors)))]
    assert list(graph.pointers) == [tensor.data_ptr() for tensor in graph.tensors.values()]
    assert by_name["q"]["dim"] == [2, 4, 7, 8]
    assert by_name["k"]["stride"] == [7 * 16, 8, 16, 1]
    assert by_name["k"]["ragged_offset"] == "offsets_16"
    assert graph.tensors[by_name["offsets_16"]["uid"]].flatten().tolist() == [0, 48, 160]
    assert graph.tensors[by_name["offsets_4"]["uid"]].flatten().tolist() == [0, 12, 40]
    assert by_name["offsets_4"]["data_type"] == "i64"
    assert graph.tensors[by_name["seq_len_kv"]["uid"]].flatten().tolist() == [3, 7]
    assert by_name["seq_len_kv"]["data_type"] == "i32"
