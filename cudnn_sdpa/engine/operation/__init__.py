"""An operation, described once: what is done with a call follows from the description and the class of its calls."""

from cudnn_sdpa.engine.operation.native_way import NativeKey
from cudnn_sdpa.engine.operation.operators import OPERATIONS, Operation

__all__ = ["OPERATIONS", "NativeKey", "Operation"]
