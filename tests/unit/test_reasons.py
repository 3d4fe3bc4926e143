"""What cuDNN says of graphs that it declines, shortened to what tells something."""

from __future__ import annotations

import pytest

from cudnn_sdpa.runtime.reasons import in_words, reason_of

CONFIGURATION = """{{"engineId":{0},"smVersion":900,"knobChoices":{{"TILE_SIZE":4}},"targetSMcount":132}}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: {1}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: (CUDNN_STATUS_NOT_INITIALIZED == status) || ((status) / 1000 * 1000)
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: finalize_internal()
"""
NONE_OF = "none of the 3 configurations that cuDNN has for it takes these tensors"


def dump(*reasons):
    configurations = (CONFIGURATION.format(number, reason) for number, reason in enumerate(reasons))
    return "\n".join(["No valid engine configs for _", *configurations])


def test_hundreds_of_lines_become_one():
    assert in_words(dump("config == INVALID", "config == INVALID", "k % 8")) == (
        f"{NONE_OF}; it says: config == INVALID, k % 8"
    )


def test_of_nothing_but_names_of_its_functions_the_number_remains():
    assert in_words(dump(*["ptr->isSupported()"] * 3)) == NONE_OF


@pytest.mark.parametrize("text", ["", "head dim 512 is too large", "two\nlines"])
def test_a_short_reason_stays_as_it_is(text):
    assert in_words(text) == text


def test_plans_that_were_passed_over_are_named_once():
    found = in_words("first\nDeselecting execution plan 1\nDeselecting execution plan 2")
    assert found.startswith("first\ncuDNN notes that it may give other bits")
    assert found.count("\n") == 1


def test_the_frontends_python_engines_are_left_out():
    text = "no engine (the backend declined: it is too large; python engines: none of 14)"
    assert reason_of(RuntimeError(text)) == "it is too large"
    assert reason_of(RuntimeError("no engine (the backend declined: it is too large)")) == "it is too large"
    assert reason_of(RuntimeError("plain")) == "plain"
    assert reason_of(KeyError()) == "KeyError"
