"""Base classes of the calls of all kinds of attention.

Calls on CPU tensors are checked for what a GPU would refuse, so that a call that runs on a laptop runs on the GPU: for
strides, then for the key of every plan that the call would need, which the support rules and the known bugs of this
cuDNN may refuse. No plan is built. Such calls are checked with tensors without data; float32 and float64, which only
the reference takes, count as bfloat16.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from cudnn_sdpa.attention import backward_arguments
from cudnn_sdpa.attention.arguments import (
    FP8_DTYPES,
    Softmax,
    check_memory,
    check_options,
    outputs_without_data,
    results,
)
from cudnn_sdpa.attention.cpu_checks import check_offsets
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.engine import cpu_target, fallback, tensor_checks
from cudnn_sdpa.engine.dispatch_state import cast_tensor, is_plain_memory
from cudnn_sdpa.engine.launch import Layout, layout_signature
from cudnn_sdpa.engine.operation.call import BackwardCall, Call
from cudnn_sdpa.errors import ArgumentError, UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.layouts import ALIGNMENT, TensorLayout
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans import providers

#: Dtypes that only the reference takes, and the dtype that replaces them in the checks.
_REFERENCE_DTYPES = (torch.float32, torch.float64)
_GPU_DTYPE = torch.bfloat16

#: Maximum number of accepted calls that are remembered.
MAX_REMEMBERED = 8192

_passed: set[Hashable] = set()


class AttentionCall(Call):
    """A call by plans of cuDNN, or of kernels of the library's own."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def q(self) -> Tensor: ...
        @property
        def k(self) -> Tensor: ...
        @property
        def v(self) -> Tensor: ...
        @property
        def out(self) -> Tensor | None: ...
        @property
        def softmax(self) -> Softmax: ...

    check_options = check_options
    check_memory = check_memory

    def outputs(self) -> tuple[Layout, ...]:
        return results(self)

    def log_key(self) -> Hashable:
        softmax = self.softmax._replace(scale=None, causal_alignment=TOP_LEFT)
        options = [value != default for value, default in zip(softmax, Softmax(), strict=True)]
        return type(self), self.q.dtype, *options, *(x is not None and x is not False for x in self)

    def check_for_gpu(self) -> None:
        _check_for_gpu(self)

    def check_strides_for_gpu(self) -> None:
        """Checks, on the CPU, the strides and storage offsets that a GPU's kernels would read."""
        raise NotImplementedError

    def check_keys(self, target: Target) -> None:
        """Refuses a call that needs a plan which there is none of on a target."""
        for _ in self.keys(target, None):
            pass

    def check_gradient_keys(self, target: Target, device: int | None = None) -> None:
        raise NotImplementedError


class PagesCall(AttentionCall):
    """A call on a paged cache: for inference, with pages of the queries' dtype or in FP8."""

    __slots__ = ()

    #: The function that makes such calls.
    function: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def k_pages(self) -> Tensor: ...
        @property
        def v_pages(self) -> Tensor: ...

    def autocast(self) -> dict[str, object]:
        """The queries in autocast's dtype, if pages have that dtype, or one in FP8."""
        q: Tensor = cast_tensor(self.q, self.q)
        return {"q": q} if q.dtype == self.k_pages.dtype or self.k_pages.dtype in FP8_DTYPES else {}

    def check_strides_for_gpu(self) -> None:
        self.check_strides()
        check_offsets(q=self.q, k_pages=self.k_pages, v_pages=self.v_pages, out=self.out)
        if self.out is not None and self.out.numel():
            tensor_checks.check_strides_of_out(self.out, for_cudnn=True)

    def check_gradient(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.function} with a gradient",
            ["an input requires grad, and attention on a paged cache is for inference only"],
            "calling it under torch.no_grad(), or sdpa_varlen for training",
        )


