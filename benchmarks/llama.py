"""`benchmarks llama`: prompts, decode steps and continuous batching of Llama layers in transformers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks.tools import cases, peers
from benchmarks.tools.output import Row
from benchmarks.tools.timing import device_times
from cudnn_sdpa.integrations.transformers import NAME, register

#: Llama 3 8B with fewer layers and a smaller vocabulary.
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}
LABEL = "4 layers of Llama's 8B model, bfloat16"

#: B, prompt tokens.
PROMPTS = ((1, 2048), (4, 2048), (1, 8192), (1, 32768))
#: B, cached tokens.
CACHES = ((1, 1024), (1, 8192), (16, 4096), (64, 1024))
STEPS = 40
#: Requests, tokens of each prompt, generated tokens.
REQUESTS = ((16, 1024, 128), (64, 512, 128), (64, 4096, 64))
#: Tokens of a batch.
BATCH_TOKENS = 8192
SDPA = "pytorch sdpa"

#: Relative error of logits: rounding errors of the layers add up.
TOLERANCE = 5e-2


@dataclass(frozen=True)
class Candidate:
    """A model, and a context manager around its calls that selects PyTorch's backend."""

    name: str
    model: Any
    backend: Callable[[], AbstractContextManager[None]]


def candidates() -> list[Candidate]:
    """A model on `sdpa`, on PyTorch's default, and on each of PyTorch's backends; weights are shared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    like = cases.normal(1)
    models: dict[str, Any] = {}
    for implementation in (NAME, "sdpa"):
        config = LlamaConfig(**{**SHAPE, "attn_implementation": implementation})
        with torch.device("meta" if models else like.device):
            models[implementation] = LlamaForCausalLM(config)
    ours, theirs = models[NAME].to(like.dtype).eval(), models["sdpa"]
    theirs.load_state_dict(ours.state_dict(), assign=True)
    theirs.model.rotary_emb = ours.model.rotary_emb
    default = Candidate(SDPA, theirs.eval(), nullcontext)
    backends = [Candidate(name, theirs, _only(name)) for name in peers.PYTORCH_BACKENDS]
    return [Candidate(NAME, ours, nullcontext), default, *backends]


def _only(name: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: peers.only(name)


def prefill() -> list[Row]:
    """Device time of prompts without padding and without a cache."""
    rows = []
    all_candidates = candidates()
    for batch, length in track(PROMPTS, "prefill", transient=True):
        ids = _tokens(batch, length)
        calls = {candidate.name: _prompt(candidate, ids) for candidate in all_candidates}
        with torch.inference_mode():
            _compare({name: call() for name, call in calls.items()})
            times = device_times(calls)
        rows.append(_row("B, tokens", f"{batch}, {length}", batch * length, times))
    return rows


def _prompt(candidate: Candidate, ids: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with candidate.backend():
            logits: Tensor = candidate.model(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    return call


def decode() -> list[Row]:
    """Wall time of one-token decode steps, each on the cache of the step before."""
    rows = []
    all_candidates = candidates()
    without_backends = [candidate for candidate in all_candidates if candidate.name in (NAME, SDPA)]
    # PyTorch's cuDNN backend would reuse the plans that its default has just built for the same lengths.
    without_cudnn = [candidate for candidate in all_candidates if candidate.name != peers.CUDNN]
    for batch, length in track(CACHES, "decode", transient=True):
        ids = _tokens(batch, length)
        for kind in ("growing", "static", "static, compiled"):
            calls = {}
            with torch.no_grad():  # not inference mode: a static cache is updated in later steps
                for candidate in without_cudnn if kind == "growing" else without_backends:
                    cache = _cache(candidate.model.config, None if kind == "growing" else length + 2 * STEPS)
                    run = compiled(candidate.model) if kind == "static, compiled" else candidate.model
                    calls[candidate.name] = _steps(candidate, run, ids, cache)
                _compare({name: call() for name, call in calls.items()})
                times = wall_times(calls, STEPS)
            rows.append(_row("B, tokens, cache", f"{batch}, {length}, {kind}", batch, times))
    return rows


def _cache(config: Any, size: int | None) -> Any:
    from transformers import DynamicCache, StaticCache

    return DynamicCache(config=config) if size is None else StaticCache(config=config, max_cache_len=size)


def compiled(model: Any) -> Any:
    """The model compiled as by `generate`: its steps become CUDA graphs."""
    torch._dynamo.reset()
    return torch.compile(model, mode="reduce-overhead", fullgraph=True)


def _steps(candidate: Candidate, run: Any, ids: Tensor, cache: object) -> Callable[[], Tensor]:
    """Decode steps of `run`, the model or its compiled form, on a cache filled by a prompt."""
    candidate.model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:].clone()

    def call() -> Tensor:
        with candidate.backend():
            logits: Tensor = run(token, past_key_values=cache).logits
        return logits.clone()  # the next replay of a CUDA graph overwrites it

    return call


def wall_times(calls: Mapping[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Microseconds from a call until the GPU has finished: the interleaved median, after a quarter as warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            with _synchronized():
                start = time.perf_counter()
                call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(measured[repeats // 4 :]) * 1e6 for name, measured in seconds.items()}


@contextmanager
def _synchronized() -> Iterator[None]:
    on_gpu = cases.DEVICE == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    yield
    if on_gpu:
        torch.cuda.synchronize()


def batching() -> list[Row]:
    """Generated tokens per second of `generate_batch`, the prompts included, after a run that warms up."""
    rows = []
    model = candidates()[0].model
    for requests, length, new in track(REQUESTS, "batching", transient=True):
        prompts = _tokens(requests, length).tolist()
        names = {NAME: NAME, f"{NAME}, no block tables": NAME, SDPA: "sdpa", **_flash_attention()}
        times, tokens = {}, {}
        for name, implementation in names.items():
            model.set_attn_implementation(implementation)
            generate = _batches(model, prompts, new, has_tables="no block tables" not in name)
            tokens[name], _ = generate()
            times[name] = generate()[1]
            model.destroy_cached_continuous_batching_manager()
        _compare_first(tokens)
        rows.append(_row("requests, prompt, new", f"{requests}, {length}, {new}", requests * new, times, backends=()))
    return rows


def _flash_attention() -> dict[str, str]:
    """FlashAttention, as transformers calls the newest one that is installed."""
    from transformers.utils import import_utils

    for version in (3, 2):
        if getattr(import_utils, f"is_flash_attn_{version}_available")():
            return {f"flash attention {version}": f"flash_attention_{version}"}
    return {}


def _batches(
    model: Any, prompts: list[list[int]], new: int, *, has_tables: bool
) -> Callable[[], tuple[list[list[int]], float]]:
    """Generates greedy tokens of all prompts, and takes the microseconds; later calls have the graphs of the first."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    never = SHAPE["vocab_size"]  # a token that no model generates
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=never, pad_token_id=0)
    config = ContinuousBatchingConfig(max_batch_tokens=BATCH_TOKENS, auto_switch_to_flash=False)
    config.num_blocks = len(prompts) * (2 + (len(prompts[0]) + new) // config.page_size)
    config.max_blocks_per_request = None if has_tables else 0

    def generate() -> tuple[list[list[int]], float]:
        with _synchronized():
            start = time.perf_counter()
            given = {"generation_config": greedy, "continuous_batching_config": config, "persistent_manager": True}
            results = [result.generated_tokens for result in model.generate_batch(prompts, **given).values()]
        microseconds = (time.perf_counter() - start) * 1e6
        if [len(tokens) for tokens in results] != [new] * len(prompts):
            raise RuntimeError(f"{model.config._attn_implementation}: {len(results)} requests have other lengths")
        return results, microseconds

    return generate


def _compare_first(tokens: dict[str, list[list[int]]]) -> None:
    """Of the first tokens, some may differ by rounding."""
    expected = [request[0] for request in tokens[SDPA]]
    for name, found in tokens.items():
        same = sum(request[0] == first for request, first in zip(found, expected, strict=True))
        if same < 0.75 * len(expected):
            raise RuntimeError(f"{name}: {same} of {len(expected)} first tokens are those of {SDPA}")


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (batch, length), device=cases.DEVICE)


def _compare(logits: dict[str, Tensor]) -> None:
    expected = logits[SDPA].clone()
    for name, actual in logits.items():
        cases.check_agreement(["logits"], [actual], [expected], f"{SDPA}'s, {name}", tolerance=TOLERANCE)


def _row(
    column: str, label: str, tokens: int, times: dict[str, float], *, backends: Iterable[str] | None = None
) -> Row:
    """Tokens per second; a dash for PyTorch's backends that were not timed."""
    rates: Row = {f"{name} tokens/s": tokens / time * 1e6 for name, time in times.items()}
    for name in peers.PYTORCH_BACKENDS if backends is None else backends:
        rates.setdefault(f"{name} tokens/s", "–")
    return {column: label, **rates, "× sdpa": times[SDPA] / times[NAME]}
