"""Draws charts, in light and dark, out of the JSON in docs/benchmarks.

    python scripts/charts.py            # draw them
    python scripts/charts.py --check    # exit with 1 if the pictures show other numbers than the JSON files

"attention" is for README.md and the site's home. A panel shows one problem of a LLaMA-like layer: forward and training
(both passes) in TFLOP/s, and decoding on a KV cache in TB/s, which memory bandwidth bounds. Higher is better in all.

"scaling" is for the page "Context parallelism". A panel shows what each method reaches of linear scaling, by the number
of GPUs: dense and packed, with as many tokens for each GPU or as many in all.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
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


METHODS = {"all_gather": "#0969da", "ulysses": "#76b900", "ring": "#bf5b00", "pytorch": "#8b949e"}

#: What a chart shows: panels of named values.
Panels = dict[str, dict[str, Any]]


def read(name: str, gpu: str = "h200") -> dict[str, Any]:
    return json.loads((BENCHMARKS / f"{name}-{gpu}.json").read_text())


def attention() -> Panels:
    """The bars of each panel: forward and training in TFLOP/s, decoding in TB/s."""
    dense, fp8, decode = read("attention"), read("fp8"), read("decode")

    def of_problem(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in rows if each["B, Hq, Hkv, S, D"] == PROBLEM]

    passes = {each["pass"]: each for each in of_problem(dense["kernels"])}
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


def scaling() -> Panels:
    """The lines of each panel: what a method reaches of linear scaling, by the number of GPUs."""
    measured = read("distributed")
    found: Panels = {}
    for kind, label in (("causal", "Dense"), ("packed", "Packed")):
        for part, tokens in (("weak", "32k tokens for each GPU"), ("strong", "128k tokens in all")):
            lines: dict[str, dict[str, float]] = {method: {"1": 1.0} for method in METHODS}
            for row in measured[part]:
                method = row["call"].rpartition(": ")[2]
                if row["call"].startswith(kind) and method in lines and "of linear scaling" in row:
                    lines[method][str(row["GPUs"])] = row["of linear scaling"]
            found[f"{label}, {tokens}"] = {method: line for method, line in lines.items() if len(line) > 1}
    return found


def numbers(panels: Panels) -> str:
    """What a chart shows, as text that the picture carries."""

    def short(value: Any) -> Any:
        return {name: short(each) for name, each in value.items()} if isinstance(value, dict) else round(value, 2)

    return json.dumps(short(panels))


def draw_attention(figure: Any, shown: Panels, theme: str) -> None:
    colors = THEMES[theme]
    figure.set_size_inches(9, 2.3)
    for axis, (title, bars) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
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


def draw_scaling(figure: Any, shown: Panels, theme: str) -> None:
    text = THEMES[theme]["text"]
    figure.set_size_inches(9, 4.6)
    for axis, (title, lines) in zip(figure.subplots(2, 2).flat, shown.items(), strict=True):
        counts = sorted({int(count) for line in lines.values() for count in line})
        for method, line in lines.items():
            places = [counts.index(int(count)) for count in line]
            axis.plot(places, list(line.values()), color=METHODS[method], marker="o", label=method)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=text)
        axis.set_xticks(range(len(counts)), [f"{count} GPU" + "s" * (count > 1) for count in counts], color=text)
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "linear"], color=text)
        axis.set_ylim(0, 1.15)
        axis.set_xlim(-0.2, len(counts) - 0.8)
        axis.grid(axis="y", alpha=0.25)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.axes[0].legend(loc="lower left", frameon=False, labelcolor=text, ncols=2)


Draw = Callable[[Any, Panels, str], None]
CHARTS: dict[str, tuple[Callable[[], Panels], Draw]] = {
    "attention": (attention, draw_attention),
    "scaling": (scaling, draw_scaling),
}


def draw(name: str, theme: str, path: Path) -> None:
    import matplotlib as mpl  # not needed to check

    mpl.use("svg")
    import matplotlib.pyplot as plt

    panels, onto = CHARTS[name]
    shown = panels()
    mpl.rcParams.update({"svg.hashsalt": "charts", "font.size": 10, "text.color": THEMES[theme]["text"]})
    figure = plt.figure(layout="constrained")
    onto(figure, shown, theme)
    metadata = {"Date": None, "Creator": None, "Description": numbers(shown)}
    figure.savefig(path, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))


def shown_in(path: Path) -> str:
    """The numbers that a picture carries."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL) if path.exists() else None
    return found[1].replace("&quot;", '"').strip() if found else ""


def main() -> int:
    pictures = {(name, theme): IMAGES / f"{name}-{theme}.svg" for name in CHARTS for theme in THEMES}
    if "--check" in sys.argv[1:]:
        wanted = {name: numbers(panels()) for name, (panels, _) in CHARTS.items()}
        old = [path.name for (name, _), path in pictures.items() if shown_in(path) != wanted[name]]
        print("".join(f"docs/images/{name} is out of date: run scripts/charts.py\n" for name in old), end="")
        return 1 if old else 0
    IMAGES.mkdir(exist_ok=True)
    for (name, theme), path in pictures.items():
        draw(name, theme, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
