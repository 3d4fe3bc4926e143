"""Calls on DTensors in two processes: each way, forward and gradients, against the plain call; what is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import cudnn_sdpa
from cudnn_sdpa import Fp8BackwardScales, Fp8Scales, UnsupportedError
from cudnn_sdpa.engine import sharding

if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

R, WHOLE = Replicate(), {}
FP8 = torch.float8_e4m3fn


def randn(*shape):
    return torch.randn(*shape)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def fp8(*shape):
    return torch.randn(*shape).to(FP8)


def qkv(batch=4, heads=4, heads_kv=2, queries=8, keys=8, dim=16):
    return {
        "q": randn(batch, heads, queries, dim),
        "k": randn(batch, heads_kv, keys, dim),
        "v": randn(batch, heads_kv, keys, dim),
    }


def packed(heads=4, heads_kv=2):
    ends = ints(0, 3, 10)
    return {
        "q": randn(10, heads, 16),
        "k": randn(10, heads_kv, 16),
        "v": randn(10, heads_kv, 16),
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
    }


def paged(heads_kv=2, layout="HND"):
    shape = (8, heads_kv, 16, 16) if layout == "HND" else (8, 16, heads_kv, 16)
    return {
        "q": randn(2, 4, 1, 16),
        "k_pages": randn(*shape),
        "v_pages": randn(*shape),
        "page_table": ints(5, 2, 7, 0).view(2, 2),
        "seq_lens_kv": ints(20, 9),
    }


def in_fp8(made, heads_kv=2):
    pages = {name: made[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return {**made, **pages, "k_scale": 0.5 + torch.rand(heads_kv), "v_scale": torch.tensor(1.7)}


def packed_on_pages(heads_kv=2, layout="HND"):
    return paged(heads_kv, layout) | {"q": randn(6, 4, 16), "cu_seqlens_q": ints(0, 1, 5)}


def run_fp8(q, k, v, **others):
    one, full = torch.ones(1), torch.tensor([448.0])
    found = cudnn_sdpa.sdpa_fp8(q, k, v, Fp8Scales(one, one, one, 1 / full, full, one), return_lse=True, **others)
    return tuple(found)


def run_fp8_backward(**tensors):
    one, many = torch.ones(1), torch.tensor([256.0])
    scales = Fp8BackwardScales(one, one, one, one, one, 1 / many, 1 / many, many, one, one, one, many)
    return tuple(cudnn_sdpa.sdpa_fp8_backward(**tensors, scales=scales))


def fp8_gradients():
    shape = (4, 2, 16, 128)
    return {name: fp8(*shape) for name in ("grad_out", "q", "k", "v", "out")} | {"lse": 5 + torch.rand(shape[:3])}


def affine(x, weight, reference=False):
    return _scaled(x, weight) if not reference else x * weight


@cudnn_sdpa.graph_op(
    reference=lambda x, weight: x * weight, backward=lambda g, o, _: _scaled_gradient(g, o), shard={"x": 1}
)
def _scaled(g, x, weight):
    return g.mul(a=x, b=weight)


def _scaled_gradient(grads, operands):
    (grad,), (x, weight) = grads, operands
    return grad * weight, (grad * x).sum_to_size(weight.shape)


sdpa, varlen = cudnn_sdpa.sdpa, cudnn_sdpa.sdpa_varlen
LONGEST = {"max_seqlen_q": 7, "max_seqlen_kv": 7}
BATCH, HEADS, QUERIES = Shard(0), Shard(1), Shard(2)


class Case:
    """A call, how its tensors are placed, and how its results must be."""

    def __init__(self, function, make, placed, results, /, *, trains=True, **options):
        self.function, self.make, self.placed = function, make, placed
        self.results, self.trains, self.options = results, trains, options

    @property
    def gradients(self):
        """How its gradients must be placed: as their tensors; those of replicated ones are sums over the parts."""
        of_replicated = R if set(self.placed.values()) == {R} else Partial()
        without = ("cos", "sin")
        names = [name for name in self.placed if "seq" not in name and name not in without] if self.trains else []
        return {name: of_replicated if self.placed[name] == R else self.placed[name] for name in names}


def all_of(placement, *names):
    return dict.fromkeys(names, placement)


def for_rotations():
    """Heads, angles of each sequence, and weights of norms."""
    made = {"q": randn(2, 4, 6, 16), "k": randn(2, 2, 6, 16), "cos": randn(2, 6, 5), "sin": randn(2, 6, 5)}
    return {**made, "q_weight": randn(16), "k_weight": randn(16)}


def for_rotations_in_fp8():
    return {**for_rotations(), "q_scale": torch.tensor([0.01]), "k_scale": torch.tensor(0.02)}


def rope_in_place(q, k, **given):
    """Copies of the heads, rotated in place."""
    q, k = q.clone(), k.clone()
    cudnn_sdpa.rope_(q, k, **given)
    return q, k


def rope_fp8(**given):
    """Values in float32: gloo sends no FP8."""
    found = cudnn_sdpa.rope_fp8(**given)
    return found.q.float(), found.k.float(), found.q_amax, found.k_amax


def layer_norm_fp8(**given):
    found = cudnn_sdpa.layer_norm_fp8(**given)
    return found.out.float(), found.scale, found.total


QKV = ("q", "k", "v")
CASES = {
    "sdpa, batch": Case(
        sdpa,
        lambda: qkv() | {"sinks": randn(4), "attn_mask": randn(4, 1, 8, 8), "seq_lens_kv": ints(3, 8, 1, 5)},
        all_of(BATCH, *QKV, "attn_mask", "seq_lens_kv") | {"sinks": R},
        [BATCH, BATCH],
        return_lse=True,
    ),
    "sdpa, batch, lengths of queries": Case(
        sdpa, lambda: qkv() | {"seq_lens_q": ints(3, 0, 8, 5)}, all_of(BATCH, *QKV, "seq_lens_q"), [BATCH]
    ),
    "sdpa, batch, causal, window": Case(sdpa, qkv, all_of(BATCH, *QKV), [BATCH], is_causal=True, window_size=(3, 0)),
    "sdpa, batch, a mask for all": Case(
        sdpa, lambda: qkv() | {"attn_mask": randn(8, 8)}, all_of(BATCH, *QKV) | {"attn_mask": R}, [BATCH]
    ),
    "sdpa, heads": Case(
        sdpa,
        lambda: qkv() | {"sinks": randn(4), "attn_mask": randn(1, 4, 8, 8), "seq_lens_kv": ints(3, 8, 1, 5)},
        all_of(HEADS, *QKV, "attn_mask") | {"sinks": Shard(0), "seq_lens_kv": R},
        [HEADS, HEADS],
        return_lse=True,
    ),
    "sdpa, heads, one mask": Case(
        sdpa, lambda: qkv() | {"attn_mask": randn(4, 1, 8, 8)}, all_of(HEADS, *QKV) | {"attn_mask": R}, [HEADS]
    ),
    "sdpa, query heads": Case(sdpa, lambda: qkv(heads_kv=1), {"q": HEADS, "k": R, "v": R}, [HEADS], is_causal=True),
    "sdpa, query heads, uneven": Case(
        sdpa, lambda: qkv(heads=3, heads_kv=1), {"q": HEADS, "k": R, "v": R}, [HEADS, HEADS], return_lse=True
    ),
    "sdpa, queries": Case(
        sdpa,
        lambda: qkv() | {"attn_mask": randn(1, 1, 8, 8), "sinks": randn(4)},
        {"q": QUERIES, "k": R, "v": R, "attn_mask": QUERIES, "sinks": R},
        [QUERIES],
    ),
    "sdpa, queries, uneven, last": Case(sdpa, lambda: qkv(queries=1), {"q": QUERIES, "k": R, "v": R}, [QUERIES]),
    "sdpa, uneven batch": Case(sdpa, lambda: qkv(batch=3), all_of(BATCH, *QKV), [BATCH]),
    "sdpa, a batch of one": Case(
        sdpa,
        lambda: qkv(batch=1) | {"sinks": randn(4)},
        all_of(BATCH, *QKV) | {"sinks": R},
        [BATCH, BATCH],
        return_lse=True,
    ),
    "sdpa, replicated": Case(sdpa, lambda: qkv() | {"sinks": randn(4)}, all_of(R, *QKV, "sinks"), [R]),
    "sdpa, alibi in the batch": Case(sdpa, qkv, all_of(BATCH, *QKV), [BATCH], alibi=True, is_causal=True),
    "drop-in, heads": Case(
        cudnn_sdpa.scaled_dot_product_attention,
        lambda: {"query": randn(2, 4, 8, 16), "key": randn(2, 4, 8, 16), "value": randn(2, 4, 8, 16)},
        all_of(HEADS, "query", "key", "value"),
        [HEADS],
    ),
    "drop-in, rank 3": Case(
        cudnn_sdpa.scaled_dot_product_attention,
        lambda: {"query": randn(4, 8, 16), "key": randn(4, 8, 16), "value": randn(4, 8, 16)},
        all_of(Shard(0), "query", "key", "value"),
        [Shard(0)],
        is_causal=True,
    ),
    "varlen, heads": Case(
        varlen,
        lambda: packed() | {"sinks": randn(4)},
        all_of(HEADS, *QKV) | {"sinks": Shard(0), "cu_seqlens_q": R, "cu_seqlens_kv": R},
        [HEADS, HEADS],
        return_lse=True,
        is_causal=True,
        **LONGEST,
    ),
    "varlen, plain offsets": Case(varlen, packed, all_of(HEADS, *QKV), [HEADS], window_size=(2, 1), **LONGEST),
    "varlen, query heads": Case(varlen, lambda: packed(heads_kv=1), {"q": HEADS, "k": R, "v": R}, [HEADS], **LONGEST),
    "paged, heads": Case(
        cudnn_sdpa.sdpa_paged, paged, all_of(HEADS, "q", "k_pages", "v_pages"), [HEADS], trains=False, page_layout="HND"
    ),
    "paged, heads, NHD": Case(
        cudnn_sdpa.sdpa_paged,
        lambda: paged(layout="NHD"),
        {"q": HEADS, "k_pages": Shard(2), "v_pages": Shard(2)},
        [HEADS, HEADS],
        trains=False,
        page_layout="NHD",
        return_lse=True,
    ),
    "paged, batch": Case(
        cudnn_sdpa.sdpa_paged,
        paged,
        all_of(BATCH, "q", "page_table", "seq_lens_kv"),
        [BATCH, BATCH],
        trains=False,
        page_layout="HND",
        return_lse=True,
    ),
    "paged, query heads": Case(
        cudnn_sdpa.sdpa_paged, lambda: paged(heads_kv=1), {"q": HEADS}, [HEADS], trains=False, page_layout="HND"
    ),
    "paged, heads, FP8": Case(
        cudnn_sdpa.sdpa_paged,
        lambda: in_fp8(paged()),
        all_of(HEADS, "q", "k_pages", "v_pages") | {"k_scale": Shard(0), "v_scale": R},
        [HEADS],
        trains=False,
        page_layout="HND",
    ),
    "packed on pages, heads": Case(
        cudnn_sdpa.sdpa_paged_varlen,
        lambda: packed_on_pages(layout="NHD") | {"sinks": randn(4).float()},
        {"q": HEADS, "k_pages": Shard(2), "v_pages": Shard(2), "sinks": Shard(0)},
        [HEADS, HEADS],
        trains=False,
        page_layout="NHD",
        return_lse=True,
        max_seqlen_q=4,
    ),
    "packed on pages, heads, FP8": Case(
        cudnn_sdpa.sdpa_paged_varlen,
        lambda: in_fp8(packed_on_pages()),
        all_of(HEADS, "q", "k_pages", "v_pages") | {"k_scale": Shard(0), "v_scale": R},
        [HEADS],
        trains=False,
        page_layout="HND",
        max_seqlen_q=4,
    ),
    "packed on pages, query heads": Case(
        cudnn_sdpa.sdpa_paged_varlen,
        lambda: packed_on_pages(heads_kv=1),
        {"q": HEADS},
        [HEADS],
        trains=False,
        page_layout="HND",
        max_seqlen_q=4,
    ),
    "fp8, batch": Case(
        run_fp8,
        lambda: {name: fp8(4, 2, 16, 128) for name in QKV},
        all_of(BATCH, *QKV),
        [BATCH, Partial("max"), Partial("max"), BATCH],
        trains=False,
    ),
    "fp8, heads": Case(
        run_fp8,
        lambda: {name: fp8(1, 2, 16, 128) for name in QKV},
        all_of(HEADS, *QKV),
        [HEADS, Partial("max"), Partial("max"), HEADS],
        trains=False,
        is_causal=True,
    ),
    "fp8 backward, batch": Case(
        run_fp8_backward,
        fp8_gradients,
        all_of(BATCH, "grad_out", "q", "k", "v", "out", "lse"),
        [BATCH] * 3 + [Partial("max")] * 4,
        trains=False,
    ),
    "fp8 backward, heads": Case(
        run_fp8_backward,
        fp8_gradients,
        all_of(HEADS, "grad_out", "q", "k", "v", "out", "lse"),
        [HEADS] * 3 + [Partial("max")] * 4,
        trains=False,
    ),
    "gelu_mul": Case(
        cudnn_sdpa.gelu_mul,
        lambda: {"gate": randn(4, 6, 8), "up": randn(4, 6, 8)},
        all_of(Shard(2), "gate", "up"),
        [Shard(2)],
    ),
    "relu_squared": Case(cudnn_sdpa.relu_squared, lambda: {"x": randn(4, 6, 8)}, {"x": Shard(1)}, [Shard(1)]),
    "rope, the batch": Case(
        cudnn_sdpa.rope,
        for_rotations,
        all_of(BATCH, "q", "k", "cos", "sin") | {"q_weight": R, "k_weight": R},
        [BATCH, BATCH],
        interleaved=True,
    ),
    "rope, heads": Case(
        cudnn_sdpa.rope,
        for_rotations,
        all_of(HEADS, "q", "k") | {"cos": R, "sin": R, "q_weight": R, "k_weight": R},
        [HEADS, HEADS],
    ),
    "rope, packed tokens": Case(
        cudnn_sdpa.rope,
        lambda: {
            "q": randn(6, 3, 8),
            "k": randn(6, 2, 8),
            "cos": randn(6, 4),
            "sin": randn(6, 4),
            "k_weight": randn(8),
        },
        all_of(BATCH, "q", "k", "cos", "sin") | {"k_weight": R},
        [BATCH, BATCH],
    ),
    "rope_, heads": Case(
        rope_in_place,
        for_rotations,
        all_of(HEADS, "q", "k") | {"cos": R, "sin": R, "q_weight": R, "k_weight": R},
        [HEADS, HEADS],
        trains=False,
    ),
    "rope_fp8, the batch": Case(
        rope_fp8,
        for_rotations_in_fp8,
        all_of(BATCH, "q", "k", "cos", "sin") | all_of(R, "q_weight", "k_weight", "q_scale", "k_scale"),
        [BATCH, BATCH, Partial("max"), Partial("max")],
        trains=False,
    ),
    "rope_fp8, heads": Case(
        rope_fp8,
        for_rotations_in_fp8,
        all_of(HEADS, "q", "k") | all_of(R, "cos", "sin", "q_weight", "k_weight", "q_scale", "k_scale"),
        [HEADS, HEADS, Partial("max"), Partial("max")],
        trains=False,
    ),
    "silu_mul, features": Case(
        cudnn_sdpa.silu_mul,
        lambda: {"gate": randn(4, 6, 8), "up": randn(4, 6, 8)},
        all_of(Shard(2), "gate", "up"),
        [Shard(2)],
    ),
    "silu_mul, both in one": Case(
        cudnn_sdpa.silu_mul, lambda: {"gate": randn(4, 6, 8)}, {"gate": Shard(1)}, [Shard(1)]
    ),
    "conv1d": Case(
        cudnn_sdpa.conv1d,
        lambda: {"x": randn(4, 4, 9), "weight": randn(6, 4, 3), "bias": randn(6)},
        {"x": BATCH, "weight": R, "bias": R},
        [BATCH],
    ),
    "conv2d, activation": Case(
        cudnn_sdpa.conv2d,
        lambda: {"x": randn(3, 4, 7, 6), "weight": randn(6, 4, 3, 3), "bias": randn(6)},
        {"x": BATCH, "weight": R, "bias": R},
        [BATCH],
        activation="silu",
        padding=1,
    ),
    "conv2d, patches": Case(
        cudnn_sdpa.conv2d,
        lambda: {"x": randn(4, 3, 8, 8), "weight": randn(6, 3, 4, 4), "bias": randn(6)},
        {"x": BATCH, "weight": R, "bias": R},
        [BATCH],
        stride=4,
    ),
    "conv3d": Case(
        cudnn_sdpa.conv3d,
        lambda: {"x": randn(2, 4, 4, 5, 6), "weight": randn(6, 4, 3, 3, 3)},
        {"x": BATCH, "weight": R},
        [BATCH],
    ),
    "a user's graph_op": Case(
        affine, lambda: {"x": randn(4, 6, 8), "weight": randn(8)}, {"x": Shard(1), "weight": R}, [Shard(1)]
    ),
}
_OF_LAYER_NORM = ("x", "weight", "bias", "residual")
for _dim in (0, 1):
    CASES |= {
        f"rms_norm, {_dim}": Case(
            cudnn_sdpa.rms_norm,
            lambda: {"x": randn(5, 6, 32), "weight": torch.rand(32)},
            {"x": Shard(_dim), "weight": R},
            [Shard(_dim)],
        ),
        f"rms_norm, residual, {_dim}": Case(
            cudnn_sdpa.rms_norm,
            lambda: {"x": randn(4, 6, 32), "weight": torch.rand(32), "residual": randn(4, 6, 32)},
            {"x": Shard(_dim), "weight": R, "residual": Shard(_dim)},
            [Shard(_dim)] * 2,
            activation="silu",
            zero_centered=True,
        ),
        f"layer_norm, {_dim}": Case(
            cudnn_sdpa.layer_norm,
            lambda: {"x": randn(4, 6, 32), "weight": torch.rand(32), "bias": randn(32)},
            {"x": Shard(_dim), "weight": R, "bias": R},
            [Shard(_dim)],
        ),
        f"layer_norm, residual, {_dim}": Case(
            cudnn_sdpa.layer_norm,
            lambda: {name: randn(4, 6, 32) if name in ("x", "residual") else randn(32) for name in _OF_LAYER_NORM},
            {"x": Shard(_dim), "weight": R, "bias": R, "residual": Shard(_dim)},
            [Shard(_dim)] * 2,
            activation="silu",
            zero_centered=True,
        ),
        f"layer_norm_fp8, {_dim}": Case(
            layer_norm_fp8,
            lambda: {"x": randn(4, 6, 32), "bias": randn(32), "residual": randn(4, 6, 32)},
            {"x": Shard(_dim), "bias": R, "residual": Shard(_dim)},
            [Shard(_dim)] * 3,
            trains=False,
        ),
        f"layer_norm, no bias, {_dim}": Case(
            cudnn_sdpa.layer_norm, lambda: {"x": randn(4, 6, 32)}, {"x": Shard(_dim)}, [Shard(_dim)]
        ),
    }


@functools.cache
def mesh_of(*shape):
    """One mesh of each shape: PyTorch 2.13 and 2.15 compile an operator on DTensors for its first mesh object alone.

    A first `relu` of a DTensor caches the result's mesh, for all equal meshes. On a DTensor of an equal mesh that is
    another object, a compiled `relu` then has a mesh that AOTAutograd does not know among its results, and fails with
    "Node tangents_2 was invalid, but is output". docs/many_gpus.md has the two lines that show it.
    """
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def placed(tensors, placements, mesh):
    """The tensors as DTensors of a mesh; those without placements as they are."""
    return {
        name: distributed(x, mesh, placements[name]).requires_grad_(x.requires_grad) if name in placements else x
        for name, x in tensors.items()
    }


def distributed(x, mesh, placements):
    if x.dtype != FP8:
        return distribute_tensor(x.detach(), mesh, placements)
    return viewed(distribute_tensor(x.view(torch.uint8), mesh, placements), FP8)


def viewed(x, dtype):
    """A DTensor of FP8 as one of bytes, which gloo can send, or the opposite."""
    local = x.to_local().view(dtype)
    return DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


def assert_equal(found, wanted, name):
    """In whole numbers of FP8, or within the rounding of float32."""
    assert found.shape == wanted.shape, name
    if wanted.dtype == FP8:
        assert torch.equal(viewed(found, torch.uint8).full_tensor(), wanted.view(torch.uint8)), name
    else:
        found = found.full_tensor()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


@contextlib.contextmanager
def silence():
    with CommDebugMode() as communication:
        yield
    assert communication.get_total_counts() == 0, communication.get_comm_counts()


def agrees(of, mesh, placements, results, gradients, compiled=False):
    """Whether a call on DTensors gives what the plain one does, placed as promised, and communicates nothing.

    Gives the number of results and gradients that were compared.
    """
    tensors = of.make()
    for name in gradients:
        tensors[name].requires_grad_()
    wanted = as_tuple(of.function(**tensors, **of.options))
    given = placed(tensors, placements, mesh)
    compiles = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}  # of other sizes, PyTorch compiles few
    if compiled:
        torch._dynamo.reset()  # a function is compiled a few times and no more
    function = torch.compile(of.function, **compiles) if compiled else of.function
    with silence() if not compiled else contextlib.nullcontext():  # under a dispatch mode, nothing is compiled
        found = as_tuple(function(**given, **of.options))
    assert len(found) == len(wanted)
    for number, (x, exact) in enumerate(zip(found, wanted, strict=True)):
        assert isinstance(x, DTensor)
        assert list(x.placements) == results[number], (number, x.placements)
        assert x.shape == exact.shape
        assert x.requires_grad == exact.requires_grad or (compiled and number)  # the LSE is detached there
    for number, (x, exact) in enumerate(zip(found, wanted, strict=True)):
        assert_equal(x.detach(), exact, f"result {number}")
    if not gradients:
        return len(found)
    count = len(found) + len(gradients)
    outs, wanted = (x[:1] if of.options.get("return_lse") else x for x in (found, wanted))
    grads = [torch.randn(x.shape) for x in wanted]
    exact = torch.autograd.grad(wanted, [tensors[name] for name in gradients], grads)
    grads = [distribute_tensor(grad, mesh, x.placements) for grad, x in zip(grads, outs, strict=True)]
    with silence():
        found = torch.autograd.grad(outs, [given[name] for name in gradients], grads)
    for name, x, wanted in zip(gradients, found, exact, strict=True):
        assert list(x.placements) == gradients[name], (name, x.placements)
        assert_equal(x, wanted, f"the gradient of {name}")
    return count


def check_case(name, compiled=False):
    of, mesh = CASES[name], mesh_of()
    placements = {operand: [where] for operand, where in of.placed.items()}
    gradients = {operand: [where] for operand, where in of.gradients.items()}
    return agrees(of, mesh, placements, [[where] for where in of.results], gradients, compiled)


def compared(name):
    """How many results and gradients of a case each of two ranks compares."""
    return [len(CASES[name].results) + len(CASES[name].gradients)] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_calls_on_dtensors_are_those_on_all(ranks, name):
    """Forward and gradients, placed as they should be, without communication."""
    assert ranks(check_case, name) == compared(name)


COMPILED = (
    "sdpa, batch",
    "sdpa, heads",
    "sdpa, query heads",
    "sdpa, queries",
    "sdpa, replicated",
    "drop-in, heads",
    "varlen, heads",
    "paged, heads",
    "paged, batch",
    "packed on pages, heads",
    "fp8, heads",
    "rms_norm, 1",
    "rms_norm, residual, 1",
    "layer_norm, residual, 1",
    "layer_norm, no bias, 1",
    "silu_mul, features",
    "silu_mul, both in one",
    "conv2d, activation",
    "a user's graph_op",
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_calls_are_the_same(ranks, name):
    assert ranks(check_case, name, True) == compared(name)


# Two mesh dimensions.


def check_two_dimensions(*shape):
    """The batch over one, heads or queries over the other; and one dimension over both."""
    mesh = mesh_of(*shape)
    of = CASES["sdpa, batch"]
    batch, heads = [Shard(0), R], [Shard(0), Shard(1)]
    placements = all_of(heads, *QKV) | {"attn_mask": batch, "seq_lens_kv": batch, "sinks": [R, Shard(0)]}
    gradients = all_of(heads, *QKV) | {"attn_mask": [Shard(0), Partial()], "sinks": [Partial(), Shard(0)]}
    counts = [agrees(of, mesh, placements, [heads] * 2, gradients)]
    queries, keys = [Shard(0), Shard(2)], [Shard(0), R]
    placements = {"q": queries, "k": keys, "v": keys}
    gradients = {"q": queries, "k": [Shard(0), Partial()], "v": [Shard(0), Partial()]}
    plain = Case(sdpa, qkv, {}, [])
    counts.append(agrees(plain, mesh, placements, [queries], gradients))
    others = [Shard(1), R], [R, Shard(0)], [R, R]
    counts.extend(agrees(plain, mesh, all_of(both, *QKV), [both], all_of(both, *QKV)) for both in others)
    twice = [Shard(0), Shard(0)]
    for batch in (4, 3):
        plain = Case(sdpa, lambda batch=batch: qkv(batch=batch), {}, [])
        counts.append(agrees(plain, mesh, all_of(twice, *QKV), [twice], all_of(twice, *QKV)))
    norm = CASES["rms_norm, 1"]
    both = [Shard(0), Shard(1)]
    whole = {"x": both, "weight": [R, R]}
    counts.append(agrees(norm, mesh, whole, [both], {"x": both, "weight": [Partial(), Partial()]}))
    return counts


#: Results and gradients: with a mask and sinks, without in six calls, and of a norm.
OF_TWO_DIMENSIONS = [7, *[4] * 6, 3]


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_two_mesh_dimensions(ranks, shape):
    assert ranks(check_two_dimensions, *shape) == [OF_TWO_DIMENSIONS] * 2


@pytest.mark.slow
def test_two_mesh_dimensions_of_two_ranks(four_ranks):
    assert four_ranks(check_two_dimensions, 2, 2) == [OF_TWO_DIMENSIONS] * 4


def check_groups_over_two_dimensions():
    """Two key heads suffice for two ranks, and not for two times two."""
    mesh = mesh_of(2, 2)
    given = placed(qkv(), all_of([Shard(1), Shard(1)], *QKV), mesh)
    with pytest.raises(UnsupportedError, match="k has 2 heads, which 4 ranks cannot share") as refused:
        sdpa(**given)
    return type(refused.value)


def check_outside_of_the_mesh():
    mesh = DeviceMesh("cpu", [0, 1])
    given = placed(qkv(), all_of([Shard(0)], *QKV), mesh)
    if dist.get_rank() < 2:
        return sdpa(**given).to_local().shape[0]
    with pytest.raises(UnsupportedError, match="this rank is not in the mesh") as refused:
        sdpa(**given)
    return type(refused.value)


@pytest.mark.slow
def test_four_ranks(four_ranks):
    assert four_ranks(check_groups_over_two_dimensions) == [UnsupportedError] * 4
    assert four_ranks(check_outside_of_the_mesh) == [2, 2, UnsupportedError, UnsupportedError]


# What is refused, and what would work.

REFUSED = {
    "features": (
        "sdpa, replicated",
        all_of(Shard(3), *QKV),
        {},
        r"q is Shard\(3\) .*expected q Shard\(0\) \(the batch\)",
    ),
    "a sum": ("sdpa, replicated", {"q": Partial(), "k": R, "v": R}, {}, r"q is Partial\(sum\) over mesh dimension 0"),
    "two ways": (
        "sdpa, replicated",
        {"q": Shard(0), "k": Shard(1), "v": Shard(1)},
        {},
        r"q is Shard\(0\) and k is Shard\(1\)",
    ),
    "keys": ("sdpa, replicated", {"q": R, "k": Shard(2), "v": Shard(2)}, {}, "each query needs all keys"),
    "sequences": ("sdpa, replicated", all_of(Shard(2), *QKV), {"is_causal": True}, "each query needs all keys"),
    "causal queries": (
        "sdpa, replicated",
        {"q": Shard(2), "k": R, "v": R},
        {"is_causal": True},
        "is_causal counts queries",
    ),
    "queries in a window": (
        "sdpa, replicated",
        {"q": Shard(2), "k": R, "v": R},
        {"window_size": (2, 2)},
        "window_size counts queries",
    ),
    "alibi": ("sdpa, replicated", all_of(Shard(1), *QKV), {"alibi": True, "is_causal": True}, "slopes depend on"),
    "query heads": (
        "sdpa, query heads, of three",
        all_of(Shard(1), *QKV),
        {},
        "k has 3 heads, which 2 ranks cannot share",
    ),
    "fewer query heads than ranks": (
        "sdpa, one head",
        {"q": Shard(1), "k": R, "v": R},
        {},
        "q has 1 query heads, which 2 ranks cannot share so that each has one",
    ),
    "lengths of queries": (
        "sdpa, lengths of queries",
        {"q": Shard(2), "k": R, "v": R, "seq_lens_q": R},
        {},
        "seq_lens_q counts queries",
    ),
    "packed tokens": ("varlen, plain offsets", all_of(Shard(0), *QKV), {}, "the sequences span ranks"),
    "pages": ("paged, heads", {"k_pages": Shard(0), "v_pages": Shard(0)}, {}, r"k_pages is Shard\(0\)"),
    "plain pages": ("paged, heads", {"q": Shard(1)}, {}, "k_pages is a plain tensor, which is taken as replicated"),
    "tokens on pages": ("packed on pages, heads", {"q": Shard(0)}, {}, "the sequences span ranks"),
    "plain lengths": ("sdpa, batch", all_of(Shard(0), *QKV), {}, "seq_lens_kv is a plain tensor"),
    "gradients in FP8": (
        "fp8 backward, batch",
        all_of(Shard(2), "q", "grad_out", "out", "lse"),
        {},
        "grad_out is Shard",
    ),
    "norm": ("rms_norm, 1", {"x": Shard(2), "weight": R}, {}, r"x is Shard\(2\)"),
    "norm of a sum": ("rms_norm, 1", {"x": Partial(), "weight": R}, {}, r"x is Partial\(sum\)"),
    "weight": ("rms_norm, 1", {"x": Shard(1), "weight": Shard(0)}, {}, r"x is Shard\(1\) and weight is Shard\(0\)"),
    "halves": ("silu_mul, both in one", {"gate": Shard(2)}, {}, r"gate is Shard\(2\)"),
    "one of two": (
        "silu_mul, features",
        {"gate": Shard(2), "up": Shard(1)},
        {},
        r"gate is Shard\(2\) and up is Shard\(1\)",
    ),
    "channels": ("conv1d", {"x": Shard(1), "weight": R, "bias": R}, {}, r"x is Shard\(1\)"),
    "filters": ("conv2d, patches", {"x": R, "weight": Shard(0), "bias": Shard(0)}, {}, r"weight is Shard\(0\)"),
}
#: What serves these calls besides a redistribution.
INSTEAD = {
    "keys": "cudnn_sdpa.distributed.context_parallel",
    "sequences": "cudnn_sdpa.distributed.context_parallel",
    "packed tokens": "cudnn_sdpa.distributed.context_parallel_varlen",
}
OTHERS = {
    "sdpa, query heads, of three": Case(sdpa, lambda: qkv(heads=6, heads_kv=3), {}, []),
    "sdpa, one head": Case(sdpa, lambda: qkv(heads=1, heads_kv=1), {}, []),
    "sdpa, lengths of queries": Case(sdpa, lambda: qkv(batch=2) | {"seq_lens_q": ints(0, 5)}, {}, []),
}


def placements_of(code):
    found = []
    for name, dim in re.findall(r"(Shard|Replicate)\((\d*)\)", code):
        found.append(Shard(int(dim)) if name == "Shard" else Replicate())
    return found


def check_refusal(which):
    """A call is refused on all ranks alike, and what the error suggests gives the right result."""
    name, placements, options, message = REFUSED[which]
    of, mesh = (CASES | OTHERS)[name], mesh_of()
    options = {**of.options, **options}
    tensors = of.make()
    if which == "plain pages":
        tensors["sinks"] = torch.randn(4)
    wanted = as_tuple(of.function(**tensors, **options))
    sums = {operand for operand, where in placements.items() if where == Partial()}
    given = placed(tensors, {operand: [where] for operand, where in placements.items() if operand not in sums}, mesh)
    for operand in sums:
        given[operand] = DTensor.from_local(tensors[operand] / mesh.size(), mesh, [Partial()])
    with pytest.raises(UnsupportedError, match=rf"on DTensors(.|\n)*{message}") as refused:
        of.function(**given, **options)
    assert INSTEAD.get(which, "") in refused.value.suggestion
    steps = re.findall(r"(\w+)\.redistribute\(placements=(\[.*?\])\)", refused.value.suggestion)
    plain = re.findall(r"distribute_tensor\((\w+), (\w+)\.device_mesh, (\[.*?\])\)", refused.value.suggestion)
    assert steps or plain, refused.value
    for operand, to in steps:
        if of.function is run_fp8_backward:  # gloo sends no FP8
            given[operand] = distributed(tensors[operand], mesh, placements_of(to))
        else:
            given[operand] = given[operand].redistribute(placements=placements_of(to))
    for operand, leading, to in plain:
        given[operand] = distribute_tensor(given[operand], given[leading].device_mesh, placements_of(to))
    for number, (x, exact) in enumerate(zip(as_tuple(of.function(**given, **options)), wanted, strict=True)):
        assert_equal(x.detach(), exact, f"result {number}")
    return str(refused.value)


@pytest.mark.parametrize("which", REFUSED)
def test_other_placements_are_refused_with_what_works(ranks, which):
    first, second = ranks(check_refusal, which)
    assert first == second


def check_other_refusals():
    mesh, of = mesh_of(), CASES["sdpa, replicated"]
    given = placed(qkv(), all_of([Shard(0)], *QKV), mesh)
    with pytest.raises(UnsupportedError, match="out on DTensors"), torch.no_grad():
        sdpa(**given, out=torch.empty(4, 4, 8, 16))
    with pytest.raises(UnsupportedError, match="out on DTensors"), torch.no_grad():
        sdpa(**qkv(), out=sdpa(**given))
    with pytest.raises(UnsupportedError, match=r"sdpa_backward on DTensors(.|\n)*local_map"):
        cudnn_sdpa.sdpa_backward(given["q"], given["q"], given["q"], **given)
    other = init_device_mesh("cpu", (1, 2))
    with pytest.raises(cudnn_sdpa.OptionError, match="k: got a DTensor of"):
        sdpa(**given | placed({"k": qkv()["k"]}, {"k": [R, Shard(0)]}, other))
    with pytest.raises(cudnn_sdpa.DeviceError, match="sinks: got meta; expected cpu"):
        sdpa(**given, sinks=torch.empty(4, device="meta"))
    with pytest.raises(cudnn_sdpa.ShapeError, match="k: got"):  # on both ranks, though one could run its part
        sdpa(**placed({**qkv(batch=3), "k": randn(4, 2, 8, 16)}, all_of([Shard(0)], *QKV), mesh))
    with pytest.raises(cudnn_sdpa.DtypeError, match="float64 on cpu"):
        sdpa(**placed({name: x.int() for name, x in qkv().items()}, all_of([Shard(0)], *QKV), mesh))
    heads = placed(for_rotations(), all_of([BATCH], "q", "k", "cos", "sin"), mesh)
    longer, angles = placed({"k": randn(4, 2, 6, 16)}, {"k": [BATCH]}, mesh), randn(2, 6, 5)
    with pytest.raises(cudnn_sdpa.ShapeError, match="k: got"):  # though queries and keys are calls of their own
        cudnn_sdpa.rope(**heads | longer | {"cos": angles[0], "sin": angles[1]})
    with pytest.raises(UnsupportedError, match=r"merge_states on DTensors(.|\n)*local_map"), torch.no_grad():
        cudnn_sdpa.merge_states([given["q"]], [given["q"][..., 0]])
    cache = cudnn_sdpa.PagedKVCache(pages=4, page_size=16, heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    step = cache.reserve([cache.add() for _ in range(4)], 8)
    with pytest.raises(UnsupportedError, match=r"PagedKVCache on DTensors(.|\n)*local tensors"):
        cache.append(step, given["k"], given["v"])
    assert of.results == [R]

    @cudnn_sdpa.graph_op(reference=lambda x: x.relu())
    def undeclared(g, x):
        return g.relu(input=x)

    @cudnn_sdpa.graph_op(reference=lambda x: x.sum(0, keepdim=True), shard={"x": 0})
    def wrong(g, x):
        return g.reduction(input=x)

    @cudnn_sdpa.graph_op(
        reference=lambda x: x.relu(), shard=lambda _: [sharding.ShardingStrategy("columns", {"x": 1}, 1)]
    )
    def by_columns(g, x):
        return g.relu(input=x)

    x = placed({"x": randn(4, 6)}, {"x": [Shard(1)]}, mesh)["x"]
    assert by_columns(x).placements == (Shard(1),)
    x = placed({"x": randn(4, 6)}, {"x": [Shard(0)]}, mesh)["x"]
    with pytest.raises(UnsupportedError, match=r"by_columns on DTensors"):
        by_columns(x)
    with pytest.raises(UnsupportedError, match=r"undeclared on DTensors(.|\n)*shard=(.|\n)*local_map"):
        undeclared(x)
    with pytest.raises(UnsupportedError, match=r"wrong on DTensors(.|\n)*should have size 2 in dimension 0") as refused:
        wrong(x)
    return str(refused.value)


def test_other_refusals(ranks):
    """`out`, several meshes and devices, sizes, and functions that do not say how they may be divided."""
    first, second = ranks(check_other_refusals)
    assert first == second


@pytest.mark.parametrize("shard", [{"y": 1}, {"x": -1}, {"x": True}, {}])
def test_declarations_are_checked(shard):
    with pytest.raises(cudnn_sdpa.OptionError, match="shard"):
        cudnn_sdpa.graph_op(reference=lambda x: x.relu(), shard=shard)(lambda g, x: g.relu(input=x))


# Plain tensors, dropout, autocast, other wrappers.


def check_plain_weights():
    """The gradient of a plain weight is that of all ranks."""
    mesh, x, weight = mesh_of(), randn(4, 6, 32), torch.rand(32)
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = cudnn_sdpa.rms_norm(*plain)
    grad = torch.randn(wanted.shape)
    exact = torch.autograd.grad(wanted, plain, grad)
    for where in (Shard(0), Shard(1), R):
        given = [distribute_tensor(x, mesh, [where]).requires_grad_(), weight.clone().requires_grad_()]
        found = torch.autograd.grad(cudnn_sdpa.rms_norm(*given), given, distribute_tensor(grad, mesh, [where]))
        assert_equal(found[0], exact[0], "x")
        torch.testing.assert_close(found[1], exact[1])
    return found[1].numpy()


def test_plain_weights_are_replicated(ranks):
    first, second = ranks(check_plain_weights)
    assert (first == second).all()
    assert first.any()


@cudnn_sdpa.graph_op(
    reference=lambda x, y: x * y, backward=lambda g, o, _: _scaled_gradient(g, o), shard={"x": 1, "y": 1}
)
def _product(g, x, y):
    return g.mul(a=x, b=y)


def check_broadcast_operands():
    """An operand of size 1 is every rank's, as a DTensor or a plain tensor; it was divided, and a rank had none."""
    mesh, x = mesh_of(), randn(4, 6, 32)
    for shape, where, other in (
        ((1, 6, 32), Shard(0), R),
        ((1, 6, 32), Shard(1), Shard(1)),
        ((4, 1, 32), Shard(1), R),
        ((4, 1, 32), Shard(0), Shard(0)),
        ((1, 1, 32), Shard(0), R),
        ((1, 1, 32), R, R),
    ):
        leaves = [x.clone().requires_grad_(), randn(*shape).requires_grad_()]
        wanted = _product(*leaves)
        grad = torch.randn(wanted.shape)
        exact = torch.autograd.grad(wanted, leaves, grad)
        given = [distribute_tensor(one.detach(), mesh, [at]) for one, at in zip(leaves, (where, other), strict=True)]
        given = [one.requires_grad_() for one in given]
        out = _product(*given)
        assert out.placements == (where,)
        found = torch.autograd.grad(out, given, distribute_tensor(grad, mesh, [where]))
        for one, like in zip((out, *found), (wanted, *exact), strict=True):
            torch.testing.assert_close(one.full_tensor(), like)
    first = placed({"x": randn(1, 6, 32), "y": x}, {"x": [R], "y": [Shard(0)]}, mesh)
    torch.testing.assert_close(_product(**first).full_tensor(), first["x"].full_tensor() * x)
    narrow = placed({"x": randn(1, 6, 32), "y": x}, {"x": [Shard(0)], "y": [Shard(0)]}, mesh)
    with pytest.raises(UnsupportedError, match=r"x\.redistribute|x is Shard\(0\)"):
        _product(**narrow)
    plain = randn(1, 6, 32)
    out = _product(distribute_tensor(x, mesh, [Shard(0)]), plain)
    torch.testing.assert_close(out.full_tensor(), x * plain)
    return out.placements


