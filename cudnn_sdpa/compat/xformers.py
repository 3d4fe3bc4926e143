"""xFormers' attention and its biases on this library: `from cudnn_sdpa.compat import xformers as xops`.

Biases are those of `xformers.ops.fmha.attn_bias`, with the same names, constructors and fields. Those of an installed
xFormers are taken, too, as their names and fields say what they mean.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT, Alignment
from cudnn_sdpa.compat.calls import dense, packed, packed_on_pages
from cudnn_sdpa.compat.missing import MissingError, missing
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError, raise_if_unsupported

if TYPE_CHECKING:
    from typing_extensions import Self
else:  # a type checker would take any name for one of this module
    _STATES = "`cudnn_sdpa.sdpa` with return_lse=True, and `cudnn_sdpa.merge_states`"
    _MISSING = {
        "*Gappy*": ("sequences of keys with gaps have no kernel", "pages, or a tensor (B, H, Mq, Mkv) as attn_bias"),
        "memory_efficient_attention_backward": ("it takes states of xFormers' operators", "`cudnn_sdpa.sdpa_backward`"),
        "memory_efficient_attention_*": ("it returns or takes states of xFormers' operators", _STATES),
        "merge_attentions": ("no function here returns partial attention", _STATES),
        "*AttentionOp*": ("kernels are chosen by `cudnn_sdpa.providers`", "op=None"),
        "MemoryEfficientAttention*Op": ("kernels are chosen by `cudnn_sdpa.providers`", "op=None"),
    }
    __getattr__ = missing(__name__, _MISSING)

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalMask",
    "BlockDiagonalPaddedKeysMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalPaddedKeysMask",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
]


# Lengths of sequences.


@dataclass
class SeqLenInfo:
    """Where sequences begin in one tensor: `seqstart` (B + 1,) int32, and `seqstart_py`, the same as a list."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: torch.device | str | None = None) -> SeqLenInfo:
        """The sequences of these lengths, one after the other."""
        lengths = list(seqlens)
        starts = list(accumulate(lengths, initial=0))
        return cls(_int32(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)


@dataclass
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences that begin at multiples of `padding`, of lengths `seqlen` (B,) int32."""

    seqlen: Tensor
    seqlen_py: Sequence[int]
    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: torch.device | str | None = None
    ) -> PaddedSeqLenInfo:
        """The sequences of these lengths, with room for `padding` tokens each."""
        lengths = list(seqlens)
        if max(lengths, default=0) > padding:
            raise OptionError("kv_seqlen", f"a length of {max(lengths)}", f"at most kv_padding, {padding}")
        starts = [padding * index for index in range(len(lengths) + 1)]
        return cls(
            seqstart=_int32(starts, device),
            max_seqlen=max(lengths, default=-1),
            min_seqlen=min(lengths, default=-1),
            seqstart_py=starts,
            seqlen=_int32(lengths, device),
            seqlen_py=lengths,
            padding=padding,
        )


def _int32(numbers: Sequence[int], device: torch.device | str | None) -> Tensor:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.tensor(numbers, dtype=torch.int32).to(default if device is None else device, non_blocking=True)


def _check_as_many(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise OptionError("kv_seqlen", f"{len(kv_seqlen)} lengths", f"{len(q_seqlen)}, as q_seqlen has")


# Biases. Their class says where the diagonal is, their fields how wide a window around it is.


class AttentionBias:
    """A mask that is described, not stored. `is_causal` and `alignment` say which keys follow a query.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat import xformers as xops
        >>> q = k = v = torch.randn(1, 10, 4, 16, dtype=torch.bfloat16)  # sequences of 3 and 7 tokens
        >>> bias = xops.BlockDiagonalMask.from_seqlens([3, 7]).make_causal()
        >>> xops.memory_efficient_attention(q, k, v, attn_bias=bias.to(q.device)).shape
        torch.Size([1, 10, 4, 16])
    """

    is_causal: ClassVar[bool] = False
    alignment: ClassVar[Alignment] = BOTTOM_RIGHT

    def __post_init__(self) -> None:
        for name, least in (("_window_size", 1), ("window_left", 0), ("window_right", 0)):
            if (size := getattr(self, name, least)) < least:
                raise OptionError(name.removeprefix("_"), repr(size), f"{least} or more")

    @property
    def materialize(self) -> NoReturn:
        """Missing: biases are described, not stored."""
        works = "the bias itself as attn_bias, or a tensor (B, H, Mq, Mkv) of yours"
        raise MissingError(f"{type(self).__name__}.materialize", ["biases are described, not stored"], works)

    def to(self, device: torch.device | str) -> Self:
        """A bias of the same values whose tensors are on a device."""
        moved = {name: _moved(x, device) for name, x in vars(self).items()}
        found = object.__new__(type(self))
        vars(found).update(moved)
        return found


def _moved(x: Any, device: torch.device | str) -> Any:
    if isinstance(x, SeqLenInfo):
        return replace(x, **{each.name: _moved(getattr(x, each.name), device) for each in fields(x)})
    return x.to(device, non_blocking=True) if isinstance(x, Tensor) else x


class LowerTriangularMask(AttentionBias):
    """A causal mask that aligns the first query with the first key."""

    is_causal = True
    alignment = TOP_LEFT

    def __init__(self, device: object = None) -> None:
        """`device` has no meaning, as in xFormers."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """A bias of this mask, and of numbers (B, H, Mq, Mkv) that are added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """A causal mask that aligns the first query with the first key, and a bias (B, H, Mq, Mkv)."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A causal mask that aligns the last query with the last key."""

    is_causal = True

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """A causal mask that shows the last `window_size` keys alone."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """A causal mask of the last `_window_size` keys, that of the query included."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A window from `window_left` keys before to `window_right` keys after the diagonal."""

    window_left: int
    window_right: int


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Packed sequences, in a batch of 1: queries see the keys of their own sequence."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """The bias of sequences of these lengths; `kv_seqlen` None is `q_seqlen`."""
        q_seqinfo = k_seqinfo = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is not None and list(kv_seqlen) != list(q_seqlen):
            _check_as_many(q_seqlen, kv_seqlen)
            k_seqinfo = SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        return cls(q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """The bias of tensors (B, M, …), and these as one, (1, tokens, …)."""
        found = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])], device=tensors[0].device)
        found._batch_sizes = [x.shape[0] for x in tensors]
        return found, _as_one(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Sequence[Tensor] | None = None,
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """The bias of queries and keys (B, M, …), and these and the values as one each."""
        of_q, of_k = ([x.shape[1] for x in each for _ in range(x.shape[0])] for each in (tensors_q, tensors_k))
        found = cls.from_seqlens(of_q, of_k, device=tensors_q[0].device)
        found._batch_sizes = [x.shape[0] for x in tensors_q]
        values = None if tensors_v is None else _as_one(tensors_v)
        return found, _as_one(tensors_q), _as_one(tensors_k), values

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """The sequences of queries in (1, tokens, …), as `from_tensor_lists_qkv` got them."""
        return _split(tensor, self.q_seqinfo, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """The sequences of keys in (1, tokens, …)."""
        return _split(tensor, self.k_seqinfo, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The sequences in (1, tokens, …), as `from_tensor_list` got them."""
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """A bias of these sequences whose causal mask aligns their first tokens."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """A bias of these sequences whose causal mask aligns their last tokens."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """A bias as by `make_causal`, whose queries see the last `window_size` keys alone."""
        parts = self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        return BlockDiagonalCausalLocalAttentionMask(*parts, _window_size=window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """A bias as by `make_causal_from_bottomright`, whose queries see the last `window_size` keys alone."""
        parts = self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*parts, _window_size=window_size)


def _as_one(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten(0, 1) for x in tensors]).unsqueeze(0)


def _split(tensor: Tensor, info: SeqLenInfo, batch_sizes: Sequence[int] | None) -> list[Tensor]:
    starts = info.seqstart_py
    if tensor.dim() < 2 or tuple(tensor.shape[:2]) != (1, starts[-1]):
        raise ShapeError("tensor", shape_of(tensor), f"(1, {starts[-1]}, …)")
    sizes = [1] * (len(starts) - 1) if batch_sizes is None else batch_sizes
    bounds = list(accumulate(sizes, initial=0))
    parts = torch.split(tensor[0], [starts[b] - starts[a] for a, b in pairwise(bounds)])
    return [x.reshape(size, -1, *x.shape[1:]) for x, size in zip(parts, sizes, strict=True)]


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Packed sequences under a causal mask that aligns the first query of each with its first key."""

    is_causal = True
    alignment = TOP_LEFT


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Packed sequences under a causal mask that aligns the last query of each with its last key."""

    is_causal = True


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """`BlockDiagonalCausalMask` of the last `_window_size` keys, that of the query included."""

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """`BlockDiagonalCausalFromBottomRightMask` of the last `_window_size` keys, that of the query included."""

    _window_size: int = 0


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Packed queries, and keys with room for as many in each sequence. For inference."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: object = None,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """The bias of `q_seqlen` queries and `kv_seqlen` keys, each with room for `kv_padding` of them."""
        return cls(*_padded_info(q_seqlen, kv_padding, kv_seqlen, device))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """A bias of these sequences whose window lies around the diagonal of their last tokens."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: type[PagedT]) -> PagedT:
        """A bias of these sequences, whose keys are in pages."""
        k_seqinfo = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, k_seqinfo, block_tables, page_size)


