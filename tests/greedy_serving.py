"""A small Llama of Transformers, served greedily by an engine's backend, and by Transformers alone.

Requests come as a serving engine's scheduler batches them: with prompts in chunks beside decodes, in a few rows that
those who wait take over from those who end.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import sglang_steps
import torch
import vllm_steps
from hf_models import DECODERS, SMALL, tiny
from torch import Tensor
from transformers import AttentionInterface

#: Of each request the lengths of its prompt and of its answer; so many run at once, with so many tokens in a step.
REQUESTS = ((5, 12), (17, 4), (30, 5), (1, 9), (40, 9), (8, 12), (33, 3), (16, 6))
ROWS, BUDGET = 4, 24

#: What both engines are told of the model.
HEADS, HEADS_KV, DIM = (SMALL[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
PAGES: dict[str, Any] = {"page": 16, "dims": (DIM, DIM)}

#: By how much the logit of each chosen token is above all others, at least. Attention in float16 changes logits of
#: this model by less than 0.002.
MARGIN = 0.02


class Layers(Protocol):
    """Attention layers on an engine's caches and batches; requests are numbered by the rows that they hold."""

    dtype: torch.dtype

    def prepare(self, new: Mapping[int, int]) -> int:
        """Makes the batch of a step from numbers of new tokens; returns how many tokens it has with padding."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention (T, Hq, D) of new tokens, whose keys and values (T, Hkv, D) are cached."""

    def end(self, request: int) -> None:
        """Frees the pages of a request."""


class Request(NamedTuple):
    """A prompt, and the tokens that Transformers generates."""

    prompt: list[int]
    answer: list[int]


def model_of(implementation: str, device: str) -> Any:
    return tiny(DECODERS["llama"], implementation).to(device)


def of_engine(
    module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: None, *, engine: Layers, **_: object
) -> tuple[Tensor, None]:
    """Transformers' attention function, of tokens of all requests (1, H, T, D)."""
    tokens = (x[0].transpose(0, 1).to(engine.dtype).contiguous() for x in (q, k, v))
    return engine.attend(module.layer_idx, *tokens).unsqueeze(0).to(q.dtype), None


AttentionInterface.register("of_engine", of_engine)


def on_vllm(**options: Any) -> Layers:
    return vllm_steps.ServedLayers(ROWS, BUDGET, heads=HEADS, heads_kv=HEADS_KV, **PAGES, **options)


def on_sglang(**options: Any) -> Layers:
    layers = SMALL["num_hidden_layers"]
    return sglang_steps.ServedLayers(ROWS, layers, heads=(HEADS, HEADS_KV), scale=DIM**-0.5, **PAGES, **options)


@functools.cache
@torch.no_grad()
def drawn(device: str) -> list[Request]:
    """Requests with answers by Transformers' `generate` in float32, clear by `MARGIN` and without many repetitions."""
    model, generator = model_of("eager", device), torch.Generator().manual_seed(1)

    def answered(length: int, count: int) -> tuple[Request, bool]:
        ids = torch.randint(3, SMALL["vocab_size"], (1, length), generator=generator)
        found = model.generate(
            ids.to(device),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=1000,  # no model has this token, so that all generate as many
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(found.logits).topk(2).values
        answer = found.sequences[0, length:].tolist()
        is_fit = bool((best[:, 0] - best[:, 1]).min() > MARGIN) and 2 * len(set(answer)) > count
        return Request(ids[0].tolist(), answer), is_fit

    return [next(x for x, is_fit in (answered(*of) for _ in range(100)) if is_fit) for of in REQUESTS]


@torch.no_grad()
def assert_tokens_are_those_of_transformers(engine: Layers, device: str = "cpu") -> None:
    """Serves all requests; each kind of step has to come up."""
    requests, model = drawn(device), model_of("of_engine", device)
    known, done = [[*x.prompt] for x in requests], [0] * len(requests)
    waiting, running, free, kinds = deque(range(len(requests))), {}, [*range(ROWS)], Counter[str]()
    while waiting or running:
        while waiting and free:
            running[free.pop()] = waiting.popleft()
        ids = batch_of({row: known[x][done[x] :] for row, x in running.items()})
        begins = {row: done[running[row]] for row in ids}
        logits = last_logits(model, engine, ids, begins)
        kinds.update(kinds_of(ids, begins))
        for row, best in zip(ids, logits.argmax(dim=1).tolist(), strict=True):
            request = running[row]
            done[request] += len(ids[row])
            if done[request] == len(known[request]):  # not before the last chunk of a prompt
                known[request].append(best)
            if len(known[request]) == len(requests[request].prompt) + len(requests[request].answer):
                engine.end(row)
                free.append(row)
                del running[row]
    assert kinds.keys() == {"prompts", "later chunks", "mixed", "decodes", "padded decodes"}, kinds
    assert [tokens[len(x.prompt) :] for tokens, x in zip(known, requests, strict=True)] == [x.answer for x in requests]


def batch_of(pending: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """What of each request's tokens fits into a step, those with the fewest first, which are decodes."""
    found, left = {}, BUDGET
    for row, tokens in sorted(pending.items(), key=lambda item: len(item[1])):
        if taken := [*tokens[:left]]:
            found[row] = taken
            left -= len(taken)
    return found


def kinds_of(ids: Mapping[int, Sequence[int]], begins: Mapping[int, int]) -> set[str]:
    decodes = sum(len(x) == 1 for x in ids.values())
    long = len(ids) - decodes
    facts = {
        "prompts": long > 1,
        "later chunks": any(len(x) > 1 and begins[row] for row, x in ids.items()),
        "mixed": decodes > 0 and long > 0,
        "decodes": decodes == ROWS,
        "padded decodes": not long and decodes < ROWS,
    }
    return {name for name, holds in facts.items() if holds}


def last_logits(model: Any, engine: Layers, ids: Mapping[int, Sequence[int]], begins: Mapping[int, int]) -> Tensor:
    """Those of the last token of each request, (requests, vocabulary), from one pass over the tokens of all."""
    lengths = {row: len(tokens) for row, tokens in ids.items()}
    padding = [0] * (engine.prepare(lengths) - sum(lengths.values()))
    positions = [begins[row] + j for row, count in lengths.items() for j in range(count)]
    given = [[token for tokens in ids.values() for token in tokens], positions]
    tokens, at = (torch.tensor([x + padding], device=model.device) for x in given)
    out = model(tokens, position_ids=at, use_cache=False, engine=engine)
    return out.logits[0, torch.tensor([*lengths.values()]).cumsum(0) - 1]
