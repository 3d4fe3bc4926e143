"""Which calls cuDNN's frontend serves by its own kernel, with which masks, and what `explain` says of it; no GPU."""

from __future__ import annotations

import inspect
import json
import random

import pytest
import torch
from float64_reference import seen_keys

from cudnn_sdpa import UnsupportedError, explain, providers, sdpa, sdpa_paged, sdpa_varlen, support
from cudnn_sdpa.attention.dense.sdpa import call_of
from cudnn_sdpa.attention.dense.specs import ForwardSpec, key_of
from cudnn_sdpa.attention.frontend import plans
from cudnn_sdpa.attention.frontend.installed import TESTED
from cudnn_sdpa.attention.frontend.plans import functions, kind_of
from cudnn_sdpa.attention.frontend.programs import Kind, program
from cudnn_sdpa.engine.explain import TARGET_VARIABLE
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.known_issues import KnownIssue
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline.installation import Installed

INSTALLED = Installed(" ".join([*TESTED.values(), "digest"]), "")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, "h100")
    monkeypatch.setattr(plans, "installed", lambda: INSTALLED)


def target(name="h100"):
    return Target.from_properties(load_properties(name))


def called(*args, **options):
    given = inspect.signature(sdpa).bind(*args, **options)
    given.apply_defaults()
    return call_of(**given.arguments)


def tensors(sq=300, skv=300, heads=(8, 2), dims=(512, 512), dtype=torch.bfloat16, **options):
    sizes = (heads[0], sq, dims[0]), (heads[1], skv, dims[0]), (heads[1], skv, dims[1])
    return [torch.empty(2, h, s, d, dtype=dtype, device="meta", **options) for h, s, d in sizes]


def served_kind(*args, **options):
    with providers("frontend"):
        return kind_of(key_of(ForwardSpec.of(called(*args, **options)), target(), None))


def test_masks_are_those_of_the_call():
    """A band as the kernel reads it shows the same keys, or the call is declined."""
    chance, served = random.Random(0), 0
    for _ in range(400):
        sq, skv = chance.choice([2, 5, 9, 12]), chance.choice([1, 5, 9, 12])
        options = {
            "is_causal": chance.random() < 0.4,
            "causal_alignment": chance.choice(["top_left", "bottom_right"]),
            "window_size": chance.choice([None, (chance.choice([-1, 0, 2, 7]), chance.choice([-1, 0, 1, 8]))]),
        }
        q, k, v = tensors(sq, skv)
        with providers("frontend"):
            spec = ForwardSpec.of(called(q, k, v, **options))
            if spec.dense.mask.masked_rows == sq:
                continue
            try:
                key = key_of(spec, target(), None)
            except UnsupportedError:
                continue
        served += 1
        kind, hidden = kind_of(key), spec.dense.mask.masked_rows
        assert kind.sq == sq - hidden > 1
        assert not kind.bottom_right or kind.sq <= kind.skv, "the frontend has no such mask"
        i = torch.arange(kind.sq)[:, None] + (kind.skv - kind.sq if kind.bottom_right else 0)
        j = torch.arange(skv)
        seen = torch.ones(kind.sq, skv, dtype=torch.bool)
        seen &= (j >= i - kind.left) if kind.left is not None else True
        seen &= (j <= i + kind.right) if kind.right is not None else True
        expected = seen_keys(1, sq, skv, options, torch.device("cpu"))[0, 0]
        assert not expected[:hidden].any(), options
        assert torch.equal(seen, expected[hidden:]), (sq, skv, options, kind)
    assert served > 150


def test_distances_of_rows_are_in_no_kind_but_their_order_is():
    q, k, v = tensors()
    found = served_kind(q, k, v)
    wide = torch.empty(2, 300, 9, 512, dtype=q.dtype, device="meta").transpose(1, 2)[:, :8]
    assert (found.order_q, served_kind(wide, k, v).order_q) == ("shb", "hsb")
    others = torch.empty(2, 11, 320, 520, dtype=q.dtype, device="meta")[:, :8, :300, :512]
    assert served_kind(others, k, v) == found
    assert served_kind(q[:1], k[:1], v[:1]).order_q == "bsh", "a single batch entry has no distance"


@pytest.mark.parametrize(
    ("sq", "heads", "packs"), [(300, (8, 2), True), (256, (8, 2), False), (5, (8, 1), True), (5, (6, 2), False)]
)
def test_heads_are_packed_where_that_takes_fewer_tiles(sq, heads, packs):
    kind = served_kind(*tensors(sq, 400, heads))
    assert kind.packs_heads is packs
    layouts = {name: TensorLayout.of(x) for name, x in zip("qkv", tensors(sq, 400, heads), strict=True)}
    found = program({**layouts, "out": layouts["q"]}, None)
    assert (found.workspace, found.knobs) == (0, {"pack_gqa": int(packs)})


