// The calls of one public function that are launched here.
#pragma once

#include "gradient.h"

#include <structmember.h>

#include <unordered_map>

namespace cudnn_sdpa {

// A tensor among the arguments, and the bytes from its address to the end of its last element; 0 if it has no element.
struct Span {
  size_t place = 0;
  uint64_t bytes = 0;

  static Span of(size_t place, const at::Tensor& tensor) {
    if (!tensor.numel()) return {place, 0};
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    return {place, static_cast<uint64_t>(last + 1) * tensor.element_size()};
  }
};

struct KnownCall {
  Words words;
  py::object plan;
  std::shared_ptr<const Recipe> recipe;
  std::vector<size_t> operands;  // the recipe's, among the arguments
  std::vector<size_t> written;   // those of them that the kernels write to
  std::vector<size_t> numbers;   // arguments that are data
  Span out;                      // the argument that the first result is written to; of 0 bytes if that is new memory
  std::vector<Span> others;      // with `out`, all other tensors that have elements
  std::vector<size_t> returned;  // which results the caller gets
  bool is_tuple;                 // whether it gets them in a tuple
  std::shared_ptr<const Differentiation> differentiation;  // null if autograd does not follow the call
};

// Called with the arguments of a public function: gives its results, or `missed` if Python must look at the call.
struct Calls {
  PyObject_HEAD
  vectorcallfunc call;
  std::unordered_map<uint64_t, std::shared_ptr<const KnownCall>>* known;
  Special special;
};

inline constexpr size_t most_known = 8192;
inline constexpr size_t most_arguments = 64;  // a bit of `Special::with_extra_key` for each

inline PyObject* missed = nullptr;           // what `Calls` gives for a call that it does not know
inline PyObject* forward_ad = nullptr;       // the namespace of torch.autograd.forward_ad
inline PyObject* current_level = nullptr;    // its "_current_level"

// Whether something must intercept operators that no dispatch key tells of.
inline bool is_intercepted() {
  if (is_observed()) return true;
  PyObject* level = PyDict_GetItemWithError(forward_ad, current_level);
  return level == nullptr || PyLong_AsLong(level) >= 0;
}

// Whether kernels can write to `out`, which overlaps no other tensor of the call: addresses are not part of what is known.
inline bool is_writable(const KnownCall& known, const Out& out, PyObject* const* arguments) {
  if (!out.address || out.address & misaligned) return false;
  const uint64_t end = out.address + known.out.bytes;
  for (const auto& other : known.others) {
    const uint64_t begin = address_of(THPVariable_Unpack(arguments[other.place]));
    if (begin < end && out.address < begin + other.bytes) return false;
  }
  return true;
}

inline PyObject* results_of(const KnownCall& known, const Results& results) {
  if (!known.is_tuple) return THPVariable_Wrap(results[known.returned[0]]);
  auto tuple = checked(PyTuple_New(known.returned.size()));
  for (size_t place = 0; place < known.returned.size(); ++place) {
    PyTuple_SET_ITEM(tuple.ptr(), place, checked(THPVariable_Wrap(results[known.returned[place]])).release().ptr());
  }
  return tuple.release().ptr();
}

// Where the gradients of a call's inputs go.
//
// A leaf's edge needs the leaf's mutex. An operator of PyTorch releases the GIL, and acquires it while it holds the mutex,
// where the leaf's reference count rises to two. So a thread that waits for the mutex with the GIL would deadlock.
inline torch::autograd::edge_list edges_of(const std::vector<int>& differentiable, PyObject* const* arguments) {
  const py::gil_scoped_release without_gil;
  torch::autograd::edge_list edges;
  edges.reserve(differentiable.size());
  for (const int place : differentiable) {
    edges.push_back(
        place < 0 ? torch::autograd::Edge() : torch::autograd::impl::gradient_edge(THPVariable_Unpack(arguments[place])));
  }
  return edges;
}

// Has autograd follow a call.
inline void differentiate(
    const std::shared_ptr<const Differentiation>& of,
    PyObject* const* arguments,
    std::vector<double> numbers,
    const Results& results) {
  auto node = Nodes<NodePointer>::make<Gradient>(of, of->is_in_force(), std::move(numbers));
  node->set_next_edges(edges_of(of->differentiable, arguments));
  for (size_t place = 0; place < of->returned; ++place) {  // integers have no gradient, but a place among the results
    const bool has_gradient = torch::autograd::isDifferentiableType(results[place].scalar_type());
    torch::autograd::set_history(has_gradient ? results[place] : at::Tensor(), node);
  }
  for (const int place : of->saved) {  // after the edges, which keep a leaf's reference count above one
    if (place >= 0) node->save(THPVariable_Unpack(arguments[place]), false);
  }
  for (size_t place = of->first_result; place < of->last_result; ++place) {
    node->save(results[place], place < of->returned);
  }
}

inline PyObject* run(const Calls* self, PyObject* const* arguments, size_t positional, PyObject* names) {
  const size_t count = positional + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  if (count > most_arguments) return nullptr;
  Words words;
  if (!describe_call(arguments, positional, names, self->special, words)) return nullptr;
  const auto found = self->known->find(hash_of(words));
  if (found == self->known->end() || found->second->words != words || is_intercepted()) return nullptr;
  const auto known = found->second;  // an eviction during the launch must not free it
  // Before any address is taken: several tensors may lie in the memory that moves.
  for (const size_t place : known->written) writable_address_of(THPVariable_Unpack(arguments[place]));
  uint64_t addresses[most_operands];
  for (size_t slot = 0; slot < known->operands.size(); ++slot) {
    addresses[slot] = address_of(THPVariable_Unpack(arguments[known->operands[slot]]));
  }
  double numbers[most_arguments];
  for (size_t number = 0; number < known->numbers.size(); ++number) {
    numbers[number] = PyFloat_AS_DOUBLE(arguments[known->numbers[number]]);
  }
  const auto device = THPVariable_Unpack(arguments[known->operands[0]]).device();
  Results results;
  const Out out = known->out.bytes ? Out(THPVariable_Unpack(arguments[known->out.place])) : Out();
  if (out.tensor != nullptr && !is_writable(*known, out, arguments)) return nullptr;
  {
    torch::autograd::AutoGradMode no_grad(false);
    if (!known->recipe->run(addresses, known->numbers.empty() ? nullptr : numbers, device, results, out)) return nullptr;
  }
  if (known->differentiation != nullptr) {
    differentiate(known->differentiation, arguments, {numbers, numbers + known->numbers.size()}, results);
  }
  return results_of(*known, results);
}

inline PyObject* calls_vectorcall(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  PyObject* found = run(reinterpret_cast<Calls*>(self), arguments, PyVectorcall_NARGS(flags), names);
  return found != nullptr ? found : Py_NewRef(missed);
  END_HANDLE_TH_ERRORS
}

// register(*, arguments, options, recipe, plan, operands, written, numbers, out, returned, is_tuple, differentiation) -> bool
inline PyObject* calls_register(PyObject* self_, PyObject* positional, PyObject* named) {
  HANDLE_TH_ERRORS
  auto* self = reinterpret_cast<Calls*>(self_);
  const auto given = py::reinterpret_borrow<py::dict>(named);
  if (PyTuple_GET_SIZE(positional) || !given) throw std::invalid_argument("arguments without names");
  const py::tuple arguments = given["arguments"];
  const py::dict options = given["options"];
  std::vector<PyObject*> all;
  for (const auto argument : arguments) all.push_back(argument.ptr());
  py::tuple names(options.size());
  size_t place = 0;
  for (const auto& option : options) {
    names[place++] = option.first;
    all.push_back(option.second.ptr());
  }
  auto known = std::make_shared<KnownCall>();
  known->recipe = py::cast<std::shared_ptr<Recipe>>(given["recipe"]);
  known->plan = given["plan"];
  known->operands = py::cast<std::vector<size_t>>(given["operands"]);
  known->written = py::cast<std::vector<size_t>>(given["written"]);
  known->numbers = py::cast<std::vector<size_t>>(given["numbers"]);
  const int out = py::cast<int>(given["out"]);
  known->returned = py::cast<std::vector<size_t>>(given["returned"]);
  known->is_tuple = py::cast<bool>(given["is_tuple"]);
  const py::object differentiation = given["differentiation"];
  if (!differentiation.is_none()) known->differentiation = py::cast<std::shared_ptr<Differentiation>>(differentiation);
  if (all.size() > most_arguments || known->operands.size() != known->recipe->operands) Py_RETURN_FALSE;
  if (known->operands.empty() || (!known->is_tuple && known->returned.size() != 1)) Py_RETURN_FALSE;
  if (!describe_call(all.data(), arguments.size(), options.empty() ? nullptr : names.ptr(), self->special, known->words)) {
    Py_RETURN_FALSE;
  }
  if (out >= 0) {
    for (size_t argument = 0; argument < all.size(); ++argument) {
      if (!THPVariable_CheckExact(all[argument])) continue;
      const auto span = Span::of(argument, THPVariable_Unpack(all[argument]));
      if (argument == static_cast<size_t>(out)) {
        known->out = span;
      } else if (span.bytes) {
        known->others.push_back(span);
      }
    }
    if (!known->out.bytes || known->recipe->results.empty() || known->differentiation != nullptr) Py_RETURN_FALSE;
  }
  std::unordered_map<uint64_t, std::shared_ptr<const KnownCall>> forgotten;  // freed when the table is whole again
  if (self->known->size() >= most_known) self->known->swap(forgotten);
  const auto hash = hash_of(known->words);
  (*self->known)[hash] = std::move(known);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget(plan): the calls of a plan; of all plans if it is None.
inline PyObject* calls_forget(PyObject* self_, PyObject* plan) {
  auto* self = reinterpret_cast<Calls*>(self_);
  std::vector<std::shared_ptr<const KnownCall>> forgotten;  // freed when the table is whole again
  for (auto known = self->known->begin(); known != self->known->end();) {
    if (plan == Py_None || known->second->plan.ptr() == plan) {
      forgotten.push_back(std::move(known->second));
      known = self->known->erase(known);
    } else {
      ++known;
    }
  }
  Py_RETURN_NONE;
}

inline Py_ssize_t calls_length(PyObject* self) {
  return reinterpret_cast<Calls*>(self)->known->size();
}

inline PyObject* calls_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  unsigned long long with_extra_key = 0;
  Py_ssize_t numbers = 0;
  PyObject* extra_key = nullptr;
  if (!PyArg_ParseTuple(arguments, "|nKU", &numbers, &with_extra_key, &extra_key)) return nullptr;
  auto* self = reinterpret_cast<Calls*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = calls_vectorcall;
  self->known = new std::unordered_map<uint64_t, std::shared_ptr<const KnownCall>>();
  self->special = {static_cast<size_t>(numbers), with_extra_key, extra_key == nullptr ? nullptr : Py_NewRef(extra_key)};
  return reinterpret_cast<PyObject*>(self);
}

inline void calls_free(PyObject* self) {
  delete reinterpret_cast<Calls*>(self)->known;
  Py_XDECREF(reinterpret_cast<Calls*>(self)->special.extra_key);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyMethodDef calls_methods[] = {
    {"register", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(calls_register)), METH_VARARGS | METH_KEYWORDS,
     "Registers a call."},
    {"forget", calls_forget, METH_O, "Forgets the calls of a plan, or all."},
    {nullptr, nullptr, 0, nullptr}};

inline PyMemberDef calls_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Calls, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

inline PyType_Slot calls_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(calls_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(calls_free)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {Py_mp_length, reinterpret_cast<void*>(calls_length)},
    {0, nullptr}};

inline PyType_Spec calls_spec = {
    "cudnn_sdpa._native.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, calls_slots};

}  // namespace cudnn_sdpa
