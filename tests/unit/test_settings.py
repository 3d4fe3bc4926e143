"""Wrong arguments of context managers raise when they are called, not when they are entered."""

from __future__ import annotations

import pytest

import cudnn_sdpa
from cudnn_sdpa import OptionError

WRONG = {
    "fallback": [(("pytorch",), {}, "to"), ((0,), {}, "to"), ((["torch"],), {}, "to")],
    "autotune": [
        ((), {"candidates": 0}, "candidates"),
        ((), {"candidates": 2.0}, "candidates"),
    ],
    "shape_policy": [((name,), {}, "policy") for name in ("x", "Exact", "", None, 1)],
    "use_plan_store": [
        ((5,), {}, "path"),
        ((True,), {}, "path"),
        ((["plans"],), {}, "path"),
        *((("plans",), {"capacity": capacity}, "capacity") for capacity in (0, -1, 1.5, True, "1")),
    ],
    "record_plans": [((), {"target": "h900"}, "target"), ((), {"target": 90}, "target")],
}


@pytest.mark.parametrize(
    ("name", "arguments", "options", "argument"),
    [pytest.param(name, *case, id=f"{name}-{case[:2]}") for name, cases in WRONG.items() for case in cases],
)
def test_wrong_settings_raise_at_once(name, arguments, options, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError) as caught:
        getattr(cudnn_sdpa, name)(*arguments, **options)
    assert caught.value.argument == argument
    assert list(tmp_path.iterdir()) == []
