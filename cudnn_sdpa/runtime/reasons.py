"""What cuDNN and its frontend say of graphs that they decline, as far as it tells something."""

from __future__ import annotations

import re

#: What the frontend says of a plan whose numerical notes are not wanted, and what that means here.
_DESELECTED = "Deselecting execution plan"
_NONDETERMINISTIC = "cuDNN notes that it may give other bits in another run, and deterministic kernels are wanted"

#: How the frontend begins what it says of each configuration, when none takes a convolution: hundreds of lines.
_CONFIGURATION = '{"engineId"'
_SAID = re.compile(r"Reason: (.*)")

#: Parts of what every configuration is said to have failed at, whatever the reason.
_ALWAYS = ("CUDNN_STATUS", "isSupported()", "finalize_internal()")


def reason_of(error: Exception) -> str:
    """cuDNN's own reason, without the list of the frontend's Python engines, which are never asked."""
    text = str(error)
    match = re.search(r"the backend declined: (.*?)(?:; python engines|\)?$)", text, re.DOTALL)
    return in_words((match[1] if match else text).strip()) or type(error).__name__


def in_words(reason: str) -> str:
    """A reason that somebody may want to read."""
    if _CONFIGURATION in reason:
        return _of_configurations(reason)
    if _DESELECTED not in reason:
        return reason
    rest = [line for line in reason.splitlines() if _DESELECTED not in line]
    return "\n".join([*rest, _NONDETERMINISTIC])


def _of_configurations(reason: str) -> str:
    told = dict.fromkeys(said for said in _SAID.findall(reason) if not any(part in said for part in _ALWAYS))
    words = f"none of the {reason.count(_CONFIGURATION)} configurations that cuDNN has for it takes these tensors"
    return words + (f"; it says: {', '.join(told)}" if told else "")
