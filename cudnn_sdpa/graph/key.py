"""Plan keys: everything that a plan is a function of.

A `PlanKey` holds everything that a graph's builder may read, and nothing else. Data (pointers, sequence lengths,
scales) is in no key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from cudnn_sdpa.graph.backend import version_string
from cudnn_sdpa.graph.layouts import JsonObject, TensorLayout
from cudnn_sdpa.graph.target import Target, serial_of

#: Compute capability of Hopper, the first GPUs with clusters of thread blocks.
FIRST_CLUSTERS = 90


class Role(str, Enum):
    TENSOR = "tensor"  #: the caller's memory on the GPU
    SCALAR = "scalar"  #: one value in host memory, read at each launch
    FILL = "fill"  #: a constant tensor owned by the plan
    HOST = "host"  #: an array of 64-bit values in host memory, read at each launch, by kernels of the library's own


@dataclass(frozen=True, slots=True)
class Operand:
    """One input or output of an operation; `ragged` names the input with the offset of each batch entry."""

    name: str
    layout: TensorLayout
    role: Role = Role.TENSOR
    fill: int = 0
    ragged: str = ""

    def __str__(self) -> str:
        if self.role is Role.SCALAR:
            return f"{self.name}: host scalar"
        if self.role is Role.HOST:
            return f"{self.name}: host array of {self.layout.shape[0]}"
        text = f"{self.name}: {self.layout}" + (f" = {self.fill}" if self.role is Role.FILL else "")
        return text + (f" at {self.ragged}" if self.ragged else "")


#: A static option: its name, its type's name, its value.
TypedOption = tuple[str, str, object]


@dataclass(frozen=True, slots=True)
class PlanKey:
    """The identity of one execution plan.

    Attributes:
        operation: Import path of the operation, "package.module:name".
        digest: Digest of its builder's source and the package's version.
        inputs: Inputs in the order of the builder's parameters, without those that are None.
        outputs: Outputs in the order of the builder's results.
        options: Static options as (name, type, value): 1, 1.0 and True are three different options,
            as are 0.0 and -0.0.
        device: Index of the GPU in this process; None for a plan compiled for later.
        deterministic: Whether engines that cuDNN marks as nondeterministic are skipped. Attention, which knows more
            about its kernels than cuDNN reports, has an option of this name instead.
        provider: Who wrote its kernels; None is cuDNN.
    """

    operation: str
    digest: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    options: tuple[TypedOption, ...]
    target: Target
    device: int | None
    deterministic: bool = False
    provider: str | None = None

    @staticmethod
    def typed(options: Mapping[str, object]) -> tuple[TypedOption, ...]:
        return tuple((name, _type_name(value), value) for name, value in sorted(options.items()))

    @property
    def option_values(self) -> dict[str, object]:
        return {name: value for name, _, value in self.options}

    @property
    def name(self) -> str:
        return self.operation.rpartition(":")[2]

    def to_json(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "digest": self.digest,
            "inputs": [_operand_to_json(operand) for operand in self.inputs],
            "outputs": [_operand_to_json(operand) for operand in self.outputs],
            "options": self.option_values,
            **({"deterministic": True} if self.deterministic else {}),
            **({"provider": self.provider} if self.provider is not None else {}),
        }

    @property
    def is_gpu_specific(self) -> bool:
        """A plan that names clusters, made on one GPU, cannot be loaded on another of the same model.

        The multiprocessors that can form a cluster differ between chips of one model, and cuDNN stores them in plans of
        convolutions: a plan for other clusters leaves some of its results unwritten (seen on 9.19 with an H200).
        Attention kernels on Hopper use no clusters; those on Blackwell have not been examined. Plans made without a GPU
        use none.
        """
        is_attention = self.operation.startswith("cudnn_sdpa.attention.")
        return self.device is not None and self.target.sm >= FIRST_CLUSTERS and not is_attention

    def identity(self) -> dict[str, object]:
        target, device = self.target, self.device
        return {
            **({"gpu": serial_of(device)} if device is not None and self.is_gpu_specific else {}),
            **self.to_json(),
            "options": [[name, kind, value] for name, kind, value in self.options],
            "target": {"properties": [list(pair) for pair in target.properties]},
            "cudnn": target.cudnn,
            "frontend": target.frontend,
            "engines": "cudnn",  # the frontend's own Python engines are never used
        }

    def without_device(self) -> PlanKey:
        return replace(self, device=None)

    @classmethod
    def from_json(cls, data: JsonObject, target: Target) -> PlanKey:
        return cls(
            operation=data["operation"],
            digest=data["digest"],
            inputs=tuple(_operand_from_json(item) for item in data["inputs"]),
            outputs=tuple(_operand_from_json(item) for item in data["outputs"]),
            options=cls.typed({name: _hashable(value) for name, value in data["options"].items()}),
            target=target,
            device=None,
            deterministic=data.get("deterministic", False),
            provider=data.get("provider"),
        )

    def __str__(self) -> str:
        operands = ", ".join(map(str, self.inputs))
        results = ", ".join(map(str, self.outputs))
        options = ", ".join(f"{name}={value!r}" for name, _, value in self.options)
        device = f"cuda:{self.device}" if self.device is not None else "no device here"
        device += ", deterministic" * self.deterministic
        return (
            f"{self.name}({operands}; {options}) -> ({results}) "
            f"on {self.target} with cuDNN {version_string(self.target.cudnn)}, {device}"
        )


class KeyedOperation:
    """An operation that has plans: a name, a provider, and a digest of what a plan depends on besides its key."""

    name: str
    provider: str | None = None

    @property
    def digest(self) -> str:
        raise NotImplementedError

    def key(
        self,
        inputs: Sequence[Operand],
        outputs: Sequence[Operand],
        options: Mapping[str, object],
        target: Target,
        device: int | None,
        *,
        deterministic: bool = False,
    ) -> PlanKey:
        return PlanKey(
            operation=self.name,
            digest=self.digest,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            options=PlanKey.typed(options),
            target=target,
            device=device,
            deterministic=deterministic,
            provider=self.provider,
        )


def _type_name(value: object) -> str:
    if isinstance(value, tuple):
        return f"tuple[{', '.join(map(_type_name, value))}]"
    is_negative_zero = isinstance(value, float) and not value and math.copysign(1.0, value) < 0
    return type(value).__name__ + ", negative" * is_negative_zero  # -0.0 equals 0.0, but may need another plan


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _operand_to_json(operand: Operand) -> dict[str, object]:
    return {
        "name": operand.name,
        "layout": operand.layout.to_json(),
        "role": operand.role.value,
        "fill": operand.fill,
        "ragged": operand.ragged,
    }


def _operand_from_json(data: JsonObject) -> Operand:
    layout = TensorLayout.from_json(data["layout"])
    return Operand(name=data["name"], layout=layout, role=Role(data["role"]), fill=data["fill"], ragged=data["ragged"])


HOST_SCALAR = TensorLayout.contiguous((1, 1, 1, 1), torch.float32)
ONE_INT64 = TensorLayout.contiguous((1, 1, 1, 1), torch.int64)
