"""Forward calls of dense attention bound to their plans, and the choice of the plan that serves a new shape.

Buckets: one plan for a range of sequence lengths and batch sizes, and the calls that it serves.

A dense call is treated as packed sequences, whose offsets and lengths are data. The key holds the rounded-up bounds,
the row strides and the mask. Measured on an H200: a bucket that is far too large costs nothing.

If the heads of a token are contiguous, a sequence is a batch entry with all its heads. Otherwise the head stride grows
with the sequence length, and each head of each batch entry is a sequence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cudnn_sdpa.attention.arguments import ForwardArguments, as_launched, query_factor, results, warn_of_order
from cudnn_sdpa.attention.dense import graphs, parts, reference
from cudnn_sdpa.attention.dense.launch import Run, bind_forward
from cudnn_sdpa.attention.dense.specs import DenseSpec, ForwardSpec, key_of, ready
from cudnn_sdpa.attention.mask import Mask
from cudnn_sdpa.attention.reference import fill_without_keys
from cudnn_sdpa.attention.varlen.specs import VarlenSpec, length_bucket, sequence_bucket
from cudnn_sdpa.engine.launch import BoundPlan, Prepared, Result
from cudnn_sdpa.engine.operation import OPERATIONS
from cudnn_sdpa.engine.tensor_checks import multiplied
from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph import known_issues
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import TensorLayout
from cudnn_sdpa.graph.target import Target, live_target
from cudnn_sdpa.plans import autotune, shape_policy
from cudnn_sdpa.plans.cache import build_plan, plan_cache
from cudnn_sdpa.plans.device_memory import DeviceTables
from cudnn_sdpa.plans.plan import Plan, current_raw_stream

if TYPE_CHECKING:
    from cudnn_sdpa.offline.background import Request

#: Calls within this many seconds count as one use, such as those of a model's layers or of a benchmark's loop.
SECONDS_PER_USE = 0.25

#: Number of uses after which a shape gets an exact-shape plan; a prompt length that does not recur is not worth one.
USES_BEFORE_EXACT_SHAPE_PLAN = 3

#: The same for single queries, whose key lengths recur in every generation as a cache grows.
USES_BEFORE_DECODE_PLAN = 10

#: Under "tiered", the number of shapes of a bucket that get exact-shape plans before the bucket's plan is built, which
#: takes about 10 times as long as another plan of a known kind.
SHAPES_BEFORE_BUCKET = 3

#: Factor on the number of uses after a failed build.
RETRY_FACTOR = 8

#: Maximum number of shapes and buckets whose usage is known; past it, all counts begin again.
MAX_SHAPES = 4096

#: Maximum GPU memory for the tables of all bucket calls.
MAX_TABLE_BYTES = 64 << 20


class Usage:
    """How often a shape or a bucket was used, and from how many uses on its plan is worth building.

    Attributes:
        uses: Of a shape: its uses on its bucket's plan. Of a bucket without a plan: the shapes that it has had.
        wanted: The number of uses before its plan is built; infinite if cuDNN has none.
    """

    __slots__ = ("_counted", "_request", "uses", "wanted")

    def __init__(self, wanted: float) -> None:
        self.uses = 0
        self.wanted = wanted
        self._counted = -SECONDS_PER_USE
        self._request: Request | None = None

    @classmethod
    def of(cls, key: PlanKey, wanted: float) -> Usage:
        if len(usages) >= MAX_SHAPES and key not in usages:
            usages.clear()
        return usages.setdefault(key, cls(wanted))

    @classmethod
    def _drop(cls, plan: Plan | None) -> None:
        if plan is None:
            usages.clear()

    def use(self, key: PlanKey) -> Plan | None:
        """Counts a use of a shape. Returns its exact-shape plan once that is held and may replace the bucket's."""
        now, request = time.monotonic(), self._request
        is_new = now - self._counted >= SECONDS_PER_USE
        is_done = request is not None and request.is_done
        if not (is_new or is_done):
            return None
        if torch.cuda.is_current_stream_capturing() or torch.are_deterministic_algorithms_enabled():
            return None
        plan = plan_cache.peek(key)  # of the helper process, `warmup`, `explain`, or another call of the same shape
        if plan is not None:
            self._request = None
            return plan
        if is_new:
            self._counted, self.uses = now, self.uses + 1
        if is_done:  # without a plan: it failed, perhaps only this time
            self._request, self.uses, self.wanted = None, 0, self.wanted * RETRY_FACTOR
        if self._request is None and self.uses >= self.wanted and not plan_cache.builds_are_forbidden:
            from cudnn_sdpa.offline.background import build_in_background  # few programs get this far

            self._request = build_in_background(key)
        return None


