"""Attention on keys and values that lie in pages, compared with PyTorch's on the same ones in a row.

    python samples/paged_attention.py

A whole prompt at once, then single tokens whose sequences share pages. Nothing here owns the pages: tables say where
they are, as an engine of one's own would. `samples/serve.py` has a `PagedKVCache` do that.

On an NVIDIA GPU it runs on cuDNN, in float16. Without one it runs the CPU reference in float32, at a smaller size.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cudnn_sdpa
from cudnn_sdpa import sdpa_paged

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if ON_GPU else ("cpu", torch.float32)
BATCH, HEADS, LENGTH, HEAD_DIM = (4, 12, 1024, 64) if ON_GPU else (2, 3, 128, 16)
TOLERANCE = 5e-3 if ON_GPU else 1e-5


def in_pages(rows: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Rows (B, H, S, D) cut into pages (P, H, page_size, D) in random order, and the table that finds them."""
    batch, heads, length, dim = rows.shape
    pages = rows.unflatten(2, (length // page_size, page_size)).transpose(1, 2).reshape(-1, heads, page_size, dim)
    order = torch.randperm(len(pages), device=rows.device)
    table = torch.argsort(order).to(torch.int32).view(batch, -1)  # where page j of sequence b has gone
    return pages[order], table


def out_of_pages(pages: Tensor, table: Tensor) -> Tensor:
    """The inverse, for the comparison: what the table finds, (B, H, S, D)."""
    return pages[table.long()].transpose(1, 2).flatten(2, 3)


def prompt() -> float:
    """A causal prompt of full length, keys and values in pages of their own tables; gives the largest error."""
    q, k, v = (torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE).transpose(1, 2) for _ in "qkv")
    (k_pages, k_table), (v_pages, v_table) = in_pages(k, 64), in_pages(v, 64)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=DEVICE)
    out = sdpa_paged(q, k_pages, v_pages, k_table, lengths, page_table_v=v_table)
    expected = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    return float((out.float() - expected).abs().max())


def single_tokens() -> float:
    """A token of each sequence on tables of random pages, some of them in several places; the largest error."""
    page_size, pages = (256, 64) if ON_GPU else (32, 16)
    q = torch.randn(BATCH, HEADS, 1, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    k_pages, v_pages = (torch.randn(pages, page_size, HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE) for _ in "kv")
    table = torch.randint(0, pages, (BATCH, LENGTH // page_size), device=DEVICE, dtype=torch.int32)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), device=DEVICE, dtype=torch.int32)
    out = sdpa_paged(q, k_pages, v_pages, table, lengths, page_layout="NHD")
    k, v = (out_of_pages(x.transpose(1, 2), table).float() for x in (k_pages, v_pages))
    seen = torch.arange(LENGTH, device=DEVICE) < lengths.view(-1, 1, 1, 1)
    return float((out.float() - scaled_dot_product_attention(q.float(), k, v, attn_mask=seen)).abs().max())


def main() -> int:
    """Prints the largest errors."""
    torch.manual_seed(42)
    console, table = Console(), Table("call", "largest error")
    where = f"{torch.cuda.get_device_name()}, float16" if ON_GPU else "the CPU, float32"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {BATCH} sequences, {HEADS} heads of {HEAD_DIM}")
    errors = {f"a prompt of {LENGTH} tokens, pages of 64": prompt(), "single tokens, pages shared": single_tokens()}
    for name, error in errors.items():
        table.add_row(name, f"{error:.1e}")
    console.print(table)
    agree = all(error < TOLERANCE for error in errors.values())
    console.print("both agree with PyTorch" if agree else "they DISAGREE with PyTorch")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
