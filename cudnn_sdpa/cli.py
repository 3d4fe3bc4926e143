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


class ColdPart(str, Enum):
    """Parts of `bench coldstart`."""

    CALLS = "calls"
    WARMUP = "warmup"
    IMPORTS = "imports"


class ShapesPart(str, Enum):
    """Parts of `bench shapes`."""

    PASSES = "passes"
    TAKEOVER = "takeover"
    BUCKETS = "buckets"


class AttentionPart(str, Enum):
    """Parts of `bench attention`."""

    KERNELS = "kernels"
    OPTIONS = "options"
    VARLEN = "varlen"
    MEMORY = "memory"
    AUTOTUNE = "autotune"


@app.command()
def version() -> None:
    """Print the version."""
    from cudnn_sdpa._version import __version__

    typer.echo(__version__)


@app.command()
def support(
    sm: Annotated[int | None, typer.Option(help="Compute capability, 90 for 9.0; this GPU's if not given.")] = None,
    cudnn: Annotated[str | None, typer.Option(help="Version, such as 9.19.0; the installed one if not given.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Have the installed cuDNN plan it all for this GPU: a name, or what `device --json` wrote."),
    ] = None,
    output: Output = None,
) -> None:
    """Show what cuDNN's attention supports on a kind of GPU: by rules, or with a target by cuDNN itself."""
    from cudnn_sdpa.errors import CudnnSdpaError

    try:
        if target is None:
            from cudnn_sdpa.support_matrix import described, matrix

            _show(described(sm, cudnn), list(matrix(sm, cudnn)))
        else:
            _plan_support(target, output)
    except CudnnSdpaError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _plan_support(name: str, output: Path | None) -> None:
    from rich.progress import track

    from cudnn_sdpa import planned_support
    from cudnn_sdpa.runtime.target import load_properties

    properties = load_properties(name)
    of = planned_support.environment(properties)
    calls = list(track(planned_support.planned_calls(properties), "planning", transient=True))
    _show(f"cuDNN {of['cudnn']} on {of['gpu']}: engines", planned_support.table(calls))
    for reason in dict.fromkeys(reason for call in calls for reason in call.reasons):
        typer.echo(f"none: {reason}")
    if output is not None:
        output.write_text(planned_support.to_json(of, calls))
        typer.echo(f"written to {output}")


