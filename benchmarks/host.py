"""`benchmarks host`: the CPU overhead of a warm call and its parts, kernel times, and memory."""

from __future__ import annotations

import gc
import resource
from array import array

import torch
from rich.progress import track
from torch import Tensor

from benchmarks import fused
from benchmarks.convolutions import Case
from benchmarks.tools import cases, hand_graphs, peers
from benchmarks.tools.launches import launches_of
from benchmarks.tools.output import Row
from benchmarks.tools.timing import Call, device_times, host_times
from benchmarks.tools.training import both_passes
from benchmarks.tools.ways import by_provider, in_python, recording, until_recorded, wait_for_native_calls
from cudnn_sdpa.attention.dense.call import SdpaCall
from cudnn_sdpa.attention.dense.drop_in import scaled_dot_product_attention
from cudnn_sdpa.attention.dense.sdpa import SDPA, sdpa
from cudnn_sdpa.attention.paged.kv_cache import PagedKVCache
from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.engine.dispatch_state import can_bypass_dispatcher
from cudnn_sdpa.fused.activation import silu_mul
from cudnn_sdpa.fused.conv import conv2d
from cudnn_sdpa.fused.graph_op import graph_op
from cudnn_sdpa.fused.norm import rms_norm
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.plans import plan as plans
from cudnn_sdpa.plans.cache import plan_cache
from cudnn_sdpa.plans.shape_policy import EXACT, shape_policy


def host() -> list[Row]:
    """CPU time of one warm inference call, B=1, H=8, S=128, D=64, bfloat16, and of PyTorch and cuDNN's frontend.

    Our own functions are called both ways: natively, and in Python.
    """
    wait_for_native_calls()
    q, k, v = (cases.normal(1, 8, 128, 64) for _ in range(3))
    operands = SDPA.inputs_of(SdpaCall(q, k, v))  # all that operators take
    frontend = hand_graphs.FrontendGraph(q, k, v, is_causal=False)
    pytorch = peers.pytorch(q, k, v, is_causal=False)
    ours = _calls(q, k, v)
    others: dict[str, Call] = {
        "sdpa through the dispatcher": lambda: torch.ops.cudnn_sdpa.sdpa_forward(*operands),
        "raw launch (nothing allocated)": frontend.launch,
        "frontend execute (nothing allocated)": frontend.execute,
        "cudnn.Graph": hand_graphs.wrapper_graph(q, k, v, is_causal=False),
    }
    packed = _packed_calls(*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)))
    ours["sdpa_varlen"] = packed.pop("sdpa_varlen")
    others |= packed | _eager_calls()
    with torch.inference_mode():
        q_i, k_i, v_i = q.clone(), k.clone(), v.clone()
    pytorch_i = peers.pytorch(q_i, k_i, v_i, is_causal=False)
    rounds = []
    for _ in range(5):  # PyTorch's backends have rounds of their own, because sdpa_kernel() is not part of a call
        times = host_times({**ours, **others}, rounds=15)
        with in_python():
            times |= {f"{name}, Python": time for name, time in host_times(ours, rounds=6).items()}
        for name in peers.PYTORCH_BACKENDS:
            with peers.only(name):
                times |= host_times({name: pytorch}, rounds=15)
        with torch.inference_mode(), peers.only("pytorch flash"):
            inference: dict[str, Call] = {"sdpa": lambda: sdpa(q_i, k_i, v_i), "pytorch flash": pytorch_i}
            times |= {f"{name}, inference mode": time for name, time in host_times(inference, rounds=15).items()}
        rounds.append(times)
    best = {name: min(times[name] for times in rounds) for name in rounds[0]}
    for name in ("two shapes in turn, mean of a call", "two shapes in turn, mean of a call, Python"):
        best[name] /= 2
    flash = best["pytorch flash"]
    return [
        {"call": name, "µs": time, "× flash": time / flash, "in Python µs": best.get(f"{name}, Python")}
        for name, time in best.items()
        if not name.endswith(", Python")
    ]


