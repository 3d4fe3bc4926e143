"""The modules of `cudnn_sdpa.nn`, implemented independently in plain PyTorch and float64, with their parameters.

Shares no formula with the library. Gradients come from autograd.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, as leaves in float64."""
    return {name: x.detach().double().requires_grad_() for name, x in module.named_parameters()}


def linear(x: Tensor, params: dict[str, Tensor], name: str) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def part(params: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): x for key, x in params.items() if key.startswith(f"{name}.")}


def norm(module: Any, params: dict[str, Tensor], x: Tensor) -> Tensor:
    weight = params.get("weight", torch.ones(x.shape[-1], dtype=x.dtype, device=x.device))
    if type(module).__name__ == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * weight + params.get("bias", 0.0)
    weight = weight + module.zero_centered if "weight" in params else weight
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(rope: Any, heads: Tensor, positions: Tensor) -> Tensor:
    half = rope.rotary_dim // 2
    powers = torch.arange(half, dtype=torch.float64, device=heads.device) / half
    speeds = rope.base**-powers
    if rope.explicit_frequencies is not None:
        speeds = torch.tensor(rope.explicit_frequencies, dtype=torch.float64, device=heads.device)
    turns = torch.polar(
        torch.ones((), dtype=torch.float64, device=heads.device), positions.double()[..., None] * speeds
    )
    turns = turns[..., None, :]  # (..., S, 1, pairs)
    turned, rest = heads[..., : 2 * half], heads[..., 2 * half :]
    if rope.interleaved:
        found = torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (half, 2)).contiguous()) * turns).flatten(
            -2
        )
    else:
        found = torch.complex(turned[..., :half], turned[..., half:]) * turns
        found = torch.cat([found.real, found.imag], dim=-1)
    return torch.cat([found, rest], dim=-1)


def seen(module: Any, sq: int, skv: int, lens_q: list[int], lens_kv: list[int], device: Any) -> Tensor:
    """Booleans (B, 1, Sq, Skv): the last query of a sequence is aligned with its last key."""
    rows, columns = torch.arange(sq, device=device)[:, None], torch.arange(skv, device=device)[None]
    found = []
    for nq, nk in zip(lens_q, lens_kv, strict=True):
        diagonal = rows + (nk - nq if module.is_causal or module.window_size else 0)
        here = (rows < nq) & (columns < nk)
        if module.is_causal:
            here = here & (columns <= diagonal)
        left, right = module.window_size or (-1, -1)
        here = here & (columns >= diagonal - left) if left >= 0 else here
        found.append(here & (columns <= diagonal + right) if right >= 0 else here)
    return torch.stack(found)[:, None]


