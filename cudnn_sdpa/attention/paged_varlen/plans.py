"""Plans of attention by the kernel for pages: their keys, the tiles of the kernel, its argument.

A plan serves any number of tokens, sequences and pages: these, and all strides, are in an array that the launch reads.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.paged.arguments import LATENT_DIMS, PagedArguments
from cudnn_sdpa.attention.paged_varlen.arguments import PagedVarlenArguments
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.plans import providers
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel, Struct

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "paged.cu"

#: The kernel's argument, and the part of it that is the same for calls of the same layouts.
ARGUMENT, SIZES = Struct(SOURCE, "Paged"), Struct(SOURCE, "Sizes")

#: The compute capabilities with asynchronous copies, with conversions of FP8, and with WGMMA.
FIRST_SM, FIRST_FP8_SM, HOPPER = 80, 89, 90

#: The forms of the kernel: for at most 64 rows of a sequence, and for more.
FEW, MANY = "few", "many"

#: Maximum number of parts of a sequence's keys in batch-invariant calls, and the minimum number of keys of a part.
MAX_PARTS, MIN_PART = 16, 2048

#: Bytes of shared memory that a block can have, by compute capability; others have the least.
_SHARED = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10, 110: 227 << 10}
_MIN_SHARED = 99 << 10

#: Bytes of a multiprocessor's shared memory that each block takes besides its own.
_RESERVED = 1 << 10

_REGISTERS = 65536  #: of a multiprocessor

#: What a block keeps besides tiles: barriers and items; then the addresses of the keys and values of two tiles.
_FIXED_BYTES, _BYTES_OF_ROW = 1400, 32

#: Chosen at random: memory that was never written does not hold it.
_TOKEN = secrets.randbits(62)

_DTYPES = {torch.float16: 1, torch.bfloat16: 2}

#: Calls that the kernel serves: of packed queries, and of as many for each sequence.
OnPages = PagedVarlenArguments | PagedArguments


@dataclass(frozen=True)
class Spec:
    """A call without its data and sizes.

    Attributes:
        rows: Rows of parts that scratch memory has room for, in batch-invariant calls; 0: as many as blocks fill.
    """

    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    dim: int
    dim_v: int
    group: int
    page_size: int
    form: str
    has_softcap: bool
    has_tree: bool
    with_lse: bool
    rows: int = 0

    @classmethod
    def of(cls, call: OnPages) -> Spec:
        if isinstance(call, PagedArguments):
            batch, heads, longest, dim = call.q.shape
            tokens, is_invariant, tree = batch * longest, False, None
        else:
            tokens, heads, dim = call.q.shape
            batch, longest = call.batch, min(call.max_seqlen_q, tokens)
            is_invariant, tree = call.batch_invariant, call.tree_mask
        heads_kv = call.k.shape[1]
        group = heads // heads_kv
        form, rows = FEW if longest * group <= 64 and not is_invariant else MANY, 0
        if is_invariant:
            split = min(tokens * group, batch * 128) * heads_kv  # one row tile of each sequence at most
            rows = 1 << (split * min(MAX_PARTS, -(-call.max_kv_len // MIN_PART)) - 1).bit_length()
        return cls(
            q_dtype=call.q.dtype,
            kv_dtype=call.k.dtype,
            dim=dim,
            dim_v=call.v.shape[3],
            group=group,
            page_size=call.page_size,
            form=form,
            has_softcap=call.softmax.is_capped,
            has_tree=tree is not None,
            with_lse=call.with_lse,
            rows=rows,
        )

    def key(self, target: Target, device: int | None) -> PlanKey:
        vector = functools.partial(TensorLayout.contiguous, dtype=torch.int32)
        ones = {name: vector((1,)) for name in ("page_table", "page_table_v", "seq_lens_kv", "cu_seqlens_q")}
        ones |= {name: TensorLayout.contiguous((1,), torch.float32) for name in ("sinks", "k_scale", "v_scale")}
        inputs = [
            Operand("q", TensorLayout.contiguous((self.group, self.dim), self.q_dtype)),
            Operand("k_pages", TensorLayout.contiguous((self.page_size, self.dim), self.kv_dtype)),
            Operand("v_pages", TensorLayout.contiguous((self.page_size, self.dim_v), self.kv_dtype)),
            *(Operand(name, layout) for name, layout in ones.items()),
            Operand("tree_mask", TensorLayout.contiguous((1,), torch.bool)),
            Operand("seq_lens_q", vector((1,))),
            Operand("scale", HOST_SCALAR, Role.SCALAR),
            Operand("sizes", TensorLayout.contiguous((len(SIZES.names),), torch.int64), Role.HOST),
        ]
        outputs = [Operand("out", TensorLayout.contiguous((self.group, self.dim_v), self.q_dtype))]
        if self.with_lse:
            outputs.append(Operand("lse", TensorLayout.contiguous((1,), torch.float32)))
        options: dict[str, object] = {"form": self.form, "softcap": self.has_softcap, "tree_mask": self.has_tree}
        if self.rows:
            options["rows"] = self.rows
        return paged_varlen_forward.key(inputs, outputs, options, target, device=device)


def reasons_against(call: OnPages, target: Target) -> list[str]:
    """Why the kernel cannot serve a call on a target; empty if it can."""
    reasons, fp8 = [], call.k_pages.dtype in FP8_DTYPES
    if target.sm < FIRST_SM:
        reasons.append(f"it needs compute capability 8.0; {target} has {target.sm / 10}")
    elif fp8 and target.sm < FIRST_FP8_SM:
        reasons.append(f"pages in FP8 need compute capability 8.9; {target} has {target.sm / 10}")
    if (call.q.shape[-1], call.v.shape[3]) == LATENT_DIMS:
        needed, limit = Tiles.of(MANY, LATENT_DIMS, fp8=False, sm=target.sm).shared, _SHARED.get(target.sm, _MIN_SHARED)
        if fp8:
            reasons.append("head dims of 576 and 512 need pages in the dtype of the queries")
        elif needed > limit:
            need = f"{needed / 1024:.0f} KB of shared memory for a block"
            reasons.append(f"head dims of 576 and 512 need {need}; {target} has {limit >> 10} KB")
    return reasons or known_issues.reasons_against(Spec.of(call).key(target, None))


def _refuse(call: OnPages, target: Target) -> None:
    if reasons := reasons_against(call, target):
        raise UnsupportedError("sdpa_paged" if isinstance(call, PagedArguments) else "sdpa_paged_varlen", reasons)


@dataclass(frozen=True)
class PagedForward:
    """A call of `sdpa_paged_varlen`, which several providers may serve."""

    call: PagedVarlenArguments

    def key(self, target: Target, device: int | None) -> PlanKey:
        """The key of the own kernel's plan."""
        return key_of(self.call, target, device)


