"""One example of each operation: its tensors, its options, and what it computes in float64.

A new operation, or a new option that changes how a call is made, gets an example here; every hazard of the contract is
then tested with it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_gpu import Compute
from float64_reference import (
    ACTIVATIONS,
    attend,
    attend_packed,
    attend_packed_on_pages,
    gradients_of_a_part,
    layer_norm,
    rms_norm,
    rope,
    silu,
)
from graph_interpreter import Operands, evaluate
from sample_modules import sample
from torch import Tensor

import cudnn_sdpa
from cudnn_sdpa import Fp8BackwardScales, Fp8Scales, kernels
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.plans.cache import plan_cache

HALF = torch.bfloat16
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Example:
    """A call of one operation.

    Attributes:
        function: The public function.
        make: Draws its tensors, by argument.
        exact: The result in float64 for tensors in float64, differentiable.
        compute: What its plans compute, if that is not the graph of their builder.
        differentiable: The arguments that have gradients; none, for operations without gradients.
        options: The other arguments.
        casts: The tensors that autocast casts, if not all inputs.
        is_attention: Whether it has the arguments and results that all attention has: `return_lse`, `out`,
            `deterministic`, and the options of the softmax.
        loops: Whether `torch.vmap` may run it, if it is no such attention.
        has_double_backward: Whether its gradients can be differentiated.
        is_random: Whether each call draws random numbers.
        writes: Whether it writes to a tensor of the caller.
        is_planned: Whether its launch has a plan of the plan cache.
        is_composed: Whether it is composed of operations around copies of its inputs, which autograd saves in place of
            them; `torch.compile` breaks its graph there.
        operators: How many operators PyTorch sees where it must see them.
        leading: Name of the first tensor, where none has a gradient.
        precision: Largest error of results in FP8 and of gradients, relative to all of them; None for others.
    """

    function: Callable[..., Any]
    make: Callable[[], dict[str, Tensor]]
    exact: Callable[..., Tensor]
    compute: Compute | None = None
    differentiable: tuple[str, ...] = ("q", "k", "v")
    options: dict[str, Any] = field(default_factory=dict)
    casts: tuple[str, ...] | None = None
    is_attention: bool = True
    loops: bool = False
    has_double_backward: bool = False
    leading: str = "q"
    precision: float | None = None
    is_random: bool = False
    writes: bool = False
    is_planned: bool = True
    is_composed: bool = False
    operators: int = 1

    @property
    def first(self) -> str:
        return self.differentiable[0] if self.differentiable else self.leading

    @property
    def last(self) -> str:
        """Name of the last tensor with a gradient."""
        return self.differentiable[-1]

    @property
    def inputs(self) -> list[str]:
        """Names of all tensors of floating-point numbers."""
        return [name for name, x in self.make().items() if x.is_floating_point()]

    @property
    def cast(self) -> list[str]:
        """Names of the tensors that autocast casts."""
        return self.inputs if self.casts is None else list(self.casts)

    def tensors(self, *, grad: bool = False) -> dict[str, Tensor]:
        """New tensors; leaves that require grad where they can."""
        made = self.make()
        return {name: x.requires_grad_() if grad and name in self.differentiable else x for name, x in made.items()}

    def __call__(self, tensors: dict[str, Tensor], **others: Any) -> Any:
        return self.function(**tensors, **{**self.options, **others})

    def gradients(self, tensors: dict[str, Tensor], grad_out: Tensor | None = None, **others: Any) -> dict[str, Tensor]:
        """The gradients of the leaves that require grad, by name."""
        out = self(tensors, **others)
        wanted = {name: x for name, x in tensors.items() if x.requires_grad}
        grad_out = torch.ones_like(out) if grad_out is None else grad_out
        return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), grad_out), strict=True))

    def warm_up(self) -> None:
        """Makes calls until the next one is known, with gradients and without."""
        for _ in range(6 if self.differentiable else 0):  # those of graph functions are watched before they are known
            self.gradients(self.tensors(grad=True))
        for _ in range(4):
            self(self.tensors())

    def assert_out(self, found: Tensor, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            wanted = self.exact(**_in_float64(tensors), **self.options)
        if self.precision is not None:
            off = (found.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-3)
            assert off < self.precision, f"the result is {off:.2%} off"
            return
        torch.testing.assert_close(found.detach().double(), wanted, rtol=2e-2, atol=2e-2)

    def assert_gradients(
        self, found: dict[str, Tensor], tensors: dict[str, Tensor], grad_out: Tensor | None = None
    ) -> None:
        """Asserts that gradients are right, and lie in memory as their tensors do."""
        leaves = _in_float64(tensors)
        wanted = [leaves[name].requires_grad_() for name in found]
        with torch.enable_grad():
            out = self.exact(**leaves, **self.options)
        exact = torch.autograd.grad(out, wanted, torch.ones_like(out) if grad_out is None else grad_out.double())
        for (name, gradient), of_exact in zip(found.items(), exact, strict=True):
            off = (gradient.double() - of_exact).norm() / of_exact.norm().clamp_min(1e-3)
            assert off < max(self.precision or 0.0, 3e-2), f"the gradient of {name} is {off:.2%} off"
            assert gradient.dtype == tensors[name].dtype

    def plans(self) -> int:
        return plan_cache.info().builds


def _in_float64(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double() if x.is_floating_point() else x for name, x in copy.copy(tensors).items()}


# Examples.


def heads(*shape: int) -> Tensor:
    """Random numbers in memory (B, S, H, D), seen as (B, H, S, D)."""
    batch, number, tokens, dim = shape
    return torch.randn(batch, tokens, number, dim).to(HALF).transpose(1, 2)


def dense() -> dict[str, Tensor]:
    """Grouped heads, and values of another size."""
    return {"q": heads(2, 4, 9, 16), "k": heads(2, 2, 13, 16), "v": heads(2, 2, 13, 24)}


def with_sinks() -> dict[str, Tensor]:
    return {**dense(), "sinks": torch.randn(4)}


def with_mask() -> dict[str, Tensor]:
    return {**dense(), "attn_mask": torch.randn(2, 1, 9, 13).to(HALF)}


def with_lengths() -> dict[str, Tensor]:
    return {**dense(), "seq_lens_kv": torch.tensor([13, 5], dtype=torch.int32)}


def one_query() -> dict[str, Tensor]:
    """A decode step on a cache of fixed size."""
    return {**with_lengths(), "q": torch.randn(2, 4, 1, 16).to(HALF)}


def exact_dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attend(q, k, v, **options)[0]


def named_as_pytorchs() -> dict[str, Tensor]:
    """What the drop-in passes on as it is."""
    return dict(zip(PYTORCHS, dense().values(), strict=True))


def without_batch() -> dict[str, Tensor]:
    """What the drop-in reshapes: one key head for all query heads, and a mask for each head."""
    shapes = {"query": (4, 9, 16), "key": (1, 13, 16), "value": (1, 13, 24), "attn_mask": (4, 9, 13)}
    return {name: torch.randn(shape).to(HALF) for name, shape in shapes.items()}


def exact_drop_in(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """With the dimensions that the call has."""
    options.pop("enable_gqa", None)
    four = (x if x.dim() == 4 else x.unsqueeze(0) for x in (query, key, value))
    out = attend(*four, attn_mask=attn_mask, **options)[0]
    return out if query.dim() == 4 else out.squeeze(0)


#: Of how many consecutive weights dropout drops one, in the example.
ONE_OF = 4

#: Seed and offset of all its forward passes.
drawn: set[tuple[int, int]] = set()


def kept_weights(scores: Tensor) -> Tensor:
    """Those that the example's dropout keeps, whatever the random numbers are."""
    batch, head, row, column = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    return (2 * batch + head + 3 * row + column) % ONE_OF != 0