def test_operands_of_size_one_are_broadcast(ranks):
    assert ranks(check_broadcast_operands) == [(Shard(0),)] * 2


def check_learned_tensors():
    """What is suggested for a plain tensor that learns leaves it a leaf."""
    mesh, tensors = mesh_of(), qkv()
    learned = {"sinks": torch.randn(4), "attn_mask": torch.randn(1, 4, 8, 8)}
    for name, values in learned.items():
        given = placed(tensors, all_of([Shard(1)], *QKV), mesh)
        plain, mine = (values.clone().requires_grad_() for _ in range(2))
        with pytest.raises(UnsupportedError, match=f"{name} is a plain tensor") as refused:
            sdpa(**given, **{name: mine})
        scope = {**given, name: mine, "DTensor": DTensor, "Replicate": Replicate, "Shard": Shard}
        distributed_one = eval(refused.value.suggestion, scope)  # noqa: S307 - as a user would copy it
        sdpa(**given, **{name: distributed_one}).full_tensor().sum().backward()
        sdpa(**tensors, **{name: plain}).sum().backward()
        torch.testing.assert_close(mine.grad, plain.grad)
        learned[name] = mine.is_leaf
    return learned


def test_learned_tensors_stay_leaves(ranks):
    assert ranks(check_learned_tensors) == [{"sinks": True, "attn_mask": True}] * 2


