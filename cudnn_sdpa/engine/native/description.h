// What decides whether a call is like another one: its arguments, and the state of its thread.
#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace cudnn_sdpa {

// A call's description: words that are equal for calls that are alike.
using Words = c10::SmallVector<uint64_t, 160>;

// Keys of plain tensors in a CPU's or an NVIDIA GPU's memory. Others are subclasses, fake, batched, sparse, nested,
// lazily negated, without memory, ...
inline constexpr c10::DispatchKeySet plain_keys =
    c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView}) |
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;

inline bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && !(tensor.key_set().raw_repr() & ~plain_keys.raw_repr());
}

// Of a plain tensor. Whether it requires grad is part of it only where gradients are enabled.
inline void describe(const at::Tensor& tensor, bool grad_mode, Words& words) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto sizes = impl->sizes(), strides = impl->strides();
  const size_t count = words.size();
  words.resize_for_overwrite(count + 2 + 2 * sizes.size());
  auto* word = words.data() + count;
  *word++ = impl->key_set().raw_repr();
  *word++ = static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 32 |
      static_cast<uint64_t>(static_cast<uint8_t>(impl->device().index())) << 16 | sizes.size() << 1 |
      static_cast<uint64_t>(grad_mode && impl->requires_grad());
  std::copy(strides.begin(), strides.end(), std::copy(sizes.begin(), sizes.end(), word));
}

// What PyTorch has set in this thread: autocast, inference mode, dispatch modes, functorch's transforms and tracing show
// in the dispatch keys, but for autocast's dtypes. Grad mode is in the last word.
inline void describe_state(Words& words) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  words.push_back(keys.included_.raw_repr());
  words.push_back(keys.excluded_.raw_repr());
  if ((keys.excluded_ & c10::autocast_dispatch_keyset) != c10::autocast_dispatch_keyset) {  // on, for some device
    words.push_back(
        static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCUDA)) << 8 |
        static_cast<uint64_t>(at::autocast::get_autocast_dtype(at::kCPU)));
  }
  words.push_back(
      static_cast<uint64_t>(c10::GradMode::is_enabled()) | at::globalContext().deterministicAlgorithms() << 1);
}

// Whether a profiler or another observer is to see operators. No dispatch key tells of them; the dispatcher asks this.
inline bool is_observed() {
  return torch::profiler::impl::profilerEnabled() || at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

enum Tag : uint64_t { kTensor = 1, kNone, kFalse, kTrue, kInt, kFloat, kNumber, kString, kTuple, kDtype };

inline constexpr int most_nested = 8;  // tuples in tuples; a caller's could be nested until the stack is full

// Options are of these types; calls with others take the Python way.
inline bool describe_option(PyObject* option, Words& words, int nested = 0) {
  if (option == Py_None) {
    words.push_back(kNone);
  } else if (option == Py_False || option == Py_True) {
    words.push_back(option == Py_True ? kTrue : kFalse);
  } else if (PyLong_CheckExact(option)) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(option, &overflow);
    if (overflow) return false;
    words.push_back(kInt);
    words.push_back(static_cast<uint64_t>(value));
  } else if (PyFloat_CheckExact(option)) {
    const double value = PyFloat_AS_DOUBLE(option);  // by its bits: 0.0 is not -0.0
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    words.push_back(kFloat);
    words.push_back(bits);
  } else if (PyUnicode_CheckExact(option)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(option, &size);
    if (text == nullptr || size > 64) {
      PyErr_Clear();
      return false;
    }
    words.push_back(kString | static_cast<uint64_t>(size) << 8);
    for (Py_ssize_t begin = 0; begin < size; begin += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text + begin, std::min<Py_ssize_t>(8, size - begin));
      words.push_back(word);
    }
  } else if (PyTuple_CheckExact(option) && nested < most_nested) {
    const auto size = PyTuple_GET_SIZE(option);
    words.push_back(kTuple | static_cast<uint64_t>(size) << 8);
    for (Py_ssize_t place = 0; place < size; ++place) {
      if (!describe_option(PyTuple_GET_ITEM(option, place), words, nested + 1)) return false;
    }
  } else if (THPDtype_Check(option)) {
    words.push_back(kDtype | static_cast<uint64_t>(reinterpret_cast<THPDtype*>(option)->scalar_type) << 8);
  } else {
    return false;
  }
  return true;
}

// Arguments of a function that are not described like others.
struct Special {
  size_t numbers;   // how many positional arguments are data if they are floats, the first ones
  uint64_t with_extra_key;  // arguments with an attribute that decides how a call is launched
  PyObject* extra_key;  // its name
};

// An attribute in a tensor's own namespace; None if it has none.
inline bool describe_extra_key(PyObject* tensor, PyObject* name, Words& words) {
  PyObject* namespace_ = PyObject_GenericGetDict(tensor, nullptr);
  if (namespace_ == nullptr) {
    PyErr_Clear();
    return false;
  }
  PyObject* value = PyDict_GetItemWithError(namespace_, name);
  const bool is_known = describe_option(value == nullptr ? Py_None : value, words);
  Py_DECREF(namespace_);
  return is_known;
}

// Of all arguments of a call, the last of which may be named.
inline bool describe_call(
    PyObject* const* arguments, size_t positional, PyObject* names, const Special& special, Words& words) {
  describe_state(words);
  const bool grad_mode = words.back() & 1;
  const size_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names), count = positional + named;
  words.push_back(positional << 32 | named);
  for (size_t place = 0; place < named; ++place) {
    if (!describe_option(PyTuple_GET_ITEM(names, place), words)) return false;
  }
  for (size_t place = 0; place < count; ++place) {
    PyObject* argument = arguments[place];
    if (THPVariable_CheckExact(argument)) {
      const auto& tensor = THPVariable_Unpack(argument);
      if (!is_plain(tensor)) return false;
      size_t first = 0;  // one tensor in two places
      while (arguments[first] != argument) ++first;
      words.push_back(kTensor | first << 8);
      if (first == place) describe(tensor, grad_mode, words);
      if (special.with_extra_key >> place & 1 && !describe_extra_key(argument, special.extra_key, words)) return false;
    } else if (place < special.numbers && place < positional && PyFloat_CheckExact(argument)) {
      words.push_back(kNumber);
    } else if (!describe_option(argument, words)) {
      return false;
    }
  }
  return true;
}

inline uint64_t hash_of(const Words& words) {
  constexpr uint64_t factor = 0xFF51AFD7ED558CCD;
  uint64_t hashes[] = {0x9E3779B97F4A7C15, 1, 2, 3};  // of every fourth word: they do not wait for each other
  const auto mix = [](uint64_t& hash, uint64_t word) {
    hash = (hash ^ word) * factor;
    hash ^= hash >> 32;
  };
  size_t place = 0;
  for (; place + 4 <= words.size(); place += 4) {
    for (size_t of = 0; of < 4; ++of) mix(hashes[of], words[place + of]);
  }
  for (; place < words.size(); ++place) mix(hashes[0], words[place]);
  for (size_t of = 1; of < 4; ++of) mix(hashes[0], hashes[of]);
  return hashes[0];
}

}  // namespace cudnn_sdpa