def attention_with_dropout(key: PlanKey, x: Operands) -> Sequence[Tensor]:
    """Attention whose plans drop always the same weights; backward passes get the numbers of a forward pass."""

    def share(p: float, seed: int, offset: int, scores: Tensor, _: object) -> Tensor:
        assert p == 1 / ONE_OF
        assert seed != offset
        assert (seed, offset) == (int(x["seed"]), int(x["offset"]))
        if key.name == "sdpa_forward":
            drawn.add((seed, offset))
        assert (seed, offset) in drawn
        return kept_weights(scores) / (1 - p)

    assert key.option_values["dropout_p"] == 1 / ONE_OF
    return evaluate(find_operation(key.operation), key, x, dropout=share)


def exact_dropout(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attend(q, k, v, kept=kept_weights(q @ k[:, :1].mT), **options)[0]


def packed() -> dict[str, Tensor]:
    """Five sequences; the second has no query, the fourth no key, and behind the last one are rows of none."""
    return {
        "q": torch.randn(23, 4, 16).to(HALF),
        "k": torch.randn(31, 2, 16).to(HALF),
        "v": torch.randn(31, 2, 24).to(HALF),
        "cu_seqlens_q": torch.tensor([0, 7, 7, 11, 14, 21], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 9, 12, 20, 20, 29], dtype=torch.int32),
    }


def packed_with_sinks() -> dict[str, Tensor]:
    return {**packed(), "sinks": torch.randn(4)}


def self_attention() -> dict[str, Tensor]:
    """The same offsets for queries and keys: one tensor."""
    rows = {name: torch.randn(17, 4, 16).to(HALF) for name in "qkv"}
    offsets = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
    return {**rows, "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}


def exact_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    **options: Any,
) -> Tensor:
    del max_seqlen_q, max_seqlen_kv
    return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_kv, **options)[0]


#: What a backward function is given of the forward pass.
OF_FORWARD = ("grad_out", "out", "lse")


def of_gradients(tensors: dict[str, Tensor], of_values: Tensor) -> dict[str, Tensor]:
    """The tensors of a backward call for a part of the keys: the LSE is larger than that of these keys."""
    rows = tensors["q"].shape[:-1]
    made = {name: heads(*rows, 24) if len(rows) == 3 else torch.randn(*rows, 24).to(HALF) for name in OF_FORWARD[:2]}
    return {**tensors, **made, "lse": of_values + torch.rand(rows)}


def dense_gradients() -> dict[str, Tensor]:
    return of_gradients(with_sinks(), torch.tensor(4.0))


def gradients_with_mask() -> dict[str, Tensor]:
    return of_gradients(with_mask(), torch.tensor(4.0))


def packed_gradients() -> dict[str, Tensor]:
    """The output is zeros behind the last sequence, as attention gives it."""
    found = of_gradients(packed_with_sinks(), torch.tensor(4.0))
    found["out"][21:] = 0
    return found


def run_backward(function: Callable[..., Any]) -> Callable[..., Tensor]:
    """All gradients, one after the other."""

    def run(**given: Any) -> Tensor:
        found = [x for x in function(**given) if x is not None]
        return torch.cat([x.contiguous().flatten().to(found[0].dtype) for x in found])

    return run


def exact_backward(grad_out: Tensor, out: Tensor, lse: Tensor, wanted: Any = None, **given: Any) -> Tensor:
    """In the order of the function's results."""
    tensors = {name: given.pop(name) for name in (*DIFFERENTIABLE, "seq_lens_kv") if name in given}
    found = gradients_of_a_part(tensors, grad_out, out, lse, **given)
    return torch.cat([found[name].flatten() for name in DIFFERENTIABLE if name in found and name in (wanted or found)])


def exact_packed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> Tensor:
    del max_seqlen_q, max_seqlen_kv
    options.setdefault("causal_alignment", "bottom_right")
    ends_q, ends_kv = cu_seqlens_q.tolist(), cu_seqlens_kv.tolist()
    whole = {name: torch.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks))}
    for a, b, c, d in zip(ends_q, ends_q[1:], ends_kv, ends_kv[1:], strict=False):
        rows = {"q": slice(a, b), "k": slice(c, d), "v": slice(c, d)}
        one = {n: x[rows[n]].transpose(0, 1).unsqueeze(0) for n, x in (("q", q), ("k", k), ("v", v))}
        given = (x[a:b].transpose(0, 1).unsqueeze(0) for x in (grad_out, out, lse))
        for name, gradient in gradients_of_a_part({**one, "sinks": sinks}, *given, **options).items():
            if name == "sinks":
                whole[name] += gradient
            else:
                whole[name][rows[name]] = gradient[0].transpose(0, 1)
    return torch.cat([x.flatten() for x in whole.values()])


