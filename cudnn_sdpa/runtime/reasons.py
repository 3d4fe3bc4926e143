"""What cuDNN and its frontend say of graphs that they decline, as far as it tells something."""

from __future__ import annotations

import logging
import re

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
