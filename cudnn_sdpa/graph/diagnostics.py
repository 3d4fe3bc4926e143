"""What cuDNN says of graphs that it declines, the lines of the builder, and texts out of files: fit for messages."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger("cudnn_sdpa")

#: What the frontend says of a plan whose numerical notes are not wanted, and what that means here.
_DESELECTED = "Deselecting execution plan"
_NONDETERMINISTIC = "cuDNN notes that it may give other bits in another run, and deterministic kernels are wanted"

#: How the frontend begins what cuDNN says of each configuration of an engine, if none takes the graph: the reason, and
#: then by which of its functions it was passed on. A convolution has hundreds of lines.
_CONFIGURATION = '{"engineId"'
_SAID = re.compile(r"(\w*); Reason: (.*)")
_PLAIN = "CUDNN_STATUS_NOT_SUPPORTED"
_PASSED_ON = re.compile(r"[\w>.:-]+\([^()]*\)|status|.*CUDNN_STATUS.*")


def reason_of(error: Exception) -> str:
    """cuDNN's own reason, without the list of the frontend's Python engines, which are never asked."""
    text = str(error)
    match = re.search(r"the backend declined: (.*?)(?:; python engines|\)?$)", text, re.DOTALL)
    found = (match[1] if match else text).strip()
    if _CONFIGURATION in found:
        _log.debug("cuDNN declined a graph: %s", found)
    return in_words(found) or type(error).__name__


def in_words(reason: str) -> str:
    """A reason that somebody may want to read."""
    rest = "\n".join(line for line in reason.splitlines() if _DESELECTED not in line)
    if _CONFIGURATION in rest:
        rest = _of_configurations(rest.split(_CONFIGURATION)[1:])
    return "\n".join([rest] * bool(rest) + [_NONDETERMINISTIC] * (_DESELECTED in reason))


def _of_configurations(texts: list[str]) -> str:
    """How many configurations were declined, and the reasons without how they were passed on."""
    told: dict[str, None] = {}
    for text in texts:
        causes = [(status, said) for status, said in _SAID.findall(text) if not _PASSED_ON.fullmatch(said)]
        told |= dict.fromkeys(said if status == _PLAIN else f"{status}, {said}" for status, said in causes[:1])
    many = f"{len(texts)} configurations of its engines, none of which takes"
    one = "one configuration of an engine, which does not take"
    return f"cuDNN proposes {many if len(texts) > 1 else one} this graph" + (f": {'; '.join(told)}" if told else "")


# Which lines of a builder's file have added which operations to a graph: cuDNN names neither in its reasons.


class Place(NamedTuple):
    """A call of one of a graph's methods."""

    operation: str
    file: str
    line: int


def recording(name: str, method: Any, places: list[Place]) -> Any:
    """A graph's method that notes where it was called; what is no method is as it is."""
    if not callable(method):
        return method

    def call(*operands: Any, **options: Any) -> Any:
        caller = sys._getframe(1)
        places.append(Place(name, caller.f_code.co_filename, caller.f_lineno))
        return method(*operands, **options)

    return call


def locations_in_words(places: Sequence[Place], file: str) -> str:
    """The operations that code of this file has added, with its lines."""
    return ", ".join(f"{place.operation} ({file}, line {place.line})" for place in places if place.file == file)


# What comes out of files, made fit for messages.


#: Longer texts are cut in messages: a file of megabytes is no message.
LONGEST = 300


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text that may be a whole file's, with its middle left out if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """A text without line breaks and terminal escapes, each as Python writes it in a string."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
