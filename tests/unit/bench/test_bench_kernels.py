"""`bench kernels` without a GPU: its rows on small sizes, its command line and JSON."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import cli, kernels
from benchmarks.tools import report

SMALL = kernels.Sizes(batch=1, heads=2, dim=8, lengths=(5, 16), exact_length=16, repeats=2)


def test_everything_that_is_timed_is_compared_with_float64():
    rows = kernels.errors(SMALL)
    of_half = [name for name in kernels.IN_HALF for _ in range(4)]
    assert sorted(row["call"] for row in rows) == sorted([*["fused", "tiled", "naive", "pytorch math"] * 2, *of_half])
    bounds = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}
    for row in rows:
        bound = bounds[row["dtype"].split(",")[0]]
        assert 0 < row["out"] < bound
        assert 0 < row["gradients"] < bound * max(1.0, row["largest gradient"])


@pytest.mark.parametrize("part", [kernels.float32, kernels.half])
def test_a_wrong_result_stops_the_benchmark(part, monkeypatch):
    for candidates in (kernels.IN_FLOAT32, kernels.IN_HALF):
        name = list(candidates)[-1] if candidates is kernels.IN_HALF else "naive"
        right = candidates[name]
        monkeypatch.setitem(candidates, name, lambda *call, right=right: right(*call) * 1.1)
    with pytest.raises(RuntimeError, match=r"out differs from that of the fused form \((naive|pytorch flash), "):
        part(SMALL)


def test_a_wrong_gradient_stops_it(monkeypatch):
    right = kernels.IN_FLOAT32["tiled"]
    wrong = lambda q, k, v, causal: right(q, k, v + 0.1 * (v - v.detach()), causal)  # noqa: E731 - wrong gradient alone
    monkeypatch.setitem(kernels.IN_FLOAT32, "tiled", wrong)
    with pytest.raises(RuntimeError, match=r"grad_v differs from that of the fused form \(tiled, float32, S=5\)"):
        kernels.float32(SMALL)


def test_errors_of_a_backend_are_no_missing_kernels(monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(kernels.IN_FLOAT32, "naive", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        kernels.float32(SMALL)


def test_the_command_writes_json_without_a_gpu_from_which_the_page_is_made(monkeypatch, tmp_path, repository):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "SMALL", SMALL)
    shown = []
    monkeypatch.setattr(report, "show", lambda title, rows: shown.append((title, len(rows))))
    path = tmp_path / "kernels.json"
    done = CliRunner().invoke(cli.app, ["kernels", "--small", "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert "memory is skipped" in done.output
    written = json.loads(path.read_text())
    assert written["environment"]["gpu"] == "none"
    assert {"torch", "cudnn", "python", "date"} <= written["environment"].keys()
    assert [len(written[name]) for name in ("float32", "half", "errors")] == [count for _, count in shown]
    assert "memory" not in written
    monkeypatch.syspath_prepend(repository / "scripts")
    tables = importlib.import_module("bench_tables")
    monkeypatch.setattr(tables, "measured", lambda file: written if file == "kernels" else {})
    page = tables.render((repository / "docs" / "kernels.md").read_text())
    for part in ("float32", "half", "errors"):
        table = page.split(f"<!-- bench:kernels/{part} -->\n")[1].split("<!-- /bench -->")[0]
        assert [line[0] for line in table.strip().splitlines()[:-2]] == ["|"] * (2 + len(written[part]))
