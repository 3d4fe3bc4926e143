"""The fast path of graph functions on a fake GPU, each scenario in a separate process."""

from __future__ import annotations

import os
from pathlib import Path

import forked_python
import pytest

HERE = Path(__file__).parent.parent
SCENARIOS = (
    *("scalars_by_keyword", "functions_of_one_builder", "garbage_collected_functions", "in_place_changes"),
    *("sizes_in_lists", "empty_tensors", "saved_tensors_of_convolutions"),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fast_path(scenario):
    environment = {
        **os.environ,
        "CUDNN_SDPA_NATIVE": "off",
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent, HERE.parents[1]])),
    }
    result = forked_python.run([str(HERE / "fast_path_scenarios.py"), scenario], env=environment, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