#: The usage of shapes and buckets by key. It outlives cached calls, which are dropped with their tables or the policy.
usages: dict[PlanKey, Usage] = {}
plan_cache._tables.add(Usage)


def prepare(call: ForwardArguments) -> Prepared:
    """A forward call bound to the plan that serves it."""
    warn_of_order(call)
    device, factor, scale = call.q.get_device(), query_factor(call), as_launched(call).scale_value
    forward = ForwardSpec.of(call)
    if forward.dense.is_empty:
        return Prepared(lambda call: fill_without_keys(call, results(call)), None)
    if forward.dense.has_no_plan:
        return Prepared(reference.run, None)
    if max(call.q.shape[:2]) > known_issues.MAX_GRID and parts.split_forward(call):
        on_gpu = OPERATIONS["sdpa"].on_gpu  # which remembers the bindings of the parts
        return Prepared(partial(parts.run_forward, run=on_gpu), None)
    key = key_of(forward, live_target(device), device)  # refused under every policy if there is no exact-shape plan
    if key.provider is not None:
        key = ready(key, forward.key, partial(_has_plan, forward))
    with torch.cuda.device(device):
        policy = shape_policy.Setting.policy or shape_policy.active()
        deterministic = call.softmax.deterministic or torch.are_deterministic_algorithms_enabled()
        is_exact = (
            factor is not None
            or key.provider is not None
            or policy == shape_policy.EXACT
            or deterministic
            or bool(autotune.in_force)
        )
        prepared = None if is_exact else _with_bucket(forward, key, policy, scale)
        if prepared is None:
            plan = plan_cache.get(key, partial(build_plan, graphs.sdpa_forward))
            prepared = Prepared(bind_forward(forward, plan, call, scale), plan)
    if factor is None:
        return prepared
    run = prepared.run  # a caller's negative scale is rare: a wrapper keeps it out of all other calls

    def run_multiplied(call: ForwardArguments) -> Result:
        return run(call._replace(q=multiplied(call.q, factor)))

    return prepared._replace(run=run_multiplied)


def _has_plan(forward: ForwardSpec, key: PlanKey) -> bool:
    """Whether there is a plan of cuDNN's for a call: of its shape, or of its bucket."""
    if plan_cache.find(key) is not None:
        return True
    is_exact = (shape_policy.Setting.policy or shape_policy.active()) == shape_policy.EXACT
    bucket = None if is_exact else Bucket.of(forward)
    bucket_key = None if bucket is None else bucket.key(key.target, key.device)
    return bucket_key is not None and plan_cache.find(bucket_key) is not None


def _with_bucket(forward: ForwardSpec, key: PlanKey, policy: str, scale: float) -> Prepared | None:
    """The call bound to its bucket's plan, if that should serve it. Cached plans take precedence over stored ones."""
    bucket = Bucket.of(forward)
    bucket_key = None if bucket is None else bucket.key(key.target, key.device)
    if bucket is None or bucket_key is None or plan_cache.peek(key) is not None:
        return None
    tiered = policy == shape_policy.TIERED
    plan = plan_cache.peek(bucket_key)
    if plan is None and plan_cache.find(key) is not None:
        return None
    plan = plan or plan_cache.find(bucket_key) or _build(bucket_key, key, tiered=tiered)
    if plan is None:
        return None
    exact = None
    if tiered:
        wanted = USES_BEFORE_DECODE_PLAN if forward.dense.sq == 1 else USES_BEFORE_EXACT_SHAPE_PLAN
        exact = partial(_run_of_exact_shape, Usage.of(key, wanted), forward, key, scale)
    run = BucketRun(bucket, plan, scale, exact)
    if run.is_captured:  # its tables are valid only in the graph
        return Prepared(run, None)
    _make_room(run.table_bytes)
    return Prepared(run, plan, policy=policy)


