"""PyTorch's attention backends, which `sdpa` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

CUDNN = "pytorch cudnn"
PYTORCH_BACKENDS = {"pytorch flash": SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Callable[[], Tensor]:
    """PyTorch's `scaled_dot_product_attention`, on the enabled backend."""
    grouped = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def pytorch_of_last_queries(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """The same with a causal mask that is aligned bottom-right."""
    grouped = q.shape[1] != k.shape[1]
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def pytorch_varlen() -> Callable[..., object] | None:
    """PyTorch's attention over packed sequences, in PyTorch 2.10 and later."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    function: Callable[..., object] = varlen_attn
    return function


@contextmanager
def only(name: str) -> Iterator[None]:
    """Enables only one of PyTorch's backends."""
    with sdpa_kernel(PYTORCH_BACKENDS[name]):
        yield


@dataclass(frozen=True)
class Candidate:
    """One implementation of the attention that is measured.

    Attributes:
        name: Its name in tables.
        attend: The forward call.
        inputs: Its q, k and v, which require grad.
        repeats_heads: Whether the heads of k and v are repeated in advance, for a backend without grouped queries.
    """

    name: str
    attend: Callable[[], Tensor]
    inputs: tuple[Tensor, Tensor, Tensor]
    repeats_heads: bool = False

    def gradients(self, out: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        """The backward pass alone, of a retained autograd graph."""
        return torch.autograd.grad(out, self.inputs, grad_out, retain_graph=True)

    def step(self, grad_out: Tensor) -> tuple[Tensor, ...]:
        """Both passes."""
        return torch.autograd.grad(self.attend(), self.inputs, grad_out)

    def fold(self, gradients: Sequence[Tensor], heads_kv: int) -> list[Tensor]:
        """The gradients, with those of repeated heads summed."""
        if not self.repeats_heads:
            return list(gradients)
        grad_q, *repeated = gradients
        return [grad_q, *(x.float().view(x.shape[0], heads_kv, -1, *x.shape[2:]).sum(2) for x in repeated)]


def candidate(name: str, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Candidate | None:
    """One of PyTorch's backends, with repeated heads where it needs them; None if it does not support the tensors."""
    groups = q.shape[1] // k.shape[1]
    for repeats in (1, groups) if groups > 1 else (1,):
        inputs = (q, k, v) if repeats == 1 else (q, _repeated(k, repeats), _repeated(v, repeats))
        call = pytorch(*inputs, is_causal=is_causal)

        def attend(call: Callable[[], Tensor] = call) -> Tensor:
            with only(name):
                return call()

        backend = Candidate(name, attend, inputs, repeats_heads=repeats > 1)
        try:
            backend.step(torch.zeros_like(q))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # "No available kernel"
            continue
        return backend
    return None


def _repeated(tensor: Tensor, times: int) -> Tensor:
    return tensor.detach().repeat_interleave(times, 1).requires_grad_()