def _padded_info(
    q_seqlen: Sequence[int], padding: int, kv_seqlen: Sequence[int], device: torch.device | str | None = None
) -> tuple[SeqLenInfo, PaddedSeqLenInfo]:
    _check_as_many(q_seqlen, kv_seqlen)
    of_keys = PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, padding, device=device)
    return SeqLenInfo.from_seqlens(q_seqlen, device=device), of_keys


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask` under a causal mask that aligns the last query with the last key."""

    causal_diagonal: Any = None
    is_causal = True


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask` in a window around the diagonal that aligns the last query with the last key."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """As `from_seqlens`, with a window."""
        parts = _padded_info(q_seqlen, kv_padding, kv_seqlen)
        return cls(*parts, window_left=window_left, window_right=window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask` of the last `_window_size` keys, that of the query included."""

    _window_size: int
    is_causal = True

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        """As `from_seqlens`, with a window."""
        return cls(*_padded_info(q_seqlen, kv_padding, kv_seqlen), _window_size=window_size)


@dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """Packed queries, and keys in pages (1, pages · page size, H, K). For inference."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: PaddedSeqLenInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: torch.device | str | None = None,
    ) -> Self:
        """The bias of `q_seqlen` queries and `kv_seqlen` keys in the pages of `block_tables` (B, max pages) int32."""
        parts = _padded_info(q_seqlen, block_tables.shape[1] * page_size, kv_seqlen, device)
        return cls(*parts, block_tables=block_tables, page_size=page_size)


PagedT = TypeVar("PagedT", bound=PagedBlockDiagonalPaddedKeysMask)


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """`PagedBlockDiagonalPaddedKeysMask` under a causal mask that aligns the last query with the last key."""

    is_causal = True


# Attention.


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention as xFormers' function of this name computes it, by `sdpa`, `sdpa_varlen` or `sdpa_paged_varlen`.

    Differentiable, but for biases of padded or paged keys.

    Args:
        query: Queries (B, Mq, H, K), or (B, Mq, K) of one head, or of groups that share a key head, (B, Mq, G, H, K).
        key: Keys, likewise with Mkv. A group that is expanded over H is read once.
        value: Values, likewise with Kv.
        attn_bias: A tensor (B, H, Mq, Mkv) that is added to the scores, or is False where a key is masked; or one of
            the biases of this module or of xFormers.
        p: Dropout probability.
        scale: Factor of the scores; None is 1/sqrt(K).
        op: None; kernels are chosen by `cudnn_sdpa.providers`.
        output_dtype: None or the dtype of the query.

    Returns:
        The output (B, Mq, H, Kv), or in the rank of the query. Queries without keys get zeros.

    Raises:
        ArgumentError: An argument is wrong; the message says which and how.
        UnsupportedError: An operator, another dtype, or a bias of another class is asked for, or no kernel here can run
            the call.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.xformers import LowerTriangularMask, memory_efficient_attention
        >>> q = k = v = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16)
        >>> memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask()).shape
        torch.Size([2, 16, 8, 64])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise OptionError(name, type(x).__name__, "a torch.Tensor")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ShapeError(name, shape_of(x), "(B, M, H, K), (B, M, K) or (B, M, G, H, K), of the rank of query")
    reasons = {
        "op: the kernels are chosen by cudnn_sdpa.providers": op is not None,
        "output_dtype: the output has the dtype of the query": output_dtype not in (None, query.dtype),
    }
    raise_if_unsupported("this call of memory_efficient_attention", reasons, "op=None, and out.to(output_dtype)")
    q, k, v = _with_heads(query, key, value)
    out = _attention(q, k, v, attn_bias, p=p, scale=scale, rank=query.dim())
    if query.dim() == 3:
        return out.squeeze(2)
    return out if query.dim() == 4 else out.reshape(*query.shape[:4], out.shape[-1])


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` without gradients.

    Arguments, results and errors are those of that.

    Examples:
        >>> import torch
        >>> from cudnn_sdpa.compat.xformers import memory_efficient_attention_forward
        >>> q = k = v = torch.randn(2, 16, 8, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> memory_efficient_attention_forward(q, k, v).requires_grad
        False
    """
    with torch.no_grad():
        return memory_efficient_attention(
            query, key, value, attn_bias, p=p, scale=scale, op=op, output_dtype=output_dtype
        )