def check_uneven_parts():
    """PyTorch leaves uneven parts as views of their padding."""
    mesh, (gate, up) = mesh_of(), torch.randn(2, 4, 5, 16)
    uneven = distribute_tensor(gate, mesh, [Shard(1)])
    moved = uneven.redistribute(placements=[Shard(0)]), distribute_tensor(up, mesh, [Shard(0)])
    given = [x.requires_grad_() for x in moved]
    plain = [x.clone().requires_grad_() for x in (gate, up)]
    found, exact = cudnn_sdpa.silu_mul(*given), cudnn_sdpa.silu_mul(*plain)
    assert_equal(found.detach(), exact.detach(), "silu_mul")
    grad = torch.randn_like(exact)
    of_found = torch.autograd.grad(found, given, distribute_tensor(grad, mesh, [Shard(0)]))
    for x, wanted in zip(of_found, torch.autograd.grad(exact, plain, grad), strict=True):
        assert_equal(x, wanted, "gradient")
    return len(of_found)


def test_uneven_parts_are_read_as_they_should_lie(ranks):
    assert ranks(check_uneven_parts) == [2, 2]


def check_second_gradient():
    """A second backward pass raises, or the first one does where PyTorch would leave gradients out."""
    x = distribute_tensor(torch.randn(4, 8, 32), mesh_of(), [Shard(1)]).requires_grad_()
    weight = distribute_tensor(torch.randn(32), mesh_of(), [Replicate()]).requires_grad_()
    y = cudnn_sdpa.rms_norm(x, weight, 1e-5)
    with pytest.raises(UnsupportedError, match=r"create_graph=True|double backward"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)[0].square().sum().backward()
    y = cudnn_sdpa.rms_norm(x, weight, 1e-5)
    return torch.autograd.grad(y.square().sum(), x)[0].requires_grad


