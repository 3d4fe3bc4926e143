"""Error texts: why cuDNN declines a graph, the builder's source locations, and safe excerpts of files."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger("cudnn_sdpa")

#: The frontend's message for a plan with deselected numerical notes, and what it means here.
_DESELECTED = "Deselecting execution plan"
_NONDETERMINISTIC = "cuDNN marks it as nondeterministic, and deterministic kernels were requested"

#: The frontend's prefix of cuDNN's reason for each engine configuration, if none supports the graph. The functions that
#: passed the reason on follow it. A convolution has hundreds of such lines.
_CONFIGURATION = '{"engineId"'
_SAID = re.compile(r"(\w*); Reason: (.*)")
_PLAIN = "CUDNN_STATUS_NOT_SUPPORTED"
_PASSED_ON = re.compile(r"[\w>.:-]+\([^()]*\)|status|.*CUDNN_STATUS.*")


def reason_of(error: Exception) -> str:
    """cuDNN's own reason, without the list of the frontend's Python engines, which are never used."""
    text = str(error)
    match = re.search(r"the backend declined: (.*?)(?:; python engines|\)?$)", text, re.DOTALL)
    found = (match[1] if match else text).strip()
    if _CONFIGURATION in found:
        _log.debug("cuDNN declined a graph: %s", found)
    return in_words(found) or type(error).__name__


def in_words(reason: str) -> str:
    """A reason, shortened for people."""
    rest = "\n".join(line for line in reason.splitlines() if _DESELECTED not in line)
    if _CONFIGURATION in rest:
        rest = _of_configurations(rest.split(_CONFIGURATION)[1:])
    return "\n".join([rest] * bool(rest) + [_NONDETERMINISTIC] * (_DESELECTED in reason))


def _of_configurations(texts: list[str]) -> str:
    """The number of declined configurations and their reasons, without the functions that passed them on."""
    told: dict[str, None] = {}
    for text in texts:
        causes = [(status, said) for status, said in _SAID.findall(text) if not _PASSED_ON.fullmatch(said)]
        told |= dict.fromkeys(said if status == _PLAIN else f"{status}, {said}" for status, said in causes[:1])
    many = f"{len(texts)} engine configurations, none of which supports"
    one = "one engine configuration, which does not support"
    return f"cuDNN proposes {many if len(texts) > 1 else one} this graph" + (f": {'; '.join(told)}" if told else "")


# Source locations of a graph's operations: cuDNN's reasons name neither.


class Place(NamedTuple):
    """A call of one of a graph's methods."""

    operation: str
    file: str
    line: int


def recording(name: str, method: Any, places: list[Place]) -> Any:
    """A graph's method, wrapped to record its source location; other attributes unchanged."""
    if not callable(method):
        return method

    def call(*operands: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        places.append(Place(name, caller.f_code.co_filename, caller.f_lineno))
        return method(*operands, **options)

    return call


def locations_in_words(places: Sequence[Place], file: str) -> str:
    """The operations that code in this file added, with their lines."""
    return ", ".join(f"{place.operation} ({file}, line {place.line})" for place in places if place.file == file)


# Text from files, made safe for messages.


#: Messages shorten longer texts, which may be a file of megabytes.
LONGEST = 300


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text without its middle if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """A text with line breaks and terminal escapes written as in a Python string."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
