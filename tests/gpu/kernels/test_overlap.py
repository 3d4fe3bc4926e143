"""Own kernels wait for what is ahead of them in the stream, although their launches do not.

The kernel ahead lets others begin, and writes their operands only a while later (`late.cu`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from native_way import is_off
from torch import Tensor

import cudnn_sdpa
from benchmarks.tools.ways import in_python, wait_for_native_calls
from cudnn_sdpa import providers
from cudnn_sdpa.plans import nvrtc
from cudnn_sdpa.plans.nvrtc import Kernel
from tests.fake_driver import OVERLAPS, Attribute, Config

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="launches do not overlap"
)

SOURCE = Path(__file__).with_name("late.cu")
LATE, AT_ONCE = (Kernel(SOURCE, name, {"UNUSED": 1}) for name in ("copy_late", "copy_at_once"))
HALF = torch.bfloat16
CLOCKS = 400_000  # some 0.2 ms, in which the host makes the call


def normal(*shape: int, dtype: torch.dtype = HALF) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=dtype, device="cuda")


def integers(least: int, most: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(least, most, shape, dtype=torch.int32, device="cuda")


def angles() -> Tensor:
    return torch.rand(64, 32, device="cuda") * 2 - 1


def offsets() -> Tensor:
    """Of three packed sequences, 200 tokens together."""
    ends = torch.randint(1, 200, (2,), device="cuda").sort().values
    return torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), 200)]).int()


def table() -> Tensor:
    return torch.randperm(20, device="cuda")[:10].view(2, 5).int()


@dataclass(frozen=True)
class Case:
    """A call, of the operands by name that are written late; `draw` makes each, and `fixed` those that are there."""

    function: Callable[..., Any]
    draw: dict[str, Callable[[], Tensor]]
    options: dict[str, Any]
    fixed: dict[str, Callable[[], Tensor]]
    providers: tuple[str, ...] = ("default",)


def case(
    function: Callable[..., Any], *, by: str = "default", fixed: Any = None, options: Any = None, **draw: Any
) -> Case:
    return Case(function, draw, options or {}, fixed or {}, tuple(by.split(",")))


def gradients(
    function: Callable[..., Tensor], *inputs: Callable[[], Tensor], shape: tuple[int, ...] = (64, 256)
) -> Case:
    """The gradients of a call, whose result's is written late."""
    kept: list[tuple[list[Tensor], Tensor]] = []

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        if not kept:
            leaves = [draw().requires_grad_() for draw in inputs]
            kept.append((leaves, function(*leaves)))
        leaves, out = kept[0]
        return torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return case(backward, grad=normal(*shape))


