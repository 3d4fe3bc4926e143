"""The command line: `python -m cudnn_sdpa` or `cudnn-sdpa`.

PyTorch is imported by the commands that need it, and not for their help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cudnn_sdpa._version import __version__
from cudnn_sdpa.bench.cli import bench_app, require_gpu, show_help
from cudnn_sdpa.bench.tools.output import Output
from cudnn_sdpa.errors import ArgumentError, CudnnSdpaError

PROBLEM, USAGE = 1, 2

#: What the functions behind the commands call their arguments, and what the command line calls them.
_ARGUMENTS = {
    "sm": "--sm",
    "cudnn": "--cudnn",
    "target": "--target",
    "folder": "--output",
    "path": "--folder",
    "dtype": "--dtype",
    "workers": "--workers",
    "manifest": "MANIFEST",
}


class _Commands(TyperGroup):
    """Prints errors as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_lines():
            return super().invoke(ctx)


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        name = _ARGUMENTS.get(error.argument, error.argument)
        _fail(str(type(error)(name, error.got, error.expected, error.hint)), USAGE)
    except CudnnSdpaError as error:
        _fail(str(error), PROBLEM)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), PROBLEM)
    except ImportError as error:  # mostly PyTorch's, whose message says what to do
        _fail(" ".join(str(error).split()), PROBLEM)


def _fail(why: str, status: int) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(status) from None


app = typer.Typer(cls=_Commands, add_completion=False, invoke_without_command=True, pretty_exceptions_enable=False)
app.add_typer(bench_app, name="bench")


@app.callback()
def main(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and nothing else.")] = False,
) -> None:
    """cuDNN attention as plain PyTorch functions."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    show_help(ctx)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def support(
    sm: Annotated[
        int | None, typer.Option(help="Compute capability, 90 for 9.0. Default: this GPU's, or 90 without a GPU.")
    ] = None,
    cudnn: Annotated[str | None, typer.Option(help="Version, such as 9.19.0. Default: the installed one.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Have the installed cuDNN plan it all for this GPU: a name, or what `device --json` wrote."),
    ] = None,
    output: Output = None,
) -> None:
    """Show what cuDNN attention supports on a GPU architecture, from rules or, with --target, from cuDNN itself."""
    import cudnn_sdpa._pytorch  # noqa: F401

    _show_support({"sm": sm, "cudnn": cudnn, "target": target}, output)


def _show_support(asked: dict[str, Any], output: Path | None) -> None:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from torch.cuda import is_available

    from cudnn_sdpa.planning import support

    of = support.environment(**asked)
    number = len(support.ROWS) * len(support.OPERATIONS)
    by_rules = asked["target"] is None
    cells = list(track(support.cells(**asked), "planning", number, transient=True, disable=by_rules))
    rows = support.table(cells)
    table = Table(*rows[0], title=f"cuDNN {of['cudnn']} on {of['gpu']}, head dims 128", title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    for reason in dict.fromkeys(reason for cell in cells for reason in cell.reasons):
        typer.echo(f"not supported: {reason}")
    if asked["sm"] is None and by_rules and not is_available():
        typer.echo("There is no GPU here that PyTorch can see: this is for SM 90 (Hopper); --sm names another.")
    if output is not None:
        output.write_text(support.to_json(of, cells))
        typer.echo(f"written to {output}")


@app.command()
def explain(
    function: Annotated[str, typer.Argument(help="A function of the library, such as sdpa or conv2d.")],
    arguments: Annotated[
        list[str], typer.Argument(help="NAME=VALUE each; for tensors a shape, such as q=2,8,1024,64 or q=2,64:float16.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The GPU: a name, or what `device --json` wrote; else CUDNN_SDPA_TARGET or h200."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of tensors given without one.")] = "bfloat16",
    training: Annotated[bool, typer.Option("--training", help="Also show what the backward pass runs.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Show the plans' full keys.")] = False,
) -> None:
    """Show what a call would run, without having the GPU; if unsupported, list every reason and exit with 1."""
    import cudnn_sdpa._pytorch  # noqa: F401
    from cudnn_sdpa import cli_arguments
    from cudnn_sdpa.engine import explain

    called = cli_arguments.function_of(function)
    given = cli_arguments.arguments_of(called, arguments, dtype, requires_grad=training)
    found = explain.explained(called, (), given, target=target)
    typer.echo(found.details if details else str(found))
    if not found.supported or (found.backward is not None and not found.backward.supported):
        raise typer.Exit(PROBLEM)


Workers = Annotated[int | None, typer.Option(min=1, help="Helper processes. Default: one per core.")]
Manifest = Annotated[Path, typer.Argument(help="A manifest saved by `record_plans`.")]


@app.command()
def device(
    json: Annotated[bool, typer.Option("--json", help="Print all properties as JSON, for `compile --target`.")] = False,
) -> None:
    """Describe this machine's GPU."""
    require_gpu("device")
    from json import dumps

    from cudnn_sdpa.graph.target import live_properties, live_target

    typer.echo(dumps(live_properties(0), indent=1) if json else str(live_target(0)))


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON only.")] = False,
) -> None:
    """Check this installation and print a fix for each problem; exit with 1 if there is one."""
    import cudnn_sdpa._pytorch  # noqa: F401
    from cudnn_sdpa.doctor.checks import examine, is_well
    from cudnn_sdpa.doctor.probe import gather
    from cudnn_sdpa.doctor.report import as_json, as_text

    facts = gather()
    findings = examine(facts)
    typer.echo(as_json(facts, findings) if json else as_text(facts, findings))
    if not is_well(findings):
        raise typer.Exit(PROBLEM)


