"""The benchmarks' command line, and the tables made from its output."""

from __future__ import annotations

import importlib.util
import json
import re
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import attention, cli
from benchmarks.cli import app
from benchmarks.tools import cases, report
from benchmarks.tools.parts import (
    AttentionPart,
    ColdPart,
    ConvPart,
    DecodePart,
    DistributedPart,
    Fp8Part,
    FusedPart,
    HostPart,
    KernelsPart,
    LlamaPart,
    NormPart,
    PeersPart,
    ProvidersPart,
    ReplacementsPart,
    ShapesPart,
    SiluPart,
)
from cudnn_sdpa.plans import default_store

ENVIRONMENT = {
    "date": "2026-01-01",
    "gpu": "a GPU",
    "cudnn": "9.19.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "torch": "2.11",
    "python": "3.12",
}


@pytest.fixture
def tables(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "scripts")
    spec = importlib.util.spec_from_file_location("bench_tables", repository / "scripts" / "bench_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option", ["--json", "--output"])
def test_the_command_writes_what_it_measured_although_a_later_part_fails(option, monkeypatch, tmp_path):
    def fail(_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report, "environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(attention, "kernels", lambda sizes: [{"shape": sizes.kernels[0].label, "µs": 1.5}])
    monkeypatch.setattr(attention, "options", lambda _: [])
    monkeypatch.setattr(attention, "varlen", fail)
    path = tmp_path / "new" / "attention.json"
    result = CliRunner().invoke(app, ["attention", "--quick", option, str(path)])
    assert result.exit_code == 1
    assert str(result.exception) == "out of luck"
    assert json.loads(path.read_text()) == {
        "benchmark": "attention",
        "environment": ENVIRONMENT,
        "kernels": [{"shape": cases.QUICK.kernels[0].label, "µs": 1.5}],
    }


def test_results_name_the_versions_of_peers(monkeypatch):
    installed = [
        SimpleNamespace(name=name, version=version) for name, version in (("liger_kernel", "0.8"), ("tqdm", "4"))
    ]
    monkeypatch.setattr(metadata, "distributions", lambda: installed)
    assert report.environment()["liger-kernel"] == "0.8"
    assert report.peer_versions() == {"liger-kernel": "0.8"}


def test_benchmarks_store_no_plans(monkeypatch, tmp_path):
    stores = []

    def kernels(_):
        stores.append(default_store.active())
        return []

    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    monkeypatch.setattr(attention, "kernels", kernels)
    with default_store.use_plan_store(tmp_path / "plans"):
        assert CliRunner().invoke(app, ["attention", "--part", "kernels"]).exit_code == 0
    assert stores == [None]


def test_tables_are_rendered_from_the_file_that_is_there(tables, tmp_path, monkeypatch):
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = (
        "<!-- bench:host -->\nold\n<!-- /bench -->\n"
        "<!-- bench:attention/kernels -->\nNot measured yet.\n<!-- /bench -->\n"
        "<!-- bench:attention/later -->\nNot measured yet.\n<!-- /bench -->\n"
    )
    rows = [{"what": "a | b", "µs": 12.345, "n": 1234}, {"what": "  c", "µs": "–", "n": 1}]
    (folder / "host-h200.json").write_text(json.dumps({"environment": ENVIRONMENT, "host": rows}))
    measured = tables.render(page)
    assert "| what | µs | n |\n|---|--:|--:|\n| a \\| b | 12.3 | 1,234 |\n| &nbsp; c | – | 1 |\n" in measured
    assert measured.count("Not measured yet.") == 2
    (folder / "attention-h200.json").write_text(json.dumps({"environment": ENVIRONMENT, "kernels": rows[:1]}))
    measured = tables.render(measured)
    assert measured.count("a \\| b") == 2
    assert measured.count("Not measured yet.") == 1
    assert tables.render(measured) == measured
    (folder / "attention-h200.json").rename(folder / "attention.json")  # of a GPU that its name does not tell
    assert tables.render(measured) == measured
    (folder / "attention.json").write_text(json.dumps({"environment": ENVIRONMENT, "later": rows[:1]}))
    assert tables.render(measured).count("a \\| b") == 3


def test_a_table_shows_the_columns_that_its_mark_names(tables, tmp_path, monkeypatch):
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    versions = {**ENVIRONMENT, "tokenspeed-fa3": "3.0", "flash-attn-4": "4.0", "quack-kernels": "0.6"}
    rows = [{"call, of": "a", "ours µs": 1.0, "theirs / ours": 0.5}, {"call, of": "b", "ours µs": 2.0}]
    (folder / "peers-h100.json").write_text(json.dumps({"environment": versions, "forward": rows}))
    page = (
        "<!-- bench:peers-h100/forward | call, of | theirs / ours -->\n<!-- /bench -->\n"
        "<!-- bench:peers-h100/machine -->\n<!-- /bench -->\n"
    )
    measured = tables.render(page)
    assert "-->\n| call, of | theirs / ours |\n|---|--:|\n| a | 0.5 |\n| b | – |\n" in measured
    packages = "FlashAttention-3 (tokenspeed-fa3 3.0), FlashAttention-4 (flash-attn-4 4.0), quack (quack-kernels 0.6)"
    machine = f"{packages}, 2026-01-01</small>\n<!-- /bench -->"
    assert measured.count(machine) == 2
    assert tables.render(measured) == measured


def test_reasons_are_notes_below_a_table(tables):
    no_kernel = "pytorch flash: RuntimeError: No available kernel. Aborting execution."
    place = "FlashAttention-3: RuntimeError: mha_bwd, /src/flash.cpp:1377, no backward; it says"
    rows = [
        {"call": "a", "µs": 1.0, "why not": "–"},
        {"call": "b", "µs": 2.0, "why not": f"{no_kernel}; {place}"},
        {"call": "c", "µs": 3.0, "why not": place},
    ]
    lines = tables.table(rows, ENVIRONMENT).splitlines()
    assert lines[0] == "| call | µs | notes |"
    assert lines[2:5] == ["| a | 1 | – |", "| b | 2 | 1, 2 |", "| c | 3 | 2 |"]
    assert lines[6:8] == [
        "1. pytorch flash: No available kernel. Aborting execution.",
        "2. FlashAttention-3: no backward; it says",
    ]
    assert tables.table(rows[:1], ENVIRONMENT).splitlines()[0] == "| call | µs |"


def test_wide_tables_are_transposed(tables):
    keys = {f"µs of {number}": float(number) for number in range(report.MAX_COLUMNS)}
    wide = [{"case": name, **keys} for name in ("a", "b")]
    lines = tables.table(wide, ENVIRONMENT).splitlines()
    assert lines[:3] == ["| case | a | b |", "|---|--:|--:|", "| µs of 0 | 0 | 0 |"]
    assert len(lines) == 2 + report.MAX_COLUMNS + 2
    for rows in ([dict(list(row.items())[:-1]) for row in wide], wide * report.MAX_COLUMNS):
        assert report.upright(rows) is rows


def test_the_pages_name_existing_parts(tables):
    enums = {
        "host": HostPart,
        "attention": AttentionPart,
        "decode": DecodePart,
        "fp8": Fp8Part,
        "coldstart": ColdPart,
        "shapes": ShapesPart,
        "norm": NormPart,
        "silu": SiluPart,
        "conv": ConvPart,
        "llama": LlamaPart,
        "kernels": KernelsPart,
        "peers": PeersPart,
        "providers": ProvidersPart,
        "replacements": ReplacementsPart,
        "distributed": DistributedPart,
    }
    parts = {file: {part.value for part in enum} for file, enum in enums.items()}
    parts["llama-batching"] = {LlamaPart.BATCHING.value}  # measured on another day than the other parts
    parts["llama"] -= parts["llama-batching"]
    parts["providers-large"] = {ProvidersPart.LARGE.value}  # in another run than the other parts
    parts["providers"] -= parts["providers-large"]
    parts["fused-norms"], parts["fused-gates"] = {FusedPart.NORMS.value}, {FusedPart.GATES.value}  # two runs
    parts["fused-rotations"], parts["fused-few-rows"] = (
        {FusedPart.ROTATIONS.value},
        {FusedPart.FEW_ROWS.value},
    )  # a third
    parts["conv-activations"] = {ConvPart.ACTIVATIONS.value}  # on another day than the other parts of conv
    parts["conv"] -= parts["conv-activations"]
    for file, part in (
        ("conv-peers", ConvPart.PEERS),
        ("fp8-rotations", Fp8Part.ROTATIONS),
        ("host-training", HostPart.TRAINING),
        ("host-launches", HostPart.LAUNCHES),
        ("fused-norms-fp8", FusedPart.NORMS_FP8),
        ("fused-append", FusedPart.ROPE_APPEND),
        ("fused-in-place", FusedPart.ROPE_IN_PLACE),
    ):  # later than the other parts
        parts[file] = {part.value}
        parts.get(file.partition("-")[0], set()).discard(part.value)
    parts["views"] = {SiluPart.VIEWS.value}  # measured on another day than the other parts of silu
    parts["silu"] -= parts["views"]
    parts["replacements-shapes"] = {ReplacementsPart.SHAPES.value}  # as these
    parts["replacements"] -= parts["replacements-shapes"]
    parts["distributed-models"] = {DistributedPart.MODEL.value}  # by another command than the other parts
    parts["distributed"] -= parts["distributed-models"]
    parts["distributed-tensor"] = {DistributedPart.TENSOR.value}  # later, with two all-reduces a pass, also compiled
    parts["distributed"] -= parts["distributed-tensor"]
    parts["distributed-weak"] = {DistributedPart.WEAK.value}  # on other GPUs
    parts["decode-flash4"] = {
        DecodePart.STEPS.value
    }  # beside FlashAttention-4, on another GPU than beside FlashAttention-3
    parts["peers"].add("machine")
    for file in ("fp8", "decode", "norm", "silu"):
        parts[file] -= {"host"}  # last measured without the native module
    named = [found for page in tables.PAGES for found in tables.MARKS.finditer(page.read_text())]
    assert len(named) == sum(len(re.findall("<!-- bench:", page.read_text())) for page in tables.PAGES)
    for found in named:
        assert found["part"] in parts[(found["file"] or "host").removesuffix("-h100")]
    for file in set(parts) - {"host"}:
        assert {each["part"] for each in named if (each["file"] or "").removesuffix("-h100") == file} == parts[file]
