"""The exception tree: the built-in base of each error, and that errors survive pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

import cudnn_sdpa
from cudnn_sdpa import errors

BUILT_IN = {
    errors.ArgumentError: (ValueError,),
    errors.ShapeError: (errors.ArgumentError, ValueError),
    errors.DtypeError: (errors.ArgumentError, ValueError, TypeError),
    errors.DeviceError: (errors.ArgumentError, ValueError),
    errors.LayoutError: (errors.ArgumentError, ValueError),
    errors.OptionError: (errors.ArgumentError, ValueError, TypeError),
    errors.UnsupportedError: (NotImplementedError, RuntimeError),
    errors.PlanBuildError: (RuntimeError,),
    errors.ExecutionError: (RuntimeError,),
    errors.OutOfPagesError: (RuntimeError,),
    errors.LibraryError: (ImportError,),
    errors.OfflineError: (RuntimeError,),
}


@pytest.mark.parametrize("error", BUILT_IN, ids=lambda error: error.__name__)
def test_each_error_derives_from_a_built_in_one(error):
    assert all(issubclass(error, base) for base in (errors.CudnnSdpaError, *BUILT_IN[error]))


def test_the_tree_has_no_other_errors_and_all_are_public():
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == {errors.CudnnSdpaError, errors.LayoutWarning, *BUILT_IN}
    assert {error.__name__ for error in defined} == set(errors.__all__)
    assert set(errors.__all__) <= set(cudnn_sdpa.__all__)


def test_the_tree_in_the_documentation_names_every_error_with_its_bases():
    lines = errors.__doc__.splitlines()
    for error in BUILT_IN:
        (line,) = [line for line in lines if f" {error.__name__} " in f"{line} "]
        for base in error.__bases__:
            if base.__module__ == "builtins":
                assert f"({base.__name__})" in line


EXAMPLES = [
    *[
        error("q", "shape (2, 3)", "rank 4", "Try this.")
        for error in BUILT_IN
        if issubclass(error, errors.ArgumentError)
    ],
    errors.UnsupportedError("sdpa", ["too wide", "too old"], "make it smaller"),
    errors.PlanBuildError("sdpa_forward(q: …)", "A plan is missing."),
    errors.ExecutionError("cuDNN could not launch it"),
    errors.OutOfPagesError(3, 1),
    errors.LibraryError("no libcudnn"),
    errors.OfflineError("no compiler"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("passed_on", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_errors_can_be_pickled_and_copied(error, passed_on):
    again = passed_on(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_str_of_an_argument_error_with_and_without_a_hint():
    assert str(errors.ShapeError("k", "3 heads", "2")) == "k: got 3 heads; expected 2."
    assert str(errors.ShapeError("k", "3 heads", "2", "Repeat it.")) == "k: got 3 heads; expected 2. Repeat it."


def test_errors_have_their_message_as_their_only_argument():
    for error in EXAMPLES:
        assert error.args == (str(error),)


def test_errors_can_be_renamed_for_another_function():
    names = {"q": "query", "k": "key", "head dim": "width"}
    error = errors.ShapeError("k", "head dim 3", "2, as q has", "Use k.to(q.dtype); quick.").renamed(names)
    assert type(error) is errors.ShapeError
    assert str(error) == "key: got width 3; expected 2, as query has. Use key.to(query.dtype); quick."
    error = errors.UnsupportedError("sdpa of q", ["k is old", "quick"], "q, k").renamed(names)
    assert (error.what, error.reasons, error.suggestion) == ("sdpa of query", ["key is old", "quick"], "query, key")
    assert errors.UnsupportedError("sdpa", ["no kernel"]).renamed(names).suggestion == ""


def test_an_unsupported_error_lists_every_reason_and_a_suggestion():
    text = str(errors.UnsupportedError("sdpa", ["reason one", "reason two"], "another way"))
    assert text.splitlines() == [
        "sdpa is not supported here:",
        "  - reason one",
        "  - reason two",
        "What works: another way",
    ]
