// The native form of a bound plan: what is allocated, which address goes where, which kernels run before the plan.
#pragma once

#include "description.h"
#include "recorded.h"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <optional>

namespace cudnn_sdpa {

constexpr uint64_t misaligned = 15;  // bits that no aligned address has
constexpr int64_t most_operands = 64;
constexpr size_t most_fields = 512;  // a kernel has 4 KB of parameters

// The stored address of a tensor, 0 if it has no memory; memory that is shared until it is written to stays shared.
inline uint64_t address_of(const at::Tensor& tensor) {
  if (tensor.storage().data() == nullptr) return 0;  // PyTorch's answer would be the offset in storage that was freed
  return reinterpret_cast<uint64_t>(tensor.const_data_ptr());
}

// Likewise for writing; memory that the tensor shares until it is written to becomes its own.
inline uint64_t writable_address_of(const at::Tensor& tensor) {
  return tensor.storage().data() == nullptr ? 0 : reinterpret_cast<uint64_t>(tensor.mutable_data_ptr());
}

// The memory of the caller's that the first result is written to; none if there is no tensor.
struct Out {
  const at::Tensor* tensor = nullptr;
  uint64_t address = 0;

  Out() = default;

  explicit Out(const at::Tensor& given) : tensor(&given), address(writable_address_of(given)) {}

