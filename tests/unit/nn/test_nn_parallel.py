"""Modules with separate projections, under PyTorch's tensor parallelism, sequence parallelism and FSDP2."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from cudnn_sdpa import OptionError, UnsupportedError, nn
from cudnn_sdpa.distributed import shard
from cudnn_sdpa.nn import parallel_plan

if not dist.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

E = 32


def attention(packed=False, **options):
    options = {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "sinks": True, **options}
    if "context_dim" not in options:
        options = {"is_causal": True, "rope": nn.RotaryEmbedding(head_dim=8), **options}
    return drawn(nn.Attention(E, packed=packed, **options))


def swiglu(packed=False):
    return drawn(nn.SwiGLU(E, 48, bias=True, packed=packed))


def layer(packed=False, **options):
    rope = nn.RotaryEmbedding(head_dim=8)
    options = {"num_kv_heads": 2, "is_causal": True, "rope": rope, **options}
    return drawn(nn.TransformerLayer(E, 4, 48, packed=packed, **options))


def drawn(module):
    """The module with random parameters, also where they would be zeros or ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return module


# One process.


@pytest.mark.parametrize("make", [attention, swiglu, layer, lambda packed: attention(packed, context_dim=E)])
def test_packed_and_separate_modules_load_each_others_weights(make):
    x = torch.randn(2, 6, E)
    for first in (False, True):
        one, other = make(first), make(not first)
        given = (x, x.flip(1)) if getattr(one, "context_dim", None) else (x,)
        assert str(other.load_state_dict(one.state_dict())) == "<All keys matched successfully>"
        torch.testing.assert_close(other(*given), one(*given))
        same = make(first)
        same.load_state_dict(one.state_dict())
        assert torch.equal(same(*given), one(*given))


def test_separate_projections_are_shown_and_initialized():
    module = nn.Attention(E, 4, packed=False, qkv_bias=True)
    assert "packed=False" in repr(module)
    assert "packed" not in repr(nn.Attention(E, 4))
    before = module.q_proj.weight.clone()
    module.reset_parameters()
    assert not torch.equal(module.q_proj.weight, before)
    assert not module.q_proj.bias.any()
    mlp = nn.SwiGLU(E, 48, packed=False)
    before = mlp.up_proj.weight.clone()
    mlp.reset_parameters()
    assert not torch.equal(mlp.up_proj.weight, before)
    with pytest.raises(OptionError, match="packed"):
        nn.SwiGLU(E, 48, packed=1)


def test_caches_and_positions_work_with_separate_projections():
    packed, separate = attention(True).eval(), attention().eval()
    separate.load_state_dict(packed.state_dict())
    x, positions = torch.randn(2, 6, E), torch.arange(6).flip(0)
    torch.testing.assert_close(separate(x, position_ids=positions), packed(x, position_ids=positions))
    rotations = packed.rope(positions)
    torch.testing.assert_close(separate(x, rotations=rotations), packed(x, rotations=rotations))
    found = []
    for module in (packed, separate):
        cache = nn.KVCache(batch=2, max_length=16, heads=2, head_dim=8, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            found.append(torch.cat([module(part, step=cache.reserve(3)) for part in x.split(3, dim=1)], 1))
    torch.testing.assert_close(*found)


def test_plans_name_every_projection():
    model = torch.nn.Sequential(layer(), layer(activation="gelu"))
    plan = parallel_plan(model)
    kinds = {name: type(style) for name, style in plan.items()}
    first = {f"0.self_attn.{name}_proj": ColwiseParallel for name in "qkv"}
    first |= {"0.mlp.gate_proj": ColwiseParallel, "0.mlp.up_proj": ColwiseParallel}
    assert kinds.items() >= first.items()
    assert kinds["0.self_attn.out_proj"] is kinds["0.mlp.down_proj"] is kinds["1.mlp.linear2"] is RowwiseParallel
    assert not any("norm" in name for name in kinds)
    assert type(parallel_plan(model, sequence_parallel=True)["1.norm2"]) is SequenceParallel
    named = torch.nn.ModuleDict({"block_norm": nn.RMSNorm(E), "layer": layer(qk_norm=1e-3)})
    norms = {name for name in parallel_plan(named, sequence_parallel=True) if "norm" in name}
    assert norms == {"block_norm", "layer.norm1", "layer.norm2"}


def test_plans_are_refused_for_packed_projections_and_for_nothing():
    with pytest.raises(UnsupportedError, match=r"0\.self_attn has packed(.|\n)*0\.mlp has packed(.|\n)*packed=False"):
        parallel_plan(torch.nn.Sequential(layer(True)))
    with pytest.raises(OptionError, match="module: got Linear"):
        parallel_plan(torch.nn.Linear(2, 2))


# Two processes.


def gradients(module):
    found = {}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def assert_close(found, wanted, name):
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, msg=lambda text: f"{name}: {text}")


