// The native module, without pybind11: it is compiled by the user's compiler, on the user's machine.
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

PyObject* rank(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) {
    PyErr_Format(PyExc_TypeError, "a tensor is expected, not %s", Py_TYPE(tensor)->tp_name);
    return nullptr;
  }
  return PyLong_FromLongLong(THPVariable_Unpack(tensor).dim());
}

PyMethodDef methods[] = {
    {"rank", rank, METH_O, "The number of dimensions of a tensor."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }
