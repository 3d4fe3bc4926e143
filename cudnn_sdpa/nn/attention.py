"""`Attention`: multi-head attention with its projections, and all options of `sdpa`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from cudnn_sdpa.attention.arguments import check_lengths, softmax_of
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.engine.sharding import parameter_of_all_heads, parameter_of_heads
from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, UnsupportedError, raise_if_unsupported
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.nn.checks import Factory, check_counts, check_number, check_tokens, checked_flags, unsharded
from cudnn_sdpa.nn.conversion import LINEAR, check_type, copy_linear, copy_parameter, merge, rename, split
from cudnn_sdpa.nn.kv_cache import KVStep
from cudnn_sdpa.nn.norms import RMSNorm, are_alike
from cudnn_sdpa.nn.rotary import Norms, RotaryEmbedding, Rotations, check_positions, checked_rotations, rotated
from cudnn_sdpa.serving.rope_append import rope_append

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from cudnn_sdpa.distributed.parallel_attention import MethodName

KeysAndValues = tuple[Tensor, Tensor]


class ConversionOptions(TypedDict, total=False):
    """Options of `Attention` that PyTorch's module does not have."""

    is_causal: bool
    window_size: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    rope: RotaryEmbedding | None


class AttentionOptions(ConversionOptions, total=False):
    """Options of `Attention` that layers of self-attention pass on."""

    num_kv_heads: int | None
    head_dim: int | None
    qkv_bias: bool | None
    sinks: bool
    qk_norm: float | None
    cp_group: ProcessGroup | DeviceMesh | None
    cp_method: MethodName


