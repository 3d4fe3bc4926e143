"""A server with continuous batching: LLaMA's shape, random weights, and pages that run out.

    python samples/serve.py

Each step takes one token of every request that decodes, and fills the rest of its budget with chunks of prompts. In a
layer that is one call of `append_paged_kv` and one of `sdpa_paged_varlen`, whatever the mixture. Pages belong to this
server: a list of free ones is its allocator. When they run out, the youngest request gives its pages back, and is
prefilled again later, with the tokens that it has generated.

On an NVIDIA GPU it runs in bfloat16, and steps are CUDA graphs of a few sizes: a step is padded to the next one.
Without a GPU the same steps run eagerly in float32, smaller, on the CPU. At the end every generated token is compared
with `sdpa` on its sequence alone.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import cudnn_sdpa
from cudnn_sdpa import append_paged_kv, plan_cache, sdpa, sdpa_paged_varlen
from cudnn_sdpa.nn import RMSNorm, RotaryEmbedding, SwiGLU

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
if not ON_GPU:
    cudnn_sdpa.cpu_checks("h200,any-dtype")  # float32, to compare more closely
LAYERS, WIDTH, MLP_WIDTH, VOCABULARY = (8, 2048, 5632, 32000) if ON_GPU else (2, 128, 256, 512)
HEADS_Q, HEADS_KV, HEAD_DIM = (16, 4, 128) if ON_GPU else (4, 2, 32)

REQUESTS = 128 if ON_GPU else 24
#: Fewest and most tokens of a prompt, and of an answer.
PROMPT, ANSWER = ((64, 2048), (32, 256)) if ON_GPU else ((8, 160), (8, 48))
STEPS_BETWEEN = 2.0  #: arrivals, on average
MAX_RUNNING, BUDGET = (48, 512) if ON_GPU else (8, 64)  #: requests and tokens of a step
#: The sizes of steps: tokens, and the most of one request. Steps of decodes alone are small.
SIZES = ((MAX_RUNNING // 4, 1), (MAX_RUNNING, 1), (BUDGET, BUDGET))
#: The pages hold the longest request, but not MAX_RUNNING average ones.
PAGES, PAGE_SIZE = (384, 64) if ON_GPU else (44, 16)
COLUMNS = -(-(PROMPT[1] + ANSWER[1]) // PAGE_SIZE)  #: of the page table
SEED = 5
#: How far below the largest logit that of a generated token may be, where logits have a standard deviation of about 1.
#: In bfloat16 kernels round differently, and the first two of 32,000 are often closer than that.
TOLERANCE = 0.3 if ON_GPU else 0.0

#: Of a layer: its attention for q, k and v, (1, tokens, heads, HEAD_DIM), as a tensor like q.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Grouped-query attention and SwiGLU, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = RMSNorm(WIDTH), RMSNorm(WIDTH), SwiGLU(WIDTH, MLP_WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS_Q + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS_Q * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor], attend: Callable[..., Tensor]) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS_Q, HEADS_KV, HEADS_KV], dim=2)
        x = x + self.out(attend(rotate(q), rotate(k), v).flatten(2))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """The model. How it attends is an argument of each call, so that the check uses the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rope = nn.Embedding(VOCABULARY, WIDTH), RotaryEmbedding(HEAD_DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # With small scores attention is a mean of all values, and the check would hardly notice a wrong key.
                nn.init.normal_(weight, std=(1.5 if "qkv" in name else 1.0) * weight.shape[1] ** -0.5)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states (tokens, WIDTH) of tokens at positions; `head` makes logits of them."""
        rotate = partial(self.rope.rotate, rotations=self.rope(positions))
        x = self.tokens(tokens).unsqueeze(0)
        for number, layer in enumerate(self.layers):
            x = layer(x, rotate, partial(attend, number))
        return self.norm(x)[0]


@dataclass(eq=False)
class Request:
    """A prompt to continue."""

    arrival: int  #: in which step
    tokens: list[int]  #: the prompt and, after it, all that has been generated
    prompt: int  #: tokens of the prompt
    length: int  #: tokens when it is done
    cached: int = 0  #: tokens whose keys are in pages
    pages: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens that the next one needs in pages; a single one if the request decodes."""
        return len(self.tokens) - self.cached


def make_requests() -> list[Request]:
    """In order of arrival."""
    draw = random.Random(SEED)
    requests, arrival = [], 0.0
    for _ in range(REQUESTS):
        tokens = draw.choices(range(VOCABULARY), k=draw.randint(*PROMPT))
        requests.append(Request(int(arrival), tokens, len(tokens), len(tokens) + draw.randint(*ANSWER)))
        arrival += draw.expovariate(1 / STEPS_BETWEEN)
    return requests


def padded(numbers: Iterable[int], size: int, padding: int = 0) -> list[int]:
    known = list(numbers)
    return known + [padding] * (size - len(known))


class Step:
    """A step of up to `size` tokens: its inputs at fixed addresses and, on a GPU, the CUDA graph that reads them."""

    def __init__(self, model: Llama, cache: Tensor, size: int, longest: int) -> None:
        self.model, self.cache, self.size, self.longest = model, cache, size, longest
        parts = (size, size, size, MAX_RUNNING, MAX_RUNNING + 1, MAX_RUNNING, MAX_RUNNING * COLUMNS)
        self.inputs = torch.zeros(sum(parts), dtype=torch.int32, device=DEVICE)  # one buffer: one copy to the GPU
        self.tokens, self.positions, self.slots, self.lengths, self.ends, self.last, table = self.inputs.split(parts)
        self.table = table.view(MAX_RUNNING, COLUMNS)
        self.fill({})
        self.run = self.compute
        if ON_GPU:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.compute()  # builds the plans
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.next = self.compute()
            self.run = self.replay

    def fill(self, counts: dict[Request, int]) -> None:
        """Sets the inputs to the next `counts[request]` tokens of each request, and the rest to no token at all."""
        tokens, positions, slots, lengths, ends, table = [], [], [], [], [0], []
        for request, count in counts.items():
            new = range(request.cached, request.cached + count)
            tokens += request.tokens[new.start : new.stop]
            positions += new
            slots += [request.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in new]
            lengths.append(new.stop)
            ends.append(len(tokens))
            table += padded(request.pages, COLUMNS)
        numbers = padded(tokens, self.size) + padded(positions, self.size) + padded(slots, self.size, -1)
        numbers += padded(lengths, MAX_RUNNING) + padded(ends, MAX_RUNNING + 1, ends[-1])
        numbers += padded((end - 1 for end in ends[1:]), MAX_RUNNING) + padded(table, MAX_RUNNING * COLUMNS)
        host = torch.tensor(numbers, dtype=torch.int32)
        self.inputs.copy_(host.pin_memory() if ON_GPU else host, non_blocking=True)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes new keys and values into their slots, then attends to all keys of each request."""
        k_pages, v_pages = self.cache[layer]
        append_paged_kv(k[0], v[0], k_pages, v_pages, self.slots, page_layout="NHD")
        tables = self.table, self.lengths, self.ends, self.longest
        return sdpa_paged_varlen(q[0], k_pages, v_pages, *tables, page_layout="NHD").unsqueeze(0)

    def compute(self) -> Tensor:
        """The next token of each request, (MAX_RUNNING,)."""
        hidden = self.model(self.tokens, self.positions, self.attend)
        return self.model.head(hidden.index_select(0, self.last)).argmax(-1)

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.next


class Server:
    """Selects the tokens of each step. Waiting requests are always younger than running ones."""

    def __init__(self, model: Llama, requests: list[Request]) -> None:
        # All layers share the page ids. Keys and values of a page: (PAGE_SIZE, HEADS_KV, HEAD_DIM), "NHD".
        shape = (LAYERS, 2, PAGES, PAGE_SIZE, HEADS_KV, HEAD_DIM)
        cache = torch.zeros(shape, dtype=DTYPE, device=DEVICE)
        self.steps = [Step(model, cache, *size) for size in SIZES]
        self.free = list(range(PAGES))
        self.coming, self.waiting = deque(requests), deque[Request]()
        self.running: list[Request] = []  # the oldest first
        self.count = self.finished = self.generated = self.preemptions = self.most_pages = 0

    def step(self) -> None:
        """Admits requests if there is room, and runs a step of those that are running."""
        while self.coming and self.coming[0].arrival <= self.count:
            self.waiting.append(self.coming.popleft())
        while self.waiting and len(self.running) < MAX_RUNNING and self.has_pages(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        counts = self.schedule()
        self.count += 1
        if not counts:
            return
        tokens, longest = sum(counts.values()), max(counts.values())
        step = next(step for step in self.steps if tokens <= step.size and longest <= step.longest)
        step.fill(counts)
        for (request, count), token in zip(counts.items(), step.run().tolist(), strict=False):
            request.cached += count
            if not request.missing:
                self.add_token(request, token)

    def schedule(self) -> dict[Request, int]:
        """The number of tokens of each request: one of each that decodes, then prompts, as far as the budget goes."""
        for request in list(self.running):
            while request in self.running and not self.has_pages(request):
                self.preempt(self.running.pop())  # the youngest
        counts, left = {}, BUDGET
        for request in sorted(self.running, key=lambda request: request.missing > 1):
            if count := min(request.missing, left):
                counts[request] = count
                left -= count
        return counts

    def has_pages(self, request: Request) -> bool:
        """Takes the pages that a request's tokens need; False if there are too few."""
        needed = -(-len(request.tokens) // PAGE_SIZE) - len(request.pages)
        if needed > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(needed)]
        self.most_pages = max(self.most_pages, PAGES - len(self.free))
        return True

    def release(self, request: Request) -> None:
        self.free += request.pages
        request.pages, request.cached = [], 0

    def preempt(self, request: Request) -> None:
        self.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def add_token(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        self.generated += 1
        if len(request.tokens) == request.length:
            self.release(request)
            self.running.remove(request)
            self.finished += 1


def dense(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a sequence alone."""
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)


def shortfalls(model: Llama, request: Request) -> Tensor:
    """How far each generated token's logit is below the largest one, with dense attention on the whole sequence."""
    tokens = torch.tensor(request.tokens, device=DEVICE)
    whole = torch.tensor(padded(request.tokens, -(-len(request.tokens) // 256) * 256), device=DEVICE)  # of few shapes
    hidden = model(whole, torch.arange(len(whole), device=DEVICE), dense)
    logits = model.head(hidden[request.prompt - 1 : len(tokens) - 1]).float()  # each position predicts the next
    return logits.amax(-1) - logits.gather(1, tokens[request.prompt :].unsqueeze(1)).squeeze(1)


@torch.inference_mode()
def main() -> int:
    """Serves all requests, prints statistics, and checks every token."""
    console, where = Console(), f"{torch.cuda.get_device_name()}, bfloat16" if ON_GPU else "the CPU, float32"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {LAYERS} layers, width {WIDTH}, ", end="")
    console.print(f"{HEADS_Q} query and {HEADS_KV} key heads, {PAGES} pages of {PAGE_SIZE} tokens")
    if not ON_GPU:
        torch.set_num_threads(1)  # with a model this small, threads would only wait for each other
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = Llama().to(DTYPE)
    requests = make_requests()
    server = Server(model, requests)
    start, builds = time.perf_counter(), plan_cache.info().builds
    while server.finished < REQUESTS:
        server.step()
    seconds = time.perf_counter() - start

    table = Table(show_header=False)
    table.add_row("requests", str(server.finished))
    table.add_row("tokens generated", f"{server.generated} in {server.count} steps")
    table.add_row("tokens/s", f"{server.generated / seconds:.0f}, in {seconds:.1f} s")
    table.add_row("plans built", f"{builds} before the first step, {plan_cache.info().builds - builds} later")
    table.add_row("most pages used", f"{server.most_pages} of {PAGES}")
    table.add_row("preemptions", str(server.preemptions))
    console.print(table)

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