def packed_on_pages() -> dict[str, Tensor]:
    """A decode, a draft, an idle sequence and a chunk, on pages of six tokens, with tokens of none around them."""
    table = torch.tensor([[3, 9, 1], [6, 99, 4], [-7, -7, -7], [8, 5, 2**30]], dtype=torch.int32)
    return {
        "q": torch.randn(15, 4, 16).to(HALF),
        "k_pages": torch.randn(11, 6, 2, 16).to(HALF),
        "v_pages": torch.randn(11, 6, 2, 24).to(HALF),
        "page_table": table,
        "seq_lens_kv": torch.tensor([17, 5, 9, 11], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([1, 2, 5, 5, 13], dtype=torch.int32),
    }


def packed_on_latent_pages() -> dict[str, Tensor]:
    """Values are the first numbers of their keys, as in multi-head latent attention."""
    pages = torch.randn(11, 6, 1, 576).to(HALF)
    latent = {"q": torch.randn(15, 4, 576).to(HALF), "k_pages": pages, "v_pages": pages[..., :512]}
    return {**packed_on_pages(), **latent}


def packed_on_own_pages() -> dict[str, Tensor]:
    """Values on pages of their own, keys and values in the heads' order, and sinks."""
    found = packed_on_pages()
    found |= {name: found[name].transpose(1, 2).contiguous() for name in ("k_pages", "v_pages")}
    wide = torch.full((4, 8), 10, dtype=torch.int32)
    wide[:, 2:5] = found["page_table"].flip(0) % 11
    return {**found, "page_table_v": wide[:, 2:5], "sinks": torch.randn(4)}


def packed_on_fp8_pages() -> dict[str, Tensor]:
    """Pages in FP8, with a scale for each head of keys and one for values, and a tree of drafts."""
    found = packed_on_pages()
    found |= {name: torch.randn(11, 6, 2, 16).to(FP8) for name in ("k_pages", "v_pages")}
    found |= {"k_scale": torch.tensor([0.6, 1.7]), "v_scale": torch.tensor([1.4])}
    return {**found, "tree_mask": torch.rand(15, 9) < 0.5}


def exact_packed_on_pages(max_seqlen_q: int, batch_invariant: bool = False, **given: Any) -> Tensor:
    del max_seqlen_q, batch_invariant
    return attend_packed_on_pages(**given)[0]


def paged() -> dict[str, Tensor]:
    """Four sequences on pages of four tokens; the second has no key, and page ids behind the last key are wild."""
    table = torch.tensor([[3, 9, 1], [-7, 99, 4], [0, 2, 2**30], [8, 5, 10]], dtype=torch.int32)
    return {
        "q": torch.randn(4, 4, 1, 16).to(HALF),
        "k_pages": torch.randn(11, 2, 4, 16).to(HALF),
        "v_pages": torch.randn(11, 2, 4, 24).to(HALF),
        "page_table": table,
        "seq_lens_kv": torch.tensor([9, 0, 5, 12], dtype=torch.int32),
    }


def pages_of_tokens() -> dict[str, Tensor]:
    """A chunk of queries, some of them absent, on pages that lie token by token."""
    found = paged()
    found |= {name: found[name].transpose(1, 2).contiguous() for name in ("k_pages", "v_pages")}
    found["q"] = heads(4, 4, 9, 16)
    found["seq_lens_kv"] = torch.tensor([11, 0, 5, 12], dtype=torch.int32)
    return {**found, "seq_lens_q": torch.tensor([9, 4, 0, 7], dtype=torch.int32)}


def paged_with_sinks() -> dict[str, Tensor]:
    """Three sequences, for which the plan has four rows, with several queries each; tables of two row strides."""
    found = {name: x[:3] if x.shape[0] == 4 else x for name, x in paged().items()}
    found |= {"q": heads(3, 4, 3, 16), "seq_lens_kv": torch.tensor([9, 0, 7], dtype=torch.int32)}
    wide = torch.full((3, 8), 10, dtype=torch.int32)
    wide[:, 2:5] = found["page_table"].flip(1) % 11
    return {**found, "page_table_v": wide[:, 2:5], "sinks": torch.randn(4)}


def paged_in_fp8() -> dict[str, Tensor]:
    """Several queries on FP8 pages of six tokens, with a scale for each head of keys and one for values."""
    found = {name: x for name, x in pages_of_tokens().items() if name != "q"}
    found |= {name: torch.randn(11, 2, 6, dim).to(FP8) for name, dim in (("k_pages", 16), ("v_pages", 32))}
    found |= {"q": heads(4, 4, 3, 16), "seq_lens_q": torch.tensor([3, 1, 0, 2], dtype=torch.int32)}
    return {**found, "k_scale": torch.tensor([0.6, 1.7]), "v_scale": torch.tensor([1.4])}


def exact_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens_kv: Tensor,
    *,
    page_table_v: Tensor | None = None,
    page_layout: str,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    **options: Any,
) -> Tensor:
    gathered = []
    tables = page_table, page_table if page_table_v is None else page_table_v
    for pages, table, scale in zip((k_pages, v_pages), tables, (k_scale, v_scale), strict=True):
        in_order = pages if page_layout == "HND" else pages.transpose(1, 2)
        if scale is not None:
            in_order = in_order.double() * scale.double().view(-1, 1, 1)
        gathered.append(in_order[table.clamp(0, len(pages) - 1).long()].transpose(1, 2).flatten(2, 3))
    mask = {"is_causal": True, "causal_alignment": "bottom_right"}
    return attend(q, *gathered, seq_lens_kv=seq_lens_kv, **{**mask, **options})[0]


def appended(k: Tensor, v: Tensor, slot_mapping: Tensor, **options: Any) -> Tensor:
    """New pages, K and V side by side, token by token, after `append_paged_kv`."""
    like = {"dtype": k.dtype, "device": k.device} if isinstance(k, Tensor) else {}
    pages = torch.zeros(4, 5, 2, 40, **like)
    cudnn_sdpa.append_paged_kv(k, v, *pages.split((16, 24), -1), slot_mapping, **options)
    return pages


