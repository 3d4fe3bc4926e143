"""Tensor parallelism of modules: `parallel_plan`, the argument of PyTorch's `parallelize_module`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from cudnn_sdpa.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def parallel_plan(module: nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """The plan of `torch.distributed.tensor.parallel.parallelize_module` for the modules of this library in a model.

    Projections that read tokens are sharded by their outputs (`ColwiseParallel`), so that each process has some heads
    and some hidden features, and those that write tokens by their inputs (`RowwiseParallel`), which sums the processes'
    results. `Attention` and `SwiGLU` need `packed=False` for it, and the number of processes must divide the number of
    key and value heads. Parts of other kinds, such as embeddings, are the caller's: add them to the dictionary.

    Args:
        module: A model, a layer, an `Attention`, a `SwiGLU` or a `FeedForward`.
        sequence_parallel: Whether the tokens between the projections are sharded along the sequence, too, as Megatron
            does: each process gets and returns its part of the sequence (B, S / processes, embed_dim), norms run on it,
            and memory for activations shrinks. Rotary embeddings still see all positions.

    Returns:
        The styles by the names of submodules; that of `module` itself has the name "".

    Raises:
        OptionError: `module` has none of these modules.
        UnsupportedError: A module has packed projections.

    Examples:
        >>> from cudnn_sdpa.nn import TransformerLayer, parallel_plan
        >>> layer = TransformerLayer(64, 4, 160, num_kv_heads=2, packed=False)
        >>> sorted(parallel_plan(layer))[-3:]
        ['self_attn.out_proj', 'self_attn.q_proj', 'self_attn.v_proj']

        `parallelize_module(layer, init_device_mesh("cuda", (2,)), parallel_plan(layer))` applies it.

    The plan is that of "Megatron-LM" (Shoeybi et al., 2019), and with `sequence_parallel` that of "Reducing Activation
    Recomputation in Large Transformer Models" (Korthikanti et al., 2022).
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    from cudnn_sdpa.nn.attention import Attention
    from cudnn_sdpa.nn.feed_forward import FeedForward, SwiGLU
    from cudnn_sdpa.nn.norms import LayerNorm, RMSNorm
    from cudnn_sdpa.nn.parallel_styles import GatheredTokens

    outside = Shard(1) if sequence_parallel else Replicate()
    reads, writes = ColwiseParallel(), RowwiseParallel(output_layouts=outside)
    plan: dict[str, ParallelStyle] = {}
    packed = []
    # Each process normalizes its heads, of all tokens.
    norms_of_heads = {norm for x in module.modules() if isinstance(x, Attention) for norm in (x.q_norm, x.k_norm)}
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        reads_context = reads
        if isinstance(part, Attention) and part.context_dim is not None and sequence_parallel:
            plan[name] = GatheredTokens(outside, ("x",))  # `project_context` gathers, too, so both projections do
            reads_context = ColwiseParallel(input_layouts=outside)
        elif isinstance(part, (Attention, SwiGLU, FeedForward)):
            plan[name] = GatheredTokens(outside)
        if isinstance(part, (Attention, SwiGLU)):
            packed += [name or type(part).__name__] if part.packed else []
            for projection in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
                if hasattr(part, projection):
                    plan[prefix + projection] = reads_context if projection in ("k_proj", "v_proj") else reads
            plan[prefix + ("out_proj" if isinstance(part, Attention) else "down_proj")] = writes
        elif isinstance(part, FeedForward):
            plan |= {f"{prefix}linear1": reads, f"{prefix}linear2": writes}
        elif isinstance(part, (RMSNorm, LayerNorm)) and sequence_parallel and name and part not in norms_of_heads:
            plan[name] = SequenceParallel(use_local_output=True)
    if packed:
        reasons = [
            f"{name} has packed projections, of which no process can have a share of each part" for name in packed
        ]
        raise UnsupportedError("tensor parallelism of packed projections", reasons, "modules made with packed=False")
    if not plan:
        raise OptionError("module", type(module).__name__, "one with an Attention, a SwiGLU or a FeedForward")
    return plan
