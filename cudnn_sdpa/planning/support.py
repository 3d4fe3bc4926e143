"""`support`: whether a call has kernels on a GPU, which need not be present, and every reason if not.

It uses the machinery of `explain` with meta tensors: checks, keys and rules are those of the call itself.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cudnn_sdpa._version import __version__
from cudnn_sdpa.attention.arguments import FP8_DTYPES
from cudnn_sdpa.attention.dense.sdpa import sdpa
from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales, Fp8Scales
from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8, sdpa_fp8_backward
from cudnn_sdpa.attention.mask import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.support.rules import BACKWARD, FORWARD
from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen
from cudnn_sdpa.engine import explain  # noqa: F401 - registers the functions that can be explained
from cudnn_sdpa.engine.explain import Description, describer_of
from cudnn_sdpa.errors import DtypeError, OptionError, ShapeError, UnsupportedError, check_choice
from cudnn_sdpa.graph import backend, known_issues
from cudnn_sdpa.graph.definition import find_operation
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.target import Target, load_properties
from cudnn_sdpa.offline.planner import plan_offline
from cudnn_sdpa.plans.program_plan import ProgramOp

#: The functions of each operation, a separate backward function last.
OPERATIONS: dict[str, tuple[Callable[..., object], ...]] = {
    "sdpa": (sdpa,),
    "sdpa_varlen": (sdpa_varlen,),
    "sdpa_fp8": (sdpa_fp8, sdpa_fp8_backward),
}
DIRECTIONS = (FORWARD, BACKWARD)

#: Known compute capabilities, as numbers.
CAPABILITIES = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)

#: Sizes of the meta tensors. They do not matter, unless a tensor has too many elements for one plan: the gradients of
#: such a call are computed in parts, and the smallest part decides about support.
BATCH, HEADS = 2, 8
MAX_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class Support:
    """The answer of `support`; true if there is a kernel.

    Attributes:
        question: The configuration, as text.
        supported: Whether there is a kernel.
        reasons: Every known reason against it.
        suggestion: The nearest configuration that works, or an empty string.
        engine: cuDNN's engine, if cuDNN was queried.
    """

    question: str
    supported: bool = True
    reasons: list[str] = field(default_factory=list)
    suggestion: str = ""
    engine: str = ""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if self.supported:
            return f"{self.question}: supported" + (f", {self.engine}" if self.engine else "")
        lines = [f"{self.question}: not supported", *(f"  - {reason}" for reason in self.reasons)]
        return "\n".join([*lines, f"  what works: {self.suggestion}"] if self.suggestion else lines)


def support(
    operation: str = "sdpa",
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    sq: int = 1024,
    skv: int | None = None,
    dtype: torch.dtype | None = None,
    direction: str = FORWARD,
    sm: int | None = None,
    cudnn: int | str | None = None,
    target: str | None = None,
    **options: object,
) -> Support:
    """Answers whether a call has kernels on a GPU, which need not be present, with every known reason if not.

    It answers as `explain` would for such a call, given head dims and lengths instead of tensors, and speaks of the
    `providers` in force. Without `target` it
    uses rules that are tested against cuDNN for SM 80, 89, 90, 100 and 120, and plans nothing. With a target, the
    installed cuDNN plans the call, which takes a second.

    Args:
        operation: "sdpa", "sdpa_varlen" or "sdpa_fp8".
        head_dim: Head dim of queries and keys.
        head_dim_v: Head dim of values; `head_dim` if not given.
        sq: Number of queries; of the longest sequence if packed.
        skv: Number of keys, likewise; `sq` if not given.
        dtype: Dtype of queries, keys and values; bfloat16 if not given, or float8_e4m3fn for "sdpa_fp8".
        direction: "forward", or "backward" for training, which needs the forward pass too.
        sm: Compute capability as one number, 90 for 9.0; if not given, the current GPU's, or 90 without a GPU.
        cudnn: Version such as "9.19.0", or 91900; the installed version if not given.
        target: Instead of both, a GPU that cuDNN plans for: a name such as "h200", or the path of a file written by
            `python -m cudnn_sdpa device --json`.
        **options: Options of the call, such as `is_causal=True`, `window_size=(256, 0)` or `dropout_p=0.1`. For the
            tensors `attn_mask`, `sinks`, `seq_lens_q` and `seq_lens_kv`, True means that one is passed, and "grad" for
            `attn_mask` that it requires grad.

    Returns:
        A `Support`, which is true or false; `print` shows the reasons.

    Raises:
        OptionError: An argument is invalid, such as an unknown operation.
        ArgumentError: The call itself would raise it.
        LibraryError: The installed cuDNN is needed and cannot be loaded.
        OfflineError: With a target, no helper process can plan here, for example without a C compiler.

    Examples:
        >>> import cudnn_sdpa
        >>> bool(cudnn_sdpa.support(head_dim=128, sm=90, cudnn="9.19.0", is_causal=True, direction="backward"))
        True
        >>> print(cudnn_sdpa.support(head_dim=256, sm=80, cudnn="9.19.0", direction="backward"))
        gradients of sdpa: bfloat16, head dims 256 and 256, Sq=1024, Skv=1024; SM 80, cuDNN 9.19.0: not supported
          - gradients have no kernel for head dims 256 and 256 on SM 80
          what works: head dims of up to 128, or no gradients
    """
    check_choice("operation", operation, OPERATIONS)
    check_choice("direction", direction, DIRECTIONS)
    if dtype is None:
        dtype = FP8_DTYPES[0] if operation == "sdpa_fp8" else torch.bfloat16
    if not isinstance(dtype, torch.dtype):
        raise OptionError("dtype", repr(dtype), "a torch.dtype")
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v}
    sizes |= {"sq": sq, "skv": sq if skv is None else skv}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(name, repr(size), "a positive integer")
    if target is not None and (sm, cudnn) != (None, None):
        name, value = ("sm", sm) if sm is not None else ("cudnn", cudnn)
        raise OptionError(name, f"{value} in addition to target", "one of the two")
    properties = None if target is None else load_properties(target)
    gpu = target_of(sm, cudnn) if properties is None else Target.from_properties(properties)
    texts = [name if isinstance(x, Tensor) or x is True else f"{name}={x}" for name, x in options.items()]
    call = operation if direction == FORWARD else f"gradients of {operation}"
    call += f": {dtype}, " + "head dims {head_dim} and {head_dim_v}, Sq={sq}, Skv={skv}".format(**sizes)
    gpu_text = f"SM {gpu.sm}" if properties is None else str(gpu)
    question = f"{', '.join([call, *texts])}; {gpu_text}, cuDNN {backend.version_string(gpu.cudnn)}"
    computations: list[Description] = []
    refusals = [] if gpu.cudnn >= backend.MIN_CUDNN else [_too_old(gpu)]
    try:
        computations += descriptions(operation, direction, dtype, **sizes, options=options)
    except (ShapeError, DtypeError) as error:  # about a size or dtype in the question
        reason = f"{error.argument}: got {error.got}; expected {error.expected}"
        refusals.append(UnsupportedError(operation, [reason], error.hint))
    computations = [each for each in computations if not each.is_empty]
    refusals += [refused for each in computations if (refused := UnsupportedError.of(_key, each, gpu)) is not None]
    engine = ""
    if properties is not None and not refusals:
        try:
            for each in computations:
                engine = _engine(_key(each, gpu), properties)
        except UnsupportedError as error:
            engine = ""
            refusals.append(error)
    reasons = dict.fromkeys(reason for refused in refusals for reason in refused.reasons)
    suggestions = dict.fromkeys(part for refused in refusals for part in refused.suggestion.split("; ") if part)
    return Support(
        question=question.replace("torch.", ""),
        supported=not refusals,
        reasons=list(reasons),
        suggestion="; ".join(suggestions),
        engine=engine,
    )


def parameters(operation: str) -> set[str]:
    signatures = [inspect.signature(function) for function in OPERATIONS[operation]]
    return {each.name for one in signatures for each in one.parameters.values() if each.kind is each.KEYWORD_ONLY}


def descriptions(
    operation: str,
    direction: str,
    dtype: torch.dtype,
    *,
    head_dim: int,
    head_dim_v: int,
    sq: int,
    skv: int,
    options: Mapping[str, object],
) -> list[Description]:
    trains = direction == BACKWARD and dtype.is_floating_point and dtype not in FP8_DTYPES
    is_small = BATCH * HEADS * max(sq, skv) * max(head_dim, head_dim_v) <= MAX_ELEMENTS
    batch, heads = (BATCH, HEADS) if is_small else (1, 1)

    def tensor(*shape: int, dtype: torch.dtype = dtype, requires_grad: bool = False) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

    def rows(tokens: int, dim: int) -> Tensor:
        shape = (batch * tokens, heads, dim) if operation == "sdpa_varlen" else (batch, heads, tokens, dim)
        return tensor(*shape, requires_grad=trains)

    tensors = {
        "attn_mask": tensor(batch, heads, sq, skv, requires_grad=trains and options.get("attn_mask") == "grad"),
        "sinks": tensor(heads, dtype=torch.float32, requires_grad=trains),
        "seq_lens_q": tensor(batch, dtype=torch.int32),
        "seq_lens_kv": tensor(batch, dtype=torch.int32),
    }
    values = {"return_lse": direction == BACKWARD, **options}
    for name, value in options.items():
        if name not in parameters(operation):
            raise OptionError(name, repr(value), f"an option of {operation}, which has none of this name")
        if name in tensors and value is not None and not isinstance(value, Tensor):
            allowed = (True, False, "grad") if name == "attn_mask" else (True, False)
            if not isinstance(value, (bool, str)) or value not in allowed:
                raise OptionError(name, repr(value), " or ".join(map(repr, allowed)))
            values[name] = tensors[name] if value else None
    qkv = {"q": rows(sq, head_dim), "k": rows(skv, head_dim), "v": rows(skv, head_dim_v)}
    calls: list[tuple[Callable[..., object], Mapping[str, object]]] = [(sdpa, qkv)]
    if operation == "sdpa_varlen":
        offsets = {name: tensor(batch + 1, dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        calls = [(sdpa_varlen, {**qkv, **offsets, "max_seqlen_q": sq, "max_seqlen_kv": skv})]
    elif operation == "sdpa_fp8":
        one, out = tensor(1, dtype=torch.float32), rows(sq, head_dim_v)
        lse = tensor(batch, heads, sq, dtype=torch.float32)
        calls = [(sdpa_fp8, {**qkv, "scales": Fp8Scales(*[one] * len(Fp8Scales._fields))})]
        if direction == BACKWARD:
            scales = Fp8BackwardScales(*[one] * len(Fp8BackwardScales._fields))
            calls.append((sdpa_fp8_backward, {**qkv, "grad_out": out, "out": out, "lse": lse, "scales": scales}))
    result: list[Description] = []
    for function, operands in calls:
        describe, accepted = describer_of(function), inspect.signature(function).parameters
        assert describe is not None
        description = describe(**operands, **{name: value for name, value in values.items() if name in accepted})
        result += [description] if description.backward is None else [description, description.backward]
    return result


def _key(description: Description, gpu: Target) -> PlanKey:
    key = description.key(gpu, None)  # raises if a rule rejects it
    known_issues.check(key)
    return key


def _engine(key: PlanKey, properties: backend.DeviceProperties) -> str:
    operation = find_operation(key.operation)
    planned = operation.program(key) if isinstance(operation, ProgramOp) else plan_offline(key, properties)
    return planned.engine


def _too_old(target: Target) -> UnsupportedError:
    version, oldest = map(backend.version_string, (target.cudnn, backend.MIN_CUDNN))
    reason = f"cuDNN {version} is older than {oldest}, the oldest that this library loads"
    return UnsupportedError("attention", [reason], "cuDNN 9.10.2 or newer")


def target_of(sm: int | None, cudnn: int | str | None) -> Target:
    if sm is None:
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
        sm = 10 * major + minor
    elif type(sm) is not int or sm not in CAPABILITIES:
        known = ", ".join(map(str, CAPABILITIES))
        raise OptionError("sm", repr(sm), f"a compute capability as one number, 90 for 9.0: one of {known}")
    version = backend.cudnn_version() if cudnn is None else version_number(cudnn)
    properties = (("deviceVer", 10 * sm), ("multiProcessorCount", 0))
    return Target(properties=properties, cudnn=version, frontend="", name=f"a GPU of SM {sm}")


def version_number(version: int | str) -> int:
    if isinstance(version, int) and not isinstance(version, bool) and version >= 90000:
        return version
    parts = version.split(".") if isinstance(version, str) else []
    if not 2 <= len(parts) <= 4 or not all(part.isdecimal() for part in parts):
        raise OptionError("cudnn", repr(version), 'a version such as "9.19.0" or 91900')
    major, minor, patch, *_ = (int(part) for part in [*parts, "0"])
    return 10000 * major + 100 * minor + patch


#: The options with a row in the matrix. Head dims are 128 unless the row says otherwise.
ROWS: dict[str, dict[str, object]] = {
    "no option": {},
    "causal": {"is_causal": True, "causal_alignment": TOP_LEFT},
    "causal, bottom-right": {"is_causal": True, "causal_alignment": BOTTOM_RIGHT},
    "window_size": {"window_size": (256, 0), "causal_alignment": BOTTOM_RIGHT},
    "actual sequence lengths": {"seq_lens_q": True, "seq_lens_kv": True},
    "attn_mask": {"attn_mask": True},
    "attn_mask, bottom-right causal, actual sequence lengths": {
        "attn_mask": True,
        "is_causal": True,
        "causal_alignment": BOTTOM_RIGHT,
        "seq_lens_q": True,
        "seq_lens_kv": True,
    },
    "attn_mask that requires grad": {"attn_mask": "grad"},
    "attn_mask that requires grad, dropout": {"attn_mask": "grad", "dropout_p": 0.1},
    "ALiBi, causal": {"alibi": True, "is_causal": True},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 20.0},
    "softcap, causal": {"softcap": 20.0, "is_causal": True, "causal_alignment": TOP_LEFT},
    "dropout": {"dropout_p": 0.1},
    "deterministic": {"deterministic": True},
    "deterministic, dropout": {"deterministic": True, "dropout_p": 0.1},
    "output in bfloat16": {"out_dtype": torch.bfloat16},
    "one query": {"sq": 1},
    "one query, dropout": {"sq": 1, "dropout_p": 0.1},
    **{
        f"head dim {d}" if d == dv else f"head dims {d} and {dv}": {"head_dim": d, "head_dim_v": dv}
        for d, dv in ((64, 64), (192, 128), (192, 192), (256, 256), (512, 512))
    },
}
SIZES = {"head_dim": 128, "sq": 512, "skv": 1024}


#: Words for kernels of both, of one, or of neither of forward and training.
WORDS = {
    (): "–",
    (True, True): "yes",
    (True, False): "forward only",
    (False, True): "training only",
    (False, False): "no",
}


@dataclass(frozen=True)
class Cell:
    """One option of one operation: answers for the forward pass and for training, none if the operation lacks it."""

    option: str
    operation: str
    answers: tuple[Support, ...]

    @property
    def supported(self) -> str:
        return WORDS[tuple(map(bool, self.answers))]

    @property
    def engines(self) -> list[str]:
        return [answer.engine for answer in self.answers]

    @property
    def reasons(self) -> list[str]:
        return list(dict.fromkeys(reason for answer in self.answers for reason in answer.reasons))

    def to_dict(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "option": self.option,
            "supported": self.supported,
            "reasons": self.reasons,
            "suggestion": self.answers[-1].suggestion or self.answers[0].suggestion,
            **({"engines": dict(zip(DIRECTIONS, self.engines, strict=True))} if any(self.engines) else {}),
        }


def cell(operation: str, option: str, **target: object) -> Cell:
    options = {**SIZES, **ROWS[option]}
    if not {*SIZES, "head_dim_v", *parameters(operation)}.issuperset(options):
        return Cell(option, operation, ())
    ask: Callable[..., Support] = support
    answers = (ask(operation, direction=direction, **{**options, **target}) for direction in DIRECTIONS)
    return Cell(option, operation, tuple(answers))


def cells(**target: object) -> Iterator[Cell]:
    for option in ROWS:
        for operation in OPERATIONS:
            yield cell(operation, option, **target)


def table(matrix: list[Cell]) -> tuple[list[dict[str, str]], list[str]]:
    """The rows of a matrix, and the numbered reasons.

    A row is an option and, per operation, the word, or the engines if cuDNN was queried, with the numbers of reasons.
    """
    rows: dict[str, dict[str, str]] = {}
    numbers: dict[str, int] = {}
    for each in matrix:
        word = ", ".join(engine or "none" for engine in each.engines) if any(each.engines) else each.supported
        notes = ",".join(map(str, sorted(numbers.setdefault(reason, 1 + len(numbers)) for reason in each.reasons)))
        rows.setdefault(each.option, {"with": each.option})[each.operation] = f"{word} ({notes})" if notes else word
    return list(rows.values()), list(numbers)


def environment(sm: int | None = None, cudnn: int | str | None = None, target: str | None = None) -> dict[str, str]:
    gpu = target_of(sm, cudnn) if target is None else Target.from_properties(load_properties(target))
    versions = {"cudnn_sdpa": __version__, "cudnn": backend.version_string(gpu.cudnn)}
    if target is None:
        return {"gpu": f"SM {gpu.sm}", **versions}
    return {"gpu": str(gpu), **versions, "nvidia-cudnn-frontend": gpu.frontend}


def to_json(environment: dict[str, str], matrix: list[Cell]) -> str:
    lines = ",\n".join(json.dumps(each.to_dict(), ensure_ascii=False) for each in matrix if each.answers)
    return f'{{"environment": {json.dumps(environment)},\n"calls": [\n{lines}\n]}}\n'