class CudnnCall(AttentionCall):
    __slots__ = ()

    def check_gradient(self) -> None:
        if self.q.is_cuda:
            device = self.q.get_device()
            self.check_gradient_keys(live_target(device), device)
        else:
            _check_for_gpu(self, of_gradient=True)

    def check_keys(self, target: Target) -> None:
        """Refuses a call that needs a plan which the support rules or known bugs of cuDNN refuse on a target."""
        for key in self.keys(target, None):
            known_issues.check(key)


AttentionCallT = TypeVar("AttentionCallT", bound=AttentionCall)
CudnnCallT = TypeVar("CudnnCallT", bound=CudnnCall)


class CudnnBackwardCall(BackwardCall[CudnnCallT]):
    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def grad_out(self) -> Tensor: ...
        @property
        def out(self) -> Tensor: ...
        @property
        def lse(self) -> Tensor: ...

    def check_types(self) -> None:
        super().check_types()
        backward_arguments.check_types(self)

    def check(self) -> None:
        self.call.check()
        backward_arguments.check(self)

    def check_for_gpu(self) -> None:
        _check_for_gpu(self.call, backward=self)

    def check_keys(self, target: Target) -> None:
        """Refuses a call that needs a plan which the support rules or known bugs of cuDNN refuse on a target."""
        for key in self.keys(target, None):
            known_issues.check(key)


def _check_for_gpu(
    call: AttentionCall, *, of_gradient: bool = False, backward: CudnnBackwardCall[Any] | None = None
) -> None:
    """Refuses a call that the GPU would refuse. A call like an accepted one is not checked again.

    Args:
        call: The call.
        of_gradient: Whether the plans of its gradient are checked, and not its own.
        backward: A backward call whose plans are checked. Gradient, output and LSE may have any strides.
    """
    target = cpu_target.active()
    tensors = [x for x in call if isinstance(x, Tensor)]
    if target is None or not all(x.device.type == "cpu" for x in tensors) or not is_plain_memory(*tensors):
        return
    lifted = fallback.is_in_force()
    plans = (of_gradient, None if backward is None else (type(backward), backward.needs))
    setting = target, cpu_target.checks_dtypes(), lifted, providers.active()
    signature = (type(call), plans, *setting, *map(_signature, call))
    if signature in _passed:
        return
    meta = _without_data(call)
    try:
        meta.check_strides_for_gpu()
        if lifted:
            pass
        elif backward is not None:
            layout = TensorLayout.contiguous((*meta.q.shape[:-1], meta.v.shape[-1]), meta.q.dtype)
            backward._replace(**outputs_without_data(layout), call=meta).check_keys(target)
        elif of_gradient:
            meta.check_gradient_keys(target)
        else:
            meta.check_keys(target)
    except (ArgumentError, UnsupportedError) as error:
        raise cpu_target.for_gpu(error) from None
    if len(_passed) >= MAX_REMEMBERED:
        _passed.clear()
    _passed.add(signature)


def _signature(field: object) -> Hashable:
    """Everything about an argument that decides whether a call is refused."""
    if not isinstance(field, Tensor):
        return tuple(map(type, field)) if isinstance(field, tuple) else type(field), field
    return layout_signature(field), field.storage_offset() % ALIGNMENT, field.requires_grad


def _without_data(call: AttentionCallT) -> AttentionCallT:
    """The call with meta tensors of the same layouts, in dtypes that GPUs take."""
    is_free = call.q.dtype in _REFERENCE_DTYPES and not cpu_target.checks_dtypes()
    dtypes = {call.q.dtype: _GPU_DTYPE} if is_free else {}
    changes: dict[str, object] = {}
    for name, field in call._asdict().items():
        if isinstance(field, Tensor):
            is_cast = name in ("q", "k", "v", "k_pages", "v_pages", "out", "attn_mask")
            dtype = dtypes.get(field.dtype, field.dtype) if is_cast else field.dtype
            meta = torch.empty(0, dtype=dtype, device="meta", requires_grad=field.requires_grad)
            changes[name] = meta.as_strided(field.shape, field.stride(), field.storage_offset())
    return call._replace(**changes)
