"""Random valid calls of every operation on CPU tensors, against float64: the same calls in every run.

A failure prints the command that repeats it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import generators
import pytest
import torch
from float64_reference import Precision, attention, attention_bounds, seen_keys, sees

import cudnn_sdpa
from cudnn_sdpa import GraphFunction
from cudnn_sdpa.attention.fp8 import arguments as fp8_arguments
from cudnn_sdpa.attention.fp8 import scaling
from cudnn_sdpa.attention.mask import ALIGNMENTS
from cudnn_sdpa.attention.paged import arguments as paged_arguments
from cudnn_sdpa.attention.paged import kv_cache_checks
from cudnn_sdpa.fused import conv_graphs, norm_graphs
from cudnn_sdpa.kernels import arguments as kernel_arguments
from cudnn_sdpa.nn import feed_forward, norms
from cudnn_sdpa.plans.shape_policy import POLICIES

#: Number of calls of each operation, in CI and in longer runs.
COUNTS = {
    "sdpa": 24,
    "scaled_dot_product_attention": 24,
    "sdpa_fp8": 10,
    "sdpa_varlen": 10,
    "nn.VisionEncoder": 3,
    "nn.Attention": 24,
}
USUAL = 8


def faults(name: str, seeds: range) -> list[str]:
    """Errors of calls, each with the command that repeats it."""
    found = []
    for seed in seeds:
        outcome = generators.attempt(name, seed)
        if outcome.kind in ("wrong", "crashed"):
            found.append("\n    ".join([f"{generators.line(name, seed, 'cpu')}  # {outcome.kind}", *outcome.problems]))
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_calls_are_right_or_declined(name):
    found = faults(name, range(COUNTS.get(name, USUAL)))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 500, 50))
@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_many_calls_are_right_or_declined(name, first):
    found = faults(name, range(first, first + 50))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", generators.OPERATIONS)
def test_a_call_is_a_function_of_its_seed(name):
    if generators.OPERATIONS[name].session.__func__ is not generators.Operation.session:
        pytest.skip("it is no single call")
    for seed in range(12):
        assert generators.draw(name, seed) == generators.draw(name, seed)
    assert len({str(generators.draw(name, seed)) for seed in range(12)}) > 8


def test_generated_calls_cover_every_corner_case():
    cases = [generators.draw("sdpa", seed, "cuda") for seed in range(800)]
    masks = [case.tensors["attn_mask"] for case in cases if "attn_mask" in case.tensors]
    assert {len(mask.shape) for mask in masks} == {0, 1, 2, 3, 4}
    for position, name in ((2, "q"), (2, "k"), (1, "k"), (0, "q")):
        assert any(case.tensors[name].shape[position] == 1 for case in cases)
    assert any(mask.shape and mask.shape[-1] == 1 for mask in masks)
    assert any(len(mask.shape) > 1 and mask.layout.order[-1] != len(mask.shape) - 1 for mask in masks)
    assert {case.mode for case in cases} >= {
        "eager",
        "aot_eager",
        "inductor",
        "autocast",
        "checkpoint",
    }
    assert {case.grad for case in cases} == set(generators.GRADIENTS)
    assert {case.third for case in cases} == set(generators.THIRD)
    assert any(mask.values.filler == -1e9 and mask.values.row for mask in masks)
    kernels = [generators.draw("conv2d", seed, "cuda").tensors["weight"].shape[2:] for seed in range(200)]
    assert {(1, 3), (3, 1), (1, 1), (5, 1)} <= set(kernels)


def test_bounds_detect_small_errors():
    """A factor of 1.05 on the weights of one row exceeds the bound of bfloat16 rounding."""
    q, k, v = (torch.randn(1, 2, 9, 16, dtype=torch.float64) for _ in range(3))
    made = attention(q, k, v)
    bound = attention_bounds(made, q, k, v, torch.randn_like(v), Precision.of(torch.bfloat16))["out"]
    assert generators.compared("out", made.out * 1.001, made.out, bound) == []
    off = made.out.clone()
    off[0, 1, 3] *= 1.2
    assert len(generators.compared("out", off, made.out, bound)) == 1
    off[0, 1, 3] = torch.nan
    assert len(generators.compared("out", off, made.out, bound)) == 1


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window_size", [None, (0, -1), (2, 1), (-1, 0)])
def test_vectorized_visibility_matches_single_positions(alignment, window_size):
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "causal_alignment": alignment, "window_size": window_size}
        options |= {"seq_lens_q": torch.tensor([3, 5, 0]), "seq_lens_kv": torch.tensor([7, 2, 4])}
        found = seen_keys(3, 5, 7, options)
        for b, (nq, nk) in enumerate(((3, 7), (5, 2), (0, 4))):
            assert found[b, 0].tolist() == [[sees(i, j, nq, nk, options) for j in range(7)] for i in range(5)]


# Coverage of the public options

#: Public names that compute nothing from a caller's tensors.
NO_OPERATIONS = {
    "NormInFp8",
    "RopeInFp8",
    *("AutotuneCandidate", "AutotuneEntry", "AutotuneReport", "CacheUse", "Explanation", "PagedStep"),
    *(
        "Fp8BackwardScales",
        "Fp8Gradients",
        "Fp8Output",
        "Fp8Scales",
        "SdpaGradients",
        "GraphFunction",
        "PlanCache",
        "PlanCacheInfo",
    ),
    *("PlanManifest", "PlanStore", "PlanStoreInfo", "Support", "WarmupReport", "__version__"),
    *("autotune", "compile_plans", "explain", "no_plan_builds", "plan_cache", "record_plans", "support"),
    *("use_plan_store", "warmup", "nn.KVStep", "nn.parallel_plan"),
}
#: Settings that hold while calls run.
SETTINGS = {"cpu_checks", "fallback", "providers", "shape_policy"}
#: Methods that are not calls.
NO_CALLS = {"reset_parameters", "from_torch", "extra_repr", "update_all", "begin", "would_update", "scales", "recorder"}
#: The operations that draw classes without their own operation.
ELSEWHERE = {
    "fp8_attention": ["Fp8Scaling"],
    "sdpa_paged": ["trusted_pages"],
    "kernels.attention": ["kernels.CUDAAttention", "kernels.reference_attention"],
}
#: Options that are not drawn, and where they are tested.
TESTED_ELSEWHERE = {
    "Fp8Scaling.process_group": "tests/unit/attention/fp8/test_fp8_ranks.py",
    "nn.Attention.cp_group": "tests/unit/distributed/test_context_parallel.py",
    "nn.Attention.cp_method": "tests/unit/distributed/test_context_parallel.py",
}
#: Options whose default is refused, by an error that says more than Python's.
REQUIRED = {"sdpa_paged.page_layout", "sdpa_paged_varlen.page_layout"}
#: Required arguments.
ALWAYS_GIVEN = {"device", "dtype"}
OF_LAYERS = {"num_kv_heads", "head_dim", "qkv_bias", "is_causal", "window_size", "scale", "softcap", "sinks", "rope"}
#: Names behind ``**``.
OPEN = {
    "PagedKVCache.attend": kv_cache_checks.OPTIONS,
    "nn.KVCache.attend": {"window_size", "scale", "softcap", "sinks", "attn_mask", "is_causal"},
    "nn.TransformerLayer": OF_LAYERS,
    "nn.VisionEncoder": OF_LAYERS - {"head_dim", "is_causal", "window_size", "rope"},
    "nn.TransformerLayer.forward": {"attn_mask", "seq_lens", "position_ids", "rotations", "step", "layer"},
    "PagedKVCache.plans": {"scale"},
}
FEED_FORWARD = set(feed_forward.ACTIVATIONS)
#: All values of options with only a few, by option name or with the function's name.
CHOICES: dict[str, set[Any]] = {
    "causal_alignment": set(ALIGNMENTS),
    "page_layout": set(paged_arguments.LAYOUTS),
    "activation": set(conv_graphs.ACTIVATIONS),
    "rms_norm.activation": set(norm_graphs.ACTIVATIONS),
    "layer_norm.activation": set(norm_graphs.ACTIVATIONS),
    "nn.FeedForward.activation": FEED_FORWARD,
    "nn.TransformerLayer.activation": FEED_FORWARD | {"swiglu"},
    "nn.VisionEncoder.activation": FEED_FORWARD | {"swiglu"},
    "norm": set(norms.NORMS),
    "inputs": set(scaling.INPUTS),
    "algorithm": set(scaling.ALGORITHMS),
    "out_dtype": {None, *fp8_arguments.OUT_DTYPES},
    "fp8_attention.grad_dtype": {None, *fp8_arguments.FP8_DTYPES},
    "Fp8Scaling.grad_dtype": set(fp8_arguments.FP8_DTYPES),
    "kernels.attention.mode": set(kernel_arguments.MODES),
    "kernels.CUDAAttention.mode": set(kernel_arguments.MODES),
}
PLAIN = (type(None), bool, int, float, str, tuple, torch.dtype)


class Reached(Exception):  # noqa: N818 - not an error
    """Raised when the watched call is reached."""


class Recorder:
    """Records the values of public functions' parameters; calls that add nothing new need not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch
        self.values: dict[str, set[str]] = defaultdict(set)
        self.signatures: dict[str, inspect.Signature] = {}

    def watch(self, owner: Any, attribute: str, name: str, *, ends: bool = False) -> None:
        function = inspect.getattr_static(owner, attribute)
        signature = self.signatures[name] = inspect.signature(function)

        @functools.wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for parameter, value in bound.arguments.items():
                if signature.parameters[parameter].kind is inspect.Parameter.VAR_KEYWORD:
                    self.values[name] |= set(value)
                else:
                    self.values[f"{name}.{parameter}"].add(repr(value) if isinstance(value, PLAIN) else "an object")
            if ends:
                raise Reached
            return function(*args, **kwargs)

        self.patch.setattr(owner, attribute, seen)

    def missing(self) -> Iterator[str]:
        """Parameters and values of the watched functions that were not drawn."""
        for name, signature in self.signatures.items():
            for parameter in signature.parameters.values():
                at = f"{name}.{parameter.name}"
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    yield from (f"{name}(**{option})" for option in OPEN[name] - self.values[name])
                elif parameter.name not in ALWAYS_GIVEN | {"self"} and at not in TESTED_ELSEWHERE:
                    yield from (f"{at}: {value}" for value in self.unseen(at, parameter))

    def unseen(self, at: str, parameter: inspect.Parameter) -> set[str]:
        """Missing values of a parameter: flags must be on and off, others given and omitted."""
        seen, annotation = self.values[at], str(parameter.annotation)
        if parameter.default is parameter.empty:
            return set() if seen else {"any value"}
        wanted = {repr(value) for value in CHOICES.get(at, CHOICES.get(parameter.name, ()))}
        wanted |= set() if at in REQUIRED else {repr(parameter.default)}
        wanted |= {"True", "False"} if "bool" in annotation else set()
        others = set() if seen - {repr(parameter.default)} else {f"anything but {parameter.default!r}"}
        return wanted - seen | others


