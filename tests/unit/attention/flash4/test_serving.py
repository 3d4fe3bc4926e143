"""Which calls FlashAttention-4 serves, with which masks, and what `explain` says of it; without a GPU or its code."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import random
import re
from pathlib import Path

import flash4_stand_in as stand_in
import pytest
import torch
from fake_gpu import FakePlan, gpu_on_the_cpu
from float64_reference import attend, seen_keys

from cudnn_sdpa import LayoutError, OptionError, UnsupportedError, explain, providers, sdpa, sdpa_varlen, support
from cudnn_sdpa.attention.arguments import GradientCall, Needs, output_layout, outputs_without_data
from cudnn_sdpa.attention.dense.sdpa import call_of
from cudnn_sdpa.attention.dense.specs import BackwardSpec, ForwardSpec, key_of
from cudnn_sdpa.attention.flash4 import preferences
from cudnn_sdpa.attention.flash4.plans import flash4_forward, functions, kind_of, names_of
from cudnn_sdpa.attention.flash4.preferences import CAUSAL, Configuration, PagesPreference, Preference
from cudnn_sdpa.attention.flash4.programs import Kind, program
from cudnn_sdpa.attention.varlen.sdpa_varlen import call_of as packed_call_of
from cudnn_sdpa.attention.varlen.specs import PackedForward
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.plans import preferences as of_all_functions
from cudnn_sdpa.plans.function_plan import NumberArgument, TensorArgument


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "h100")
    stand_in.write(tmp_path)
    with stand_in.on_the_search_path(tmp_path):
        yield


def target(name="h100"):
    return Target.from_properties(load_properties(name))


def called(*args, **options):
    given = inspect.signature(sdpa).bind(*args, **options)
    given.apply_defaults()
    return call_of(**given.arguments)


def tensors(sq=300, skv=300, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, **options):
    sizes = (heads[0], sq, dims[0]), (heads[1], skv, dims[0]), (heads[1], skv, dims[1])
    return [torch.empty(2, h, s, d, dtype=dtype, device="meta", **options) for h, s, d in sizes]


def test_masks_are_those_of_the_call():
    """A window that ends at the last query and the last key shows the same keys, or the call is declined."""
    chance, served = random.Random(0), 0
    for _ in range(400):
        sq, skv = chance.choice([1, 5, 9, 12]), chance.choice([1, 5, 9, 12])
        options = {
            "is_causal": chance.random() < 0.4,
            "causal_alignment": chance.choice(["top_left", "bottom_right"]),
            "window_size": chance.choice([None, (chance.choice([-1, 0, 2, 7]), chance.choice([-1, 0, 1, 8]))]),
        }
        q, k, v = tensors(sq, skv)
        with providers("fa4", "cudnn"):
            spec = ForwardSpec.of(called(q, k, v, **options))
            if spec.dense.mask.masked_rows == sq:
                continue
            try:
                key = key_of(spec, target(), None)
            except UnsupportedError:  # cuDNN's refusal of what was declined
                continue
        if key.provider is None:
            continue
        served += 1
        left, right = key.option_values["window"]
        hidden = spec.dense.mask.masked_rows
        i, j = torch.arange(sq - hidden)[:, None] + skv - (sq - hidden), torch.arange(skv)
        seen = torch.ones(sq - hidden, skv, dtype=torch.bool)
        seen &= (j >= i - left) if left is not None else True
        seen &= (j <= i + right) if right is not None else True
        expected = seen_keys(1, sq, skv, options, torch.device("cpu"))[0, 0]
        assert not expected[:hidden].any(), options
        assert torch.equal(seen, expected[hidden:]), (sq, skv, options, left, right)
        assert seen.any(1).all(), "its kernels meet no row without a key"
    assert served > 150


def test_an_unbounded_side_is_no_number():
    """-1 means unbounded elsewhere; there it is a bound, and hides all keys."""
    q, k, v = tensors()
    for window, bounds in [((-1, 3), (None, 3)), ((4, -1), (4, None)), ((-1, 0), (None, None)), (None, (None, None))]:
        with providers("fa4"):
            key = key_of(ForwardSpec.of(called(q, k, v, window_size=window)), target(), None)
        layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
        (call,) = program(layouts, key.option_values["window"]).calls
        assert call.arguments[11:13] == bounds
        assert kind_of(key).is_causal is (window == (-1, 0))


def packed(lengths=(300, 0, 45), of_keys=None, heads=(8, 2), dim=128, dtype=torch.bfloat16, **options):
    """Arguments of a packed call without data; the offsets of keys are those of queries unless they are given."""
    tokens = [sum(lengths), *[sum(of_keys or lengths)] * 2]
    q, k, v = (
        torch.empty(n, h, dim, dtype=dtype, device="meta", **options)
        for n, h in zip(tokens, (*heads, heads[1]), strict=True)
    )
    ends = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    return q, k, v, ends, ends if of_keys is None else torch.empty_like(ends), max(lengths), max(of_keys or lengths)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (33, 5)}, {"softcap": 9.0}])
def test_packed_calls_are_served_in_both_passes(options):
    with providers("fa4", "cudnn"):
        found = explain(sdpa_varlen, *packed(requires_grad=True), **options)
    assert (found.provider, found.backward.provider) == ("fa4", "fa4")
    assert found.choice.startswith("FlashAttention-4, by providers('fa4', 'cudnn')")
    assert found.backward.choice.startswith("FlashAttention-4, by providers('fa4', 'cudnn')")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        ({"of_keys": (40, 7, 300)}, {"is_causal": True, "causal_alignment": "top_left"}, "last key of each sequence"),
        ({"lengths": (2,) * 257}, {}, "up to 256 sequences"),
        ({}, {"dropout_p": 0.1}, "dropout"),
        ({}, {"deterministic": True}, "deterministic"),
    ],
)
def test_packed_calls_that_are_declined(given, options, reason):
    with providers("fa4", "cudnn"):
        found = explain(sdpa_varlen, *packed(**given), **options)
        assert found.provider == "cudnn"
        assert reason in found.choice
    with providers("fa4"):
        assert reason in str(explain(sdpa_varlen, *packed(**given), **options))


def test_a_causal_mask_of_equal_lengths_is_both_alignments():
    with providers("fa4"):
        found = explain(sdpa_varlen, *packed(), is_causal=True, causal_alignment="top_left")
    assert found.provider == "fa4"


def test_numbers_of_tokens_and_sequences_are_in_no_packed_kind():
    kinds = set()
    for lengths in ((300, 0, 45), (2000,), (7,) * 90):
        with providers("fa4"):
            given = inspect.signature(sdpa_varlen).bind(*packed(lengths), is_causal=True)
            given.apply_defaults()
            spec = PackedForward.of(packed_call_of(**given.arguments))
            kinds.add(kind_of(key_of(spec, target(), None)))
    assert len(kinds) == 1


def test_lengths_batches_and_heads_are_in_no_kind():
    kinds = set()
    for batch, heads, length in itertools.product((1, 3), (4, 8), (70, 4096)):
        q = torch.empty(batch, heads, length, 64, dtype=torch.float16, device="meta")
        k = torch.empty(batch, heads // 4, length, 64, dtype=torch.float16, device="meta")
        with providers("fa4"):
            kinds.add(kind_of(key_of(ForwardSpec.of(called(q, k, k, is_causal=True)), target(), None)))
    assert len(kinds) == 1


def test_a_soft_cap_is_data_of_both_passes():
    """Its value is in no key: a launch reads it from host memory, as it reads the scale."""
    keys = set()
    for softcap in (20.0, 3.5):
        call = called(*tensors(), softcap=softcap, is_causal=True)
        of = GradientCall(**outputs_without_data(output_layout(call)), call=call, needs=(True,) * len(Needs._fields))
        with providers("fa4"):
            keys |= {key_of(spec, target(), None) for spec in (ForwardSpec.of(call), BackwardSpec.of(of))}
    assert len(keys) == 2
    for key in keys:
        assert kind_of(key).is_capped
        layouts = {operand.name: operand.layout for operand in (*key.inputs, *key.outputs)}
        found = [call for call in program(layouts, (None, 0)).calls if call.function in ("forward", "main")]
        (tuples,) = ([x for x in call.arguments if isinstance(x, tuple)] for call in found)
        assert tuples == [(None, (NumberArgument("softcap"),))]


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({}, {"attn_mask": torch.empty(300, 300, dtype=torch.bool, device="meta")}, "no attn_mask"),
        ({}, {"seq_lens_kv": torch.empty(2, dtype=torch.int32, device="meta")}, "no sequence lengths"),
        ({}, {"deterministic": True}, "does not promise deterministic results"),
        ({}, {"alibi": True, "is_causal": True}, "no ALiBi"),
        ({"skv": 400}, {"is_causal": True}, "its masks end at the last query and the last key"),
    ],
)
def test_what_it_lacks_is_cudnns_and_explained(changed, options, reason):
    q, k, v = tensors(**changed)
    with providers("fa4"):
        refused = explain(sdpa, q, k, v, **options)
    assert not refused.supported
    assert any(reason in each for each in refused.reasons)
    with providers("fa4", "cudnn"):
        found = explain(sdpa, q, k, v, **options)
    assert found.provider == "cudnn"
    assert reason in found.choice


@pytest.mark.sample(1)
@pytest.mark.parametrize("table", ["ATTENTION_ISSUES", "FUSED_ISSUES"])
def test_calls_that_meet_a_known_bug_are_another_providers(table, monkeypatch):
    """Also those that it is the fastest at; and no plan that meets one is made."""
    q, k, v = tensors(4096, 4096, requires_grad=True)
    row = Preference(Configuration(90, False, (128, 128), CAUSAL, *[False] * 4), 4096, 4096, 8192, 80.0, 100.0, "8,192")
    monkeypatch.setattr(preferences, "preference_of", lambda *_: row)
    monkeypatch.setattr("cudnn_sdpa.attention.providers.choosing.preference_of", lambda *_: row)
    with providers("fastest"):
        assert explain(sdpa, q, k, v, is_causal=True).provider == "fa4"
        key = key_of(ForwardSpec.of(called(q, k, v, is_causal=True)), target(), None)
    bug = KnownIssue("it skips a tile", "seen on an H200", "refused", concerns=is_causal_forward, provider="fa4")
    monkeypatch.setattr(known_issues, table, (*getattr(known_issues, table), bug))
    for names in [("fa4", "cudnn"), ("fastest",), ("fa4", "own")]:
        with providers(*names):
            found = explain(sdpa, q, k, v, is_causal=True)
            assert explain(sdpa, q, k, v).provider == "fa4", "without the bug"
        assert found.supported
        assert found.provider == names[-1].replace("fastest", "cudnn")
        assert f"FlashAttention-4 does not serve it, as {bug}" in found.choice
        assert found.backward.provider == "fa4", "which has no bug"
    with providers("fa4", "cudnn"):
        assert explain(sdpa_varlen, *packed(), is_causal=True).provider == "cudnn"
        assert explain(sdpa_varlen, *packed()).provider == "fa4"
    with providers("fa4"):
        refused = explain(sdpa, q, k, v, is_causal=True)
    assert not refused.supported
    assert refused.reasons == [f"FlashAttention-4: {bug}"]
    with pytest.raises(UnsupportedError, match="it skips a tile"):
        flash4_forward.plan(key)


def is_causal_forward(key):
    return key.name == "flash4_forward" and key.option_values["window"] == (None, 0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_in_force", [False, True])
def test_only_the_option_decides_about_deterministic_results(is_in_force):
    """PyTorch's setting is the default of the option alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_in_force)
    try:
        with providers("fa4", "cudnn"):
            for deterministic, provider in [(False, "fa4"), (True, "cudnn"), (None, "cudnn" if is_in_force else "fa4")]:
                found = explain(sdpa, *tensors(requires_grad=True), deterministic=deterministic)
                assert (found.provider, found.backward.provider) == (provider, provider)
                assert explain(sdpa_varlen, *packed(), deterministic=deterministic).provider == provider
    finally:
        torch.use_deterministic_algorithms(before)


