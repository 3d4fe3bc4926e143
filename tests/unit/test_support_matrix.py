"""`support`: the rules of support as a function, a table and a page."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa import OptionError, support
from cudnn_sdpa.attention.support import BACKWARD, RULES, Case, refusal
from cudnn_sdpa.cli import app
from cudnn_sdpa.runtime.backend import MIN_CUDNN, version_string
from cudnn_sdpa.support_matrix import ROWS, answers, table, version_number

H200 = {"sm": 90, "cudnn": "9.28.0"}
LATE, TOP_LEFT, BOTTOM_RIGHT = (-64, None, False), (None, 0, False), (None, 0, True)
PLAIN = Case("forward", torch.bfloat16, 128, 128, 256, 384, 90, 92800)
GRADIENT = replace(PLAIN, operation=BACKWARD)
B200 = replace(GRADIENT, sm=100)
#: A case for each rule, and what its way out changes.
REACHED = [
    (replace(PLAIN, sm=75), {"sm": 80}),
    (replace(PLAIN, dtype=torch.float32), {"dtype": torch.bfloat16}),
    (replace(PLAIN, head_dim=100), {"head_dim": 104}),
    (replace(PLAIN, head_dim_v=2048), {"head_dim_v": 1024}),
    (replace(PLAIN, cudnn=91001), {"cudnn": 91002}),
    (replace(GRADIENT, sm=80, head_dim=136), {"head_dim": 128}),
    (replace(B200, head_dim=192, head_dim_v=128, cudnn=91002), {"head_dim": 128}),
    (replace(PLAIN, sm=100, head_dim=256, dropout=True), {"head_dim_v": 136}),
    (replace(GRADIENT, sm=120, packed=True, lengths=True), {"packed": False}),
    (replace(GRADIENT, sm=80, softcap=True), {"softcap": False}),
    (replace(PLAIN, band=BOTTOM_RIGHT, lengths=True, bias=True), {"band": None}),
    (replace(GRADIENT, band=LATE, dropout=True), {"band": None, "bias": True}),
    (replace(PLAIN, alibi=True), {"alibi": False, "bias": True}),
    (replace(PLAIN, alibi=True, softcap=True, band=TOP_LEFT), {"alibi": False, "bias": True}),
    (replace(PLAIN, sinks=True, cudnn=91002), {"cudnn": 91300}),
    (replace(B200, sq=1, cudnn=91002), {"cudnn": 91900}),
    (replace(GRADIENT, softcap=True, skv=100, cudnn=91002), {"skv": 128, "bias": True}),
    (replace(PLAIN, softcap=True, lengths=True, sq=1), {"lengths": False, "bias": True}),
    (replace(PLAIN, dropout=True, sq=1), {"sq": 2}),
    (replace(GRADIENT, softcap=True, bias=True, bias_gradient=True), {"bias_gradient": False}),
    (replace(B200, head_dim=256, head_dim_v=256, dropout=True), {"head_dim": 128, "head_dim_v": 128}),
    (replace(B200, head_dim=192, bias=True, bias_gradient=True), {"bias_gradient": False}),
    (replace(B200, bias=True, bias_gradient=True, dropout=True), {"dropout": False}),
    (replace(GRADIENT, sm=80, bias=True, skv=1), {"skv": 2}),
    (replace(B200, deterministic=True, dropout=True), {"deterministic": False}),
    (replace(B200, deterministic=True, cudnn=91700), {"deterministic": False}),
    (replace(B200, deterministic=True, cudnn=91900, softcap=True, lengths=True), {"deterministic": False}),
    (replace(PLAIN, sm=80, packed=True, cudnn=91700), {"packed": False, "lengths": True}),
]


@pytest.mark.parametrize(("case", "way_out"), REACHED)
def test_a_case_is_refused_and_its_way_out_is_not(case, way_out):
    error = refusal(case, "sdpa")
    assert error is not None
    assert error.reasons
    assert error.suggestion
    assert "{" not in str(error)
    assert refusal(replace(case, **way_out), "sdpa") is None


def test_every_rule_is_reached():
    unreached = [rule.reason for rule in RULES if not any(rule.applies(case) for case, _ in REACHED)]
    assert not unreached


def test_a_supported_call_is_true_and_says_so():
    answer = support(head_dim=128, is_causal=True, direction="backward", **H200)
    assert answer
    assert answer.supported
    assert answer.reasons == []
    assert answer.suggestion == ""
    assert str(answer).endswith("is_causal, top_left; SM 90, cuDNN 9.28.0: supported")


def test_an_unsupported_call_names_every_reason():
    answer = support(head_dim=512, softcap=True, alibi=True, sm=89, cudnn=92800, direction="backward")
    assert not answer
    text = str(answer)
    for part in ("head dims 512 and 512", "soft cap", "linear biases", "SM 89", "what works:"):
        assert part in text
    assert len(answer.reasons) == len(set(answer.reasons)) == text.count("\n  - ")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"head_dim": 100}, "multiples of 8"),
        ({"head_dim": 64, "dtype": torch.float32}, "float32"),
        ({"head_dim": 64, "sm": 75}, "7.5"),
        ({"head_dim": 64, "dropout": True, "sq": 1}, "single query"),
        ({"head_dim": 64, "softcap": True, "attn_mask_grad": True, "direction": "backward"}, "attn_mask"),
        ({"head_dim": 64, "sm": 100, "cudnn": "9.19", "sq": 1}, "Blackwell"),
        ({"head_dim": 64, "alibi": True}, "causal"),
    ],
)
def test_reasons_name_what_is_wrong(options, word):
    answer = support(**{**H200, **options})
    assert not answer
    assert any(word in reason for reason in answer.reasons), answer.reasons


def test_gradients_need_the_forward_pass_too():
    forward = support(head_dim=64, dtype=torch.float64, **H200)
    backward = support(head_dim=64, dtype=torch.float64, direction="backward", **H200)
    assert forward.reasons == backward.reasons


def test_one_query_on_one_key_has_gradients_without_a_plan():
    assert support(head_dim=64, sq=1, skv=1, direction="backward", **H200)


@pytest.mark.parametrize("cudnn", ["8.9.0", "9.5.0", "9.9.99"])
@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_cudnn_that_the_library_refuses_to_load_supports_nothing(cudnn, operation, direction):
    answer = support(operation, head_dim=64, direction=direction, sm=90, cudnn=cudnn)
    assert not answer
    assert f"cuDNN {cudnn} is older than {version_string(MIN_CUDNN)}" in answer.reasons[0]
    newer = answer.suggestion.split()[1]
    assert support(operation, head_dim=64, direction=direction, sm=90, cudnn=newer)


def test_an_old_cudnn_is_one_reason_beside_others():
    answer = support(head_dim=64, dtype=torch.float32, sm=90, cudnn="9.5.0")
    assert len(answer.reasons) == 2
    assert set(table(answers(90, "9.5.0"))[0].values()) == {"no option", "no"}


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": True}, {"sinks": True}, {"head_dim": 64, "head_dim_v": 128}], ids=str
)
@pytest.mark.parametrize("sizes", [{"sq": 2**21}, {"sq": 2**20, "skv": 2**23}, {"sq": 1, "skv": 2**22}], ids=str)
def test_sizes_that_take_several_plans_are_no_reason_against_gradients(operation, options, sizes):
    if sizes["sq"] == 1 and "dropout" in options:
        sizes = {**sizes, "sq": 2}
    assert support(operation, direction="backward", sm=90, cudnn="9.19", **{"head_dim": 128, **options, **sizes})


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
def test_a_head_that_is_too_large_for_one_plan_is_a_reason(operation):
    options = {"head_dim": 128, "sq": 2**25, "sm": 90, "cudnn": "9.19"}
    assert support(operation, **options)
    answer = support(operation, direction="backward", **options)
    assert not answer
    assert "one head has more than" in answer.reasons[0]
    assert answer.suggestion == "shorter sequences"


def test_packed_sequences_have_options_and_a_diagonal_of_their_own():
    assert "bottom_right" in str(support("sdpa_varlen", head_dim=64, is_causal=True, **H200))
    assert support("sdpa_varlen", head_dim=64, direction="backward", **H200)
    assert not support("sdpa_varlen", head_dim=64, direction="backward", sm=80, cudnn="9.28")
    for name in ("attn_mask", "attn_mask_grad", "alibi", "seq_lens"):
        with pytest.raises(OptionError, match=f"{name}.*sdpa_varlen has no such argument"):
            support("sdpa_varlen", head_dim=64, **{name: True}, **H200)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("operation", "flash"),
        ("direction", "sideways"),
        ("dtype", "bfloat16"),
        ("head_dim", 0),
        ("head_dim_v", 64.0),
        ("sq", True),
        ("skv", -1),
        ("sm", "90"),
        ("sm", 9),
        ("cudnn", "nine"),
        ("cudnn", 9),
        ("cudnn", "9"),
        ("dropout", 0.1),
        ("softcap", 30.0),
        ("is_causal", 1),
        ("causal_alignment", "middle"),
        ("window", 64),
        ("window", (64,)),
        ("alibi", None),
        ("deterministic", None),
    ],
)
def test_what_is_no_option_is_refused_by_name(name, value):
    with pytest.raises(OptionError) as caught:
        support(**{"head_dim": 64, **H200, name: value})
    assert caught.value.argument == name


def test_versions_are_numbers_or_texts():
    assert version_number("9.19") == version_number("9.19.0") == version_number("9.19.0.56") == version_number(91900)


def test_without_a_gpu_the_answer_is_for_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "SM 90" in str(support(head_dim=64, cudnn="9.28.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert "SM 89" in str(support(head_dim=64, cudnn="9.28.0"))


def test_a_matrix_has_a_row_for_each_option():
    rows = {row["with"]: row for row in table(answers(80, "9.28.0"))}
    assert list(rows) == list(ROWS)
    assert rows["causal"] == {"with": "causal", "sdpa": "yes", "sdpa_varlen": "forward only", "sdpa_fp8": "no"}
    assert rows["attn_mask"]["sdpa_varlen"] == "–"
    assert rows["one query, dropout"]["sdpa"] == "no"


def test_the_command_prints_a_table():
    result = CliRunner().invoke(app, ["support", "--sm", "100", "--cudnn", "9.19.0"])
    assert result.exit_code == 0
    assert "cuDNN 9.19.0 on SM 100" in result.output
    assert "forward only" in result.output


def test_the_command_refuses_what_is_no_version():
    result = CliRunner().invoke(app, ["support", "--sm", "100", "--cudnn", "new"])
    assert result.exit_code == 2
    assert "--cudnn: got 'new'" in result.output


def test_the_page_shows_what_the_rules_say(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "scripts")
    spec = importlib.util.spec_from_file_location("support_tables", repository / "scripts" / "support_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text()
    assert len(script.MARKS.findall(text)) == 6
    assert script.render(text) == text, "run: python scripts/support_tables.py"


def test_it_is_public():
    assert "support" in cudnn_sdpa.__all__