class Attention(nn.Module):
    """Multi-head attention with its projections, on `sdpa`: self-attention or cross-attention.

    Self-attention has one projection `qkv_proj`, with the rows of all query heads, then key heads, then value heads:
    one matrix product, from which attention reads queries, keys and values without copies. Cross-attention
    (`context_dim`) has `q_proj` and `kv_proj`. With `packed=False`, which tensor parallelism needs, both have `q_proj`,
    `k_proj` and `v_proj`; each process then computes the heads of its rows. `out_proj` follows. `load_state_dict`
    accepts packed and separate weights for either, `o_proj` of Hugging Face's models, and the names of
    `torch.nn.MultiheadAttention`.

    Tokens are (batch, sequence, features); masks are those of `sdpa`: True is to attend. On the GPU it computes in
    bfloat16 or float16: convert the module, or call it under `torch.autocast`.

    Args:
        embed_dim: Features of a token, and of the result.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, a divisor of `num_heads`; None is `num_heads`.
        head_dim: Head dim; None is embed_dim / num_heads.
        context_dim: Features of a token of the other sequence; makes it cross-attention.
        bias: Whether the projections have biases.
        qkv_bias: Whether the projections of queries, keys and values have biases; None is `bias`.
        is_causal: Whether later tokens are masked.
        window_size: (left, right): a token sees the tokens from `left` before to `right` after itself; -1 is unbounded.
        scale: Factor applied to the scores; None is 1/sqrt(head_dim).
        softcap: Logit soft-capping: scores become softcap · tanh(score / softcap).
        sinks: Whether each query head has a learned attention sink: a score that takes part in the softmax and has no
            value, computed in float32.
        rope: Rotates queries and keys by their positions. Layers may share one.
        qk_norm: Epsilon of a norm of each query and key head, before the rotation and in the same kernel, as in Qwen3;
            its weights are `q_norm.weight` and `k_norm.weight`. None is no norm.
        dropout: Dropout probability of the attention weights in training.
        packed: Whether projections that read the same tokens are one; False for tensor parallelism (`parallel_plan`).
        cp_group: The process group, or device mesh of one dimension, over which sequences are spread: tokens are this
            rank's part, as `cudnn_sdpa.distributed.shard` gives it, and attention is that of `context_parallel`. Takes
            no masks, lengths or steps. None for whole sequences.
        cp_method: The method of `context_parallel`: "all_gather", "ulysses" or "ring".
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        Grouped-query attention with rotary embeddings, as in LLaMA:

        >>> import torch, cudnn_sdpa
        >>> rope = cudnn_sdpa.nn.RotaryEmbedding(head_dim=16)
        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, num_kv_heads=2, is_causal=True, rope=rope).bfloat16()
        >>> x = torch.randn(2, 10, 64, dtype=torch.bfloat16)
        >>> attention(x).shape
        torch.Size([2, 10, 64])

        The weights of PyTorch's module:

        >>> reference = torch.nn.MultiheadAttention(64, 4, batch_first=True).bfloat16()
        >>> attention = cudnn_sdpa.nn.Attention.from_torch(reference)
        >>> torch.allclose(attention(x), reference(x, x, x)[0], atol=0.05)
        True

        Cross-attention:

        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, context_dim=32).bfloat16()
        >>> attention(x, torch.randn(2, 7, 32, dtype=torch.bfloat16)).shape
        torch.Size([2, 10, 64])
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        qkv_bias: bool | None = None,
        is_causal: bool = False,
        window_size: tuple[int, int] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        rope: RotaryEmbedding | None = None,
        qk_norm: float | None = None,
        dropout: float = 0.0,
        packed: bool = True,
        cp_group: ProcessGroup | DeviceMesh | None = None,
        cp_method: MethodName = "all_gather",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        qkv_bias = bias if qkv_bias is None else qkv_bias
        bias, qkv_bias, sinks, packed = checked_flags(bias=bias, qkv_bias=qkv_bias, sinks=sinks, packed=packed)
        heads = _head_sizes(embed_dim, num_heads, num_kv_heads, head_dim)
        self.embed_dim, self.num_heads, (self.num_kv_heads, self.head_dim) = embed_dim, num_heads, heads
        self.context_dim, self.packed = context_dim, packed
        check_number("dropout", dropout, below=1)
        softmax = softmax_of(is_causal, "top_left", window_size, scale, softcap=softcap)
        softmax.check()
        self.is_causal, self.window_size, self.dropout = softmax.is_causal, window_size, dropout
        self.scale, self.softcap = softmax.scale, softmax.softcap
        _check_rope_and_context(self, rope, qk_norm)
        _check_parallel(cp_group, cp_method, context_dim)
        self.cp_group, self.cp_method = cp_group, cp_method
        rows, rows_kv = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        factory: Factory = {"device": device, "dtype": dtype}
        if not packed:
            of_keys = embed_dim if context_dim is None else context_dim
            self.q_proj = nn.Linear(embed_dim, rows, bias=qkv_bias, **factory)
            self.k_proj = nn.Linear(of_keys, rows_kv, bias=qkv_bias, **factory)
            self.v_proj = nn.Linear(of_keys, rows_kv, bias=qkv_bias, **factory)
        elif context_dim is None:
            self.qkv_proj = nn.Linear(embed_dim, rows + 2 * rows_kv, bias=qkv_bias, **factory)
        else:
            self.q_proj = nn.Linear(embed_dim, rows, bias=qkv_bias, **factory)
            self.kv_proj = nn.Linear(context_dim, 2 * rows_kv, bias=qkv_bias, **factory)
        self.out_proj = nn.Linear(rows, embed_dim, bias=bias, **factory)
        sinks_parameter = nn.Parameter(torch.empty(num_heads, **factory)) if sinks else None
        self.register_parameter("sinks", sinks_parameter)
        self.qk_norm = qk_norm
        self.q_norm = None if qk_norm is None else RMSNorm(self.head_dim, qk_norm, **factory)
        self.k_norm = None if qk_norm is None else RMSNorm(self.head_dim, qk_norm, **factory)
        self.rope = rope
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the weights as `torch.nn.Linear` does, biases and sinks with zeros, and norms with ones."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, cross: bool = False, **options: Unpack[ConversionOptions]
    ) -> Attention:
        """The equivalent of PyTorch's attention, with copies of its weights.

        PyTorch's boolean masks mean the opposite: True in its `attn_mask` and `key_padding_mask` is False in ours.

        Args:
            module: PyTorch's module; its inputs are (batch, sequence, features).
            cross: Whether it is called with keys and values of another sequence.
            options: is_causal, window_size, scale, softcap, rope, which PyTorch's module does not have.

        Raises:
            OptionError: `module` is not exactly a `torch.nn.MultiheadAttention`, or an option is wrong.
            UnsupportedError: `module` computes something that this class does not, with every reason.
        """
        check_type("module", module, nn.MultiheadAttention)
        (cross,) = checked_flags(cross=cross)
        *names, last = ConversionOptions.__annotations__
        for name in options.keys() - {*names, last}:
            raise OptionError("options", name, f"{', '.join(names)} or {last}: the module has the others")
        _check_convertible(module, cross)
        out_weight, bias = module.out_proj.weight, module.in_proj_bias is not None
        new = cls(
            module.embed_dim,
            module.num_heads,
            context_dim=module.kdim if cross else None,
            bias=bias,
            dropout=module.dropout,
            device=out_weight.device,
            dtype=out_weight.dtype,
            **options,
        )
        in_proj_weight: Tensor | None = module.in_proj_weight
        separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        q, k, v = separate if in_proj_weight is None else in_proj_weight.chunk(3)
        q_bias, k_bias, v_bias = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        if cross:
            copy_parameter(new.q_proj.weight, q)
            copy_parameter(new.q_proj.bias, q_bias)
            copy_parameter(new.kv_proj.weight, k, v)
            copy_parameter(new.kv_proj.bias, k_bias, v_bias)
        else:
            copy_parameter(new.qkv_proj.weight, q, k, v)
            copy_parameter(new.qkv_proj.bias, q_bias, k_bias, v_bias)
        copy_linear(new.out_proj, module.out_proj)
        return new.train(module.training)

    def forward(
        self,
        x: Tensor,
        context: Tensor | KeysAndValues | None = None,
        *,
        attn_mask: Tensor | None = None,
        seq_lens: Tensor | None = None,
        context_lens: Tensor | None = None,
        position_ids: Tensor | None = None,
        rotations: Rotations | None = None,
        step: KVStep | PagedStep | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Attention of tokens.

        Args:
            x: (B, S, embed_dim). With a step, the new tokens.
            context: For cross-attention, the other sequence (B, Skv, context_dim), or the result of `project_context`.
            attn_mask: Broadcastable to (B, Hq, S, Skv): boolean, True to attend, or float (additive). With a
                `KVCache` Skv is its `max_length`.
            seq_lens: Actual sequence lengths of x, (B,) int32; tokens past them are masked.
            context_lens: Actual sequence lengths of the context, (B,) int32.
            position_ids: Positions of the tokens for `rope`, (S,) or (B, S); None is those of the step, or 0 to S - 1.
            rotations: The result of `rope(position_ids)`, which layers may share; replaces `position_ids`.
            step: A reserved step of a `KVCache` or a `PagedKVCache`: the keys and values of x are appended, and the
                tokens attend to their whole sequences. For inference.
            layer: The layer of the cache.

        Returns:
            (B, S, embed_dim). Tokens past a length get the bias of `out_proj`.

        Raises:
            ArgumentError: An argument is wrong; the subclass and the message say which and how.
            UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason.
        """
        check_tokens("x", x, self.embed_dim)
        _check_context(self, x, context, context_lens)
        check_lengths("seq_lens", seq_lens, x, "x")
        _check_rotation(self, x, position_ids, rotations)
        _check_whole(self, attn_mask=attn_mask, seq_lens=seq_lens, step=step)
        if step is not None:
            _check_step(self, x, step, attn_mask=attn_mask, seq_lens=seq_lens)
        options: dict[str, Any] = {
            "is_causal": self.is_causal,
            "window_size": self.window_size,
            "scale": self.scale,
            "softcap": self.softcap,
        }
        if step is None:
            if self.packed or position_ids is not None:
                rotations = self._rotations(x, position_ids, rotations)
            q, k, v = self._heads(x, context, rotations)
            options["sinks"] = self._sinks(q)
            dropout = self.dropout if self.training else 0.0
            if self.cp_group is not None:
                from cudnn_sdpa.distributed import context_parallel

                group, method = self.cp_group, self.cp_method
                out = context_parallel(q, k, v, group=group, method=method, dropout_p=dropout, **options)
            else:
                lengths = context_lens if self.context_dim is not None else seq_lens
                out = sdpa(
                    q, k, v, attn_mask=attn_mask, seq_lens_q=seq_lens, seq_lens_kv=lengths, dropout_p=dropout, **options
                )
        else:
            positions = step.positions if position_ids is None else position_ids
            rotations = self._rotations(x, positions, rotations)
            cache: Any = step.cache()
            if self.packed and isinstance(step, PagedStep) and rotations is not None:
                q = self._append_rotated(x, rotations, step, layer)
            else:
                q, k, v = self._heads(x, None, rotations)
                cache.append(step, k, v, layer)
            options["sinks"] = self._sinks(q)
            masks = {} if attn_mask is None else {"attn_mask": attn_mask}
            out = cache.attend(step, q, layer, **masks, **options)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A copy of the parameters, with the same process group, which is no data."""
        if self.cp_group is not None:
            memo[id(self.cp_group)] = self.cp_group
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return copied

    def project_context(self, context: Tensor) -> KeysAndValues:
        """Keys and values (B, Hkv, Skv, D) of another sequence, to share between calls."""
        if self.context_dim is None:
            raise OptionError("context", "a tensor", "none: this is self-attention (context_dim=None)")
        check_tokens("context", context, self.context_dim)
        if not self.packed:
            return self._heads_of("k_proj", context).transpose(1, 2), self._heads_of("v_proj", context).transpose(1, 2)
        projected = unsharded("kv_proj", self.kv_proj(context), 2 * self.num_kv_heads * self.head_dim)
        heads = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        k, v = heads.transpose(1, 2).chunk(2, dim=1)
        return k, v

    def _rotations(self, x: Tensor, positions: Tensor | None, rotations: Rotations | None) -> Rotations | None:
        if self.rope is None or rotations is not None:
            return rotations
        if positions is None:
            positions = _positions_of(x, self.cp_group)
        result: Rotations = self.rope(positions)
        return result

    def _heads(
        self, x: Tensor, context: Tensor | KeysAndValues | None, rotations: Rotations | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, S, D), views of the projections: (B, S, H, D) in memory."""
        if not self.packed:
            return self._separate_heads(x, context, rotations)
        if context is not None:
            q = self.q_proj(x)
            if self.num_kv_heads > 1:  # with part of the query heads, the groups of a key head would be wrong
                unsharded("q_proj", q, self.num_heads * self.head_dim)
            q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return q, *(context if isinstance(context, tuple) else self.project_context(context))
        q, k, v = self._projected(x)
        q, k = self._rotated(q, k, rotations)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, S, H, D) of self-attention, views of one projection."""
        heads_q, heads_kv = self.num_heads, self.num_kv_heads
        projected = unsharded("qkv_proj", self.qkv_proj(x), (heads_q + 2 * heads_kv) * self.head_dim)
        heads = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        return torch.split(heads, [heads_q, heads_kv, heads_kv], dim=2)

    def _append_rotated(self, x: Tensor, rotations: Rotations, step: PagedStep, layer: int) -> Tensor:
        """Queries (B, Hq, S, D), rotated; one kernel writes keys, rotated likewise, and values into their pages."""
        assert self.rope is not None
        q, k, v = self._projected(x)
        q, k, norms = self._normed(q, k)
        cos, sin = checked_rotations(self.rope, rotations, *x.shape[:2])
        heads = {name: y.transpose(1, 2) for name, y in (("q", q), ("k", k), ("v", v))}
        return rope_append(step, layer, cos=cos, sin=sin, interleaved=self.rope.interleaved, **heads, **norms)

    def _separate_heads(
        self, x: Tensor, context: Tensor | KeysAndValues | None, rotations: Rotations | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, S, D) of separate projections, which may have some of the heads."""
        q = self._heads_of("q_proj", x)
        if context is not None:
            k, v = context if isinstance(context, tuple) else self.project_context(context)
        else:
            k, v = self._heads_of("k_proj", x), self._heads_of("v_proj", x)
            # With a sequence in parts, projections return more tokens than x has.
            q, k = self._rotated(q, k, self._rotations(q, None, rotations))
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        heads = q.shape[2], k.shape[1], v.shape[1]
        if heads[1:] != (self.num_kv_heads,) * 2 or heads[0] != self.num_heads:
            _check_groups(self, heads)
        return q.transpose(1, 2), k, v

    def _rotated(self, q: Tensor, k: Tensor, rotations: Rotations | None) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, S, H, D), normalized if there are norms, and rotated if there are rotations."""
        q, k, norms = self._normed(q, k)
        if self.rope is not None and rotations is not None:
            return rotated(self.rope, q, k, rotations, **norms)
        if norms:
            eps, zero_centered = norms["eps"], norms["zero_centered"]
            q = rms_norm(q, norms["q_weight"], eps, zero_centered=zero_centered)
            k = rms_norm(k, norms["k_weight"], eps, zero_centered=zero_centered)
        return q, k

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Norms]:
        """Queries and keys, and options of `rope` for norms; normalized already if no kernel of it computes these."""
        if self.q_norm is None or self.k_norm is None:
            return q, k, {}
        if not are_alike(self.q_norm, self.k_norm):
            return self.q_norm(q), self.k_norm(k), {}
        return (
            q,
            k,
            {
                "q_weight": self._weight_of(self.q_norm, "q_proj", q),
                "k_weight": self._weight_of(self.k_norm, "k_proj", k),
                "eps": self.q_norm.eps or 0.0,
                "zero_centered": self.q_norm.zero_centered,
            },
        )

    def _weight_of(self, norm: RMSNorm, projection: str, x: Tensor) -> Tensor:
        assert norm.weight is not None
        weight = None if self.packed else getattr(getattr(self, projection), "weight", None)
        return parameter_of_all_heads(norm.weight, weight, x)

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        projected: Tensor = getattr(self, name)(x)
        if projected.shape[-1] % self.head_dim:
            reason = f"{name} returned {projected.shape[-1]} features, which are no whole heads of {self.head_dim}"
            suggestion = "a number of processes that divides num_kv_heads"
            raise UnsupportedError("this tensor parallelism", [reason], suggestion)
        return projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return,no-untyped-call]

    def _sinks(self, q: Tensor) -> Tensor | None:
        if self.sinks is None:
            return None
        # A wrapper of the projection may lack `weight`.
        weight = None if self.packed else getattr(self.q_proj, "weight", None)
        return parameter_of_heads(self.sinks, weight, q).float()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        rows, rows_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        *_, error_msgs = rest
        rename(state_dict, prefix, {"o_proj.": "out_proj."})
        if not self.packed:
            rename(state_dict, prefix, {f"{name}_proj_weight": f"{name}_proj.weight" for name in "qkv"})
            if self.context_dim is None:
                rename(state_dict, prefix, {"in_proj_": "qkv_proj."})
            for kind in ("weight", "bias"):
                q, k, v = f"q_proj.{kind}", f"k_proj.{kind}", f"v_proj.{kind}"
                for merged in ("qkv_proj.", "in_proj_"):
                    split(state_dict, prefix, f"{merged}{kind}", {q: rows, k: rows_kv, v: rows_kv})
                split(state_dict, prefix, f"kv_proj.{kind}", {k: rows_kv, v: rows_kv})
        elif self.context_dim is None:
            rename(state_dict, prefix, {"in_proj_": "qkv_proj."})
            parts = {"q_proj": rows, "k_proj": rows_kv, "v_proj": rows_kv}
            merge(state_dict, prefix, into="qkv_proj", parts=parts, error_msgs=error_msgs)
        else:
            rename(state_dict, prefix, {f"{name}_proj_weight": f"{name}_proj.weight" for name in "qkv"})
            for kind in ("weight", "bias"):
                split(state_dict, prefix, f"in_proj_{kind}", {f"q_proj.{kind}": rows, f"kv_proj.{kind}": 2 * rows_kv})
            parts = {"k_proj": rows_kv, "v_proj": rows_kv}
            merge(state_dict, prefix, into="kv_proj", parts=parts, error_msgs=error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        text = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        others = {
            name: getattr(self, name) for name in ("is_causal", "window_size", "scale", "softcap", "dropout", "qk_norm")
        }
        others["cp_method"] = "" if self.cp_group is None else self.cp_method
        text += "".join(f", {name}={value}" for name, value in others.items() if value)
        return text if self.packed else f"{text}, packed=False"


def _head_sizes(embed_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
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


def _check_rope_and_context(module: Attention, rope: object, qk_norm: object) -> None:
    """Checks rope, qk_norm, and for cross-attention that no option compares positions or normalizes heads."""
    head_dim = module.head_dim
    if rope is not None and not isinstance(rope, RotaryEmbedding):
        raise OptionError("rope", type(rope).__name__, "cudnn_sdpa.nn.RotaryEmbedding or None")
    if rope is not None and rope.head_dim != head_dim:
        raise OptionError("rope", f"one for head_dim {rope.head_dim}", f"one for {head_dim}, the head_dim here")
    if qk_norm is not None:
        check_number("qk_norm", qk_norm)
    if module.context_dim is None:
        return
    check_counts(context_dim=module.context_dim)
    if qk_norm is not None:
        raise OptionError("qk_norm", repr(qk_norm), "None for cross-attention, which has no norms of heads")
    options: tuple[tuple[str, object, object], ...] = (
        ("is_causal", module.is_causal, False),
        ("window_size", module.window_size, None),
        ("rope", rope, None),
    )
    for name, value, off in options:
        if value is not off:
            expected = f"{off}: positions in the two sequences of cross-attention are not comparable"
            raise OptionError(name, repr(value) if name != "rope" else "one", expected)


def _check_groups(module: Attention, heads: tuple[int, int, int]) -> None:
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


def _check_convertible(module: nn.MultiheadAttention, cross: bool) -> None:
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
    raise_if_unsupported("Attention.from_torch", reasons)


def _check_rotation(module: Attention, x: Tensor, position_ids: Tensor | None, rotations: object) -> None:
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


def _check_whole(module: Attention, **of_whole_sequences: object) -> None:
    if module.cp_group is not None:
        why = "is for whole sequences, of which cp_group gives each rank a part"
        reasons = {f"{name} {why}": value is not None for name, value in of_whole_sequences.items()}
        raise_if_unsupported("Attention with cp_group", reasons, "cudnn_sdpa.distributed.context_parallel_varlen")


def _check_parallel(cp_group: object, cp_method: object, context_dim: int | None) -> None:
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


def _positions_of(x: Tensor, cp_group: ProcessGroup | DeviceMesh | None) -> Tensor:
    """Positions of tokens (B, S, features): 0 to S - 1, or those of this rank's part of the sequence."""
    if cp_group is None:
        return torch.arange(x.shape[1], device=x.device)
    from cudnn_sdpa.distributed import shard
    from cudnn_sdpa.distributed.collectives import group_rank_of

    return shard(torch.arange(x.shape[1] * group_rank_of(cp_group).ranks, device=x.device), 0, cp_group)


def _check_context(
    module: Attention, x: Tensor, context: Tensor | KeysAndValues | None, context_lens: Tensor | None
) -> None:
    if module.context_dim is None:
        for name, value in (("context", context), ("context_lens", context_lens)):
            if value is not None:
                raise OptionError(name, type(value).__name__, "None: this is self-attention (context_dim=None)")
        return
    check_lengths("context_lens", context_lens, x, "x")
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
    check_tokens("context", context, module.context_dim)
    if context.shape[0] != x.shape[0]:
        raise ShapeError("context", shape_of(context), f"batch {x.shape[0]}, as x has ({shape_of(x)})")


def _check_step(module: Attention, x: Tensor, step: object, *, attn_mask: object, seq_lens: object) -> None:
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
