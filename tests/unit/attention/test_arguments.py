"""Wrong arguments of `sdpa`: each a typed error that names the argument, what it got and what was expected."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from refusals import assert_refused

from cudnn_sdpa import (
    ArgumentError,
    DeviceError,
    DtypeError,
    LayoutError,
    OptionError,
    ShapeError,
    UnsupportedError,
    scaled_dot_product_attention,
    sdpa,
)

BATCH, HEADS, HEADS_KV, SQ, SKV, DIM, DIM_V = 2, 4, 2, 8, 12, 16, 24


def arguments(**changes):
    call = {
        "q": torch.randn(BATCH, HEADS, SQ, DIM),
        "k": torch.randn(BATCH, HEADS_KV, SKV, DIM),
        "v": torch.randn(BATCH, HEADS_KV, SKV, DIM_V),
    }
    return {**call, **changes}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


R, Z = torch.randn, torch.empty
WRONG = {
    # name: (changes, error, part of what the argument got, part of what was expected)
    "q of rank 3": ({"q": R(4, 8, 16)}, ShapeError, "(4, 8, 16)", "rank 4"),
    "q of rank 5": ({"q": R(1, 2, 4, 8, 16)}, ShapeError, "(1, 2, 4, 8, 16)", "rank 4"),
    "k of rank 3": ({"k": R(2, 12, 16)}, ShapeError, "(2, 12, 16)", "rank 4"),
    "v of rank 2": ({"v": R(12, 24)}, ShapeError, "(12, 24)", "rank 4"),
    "k of rank 0": ({"k": torch.tensor(1.5)}, ShapeError, "()", "rank 4"),
    "other dtype of k": ({"k": R(2, 2, 12, 16).half()}, DtypeError, "float16", "float32, the dtype of q"),
    "other dtype of v": ({"v": R(2, 2, 12, 24).double()}, DtypeError, "float64", "float32, the dtype of q"),
    "integers": ({"q": torch.ones(2, 4, 8, 16).int()}, DtypeError, "int32", "float16 or bfloat16"),
    "bools": ({"q": torch.ones(2, 4, 8, 16).bool()}, DtypeError, "bool", "float16 or bfloat16"),
    "complex": ({"q": R(2, 4, 8, 16) * 1j}, DtypeError, "complex64", "float16 or bfloat16"),
    "float8": ({"q": R(2, 4, 8, 16).to(torch.float8_e4m3fn)}, DtypeError, "float8_e4m3fn", "bfloat16"),
    "k elsewhere": ({"k": Z(2, 2, 12, 16, device="meta")}, DeviceError, "meta", "cpu, the device of q"),
    "v elsewhere": ({"v": Z(2, 2, 12, 24, device="meta")}, DeviceError, "meta", "cpu, the device of q"),
    "other batch of k": ({"k": R(3, 2, 12, 16)}, ShapeError, "(3, 2, 12, 16)", "batch 2"),
    "batch of v is 1": ({"v": R(1, 2, 12, 24)}, ShapeError, "(1, 2, 12, 24)", "batch 2"),
    "heads do not divide": ({"k": R(2, 3, 12, 16)}, ShapeError, "3 heads", "divisor of q's 4 heads"),
    "more key heads": ({"k": R(2, 8, 12, 16)}, ShapeError, "8 heads", "divisor of q's 4 heads"),
    "other heads of v": ({"v": R(2, 4, 12, 24)}, ShapeError, "4 heads", "2, the number of heads of k"),
    "no query heads": ({"q": R(2, 0, 8, 16)}, ShapeError, "0 heads", "at least one head"),
    "no key heads": ({"k": R(2, 0, 12, 16)}, ShapeError, "0 heads", "at least one head"),
    "no value heads": ({"v": R(2, 0, 12, 24)}, ShapeError, "0 heads", "at least one head"),
    "head dims differ": ({"k": R(2, 2, 12, 24)}, ShapeError, "head dim 24", "16, the head dim of q"),
    "head dim 0": ({"q": R(2, 4, 8, 0)}, ShapeError, "head dim 0", "multiple of 8"),
    "head dim 12": ({"q": R(2, 4, 8, 12)}, ShapeError, "head dim 12", "multiple of 8"),
    "head dim 20 of k": ({"k": R(2, 2, 12, 20)}, ShapeError, "head dim 20", "multiple of 8"),
    "head dim 30 of v": ({"v": R(2, 2, 12, 30)}, ShapeError, "head dim 30", "multiple of 8"),
    "head dim 0 of v": ({"v": R(2, 2, 12, 0)}, ShapeError, "head dim 0", "multiple of 8"),
    "v longer than k": ({"v": R(2, 2, 13, 24)}, ShapeError, "sequence length 13", "12, the sequence length of k"),
    "q is a list": ({"q": [[1.5]]}, OptionError, "list", "a torch.Tensor"),
    "k is None": ({"k": None}, OptionError, "NoneType", "a torch.Tensor"),
    "v is a number": ({"v": 3.5}, OptionError, "float", "a torch.Tensor"),
    "is_causal=1": ({"is_causal": 1}, OptionError, "1", "True or False"),
    "is_causal is a tensor": ({"is_causal": torch.tensor(True)}, OptionError, "tensor", "True or False"),
    "alignment typo": ({"causal_alignment": "bottom-right"}, OptionError, "bottom-right", "top_left"),
    "alignment None": ({"causal_alignment": None}, OptionError, "None", "bottom_right"),
    "alignment unhashable": ({"causal_alignment": []}, OptionError, "[]", "bottom_right"),
    "scale NaN": ({"scale": math.nan}, OptionError, "nan", "finite float"),
    "scale inf": ({"scale": math.inf}, OptionError, "inf", "finite float"),
    "scale is a bool": ({"scale": True}, OptionError, "bool", "a float"),
    "scale is text": ({"scale": "0.5"}, OptionError, "str", "a float"),
    "scale is complex": ({"scale": 0.5j}, OptionError, "complex", "a float"),
    "scale is a tensor": ({"scale": torch.tensor(0.5)}, OptionError, "Tensor", "a float"),
    "return_lse=1": ({"return_lse": 1}, OptionError, "1", "True or False"),
}
for name in ("seq_lens_q", "seq_lens_kv"):
    elsewhere = torch.empty(2, dtype=torch.int32, device="meta")
    WRONG |= {
        f"{name} is a list": ({name: [3, 5]}, OptionError, "list", "a torch.Tensor or None"),
        f"{name} is int64": ({name: torch.tensor([3, 5])}, DtypeError, "int64", "int32"),
        f"{name} is float": ({name: torch.tensor([3.0, 5.0])}, DtypeError, "float32", "int32"),
        f"{name} too many": ({name: int32(3, 5, 7)}, ShapeError, "(3,)", "shape (2,)"),
        f"{name} too few": ({name: int32(3)}, ShapeError, "(1,)", "shape (2,)"),
        f"{name} as (B, 1, 1, 1)": ({name: int32(3, 5).view(2, 1, 1, 1)}, ShapeError, "(2, 1, 1, 1)", "shape (2,)"),
        f"{name} as number": ({name: torch.tensor(3, dtype=torch.int32)}, ShapeError, "()", "shape (2,)"),
        f"{name} elsewhere": ({name: elsewhere}, DeviceError, "meta", "cpu, the device of q"),
        f"{name} strided": ({name: int32(3, 4, 5, 6)[::2]}, LayoutError, "stride 2", "dense"),
        f"{name} expanded": ({name: int32(3).expand(2)}, LayoutError, "stride 0", "dense"),
    }


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_was_expected(case):
    changes, kind, got, expected = WRONG[case]
    assert_refused(lambda: sdpa(**arguments(**changes)), kind, *changes, got, expected)


OUT = (BATCH, HEADS, SQ, DIM_V)
WRONG_OUT = {
    "a list": ([0.0], OptionError, "list", "a torch.Tensor or None"),
    "shape of q": (Z(2, 4, 8, 16), ShapeError, "(2, 4, 8, 16)", "(2, 4, 8, 24)"),
    "rank 3": (Z(4, 8, 24), ShapeError, "(4, 8, 24)", "(2, 4, 8, 24)"),
    "dtype": (Z(OUT, dtype=torch.float64), DtypeError, "float64", "float32, the dtype of q"),
    "device": (Z(OUT, device="meta"), DeviceError, "meta", "cpu, the device of q"),
    "last dimension": (Z(2, 4, 24, 8).transpose(2, 3), LayoutError, "stride 8 in the last dimension", "1"),
    "stride": (Z(2, 4, 8, 26)[..., :24], LayoutError, "stride of 26", "multiples of 4 elements"),
    "expanded batch": (Z(1, 4, 8, 24).expand(OUT), LayoutError, "overlap", "a separate address"),
    "expanded rows": (Z(2, 4, 1, 24).expand(OUT), LayoutError, "overlap", "a separate address"),
    "overlapping rows": (Z(4096).as_strided(OUT, (1024, 256, 16, 1)), LayoutError, "overlap", "a separate address"),
    "overlapping heads": (Z(4096).as_strided(OUT, (1024, 184, 24, 1)), LayoutError, "overlap", "a separate address"),
}


@pytest.mark.parametrize("case", WRONG_OUT)
@pytest.mark.parametrize("return_lse", [False, True])
def test_an_output_that_cannot_be_written_is_refused(case, return_lse):
    out, kind, got, expected = WRONG_OUT[case]
    assert_refused(lambda: sdpa(**arguments(), out=out, return_lse=return_lse), kind, "out", got, expected)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shift", [0, 16, 96])
def test_an_output_in_the_memory_of_an_input_is_refused(name, shift):
    storage = torch.randn(2048)
    call = {key: torch.randn(1, 2, 8, 16) for key in ("q", "k", "v")}
    call[name] = storage[:256].view(1, 2, 8, 16)
    out = storage[shift : shift + 256].view(1, 2, 8, 16)
    before = storage.clone()
    got = f"memory that overlaps {name}"
    assert_refused(lambda: sdpa(**call, out=out), LayoutError, "out", got, "a separate buffer")
    assert torch.equal(storage, before)


def test_an_output_may_follow_an_input_in_the_same_storage():
    storage = torch.randn(512)
    q, k = storage[:256].view(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    expected = sdpa(q, k, k)
    assert torch.equal(sdpa(q, k, k, out=storage[256:].view(1, 2, 8, 16)), expected)


def test_fewer_arguments_than_needed_are_a_type_error():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError):
        sdpa(q, q)
    with pytest.raises(TypeError):
        sdpa(q, q, q, True)  # options have names


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", [sdpa, scaled_dot_product_attention])
def test_a_nested_tensor_is_named(function):
    q, k, v = (arguments()[name] for name in "qkv")
    nested = torch.nested.nested_tensor([q[0], q[0]])
    with pytest.raises(LayoutError, match=r"^q(uery)?: got a nested tensor"):
        function(nested, k, v)


def test_a_sparse_tensor_is_named():
    with pytest.raises(LayoutError, match=r"^q: got"):
        sdpa(**arguments(q=torch.randn(BATCH, HEADS, SQ, DIM).to_sparse()))


def test_an_output_that_requires_grad_is_refused():
    with pytest.raises((UnsupportedError, ArgumentError), match="out"):
        sdpa(**arguments(), out=torch.empty(OUT, requires_grad=True))


def test_gpu_only_checks_of_memory():
    from cudnn_sdpa.engine import tensor_checks as checks

    q, k, v = (torch.randn(2, 4, 8, 16, dtype=torch.float16) for _ in range(3))
    checks.check_strides(q, k, v)
    not_dense = torch.randn(2, 4, 16, 8, dtype=torch.float16).transpose(2, 3)
    uneven = torch.randn(2, 4, 8, 18, dtype=torch.float16)[..., :16]
    for name, call in {"q": (not_dense, k, v), "k": (q, not_dense, v), "v": (q, k, not_dense)}.items():
        got = "stride 8 in the last dimension"
        assert_refused(partial(checks.check_strides, *call), LayoutError, name, got, "dense")
    for name, call in {"q": (uneven, k, v), "k": (q, uneven, v), "v": (q, k, uneven)}.items():
        got, expected = "stride 18 from token to token", "a multiple of 8 elements (16 bytes)"
        assert_refused(partial(checks.check_strides, *call), LayoutError, name, got, expected)
    single = torch.empty(64, dtype=torch.float16).as_strided((1, 1, 1, 16), (3, 5, 7, 1))
    checks.check_strides(single, single, single)  # strides of size-1 dimensions do not matter


def test_float32_and_integers_are_refused_for_tensors_of_a_gpu():
    from cudnn_sdpa.attention import arguments as checks

    for dtype in (torch.float32, torch.float64, torch.int8, torch.float8_e5m2):
        tensor = torch.empty(2, 4, 8, 16, dtype=dtype, device="meta")
        got = str(dtype).removeprefix("torch.")
        assert_refused(partial(checks.check_qkv, *[tensor] * 3), DtypeError, "q", got, "float16 or bfloat16")


def test_tensors_on_other_devices_are_refused():
    class Elsewhere(torch.Tensor):
        device = torch.device("xla")

    q, k, v = arguments().values()
    with pytest.raises(DeviceError, match="k: got xla; expected a CUDA device"):
        sdpa(q, k.as_subclass(Elsewhere), v)