def check_tensor_parallel(make, arguments, options, sequence_parallel):
    """Forward and gradients are those of one process; so are checkpoints, which a packed module loads."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = make(**options)
    inputs = [torch.randn(2, 8, E, requires_grad=True) for _ in range(arguments)]
    wanted = module(*inputs)
    grad = torch.randn(wanted.shape)
    wanted.backward(grad)
    exact, of_inputs = gradients(module), [x.grad for x in inputs]
    module.zero_grad()
    given = [x.detach().clone().requires_grad_() for x in inputs]
    parallel = parallelize_module(module, mesh, parallel_plan(module, sequence_parallel=sequence_parallel))
    split = [distribute_tensor(x, mesh, [Shard(1)]).to_local() for x in given] if sequence_parallel else given
    split = [x.detach().requires_grad_() for x in split]
    out = parallel(*split)
    part = distribute_tensor(wanted.detach(), mesh, [Shard(1)]).to_local() if sequence_parallel else wanted
    assert_close(out, part.detach(), "out")
    out.backward(distribute_tensor(grad, mesh, [Shard(1)]).to_local() if sequence_parallel else grad)
    for x, of_all in zip(split, of_inputs, strict=True):
        mine = distribute_tensor(of_all, mesh, [Shard(1)]).to_local() if sequence_parallel else of_all
        assert_close(x.grad, mine, "x")
    for name, found in gradients(parallel).items():
        assert_close(found, exact[name], name)
    state = get_model_state_dict(parallel, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        packed = make(packed=True, **options)
        packed.load_state_dict(state)
        assert_close(packed(*inputs), wanted, "packed")
    return sorted(type(parameter).__name__ for parameter in parallel.parameters())


CASES = {
    "attention": (attention, 1, {}),
    "attention, one key head each": (attention, 1, {"num_kv_heads": 2, "sinks": False, "qkv_bias": False}),
    "attention, norms of heads": (attention, 1, {"qk_norm": 1e-3}),
    "attention, norms of heads without rotations": (attention, 1, {"qk_norm": 1e-3, "rope": None}),
    "cross-attention": (attention, 2, {"context_dim": E}),
    "swiglu": (swiglu, 1, {}),
    "layer": (layer, 1, {}),
    "layer with sinks and layer norms": (
        layer,
        1,
        {"sinks": True, "norm": "layer_norm", "activation": "gelu", "bias": True},
    ),
    "layer, norms last": (layer, 1, {"norm_first": False}),
    "layer, norms of heads": (layer, 1, {"qk_norm": 1e-3}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_modules_compute_the_same(ranks, name):
    make, arguments, options = CASES[name]
    for kinds in ranks(check_tensor_parallel, make, arguments, options, False):
        assert "DTensor" in kinds


def collectives(make, options, sequence_parallel):
    """How many collectives of each kind a forward and a backward pass have."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = make(**options)
    parallelize_module(parallel, mesh, parallel_plan(parallel, sequence_parallel=sequence_parallel))
    given = [torch.randn(2, 8, E, requires_grad=True) for _ in range(2 if "context_dim" in options else 1)]
    with CommDebugMode() as forward:
        out = parallel(*given)
    with CommDebugMode() as backward:
        out.backward(torch.randn_like(out))
    passes = forward, backward
    return [{str(kind).split(".")[-1]: n for kind, n in each.get_comm_counts().items()} for each in passes]


