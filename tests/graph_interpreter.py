"""An interpreter of graph builders: evaluates every operation of a graph when the builder adds it, in float64.

`evaluate` calls the builder of a `GraphDefinition` with a `Graph` in place of cuDNN's. Its symbols hold tensors, and
its methods take the arguments of the frontend's methods of the same names, by the same keywords. So a builder that
swaps operands, forgets an option or takes another operation gives wrong numbers without a GPU. Results are rounded
only where they are written: cuDNN keeps intermediate results in float32.

FP8 attention rounds inside its kernels, so its operations run the emulation of `fp8.reference`. An operation that is
not here is refused by its name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from float64_reference import slopes
from torch import Tensor

from cudnn_sdpa.attention.arguments import MIN_SCALE, from_fields
from cudnn_sdpa.attention.fp8 import reference as fp8_reference
from cudnn_sdpa.attention.fp8.arguments import Fp8Arguments, Fp8BackwardArguments, Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.graph.definition import GraphDefinition
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES

Operands = Mapping[str, Any]  # tensors in the layouts of a key, and numbers

#: The factor of each weight under dropout, given the probability, seed, offset, the scores, and the sizes that the
#: random numbers depend on.
Dropout = Callable[[float, int, int, Tensor, tuple[int, ...]], Tensor]

_DTYPES = {name: dtype for dtype, name in CUDNN_DTYPE_NAMES.items()}

#: The enumerations of the `cudnn` module that builders use.
TYPES = SimpleNamespace(
    data_type=Enum("data_type", list(_DTYPES)),
    diagonal_alignment=Enum("diagonal_alignment", ["TOP_LEFT", "BOTTOM_RIGHT"]),
    norm_forward_phase=Enum("norm_forward_phase", ["INFERENCE", "TRAINING"]),
    scalar_type=Enum("scalar_type", ["RUNTIME_PARAM"]),
)


class Symbol:
    """A symbolic tensor with its values.

    Attributes:
        shape: The shape that the key declares. Values of packed tensors are those of one sequence.
        tensor: The values; None until they are known.
        of_shape: Computes the values of a result whose shape its operation does not imply.
        is_packed: Whether a sequence lies behind another.
    """

    def __init__(
        self,
        tensor: Tensor | None,
        shape: Sequence[int] | None = None,
        of_shape: Callable[[Sequence[int]], Tensor] | None = None,
        *,
        is_packed: bool = False,
    ) -> None:
        self.tensor, self.of_shape, self.is_packed = tensor, of_shape, is_packed
        self.shape = tuple(tensor.shape if shape is None and tensor is not None else shape or ())

    @property
    def value(self) -> Tensor:
        assert self.tensor is not None, "an operation reads a tensor that no operation has written"
        return self.tensor if self.tensor.dtype == torch.bool else self.tensor.double()

    def get_dim(self) -> list[int]:
        return list(self.shape)

    def set_data_type(self, data_type: Enum) -> Symbol:
        self.tensor = self.value.to(_DTYPES[data_type.name])
        return self


def _swish(x: Tensor, *, swish_beta: float = 1.0) -> Tensor:
    return x * torch.sigmoid(swish_beta * x)


def _swish_backward(loss: Tensor, x: Tensor, *, swish_beta: float = 1.0) -> Tensor:
    sigmoid = torch.sigmoid(swish_beta * x)
    return loss * sigmoid * (1 + swish_beta * x * (1 - sigmoid))


def _relu(x: Tensor, *, negative_slope: float = 0.0) -> Tensor:
    return torch.where(x > 0, x, x * negative_slope)


def _relu_backward(loss: Tensor, x: Tensor, *, negative_slope: float = 0.0) -> Tensor:
    return torch.where(x > 0, loss, loss * negative_slope)


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _gelu_backward(loss: Tensor, x: Tensor) -> Tensor:
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return loss * ((1 + torch.erf(x / math.sqrt(2))) / 2 + x * density)


#: Pointwise operations by the frontend's names: the names of their tensors, and what they compute. What else they take,
#: such as a slope, is a keyword of the function.
POINTWISE: dict[str, tuple[tuple[str, ...], Callable[..., Tensor]]] = {
    **{
        name: (("input",), getattr(torch, name))
        for name in ("abs", "erf", "exp", "log", "neg", "reciprocal", "rsqrt", "sigmoid", "sqrt", "tanh")
    },
    "identity": (("input",), torch.clone),
    "relu": (("input",), _relu),
    "leaky_relu": (("input",), _relu),
    "swish": (("input",), _swish),
    "gelu": (("input",), _gelu),
    **{name: (("a", "b"), getattr(torch, name)) for name in ("add", "sub", "mul", "div", "logical_and", "logical_or")},
    "bias": (("input", "bias"), torch.add),
    "scale": (("input", "scale"), torch.mul),
    "max": (("input0", "input1"), torch.maximum),
    "min": (("input0", "input1"), torch.minimum),
    "pow": (("input0", "input1"), torch.pow),
    **{
        f"cmp_{name}": (("input", "comparison"), getattr(torch, name.replace("neq", "ne")))
        for name in ("eq", "ge", "gt", "le", "lt", "neq")
    },
    "relu_backward": (("loss", "input"), _relu_backward),
    "leaky_relu_backward": (("loss", "input"), _relu_backward),
    "swish_backward": (("loss", "input"), _swish_backward),
    "gelu_backward": (("loss", "input"), _gelu_backward),
    "sigmoid_backward": (("loss", "input"), lambda loss, x: loss * torch.sigmoid(x) * torch.sigmoid(-x)),
    "tanh_backward": (("loss", "input"), lambda loss, x: loss * (1 - torch.tanh(x).square())),
    "binary_select": (("input0", "input1", "mask"), lambda one, other, mask: torch.where(mask.bool(), one, other)),
}


def random_share(p: float, seed: int, offset: int, scores: Tensor, sizes: tuple[int, ...]) -> Tensor:
    _, rows, columns = sizes
    generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, offset, *sizes)).encode()))
    kept = torch.rand(*scores.shape[:2], rows, columns, generator=generator) >= p
    return kept[:, :, : scores.shape[2], : scores.shape[3]].double() / (1 - p)


class Graph:
    """What a builder gets as `g`.

    Attributes:
        types: The enumerations.
        key: The key of the graph.
        sequence: The number of the packed sequence that is computed.
        dropout: The dropout factors.
    """

    types = TYPES

    def __init__(self, key: PlanKey, operands: Operands, dropout: Dropout) -> None:
        self.key, self.sequence, self.dropout, self._operands = key, operands.get("sequence", 0), dropout, operands
        self.is_repeatable = False

    def declare(
        self,
        name: str,
        *,
        shape: Sequence[int],
        host_scalar: bool,
        ragged: Symbol | None,
        **_: object,
    ) -> Symbol:
        """The symbol of an operand. What says where packed sequences begin has been followed already."""
        value = self._operands.get(name)
        if host_scalar:
            value = torch.tensor(value, dtype=torch.float64).expand(tuple(shape))
        return Symbol(value, shape, is_packed=ragged is not None)

    def only_repeatable(self, *, single_query: bool) -> None:
        """Chooses among engines; `evaluate` checks that it was asked where the key asks for it."""
        assert single_query == (next(x for x in self.key.inputs if x.name == "q").layout.shape[2] == 1)
        self.is_repeatable = True

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Enum) -> Symbol:
        """An output that an operation takes as an argument."""
        del name, stride, data_type
        return Symbol(None, dim)

    def tensor_scalar(self, value: float, scalar_type: Enum) -> Symbol:
        assert isinstance(scalar_type, TYPES.scalar_type)
        return Symbol(torch.full((1, 1, 1, 1), value, dtype=torch.float64))

    def __getattr__(self, operation: str) -> Callable[..., Symbol]:
        if operation not in POINTWISE:
            raise AttributeError(f"graph_interpreter.py has no operation {operation!r}")
        return partial(self._pointwise, operation)

    def _pointwise(
        self, operation: str, *given: Any, name: str = "", compute_data_type: Enum | None = None, **named: Any
    ) -> Symbol:
        del name, compute_data_type
        names, function = POINTWISE[operation]
        tensors = [*given, *[named.pop(argument) for argument in names[len(given) :] if argument in named]]
        if len(tensors) != len(names):
            raise TypeError(f"{operation} takes {names}")
        values = [x.value for x in tensors]
        if operation not in ("add", "sub", "mul", "div"):
            return Symbol(function(*values, **named))
        return Symbol(function(*[x.double() for x in values], **named))

    def gen_index(self, input: Symbol, *, axis: int, compute_data_type: Enum) -> Symbol:  # noqa: A002
        """The position of each element along an axis."""
        del compute_data_type
        shape = input.value.shape
        rest = (1,) * (len(shape) - axis - 1)
        return Symbol(torch.arange(shape[axis]).view(-1, *rest).expand(shape))

    # Norms.

    def rmsnorm(
        self,
        *,
        norm_forward_phase: Enum,
        input: Symbol,  # noqa: A002
        scale: Symbol | None,
        epsilon: Symbol,
        name: str = "",
    ) -> list[Symbol | None]:
        """The normalized rows; in training also the factor of each."""
        del name
        x = input.value
        factor = (_mean(x.square(), scale) + epsilon.value).rsqrt()
        y = x * factor if scale is None else x * factor * scale.value
        return [Symbol(y), self._in_training(norm_forward_phase, factor)]

    def layernorm(
        self,
        *,
        norm_forward_phase: Enum,
        input: Symbol,  # noqa: A002
        scale: Symbol,
        bias: Symbol,
        epsilon: Symbol,
        name: str = "",
    ) -> list[Symbol | None]:
        """The normalized rows; in training also the mean and the factor of each."""
        del name
        mean = _mean(input.value, scale)
        x = input.value - mean
        factor = (_mean(x.square(), scale) + epsilon.value).rsqrt()
        y = x * factor * scale.value + bias.value
        return [Symbol(y), *(self._in_training(norm_forward_phase, found) for found in (mean, factor))]

    @staticmethod
    def _in_training(phase: Enum, found: Tensor) -> Symbol | None:
        return Symbol(found) if phase is TYPES.norm_forward_phase.TRAINING else None

    def rmsnorm_backward(
        self,
        *,
        grad: Symbol,
        input: Symbol,  # noqa: A002
        scale: Symbol | None,
        inv_variance: Symbol,
        has_dbias: bool,
        name: str = "",
    ) -> list[Symbol | None]:
        """The gradients of the input, the scale and the bias."""
        del name
        dy, rows = grad.value, input.value * inv_variance.value
        of_rows = dy if scale is None else dy * scale.value
        of_input = inv_variance.value * (of_rows - rows * _mean(of_rows * rows, scale))
        if scale is None:
            return [Symbol(of_input), None, None]
        sums = [Symbol(part.sum_to_size(scale.shape)) for part in (dy * rows, dy)]
        return [Symbol(of_input), sums[0], sums[1] if has_dbias else None]

    def layernorm_backward(
        self,
        *,
        grad: Symbol,
        input: Symbol,  # noqa: A002
        scale: Symbol,
        mean: Symbol,
        inv_variance: Symbol,
        name: str = "",
    ) -> list[Symbol]:
        """The gradients of the input, the scale and the bias."""
        del name
        dy, rows = grad.value, (input.value - mean.value) * inv_variance.value
        of_rows = dy * scale.value
        of_rows = of_rows - _mean(of_rows, scale) - rows * _mean(of_rows * rows, scale)
        sums = [Symbol(part.sum_to_size(scale.shape)) for part in (dy * rows, dy)]
        return [Symbol(inv_variance.value * of_rows), *sums]

    # Convolutions. Those of gradients get the shape of their result from the key.

    def conv_fprop(self, *, image: Symbol, weight: Symbol, **sizes: list[int]) -> Symbol:
        groups = image.shape[1] // weight.shape[1]
        return Symbol(torch.ops.aten.convolution(image.value, weight.value, None, *_geometry(**sizes), groups))

    def conv_dgrad(self, *, loss: Symbol, filter: Symbol, **sizes: list[int]) -> Symbol:  # noqa: A002
        w = filter.value
        return Symbol(None, of_shape=lambda shape: _conv_gradients(loss.value, w.new_zeros(shape), w, sizes)[0])

    def conv_wgrad(self, *, image: Symbol, loss: Symbol, **sizes: list[int]) -> Symbol:
        x = image.value
        return Symbol(None, of_shape=lambda shape: _conv_gradients(loss.value, x, x.new_zeros(shape), sizes)[1])

    # Attention.

    def sdpa(
        self,
        *,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        attn_scale: Symbol,
        generate_stats: bool,
        sink_token: Symbol | None = None,
        paged_attention_k_table: Symbol | None = None,
        paged_attention_v_table: Symbol | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        name: str = "",
        **options: Any,
    ) -> list[Symbol | None]:
        del name
        keys, values, is_paged = k.value, v.value, paged_attention_k_table is not None
        if is_paged:
            pages = paged_attention_max_seq_len_kv, options["seq_len_kv"].tensor
            keys = _of_pages(keys, paged_attention_k_table, *pages)
            values = _of_pages(values, paged_attention_v_table, *pages)
        scores, seen, share, _ = self._scores(q, k, keys, attn_scale, **options)
        values = values.repeat_interleave(scores.shape[1] // values.shape[1], 1)
        if is_paged:  # whatever is on pages that nobody sees
            values = values.masked_fill(~seen.any(2).unsqueeze(-1), 0.0)
        if sink_token is not None:
            column = sink_token.value.expand(scores.shape[0], -1, scores.shape[2], 1)
            scores, values = torch.cat([scores, column], -1), torch.nn.functional.pad(values, (0, 0, 0, 1))
            share = torch.nn.functional.pad(share, (0, 1))
        out = (scores.softmax(-1).nan_to_num(0.0) * share) @ values
        return [Symbol(out), Symbol(scores.logsumexp(-1, keepdim=True)) if generate_stats else None]

    def sdpa_backward(
        self,
        *,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        o: Symbol,
        dO: Symbol,
        stats: Symbol,
        attn_scale: Symbol,
        use_deterministic_algorithm: bool,
        dBias: Symbol | None = None,
        name: str = "",
        **options: Any,
    ) -> list[Symbol]:
        """The gradients of q, k and v; that of the bias is written."""
        del name
        assert use_deterministic_algorithm is self.key.option_values["deterministic"]
        self.is_repeatable = True
        scores, _, share, derivative = self._scores(q, k, k.value, attn_scale, **options)
        heads, group = k.value.shape[1], scores.shape[1] // k.value.shape[1]
        keys, values = (x.value.repeat_interleave(group, 1) for x in (k, v))
        weights = torch.exp(scores - stats.value)
        if options.get("bias") is None and options.get("score_mod") is None:
            weights = weights.nan_to_num(0.0)  # a mask of the kernel's own; others subtract two minus infinities
        mean = (dO.value * o.value).sum(-1, keepdim=True)
        of_scores = weights * (dO.value @ values.mT * share - mean)
        if dBias is not None:
            dBias.tensor = of_scores.sum_to_size(dBias.shape)
        of_products = derivative(self, Symbol(of_scores)).value * attn_scale.value
        return [
            Symbol(of_products @ keys),
            Symbol((of_products.mT @ q.value).unflatten(1, (heads, group)).sum(2)),
            Symbol(((weights * share).mT @ dO.value).unflatten(1, (heads, group)).sum(2)),
        ]

    def _scores(
        self,
        q: Symbol,
        k: Symbol,
        keys: Tensor,
        attn_scale: Symbol,
        *,
        bias: Symbol | None = None,
        score_mod: Callable[[Graph, Symbol], Symbol] | None = None,
        score_mod_bprop: Callable[[Graph, Symbol], Symbol] = lambda _, gradient: gradient,
        dropout: tuple[float, Symbol, Symbol] | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Symbol | None = None,
        seq_len_kv: Symbol | None = None,
        diagonal_alignment: Enum | None = None,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Graph, Symbol], Symbol]]:
        """The scores that the softmax sees, which keys are seen, the dropout factors, and the derivative of the scores.

        The order is cuDNN's: the scale, `score_mod`, ALiBi, the bias, the masks.
        """
        assert float(attn_scale.value.flatten()[0]) >= MIN_SCALE
        assert use_padding_mask or score_mod or seq_len_q is None, "lengths are read with a padding mask only"
        assert not (q.is_packed and seq_len_q is None), "packed sequences need lengths"
        totals = max_total_seq_len_q, max_total_seq_len_kv
        assert totals == (self.key.option_values.get("totals") or (None, None)), "other totals than the key's"
        assert bias is None or k.shape[2] > 1, "cuDNN misreads a bias of one key"
        scores = q.value @ keys.repeat_interleave(q.value.shape[1] // keys.shape[1], 1).mT * attn_scale.value
        if score_mod is not None:
            assert diagonal_alignment is None
            assert not use_alibi_mask
            scores = score_mod(self, Symbol(scores)).value
        sq, skv = scores.shape[2:]
        row, column = torch.arange(sq).view(-1, 1), torch.arange(skv)
        if use_alibi_mask:  # aligned top-left, as the causal mask that it needs
            slope = torch.tensor(slopes(scores.shape[1])).double().view(-1, 1, 1)
            scores = scores - slope * (row - column).abs()
        if bias is not None:  # in float32, as in kernels: beside -1e9 nothing is left of a score
            scores = (scores + bias.value).float().double()
        nq, nk = (
            torch.tensor(size).view(1, 1, 1, 1) if x is None else x.tensor.view(-1, 1, 1, 1)
            for x, size in ((seq_len_q, sq), (seq_len_kv, skv))
        )
        seen = (row < nq) & (column < nk)
        if bias is not None:  # kernels use base 2, in which values near the lowest float32 are infinite
            seen = seen & (bias.value.float() * math.log2(math.e) > -math.inf)
        if diagonal_alignment is not None:
            diagonal = row + (nk - nq if diagonal_alignment is TYPES.diagonal_alignment.BOTTOM_RIGHT else 0)
            if diagonal_band_right_bound is not None:
                seen = seen & (column <= diagonal + diagonal_band_right_bound)
            if diagonal_band_left_bound is not None:
                seen = seen & (column > diagonal - diagonal_band_left_bound)
        share = torch.ones_like(scores)
        if dropout is not None:
            p, seed, offset = dropout
            sizes = self.sequence, q.shape[2], k.shape[2]
            share = self.dropout(p, int(seed.tensor), int(offset.tensor), scores, sizes)
        return scores.masked_fill(~seen, -torch.inf), seen, share, score_mod_bprop

    # Attention in FP8.

    def sdpa_fp8(
        self,
        *,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        attn_scale: Symbol,
        generate_stats: bool,
        paged_attention_k_table: Symbol | None = None,
        paged_attention_v_table: Symbol | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        name: str = "",
        **options: Any,
    ) -> list[Symbol | None]:
        """O, on request the LSE, and the amax of the probabilities and of O."""
        del name
        scales = [options.pop(scale).tensor.view(1) for scale in Fp8Scales._fields]
        keys, values = k.tensor, v.tensor
        if paged_attention_k_table is not None:  # cuDNN reads the pages of all keys, also beyond the length
            keys = _of_pages(keys, paged_attention_k_table, paged_attention_max_seq_len_kv)
            values = _of_pages(values, paged_attention_v_table, paged_attention_max_seq_len_kv)
        out_dtype = self.key.outputs[0].layout.dtype
        of_masks = _fp8_masks(attn_scale, **options)
        call = from_fields(Fp8Arguments, q.tensor, keys, values, *scales, **of_masks, out_dtype=out_dtype)
        found = fp8_reference.attention(call)
        lse = Symbol(found.lse.unsqueeze(-1)) if generate_stats else None
        return [Symbol(found.out), lse, *(Symbol(x.view(1, 1, 1, 1)) for x in (found.amax_s, found.amax_o))]

    def sdpa_fp8_backward(
        self,
        *,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        o: Symbol,
        dO: Symbol,
        stats: Symbol,
        attn_scale: Symbol,
        use_deterministic_algorithm: bool,
        name: str = "",
        **options: Any,
    ) -> list[Symbol]:
        """The gradients of q, k and v, their amax values, and that of the scores' gradient."""
        del name
        assert use_deterministic_algorithm is self.key.option_values["deterministic"]
        self.is_repeatable = True
        by_name = {"do": "dO", "dp": "dP", "dq": "dQ", "dk": "dK", "dv": "dV"}
        scales = []
        for field in Fp8BackwardScales._fields:
            kind, _, of = field.partition("_")
            scales.append(options.pop(f"{kind}_{by_name.get(of, of)}").tensor.view(1))
        tensors = [x.tensor for x in (dO, q, k, v, o)]
        tensors.append(stats.tensor.squeeze(-1))
        call = from_fields(Fp8BackwardArguments, *tensors, *scales, **_fp8_masks(attn_scale, **options))
        found = fp8_reference.gradients(call)
        return [*map(Symbol, found[:3]), *(Symbol(x.view(1, 1, 1, 1)) for x in found[3:])]


