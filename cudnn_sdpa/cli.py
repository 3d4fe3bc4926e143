"""The command line: `python -m cudnn_sdpa` or `cudnn-sdpa`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="cuDNN's attention as plain PyTorch functions.", no_args_is_help=True, add_completion=False)
bench_app = typer.Typer(help="Measure on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


Measure = Callable[[], list[dict[str, Any]]]
Output = Annotated[Path | None, typer.Option("--output", "--json", help="Write the results to this JSON file.")]


class HostPart(str, Enum):
    """Parts of `bench host`."""

    HOST = "host"
    PARTS = "parts"
    TRAINING = "training"
    KERNELS = "kernels"
    MEMORY = "memory"


class AttentionPart(str, Enum):
    """Parts of `bench attention`."""

    KERNELS = "kernels"
    OPTIONS = "options"
    VARLEN = "varlen"
    MEMORY = "memory"


@app.command()
def version() -> None:
    """Print the version."""
    from cudnn_sdpa._version import __version__

    typer.echo(__version__)


@app.command()
def support(
    sm: Annotated[int | None, typer.Option(help="Compute capability, 90 for 9.0; this GPU's if not given.")] = None,
    cudnn: Annotated[str | None, typer.Option(help="Version, such as 9.19.0; the installed one if not given.")] = None,
) -> None:
    """Show what cuDNN's attention supports on a kind of GPU."""
    from rich.console import Console
    from rich.table import Table

    from cudnn_sdpa.errors import CudnnSdpaError
    from cudnn_sdpa.support_matrix import described, matrix

    try:
        rows, title = list(matrix(sm, cudnn)), described(sm, cudnn)
    except CudnnSdpaError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


@bench_app.command("host")
def bench_host(
    part: Annotated[list[HostPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: Output = None,
) -> None:
    """Time one warm call on the host and the kernel on the device, and watch memory."""
    _require_gpu()
    from cudnn_sdpa.bench import host
    from cudnn_sdpa.bench.training import training

    measures: dict[HostPart, tuple[str, Measure]] = {
        HostPart.HOST: ("Host time of one warm call: B=1, H=8, S=128, D=64, bfloat16", host.host),
        HostPart.PARTS: ("Where it goes", host.parts),
        HostPart.TRAINING: ("Host time of a forward and a backward pass, the same shape", training),
        HostPart.KERNELS: ("Device time, interleaved, median", host.kernels),
        HostPart.MEMORY: ("Memory", host.memory),
    }
    _measure("host", {chosen.value: measures[chosen] for chosen in part or list(HostPart)}, output)


@bench_app.command("attention")
def bench_attention(
    part: Annotated[
        list[AttentionPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: Output = None,
    quick: Annotated[bool, typer.Option(help="Small shapes and few repeats: to see that it runs.")] = False,
) -> None:
    """Time forward and backward kernels, options and packed sequences on the device, and the memory of a step."""
    _require_gpu()
    from cudnn_sdpa.bench import attention, cases

    sizes = cases.QUICK if quick else cases.FULL
    measures: dict[AttentionPart, tuple[str, Callable[[cases.Sizes], list[dict[str, Any]]]]] = {
        AttentionPart.KERNELS: ("Device time, interleaved, median", attention.kernels),
        AttentionPart.OPTIONS: (f"What options cost: {sizes.options.label}", attention.options),
        AttentionPart.VARLEN: (f"{sizes.tokens} packed tokens, causal", attention.varlen),
        AttentionPart.MEMORY: (f"Memory of a training step: {sizes.training.label}", attention.memory),
    }
    chosen = {name.value: measures[name] for name in part or list(AttentionPart)}
    _measure("attention", {name: (title, partial(run, sizes)) for name, (title, run) in chosen.items()}, output)


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        typer.echo("bench needs an NVIDIA GPU that PyTorch can see (torch.cuda.is_available() is False)", err=True)
        raise typer.Exit(2)


def _measure(name: str, parts: dict[str, tuple[str, Measure]], output: Path | None) -> None:
    """Measures and prints parts, and writes after each of them what there is: a later one may fail."""
    from cudnn_sdpa.bench import report

    results: dict[str, Any] = {}
    for part, (title, run) in parts.items():
        rows = run()
        if not rows:  # the part has said why
            continue
        results[part] = rows
        report.show(title, rows)
        if output is not None:
            report.write(output, name, results)
    if output is not None and results:
        typer.echo(f"written to {output}")
