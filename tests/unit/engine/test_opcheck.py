"""Every registered operator passes PyTorch's opcheck, called as public functions call it."""

from __future__ import annotations

import pytest

from tests.unit import opcheck_calls
from tests.unit.opcheck_calls import CALLS, recorded, registered


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # opcheck itself
def test_operators_pass_opcheck(name):
    calls = recorded(CALLS[name], "cpu")
    assert calls
    for operator, arguments in calls:
        opcheck_calls.check(operator, arguments)
    names = {operator._schema.name for operator, _ in calls}
    assert ("trained" in name or "gradients" in name) == (len(calls) > 1)
    assert all(found.startswith("cudnn_sdpa::") for found in names)


def test_every_operator_has_a_case():
    reached = {operator._schema.name for call in CALLS.values() for operator, _ in recorded(call, "cpu")}
    assert {name.partition("::")[2] for name in reached} == registered()
