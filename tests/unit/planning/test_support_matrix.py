"""`support`: the support rules as a function, a table and a page."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import cudnn_sdpa
from cudnn_sdpa import OptionError, UnsupportedError, support
from cudnn_sdpa.attention.support.rules import BACKWARD, RULES, Configuration, refusal
from cudnn_sdpa.cli import app
from cudnn_sdpa.engine import cpu_target
from cudnn_sdpa.graph.backend import MIN_CUDNN, version_string
from cudnn_sdpa.planning.support import ROWS, cells, table, version_number

H200 = {"sm": 90, "cudnn": "9.28.0"}
LATE, TOP_LEFT, BOTTOM_RIGHT = (-64, None, False), (None, 0, False), (None, 0, True)
PLAIN = Configuration("forward", torch.bfloat16, 128, 128, 256, 384, 90, 92800)
GRADIENT = replace(PLAIN, operation=BACKWARD)
B200 = replace(GRADIENT, sm=100)
#: A configuration for each rule, and the changes of its suggestion.
REACHED = [
    (replace(PLAIN, sm=75), {"sm": 80}),
    (replace(PLAIN, dtype=torch.float32), {"dtype": torch.bfloat16}),
    (replace(PLAIN, head_dim=100), {"head_dim": 104}),
    (replace(PLAIN, head_dim_v=100), {"head_dim_v": 104}),
    (replace(PLAIN, head_dim_v=2048), {"head_dim_v": 1024}),
    (replace(PLAIN, cudnn=91001), {"cudnn": 91002}),
    (replace(GRADIENT, sm=80, head_dim=136), {"head_dim": 128}),
    (replace(B200, head_dim=192, head_dim_v=128, cudnn=91002), {"head_dim": 128}),
    (replace(PLAIN, sm=100, head_dim=256, dropout=True), {"head_dim_v": 136}),
    (replace(GRADIENT, sm=120, packed=True, lengths=True), {"packed": False}),
    (replace(GRADIENT, sm=80, capped=True), {"capped": False}),
    (replace(PLAIN, band=BOTTOM_RIGHT, lengths=True, bias=True), {"band": None}),
    (replace(GRADIENT, band=LATE, dropout=True), {"band": None, "bias": True}),
    (replace(PLAIN, alibi=True), {"alibi": False, "bias": True}),
    (replace(PLAIN, alibi=True, capped=True, band=TOP_LEFT), {"alibi": False, "bias": True}),
    (replace(PLAIN, sinks=True, cudnn=91002), {"cudnn": 91300}),
    (replace(B200, sq=1, cudnn=91002), {"cudnn": 91900}),
    (replace(GRADIENT, capped=True, skv=100, cudnn=91002), {"skv": 128, "bias": True}),
    (replace(PLAIN, capped=True, lengths=True, sq=1), {"lengths": False, "bias": True}),
    (replace(PLAIN, dropout=True, sq=1), {"sq": 2}),
    (replace(GRADIENT, capped=True, bias=True, bias_gradient=True), {"bias_gradient": False}),
    (replace(B200, head_dim=256, head_dim_v=256, dropout=True), {"head_dim": 128, "head_dim_v": 128}),
    (replace(B200, head_dim=192, bias=True, bias_gradient=True), {"bias_gradient": False}),
    (replace(B200, bias=True, bias_gradient=True, dropout=True), {"dropout": False}),
    (replace(GRADIENT, sm=80, bias=True, skv=1), {"skv": 2}),
    (replace(B200, deterministic=True, dropout=True), {"deterministic": False}),
    (replace(B200, deterministic=True, cudnn=91700), {"deterministic": False}),
    (replace(B200, deterministic=True, cudnn=91900, capped=True, lengths=True), {"deterministic": False}),
    (replace(PLAIN, sm=80, packed=True, cudnn=91700), {"packed": False, "lengths": True}),
]


@pytest.mark.parametrize(("case", "suggestion"), REACHED)
def test_a_configuration_is_refused_and_its_suggestion_is_not(case, suggestion):
    error = refusal(case, "sdpa")
    assert error is not None
    assert error.reasons
    assert error.suggestion
    assert "{" not in str(error)
    assert refusal(replace(case, **suggestion), "sdpa") is None


def test_every_rule_is_covered():
    unreached = [rule.reason for rule in RULES if not any(rule.applies(case) for case, _ in REACHED)]
    assert not unreached


def test_a_supported_call():
    answer = support(head_dim=128, is_causal=True, direction="backward", **H200)
    assert answer
    assert answer.supported
    assert answer.reasons == []
    assert answer.suggestion == ""
    assert answer.engine == ""
    assert str(answer).endswith("Skv=1024, is_causal; SM 90, cuDNN 9.28.0: supported")


def test_an_unsupported_call_names_every_reason():
    answer = support(head_dim=512, softcap=30.0, alibi=True, sm=89, cudnn=92800, direction="backward")
    assert not answer
    text = str(answer)
    for part in ("head dims 512 and 512", "softcap", "alibi", "SM 89", "what works:"):
        assert part in text
    assert len(answer.reasons) == len(set(answer.reasons)) == text.count("\n  - ")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"head_dim": 100}, "multiple of 8"),
        ({"head_dim": 64, "dtype": torch.float32}, "float32"),
        ({"head_dim": 64, "operation": "sdpa_fp8", "dtype": torch.bfloat16}, "float8_e4m3fn"),
        ({"head_dim": 64, "sm": 75}, "7.5"),
        ({"head_dim": 64, "dropout_p": 0.1, "sq": 1}, "single query"),
        ({"head_dim": 64, "softcap": 20.0, "attn_mask": "grad", "direction": "backward"}, "attn_mask"),
        ({"head_dim": 64, "sm": 100, "cudnn": "9.19", "sq": 1}, "Blackwell"),
        ({"head_dim": 64, "alibi": True}, "causal"),
    ],
)
def test_reasons_name_what_is_wrong(options, word):
    answer = support(**{**H200, **options})
    assert not answer
    assert any(word in reason for reason in answer.reasons), answer.reasons


def test_gradients_also_need_the_forward_pass():
    forward = support(head_dim=64, dtype=torch.float64, **H200)
    backward = support(head_dim=64, dtype=torch.float64, direction="backward", **H200)
    assert forward.reasons == backward.reasons


def test_one_query_on_one_key_has_gradients_without_a_plan():
    assert support(head_dim=64, sq=1, skv=1, direction="backward", **H200)


@pytest.mark.parametrize("cudnn", ["8.9.0", "9.5.0", "9.9.99"])
@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_refused_cudnn_version_supports_nothing(cudnn, operation, direction):
    answer = support(operation, head_dim=64, direction=direction, sm=90, cudnn=cudnn)
    assert not answer
    assert f"cuDNN {cudnn} is older than {version_string(MIN_CUDNN)}" in answer.reasons[0]
    newer = answer.suggestion.split()[1]
    assert support(operation, head_dim=64, direction=direction, sm=90, cudnn=newer)


def test_an_old_cudnn_is_one_of_several_reasons():
    answer = support(head_dim=64, dtype=torch.float32, sm=90, cudnn="9.5.0")
    assert len(answer.reasons) == 2
    assert set(table(list(cells(sm=90, cudnn="9.5.0")))[0][0].values()) == {"no option", "no (1)"}


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.1}, {"sinks": True}, {"head_dim": 64, "head_dim_v": 128}], ids=str
)
@pytest.mark.parametrize("sizes", [{"sq": 2**21}, {"sq": 2**20, "skv": 2**23}, {"sq": 1, "skv": 2**22}], ids=str)
def test_sizes_that_need_several_plans_have_gradients(operation, options, sizes):
    if sizes["sq"] == 1 and "dropout_p" in options:
        sizes = {**sizes, "sq": 2}
    assert support(operation, direction="backward", sm=90, cudnn="9.19", **{"head_dim": 128, **options, **sizes})


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen"])
def test_a_head_too_large_for_one_plan_is_a_reason(operation):
    options = {"head_dim": 128, "sq": 2**25, "sm": 90, "cudnn": "9.19"}
    assert support(operation, **options)
    answer = support(operation, direction="backward", **options)
    assert not answer
    assert "one head has more than" in answer.reasons[0]
    assert answer.suggestion == "shorter sequences"


def test_packed_sequences_have_gradients_on_some_gpus():
    assert support("sdpa_varlen", head_dim=64, direction="backward", **H200)
    assert not support("sdpa_varlen", head_dim=64, direction="backward", sm=80, cudnn="9.28")


@pytest.mark.parametrize("name", ["attn_mask", "alibi", "seq_lens_kv", "out_dtype", "causal", "q", "max_seqlen_q"])
def test_unknown_options_are_refused(name):
    with pytest.raises(OptionError, match=f"{name}: .*sdpa_varlen, which has none of this name"):
        support("sdpa_varlen", head_dim=64, **{name: True}, **H200)


def test_operands_may_be_meta_tensors():
    mask = torch.empty(512, 1024, dtype=torch.bfloat16, device="meta", requires_grad=True)
    asked = {"head_dim": 64, "direction": "backward", "sq": 512, "skv": 1024, "softcap": 20.0, **H200}
    given, named = support(attn_mask=mask, **asked), support(attn_mask="grad", **asked)
    assert given.reasons == named.reasons != []
    assert "Skv=1024, softcap=20.0, attn_mask; " in given.question.replace(
        "attn_mask, softcap=20.0", "softcap=20.0, attn_mask"
    )


@pytest.mark.parametrize("operation", ["sdpa", "sdpa_varlen", "sdpa_fp8"])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "window_size": (64, 0)}, {"sq": 1}, {"head_dim": 256}], ids=str
)
@pytest.mark.parametrize("sm", [80, 90, 100])
def test_support_agrees_with_calls(operation, options, sm):
    """Compared with calls on CPU tensors, which are checked for a named GPU by the same rules."""
    options = {"head_dim": 64, "sq": 16, **options}
    head_dim, sq = options.pop("head_dim"), options.pop("sq")
    answer = support(operation, head_dim=head_dim, sq=sq, skv=16, sm=sm, cudnn=cpu_target.installed_cudnn(), **options)
    q, k, v = (torch.randn(2, 8, tokens, head_dim) for tokens in (sq, 16, 16))

    def call():
        if operation == "sdpa":
            return cudnn_sdpa.sdpa(q, k, v, **options)
        if operation == "sdpa_varlen":
            packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
            offsets = [torch.arange(3, dtype=torch.int32) * tokens for tokens in (sq, 16)]
            return cudnn_sdpa.sdpa_varlen(*packed, *offsets, sq, 16, **options)
        scales = cudnn_sdpa.Fp8Scales(*[torch.ones(1)] * 6)
        return cudnn_sdpa.sdpa_fp8(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), scales, **options)

    with cudnn_sdpa.cpu_checks({80: "a100", 90: "h200", 100: "b200"}[sm] + ",any-dtype"):
        refused = UnsupportedError.of(call)
    assert bool(answer) == (refused is None)
    assert [reason.partition(" has compute")[2] or reason for reason in answer.reasons] == [
        reason.partition(" has compute")[2] or reason for reason in (refused.reasons if refused else [])
    ]


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
        ("sm", 9000),
        ("sm", 90.0),
        ("sm", True),
        ("cudnn", "nine"),
        ("cudnn", 9),
        ("cudnn", "9"),
        ("dropout_p", 1.5),
        ("softcap", -30.0),
        ("attn_mask", 1),
        ("sinks", "grad"),
        ("causal_alignment", "middle"),
        ("window_size", 64),
        ("window_size", (64,)),
        ("alibi", None),
        ("target", "h9000"),
    ],
)
def test_invalid_options_are_refused_by_name(name, value):
    """Arguments of the call itself get the error of the call."""
    chosen = {} if name == "target" else H200
    with pytest.raises(OptionError) as caught:
        support(**{"head_dim": 64, **chosen, name: value})
    assert caught.value.argument == name


def test_a_gpu_is_named_once():
    with pytest.raises(OptionError, match="sm: got 90 in addition to target; expected one of the two"):
        support(head_dim=64, target="h200", sm=90)
    with pytest.raises(OptionError, match=r"cudnn: got 9\.19 in addition to target; expected one of the two"):
        support(head_dim=64, target="h200", cudnn="9.19")


def test_versions_are_integers_or_strings():
    assert version_number("9.19") == version_number("9.19.0") == version_number("9.19.0.56") == version_number(91900)


def test_without_a_gpu_the_answer_is_for_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "SM 90" in str(support(head_dim=64, cudnn="9.28.0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert "SM 89" in str(support(head_dim=64, cudnn="9.28.0"))


def test_a_matrix_has_a_row_for_each_option():
    rows = {row["with"]: row for row in table(list(cells(sm=80, cudnn="9.28.0")))[0]}
    assert list(rows) == list(ROWS)
    assert rows["causal"] == {"with": "causal", "sdpa": "yes", "sdpa_varlen": "forward only (1)", "sdpa_fp8": "no (2)"}
    assert rows["attn_mask"]["sdpa_varlen"] == "–"
    assert rows["one query, dropout"]["sdpa"] == "no (7)"


def test_the_command_prints_a_table():
    result = CliRunner().invoke(app, ["support", "--sm", "100", "--cudnn", "9.19.0"])
    assert result.exit_code == 0
    assert "cuDNN 9.19.0 on SM 100" in result.output
    assert "forward only" in result.output


def test_the_command_refuses_an_invalid_compute_capability():
    result = CliRunner().invoke(app, ["support", "--sm", "9000"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--sm: got 9000; expected a compute capability as one number, 90 for 9.0: one of 70, " in result.stderr


def test_the_command_refuses_an_invalid_version():
    result = CliRunner().invoke(app, ["support", "--sm", "100", "--cudnn", "new"])
    assert result.exit_code == 2
    assert "--cudnn: got 'new'" in result.output


def test_the_page_matches_the_rules(repository, monkeypatch):
    monkeypatch.syspath_prepend(repository / "scripts")
    spec = importlib.util.spec_from_file_location("support_tables", repository / "scripts" / "support_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text()
    assert len(script.MARKS.findall(text)) == 6
    assert script.render(text) == text, "run: python scripts/support_tables.py"


def test_it_is_public():
    assert "support" in cudnn_sdpa.__all__
