"""Base classes of the calls of all kinds of attention on cuDNN."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from cudnn_sdpa.attention import backward_arguments
from cudnn_sdpa.attention.arguments import Softmax, check_options
from cudnn_sdpa.attention.cpu_checks import check_backward_call, check_call
from cudnn_sdpa.attention.mask import TOP_LEFT
from cudnn_sdpa.engine.operation.call import BackwardCall, Call
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.target import Target, live_target

#: Arguments that a log key has as given or not.
_ARGUMENTS = ("attn_mask", "sinks", "seq_lens_q", "seq_lens_kv", "with_lse", "out")


class CudnnCall(Call):
    """A call of attention that cuDNN's kernels run."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def q(self) -> Tensor: ...
        @property
        def k(self) -> Tensor: ...
        @property
        def v(self) -> Tensor: ...
        @property
        def softmax(self) -> Softmax: ...

    check_options = check_options

    def log_key(self) -> Hashable:
        arguments = [getattr(self, name, None) for name in _ARGUMENTS]
        softmax = self.softmax._replace(scale=None, causal_alignment=TOP_LEFT)
        options = [value != default for value, default in zip(softmax, Softmax(), strict=True)]
        return type(self), self.q.dtype, *options, *(isinstance(x, Tensor) or bool(x) for x in arguments)

    def check_for_gpu(self) -> None:
        check_call(self, type(self).check_strides_for_gpu, type(self).check_keys)

    def check_gradient(self) -> None:
        if self.q.is_cuda:
            device = self.q.get_device()
            self.check_gradient_keys(live_target(device), device)
        else:
            check_call(self, type(self).check_strides_for_gpu, type(self).check_gradient_keys)

    def check_strides_for_gpu(self) -> None:
        """Checks, on the CPU, the strides and storage offsets that a GPU's kernels would read."""
        raise NotImplementedError

    def check_keys(self, target: Target) -> None:
        """Refuses a call that needs a plan which the support rules or known bugs of cuDNN refuse on a target."""
        for key in self.keys(target, None):
            known_issues.check(key)

    def check_gradient_keys(self, target: Target, device: int | None = None) -> None:
        """Refuses a call whose backward call would need such a plan."""
        raise NotImplementedError


CudnnCallT = TypeVar("CudnnCallT", bound=CudnnCall)


class CudnnBackwardCall(BackwardCall[CudnnCallT]):
    """A backward call of attention that cuDNN's kernels run."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def grad_out(self) -> Tensor: ...
        @property
        def out(self) -> Tensor: ...
        @property
        def lse(self) -> Tensor: ...

    def check_types(self) -> None:
        backward_arguments.check_types(self)

    def check(self) -> None:
        self.call.check()
        backward_arguments.check(self)

    def check_for_gpu(self) -> None:
        check_backward_call(self, self.call, type(self.call).check_strides_for_gpu, type(self).check_keys)

    def check_keys(self, target: Target) -> None:
        """Refuses a call that needs a plan which the support rules or known bugs of cuDNN refuse on a target."""
        for key in self.keys(target, None):
            known_issues.check(key)