def public(name: str) -> Any:
    owner, short = home(name)
    return getattr(owner, short)


def home(name: str) -> tuple[Any, str]:
    """The module with a public name, and its name there."""
    module, _, short = name.rpartition(".")
    return getattr(cudnn_sdpa, module) if module else cudnn_sdpa, short


def watched(name: str, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(monkeypatch)
    for each in [name, *ELSEWHERE.get(name, [])]:
        found = public(each)
        if not isinstance(found, type):
            recorder.watch(*home(each), each, ends=each == name)
            continue
        recorder.watch(found, "__init__", each)
        methods = [n for n, x in vars(found).items() if inspect.isfunction(x) and not n.startswith("_")]
        for method in set(methods) - NO_CALLS:
            ends = method == "forward" and name != "nn.RotaryEmbedding"
            recorder.watch(found, method, f"{each}.{method}", ends=ends)
    return recorder


def drawn(name: str, seed: int) -> None:
    """Draws a call, and runs it as far as needed."""
    op = generators.OPERATIONS[name]
    if is_session(name):
        generators.attempt(name, seed)
        return
    case = generators.draw(name, seed)
    is_backward = isinstance(op, generators.Backward)
    tensors = generators.Run(case, "cpu").tensors(case.wanted if is_backward else ())
    with torch.set_grad_enabled(seed % 4 < 2), generators.in_force(case.settings):
        op.before(case, tensors, case.options)
        refusal = cudnn_sdpa.ArgumentError if case.refusable else Reached
        with contextlib.suppress(Reached, cudnn_sdpa.UnsupportedError, refusal):
            found = op.call(tensors, case.options, case.facts)
            if is_backward and found["out"].requires_grad:
                found["out"].sum().backward()


def is_session(name: str) -> bool:
    return generators.OPERATIONS[name].session.__func__ is not generators.Operation.session


@pytest.mark.parametrize("name", [name for name in generators.OPERATIONS if name != "graph_op"])
def test_every_option_is_drawn(name, monkeypatch):
    monkeypatch.setattr(generators, "kept", lambda *_: None)
    recorder = watched(name, monkeypatch)
    for seed in range(1000):
        drawn(name, seed)
        if not (missing := sorted(recorder.missing())):
            break
    assert not missing


def test_every_option_of_user_graphs_is_drawn():
    graphs = [x for x in vars(generators).values() if isinstance(x, GraphFunction)]
    drawn = {*("builder", "reference", "outputs", "backward", "keeps_results")}
    drawn_with_the_fused_operations = {
        *("auxiliary", "check", "readable", "views", "reads", "autocast", "materialize_grads"),
        *("flops", "shard"),
    }
    assert set(inspect.signature(cudnn_sdpa.graph_op).parameters) == drawn | drawn_with_the_fused_operations
    assert {str(graph.kept) for graph in graphs} == {str(slice(None)), str(slice(0))}
    assert {graph.backward is None for graph in graphs} == {True, False}
    assert {graph._outputs is graph.reference for graph in graphs} == {True, False}
    assert {generators.draw("graph_op", seed).facts["graph"] for seed in range(60)} == {x.__name__ for x in graphs}


def test_every_public_function_is_drawn():
    names = {*cudnn_sdpa.__all__, *(f"nn.{name}" for name in cudnn_sdpa.nn.__all__)}
    names |= {f"kernels.{name}" for name in cudnn_sdpa.kernels.__all__}
    names -= {n for n in names if isinstance(public(n), type) and issubclass(public(n), Exception)}
    names -= {n for n in names if f"nn.{n}" in names}  # modules of both
    elsewhere = {name for found in ELSEWHERE.values() for name in found}
    assert names >= NO_OPERATIONS | SETTINGS | elsewhere
    assert names - NO_OPERATIONS - SETTINGS - elsewhere == set(generators.OPERATIONS)


def test_every_setting_is_drawn():
    cases = [generators.draw(name, seed) for name in ("sdpa", "rms_norm") for seed in range(400)]
    assert {case.policy for case in cases} == set(POLICIES)
    assert {case.settings.get("fallback") for case in cases} == {None, "torch"}
    first = {(case.settings.get("providers") or ["default"])[0] for case in cases}
    assert first == {"default", "fastest", "cudnn", "own", "fa4"}
    assert {str(case.settings.get("cpu_checks", "h200")).partition(",")[0] for case in cases} >= {
        "None",
        "h200",
        "a100",
        "b200",
    }
    assert any(case.settings.get("deterministic") for case in cases)
