"""`support`: whether there is a kernel for some options, head dims, GPU and cuDNN version, and every reason if not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_sdpa._version import __version__
from cudnn_sdpa.attention.options import BOTTOM_RIGHT, TOP_LEFT
from cudnn_sdpa.attention.questions import DTYPES_OF, LACKING, OPERATIONS, Question
from cudnn_sdpa.attention.support import BACKWARD, FORWARD
from cudnn_sdpa.errors import OptionError, UnsupportedError
from cudnn_sdpa.runtime import backend
from cudnn_sdpa.runtime.target import Target


@dataclass(frozen=True)
class Support:
    """What `support` answers; true if there is a kernel.

    Attributes:
        question: What was asked, in words.
        supported: Whether there is a kernel.
        reasons: Every reason that is known why there is none.
        suggestion: The nearest thing that works, or an empty string.
    """

    question: str
    supported: bool = True
    reasons: list[str] = field(default_factory=list)
    suggestion: str = ""

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        if self.supported:
            return f"{self.question}: supported"
        lines = [f"{self.question}: not supported", *(f"  - {reason}" for reason in self.reasons)]
        return "\n".join([*lines, f"  what works: {self.suggestion}"] if self.suggestion else lines)


def support(
    operation: str = "sdpa",
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    direction: str = FORWARD,
    dtype: torch.dtype | None = None,
    sm: int | None = None,
    cudnn: int | str | None = None,
    is_causal: bool = False,
    causal_alignment: str | None = None,
    window: tuple[int, int] | None = None,
    attn_mask: bool = False,
    attn_mask_grad: bool = False,
    dropout: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    seq_lens: bool = False,
    deterministic: bool = False,
    out_dtype: torch.dtype | None = None,
    sq: int = 1024,
    skv: int | None = None,
) -> Support:
    """Says whether there is a kernel for some options, and every known reason if there is none.

    It answers from rules that are held against cuDNN itself for SM 80, 89, 90, 100 and 120: nothing is planned, and no
    GPU is needed. Options that are numbers or tensors when calling are yes or no here.

    Args:
        operation: "sdpa", "sdpa_varlen" or "sdpa_fp8".
        head_dim: Head dim of queries and keys.
        head_dim_v: Head dim of values; `head_dim` if not given.
        direction: "forward", or "backward" for training, which needs the forward pass too.
        dtype: Of queries, keys and values; bfloat16 if not given, or float8_e4m3fn for "sdpa_fp8".
        sm: Compute capability as one number, 90 for 9.0; that of the current GPU if not given, or 90 without one.
        cudnn: Version such as "9.19.0", or 91900; the version that is installed if not given.
        is_causal: As when calling.
        causal_alignment: As when calling; the operation's own default if not given.
        window: As when calling.
        attn_mask: Whether there is one.
        attn_mask_grad: Whether there is one that requires grad.
        dropout: Whether `dropout_p` is more than 0.
        softcap: Whether there is a soft cap.
        alibi: As when calling.
        sinks: Whether there are attention sinks.
        seq_lens: Whether `seq_lens_q` or `seq_lens_kv` is given.
        deterministic: Whether gradients must be bit-exact.
        out_dtype: As when calling "sdpa_fp8".
        sq: Queries, of the longest sequence if they are packed.
        skv: Keys, likewise; `sq` if not given.

    Returns:
        A `Support`, which is true or false; `print` shows the reasons.

    Raises:
        OptionError: An argument has no meaning, such as an operation that is not there.
        LibraryError: `cudnn` is not given and cuDNN cannot be loaded.

    Examples:
        >>> import cudnn_sdpa
        >>> bool(cudnn_sdpa.support(head_dim=128, sm=90, cudnn="9.19.0", is_causal=True, direction="backward"))
        True
        >>> print(cudnn_sdpa.support(head_dim=256, sm=80, cudnn="9.19.0", direction="backward"))
        gradients of sdpa: bfloat16, head dims 256 and 256, Sq=1024, Skv=1024; SM 80, cuDNN 9.19.0: not supported
          - gradients have no kernel for head dims 256 and 256 on SM 80
          what works: head dims of up to 128, or no gradients
    """
    question = Question(
        operation=operation,
        direction=direction,
        dtype=DTYPES_OF.get(operation, (torch.bfloat16,))[0] if dtype is None else dtype,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        is_causal=is_causal,
        causal_alignment=OPERATIONS.get(operation, TOP_LEFT) if causal_alignment is None else causal_alignment,
        window=window,
        attn_mask=attn_mask,
        attn_mask_grad=attn_mask_grad,
        dropout=dropout,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        seq_lens=seq_lens,
        deterministic=deterministic,
        out_dtype=out_dtype,
        sq=sq,
        skv=sq if skv is None else skv,
    )
    question.check()
    return answer(question, target_of(sm, cudnn))


def answer(question: Question, target: Target) -> Support:
    """Whether everything that is needed has a plan on `target`."""
    asked = f"{question}; SM {target.sm}, cuDNN {backend.version_string(target.cudnn)}"
    refusals = [] if target.cudnn >= backend.MIN_CUDNN else [_too_old(target)]
    refusals += [found for plan in question.plans() if (found := plan.refusal(target)) is not None]
    if not refusals:
        return Support(asked)
    reasons = dict.fromkeys(reason for refused in refusals for reason in refused.reasons)
    suggestions = dict.fromkeys(part for refused in refusals for part in refused.suggestion.split("; ") if part)
    return Support(asked, False, list(reasons), "; ".join(suggestions))


def _too_old(target: Target) -> UnsupportedError:
    found, oldest = map(backend.version_string, (target.cudnn, backend.MIN_CUDNN))
    reason = f"cuDNN {found} is older than {oldest}, the oldest that this library loads"
    return UnsupportedError("attention", [reason], "cuDNN 9.10.2 or newer")


def is_gpu_here() -> bool:
    """Whether the current GPU answers where no `sm` is given."""
    return torch.cuda.is_available()


def target_of(sm: int | None, cudnn: int | str | None) -> Target:
    """A target with this compute capability and version; what is not given is that of this machine, or of an H200."""
    if sm is None:
        major, minor = torch.cuda.get_device_capability() if is_gpu_here() else (9, 0)
        sm = 10 * major + minor
    if isinstance(sm, bool) or not isinstance(sm, int) or sm < 10:
        raise OptionError("sm", repr(sm), "a compute capability such as 90")
    version = backend.cudnn_version() if cudnn is None else version_number(cudnn)
    return Target((("deviceVer", 10 * sm), ("multiProcessorCount", 0)), version, "", f"a GPU of SM {sm}")


def version_number(version: int | str) -> int:
    """The version as `cudnnGetVersion` gives it: 91900 for "9.19.0"."""
    if isinstance(version, int) and not isinstance(version, bool) and version >= 90000:
        return version
    parts = version.split(".") if isinstance(version, str) else []
    if not 2 <= len(parts) <= 4 or not all(part.isdecimal() for part in parts):
        raise OptionError("cudnn", repr(version), 'a version such as "9.19.0" or 91900')
    major, minor, patch = (int(part) for part in [*parts, "0"][:3])
    return 10000 * major + 100 * minor + patch


#: The options that a matrix has a row for.
ROWS: dict[str, dict[str, Any]] = {
    "no option": {},
    "causal": {"is_causal": True, "causal_alignment": TOP_LEFT},
    "causal, bottom-right": {"is_causal": True, "causal_alignment": BOTTOM_RIGHT},
    "window": {"window": (256, 0), "causal_alignment": BOTTOM_RIGHT},
    "true lengths": {"seq_lens": True},
    "attn_mask": {"attn_mask": True},
    "attn_mask, bottom-right causal, true lengths": {
        "attn_mask": True,
        "is_causal": True,
        "causal_alignment": BOTTOM_RIGHT,
        "seq_lens": True,
    },
    "attn_mask that requires grad": {"attn_mask_grad": True},
    "attn_mask that requires grad, dropout": {"attn_mask_grad": True, "dropout": True},
    "ALiBi, causal": {"alibi": True, "is_causal": True},
    "sinks": {"sinks": True},
    "soft cap": {"softcap": True},
    "soft cap, causal": {"softcap": True, "is_causal": True, "causal_alignment": TOP_LEFT},
    "dropout": {"dropout": True},
    "deterministic": {"deterministic": True},
    "deterministic, dropout": {"deterministic": True, "dropout": True},
    "output in bfloat16": {"out_dtype": torch.bfloat16},
    "one query": {"sq": 1},
    "one query, dropout": {"sq": 1, "dropout": True},
    **{
        f"head dim {d}" if d == dv else f"head dims {d} and {dv}": {"head_dim": d, "head_dim_v": dv}
        for d, dv in ((64, 64), (192, 128), (192, 192), (256, 256), (512, 512))
    },
}


@dataclass(frozen=True)
class Answer:
    """A cell of a matrix.

    Attributes:
        option: The option, in words.
        operation: "sdpa", "sdpa_varlen" or "sdpa_fp8".
        word: "yes", "forward only", "no", or "–" for an option that the operation does not have.
        why: The answer that says why no more is supported.
    """

    option: str
    operation: str
    word: str
    why: Support

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON."""
        of_answer = {"operation": self.operation, "option": self.option, "supported": self.word}
        return {**of_answer, "reasons": self.why.reasons, "suggestion": self.why.suggestion}