_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "k_pages": "key",
    "v_pages": "value",
    "attn_mask": "attn_bias",
    "dropout_p": "p",
    "cu_seqlens_q": "attn_bias.q_seqinfo.seqstart",
    "cu_seqlens_kv": "attn_bias.k_seqinfo.seqstart",
    "seq_lens_kv": "attn_bias.k_seqinfo.seqlen",
    "page_table": "attn_bias.block_tables",
}


def _with_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (B, M, heads, K); keys and values of a group that are expanded have one head."""
    if query.dim() == 4:
        return query, key, value
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    for name, x in (("key", key), ("value", value)):
        if x.shape[2:4] != query.shape[2:4]:
            raise ShapeError(name, shape_of(x), f"(B, M, {query.shape[2]}, {query.shape[3]}, K), as query has")
    if key.stride(3) == 0 == value.stride(3):
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | AttentionBias | None, *, p: float, scale: float | None, rank: int
) -> Tensor:
    kind = None if bias is None or isinstance(bias, Tensor) else _class_of(bias)
    options: dict[str, Any] = {"scale": scale}
    if kind is not None:
        options |= {
            "is_causal": kind.is_causal,
            "causal_alignment": kind.alignment,
            "window_size": _window_of(bias),
        }
    if kind is None or not issubclass(kind, _PACKED):
        mask = bias if isinstance(bias, Tensor) else getattr(bias, "_bias", None)
        if mask is not None and rank != 4:
            mask = mask.unsqueeze(1) if rank == 3 else mask.flatten(1, 2)
        return dense((q, k, v), options, _NAMES, attn_mask=mask, dropout_p=p)[0]
    described: Any = bias
    of_q, of_k = described.q_seqinfo, described.k_seqinfo
    _check_tokens("query", q, of_q.seqstart_py[-1])
    if issubclass(kind, BlockDiagonalMask):
        for name, x in (("key", k), ("value", v)):
            _check_tokens(name, x, of_k.seqstart_py[-1])
        offsets, lengths = (of_q.seqstart, of_k.seqstart), (of_q.max_seqlen, of_k.max_seqlen)
        return packed((q[0], k[0], v[0]), offsets, lengths, options, names=_NAMES, dropout_p=p)[0].unsqueeze(0)
    raise_if_unsupported(kind.__name__, {"p: attention on padded or paged keys has no dropout": p != 0}, "p=0.0")
    if issubclass(kind, PagedBlockDiagonalPaddedKeysMask):
        size, table = described.page_size, described.block_tables
    else:
        batch = len(of_k.seqstart_py) - 1
        size, table = of_k.padding, torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
    for name, x in (("key", k), ("value", v)):
        if x.shape[0] != 1 or x.shape[1] % size:
            raise ShapeError(name, shape_of(x), f"(1, a multiple of {size} tokens, H, K)")
    pages = (x[0].view(-1, size, *x.shape[2:]) for x in (k, v))
    out, _ = packed_on_pages(
        (q[0], *pages),
        _NAMES,
        page_table=table,
        seq_lens_kv=of_k.seqlen,
        cu_seqlens_q=of_q.seqstart,
        max_seqlen_q=of_q.max_seqlen,
        **options,
    )
    return out.unsqueeze(0)


_BIASES: dict[str, type[AttentionBias]] = {
    name: kind for name in __all__ if isinstance(kind := globals()[name], type) and kind is not AttentionBias
}
#: Where they are defined here, and in xFormers: names that `torch.compile` can compare.
_MODULES = __name__, "xformers.ops.fmha.attn_bias", "mslk.attention.fmha.attn_bias"
_PACKED = (BlockDiagonalMask, BlockDiagonalPaddedKeysMask, PagedBlockDiagonalPaddedKeysMask)


def _class_of(bias: object) -> type[AttentionBias]:
    """The class of this module of a bias, which may be one of xFormers."""
    kind = type(bias)
    found = _BIASES.get(kind.__name__) if kind.__module__ in _MODULES else None
    if found is None:
        made = ", such as attn_bias.materialize(shape, dtype, device)" if hasattr(bias, "materialize") else ""
        raise UnsupportedError(
            f"attn_bias of class {kind.__module__}.{kind.__name__}",
            ["its mask has no kernel here"],
            f"a tensor (B, H, Mq, Mkv){made}, or a bias of cudnn_sdpa.compat.xformers",
        )
    return found


def _window_of(bias: Any) -> tuple[int, int] | None:
    if hasattr(bias, "_window_size"):
        return bias._window_size - 1, 0
    return (bias.window_left, bias.window_right) if hasattr(bias, "window_left") else None


def _check_tokens(name: str, x: Tensor, tokens: int) -> None:
    if x.shape[0] != 1 or x.shape[1] != tokens:
        raise ShapeError(name, shape_of(x), f"(1, {tokens}, H, K), as attn_bias describes")


#: Where xFormers has its biases, `xops.fmha.attn_bias`, and some of them, `xops.fmha`.
fmha = attn_bias = sys.modules[__name__]
