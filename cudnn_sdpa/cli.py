"""The command line: `python -m cudnn_sdpa` or `cudnn-sdpa`.

Only commands that need PyTorch import it, and no command imports it for its help.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cudnn_sdpa._start import import_pytorch
from cudnn_sdpa._version import __version__
from cudnn_sdpa.errors import ArgumentError, CudnnSdpaError, DeviceError, OptionError

if TYPE_CHECKING:
    import torch

    from cudnn_sdpa.offline.warmup import WarmupReport
    from cudnn_sdpa.plans.manifest import PlanManifest
    from cudnn_sdpa.plans.store import PlanStore

PROBLEM, USAGE = 1, 2

#: Arguments of the functions that commands call, and their names on the command line.
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


class Commands(TyperGroup):
    """Prints errors as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DeviceError as error:
            _fail(str(error), PROBLEM)  # no GPU: nothing is wrong with the arguments
        except ArgumentError as error:
            name = _ARGUMENTS.get(error.argument, error.argument)
            _fail(str(type(error)(name, error.got, error.expected, error.hint)), USAGE)
        except CudnnSdpaError as error:
            _fail(str(error), PROBLEM)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), PROBLEM)
        except ImportError as error:  # mostly PyTorch's, whose message includes a cure
            _fail(" ".join(str(error).split()), PROBLEM)


def _fail(why: str, status: int) -> NoReturn:
    typer.echo(why, err=True)
    raise typer.Exit(status) from None


app = typer.Typer(cls=Commands, add_completion=False, invoke_without_command=True, pretty_exceptions_enable=False)


def show_help(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit


def require_gpu(command: str) -> None:
    import_pytorch()
    from torch.cuda import is_available

    if not is_available():
        _fail(f"{command} needs an NVIDIA GPU that PyTorch can see (torch.cuda.is_available() is False)", USAGE)


def writable(path: Path | None) -> Path | None:
    """The path of a file, checked to be writable before a long command starts."""
    if path is None:
        return None
    make_folder(path.parent, path)
    if path.is_dir():
        raise OptionError("--json", repr(str(path)), "the path of a file, not of a folder")
    target = path if path.exists() else path.parent
    if not os.access(target, os.W_OK):
        raise OptionError("--json", f"{str(path)!r}", f"a path that can be written; {str(target)!r} cannot")
    return path


def make_folder(folder: Path, path: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        actual = f"{str(path)!r}, whose folder cannot be created ({error.strerror})"
        raise OptionError("--json", actual, "a path that can be written") from None


Output = Annotated[
    Path | None,
    typer.Option("--output", "--json", "-o", callback=writable, help="Write the results to this JSON file."),
]


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
        typer.Option(help="Plan with the installed cuDNN for this GPU: a name, or a file of `device --json`."),
    ] = None,
    output: Output = None,
) -> None:
    """Show what cuDNN attention supports on a GPU architecture, from rules or, with --target, from cuDNN itself."""
    import_pytorch()
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from torch.cuda import is_available

    from cudnn_sdpa.planning import support as planning

    environment = planning.environment(sm, cudnn, target)
    number = len(planning.ROWS) * len(planning.OPERATIONS)
    by_rules = target is None
    found = planning.cells(sm=sm, cudnn=cudnn, target=target)
    cells = list(track(found, "planning", number, transient=True, disable=by_rules))
    rows, reasons = planning.table(cells)
    title = f"cuDNN {environment['cudnn']} on {environment['gpu']}, head dims 128 unless the row says otherwise"
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
    typer.echo("yes: forward and training; no: neither; –: no such option; (n): why")
    for number, reason in enumerate(reasons, start=1):
        typer.echo(f"({number}) {reason}")
    if sm is None and by_rules and not is_available():
        typer.echo("PyTorch sees no GPU: this is for SM 90 (Hopper); --sm names another.")
    if output is not None:
        output.write_text(planning.to_json(environment, cells))
        typer.echo(f"written to {output}")