def rotated(q: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = cudnn_sdpa.rope(q, None, angles(), angles(), q_weight=weight)[0]
    return out


def rotated_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cudnn_sdpa.rope_(q, k, cos, sin)
    return q, k


def appended(k: Tensor, v: Tensor, **pages: Tensor) -> tuple[Tensor, Tensor]:
    cudnn_sdpa.append_paged_kv(k, v, **pages, page_layout="HND")
    return pages["k_pages"], pages["v_pages"]


HEADS = {"q": normal(2, 8, 64, 64), "k": normal(2, 2, 64, 64), "cos": angles, "sin": angles}
QKV = {name: normal(2, 4, 96, 64) for name in ("q", "k", "v")}
IN_FLOAT32 = {name: normal(2, 4, 96, 64, dtype=torch.float32) for name in QKV}
PAGES = {"k_pages": normal(20, 4, 64, 64), "v_pages": normal(20, 4, 64, 64), "page_table": table}
DECODES = {**PAGES, "q": normal(2, 4, 1, 64), "seq_lens_kv": integers(1, 300, 2)}
LENGTHS = integers(1, 96, 2)
PACKED = {name: normal(200, 4, 64) for name in ("q", "k", "v")} | {"cu_seqlens_q": offsets}
CASES = {
    "rms_norm": case(cudnn_sdpa.rms_norm, x=normal(64, 256), weight=normal(256)),
    "rms_norm of a sum": case(cudnn_sdpa.rms_norm, x=normal(64, 256), weight=normal(256), residual=normal(64, 256)),
    "rms_norm, long rows": case(cudnn_sdpa.rms_norm, x=normal(4, 40_000), weight=normal(40_000)),
    "layer_norm": case(cudnn_sdpa.layer_norm, x=normal(64, 256), weight=normal(256), bias=normal(256)),
    "rms_norm_fp8": case(cudnn_sdpa.rms_norm_fp8, x=normal(64, 256), weight=normal(256)),
    "silu_mul": case(cudnn_sdpa.silu_mul, gate=normal(64, 256), up=normal(64, 256)),
    "gelu_mul": case(cudnn_sdpa.gelu_mul, gate=normal(64, 256), up=normal(64, 256)),
    "relu_squared": case(cudnn_sdpa.relu_squared, x=normal(64, 256)),
    "gradients of silu_mul": gradients(cudnn_sdpa.silu_mul, normal(64, 256), normal(64, 256)),
    "gradients of rms_norm": gradients(
        lambda x, weight: cudnn_sdpa.rms_norm(x, weight, activation="silu"), normal(64, 256), normal(256)
    ),
    "rope": case(cudnn_sdpa.rope, **HEADS),
    "rope with norms": case(cudnn_sdpa.rope, **HEADS, q_weight=normal(64), k_weight=normal(64)),
    "rope in place": case(rotated_in_place, **HEADS),
    "gradients of rope with norms": gradients(rotated, normal(2, 8, 64, 64), normal(64), shape=(2, 8, 64, 64)),
    "append": case(
        appended,
        k=normal(30, 4, 64),
        v=normal(30, 4, 64),
        fixed={
            **{x: PAGES[x] for x in ("k_pages", "v_pages")},
            "slot_mapping": lambda: torch.randperm(1280, device="cuda")[:30],
        },
    ),
    "lengths": case(cudnn_sdpa.sdpa, **QKV, seq_lens_kv=LENGTHS),
    "soft cap, lengths": case(cudnn_sdpa.sdpa, **QKV, seq_lens_kv=LENGTHS, options={"softcap": 9.0}),
    "boolean mask": case(cudnn_sdpa.sdpa, **QKV, attn_mask=lambda: torch.rand(2, 1, 96, 96, device="cuda") > 0.3),
    "boolean mask, lengths": case(
        cudnn_sdpa.sdpa, **QKV, attn_mask=lambda: torch.rand(2, 1, 96, 96, device="cuda") > 0.3, seq_lens_kv=LENGTHS
    ),
    "float32": case(
        cudnn_sdpa.sdpa, by="cudnn,own", **{name: normal(2, 4, 96, 64, dtype=torch.float32) for name in QKV}
    ),
    "varlen": case(
        lambda cu_seqlens_q, **qkv: cudnn_sdpa.sdpa_varlen(
            **qkv, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_q, max_seqlen_q=200, max_seqlen_kv=200
        ),
        **PACKED,
    ),
    "paged": case(cudnn_sdpa.sdpa_paged, **DECODES, options={"page_layout": "HND"}),
    "paged by cuDNN": case(cudnn_sdpa.sdpa_paged, by="cudnn", **DECODES, options={"page_layout": "HND"}),
    "paged_varlen": case(
        cudnn_sdpa.sdpa_paged_varlen,
        **PAGES,
        q=normal(6, 4, 64),
        seq_lens_kv=integers(6, 300, 2),
        fixed={"cu_seqlens_q": lambda: torch.tensor([0, 2, 6], dtype=torch.int32, device="cuda")},
        options={"page_layout": "HND", "max_seqlen_q": 4},
    ),
    "merge_states": case(
        lambda a, b, lse_a, lse_b: cudnn_sdpa.merge_states([a, b], [lse_a, lse_b]),
        a=normal(2, 4, 96, 64),
        b=normal(2, 4, 96, 64),
        lse_a=normal(2, 4, 96, dtype=torch.float32),
        lse_b=normal(2, 4, 96, dtype=torch.float32),
    ),
}


class Late:
    """Operands in one piece of memory, which a kernel writes late."""

    def __init__(self, drawn: dict[str, Tensor]) -> None:
        self.drawn, places, size = drawn, {}, 0
        for name, x in drawn.items():
            places[name] = size
            size += -(-x.numel() * x.element_size() // 512) * 512
        self.memory = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.operands = {
            name: self.memory[at : at + drawn[name].numel() * drawn[name].element_size()]
            .view(drawn[name].dtype)
            .view(drawn[name].shape)
            for name, at in places.items()
        }
        self.put(drawn)

    def put(self, drawn: dict[str, Tensor]) -> None:
        for name, x in drawn.items():
            self.operands[name].copy_(x)

    def write(self, contents: Tensor) -> None:
        fields = array("q", (self.memory.data_ptr(), contents.data_ptr(), contents.numel() // 8, CLOCKS))
        LATE.on(0).launch(1, 1024, fields, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("name", CASES)
def test_operands_that_the_kernel_ahead_writes_late(name):
    assert is_off() or wait_for_native_calls()
    one = CASES[name]
    fixed = {argument: draw() for argument, draw in one.fixed.items()}

    def results(operands: dict[str, Tensor]) -> list[Tensor]:
        found = one.function(**operands, **fixed, **one.options)
        return [x for x in (found if isinstance(found, tuple) else [found]) if x is not None]

    with providers(*one.providers):
        late = Late({argument: draw() for argument, draw in one.draw.items()})
        right = late.memory.clone()
        for _ in range(6):
            results(late.operands)
        late.memory.copy_(right)  # which calls in place have changed
        with in_python():
            expected = [x.clone() for x in results(late.operands)]
        for _ in range(5):
            late.put({argument: draw() for argument, draw in one.draw.items()})
            torch.cuda.synchronize()
            late.write(right)
            found = results(late.operands)
            torch.cuda.synchronize()
            assert all(map(torch.equal, map(bits, found), map(bits, expected)))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_what_does_not_wait_reads_what_was_there():
    """So the kernel ahead is late indeed."""
    memory, right, read = (torch.full((64,), number, device="cuda") for number in (1, 2, 0))
    stream = torch.cuda.current_stream().cuda_stream
    fields = array("q", (read.data_ptr(), memory.data_ptr(), 0, 0))
    attribute = Attribute(OVERLAPS, 0, (1,))
    config = Config((1, 1, 1), (32, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
    function = ctypes.c_void_p(AT_ONCE.on(0)._function)  # compiled by now
    given = (ctypes.c_void_p * 1)(fields.buffer_info()[0])
    late = LATE.on(0)
    torch.cuda.synchronize()
    late.launch(1, 1024, array("q", (memory.data_ptr(), right.data_ptr(), 64, CLOCKS)), stream)
    assert not nvrtc._driver().cuLaunchKernelEx(ctypes.byref(config), function, given, None)
    torch.cuda.synchronize()
    assert int(read[0]) == 1
    assert int(memory[0]) == 2
