"""A helper process's program: compiles FlashAttention-4's functions of one kind, without a GPU.

It calls `flash_attn.cute` with tensors without memory, and keeps what that compiles and what it would call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_sdpa.attention.flash4.programs import (
    BEGINS_KV,
    BEGINS_Q,
    CAUSAL,
    LENGTHS,
    PAGE_TABLE,
    BackwardTiles,
    Kind,
    Window,
    program,
)
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.offline.function_compiler import answer, library_of
from cudnn_sdpa.plans.function_plan import Argument, NumberArgument, TensorArgument

#: Set before `flash_attn.cute` is imported: it asks no GPU.
ENVIRONMENT = {
    "FLASH_ATTENTION_ARCH": "sm_90",
    "CUTE_DSL_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
}

#: The page size of the example. With pages of one tile, tensor copies would read slots behind a sequence's last key:
#: its other way of loading reads none of them, of pages of any size, and has zeros in their place.
_PAGE_SIZE = 48

#: The numbers of the example, by operand.
_NUMBERS = {"scale": 0.34375, "softcap": 21.25}


class Compiled:
    """The functions that were compiled, in the order of their calls, and each call's arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def cache(self) -> dict[Any, Any]:
        """A cache of compiled functions in which calls are kept, and not made."""
        made = self

        class Cache(dict[Any, Any]):
            def __setitem__(self, key: Any, function: Any) -> None:
                super().__setitem__(key, lambda *arguments: made.calls.append((function, arguments)))

        return Cache()


def compile_kind(kind: Kind) -> dict[str, bytes]:
    """The functions of a kind, each as a shared library."""
    from flash_attn.cute import interface

    compiled, window = Compiled(), window_of(kind)
    interface.is_fake_mode = lambda: False  # or nothing would be called
    for function in (
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        interface._bwd_preprocess,
        interface._bwd_postprocess_convert,
    ):
        function.compile_cache = compiled.cache()
    with FakeTensorMode():
        tensors = example(kind)
        layouts = {name: TensorLayout.of(x) for name, x in tensors.items()}
        if Kind.of(layouts, window) != kind:
            raise ValueError(f"the example is {Kind.of(layouts, window)}")
        _call(interface, tensors, kind, window)
        expected = program(layouts, window).calls
        found = [arguments for _, arguments in compiled.calls]
        _compare([call.arguments for call in expected], found, tensors)
    return {call.function: library_of(function) for call, (function, _) in zip(expected, compiled.calls, strict=True)}


def window_of(kind: Kind) -> Window:
    return CAUSAL if kind.is_causal else (7 if kind.has_left else None, 5 if kind.has_right else None)


