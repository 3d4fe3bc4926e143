"""The benchmarks run on a few small shapes with few repeats: the internals that they use exist."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from compiled_functions import given_functions
from typer.testing import CliRunner

from benchmarks import convolutions, decode, fp8, fused, fused_inference, fused_peers, host, proposals
from benchmarks.cli import app
from benchmarks.decode import FP8, VARLEN, Step
from benchmarks.tools import candidates, cases, timing, training
from benchmarks.tools.parts import (
    AttentionPart,
    ConvPart,
    DecodePart,
    Fp8Part,
    FusedPart,
    HostPart,
    KernelsPart,
    LlamaPart,
    NormPart,
    PeersPart,
    ProvidersPart,
    ReplacementsPart,
    SiluPart,
)
from cudnn_sdpa.attention.flash4.installed import installed


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Two calls per measurement, and small shapes."""
    for module in (host, training, decode, fp8, fused, fused_inference):
        monkeypatch.setattr(module, "host_times", lambda calls, **_: timing.host_times(calls, per_round=2, rounds=1))
    for module in (host, decode, candidates, fused, convolutions, proposals):
        short = lambda calls, **how: timing.device_times(calls, **{**how, "repeats": 2})  # noqa: E731
        monkeypatch.setattr(module, "device_times", short)
    monkeypatch.setattr(fp8, "REPEATS", 2)
    monkeypatch.setattr(fp8, "SHAPES", (cases.Shape(1, 8, 2, 1024, 128, True), cases.Shape(1, 4, 4, 512, 128, False)))
    monkeypatch.setattr(cases, "KERNEL_SHAPES", cases.QUICK.kernels)
    new = ((1, 1, 1), (4, 4), (1, 1, 70))
    steps = (*(Step(each, 300) for each in new), Step((1, 1), 300, page_size=16), Step((1, 1), 300, pages=FP8))
    monkeypatch.setattr(decode, "STEPS", steps)
    monkeypatch.setattr(decode, "APPEND", decode.Sizes(layers=2, pages=8))
    monkeypatch.setattr(cases, "COPIED", 1 << 20)
    monkeypatch.setattr(fused, "NORMS", ((64, 256),))
    monkeypatch.setattr(fused, "GATES", ((64, 256),))
    monkeypatch.setattr(convolutions, "CASES", (convolutions.Case(2, 32, 8, 64, 3, padding=1),))
    monkeypatch.setattr(convolutions, "MORE", *convolutions.CASES)
    monkeypatch.setattr(fused_peers, "NORMS", fused.NORMS)
    monkeypatch.setattr(fused_peers, "GATES", fused.GATES)
    monkeypatch.setattr(fused_peers, "ROTATIONS", ((2, 64, 4, 2, 64),))
    monkeypatch.setattr(fused_peers, "FEW_ROWS", ((1, 256),))
    monkeypatch.setattr(fused_inference, "NORMS", fused.NORMS)
    monkeypatch.setattr(fused_inference, "SIZES", fused_inference.Sizes(tokens=(1, 64), heads=(4, 2), pages=8))
    monkeypatch.setattr(proposals, "NORMS", fused.NORMS)
    monkeypatch.setattr(proposals, "GATES", fused.GATES)
    monkeypatch.setattr(proposals, "CONVOLUTIONS", convolutions.CASES)


def assert_measured(tmp_path, command, part, *options):
    path = tmp_path / "results.json"
    result = CliRunner().invoke(app, [command, "--part", part.value, "--output", str(path), *options])
    assert result.exit_code == 0, result.output + repr(result.exception)
    rows = json.loads(path.read_text())[part.value]
    assert rows
    for row in rows:
        numbers = [value for value in row.values() if isinstance(value, (int, float))]
        assert numbers
        assert all(map(math.isfinite, numbers))


#: Parts of each command. Left out: 1,000 plans, 10,000 steps, and a layer of another library.
PARTS = {
    "host": [part for part in HostPart if part is not HostPart.MEMORY],
    "decode": [part for part in DecodePart if part is not DecodePart.PLANS],
    "norm": NormPart,
    "silu": SiluPart,
    "fused": FusedPart,
    "fp8": [part for part in Fp8Part if part is not Fp8Part.LAYER],
    "conv": ConvPart,
    "attention": AttentionPart,
    "kernels": KernelsPart,
}


