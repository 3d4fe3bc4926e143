"""Builders of cuDNN's attention graphs: functions of symbolic tensors and static options alone.

The operations are described in NVIDIA's documentation of the cuDNN frontend, "Attention". Options of both builders:

- `band`: None, or (left, right, bottom_right): a query sees the keys from `left` before to `right` after the diagonal,
  None being unbounded; the diagonal ends at the last query and key if `bottom_right`.
- `alibi`: cuDNN's own ALiBi.
- `dropout_p`: dropout probability; seed and offset of the generator are operands.
- `deterministic`: whether every run must give the same bits; passed to forward passes only where it makes a difference.
- `totals`: None, or for packed tensors the maximum number of rows of queries and of keys in all sequences together.

Logit soft-capping is a `score_mod`, which excludes cuDNN's own masks, so the `score_mod` also masks keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cudnn_sdpa.graph.backend import GraphBuilder, Operations, Results, Symbol
from cudnn_sdpa.graph.definition import GraphDefinition

Modifier: TypeAlias = Callable[[Operations, Symbol], Symbol]


@GraphDefinition
def sdpa_forward(
    g: GraphBuilder,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    scale: Symbol,
    bias: Symbol | None = None,
    sink: Symbol | None = None,
    seq_len_q: Symbol | None = None,
    seq_len_kv: Symbol | None = None,
    seed: Symbol | None = None,
    offset: Symbol | None = None,
    softcap: Symbol | None = None,
    lowest: Symbol | None = None,
    highest: Symbol | None = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
    alibi: bool,
    dropout_p: float,
    totals: tuple[int, int] | None,
    with_lse: bool,
    deterministic: bool = False,
) -> Results:
    """O = softmax(cap(scale · Q Kᵀ) + bias) V, and on request the LSE of the scores that the softmax sees."""
    options: dict[str, object] = {"bias": bias, "sink_token": sink}
    if deterministic:
        g.only_repeatable(single_query=q.get_dim()[2] == 1)
    if softcap is not None:
        options["score_mod"] = soft_cap(
            g, softcap, keys=k.get_dim()[2], band=band, lowest=lowest, highest=highest, backward=False
        )[0]
        options |= {"seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
    else:
        options |= masks(g, band=band, alibi=alibi, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    if dropout_p:
        options["dropout"] = (dropout_p, seed, offset)
    if totals is not None:
        options |= {"max_total_seq_len_q": totals[0], "max_total_seq_len_kv": totals[1]}
    o, lse = g.sdpa(name="sdpa", q=q, k=k, v=v, attn_scale=scale, generate_stats=with_lse, **options)
    return (o, lse) if with_lse else o


@GraphDefinition
def sdpa_backward(
    g: GraphBuilder,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    out: Symbol,
    grad_out: Symbol,
    lse: Symbol,
    scale: Symbol,
    bias: Symbol | None = None,
    seq_len_q: Symbol | None = None,
    seq_len_kv: Symbol | None = None,
    seed: Symbol | None = None,
    offset: Symbol | None = None,
    softcap: Symbol | None = None,
    lowest: Symbol | None = None,
    highest: Symbol | None = None,
    *,
    band: tuple[int | None, int | None, bool] | None,
    alibi: bool,
    dropout_p: float,
    totals: tuple[int, int] | None,
    deterministic: bool,
    bias_gradient: tuple[int, ...] | None,
) -> Results:
    """The gradients of q, k and v, and of the bias if the shape of its gradient is passed.

    The sinks enter only through the LSE.
    """
    options: dict[str, object] = {"bias": bias, "use_deterministic_algorithm": deterministic}
    if softcap is not None:
        modifiers = soft_cap(g, softcap, keys=k.get_dim()[2], band=band, lowest=lowest, highest=highest, backward=True)
        options["score_mod"], options["score_mod_bprop"] = modifiers
        options |= {"seq_len_q": seq_len_q, "seq_len_kv": seq_len_kv}
    else:
        options |= masks(g, band=band, alibi=alibi, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    if dropout_p:
        options["dropout"] = (dropout_p, seed, offset)
    if totals is not None:
        options |= {"max_total_seq_len_q": totals[0], "max_total_seq_len_kv": totals[1]}
    grad_bias = None if bias_gradient is None else side_output(g, "grad_bias", bias_gradient)
    if grad_bias is not None:
        options["dBias"] = grad_bias
    gradients = g.sdpa_backward(
        name="sdpa_backward", q=q, k=k, v=v, o=out, dO=grad_out, stats=lse, attn_scale=scale, **options
    )
    return tuple(gradients) if grad_bias is None else (*gradients, grad_bias)


@GraphDefinition
def paged_decode(
    g: GraphBuilder,
    q: Symbol,
    k: Symbol,
    v: Symbol,
    scale: Symbol,
    seq_len_q: Symbol,
    seq_len_kv: Symbol,
    table_k: Symbol,
    table_v: Symbol,
    *,
    left: int | None,
    with_lse: bool,
    deterministic: bool = False,
) -> Results:
    """The forward pass of single queries on a paged KV cache.

    The page of key j of sequence b is `table_k[b, j // page_size]`. A query sees the last `left` + 1 keys, or all.
    """
    band = None if left is None else (left, None, True)
    options = masks(g, band=band, alibi=False, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    if deterministic:
        g.only_repeatable(single_query=True)
    max_seq_len_kv = table_k.get_dim()[2] * k.get_dim()[2]
    o, lse = g.sdpa(
        name="paged_decode",
        q=q,
        k=k,
        v=v,
        attn_scale=scale,
        generate_stats=with_lse,
        paged_attention_k_table=table_k,
        paged_attention_v_table=table_v,
        paged_attention_max_seq_len_kv=max_seq_len_kv,
        **options,
    )
    return (o, lse) if with_lse else o


def side_output(g: GraphBuilder, name: str, shape: tuple[int, ...]) -> Symbol:
    """An output that cuDNN takes as an argument."""
    return g.tensor(name=name, dim=list(shape), stride=[1] * len(shape), data_type=g.types.data_type.FLOAT)


def masks(
    g: GraphBuilder,
    *,
    band: tuple[int | None, int | None, bool] | None,
    alibi: bool,
    seq_len_q: Symbol | None,
    seq_len_kv: Symbol | None,
) -> dict[str, object]:
    options: dict[str, object] = {"use_alibi_mask": alibi}
    if band is not None:
        left, right, bottom_right = band
        alignment = g.types.diagonal_alignment
        options["diagonal_alignment"] = alignment.BOTTOM_RIGHT if bottom_right else alignment.TOP_LEFT
        options["diagonal_band_right_bound"] = right
        if left is not None:  # cuDNN masks keys from this distance on
            options["diagonal_band_left_bound"] = left + 1
    if seq_len_q is not None:
        options.update(use_padding_mask=True, seq_len_q=seq_len_q, seq_len_kv=seq_len_kv)
    return options


def soft_cap(
    g: GraphBuilder,
    cap: Symbol,
    *,
    keys: int,
    band: tuple[int | None, int | None, bool] | None,
    lowest: Symbol | None,
    highest: Symbol | None,
    backward: bool,
) -> tuple[Modifier, Modifier]:
    """cap · tanh(score / cap) and its derivative; the score is masked as well.

    The derivative needs no mask: masked scores have no weight, and so no gradient.

    Args:
        g: The graph.
        cap: The cap.
        keys: Number of keys.
        band: The band, used if no actual sequence lengths are passed.
        lowest: The first key that each query sees, (B, 1, Sq, 1), if actual sequence lengths are passed.
        highest: The last one, likewise.
        backward: Whether this is the backward pass, whose engines need more masks than the mathematics.
    """
    inner: list[Symbol] = []
    left, right, _ = band or (None, None, False)
    if highest is not None:
        left = right = None  # `lowest` and `highest` contain them
    if backward and right is None:
        # Without a mask that compares rows with columns, cuDNN 9.19 gives zeros for the gradient of the values.
        right = keys

    def forward(graph: Operations, score: Symbol) -> Symbol:
        inner.append(graph.div(score, cap))
        score = graph.mul(graph.tanh(inner[-1]), cap)
        row, column = index(g, graph, score, 2), index(g, graph, score, 3)
        if right is not None:
            last = row if right == 0 else shifted(g, graph, row, right)
            score = keep(g, graph, score, compare=graph.cmp_ge, position=last, other=column)
        if left is not None:
            # Always shifted, even by 0: cuDNN 9.19 takes a plain column >= row for a causal mask.
            position = shifted(g, graph, column, left)
            score = keep(g, graph, score, compare=graph.cmp_ge, position=position, other=row)
        if lowest is not None and highest is not None:
            score = keep(g, graph, score, compare=graph.cmp_le, position=column, other=highest)
            score = keep(g, graph, score, compare=graph.cmp_ge, position=column, other=lowest)
        elif backward:  # masks the padding of the last tile: see `known_issues`
            score = keep(g, graph, score, compare=graph.cmp_le, position=column, other=number(g, keys - 1))
        return score

    def derivative(graph: Operations, gradient: Symbol) -> Symbol:
        return graph.div(graph.tanh_backward(graph.mul(gradient, cap), inner[-1]), cap)

    return forward, derivative


def index(g: GraphBuilder, graph: Operations, score: Symbol, axis: int) -> Symbol:
    int32 = g.types.data_type.INT32
    result = graph.gen_index(score, axis=axis, compute_data_type=int32)
    result.set_data_type(int32)
    return result


def shifted(g: GraphBuilder, graph: Operations, position: Symbol, shift: int) -> Symbol:
    int32 = g.types.data_type.INT32
    result = graph.add(position, number(g, shift), compute_data_type=int32)
    result.set_data_type(int32)
    return result


def keep(
    g: GraphBuilder,
    graph: Operations,
    score: Symbol,
    *,
    compare: Callable[..., Symbol],
    position: Symbol,
    other: Symbol,
) -> Symbol:
    """The score where the comparison of two positions holds, elsewhere −inf."""
    boolean = g.types.data_type.BOOLEAN
    seen = compare(position, other, compute_data_type=boolean)
    seen.set_data_type(boolean)
    return graph.binary_select(score, number(g, float("-inf")), seen)


def number(g: GraphBuilder, value: float) -> Symbol:
    return g.tensor_scalar(value, g.types.scalar_type.RUNTIME_PARAM)