def test_tensors_whose_addresses_may_not_fit_32_bits_are_declined():
    """Those of a call, with what lies between their elements, and the sums of a backward pass."""
    length = 2**20  # of 16 heads of 128
    for rows, provider, of_gradient in [(length, "cudnn", None), (length - 1, "fa4", "cudnn"), (2**19, "fa4", "fa4")]:
        q, k, v = tensors(rows, 300, requires_grad=True)
        with providers("fa4", "cudnn"):
            found = explain(sdpa, q, k, v)
        assert found.provider == provider
        assert ("untested beyond 2,147,483,647 elements of q" in found.choice) is (provider == "cudnn")
        if of_gradient is not None:
            assert found.backward.provider == of_gradient
            assert ("elements of its workspace" in found.backward.choice) is (of_gradient == "cudnn")
    q, k, v = tensors()
    far = torch.empty(2, 2**30 + 8, dtype=q.dtype, device="meta").as_strided(k.shape, (2**31, *k.stride()[1:]))
    with providers("fa4"):
        assert any("elements of k" in reason for reason in explain(sdpa, q, far, v).reasons)


def test_an_expanded_tensor_is_not_copied():
    q, k, v = tensors()
    with providers("fa4"):
        found = explain(sdpa, q, k[:, :1].expand(-1, 2, -1, -1), v)
    assert any("k is expanded" in reason for reason in found.reasons)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_strides_that_it_cannot_read_are_own_kernels(name):
    """They are read in words of 16 bytes; cuDNN cannot read them either."""
    given = dict(zip("qkv", tensors(), strict=True))
    given["out"] = torch.empty_like(given["q"])
    *sizes, dim = given[name].shape
    given[name] = torch.empty(*sizes, dim + 4, dtype=torch.bfloat16, device="meta")[..., :dim]
    with providers("fa4", "own"):
        found = explain(sdpa, **given, is_causal=True)
    assert found.provider == "own"
    assert f"FlashAttention-4 does not serve it, as {name} has strides" in found.choice
    with providers("fa4", "cudnn"), pytest.raises(LayoutError, match=rf"^{name}: got (a stride of|stride) 132"):
        explain(sdpa, **given, is_causal=True)


