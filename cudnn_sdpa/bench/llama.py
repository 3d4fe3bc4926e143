"""`bench llama`: prefill and decode of a stack of Llama's layers in transformers, beside PyTorch's backends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from cudnn_sdpa.bench.tools import cases, peers
from cudnn_sdpa.bench.tools.timing import device_times
from cudnn_sdpa.integrations.transformers import NAME, register

#: Llama 3's 8B model with fewer layers and tokens.
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

#: B, tokens of a prompt.
PROMPTS = ((1, 2048), (4, 2048), (1, 8192), (1, 32768))
#: B, tokens that are there already.
CACHES = ((1, 1024), (1, 8192), (16, 4096), (64, 1024))
STEPS = 40
SDPA = "pytorch sdpa"

#: Relative error of logits: each layer rounds again.
TOLERANCE = 5e-2


@dataclass(frozen=True)
class Candidate:
    """A model and what has to be around its calls."""

    name: str
    model: Any
    around: Callable[[], AbstractContextManager[None]]


def candidates() -> list[Candidate]:
    """A model on this library's attention and on PyTorch's, as it chooses and on each backend; weights are shared."""
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    like = cases.normal(1)
    models: dict[str, Any] = {}
    for implementation in (NAME, "sdpa"):
        config = LlamaConfig(**{**SHAPE, "attn_implementation": implementation})
        with torch.device("meta" if models else like.device):
            models[implementation] = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    ours, theirs = models[NAME].to(like.dtype).eval(), models["sdpa"]
    theirs.load_state_dict(ours.state_dict(), assign=True)
    theirs.model.rotary_emb = ours.model.rotary_emb
    found = [Candidate(NAME, ours, nullcontext), Candidate(SDPA, theirs.eval(), nullcontext)]
    return found + [Candidate(name, theirs, _only(name)) for name in peers.PYTORCH_BACKENDS]


def _only(name: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: peers.only(name)


def prefill() -> list[dict[str, Any]]:
    """Prompts without padding and without a cache: device time."""
    rows = []
    all_candidates = candidates()
    for batch, length in track(PROMPTS, "prefill", transient=True):
        ids = _tokens(batch, length)
        calls = {one.name: _prompt(one, ids) for one in all_candidates}
        with torch.inference_mode():
            _compare({name: call() for name, call in calls.items()})
            times = device_times(calls)
        rows.append(_row("B, tokens", f"{batch}, {length}", batch * length, times))
    return rows


def _prompt(one: Candidate, ids: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with one.around():
            logits: Tensor = one.model(ids, use_cache=False, logits_to_keep=1).logits
        return logits

    return call


def decode() -> list[dict[str, Any]]:
    """Steps of one token, each one on the cache that the step before left: wall time of a step."""
    rows = []
    everyone = candidates()
    # PyTorch held to cuDNN would find the plans that PyTorch has built for the same lengths just before.
    growing = [one for one in everyone if one.name != peers.CUDNN]
    for batch, length in track(CACHES, "decode", transient=True):
        ids = _tokens(batch, length)
        for kind in ("growing", "static", "static, compiled"):
            calls = {}
            with torch.no_grad():  # not inference mode: a static cache has to outlive its steps
                for one in growing if kind == "growing" else everyone[:2]:
                    cache = _cache(one.model.config, None if kind == "growing" else length + 2 * STEPS)
                    run = compiled(one.model) if kind == "static, compiled" else one.model
                    calls[one.name] = _steps(one, run, ids, cache)
                _compare({name: call() for name, call in calls.items()})
                times = wall_times(calls, STEPS)
            rows.append(_row("B, tokens, cache", f"{batch}, {length}, {kind}", batch, times))
    return rows


def _cache(config: Any, size: int | None) -> Any:
    from transformers import DynamicCache, StaticCache

    return DynamicCache(config=config) if size is None else StaticCache(config=config, max_cache_len=size)


def compiled(model: Any) -> Any:
    """The model as `generate` compiles it: its steps become CUDA graphs."""
    torch._dynamo.reset()
    return torch.compile(model, mode="reduce-overhead", fullgraph=True)


def _steps(one: Candidate, run: Any, ids: Tensor, cache: Any) -> Callable[[], Tensor]:
    """Steps, by a compiled model perhaps, on a cache that a prompt has filled."""
    one.model(ids, past_key_values=cache, logits_to_keep=1)
    token = ids[:, -1:].clone()

    def call() -> Tensor:
        with one.around():
            logits: Tensor = run(token, past_key_values=cache).logits
        return logits.clone()  # the next replay of a CUDA graph writes over it

    return call


def wall_times(calls: Mapping[str, Callable[[], Tensor]], repeats: int) -> dict[str, float]:
    """Microseconds from a call until the GPU has done it: the median, interleaved, after some to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            with _finished():
                start = time.perf_counter()
                call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[repeats // 4 :]) * 1e6 for name, found in seconds.items()}


@contextmanager
def _finished() -> Iterator[None]:
    """Nothing is left to do for the GPU before and after."""
    on_gpu = cases.DEVICE == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    yield
    if on_gpu:
        torch.cuda.synchronize()


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (batch, length), device=cases.DEVICE)


def _compare(logits: dict[str, Tensor]) -> None:
    expected = logits[SDPA].clone()
    for name, found in logits.items():
        cases.check_agreement(["logits"], [found], [expected], f"{SDPA}'s, {name}", TOLERANCE)


def _row(what: str, label: str, tokens: int, times: dict[str, float]) -> dict[str, Any]:
    """Tokens in a second."""
    rates: dict[str, Any] = {f"{name} tokens/s": tokens / time * 1e6 for name, time in times.items()}
    for name in (NAME, SDPA, *peers.PYTORCH_BACKENDS):
        rates.setdefault(f"{name} tokens/s", "–")
    return {what: label, **rates, "× sdpa": times[SDPA] / times[NAME]}