def answers(sm: int | None = None, cudnn: int | str | None = None) -> list[Answer]:
    """All cells of the matrix for one kind of GPU. Where nothing else is said, head dims are 128."""
    pairs = [(option, operation) for option in ROWS for operation in OPERATIONS]
    return [Answer(option, operation, *cell(operation, ROWS[option], sm, cudnn)) for option, operation in pairs]


def table(found: list[Answer]) -> list[dict[str, str]]:
    """The rows of a matrix: an option, and for each operation the word."""
    rows: dict[str, dict[str, str]] = {}
    for answer in found:
        rows.setdefault(answer.option, {"with": answer.option})[answer.operation] = answer.word
    return list(rows.values())


def common_reasons(found: list[Answer]) -> dict[str, str]:
    """Of operations that are not supported with any option, by name, what all of them have against them."""
    reasons: dict[str, str] = {}
    for operation in OPERATIONS:
        asked = [answer for answer in found if answer.operation == operation and answer.word != "–"]
        if all(answer.word == "no" for answer in asked):
            common = [reason for reason in asked[0].why.reasons if all(reason in each.why.reasons for each in asked)]
            reasons |= {operation: "; ".join(common)} if common else {}
    return reasons


def to_json(sm: int | None, cudnn: int | str | None, found: list[Answer]) -> str:
    """A matrix and what it holds for as JSON, a line for each cell."""
    target = target_of(sm, cudnn)
    of = {"sm": target.sm, "cudnn_sdpa": __version__, "cudnn": backend.version_string(target.cudnn)}
    lines = ",\n".join(json.dumps(answer.to_dict(), ensure_ascii=False) for answer in found if answer.word != "–")
    return f'{{"environment": {json.dumps(of)},\n"calls": [\n{lines}\n]}}\n'


def described(sm: int | None = None, cudnn: int | str | None = None) -> str:
    """What a matrix is for, in words."""
    target = target_of(sm, cudnn)
    return f"cuDNN {backend.version_string(target.cudnn)} on SM {target.sm}, head dims 128"


def cell(
    operation: str, options: dict[str, Any], sm: int | None = None, cudnn: int | str | None = None
) -> tuple[str, Support]:
    """What is supported, in one word, and the answer that says why no more is."""
    if any(name in LACKING[operation] for name in options):
        return "–", Support("")
    asked = {"head_dim": 128, "sq": 512, "skv": 1024, "sm": sm, "cudnn": cudnn, **options}
    forward, backward = support(operation, **asked), support(operation, direction=BACKWARD, **asked)
    return ("yes" if backward else "forward only" if forward else "no"), backward
