"""Checks of what `Attention` is made with, made of, and called with."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import check_lengths, shape_of
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.nn.checks import check_counts, check_tokens
from cudnn_sdpa.nn.conversion import LINEAR, check_type, refuse
from cudnn_sdpa.nn.kv_cache import KVStep
from cudnn_sdpa.nn.rotary import RotaryEmbedding, check_positions


def head_sizes(embed_dim: Any, num_heads: Any, num_kv_heads: Any, head_dim: Any) -> tuple[int, int]:
    """Heads of keys and values, and the size of a head."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_counts(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise OptionError("num_kv_heads", repr(num_kv_heads), f"a divisor of num_heads, {num_heads}")
    if head_dim is None:
        if embed_dim % num_heads:
            expected = f"a divisor of embed_dim, {embed_dim}, or head_dim given"
            raise OptionError("num_heads", repr(num_heads), expected)
        head_dim = embed_dim // num_heads
    check_counts(head_dim=head_dim)
    return num_kv_heads, head_dim


def check_kind(context_dim: Any, is_causal: bool, window_size: Any, rope: Any, head_dim: int) -> None:
    """What goes with cross-attention, and what does not: two sequences have no common positions."""
    if rope is not None and not isinstance(rope, RotaryEmbedding):
        raise OptionError("rope", type(rope).__name__, "cudnn_sdpa.nn.RotaryEmbedding or None")
    if rope is not None and rope.head_dim != head_dim:
        raise OptionError("rope", f"one for head_dim {rope.head_dim}", f"one for {head_dim}, as heads have here")
    if context_dim is None:
        return
    check_counts(context_dim=context_dim)
    for name, value, without in (
        ("is_causal", is_causal, False),
        ("window_size", window_size, None),
        ("rope", rope, None),
    ):
        if value is not without:
            expected = f"{without}: positions in the two sequences of cross-attention are not comparable"
            raise OptionError(name, repr(value) if name != "rope" else "one", expected)


def check_convertible(module: nn.MultiheadAttention, cross: bool) -> None:
    """Whether PyTorch's attention computes what ours does.

    Raises:
        UnsupportedError: It does not, with every reason.
    """
    check_type("module.out_proj", module.out_proj, *LINEAR)
    same = module.kdim == module.vdim == module.embed_dim
    reasons = {
        "its inputs are (sequence, batch, features); if yours are not, set module.batch_first = True": (
            not module.batch_first
        ),
        "it has add_bias_kv: a learned key and value that every query sees": module.bias_k is not None,
        "it has add_zero_attn: a key and value of zeros that every query sees": module.add_zero_attn,
        f"its keys have {module.kdim} features and its values {module.vdim}: they come from two sequences": (
            module.kdim != module.vdim
        ),
        f"its queries have {module.embed_dim} features and its keys {module.kdim}: it is for cross=True": (
            not cross and not same and module.kdim == module.vdim
        ),
    }
    refuse("Attention.from_torch", reasons)


def check_call(module: Any, x: Tensor, given: dict[str, Any]) -> None:
    """The arguments of a call that go together, by their names."""
    context, positions = given["context"], given["position_ids"]
    if module.context_dim is None:
        for name in ("context", "context_lens"):
            if given[name] is not None:
                raise OptionError(name, type(given[name]).__name__, "None: this is self-attention (context_dim=None)")
    else:
        _check_context(module, x, context)
    for name in ("seq_lens", "context_lens"):
        check_lengths(name, given[name], x, "x")
    for name in ("position_ids", "rotations"):
        if given[name] is not None and module.rope is None:
            raise OptionError(name, type(given[name]).__name__, "None: this module has no rope")
    if positions is not None:
        check_positions(positions)
        if positions.shape[-1] != x.shape[1] or (positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])):
            raise ShapeError("position_ids", shape_of(positions), f"(S,) or (B, S), as x has ({shape_of(x)})")
    if given["step"] is not None:
        _check_step(module, x, given)


def _check_context(module: Any, x: Tensor, context: Any) -> None:
    if isinstance(context, tuple):
        if len(context) != 2 or not all(isinstance(part, Tensor) for part in context):
            raise OptionError("context", "a tuple", "the two tensors that project_context gives")
        heads = (module.num_kv_heads, module.head_dim)
        for part in context:
            if part.dim() != 4 or (part.shape[1], part.shape[3]) != heads:
                expected = f"(B, {heads[0]}, Skv, {heads[1]}): what project_context of this module gives"
                raise ShapeError("context", shape_of(part), expected)
        return
    if context is None:
        raise OptionError("context", "None", "the other sequence: this is cross-attention (context_dim)")
    check_tokens("context", context, module.context_dim or 0)
    if context.shape[0] != x.shape[0]:
        raise ShapeError("context", shape_of(context), f"batch {x.shape[0]}, as x has ({shape_of(x)})")


def _check_step(module: Any, x: Tensor, given: dict[str, Any]) -> None:
    step = given["step"]
    if not isinstance(step, (KVStep, PagedStep)):
        raise OptionError("step", type(step).__name__, "what reserve of a KVCache or a PagedKVCache gives")
    if step.cache() is None:
        raise OptionError("step", "a step of a cache that is gone", "one whose cache is kept")
    if not module.is_causal:
        kind = "cross-attention" if module.context_dim is not None else "a module with is_causal=False"
        raise OptionError("step", f"one for {kind}", "None: earlier tokens would have to see later ones")
    if given["seq_lens"] is not None:
        raise OptionError("seq_lens", "a tensor beside a step", "None: the numbers of new tokens are given to reserve")
    if (step.batch, step.tokens) != tuple(x.shape[:2]):
        expected = f"({step.batch}, {step.tokens}, {module.embed_dim}): what the step has room for"
        raise ShapeError("x", shape_of(x), expected)
    if module.training and module.dropout:
        reasons = ["the module is in training mode and has dropout; a cache is for inference"]
        raise UnsupportedError("Attention with a step", reasons, "module.eval()")
    if given["attn_mask"] is not None and isinstance(step, PagedStep):
        reasons = ["attention on pages takes no attn_mask"]
        raise UnsupportedError("Attention with a PagedStep", reasons, "a KVCache, or sequences of their own lengths")