def test_second_gradients_are_refused(ranks):
    assert ranks(check_second_gradient) == [False, False]


def check_dropout(compiled=False):
    """Every rank draws its own; the backward pass sees what the forward pass dropped."""
    mesh = mesh_of()
    ones = torch.ones(2, 2, 64, 64)
    shares = []
    calls = {"batch": [Shard(0)], "heads": [Shard(1)]}
    function = torch.compile(sdpa, backend="aot_eager", fullgraph=True) if compiled else sdpa
    for placements in calls.values():
        torch._dynamo.reset()
        q, k = (distribute_tensor(torch.zeros_like(ones), mesh, placements) for _ in range(2))
        v = distribute_tensor(torch.eye(64).expand_as(ones).contiguous(), mesh, placements).requires_grad_()
        torch.manual_seed(3)  # the same in both ranks
        out = function(q, k, v, dropout_p=0.5)
        whole = out.detach().full_tensor()
        (grad,) = torch.autograd.grad(out, v, torch.ones_like(out))
        dropped = (whole == 0).double()
        assert 0.4 < dropped.mean() < 0.6
        apart = dropped[0] != dropped[1] if placements == [Shard(0)] else dropped[:, 0] != dropped[:, 1]
        shares.append(float(apart.double().mean()))
        torch.testing.assert_close(grad.full_tensor()[..., 0], whole.sum(2))
    replicated = distribute_tensor(ones, mesh, [R])
    with pytest.raises(UnsupportedError, match="would draw different random numbers"):
        sdpa(replicated, replicated, replicated, dropout_p=0.5)
    sharded = distribute_tensor(ones, mesh, [Shard(0)])
    with cudnn_sdpa.fallback("torch"), pytest.raises(UnsupportedError, match="fallback"):
        sdpa(sharded, sharded, sharded, dropout_p=0.5)
    return shares