@app.command()
def warmup(manifest: Manifest, workers: Workers = None) -> None:
    """Load or build the plans of a manifest on this machine's GPU and save them in the plan store."""
    require_gpu("warmup")
    from cudnn_sdpa.offline.warmup import warmup as run
    from cudnn_sdpa.plans.default_store import active, use_plan_store

    plans = _plans_of(manifest)
    if active() is None:
        use_plan_store()  # without a store the plans would be lost when this process exits
    _report(lambda: run(plans, progress=True, workers=workers))


@app.command("compile")
def compile_command(
    manifest: Manifest,
    target: Annotated[
        str, typer.Option(help="The GPU: a name such as h200, or the path of what `device --json` wrote.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for `use_plan_store`.")],
    workers: Workers = None,
) -> None:
    """Compile the plans of a manifest for a GPU, without having it."""
    import cudnn_sdpa._pytorch  # noqa: F401
    from cudnn_sdpa.offline.warmup import compile_plans

    plans = _plans_of(manifest)
    _report(lambda: compile_plans(plans, target, output, progress=True, workers=workers))


plans_app = typer.Typer(invoke_without_command=True)
app.add_typer(plans_app, name="plans")
Folder = Annotated[
    Path | None,
    typer.Option(help="The plan store. Default: CUDNN_SDPA_PLAN_DIR, or the user's cache folder."),
]


@plans_app.callback()
def plans(ctx: typer.Context) -> None:
    """Inspect or remove the plans on disk."""
    show_help(ctx)


@plans_app.command("size")
def plans_size(folder: Folder = None) -> None:
    """Show where plans are stored, how many there are, and their size."""
    found = _store(folder).info()
    typer.echo(f"{found.plans} plans, {found.bytes / 2**20:.1f} of {found.capacity / 2**20:.0f} MiB, in {found.folder}")


@plans_app.command("clear")
def plans_clear(folder: Folder = None) -> None:
    """Remove all stored plans; later processes build them again."""
    store = _store(folder)
    before = store.info().plans
    store.clear()
    typer.echo(f"{before - store.info().plans} of {before} plans removed from {store.folder}")


def _store(folder: Path | None) -> Any:
    import cudnn_sdpa._pytorch  # noqa: F401
    from cudnn_sdpa.plans.default_store import active, open_store

    if folder is None:
        store = active()
        if store is None:
            _fail(
                "plans are not stored: CUDNN_SDPA_PLAN_DIR or the user's cache folder prevents it; see doctor", PROBLEM
            )
        return store
    if not folder.is_dir():
        raise ArgumentError("path", repr(str(folder)), "an existing folder of plans")
    return open_store(folder, "path")


def _plans_of(path: Path) -> Any:
    """The manifest at `path`; an empty one is an error."""
    from cudnn_sdpa.plans.manifest import PlanManifest

    manifest = PlanManifest.load(path)
    if not len(manifest):
        hint = 'Calls on the GPU are recorded, or with record_plans(target="h200") calls on the CPU.'
        raise ArgumentError("manifest", f"{str(path)!r}, a manifest without plans", "at least one plan", hint)
    return manifest


def _report(run: Callable[[], Any]) -> None:
    """Prints the report of `run`, and exits with 1 if a plan failed."""
    report = run()
    typer.echo(
        f"{report.built} built, {report.loaded} loaded, {report.held} already in memory, in {report.seconds:.1f} s"
    )
    for key, reason in report.failed.items():
        typer.echo(f"failed: {key}\n  {reason}", err=True)
    if report.failed:
        raise typer.Exit(PROBLEM)
