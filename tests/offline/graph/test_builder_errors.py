"""Errors in a graph's builder name their source lines."""

from __future__ import annotations

import pytest
import torch
from failing_graphs import mismatches, misses, mistakes

from cudnn_sdpa import CudnnSdpaError, explain

pytestmark = pytest.mark.usefixtures("can_plan")


@pytest.mark.parametrize(("function", "line"), [(misses, 13), (mistakes, 18)], ids=["method", "argument"])
def test_an_error_in_a_builder_names_its_line(function, line):
    with pytest.raises((CudnnSdpaError, TypeError), match=rf"failing_graphs\.py, line {line}"):
        explain(function, torch.empty(1, 4, 64, device="meta", dtype=torch.bfloat16))


def test_rejected_graphs_name_the_lines_of_their_operations():
    x, weight = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        for shape in ((1, 16, 4, 4), (8, 24, 1, 1))
    )
    explanation = explain(mismatches, x, weight)
    assert not explanation.supported
    text = str(explanation)
    assert "failing_graphs.py, line 23" in text
    assert "failing_graphs.py, line 24" in text
