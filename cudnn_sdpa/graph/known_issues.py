"""Known bugs of cuDNN versions, as data: consulted before every build and shown by `explain`.

Each row says which plans a bug affects and whether a plan works around it. An affected plan without a workaround is
refused: an error is better than a wrong result.

Record a newly found bug here if the key shows which plans it affects. Every plan passes this check, also those of
manifests, of offline planning and of users' graphs. The code of a workaround stays with the graph or the launch that it
changes; the row's `avoids` detects it in the key. Three kinds of bugs are kept elsewhere:

- `attention/support` has rules for calls that are refused, with `wrong=True` if cuDNN has a plan for them. A rule needs
  no key, so `support` and CPU tensors get the same answer, and it suggests what works instead. A bug that a key from a
  manifest can still reach has a row here, too, such as dropout with a single query.
- `backend.py` lists kernels whose results differ from run to run. They are not wrong, and which kernel a plan gets
  is known only while it is built.
- A bug that only values trigger, such as a scale close to 0, shows in no key. The code of the launch avoids it, and a
  comment there names the bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from cudnn_sdpa.errors import UnsupportedError
from cudnn_sdpa.graph.backend import version_string
from cudnn_sdpa.graph.key import Operand, PlanKey, Role
from cudnn_sdpa.graph.layouts import TensorLayout

NEVER_FIXED = 10**9

#: Largest offset of an element from its tensor's first that gradients of attention, and plans of other graphs, address
#: correctly.
MAX_OFFSET = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KnownIssue:
    """A bug of a provider's kernels, described by `bug`.

    Attributes:
        source: The report, or the version and the GPU of this library's tests that showed it.
        treatment: The workaround, or that the plan is refused.
        concerns: Whether a plan on a version with the bug is affected.
        avoids: Whether the plan works around it.
        first: First version with the bug, as a number.
        fixed: First version without it.
        in_capture: Whether only launches into a CUDA graph are affected; these are refused.
        when_recorded: Whether only recorded launches are affected; cuDNN launches the plan instead.
        provider: Whose kernels have it; None is cuDNN. Another provider declines the calls whose plans it concerns,
            in all its versions, whichever table has the row; they are refused where cuDNN has no engine for them.
    """

    bug: str
    source: str
    treatment: str
    concerns: Callable[[PlanKey], bool]
    avoids: Callable[[PlanKey], bool] = lambda _: False
    first: int = 0
    fixed: int = NEVER_FIXED
    in_capture: bool = False
    when_recorded: bool = False
    provider: str | None = None

    def __post_init__(self) -> None:
        if self.provider is not None and (self.first, self.fixed) != (0, NEVER_FIXED):
            raise ValueError(
                f"first and fixed are versions of cuDNN, which say nothing of {self.provider!r}: {self.bug}"
            )

    def __str__(self) -> str:
        return f"{self.bug} ({self.source}); {self.treatment}"


# Bugs in graphs other than attention, and in users' graphs.


def _varies_along_one_dim(key: PlanKey) -> bool:
    """A 3-D operand is broadcast along two dimensions, in a batch of several."""
    shapes = [op.layout.shape for op in key.inputs if op.role is Role.TENSOR and len(op.layout.shape) == 3]
    full = [max(sizes) for sizes in zip(*shapes, strict=True)]
    is_batch = bool(full) and full[0] > 1 and max(full[1:]) > 1
    return is_batch and any(sum(size > 1 for size in shape) == 1 for shape in shapes)


def _layouts_of_user(key: PlanKey) -> list[TensorLayout]:
    """The library's own graphs have none: all their layouts are read correctly."""
    if key.operation.startswith("cudnn_sdpa."):
        return []
    return [op.layout for op in key.inputs if op.role is Role.TENSOR]


def _is_below_3d(key: PlanKey) -> bool:
    layouts = _layouts_of_user(key)
    return bool(layouts) and max(len(x.shape) for x in layouts) < 3


def _is_broadcast_with_gaps(key: PlanKey) -> bool:
    """A broadcast tensor is not dense or, with three dimensions, not row-major."""
    layouts = _layouts_of_user(key)
    rank = max((len(x.shape) for x in layouts), default=0)
    layouts = [x for x in layouts if len(x.shape) == rank]
    full = [max(sizes) for sizes in zip(*(x.shape for x in layouts), strict=True)]
    return any(_is_broadcast(x, full) and not _is_read_correctly(x) for x in layouts)


