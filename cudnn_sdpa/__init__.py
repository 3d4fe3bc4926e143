"""cuDNN attention and the fused operations around it as plain PyTorch functions; every plan is cached.

Importing this package registers its operators with PyTorch, starts no CUDA and loads no cuDNN: the first call on a GPU
does. A public name is imported on the first access to it.
"""

import importlib as _importlib
import typing as _typing

from cudnn_sdpa import _start
from cudnn_sdpa._version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from cudnn_sdpa import kernels as kernels
    from cudnn_sdpa import nn as nn
    from cudnn_sdpa.attention.backward_arguments import SdpaGradients as SdpaGradients
    from cudnn_sdpa.attention.dense.drop_in import scaled_dot_product_attention as scaled_dot_product_attention
    from cudnn_sdpa.attention.dense.sdpa import sdpa as sdpa
    from cudnn_sdpa.attention.dense.sdpa import sdpa_backward as sdpa_backward
    from cudnn_sdpa.attention.fp8.arguments import Fp8BackwardScales as Fp8BackwardScales
    from cudnn_sdpa.attention.fp8.arguments import Fp8Gradients as Fp8Gradients
    from cudnn_sdpa.attention.fp8.arguments import Fp8Output as Fp8Output
    from cudnn_sdpa.attention.fp8.arguments import Fp8Scales as Fp8Scales
    from cudnn_sdpa.attention.fp8.fp8_attention import fp8_attention as fp8_attention
    from cudnn_sdpa.attention.fp8.scaling import Fp8Scaling as Fp8Scaling
    from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8 as sdpa_fp8
    from cudnn_sdpa.attention.fp8.sdpa_fp8 import sdpa_fp8_backward as sdpa_fp8_backward
    from cudnn_sdpa.attention.merge_states import merge_states as merge_states
    from cudnn_sdpa.attention.paged.append import append_paged_kv as append_paged_kv
    from cudnn_sdpa.attention.paged.kv_cache import PagedKVCache as PagedKVCache
    from cudnn_sdpa.attention.paged.page_pool import CacheUse as CacheUse
    from cudnn_sdpa.attention.paged.sdpa_paged import sdpa_paged as sdpa_paged
    from cudnn_sdpa.attention.paged.step import PagedStep as PagedStep
    from cudnn_sdpa.attention.paged.tables import page_table_of_csr as page_table_of_csr
    from cudnn_sdpa.attention.paged.tables import trusted_pages as trusted_pages
    from cudnn_sdpa.attention.paged_varlen.sdpa_paged_varlen import sdpa_paged_varlen as sdpa_paged_varlen
    from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen as sdpa_varlen
    from cudnn_sdpa.attention.varlen.sdpa_varlen import sdpa_varlen_backward as sdpa_varlen_backward
    from cudnn_sdpa.engine.cpu_target import cpu_checks as cpu_checks
    from cudnn_sdpa.engine.explain import Explanation as Explanation
    from cudnn_sdpa.engine.explain import explain as explain
    from cudnn_sdpa.engine.fallback import fallback as fallback
    from cudnn_sdpa.errors import ArgumentError as ArgumentError
    from cudnn_sdpa.errors import CudnnSdpaError as CudnnSdpaError
    from cudnn_sdpa.errors import DeviceError as DeviceError
    from cudnn_sdpa.errors import DtypeError as DtypeError
    from cudnn_sdpa.errors import ExecutionError as ExecutionError
    from cudnn_sdpa.errors import LayoutError as LayoutError
    from cudnn_sdpa.errors import LayoutWarning as LayoutWarning
    from cudnn_sdpa.errors import LibraryError as LibraryError
    from cudnn_sdpa.errors import OfflineError as OfflineError
    from cudnn_sdpa.errors import OptionError as OptionError
    from cudnn_sdpa.errors import OutOfPagesError as OutOfPagesError
    from cudnn_sdpa.errors import PlanBuildError as PlanBuildError
    from cudnn_sdpa.errors import ShapeError as ShapeError
    from cudnn_sdpa.errors import UnsupportedError as UnsupportedError
    from cudnn_sdpa.fused.activation import gelu_mul as gelu_mul
    from cudnn_sdpa.fused.activation import relu_squared as relu_squared
    from cudnn_sdpa.fused.activation import silu_mul as silu_mul
    from cudnn_sdpa.fused.conv import conv1d as conv1d
    from cudnn_sdpa.fused.conv import conv2d as conv2d
    from cudnn_sdpa.fused.conv import conv3d as conv3d
    from cudnn_sdpa.fused.graph_op import GraphFunction as GraphFunction
    from cudnn_sdpa.fused.graph_op import graph_op as graph_op
    from cudnn_sdpa.fused.norm import NormInFp8 as NormInFp8
    from cudnn_sdpa.fused.norm import layer_norm as layer_norm
    from cudnn_sdpa.fused.norm import layer_norm_fp8 as layer_norm_fp8
    from cudnn_sdpa.fused.norm import rms_norm as rms_norm
    from cudnn_sdpa.fused.norm import rms_norm_fp8 as rms_norm_fp8
    from cudnn_sdpa.fused.rotary.rope import RopeInFp8 as RopeInFp8
    from cudnn_sdpa.fused.rotary.rope import rope as rope
    from cudnn_sdpa.fused.rotary.rope import rope_fp8 as rope_fp8
    from cudnn_sdpa.fused.rotary.rope_in_place import rope_ as rope_
    from cudnn_sdpa.nn import Fp8Attention as Fp8Attention
    from cudnn_sdpa.offline.warmup import WarmupReport as WarmupReport
    from cudnn_sdpa.offline.warmup import compile_plans as compile_plans
    from cudnn_sdpa.offline.warmup import warmup as warmup
    from cudnn_sdpa.planning.record import record_plans as record_plans
    from cudnn_sdpa.planning.support import Support as Support
    from cudnn_sdpa.planning.support import support as support
    from cudnn_sdpa.plans.autotune import AutotuneCandidate as AutotuneCandidate
    from cudnn_sdpa.plans.autotune import AutotuneEntry as AutotuneEntry
    from cudnn_sdpa.plans.autotune import AutotuneReport as AutotuneReport
    from cudnn_sdpa.plans.autotune import autotune as autotune
    from cudnn_sdpa.plans.cache import PlanCache as PlanCache
    from cudnn_sdpa.plans.cache import PlanCacheInfo as PlanCacheInfo
    from cudnn_sdpa.plans.cache import no_plan_builds as no_plan_builds
    from cudnn_sdpa.plans.cache import plan_cache as plan_cache
    from cudnn_sdpa.plans.default_store import use_plan_store as use_plan_store
    from cudnn_sdpa.plans.manifest import PlanManifest as PlanManifest
    from cudnn_sdpa.plans.providers import providers as providers
    from cudnn_sdpa.plans.shape_policy import shape_policy as shape_policy
    from cudnn_sdpa.plans.store import PlanStore as PlanStore
    from cudnn_sdpa.plans.store import PlanStoreInfo as PlanStoreInfo
    from cudnn_sdpa.serving.rope_append import rope_append_paged_kv as rope_append_paged_kv

