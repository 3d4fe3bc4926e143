"""Shared by the tests of wrong arguments: the error names the argument, what it got, and what was expected."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_sdpa import ArgumentError, DtypeError, OptionError


def assert_refused(
    call: Callable[[], Any], kind: type[ArgumentError], argument: str, got: str = "", expected: str = ""
) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    error = caught.value
    assert type(error) is kind
    assert error.argument == argument
    assert got in str(error.got)
    assert expected in str(error.expected)
    assert str(error).startswith(f"{argument}: got {error.got}; expected {error.expected}.")
    assert isinstance(error, TypeError if kind in (DtypeError, OptionError) else ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
