"""A pytest plugin that runs FlashAttention's own tests on `cudnn_sdpa.compat`, in place of FlashAttention.

    make test-originals                                        # every 50th of those of FlashAttention-2, and of -3
    make test-originals EVERY=1 PYTEST_ARGS="-k kvcache"

It needs a GPU, einops, and the sources that `python scripts/originals.py fetch` gets; their kernels are not built. What
raises `UnsupportedError` counts as skipped, with the reason.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Generator

import pytest
from originals import FLASH, folder

from cudnn_sdpa.compat import flash_attn, flash_attn_interface
from cudnn_sdpa.errors import UnsupportedError

SOURCES = folder(FLASH[0])

#: Tests of FlashAttention's operators, not of its functions, and of how its kernels are built.
OF_KERNELS = ("generator_arg", "flash3_bw_compatibility", "combine", "num_splits", "table_bounds")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, help="run one of so many tests, chosen by a hash of their names")


def pytest_configure() -> None:
    """Modules with FlashAttention's names; the others of its package, such as `bert_padding`, are its own."""
    functions = {name: getattr(flash_attn, name) for name in flash_attn.__all__}
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    vars(package).update(functions, __path__=[str(SOURCES / "flash_attn")], flash_attn_interface=interface)
    vars(interface).update(functions, USE_TRITON_ROCM=False, _get_block_size_n=_no_dropout_masks)
    of_3 = types.ModuleType("flash_attn_interface")
    vars(of_3).update({name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__})
    vars(of_3).update(flash_attn_combine=_not_ours, get_scheduler_metadata=lambda *_, **__: None)
    sys.modules |= {x.__name__: x for x in (package, interface, of_3)}


def _no_dropout_masks(*_: object) -> object:
    raise UnsupportedError("S_dmask", ["cuDNN does not return it"])


def _not_ours(*_: object, **__: object) -> object:
    raise UnsupportedError("flash_attn_combine", ["it is merge_states here"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    is_run = {x: zlib.crc32(x.name.encode()) % every == 0 and not any(n in x.name for n in OF_KERNELS) for x in items}
    config.hook.pytest_deselected(items=[x for x in items if not is_run[x]])
    items[:] = [x for x in items if is_run[x]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except UnsupportedError as error:
        pytest.skip(" ".join(str(error).split()))
