"""A part of TVM FFI's library, and functions with its C interface, compiled here, for tests of plans of functions."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

from cudnn_sdpa.plans.function_plan import Interface, Library

#: One stream for each thread, and an error's text.
_TVM_FFI = r"""
#include <stdint.h>
static __thread void* stream;
int TVMFFIEnvSetStream(int type, int device, void* now, void** before) {
  if (type != 2 || device != 0) return -1;
  if (before) *before = stream;
  stream = now;
  return 0;
}
void* StreamOfTheseTests(void) { return stream; }  // by a name that no other library in the process has
static struct { uint64_t header[3]; const char* kind; uint64_t size; const char* text; uint64_t length; } error = {
  {1}, "TypeError", 9, "no such tensor", 14};
void TVMFFIErrorMoveFromRaised(void** result) { *result = &error; }
int TVMFFIObjectDecRef(void* object) { return 0; }
"""

#: What functions get, and the stream that is set.
_TYPES = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int32_t kind; uint32_t small; union { int64_t number; double real; void* pointer; }; } Any;
typedef struct { void* data; int32_t type, device, rank; uint8_t code, bits; uint16_t lanes; int64_t *shape, *stride;
                 uint64_t offset; } Tensor;
typedef struct { uint64_t count; int32_t kind, pad; void* deleter; Any* data; int64_t size, capacity; } Array;
void* StreamOfTheseTests(void);
"""


@functools.cache
def interface() -> Interface:
    """One for the process: functions find the symbols of the first."""
    path = _compiled("tvm_ffi", _TVM_FFI)
    return Interface(path, path)


@functools.cache
def function(name: str, source: str, *flags: str) -> Library:
    """The function `__tvm_ffi_func` of C code that knows the types of arguments."""
    interface()
    return Library(Path(_compiled(name, _TYPES + source, *flags)).read_bytes())


def _compiled(name: str, source: str, *flags: str) -> str:
    path, library = _folder() / f"{name}.c", str(_folder() / f"{name}.so")
    path.write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", library, str(path)], check=True)
    return library


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="cudnn_sdpa-functions-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
