"""`VisionEncoder` and `PatchEmbed`: the encoder of vision transformers, and its patch embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from cudnn_sdpa.engine.tensor_checks import shape_of
from cudnn_sdpa.errors import OptionError, ShapeError, check_choice, raise_if_unsupported
from cudnn_sdpa.fused.conv import conv2d
from cudnn_sdpa.nn.attention import AttentionOptions
from cudnn_sdpa.nn.checks import Factory, check_counts, checked_flags
from cudnn_sdpa.nn.conversion import check_type, copy_parameter
from cudnn_sdpa.nn.feed_forward import drop
from cudnn_sdpa.nn.norms import NORMS, LayerNorm, RMSNorm, norm_from_torch
from cudnn_sdpa.nn.transformer import TransformerLayer


class LayerOptions(AttentionOptions, total=False):
    """Options of `TransformerLayer` that `VisionEncoder` passes on."""

    norm_first: bool
    packed: bool


class PatchEmbed(nn.Module):
    """Splits images into patches and projects each to a token, by `conv2d`.

    Weight and bias are those of a `torch.nn.Conv2d` whose stride equals its kernel size.

    Args:
        patch_size: Height and width of a patch, one number for both or one for each.
        embed_dim: Features of a token.
        in_channels: Channels of the images.
        bias: Whether there is a bias.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> reference = torch.nn.Conv2d(3, 64, kernel_size=16, stride=16)
        >>> embed = cudnn_sdpa.nn.PatchEmbed.from_torch(reference)
        >>> images = torch.randn(2, 3, 32, 48)
        >>> tokens = embed(images)
        >>> tokens.shape, torch.allclose(tokens, reference(images).flatten(2).transpose(1, 2), atol=1e-5)
        (torch.Size([2, 6, 64]), True)

    From "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2020).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        patch_size: int | tuple[int, int],
        embed_dim: int,
        in_channels: int = 3,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.patch_size = pair("patch_size", patch_size)
        check_counts(embed_dim=embed_dim, in_channels=in_channels)
        (bias,) = checked_flags(bias=bias)
        self.embed_dim, self.in_channels = embed_dim, in_channels
        shape = (embed_dim, in_channels, *self.patch_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        bias_parameter = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", bias_parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes weight and bias as `torch.nn.Conv2d` does."""
        bound = (self.in_channels * self.patch_size[0] * self.patch_size[1]) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_torch(cls, module: nn.Conv2d) -> PatchEmbed:
        """The equivalent of PyTorch's convolution, with copies of its weight and bias.

        Raises:
            OptionError: `module` is not exactly a `torch.nn.Conv2d`.
            UnsupportedError: `module` is not a patch embedding, with every reason.
        """
        check_type("module", module, nn.Conv2d)
        reasons = {
            f"its stride {module.stride} is not its kernel size {module.kernel_size}": (
                module.stride != module.kernel_size
            ),
            f"it has padding {module.padding!r}": module.padding not in ((0, 0), "valid"),
            f"its filter has dilation {module.dilation}": module.dilation != (1, 1),
            f"it has {module.groups} groups of channels": module.groups != 1,
        }
        raise_if_unsupported(f"{cls.__name__}.from_torch", reasons, "cudnn_sdpa.conv2d with its weight and bias")
        like: Factory = {"device": module.weight.device, "dtype": module.weight.dtype}
        size = module.kernel_size[0], module.kernel_size[1]
        new = cls(size, module.out_channels, module.in_channels, bias=module.bias is not None, **like)
        copy_parameter(new.weight, module.weight)
        copy_parameter(new.bias, module.bias)
        return new.train(module.training)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens of images.

        Args:
            images: (B, in_channels, H, W); height and width are multiples of the patch size.

        Returns:
            (B, H / patch height · W / patch width, embed_dim), row by row.

        Raises:
            ArgumentError: `images` has another type or shape.
        """
        if not isinstance(images, Tensor):
            raise OptionError("images", type(images).__name__, "a torch.Tensor")
        height, width = self.patch_size
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ShapeError("images", shape_of(images), f"(batch, {self.in_channels}, height, width)")
        _, _, image_height, image_width = images.shape
        if image_height % height or image_width % width or 0 in (image_height, image_width):
            expected = f"multiples of the patch size, {height} x {width}"
            raise ShapeError("images", shape_of(images), expected, "Pad or crop them.")
        return conv2d(images, self.weight, self.bias, self.patch_size).flatten(2).transpose(1, 2)

    def extra_repr(self) -> str:
        size = f"patch_size={self.patch_size}, embed_dim={self.embed_dim}, in_channels={self.in_channels}"
        return size if self.bias is not None else size + ", bias=False"


def pair(name: str, sizes: object) -> tuple[int, int]:
    both = sizes if isinstance(sizes, (tuple, list)) else (sizes, sizes)
    if len(both) != 2:
        raise OptionError(name, repr(sizes), "one number, or two: height and width")
    height, width = both
    check_counts(**{name: height})
    check_counts(**{name: width})
    return height, width


class VisionEncoder(nn.Module):
    """A vision transformer without a head: patch embedding, learned position embedding, layers, and a norm.

    Args:
        image_size: Height and width of an image, one number for both or one for each.
        patch_size: Height and width of a patch, divisors of those of the image.
        embed_dim: Features of a token.
        num_layers: Number of layers.
        num_heads: Number of heads of each layer.
        ffn_dim: Hidden features of the feed-forward networks; None is four times `embed_dim`.
        in_channels: Channels of the images.
        class_token: Whether a learned token precedes those of the patches.
        norm: "layer_norm" or "rms_norm", in the layers and at the end.
        norm_eps: Of the norms.
        activation: As for `TransformerLayer`.
        bias: Whether projections and norms have biases.
        dropout: Dropout probability in training, after the position embedding and in the layers.
        device: Of the parameters.
        dtype: Of the parameters.
        attention: Options of each layer's `Attention`, such as num_kv_heads.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> encoder = cudnn_sdpa.nn.VisionEncoder(32, 8, embed_dim=64, num_layers=2, num_heads=4).bfloat16()
        >>> tokens = encoder(torch.randn(2, 3, 32, 32, dtype=torch.bfloat16))
        >>> tokens.shape  # the class token, and 4 · 4 patches
        torch.Size([2, 17, 64])

    From "An Image is Worth 16x16 Words" (Dosovitskiy et al., 2020).
    """

    class_token: nn.Parameter | None
    norm: RMSNorm | LayerNorm | nn.Identity

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch_size: int | tuple[int, int],
        *,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        ffn_dim: int | None = None,
        in_channels: int = 3,
        class_token: bool = True,
        norm: str = "layer_norm",
        norm_eps: float = 1e-6,
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **attention: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        self.image_size = pair("image_size", image_size)
        height, width = pair("patch_size", patch_size)
        if self.image_size[0] % height or self.image_size[1] % width:
            raise OptionError("image_size", repr(image_size), f"multiples of the patch size, {height} x {width}")
        check_counts(num_layers=num_layers)
        (class_token,) = checked_flags(class_token=class_token)
        check_choice("norm", norm, tuple(NORMS))
        factory: Factory = {"device": device, "dtype": dtype}
        self.patch_embed = PatchEmbed((height, width), embed_dim, in_channels, bias=bias, **factory)
        tokens = self.image_size[0] // height * (self.image_size[1] // width) + class_token
        class_parameter = nn.Parameter(torch.empty(1, 1, embed_dim, **factory)) if class_token else None
        self.register_parameter("class_token", class_parameter)
        self.position_embedding = nn.Parameter(torch.empty(1, tokens, embed_dim, **factory))
        self.dropout = dropout
        ffn_dim = 4 * embed_dim if ffn_dim is None else ffn_dim
        self.layers = nn.ModuleList(
            TransformerLayer(
                embed_dim,
                num_heads,
                ffn_dim,
                norm=norm,
                norm_eps=norm_eps,
                activation=activation,
                bias=bias,
                dropout=dropout,
                **factory,
                **attention,
            )
            for _ in range(num_layers)
        )
        norm_options: dict[str, bool] = {"bias": bias} if norm == "layer_norm" else {}
        self.norm = NORMS[norm](embed_dim, norm_eps, **norm_options, **factory)
        self._reset_tokens()

    def reset_parameters(self) -> None:
        """Initializes all parameters."""
        self._reset_tokens()
        for module in (self.patch_embed, *self.layers, self.norm):
            if not isinstance(module, nn.Identity):
                module.reset_parameters()

    def _reset_tokens(self) -> None:
        nn.init.trunc_normal_(self.position_embedding, std=0.02)
        if self.class_token is not None:
            nn.init.trunc_normal_(self.class_token, std=0.02)

    @classmethod
    def from_torch(
        cls,
        patch_embed: nn.Conv2d,
        position_embedding: Tensor,
        encoder: nn.TransformerEncoder,
        *,
        image_size: int | tuple[int, int],
        class_token: Tensor | None = None,
    ) -> VisionEncoder:
        """A vision transformer from PyTorch's modules, with copies of their weights.

        Args:
            patch_embed: The patch embedding.
            position_embedding: (tokens, features), or with a leading 1; the class token's first if there is one.
            encoder: The layers, and the norm at the end if there is one.
            image_size: Height and width of an image.
            class_token: (features,), or with leading ones.

        Raises:
            ArgumentError: A module has another class, or shapes do not match.
            UnsupportedError: A module computes something that this one does not, with every reason.

        Examples:
            >>> import torch, cudnn_sdpa
            >>> layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
            >>> layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
            >>> project, positions = torch.nn.Conv2d(3, 64, 8, 8), torch.randn(16, 64)
            >>> encoder = cudnn_sdpa.nn.VisionEncoder.from_torch(project, positions, layers, image_size=32)
            >>> images = torch.randn(2, 3, 32, 32)
            >>> expected = layers(project(images).flatten(2).transpose(1, 2) + positions)
            >>> with cudnn_sdpa.cpu_checks("h200,any-dtype"):  # float32 on the CPU
            ...     torch.allclose(encoder(images), expected, atol=1e-5)
            True
        """
        check_type("encoder", encoder, nn.TransformerEncoder)
        raise_if_unsupported(f"{cls.__name__}.from_torch", {"the encoder has no layers": not len(encoder.layers)})
        embed = PatchEmbed.from_torch(patch_embed)
        layers = [TransformerLayer.from_torch(layer) for layer in encoder.layers]
        new = cls(
            image_size,
            embed.patch_size,
            embed_dim=embed.embed_dim,
            num_layers=1,
            num_heads=1,
            ffn_dim=1,
            in_channels=embed.in_channels,
            class_token=class_token is not None,
            device=embed.weight.device,
            dtype=embed.weight.dtype,
        )
        for name, source in (("position_embedding", position_embedding), ("class_token", class_token)):
            target = getattr(new, name)
            if source is None:
                continue
            if _without_ones(source.shape) != _without_ones(target.shape):
                raise ShapeError(name, shape_of(source), f"shape {tuple(target.shape)}")
            copy_parameter(target, source.reshape(target.shape))
        new.patch_embed, new.layers = embed, nn.ModuleList(layers)
        new.norm = nn.Identity() if encoder.norm is None else norm_from_torch("encoder.norm", encoder.norm)
        return new.train(encoder.training)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens of images.

        Args:
            images: (B, in_channels, H, W), of `image_size`.

        Returns:
            (B, tokens, embed_dim): the class token, if there is one, then the patches row by row.

        Raises:
            ArgumentError: `images` has another type or shape.
        """
        if isinstance(images, Tensor) and images.dim() == 4 and tuple(images.shape[2:]) != self.image_size:
            raise ShapeError("images", shape_of(images), f"height and width {self.image_size}, the image_size")
        x = self.patch_embed(images)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], -1, -1).to(x.dtype), x), dim=1)
        x = drop(x + self.position_embedding, self.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        normalized: Tensor = self.norm(x)
        return normalized

    def extra_repr(self) -> str:
        return f"image_size={self.image_size}, class_token={self.class_token is not None}"


def _without_ones(shape: torch.Size) -> list[int]:
    sizes = list(shape)
    while sizes[:1] == [1]:
        del sizes[0]
    return sizes
