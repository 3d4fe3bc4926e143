"""`Attention`: multi-head attention with its projections, and all options of `sdpa`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from cudnn_sdpa.attention.arguments import softmax_of
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.engine.sharding import sinks_of_heads
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.nn import attention_checks
from cudnn_sdpa.nn.checks import Factory, check_number, check_tokens, checked_flags, unsharded
from cudnn_sdpa.nn.conversion import check_type, copy_linear, copy_parameter, merge, rename, split
from cudnn_sdpa.nn.kv_cache import KVStep
from cudnn_sdpa.nn.rotary import RotaryEmbedding, Rotations

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from cudnn_sdpa.distributed.parallel_attention import MethodName

KeysAndValues = tuple[Tensor, Tensor]


class _ScoreOptions(TypedDict, total=False):
    """Options of `sdpa` and `context_parallel` that a module holds."""

    is_causal: bool
    window_size: tuple[int, int] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


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
        heads = attention_checks.head_sizes(embed_dim, num_heads, num_kv_heads, head_dim)
        self.embed_dim, self.num_heads, (self.num_kv_heads, self.head_dim) = embed_dim, num_heads, heads
        self.context_dim, self.packed = context_dim, packed
        check_number("dropout", dropout, below=1)
        softmax = softmax_of(is_causal, "top_left", window_size, scale, softcap=softcap)
        softmax.check()
        is_causal, scale, softcap = softmax.is_causal, softmax.scale, softmax.softcap
        attention_checks.check_cross_attention(
            context_dim=context_dim,
            is_causal=is_causal,
            window_size=window_size,
            rope=rope,
            head_dim=self.head_dim,
        )
        attention_checks.check_parallel(cp_group, cp_method, context_dim)
        self.cp_group, self.cp_method = cp_group, cp_method
        self.is_causal, self.window_size = is_causal, window_size
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
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
        self.rope = rope
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the weights as `torch.nn.Linear` does, biases and sinks with zeros."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
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
        for name in options.keys() - {"is_causal", "window_size", "scale", "softcap", "rope"}:
            expected = "is_causal, window_size, scale, softcap or rope: the module has the others"
            raise OptionError("options", name, expected)
        attention_checks.check_convertible(module, cross)
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
        attention_checks.check_call(
            self,
            x,
            context=context,
            attn_mask=attn_mask,
            seq_lens=seq_lens,
            context_lens=context_lens,
            position_ids=position_ids,
            rotations=rotations,
            step=step,
        )
        options: _ScoreOptions = {
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
            if self.cp_group is not None:
                return self._of_all_ranks(q, k, v, options)
            lengths = context_lens if self.context_dim is not None else seq_lens
            dropout = self.dropout if self.training else 0.0
            out = sdpa(
                q, k, v, attn_mask=attn_mask, seq_lens_q=seq_lens, seq_lens_kv=lengths, dropout_p=dropout, **options
            )
        else:
            positions = step.positions if position_ids is None else position_ids
            q, k, v = self._heads(x, None, self._rotations(x, positions, rotations))
            options["sinks"] = self._sinks(q)
            cache: Any = step.cache()
            cache.append(step, k, v, layer)
            if attn_mask is None:
                out = cache.attend(step, q, layer, **options)
            else:
                out = cache.attend(step, q, layer, attn_mask=attn_mask, **options)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    def _of_all_ranks(self, q: Tensor, k: Tensor, v: Tensor, options: _ScoreOptions) -> Tensor:
        from cudnn_sdpa.distributed import context_parallel

        dropout = self.dropout if self.training else 0.0
        out = context_parallel(q, k, v, group=self.cp_group, method=self.cp_method, dropout_p=dropout, **options)
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
            positions = attention_checks.positions_of(x, self.cp_group)
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
        heads_q, heads_kv = self.num_heads, self.num_kv_heads
        projected = unsharded("qkv_proj", self.qkv_proj(x), (heads_q + 2 * heads_kv) * self.head_dim)
        heads = projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
        if self.rope is not None and rotations is not None:
            rotated = self.rope.rotate(heads[:, :, : heads_q + heads_kv], rotations)
            q, k = torch.split(rotated, [heads_q, heads_kv], dim=2)
            v = heads[:, :, heads_q + heads_kv :]
        else:
            q, k, v = torch.split(heads, [heads_q, heads_kv, heads_kv], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _separate_heads(
        self, x: Tensor, context: Tensor | KeysAndValues | None, rotations: Rotations | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, S, D) of separate projections, which may have some of the heads."""
        q = self._heads_of("q_proj", x)
        if context is not None:
            k, v = context if isinstance(context, tuple) else self.project_context(context)
        else:
            k, v = self._heads_of("k_proj", x), self._heads_of("v_proj", x)
            if self.rope is not None:  # with a sequence in parts, projections return more tokens than x has
                rotations = self._rotations(q, None, rotations)
                assert rotations is not None
                q, k = self.rope.rotate(q, rotations), self.rope.rotate(k, rotations)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        heads = q.shape[2], k.shape[1], v.shape[1]
        if heads[1:] != (self.num_kv_heads,) * 2 or heads[0] != self.num_heads:
            attention_checks.check_groups(self, heads)
        return q.transpose(1, 2), k, v

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        projected: Tensor = getattr(self, name)(x)
        if projected.shape[-1] % self.head_dim:
            attention_checks.refuse_parts_of_heads(name, projected, self.head_dim)
        return projected.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-any-return,no-untyped-call]

    def _sinks(self, q: Tensor) -> Tensor | None:
        if self.sinks is None:
            return None
        # A wrapper of the projection may lack `weight`.
        weight = None if self.packed else getattr(self.q_proj, "weight", None)
        return sinks_of_heads(self.sinks, weight, q).float()

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
        others = {name: getattr(self, name) for name in ("is_causal", "window_size", "scale", "softcap", "dropout")}
        others["cp_method"] = "" if self.cp_group is None else self.cp_method
        text += "".join(f", {name}={value}" for name, value in others.items() if value)
        return text if self.packed else f"{text}, packed=False"
