"""Sources of the library's own kernels: arguments, filled by the fields that they declare, and how kernels begin."""

from __future__ import annotations

import re

import pytest

from cudnn_sdpa.plans.nvrtc import HEADERS, Kernel, Struct

SOURCE = """
struct Part {
  const char* from;  /* its beginning */
  number size[2];
};

struct Whole {
  number count;
  Part part[2];
  uint4* to;
};

struct Sizes {
  const number* table;
  number sizes[40];
  number last;
};
"""


@pytest.fixture
def struct(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    return Struct(path, "Whole")


def test_fields_are_in_the_order_of_the_source(struct):
    assert list(struct.filled(count=7, part=[{"from": 1, "size": [2, 3]}], to=9)) == [7, 1, 2, 3, 0, 0, 0, 9]
    assert struct.indices("to", "count", "part.1.size.0") == [7, 0, 5]


def test_an_array_begins_at_its_first_field(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    sizes = Struct(path, "Sizes")
    assert sizes.indices("table", "sizes.0", "last") == [0, 1, 41]
    assert list(sizes.filled(sizes=list(range(40)), last=7)) == [0, *range(40), 7]


@pytest.mark.parametrize(
    "values",
    [{}, {"count": 1, "other": 2}, {"count": 1, "part": [{"from": 1}]}, {"count": 1, "part": [{"size": [1]}]}],
    ids=["a number is missing", "an unknown field", "an array is missing", "an element is missing"],
)
def test_missing_numbers_and_unknown_fields_are_refused(struct, values):
    with pytest.raises(ValueError, match="struct Whole"):
        struct.filled(**values)


def test_a_line_that_is_no_field_is_refused(tmp_path):
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE.replace("number count;", "number count, more;"))
    with pytest.raises(ValueError, match="no field"):
        Struct(path, "Whole").filled(count=1)


@pytest.mark.parametrize(
    ("body", "overlaps"),
    [
        ("f(const int* x) { wait_for_previous(); }", True),
        ("__launch_bounds__(64)\nf(const int* x)\n{\n  /* first */ wait_for_previous();\n}", True),
        ("f(const int* x) { int y = *x; wait_for_previous(); }", False),
        ("f(const int* x) { }", False),
        ("g(const int* x) { wait_for_previous(); } __global__ void f(const int* x) { int y = *x; }", False),
        ("f(const int* x) { wait_for_previous(); }\n#else\n__global__ void f(const int* x) { int y = *x; }", False),
        ("f(const int* x) { // wait_for_previous();\n int y = *x; }", False),
        ("/* f(const int* x) { wait_for_previous(); } __global__ void */ f(const int* x) { int y = *x; }", False),
    ],
)
def test_a_kernel_is_launched_early_if_it_waits_before_all_else(tmp_path, body, overlaps):
    path = tmp_path / "kernel.cu"
    path.write_text(f'extern "C" __global__ void {body}\n')
    kernel = Kernel(path, "f")
    assert kernel.overlaps(90) is overlaps
    assert not kernel.overlaps(89)
    path.write_text('extern "C" __global__ void f(const int* x) { int y = *x; }')
    assert not kernel.overlaps(90)


def test_every_kernel_waits_first_for_what_is_ahead():
    """Its launch does not; and `__ldg` could read what was there before."""
    sources = [path.read_text() for path in HEADERS.parent.rglob("*.cu*")]
    found = [first for source in sources for first in re.findall(r"__global__[^{;]*\{\s*(.*)", source)]
    assert len(found) > 40
    assert set(found) == {"wait_for_previous();"}
    assert not any("__ldg(" in source for source in sources)
