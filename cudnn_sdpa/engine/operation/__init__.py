"""An operation, described once: what is done with a call follows from the description and the class of its calls."""

from cudnn_sdpa.engine.operation.operators import OPERATIONS, Operation
from cudnn_sdpa.engine.operation.pipeline import NativeKey

__all__ = ["OPERATIONS", "NativeKey", "Operation"]
