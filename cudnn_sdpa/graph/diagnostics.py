"""Error texts: cuDNN's reasons to decline a graph, the builder's source locations, and safe excerpts of files."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger("cudnn_sdpa")

#: The frontend's message for a plan with deselected numerical notes, and its meaning here.
_DESELECTED = "Deselecting execution plan"
_NONDETERMINISTIC = "cuDNN marks it as nondeterministic, and deterministic kernels were requested"

#: The frontend's prefix of cuDNN's reasons for each engine configuration, if none supports the graph: the cause, then
#: the call stack that returned it. A convolution has hundreds of such lines.
_CONFIGURATION = '{"engineId"'
_REASON = re.compile(r"(\w*); Reason: (.*)")
_NOT_SUPPORTED = "CUDNN_STATUS_NOT_SUPPORTED"
_STACK_FRAME = re.compile(r"[\w>.:-]+\([^()]*\)|status|.*CUDNN_STATUS.*")


def reason_of(error: Exception) -> str:
    """cuDNN's own reason, without the list of the frontend's Python engines, which are never used."""
    text = str(error)
    match = re.search(r"the backend declined: (.*?)(?:; python engines|\)?$)", text, re.DOTALL)
    reason = (match[1] if match else text).strip()
    if _CONFIGURATION in reason:
        _log.debug("cuDNN declined a graph: %s", reason)
    return summarized(reason) or type(error).__name__


def summarized(reason: str) -> str:
    rest = "\n".join(line for line in reason.splitlines() if _DESELECTED not in line)
    if _CONFIGURATION in rest:
        rest = _summary_of_configurations(rest.split(_CONFIGURATION)[1:])
    return "\n".join([rest] * bool(rest) + [_NONDETERMINISTIC] * (_DESELECTED in reason))


def _summary_of_configurations(texts: list[str]) -> str:
    causes: dict[str, None] = {}
    for text in texts:
        reasons = [(status, why) for status, why in _REASON.findall(text) if not _STACK_FRAME.fullmatch(why)]
        causes |= dict.fromkeys(why if status == _NOT_SUPPORTED else f"{status}, {why}" for status, why in reasons[:1])
    many = f"{len(texts)} engine configurations, none of which supports"
    one = "one engine configuration, which does not support"
    return f"cuDNN proposes {many if len(texts) > 1 else one} this graph" + (f": {'; '.join(causes)}" if causes else "")


# Source locations of a graph's operations, which cuDNN's reasons do not name.


class SourceLocation(NamedTuple):
    operation: str
    file: str
    line: int


def recording(name: str, method: Any, locations: list[SourceLocation]) -> Any:
    if not callable(method):
        return method

    def call(*operands: object, **options: object) -> object:
        caller = sys._getframe(1)
        locations.append(SourceLocation(name, caller.f_code.co_filename, caller.f_lineno))
        return method(*operands, **options)

    return call


def locations_in_file(locations: Sequence[SourceLocation], file: str) -> str:
    return ", ".join(f"{each.operation} ({file}, line {each.line})" for each in locations if each.file == file)


# Text from files, made safe for messages.


#: Messages shorten longer texts, which may be a file of megabytes.
MAX_LENGTH = 300


def shortened(text: str, max_length: int = MAX_LENGTH) -> str:
    half = max_length // 2
    return text if len(text) <= max_length else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
