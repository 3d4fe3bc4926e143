"""Wrong arguments of `sdpa`: each a typed error that names the argument, what it got and what was expected."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_sdpa import (
    ArgumentError,
    CudnnSdpaError,
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


def assert_names(error, argument, got, expected):
    message = str(error)
    assert error.argument == argument
    assert message.startswith(f"{argument}: got ")
    assert got in str(error.got)
    assert expected in str(error.expected)
    assert f"got {error.got}; expected {error.expected}." in message
    assert isinstance(error, CudnnSdpaError)
    assert isinstance(error, TypeError if type(error) in (DtypeError, OptionError) else ValueError)


R, Z = torch.randn, torch.empty
WRONG = {
    # name: (changes, error, wrong argument, part of what it got, part of what was expected)
    "q of rank 3": ({"q": R(4, 8, 16)}, ShapeError, "q", "(4, 8, 16)", "rank 4"),
    "q of rank 5": ({"q": R(1, 2, 4, 8, 16)}, ShapeError, "q", "(1, 2, 4, 8, 16)", "rank 4"),
    "k of rank 3": ({"k": R(2, 12, 16)}, ShapeError, "k", "(2, 12, 16)", "rank 4"),
    "v of rank 2": ({"v": R(12, 24)}, ShapeError, "v", "(12, 24)", "rank 4"),
    "k of rank 0": ({"k": torch.tensor(1.5)}, ShapeError, "k", "()", "rank 4"),
    "other dtype of k": ({"k": R(2, 2, 12, 16).half()}, DtypeError, "k", "float16", "float32, the dtype of q"),
    "other dtype of v": ({"v": R(2, 2, 12, 24).double()}, DtypeError, "v", "float64", "float32, the dtype of q"),
    "integers": ({"q": torch.ones(2, 4, 8, 16).int()}, DtypeError, "q", "int32", "float16 or bfloat16"),
    "bools": ({"q": torch.ones(2, 4, 8, 16).bool()}, DtypeError, "q", "bool", "float16 or bfloat16"),
    "complex": ({"q": R(2, 4, 8, 16) * 1j}, DtypeError, "q", "complex64", "float16 or bfloat16"),
    "float8": ({"q": R(2, 4, 8, 16).to(torch.float8_e4m3fn)}, DtypeError, "q", "float8_e4m3fn", "bfloat16"),
    "k elsewhere": ({"k": Z(2, 2, 12, 16, device="meta")}, DeviceError, "k", "meta", "cpu, the device of q"),
    "v elsewhere": ({"v": Z(2, 2, 12, 24, device="meta")}, DeviceError, "v", "meta", "cpu, the device of q"),
    "other batch of k": ({"k": R(3, 2, 12, 16)}, ShapeError, "k", "(3, 2, 12, 16)", "batch 2"),
    "batch of v is 1": ({"v": R(1, 2, 12, 24)}, ShapeError, "v", "(1, 2, 12, 24)", "batch 2"),
    "heads do not divide": ({"k": R(2, 3, 12, 16)}, ShapeError, "k", "3 heads", "divisor of q's 4 heads"),
    "more key heads": ({"k": R(2, 8, 12, 16)}, ShapeError, "k", "8 heads", "divisor of q's 4 heads"),
    "other heads of v": ({"v": R(2, 4, 12, 24)}, ShapeError, "v", "4 heads", "2, the number of heads of k"),
    "no query heads": ({"q": R(2, 0, 8, 16)}, ShapeError, "q", "0 heads", "at least one head"),
    "no key heads": ({"k": R(2, 0, 12, 16)}, ShapeError, "k", "0 heads", "at least one head"),
    "no value heads": ({"v": R(2, 0, 12, 24)}, ShapeError, "v", "0 heads", "at least one head"),
    "head dims differ": ({"k": R(2, 2, 12, 24)}, ShapeError, "k", "head dim 24", "16, the head dim of q"),
    "head dim 0": ({"q": R(2, 4, 8, 0)}, ShapeError, "q", "head dim 0", "multiple of 8"),
    "head dim 12": ({"q": R(2, 4, 8, 12)}, ShapeError, "q", "head dim 12", "multiple of 8"),
    "head dim 20 of k": ({"k": R(2, 2, 12, 20)}, ShapeError, "k", "head dim 20", "multiple of 8"),
    "head dim 30 of v": ({"v": R(2, 2, 12, 30)}, ShapeError, "v", "head dim 30", "multiple of 8"),
    "head dim 0 of v": ({"v": R(2, 2, 12, 0)}, ShapeError, "v", "head dim 0", "multiple of 8"),
    "v longer than k": ({"v": R(2, 2, 13, 24)}, ShapeError, "v", "sequence length 13", "12, the sequence length of k"),
    "q is a list": ({"q": [[1.5]]}, OptionError, "q", "list", "a torch.Tensor"),
    "k is None": ({"k": None}, OptionError, "k", "NoneType", "a torch.Tensor"),
    "v is a number": ({"v": 3.5}, OptionError, "v", "float", "a torch.Tensor"),
    "is_causal=1": ({"is_causal": 1}, OptionError, "is_causal", "1", "True or False"),
    "is_causal=None": ({"is_causal": None}, OptionError, "is_causal", "None", "True or False"),
    "is_causal is a tensor": ({"is_causal": torch.tensor(True)}, OptionError, "is_causal", "tensor", "True or False"),
    "alignment typo": (
        {"causal_alignment": "bottom-right"},
        OptionError,
        "causal_alignment",
        "bottom-right",
        "top_left",
    ),
    "alignment None": ({"causal_alignment": None}, OptionError, "causal_alignment", "None", "bottom_right"),
    "alignment unhashable": ({"causal_alignment": []}, OptionError, "causal_alignment", "[]", "bottom_right"),
    "scale NaN": ({"scale": math.nan}, OptionError, "scale", "nan", "finite float"),
    "scale inf": ({"scale": math.inf}, OptionError, "scale", "inf", "finite float"),
    "scale -inf": ({"scale": -math.inf}, OptionError, "scale", "-inf", "finite float"),
    "scale is a bool": ({"scale": True}, OptionError, "scale", "bool", "a float"),
    "scale is text": ({"scale": "0.5"}, OptionError, "scale", "str", "a float"),
    "scale is complex": ({"scale": 0.5j}, OptionError, "scale", "complex", "a float"),
    "scale is a tensor": ({"scale": torch.tensor(0.5)}, OptionError, "scale", "Tensor", "a float"),
    "return_lse=1": ({"return_lse": 1}, OptionError, "return_lse", "1", "True or False"),
    "return_lse=None": ({"return_lse": None}, OptionError, "return_lse", "None", "True or False"),
}
for name in ("seq_lens_q", "seq_lens_kv"):
    elsewhere = torch.empty(2, dtype=torch.int32, device="meta")
    WRONG |= {
        f"{name} is a list": ({name: [3, 5]}, OptionError, name, "list", "a torch.Tensor or None"),
        f"{name} is int64": ({name: torch.tensor([3, 5])}, DtypeError, name, "int64", "int32"),
        f"{name} is float": ({name: torch.tensor([3.0, 5.0])}, DtypeError, name, "float32", "int32"),
        f"{name} too many": ({name: int32(3, 5, 7)}, ShapeError, name, "(3,)", "shape (2,)"),
        f"{name} too few": ({name: int32(3)}, ShapeError, name, "(1,)", "shape (2,)"),
        f"{name} as (B, 1, 1, 1)": (
            {name: int32(3, 5).view(2, 1, 1, 1)},
            ShapeError,
            name,
            "(2, 1, 1, 1)",
            "shape (2,)",
        ),
        f"{name} as number": ({name: torch.tensor(3, dtype=torch.int32)}, ShapeError, name, "()", "shape (2,)"),
        f"{name} elsewhere": ({name: elsewhere}, DeviceError, name, "meta", "cpu, the device of q"),
        f"{name} strided": ({name: int32(3, 4, 5, 6)[::2]}, LayoutError, name, "stride 2", "dense"),
        f"{name} expanded": ({name: int32(3).expand(2)}, LayoutError, name, "stride 0", "dense"),
    }


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named_with_what_was_expected(case):
    changes, error, argument, got, expected = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        sdpa(**arguments(**changes))
    assert type(caught.value) is error
    assert_names(caught.value, argument, got, expected)


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
    out, error, got, expected = WRONG_OUT[case]
    with pytest.raises(ArgumentError) as caught:
        sdpa(**arguments(), out=out, return_lse=return_lse)
    assert type(caught.value) is error
    assert_names(caught.value, "out", got, expected)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shift", [0, 16, 96])
def test_an_output_in_the_memory_of_an_input_is_refused(name, shift):
    storage = torch.randn(2048)
    call = {key: torch.randn(1, 2, 8, 16) for key in ("q", "k", "v")}
    call[name] = storage[:256].view(1, 2, 8, 16)
    out = storage[shift : shift + 256].view(1, 2, 8, 16)
    before = storage.clone()
    with pytest.raises(LayoutError) as caught:
        sdpa(**call, out=out)
    assert_names(caught.value, "out", f"memory that overlaps {name}", "a separate buffer")
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
        with pytest.raises(LayoutError) as caught:
            checks.check_strides(*call)
        assert_names(caught.value, name, "stride 8 in the last dimension", "dense")
    for name, call in {"q": (uneven, k, v), "k": (q, uneven, v), "v": (q, k, uneven)}.items():
        with pytest.raises(LayoutError) as caught:
            checks.check_strides(*call)
        assert_names(caught.value, name, "stride 18 from token to token", "a multiple of 8 elements (16 bytes)")
    single = torch.empty(64, dtype=torch.float16).as_strided((1, 1, 1, 16), (3, 5, 7, 1))
    checks.check_strides(single, single, single)  # strides of size-1 dimensions do not matter


def test_float32_and_integers_are_refused_for_tensors_of_a_gpu():
    from cudnn_sdpa.attention import arguments as checks

    for dtype in (torch.float32, torch.float64, torch.int8, torch.float8_e5m2):
        tensor = torch.empty(2, 4, 8, 16, dtype=dtype, device="meta")
        with pytest.raises(DtypeError) as caught:
            checks.check_qkv(tensor, tensor, tensor)
        assert_names(caught.value, "q", str(dtype).removeprefix("torch."), "float16 or bfloat16")


def test_tensors_on_other_devices_are_refused():
    class Elsewhere(torch.Tensor):
        device = torch.device("xla")

    q, k, v = arguments().values()
    with pytest.raises(DeviceError, match="k: got xla; expected a CUDA device"):
        sdpa(q, k.as_subclass(Elsewhere), v)