def gathered(count):
    return {"all_gather_into_tensor": count, "reduce_scatter_tensor": count}


CROSS = {"context_dim": E}
COLLECTIVES = [
    (layer, {}, False, {"all_reduce": 2}, {"all_reduce": 2}),
    (layer, {}, True, gathered(2), gathered(2) | {"all_reduce": 2}),  # gradients of the norms' weights, too
    (attention, {"qk_norm": 1e-3, "sinks": False}, False, {"all_reduce": 1}, {"all_reduce": 3}),
    (swiglu, {}, False, {"all_reduce": 1}, {"all_reduce": 1}),
    (swiglu, {}, True, gathered(1), gathered(1)),
    (attention, CROSS | {"sinks": False}, False, {"all_reduce": 1}, {"all_reduce": 2}),
]


@pytest.mark.parametrize(("make", "options", "sequence_parallel", "forward", "backward"), COLLECTIVES)
def test_how_often_a_module_communicates(ranks, make, options, sequence_parallel, forward, backward):
    """Attention and a feed-forward network once each, and once for each sequence backward: not for each projection."""
    for found in ranks(collectives, make, options, sequence_parallel):
        assert found == [forward, backward]


def check_names():
    """Tokens and context may be given by name, and a context may be projected before."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, context = torch.randn(2, 2, 8, E)
    own, cross = attention(), attention(context_dim=E)
    wanted = own(x), cross(x, context)
    found = []
    for sequence_parallel in (False, True):
        parallel = [copy.deepcopy(module) for module in (own, cross)]
        for module in parallel:
            parallelize_module(module, mesh, parallel_plan(module, sequence_parallel=sequence_parallel))
        first, second = parallel
        if sequence_parallel:
            x, context = (distribute_tensor(each, mesh, [Shard(1)]).to_local() for each in (x, context))
            wanted = [distribute_tensor(each.detach(), mesh, [Shard(1)]).to_local() for each in wanted]
        made = first(x=x), first(x, None), second(x=x, context=context), second(x, second.project_context(context))
        for number, out in enumerate(made):
            assert_close(out, wanted[number // 2], f"{number}, {sequence_parallel}")
            found.append(tuple(out.shape))
        with pytest.raises(OptionError, match="x: got arguments named hidden_states; expected tokens by position"):
            first(hidden_states=x)
    return found


def test_tokens_may_be_given_by_name(ranks):
    for found in ranks(check_names):
        assert found == [(2, 8, E)] * 4 + [(2, 4, E)] * 4


def check_clipping():
    """`clip_grad_norm_` scales all gradients, of norms, too, as it does in one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = layer(norm="layer_norm", bias=True, qk_norm=1e-3)
    x, grad = torch.randn(2, 2, 8, E)
    parallel = copy.deepcopy(module)
    module(x).backward(grad)
    wanted = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    parallelize_module(parallel, mesh, parallel_plan(parallel, sequence_parallel=True))
    for norm in (parallel.self_attn.q_norm, parallel.self_attn.k_norm):
        norm.weight = torch.nn.Parameter(distribute_tensor(norm.weight, mesh, [Replicate()]))
    parallel.to(torch.float64).to(torch.float32)  # makes new parameters, as `to_empty` does
    x, grad = (distribute_tensor(each, mesh, [Shard(1)]).to_local() for each in (x, grad))
    parallel(x).backward(grad)
    found = torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0).full_tensor()
    assert_close(found, wanted, "norm")
    exact = gradients(module)
    for name, gradient in gradients(parallel).items():
        assert_close(gradient, exact[name], name)
    return [str(parameter.grad.placements) for name, parameter in parallel.named_parameters() if "norm" in name]


