"""A transformer block on this library and the same block on PyTorch, for tests of compilers and model wrappers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cudnn_sdpa import rms_norm, sdpa, silu_mul


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm."""

    def __init__(self, width: int = 32, heads: int = 4, *, pytorch: bool = False) -> None:
        super().__init__()
        self.heads, self.pytorch = heads, pytorch
        self.attention_norm = nn.Parameter(torch.rand(width) + 0.5)
        self.gate_norm = nn.Parameter(torch.rand(width) + 0.5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self._norm(x, self.attention_norm)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        attend = F.scaled_dot_product_attention if self.pytorch else sdpa
        x = x + self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self._norm(x, self.gate_norm)).chunk(2, dim=2)
        return x + self.down(F.silu(gate) * up if self.pytorch else silu_mul(gate, up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-6) if self.pytorch else rms_norm(x, weight)


def model_and_reference(
    device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 32
) -> tuple[Block, Block]:
    ours, theirs = (Block(width, pytorch=pytorch).to(device, dtype) for pytorch in (False, True))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients for the input and every weight."""
    x = x.detach().requires_grad_()
    out = model(x)
    return list(torch.autograd.grad(out.float().square().mean(), [x, *model.parameters()]))
