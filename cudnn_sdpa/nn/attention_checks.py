"""Checks of `Attention`'s options, arguments and conversions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import check_lengths
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError
from cudnn_sdpa.nn.checks import check_counts, check_tokens
from cudnn_sdpa.nn.conversion import LINEAR, check_type, refuse
from cudnn_sdpa.nn.kv_cache import KVStep
from cudnn_sdpa.nn.rotary import RotaryEmbedding, check_positions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class AttentionModule(Protocol):
    """The part of `Attention`, whose module imports this one, that the checks use."""

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_dim: int | None
    packed: bool
    is_causal: bool
    rope: RotaryEmbedding | None
    training: bool
    dropout: float
    cp_group: ProcessGroup | DeviceMesh | None


def head_sizes(embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_counts(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise OptionError("num_kv_heads", repr(num_kv_heads), f"a divisor of num_heads, {num_heads}")
    if head_dim is None:
        if embed_dim % num_heads:
            expected = f"a divisor of embed_dim, {embed_dim}, unless head_dim is passed"
            raise OptionError("num_heads", repr(num_heads), expected)
        head_dim = embed_dim // num_heads
    check_counts(head_dim=head_dim)
    return num_kv_heads, head_dim


def check_cross_attention(
    *, context_dim: int | None, is_causal: bool, window_size: tuple[int, int] | None, rope: object, head_dim: int
) -> None:
    """Checks rope, and for cross-attention that no option compares positions, which two sequences do not share."""
    if rope is not None and not isinstance(rope, RotaryEmbedding):
        raise OptionError("rope", type(rope).__name__, "cudnn_sdpa.nn.RotaryEmbedding or None")
    if rope is not None and rope.head_dim != head_dim:
        raise OptionError("rope", f"one for head_dim {rope.head_dim}", f"one for {head_dim}, the head_dim here")
    if context_dim is None:
        return
    check_counts(context_dim=context_dim)
    options: tuple[tuple[str, object, object], ...] = (
        ("is_causal", is_causal, False),
        ("window_size", window_size, None),
        ("rope", rope, None),
    )
    for name, value, off in options:
        if value is not off:
            expected = f"{off}: positions in the two sequences of cross-attention are not comparable"
            raise OptionError(name, repr(value) if name != "rope" else "one", expected)


def check_groups(module: AttentionModule, heads: tuple[int, int, int]) -> None:
    """Checks that the query, key and value heads of one process are whole groups."""
    q, k, v = heads
    if k == v and (q * module.num_kv_heads == k * module.num_heads or module.num_kv_heads == k == 1):
        return
    reason = (
        f"q_proj, k_proj and v_proj returned {q}, {k} and {v} of their {module.num_heads}, {module.num_kv_heads} and "
        f"{module.num_kv_heads} heads: query heads would meet the keys of other groups"
    )
    suggestion = "the same ColwiseParallel on all three, as cudnn_sdpa.nn.parallel_plan gives it"
    raise UnsupportedError("this tensor parallelism", [reason], suggestion)


def refuse_parts_of_heads(name: str, projected: Tensor, head_dim: int) -> NoReturn:
    reason = f"{name} returned {projected.shape[-1]} features, which are no whole heads of {head_dim}"
    raise UnsupportedError("this tensor parallelism", [reason], "a number of processes that divides num_kv_heads")


def check_convertible(module: nn.MultiheadAttention, cross: bool) -> None:
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


def check_call(
    module: AttentionModule,
    x: Tensor,
    *,
    context: Tensor | tuple[Tensor, Tensor] | None,
    attn_mask: object,
    seq_lens: Tensor | None,
    context_lens: Tensor | None,
    position_ids: Tensor | None,
    rotations: object,
    step: object,
) -> None:
    if module.context_dim is None:
        for name, value in (("context", context), ("context_lens", context_lens)):
            if value is not None:
                raise OptionError(name, type(value).__name__, "None: this is self-attention (context_dim=None)")
    else:
        _check_context(module, x, context)
    check_lengths("seq_lens", seq_lens, x, "x")
    check_lengths("context_lens", context_lens, x, "x")
    for name, argument in (("position_ids", position_ids), ("rotations", rotations)):
        if argument is not None and module.rope is None:
            raise OptionError(name, type(argument).__name__, "None: this module has no rope")
    if position_ids is not None:
        check_positions(position_ids)
        batch, tokens, _ = x.shape
        if not module.packed:  # x may be a part of the sequence; `rope` compares with the heads
            tokens = position_ids.shape[-1]
        if position_ids.shape[-1] != tokens or (position_ids.dim() == 2 and position_ids.shape[0] not in (1, batch)):
            raise ShapeError("position_ids", shape_of(position_ids), f"(S,) or (B, S), as x has ({shape_of(x)})")
    if module.cp_group is not None:
        refuse_beside_group(attn_mask=attn_mask, seq_lens=seq_lens, step=step)
    if step is not None:
        _check_step(module, x, step, attn_mask=attn_mask, seq_lens=seq_lens)


def check_parallel(cp_group: object, cp_method: object, context_dim: int | None) -> None:
    if cp_group is None and cp_method == "all_gather":
        return
    from cudnn_sdpa.distributed.collectives import group_rank_of
    from cudnn_sdpa.distributed.parallel_attention import check_method

    check_method(cp_method)
    if cp_group is None:
        return
    if context_dim is not None:
        raise OptionError("cp_group", "a group", "None: cross-attention (context_dim) has two sequences")
    group_rank_of(cp_group)


def positions_of(x: Tensor, cp_group: ProcessGroup | DeviceMesh | None) -> Tensor:
    """Positions of tokens (B, S, features): 0 to S - 1, or those of this rank's part of the sequence."""
    if cp_group is None:
        return torch.arange(x.shape[1], device=x.device)
    from cudnn_sdpa.distributed import shard
    from cudnn_sdpa.distributed.collectives import group_rank_of

    return shard(torch.arange(x.shape[1] * group_rank_of(cp_group).ranks, device=x.device), 0, cp_group)


