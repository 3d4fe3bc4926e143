"""`PlanKey`: every field distinguishes plans, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch
from fake_gpu import halve

from cudnn_sdpa import PlanManifest, UnsupportedError
from cudnn_sdpa.attention.arguments import ForwardArguments, from_fields
from cudnn_sdpa.attention.dense.specs import BackwardSpec, DenseSpec, ForwardSpec
from cudnn_sdpa.engine import launch
from cudnn_sdpa.graph import key as key_module
from cudnn_sdpa.graph.definition import InferringBuilder
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels.plans import attention_forward

TARGET = Target((("deviceVer", 900), ("multiProcessorCount", 132)), 92800, "1.32.0", "NVIDIA H200")
LAYOUT = TensorLayout((2, 4, 16, 64), (4096, 1024, 64, 1), torch.float16)
SCALAR = TensorLayout((1, 1, 1, 1), (1, 1, 1, 1), torch.float32)
KEY = PlanKey(
    operation="package.module:attend",
    digest="0123456789abcdef",
    inputs=(Operand("q", LAYOUT), Operand("scale", SCALAR, Role.SCALAR), Operand("ones", SCALAR, Role.FILL, 7)),
    outputs=(Operand("out", LAYOUT),),
    options=PlanKey.typed({"causal": "top_left", "with_lse": True, "window_size": (3, 5)}),
    target=TARGET,
    device=1,
)

OTHER_LAYOUTS = [
    dataclasses.replace(LAYOUT, shape=(2, 4, 17, 64)),
    dataclasses.replace(LAYOUT, stride=(4096, 64, 256, 1)),
    dataclasses.replace(LAYOUT, dtype=torch.bfloat16),
]
OTHER_OPERANDS = [
    *(Operand("q", layout) for layout in OTHER_LAYOUTS),
    Operand("query", LAYOUT),
    Operand("q", LAYOUT, Role.SCALAR),
    Operand("q", LAYOUT, Role.FILL, 3),
    Operand("q", LAYOUT, Role.HOST),
]
OTHER_TARGETS = [
    dataclasses.replace(TARGET, properties=(("deviceVer", 800), ("multiProcessorCount", 132))),
    dataclasses.replace(TARGET, properties=(("deviceVer", 900),)),
    dataclasses.replace(TARGET, cudnn=91900),
    dataclasses.replace(TARGET, cudnn=TARGET.cudnn + 1),  # a patch release
    dataclasses.replace(TARGET, frontend="1.28.0"),
]
CHANGES = [
    {"operation": "package.module:other"},
    {"operation": "other.module:attend"},
    {"digest": "fedcba9876543210"},
    *({"inputs": (operand, *KEY.inputs[1:])} for operand in OTHER_OPERANDS),
    {"inputs": KEY.inputs[:2]},
    {"inputs": (KEY.inputs[1], KEY.inputs[0], KEY.inputs[2])},
    {"inputs": (*KEY.inputs[:2], Operand("ones", SCALAR, Role.FILL, 8))},
    *({"outputs": (operand,)} for operand in OTHER_OPERANDS),
    {"outputs": (*KEY.outputs, Operand("lse", SCALAR))},
    {"options": PlanKey.typed({"causal": "bottom_right", "with_lse": True, "window_size": (3, 5)})},
    {"options": PlanKey.typed({"causal": None, "with_lse": True, "window_size": (3, 5)})},
    {"options": PlanKey.typed({"causal": "top_left", "with_lse": 1, "window_size": (3, 5)})},
    {"options": PlanKey.typed({"causal": "top_left", "with_lse": True, "window_size": (3, 6)})},
    {"options": PlanKey.typed({"causal": "top_left", "with_lse": True})},
    *({"target": target} for target in OTHER_TARGETS),
    {"device": 0},
    {"device": None},
    {"deterministic": True},
    {"provider": "own"},
]


def same() -> PlanKey:
    """An equal key that shares no object with `KEY`."""
    return pickle.loads(pickle.dumps(KEY))


def test_equal_keys_have_equal_hashes():
    assert same() is not KEY
    assert same() == KEY
    assert hash(same()) == hash(KEY)
    assert {KEY: "plan"}[same()] == "plan"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_change_of_anything_makes_another_key(change):
    changed = dataclasses.replace(KEY, **change)
    assert changed != KEY
    assert hash(changed) != hash(KEY)
    assert changed not in {KEY: "plan"}


@pytest.mark.parametrize("change", [x for x in CHANGES if "device" not in x], ids=lambda change: next(iter(change)))
def test_a_change_of_anything_but_the_device_makes_another_identity(change):
    """Of plans on disk, which another GPU of the model shares."""
    assert dataclasses.replace(KEY, **change).identity() != KEY.identity()
    assert json.dumps(dataclasses.replace(KEY, **change).identity()) != json.dumps(KEY.identity())


def test_every_field_is_covered():
    assert {name for change in CHANGES for name in change} == {field.name for field in dataclasses.fields(PlanKey)}


def test_all_changed_keys_differ():
    keys = {dataclasses.replace(KEY, **change) for change in CHANGES} | {KEY}
    assert len(keys) == len(CHANGES) + 1


@pytest.mark.parametrize("name", ["inputs", "device", "operation"])
def test_keys_cannot_be_changed(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(KEY, name, None)


def test_one_as_integer_float_and_bool_are_three_options():
    keys = [dataclasses.replace(KEY, options=PlanKey.typed({"n": value})) for value in (1, 1.0, True)]
    assert len(set(keys)) == 3
    assert [type(key.option_values["n"]) for key in keys] == [int, float, bool]


def test_one_as_integer_float_and_bool_are_three_options_inside_a_tuple_too():
    keys = [dataclasses.replace(KEY, options=PlanKey.typed({"n": (value, 5)})) for value in (1, 1.0, True)]
    assert len(set(keys)) == 3


def test_positive_and_negative_zero_are_different_options():
    values = (0.0, -0.0, (0.0,), (-0.0,), 0)
    keys = [dataclasses.replace(KEY, options=PlanKey.typed({"n": value}), device=None) for value in values]
    assert len(set(keys)) == len(values)
    assert len({json.dumps(key.identity()["options"]) for key in keys}) == len(values)
    assert len({launch.type_of(value) for value in values}) == len(values)
    for key in keys:
        assert PlanKey.from_json(json.loads(json.dumps(key.to_json())), TARGET) == key


def test_the_order_of_options_does_not_matter():
    assert PlanKey.typed({"a": 2, "b": 3}) == PlanKey.typed({"b": 3, "a": 2})


@pytest.mark.parametrize("options", [{"n": 1}, {"n": 1.0}, {"n": True}, {"n": None}, {"n": (1, (2.5, "x"))}, {}])
def test_a_key_can_be_written_to_json_and_read_back(options):
    key = dataclasses.replace(KEY, options=PlanKey.typed(options), device=None)
    again = PlanKey.from_json(json.loads(json.dumps(key.to_json())), TARGET)
    assert again == key
    assert hash(again) == hash(key)
    assert again.option_values == options


def test_host_arrays_are_operands(tmp_path):
    layout = TensorLayout.contiguous((40,), torch.int64)
    key = halve.key([*KEY.inputs[:2], Operand("sizes", layout, Role.HOST)], KEY.outputs, {}, TARGET, None)
    PlanManifest.of([key]).save(tmp_path / "manifest.json")
    assert PlanManifest.load(tmp_path / "manifest.json").keys(TARGET, None) == [key]
    assert "sizes: host array of 40" in str(key)
    with pytest.raises(UnsupportedError, match="cuDNN reads no array in host memory: sizes: host array of 40"):
        halve.compile(key, InferringBuilder())


def test_determinism_is_written_only_where_set():
    exactly = dataclasses.replace(KEY, deterministic=True, device=None)
    assert PlanKey.from_json(json.loads(json.dumps(exactly.to_json())), TARGET) == exactly
    assert exactly.identity() != KEY.identity()
    assert "deterministic" not in KEY.identity()  # plans stored before this field existed are still found
    assert "deterministic" in str(exactly)
    assert "deterministic" not in str(KEY)


def test_json_holds_no_device_and_no_target():
    text = json.dumps(KEY.to_json())
    assert "H200" not in text
    assert PlanKey.from_json(json.loads(text), OTHER_TARGETS[0]) == dataclasses.replace(
        KEY, target=OTHER_TARGETS[0], device=None
    )


def test_the_gpu_name_is_not_part_of_the_key():
    sibling = dataclasses.replace(TARGET, name="NVIDIA H100")
    assert sibling == TARGET
    assert dataclasses.replace(KEY, target=sibling) == KEY
    assert TARGET != "NVIDIA H200"


def test_str_of_a_key():
    text = str(KEY)
    assert text.startswith("attend(q: float16[2×4×16×64; strides 4096,1024,64,1]")
    for part in ("scale: host scalar", "= 7", "causal='top_left'", "window_size=(3, 5)", "with_lse=True", "-> (out: "):
        assert part in text
    assert "NVIDIA H200 (SM 90, 132 multiprocessors)" in text
    assert "cuDNN 9.28.0" in text
    assert text.endswith("cuda:1")
    assert "\n" not in text


def forward_key(q, k, v, **options):
    return ForwardSpec.of(from_fields(ForwardArguments, q, k, v, **options)).key(TARGET, 0)


def backward_key(q, k, v, *, bias_gradient=False, **options):
    call = from_fields(ForwardArguments, q, k, v, **options)
    out = TensorLayout.of(torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype))
    return BackwardSpec(DenseSpec.of(call), out, out, bias_gradient).key(TARGET, 0)


def test_views_that_differ_only_in_unused_strides_share_a_plan():
    q = torch.randn(1, 4, 16, 64, dtype=torch.float16)
    cut = torch.randn(3, 4, 16, 64, dtype=torch.float16)[::2][:1]
    odd = q.as_strided(q.shape, (7, *q.stride()[1:]))
    assert cut.stride() != odd.stride() or cut.stride() != q.stride()
    assert forward_key(q, q, q) == forward_key(odd, cut, q)


def test_data_is_in_no_key():
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    mask, sinks, rng = torch.randn(16, 16), torch.randn(4), torch.tensor([3, 5])
    data = {"seq_lens_kv": lengths, "attn_mask": mask, "sinks": sinks, "rng": rng, "scale": 0.3}
    more = {"seq_lens_kv": lengths + 4, "attn_mask": mask * 2, "sinks": sinks - 1, "rng": rng + 9, "scale": 0.7}
    for key in (forward_key, backward_key):
        base = key(q, k, v, dropout_p=0.25, **data)
        assert key(q.clone(), k.clone(), v.clone(), dropout_p=0.25, **more) == base
        assert key(q, k, v, softcap=20.0) == key(q, k, v, softcap=31.5)


def test_equivalent_options_share_a_key_and_others_do_not():
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    one, wide = q[:, :, :1], torch.randn(2, 4, 20, 64, dtype=torch.float16)
    bottom = {"is_causal": True, "causal_alignment": "bottom_right"}
    top = {"is_causal": True}
    assert forward_key(q, k, v, **top) == forward_key(q, k, v, **bottom)
    assert forward_key(one, k, v, **bottom) == forward_key(one, k, v)
    assert forward_key(q, k, v, causal_alignment="bottom_right") == forward_key(q, k, v)
    assert forward_key(q, wide, wide, **top) != forward_key(q, wide, wide, **bottom)
    assert forward_key(one, k, v, **top) != forward_key(one, k, v)
    assert forward_key(q, k, v, **top) != forward_key(q, k, v)
    assert forward_key(q, k, v, with_lse=True) != forward_key(q, k, v)


OPTIONS = [
    {},
    {"is_causal": True},
    {"window_left": 3},
    {"window_left": 4},
    {"window_right": 3},
    {"window_left": 3, "is_causal": True},
    {"attn_mask": torch.randn(16, 16)},
    {"attn_mask": torch.randn(2, 1, 16, 16)},
    {"attn_mask": torch.randn(16, 16).half()},
    {"dropout_p": 0.1, "rng": torch.tensor([3, 5])},
    {"dropout_p": 0.2, "rng": torch.tensor([3, 5])},
    {"softcap": 20.0},
    {"alibi": True, "is_causal": True},
    {"seq_lens_q": torch.tensor([3, 9], dtype=torch.int32)},
    {"seq_lens_kv": torch.tensor([3, 9], dtype=torch.int32)},
]


@pytest.mark.parametrize("make", [forward_key, backward_key])
def test_every_graph_option_makes_another_key(make):
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    assert len({make(q, k, v, **options) for options in OPTIONS}) == len(OPTIONS)


def test_sinks_are_part_of_the_forward_graph_only():
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    sinks = torch.randn(4)
    assert forward_key(q, k, v, sinks=sinks) != forward_key(q, k, v)
    assert backward_key(q, k, v, sinks=sinks) == backward_key(q, k, v)


def test_needed_gradients_are_part_of_a_backward_key():
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    mask = torch.randn(16, 16)
    keys = [
        backward_key(q, k, v, attn_mask=mask),
        backward_key(q, k, v, attn_mask=mask, deterministic=True),
        backward_key(q, k, v, attn_mask=mask, bias_gradient=True),
        forward_key(q, k, v, attn_mask=mask),
    ]
    assert len(set(keys)) == 4
    assert keys[2].outputs[-1].layout.shape == (2, 4, 16, 16)


def test_windows_that_hide_nothing_make_no_other_key():
    q, k, v = torch.randn(3, 2, 4, 16, 64, dtype=torch.float16)
    for make in (forward_key, backward_key):
        assert make(q, k, v, window_left=15) == make(q, k, v, window_left=40, window_right=15) == make(q, k, v)
        assert make(q, k, v, window_left=3, window_right=0) == make(q, k, v, window_left=3, is_causal=True)
        assert make(q, k, v, window_left=3, window_right=7, is_causal=True) == make(
            q, k, v, window_left=3, is_causal=True, causal_alignment="bottom_right"
        )


def test_plans_with_cluster_kernels_belong_to_one_gpu(monkeypatch):
    monkeypatch.setattr(key_module, "serial_of", lambda device: f"GPU {device}")
    attention = dataclasses.replace(KEY, operation="cudnn_sdpa.attention.dense.graphs:sdpa_forward")
    older = dataclasses.replace(KEY, target=dataclasses.replace(TARGET, properties=(("deviceVer", 800),)))
    assert KEY.identity()["gpu"] == "GPU 1"
    assert KEY.identity() != dataclasses.replace(KEY, device=2).identity() != KEY.without_device().identity()
    for shared in (attention, older, KEY.without_device()):
        assert not shared.is_gpu_specific
        assert "gpu" not in shared.identity()
        assert shared.identity() == shared.without_device().identity()


@pytest.mark.parametrize("of", [float, np.float64, lambda value: (1, float(value))])
def test_positive_and_negative_zero_are_different_cached_calls(of):
    assert of(0.0) == of(-0.0)
    assert launch.type_of(of(0.0)) != launch.type_of(of(-0.0))
    assert launch.type_of(of(0.0)) == launch.type_of(of(0.0))


def test_a_manifest_without_providers_has_those_of_its_operations(tmp_path):
    """As one that was written before this field existed."""
    pair = Operand("q", LAYOUT), Operand("out", LAYOUT)
    keys = [operation.key(pair[:1], pair[1:], {}, TARGET, None) for operation in (attention_forward, halve)]
    manifest = PlanManifest.of(keys)
    for plan in manifest.plans:
        plan.pop("provider", None)
    manifest.save(tmp_path / "manifest.json")
    assert set(PlanManifest.load(tmp_path / "manifest.json").keys(TARGET, None)) == set(keys)
    assert {key.provider for key in keys} == {"own", None}


def test_the_provider_is_written_only_where_it_is_not_cudnn():
    assert "provider" not in KEY.identity()  # plans stored before this field existed are still found
    own = dataclasses.replace(KEY, provider="own", device=None)
    assert PlanKey.from_json(json.loads(json.dumps(own.to_json())), TARGET) == own