def _is_broadcast(x: TensorLayout, full: list[int]) -> bool:
    expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride, strict=True))
    return expanded or any(n == 1 < size for n, size in zip(x.shape, full, strict=True))


def _is_read_correctly(x: TensorLayout) -> bool:
    dims = [(stride, n) for n, stride in zip(x.shape, x.stride, strict=True) if n > 1]
    in_order = dims[::-1] if len(x.shape) == 3 else sorted(dims)
    span = 1
    for stride, n in in_order:
        if stride != span:
            return False
        span *= n
    return True


def _max_offset(layouts: Iterable[TensorLayout]) -> int:
    return max(sum((n - 1) * stride for n, stride in zip(x.shape, x.stride, strict=True)) for x in layouts)


def _is_conv3d(key: PlanKey, *dtypes: torch.dtype) -> bool:
    of_x = key.inputs[0].layout
    is_convolution = key.operation.startswith("cudnn_sdpa.fused.conv_graphs:")
    return is_convolution and len(of_x.shape) == len(("batch", "channels", *"DHW")) and of_x.dtype in dtypes


def _has_filter_of_1(key: PlanKey) -> bool:
    filters = key.outputs[0].layout.shape if key.name == "conv_wgrad" else _shape(key, "weight")
    return set(filters[2:]) == {1}


FUSED_ISSUES = (
    KnownIssue(
        bug="3-D convolutions in half precision, and their gradients, are silently wrong unless filters have size 1",
        source="pytorch#163539, pytorch#163581, pytorch#166480",
        treatment="refused: cuDNN 9.15 or newer, or PyTorch's own functions",
        concerns=lambda key: _is_conv3d(key, torch.bfloat16, torch.float16) and not _has_filter_of_1(key),
        first=90800,
        fixed=91500,
    ),
    KnownIssue(
        bug="a kernel of 3-D convolutions in TF32 is wrong, for which sizes is not known",
        source="pytorch#167024",
        treatment="refused: cuDNN 9.16 or newer, or PyTorch's own functions",
        concerns=lambda key: _is_conv3d(key, torch.float32),
        first=91002,
        fixed=91600,
    ),
    KnownIssue(
        bug="a 3-D operand that varies along one dimension only is misread in a batch of several: wrong results",
        source="seen on 9.19 with an H200",
        treatment="refused: view the batch as rows, (1, batch · rows, n), or repeat the operand along one more "
        "dimension",
        concerns=_varies_along_one_dim,
    ),
    KnownIssue(
        bug="a graph of 1-D or 2-D tensors computes wrong results",
        source="seen on 9.19 with an H200",
        treatment="refused: view them as 3-D tensors, (1, rows, n)",
        concerns=_is_below_3d,
    ),
    KnownIssue(
        bug="a broadcast operand is misread unless it is dense and, with three dimensions, row-major",
        source="seen on 9.19 with an H200",
        treatment="refused: pass it contiguous, with sizes of 1 instead of strides of 0",
        concerns=_is_broadcast_with_gaps,
    ),
    KnownIssue(
        bug="offsets beyond 2^31 elements are not known to work",
        source="norms have no engine there, and attention's gradients miss them, on 9.19 with an H200",
        treatment="large calls are split along the dimensions that `shard` declares; refused without it",
        concerns=lambda key: _max_offset(operand.layout for operand in (*key.inputs, *key.outputs)) > MAX_OFFSET,
    ),
)


#: Maximum number of batch entries, and of heads, where kernels have them in a dimension of CUDA's grid.
MAX_GRID = 65535

#: The operations that `ATTENTION_ISSUES` covers.
ATTENTION = ("cudnn_sdpa.attention.dense.graphs:", "cudnn_sdpa.attention.fp8.graphs:")


def _find(key: PlanKey, name: str) -> Operand | None:
    return next((operand for operand in (*key.inputs, *key.outputs) if operand.name == name), None)


def _has(key: PlanKey, *names: str) -> bool:
    return all(_find(key, name) is not None for name in names)


def _shape(key: PlanKey, name: str) -> tuple[int, ...]:
    operand = _find(key, name)
    return () if operand is None else operand.layout.shape


def _is_forward(key: PlanKey) -> bool:
    return key.name in ("sdpa_forward", "paged_decode", "sdpa_fp8_forward")


def _is_backward(key: PlanKey) -> bool:
    return key.name in ("sdpa_backward", "sdpa_fp8_backward")


