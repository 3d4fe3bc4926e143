"""`Attention`: multi-head attention with its projections, and all options of `sdpa`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.arguments import ForwardArguments, check_options, window_bounds
from cudnn_sdpa.attention.dense.sdpa import NO_DROPOUT, sdpa
from cudnn_sdpa.attention.paged.step import PagedStep
from cudnn_sdpa.errors import OptionError
from cudnn_sdpa.nn import attention_checks
from cudnn_sdpa.nn.checks import check_flags, check_number, check_tokens, whole
from cudnn_sdpa.nn.conversion import check_type, copy_linear, copy_parameter, merge, rename, split
from cudnn_sdpa.nn.kv_cache import KVStep
from cudnn_sdpa.nn.rotary import RotaryEmbedding, Rotations

KeysAndValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Multi-head attention with its projections, on `sdpa`: of a sequence on itself, or on another one.

    Self-attention has one projection `qkv_proj`, whose rows are those of all query heads, key heads, and value heads:
    one matrix product, from which attention reads queries, keys and values without copies. Cross-attention
    (`context_dim`) has `q_proj` and `kv_proj`. `out_proj` follows. `load_state_dict` also takes separate weights
    `q_proj`, `k_proj`, `v_proj` and `o_proj`, as Hugging Face's models have them, and the names of
    `torch.nn.MultiheadAttention`.

    Tokens are (batch, sequence, features); masks are those of `sdpa`: True is seen. On the GPU it computes in bfloat16
    and float16: make it so, or call it under `torch.autocast`.

    Args:
        embed_dim: Features of a token, and of the result.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values, a divisor of `num_heads`; as many if not given.
        head_dim: Size of a head; embed_dim / num_heads if not given.
        context_dim: Makes it cross-attention: features of a token of the other sequence.
        bias: Whether the projections have biases.
        qkv_bias: Whether those of queries, keys and values have; `bias` if not given.
        is_causal: Hide later tokens from each token.
        window_size: (left, right): a token sees those from `left` before to `right` after itself; -1 is no bound.
        scale: Factor applied to the scores; None is 1/sqrt(head_dim).
        softcap: Logit soft-capping: scores become softcap · tanh(score / softcap).
        sinks: Whether each query head has a learned score that takes part in the softmax and has no value. It is
            computed with in float32.
        rope: Turns queries and keys by their positions. Layers may share one.
        dropout: Share of the weights that is dropped in training.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        Grouped-query attention with rotary embeddings, as in LLaMA:

        >>> import torch, cudnn_sdpa
        >>> rope = cudnn_sdpa.nn.RotaryEmbedding(head_dim=16)
        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, num_kv_heads=2, is_causal=True, rope=rope)
        >>> attention(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])

        The weights of PyTorch's module:

        >>> reference = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> attention = cudnn_sdpa.nn.Attention.from_torch(reference)
        >>> x = torch.randn(2, 10, 64)
        >>> torch.allclose(attention(x), reference(x, x, x)[0], atol=1e-5)
        True

        Cross-attention:

        >>> attention = cudnn_sdpa.nn.Attention(64, num_heads=4, context_dim=32)
        >>> attention(torch.randn(2, 10, 64), torch.randn(2, 7, 32)).shape
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
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        qkv_bias = bias if qkv_bias is None else qkv_bias
        check_flags(bias=bias, qkv_bias=qkv_bias, sinks=sinks)
        heads = attention_checks.head_sizes(embed_dim, num_heads, num_kv_heads, head_dim)
        self.embed_dim, self.num_heads, (self.num_kv_heads, self.head_dim) = embed_dim, num_heads, heads
        self.context_dim = context_dim
        check_number("dropout", dropout, below=1)
        bounds = window_bounds(window_size)
        none: Any = None
        options = ForwardArguments(none, none, none, is_causal=is_causal, scale=scale, softcap=softcap)
        check_options(options._replace(window_left=bounds[0], window_right=bounds[1]))
        attention_checks.check_kind(context_dim, is_causal, window_size, rope, self.head_dim)
        self.is_causal, self.window_size, self.scale, self.softcap, self.dropout = (
            is_causal,
            window_size,
            scale,
            softcap,
            dropout,
        )
        rows, rows_kv = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if context_dim is None:
            self.qkv_proj = nn.Linear(embed_dim, rows + 2 * rows_kv, qkv_bias, device, dtype)
        else:
            self.q_proj = nn.Linear(embed_dim, rows, qkv_bias, device, dtype)
            self.kv_proj = nn.Linear(context_dim, 2 * rows_kv, qkv_bias, device, dtype)
        self.out_proj = nn.Linear(rows, embed_dim, bias, device, dtype)
        sinks_parameter = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sinks else None
        self.register_parameter("sinks", sinks_parameter)
        self.rope = rope
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights as `torch.nn.Linear` does, which do not depend on what shares a projection; no biases."""
        for module in self.children():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, cross: bool = False, **options: Any) -> Attention:
        """The same attention as PyTorch's, with copies of its weights.

        PyTorch's masks mean the opposite: where its boolean `attn_mask` and `key_padding_mask` have True, ours has
        False.

        Args:
            module: Its inputs are (batch, sequence, features).
            cross: Whether it is called with keys and values of another sequence.
            options: is_causal, window_size, scale, softcap, rope, which PyTorch's module does not have.

        Raises:
            OptionError: It is something else.
            UnsupportedError: It computes what this module does not, with every reason.
        """
        check_type("module", module, nn.MultiheadAttention)
        check_flags(cross=cross)
        for name in options.keys() - {"is_causal", "window_size", "scale", "softcap", "rope"}:
            expected = "is_causal, window_size, scale, softcap or rope: the module has the others"
            raise OptionError("options", name, expected)
        attention_checks.check_convertible(module, cross)
        weight, bias = module.out_proj.weight, module.in_proj_bias is not None
        made = {"bias": bias, "dropout": module.dropout, "device": weight.device, "dtype": weight.dtype}
        context_dim = module.kdim if cross else None
        new = cls(module.embed_dim, module.num_heads, context_dim=context_dim, **made, **options)
        in_proj_weight: Tensor | None = module.in_proj_weight
        separate = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        weights = separate if in_proj_weight is None else in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        parts = {new.q_proj: slice(1), new.kv_proj: slice(1, 3)} if cross else {new.qkv_proj: slice(3)}
        for linear, part in parts.items():
            copy_parameter(linear.weight, *weights[part])
            copy_parameter(linear.bias, *biases[part])
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
            context: For cross-attention, the other sequence (B, Skv, context_dim), or what `project_context` gave.
            attn_mask: Broadcastable to (B, Hq, S, Skv): boolean, True to attend, or float (additive). With a
                `KVCache` Skv is its `max_length`.
            seq_lens: Actual sequence lengths of x, (B,) int32; tokens past them are masked.
            context_lens: Actual sequence lengths of the context, (B,) int32.
            position_ids: Positions of the tokens for `rope`, (S,) or (B, S); those of the step, or 0 to S - 1, if not
                given.
            rotations: What `rope(position_ids)` gave, so that layers share it; taken instead of `position_ids`.
            step: What a `KVCache` or a `PagedKVCache` has reserved for x: its keys and values are appended, and the
                tokens see all of their sequences. For inference.
            layer: Of the cache.

        Returns:
            (B, S, embed_dim). Tokens past a length get the bias of `out_proj`.

        Raises:
            ArgumentError: An argument is wrong; the subclass and the message say which and how.
            UnsupportedError: cuDNN or this GPU has no kernel for it, with every reason.
        """
        check_tokens("x", x, self.embed_dim)
        given: dict[str, Any] = {"context": context, "context_lens": context_lens, "seq_lens": seq_lens, "step": step}
        given |= {"position_ids": position_ids, "rotations": rotations, "attn_mask": attn_mask}
        attention_checks.check_call(self, x, given)
        options: dict[str, Any] = {"is_causal": self.is_causal, "window_size": self.window_size, "scale": self.scale}
        options |= {"softcap": self.softcap, "sinks": None if self.sinks is None else self.sinks.float()}
        if step is None:
            q, k, v = self._heads(x, context, self._rotations(x, position_ids, rotations))
            lengths = context_lens if self.context_dim is not None else seq_lens
            dropout = self.dropout if self.training and self.dropout else NO_DROPOUT
            options |= {"attn_mask": attn_mask, "seq_lens_q": seq_lens, "seq_lens_kv": lengths, "dropout_p": dropout}
            out = sdpa(q, k, v, **options)
        else:
            positions = step.positions if position_ids is None else position_ids
            q, k, v = self._heads(x, None, self._rotations(x, positions, rotations))
            if attn_mask is not None:
                options["attn_mask"] = attn_mask
            cache: Any = step.cache()
            cache.append(step, k, v, layer)
            out = cache.attend(step, q, layer, **options)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected

    def project_context(self, context: Tensor) -> KeysAndValues:
        """Keys and values (B, Hkv, Skv, D) of another sequence, for many calls with the same one."""
        if self.context_dim is None:
            raise OptionError("context", "a tensor", "none: this is self-attention (context_dim=None)")
        check_tokens("context", context, self.context_dim)
        projected = whole("kv_proj", self.kv_proj(context), 2 * self.num_kv_heads * self.head_dim)
        k, v = projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).chunk(2, dim=1)
        return k, v

    def _rotations(self, x: Tensor, positions: Tensor | None, rotations: Rotations | None) -> Rotations | None:
        if self.rope is None or rotations is not None:
            return rotations
        made: Rotations = self.rope(torch.arange(x.shape[1], device=x.device) if positions is None else positions)
        return made

    def _heads(
        self, x: Tensor, context: Tensor | KeysAndValues | None, rotations: Rotations | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, S, D): in memory (B, S, H, D), parts of what the projections gave."""
        if context is not None:
            q = self.q_proj(x)
            if self.num_kv_heads > 1:  # groups of fewer query heads would be others
                whole("q_proj", q, self.num_heads * self.head_dim)
            q = q.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            return q, *(context if isinstance(context, tuple) else self.project_context(context))
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        heads = whole("qkv_proj", self.qkv_proj(x), sum(sizes) * self.head_dim).unflatten(-1, (-1, self.head_dim))
        q, k, v = torch.split(heads, sizes, dim=2)
        if self.rope is not None and rotations is not None:
            turned = self.rope.rotate(heads[:, :, : sizes[0] + sizes[1]], rotations)
            q, k = torch.split(turned, sizes[:2], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        rows, rows_kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rename(state_dict, prefix, {"o_proj.": "out_proj."})
        if self.context_dim is None:
            rename(state_dict, prefix, {"in_proj_": "qkv_proj."})
            merge(state_dict, prefix, "qkv_proj", {"q_proj": rows, "k_proj": rows_kv, "v_proj": rows_kv}, rest[-1])
        else:
            rename(state_dict, prefix, {f"{name}_proj_weight": f"{name}_proj.weight" for name in "qkv"})
            for kind in ("weight", "bias"):
                split(state_dict, prefix, f"in_proj_{kind}", {f"q_proj.{kind}": rows, f"kv_proj.{kind}": 2 * rows_kv})
            merge(state_dict, prefix, "kv_proj", {"k_proj": rows_kv, "v_proj": rows_kv}, rest[-1])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """The arguments that its projections do not show."""
        text = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        others = {name: getattr(self, name) for name in ("is_causal", "window_size", "scale", "softcap", "dropout")}
        return text + "".join(f", {name}={value}" for name, value in others.items() if value)
