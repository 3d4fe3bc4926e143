"""The command line: `python -m cudnn_sdpa` or `cudnn-sdpa`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="cuDNN's attention as plain PyTorch functions.", no_args_is_help=True, add_completion=False)
bench_app = typer.Typer(help="Measure on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


class Part(str, Enum):
    """Parts of `bench host`."""

    HOST = "host"
    PARTS = "parts"
    KERNELS = "kernels"
    MEMORY = "memory"


@app.command()
def version() -> None:
    """Print the version."""
    from cudnn_sdpa._version import __version__

    typer.echo(__version__)


@bench_app.command("host")
def bench_host(
    part: Annotated[list[Part] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Time one warm call on the host and the kernel on the device, and watch memory."""
    import torch

    if not torch.cuda.is_available():
        typer.echo("bench needs an NVIDIA GPU that PyTorch can see (torch.cuda.is_available() is False)", err=True)
        raise typer.Exit(2)
    from cudnn_sdpa.bench import host, report

    measure: dict[Part, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
        Part.HOST: ("Host time of one warm call: B=1, H=8, S=128, D=64, bfloat16", host.host),
        Part.PARTS: ("Where it goes", host.parts),
        Part.KERNELS: ("Device time, interleaved, median", host.kernels),
        Part.MEMORY: ("Memory", host.memory),
    }
    results: dict[str, Any] = {}
    for chosen in part or list(Part):
        title, run = measure[chosen]
        results[chosen.value] = run()
        report.show(title, results[chosen.value])
    if output is not None:
        report.write(output, "host", results)
        typer.echo(f"written to {output}")