def refuse_beside_group(**arguments: object) -> None:
    """Refuses arguments that describe whole sequences, with which a rank's part has no meaning."""
    names = [name for name, value in arguments.items() if value is not None]
    if names:
        reasons = [f"{name} is for whole sequences, of which cp_group gives each rank a part" for name in names]
        raise UnsupportedError("Attention with cp_group", reasons, "cudnn_sdpa.distributed.context_parallel_varlen")


def _check_context(module: AttentionModule, x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None) -> None:
    if isinstance(context, tuple):
        if len(context) != 2 or not all(isinstance(part, Tensor) for part in context):
            raise OptionError("context", "a tuple", "the two tensors that project_context returns")
        heads, dim = module.num_kv_heads, module.head_dim
        for part in context:
            part_heads = part.shape[1] if part.dim() == 4 else 0
            if not module.packed and part_heads and heads % part_heads == 0:  # this process's heads
                heads = part_heads
            if part.dim() != 4 or (part.shape[1], part.shape[3]) != (heads, dim):
                expected = f"(B, {heads}, Skv, {dim}), as project_context of this module returns"
                raise ShapeError("context", shape_of(part), expected)
        return
    if context is None:
        raise OptionError("context", "None", "the other sequence: this is cross-attention (context_dim)")
    check_tokens("context", context, module.context_dim or 0)
    if context.shape[0] != x.shape[0]:
        raise ShapeError("context", shape_of(context), f"batch {x.shape[0]}, as x has ({shape_of(x)})")


def _check_step(module: AttentionModule, x: Tensor, step: object, *, attn_mask: object, seq_lens: object) -> None:
    if not isinstance(step, (KVStep, PagedStep)):
        raise OptionError("step", type(step).__name__, "the result of reserve of a KVCache or a PagedKVCache")
    if step.cache() is None:
        raise OptionError("step", "a step whose cache was deleted", "a step whose cache still exists")
    if not module.is_causal:
        kind = "cross-attention" if module.context_dim is not None else "a module with is_causal=False"
        raise OptionError("step", f"one for {kind}", "None: earlier tokens would have to see later ones")
    if seq_lens is not None:
        raise OptionError("seq_lens", "a tensor in addition to a step", "None: pass the lengths to reserve instead")
    batch, tokens, _ = x.shape
    if (step.batch, step.tokens) != (batch, tokens):
        expected = f"({step.batch}, {step.tokens}, {module.embed_dim}), as many tokens as the step has reserved"
        raise ShapeError("x", shape_of(x), expected)
    if module.training and module.dropout:
        reasons = ["the module is in training mode and has dropout; a cache is for inference"]
        raise UnsupportedError("Attention with a step", reasons, "module.eval()")
    if attn_mask is not None and isinstance(step, PagedStep):
        reasons = ["attention on a paged KV cache has no attn_mask"]
        raise UnsupportedError("Attention with a PagedStep", reasons, "a KVCache, or sequences of their own lengths")