def _calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Calls of this library, but of packed sequences."""
    lengths = torch.full((1,), 100, dtype=torch.int32, device="cuda")
    sinks = cases.normal(8, dtype=torch.float32)
    step = cases.normal(1, 8, 1, 64)
    additive, boolean = cases.normal(1, 1, 128, 128), cases.normal(1, 1, 128, 128) > -0.5
    return {
        "sdpa": lambda: sdpa(q, k, v),
        "sdpa, causal, scale given": lambda: sdpa(q, k, v, is_causal=True, scale=0.2),
        "two shapes in turn, mean of a call": lambda: (sdpa(q, k, v), sdpa(step, k, v)),
        "drop-in": lambda: scaled_dot_product_attention(q, k, v),
        "sdpa, decode with seq_lens_kv": lambda: sdpa(step, k, v, seq_lens_kv=lengths),
        "sdpa, return_lse": lambda: sdpa(q, k, v, return_lse=True),
        "sdpa, window": lambda: sdpa(q, k, v, window_size=(31, 0)),
        "sdpa, sinks": lambda: sdpa(q, k, v, sinks=sinks),
        "sdpa, softcap": lambda: sdpa(q, k, v, softcap=30.0),
        "sdpa, attn_mask": lambda: sdpa(q, k, v, attn_mask=additive),
        "sdpa, boolean attn_mask": lambda: sdpa(q, k, v, attn_mask=boolean),
        "sdpa, prefill with seq_lens_kv": lambda: sdpa(q, k, v, seq_lens_kv=lengths),
        **_paged_calls(step),
        **_fused_calls(),
    }


def _single_calls() -> dict[str, Call]:
    """Calls of each operation, one at a time."""
    q, k, v = (cases.normal(1, 8, 128, 64) for _ in range(3))
    packed = _packed_calls(*(x[0].transpose(0, 1).contiguous() for x in (q, k, v)))
    calls = {**_calls(q, k, v), "sdpa_varlen": packed["sdpa_varlen"], **both_passes()}
    del calls["two shapes in turn, mean of a call"]
    return calls


def launches() -> list[Row]:
    """What a call cannot do without: the launches of its plans, and of this library's own kernels, alone.

    The launches are those of one call, repeated on its addresses; nothing is allocated. Recorded launches are called
    from Python; the time of as many calls without a launch is subtracted. Own kernels are launched by ctypes.
    """
    wait_for_native_calls()
    calls, rows = _single_calls(), list[Row]()
    for name, call in track(calls.items(), "launches", transient=True):
        until_recorded(call)
        alone = launches_of(call)
        timed = {"call": call, "plans": alone.plans, "without": alone.not_launched, "kernels": alone.own_kernels}
        times = host_times({part: run for part, run in timed.items() if run is not None}, per_round=200, rounds=15)
        plans = times["plans"] - times.get("without", 0.0) if "plans" in times else None
        rows.append(
            {
                "call": name,
                "µs": times["call"],
                "its plans alone": plans,
                "its own kernels alone": times.get("kernels"),
                "the rest": times["call"] - (plans or 0.0) - times.get("kernels", 0.0),
            }
        )
    return rows


def recorded() -> list[Row]:
    """CPU and device time of calls whose plans are launched as recorded, and by cuDNN; rounds alternate."""
    wait_for_native_calls()
    calls, rows = _single_calls(), list[Row]()
    with recording():
        for name, call in track(calls.items(), "recorded launches", transient=True):
            until_recorded(call)
            with plan_cache.watch_uses() as used:
                call()
            recorders = (getattr(plan_cache.peek(key), "recorder", None) for key in used)

            def of_cudnn(call: Call = call) -> None:
                with by_provider():
                    call()

            as_recorded, as_before = [], []
            for _ in range(12):
                as_recorded.append(host_times({name: call}, per_round=100, rounds=3)[name])
                with by_provider():
                    as_before.append(host_times({name: call}, per_round=100, rounds=3)[name])
            on_gpu = device_times({"recorded": call, "cuDNN": of_cudnn})
            rows.append(
                {
                    "call": name,
                    "µs": min(as_recorded),
                    "by cuDNN": min(as_before),
                    "GPU µs": on_gpu["recorded"],
                    "GPU µs, by cuDNN": on_gpu["cuDNN"],
                    "launched": "; ".join(str(each) for each in recorders if each is not None) or "no plan of cuDNN's",
                }
            )
    return rows


def _paged_calls(q: Tensor) -> dict[str, Call]:
    """A decode step on the tables of a cache, and on copies of them, which it does not know."""
    cache = PagedKVCache(pages=64, page_size=64, heads=8, head_dim=64, device=cases.DEVICE)
    sequence, step = cache.add(), cache.new_step(1)
    cache.reserve([sequence], 128)
    cache.reserve([sequence], into=step)
    pages = cache.k_pages().normal_(), cache.v_pages().normal_()  # a launch is proved by its results, if they tell
    tables, copies = (step.page_table, step.seq_lens_kv), (step.page_table.clone(), step.seq_lens_kv.clone())
    return {
        "sdpa_paged": lambda: sdpa_paged(q, *pages, *tables, page_layout=cache.page_layout),
        "sdpa_paged, other tables": lambda: sdpa_paged(q, *pages, *copies, page_layout=cache.page_layout),
    }


def _own_silu_mul_reference(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@graph_op(reference=_own_silu_mul_reference)
def own_silu_mul(g: GraphBuilder, gate: Symbol, up: Symbol) -> Symbol:
    """SiLU(gate) · up, as a user writes it."""
    return g.mul(a=g.swish(input=gate), b=up)


#: A convolution that takes the GPU a few microseconds.
SMALL = Case(batch=1, channels=64, size=32, filters=64, extent=3, padding=1)


def _fused_calls() -> dict[str, Call]:
    (x, weight), (gate, up) = fused.norm_inputs(512, 1024), fused.gate_inputs(512, 1024)
    rows = gate.unsqueeze(0), up.unsqueeze(0)
    image = SMALL.inputs()
    return {
        "rms_norm": lambda: rms_norm(x, weight),
        "silu_mul": lambda: silu_mul(gate, up),
        "conv2d": lambda: conv2d(*image, padding=SMALL.padding),
        "graph_op of one's own, SiLU(gate) · up": lambda: own_silu_mul(*rows),
    }


def _eager_calls() -> dict[str, Call]:
    (x, weight), (gate, up) = fused.norm_inputs(512, 1024), fused.gate_inputs(512, 1024)
    image = SMALL.inputs()
    return {
        "pytorch rms_norm": lambda: torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6),
        "pytorch silu, mul": lambda: torch.nn.functional.silu(gate) * up,
        "pytorch conv2d": lambda: torch.nn.functional.conv2d(*image, padding=SMALL.padding),
    }


def _packed_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Calls on the same tokens as one packed sequence."""
    length = q.shape[0]
    cu_seqlens = torch.tensor((0, length), dtype=torch.int32, device="cuda")
    # Both functions take these arguments in the same order; by position, as in existing code of either.
    arguments = (q, k, v, cu_seqlens, cu_seqlens, length, length)
    calls: dict[str, Call] = {"sdpa_varlen": lambda: sdpa_varlen(*arguments)}
    theirs = peers.pytorch_varlen()
    if theirs is not None:
        calls["pytorch varlen_attn"] = lambda: theirs(*arguments)
    return calls