def _show(title: str, rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


Workers = Annotated[int | None, typer.Option(min=1, help="Helper processes; one for each core if not given.")]


@app.command()
def device(
    json: Annotated[
        bool, typer.Option("--json", help="Everything, in the form that `compile --target` reads.")
    ] = False,
) -> None:
    """Describe this machine's GPU."""
    _require_gpu("device")
    from json import dumps

    from cudnn_sdpa.runtime.target import live_properties, live_target

    typer.echo(dumps(live_properties(0), indent=1) if json else str(live_target(0)))


@app.command()
def warmup(
    manifest: Annotated[Path, typer.Argument(help="What `record_plans` saved.")], workers: Workers = None
) -> None:
    """Load or build the plans of a manifest on this machine's GPU, and keep them in the plan store."""
    _require_gpu("warmup")
    from cudnn_sdpa.runtime.store_setting import active, use_plan_store
    from cudnn_sdpa.warming import warmup as run

    def work() -> Any:
        if active() is None:
            use_plan_store()  # plans that go with this process would be of no use
        return run(manifest, progress=True, workers=workers)

    _report(work)


@app.command("compile")
def compile_command(
    manifest: Annotated[Path, typer.Argument(help="What `record_plans` saved.")],
    target: Annotated[
        str, typer.Option(help="The GPU: a name such as h200, or the path of what `device --json` wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for `use_plan_store`.")],
    workers: Workers = None,
) -> None:
    """Compile the plans of a manifest for a GPU that need not be here."""
    from cudnn_sdpa.warming import compile_plans

    _report(lambda: compile_plans(manifest, target, output, progress=True, workers=workers))


def _report(run: Callable[[], Any]) -> None:
    """Says what `run` has made ready, and ends with 1 if a plan is missing."""
    from cudnn_sdpa.errors import CudnnSdpaError

    try:
        report = run()
    except CudnnSdpaError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{report.built} built, {report.loaded} loaded, {report.held} there already, in {report.seconds:.1f} s")
    for key, reason in report.failed.items():
        typer.echo(f"failed: {key}\n  {reason}", err=True)
    if report.failed:
        raise typer.Exit(1)


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
    from cudnn_sdpa.bench.tuned import autotune_gains

    sizes = cases.QUICK if quick else cases.FULL
    measures: dict[AttentionPart, tuple[str, Callable[[cases.Sizes], list[dict[str, Any]]]]] = {
        AttentionPart.KERNELS: ("Device time, interleaved, median", attention.kernels),
        AttentionPart.OPTIONS: (f"What options cost: {sizes.options.label}", attention.options),
        AttentionPart.VARLEN: (f"{sizes.tokens} packed tokens, causal", attention.varlen),
        AttentionPart.MEMORY: (f"Memory of a training step: {sizes.training.label}", attention.memory),
        AttentionPart.AUTOTUNE: ("What autotune gains", autotune_gains),
    }
    chosen = {name.value: measures[name] for name in part or list(AttentionPart)}
    _measure("attention", {name: (title, partial(run, sizes)) for name, (title, run) in chosen.items()}, output)


@bench_app.command("coldstart")
def bench_coldstart(
    part: Annotated[list[ColdPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each number.")] = 7,
) -> None:
    """Time the first calls of a process, without stored plans and with them, and getting ready, in fresh processes."""
    _require_gpu()
    from cudnn_sdpa.bench import coldstart

    measures: dict[ColdPart, tuple[str, Callable[[int], list[dict[str, Any]]]]] = {
        ColdPart.CALLS: (f"First calls of a process: {coldstart.LABEL}", coldstart.calls),
        ColdPart.WARMUP: ("warmup() of stored plans", coldstart.warmup),
        ColdPart.IMPORTS: ("Importing", coldstart.imports),
    }
    chosen = {name.value: measures[name] for name in part or list(ColdPart)}
    _measure("coldstart", {name: (title, partial(run, repeats)) for name, (title, run) in chosen.items()}, output)


@bench_app.command("shapes")
def bench_shapes(
    part: Annotated[list[ShapesPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each number.")] = 3,
) -> None:
    """Time calls of many lengths under each shape policy, and what plans of buckets cost."""
    _require_gpu()
    from cudnn_sdpa.bench import shapes

    measures: dict[ShapesPart, tuple[str, Callable[[int], list[dict[str, Any]]]]] = {
        ShapesPart.PASSES: (f"From cold: {shapes.LABEL}", shapes.passes),
        ShapesPart.TAKEOVER: ("Lengths that come back, under tiered", shapes.takeover),
        ShapesPart.BUCKETS: ("A bucket's plan beside a plan of its own", shapes.buckets),
    }
    chosen = {name.value: measures[name] for name in part or list(ShapesPart)}
    _measure("shapes", {name: (title, partial(run, repeats)) for name, (title, run) in chosen.items()}, output)


def _require_gpu(command: str = "bench") -> None:
    import torch

    if not torch.cuda.is_available():
        typer.echo(f"{command} needs an NVIDIA GPU that PyTorch can see (torch.cuda.is_available() is False)", err=True)
        raise typer.Exit(2)


def _measure(name: str, parts: dict[str, tuple[str, Measure]], output: Path | None) -> None:
    """Measures and prints parts, and writes after each of them what there is: a later one may fail."""
    from cudnn_sdpa.bench import report
    from cudnn_sdpa.runtime.store_setting import OFF, use_plan_store

    results: dict[str, Any] = {}
    with use_plan_store(OFF):  # plans are built as they are measured, and do not fill the user's store
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
