"""Fuzzing of the attention functions: a wrong call raises a library error or matches float64."""

from __future__ import annotations

import random

import pytest
import torch
from float64_reference import attend, attend_packed

import cudnn_sdpa
from cudnn_sdpa import CudnnSdpaError

CALLS = 400


class Own(torch.Tensor):
    """A foreign tensor subclass with ordinary memory."""


def nested(x):
    return torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)


def old_nested(x):
    return torch.nested.nested_tensor([x[0], x[0]])


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


#: Mutations of a tensor. None is a valid argument as such, but some have the same values.
SPOILERS = {
    "none": lambda _: None,
    "a number": lambda _: 3,
    "a text": lambda _: "q",
    "a list": lambda x: x.tolist(),
    "an array": lambda x: x.numpy(),
    "nested": nested,
    "nested, strided": old_nested,
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.reshape(-1, x.shape[-1]).to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "fp8": lambda x: x.to(torch.float8_e4m3fn),
    "integers": lambda x: x.to(torch.int32),
    "int8": lambda x: x.to(torch.int8),
    "complex": lambda x: x.to(torch.complex64),
    "booleans": lambda x: x > 0,
    "float64": lambda x: x.double(),
    "half": lambda x: x.half(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "a dimension more": lambda x: x.unsqueeze(0),
    "a dimension less": lambda x: x[0],
    "a scalar": lambda x: x.flatten()[0],
    "empty": lambda x: x[..., :0],
    "nothing": lambda x: x[:0],
    "longer": lambda x: torch.cat([x, x]),
    "other heads": lambda x: x[:, :1].repeat(1, 3, *(1,) * (x.dim() - 2)) if x.dim() > 1 else x[:-1],
    "odd": lambda x: torch.nn.functional.pad(x, (0, 1)),
    "freed": freed,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "negative bit": lambda x: torch._neg_view(-x),
    "negated view": torch._neg_view,
    "conjugate": lambda x: torch.complex(x, x).conj().imag.neg(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
    "overlapping": lambda x: torch.as_strided(x.clone(), x.shape, (1,) * x.dim()),
    "own class": lambda x: x.as_subclass(Own),
    "parameter": lambda x: torch.nn.Parameter(x.clone()) if x.is_floating_point() else x,
}
OPTIONS = {
    "scale": [
        2**63,
        2**200,
        1e39,
        float("nan"),
        float("inf"),
        -float("inf"),
        "1",
        True,
        torch.tensor(1.0),
        1 + 2j,
        [],
        1e6,
        -0.5,
        0.0,
        1e-35,
    ],
    "is_causal": [1, None, "yes", torch.tensor(True), torch.ones(2), 1.0],
    "dropout_p": [1.0, -0.1, 2, True, "0", None, float("nan"), torch.tensor(0.1), 10**400],
    "softcap": [0, -1.0, float("nan"), 10**400, True, "2", torch.tensor(1.0)],
    "window_size": [
        1,
        (1,),
        (1, 2, 3),
        (-2, 0),
        (1.5, 0),
        ("a", "b"),
        (True, 0),
        torch.tensor([1, 2]),
        [[1, 2], [3, 4]],
    ],
    "causal_alignment": ["top", None, 0, ["top_left"], torch.ones(1)],
    "alibi": [1, None, "x", torch.tensor(True)],
    "return_lse": [1, None, "x", torch.tensor(True)],
    "deterministic": [1, "x", torch.tensor(True)],
    "max_seqlen_q": [-1, 2.5, None, "7", torch.tensor(9), True, 2**70],
    "max_seqlen_kv": [-1, 2.5, None, "7", torch.tensor(9), True, 2**70],
    "page_layout": [1, None, "HDN", ["HND"], torch.ones(1)],
    "enable_gqa": [1, None, "x", torch.tensor(True)],
    "out": [1, "x", torch.empty(1), torch.empty(2, 4, 9, 8).double()],
}


def dense(rng):
    tensors = {"q": torch.randn(2, 4, 9, 8), "k": torch.randn(2, 2, 7, 8), "v": torch.randn(2, 2, 7, 8)}
    if rng.random() < 0.5:
        tensors["attn_mask"] = torch.randn(2, 1, 9, 7)
    if rng.random() < 0.5:
        tensors["sinks"] = torch.randn(4)
    if rng.random() < 0.5:
        tensors["seq_lens_q"] = torch.tensor([9, 4], dtype=torch.int32)
        tensors["seq_lens_kv"] = torch.tensor([3, 7], dtype=torch.int32)
    known = (
        "scale",
        "is_causal",
        "dropout_p",
        "softcap",
        "window_size",
        "causal_alignment",
        "alibi",
        "return_lse",
        "out",
    )
    return cudnn_sdpa.sdpa, tensors, {}, (*known, "deterministic")


def drop_in(rng):
    tensors = {"query": torch.randn(2, 4, 9, 8), "key": torch.randn(2, 4, 7, 8), "value": torch.randn(2, 4, 7, 8)}
    if rng.random() < 0.6:
        tensors["attn_mask"] = torch.randn(2, 1, 9, 7) if rng.random() < 0.5 else torch.rand(9, 7) > 0.3
    return cudnn_sdpa.scaled_dot_product_attention, tensors, {}, ("scale", "is_causal", "dropout_p", "enable_gqa")


def packed(rng):
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    tensors = {"q": torch.randn(9, 4, 8), "k": torch.randn(9, 2, 8), "v": torch.randn(9, 2, 8)}
    tensors |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends.clone()}
    if rng.random() < 0.5:
        tensors["sinks"] = torch.randn(4)
    known = ("scale", "is_causal", "dropout_p", "softcap", "window_size", "causal_alignment", "return_lse", "out")
    options = {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    return cudnn_sdpa.sdpa_varlen, tensors, options, (*known, "deterministic", "max_seqlen_q", "max_seqlen_kv")


def paged(rng):
    pages = torch.randn(5, 2, 16, 8)
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    tensors = {"q": torch.randn(2, 4, 3, 8), "k_pages": pages, "v_pages": torch.randn(5, 2, 16, 8), "page_table": table}
    tensors["seq_lens_kv"] = torch.tensor([20, 7], dtype=torch.int32)
    if rng.random() < 0.3:
        tensors["page_table_v"] = table.flip(0)
    if rng.random() < 0.3:
        tensors["seq_lens_q"] = torch.tensor([1, 3], dtype=torch.int32)
    if rng.random() < 0.3:
        tensors["sinks"] = torch.randn(4)
    known = ("scale", "is_causal", "softcap", "window_size", "causal_alignment", "return_lse", "out", "page_layout")
    return cudnn_sdpa.sdpa_paged, tensors, {"page_layout": "HND"}, known


def exact_paged(numbers, options):
    """Paged attention in float64, on gathered keys and values."""
    tables = numbers["page_table"], numbers.get("page_table_v", numbers["page_table"])
    k, v = (
        numbers[name][table.long()].transpose(1, 2).flatten(2, 3)
        for name, table in zip(("k_pages", "v_pages"), tables, strict=True)
    )
    rest = {name: x for name, x in numbers.items() if name in ("seq_lens_q", "seq_lens_kv", "sinks")}
    return attend(numbers["q"], k, v, causal_alignment="bottom_right", **{"is_causal": True, **options}, **rest)[0]


def exact(function, tensors, options):
    """The float64 output of a call whose tensors have ordinary values."""
    numbers = {n: x.detach().resolve_neg().as_subclass(torch.Tensor) for n, x in tensors.items() if x is not None}
    options = {
        name: x for name, x in options.items() if name in ("is_causal", "softcap", "window_size", "scale", "alibi")
    }
    if function is cudnn_sdpa.scaled_dot_product_attention:
        numbers = {{"query": "q", "key": "k", "value": "v"}.get(name, name): x for name, x in numbers.items()}
    if function is cudnn_sdpa.sdpa_paged:
        return exact_paged(numbers, options)
    if function is not cudnn_sdpa.sdpa_varlen:
        return attend(**numbers, **options)[0]
    return attend_packed(**numbers, **options)[0]


def spoiled(rng, make, share, values):
    """A call with up to two wrong arguments; this share of them are tensors."""
    function, tensors, options, names = make(rng)
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < share:
            name, kind = rng.choice(list(tensors)), rng.choice(list(SPOILERS))
            try:
                tensors[name] = SPOILERS[kind](tensors[name])
            except (AttributeError, RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
                continue  # the mutation is impossible for this tensor
        else:
            name = rng.choice(names)
            options[name] = rng.choice(values[name])
    return function, tensors, options


def assert_named_or_right(make, call, is_right, *, count=CALLS, share=0.6, trained=0.0, values=OPTIONS):
    """Runs wrong calls; is_right compares the results of those that are taken. A share of the tensors is trained."""
    wrong = []
    for seed in range(count):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        function, tensors, options = spoiled(rng, make, share, values)
        said = f"seed {seed}: " + ", ".join(f"{n}={_said(x)}" for n, x in (tensors | options).items())
        for x in tensors.values() if trained else ():
            is_leaf = isinstance(x, torch.Tensor) and x.is_floating_point() and x.is_leaf
            if is_leaf and (trained == 1.0 or rng.random() < trained):
                x.requires_grad_()
        try:
            found = call(function, tensors, options)
        except CudnnSdpaError:
            continue
        except Exception as error:  # noqa: BLE001
            wrong.append(f"{said}\n    {type(error).__name__}: {str(error)[:200]}")
            continue
        if not found[0].is_meta and not is_right(found, function, tensors, options):
            wrong.append(f"{said}\n    a wrong number")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])


def call(function, tensors, options):
    found = function(**tensors, **options)
    return found if isinstance(found, tuple) else (found,)


def matches_float64(found, function, tensors, options):
    if options.get("dropout_p"):
        return True
    out, expected = found[0], exact(function, tensors, options)
    return out.shape == expected.shape and torch.allclose(out.detach().double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore")  # warnings of prototype features: nested, sparse, quantized tensors
@pytest.mark.parametrize("make", [dense, drop_in, packed, paged])
@pytest.mark.parametrize("trains", [False, True])
def test_wrong_calls_raise_library_errors_or_give_right_values(make, trains):
    assert_named_or_right(make, call, matches_float64, trained=float(trains))


def _said(x):
    if not isinstance(x, torch.Tensor):
        return repr(x)[:60]
    try:
        return f"{type(x).__name__}{tuple(x.shape)} {x.dtype} {x.layout} {x.device}"
    except Exception:  # noqa: BLE001
        return type(x).__name__
