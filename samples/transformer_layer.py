"""One layer of a model like LLaMA: norms, attention and the gate of its MLP by cuDNN, with gradients, and compiled.

    python samples/transformer_layer.py

Between the projections, which are PyTorch's, stand three functions: `rms_norm`, `sdpa` and `silu_mul`. A twin that has
the same parameters uses PyTorch's own instead. Output and all gradients are compared with those of the twin in float32,
once as they come and once under `torch.compile(fullgraph=True)`.

On an NVIDIA GPU it runs on cuDNN, in bfloat16, and measures both. Without one it runs the CPU reference in float32, at
a smaller size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cudnn_sdpa
from cudnn_sdpa import rms_norm, sdpa, silu_mul

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
BATCH, LENGTH = (2, 2048) if ON_GPU else (2, 48)
WIDTH, MLP_WIDTH = (4096, 14336) if ON_GPU else (128, 320)
HEADS_Q, HEADS_KV, HEAD_DIM = (32, 8, 128) if ON_GPU else (4, 2, 32)
EPS = 1e-5
RUNS, WARM_UP = 20, 5
SEED = 3
#: How large the difference from float32 may be, as a share of the norm of the whole. bfloat16 has 8 bits, and what a
#: gradient is made of has been rounded a dozen times: PyTorch's own are about 1e-2 from float32, too.
TOLERANCE = 3e-2 if ON_GPU else 1e-5

Angles = tuple[Tensor, Tensor]
Module = Callable[[Tensor, Angles], Tensor]
console = Console()


def rotations(length: int) -> Angles:
    """Cosines and sines (S, 1, D/2) by which RoPE turns the pairs of each position."""
    speeds = 5e5 ** (-torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM)
    angles = torch.outer(torch.arange(length, device=DEVICE), speeds).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turns heads (B, S, H, D), whose pairs are a number of the first half and one of the second, in float32."""
    cos, sin = angles
    one, other = heads.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(heads.dtype)


class Layer(nn.Module):
    """Attention in groups of query heads, then SwiGLU; each behind a norm, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.Parameter(1 + 0.2 * torch.randn(WIDTH)) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 2 * MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)
        for linear in (self.qkv, self.out, self.gate_and_up, self.down):
            # Larger than one would train: what the layer adds must not be lost beside what came in.
            nn.init.normal_(linear.weight, std=1.5 * linear.in_features**-0.5)

    def heads(self, rows: Tensor, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, H, S, D), of one projection: (B, S, H, D) in memory, and never copied."""
        every_head = self.qkv(rows).unflatten(-1, (-1, HEAD_DIM))
        with_positions, v = every_head.split([HEADS_Q + HEADS_KV, HEADS_KV], dim=2)
        q, k = rotate(with_positions, angles).split([HEADS_Q, HEADS_KV], dim=2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        q, k, v = self.heads(rms_norm(x, self.attention_norm, EPS), angles)
        x = x + self.out(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(silu_mul(self.gate_and_up(rms_norm(x, self.mlp_norm, EPS))))


class Twin(nn.Module):
    """The same with PyTorch's functions, on the parameters of a layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, angles: Angles) -> Tensor:
        layer = self.layer
        q, k, v = layer.heads(F.rms_norm(x, (WIDTH,), layer.attention_norm, EPS), angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + layer.out(attended.transpose(1, 2).flatten(2))
        gate, up = layer.gate_and_up(F.rms_norm(x, (WIDTH,), layer.mlp_norm, EPS)).chunk(2, dim=-1)
        return x + layer.down(F.silu(gate) * up)


def results(module: Module, layer: Layer, x: Tensor, angles: Angles, gradient: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients by x and by every parameter of the layer that the module computes with."""
    x = x.detach().requires_grad_()
    parameters = dict(layer.named_parameters())
    out = module(x, angles)
    gradients = torch.autograd.grad(out, [x, *parameters.values()], gradient)
    names = [f"gradient by {name.removesuffix('.weight')}" for name in ("x", *parameters)]
    return {"output": out.detach(), **dict(zip(names, gradients, strict=True))}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[float]:
    """How far each result is from the expected one, as a share of its norm."""
    return [float((found[name].float() - right).norm() / right.norm()) for name, right in expected.items()]


def why_not_compiled() -> str | None:
    """What torch.compile misses on this machine, a C compiler for instance; None if it works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(4, device=DEVICE))
    except RuntimeError as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def milliseconds(call: Callable[[], object]) -> float:
    """The median time on the GPU."""
    pairs = []
    for _ in range(WARM_UP + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs[WARM_UP:])


def show_times(modules: dict[str, Module], layer: Layer, x: Tensor, angles: Angles, gradient: Tensor) -> None:
    table = Table(title=f"ms on the GPU, median of {RUNS}", title_justify="left")
    for column in ("", "forward, inference", "forward and backward"):
        table.add_column(column, justify="right" if column else "left")
    for name, module in modules.items():
        with torch.no_grad():
            inference = milliseconds(partial(module, x, angles))
        training = milliseconds(partial(results, module, layer, x, angles, gradient))
        table.add_row(name, f"{inference:.3f}", f"{training:.3f}")
    console.print(table)


def main() -> int:
    """Compares, prints errors and, on a GPU, times."""
    where = f"{torch.cuda.get_device_name()}, bfloat16" if ON_GPU else "the CPU, float32"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {BATCH} sequences of {LENGTH} tokens, ", end="")
    console.print(f"width {WIDTH}, {HEADS_Q} query and {HEADS_KV} key heads of {HEAD_DIM}, MLP of {MLP_WIDTH}")
    if not ON_GPU:
        torch.set_num_threads(1)  # so small a layer that threads would wait for each other
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        layer = Layer().to(DTYPE)
        x, gradient = (torch.randn(BATCH, LENGTH, WIDTH, dtype=DTYPE) for _ in range(2))
    angles = rotations(LENGTH)
    exact = deepcopy(layer).float()
    expected = results(Twin(exact), exact, x.float(), angles, gradient.float())

    modules: dict[str, Module] = {"cudnn_sdpa": layer}
    reason = why_not_compiled()
    if reason is None:
        modules["compiled"] = torch.compile(layer, fullgraph=True)
    else:
        console.print(f"torch.compile does not work here, and is left out: {reason}", markup=False)
    if ON_GPU:
        modules["PyTorch"] = Twin(layer)  # for its own error in bfloat16

    found = {name: errors(results(module, layer, x, angles, gradient), expected) for name, module in modules.items()}
    table = Table("error, as a share of the norm", title_justify="left")
    for name in found:
        table.add_column(name, justify="right")
    for name, row in zip(expected, zip(*found.values(), strict=True), strict=True):
        table.add_row(name, *(f"{error:.1e}" for error in row))
    console.print(table)
    if ON_GPU:
        show_times({name: modules[name] for name in ("cudnn_sdpa", "PyTorch")}, layer, x, angles, gradient)

    agree = all(error <= TOLERANCE for name in found if name != "PyTorch" for error in found[name])
    verdict = "output and gradients agree" if agree else "output and gradients DISAGREE"
    console.print(f"{verdict} with PyTorch in float32, within {TOLERANCE} of the norm")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
