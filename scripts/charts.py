"""Draws the chart of README.md and of the site's home, in light and dark, out of the JSON in docs/benchmarks.

    python scripts/charts.py            # draw it
    python scripts/charts.py --check    # exit with 1 if the pictures show other numbers than the JSON files

A panel shows one problem of a LLaMA-like layer: forward and training (both passes) in TFLOP/s, and decoding on
a KV cache in TB/s, which memory bandwidth bounds. Higher is better in all three.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"
IMAGES = ROOT / "docs" / "images"

PROBLEM = "4, 32, 8, 4096, 128, causal"  #: batch, query heads, key heads, sequence, head dim
CACHE = "32, 4096, 64"  #: sequences, tokens of each, page size

FLASH, CUDNN, OURS, FP8 = "PyTorch FLASH", "PyTorch cuDNN", "cudnn_sdpa", "cudnn_sdpa, FP8"
THEMES = {
    "light": {"text": "#1f2328", FLASH: "#c4c9d0", CUDNN: "#8d96a0", OURS: "#3f8f00", FP8: "#76b900"},
    "dark": {"text": "#e6edf3", FLASH: "#4b535d", CUDNN: "#8b949e", OURS: "#76b900", FP8: "#b4e04b"},
}


def read(name: str) -> dict[str, Any]:
    return json.loads((BENCHMARKS / f"{name}-h200.json").read_text())


def panels() -> dict[str, dict[str, float]]:
    """The bars of each panel: forward and training in TFLOP/s, decoding in TB/s."""
    attention, fp8, decode = read("attention"), read("fp8"), read("decode")

    def of_problem(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in rows if each["B, Hq, Hkv, S, D"] == PROBLEM]

    passes = {each["pass"]: each for each in of_problem(attention["kernels"])}
    forward, backward = passes["forward"], passes["backward"]
    names = {FLASH: "pytorch flash", CUDNN: "pytorch cudnn", OURS: "sdpa"}

    def training(name: str) -> float:
        """Both passes: what they compute, by the time that they take together."""
        work = sum(each[f"{name} TFLOP/s"] * each[f"{name} µs"] for each in (forward, backward))
        return work / sum(each[f"{name} µs"] for each in (forward, backward))

    cached = next(each for each in decode["bandwidth"] if each["B, tokens, page size"] == CACHE)
    return {
        "Forward, TFLOP/s": {
            **{label: forward[f"{name} TFLOP/s"] for label, name in names.items()},
            FP8: of_problem(fp8["forward"])[0]["sdpa_fp8 TFLOP/s"],
        },
        "Training, TFLOP/s": {
            **{label: training(name) for label, name in names.items()},
            FP8: of_problem(fp8["training"])[0]["sdpa_fp8 TFLOP/s"],
        },
        "Decode, TB/s": {FLASH: cached["flash TB/s"], OURS: cached["TB/s"]},
    }


def numbers() -> str:
    """What the chart shows, as text that the picture carries."""
    return json.dumps(
        {panel: {name: round(value, 2) for name, value in bars.items()} for panel, bars in panels().items()}
    )


def draw(theme: str, path: Path) -> None:
    import matplotlib as mpl  # not needed to check

    mpl.use("svg")
    import matplotlib.pyplot as plt

    colors = THEMES[theme]
    mpl.rcParams.update({"svg.hashsalt": "charts", "font.size": 10, "text.color": colors["text"]})
    shown = panels()
    figure, axes = plt.subplots(1, len(shown), figsize=(9, 2.3), width_ratios=[1, 1, 1], layout="constrained")
    for axis, (title, bars) in zip(axes, shown.items(), strict=True):
        lines = [name for name in (FLASH, CUDNN, OURS, FP8) if name in bars]
        for number, name in enumerate(lines):
            value = bars[name]
            axis.barh(number, value, color=colors[name], height=0.72)
            axis.text(value, number, f" {value:.0f}" if value >= 10 else f" {value:.1f}", va="center", fontsize=10)
        axis.set_yticks(range(len(lines)), lines, color=colors["text"])
        axis.set_ylim(3.5, -0.5)
        axis.set_xlim(0, max(bars.values()) * 1.18)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=colors["text"])
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    metadata = {"Date": None, "Creator": None, "Description": numbers()}
    figure.savefig(path, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def shown_in(path: Path) -> str:
    """The numbers that a picture carries."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL) if path.exists() else None
    return found[1].replace("&quot;", '"').strip() if found else ""


def main() -> int:
    pictures = {theme: IMAGES / f"attention-{theme}.svg" for theme in THEMES}
    if "--check" in sys.argv[1:]:
        old = [path.name for path in pictures.values() if shown_in(path) != numbers()]
        print("".join(f"docs/images/{name} is out of date: run scripts/charts.py\n" for name in old), end="")
        return 1 if old else 0
    IMAGES.mkdir(exist_ok=True)
    for theme, path in pictures.items():
        draw(theme, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
