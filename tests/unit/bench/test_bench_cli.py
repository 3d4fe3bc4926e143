"""The benchmarks' command line: its commands, wrong arguments, `all`, and processes of its own."""

from __future__ import annotations

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import attention, cli
from benchmarks.tools.processes import run_command
from cudnn_sdpa.plans import default_store

BENCHMARKS = list(typer.main.get_command(cli.app).commands)


def invoke(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_all_commands_are_listed():
    assert [
        *("all", "host", "attention", "fp8", "decode", "norm", "silu", "conv", "llama", "coldstart", "shapes"),
        *("peers", "provider", "kernels", "distributed"),
    ] == BENCHMARKS


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        "all --json {text}",
        "all --json {text}/x",
        *(f"{name} --nothing" for name in BENCHMARKS),
        *(f"{name} --part nothing" for name in BENCHMARKS),
        *(f"{name} --json {{open}}" for name in BENCHMARKS if name != "all"),
        *(f"{name} --json {{text}}/x.json" for name in BENCHMARKS if name != "all"),
    ],
)
def test_wrong_arguments_exit_with_2_and_a_message(line, tmp_path):
    (tmp_path / "text").write_text("a file")
    (tmp_path / "open").mkdir()
    result = invoke(*line.format(text=tmp_path / "text", open=tmp_path / "open").split())
    assert result.exit_code == 2
    assert "Usage: " in result.stderr or len(result.stderr.splitlines()) == 1


def test_all_continues_after_a_failed_benchmark(monkeypatch, tmp_path):
    ran = []

    def run(*arguments):
        ran.append(arguments)
        return arguments[0] == "fp8"

    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    monkeypatch.setattr(cli, "run_command", run)
    result = invoke("all", "--json", tmp_path / "results")
    names = [name for name in BENCHMARKS if name != "all"]
    assert ran == [(name, "--json", str(tmp_path / "results" / f"{name}.json")) for name in names]
    assert result.exit_code == 1
    assert result.stderr == "failed: fp8; the other 13 are done\n"
    ran.clear()
    monkeypatch.setattr(cli, "run_command", lambda *arguments: ran.append(arguments))
    assert invoke("all").exit_code == 0
    assert ran == [(name,) for name in names]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_in_a_separate_process_has_the_same_exit_status(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_command("--help") == 0
    assert run_command("host") == 2


def test_benchmarks_store_no_plans(monkeypatch, tmp_path):
    stores = []

    def kernels(_):
        stores.append(default_store.active())
        return []

    monkeypatch.setattr(cli, "require_gpu", lambda: None)
    monkeypatch.setattr(attention, "kernels", kernels)
    with default_store.use_plan_store(tmp_path / "plans"):
        assert invoke("attention", "--part", "kernels").exit_code == 0
    assert stores == [None]