def parts() -> list[Row]:
    """The parts of the CPU overhead of a warm call, natively and in Python."""
    wait_for_native_calls()
    q, k, v = (cases.normal(1, 8, 128, 64) for _ in range(3))
    out = sdpa(q, k, v)
    frontend = hand_graphs.FrontendGraph(q, k, v, is_causal=False)
    until_recorded(lambda: sdpa(q, k, v))
    alone = launches_of(lambda: sdpa(q, k, v)).plans
    assert alone is not None

    call = SdpaCall(q, k, v)
    signature = SDPA.signature(call)
    entry = SDPA.table.get(signature)
    assert entry is not None
    assert entry.plan is not None
    plan = entry.plan
    layout = (tuple(out.shape), out.stride(), out.dtype)
    scale = array("f", [64**-0.5])
    pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), scale.buffer_info()[0], out.data_ptr())
    native: dict[str, Call] = {
        "natively, whole call": lambda: sdpa(q, k, v),
        "  of it: an output of PyTorch's allocator": lambda: plans.allocate(*layout),
        "  of it: the recorded launches": alone,
        "  in place of them: cuDNN and the frontend's C++": frontend.launch,
    }
    timed: dict[str, Call] = {
        "in Python, whole call": lambda: sdpa(q, k, v),
        "  of it: signature": lambda: SDPA.signature(call),
        "  of it: look-up of the signature": lambda: SDPA.table.get(signature),
        "  of it: may it skip the dispatcher?": lambda: can_bypass_dispatcher(q, k, v),
        "  of it: launch": lambda: entry.run(call),
        "    of it: plan.launch": lambda: plan.launch(pointers),
    }
    times = host_times(native)
    with in_python():
        times |= host_times(timed)
    return [{"part": name, "µs": time} for name, time in times.items()]


