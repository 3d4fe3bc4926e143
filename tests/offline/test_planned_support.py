"""cuDNN's own answers for a grid of options, and the published files of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cudnn_sdpa import cli, planned_support
from cudnn_sdpa.planned_support import PlannedCall, environment, planned_calls, questions, tables
from cudnn_sdpa.runtime.target import load_properties

PUBLISHED = Path(__file__).parents[2] / "docs" / "engines"


def name_of(call):
    return tuple(call[name] for name in ("operation", "direction", "dtype", "head_dim", "head_dim_v", "option"))


@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
def test_the_published_engines_are_those_that_cudnn_proposes(can_plan, target):  # noqa: ARG001
    properties = load_properties(target)
    published = json.loads((PUBLISHED / f"{target}.json").read_text())
    if published["environment"] | {"cudnn_sdpa": ""} != environment(properties) | {"cudnn_sdpa": ""}:
        pytest.skip("published with other versions")
    calls = [call.to_dict() for call in planned_calls(properties, (torch.bfloat16,), compiles=False)]
    engines = {name_of(call): call["engine"] for call in published["calls"] if call["dtype"] == "bfloat16"}
    assert {name_of(call): call["engine"] for call in calls} == engines
    assert any(call["compiled"] for call in published["calls"])
    assert all(bool(call["engine"]) is not bool(call["reasons"]) for call in published["calls"])


def test_the_first_of_each_kind_is_compiled(can_plan, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(planned_support, "HEAD_DIMS", ((64, 64), (128, 128), (512, 512)))
    monkeypatch.setattr(planned_support, "ROWS", {"no option": {}, "causal": {"is_causal": True}})
    calls = list(planned_calls(load_properties("h200"), (torch.bfloat16,)))
    assert len(calls) == 24
    for call in calls:
        has_plan = call.head_dim < 512 or call.direction == "forward"
        assert bool(call.engine) is has_plan
        assert bool(call.reasons) is not has_plan
    kinds = [(call.operation, call.direction, call.option, call.engine) for call in calls if call.compiled]
    assert len(kinds) == len(set(kinds)) >= 8
    rows = tables(calls)["sdpa"]
    assert [(row["with"], row["head dims"]) for row in rows] == [
        *(("no option", "64, 128"), ("no option", "512"), ("causal", "64, 128"), ("causal", "512"))
    ]
    assert rows[1]["backward"] == "none"
    assert rows[0]["forward"].startswith("eng")


def test_the_command_prints_and_writes(can_plan, monkeypatch, tmp_path):  # noqa: ARG001
    monkeypatch.setattr(planned_support, "HEAD_DIMS", ((256, 256),))
    monkeypatch.setattr(planned_support, "ROWS", {"no option": {}})
    arguments = ["support", "--target", "a100", "--json", str(tmp_path / "a100.json")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "none: gradients have no kernel for head dims 256 and 256 on SM 80" in result.output.replace("\n", " ")
    data = json.loads((tmp_path / "a100.json").read_text())
    assert "from public specifications" in data["environment"]["gpu"]
    assert len(data["calls"]) == 10  # of sdpa and sdpa_varlen in two dtypes, and of sdpa_fp8, both passes of each
    assert CliRunner().invoke(cli.app, ["support", "--target", "h9000"]).exit_code == 2


def test_a_table_has_the_answers_of_its_operation_below_their_names():
    """Also for options that the first operation lacks, and for dtypes that differ."""

    def call(operation, direction, dtype, option, engine):
        return PlannedCall(operation, direction, dtype, 128, 128, option, engine)

    half, fp8 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
    calls = [call("sdpa", way, dtype, "causal", f"eng-{way}") for dtype in half for way in ("forward", "backward")]
    calls += [call("sdpa_fp8", "backward", fp8, "output in bfloat16", "")]
    calls += [call("sdpa_fp8", "forward", fp8, "output in bfloat16", "eng1")]
    calls += [call("sdpa_varlen", "forward", dtype, "causal", f"eng{size}") for size, dtype in enumerate(half)]
    found = tables(calls)
    assert found["sdpa"] == [
        {"with": "causal", "head dims": "128", "forward": "eng-forward", "backward": "eng-backward"}
    ]
    assert found["sdpa_fp8"] == [
        {"with": "output in bfloat16", "head dims": "128", "forward": "eng1", "backward": "none"}
    ]
    assert found["sdpa_varlen"][0]["forward"] == "eng0, eng1"


def test_the_table_is_readable_at_100_columns(monkeypatch):
    calls = [
        PlannedCall(question.operation, question.direction, question.dtype, *dims, option, f"eng{place % 12}")
        for place, (question, option) in enumerate(questions(planned_support.DTYPES))
        for dims in [(question.head_dim, question.head_dim_v)]
    ]
    monkeypatch.setattr(planned_support, "planned_calls", lambda _: iter(calls))
    result = CliRunner().invoke(cli.app, ["support", "--target", "h200"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    assert "bottom-right causal" in result.output
    assert max(map(len, result.output.splitlines())) <= 100