def _mean(x: Tensor, scale: Symbol | None) -> Tensor:
    """The mean over the dimensions that cuDNN normalizes: those of the scale; without one, all but the first."""
    dims = [dim for dim in range(x.dim()) if (dim > 0 if scale is None else scale.shape[dim] != 1)]
    return x.mean(dims, keepdim=True) if dims else x


def _geometry(
    *, pre_padding: list[int], post_padding: list[int], stride: list[int], dilation: list[int]
) -> tuple[list[int], list[int], list[int], bool, list[int]]:
    assert pre_padding == post_padding
    return stride, pre_padding, dilation, False, [0] * len(stride)


def _conv_gradients(loss: Tensor, image: Tensor, weight: Tensor, sizes: dict[str, list[int]]) -> Sequence[Tensor]:
    groups = image.shape[1] // weight.shape[1]
    wanted = [True, True, False]
    return torch.ops.aten.convolution_backward(loss, image, weight, None, *_geometry(**sizes), groups, wanted)


def _of_pages(pages: Tensor, table: Symbol, keys: int, lengths: Tensor | None = None) -> Tensor:
    """Keys or values in the order of a page table; wild page ids beyond the lengths are not followed."""
    ids, size = table.tensor.flatten(1).long(), pages.shape[2]
    if lengths is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[1]) * size >= lengths.view(-1, 1), 0)
    found = pages.view(torch.uint8)[ids] if pages.dtype.itemsize == 1 else pages[ids]
    assert keys == ids.shape[1] * size, "a maximum length that is not that of the table"
    return found.view(pages.dtype).transpose(1, 2).flatten(2, 3)[:, :, :keys]


