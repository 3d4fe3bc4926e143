"""Graph functions on a stand-in of a GPU, each scenario in a process of its own: what must not be mixed up."""

from __future__ import annotations

import os
from pathlib import Path

import forked_python
import pytest

HERE = Path(__file__).parent.parent
SCENARIOS = (
    *("numbers_by_name", "gradients_under_hooks", "functions_of_one_builder", "functions_that_nobody_keeps"),
    *("checkpoints", "misaligned_gradients", "changes_in_place", "forward_differentiation", "sizes_in_lists"),
    *("empty_tensors", "determinism", "wanted_gradients", "convolutions", "saved_for_convolutions"),
    *("gradients_of_gradients", "gradients_without_numbers_in_memory", "tensors_without_numbers_in_memory"),
    *("tensors_on_other_devices", "tensors_that_are_elsewhere_in_a_backward_pass", "freed_memory"),
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_short_way(scenario):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent, HERE.parents[1]]))}
    result = forked_python.run([str(HERE / "fast_path_scenarios.py"), scenario], env=environment, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
