"""Hand-written graphs of cuDNN's frontend, which `sdpa` and `sdpa_varlen` are compared with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cudnn_sdpa.graph import backend, handles
from cudnn_sdpa.graph.backend import PyGraph, Symbol


class HandGraph:
    """A graph written by hand with the frontend, with everything prepared in advance.

    `launch` takes only the time of cuDNN and of the frontend's C++: output, workspace, pointers and stream are fixed.
    """

    def __init__(self, like: Tensor) -> None:
        self.types = backend.cudnn()
        self.device = like.get_device()
        self.handle = handles.build_handle(self.device)
        slot = handles.thread.slots[self.device]
        slot.bind(torch.cuda.current_stream(self.device).cuda_stream)
        self.raw_handle = slot.raw
        single = self.types.data_type.FLOAT
        self.graph: PyGraph = self.types.pygraph(
            io_data_type=self._dtype(like), intermediate_data_type=single, compute_data_type=single, handle=self.handle
        )
        self.tensors: dict[int, Tensor] = {}

    def _dtype(self, tensor: Tensor) -> object:
        names = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}
        names |= {torch.int32: "INT32", torch.int64: "INT64"}
        return getattr(self.types.data_type, names[tensor.dtype])

    def _next_uid(self, tensor: Tensor) -> int:
        self.tensors[len(self.tensors) + 1] = tensor
        return len(self.tensors)

    def declare(
        self,
        name: str,
        tensor: Tensor,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        ragged: Symbol | None = None,
    ) -> Symbol:
        """Declares an input, by default with the tensor's own shape and strides; `ragged` are its ragged offsets."""
        symbol: Symbol = self.graph.tensor(
            name=name,
            dim=list(shape or tensor.shape),
            stride=list(stride or tensor.stride()),
            data_type=self._dtype(tensor),
            uid=self._next_uid(tensor),
            ragged_offset=ragged,
        )
        return symbol

    def write(
        self,
        symbol: Symbol,
        tensor: Tensor,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        ragged: Symbol | None = None,
    ) -> Tensor:
        """Declares `symbol` as an output, written to `tensor`."""
        symbol.set_output(True).set_dim(list(shape or tensor.shape)).set_stride(list(stride or tensor.stride()))
        symbol.set_data_type(self._dtype(tensor)).set_uid(self._next_uid(tensor))
        if ragged is not None:
            symbol.set_ragged_offset(ragged)
        return tensor

    def build(self) -> None:
        """Builds the graph's plan; all inputs and outputs have been declared."""
        graph = self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.types.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        self.workspace = torch.empty(size, dtype=torch.uint8, device=self.tensors[1].device)
        self.pointers = array("Q", [tensor.data_ptr() for tensor in self.tensors.values()])
        self.raw_execute = backend.BuiltGraph(graph, "", {}, 0).executor(list(self.tensors))

    def launch(self) -> None:
        """The launch by raw pointers."""
        address, count = self.pointers.buffer_info()
        self.raw_execute(address, count, self.workspace.data_ptr(), self.raw_handle, -1)  # see `backend.Execute`

    def execute(self) -> None:
        """The frontend's public `execute`."""
        self.graph.execute(self.tensors, self.workspace, handle=self.handle)