def test_an_axis_of_one_gets_the_distance_of_a_row():
    """Its stride means nothing to PyTorch, but the kernel's descriptors of tensors take multiples of 16 bytes alone."""
    q, k, v = (x[:1].as_strided((1, *x.shape[1:]), (7, *x.stride()[1:])) for x in tensors())
    layouts = {name: TensorLayout.of(x) for name, x in zip("qkv", (q, k, v), strict=True)}
    (call,) = program({**layouts, "out": layouts["q"]}, None).calls
    assert {argument.stride[0] for argument in call.arguments[:4]} == {512}


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({}, {"attn_mask": torch.empty(300, 300, dtype=torch.bool, device="meta")}, "no attn_mask"),
        ({}, {"seq_lens_kv": torch.empty(2, dtype=torch.int32, device="meta")}, "sequence lengths are not used"),
        ({}, {"deterministic": True}, "does not promise deterministic results"),
        ({}, {"alibi": True, "is_causal": True}, "no ALiBi"),
        ({}, {"softcap": 20.0}, "no soft cap"),
        ({"dims": (256, 256)}, {}, "above 256 and up to 512, and not 256 and 256"),
        ({"dims": (512, 128)}, {}, "above 256 and up to 512, and not 512 and 128"),
        ({"dims": (520, 520)}, {}, "up to 512, and not 520 and 520"),
        ({"sq": 1}, {}, "single queries"),
        ({"skv": 200}, {"window_size": (33, 0)}, "no more queries than keys, and not 300 and 200"),
    ],
)
def test_what_it_lacks_is_cudnns_and_explained(changed, options, reason):
    q, k, v = tensors(**changed)
    with providers("frontend"):
        refused = explain(sdpa, q, k, v, **options)
    assert not refused.supported
    assert any(reason in each for each in refused.reasons)
    with providers("frontend", "cudnn"):
        found = explain(sdpa, q, k, v, **options)
    assert found.provider == "cudnn"
    assert reason in found.choice


def test_explain_has_the_reasons_of_all_that_were_named_before():
    q, k, v = tensors()
    for names in (("frontend", "own", "cudnn"), ("own", "frontend", "cudnn")):
        with providers(*names):
            found = explain(sdpa, q, k, v, softcap=3.0)
        assert found.provider == "cudnn"
        places = [found.choice.index(x) for x in ("cuDNN's frontend does not serve it", "own kernels do not serve it")]
        assert (places == sorted(places)) == (names[0] == "frontend")
        assert "it has no soft cap" in found.choice