def example(kind: Kind) -> dict[str, Tensor]:
    """Operands of a call of this kind, by name: (B, H, S, D), (T, H, D) of packed sequences, or (pages, H, S, D)."""
    tiles, dtype = BackwardTiles.of(kind.dim, window_of(kind)), getattr(torch, kind.dtype)
    batch, heads_kv = 2, 3
    heads, sq = heads_kv * kind.group, tiles.queries - 8 if kind.few_queries else 520
    skv = tiles.keys - 8 if kind.few_keys else 400

    def dense(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").transpose(1, 2)

    def rows(heads: int, length: int, dim: int) -> Tensor:
        if kind.is_packed:
            return torch.empty(length, heads, dim, dtype=dtype, device="cuda")
        return dense(batch, length, heads, dim)

    made = {"q": rows(heads, sq, kind.dim)}
    for name, dim in (("k", kind.dim), ("v", kind.dim_v)):
        made[name] = dense(40, _PAGE_SIZE, heads_kv, dim) if kind.is_on_pages else rows(heads_kv, skv, dim)
    made["out"] = rows(heads, sq, kind.dim_v)
    for name, shape in _sequences(kind, batch).items():
        made[name] = torch.empty(shape, dtype=torch.int32, device="cuda")
    if kind.has_lse:
        made["lse"] = torch.empty((heads, sq) if kind.is_packed else (batch, heads, sq, 1), device="cuda")
    if kind.is_capped:
        made["softcap"] = torch.empty(1, 1, 1, 1)
    if kind.has_sinks:
        made["sink"] = torch.empty(1, heads, 1, 1, device="cuda")
    if kind.is_backward:
        made["grad_out"] = rows(heads, sq, kind.dim_v)
        made |= {f"grad_{name}": torch.empty_like(made[name]) for name in "qkv"}
    return made


def _sequences(kind: Kind, batch: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what says where sequences are."""
    if kind.is_on_pages:
        return {BEGINS_Q: (batch + 1,), LENGTHS: (batch,), PAGE_TABLE: (batch, 9)}
    return {BEGINS_Q: (batch + 1,), BEGINS_KV: (batch + 1,)} if kind.is_packed else {}


def _call(interface: Any, tensors: Mapping[str, Tensor], kind: Kind, window: Window) -> None:
    """Calls FlashAttention-4 as its own functions with gradients do."""
    rows = {name: x.transpose(1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
    lse = (tensors["lse"] if kind.is_packed else tensors["lse"].squeeze(3)) if kind.has_lse else None
    left, right = (None, None) if kind.is_causal else window
    more: dict[str, Any] = {"window_size_left": left, "window_size_right": right, "causal": kind.is_causal}
    more["softmax_scale"] = _NUMBERS["scale"]
    given_as = {BEGINS_Q: "cu_seqlens_q", BEGINS_KV: "cu_seqlens_k", LENGTHS: "seqused_k", PAGE_TABLE: "page_table"}
    more |= {argument: tensors[name] for name, argument in given_as.items() if name in tensors}
    if kind.is_capped:
        import cutlass

        cap, slope = soft_cap()
        more |= {"score_mod": cap, "aux_scalars": (cutlass.Float32(_NUMBERS["softcap"]),)}
        more |= {"score_mod_bwd": slope} if kind.is_backward else {}
    if kind.is_backward:
        given = [rows[name] for name in ("q", "k", "v", "out", "grad_out")]
        interface._flash_attn_bwd(*given, lse, dq=rows["grad_q"], dk=rows["grad_k"], dv=rows["grad_v"], **more)
    else:
        sinks = tensors["sink"].view(-1) if kind.has_sinks else None
        given = [rows[name] for name in "qkv"]
        interface._flash_attn_fwd(*given, out=rows["out"], lse=lse, learnable_sink=sinks, **more)


def soft_cap() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions of scores: the soft cap, and its gradient. Those of FlashAttention-4 have the cap compiled in.

    The hyperbolic tangent is computed from the exponential, as the approximate one of the GPU's instruction is off by
    2^-11, which a cap multiplies.
    """
    from cutlass import cute

    @cute.jit
    def tanh(x: Any) -> Any:
        return 1.0 - 2.0 / (1.0 + cute.math.exp(2.0 * x, fastmath=True))  # type: ignore[attr-defined]

    @cute.jit
    def cap(scores: Any, batch: Any, head: Any, *, aux_scalars: Any, **places: Any) -> Any:  # noqa: ARG001
        return aux_scalars[0] * tanh(scores / aux_scalars[0])

    @cute.jit
    def slope(grad: Any, scores: Any, batch: Any, head: Any, *, aux_scalars: Any, **places: Any) -> Any:  # noqa: ARG001
        capped = tanh(scores / aux_scalars[0])
        return grad * (1.0 - capped * capped)

    return cap, slope


def _compare(
    expected: Sequence[Sequence[Argument]], found: Sequence[Sequence[Any]], tensors: Mapping[str, Tensor]
) -> None:
    """Raises ValueError unless both are the same calls: the version then passes other arguments."""
    storages = {x.untyped_storage()._cdata: name for name, x in tensors.items()}
    made: dict[int, int] = {}  # storages of the workspace, and their offsets
    where = "a call"
    if len(expected) != len(found):
        raise ValueError(f"{len(found)} functions are called instead of {len(expected)}")

    def same(one: Argument, other: Any) -> bool:
        if isinstance(one, TensorArgument):
            if not isinstance(other, Tensor):
                return False
            storage = other.untyped_storage()._cdata
            owner = storages.get(storage, "")
            is_same = owner == one.operand and (owner != "" or made.setdefault(storage, one.offset) == one.offset)
            return is_same and (tuple(other.shape), other.stride(), other.dtype) == (one.shape, one.stride, one.dtype)
        if isinstance(one, NumberArgument):
            value = getattr(other, "value", other)  # a number of CuTe's, or of Python's
            return isinstance(value, float) and value == _NUMBERS[one.operand]
        if isinstance(one, tuple):
            return isinstance(other, tuple) and len(one) == len(other) and all(map(same, one, other))
        return type(one) is type(other) and one == other

    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if len(ours) != len(theirs):
            raise ValueError(f"function {number} gets {len(theirs)} arguments instead of {len(ours)}")
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            where = f"argument {place} of function {number}"
            if not same(one, other):
                raise ValueError(f"{where} is {_described(other)} instead of {one}")


def _described(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"a tensor {tuple(argument.shape)} with strides {argument.stride()} in {argument.dtype}"
    return repr(argument)


def main() -> None:
    answer(lambda kind: compile_kind(Kind(*kind)))