def exact_appended(k: Tensor, v: Tensor, slot_mapping: Tensor, *, page_layout: str) -> Tensor:
    assert page_layout == "NHD"
    slots = torch.zeros(20, 2, 40, dtype=k.dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            slots[slot] = torch.cat([k[token], v[token]], -1)
    return slots.view(4, 5, 2, 40)


def rotated_and_appended(slot_mapping: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Rotated queries, and new pages, K and V side by side, after `rope_append_paged_kv`."""
    like = {"dtype": v.dtype, "device": v.device} if isinstance(v, Tensor) else {}
    pages = torch.zeros(4, 5, 2, 32, **like)
    halves = dict(zip(("k_pages", "v_pages"), pages.split(16, -1), strict=True))
    q = cudnn_sdpa.rope_append_paged_kv(v=v, slot_mapping=slot_mapping, **given, **halves)
    return torch.cat([q.flatten(), pages.flatten()])


def exact_rotated_and_appended(slot_mapping: Tensor, v: Tensor, *, page_layout: str, **given: Any) -> Tensor:
    q, k = rope(**given)
    pages = exact_appended(k, torch.cat([v, v[..., :8]], -1), slot_mapping, page_layout=page_layout)[..., :32]
    return torch.cat([q.flatten(), pages.flatten()])


def fp8_tensors(queries: int = 16) -> dict[str, Tensor]:
    """Grouped heads; Hopper's gradients in FP8 have head dim 128."""
    shapes = {"q": (2, 4, queries, 128), "k": (2, 2, 13, 128), "v": (2, 2, 13, 128)}
    return {name: heads(*shape).to(FP8) for name, shape in shapes.items()}


def with_scales(kind: type, tensors: dict[str, Tensor], **values: float) -> dict[str, Tensor]:
    """The tensors, and scales by the names that messages call them."""
    return tensors | {f"scales.{name}": torch.tensor([values[name]]) for name in kind._fields}


FORWARD = {
    "descale_q": 0.7,
    "descale_k": 1.3,
    "descale_v": 0.6,
    "descale_s": 1 / 400,
    "scale_s": 400.0,
    "scale_o": 30.0,
}


def fp8() -> dict[str, Tensor]:
    return with_scales(Fp8Scales, fp8_tensors(), **FORWARD)


def fp8_on_pages() -> dict[str, Tensor]:
    """Pages of four tokens, some ids of which are wild; the second sequence has no key, the third two queries less."""
    pages = {name: torch.randn(11, 2, 4, 128).to(FP8) for name in "kv"}
    table = torch.tensor([[3, 9, 1], [-7, 99, 4], [0, 2, 2**30]], dtype=torch.int32)
    return {
        **with_scales(Fp8Scales, {"q": heads(3, 4, 7, 128).to(FP8), **pages}, **FORWARD),
        "page_table": table,
        "page_table_v": table.flip(1) % 11,
        "seq_lens_q": torch.tensor([7, 7, 5], dtype=torch.int32),
        "seq_lens_kv": torch.tensor([12, 0, 5], dtype=torch.int32),
    }


def run_fp8(**given: Any) -> Tensor:
    """The output of `sdpa_fp8`."""
    scales = Fp8Scales(*(given.pop(f"scales.{name}") for name in Fp8Scales._fields))
    return cudnn_sdpa.sdpa_fp8(**given, scales=scales).out


def exact_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    page_table: Tensor | None = None,
    page_table_v: Tensor | None = None,
    return_lse: bool = False,
    **others: Any,
) -> Tensor:
    del return_lse
    scales = {name: others.pop(f"scales.{name}") for name in Fp8Scales._fields}
    if page_table is not None:
        assert page_table_v is not None
        tables = zip((k, v), (page_table, page_table_v), strict=True)
        k, v = (x[table.clamp(0, len(x) - 1).long()].transpose(1, 2).flatten(2, 3) for x, table in tables)
    of_weights = scales["scale_s"] * scales["descale_s"] * scales["descale_v"]
    return attend(q * scales["descale_q"], k * scales["descale_k"], v * of_weights, **others)[0] * scales["scale_o"]


BACKWARD = {
    "descale_q": 0.7,
    "descale_k": 1.3,
    "descale_v": 0.6,
    "descale_o": 1.4,
    "descale_do": 0.8,
    "descale_s": 1 / 400,
    "descale_dp": 1 / 90,
    "scale_s": 400.0,
    "scale_dp": 90.0,
    "scale_dq": 25.0,
    "scale_dk": 15.0,
    "scale_dv": 20.0,
}


def in_16_bits() -> dict[str, Tensor]:
    """Tensors that `fp8_attention` quantizes; Hopper's gradients in FP8 have head dim 128."""
    return {"q": heads(2, 4, 16, 128), "k": heads(2, 2, 13, 128), "v": heads(2, 2, 13, 128)}


def fp8_gradients(*, queries: int = 16) -> dict[str, Tensor]:
    tensors = fp8_tensors(queries)
    tensors |= {name: heads(2, 4, queries, 128).to(FP8) for name in ("out", "grad_out")}
    return with_scales(Fp8BackwardScales, {**tensors, "lse": 5 + torch.rand(2, 4, queries)}, **BACKWARD)


def fp8_gradients_of_lengths() -> dict[str, Tensor]:
    """Nine queries, for which Hopper's plan has sixteen."""
    return {**fp8_gradients(queries=9), "seq_lens_kv": torch.tensor([13, 5], dtype=torch.int32)}


def run_fp8_backward(**given: Any) -> Tensor:
    """All gradients of `sdpa_fp8_backward`, one after the other."""
    scales = Fp8BackwardScales(*(given.pop(f"scales.{name}") for name in Fp8BackwardScales._fields))
    found = cudnn_sdpa.sdpa_fp8_backward(**given, scales=scales)
    return torch.cat([x.contiguous().view(torch.uint8).flatten() for x in found[:3]]).view(FP8)


def exact_fp8_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    *,
    seq_lens_kv: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """By the formulas of its documentation."""
    scale = {name: others.pop(f"scales.{name}") for name in Fp8BackwardScales._fields}
    group, factor = q.shape[1] // k.shape[1], others.pop("scale", q.shape[3] ** -0.5)
    assert not others
    k, v = ((x * scale[name]).repeat_interleave(group, 1) for x, name in ((k, "descale_k"), (v, "descale_v")))
    q, grad_out, out = q * scale["descale_q"], grad_out * scale["descale_do"], out * scale["descale_o"]
    weights = torch.exp(q @ k.mT * factor - lse.unsqueeze(-1))
    if seq_lens_kv is not None:
        absent = torch.arange(k.shape[2], device=k.device) >= seq_lens_kv.view(-1, 1, 1, 1)
        weights = weights.masked_fill(absent, 0.0)
    of_scores = weights * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * factor
    found = {
        "scale_dq": of_scores @ k,
        "scale_dk": (of_scores.mT @ q).unflatten(1, (-1, group)).sum(2),
        "scale_dv": (weights.mT @ grad_out).unflatten(1, (-1, group)).sum(2),
    }
    return torch.cat([(x * scale[name]).flatten() for name, x in found.items()])


def of_any_dim() -> dict[str, Tensor]:
    """Grouped heads in float32, whose head dim cuDNN does not take, and keys in another memory order."""
    return {
        "q": torch.randn(2, 4, 9, 17),
        "k": torch.randn(2, 13, 2, 17).transpose(1, 2),
        "v": torch.randn(2, 2, 13, 17),
    }


def in_vectors() -> dict[str, Tensor]:
    """What kernels read 16 bytes at a time, and a mask that is broadcast."""
    rows = {name: x[:1, :, :, :16].clone() for name, x in dense().items()}
    return {**rows, "mask": torch.randn(4, 1, 13).to(HALF)}


def with_boolean_mask() -> dict[str, Tensor]:
    """A mask that leaves the first query no key."""
    rows = {name: x[:1].clone() for name, x in of_any_dim().items()}
    return {**rows, "mask": (torch.arange(13) < torch.arange(9).view(-1, 1)).expand(1, 1, 9, 13)}


def exact_kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    del options["mode"]
    return attend(q, k, v, attn_mask=mask, **options)[0]


def rows(dim: int = 32) -> Tensor:
    return torch.randn(2, 9, dim).to(HALF)


def normalized() -> dict[str, Tensor]:
    return {"x": rows(), "weight": torch.rand(32).to(HALF)}


def with_residual(dim: int = 64) -> dict[str, Tensor]:
    """Rows of 64 elements are added in the norm's kernel, rows of 32 before it."""
    return {"x": rows(dim), "weight": torch.rand(dim).to(HALF), "residual": rows(dim)}


def added_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Tensor:
    """The norm and the sum, in one tensor, so that both have gradients."""
    out, total = cudnn_sdpa.rms_norm(x, weight, residual=residual, **options)
    return torch.cat([out, total], -1)


def exact_added_rms_norm(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Tensor:
    return torch.cat(rms_norm(x, weight, residual=residual, **options), -1)


def with_residual_and_bias() -> dict[str, Tensor]:
    return {**with_residual(), "bias": torch.randn(64).to(HALF)}


def added_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, **options: Any) -> Tensor:
    return torch.cat(cudnn_sdpa.layer_norm(x, weight, bias, residual=residual, **options), -1)


def exact_added_layer_norm(**given: Any) -> Tensor:
    return torch.cat(layer_norm(**given), -1)


def normalized_with_bias() -> dict[str, Tensor]:
    return {**normalized(), "bias": torch.randn(32).to(HALF)}


def for_rotations() -> dict[str, Tensor]:
    """Grouped heads, of which 12 of 16 features are rotated, and weights of norms of their own."""
    angles = 3 * torch.randn(2, 9, 6)
    weights = {name: torch.rand(16).to(HALF) for name in ("q_weight", "k_weight")}
    return {"q": heads(2, 4, 9, 16), "k": heads(2, 2, 9, 16), "cos": angles.cos(), "sin": angles.sin(), **weights}


def packed_for_rotations() -> dict[str, Tensor]:
    """Queries that are normalized, and keys that are not."""
    angles = 3 * torch.randn(7, 8)
    made = {"q": torch.randn(7, 3, 16).to(HALF), "k": torch.randn(7, 2, 16).to(HALF)}
    return {**made, "cos": angles.cos(), "sin": angles.sin(), "q_weight": torch.rand(16)}


def rotated_heads(**given: Any) -> Tensor:
    """Queries and keys in one tensor."""
    return torch.cat(cudnn_sdpa.rope(**given), 1)


def exact_rotated_heads(**given: Any) -> Tensor:
    return torch.cat(rope(**given), 1)


def rotated_in_place(q: Tensor, k: Tensor, **given: Any) -> Tensor:
    """Copies of queries and keys in one tensor, after `rope_`."""
    q, k = (x if not isinstance(x, Tensor) or is_freed(x) else x.clone() for x in (q, k))
    cudnn_sdpa.rope_(q, k, **given)
    return torch.cat([q, k], 1)


def is_freed(x: Tensor) -> bool:
    """Whether a tensor's storage is gone, which PyTorch would read all the same."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    with contextlib.suppress(NotImplementedError):  # sparse tensors, and those within transforms
        return x.untyped_storage().nbytes() == 0
    return False


def for_rotations_in_fp8() -> dict[str, Tensor]:
    return {**for_rotations(), "q_scale": torch.tensor([0.01]), "k_scale": torch.tensor([0.02])}


def rotated_in_fp8(**given: Any) -> Tensor:
    """The values of queries and keys in one tensor."""
    found = cudnn_sdpa.rope_fp8(**given)
    values = [found.q.float() * given["q_scale"], found.k.float() * given["k_scale"]]
    return torch.cat(values, 1).to(given["q"].dtype)


def exact_rotated_in_fp8(q_scale: Tensor, k_scale: Tensor, **given: Any) -> Tensor:
    """Values beyond 448 times the scale become that."""
    pairs = zip(rope(**given), (448 * q_scale, 448 * k_scale), strict=True)
    return torch.cat([torch.clamp(x, -limit, limit) for x, limit in pairs], 1)


def norm_in_fp8(**given: Any) -> Tensor:
    """The values of the norm, and the sum."""
    return _with_sum(cudnn_sdpa.rms_norm_fp8(**given))


def layer_norm_in_fp8(**given: Any) -> Tensor:
    return _with_sum(cudnn_sdpa.layer_norm_fp8(**given))


def _with_sum(found: cudnn_sdpa.NormInFp8) -> Tensor:
    return torch.cat([(found.out.float() * found.scale).to(found.total.dtype), found.total], -1)


def exact_norm_in_fp8(x: Tensor, weight: Tensor, residual: Tensor, **options: Any) -> Tensor:
    return torch.cat(rms_norm(x, weight, residual=residual, **options), -1)


def gated() -> dict[str, Tensor]:
    return {"gate": rows(), "up": rows()}


def exact_silu_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    one, other = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return silu(one) * other


def images() -> dict[str, Tensor]:
    return {
        "x": torch.randn(2, 8, 7, 6).to(HALF).to(memory_format=torch.channels_last),
        "weight": torch.randn(16, 8, 3, 3).to(HALF).to(memory_format=torch.channels_last) / 8,
        "bias": torch.randn(16).to(HALF),
    }


def exact_conv(x: Tensor, *, activation: str | None = None, **given: Any) -> Tensor:
    out: Tensor = getattr(torch.nn.functional, f"conv{x.dim() - 2}d")(x, **given)
    return ACTIVATIONS[activation](out)


def lines() -> dict[str, Tensor]:
    """Channels innermost, as in the output of a linear layer."""
    return {
        "x": torch.randn(2, 12, 8).to(HALF).transpose(1, 2),
        "weight": torch.randn(16, 3, 4).to(HALF).transpose(1, 2) / 4,
        "bias": torch.randn(16).to(HALF),
    }


def volumes() -> dict[str, Tensor]:
    form = torch.channels_last_3d
    return {
        "x": torch.randn(2, 8, 4, 5, 6).to(HALF).to(memory_format=form),
        "weight": torch.randn(16, 8, 3, 3, 3).to(HALF).to(memory_format=form) / 16,
    }


# Operations of a user's: those of docs/add_an_operation.md and docs/add_a_kernel.md.


user_sample = sample("add_an_operation.py")
row_softmax = sample("add_a_kernel/row_softmax.py").row_softmax


def call_of_a_user(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> Tensor:
    """Both results in one tensor, so that both have gradients."""
    return torch.cat(user_sample.add_rms_norm(x, weight, residual, eps), -1)


def kernel_of_a_user(x: Tensor, scale: float) -> Tensor:
    """The squares: what autograd gets from ones, the sums of softmaxes, has no gradient."""
    return row_softmax(x, scale).square()


def exact_of_a_user(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> Tensor:
    return torch.cat(user_sample.in_float64(x, weight, residual, eps), -1)


@cudnn_sdpa.graph_op(reference=lambda x, mask: x * mask)
def masked(g: Any, x: Any, mask: Any) -> Any:
    return g.mul(a=x, b=mask)


def gradients_of_kept(grads: Any, operands: Any, results: Any) -> Any:
    """Those of `kept_above`; the second result is a mask and has none."""
    del operands
    return masked.call(grads[0], results[1])


@cudnn_sdpa.graph_op(
    reference=lambda x, limit: ((x > limit) * x, x > limit),
    backward=gradients_of_kept,
    reads=lambda *_: (False, False),
)
def kept_above(g: Any, x: Any, limit: Any) -> Any:
    """The elements above a limit, and which they are."""
    is_above = g.cmp_gt(input=x, comparison=limit)
    return g.mul(a=x, b=is_above), is_above


def mask_of_a_user(x: Tensor, limit: float) -> Tensor:
    """The first result, whose gradient is that of its squares; the second is of booleans."""
    kept, is_above = kept_above(x, limit)
    assert is_above.dtype is torch.bool
    assert not is_above.requires_grad
    return kept.square()


#: The inputs that can have gradients, in the order of their gradients.
DIFFERENTIABLE = ("q", "k", "v", "attn_mask", "sinks")
PYTORCHS = ("query", "key", "value")
LONGEST = {"max_seqlen_q": 7, "max_seqlen_kv": 9}
LONGEST_OF_BOTH = {"max_seqlen_q": 12, "max_seqlen_kv": 12}
SINKS = ("q", "k", "v", "sinks")
sdpa, sdpa_varlen, sdpa_paged = cudnn_sdpa.sdpa, cudnn_sdpa.sdpa_varlen, cudnn_sdpa.sdpa_paged
sdpa_paged_varlen = cudnn_sdpa.sdpa_paged_varlen

OPERATIONS: dict[str, Example] = {
    "sdpa": Example(sdpa, dense, exact_dense),
    "sdpa, causal, scale": Example(sdpa, dense, exact_dense, options={"is_causal": True, "scale": 0.3}),
    "sdpa, window": Example(
        sdpa, dense, exact_dense, options={"window_size": (5, 1), "causal_alignment": "bottom_right"}
    ),
    "sdpa, sinks": Example(sdpa, with_sinks, exact_dense, differentiable=SINKS),
    "sdpa, mask": Example(sdpa, with_mask, exact_dense, differentiable=("q", "k", "v", "attn_mask")),
    "sdpa, lengths": Example(sdpa, with_lengths, exact_dense),
    "sdpa, one query, lengths": Example(sdpa, one_query, exact_dense),
    "sdpa, softcap": Example(sdpa, dense, exact_dense, options={"softcap": 2.0}),
    "sdpa, ALiBi": Example(sdpa, dense, exact_dense, options={"alibi": True, "is_causal": True}),
    "sdpa, dropout": Example(
        sdpa,
        dense,
        exact_dropout,
        compute=attention_with_dropout,
        options={"dropout_p": 1 / ONE_OF},
        is_random=True,
    ),
    "sdpa, dropout, lengths": Example(
        sdpa,
        with_lengths,
        exact_dropout,
        compute=attention_with_dropout,
        options={"dropout_p": 1 / ONE_OF},
        is_random=True,
    ),
    "scaled_dot_product_attention": Example(
        cudnn_sdpa.scaled_dot_product_attention,
        named_as_pytorchs,
        exact_drop_in,
        differentiable=PYTORCHS,
        options={"is_causal": True, "enable_gqa": True, "scale": 0.3},
        is_attention=False,
        loops=True,
    ),
    "scaled_dot_product_attention, no batch, mask": Example(
        cudnn_sdpa.scaled_dot_product_attention,
        without_batch,
        exact_drop_in,
        differentiable=(*PYTORCHS, "attn_mask"),
        is_attention=False,
        loops=True,
    ),
    "sdpa_varlen": Example(sdpa_varlen, packed, exact_packed, options=LONGEST),
    "sdpa_varlen, self-attention": Example(
        sdpa_varlen, self_attention, exact_packed, options={**LONGEST_OF_BOTH, "is_causal": True, "scale": -0.4}
    ),
    "sdpa_varlen, sinks, window": Example(
        sdpa_varlen,
        packed_with_sinks,
        exact_packed,
        differentiable=SINKS,
        options={**LONGEST, "window_size": (4, 2)},
    ),
    "sdpa_varlen, softcap": Example(
        sdpa_varlen, packed, exact_packed, options={**LONGEST, "softcap": 2.0, "is_causal": True}
    ),
    "sdpa_backward": Example(
        run_backward(cudnn_sdpa.sdpa_backward),
        dense_gradients,
        exact_backward,
        differentiable=(),
        options={"window_size": (5, 1), "causal_alignment": "bottom_right"},
        is_attention=False,
        precision=0.01,
    ),
    "sdpa_backward, mask, some": Example(
        run_backward(cudnn_sdpa.sdpa_backward),
        gradients_with_mask,
        exact_backward,
        differentiable=(),
        options={"wanted": ("q", "attn_mask")},
        is_attention=False,
        precision=0.01,
    ),
    "sdpa_varlen_backward": Example(
        run_backward(cudnn_sdpa.sdpa_varlen_backward),
        packed_gradients,
        exact_packed_backward,
        differentiable=(),
        options={**LONGEST, "is_causal": True},
        is_attention=False,
        precision=0.01,
    ),
    "sdpa_paged": Example(
        sdpa_paged,
        paged,
        exact_paged,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "HND"},
    ),
    "sdpa_paged, a chunk": Example(
        sdpa_paged,
        pages_of_tokens,
        exact_paged,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "NHD", "softcap": 2.0, "scale": 0.4},
    ),
    "sdpa_paged, sinks, window": Example(
        sdpa_paged,
        paged_with_sinks,
        exact_paged,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "HND", "window_size": (5, 0), "scale": -0.3},
    ),
    "sdpa_paged, FP8": Example(
        sdpa_paged,
        paged_in_fp8,
        exact_paged,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "HND", "window_size": (7, 0), "softcap": 2.0},
    ),
    "sdpa_paged_varlen": Example(
        sdpa_paged_varlen,
        packed_on_pages,
        exact_packed_on_pages,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "NHD", "max_seqlen_q": 8},
    ),
    "sdpa_paged_varlen, latent": Example(
        sdpa_paged_varlen,
        packed_on_latent_pages,
        exact_packed_on_pages,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "NHD", "max_seqlen_q": 8, "scale": 0.07},
    ),
    "sdpa_paged_varlen, sinks, window": Example(
        sdpa_paged_varlen,
        packed_on_own_pages,
        exact_packed_on_pages,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "HND", "max_seqlen_q": 9, "window_size": (4, 0), "scale": -0.3, "softcap": 2.0},
    ),
    "sdpa_paged_varlen, FP8, tree": Example(
        sdpa_paged_varlen,
        packed_on_fp8_pages,
        exact_packed_on_pages,
        differentiable=(),
        casts=("q",),
        options={"page_layout": "NHD", "max_seqlen_q": 8, "batch_invariant": True},
    ),
    "sdpa_fp8": Example(
        run_fp8,
        fp8,
        exact_fp8,
        differentiable=(),
        options={"is_causal": True, "scale": 0.11},
        is_attention=False,
        precision=0.08,
    ),
    "sdpa_fp8, pages": Example(
        run_fp8,
        fp8_on_pages,
        exact_fp8,
        differentiable=(),
        options={"return_lse": True},
        is_attention=False,
        precision=0.08,
    ),
    "sdpa_fp8_backward": Example(
        run_fp8_backward,
        fp8_gradients,
        exact_fp8_backward,
        differentiable=(),
        options={"scale": 0.06},
        is_attention=False,
        precision=0.08,
    ),
    "sdpa_fp8_backward, lengths": Example(
        run_fp8_backward,
        fp8_gradients_of_lengths,
        exact_fp8_backward,
        differentiable=(),
        is_attention=False,
        precision=0.08,
    ),
    "fp8_attention": Example(
        cudnn_sdpa.fp8_attention,
        in_16_bits,
        exact_dense,
        options={"is_causal": True, "scale": 0.11},
        is_attention=False,
        is_composed=True,
        precision=0.16,
    ),
    "kernels": Example(
        kernels.attention,
        of_any_dim,
        exact_kernels,
        options={"mode": "fused", "scale": -0.3},
        is_attention=False,
        loops=True,
    ),
    "kernels, mask, causal": Example(
        kernels.attention,
        in_vectors,
        exact_kernels,
        differentiable=("q", "k", "v", "mask"),
        options={"mode": "fused", "is_causal": True},
        is_attention=False,
        loops=True,
    ),
    "kernels, naive, boolean mask": Example(
        kernels.attention,
        with_boolean_mask,
        exact_kernels,
        options={"mode": "naive"},
        is_attention=False,
        loops=True,
    ),
    "kernels, tiled": Example(
        kernels.attention,
        in_vectors,
        exact_kernels,
        differentiable=("q", "k", "v", "mask"),
        options={"mode": "tiled", "is_causal": True},
        is_attention=False,
        loops=True,
    ),
    "a kernel of a user's": Example(
        kernel_of_a_user,
        lambda: {"x": rows(33)},
        lambda x, scale: torch.softmax(x * scale, -1).square(),
        differentiable=("x",),
        options={"scale": -1.7},
        casts=(),
        is_attention=False,
        loops=True,
    ),
    "rms_norm": Example(
        cudnn_sdpa.rms_norm,
        normalized,
        lambda **given: rms_norm(**given)[0],
        differentiable=("x", "weight"),
        options={"eps": 1e-3},
        is_attention=False,
    ),
    "rms_norm_fp8": Example(
        norm_in_fp8,
        with_residual,
        exact_norm_in_fp8,
        differentiable=(),
        options={"eps": 1e-3, "zero_centered": True},
        casts=(),
        is_attention=False,
        leading="x",
        precision=0.05,
    ),
    "layer_norm_fp8": Example(
        layer_norm_in_fp8,
        with_residual_and_bias,
        exact_added_layer_norm,
        differentiable=(),
        options={"eps": 1e-3},
        casts=(),
        is_attention=False,
        leading="x",
        precision=0.05,
    ),
    "layer_norm": Example(
        cudnn_sdpa.layer_norm,
        normalized_with_bias,
        lambda **given: layer_norm(**given)[0],
        differentiable=("x", "weight", "bias"),
        options={"eps": 1e-3},
        is_attention=False,
    ),
    "layer_norm, zero-centered, residual, SiLU": Example(
        added_layer_norm,
        with_residual_and_bias,
        exact_added_layer_norm,
        differentiable=("x", "weight", "bias", "residual"),
        options={"eps": 1e-3, "zero_centered": True, "activation": "silu"},
        is_attention=False,
    ),
    "rms_norm, zero-centered, residual": Example(
        added_rms_norm,
        with_residual,
        exact_added_rms_norm,
        differentiable=("x", "weight", "residual"),
        options={"eps": 1e-3, "zero_centered": True},
        is_attention=False,
    ),
    "rms_norm, residual, several kernels": Example(
        added_rms_norm,
        lambda: with_residual(32),
        exact_added_rms_norm,
        differentiable=("x", "weight", "residual"),
        options={"eps": 1e-3},
        is_attention=False,
    ),
    "rope, norms": Example(
        rotated_heads,
        for_rotations,
        exact_rotated_heads,
        differentiable=("q", "k", "q_weight", "k_weight"),
        options={"eps": 1e-3, "zero_centered": True},
        casts=(),
        is_attention=False,
    ),
    "rope, packed": Example(
        rotated_heads,
        packed_for_rotations,
        exact_rotated_heads,
        differentiable=("q", "k", "q_weight"),
        options={"interleaved": True},
        casts=(),
        is_attention=False,
    ),
    "rope_": Example(
        rotated_in_place,
        for_rotations,
        exact_rotated_heads,
        differentiable=(),
        options={"eps": 1e-3},
        casts=(),
        is_attention=False,
        writes=True,
    ),
    "rope_fp8": Example(
        rotated_in_fp8,
        for_rotations_in_fp8,
        exact_rotated_in_fp8,
        differentiable=(),
        options={"eps": 1e-3, "zero_centered": True},
        casts=(),
        is_attention=False,
        precision=0.05,
    ),
    "silu_mul, both in one": Example(
        cudnn_sdpa.silu_mul,
        lambda: {"gate": rows(64)},
        exact_silu_mul,
        differentiable=("gate",),
        is_attention=False,
    ),
    "gelu_mul": Example(
        cudnn_sdpa.gelu_mul,
        gated,
        lambda gate, up: torch.nn.functional.gelu(gate) * up,
        differentiable=("gate", "up"),
        is_attention=False,
    ),
    "gelu_mul, both in one": Example(
        cudnn_sdpa.gelu_mul,
        lambda: {"gate": rows(64)},
        lambda gate: torch.nn.functional.gelu(gate.chunk(2, -1)[0]) * gate.chunk(2, -1)[1],
        differentiable=("gate",),
        is_attention=False,
    ),
    "relu_squared": Example(
        cudnn_sdpa.relu_squared,
        lambda: {"x": rows()},
        lambda x: torch.relu(x).square(),
        differentiable=("x",),
        is_attention=False,
    ),
    "conv1d": Example(
        cudnn_sdpa.conv1d,
        lines,
        exact_conv,
        differentiable=("x", "weight", "bias"),
        options={"stride": 2, "groups": 2},
        is_attention=False,
        has_double_backward=True,
    ),
    "conv3d": Example(
        cudnn_sdpa.conv3d,
        volumes,
        exact_conv,
        differentiable=("x", "weight"),
        options={"padding": (0, 1, 1)},
        is_attention=False,
        has_double_backward=True,
    ),
    "append_paged_kv": Example(
        appended,
        lambda: {
            "k": torch.randn(3, 2, 16).to(HALF),
            "v": torch.randn(3, 2, 24).to(HALF),
            "slot_mapping": torch.tensor([7, -1, 19]),
        },
        exact_appended,
        differentiable=(),
        options={"page_layout": "NHD"},
        casts=(),
        is_attention=False,
        leading="k",
        writes=True,
        is_planned=False,
    ),
    "rope_append_paged_kv": Example(
        rotated_and_appended,
        lambda: packed_for_rotations() | {"v": torch.randn(7, 2, 16).to(HALF), "slot_mapping": torch.arange(3, 17, 2)},
        exact_rotated_and_appended,
        differentiable=(),
        options={"page_layout": "NHD", "eps": 1e-3},
        casts=(),
        is_attention=False,
        writes=True,
        operators=2,
    ),
    "a user's graph_op": Example(
        call_of_a_user,
        with_residual,
        exact_of_a_user,
        differentiable=("x", "weight", "residual"),
        options={"eps": 1e-3},
        is_attention=False,
    ),
    "a user's graph_op, booleans": Example(
        mask_of_a_user,
        lambda: {"x": rows(64)},
        lambda x, limit: ((x > limit) * x).square(),
        differentiable=("x",),
        options={"limit": 0.25},
        is_attention=False,
    ),
    "silu_mul": Example(
        cudnn_sdpa.silu_mul,
        gated,
        exact_silu_mul,
        differentiable=("gate", "up"),
        is_attention=False,
    ),
    "conv2d": Example(
        cudnn_sdpa.conv2d,
        images,
        exact_conv,
        differentiable=("x", "weight", "bias"),
        options={"padding": 1, "activation": "silu"},
        is_attention=False,
        has_double_backward=True,
    ),
}