def test_calls_that_meet_a_known_bug_are_another_providers(monkeypatch):
    bug = KnownIssue("it skips a tile", "seen on an H200", "refused", concerns=lambda _: True, provider="frontend")
    monkeypatch.setattr(known_issues, "ATTENTION_ISSUES", (*known_issues.ATTENTION_ISSUES, bug))
    q, k, v = tensors()
    with providers("frontend", "cudnn"):
        found = explain(sdpa, q, k, v)
    assert (found.provider, found.supported) == ("cudnn", True)
    assert f"cuDNN's frontend does not serve it, as {bug}" in found.choice
    with providers("frontend"):
        assert explain(sdpa, q, k, v).reasons == [f"cuDNN's frontend: {bug}"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_in_force", [False, True])
def test_only_the_option_decides_about_deterministic_results(is_in_force):
    """PyTorch's setting is the default of the option alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_in_force)
    try:
        with providers("frontend", "cudnn"):
            for deterministic, by_cudnn in [(False, False), (True, True), (None, is_in_force)]:
                found = explain(sdpa, *tensors(), deterministic=deterministic)
                assert found.provider == ("cudnn" if by_cudnn else "frontend")
    finally:
        torch.use_deterministic_algorithms(before)


def test_tensors_whose_addresses_may_not_fit_32_bits_are_declined():
    for length, is_served in ((2**18, False), (2**18 - 1, True)):  # of 16 heads of 512
        with providers("frontend"):
            found = explain(sdpa, *tensors(length))
        assert found.supported is is_served
        assert any("2,147,483,647 elements of q" in reason for reason in found.reasons) is not is_served


@pytest.mark.parametrize(("batch", "heads", "is_served"), [(65535, 1, True), (65536, 1, False), (1, 65536, False)])
def test_more_batch_entries_or_heads_than_a_grid_has(batch, heads, is_served):
    rows = TensorLayout.contiguous((batch, heads, 2, 264), torch.float16)
    found = plans.reasons_against(dict.fromkeys(("q", "k", "v", "out"), rows), None, target())
    assert found == ([] if is_served else ["its grids have at most 65,535 batch entries or heads"])


def test_a_kind_in_words():
    kind = served_kind(*tensors(300, 400), window_size=(33, 0), causal_alignment="bottom_right", return_lse=True)
    shapes = "q (2, 8, 300, 512), k (2, 2, 400, 512), Dv=512"
    assert f"{kind}" == f"calls in bfloat16, {shapes}, window (33, 0), bottom-right, log-sum-exp"


def test_other_gpus_are_named():
    spec = ForwardSpec.of(called(*tensors()))
    with providers("frontend"), pytest.raises(UnsupportedError, match=r"9\.0 alone, and the GPU has 10\.0"):
        key_of(spec, target("b200"), None)


def test_expanded_keys_are_declined():
    q, k, v = tensors()
    with providers("frontend"):
        found = explain(sdpa, q, k[:, :1].expand(-1, 2, -1, -1), v)
    assert any("expanded" in reason and reason.endswith("as k") for reason in found.reasons)


def test_what_is_not_installed_is_said_with_the_command(monkeypatch):
    missing = Installed("", "nvidia-cutlass-dsl is not installed; pip install it")
    monkeypatch.setattr(plans, "installed", lambda: missing)
    with providers("frontend", "cudnn"):
        found = explain(sdpa, *tensors())
    assert found.provider == "cudnn"
    assert "pip install it" in found.choice


def test_gradients_are_another_providers():
    q, k, v = tensors(requires_grad=True)
    with providers("frontend"):
        found = explain(sdpa, q, k, v)
        assert found.provider == "frontend"
        assert any("no gradients" in reason for reason in found.backward.reasons)


def test_providers_serve_in_their_order():
    q, k, v = tensors()
    served = {}
    for names in [("cudnn", "frontend"), ("frontend", "cudnn"), ("fa4", "frontend"), ("own", "frontend")]:
        with providers(*names):
            served[names] = explain(sdpa, q, k, v, is_causal=True).provider
    assert list(served.values()) == ["cudnn", "frontend", "frontend", "own"]
    with providers("fa4", "frontend"):
        reasons = explain(sdpa, q, k, v, softcap=20.0).reasons
    assert [reason.partition(":")[0] for reason in reasons] == ["FlashAttention-4", "cuDNN's frontend"]


def test_a_choice_names_all_providers_in_force():
    q, k, v = tensors()
    with providers("frontend", "cudnn"):
        assert "by providers('frontend', 'cudnn'); cuDNN serves it until" in explain(sdpa, q, k, v).choice
    with providers("frontend"):
        assert "waits until its kind is compiled" in explain(sdpa, q, k, v).choice
    with providers("fastest", "frontend"):
        assert "by providers('fastest', 'frontend')" in explain(sdpa, q, k, v).choice


def test_packed_and_paged_calls_are_others():
    q, k = (torch.empty(300, heads, 512, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    with providers("frontend"):
        found = explain(sdpa_varlen, q, k, k, ends, ends, 200, 200)
        assert found.provider == "cudnn"
    with providers("frontend", "cudnn"):
        assert explain(sdpa_varlen, q, k, k, ends, ends, 200, 200).provider == "cudnn"
    pages = torch.empty(16, 2, 64, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(2, 4, dtype=torch.int32, device="meta")
    one = torch.empty(2, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    in_fp8 = pages.to(torch.float8_e4m3fn)
    for names in (("frontend",), ("fa4",), ("frontend", "fa4")):  # of which none has kernels for this function
        with providers(*names):
            found = explain(sdpa_paged, one, pages, pages, table, ends[:2], page_layout="HND")
            refused = explain(sdpa_paged, one, in_fp8, in_fp8, table, ends[:2], page_layout="HND")
        assert found.provider == "cudnn"
        assert any("cuDNN has none for pages in FP8" in reason for reason in refused.reasons)


def test_a_kind_that_fails_to_compile_is_declined(monkeypatch):
    q, k, v = tensors()
    monkeypatch.setitem(functions._failed, served_kind(q, k, v), "no compiler")
    with providers("frontend", "cudnn"):
        assert "no compiler" in explain(sdpa, q, k, v).choice
        assert explain(sdpa, q, k, v, is_causal=True).provider == "frontend"


def test_support_speaks_of_the_providers_in_force():
    with providers("frontend"):
        assert support(head_dim=512, is_causal=True, direction="forward", sm=90).supported
        reasons = support(head_dim=512, is_causal=True, direction="backward", sm=90).reasons
        assert "cuDNN's frontend: it has no gradients on compute capability 9.0" in reasons


def test_a_kind_survives_json():
    kind = served_kind(*tensors(), window_size=(33, 5))
    assert Kind(*json.loads(json.dumps(kind))) == kind
