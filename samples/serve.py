"""A small server with continuous batching: LLaMA's shape, random weights, and a paged cache that is too small.

    python samples/serve.py

Requests arrive over time. Prompts are prefilled in chunks, and all prefilled requests decode together, one token
each per iteration. A finished request frees its pages. When pages run out, the youngest request is preempted: it frees
its pages and waits to be prefilled again, with its generated tokens. At the end every generated token is checked
against the same weights with PyTorch's attention on the whole sequence at once.

On an NVIDIA GPU it runs on cuDNN, in bfloat16. Without one it runs the CPU reference in float32, at a smaller size.
It runs eagerly; docs/serving.md shows how to put decode steps into CUDA graphs.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from torch.nn.utils.rnn import pad_sequence

import cudnn_sdpa
from cudnn_sdpa import OutOfPagesError, PagedKVCache, PagedStep, plan_cache

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
if not ON_GPU:
    cudnn_sdpa.cpu_checks("h200,any-dtype")  # float32, to compare more closely
LAYERS, WIDTH, MLP_WIDTH, VOCABULARY = (8, 2048, 5632, 32000) if ON_GPU else (2, 128, 256, 512)
HEADS_Q, HEADS_KV, HEAD_DIM = (16, 4, 128) if ON_GPU else (4, 2, 32)

REQUESTS = 128 if ON_GPU else 24
#: Fewest and most tokens of a prompt, and of an answer.
PROMPT, ANSWER = ((64, 2048), (32, 256)) if ON_GPU else ((8, 160), (8, 48))
ITERATIONS_BETWEEN = 2.0  #: arrivals, on average
CHUNK = 512 if ON_GPU else 64  #: tokens that are prefilled in an iteration
MAX_RUNNING = 48 if ON_GPU else 8
MAX_LENGTH = PROMPT[1] + ANSWER[1]
#: The cache holds the longest request, but not MAX_RUNNING average ones: pages run out, to show what happens then.
PAGES, PAGE_SIZE = (384, 64) if ON_GPU else (44, 16)
SEED = 5
#: How far below the largest logit that of a generated token may be, where logits have a standard deviation of about 1.
#: In bfloat16 kernels round differently, and the first two of 32,000 are often closer than that.
TOLERANCE = 0.3 if ON_GPU else 0.0

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
console = Console()


def paged_attention(cache: PagedKVCache, step: PagedStep, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a step's new tokens on the cached tokens of their sequences."""
    cache.append(step, k, v, layer)
    return cache.attend(step, q, layer)


