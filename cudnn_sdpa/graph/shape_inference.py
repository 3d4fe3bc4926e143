"""Infers the shapes of a graph's results, to check those that a user declares.

cuDNN rejects most impossible shapes. Pointwise operations accept any result shape, though, and read and write out of
bounds if it is larger than their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_sdpa.errors import ShapeError
from cudnn_sdpa.graph.backend import GraphBuilder, Symbol
from cudnn_sdpa.graph.key import PlanKey
from cudnn_sdpa.graph.layouts import CUDNN_DTYPE_NAMES

#: Operations whose result may have one of several shapes, so that it must be declared; cuDNN checks that one.
_DECLARED = ("conv_dgrad", "conv_wgrad", "reduction", "reshape", "resample")


class InferringBuilder(GraphBuilder):
    """Plans nothing; records which operation made each symbol."""

    def __init__(self, **device_options: Any) -> None:
        self._made_by: dict[int, str] = {}
        super().__init__(**device_options)

    def __getattr__(self, name: str) -> Any:
        method: object = super().__getattr__(name)
        if not callable(method):
            return method

        def call(*operands: object, **options: object) -> object:
            results = method(*operands, **options)
            for symbol in results if isinstance(results, (tuple, list)) else (results,):
                self._made_by[id(symbol)] = name
            return results

        return call

    def check(self, key: PlanKey, results: Sequence[Symbol]) -> None:
        """Compares the outputs of `key` with the inferred shapes, where these can be inferred.

        Raises:
            ShapeError: They differ.
        """
        for uid, (operand, symbol) in enumerate(zip(key.outputs, results, strict=True), start=1 + len(key.inputs)):
            layout = operand.layout
            dtype = CUDNN_DTYPE_NAMES[layout.dtype]
            if self._made_by.get(id(symbol), "").startswith(_DECLARED):
                self.declare_output(symbol, uid=uid, shape=layout.shape, stride=layout.stride, dtype=dtype)
            else:
                symbol.set_output(True).set_uid(uid).set_data_type(getattr(self.types.data_type, dtype))
        try:
            self._graph.validate()
        except Exception:  # noqa: BLE001 - building the graph raises it again
            return
        for number, (operand, symbol) in enumerate(zip(key.outputs, results, strict=True)):
            inferred, declared = tuple(symbol.get_dim()), operand.layout.shape
            if inferred and inferred != declared:
                expected = f"shape {inferred}, which its graph gives"
                hint = "reference= or outputs= declares the shapes of results."
                raise ShapeError(f"result {number} of {key.name}", f"shape {declared}", expected, hint)