class FrontendGraph(HandGraph):
    """The forward pass of dense attention."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> None:
        super().__init__(q)
        symbols = [self.declare(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
        scale = q.shape[3] ** -0.5
        out, _ = self.graph.sdpa(*symbols, attn_scale=scale, is_inference=True, use_causal_mask=is_causal)
        self.out = self.write(out, torch.empty_like(q))
        self.build()


class PackedGraph(HandGraph):
    """Declarations of both passes: ragged offsets in elements, lengths, and options with the exact token counts.

    Causal with bottom-right alignment, as in `sdpa_varlen`; queries and keys have the same lengths.
    """

    def __init__(self, q: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        super().__init__(q)
        self.batch, self.max_seqlen = cu_seqlens.numel() - 1, max_seqlen
        tokens, _, dim = q.shape
        self.cu_seqlens = cu_seqlens
        self.offsets: dict[int, Symbol] = {}
        lengths = cu_seqlens.diff().int().view(-1, 1, 1, 1)
        self.options = {
            "attn_scale": dim**-0.5,
            "use_padding_mask": True,
            "seq_len_q": self.declare("seq_len_q", lengths),
            "seq_len_kv": self.declare("seq_len_kv", lengths),
            "max_total_seq_len_q": tokens,
            "max_total_seq_len_kv": tokens,
            "diagonal_alignment": self.types.diagonal_alignment.BOTTOM_RIGHT,
            "diagonal_band_right_bound": 0,
        }

    def _view(self, tensor: Tensor) -> tuple[list[int], list[int], Symbol]:
        """The (B, H, S, D) shape and strides and the ragged offsets of a tensor (T, H, D) or log-sum-exps (T, H)."""
        _, heads, *dims = tensor.shape
        dim = dims[0] if dims else 1
        per_token = heads * dim
        if per_token not in self.offsets:
            offsets = self.cu_seqlens.long().view(-1, 1, 1, 1) * per_token
            self.offsets[per_token] = self.declare(f"offsets_{per_token}", offsets)
        shape = [self.batch, heads, self.max_seqlen, dim]
        stride = [self.max_seqlen * per_token, dim, per_token, 1]
        return shape, stride, self.offsets[per_token]

    def declare_packed(self, name: str, tensor: Tensor) -> Symbol:
        """Declares a packed input."""
        shape, stride, ragged = self._view(tensor)
        return self.declare(name, tensor, shape=shape, stride=stride, ragged=ragged)

    def write_packed(self, symbol: Symbol, tensor: Tensor) -> Tensor:
        """Declares a packed output."""
        shape, stride, ragged = self._view(tensor)
        return self.write(symbol, tensor, shape=shape, stride=stride, ragged=ragged)


class PackedForward(PackedGraph):
    """The forward pass.

    Attributes:
        out: The output (T, Hq, D).
        lse: The log-sum-exp (T, Hq), with `with_lse`.
    """

    def __init__(
        self, qkv: tuple[Tensor, Tensor, Tensor], *, cu_seqlens: Tensor, max_seqlen: int, with_lse: bool
    ) -> None:
        q, _, _ = qkv
        super().__init__(q, cu_seqlens, max_seqlen)
        symbols = [self.declare_packed(name, tensor) for name, tensor in zip("qkv", qkv, strict=True)]
        out, lse = self.graph.sdpa(*symbols, generate_stats=with_lse, **self.options)
        self.out = self.write_packed(out, torch.empty_like(q))
        self.lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if with_lse:
            self.write_packed(lse, self.lse)
        self.build()


class PackedBackward(PackedGraph):
    """The backward pass of a `PackedForward` with its log-sum-exp.

    Attributes:
        gradients: Gradients of q, k and v.
    """

    def __init__(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        *,
        forward: PackedForward,
        grad_out: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> None:
        super().__init__(qkv[0], cu_seqlens, max_seqlen)
        named = zip(("q", "k", "v", "o", "dO", "stats"), (*qkv, forward.out, grad_out, forward.lse), strict=True)
        operands = {name: self.declare_packed(name, tensor) for name, tensor in named}
        results = self.graph.sdpa_backward(**operands, **self.options)
        self.gradients = [
            self.write_packed(symbol, torch.empty_like(tensor)) for symbol, tensor in zip(results, qkv, strict=True)
        ]
        self.build()


def wrapper_graph(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Callable[[], Tensor]:
    """`cudnn.Graph`, the frontend's PyTorch-like wrapper, which allocates its output as `sdpa` does."""
    cudnn = backend.cudnn()
    dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[q.dtype]
    single = cudnn.data_type.FLOAT
    with cudnn.Graph(io_data_type=dtype, intermediate_data_type=single, compute_data_type=single) as graph:
        out, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=q.shape[3] ** -0.5, is_inference=True, use_causal_mask=is_causal)
        out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
    graph.set_io_tuples([q, k, v], [out])
    handle = handles.build_handle(q.get_device())
    return lambda: graph(q, k, v, handle=handle)