def test_each_part_has_a_number_of_its_own():
    """By which its random numbers differ from those of others."""
    strategy, sizes = sharding.ShardingStrategy("the heads", {"q": 1}, 1), (2, 3)

    def part(*coordinate):
        mesh = SimpleNamespace(size=lambda index: sizes[index], get_coordinate=lambda: coordinate)
        return sharding.ShardedCall(mesh, (strategy, strategy), (6, 6)).part()

    assert sorted(part(*place) for place in itertools.product(*map(range, sizes))) == list(range(6))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_differs_between_ranks(ranks, compiled):
    for shares in ranks(check_dropout, compiled):
        assert len(shares) == 2
        assert min(shares) > 0.3


def check_others():
    """Autocast, tensors whose communication is still running, and what `explain` says."""
    mesh = mesh_of()
    q, k, v = (x.requires_grad_() for x in placed(qkv(), all_of([Shard(0)], *QKV), mesh).values())
    with torch.autocast("cpu", torch.bfloat16):
        out = sdpa(q, k, v)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert q.grad.placements == (Shard(0),)
    x = randn(4, 6, 32)
    pending = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    gathered = pending.redistribute(placements=[R], async_op=True)
    found = cudnn_sdpa.rms_norm(gathered)
    assert_equal(found.detach(), cudnn_sdpa.rms_norm(x), "gathered")
    found.sum().backward()
    plain = x.clone().requires_grad_()
    cudnn_sdpa.rms_norm(plain).sum().backward()
    assert_equal(pending.grad, plain.grad, "its gradient")
    half = {name: x.bfloat16() for name, x in qkv(batch=2).items()}
    for function, names in ((sdpa, QKV), (cudnn_sdpa.scaled_dot_product_attention, ("query", "key", "value"))):
        tensors = dict(zip(names, placed(half, all_of([Shard(0)], *QKV), mesh).values(), strict=True))
        local = {name: tensor.to_local() for name, tensor in tensors.items()}
        more = {"enable_gqa": True} if names != QKV else {}
        keys = [keys_of(function, given, more) for given in (tensors, local)]
        assert keys[0] == keys[1]
    norm = placed({"x": x.bfloat16(), "weight": torch.rand(32).bfloat16()}, {"x": [Shard(1)], "weight": [R]}, mesh)
    keys = [keys_of(cudnn_sdpa.rms_norm, given) for given in (norm, {n: t.to_local() for n, t in norm.items()})]
    assert keys[0] == keys[1]
    with pytest.raises(UnsupportedError, match="on DTensors"):
        cudnn_sdpa.explain(sdpa, *[distribute_tensor(x, mesh, [Shard(3)]) for x in half.values()])
    return keys[0]


