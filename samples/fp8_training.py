"""A small causal transformer, trained with attention in FP8 and again, from the same seed, in bfloat16.

    python samples/fp8_training.py
    python samples/fp8_training.py --plot losses.png    # needs matplotlib

The task: a sequence of random tokens is followed by itself, and the model learns to say the second half. Everything but
attention is the same in both runs. FP8 needs a GPU of the generations Hopper or Blackwell, on which the rest runs under
autocast to bfloat16; without one the CPU emulates it, at a smaller size, with the rest in float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cudnn_sdpa
from cudnn_sdpa import Fp8Attention, plan_cache, sdpa

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICE = "cuda" if ON_GPU else "cpu"
#: Heads are 128 wide on the GPU: on Hopper gradients in FP8 have kernels for no other size.
LAYERS, WIDTH, HEADS_Q, HEADS_KV = (2, 512, 4, 2) if ON_GPU else (2, 64, 4, 2)
BATCH, HALF, TOKENS = (64, 64, 64) if ON_GPU else (16, 8, 16)
STEPS, LAST, PEAK_RATE = 250, 20, 1e-3 if ON_GPU else 1e-2
SEED = 11
#: How far apart the two losses, each the mean of the last steps, may be, in nats for each token.
TOLERANCE = 0.1

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
console = Console()


def in_fp8() -> Attend:
    """A layer with scales of its own."""
    return Fp8Attention(is_causal=True)


def in_bfloat16() -> Attend:
    return lambda q, k, v: sdpa(q, k, v, is_causal=True)


class Block(nn.Module):
    """Grouped-query attention and a feed-forward layer, each behind a norm and with a residual connection."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend  # a module becomes part of the model: its scales move with it, and are saved with it
        self.head_dim = WIDTH // HEADS_Q
        self.groups = [HEADS_Q, HEADS_KV, HEADS_KV]
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, sum(self.groups) * self.head_dim, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        every_head = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = every_head.split(self.groups, dim=1)  # views: nothing is copied before or after attention
        attended = self.attend(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)  # no copies under autocast
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, and a prediction of the next token at each place."""

    def __init__(self, make_attend: Callable[[], Attend]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(2 * HALF, WIDTH))
        self.blocks = nn.Sequential(*(Block(make_attend()) for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]]))


@dataclass
class Run:
    """One training: its losses, and what a step took."""

    name: str
    make_attend: Callable[[], Attend]
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def train(self) -> None:
        """All steps. Weights and data follow from the seed, so that every run has the same."""
        torch.manual_seed(SEED)
        model = Transformer(self.make_attend).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min((done + 1) / 20, 1 - done / STEPS))
        data = torch.Generator(DEVICE).manual_seed(SEED)
        losses = []
        start = time.perf_counter()
        for _ in track(range(STEPS), self.name, console=console, transient=True):
            losses.append(step(model, optimizer, data))
            rate.step()
        self.losses = torch.stack(losses).tolist()  # the one time that the host waits for the GPU
        self.seconds = time.perf_counter() - start

    @property
    def final(self) -> float:
        """The mean loss of the last steps."""
        return sum(self.losses[-LAST:]) / LAST


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Generator) -> Tensor:
    """One step on fresh data; the loss of the second half, in nats for each token."""
    half = torch.randint(TOKENS, (BATCH, HALF), generator=data, device=DEVICE)
    tokens = torch.cat([half, half], dim=1)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=ON_GPU):
        predicted = model(tokens[:, :-1])[:, HALF - 1 :]
    loss = cross_entropy(predicted.float().flatten(0, 1), tokens[:, HALF:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def curve(losses: list[float]) -> str:
    """The losses as a line of bars."""
    every = max(1, len(losses) // 50)
    means = [sum(losses[at : at + every]) / every for at in range(0, len(losses), every)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * mean / max(means)))] for mean in means)


def show(runs: list[Run]) -> None:
    table = Table(title="loss, nats for each token", title_justify="left")
    table.add_column("step")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_column("difference", justify="right")
    for at in [*range(0, STEPS, 25), STEPS - 1]:
        one, other = (run.losses[at] for run in runs)
        table.add_row(str(at + 1), f"{one:.4f}", f"{other:.4f}", f"{abs(one - other):.1e}")
    console.print(table)
    for run in runs:
        console.print(f"{run.name:<8} {curve(run.losses)} {run.seconds / STEPS * 1e3:.1f} ms a step")
    if ON_GPU:
        info = plan_cache.info()
        counts = f"{info.builds} builds, {info.loads} loads, {info.hits} hits"
        console.print(f"{info.plans} plans served all passes of all layers: {counts}.")


def plot(runs: list[Run], path: str) -> None:
    """Both losses as a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(run.losses, style, label=run.name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, nats for each token", title="attention in FP8 and in bfloat16")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    console.print(f"the losses are drawn in {path}")


def main() -> int:
    """Trains twice, prints both curves and compares where they end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the losses as a PNG")
    options = parser.parse_args()
    where = torch.cuda.get_device_name() if ON_GPU else "the CPU, which emulates FP8"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {LAYERS} layers, width {WIDTH}, ", end="")
    console.print(f"{HEADS_Q} query and {HEADS_KV} key heads, {BATCH} sequences of {2 * HALF} tokens, {STEPS} steps")
    if not ON_GPU:
        torch.set_num_threads(1)  # so small a model that threads would wait for each other
    runs = [Run("FP8", in_fp8), Run("bfloat16", in_bfloat16)]
    for run in runs:
        run.train()
    show(runs)
    if options.plot:
        plot(runs, options.plot)
    one, other = (run.final for run in runs)
    agree = abs(one - other) <= TOLERANCE
    verdict = "the final losses agree" if agree else "the final losses DISAGREE"
    console.print(f"{verdict}: {one:.4f} and {other:.4f}, mean of {LAST} steps, within {TOLERANCE} nats")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