#: The public names, by the module that has them.
_NAMES = {
    "attention.backward_arguments": "SdpaGradients",
    "attention.dense.drop_in": "scaled_dot_product_attention",
    "attention.dense.sdpa": "sdpa sdpa_backward",
    "attention.fp8.arguments": "Fp8BackwardScales Fp8Gradients Fp8Output Fp8Scales",
    "attention.fp8.fp8_attention": "fp8_attention",
    "attention.fp8.scaling": "Fp8Scaling",
    "attention.fp8.sdpa_fp8": "sdpa_fp8 sdpa_fp8_backward",
    "attention.merge_states": "merge_states",
    "attention.paged.append": "append_paged_kv",
    "attention.paged.kv_cache": "PagedKVCache",
    "attention.paged.page_pool": "CacheUse",
    "attention.paged.sdpa_paged": "sdpa_paged",
    "attention.paged.step": "PagedStep",
    "attention.paged_varlen.sdpa_paged_varlen": "sdpa_paged_varlen",
    "attention.paged.tables": "page_table_of_csr trusted_pages",
    "attention.varlen.sdpa_varlen": "sdpa_varlen sdpa_varlen_backward",
    "engine.cpu_target": "cpu_checks",
    "engine.explain": "Explanation explain",
    "engine.fallback": "fallback",
    "errors": (
        "ArgumentError CudnnSdpaError DeviceError DtypeError ExecutionError LayoutError LayoutWarning LibraryError"
        " OfflineError OptionError OutOfPagesError PlanBuildError ShapeError UnsupportedError"
    ),
    "fused.activation": "gelu_mul relu_squared silu_mul",
    "fused.conv": "conv1d conv2d conv3d",
    "fused.graph_op": "GraphFunction graph_op",
    "fused.norm": "NormInFp8 layer_norm layer_norm_fp8 rms_norm rms_norm_fp8",
    "fused.rotary.rope": "RopeInFp8 rope rope_fp8",
    "fused.rotary.rope_in_place": "rope_",
    "nn": "Fp8Attention",
    "offline.warmup": "WarmupReport compile_plans warmup",
    "planning.record": "record_plans",
    "planning.support": "Support support",
    "plans.autotune": "AutotuneCandidate AutotuneEntry AutotuneReport autotune",
    "plans.cache": "PlanCache PlanCacheInfo no_plan_builds plan_cache",
    "plans.default_store": "use_plan_store",
    "plans.manifest": "PlanManifest",
    "plans.providers": "providers",
    "plans.shape_policy": "shape_policy",
    "plans.store": "PlanStore PlanStoreInfo",
    "serving.rope_append": "rope_append_paged_kv",
}
_MODULES = {name: f"cudnn_sdpa.{module}" for module, names in _NAMES.items() for name in names.split()}
_PACKAGES = ("distributed", "errors", "integrations", "kernels", "nn")


def _register() -> None:
    """Imports PyTorch, and registers the operators, which saved programs name without importing anything else."""
    _start.import_pytorch()  # first, since nothing works without it
    import cudnn_sdpa.engine.torch_ops  # noqa: F401


if not _typing.TYPE_CHECKING:  # for type checkers, a name that is not above is an error
    __all__ = sorted([*_MODULES, "__version__"])  # noqa: PLE0605 - from the table

    def __getattr__(name: str) -> object:
        if name not in _MODULES and name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _register()
        module = _importlib.import_module(_MODULES.get(name, f"cudnn_sdpa.{name}"))
        found = module if name in _PACKAGES else getattr(module, name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES, *_PACKAGES})


if not _start.is_command_line():  # the command line prints its help without PyTorch
    _register()