def _is_packed(key: PlanKey) -> bool:
    return any(operand.ragged for operand in key.inputs)


def _has_grouped_heads(key: PlanKey) -> bool:
    return _shape(key, "q")[1] != _shape(key, "k")[1]


def _is_fp8(key: PlanKey) -> bool:
    operand = _find(key, "q")
    return operand is not None and "float8" in str(operand.layout.dtype)


def _has_single_query(key: PlanKey) -> bool:
    return _shape(key, "q")[2] == 1


def _has_partial_tiles(key: PlanKey) -> bool:
    return _is_backward(key) and (_shape(key, "q")[2] % 128 != 0 or _shape(key, "k")[2] % 128 != 0)


def _has_one_row_of_bias(key: PlanKey) -> bool:
    return _has(key, "bias") and _shape(key, "bias")[2] == 1 and not _has_single_query(key)


def _has_only_causal_mask(key: PlanKey) -> bool:
    masks = ("bias", "seq_len_kv", "highest")
    return key.option_values.get("band") in ((None, 0, False), (None, 0, True)) and not any(_has(key, x) for x in masks)


def _passes_the_last_key(key: PlanKey) -> bool:
    """A bottom-right window without a right bound may have more queries than keys and the left bound."""
    band = key.option_values.get("band")
    if not isinstance(band, tuple):
        return False
    left, right, bottom_right = band
    if left is None or right is not None or not bottom_right:
        return False
    lengths = (_find(key, "seq_len_q"), _find(key, "seq_len_kv"))
    return _shape(key, "q")[2] > left + 1 and any(x is not None and x.role is Role.TENSOR for x in lengths)


def _has_dense_rows(key: PlanKey, name: str) -> bool:
    operand = _find(key, name)
    if operand is None:
        return True
    _, heads, _, dim = operand.layout.shape
    _, head_stride, row_stride, _ = operand.layout.stride
    return row_stride == heads * dim or row_stride == dim or (heads == 1 and head_stride == dim)


def _max_offset_of_tensors(key: PlanKey) -> int:
    names = ("q", "k", "v", "out", "grad_out")
    return _max_offset(operand.layout for operand in key.inputs if operand.name in names)


def _has_token_major_gradients(key: PlanKey) -> bool:
    return all(
        operand.layout.stride[1] <= operand.layout.stride[2] for operand in key.outputs if operand.name != "grad_q"
    )


def _exceeds_a_grid(key: PlanKey) -> bool:
    batch, heads, queries, _ = _shape(key, "q")
    if _is_packed(key):
        is_limited = key.option_values.get("deterministic") if _is_backward(key) else _has(key, "sink")
        return bool(is_limited) and max(batch, heads) > MAX_GRID
    if _has(key, "table_k"):  # query heads are rows of a tile
        return queries == 1 and max(batch, _shape(key, "k")[1]) > MAX_GRID
    return (_is_backward(key) or queries == 1) and max(batch, heads) > MAX_GRID


