"""Compiled functions of other providers in GPU tests: their compilation beforehand, and their plan store."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def given_functions() -> Iterator[None]:
    """The plan store that `CUDNN_SDPA_TEST_PLANS` names, if it does."""
    from cudnn_sdpa.plans.default_store import use_plan_store

    folder = os.environ.get("CUDNN_SDPA_TEST_PLANS")
    with use_plan_store(folder) if folder else contextlib.nullcontext():
        yield


def compile_all(package: str, kinds: Callable[[], list[tuple[Any, ...]]], about: str) -> None:
    """A program that compiles kinds into the plan store of a folder.

    Args:
        package: The provider's package, which has `compiler`, `plans` and `programs`.
        kinds: What is to be compiled.
        about: The program's description.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    from cudnn_sdpa.plans.default_store import open_store

    functions, kind_of = import_module(f"{package}.plans").functions, import_module(f"{package}.programs").Kind
    given.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    store, failed = open_store(given.folder, "folder"), 0
    missing = [kind for kind in kinds() if not functions.are_in(store, kind_of(*kind))]
    print(f"{len(missing)} kinds are missing in {given.folder}", flush=True)
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        made_of = pool.imap_unordered(partial(_compiled, package), missing)
        for number, (kind, made, fault, seconds) in enumerate(made_of, start=1):
            if made:
                functions.save(store, kind_of(*kind), made, seconds)
            failed += not made
            print(f"{number} of {len(missing)}: {seconds:.1f} s, {kind_of(*kind)} {fault}", flush=True)
    if failed:
        sys.exit(f"{failed} kinds could not be compiled")


def _compiled(package: str, kind: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, bytes], str, float]:
    compiler, kind_of = import_module(f"{package}.compiler"), import_module(f"{package}.programs").Kind
    os.environ.update(compiler.ENVIRONMENT)
    start = time.perf_counter()
    try:
        return kind, compiler.compile_kind(kind_of(*kind)), "", time.perf_counter() - start
    except Exception as error:  # noqa: BLE001 - as text: the compiler's own exceptions cannot be sent to another process
        return kind, {}, f"{type(error).__name__}: {error}", time.perf_counter() - start