  // Tells autograd that the tensor has changed.
  void count_write() const {
    if (!tensor->is_inference()) torch::autograd::impl::bump_version(*tensor);
  }
};

struct Layout {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  py::object python_dtype;
};

// Where an address goes: `place` in a list of words gets that of `slot`, `offset` bytes on.
struct Pointer {
  size_t place, slot;
  int64_t offset;
};

inline py::object checked(PyObject* found) {
  if (found == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

// The address of words in an array of Python's, which must be kept, and never grow.
inline uint64_t* words_in(const py::object& array, py::ssize_t count) {
  const auto words = py::cast<py::buffer>(array).request();
  if (words.itemsize != sizeof(uint64_t) || words.size != count) throw std::invalid_argument("an array of other words");
  return static_cast<uint64_t*>(words.ptr);
}

inline py::list list_of(const uint64_t* words, size_t count) {
  py::list list(count);
  for (size_t place = 0; place < count; ++place) list[place] = py::int_(words[place]);
  return list;
}

// The slot of this thread on a device: its cuDNN handle, what that is bound to, and memory for launches on the default
// stream. One slot belongs to a thread as long as Python knows the thread by the same number.
struct OwnSlot {
  uint64_t thread = 0;
  int64_t device = -1;
  PyObject* slot = nullptr;
  PyObject* raw = nullptr;      // the handle
  const uint64_t* bound = nullptr;  // the stream that it is bound to
  uint64_t* zeros = nullptr;    // from one to the other: cleared memory that no launch has counted in
  PyObject* taken = nullptr;    // one byte: whether a call under way has taken the memory that kernels fill
  uint64_t scratch = 0;         // address of the scratch memory
  uint64_t filled = 0;          // address of the memory that kernels fill
};
inline thread_local OwnSlot own_slot;

// The memory that kernels fill, taken until the end of a launch.
class Taken {
 public:
  Taken() = default;
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  ~Taken() {
    if (byte_) *PyByteArray_AS_STRING(byte_.ptr()) = 0;
  }

  void take(PyObject* byte) {
    byte_ = py::reinterpret_borrow<py::object>(byte);
    *PyByteArray_AS_STRING(byte) = 1;
  }

 private:
  py::object byte_;
};

inline at::Tensor empty(const Layout& layout, at::Device on, const py::object& allocate) {
  if (allocate) {
    return THPVariable_Unpack(allocate(py::cast(layout.sizes), py::cast(layout.strides), layout.python_dtype).ptr());
  }
  // What is above the device's own function in the dispatcher has nothing to do here; and that does nothing else either,
  // but where PyTorch is to fill new memory.
  const c10::DispatchKeySet key(on.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    return at::_ops::empty_strided::redispatch(
        key, c10::fromIntArrayRefSlow(layout.sizes), c10::fromIntArrayRefSlow(layout.strides), layout.dtype, std::nullopt,
        on, std::nullopt);
  }
  auto* allocator = on.is_cuda() ? at::detail::getCUDAHooks().getCUDADeviceAllocator() : c10::GetAllocator(c10::kCPU);
  return at::detail::empty_strided_generic(layout.sizes, layout.strides, allocator, key, layout.dtype);
}

// PyTorch's current stream of a device.
struct Stream {
  uint64_t raw;

  bool is_default() const {
    return raw == 0;
  }
};

// Asks PyTorch what is current: in C++ as far as that can tell.
struct Current {
  py::object stream;     // gives the address of a device's stream
  py::object device;     // gives the device's number; the tests' own, null for PyTorch's
  py::object number;     // of the device of a recipe
  bool is_pytorchs_stream, has_one_device;

  Stream stream_of(at::Device on) const {
    // Any other one's number says no address; and that function is of PyTorch's CUDA library, which is not linked.
    if (is_pytorchs_stream && !c10::impl::getDeviceGuardImpl(on.type())->getStream(on).id()) return {0};
    PyObject* of_device[] = {number.ptr()};
    return {py::cast<uint64_t>(checked(PyObject_Vectorcall(stream.ptr(), of_device, 1, nullptr)))};
  }

  bool is_on(at::Device on) const {
    if (has_one_device) return true;
    if (device) return checked(PyObject_CallNoArgs(device.ptr())).equal(number);
    return c10::impl::getDeviceGuardImpl(on.type())->getDevice() == on;
  }
};

// One of the library's own kernels; its argument is a list of words.
struct Kernel {
  decltype(driver::Functions::cuLaunchKernelEx) launch_ex;  // null where `python` launches it
  driver::Result (*is_capturing)(void*, int*);
  void* function;
  unsigned blocks, threads, shared;  // the last one in bytes
  bool overlaps;      // it waits itself for what is ahead in the stream: its launch need not, which takes the host less
  py::object python;  // launches it given its fields and the stream, and says what is wrong if the driver refuses

  void launch(uint64_t* fields, size_t count, const Stream& current) const {
    if (launch_ex != nullptr) {
      driver::Attribute early{driver::kProgrammaticStreamSerialization, {1}};
      auto* const stream = reinterpret_cast<void*>(current.raw);
      // Not in CUDA graphs, whose other readers may not expect the edges that it makes. The default stream has none.
      int captured = 0;
      const bool is_early = overlaps && (current.is_default() || !(is_capturing(stream, &captured) || captured));
      const driver::LaunchConfig config{{blocks, 1, 1}, {threads, 1, 1}, shared, stream, &early, is_early};
      void* argument[] = {fields};
      if (!launch_ex(&config, function, argument, nullptr)) return;
    }
    python(list_of(fields, count), py::int_(current.raw));
  }
};

// A kernel before a plan, as `OwnKernel` in Python.
struct OwnKernel {
  Kernel kernel;
  std::vector<uint64_t> fields;
  std::vector<Pointer> pointers;

  void launch(const uint64_t* slots, const Stream& current) const {
    uint64_t filled[most_fields];
    std::copy(fields.begin(), fields.end(), filled);
    for (const auto& pointer : pointers) filled[pointer.place] = slots[pointer.slot] + pointer.offset;
    kernel.launch(filled, fields.size(), current);
  }
};

// The kernels of a plan of the library's own, launched as `KernelPlan.launch` does it in Python.
struct Program {
  std::vector<Kernel> kernels;
  std::vector<uint64_t> fields;
  std::vector<std::pair<size_t, size_t>> places;   // for each pointer its field, and the bytes that are copied from it
  std::vector<std::pair<size_t, uint64_t>> scratch;  // for each tensor its field, and where it begins in the workspace

  void launch(const uint64_t* pointers, uint64_t workspace, const Stream& current) const {
    uint64_t filled[most_fields];
    std::copy(fields.begin(), fields.end(), filled);
    for (const auto& [field, size] : places) {
      const uint64_t pointer = *pointers++;
      filled[field] = size ? 0 : pointer;
      if (size) std::memcpy(filled + field, reinterpret_cast<const void*>(pointer), size);
    }
    for (const auto& [field, offset] : scratch) filled[field] = workspace + offset;
    for (const auto& kernel : kernels) kernel.launch(filled, fields.size(), current);
  }
};

// Functions with TVM FFI's C interface, called as `FunctionPlan.launch` does it in Python.
struct Functions {
  using Function = int (*)(void*, const void*, int32_t, void*);
  using SetStream = int (*)(int32_t, int32_t, void*, void**);

  struct Call {
    Function function;
    size_t first;  // the word of its first argument
    int32_t count;
  };

  static constexpr int32_t cuda = 2;

  std::vector<Call> calls;
  SetStream set_stream;
  int32_t device;
  std::vector<uint64_t> words;
  std::vector<Pointer> pointers;                       // `place` is a word, `slot` an operand
  std::vector<std::pair<size_t, uint64_t>> scratch;    // words, and where tensors begin in the workspace
  std::vector<std::pair<size_t, size_t>> links;        // words, and the words that they point to
  std::vector<std::pair<size_t, size_t>> numbers;      // words, and operands in host memory
  std::pair<int64_t, int64_t> zeroed;                  // the first byte of the workspace, and how many
  py::object refuse;                                   // raises what a function has raised

  void launch(const uint64_t* operands, const at::Tensor& workspace, const Stream& current) const {
    if (zeroed.second) workspace.narrow(0, zeroed.first, zeroed.second).zero_();
    execute(operands, workspace.defined() ? address_of(workspace) : 0, current);
  }

  void execute(const uint64_t* operands, uint64_t memory, const Stream& current) const {
    std::vector<uint64_t> filled = words;
    for (const auto& pointer : pointers) filled[pointer.place] = operands[pointer.slot] + pointer.offset;
    for (const auto& [word, target] : links) filled[word] = reinterpret_cast<uint64_t>(filled.data() + target);
    for (const auto& [word, operand] : numbers) {
      const double number = *reinterpret_cast<const float*>(operands[operand]);
      std::memcpy(&filled[word], &number, sizeof number);
    }
    for (const auto& [word, offset] : scratch) filled[word] = memory + offset;
    void* before = nullptr;
    set_stream(cuda, device, reinterpret_cast<void*>(current.raw), &before);
    int failed = 0;
    for (const auto& call : calls) {
      uint64_t result[2] = {0, 0};
      StackNoise::write();
      failed = call.function(nullptr, filled.data() + call.first, call.count, result);
      if (failed) break;
    }
    set_stream(cuda, device, before, nullptr);
    if (failed) refuse();
  }
};

// A plan, launched as `Plan.launch` does it in Python.
struct Plan {
  py::object python;            // the same plan there
  py::object launch_in_python;  // its `launch`, where none of the following is set
  std::optional<Program> program;
  std::optional<Functions> functions;
  py::object execute;           // the frontend's, with an array of raw pointers; needs the rest
  py::object slots;             // gives this thread's slot
  py::object capturing;         // whether a CUDA graph is being captured
  py::object use_arrays;        // of Python, which reads what this module counts there:
  uint64_t* uses;               // all launches of this module,
  uint64_t* last_use;           // and how many there were when this plan was launched last, with that launch
  py::object keep, refused;
  py::object device, count, no_overrides;
  py::object of_bound, of_cleared, of_raw, of_scratch, of_taken, bind, make_filled;  // names of a slot's attributes
  int64_t device_number, scratch;
  uint64_t zeros = 0;  // bytes behind the scratch memory
  Layout workspace;
  std::shared_ptr<Recorded> recorded;  // null where launches are not to be recorded
  py::object watch;                    // launches the plan in Python, and brings the recording forward

  void launch(uint64_t* pointers, size_t number, at::Device on, const py::object& allocate, const Stream& current) const {
    *last_use = ++*uses;
    if (program) {
      at::Tensor memory;  // until all kernels are launched
      if (workspace.sizes[0]) memory = empty(workspace, on, allocate);
      program->launch(pointers, memory.defined() ? address_of(memory) : 0, current);
      return;
    }
    if (is_watched_launch(pointers, number)) return;
    const bool is_recorded = recorded != nullptr && recorded->is_serving && recorded->serves(pointers);
    if (functions) {
      const auto memory = workspace.sizes[0] ? empty(workspace, on, allocate) : at::Tensor();
      if (is_recorded) {
        launch_recorded(pointers, number, memory.defined() ? address_of(memory) : 0, current);
      } else {
        functions->launch(pointers, memory, current);
      }
      return;
    }
    if (!execute) {
      launch_in_python(list_of(pointers, number));
      return;
    }
    // Held here: what Python frees may launch something on another device.
    const auto& own = slot();
    const auto of_thread = py::reinterpret_borrow<py::object>(own.slot), handle = py::reinterpret_borrow<py::object>(own.raw);
    const auto* const bound = own.bound;
    if (!current.is_default() && checked(PyObject_CallNoArgs(capturing.ptr())).ptr() == Py_True) keep();
    const bool is_scratch = current.is_default() && workspace.sizes[0] <= scratch;
    at::Tensor memory;  // of the workspace, until the launch
    if (!is_scratch && workspace.sizes[0]) memory = empty(workspace, on, allocate);
    const bool takes_zeros = is_recorded && recorded->takes_zeros && current.is_default();
    if (is_recorded && !takes_zeros && !(is_scratch && workspace.sizes[0])) {  // the handle need not be bound
      launch_recorded(pointers, number, memory.defined() ? address_of(memory) : 0, current);
      return;
    }
    // Last, as nothing below runs Python: what an allocation frees, or a signal's handler, may launch on another stream.
    while (*bound != current.raw) {
      const py::int_ stream(current.raw);
      PyObject* binding[] = {of_thread.ptr(), stream.ptr()};
      checked(PyObject_VectorcallMethod(bind.ptr(), binding, 2, nullptr));
    }
    const uint64_t address = is_scratch ? scratch_of(of_thread) : memory.defined() ? address_of(memory) : 0;
    if (is_recorded) {
      launch_recorded(pointers, number, address, current, takes_zeros ? take_zeros(of_thread) : 0);
      return;
    }
    const py::int_ array(reinterpret_cast<uint64_t>(pointers)), of_workspace(address);
    PyObject* arguments[] = {array.ptr(), count.ptr(), of_workspace.ptr(), handle.ptr(), no_overrides.ptr()};
    PyObject* done = PyObject_Vectorcall(execute.ptr(), arguments, 5, nullptr);
    if (done == nullptr) raise_refused();
    Py_DECREF(done);
  }

  // The address of the memory that kernels fill, which is then taken; 0 if the call must allocate its own. See
  // `Plan.take_filled`, which does the same in Python.
  uint64_t take_filled(const Stream& current, Taken& taken) const {
    if (!execute || !current.is_default()) return 0;
    auto* own = &slot();
    if (*PyByteArray_AS_STRING(own->taken)) return 0;
    if (!own->filled) {
      const auto of_thread = py::reinterpret_borrow<py::object>(own->slot);
      PyObject* given[] = {of_thread.ptr()};
      const auto made = checked(PyObject_VectorcallMethod(make_filled.ptr(), given, 1, nullptr));
      own = &slot();  // again, as after all that runs Python
      if (*PyByteArray_AS_STRING(own->taken)) return 0;
      own->filled = py::cast<uint64_t>(made);
    }
    taken.take(own->taken);
    return own->filled;
  }

 private:
  // Whether Python launches the plan, and brings the recording forward.
  bool is_watched_launch(const uint64_t* pointers, size_t number) const {
    if (recorded == nullptr || !recorded->is_watched || Asking::is_over) return false;
    if (recorded->calls_before) {
      --recorded->calls_before;
      return false;
    }
    const Asking asking;
    watch(python, list_of(pointers, number));
    return true;
  }

  // After an error the provider launches the plan, now and always. It may know why: another plan has changed an attribute of
  // the same function, which `execute` sets again. What has been launched of this call is launched again.
  void launch_recorded(
      const uint64_t* pointers, size_t number, uint64_t memory, const Stream& current, uint64_t zeros = 0) const {
    const auto error = recorded->launch(pointers, memory, current.raw, zeros);
    if (!error) return;
    recorded->error = error, recorded->is_serving = false, recorded->is_watched = true;
    const Asking asking;
    watch(python, list_of(pointers, number));
  }

  // Zeros for the counters of a recorded launch on the default stream; 0 if it clears its own. One memset clears those of
  // many launches: each saves the host a launch, and the GPU a microsecond or two. No launch counts where another has.
  uint64_t take_zeros(const py::object& of_thread) const {
    const uint64_t size = recorded->zeros();
    if (own_slot.slot != of_thread.ptr()) return 0;
    auto *next = own_slot.zeros, *end = next + 1;
    if (*end - *next < size) {
      const auto begin = scratch_of(of_thread) + scratch;
      if (zeros < size || cuda.cuMemsetD8Async(begin, 0, zeros, nullptr)) return 0;
      *next = begin, *end = begin + zeros;
    }
    *next += size;
    return *next - size;
  }

  // Raises what Python's way raises for the error that is set.
  [[noreturn]] void raise_refused() const {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();
    py::error_already_set error;
    refused(error.value());
    throw std::runtime_error("a refused launch");
  }

  OwnSlot& slot() const {
    const uint64_t thread = PyThreadState_GetID(PyThreadState_Get());
    auto& own = own_slot;
    if (own.thread != thread || own.device != device_number) {
      const auto found = slots(device);
      auto raw = checked(PyObject_GetAttr(found.ptr(), of_raw.ptr()));
      auto taken = checked(PyObject_GetAttr(found.ptr(), of_taken.ptr()));
      if (!PyByteArray_CheckExact(taken.ptr()) || PyByteArray_GET_SIZE(taken.ptr()) != 1) {
        throw std::invalid_argument("a slot whose memory cannot be taken");
      }
      const auto* const bound = words_in(checked(PyObject_GetAttr(found.ptr(), of_bound.ptr())), 1);
      auto* const of_zeros = words_in(checked(PyObject_GetAttr(found.ptr(), of_cleared.ptr())), 2);
      OwnSlot before = own;  // freed when the new one is whole
      own = {thread, device_number, found.inc_ref().ptr(), raw.release().ptr(), bound, of_zeros, taken.release().ptr()};
      Py_XDECREF(before.slot);
      Py_XDECREF(before.raw);
      Py_XDECREF(before.taken);
    }
    return own;
  }

  // Known once the slot has been bound to the default stream.
  uint64_t scratch_of(const py::object& of_thread) const {
    auto& own = own_slot;
    const bool is_own = own.slot == of_thread.ptr();
    if (is_own && own.scratch) return own.scratch;
    const auto address = py::cast<uint64_t>(checked(PyObject_GetAttr(of_thread.ptr(), of_scratch.ptr())));
    if (is_own) own.scratch = address;
    return address;
  }
};

using Results = c10::SmallVector<at::Tensor, 8>;

// A bound plan in C++; made of a `BoundPlan` of Python, which does the same there.
struct Recipe {
  size_t operands;
  std::vector<Pointer> aligned;   // addresses that kernels read in words of 16 bytes; `place` is not used
  std::vector<Layout> results, buffers;
  bool may_take;                  // whether the memory of the thread's slot may serve as the buffers
  std::vector<uint64_t> offsets;  // theirs in it
  std::vector<OwnKernel> kernels;
  std::vector<uint64_t> pointers;
  std::vector<Pointer> places;
  std::vector<size_t> number_places;
  std::vector<float> numbers;
  py::object arrays;              // of the host, whose addresses are among the pointers
  Plan plan;
  py::object allocate;  // the tests' own; null for PyTorch's
  Current pytorchs;

  // Runs a call given the addresses of its operands; false if Python must look at it.
  bool run(
      const uint64_t* addresses, const double* given_numbers, at::Device on, Results& found, const Out& out = {}) const {
    uint64_t slots[most_operands];
    for (size_t slot = 0; slot < operands; ++slot) {
      if (!addresses[slot]) return false;
      slots[slot] = addresses[slot];
    }
    for (const auto& pointer : aligned) {
      if ((addresses[pointer.slot] + pointer.offset) & misaligned) return false;
    }
    if (!pytorchs.is_on(on)) return false;
    size_t slot = operands;
    if (out.tensor != nullptr) {
      out.count_write();
      found.push_back(*out.tensor);
      slots[slot++] = out.address;
    }
    for (size_t result = found.size(); result < results.size(); ++result) {
      found.push_back(empty(results[result], on, allocate));
      slots[slot++] = address_of(found.back());
    }
    const Stream current = pytorchs.stream_of(on);
    Results made;  // the buffers, until the launch
    Taken taken;   // or memory in which they lie
    const uint64_t filled = may_take ? plan.take_filled(current, taken) : 0;
    for (size_t buffer = 0; buffer < buffers.size(); ++buffer) {
      if (!filled) made.push_back(empty(buffers[buffer], on, allocate));
      slots[slot++] = filled ? filled + offsets[buffer] : address_of(made.back());
    }
    for (const auto& kernel : kernels) kernel.launch(slots, current);
    c10::SmallVector<uint64_t, 48> words(pointers.begin(), pointers.end());
    for (const auto& pointer : places) words[pointer.place] = slots[pointer.slot] + pointer.offset;
    c10::SmallVector<float, 8> values(numbers.begin(), numbers.end());  // cuDNN reads them at the launch
    for (size_t number = 0; number < values.size(); ++number) {
      if (given_numbers != nullptr) values[number] = static_cast<float>(given_numbers[number]);
      words[number_places[number]] = reinterpret_cast<uint64_t>(&values[number]);
    }
    plan.launch(words.data(), words.size(), on, allocate, current);
    return true;
  }
};

}  // namespace cudnn_sdpa