@pytest.mark.parametrize(("other", "launches"), [("cudnn", 3), ("own", 6)])
def test_an_address_that_it_cannot_read(monkeypatch, other, launches):
    """Cold and known calls refuse it by name; where own kernels are named, the tensor is copied instead."""
    monkeypatch.setattr(functions, "are_ready", lambda _: True)
    q, k, v = torch.randn(3, 2, 4, 9, 64).bfloat16()
    beside = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    refused = pytest.raises(LayoutError, match=r"^q: got an address 2 bytes past a multiple of 16")
    before = len(FakePlan.launched)
    with gpu_on_the_cpu(lambda _, x: attend(*(x[name] for name in "qkv"), is_causal=True)[:1]), providers("fa4", other):
        for _ in range(3):
            expected = sdpa(q, k, v, is_causal=True)
            with refused if other == "cudnn" else contextlib.nullcontext():
                assert torch.equal(sdpa(beside, k, v, is_causal=True), expected)
    assert [key.provider for key in FakePlan.launched[before:]] == ["fa4"] * launches


def test_another_gpu_is_untested(monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "b200")
    with providers("fa4"):
        found = explain(sdpa, *tensors())
    assert any("compute capability 9.0 alone, and the GPU has 10.0" in reason for reason in found.reasons)


