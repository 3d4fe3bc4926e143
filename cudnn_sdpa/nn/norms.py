"""`RMSNorm` and `LayerNorm`: `rms_norm` and `layer_norm` as modules with weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cudnn_sdpa.engine.sharding import with_summed_gradient
from cudnn_sdpa.errors import OptionError, raise_if_unsupported
from cudnn_sdpa.fused.norm import layer_norm, rms_norm
from cudnn_sdpa.nn.checks import Factory, check_counts, check_number, checked_flags
from cudnn_sdpa.nn.conversion import check_type, copy_parameter


class RMSNorm(nn.Module):
    """`torch.nn.RMSNorm` over the last dimension, by `rms_norm`: x / sqrt(mean(x²) + eps) · weight.

    Args:
        normalized_shape: Size of the last dimension.
        eps: Added to the mean of the squares; None is PyTorch's default, the machine epsilon of float64 for float64 and
            of float32 (1.19e-7) for other dtypes. A model's configuration has its value: LLaMA uses 1e-5 or 1e-6.
        elementwise_affine: Whether there is a weight.
        zero_centered: Whether the weight is stored minus 1, as in Gemma; it is then initialized with 0.
        device: Of the weight.
        dtype: Of the weight: x's dtype or float32.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> reference = torch.nn.RMSNorm(64, eps=1e-5)
        >>> norm = cudnn_sdpa.nn.RMSNorm.from_torch(reference)
        >>> x = torch.randn(2, 10, 64)
        >>> torch.allclose(norm(x), reference(x), atol=1e-6)
        True
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        zero_centered: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _one_dimension(normalized_shape)
        if eps is not None:
            check_number("eps", eps)
        elementwise_affine, zero_centered = checked_flags(
            elementwise_affine=elementwise_affine, zero_centered=zero_centered
        )
        self.eps, self.elementwise_affine, self.zero_centered = eps, bool(elementwise_affine), bool(zero_centered)
        self.register_parameter("weight", _vector(self.normalized_shape, device, dtype, elementwise_affine))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets the weight, so that it has no effect."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    @classmethod
    def from_torch(cls, module: nn.RMSNorm) -> RMSNorm:
        """The equivalent of PyTorch's norm, with a copy of its weight.

        Raises:
            OptionError: `module` is not exactly a `torch.nn.RMSNorm`.
            UnsupportedError: It normalizes several dimensions.
        """
        check_type("module", module, nn.RMSNorm)
        _refuse_several(cls.__name__, module.normalized_shape)
        new = cls(module.normalized_shape[0], module.eps, module.elementwise_affine, **_like(module.weight))
        copy_parameter(new.weight, module.weight)
        return new.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of rows (..., n)."""
        weight = with_summed_gradient(self.weight)
        normalized: Tensor = rms_norm(x, weight, self.eps, zero_centered=self.zero_centered)
        return normalized

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return text + (", zero_centered=True" if self.zero_centered else "")


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` over the last dimension, by `layer_norm`: (x - mean) / sqrt(variance + eps) · weight + bias.

    Args:
        normalized_shape: Size of the last dimension.
        eps: Added to the variance.
        elementwise_affine: Whether there is a weight.
        bias: Whether there is also a bias.
        zero_centered: Whether the weight is stored minus 1; it is then initialized with 0.
        device: Of both.
        dtype: Of both: x's dtype or float32.

    Raises:
        OptionError: An argument is wrong.

    Examples:
        >>> import torch, cudnn_sdpa
        >>> reference = torch.nn.LayerNorm(64)
        >>> norm = cudnn_sdpa.nn.LayerNorm.from_torch(reference)
        >>> x = torch.randn(2, 10, 64)
        >>> torch.allclose(norm(x), reference(x), atol=1e-5)
        True
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        zero_centered: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _one_dimension(normalized_shape)
        check_number("eps", eps)
        elementwise_affine, bias, self.zero_centered = checked_flags(
            elementwise_affine=elementwise_affine, bias=bias, zero_centered=zero_centered
        )
        self.eps, self.elementwise_affine = eps, elementwise_affine
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            self.register_parameter(name, _vector(self.normalized_shape, device, dtype, exists))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Resets weight and bias, so that they have no effect."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_torch(cls, module: nn.LayerNorm) -> LayerNorm:
        """The equivalent of PyTorch's norm, with copies of its weight and bias.

        Raises:
            OptionError: `module` is not exactly a `torch.nn.LayerNorm`.
            UnsupportedError: It normalizes several dimensions.
        """
        check_type("module", module, nn.LayerNorm)
        _refuse_several(cls.__name__, module.normalized_shape)
        affine, with_bias = module.elementwise_affine, module.bias is not None
        new = cls(module.normalized_shape[0], module.eps, affine, with_bias, **_like(module.weight))
        copy_parameter(new.weight, module.weight)
        copy_parameter(new.bias, module.bias)
        return new.train(module.training)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of rows (..., n)."""
        weight, bias = with_summed_gradient(self.weight), with_summed_gradient(self.bias)
        return layer_norm(x, weight, bias, self.eps, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"
        return f"{text}, bias={self.bias is not None}" + (", zero_centered=True" if self.zero_centered else "")


def are_alike(*norms: nn.Module) -> bool:
    """Whether one kernel computes both norms: not if a caller has replaced, wrapped or hooked one, or unset its eps."""
    if any(type(norm) is not RMSNorm or norm.weight is None or norm.eps is None for norm in norms):
        return False
    options = {(norm.eps, norm.zero_centered) for norm in norms if isinstance(norm, RMSNorm)}
    return len(options) == 1 and not any(norm._forward_hooks or norm._forward_pre_hooks for norm in norms)


def _one_dimension(shape: object) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
    if len(sizes) != 1:
        raise OptionError("normalized_shape", repr(shape), "the size of one dimension, the last")
    check_counts(normalized_shape=sizes[0])
    return sizes


def _vector(
    shape: tuple[int, ...], device: torch.device | str | int | None, dtype: torch.dtype | None, exists: bool
) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if exists else None


def _like(weight: Tensor | None) -> Factory:
    return {} if weight is None else {"device": weight.device, "dtype": weight.dtype}


def _refuse_several(name: str, shape: tuple[int, ...]) -> None:
    several = {f"it normalizes the last {len(shape)} dimensions, and cuDNN's norm only one": len(shape) != 1}
    raise_if_unsupported(f"{name}.from_torch", several, "flattening these dimensions before it")


NORMS: dict[str, type[RMSNorm | LayerNorm]] = {"rms_norm": RMSNorm, "layer_norm": LayerNorm}


def norm_from_torch(name: str, module: nn.Module) -> RMSNorm | LayerNorm:
    check_type(name, module, nn.LayerNorm, nn.RMSNorm)
    if isinstance(module, nn.RMSNorm):
        return RMSNorm.from_torch(module)
    assert isinstance(module, nn.LayerNorm)
    return LayerNorm.from_torch(module)