@app.command()
def explain(
    function: Annotated[str, typer.Argument(help="A function of the library, such as sdpa or conv2d.")],
    arguments: Annotated[
        list[str], typer.Argument(help="NAME=VALUE each; for tensors a shape, such as q=2,8,1024,64 or q=2,64:float16.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The GPU: a name, or a file of `device --json`. Default: CUDNN_SDPA_TARGET, or h200."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of tensors without one.")] = "bfloat16",
    training: Annotated[bool, typer.Option("--training", help="Also show what the backward pass runs.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Show the plans' full keys.")] = False,
) -> None:
    """Show what a call would run, without having the GPU; if unsupported, list every reason and exit with 1."""
    import_pytorch()
    from cudnn_sdpa.engine.explain import explained

    called = _function_of(function)
    values = _arguments_of(called, arguments, dtype, requires_grad=training)
    explanation = explained(called, (), values, target=target)
    typer.echo(explanation.details if details else str(explanation))
    if not explanation.supported or (explanation.backward is not None and not explanation.backward.supported):
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
    import_pytorch()
    from cudnn_sdpa.doctor.checks import as_json, as_text, examine, is_well
    from cudnn_sdpa.doctor.probe import gather

    facts = gather()
    findings = examine(facts)
    typer.echo(as_json(facts, findings) if json else as_text(facts, findings))
    if not is_well(findings):
        raise typer.Exit(PROBLEM)


@app.command()
def warmup(manifest: Manifest, workers: Workers = None) -> None:
    """Load or build the plans of a manifest on this machine's GPU and save them in the plan store."""
    import_pytorch()

    plans = _plans_of(manifest)
    require_gpu("warmup")
    from cudnn_sdpa.offline.warmup import warmup as run
    from cudnn_sdpa.plans.default_store import active, use_plan_store

    if active() is None:
        use_plan_store()  # without a store the plans would be lost when this process exits
    _report(lambda: run(plans, progress=True, workers=workers))


@app.command("compile")
def compile_command(
    manifest: Manifest,
    target: Annotated[
        str, typer.Option(help="The GPU: a name such as h200, or the path of a file of `device --json`.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="Folder for `use_plan_store`.")],
    workers: Workers = None,
) -> None:
    """Compile the plans of a manifest for a GPU, without having it."""
    import_pytorch()
    from cudnn_sdpa.offline.warmup import compile_plans

    plans = _plans_of(manifest)
    _report(lambda: compile_plans(plans, target, output, progress=True, workers=workers))


@app.command("build-native")
def build_native(
    again: Annotated[bool, typer.Option("--again", help="Compile it even if it is there.")] = False,
) -> None:
    """Compile the native module ahead, for this PyTorch and this Python, and load it."""
    import_pytorch()
    from cudnn_sdpa.engine.native import build, loader

    try:
        path, how = None if again else build.find(), "compiled before"
        if path is None:
            begin = time.perf_counter()
            path = build.compile_module()
            how = f"compiled in {time.perf_counter() - begin:.0f} s"
        loader.load(path)
    except (build.CompileError, ImportError) as error:
        _fail(" ".join(str(error).split()), PROBLEM)
    typer.echo(f"{how}: {path}")


plans_app = typer.Typer(invoke_without_command=True)
app.add_typer(plans_app, name="plans")
Folder = Annotated[
    str | None,  # as a Path, an unset variable of the shell would be the current folder
    typer.Option(help="The plan store. Default: CUDNN_SDPA_PLAN_DIR, or the user's cache folder."),
]


@plans_app.callback()
def plans(ctx: typer.Context) -> None:
    """Inspect or remove the plans on disk."""
    show_help(ctx)


@plans_app.command("size")
def plans_size(folder: Folder = None) -> None:
    """Show where plans are stored, how many there are, and their size."""
    info = _store(folder).info()
    typer.echo(f"{info.plans} plans, {info.bytes / 2**20:.1f} of {info.capacity / 2**20:.0f} MiB, in {info.folder}")


@plans_app.command("clear")
def plans_clear(folder: Folder = None) -> None:
    """Remove all stored plans; later processes build them again."""
    store = _store(folder)
    before = store.info().plans
    store.clear()
    typer.echo(f"{before - store.info().plans} of {before} plans removed from {store.folder}")


def _store(folder: str | None) -> PlanStore:
    import_pytorch()
    from cudnn_sdpa.plans.default_store import active, open_store

    if folder is None:
        store = active()
        if store is None:
            _fail(
                "plans are not stored: CUDNN_SDPA_PLAN_DIR or the user's cache folder prevents it; see doctor", PROBLEM
            )
        return store
    if not folder or not Path(folder).is_dir():
        raise ArgumentError("path", repr(folder), "an existing folder of plans")
    return open_store(folder, "path")


def _plans_of(path: Path) -> PlanManifest:
    from cudnn_sdpa.plans.manifest import PlanManifest

    manifest = PlanManifest.load(path)
    if not len(manifest):
        hint = 'Record calls on a GPU, or calls on the CPU with record_plans(target="h200").'
        raise ArgumentError("manifest", f"{str(path)!r}, a manifest without plans", "at least one plan", hint)
    return manifest


def _report(run: Callable[[], WarmupReport]) -> None:
    report = run()
    typer.echo(
        f"{report.built} built, {report.loaded} loaded, {report.held} already in memory, in {report.seconds:.1f} s"
    )
    for key, reason in report.failed.items():
        typer.echo(f"failed: {key}\n  {reason}", err=True)
    if report.failed:
        raise typer.Exit(PROBLEM)


_WORDS = {"true": True, "false": False, "none": None}


def _function_of(name: str) -> Callable[..., object]:
    from cudnn_sdpa.engine.explain import described_functions, named

    function = named(name)
    if function is None:
        names = described_functions()
        raise OptionError("FUNCTION", repr(name), "one of " + ", ".join(names), _nearest(name, names))
    return function


def _nearest(name: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(names), 1)
    return f"Did you mean {found[0]}?" if found else ""


def _arguments_of(
    function: Callable[..., object], words: Sequence[str], dtype: str, *, requires_grad: bool
) -> dict[str, object]:
    """Parses words NAME=VALUE: shapes become tensors without values, everything else Python literals.

    The shape of a tensor may end with its dtype, `cu_seqlens_q=17:int32`.
    """
    parameters = inspect.signature(function).parameters
    arguments: dict[str, object] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise OptionError("ARGUMENT", repr(word), "NAME=VALUE, such as q=2,8,1024,64 or is_causal=true")
        if name not in parameters:
            raise OptionError("ARGUMENT", repr(word), "one of " + ", ".join(parameters), _nearest(name, parameters))
        if name in arguments:
            raise OptionError("ARGUMENT", repr(word), f"{name} once")
        is_tensor = "Tensor" in str(parameters[name].annotation) and text.lower() != "none"
        arguments[name] = _tensor(name, text, dtype, requires_grad) if is_tensor else _value(text)
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in arguments]
    if missing:
        raise OptionError("ARGUMENT", f"no {missing[0]}", f"{missing[0]}=VALUE, a required argument")
    return arguments


def _tensor(name: str, text: str, default_dtype: str, requires_grad: bool) -> torch.Tensor:
    import torch

    sizes, _, own_dtype = text.partition(":")
    dtype = getattr(torch, own_dtype or default_dtype, None)
    if not isinstance(dtype, torch.dtype):
        name = name if own_dtype else "dtype"
        raise OptionError(name, repr(own_dtype or default_dtype), "a dtype such as bfloat16")
    shape = _value(f"{sizes},") if sizes.strip() else ()
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 2**40 for size in shape):
        raise OptionError(name, repr(text), "a shape such as 2,8,1024,64, or 17:int32 with a dtype")
    try:
        tensor = torch.empty(shape, dtype=dtype)  # its memory is never touched
    except RuntimeError:
        raise OptionError(name, repr(text), "a tensor that fits in memory") from None
    return tensor.requires_grad_(requires_grad and tensor.is_floating_point())


def _value(text: str) -> object:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two for thousands of signs or brackets
        return text
