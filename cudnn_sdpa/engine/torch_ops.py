"""PyTorch's operators: all are registered when the package is imported, and import their implementations on first use.

Saved programs (`torch.export`, AOTInductor) name operators and no module of this package. So each operator is in
PyTorch's dispatcher, in full, after `import cudnn_sdpa`. The module of an operation sets its implementations.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DENSE = (
    "Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor? sinks, Tensor? seq_lens_q, Tensor? seq_lens_kv, "
    "Tensor? rng, bool is_causal, str causal_alignment, SymInt window_left, SymInt window_right, float? scale, "
    "float dropout_p, float? softcap, bool alibi, bool deterministic"
)
_VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor cu_seqlens_q, Tensor? cu_seqlens_kv, Tensor? rng, "
    "SymInt max_seqlen_q, SymInt max_seqlen_kv, bool is_causal, str causal_alignment, SymInt window_left, "
    "SymInt window_right, float? scale, float dropout_p, float? softcap, bool deterministic"
)
_PAGED = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor? page_table_v, Tensor seq_lens_kv, "
    "Tensor? seq_lens_q, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, str page_layout, bool is_causal, "
    "str causal_alignment, SymInt window_left, SymInt window_right, float? scale, float? softcap, bool deterministic"
)
_PAGED_VARLEN = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor page_table, Tensor? page_table_v, Tensor seq_lens_kv, "
    "Tensor cu_seqlens_q, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, SymInt max_seqlen_q, "
    "str page_layout, bool batch_invariant, bool is_causal, str causal_alignment, SymInt window_left, "
    "SymInt window_right, float? scale, float? softcap"
)
_APPEND = (
    "Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor? slot_mapping, Tensor? page_table, "
    "Tensor? seq_lens_kv, Tensor? seq_lens_q, Tensor? k_scale, Tensor? v_scale, str page_layout, SymInt? tokens"
)
_FP8 = (
    "Tensor q, Tensor k, Tensor v, Tensor descale_q, Tensor descale_k, Tensor descale_v, Tensor descale_s, "
    "Tensor scale_s, Tensor scale_o, Tensor? seq_lens_q, Tensor? seq_lens_kv, Tensor? page_table, "
    "Tensor? page_table_v, ScalarType? out_dtype, bool is_causal, str causal_alignment, SymInt window_left, "
    "SymInt window_right, float? scale"
)
_FP8_BACKWARD = (
    "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor descale_q, Tensor descale_k, "
    "Tensor descale_v, Tensor descale_o, Tensor descale_do, Tensor descale_s, Tensor descale_dp, Tensor scale_s, "
    "Tensor scale_dq, Tensor scale_dk, Tensor scale_dv, Tensor scale_dp, Tensor? seq_lens_q, Tensor? seq_lens_kv, "
    "bool is_causal, str causal_alignment, SymInt window_left, SymInt window_right, float? scale, bool deterministic"
)
_KERNELS = "Tensor q, Tensor k, Tensor v, Tensor? mask, str mode, bool is_causal, float? scale"
_KERNELS_BACKWARD = f"Tensor grad_out, Tensor out, Tensor statistics, {_KERNELS}, bool[] needs"
_GRAPH = "str name, str kinds, Tensor[] tensors, float[] numbers, SymInt[]? symbols, str options"

#: The schemas of the operators, by the module that sets their implementations.
SCHEMAS = {
    "cudnn_sdpa.attention.dense.sdpa": (
        f"sdpa_forward({_DENSE}) -> Tensor",
        f"sdpa_forward_lse({_DENSE}) -> (Tensor, Tensor)",
        f"sdpa_forward_out({_DENSE}, Tensor(a!) out) -> Tensor",
        f"sdpa_backward(Tensor grad_out, Tensor out, Tensor lse, {_DENSE}, bool[] needs) -> Tensor[]",
    ),
    "cudnn_sdpa.attention.varlen.sdpa_varlen": (
        f"varlen_forward({_VARLEN}) -> Tensor",
        f"varlen_forward_lse({_VARLEN}) -> (Tensor, Tensor)",
        f"varlen_forward_out({_VARLEN}, Tensor(a!) out) -> Tensor",
        f"varlen_backward(Tensor grad_out, Tensor out, Tensor lse, {_VARLEN}, bool[] needs) -> Tensor[]",
    ),
    "cudnn_sdpa.attention.paged.sdpa_paged": (
        f"paged_forward({_PAGED}) -> Tensor",
        f"paged_forward_lse({_PAGED}) -> (Tensor, Tensor)",
        f"paged_forward_out({_PAGED}, Tensor(a!) out) -> Tensor",
    ),
    "cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen": (
        f"paged_varlen_forward({_PAGED_VARLEN}) -> Tensor",
        f"paged_varlen_forward_lse({_PAGED_VARLEN}) -> (Tensor, Tensor)",
        f"paged_varlen_forward_out({_PAGED_VARLEN}, Tensor(a!) out) -> Tensor",
    ),
    "cudnn_sdpa.attention.paged.append": (f"append_paged_kv({_APPEND}) -> ()",),
    "cudnn_sdpa.attention.fp8.sdpa_fp8": (
        f"sdpa_fp8_forward({_FP8}) -> (Tensor, Tensor, Tensor)",
        f"sdpa_fp8_forward_lse({_FP8}) -> (Tensor, Tensor, Tensor, Tensor)",
        f"sdpa_fp8_backward({_FP8_BACKWARD}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ),
    "cudnn_sdpa.kernels": (
        f"kernels_attention_forward({_KERNELS}) -> Tensor",
        f"kernels_attention_forward_statistics({_KERNELS}) -> (Tensor, Tensor)",
        f"kernels_attention_backward({_KERNELS_BACKWARD}) -> Tensor[]",
    ),
    "cudnn_sdpa.fused.graph_op": (f"graph_function({_GRAPH}) -> Tensor[]",),
}

_HOMES = {schema.partition("(")[0]: module for module, schemas in SCHEMAS.items() for schema in schemas}

#: The operators with gradients, or with an error of their own for them.
_DIFFERENTIABLE = {
    *("sdpa_forward", "sdpa_forward_lse", "sdpa_backward"),
    *("varlen_forward", "varlen_forward_lse", "varlen_backward"),
    *("kernels_attention_forward", "kernels_attention_forward_statistics", "kernels_attention_backward"),
    "graph_function",
}

library: Any = torch.library.Library("cudnn_sdpa", "DEF")  # type: ignore[no-untyped-call]

Implementation = Callable[..., Any]


def _saves_nothing(ctx: object, inputs: object, output: object) -> None:
    """Saves nothing, for an operator whose gradient is refused."""


class Implementations(NamedTuple):
    """The implementations of an operator.

    Attributes:
        backward: The gradient, as `torch.autograd.Function` has it, for operators that autograd knows.
        setup_context: Saves the tensors of `backward`.
    """

    cuda: Implementation
    cpu: Implementation
    fake: Implementation
    flops: Implementation
    backward: Implementation | None = None
    setup_context: Implementation = _saves_nothing


_implementations: dict[str, Implementations] = {}

#: The schema of each operator, and whether autograd knows it.
registered: dict[str, tuple[str, bool]] = {}


def implement(name: str, schema: str, implementations: Implementations) -> None:
    """Sets the implementations of the operator ``cudnn_sdpa::name``; registers it unless the import has."""
    is_differentiable = implementations.backward is not None
    if name not in registered:
        _register(name, schema, is_differentiable=is_differentiable)
        if _COUNTER in sys.modules:
            _register_formula(sys.modules[_COUNTER], name)
    elif registered[name] != (schema, is_differentiable):
        raise ValueError(f"the operator {name} is registered by another schema than {schema}, or without gradients")
    _implementations[name] = implementations


def implementations(name: str) -> Implementations:
    """The implementations of an operator, whose module is imported first where it has not been."""
    if name not in _implementations:
        importlib.import_module(_HOMES[name])
    return _implementations[name]


def _register(name: str, schema: str, *, is_differentiable: bool) -> None:
    """Registers an operator with implementations, a fake and gradients that are imported when they are first called."""

    def cuda(*inputs: object) -> object:
        return implementations(name).cuda(*inputs)

    def cpu(*inputs: object) -> object:
        return implementations(name).cpu(*inputs)

    def fake(*inputs: object) -> object:
        return implementations(name).fake(*inputs)

    def backward(ctx: object, *grads: object) -> object:
        run = implementations(name).backward
        return None if run is None else run(ctx, *grads)

    def setup_context(ctx: object, inputs: tuple[object, ...], output: object) -> None:
        implementations(name).setup_context(ctx, inputs, output)

    registered[name] = schema, is_differentiable
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, cuda, "CUDA")
    library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"cudnn_sdpa::{name}", fake, lib=library)
    if is_differentiable:
        torch.library.register_autograd(f"cudnn_sdpa::{name}", backward, setup_context=setup_context, lib=library)


# The random numbers that dropout starts from, also in compiled code.


def new_seed(q: Tensor) -> Tensor:
    """Seed and offset of dropout, from PyTorch's generator of q's device.

    manual_seed, checkpointing and CUDA graphs act on it. In compiled code it is an operator of its own: see `_seed`.
    """
    if torch.compiler.is_dynamo_compiling():
        seed: Tensor = torch.ops.cudnn_sdpa.dropout_seed(q)
        return seed
    return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)


def _seed(q: Tensor) -> Tensor:
    """The trace of `dropout_seed` in compiled code: a random number that is kept for the backward pass.

    With `torch._functorch.config.activation_memory_budget` below 1 it would draw another one there.

    Raises:
        UnsupportedError: The budget is 0: the compiler keeps nothing then, whatever a node says.
    """
    from torch._functorch import config as functorch_config
    from torch.fx import traceback as fx_traceback
    from torch.utils.checkpoint import CheckpointPolicy

    if functorch_config.activation_memory_budget == 0 and torch.is_grad_enabled():
        from cudnn_sdpa.errors import UnsupportedError

        raise UnsupportedError(
            "dropout under torch.compile with an activation memory budget of 0",
            ["the compiler would draw the random numbers of the backward pass again"],
            "a budget above 0",
        )
    meta = fx_traceback.current_meta
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        return torch.randint(2**62, (2,), dtype=torch.int64, device=q.device)
    finally:
        meta.pop("recompute")
        if before is not None:
            meta["recompute"] = before


library.define(
    "dropout_seed(Tensor q) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
library.impl("dropout_seed", _seed, "CompositeImplicitAutograd")
for _module in SCHEMAS.values():
    for _schema in _module:
        _name = _schema.partition("(")[0]
        _register(_name, _schema, is_differentiable=_name in _DIFFERENTIABLE)


# Floating-point operations, for `torch.utils.flop_counter.FlopCounterMode`.

_COUNTER = "torch.utils.flop_counter"


def _register_formula(counter: ModuleType, name: str) -> None:
    def count(*inputs: object, **options: object) -> object:
        return implementations(name).flops(*inputs, **options)

    counter.register_flop_formula(getattr(torch.ops.cudnn_sdpa, name), get_raw=True)(count)


def _register_formulas(counter: ModuleType) -> None:
    for name in registered:
        _register_formula(counter, name)


class _FormulasOnImport:
    """Registers the formulas once PyTorch's counter is imported, which imports Triton: too slow for who counts nothing.

    A counter copies the formulas when it is made, so they cannot wait for an operator's first call.
    """

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Python's own spec of the counter's module, with a loader that registers the formulas, too."""
        if name != _COUNTER:
            return None
        finders = [finder for finder in sys.meta_path if finder is not cls and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _register_formulas(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _COUNTER in sys.modules:
    _register_formulas(importlib.import_module(_COUNTER))  # which another thread may be importing
else:
    sys.meta_path.insert(0, _FormulasOnImport)
