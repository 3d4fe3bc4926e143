"""`TransformerLayer`: attention and a feed-forward network with norms and residual connections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from cudnn_sdpa.errors import OptionError, check_choice, raise_if_unsupported
from cudnn_sdpa.nn.attention import Attention, AttentionOptions, ConversionOptions
from cudnn_sdpa.nn.checks import Factory, check_counts, check_number, checked_flags
from cudnn_sdpa.nn.conversion import LINEAR, check_type, copy_linear, rename
from cudnn_sdpa.nn.feed_forward import ACTIVATIONS, FeedForward, SwiGLU, drop
from cudnn_sdpa.nn.norms import NORMS, LayerNorm, RMSNorm, norm_from_torch

#: Names in Hugging Face's LLaMA and in PyTorch's layer, and ours.
OTHER_NAMES = {
    "input_layernorm.": "norm1.",
    "post_attention_layernorm.": "norm2.",
    "linear1.": "mlp.linear1.",
    "linear2.": "mlp.linear2.",
}


class TransformerLayer(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)): by default with RMSNorm and SwiGLU, as in LLaMA.

    Its submodules are `norm1`, `self_attn`, `norm2` and `mlp`. `load_state_dict` also accepts the names of a layer of
    Hugging Face's LLaMA and of `torch.nn.TransformerEncoderLayer`.

    Args:
        embed_dim: Features of a token.
        num_heads: Number of query heads.
        ffn_dim: Hidden features of the feed-forward network.
        norm: "rms_norm" or "layer_norm".
        activation: "swiglu", which is gated, or "gelu", "gelu_tanh", "relu", "silu".
        norm_first: Whether norms come before attention and feed-forward network; if not, after the sums, as in BERT.
        norm_eps: Of the norms; None is 1e-6 for "rms_norm" and 1e-5 for "layer_norm". Weights do not include it: LLaMA
            2 and 3 use 1e-5 ("rms_norm_eps" in a model's configuration).
        bias: Whether projections, and norms of "layer_norm", have biases.
        dropout: Dropout probability in training, as in PyTorch's layer: of the attention weights, of both residual
            branches, and of the hidden features unless the activation is gated.
        packed: Of `Attention` and `SwiGLU`: False for tensor parallelism (`parallel_plan`).
        device: Of the parameters.
        dtype: Of the parameters.
        attention: Further options of `Attention` but `context_dim`.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        A layer of LLaMA:

        >>> import torch, cudnn_sdpa
        >>> rope = cudnn_sdpa.nn.RotaryEmbedding(head_dim=16, base=500000.0)
        >>> layer = cudnn_sdpa.nn.TransformerLayer(64, 4, 160, num_kv_heads=2, is_causal=True, rope=rope).bfloat16()
        >>> x = torch.randn(2, 10, 64, dtype=torch.bfloat16)
        >>> layer(x).shape
        torch.Size([2, 10, 64])

        The weights of PyTorch's layer:

        >>> encoder = torch.nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True, norm_first=True)
        >>> layer = cudnn_sdpa.nn.TransformerLayer.from_torch(encoder.eval().bfloat16())
        >>> torch.allclose(layer(x), encoder(x), atol=0.1)
        True
    """

    norm1: RMSNorm | LayerNorm
    norm2: RMSNorm | LayerNorm
    mlp: SwiGLU | FeedForward

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        *,
        norm: str = "rms_norm",
        activation: str = "swiglu",
        norm_first: bool = True,
        norm_eps: float | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        packed: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **attention: Unpack[AttentionOptions],
    ) -> None:
        super().__init__()
        check_choice("norm", norm, tuple(NORMS))
        check_choice("activation", activation, ("swiglu", *ACTIVATIONS))
        norm_first, bias = checked_flags(norm_first=norm_first, bias=bias)
        check_counts(ffn_dim=ffn_dim)
        check_number("dropout", dropout, below=1)
        context_dim: object = attention.get("context_dim")
        if context_dim is not None:
            raise OptionError("context_dim", repr(context_dim), "None: the layer has self-attention only")
        self.norm_first, self.dropout = norm_first, dropout
        factory: Factory = {"device": device, "dtype": dtype}
        norm_options: dict[str, bool] = {"bias": bias} if norm == "layer_norm" else {}
        default_eps = 1e-6 if norm == "rms_norm" else 1e-5
        eps = default_eps if norm_eps is None else norm_eps
        self.norm1 = NORMS[norm](embed_dim, eps, **norm_options, **factory)
        self.self_attn = Attention(
            embed_dim, num_heads, bias=bias, dropout=dropout, packed=packed, **factory, **attention
        )
        self.norm2 = NORMS[norm](embed_dim, eps, **norm_options, **factory)
        if activation == "swiglu":
            self.mlp = SwiGLU(embed_dim, ffn_dim, bias=bias, packed=packed, **factory)
        else:
            self.mlp = FeedForward(embed_dim, ffn_dim, activation=activation, bias=bias, dropout=dropout, **factory)

    def reset_parameters(self) -> None:
        """Initializes all parameters."""
        for module in (self.norm1, self.self_attn, self.norm2, self.mlp):
            module.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.TransformerEncoderLayer, **attention: Unpack[ConversionOptions]) -> TransformerLayer:
        """The equivalent of PyTorch's layer, with copies of its weights.

        Args:
            module: PyTorch's layer; its inputs are (batch, sequence, features).
            attention: The options of `Attention.from_torch`. PyTorch's boolean masks mean the opposite of ours.

        Raises:
            OptionError: `module` is not exactly a `torch.nn.TransformerEncoderLayer`.
            UnsupportedError: `module` computes something that this class does not, with every reason.
        """
        check_type("module", module, nn.TransformerEncoderLayer)
        activation = _activation_of(module)
        reasons = {
            f"its activation is {module.activation!r}, not one of {', '.join(ACTIVATIONS)}": activation is None,
            "dropout1 and dropout2 have different probabilities": module.dropout1.p != module.dropout2.p,
        }
        raise_if_unsupported(f"{cls.__name__}.from_torch", reasons)
        for name in ("linear1", "linear2"):
            check_type(f"module.{name}", getattr(module, name), *LINEAR)
        linear = module.linear1
        new = cls(
            linear.in_features,
            module.self_attn.num_heads,
            linear.out_features,
            norm="layer_norm",
            activation=activation or "gelu",
            norm_first=module.norm_first,
            bias=linear.bias is not None,
            dropout=module.dropout1.p,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        for name in ("norm1", "norm2"):
            setattr(new, name, norm_from_torch(f"module.{name}", getattr(module, name)))
        new.self_attn = Attention.from_torch(module.self_attn, **attention)
        assert isinstance(new.mlp, FeedForward)
        new.mlp.dropout = module.dropout.p
        copy_linear(new.mlp.linear1, module.linear1)
        copy_linear(new.mlp.linear2, module.linear2)
        return new.train(module.training)

    def forward(self, x: Tensor, **attention: object) -> Tensor:
        """The result for tokens.

        Args:
            x: (B, S, embed_dim).
            attention: Options of `Attention.forward`: attn_mask, seq_lens, position_ids, rotations, step, layer.

        Returns:
            (B, S, embed_dim).
        """
        if self.norm_first:
            x = x + self._drop(self.self_attn(self.norm1(x), **attention))
            return x + self._drop(self.mlp(self.norm2(x)))
        x = self.norm1(x + self._drop(self.self_attn(x, **attention)))
        normalized: Tensor = self.norm2(x + self._drop(self.mlp(x)))
        return normalized

    def _drop(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout, self.training)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
        rename(state_dict, prefix, OTHER_NAMES)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}, dropout={self.dropout}"


def _activation_of(module: nn.TransformerEncoderLayer) -> str | None:
    activation: object = module.activation
    if type(activation) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}[activation.approximate]
    names: dict[object, str] = {nn.ReLU: "relu", nn.SiLU: "silu"}
    names |= {functional.gelu: "gelu", functional.relu: "relu", torch.relu: "relu", functional.silu: "silu"}
    return names.get(type(activation)) or names.get(activation)
