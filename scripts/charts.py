"""Draws charts, in light and dark, out of the JSON in docs/benchmarks.

    python scripts/charts.py            # draw them
    python scripts/charts.py --check    # exit with 1 if the pictures show other numbers than the JSON files

"attention" is for README.md and the site's home. All its bars are of one run, `benchmarks peers`, whose candidates are
interleaved. A panel shows one problem of a LLaMA-like layer: forward and training (both passes) in TFLOP/s, and
decoding on a KV cache in TB/s, which memory bandwidth bounds. Higher is better in all.

"scaling" is for the page "Context parallelism". A panel shows what each method reaches of linear scaling, by the number
of GPUs: dense and packed, with as many tokens for each GPU or as many in all.

"providers" is for the page "Providers". A panel shows one pass of one head dim: TFLOP/s of each provider by length, of
calls with as many tokens. Higher is better.
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

#: Bars, and their candidates in `benchmarks peers`: of dense problems, of decode steps.
FLASH, CUDNN, V3, V4 = "PyTorch FLASH", "PyTorch cuDNN", "FlashAttention-3", "FlashAttention-4"
OURS, FP8, FP8_KERNELS = "cudnn_sdpa", "cudnn_sdpa, FP8", "FP8, no quantization"
DENSE = {
    FLASH: "pytorch flash",
    CUDNN: "pytorch cudnn",
    V3: "FlashAttention-3",
    V4: "FlashAttention-4",
    OURS: "ours",
    FP8: "Fp8Attention",
    FP8_KERNELS: "sdpa_fp8",
}
DECODE = {FLASH: "pytorch flash, contiguous", V3: "FlashAttention-3", OURS: "sdpa_paged", "memcpy": "a copy"}
PROBLEMS = {
    "Forward, TFLOP/s": "forward",
    "Training, TFLOP/s": "training",
    "Decode, 32 × 4,096, TB/s": "decode, 32 × 4,096",
    "Decode, 8 × 32,768, TB/s": "decode, 8 × 32,768",
}
GREYS = {"light": ("#c4c9d0", "#8d96a0"), "dark": ("#4b535d", "#8b949e")}
GREENS = {"light": ("#3f8f00", "#76b900", "#b5dc7a"), "dark": ("#76b900", "#b4e04b", "#55731c")}
THEMES = {
    theme: {
        "text": text,
        **dict.fromkeys((FLASH, CUDNN), GREYS[theme][0]),
        **dict.fromkeys((V3, V4, "memcpy"), GREYS[theme][1]),
        **dict(zip((OURS, FP8, FP8_KERNELS), GREENS[theme], strict=True)),
    }
    for theme, text in (("light", "#1f2328"), ("dark", "#e6edf3"))
}


METHODS = {"all_gather": "#0969da", "ulysses": "#76b900", "ring": "#bf5b00", "pytorch": "#8b949e"}

#: Names and colors of providers.
PROVIDERS = {"cudnn": ("cuDNN 9.19", "#76b900"), "fa4": ("FlashAttention-4", "#bf5b00")}

#: What a chart shows: panels of named values.
Panels = dict[str, dict[str, Any]]


def read(name: str, gpu: str = "h200") -> dict[str, Any]:
    return json.loads((BENCHMARKS / f"{name}-{gpu}.json").read_text())


def attention() -> Panels:
    """The bars of each panel, where there is a measurement."""
    rows = {(row["problem"], row["candidate"]): row for row in read("peers", "h100")["overview"]}
    found: Panels = {}
    for title, problem in PROBLEMS.items():
        bars, unit = (DECODE, "TB/s") if problem.startswith("decode") else (DENSE, "TFLOP/s")
        measured = {label: rows[problem, candidate] for label, candidate in bars.items()}
        found[title] = {label: row[unit] for label, row in measured.items() if unit in row}
    return found


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


def providers() -> Panels:
    """The lines of each panel: TFLOP/s of each provider, by the length of the sequences."""
    measured = read("providers", "h100")
    found: Panels = {}
    for part, label, products in (("lengths", "Forward", 2), ("backward_lengths", "Backward", 5)):
        for row in measured[part]:
            match = re.match(r"(\d+)/\d+ heads, D=(\d+), causal, (\d+) × ([\d,]+)", row["call"])
            heads, dim, batch, length = (int(each.replace(",", "")) for each in match.groups())
            operations = products * batch * heads * length * length * dim  # causal: half of twice as many
            panel = found.setdefault(f"{label}, D={dim}", {name: {} for name in PROVIDERS})
            for name in PROVIDERS:
                panel[name][str(length)] = operations / row[f"{name} µs"] / 1e6
    return found


def numbers(panels: Panels) -> str:
    """What a chart shows, as text that the picture carries."""

    def short(value: Any) -> Any:
        return {name: short(each) for name, each in value.items()} if isinstance(value, dict) else round(value, 2)

    return json.dumps(short(panels))


def draw_attention(figure: Any, shown: Panels, theme: str) -> None:
    """Panels one below the other: labels stay readable on a telephone."""
    colors = THEMES[theme]
    heights = [len(bars) + 1.4 for bars in shown.values()]
    figure.set_size_inches(5.4, 0.2 * sum(heights))
    panels = figure.subplots(len(shown), 1, height_ratios=heights)
    for axis, (title, bars) in zip(panels, shown.items(), strict=True):
        for number, (name, value) in enumerate(bars.items()):
            axis.barh(number, value, color=colors[name], height=0.76)
            axis.text(value, number, f" {value:.0f}" if value >= 10 else f" {value:.2f}", va="center", fontsize=10)
        axis.set_yticks(range(len(bars)), list(bars), color=colors["text"])
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.set_xlim(0, max(bars.values()) * 1.12)
        axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=colors["text"], pad=4)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    for label in figure.findobj(lambda item: getattr(item, "get_text", str)() == OURS):
        label.set_fontweight("bold")


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


def draw_providers(figure: Any, shown: Panels, theme: str) -> None:
    text = THEMES[theme]["text"]
    figure.set_size_inches(9, 4.6)
    for axis, (title, lines) in zip(figure.subplots(2, 3).flat, shown.items(), strict=True):
        lengths = [int(length) for length in next(iter(lines.values()))]
        for name, line in lines.items():
            axis.plot(
                range(len(lengths)), list(line.values()), color=PROVIDERS[name][1], marker="o", label=PROVIDERS[name][0]
            )
        axis.set_title(f"{title}, TFLOP/s", loc="left", fontsize=11, fontweight="bold", color=text)
        axis.set_xticks(range(len(lengths)), [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths], color=text)
        axis.set_ylim(0, 850)
        axis.tick_params(length=0, colors=text)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[:].set_visible(False)
    figure.axes[0].legend(loc="lower right", frameon=False, labelcolor=text)


Draw = Callable[[Any, Panels, str], None]
CHARTS: dict[str, tuple[Callable[[], Panels], Draw]] = {
    "attention": (attention, draw_attention),
    "scaling": (scaling, draw_scaling),
    "providers": (providers, draw_providers),
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