def _run_of_exact_shape(
    usage: Usage, forward: ForwardSpec, key: PlanKey, scale: float, call: ForwardArguments
) -> Run | None:
    """Counts a use. Returns what runs the call on its exact-shape plan, once that may replace the bucket's."""
    plan = usage.use(key)
    if plan is None:
        return None
    run = bind_forward(forward, plan, call, scale)
    OPERATIONS["sdpa"].remember(call, Prepared(run, plan))
    return run


def _build(bucket_key: PlanKey, key: PlanKey, *, tiered: bool) -> Plan | None:
    """Builds a bucket's plan; None if cuDNN has none, or if its first shapes are to have exact-shape plans."""
    bucket = Usage.of(bucket_key, SHAPES_BEFORE_BUCKET)
    if bucket.wanted == math.inf:
        return None
    usage = usages.get(key)  # once: another thread may clear them
    if tiered and usage is None and bucket.uses < bucket.wanted:
        Usage.of(key, USES_BEFORE_EXACT_SHAPE_PLAN)
        bucket.uses += 1
        return None
    if tiered and usage is not None and not usage.uses:  # one of the first, whose plan was evicted
        return None
    try:
        return plan_cache.get(bucket_key, partial(build_plan, graphs.sdpa_forward))
    except UnsupportedError:
        bucket.wanted = math.inf
        return None


def _make_room(size: int) -> None:
    """Bounds the memory of all tables: drops all bucket calls when the next one would exceed it."""
    if sum(run.table_bytes for run in OPERATIONS["sdpa"].runs(BucketRun)) + size > MAX_TABLE_BYTES:
        forget_buckets()


@shape_policy.on_change
def forget_buckets() -> None:
    """Drops all bucket calls; their next use prepares them again, under the policy of that time."""
    OPERATIONS["sdpa"].forget(BucketRun)


#: Longest sequence that a bucket serves; longer ones run long enough to be worth an exact-shape plan.
MAX_LENGTH = 65536

#: Maximum number of sequences of a bucket: with more, the offset tables would be too large.
MAX_SEQUENCES = 4096

_UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class Bucket:
    """A dense forward call as a packed one, whose plan it shares with calls of other shapes.

    Attributes:
        split_heads: Whether each head of each batch entry is a sequence.
    """

    forward: ForwardSpec
    split_heads: bool
    packed: VarlenSpec
    out: TensorLayout

    @classmethod
    def of(cls, forward: ForwardSpec) -> Bucket | None:
        """The bucket of a call; None if it needs an exact-shape plan."""
        dense = forward.dense
        if not _is_plain(forward) or max(dense.sq, dense.skv) > MAX_LENGTH:
            return None
        tensors = (dense.q, dense.k, dense.v, forward.out)
        split_heads = not all(map(_has_contiguous_heads, tensors))
        heads = dense.q.shape[1]
        real = dense.q.shape[0] * (heads if split_heads else 1)
        if real > MAX_SEQUENCES or any(_row_stride(tensor, split_heads=split_heads) == 0 for tensor in tensors):
            return None
        decodes = forward.is_decode and dense.mask.band is None  # cuDNN's decode engines apply no mask
        queries, keys = dense.sq, dense.skv
        sequences = sequence_bucket(real)
        max_seqlen_q = 1 if decodes else length_bucket(queries, _UNBOUNDED, tight=False)
        max_seqlen_kv = length_bucket(keys, _UNBOUNDED, tight=False)
        rows = [length * sequences for length in (max_seqlen_q, max_seqlen_kv, max_seqlen_kv, max_seqlen_q)]
        q, k, v, out = (_packed(tensor, n, split_heads=split_heads) for tensor, n in zip(tensors, rows, strict=True))
        spec = VarlenSpec(
            q=q,
            k=k,
            v=v,
            sequences=sequences,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            mask=Mask(dense.mask.band),
        )
        return cls(forward, split_heads, spec, out)

    def key(self, target: Target, device: int | None) -> PlanKey | None:
        """The key of the plan; None if it is known to be unsupported."""
        try:
            return self.packed.forward_key(self.out, False, target, device)
        except UnsupportedError:
            return None

    def tables(self, device: torch.device | str) -> dict[str, Tensor]:
        """Offsets of the sequences of each tensor, in elements, and their lengths, computed on the device."""
        dense, sequences = self.forward.dense, self.packed.sequences
        batch, heads = dense.q.shape[:2]
        real = batch * heads if self.split_heads else batch
        number = torch.arange(sequences + 1, device=device).clamp_max_(real)
        entry, head = (number // heads, number % heads) if self.split_heads else (number, None)
        offsets: dict[tuple[int, int, int], Tensor] = {}
        result = {}
        for name, x in (("q", dense.q), ("k", dense.k), ("v", dense.v), ("out", self.forward.out)):
            group = heads // x.shape[1]
            entry_stride, head_stride = x.stride[0] if batch > 1 else 0, x.stride[1] if x.shape[1] > 1 else 0
            strides = (entry_stride, head_stride, group)
            if strides not in offsets:
                offsets[strides] = entry * entry_stride + (0 if head is None else head // group * head_stride)
            result[f"offsets_{name}"] = offsets[strides]
        lengths = torch.zeros(2, sequences, dtype=torch.int32, device=device)
        lengths[0, :real] = dense.sq
        lengths[1, :real] = dense.skv
        return result | {"seq_len_q": lengths[0], "seq_len_kv": lengths[1]}


def _is_plain(forward: ForwardSpec) -> bool:
    """Whether the call has no options but a band and the scale, and its plan no LSE."""
    dense = forward.dense
    left = dense.mask.band[0] if dense.mask.band is not None else None
    if left is not None and (left < 0 or dense.sq > dense.skv):
        return False  # the band depends on the lengths, or queries may see no key
    return dense == DenseSpec(dense.q, dense.k, dense.v, Mask(dense.mask.band)) and not forward.plan_has_lse


def _has_contiguous_heads(tensor: TensorLayout) -> bool:
    """Whether the heads of a token fit into its row stride, so that no stride depends on the length."""
    _, heads, rows, _ = tensor.shape
    return heads == 1 or rows == 1 or tensor.stride[1] * heads <= tensor.stride[2]


def _row_stride(tensor: TensorLayout, *, split_heads: bool) -> int:
    """The stride between the rows of a sequence; that of a dense tensor if there is only one row."""
    _, heads, rows, dim = tensor.shape
    if rows > 1:
        return tensor.stride[2]
    return dim if split_heads else heads * dim


def _packed(tensor: TensorLayout, rows: int, *, split_heads: bool) -> TensorLayout:
    """The layout of a tensor (B, H, S, D) as packed rows (T, H, D)."""
    _, heads, _, dim = tensor.shape
    heads = 1 if split_heads else heads
    head_stride = tensor.stride[1] if heads > 1 else dim
    return TensorLayout(
        (rows, heads, dim), (_row_stride(tensor, split_heads=split_heads), head_stride, 1), tensor.dtype
    )


# Forward calls that run the plan of their bucket.


class BucketRun:
    """Runs calls of one shape on the plan of their bucket, with tables of sequence offsets and lengths.

    Attributes:
        is_captured: Whether its tables were made in a CUDA graph capture, and are valid only in that graph.
    """

    __slots__ = ("_bound", "_device", "_find_exact", "_tables", "is_captured", "table_bytes")

    def __init__(
        self, bucket: Bucket, plan: Plan, scale: float, find_exact: Callable[[ForwardArguments], Run | None] | None
    ) -> None:
        """Makes the tables on the current stream of the plan's GPU, which must be the current device.

        At each use, `find_exact` gives what runs the call on its exact-shape plan, or None until that is available.
        """
        self._find_exact = find_exact
        self._device = plan.device
        tables = bucket.tables(torch.device("cuda", plan.device))
        self.is_captured = torch.cuda.is_current_stream_capturing()
        stream = current_raw_stream(plan.device)
        self._tables = DeviceTables(tables, plan.device, stream, captured=self.is_captured)
        self.table_bytes = self._tables.size
        out = bucket.forward.out
        self._bound = BoundPlan(
            plan=plan,
            operands=("q", "k", "v"),
            results=[(out.shape, out.stride, out.dtype)],
            numbers={"scale": scale},
            fixed=self._tables.addresses,
        )

    def __call__(self, call: ForwardArguments) -> Result:
        """Launches the plan, or the exact-shape plan if that is available now."""
        exact = None if self._find_exact is None else self._find_exact(call)
        if exact is not None:
            return exact(call)
        self._tables.prepare(current_raw_stream(self._device))
        return self._bound((call.q, call.k, call.v), call.out)[0]