def test_explain_describes_its_plans():
    q, k, v = tensors(requires_grad=True)
    with providers("fa4", "cudnn"):
        found = explain(sdpa, q, k, v, is_causal=True)
    assert (found.provider, found.engine) == ("fa4", "FlashAttention-4")
    assert found.choice == "FlashAttention-4, by providers('fa4', 'cudnn'); cuDNN serves it until its kind is compiled"
    assert found.backward is not None
    assert (found.backward.provider, found.backward.engine) == ("fa4", "FlashAttention-4")
    assert found.backward.workspace > 4 * 2 * 8 * 300 * 128


def test_gradients_of_grouped_heads_need_one_head_dim():
    with providers("fa4", "cudnn"):
        found = explain(sdpa, *tensors(dims=(192, 128), requires_grad=True), is_causal=True)
    assert found.provider == "fa4"
    assert found.backward is not None
    assert found.backward.provider == "cudnn"
    assert "one head dim of q and v" in found.backward.choice


@pytest.mark.sample(1)
@pytest.mark.parametrize("dims", [(48, 80), (8, 8), (72, 72), (128, 64), (256, 128)])
def test_head_dims_are_those_that_the_tests_on_a_gpu_have(dims):
    """With some others its gradients are wrong."""
    with providers("fa4", "cudnn"):
        found = explain(sdpa, *tensors(heads=(2, 2), dims=dims, requires_grad=True), is_causal=True)
        assert (found.provider, found.backward.provider) == ("cudnn", "cudnn")
        assert "head dims of 64, 128, 256, and 192 with 128; q and v have" in found.choice
        found = explain(sdpa, *tensors(heads=(2, 2), dims=(192, 128), requires_grad=True), is_causal=True)
        assert (found.provider, found.backward.provider) == ("fa4", "fa4")


def test_by_default_it_serves_nothing(monkeypatch):
    """`explain` says where it would be faster."""
    call = Configuration(90, False, (128, 128), CAUSAL, False, False, True, False)
    row = Preference(call, 300, 300, 600, 80.0, 100.0, "2 × 300")
    monkeypatch.setattr(preferences, "preferences", lambda: {call: [row]})
    with providers("default"):
        found, full = explain(sdpa, *tensors(), is_causal=True), explain(sdpa, *tensors())
    assert (found.provider, full.provider, full.choice) == ("cudnn", "cudnn", "")
    assert found.choice.startswith("cuDNN's engines; providers('fastest') would take FlashAttention-4: measured 80 µs")
    with providers("cudnn"):
        assert explain(sdpa, *tensors(), is_causal=True).choice == ""


def the_fastest(batch, length, *, is_causal):
    q, k, v = (torch.empty(batch, h, length, 128, dtype=torch.bfloat16, device="meta") for h in (8, 2, 2))
    with providers("fastest"):
        return explain(sdpa, q, k, v, is_causal=is_causal)


def test_the_fastest_is_what_was_measured(monkeypatch):
    call = Configuration(90, False, (128, 128), CAUSAL, False, False, True, False)
    rows = [
        Preference(call, 4096, 4096, 16384, 80.0, 100.0, "4 × 4,096"),
        Preference(call, 512, 512, 4096, 110.0, 100.0, "32 × 512"),
    ]
    monkeypatch.setattr(preferences, "preferences", lambda: {call: rows})
    for length, provider in ((4096, "fa4"), (3000, "fa4"), (512, "cudnn"), (1500, "cudnn"), (20000, "cudnn")):
        found = the_fastest(4, length, is_causal=True)
        assert found.provider == provider, length
        assert ("measured" in found.choice) is (length in (4096, 3000, 512)), found.choice
        assert the_fastest(4, length, is_causal=False).provider == "cudnn"


def test_rows_of_the_same_gpu_decide_before_others(monkeypatch):
    """And others' where that GPU has no row within range."""
    call = Configuration(90, False, (128, 128), CAUSAL, False, False, True, False)
    rows = [
        Preference(call, 4096, 4096, 16384, 80.0, 100.0, "4 × 4,096", "sdpa"),
        Preference(call, 4096, 4096, 8192, 110.0, 100.0, "2 × 4,096", "sdpa_h200"),
        Preference(call, 1024, 1024, 4096, 80.0, 100.0, "4 × 1,024", "sdpa"),
    ]
    monkeypatch.setattr(preferences, "preferences", lambda: {call: rows})
    q, k, v = (torch.empty(4, h, 4096, 128, dtype=torch.bfloat16, device="meta") for h in (8, 2, 2))
    of = ForwardSpec.of(called(q, k, v, is_causal=True))
    found = {gpu: preferences.preference_of(of, target(gpu)).of for gpu in ("h100", "h200")}
    assert found == {"h100": "4 × 4,096", "h200": "2 × 4,096"}
    q, k, v = (x[:, :, :1024] for x in (q, k, v))
    of = ForwardSpec.of(called(q, k, v, is_causal=True))
    assert preferences.preference_of(of, target("h200")).of == "4 × 1,024"


def test_a_row_of_few_tokens_is_for_no_larger_batch(monkeypatch):
    call = Configuration(90, False, (128, 128), CAUSAL, False, False, True, False)
    rows = [
        Preference(call, 512, 512, 512, 80.0, 100.0, "1 × 512"),
        Preference(call, 4096, 4096, 4096, 80.0, 100.0, "1 × 4,096"),
    ]
    monkeypatch.setattr(preferences, "preferences", lambda: {call: rows})
    chosen = {
        (batch, length): the_fastest(batch, length, is_causal=True).provider
        for batch in (1, 2, 4)
        for length in (512, 4096)
    }
    assert {call for call, provider in chosen.items() if provider == "fa4"} == {
        (1, 512),
        (1, 4096),
        (2, 4096),
        (4, 4096),
    }


