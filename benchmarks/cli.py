"""The commands `python -m benchmarks …`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.tools.output import Row, folder
from benchmarks.tools.parts import (
    AttentionPart,
    ColdPart,
    ConvPart,
    DecodePart,
    DistributedPart,
    Fp8Part,
    FusedPart,
    HostPart,
    KernelsPart,
    LlamaPart,
    NormPart,
    PeersPart,
    ProvidersPart,
    ReplacementsPart,
    ShapesPart,
    SiluPart,
)
from benchmarks.tools.processes import run_command
from cudnn_sdpa import cli

app = typer.Typer(cls=cli.Commands, add_completion=False, invoke_without_command=True, pretty_exceptions_enable=False)

Measure = Callable[[], list[Row]]


@app.callback()
def main(ctx: typer.Context) -> None:
    """Measure on this machine's GPU."""
    cli.show_help(ctx)


@app.command("all")
def bench_all(
    output: Annotated[
        Path | None,
        typer.Option("--output", "--json", "-o", callback=folder, help="Write NAME.json of each into this folder."),
    ] = None,
) -> None:
    """Run all benchmarks, each in its own process; the others continue if one fails."""
    require_gpu()
    names = [command.name for command in app.registered_commands if command.name not in (None, "all")]
    failed = []
    for name in map(str, names):
        typer.echo(f"benchmark {name}")
        results = [] if output is None else ["--json", str(output / f"{name}.json")]
        if run_command(name, *results):
            failed.append(name)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}; the other {len(names) - len(failed)} are done", err=True)
        raise typer.Exit(1)


