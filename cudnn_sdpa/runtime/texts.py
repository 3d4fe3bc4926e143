"""What comes out of files, made fit for messages."""

from __future__ import annotations

#: Longer texts are cut in messages: a file of megabytes is no message.
LONGEST = 300


def shortened(text: str, longest: int = LONGEST) -> str:
    """A text that may be a whole file's, with its middle left out if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def printable(text: str) -> str:
    """A text without line breaks and terminal escapes, each as Python writes it in a string."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
