"""What `sdpa` is compared with: PyTorch's backends, and cuDNN's frontend used by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from cudnn_sdpa.runtime import backend, handles

PYTORCH_BACKENDS = {"pytorch flash": SDPBackend.FLASH_ATTENTION, "pytorch cudnn": SDPBackend.CUDNN_ATTENTION}


def pytorch(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Callable[[], Tensor]:
    """PyTorch's own call, on whichever backend is enabled around it."""
    grouped = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


@contextmanager
def only(name: str) -> Iterator[None]:
    """Only one of PyTorch's backends."""
    with sdpa_kernel(PYTORCH_BACKENDS[name]):
        yield


class FrontendGraph:
    """The graph that an expert would write by hand with the frontend, with everything prepared beforehand.

    `launch` costs what cuDNN and the frontend's C++ take, and nothing else: output, workspace, pointers and stream
    are fixed.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> None:
        cudnn = backend.cudnn()
        dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[q.dtype]
        single = cudnn.data_type.FLOAT
        device = q.get_device()
        self.handle = handles.build_handle(device)
        slot = handles.thread.slots[device]
        slot.bind(torch.cuda.current_stream(device).cuda_stream)
        self.raw_handle = slot.raw
        graph = cudnn.pygraph(
            io_data_type=dtype, intermediate_data_type=single, compute_data_type=single, handle=self.handle
        )
        symbols = [
            graph.tensor(name=name, dim=list(t.shape), stride=list(t.stride()), data_type=dtype, uid=uid)
            for uid, (name, t) in enumerate((("q", q), ("k", k), ("v", v)), start=1)
        ]
        symbol, _ = graph.sdpa(*symbols, attn_scale=q.shape[3] ** -0.5, is_inference=True, use_causal_mask=is_causal)
        out = torch.empty_like(q)
        symbol.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_uid(4)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        self.workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
        self.tensors = {1: q, 2: k, 3: v, 4: out}
        self.pointers = array("Q", [tensor.data_ptr() for tensor in self.tensors.values()])
        self.graph = graph
        self.raw_launch = backend.BuiltGraph(graph, "", {}, 0).launcher([1, 2, 3, 4])

    def launch(self) -> None:
        """The launch by raw pointers."""
        address, count = self.pointers.buffer_info()
        self.raw_launch(address, count, self.workspace.data_ptr(), self.raw_handle, -1)

    def execute(self) -> None:
        """The frontend's public `execute`."""
        self.graph.execute(self.tensors, self.workspace, handle=self.handle)


def wrapper_graph(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Callable[[], Tensor]:
    """`cudnn.Graph`, the frontend's PyTorch-like wrapper, which allocates its output as we do."""
    cudnn = backend.cudnn()
    dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[q.dtype]
    single = cudnn.data_type.FLOAT
    with cudnn.Graph(io_data_type=dtype, intermediate_data_type=single, compute_data_type=single) as graph:
        out, _ = graph.sdpa(q=q, k=k, v=v, attn_scale=q.shape[3] ** -0.5, is_inference=True, use_causal_mask=is_causal)
        out.set_output(True).set_dim(list(q.shape)).set_stride(list(q.stride()))
    graph.set_io_tuples([q, k, v], [out])
    handle = handles.build_handle(q.get_device())
    return lambda: graph(q, k, v, handle=handle)
