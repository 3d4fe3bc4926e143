"""Plans of `kernels.attention`: the kernels of a call, their compile-time options, the sizes of their tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cudnn_sdpa.engine.launch import Layout
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.key import HOST_SCALAR, Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout, contiguous_stride, dense_like, dense_stride_like
from cudnn_sdpa.graph.target import Target
from cudnn_sdpa.kernels.arguments import FUSED, MAX_FUSED_DIM, NAIVE, TILED, Gradient, KernelArguments, Needs
from cudnn_sdpa.plans.kernel_plan import KernelCall, KernelOp, KernelProgram
from cudnn_sdpa.plans.nvrtc import Kernel

FOLDER = Path(__file__).parent

#: The first compute capability with asynchronous copies.
FIRST_SM = 80

#: Shared memory that a block can have, in KiB, by compute capability; others have `_MIN_SHARED`.
_SHARED = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_MIN_SHARED = 99

#: Bytes of a multiprocessor's shared memory that each block takes besides its own.
_RESERVED = 1024

#: Maximum number of blocks of a grid; kernels take several tiles each beyond it.
_MAX_BLOCKS = 2**31 - 1

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MASKS = {torch.bool: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4}

#: The tensors of the struct `Attention` of common.cuh: an address and four strides each.
_STRIDED = ("q", "k", "v", "mask", "out", "grad_out", "grad_q", "grad_k", "grad_v")
_FLAT = ("statistics", "scores", "delta", "grad_scores", "lse")
_SIZES = ("batch", "heads", "heads_kv", "sq", "skv", "dim", "scale")
_NAMES = (*(f"{name}.{part}" for name in _STRIDED for part in range(5)), *_FLAT, *_SIZES)
_PLACES = {name: _NAMES.index(name if name in _NAMES else f"{name}.0") for name in (*_STRIDED, *_FLAT, "scale")}


@dataclass(frozen=True, slots=True)
class Spec:
    """A call without data, forward or backward.

    Attributes:
        mask: The mask as it is broadcast to all scores, with strides of 0; None without one.
        grad_out: None in a forward call, and so is `needs`.
        vectors: Whether memory is read 16 bytes at a time.
        keeps_lse: Whether the log-sum-exp of each row is kept, as by `sdpa`, and not its statistics.
    """

    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    mask: TensorLayout | None
    out: TensorLayout
    mode: str
    is_causal: bool
    with_statistics: bool
    grad_out: TensorLayout | None = None
    needs: Needs | None = None
    vectors: bool = False
    keeps_lse: bool = False

    @classmethod
    def of(cls, call: KernelArguments) -> Spec:
        mask = None if call.mask is None else expanded(TensorLayout.of(call.mask), call.q.shape, call.k.shape[2])
        found = cls(
            q=TensorLayout.of(call.q),
            k=TensorLayout.of(call.k),
            v=TensorLayout.of(call.v),
            mask=mask,
            out=TensorLayout(*results(call)[0]),
            mode=call.mode,
            is_causal=call.is_causal,
            with_statistics=call.with_statistics,
        )
        return replace(found, vectors=found.can_read_vectors)

    @classmethod
    def of_gradient(cls, of: Gradient) -> Spec:
        found = replace(
            cls.of(of.call),
            mode=FUSED if of.call.q.shape[3] <= MAX_FUSED_DIM else TILED,
            with_statistics=True,
            out=TensorLayout.of(of.out),
            grad_out=TensorLayout.of(of.grad_out),
            needs=Needs(*of.needs),
        )
        return replace(found, vectors=found.can_read_vectors)

    @property
    def is_empty(self) -> bool:
        return 0 in self.q.shape or 0 in self.k.shape

    @property
    def can_read_vectors(self) -> bool:
        """Whether head vectors are dense and aligned to 16 bytes, so that the fused kernels read 16 bytes at a time."""
        layouts = [self.q, self.k, self.v, self.out, *([] if self.grad_out is None else [self.grad_out])]
        return self.mode == FUSED and all(map(has_vectors, layouts))

    def inputs(self) -> list[Operand]:
        found = [Operand("q", self.q), Operand("k", self.k), Operand("v", self.v)]
        found += [] if self.mask is None else [Operand("mask", self.mask)]
        if self.grad_out is not None:
            found += [Operand("out", self.out), Operand("grad_out", self.grad_out)]
            found.append(self.statistics)
        return [*found, Operand("scale", HOST_SCALAR, Role.SCALAR)]

    def outputs(self) -> list[Operand]:
        if self.needs is None:
            return [Operand("out", self.out), *([self.statistics] * self.with_statistics)]
        found = []
        if self.needs.q or self.needs.mask:
            found.append(Operand("grad_q", dense_like(self.q)))
        if self.needs.k or self.needs.v:
            found += [Operand("grad_k", dense_like(self.k)), Operand("grad_v", dense_like(self.v))]
        if self.needs.mask:
            scores = (*self.q.shape[:3], self.k.shape[2])
            found.append(Operand("grad_scores", TensorLayout.contiguous(scores, torch.float32)))
        return found

    @property
    def statistics(self) -> Operand:
        name, numbers = ("lse", 1) if self.keeps_lse else ("statistics", 2)
        return Operand(name, TensorLayout.contiguous((*self.q.shape[:3], numbers), torch.float32))

    def key(self, target: Target, device: int | None) -> PlanKey:
        if self.q.dtype not in _DTYPES:
            given = str(self.q.dtype).removeprefix("torch.")
            reason = f"the kernels take float32, float16 and bfloat16; {given} runs on the CPU only"
            raise UnsupportedError("kernels.attention", [reason], "float32, with q.float()")
        if target.sm < FIRST_SM:
            raise UnsupportedError(
                "kernels.attention", [f"it needs compute capability 8.0; {target} has {target.sm / 10}"]
            )
        options: dict[str, object] = {"is_causal": self.is_causal, "vectors": self.vectors}
        operation = attention_forward if self.needs is None else attention_backward
        if self.needs is None:
            options["mode"] = self.mode
        return operation.key(self.inputs(), self.outputs(), options, target, device=device)


def keys(call: KernelArguments | Gradient, target: Target, device: int | None) -> Iterator[PlanKey]:
    spec = Spec.of_gradient(call) if isinstance(call, Gradient) else Spec.of(call)
    if not spec.is_empty:
        yield spec.key(target, device)


def results(call: KernelArguments) -> tuple[Layout, Layout]:
    q = call.q
    rows = (*q.shape[:3], 2)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        (tuple(q.shape), dense_stride_like(q.shape, q.shape, q.stride()), q.dtype),
        (rows, contiguous_stride(rows), exact),
    )


def expanded(mask: TensorLayout, shape_q: Sequence[int], skv: int) -> TensorLayout:
    """The layout of a mask for all scores, with strides of 0 where it is broadcast."""
    missing = 4 - len(mask.shape)
    sizes, strides = (1,) * missing + mask.shape, (0,) * missing + mask.stride
    stride = tuple(0 if size == 1 else stride for size, stride in zip(sizes, strides, strict=True))
    return TensorLayout((*shape_q[:3], skv), stride, mask.dtype)


def has_vectors(layout: TensorLayout) -> bool:
    """Whether head vectors are dense and lie at multiples of 16 bytes from each other."""
    elements = ALIGNMENT // layout.dtype.itemsize
    *outer, dim = zip(layout.shape, layout.stride, strict=True)
    return dim[1] == 1 and dim[0] % elements == 0 and all(size == 1 or stride % elements == 0 for size, stride in outer)


# Programs.


class _Tiles(NamedTuple):
    """How a fused kernel divides its work.

    Attributes:
        columns: Rows of the tensors that it goes through, at a time.
    """

    rows: int
    columns: int
    threads: int
    shared: int


class _Form(NamedTuple):
    """The shared memory of a fused kernel.

    Attributes:
        scores: Tiles of scores in float32, on CUDA cores.
        known: Numbers that it keeps of each column, twice, on tensor cores.
        on_cores: Sizes of tiles and numbers of threads on CUDA cores, the best first, by head dim.
        at_once: Blocks that should share a multiprocessor, on CUDA cores.
    """

    kept: int
    scores: int
    known: int
    on_cores: Mapping[int, Sequence[tuple[int, int, int]]]
    on_tensor_cores: Mapping[int, Sequence[tuple[int, int, int]]]
    at_once: int = 1

    def tiles(self, dtype: torch.dtype, dim: int, max_shared: int) -> _Tiles:
        """The first tiles that fit in shared memory, where head vectors and rows of scores are padded by 16 bytes."""
        found: list[_Tiles] = []
        at_once = 1
        if dtype == torch.float32:
            at_once = self.at_once
            for rows, columns, threads in self.on_cores[dim]:
                vectors = (self.kept * rows + 2 * columns) * (dim + 4)
                found.append(_Tiles(rows, columns, threads, 4 * (vectors + self.scores * rows * (columns + 4))))
        else:
            for rows, columns, threads in self.on_tensor_cores[dim]:
                vectors = (self.kept * rows + 4 * columns) * (dim + 8)
                found.append(_Tiles(rows, columns, threads, 2 * vectors + 4 * 2 * self.known * columns))
        fit = [tiles for tiles in found if tiles.shared <= max_shared]
        whole = max_shared + _RESERVED
        return next((tiles for tiles in fit if at_once * (tiles.shared + _RESERVED) <= whole), fit[-1])


_FORWARD = _Form(
    kept=1,
    scores=1,
    known=0,
    on_cores={64: ((128, 64, 128), (64, 64, 128), (64, 32, 128)), 128: ((64, 32, 128),)},
    on_tensor_cores={64: ((128, 64, 128),), 128: ((128, 64, 256), (64, 64, 128))},
    at_once=2,
)
_GRAD_KV = _Form(
    kept=2,
    scores=2,
    known=3,
    on_cores={64: ((64, 64, 256), (64, 32, 256)), 128: ((64, 32, 256), (32, 32, 256))},
    on_tensor_cores={64: ((128, 64, 256),), 128: ((128, 32, 256), (64, 32, 128))},
)
_GRAD_Q = _GRAD_KV._replace(scores=1, known=0)


def padded_dim(dim: int) -> int:
    return 64 if dim <= 64 else 128


def fused_rows(dtype: torch.dtype, dim: int, sm: int) -> int:
    return _FORWARD.tiles(dtype, padded_dim(dim), _max_shared(sm)).rows


def _max_shared(sm: int) -> int:
    return 1024 * _SHARED.get(sm, _MIN_SHARED)


@functools.cache
def _kernel(file: str, name: str, shared: int, **defines: int) -> Kernel:
    return Kernel(FOLDER / file, name, defines, shared)


class _Sizes(NamedTuple):
    layouts: Mapping[str, TensorLayout]
    options: Mapping[str, Any]
    max_shared: int

    @classmethod
    def of(cls, key: PlanKey) -> _Sizes:
        layouts = {x.name: x.layout for x in (*key.inputs, *key.outputs)}
        return cls(layouts, key.option_values, _max_shared(key.target.sm))

    @property
    def defines(self) -> dict[str, int]:
        mask = self.layouts.get("mask")
        return {
            "DTYPE": _DTYPES[self.layouts["q"].dtype],
            "MASK": 0 if mask is None else _MASKS[mask.dtype],
            "CAUSAL": int(self.options["is_causal"]),
            "VECTORS": int(self.options["vectors"]),
        }

    def fields(self) -> list[int]:
        given = dict.fromkeys(_NAMES, 0)
        for name in _STRIDED:
            if name in self.layouts:
                given |= {f"{name}.{1 + dim}": stride for dim, stride in enumerate(self.layouts[name].stride)}
        batch, heads, sq, dim = self.layouts["q"].shape
        _, heads_kv, skv, _ = self.layouts["k"].shape
        given |= {"batch": batch, "heads": heads, "heads_kv": heads_kv, "sq": sq, "skv": skv, "dim": dim}
        return list(given.values())

    def tiles(self, form: _Form) -> _Tiles:
        q = self.layouts["q"]
        return form.tiles(q.dtype, padded_dim(q.shape[3]), self.max_shared)

    def sizes(self, tiles: _Tiles) -> dict[str, int]:
        dim = padded_dim(self.layouts["q"].shape[3])
        return {"BM": tiles.rows, "BN": tiles.columns, "DP": dim, "THREADS": tiles.threads}

    def fused(self, file: str, name: str, form: _Form, *, rows: int, heads: int, **defines: int) -> KernelCall:
        """A fused kernel that divides rows of so many heads into tiles; half precision is for tensor cores."""
        tiles, q = self.tiles(form), self.layouts["q"]
        if q.dtype != torch.float32:
            file, name = file.replace("fused", "fused_tensor"), f"{name}_tensor"
        blocks = -(-rows // tiles.rows) * heads * q.shape[0]
        return self.call(file, name, blocks, threads=tiles.threads, shared=tiles.shared, **self.sizes(tiles), **defines)

    def simple(self, file: str, name: str, work: int, **defines: int) -> KernelCall:
        """A kernel whose 256 threads do a piece of work each."""
        return self.call(file, name, -(-work // 256), **defines)

    def of_rows(self) -> tuple[list[KernelCall], dict[str, tuple[int, ...]]]:
        """The kernels of a backward pass that compute what it needs of each row, and where they keep it."""
        rows = self.layouts["q"].shape[:3]
        work = 32 * math.prod(rows)
        delta = self.simple("delta.cu", "grad_delta", work, MASK=0, CAUSAL=0, VECTORS=0)
        if "lse" not in self.layouts:
            return [delta], {"delta": rows}
        return [self.simple("of_lse.cu", "statistics_of_lse", work, VECTORS=0), delta], {
            "delta": rows,
            "statistics": (*rows, 2),
        }

    def call(
        self, file: str, name: str, blocks: int, *, threads: int = 256, shared: int = 0, **defines: int
    ) -> KernelCall:
        kernel = _kernel(file, name, shared, **(self.defines | defines))
        return KernelCall(kernel, min(blocks, _MAX_BLOCKS), threads)  # any number of blocks is right

    def program(self, calls: Sequence[KernelCall], tiles: _Tiles | None, **scratch: tuple[int, ...]) -> KernelProgram:
        knobs = {} if tiles is None else {"rows": tiles.rows, "columns": tiles.columns}
        return KernelProgram(calls, self.fields(), _PLACES, scratch=scratch, knobs=knobs)


#: Rows and columns of a tile of tiled.cu, and the columns that it reads at a time.
TILE, _COLUMNS_AT_ONCE = 64, 16
_TILED = _Tiles(TILE, TILE, threads=256, shared=4 * 2 * _COLUMNS_AT_ONCE * (TILE + 4))
_REDUCTION_SHARED = 4 * 32


_kernel_op = functools.partial(KernelOp, folder=FOLDER)


@_kernel_op
def attention_forward(key: PlanKey) -> KernelProgram:
    sizes = _Sizes.of(key)
    q, k = sizes.layouts["q"].shape, sizes.layouts["k"].shape
    mode, scores = sizes.options["mode"], (*q[:3], k[2])
    if mode == FUSED:
        calls = [sizes.fused("fused.cu", "fused_forward", _FORWARD, rows=q[2], heads=q[1])]
        return sizes.program(calls, sizes.tiles(_FORWARD))
    rows = q[0] * q[1] * q[2]
    if mode == NAIVE:
        calls = [
            sizes.simple("naive.cu", "naive_qk", rows * k[2]),
            sizes.simple("naive.cu", "naive_softmax", rows),
            sizes.simple("naive.cu", "naive_av", rows * q[3]),
        ]
        return sizes.program(calls, None, scores=scores)
    of_rows, of_keys, of_columns = (-(-size // TILE) for size in (q[2], k[2], q[3]))
    heads = q[0] * q[1]
    calls = [
        sizes.call("tiled.cu", "tiled_qk", heads * of_rows * of_keys, shared=_TILED.shared),
        sizes.call("tiled.cu", "tiled_softmax", rows, threads=128, shared=_REDUCTION_SHARED),
        sizes.call("tiled.cu", "tiled_av", heads * of_rows * of_columns, shared=_TILED.shared),
    ]
    return sizes.program(calls, _TILED, scores=scores)


@_kernel_op
def attention_backward(key: PlanKey) -> KernelProgram:
    """The backward pass: the sums of the rows, then a kernel over the keys, then one over the queries."""
    sizes = _Sizes.of(key)
    if sizes.layouts["q"].shape[3] > MAX_FUSED_DIM:
        return _tiled_backward(sizes)
    (_, heads, sq, _), (_, heads_kv, skv, _) = sizes.layouts["q"].shape, sizes.layouts["k"].shape
    file = "fused_backward.cu"
    calls, scratch = sizes.of_rows()
    if "grad_k" in sizes.layouts:
        calls.append(sizes.fused(file, "fused_grad_kv", _GRAD_KV, rows=skv, heads=heads_kv, OF_KEYS=1))
    if "grad_q" in sizes.layouts:
        calls.append(sizes.fused(file, "fused_grad_q", _GRAD_Q, rows=sq, heads=heads, OF_KEYS=0))
    return sizes.program(calls, sizes.tiles(_GRAD_KV), **scratch)


def _tiled_backward(sizes: _Sizes) -> KernelProgram:
    """Gradients for head dims beyond the fused form; they keep the weights and the gradients of the scores."""
    (batch, heads, sq, dim), (_, heads_kv, skv, _) = sizes.layouts["q"].shape, sizes.layouts["k"].shape
    of_queries, of_keys, of_columns = (-(-size // TILE) for size in (sq, skv, dim))

    def call(name: str, blocks: int) -> KernelCall:
        return sizes.call("tiled_backward.cu", name, batch * blocks, shared=_TILED.shared)

    calls, scratch = sizes.of_rows()
    calls.append(call("tiled_grad_scores", heads * of_queries * of_keys))
    if "grad_k" in sizes.layouts:
        calls.append(call("tiled_grad_k", heads_kv * of_keys * of_columns))
        calls.append(call("tiled_grad_v", heads_kv * of_keys * of_columns))
    if "grad_q" in sizes.layouts:
        calls.append(call("tiled_grad_q", heads * of_queries * of_columns))
    kept = [name for name in ("scores", "grad_scores") if name not in sizes.layouts]
    return sizes.program(calls, _TILED, **scratch, **dict.fromkeys(kept, (batch, heads, sq, skv)))