@app.command("host")
def bench_host(
    part: Annotated[list[HostPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time one warm call on the CPU and its kernel on the GPU, and measure memory."""
    require_gpu()
    from benchmarks import host
    from benchmarks.tools.training import training

    measures: dict[HostPart, tuple[str, Measure]] = {
        HostPart.HOST: ("CPU time of one warm call: B=1, H=8, S=128, D=64, bfloat16", host.host),
        HostPart.PARTS: ("Where it goes", host.parts),
        HostPart.LAUNCHES: ("The launches of these calls alone", host.launches),
        HostPart.RECORDED: ("Calls whose plans are launched as recorded, and by cuDNN, in turn", host.recorded),
        HostPart.TRAINING: ("CPU time of a forward and a backward pass, the same shape", training),
        HostPart.KERNELS: ("Device time, interleaved, median", host.kernels),
        HostPart.MEMORY: ("Memory", host.memory),
    }
    _measure("host", {name.value: measures[name] for name in part or list(HostPart)}, output)


@app.command("attention")
def bench_attention(
    part: Annotated[
        list[AttentionPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: cli.Output = None,
    quick: Annotated[bool, typer.Option(help="Small shapes and few repeats: to test that it runs.")] = False,
) -> None:
    """Time forward and backward kernels, options and packed sequences on the device, and the memory of a step."""
    require_gpu()
    from benchmarks import attention
    from benchmarks.tools import cases
    from benchmarks.tools.tuned import autotune_gains

    sizes = cases.QUICK if quick else cases.FULL
    measures: dict[AttentionPart, tuple[str, Callable[[cases.Sizes], list[Row]]]] = {
        AttentionPart.KERNELS: ("Device time, interleaved, median", attention.kernels),
        AttentionPart.OPTIONS: (f"What options cost: {sizes.options.label}", attention.options),
        AttentionPart.VARLEN: (f"{sizes.tokens} packed tokens, causal", attention.varlen),
        AttentionPart.MEMORY: (f"Memory of a training step: {sizes.training.label}", attention.memory),
        AttentionPart.AUTOTUNE: ("What autotune gains", autotune_gains),
    }
    chosen = {name.value: measures[name] for name in part or list(AttentionPart)}
    _measure("attention", {name: (title, partial(run, sizes)) for name, (title, run) in chosen.items()}, output)


@app.command("fp8")
def bench_fp8(
    part: Annotated[list[Fp8Part] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time attention in FP8 and in bfloat16."""
    require_gpu()
    from benchmarks import fp8

    measures: dict[Fp8Part, tuple[str, Measure]] = {
        Fp8Part.FORWARD: ("Forward pass, interleaved, median", fp8.forward),
        Fp8Part.TRAINING: ("Forward and backward pass, interleaved, median", fp8.training),
        Fp8Part.HOST: (f"CPU time of one warm call: {fp8.SMALL.label}", fp8.host),
        Fp8Part.LAYER: ("Fp8Attention, with quantization and scaling", fp8.layer),
        Fp8Part.ROTATIONS: ("Fp8Attention with rotations, without gradients", fp8.rotations),
    }
    _measure("fp8", {chosen.value: measures[chosen] for chosen in part or list(Fp8Part)}, output)


@app.command("decode")
def bench_decode(
    part: Annotated[list[DecodePart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time decodes, drafts and chunks of prompts on a paged cache, beside FlashAttention-3 if it is installed."""
    require_gpu()
    from benchmarks import decode

    measures: dict[DecodePart, tuple[str, Measure]] = {
        DecodePart.STEPS: ("Steps on pages of 64, 32/8 heads of 128, bfloat16, causal, unless said", decode.steps),
        DecodePart.APPEND: ("New keys and values into pages, in CUDA graphs", decode.append),
        DecodePart.PLANS: ("Plans of a server: mixtures, batches and lengths that change in every step", decode.plans),
        DecodePart.HOST: ("CPU time of one warm call: B=1, 8 heads of 64, 128 tokens", decode.host),
    }
    chosen = part or list(DecodePart)
    # FlashAttention-4's functions take seconds each to compile, or come from the store; `plans` counts builds.
    of_store = chosen == [DecodePart.STEPS]
    _measure("decode", {each.value: measures[each] for each in chosen}, output, stores=of_store)


@app.command("norm")
def bench_norm(
    part: Annotated[list[NormPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time rms_norm, PyTorch's, torch.compile's, and a copy."""
    require_gpu()
    from benchmarks import fused, proposals

    measures: dict[NormPart, tuple[str, Measure]] = {
        NormPart.FORWARD: ("rms_norm, bfloat16", fused.norm_forward),
        NormPart.BACKWARD: ("Gradients of rms_norm, bfloat16", fused.norm_backward),
        NormPart.FUSED: ("rms_norm of a sum, and with SiLU behind it, bfloat16", fused.norm_fused),
        NormPart.HOST: (f"CPU time of one warm rms_norm of {fused.SMALL}", fused.norm_host),
        NormPart.PROPOSALS: ("All plans that cuDNN proposes for rms_norm", proposals.norms),
    }
    _measure("norm", {chosen.value: measures[chosen] for chosen in part or list(NormPart)}, output)


@app.command("fused")
def bench_fused(
    part: Annotated[list[FusedPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time norms, gates and rotations by this library, by torch.compile, and by quack and Liger if installed."""
    require_gpu()
    from benchmarks import fused_inference, fused_peers

    measures: dict[FusedPart, tuple[str, Measure]] = {
        FusedPart.NORMS: ("rms_norm, bfloat16, interleaved, median", fused_peers.norms),
        FusedPart.GATES: ("silu_mul, bfloat16, interleaved, median", fused_peers.gates),
        FusedPart.ROTATIONS: ("rope, bfloat16, interleaved, median", fused_peers.rotations),
        FusedPart.FEW_ROWS: ("Gradients of rms_norm of few rows, bfloat16, interleaved, median", fused_peers.few_rows),
        FusedPart.NORMS_FP8: ("Norms in E4M3, interleaved, median", fused_inference.norms_fp8),
        FusedPart.ROPE_APPEND: (f"Rotations into pages: {fused_inference.LABEL}", fused_inference.rope_append),
        FusedPart.ROPE_IN_PLACE: (f"Rotations in place: {fused_inference.LABEL}", fused_inference.rope_in_place),
    }
    _measure("fused", {chosen.value: measures[chosen] for chosen in part or list(FusedPart)}, output)


@app.command("silu")
def bench_silu(
    part: Annotated[list[SiluPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time silu_mul, PyTorch's, torch.compile's, and a copy."""
    require_gpu()
    from benchmarks import fused, proposals

    measures: dict[SiluPart, tuple[str, Measure]] = {
        SiluPart.FORWARD: ("silu_mul, bfloat16", fused.silu_forward),
        SiluPart.BACKWARD: ("Gradients of silu_mul, bfloat16", fused.silu_backward),
        SiluPart.VIEWS: ("silu_mul in this library's views of its tensors, and on rows as they are", fused.silu_views),
        SiluPart.HOST: (f"CPU time of one warm silu_mul of {fused.SMALL}", fused.silu_host),
        SiluPart.PROPOSALS: ("All plans that cuDNN proposes for silu_mul", proposals.gates),
    }
    _measure("silu", {chosen.value: measures[chosen] for chosen in part or list(SiluPart)}, output)


@app.command("conv")
def bench_conv(
    part: Annotated[list[ConvPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time conv2d, PyTorch's and torch.compile's."""
    require_gpu()
    from benchmarks import convolutions, proposals

    measures: dict[ConvPart, tuple[str, Measure]] = {
        ConvPart.FORWARD: ("conv2d, bfloat16, channels last", convolutions.forward),
        ConvPart.ACTIVATIONS: ("SiLU within conv2d, and behind it", convolutions.activations),
        ConvPart.PEERS: ("conv2d with bias and SiLU, PyTorch's and torch.compile's, interleaved", convolutions.peers),
        ConvPart.BACKWARD: ("Gradients of conv2d, bfloat16, channels last", convolutions.backward),
        ConvPart.PROPOSALS: ("All plans that cuDNN proposes for conv2d with bias and SiLU", proposals.convolutions),
    }
    _measure("conv", {chosen.value: measures[chosen] for chosen in part or list(ConvPart)}, output)


@app.command("llama")
def bench_llama(
    part: Annotated[list[LlamaPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time prompts, decode steps and continuous batching of a few Llama layers in Hugging Face Transformers."""
    require_gpu()
    from benchmarks import llama

    measures: dict[LlamaPart, tuple[str, Measure]] = {
        LlamaPart.PREFILL: (f"Prompts, device time: {llama.LABEL}", llama.prefill),
        LlamaPart.DECODE: (f"Steps of one token, wall time: {llama.LABEL}", llama.decode),
        LlamaPart.BATCHING: (f"Continuous batching, wall time: {llama.LABEL}", llama.batching),
    }
    _measure("llama", {chosen.value: measures[chosen] for chosen in part or list(LlamaPart)}, output)


@app.command("coldstart")
def bench_coldstart(
    part: Annotated[list[ColdPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each number.")] = 7,
) -> None:
    """Time imports, warm-up, and the first calls of a process with and without stored plans, in new processes."""
    require_gpu()
    from benchmarks import coldstart

    measures: dict[ColdPart, tuple[str, Callable[[int], list[Row]]]] = {
        ColdPart.CALLS: (f"First calls of a process: {coldstart.LABEL}", coldstart.calls),
        ColdPart.WARMUP: ("warmup() of stored plans", coldstart.warmup),
        ColdPart.IMPORTS: ("Importing", coldstart.imports),
    }
    chosen = {name.value: measures[name] for name in part or list(ColdPart)}
    _measure("coldstart", {name: (title, partial(run, repeats)) for name, (title, run) in chosen.items()}, output)


@app.command("shapes")
def bench_shapes(
    part: Annotated[list[ShapesPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Processes for each number.")] = 3,
) -> None:
    """Time calls of many lengths under each shape policy, and compare buckets' plans with exact-shape plans."""
    require_gpu()
    from benchmarks import shapes

    measures: dict[ShapesPart, tuple[str, Callable[[int], list[Row]]]] = {
        ShapesPart.PASSES: (f"From cold: {shapes.LABEL}", shapes.passes),
        ShapesPart.TAKEOVER: ("Recurring lengths, under tiered", shapes.takeover),
        ShapesPart.BUCKETS: ("A bucket's plan and an exact-shape plan", shapes.buckets),
    }
    chosen = {name.value: measures[name] for name in part or list(ShapesPart)}
    _measure("shapes", {name: (title, partial(run, repeats)) for name, (title, run) in chosen.items()}, output)


@app.command("peers")
def bench_peers(
    part: Annotated[list[PeersPart] | None, typer.Option(help="Only these parts; may be given several times.")] = None,
    output: cli.Output = None,
) -> None:
    """Time attention here, in PyTorch's backends, and in FlashAttention-3 and -4 if they are installed."""
    require_gpu()
    from benchmarks import peers

    measures: dict[PeersPart, tuple[str, Measure]] = {
        PeersPart.OVERVIEW: (f"{peers.PROBLEM.label}, and decode steps, interleaved, median", peers.overview),
        PeersPart.FORWARD: ("Forward pass, bfloat16, interleaved, median", peers.forward),
        PeersPart.TRAINING: ("Forward and backward pass, bfloat16, interleaved, median", peers.training),
    }
    _measure("peers", {chosen.value: measures[chosen] for chosen in part or list(PeersPart)}, output)


@app.command("providers")
def bench_providers(
    part: Annotated[
        list[ProvidersPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: cli.Output = None,
) -> None:
    """Time calls of sdpa by the kernels of several providers; the plan store keeps what is compiled."""
    require_gpu()
    from benchmarks import providers

    measures: dict[ProvidersPart, tuple[str, Measure]] = {
        ProvidersPart.FORWARD: ("Forward pass, interleaved, median", providers.forward),
        ProvidersPart.BACKWARD: ("Backward pass, interleaved, median", providers.backward),
        ProvidersPart.TRAINING: ("Forward and backward pass, interleaved, median", providers.training),
        ProvidersPart.LENGTHS: ("Forward pass by length", providers.lengths),
        ProvidersPart.BACKWARD_LENGTHS: ("Backward pass by length", providers.backward_lengths),
        ProvidersPart.LARGE: ("Forward pass with large head dims", providers.large),
        ProvidersPart.HOST: (f"CPU time of one warm call: {providers.SMALL.label}", providers.host),
        ProvidersPart.FIRST_CALLS: ("First calls of kinds that the plan store has, median", providers.first_calls),
    }
    chosen = {chosen.value: measures[chosen] for chosen in part or list(ProvidersPart)}
    _measure("providers", chosen, output, stores=True)


@app.command("replacements")
def bench_replacements(
    part: Annotated[
        list[ReplacementsPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: cli.Output = None,
) -> None:
    """Time PyTorch's own attention functions on this library, on the frontend's module, and on PyTorch."""
    require_gpu()
    from benchmarks import replacements

    measures: dict[ReplacementsPart, tuple[str, Measure]] = {
        ReplacementsPart.HOST: (f"CPU time of one warm call: {replacements.SMALL.label}", replacements.host),
        ReplacementsPart.KERNELS: ("Device time, median", replacements.kernels),
        ReplacementsPart.SHAPES: ("From cold: many lengths, causal", replacements.new_shapes),
    }
    _measure("replacements", {chosen.value: measures[chosen] for chosen in part or list(ReplacementsPart)}, output)


@app.command("kernels")
def bench_kernels(
    part: Annotated[
        list[KernelsPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: cli.Output = None,
    small: Annotated[bool, typer.Option(help="Small sizes, also without a GPU: to test that it runs.")] = False,
) -> None:
    """Time this library's own attention kernels, PyTorch's and cuDNN's, with their memory and their errors."""
    if not small:
        require_gpu()
    from benchmarks import kernels

    sizes = kernels.SMALL if small else kernels.FULL
    measures: dict[KernelsPart, tuple[str, Callable[[kernels.Sizes], list[Row]]]] = {
        KernelsPart.FLOAT32: ("float32: device time, interleaved, median", kernels.float32),
        KernelsPart.HALF: ("Half precision: device time, interleaved, median", kernels.half),
        KernelsPart.MEMORY: ("Peak memory beyond inputs and outputs", kernels.memory),
        KernelsPart.ERRORS: ("Largest difference to float64", kernels.errors),
    }
    chosen = {name.value: measures[name] for name in part or list(KernelsPart)}
    _measure("kernels", {name: (title, partial(run, sizes)) for name, (title, run) in chosen.items()}, output)


@app.command("distributed")
def bench_distributed(
    part: Annotated[
        list[DistributedPart] | None, typer.Option(help="Only these parts; may be given several times.")
    ] = None,
    output: cli.Output = None,
    ranks: Annotated[int, typer.Option(min=0, help="Most processes; 0 is one for each GPU.")] = 0,
    small: Annotated[bool, typer.Option(help="Small sizes, also without GPUs: to test that it runs.")] = False,
) -> None:
    """Time context parallelism and parallel models on 2, 4, 8, … GPUs of this machine, and what scaling is linear."""
    if not small:
        require_gpu()
    import torch

    from benchmarks.tools.processes import run_ranks

    most = ranks or max(1, torch.cuda.device_count())
    counts = [2**power for power in range(1, most.bit_length())] or [1]

    def run(name: str) -> list[Row]:
        arguments, rows = (name, *(["small"] if small else [])), []
        for count in counts:
            rows += run_ranks("benchmarks.programs.many_gpus", count, *arguments)[name]
        return rows

    titles = {
        DistributedPart.WEAK: "Context parallelism, forward and backward: 32k tokens for each GPU",
        DistributedPart.STRONG: "Context parallelism, forward and backward: 128k tokens in all",
        DistributedPart.TENSOR: "Tensor parallelism of a layer, forward and backward",
        DistributedPart.MODEL: "FSDP2, context and tensor parallelism of two layers, forward and backward",
    }
    chosen = part or list(DistributedPart)
    _measure("distributed", {each.value: (titles[each], partial(run, each.value)) for each in chosen}, output)


def require_gpu() -> None:
    """Exits if there is no GPU."""
    cli.require_gpu("a benchmark")


def _measure(name: str, parts: dict[str, tuple[str, Measure]], output: Path | None, *, stores: bool = False) -> None:
    """Measures and prints parts, and writes the results after each of them: a later one may fail.

    Plans are built, and the user's store is not filled, unless it `stores`.
    """
    from benchmarks.tools import report
    from cudnn_sdpa.plans.default_store import OFF, use_plan_store

    results: dict[str, list[Row]] = {}
    with nullcontext() if stores else use_plan_store(OFF):
        for part, (title, run) in parts.items():
            rows = run()
            if not rows:  # the part has printed why
                continue
            results[part] = rows
            report.show(title, rows)
            if output is not None:
                report.write(output, name, results)
    if output is not None and results:
        typer.echo(f"written to {output}")
