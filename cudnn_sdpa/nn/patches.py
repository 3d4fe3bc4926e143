"""`PatchEmbed`: pictures as sequences of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cudnn_sdpa.attention.side_tensors import shape_of
from cudnn_sdpa.conv import conv2d
from cudnn_sdpa.errors import OptionError, ShapeError
from cudnn_sdpa.nn.checks import check_counts, check_flags
from cudnn_sdpa.nn.conversion import check_type, copy_parameter, refuse


class PatchEmbed(nn.Module):
    """Cuts pictures into patches and projects each to a token, by `conv2d`.

    Weight and bias are those of a `torch.nn.Conv2d` whose steps are as large as its filter.

    Args:
        patch_size: Height and width of a patch, one number for both or one for each.
        embed_dim: Features of a token.
        in_channels: Channels of a picture.
        bias: Whether there is a bias.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> twin = torch.nn.Conv2d(3, 64, kernel_size=16, stride=16)
        >>> embed = cudnn_sdpa.nn.PatchEmbed.from_torch(twin)
        >>> images = torch.randn(2, 3, 32, 48)
        >>> tokens = embed(images)
        >>> tokens.shape, torch.allclose(tokens, twin(images).flatten(2).transpose(1, 2), atol=1e-5)
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
        check_flags(bias=bias)
        self.embed_dim, self.in_channels = embed_dim, in_channels
        shape = (embed_dim, in_channels, *self.patch_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        of_bias = nn.Parameter(torch.empty(embed_dim, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", of_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new weights as `torch.nn.Conv2d` does."""
        bound = (self.in_channels * self.patch_size[0] * self.patch_size[1]) ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    @classmethod
    def from_torch(cls, module: nn.Conv2d) -> PatchEmbed:
        """The same as a convolution of PyTorch's, with copies of its weight and bias.

        Raises:
            OptionError: It is something else.
            UnsupportedError: It is no projection of patches, with every reason.
        """
        check_type("module", module, nn.Conv2d)
        reasons = {
            f"its steps, {module.stride}, are not as large as its filter, {module.kernel_size}": (
                module.stride != module.kernel_size
            ),
            f"it has padding {module.padding!r}": module.padding not in ((0, 0), "valid"),
            f"its filter has dilation {module.dilation}": module.dilation != (1, 1),
            f"it has {module.groups} groups of channels": module.groups != 1,
        }
        refuse(f"{cls.__name__}.from_torch", reasons, "cudnn_sdpa.conv2d with its weight and bias")
        like: dict[str, Any] = {"device": module.weight.device, "dtype": module.weight.dtype}
        size = module.kernel_size[0], module.kernel_size[1]
        new = cls(size, module.out_channels, module.in_channels, bias=module.bias is not None, **like)
        copy_parameter(new.weight, module.weight)
        copy_parameter(new.bias, module.bias)
        return new.train(module.training)

    def forward(self, images: Tensor) -> Tensor:
        """Tokens of pictures.

        Args:
            images: (B, in_channels, H, W), in whole patches.

        Returns:
            (B, H / patch height · W / patch width, embed_dim), row by row.

        Raises:
            ArgumentError: They do not fit.
        """
        if not isinstance(images, Tensor):
            raise OptionError("images", type(images).__name__, "a torch.Tensor")
        height, width = self.patch_size
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ShapeError("images", shape_of(images), f"(batch, {self.in_channels}, height, width)")
        if images.shape[2] % height or images.shape[3] % width or 0 in images.shape[2:]:
            expected = f"height and width in whole patches of {height} x {width}"
            raise ShapeError("images", shape_of(images), expected, "Pad or crop them.")
        return conv2d(images, self.weight, self.bias, self.patch_size).flatten(2).transpose(1, 2)

    def extra_repr(self) -> str:
        """The arguments that it was made with."""
        size = f"patch_size={self.patch_size}, embed_dim={self.embed_dim}, in_channels={self.in_channels}"
        return size if self.bias is not None else size + ", bias=False"


def pair(name: str, sizes: Any) -> tuple[int, int]:
    """A height and a width, of one number for both or of two."""
    both = sizes if isinstance(sizes, (tuple, list)) else (sizes, sizes)
    if len(both) != 2:
        raise OptionError(name, repr(sizes), "one number, or two: height and width")
    check_counts(**{name: both[0]})
    check_counts(**{name: both[1]})
    return both[0], both[1]
