"""A compiled call may be the first one of its process: no setting is left for Dynamo to read that it cannot trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.operations import OPERATIONS

TESTS = Path(__file__).parents[2]

CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from contract.operations import OPERATIONS

call = OPERATIONS[sys.argv[2]]
tensors = call.tensors()
call.assert_out(torch.compile(call.__call__, fullgraph=not call.is_composed, backend="eager")(tensors), tensors)
print("right")
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for name, call in OPERATIONS.items() if not call.is_random])
def test_the_first_call_of_a_process_is_compiled(name, run_python):
    checks_by_default = {"CUDNN_SDPA_CPU_CHECKS": None}
    assert run_python(CODE, str(TESTS), name, **checks_by_default).stdout == "right\n"