def test_rows_say_on_which_gpu_they_were_measured():
    """They decide for other GPUs of the compute capability, too."""
    rows = {"sdpa": Preference(None, 1, 1, 1, 8.0, 9.0, "a call"), "sdpa_paged_varlen": PagesPreference(*[1.0] * 7)}
    table = json.loads(Path(of_all_functions.__file__).with_suffix(".json").read_text())
    for function, row in rows.items():
        (gpu,) = re.findall(r"^(NVIDIA H\w+ ?\w* ?\w*), cuDNN", table[function]["measured"])
        assert str(row).endswith(f", on an {gpu}; {table[function]['source']})")


def test_rows_of_the_table_can_be_read():
    for call, rows in preferences.preferences().items():
        assert call.mask in (preferences.FULL, CAUSAL, preferences.WINDOW)
        assert all(row.fa4_us > 0 and row.cudnn_us > 0 for row in rows)


def test_without_its_package_cudnn_serves(tmp_path):
    stand_in.write(tmp_path / "other", {"flash-attn-4": "1.0"})
    with stand_in.on_the_search_path(tmp_path / "other"), providers("fa4", "cudnn"):
        found = explain(sdpa, *tensors(), is_causal=True)
        assert found.provider == "cudnn"
        assert "pip install" in found.choice


def test_a_kind_that_fails_to_compile_is_declined(monkeypatch):
    q, k, v = tensors()
    with providers("fa4", "cudnn"):
        kind = kind_of(key_of(ForwardSpec.of(called(q, k, v)), target(), None))
        monkeypatch.setitem(functions._failed, kind, "no compiler")
        assert "no compiler" in explain(sdpa, q, k, v).choice
        assert explain(sdpa, q, k, v, is_causal=True).provider == "fa4"


@pytest.mark.parametrize("gpu", [{"sm": 90}, {"target": "h100"}])
def test_support_speaks_of_the_providers_in_force(gpu):
    with providers("fa4"):
        found = support(head_dim=128, is_causal=True, direction="backward", **gpu)
        assert found.supported
        assert found.engine in ("", "FlashAttention-4")
        assert bool(found.engine) is ("target" in gpu)
        assert "FlashAttention-4: it has no ALiBi" in support(head_dim=128, is_causal=True, alibi=True, **gpu).reasons
    with providers("fa4", "cudnn"):
        assert support(head_dim=128, is_causal=True, alibi=True, sm=90).supported


def test_unknown_providers_are_named():
    with pytest.raises(OptionError, match="'fa5'"):
        providers("fa5")


def test_a_backward_program_uses_its_workspace_apart():
    """Tensors in the workspace do not overlap, and sums over groups of heads begin at zero."""
    chance = random.Random(1)
    for _ in range(60):
        heads_kv, group, dim = chance.choice([1, 3]), chance.choice([1, 2, 8]), 8 * chance.randint(1, 32)
        layouts = {}
        for name, heads in (("q", heads_kv * group), ("k", heads_kv), ("v", heads_kv), ("out", heads_kv * group)):
            rows = 190 if name in ("k", "v") else 77
            layouts[name] = TensorLayout.contiguous((2, heads, rows, dim), torch.bfloat16)
        layouts |= {f"grad_{name}": layouts[name] for name in ("out", "q", "k", "v")}
        layouts["lse"] = TensorLayout.contiguous((2, heads_kv * group, 77, 1), torch.float32)
        window = chance.choice([(None, None), (None, 0), (5, 3)])
        found = program(layouts, window)
        spans = {}
        for call in found.calls:
            for x in call.arguments:
                if isinstance(x, TensorArgument) and not x.operand:
                    spans[x.offset] = x.offset + 4 * x.shape[0] * x.stride[0]
        ends = sorted(spans.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= found.workspace
        first, count = found.zeroed
        assert (count > 0) is (group > 1)
        assert count == 0 or {x for x in spans if x >= first} == set(sorted(spans)[-2:])
        kind = Kind.of(layouts, window)
        assert tuple(call.function for call in found.calls) == names_of(kind)