def attention(
    module: Any,
    params: dict[str, Tensor],
    x: Tensor,
    context: Tensor | None = None,
    *,
    attn_mask: Tensor | None = None,
    seq_lens: Tensor | None = None,
    context_lens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    batch, length, dim = x.shape[0], x.shape[1], module.head_dim
    if context is None:
        every = linear(x, params, "qkv_proj").view(batch, length, -1, dim)
        q, k, v = every.split([module.num_heads, module.num_kv_heads, module.num_kv_heads], dim=2)
    else:
        q = linear(x, params, "q_proj").view(batch, length, -1, dim)
        k, v = linear(context, params, "kv_proj").view(batch, context.shape[1], -1, dim).chunk(2, dim=2)
    if module.rope is not None:
        positions = torch.arange(length, device=x.device) if position_ids is None else position_ids
        q, k = (rotate(module.rope, heads, positions) for heads in (q, k))
    group = module.num_heads // module.num_kv_heads
    k, v = (heads.repeat_interleave(group, dim=2) for heads in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (dim**-0.5 if module.scale is None else module.scale)
    if module.softcap is not None:
        scores = module.softcap * torch.tanh(scores / module.softcap)
    lens_kv = seq_lens if context is None else context_lens
    lens = [[n] * batch if x is None else x.tolist() for x, n in ((seq_lens, length), (lens_kv, k.shape[1]))]
    visible = seen(module, length, k.shape[1], *lens, x.device)
    if attn_mask is not None:
        visible = visible & attn_mask if attn_mask.dtype == torch.bool else visible
        scores = scores if attn_mask.dtype == torch.bool else scores + attn_mask.double()
    sinks = params.get("sinks")
    last = (
        torch.full_like(scores[..., :1], -math.inf)
        if sinks is None
        else sinks.view(1, -1, 1, 1).expand_as(scores[..., :1])
    )
    if sinks is None:
        last = torch.where(visible.any(-1, keepdim=True), last, 0.0)
    weights = torch.cat([scores.masked_fill(~visible, -math.inf), last], dim=-1).softmax(-1)[..., :-1]
    if seq_lens is not None:  # rows past the length are zeros, also with a sink
        weights = weights * (torch.arange(length, device=x.device) < seq_lens[:, None])[:, None, :, None]
    return linear(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2), params, "out_proj")


def feed_forward(module: Any, params: dict[str, Tensor], x: Tensor) -> Tensor:
    if type(module).__name__ == "SwiGLU":
        gate, up = linear(x, params, "gate_up_proj").chunk(2, dim=-1)
        return linear(gate * torch.sigmoid(gate) * up, params, "down_proj")
    activations = {
        "gelu": lambda y: y * 0.5 * (1 + torch.erf(y / math.sqrt(2))),
        "gelu_tanh": lambda y: y * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
        "relu": lambda y: y.clamp_min(0),
        "silu": lambda y: y * torch.sigmoid(y),
    }
    return linear(activations[module.activation](linear(x, params, "linear1")), params, "linear2")


def layer(module: Any, params: dict[str, Tensor], x: Tensor, **options: Any) -> Tensor:
    def attend(y: Tensor) -> Tensor:
        return attention(module.self_attn, part(params, "self_attn"), y, **options)

    def feed(y: Tensor) -> Tensor:
        return feed_forward(module.mlp, part(params, "mlp"), y)

    def normed(name: str, y: Tensor) -> Tensor:
        return norm(getattr(module, name), part(params, name), y)

    if module.norm_first:
        x = x + attend(normed("norm1", x))
        return x + feed(normed("norm2", x))
    x = normed("norm1", x + attend(x))
    return normed("norm2", x + feed(x))


def patches(module: Any, params: dict[str, Tensor], images: Tensor) -> Tensor:
    height, width = module.patch_size
    cut = images.unfold(2, height, height).unfold(3, width, width)  # (B, C, rows, columns, height, width)
    rows = cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    found = rows @ params["weight"].flatten(1).T
    return found + params["bias"] if "bias" in params else found


def vision(module: Any, params: dict[str, Tensor], images: Tensor) -> Tensor:
    x = patches(module.patch_embed, part(params, "patch_embed"), images)
    if module.class_token is not None:
        x = torch.cat([params["class_token"].expand(x.shape[0], 1, -1), x], dim=1)
    x = x + params["position_embedding"]
    for number, each in enumerate(module.layers):
        x = layer(each, part(params, f"layers.{number}"), x)
    return norm(module.norm, part(params, "norm"), x)


def evaluate(module: nn.Module, params: dict[str, Tensor], *tensors: Tensor, **options: Any) -> Tensor:
    """The result of a module in float64."""
    by_name = {
        "Attention": attention,
        "RMSNorm": norm,
        "LayerNorm": norm,
        "SwiGLU": feed_forward,
        "FeedForward": feed_forward,
        "PatchEmbed": patches,
        "TransformerLayer": layer,
        "VisionEncoder": vision,
    }
    return by_name[type(module).__name__](module, params, *tensors, **options)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN where there is a NaN."""
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm().clamp_min(1e-30))


def randomize(module: nn.Module) -> nn.Module:
    """Randomizes all parameters, so that no bias, sink or norm has its initial value."""
    with torch.no_grad():
        for name, x in module.named_parameters():
            if x.dim() == 1:
                x.copy_(0.5 * torch.randn_like(x) + ("norm" in name or name == "weight"))
    return module


def assert_right(module: nn.Module, *tensors: Tensor, tolerance: float, **options: Any) -> None:
    """Compares the output without and with gradients, and the gradients by all tensors and parameters."""
    params = parameters_of(module)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = evaluate(module, params, *exact, **options)
    with torch.no_grad():
        assert difference(module(*tensors, **options), expected) < tolerance
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = module(*leaves, **options)
    assert out.shape == expected.shape
    assert difference(out, expected) < tolerance
    grad = torch.randn_like(out)
    names = [*(f"input {number}" for number in range(len(leaves))), *params]
    found = torch.autograd.grad(out, [*leaves, *module.parameters()], grad)
    wanted = torch.autograd.grad(expected, [*exact, *params.values()], grad.double())
    for name, one, other in zip(names, found, wanted, strict=True):
        assert difference(one, other) < 2 * tolerance, name