def kernels() -> list[Row]:
    """Device time of `sdpa` and of the plain frontend graph, interleaved."""
    rows = []
    for shape in track(cases.KERNEL_SHAPES, "kernels", transient=True):
        causal = shape.causal
        q, k, v = shape.tensors()
        frontend = hand_graphs.FrontendGraph(q, k, v, is_causal=causal)

        def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal) -> Tensor:
            return sdpa(q, k, v, is_causal=causal)

        with peers.only("pytorch flash"):
            times = device_times(
                {"sdpa": ours, "frontend": frontend.launch, "flash": peers.pytorch(q, k, v, is_causal=causal)}
            )
        flops = shape.flops()
        rows.append(
            {
                "B, Hq, Hkv, S, D": shape.label,
                "sdpa µs": times["sdpa"],
                "frontend µs": times["frontend"],
                "sdpa / frontend": times["sdpa"] / times["frontend"],
                "sdpa TFLOP/s": flops / times["sdpa"] / 1e6,
                "pytorch flash TFLOP/s": flops / times["flash"] / 1e6,
            }
        )
    return rows


def memory() -> list[Row]:
    """Growth of device and host memory in a million calls; plans and host memory in 1,000 shapes."""
    wait_for_native_calls()
    q, k, v = (cases.normal(1, 8, 128, 64) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rows: list[Row] = []
    for name, count, call in (
        ("1,000,000 calls", 1_000_000, lambda: sdpa(q, k, v)),
        ("100,000 forward and backward passes", 100_000, lambda: torch.autograd.grad(sdpa(*leaves), leaves, q)),
    ):
        for _ in range(100):
            call()
        gc.collect()
        device, host_ = _device_memory(), _host_memory()
        for _ in track(range(count // 1000), name, transient=True):
            for _ in range(1000):
                call()
            torch.cuda.synchronize()
        gc.collect()
        rows += [
            {"what": f"device memory grown over {name}, bytes", "value": _device_memory() - device},
            {"what": f"host memory grown over {name}, MB", "value": (_host_memory() - host_) / 1e6},
        ]
    capacity = plan_cache.info().capacity
    plan_cache.clear()
    plan_cache.resize(100)
    resident = []
    try:
        with shape_policy(EXACT):
            for length in track(range(1, 1001), "1,000 shapes", transient=True):
                sdpa(cases.normal(1, 2, length, 64), k[:, :2], v[:, :2])
                if length % 200 == 0:
                    gc.collect()
                    resident.append(_host_memory())
        info = plan_cache.info()
    finally:
        plan_cache.resize(capacity)
    rows += [
        {"what": "plans held of 1,000 shapes, capacity 100", "value": info.plans},
        {"what": "prepared calls held", "value": len(SDPA.table)},
        {"what": "seconds for a plan, mean", "value": info.build_seconds / info.builds},
    ]
    for count, size in zip(range(200, 1001, 200), resident, strict=True):
        rows.append({"what": f"host memory after {count} shapes, MB", "value": size / 1e6})
    return rows


def _device_memory() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _host_memory() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file on a disk
        return int(file.read().split()[1]) * resource.getpagesize()