ATTENTION_ISSUES = (
    KnownIssue(
        bug="a very negative log-sum-exp gives NaN gradients if queries or keys do not fill their last tile of 128",
        source="pytorch#196678, cudnn-frontend#1072; seen on 9.19 with an H200, not on 9.28",
        treatment="full sequence lengths are passed, which masks the rest of the tile",
        concerns=_has_partial_tiles,
        avoids=lambda key: _has(key, "seq_len_q") or _has(key, "softcap"),
        fixed=92800,
    ),
    KnownIssue(
        bug="decode on Blackwell silently corrupts results",
        source="pytorch#193893",
        treatment="refused",
        concerns=lambda key: _is_forward(key) and _has_single_query(key) and key.target.sm // 10 == 10,
        first=91900,
        fixed=92600,
    ),
    KnownIssue(
        bug="the packed log-sum-exp of a decode step is written for the first head of each group only",
        source="cudnn-frontend#1083",
        treatment="packed plans are built for longer sequences",
        concerns=lambda key: _is_forward(key) and _is_packed(key) and _has(key, "lse") and _has_grouped_heads(key),
        avoids=lambda key: not _has_single_query(key),
        first=92600,
        fixed=92800,
    ),
    KnownIssue(
        bug="planning gradients for one batch, head and query crashes",
        source="cudnn-frontend#1071, seen with 9.28 too",
        treatment="refused",
        concerns=lambda key: _is_backward(key) and _shape(key, "q")[:3] == (1, 1, 1),
        first=92600,
    ),
    KnownIssue(
        bug="a head-major packed log-sum-exp gives gradients that are all zero",
        source="cudnn-frontend#462",
        treatment="it is stored token-major",
        concerns=lambda key: _is_backward(key) and _is_packed(key),
        avoids=lambda key: (operand := _find(key, "lse")) is not None and operand.layout.stride[1] == 1,
        first=92200,
        fixed=92700,
    ),
    KnownIssue(
        bug="a sequence without keys gets NaN or uninitialized memory",
        source="cudnn-frontend#943; seen on 9.19 with an H200",
        treatment="it is passed as one without queries, or the result is zero-filled beforehand",
        concerns=lambda key: (
            (operand := _find(key, "seq_len_kv")) is not None and operand.role is Role.TENSOR and not _is_fp8(key)
        ),
        avoids=lambda _: True,
    ),
    KnownIssue(
        bug="the FP8 gradient of the last queries is wrong if Sq is not a multiple of 16",
        source="seen on 9.19 with an H200",
        treatment="queries are copied into a padded tensor",
        concerns=lambda key: _is_backward(key) and _is_fp8(key) and key.target.sm // 10 == 9,
        avoids=lambda key: _shape(key, "q")[2] % 16 == 0,
    ),
    KnownIssue(
        bug="FP8 forward also computes padding queries, and its amax outputs include them",
        source="seen on 9.19 with an H200",
        treatment="their rows are zero-filled and amax_o is taken from the output; amax_s may be too large, at most 1",
        concerns=lambda key: _is_forward(key) and _is_fp8(key) and _has(key, "seq_len_q") and key.target.sm // 10 == 9,
        avoids=lambda _: True,
    ),
    KnownIssue(
        bug="FP8 forward attends to keys past a length: bottom-right windows without right bound, Sq over Skv",
        source="seen on 9.19 with an H200",
        treatment="refused",
        concerns=lambda key: (
            _is_forward(key) and _is_fp8(key) and key.target.sm // 10 == 9 and _passes_the_last_key(key)
        ),
    ),
    KnownIssue(
        bug="CUDA graph replay makes an illegal memory access with over 1024 keys and a mask other than plain causal",
        source="TransformerEngine#2344",
        treatment="a launch into a CUDA graph is refused",
        concerns=lambda key: (_shape(key, "k")[2] > 1024 or _has(key, "table_k")) and not _has_only_causal_mask(key),
        first=91300,
        fixed=91500,
        in_capture=True,
    ),
    KnownIssue(
        bug="FP8 forward is wrong with head dims over 192 on data-center Blackwell",
        source="cudnn-frontend#981",
        treatment="refused",
        concerns=lambda key: (
            _is_forward(key) and _is_fp8(key) and _shape(key, "q")[3] > 192 and key.target.sm // 10 == 10
        ),
    ),
    KnownIssue(
        bug="sequence lengths passed as 1-D tensors are misread",
        source="flashinfer#3784, with nvidia-cudnn-frontend 1.25 and 1.26",
        treatment="they are passed as (B, 1, 1, 1)",
        concerns=lambda key: _has(key, "seq_len_kv"),
        avoids=lambda key: len(_shape(key, "seq_len_q")) == len(_shape(key, "seq_len_kv")) == 4,
    ),
    KnownIssue(
        bug="offsets of packed tensors overflow 32 bits",
        source="cudnn-frontend#517",
        treatment="they are computed in 64 bits",
        concerns=_is_packed,
        avoids=lambda key: all("int64" in str(op.layout.dtype) for op in key.inputs if op.name.startswith("offsets_")),
    ),
    KnownIssue(
        bug="GQA gradients are summed wrongly in packed tensors that are not token-major",
        source="seen on 9.19 with an H200",
        treatment="gradients of keys and values are written token-major, and copied if their tensors are not",
        concerns=lambda key: _is_backward(key) and _is_packed(key) and _has_grouped_heads(key),
        avoids=_has_token_major_gradients,
    ),
    KnownIssue(
        bug="gradients of packed queries that are strided views cannot be launched",
        source="seen on 9.19 with an H200",
        treatment="such queries are copied",
        concerns=lambda key: _is_backward(key) and _is_packed(key),
        avoids=lambda key: _has_dense_rows(key, "q"),
    ),
    KnownIssue(
        bug="gradients and single queries of more than 65,535 batch entries or heads cannot be launched, nor can "
        "packed sequences with sinks, or their deterministic gradients",
        source="seen on 9.19 with an H100",
        treatment="calls are split along batch and heads; sinks of packed sequences are applied to the output; "
        "deterministic gradients of more packed sequences are refused: pass deterministic=False, or fewer sequences",
        concerns=_exceeds_a_grid,
    ),
    KnownIssue(
        bug="more than 65,535 query heads that share key heads get wrong results",
        source="seen on 9.19 with an H100, dense and packed",
        treatment="dense calls are split along heads; packed ones are refused, and those in FP8, untested: pass fewer",
        concerns=lambda key: (
            _is_forward(key)
            and key.name != "paged_decode"
            and _has_grouped_heads(key)
            and _shape(key, "q")[1] > MAX_GRID
        ),
    ),
    KnownIssue(
        bug="gradients use wrong addresses beyond 2^31 elements",
        source="seen on 9.19 with an H200",
        treatment="large calls are split along batch and heads",
        concerns=lambda key: _is_backward(key) and not _is_packed(key) and _max_offset_of_tensors(key) > MAX_OFFSET,
    ),
    KnownIssue(
        bug="backward engines misread an attn_mask with one row for all queries",
        source="seen on 9.19 with an H200",
        treatment="the row is passed expanded, with a stride of 0",
        concerns=lambda key: _is_backward(key) and _has(key, "bias"),
        avoids=lambda key: not _has_one_row_of_bias(key),
    ),
    KnownIssue(
        bug="an attn_mask over a single key is misread or read at misaligned addresses",
        source="seen on 9.19 with an H200",
        treatment="such calls are computed in plain PyTorch",
        concerns=lambda key: _has(key, "bias") and _shape(key, "k")[2] == 1,
    ),
    KnownIssue(
        bug="dropout with a single query reads out of bounds",
        source="seen on 9.19 with an H200",
        treatment="refused",
        concerns=lambda key: _is_forward(key) and _has_single_query(key) and bool(key.option_values.get("dropout_p")),
    ),
    KnownIssue(
        bug="with softcap, the gradient of V is zero unless a mask compares rows with columns",
        source="seen on 9.19 with an H200",
        treatment="a mask of this kind that masks nothing is added",
        concerns=lambda key: _is_backward(key) and _has(key, "softcap"),
        avoids=lambda _: True,
    ),
    KnownIssue(
        bug="with softcap, the gradient of attn_mask is wrong",
        source="seen on 9.19 with an H200",
        treatment="refused",
        concerns=lambda key: (
            _is_backward(key) and _has(key, "softcap") and key.option_values["bias_gradient"] is not None
        ),
    ),
    KnownIssue(
        bug="with softcap, the key bounds of a single query are misread",
        source="seen on 9.19 with an H200",
        treatment="refused",
        concerns=lambda key: _has(key, "softcap", "highest") and _has_single_query(key),
    ),
)