def test_gradients_are_clipped_alike(ranks):
    for placements in ranks(check_clipping):
        assert placements == ["(Replicate(),)"] * 6


def check_inference():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = layer(sinks=True)
    x = torch.randn(2, 8, E)
    parallel = parallelize_module(copy.deepcopy(module), mesh, parallel_plan(module))
    d = distribute_tensor(x, mesh, [Shard(1)])
    with torch.inference_mode():
        assert_close(parallel(x), module(x), "layer")
        assert_close(module.norm1(d).full_tensor(), module.norm1(x), "norm")
        return module.norm1(d).is_inference()


def test_inference_mode(ranks):
    assert ranks(check_inference) == [True, True]


def check_compiled_layer(sequence_parallel):
    """`torch.compile` traces a layer as one graph, in which the tokens become DTensors, and computes the same."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallel = layer()
    parallelize_module(parallel, mesh, parallel_plan(parallel, sequence_parallel=sequence_parallel))
    x, grad = torch.randn(2, 2, 8, E)
    if sequence_parallel:
        x, grad = (distribute_tensor(each, mesh, [Shard(1)]).to_local() for each in (x, grad))
    found = []
    for function in (parallel, torch.compile(parallel, backend="aot_eager", fullgraph=True, dynamic=False)):
        tokens = x.clone().requires_grad_()
        out = function(tokens)
        out.backward(grad)
        found.append({"out": out.detach(), "x": tokens.grad, **gradients(parallel)})
        parallel.zero_grad()
    assert len(found[0]) == len(found[1]) == 2 + len(list(parallel.parameters()))
    for name, eager in found[0].items():
        assert_close(found[1][name], eager, name)
    return tuple(out.shape)


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_compiled_layer_is_one_graph(ranks, sequence_parallel):
    for shape in ranks(check_compiled_layer, sequence_parallel):
        assert shape == (2, 4 if sequence_parallel else 8, E)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CASES if "layer" in name or name in ("swiglu", "attention")])
def test_sequence_parallel_modules_compute_the_same(ranks, name):
    make, arguments, options = CASES[name]
    for kinds in ranks(check_tensor_parallel, make, arguments, options, True):
        assert "DTensor" in kinds


def check_gathered_heads(gathered):
    """Gradients of the norms of heads that every rank has all of, or of divided queries and keys alone."""
    mesh, module = init_device_mesh("cpu", (dist.get_world_size(),)), attention(qk_norm=1e-3, sinks=False)
    x, grad = torch.randn(2, 2, 8, E)
    module(x).backward(grad)
    exact = gradients(module)
    module.zero_grad()
    styles = {f"{name}_proj": ColwiseParallel(output_layouts=Replicate()) for name in gathered}
    parallelize_module(module, mesh, styles)(x).backward(grad)
    for name, found in gradients(module).items():
        assert_close(found, exact[name], name)


@pytest.mark.parametrize("gathered", ["q", "qkv"])
def test_gathered_heads_are_normalized(ranks, gathered):
    ranks(check_gathered_heads, gathered)


def check_rotations():
    """Of heads that are DTensors: each rank rotates its own; the angles of sharded tokens are sharded, too."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rope = nn.RotaryEmbedding(head_dim=8)
    heads = torch.randn(2, 6, 4, 8, requires_grad=True)
    compared = 0
    for positions in (torch.arange(6), torch.randint(9, (2, 6))):
        angles = rope(positions)
        wanted = rope.rotate(heads, angles)
        (of_wanted,) = torch.autograd.grad(wanted.square().sum(), heads)
        for dim in (0, 1, 2):
            of_angles = {0: -3, 1: -2}.get(dim)
            is_divided = of_angles is not None and -of_angles <= angles[0].dim()
            place = Shard(of_angles % angles[0].dim()) if is_divided else Replicate()
            given = distribute_tensor(heads.detach(), mesh, [Shard(dim)]).requires_grad_()
            rotated = rope.rotate(given, tuple(distribute_tensor(x, mesh, [place]) for x in angles))
            assert rotated.placements == (Shard(dim),)
            compared += 1
            assert_close(rotated.full_tensor().detach(), wanted.detach(), str(dim))
            (gradient,) = torch.autograd.grad(rotated.square().sum(), given)
            assert_close(gradient.full_tensor(), of_wanted, str(dim))
            if not is_divided:
                assert_close(rope.rotate(given, angles).full_tensor().detach(), wanted.detach(), str(dim))
                continue
            with pytest.raises(UnsupportedError, match="cos is a plain tensor") as refused:
                rope.rotate(given, angles)
            assert "q.redistribute(placements=[" in refused.value.suggestion
    with pytest.raises(UnsupportedError, match=r"q is Shard\(3\)"):
        rope.rotate(distribute_tensor(heads.detach(), mesh, [Shard(3)]), angles)
    return compared


