"""LLaMA-like attention, end to end: a prefill, then 64 decode steps over a preallocated cache.

    python samples/quickstart.py

On an NVIDIA GPU it runs on cuDNN, in bfloat16. Without one it runs the CPU reference at a smaller size, and shows the
plans that cuDNN would run on an H200.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cudnn_sdpa
from cudnn_sdpa import explain, plan_cache, sdpa

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BATCH, HEADS_Q, HEADS_KV, PROMPT, HEAD_DIM = (4, 32, 8, 2048, 128) if ON_GPU else (2, 8, 2, 256, 64)
STEPS = 64

console = Console()


@dataclass
class Phase:
    """Time of one kind of call, and its error against float32."""

    name: str
    milliseconds: list[float] = field(default_factory=list)
    error: float = 0.0
    builds: int = 0
    loads: int = 0
    hits: int = 0

    def run(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """One timed call of `sdpa`, counting plans."""
        before = plan_cache.info()
        synchronize()
        start = time.perf_counter()
        out = sdpa(q, k, v, **options)
        synchronize()
        self.milliseconds.append((time.perf_counter() - start) * 1e3)
        after = plan_cache.info()
        self.builds += after.builds - before.builds
        self.loads += after.loads - before.loads  # built by an earlier run
        self.hits += after.hits - before.hits
        return out

    def compare(self, out: Tensor, expected: Tensor) -> None:
        """Fails if they differ by more than bfloat16 rounding; keeps the largest relative error."""
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        self.error = max(self.error, float((out.float() - expected).norm() / expected.norm()))

    def row(self) -> dict[str, str]:
        """What the table shows: plans only on a GPU, as the CPU reference has none."""
        steady = sorted(self.milliseconds[1:])[len(self.milliseconds[1:]) // 2]
        plans = {"built": str(self.builds), "loaded": str(self.loads), "hits": str(self.hits)} if ON_GPU else {}
        return {
            "phase": self.name,
            "calls": str(len(self.milliseconds)),
            **plans,
            "first, ms": f"{self.milliseconds[0]:.2f}",
            "steady, ms": f"{steady:.3f}",
            "error": f"{self.error:.1e}",
        }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def random(length: int, heads: int) -> Tensor:
    """As a projection returns it: (batch, sequence, heads, head dim) in memory, viewed as (B, H, S, D)."""
    tensor = torch.randn(BATCH, length, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    return tensor.transpose(1, 2)


def main() -> None:
    """Runs both phases, checks every result against PyTorch and prints a table."""
    torch.manual_seed(7)
    console.print(
        f"cudnn_sdpa {cudnn_sdpa.__version__} on {torch.cuda.get_device_name() if ON_GPU else 'the CPU'}: ", end=""
    )
    console.print(f"B={BATCH}, Hq={HEADS_Q}, Hkv={HEADS_KV}, S={PROMPT}, D={HEAD_DIM}, bfloat16")

    # A cache for the prompt and all generated tokens. Its shape never changes, so one plan is enough.
    room = (BATCH, PROMPT + STEPS, HEADS_KV, HEAD_DIM)
    k_cache, v_cache = (torch.zeros(room, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    lengths = torch.full((BATCH,), PROMPT, dtype=torch.int32, device=DEVICE)

    prefill = Phase("prefill, causal")
    q, k, v = random(PROMPT, HEADS_Q), random(PROMPT, HEADS_KV), random(PROMPT, HEADS_KV)
    k_cache[:, :, :PROMPT], v_cache[:, :, :PROMPT] = k, v
    expected = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    for _ in range(20 if ON_GPU else 3):  # the same plan serves every layer
        out = prefill.run(q, k, v, is_causal=True)
        prefill.compare(out, expected)

    decode = Phase("decode, one token")
    for step in track(range(STEPS), "decoding", console=console, transient=True):
        end = PROMPT + step
        q = random(1, HEADS_Q)
        k_cache[:, :, end : end + 1], v_cache[:, :, end : end + 1] = random(1, HEADS_KV), random(1, HEADS_KV)
        lengths += 1  # on the GPU; sequence lengths are data
        out = decode.run(q, k_cache, v_cache, seq_lens_kv=lengths)
        seen_k, seen_v = k_cache[:, :, : end + 1], v_cache[:, :, : end + 1]
        expected = scaled_dot_product_attention(q.float(), seen_k.float(), seen_v.float(), enable_gqa=True)
        decode.compare(out, expected)

    show(prefill, decode)
    if not ON_GPU:
        show_plans(k_cache, v_cache, lengths)


def show(*phases: Phase) -> None:
    rows = [phase.row() for phase in phases]
    table = Table(title="every result agrees with PyTorch in float32", title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    if ON_GPU:
        info = plan_cache.info()
        console.print(f"{info.plans} plans served {info.builds + info.loads + info.hits} calls.")


def show_plans(k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> None:
    """What cuDNN would run on an H200, planned here by cuDNN itself."""
    console.print("\nWithout an NVIDIA GPU the CPU reference ran. cuDNN's plans for an H200:")
    try:
        with console.status("planning for an H200"):
            k, v = k_cache[:, :, :PROMPT], v_cache[:, :, :PROMPT]
            plans = [
                explain(sdpa, random(PROMPT, HEADS_Q), k, v, is_causal=True),
                explain(sdpa, random(1, HEADS_Q), k_cache, v_cache, seq_lens_kv=lengths),
            ]
    except (cudnn_sdpa.OfflineError, cudnn_sdpa.LibraryError) as error:
        console.print(f"  (cannot plan here: {error})")
        return
    table = Table()
    table.add_column("phase", no_wrap=True)
    table.add_column("cuDNN engine")
    for column in ("workspace, bytes", "built in, ms"):
        table.add_column(column, justify="right")
    for name, plan in zip(("prefill", "decode"), plans, strict=True):
        knobs = " ".join(f"{knob}={value}" for knob, value in plan.knobs.items())
        table.add_row(name, f"{plan.engine} {knobs}", str(plan.workspace), f"{plan.build_seconds * 1e3:.0f}")
    console.print(table)
    console.print(f"cuDNN {plans[0].versions['cuDNN']}, frontend {plans[0].versions['nvidia-cudnn-frontend']}")


if __name__ == "__main__":
    main()
