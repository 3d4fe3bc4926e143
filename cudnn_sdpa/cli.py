"""The command line: `python -m cudnn_sdpa` or `cudnn-sdpa`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cudnn_sdpa.bench.cli import Output, bench_app, require_gpu

app = typer.Typer(help="cuDNN's attention as plain PyTorch functions.", no_args_is_help=True, add_completion=False)
app.add_typer(bench_app, name="bench")


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
    require_gpu("device")
    from json import dumps

    from cudnn_sdpa.runtime.target import live_properties, live_target

    typer.echo(dumps(live_properties(0), indent=1) if json else str(live_target(0)))


@app.command()
def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print everything that was found as JSON, and nothing else.")
    ] = False,
) -> None:
    """Say what is wrong with this installation, and the cure; end with 1 if something is."""
    from cudnn_sdpa.doctor.gather import gather
    from cudnn_sdpa.doctor.report import as_json, as_text, examine, is_well

    facts = gather()
    findings = examine(facts)
    typer.echo(as_json(facts, findings) if json else as_text(facts, findings))
    if not is_well(findings):
        raise typer.Exit(1)


@app.command()
def warmup(
    manifest: Annotated[Path, typer.Argument(help="What `record_plans` saved.")], workers: Workers = None
) -> None:
    """Load or build the plans of a manifest on this machine's GPU, and keep them in the plan store."""
    require_gpu("warmup")
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
