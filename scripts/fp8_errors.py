"""Writes the table of expected errors in docs/fp8.md: what the format costs, computed with the emulation on the CPU.

    python scripts/fp8_errors.py            # write it; takes a minute
    python scripts/fp8_errors.py --check    # exit with 1 if a number of the page is more than a tenth off

It stands between the comments <!-- fp8-errors --> and <!-- /fp8-errors -->.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

import torch
from pages import ROOT
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cudnn_sdpa import fp8_attention, sdpa
from cudnn_sdpa.attention.fp8 import quantize
from cudnn_sdpa.attention.fp8.scaling_state import DESCALE, new_table, number

PAGE = ROOT / "docs" / "fp8.md"
MARKS = re.compile(r"(<!-- fp8-errors -->\n).*?(<!-- /fp8-errors -->)", re.DOTALL)
HEADS, DIM, SEED = 1, 128, 7
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = 448.0

Change = Callable[[list[Tensor]], None]


def plain(qkv: list[Tensor]) -> None:
    """As they are."""


def sharp(qkv: list[Tensor]) -> None:
    qkv[0].mul_(4)


def outliers(qkv: list[Tensor]) -> None:
    for x in qkv[:2]:
        x.mul_(torch.where(torch.rand_like(x) < 1e-3, 20.0, 1.0))


def channel(qkv: list[Tensor]) -> None:
    qkv[1][..., 5] += 30


def mean(qkv: list[Tensor]) -> None:
    qkv[2].add_(4)


CASES: list[tuple[str, int, Change]] = [
    ("normal", 128, plain),
    ("normal", 512, plain),
    ("normal", 2048, plain),
    ("sharp: Q and the scores are 4 times as large", 128, sharp),
    ("sharp", 512, sharp),
    ("sharp", 2048, sharp),
    ("one of 1,000 values of Q and K is 20 times as large", 512, outliers),
    ("one channel of K has mean 30", 512, channel),
    ("V has mean 4", 512, mean),
]


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((found.detach().double() - exact).norm() / exact.norm())


def of_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as FP8 holds them."""
    table = new_table(tensors[0].device)
    wanted = quantize.Wanted((0, 1, 2), E4M3, LIMIT, current=True)
    made = quantize.quantize([x.detach() for x in tensors], wanted, table=table, given=None, record=None)
    return [x.double() * number(table, DESCALE, row).double() for row, x in enumerate(made)]


def row(length: int, change: Change) -> list[float]:
    """Errors of one case: in bfloat16, of the inputs alone, of the output, and of gradients in both dtypes."""
    torch.manual_seed(SEED)
    tensors = [torch.randn(1, HEADS, length, DIM) for _ in range(3)]
    change(tensors)
    tensors = [x.bfloat16().requires_grad_() for x in tensors]
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    exact = scaled_dot_product_attention(*leaves)
    grad_out = torch.randn(exact.shape).bfloat16()
    gradients = torch.autograd.grad(exact, leaves, grad_out.double())
    exact = exact.detach()
    errors = [error(sdpa(*tensors), exact), error(scaled_dot_product_attention(*of_inputs(tensors)), exact)]
    for dtype in (E4M3, E5M2):
        out = fp8_attention(*tensors, grad_dtype=dtype)
        if dtype == E4M3:
            errors.append(error(out, exact))
        found = torch.autograd.grad(out, tensors, grad_out)
        errors.append(max(error(x, y) for x, y in zip(found, gradients, strict=True)))
    return errors


def rows() -> Iterator[tuple[str, int, list[float]]]:
    for name, length, change in CASES:
        yield name, length, row(length, change)


def table() -> str:
    """The errors as Markdown, in percent."""
    lines = [
        "| values | keys | bfloat16 | FP8: of the inputs | FP8: output | gradients, E4M3 | gradients, E5M2 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, length, errors in rows():
        lines.append(f"| {name} | {length:,} | " + " | ".join(f"{100 * x:.2g}" for x in errors) + " |")
    return "\n".join(lines)


def numbers(text: str) -> list[float]:
    """The errors in a table."""
    cells = [line.split("|")[3:-1] for line in text.splitlines() if re.search(r"\| [\d.]+ \|$", line)]
    return [float(cell) for line in cells for cell in line]


def main() -> int:
    """Writes the page, or with --check compares it."""
    text, made = PAGE.read_text(), table()
    if "--check" not in sys.argv:
        PAGE.write_text(MARKS.sub(lambda found: f"{found[1]}{made}\n{found[2]}", text))
        return 0
    there = MARKS.search(text)
    one, other = numbers(there[0] if there else ""), numbers(made)
    stale = len(one) != len(other) or any(abs(a - b) > 0.1 * b for a, b in zip(one, other, strict=True))
    if stale:
        print("docs/fp8.md is out of date; run: python scripts/fp8_errors.py")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
