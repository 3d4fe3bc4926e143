"""Trains a small transformer on packed documents, over several processes in three ways at once.

    torchrun --nproc-per-node 8 samples/train_parallel.py --cp 2 --tp 2    # on GPUs: 2 × 2 × 2
    torchrun --nproc-per-node 2 samples/train_parallel.py --cp 2           # on CPUs too, at small sizes

- FSDP2 (`fully_shard`) spreads parameters over the processes of data and of context parallelism.
- Tensor parallelism (`--tp`) spreads heads and hidden features, by `parallel_plan`.
- Context parallelism (`--cp`) spreads the tokens of packed documents; attention is `context_parallel_varlen`, with a
  window.

Blocks are checkpointed. At the end, the loss of each step is compared with that of one process on the same documents.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import cudnn_sdpa
from cudnn_sdpa.distributed import context_parallel_varlen, shard
from cudnn_sdpa.nn import RMSNorm, RotaryEmbedding, SwiGLU, parallel_plan

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 128, 128, 4, 2, 32, 2, (31, 0)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Packed attention whose projections tensor parallelism can split: local heads are counted, not assumed."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.rope = RotaryEmbedding(HEAD_DIM)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Tokens (T, WIDTH) of packed documents."""
        q, k, v = (proj(x).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        rotations = self.rope(positions)
        q, k = (self.rope.rotate(x.unsqueeze(0), rotations).squeeze(0) for x in (q, k))
        return self.out_proj(attend(q, k, v).flatten(1))


class Block(nn.Module):
    """Attention and a gated feed-forward network, each on normalized tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.mlp = Attention(), SwiGLU(WIDTH, 2 * WIDTH, packed=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The block."""
        x = x + self.attention(self.norm1(x), positions, attend)
        return x + self.mlp(self.norm2(x).unsqueeze(0)).squeeze(0)


class Model(nn.Module):
    """Embeddings, checkpointed blocks, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits (T, VOCABULARY)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, positions, attend, use_reentrant=False)
        return self.head(x)


def documents(tokens: int, step: int, replica: int) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Packed documents: tokens, labels, positions within each, offsets, and the longest length."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    cuts = torch.randperm(tokens - 1, generator=generator)[:5].add(1).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])])
    lengths = offsets.diff()
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    starts = torch.randint(VOCABULARY, (len(lengths),), generator=generator).repeat_interleave(lengths)
    ids = (starts + 3 * positions) % VOCABULARY  # what can be learned
    return ids, (ids + 3) % VOCABULARY, positions, offsets.int(), int(lengths.max())


def train(mesh: DeviceMesh | None, steps: int, tokens: int, device: torch.device, replicas: int) -> list[float]:
    """The loss of each step; without a mesh, of one process that sees the documents of all replicas."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model().to(device, dtype)
    cp = None
    if mesh is not None:
        cp = mesh["cp"]
        if mesh["tp"].size() > 1:
            for block in model.blocks:
                parallelize_module(block, mesh["tp"], plan_of(block))
        over = mesh["dp", "cp"]._flatten("dp_cp")  # tokens differ in both: gradients are averaged over both
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        mine = range(replicas) if mesh is None else [mesh["dp"].get_local_rank()]
        total = torch.zeros((), device=device)
        for replica in mine:
            ids, labels, positions, offsets, longest = documents(tokens, step, replica)
            parts = [x.to(device) for x in (ids, labels, positions)]
            if cp is not None:
                parts = [shard(x, 0, cp) for x in parts]
            at = offsets.to(device)

            def attend(q: Tensor, k: Tensor, v: Tensor, at: Tensor = at, longest: int = longest) -> Tensor:
                if cp is None:
                    return cudnn_sdpa.sdpa_varlen(q, k, v, at, at, longest, longest, is_causal=True, window_size=WINDOW)
                return context_parallel_varlen(q, k, v, at, longest, group=cp, is_causal=True, window_size=WINDOW)

            logits = model(parts[0], parts[2], attend)
            loss = nn.functional.cross_entropy(logits.float(), parts[1]) / len(mine)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(float(total))
    return losses


def plan_of(block: nn.Module) -> dict[str, object]:
    """The library's plan for its own modules, and the usual one for the projections of `Attention`."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    own = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"} | {"attention.out_proj": RowwiseParallel()}
    return own | parallel_plan(block)


def main() -> None:
    """Trains on all processes, then on one, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="processes that share a sequence")
    parser.add_argument("--tp", type=int, default=1, help="processes that share heads")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256, help="of all documents of a replica")
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    else:
        cudnn_sdpa.cpu_checks("h200,any-dtype")  # float32, in which losses agree to more digits
    dist.init_process_group("nccl" if has_gpu else "gloo")
    replicas = dist.get_world_size() // (given.cp * given.tp)
    mesh = init_device_mesh(device.type, (replicas, given.cp, given.tp), mesh_dim_names=("dp", "cp", "tp"))
    found = train(mesh, given.steps, given.tokens, device, replicas)
    if dist.get_rank() == 0:
        alone = train(None, given.steps, given.tokens, device, replicas)
        for step, (loss, wanted) in enumerate(zip(found, alone, strict=True)):
            print(f"step {step}: loss {loss:.4f}, in one process {wanted:.4f}")
            if abs(loss - wanted) > (5e-2 if has_gpu else 1e-3):
                raise SystemExit("the losses differ")
        print(f"{dist.get_world_size()} processes agree with one")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