def test_rotations_of_dtensors(ranks):
    assert ranks(check_rotations) == [6, 6]  # batch, tokens and heads, with positions for all and for each


def check_distributed_modules():
    """`distribute_module` makes all of a module DTensors; rotations met plain positions there, and raised."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for packed in (True, False):
        for where in (Shard(0), Replicate()):
            module = layer(packed, sinks=True)
            x = torch.randn(2, 8, E)
            wanted = module(x)
            grad = torch.randn(wanted.shape)
            wanted.backward(grad)
            exact = gradients(module)
            module.zero_grad()
            distribute_module(module, mesh)
            out = module(distribute_tensor(x, mesh, [where]))
            assert_close(out.full_tensor().detach(), wanted.detach(), "out")
            out.backward(distribute_tensor(grad, mesh, [where]))
            for name, like in exact.items():
                assert_close(dict(module.named_parameters())[name].grad.full_tensor(), like, name)
            found.append(out.placements)
    return found


def test_modules_of_which_all_is_distributed(ranks):
    assert ranks(check_distributed_modules) == [[(Shard(0),), (Replicate(),)] * 2] * 2


def check_guards():
    """Projections that lose features or whole heads raise; without the guards numbers were wrong in silence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(2, 8, E)
    by_rows = ColwiseParallel()
    rows = {"q_proj": by_rows, "k_proj": by_rows, "v_proj": by_rows}
    cases = [
        (swiglu(True), {"gate_up_proj": by_rows}, 1, "gate_up_proj returned 48 of its 96(.|\n)*packed=False"),
        (attention(True), {"qkv_proj": by_rows}, 1, "qkv_proj returned 32 of its 64(.|\n)*parallel_plan"),
        (
            attention(True, context_dim=E),
            {"q_proj": by_rows, "kv_proj": by_rows},
            2,
            "q_proj returned|kv_proj returned",
        ),
        (
            attention(),
            {"q_proj": by_rows},
            1,
            "q_proj, k_proj and v_proj returned 2, 2 and 2 of their 4, 2 and 2 heads",
        ),
        (attention(), {"k_proj": by_rows, "v_proj": by_rows}, 1, "returned 4, 1 and 1 of their"),
        (attention(), {"q_proj": by_rows, "k_proj": by_rows}, 1, "returned 2, 1 and 2 of their"),
        (
            attention(num_heads=3, num_kv_heads=3, head_dim=8),
            rows,
            1,
            "q_proj returned 12 features, which are no whole",
        ),
    ]
    refused = []
    for module, plan, arguments, message in cases:
        parallel = parallelize_module(module, mesh, plan)
        with pytest.raises(UnsupportedError, match=message) as error:
            parallel(*[x] * arguments)
        refused.append(str(error.value))
    one = attention(num_kv_heads=1, sinks=False)
    wanted = one(x)
    parallel = parallelize_module(one, mesh, {"q_proj": by_rows, "out_proj": RowwiseParallel()})
    assert_close(parallel(x).detach(), wanted.detach(), "one key head")
    return refused


def test_projections_that_lose_heads_are_refused(ranks):
    first, second = ranks(check_guards)
    assert first == second
    assert len(first) > 4