@pytest.mark.parametrize(("command", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_parts(tmp_path, command, part):
    options = {"attention": ["--quick"], "kernels": ["--small"]}
    assert_measured(tmp_path, command, part, *options.get(command, []))


def test_steps_on_pages_agree_with_float64():
    *rows, fp8 = decode.steps()
    for row in rows if torch.cuda.get_device_capability() < (8, 9) else [*rows, fp8]:
        assert isinstance(row[f"{VARLEN} µs"], float), row


@pytest.mark.parametrize("name", ["norms_fp8", "rope_append", "rope_in_place"])
def test_calls_of_inference_agree_with_float64_as_does_what_they_are_compared_with(name):
    if name != "rope_in_place" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8")
    for row in getattr(fused_inference, name)():
        assert row["why not"] == "–", row


def test_convolutions_agree_with_float64_as_do_those_of_pytorch():
    for row in convolutions.peers():
        assert row["why not"] == "–", row


def test_a_server_builds_few_plans():
    first, last = decode.plans(200)
    assert first["plans built"] <= last["plans built"] <= 3, (first, last)


@pytest.mark.parametrize("part", [ReplacementsPart.HOST, ReplacementsPart.KERNELS])
def test_replacements(tmp_path, part, monkeypatch):
    from benchmarks import replacements

    monkeypatch.setattr(replacements, "host_times", lambda calls, **_: timing.host_times(calls, per_round=2, rounds=1))
    monkeypatch.setattr(replacements, "device_times", lambda calls, **how: timing.device_times(calls, repeats=2, **how))
    monkeypatch.setattr(replacements, "SHAPES", (cases.Shape(1, 8, 8, 512, 64, True),))
    assert_measured(tmp_path, "replacements", part)


@pytest.mark.parametrize("part", list(PeersPart))
def test_peers(tmp_path, part, monkeypatch):
    """Packages that are not installed have no time; this library and PyTorch's backends have."""
    from benchmarks import peers

    monkeypatch.setattr(peers, "DECODE", ((2, 300),))
    monkeypatch.setattr(peers, "PROBLEM", cases.Shape(1, 8, 2, 1024, 128, True))
    small = tuple(replace(each, lengths=each.lengths[:3]) for each in peers.TRAINING)
    monkeypatch.setattr(peers, "FORWARD", small)
    monkeypatch.setattr(peers, "TRAINING", small)
    path = tmp_path / "peers.json"
    result = CliRunner().invoke(app, ["peers", "--part", part.value, "--output", str(path)])
    assert result.exit_code == 0, result.output + repr(result.exception)
    rows = json.loads(path.read_text())[part.value]
    for row in rows:
        if part is not PeersPart.OVERVIEW:
            assert row["ours µs"] > 0, row
        elif not row["candidate"].startswith("FlashAttention"):
            assert row["µs"] > 0, row


@pytest.mark.parametrize("part", list(ProvidersPart))
def test_providers(tmp_path, part, monkeypatch):
    """cuDNN has a time; FlashAttention-4 where it is installed and its kinds are compiled."""
    from benchmarks import providers

    small = tuple(replace(each, lengths=each.lengths[:2]) for each in providers.TRAINING[:2])
    for name in ("FORWARD", "BACKWARD", "TRAINING", "LENGTHS"):
        monkeypatch.setattr(providers, name, small)
    monkeypatch.setattr(providers, "LARGE", providers.LARGE[:1])
    monkeypatch.setattr(providers, "PROCESSES", 1)
    path = tmp_path / "providers.json"
    with given_functions():
        result = CliRunner().invoke(app, ["providers", "--part", part.value, "--output", str(path)])
    if part in (ProvidersPart.HOST, ProvidersPart.FIRST_CALLS) and installed().missing:
        assert result.exit_code == 1
        assert "flash-attn-4" in result.output + repr(result.exception)
        return
    assert result.exit_code == 0, result.output + repr(result.exception)
    column = "first call ms" if part is ProvidersPart.FIRST_CALLS else "cudnn µs"
    for row in json.loads(path.read_text())[part.value]:
        assert row[column] > 0, row


@pytest.mark.parametrize("part", list(LlamaPart))
def test_llama(tmp_path, part, monkeypatch):
    pytest.importorskip("transformers", minversion="5.24" if part is LlamaPart.BATCHING else "5.17")
    from benchmarks import llama

    monkeypatch.setattr(llama, "device_times", lambda calls, **how: timing.device_times(calls, repeats=2, **how))
    small = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    monkeypatch.setattr(llama, "SHAPE", {**llama.SHAPE, **small, "num_hidden_layers": 2})
    monkeypatch.setattr(llama, "PROMPTS", ((2, 300),))
    monkeypatch.setattr(llama, "CACHES", ((2, 300),))
    monkeypatch.setattr(llama, "STEPS", 4)
    assert_measured(tmp_path, "llama", part)


def test_kernels_run_beside_every_peer():
    """Each of PyTorch's backends has a kernel on a GPU, so no column of the tables is empty."""
    from benchmarks import kernels

    (first, *_), (half, *_) = kernels.float32(kernels.SMALL), kernels.half(kernels.SMALL)
    assert {f"{name} µs" for name in kernels.IN_FLOAT32} <= first.keys()
    assert {f"{name} µs" for name in kernels.IN_HALF} <= half.keys()
    fused, *_ = kernels.memory(kernels.Sizes(1, 4, 64, (1024,), 64, 2))
    assert fused["fused MB"] < 0.1 * fused["naive MB"]