def keys_of(function, tensors, more=WHOLE):
    """The key of a call's plan for an H200, without planning it."""
    from cudnn_sdpa.engine import explain
    from cudnn_sdpa.graph.target import Target, load_properties

    found = []

    def keep(name, description, *_):
        found.append(str(description.key(Target.from_properties(load_properties("h200")), None)))
        return explain.Explanation(name, "h200", offline=True, supported=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain, "_explain", keep)
        cudnn_sdpa.explain(function, **tensors, **more)
    return found


def test_other_circumstances(ranks):
    first, second = ranks(check_others)
    assert first == second
    assert first


def check_fp8_attention():
    """Each rank has the scales of its part: as near to the exact result as on one process."""
    mesh = mesh_of()
    tensors = {name: randn(4, 2, 32, 128).bfloat16() for name in QKV}
    errors = []
    for where in (Shard(0), Shard(1)):
        given = placed(tensors, all_of([where], *QKV), mesh)
        for x in given.values():
            x.requires_grad_()
        out = cudnn_sdpa.fp8_attention(**given, is_causal=True)
        assert out.placements == (where,)
        (out * out.detach()).sum().backward()
        exact = {name: x.float().requires_grad_() for name, x in tensors.items()}
        wanted = sdpa(**exact, is_causal=True)
        (wanted * wanted.detach()).sum().backward()
        pairs = [(out.detach(), wanted.detach())] + [(given[name].grad, exact[name].grad) for name in QKV]
        errors += [float((found.full_tensor().float() - x).norm() / x.norm()) for found, x in pairs]
    return errors


def test_attention_computed_in_fp8(ranks):
    for errors in ranks(check_fp8_attention):
        assert len(errors) == 8
        assert all(0 < error < 0.12 for error in errors)


def test_only_tensors_of_subclasses_are_looked_at(monkeypatch):
    """Which imports `torch.distributed.tensor`; others cost two comparisons of types, and that in new calls alone."""
    seen = []
    monkeypatch.setattr(sharding, "_is_dtensor", lambda x: seen.append(type(x)))
    x = torch.randn(1, 2, 8, 16)
    sdpa(x, x, x)
    cudnn_sdpa.rms_norm(x, torch.nn.Parameter(torch.ones(16)))
    cudnn_sdpa.conv2d(torch.ones(1, 2, 4, 4), torch.ones(3, 2, 2, 2), stride=2)
    assert not seen
    kind = type("Subclass", (torch.Tensor,), {})
    cudnn_sdpa.rms_norm(x.as_subclass(kind))
    assert kind in seen
