"""`support` with a target: cuDNN's own answers, and their published files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cudnn_sdpa import cli, explain, sdpa, support
from cudnn_sdpa.planning import support as support_module
from cudnn_sdpa.planning.support import ROWS, Cell, Support, cell, environment

PUBLISHED = Path(__file__).parents[3] / "docs" / "engines"

pytestmark = pytest.mark.usefixtures("can_plan")


@pytest.mark.slow
@pytest.mark.parametrize("option", ROWS)
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_the_published_engines_are_those_of_cudnn(target, option):
    published = json.loads((PUBLISHED / f"{target}.json").read_text())
    if published["environment"] | {"cudnn_sdpa": ""} != environment(target=target) | {"cudnn_sdpa": ""}:
        pytest.skip("published with other versions")
    of_option = [call for call in published["calls"] if call["option"] == option]
    assert of_option
    for call in of_option:
        assert cell(call["operation"], option, target=target).to_dict() == call


@pytest.mark.parametrize(("target", "sm"), [("a100", 80), ("l40s", 89), ("h200", 90), ("b200", 100), ("rtx5090", 120)])
def test_the_published_reasons_are_those_of_the_rules(target, sm):
    """What no rule says is left out: cuDNN's own errors, and sentences that name the GPU."""
    published = json.loads((PUBLISHED / f"{target}.json").read_text())
    version = published["environment"]["cudnn"]
    for call in published["calls"]:
        reasons = [one for one in call["reasons"] if not one.startswith(("CUDNN_", published["environment"]["gpu"]))]
        ruled = cell(call["operation"], call["option"], sm=sm, cudnn=version).reasons
        assert reasons == [one for one in ruled if not one.startswith("a GPU of SM")], call


def test_support_for_a_target_agrees_with_explain():
    q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16)
    told = explain(sdpa, q, q, q, is_causal=True)
    asked = support(head_dim=64, target="h200", is_causal=True)
    assert asked.engine == told.engine != ""
    assert str(asked) == (
        f"sdpa: bfloat16, head dims 64 and 64, Sq=1024, Skv=1024, is_causal; {told.target}, "
        f"cuDNN {told.versions['cuDNN']}: supported, {told.engine}"
    )
    refused = support(head_dim=256, target="a100", direction="backward")
    assert not refused
    assert refused.reasons == ["gradients have no kernel for head dims 256 and 256 on SM 80"]


def test_the_command_prints_and_writes(monkeypatch, tmp_path):
    monkeypatch.setattr(support_module, "ROWS", {"head dim 256": ROWS["head dim 256"]})
    arguments = ["support", "--target", "a100", "--json", str(tmp_path / "a100.json")]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "eng8, none (1) " in result.output
    assert "\n(1) gradients have no kernel for head dims 256 and 256 on SM 80\n" in result.output
    data = json.loads((tmp_path / "a100.json").read_text())
    assert "from public specifications" in data["environment"]["gpu"]
    words = {call["operation"]: call["supported"] for call in data["calls"]}
    assert words == {"sdpa": "forward only", "sdpa_varlen": "forward only", "sdpa_fp8": "no"}
    assert data["calls"][0]["engines"]["forward"].startswith("eng")
    assert data["calls"][0]["engines"]["backward"] == ""
    assert CliRunner().invoke(cli.app, ["support", "--target", "h9000"]).exit_code == 2


def test_the_table_is_readable_at_80_columns(monkeypatch):
    answer = Support("it", engine="eng10")
    monkeypatch.setattr(
        support_module, "cell", lambda operation, option, **_: Cell(option, operation, (answer, answer))
    )
    result = CliRunner().invoke(cli.app, ["support", "--target", "h200"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    assert "attn_mask, bottom-right causal" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