def dense_attention(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: rotates pairs (B, S, H, D/2) of x by angles (B, S, D/2)."""
    cos, sin = angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Grouped-query attention and SwiGLU, each after a norm and with a residual connection."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.groups = [HEADS_Q, HEADS_KV, HEADS_KV]
        self.before_attention, self.before_mlp = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.qkv = nn.Linear(WIDTH, sum(self.groups) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)
        self.gate_and_up = nn.Linear(WIDTH, 2 * MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        every_head = self.qkv(rms_norm(x, (WIDTH,), self.before_attention)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = every_head.split(self.groups, dim=2)
        q, k, v = (heads.transpose(1, 2) for heads in (rotate(q, angles), rotate(k, angles), v))
        x = x + self.out(attend(self.layer, q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(rms_norm(x, (WIDTH,), self.before_mlp)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


class Llama(nn.Module):
    """The model. The attention function is an argument of each call, so the check uses the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # With small scores attention is a mean of all values, and the check would hardly notice a wrong key.
                gain = 1.5 if "qkv" in name else 1.0
                nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (B, S, WIDTH) of tokens at positions, both (B, S)."""
        pairs = torch.arange(HEAD_DIM // 2, device=tokens.device)
        angles = positions.unsqueeze(-1) * 1e4 ** (-2 * pairs / HEAD_DIM)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, angles, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(rms_norm(hidden, (WIDTH,), self.norm)).float()


@dataclass(eq=False)
class Request:
    """A prompt to continue."""

    arrival: int  #: in which iteration
    tokens: list[int]  #: the prompt and, after it, all that has been generated
    prompt: int  #: tokens of the prompt
    length: int  #: tokens when it is done
    sequence: int = -1  #: its number in the cache, once it has arrived


def make_requests() -> list[Request]:
    """In order of arrival."""
    draw = random.Random(SEED)
    requests, arrival = [], 0.0
    for _ in range(REQUESTS):
        tokens = draw.choices(range(VOCABULARY), k=draw.randint(*PROMPT))
        requests.append(Request(int(arrival), tokens, len(tokens), len(tokens) + draw.randint(*ANSWER)))
        arrival += draw.expovariate(1 / ITERATIONS_BETWEEN)
    return requests


class Server:
    """Selects the requests of each iteration. Waiting requests are always younger than running ones."""

    def __init__(self, model: Llama, requests: list[Request]) -> None:
        self.model = model
        sizes = {"pages": PAGES, "page_size": PAGE_SIZE, "heads": HEADS_KV, "head_dim": HEAD_DIM, "layers": LAYERS}
        self.cache = PagedKVCache(**sizes, max_length=MAX_LENGTH, dtype=DTYPE, device=DEVICE)
        self.coming, self.waiting = deque(requests), deque[Request]()
        self.running: list[Request] = []  # the oldest first
        self.iterations = self.finished = self.generated = self.preemptions = self.most_pages = 0
        self.builds = 0  # plans built before the first request

    def iterate(self) -> None:
        """Admits requests if there is room, decodes a token of each prefilled request, and prefills a chunk."""
        while self.coming and self.coming[0].arrival <= self.iterations:
            self.coming[0].sequence = self.cache.add()
            self.waiting.append(self.coming.popleft())
        while self.waiting and len(self.running) < MAX_RUNNING and self.has_room_for(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        self.advance({request: 1 for request in self.running if self.missing(request) == 1})
        self.advance(self.next_chunk())
        self.iterations += 1

    def missing(self, request: Request) -> int:
        """Tokens that are not in the cache yet; the next token needs them all."""
        return len(request.tokens) - self.cache.length(request.sequence)

    def has_room_for(self, request: Request) -> bool:
        """Whether there are pages for its known tokens, besides those reserved for other prefills."""
        promised = sum(
            pages_for(len(other.tokens)) - pages_for(self.cache.length(other.sequence)) for other in self.running
        )
        return promised + pages_for(len(request.tokens)) <= self.cache.use().free

    def next_chunk(self) -> dict[Request, int]:
        """The requests to prefill, oldest first, and their numbers of tokens."""
        counts: dict[Request, int] = {}
        for request in self.running:
            count = min(self.missing(request), CHUNK - sum(counts.values()))
            if count and self.missing(request) > 1:
                counts[request] = count
        return counts

    def advance(self, counts: dict[Request, int]) -> None:
        """Runs the model on the given numbers of tokens. A request without missing tokens gets a new one."""
        step = self.reserve(counts)
        if not counts:
            return
        rows = []
        for request, count in counts.items():
            end = self.cache.length(request.sequence)
            rows.append(torch.tensor(request.tokens[end - count : end]))
        tokens = pad_sequence(rows, batch_first=True).to(DEVICE)
        hidden = self.model(tokens, step.positions, partial(paged_attention, self.cache, step))
        last = hidden[torch.arange(len(rows), device=DEVICE), step.seq_lens_q.long() - 1]
        for request, token in zip(counts, self.model.logits(last).argmax(-1).tolist(), strict=True):
            if not self.missing(request):
                self.add_token(request, token)

    def reserve(self, counts: dict[Request, int]) -> PagedStep:
        """Reserves the pages of the step; preempted requests are removed from it."""
        try:
            step = self.cache.reserve([request.sequence for request in counts], list(counts.values()))
        except OutOfPagesError:
            counts.pop(self.preempt(), None)
            return self.reserve(counts)
        self.most_pages = max(self.most_pages, self.cache.use().used)
        return step

    def preempt(self) -> Request:
        """Makes the youngest request wait again, without pages. It keeps its generated tokens."""
        youngest = self.running.pop()
        self.cache.evict(youngest.sequence)
        self.waiting.appendleft(youngest)
        self.preemptions += 1
        return youngest

    def add_token(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.generated += 1
        if len(request.tokens) == request.length:
            self.cache.free(request.sequence)
            self.running.remove(request)
            self.finished += 1


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)


def warm_up(cache: PagedKVCache) -> None:
    """Prepares the plans of likely steps before the first request; others are built at first use."""
    q = torch.empty(1, 2, HEADS_Q, HEAD_DIM, dtype=DTYPE, device=DEVICE).transpose(1, 2)  # as in `Block`
    decode, prefill = cache.plans(q, range(1, MAX_RUNNING + 1)), cache.plans(q, range(1, 9), range(2, CHUNK + 1))
    for manifest in (decode, prefill):
        report = cudnn_sdpa.warmup(manifest, progress=True)
        console.print(f"{report.built} plans built, {report.loaded} loaded, in {report.seconds:.1f} s")


def serve(server: Server) -> float:
    """Runs until every request is finished. Returns the time in seconds."""
    now = TextColumn(f"pages {{task.fields[pages]:>3}} of {PAGES}, {{task.fields[rate]:5.0f}} tokens/s")
    start, server.builds = time.perf_counter(), plan_cache.info().builds
    with Progress("requests", BarColumn(), MofNCompleteColumn(), now, console=console, transient=True) as progress:
        task = progress.add_task("", total=REQUESTS, pages=0, rate=0.0)
        while server.finished < REQUESTS:
            server.iterate()
            rate = server.generated / (time.perf_counter() - start)
            progress.update(task, completed=server.finished, pages=server.cache.use().used, rate=rate)
    return time.perf_counter() - start


def shortfalls(model: Llama, request: Request) -> Tensor:
    """How far each generated token's logit is below the maximum, with dense attention on the whole sequence."""
    tokens = torch.tensor([request.tokens], device=DEVICE)
    hidden = model(tokens, torch.arange(tokens.shape[1], device=DEVICE).unsqueeze(0), dense_attention)
    logits = model.logits(hidden[0, request.prompt - 1 : -1])  # each position predicts the next
    return logits.amax(-1) - logits.gather(1, tokens[0, request.prompt :].unsqueeze(1)).squeeze(1)


def show(server: Server, seconds: float) -> None:
    builds = plan_cache.info().builds - server.builds
    table = Table(show_header=False)
    table.add_row("requests", str(server.finished))
    table.add_row("tokens generated", f"{server.generated} in {server.iterations} iterations")
    table.add_row("tokens/s", f"{server.generated / seconds:.0f}, in {seconds:.1f} s")
    table.add_row("plans built meanwhile", str(builds))
    table.add_row("most pages used", f"{server.most_pages} of {PAGES}")
    table.add_row("preemptions", str(server.preemptions))
    console.print(table)


@torch.inference_mode()
def main() -> int:
    """Serves all requests, prints statistics, and checks every token."""
    where = f"{torch.cuda.get_device_name()}, bfloat16" if ON_GPU else "the CPU, float32"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {LAYERS} layers, width {WIDTH}, ", end="")
    console.print(f"{HEADS_Q} query and {HEADS_KV} key heads, {PAGES} pages of {PAGE_SIZE} tokens")
    if not ON_GPU:
        torch.set_num_threads(1)  # with a model this small, threads would only wait for each other
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = Llama().to(DTYPE)
    requests = make_requests()
    server = Server(model, requests)
    if ON_GPU:
        warm_up(server.cache)
    show(server, serve(server))
    checked = track(requests, "checking", console=console, transient=True)
    below = torch.cat([shortfalls(model, request) for request in checked])
    agree = bool((below <= TOLERANCE).all())
    verdict = "every token agrees" if agree else "the tokens DISAGREE"
    exact, worst = (below == 0).double().mean().item(), below.max().item()
    console.print(f"{verdict} with dense attention: {exact:.2%} of {len(below)} are the argmax, ", end="")
    console.print(f"and no token's logit is more than {worst:.3f} below the largest (limit {TOLERANCE})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
