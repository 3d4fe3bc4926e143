"""cuDNN's messages about rejected graphs, shortened to their informative parts."""

from __future__ import annotations

import logging

import pytest

from cudnn_sdpa.graph.diagnostics import reason_of, summarized

#: In the format of cuDNN 9.28 and frontend 1.32.
CONFIGURATION = """{{"engineId":{0},"smVersion":900,"knobChoices":{{"TILE_SIZE":4}},"targetSMcount":132}}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: {1}
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: (CUDNN_STATUS_NOT_INITIALIZED == status) || ((status) / 1000 * 1000)
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: fwd_initSupported(deviceProp, opSet, false)
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ConvolutionEngine::getStatus()
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: status
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: engine.finalize()
"""
NONE_OF_3 = "cuDNN proposes 3 engine configurations, none of which supports this graph"


def dump(*reasons):
    configurations = (CONFIGURATION.format(number, reason) for number, reason in enumerate(reasons))
    return "\n".join(["No valid engine configs for _", *configurations])


def test_hundreds_of_lines_become_one():
    matched = "matcher->hasPrologue() || matcher->hasEpilogue()"
    found = summarized(dump("config == INVALID", "config == INVALID", matched))
    assert found == f"{NONE_OF_3}: config == INVALID; {matched}"


def test_an_informative_status_is_kept():
    text = dump("smem > usable").replace(
        "SUPPORTED; Reason: smem", "SUPPORTED_SHARED_MEMORY_INSUFFICIENT; Reason: smem"
    )
    found = summarized(text)
    assert found.endswith(" this graph: CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT, smem > usable")


def test_one_configuration_is_singular():
    assert summarized(dump("k % 8")) == (
        "cuDNN proposes one engine configuration, which does not support this graph: k % 8"
    )


def test_reasons_that_only_name_functions_become_a_count():
    assert summarized(dump(*["ptr->isSupported()"] * 3)) == NONE_OF_3


@pytest.mark.parametrize("text", ["", "head dim 512 is too large", "two\nlines", "two\nlines\n"])
def test_a_short_reason_stays_as_it_is(text):
    assert summarized(text) == text.removesuffix("\n")


def test_skipped_plans_are_named_once():
    found = summarized("first\nDeselecting execution plan 1\nDeselecting execution plan 2")
    assert found.startswith("first\ncuDNN marks it as nondeterministic")
    assert found.count("\n") == 1
    alone = summarized("Deselecting execution plan 1")
    assert alone.startswith("cuDNN marks it as nondeterministic")
    both = summarized(dump("k % 8") + "Deselecting execution plan 3")
    assert both == summarized(dump("k % 8")) + "\n" + alone


def test_the_frontends_python_engines_are_left_out():
    text = "no engine (the backend declined: it is too large; python engines: none of 14)"
    assert reason_of(RuntimeError(text)) == "it is too large"
    assert reason_of(RuntimeError("no engine (the backend declined: it is too large)")) == "it is too large"
    assert reason_of(RuntimeError("plain")) == "plain"
    assert reason_of(KeyError()) == "KeyError"


def test_all_lines_are_in_the_log(caplog):
    with caplog.at_level(logging.DEBUG, "cudnn_sdpa"):
        reason_of(RuntimeError(dump("k % 8", "config == INVALID")))
        reason_of(RuntimeError("plain"))
    assert [record.getMessage().count("Reason: ") for record in caplog.records] == [14]