def concerning(key: PlanKey) -> list[KnownIssue]:
    version = key.target.cudnn
    rows: tuple[KnownIssue, ...] = ATTENTION_ISSUES if key.operation.startswith(ATTENTION) else FUSED_ISSUES
    if key.provider is not None:
        rows = (*ATTENTION_ISSUES, *FUSED_ISSUES)
    of_provider = [issue for issue in rows if issue.provider == key.provider]
    return [issue for issue in of_provider if issue.first <= version < issue.fixed and issue.concerns(key)]


def reasons_against(key: PlanKey) -> list[str]:
    """Every bug that a plan does not avoid, and for which it is refused."""
    return [
        str(issue) for issue in concerning(key) if not (issue.in_capture or issue.when_recorded or issue.avoids(key))
    ]


def check(key: PlanKey) -> None:
    """Refuses to build a plan that would give wrong results, with every bug that the plan does not avoid."""
    if reasons := reasons_against(key):
        by = f"cuDNN {version_string(key.target.cudnn)}" if key.provider is None else f"kernels of {key.provider!r}"
        suggestion = "" if key.provider is None else 'perhaps another provider, such as providers("cudnn").'
        raise UnsupportedError(f"{key.name} with {by}", reasons, suggestion)


def not_in_capture(key: PlanKey) -> str:
    return "; ".join(str(issue) for issue in concerning(key) if issue.in_capture)


def not_recorded(key: PlanKey) -> str:
    return "; ".join(str(issue) for issue in concerning(key) if issue.when_recorded)