def _fp8_masks(
    attn_scale: Symbol,
    *,
    use_padding_mask: bool = False,
    seq_len_q: Symbol | None = None,
    seq_len_kv: Symbol | None = None,
    diagonal_alignment: Enum | None = None,
    left_bound: int | None = None,
    right_bound: int | None = None,
) -> dict[str, Any]:
    is_bottom_right = diagonal_alignment is TYPES.diagonal_alignment.BOTTOM_RIGHT
    options: dict[str, Any] = {
        "causal_alignment": "bottom_right" if is_bottom_right else "top_left",
        "window_left": -1 if left_bound is None else left_bound - 1,
        "window_right": -1 if right_bound is None else right_bound,
        "scale": float(attn_scale.value.flatten()[0]),
    }
    assert use_padding_mask == (seq_len_q is not None) == (seq_len_kv is not None)
    lengths = {"q": seq_len_q, "kv": seq_len_kv}
    return options | {f"seq_lens_{name}": x.tensor.flatten() for name, x in lengths.items() if x is not None}


@torch.no_grad()
def evaluate(
    operation: GraphDefinition, key: PlanKey, operands: Operands, *, dropout: Dropout = random_share
) -> list[Tensor]:
    """The results of the graph that an operation's builder makes for a key.

    Args:
        operation: The operation.
        key: The key.
        operands: The key's inputs and outputs by name, the latter for their shapes. Of packed tensors, the rows of one
            sequence, whose number is `sequence`.
        dropout: The dropout factors.
    """
    graph = Graph(key, operands, dropout)
    _, symbols = operation._build(key, graph)
    assert graph.is_repeatable or not key.option_values.get("deterministic"), (
        "any engine, where the key is deterministic"
    )
    results = []
    for output, symbol in zip(key.outputs, symbols, strict=True):
        shape = operands[output.name].shape
        found = symbol.tensor if symbol.of_shape is None else symbol.of_shape(shape)
        assert found is not None, f"{output.name} of {key.name}: no operation writes it"
        assert found.shape == shape, f"{output.name} of {key.name}: {tuple(found.shape)} instead of {tuple(shape)}"
        results.append(found)
    return results