def chosen_key(spec: PagedForward, target: Target, device: int | None) -> PlanKey:
    """The key of a call's plan, of the first provider in force that serves it."""
    if not providers.may_be_others():
        return spec.key(target, device)
    found: PlanKey = providers.chooser().key_of(spec, target, device, providers.active())
    return found


def keys(call: PagedVarlenArguments, target: Target, device: int | None) -> Iterator[PlanKey]:
    if not call.is_empty:
        yield chosen_key(PagedForward(call), target, device)


def key_of(call: OnPages, target: Target, device: int | None) -> PlanKey:
    _refuse(call, target)
    return Spec.of(call).key(target, device)


def part_of_keys(call: PagedVarlenArguments) -> int:
    """Keys of a part in batch-invariant calls, a number that no other sequence changes; 0 in others."""
    return max(MIN_PART, 1 << (-(-call.max_kv_len // MAX_PARTS) - 1).bit_length()) if call.batch_invariant else 0


def _multiprocessors(target: Target) -> int:
    return int(dict(target.properties)["multiProcessorCount"]) or 1


# Programs.


@dataclass(frozen=True)
class Tiles:
    """How a kernel divides its work; the macros of `paged.cu` of the same names.

    Attributes:
        keys: N, the keys of a tile.
        raw: Tiles of FP8 pages in shared memory.
        columns: Warpgroups that compute the same rows, and divide the columns of the values.
        blocks: Blocks that share a multiprocessor.
        registers: Those of a thread that computes, and of one that loads.
        shared: Bytes of shared memory.
    """

    groups: int
    columns: int
    keys: int
    stages: int
    raw: int
    blocks: int
    registers: tuple[int, int]
    shared: int

    @property
    def rows(self) -> int:
        return 64 * self.groups // self.columns

    @classmethod
    def of(cls, form: str, dims: tuple[int, int], *, fp8: bool, sm: int) -> Tiles:
        """The tiles for queries and values of these dims.

        Hopper's were measured on an H100; other GPUs have those that fit.
        """
        columns = 2 if dims == LATENT_DIMS else 1  # keys and values then have the same tiles, as wide as keys
        dim, dim_v = (-(-x // 64) * 64 for x in dims)
        of_raw = sum(-(-x // 128) * 128 for x in dims) if fp8 else 0
        of_key = 2 * (dim + dim_v if columns == 1 else dim)
        is_hopper = sm == HOPPER
        groups = 2 if columns == 2 or (is_hopper and form == MANY and not (fp8 and dim > 192)) else 1
        blocks = 2 if is_hopper and form == FEW and not fp8 and of_key <= 512 else 1
        keys = 64
        if is_hopper and of_key <= 512 and (form == MANY) != fp8:
            keys = 128
        elif not is_hopper and of_key > 512:
            keys = 32
        limit = _SHARED.get(sm, _MIN_SHARED)
        fixed = _FIXED_BYTES + _BYTES_OF_ROW * keys + (groups // columns * 128 * dim if dim > 192 else 16)
        room = (limit // blocks - (blocks - 1) * _RESERVED - fixed) // keys
        stages = max(1, min(2 if fp8 or not is_hopper else 3 if blocks == 2 else 6, (room - of_raw) // of_key))
        raw = max(1, min(6, (room - stages * of_key) // of_raw)) if fp8 else 1
        threads = 128 * (groups + (3 if fp8 else 1))
        computing = 0
        if is_hopper:
            computing = {1: 232 if blocks == 1 else 200, 2: 176 if fp8 else 224}[groups]
        of_thread = min(248, _REGISTERS // (threads * blocks) // 8 * 8)
        loading = (of_thread * threads - computing * 128 * groups) // (threads - 128 * groups) // 8 * 8
        shared = fixed + keys * (stages * of_key + raw * of_raw)
        return cls(groups, columns, keys, stages, raw, blocks, (computing, max(24, min(loading, 232))), shared)


@functools.cache
def _kernel(shared: int, hopper: bool, **defines: int) -> Kernel:
    return Kernel(SOURCE, "paged_attention", defines | {"SHARED": shared}, shared, architecture_specific=hopper)


@functools.partial(KernelOp, folder=FOLDER)
def paged_varlen_forward(key: PlanKey) -> KernelProgram:
    """Attention of new tokens on pages, by one kernel."""
    layouts, options, sm = {x.name: x.layout for x in (*key.inputs, *key.outputs)}, key.option_values, key.target.sm
    (group, dim), (page_size, dim_v), cache = layouts["q"].shape, layouts["v_pages"].shape, layouts["k_pages"].dtype
    fp8 = cache in FP8_DTYPES
    tiles = Tiles.of(str(options["form"]), (dim, dim_v), fp8=fp8, sm=sm)
    kernel = _kernel(
        tiles.shared,
        sm == HOPPER,
        DTYPE=_DTYPES[layouts["q"].dtype],
        CACHE=FP8_DTYPES.index(cache) + 1 if fp8 else 0,
        D=dim,
        DV=dim_v,
        G=group,
        PS=page_size,
        GROUPS=tiles.groups,
        COLUMNS=tiles.columns,
        N=tiles.keys,
        STAGES=tiles.stages,
        RAW=tiles.raw,
        BLOCKS=tiles.blocks,
        LEAST=256 // tiles.keys,
        SOFTCAP=int(bool(options["softcap"])),
        TREE=int(bool(options["tree_mask"])),
        WGMMA=int(sm == HOPPER),
        COMPUTE_REGISTERS=tiles.registers[0],
        LOAD_REGISTERS=tiles.registers[1],
    )
    blocks = tiles.blocks * _multiprocessors(key.target)
    rows = int(str(options.get("rows", 0))) or 2 * blocks * tiles.rows
    fields = ARGUMENT.filled(token=_TOKEN, scale=0, sizes=dict.fromkeys(SIZES.names, 0))
    names = [x.name for x in (*key.inputs, *key.outputs)] + ["partial", "sums", "ready"]
    return KernelProgram(
        calls=[KernelCall(kernel, blocks, 128 * (tiles.groups + (3 if fp8 else 1)))],
        fields=fields,
        slots={name: ARGUMENT.indices(_FIELDS.get(name, name))[0] for name in names},
        scratch={"partial": (rows, -(-dim_v // 64) * 64), "sums": (rows, 2), "ready": (rows, 2 * tiles.columns)},
        knobs={"rows": tiles.rows, "keys": tiles.keys, "stages": tiles.stages},
    )


#: The fields of the kernel's argument that operands have other names for.
_FIELDS = {
    "k_pages": "k",
    "v_pages": "v",
    "page_table": "table_k",
    "page_table_v": "table_v",
    "seq_lens_kv": "lengths",
    "cu_seqlens_q": "ends",
    "seq_lens_q": "counts",
    "tree_mask": "tree",
    "sizes": "sizes.batch",
}
