"""Fixtures of the unit tests, among them an independent row-by-row implementation of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from processes import check_for_a_cudnn_that_has_sinks
from torch import Tensor

import cudnn_sdpa

#: (rtol, atol) of a computation in at least float32 that is rounded once to the dtype.
TOLERANCES = {
    torch.float16: (1e-3, 5e-5),
    torch.bfloat16: (8e-3, 5e-5),
    torch.float32: (2e-5, 5e-6),
    torch.float64: (1e-11, 1e-12),
}


def row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    scale: float | None = None,
    seq_lens_q: Tensor | None = None,
    seq_lens_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64."""
    batch, heads, sq, head_dim = q.shape
    heads_kv, skv = k.shape[1:3]
    factor = head_dim**-0.5 if scale is None else scale
    queries, keys, values = q.double(), k.double(), v.double()
    out = torch.zeros(batch, heads, sq, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, sq), -torch.inf, dtype=torch.float64)
    for b in range(batch):
        n_queries = sq if seq_lens_q is None else int(seq_lens_q[b])
        n_keys = skv if seq_lens_kv is None else int(seq_lens_kv[b])
        shift = n_keys - n_queries if causal_alignment == "bottom_right" else 0
        for h in range(heads):
            g = h * heads_kv // heads
            for i in range(n_queries):
                end = min(n_keys, i + shift + 1) if is_causal else n_keys
                if end <= 0:
                    continue
                scores = factor * (keys[b, g, :end] * queries[b, h, i]).sum(dim=1)
                peak = scores.max()
                weights = (scores - peak).exp()
                lse[b, h, i] = peak + weights.sum().log()
                out[b, h, i] = (weights.unsqueeze(1) * values[b, g, :end]).sum(dim=0) / weights.sum()
    return out, lse


@pytest.fixture(scope="session")
def expected_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    return row_by_row


@pytest.fixture(scope="session")
def assert_rounded() -> Callable[[Tensor, Tensor], None]:
    """Asserts that a tensor is a float64 one, up to the rounding of its dtype."""

    def check(actual: Tensor, expected: Tensor) -> None:
        rtol, atol = TOLERANCES[actual.dtype]
        torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol)

    return check


@pytest.fixture(scope="session", autouse=True)
def checked_for_a_cudnn_that_has_sinks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        check_for_a_cudnn_that_has_sinks(patch)
        yield


@pytest.fixture
def reference_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disables the GPU checks of CPU tensors, here and in processes that the test starts.

    For tests of the reference's mathematics where no GPU, or not the default one, has a kernel.
    """
    with cudnn_sdpa.cpu_checks(None):
        monkeypatch.setenv("CUDNN_SDPA_CPU_CHECKS", "none")
        yield