class Model(torch.nn.Module):
    """Two layers and a norm, between an embedding and a head that each process has whole."""

    def __init__(self, packed=False):
        super().__init__()
        self.layers = torch.nn.ModuleList([layer(packed), layer(packed, sinks=True, qk_norm=1e-3)])
        self.norm = drawn(nn.RMSNorm(E))

    def forward(self, x):
        for each in self.layers:
            x = each(x)
        return self.norm(x)


def check_fsdp(data, tensor, sequence_parallel):
    """FSDP2 over one mesh dimension, tensor and sequence parallelism over the other: as one process.

    The model gets its memory and its weights afterwards.
    """
    mesh, whole = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp")), Model()
    x = torch.randn(2 * data, 8, E)
    wanted = whole(x)
    wanted.square().mean().backward()
    exact = gradients(whole)
    with torch.device("meta"):
        model = Model()
    parallelize_module(model, mesh["tp"], parallel_plan(model, sequence_parallel=sequence_parallel))
    for each in model.layers:
        fully_shard(each, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.to_empty(device="cpu")
    set_model_state_dict(model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    placements = [Shard(0), Shard(1) if sequence_parallel else Replicate()]
    mine = distribute_tensor(x, mesh, placements).to_local()
    out = model(mine)
    assert_close(out.detach(), distribute_tensor(wanted.detach(), mesh, placements).to_local(), "out")
    parts = tensor if sequence_parallel else 1
    (out.square().mean() / parts).backward()
    for name, found in gradients(model).items():
        assert_close(found, exact[name], name)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        packed = Model(True)
        packed.load_state_dict(state)
        assert_close(packed(x), wanted, "checkpoint")
    return tuple(mine.shape)


@pytest.mark.sample(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fsdp_with_tensor_parallelism(ranks, sequence_parallel):
    tokens = 4 if sequence_parallel else 8
    assert ranks(check_fsdp, 1, 2, sequence_parallel) == [(2, tokens, E)] * 2
    assert ranks(check_fsdp, 2, 1, sequence_parallel) == [(2, 8, E)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fsdp_with_tensor_parallelism_in_four_processes(four_ranks, sequence_parallel):
    tokens = 4 if sequence_parallel else 8
    assert four_ranks(check_fsdp, 2, 2, sequence_parallel) == [(2, tokens, E)] * 4


def check_context_and_tensor_parallel(method):
    """Tokens over one mesh dimension, heads over the other: values and gradients of one process in float64."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    options = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "window_size": None if method == "ring" else (5, 0)}
    whole = attention(**options).double()
    parallel = attention(**options, cp_group=mesh["cp"], cp_method=method).double()
    parallel.load_state_dict(whole.state_dict())
    x, grad = torch.randn(2, 16, E, dtype=torch.float64).requires_grad_(), torch.randn(2, 16, E, dtype=torch.float64)
    wanted = whole(x)
    wanted.backward(grad)
    parallelize_module(parallel, mesh["tp"], parallel_plan(parallel))
    assert parallel.k_proj.weight.to_local().shape[0] == 16
    mine = shard(x.detach(), 1, mesh["cp"]).requires_grad_()
    out = parallel(mine)
    out.backward(shard(grad, 1, mesh["cp"]))
    found = {"out": (out, shard(wanted, 1, mesh["cp"])), "x": (mine.grad, shard(x.grad, 1, mesh["cp"]))}
    for name, parameter in parallel.named_parameters():
        total = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        dist.all_reduce(total, group=mesh["cp"].get_group())
        found[name] = total, whole.get_parameter(name).grad
    for name, (one, other) in found.items():  # the LSE, of which gradients are made, is kept in float32
        assert (one - other).norm() < 1e-6 * other.norm(), (name, (one - other).norm() / other.norm())
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_context_parallelism_with_tensor_parallelism_in_four_processes(four_ranks, method):
    parameters = len(list(attention().parameters()))
    assert four_ranks(check_context_and_tensor_parallel, method) == [2 + parameters] * 4
