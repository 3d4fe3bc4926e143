// The node of autograd's graph: it saves what a call's gradients need. Like calls are launched here, others in Python.
#pragma once

#include "recipe.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace cudnn_sdpa {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge{}.function);

// PyTorch 2.9 to 2.12 counts the references of nodes with std::shared_ptr, later ones with c10::intrusive_ptr.
template <class Pointer>
struct Nodes;

template <>
struct Nodes<std::shared_ptr<Node>> {
  template <class T, class... Arguments>
  static std::shared_ptr<T> make(Arguments&&... arguments) {
    return std::shared_ptr<T>(new T(std::forward<Arguments>(arguments)...), [](T* node) { deleteNode(node); });
  }
  template <class T>
  static std::shared_ptr<Node> of(T* node) {
    return node->shared_from_this();
  }
};

template <>
struct Nodes<c10::intrusive_ptr<Node>> {
  template <class T, class... Arguments>
  static c10::intrusive_ptr<T> make(Arguments&&... arguments) {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
  template <class T>
  static c10::intrusive_ptr<Node> of(T* node) {
    return c10::intrusive_ptr<Node>::unsafe_reclaim_from_nonowning(node);
  }
};

// A kind of backward calls that is launched here. It holds no plan: autograd's graph holds it.
struct KnownBackward {
  Words words;
  std::weak_ptr<const Recipe> recipe;
  std::vector<size_t> operands;  // places among the gradients and what was saved
  std::vector<size_t> returned;  // which results are the needed gradients
};

// The last few of them, of a kind of forward calls, the last one first: gradients may lie in two ways, or be needed of
// different inputs, in turn. The GIL guards it.
class KnownBackwards {
 public:
  std::shared_ptr<const KnownBackward> find(const Words& words) {
    const auto found = place_of(words);
    if (found == known_.end()) return nullptr;
    std::rotate(known_.begin(), found, found + 1);
    return known_.front();
  }

  void add(std::shared_ptr<const KnownBackward> backward) {
    const auto found = place_of(backward->words);
    if (found != known_.end()) known_.erase(found);
    if (known_.size() == most) known_.pop_back();
    known_.insert(known_.begin(), std::move(backward));
  }

 private:
  static constexpr size_t most = 4;
  using Known = std::vector<std::shared_ptr<const KnownBackward>>;

  Known::iterator place_of(const Words& words) {
    return std::find_if(known_.begin(), known_.end(), [&](const auto& known) { return known->words == words; });
  }

  Known known_;
};

inline std::atomic<uint64_t> differentiations = 0;

// What the gradients of a kind of forward calls need.
struct Differentiation {
  const uint64_t number = ++differentiations;  // no other kind ever has it
  std::string name;
  py::object gradients;            // computes them in Python
  py::object options;              // given to it
  py::object setting, in_force;    // a context variable that the forward pass reads, and its value that is saved as true
  std::vector<int> differentiable; // places of the inputs among the arguments; -1 for one that is left out
  std::vector<int> saved;          // places of the saved arguments; -1 for None
  size_t first_result, last_result;  // which results are saved
  size_t returned;                 // how many results the caller gets, the first ones
  const std::shared_ptr<KnownBackwards> backwards = std::make_shared<KnownBackwards>();

  // Whether the setting has that value in this thread.
  bool is_in_force() const {
    if (!setting) return false;
    PyObject* value = nullptr;
    if (PyContextVar_Get(setting.ptr(), nullptr, &value) < 0) throw py::error_already_set();
    const auto found = py::reinterpret_steal<py::object>(value);
    const int is_equal = found ? PyObject_RichCompareBool(found.ptr(), in_force.ptr(), Py_EQ) : 0;
    if (is_equal < 0) throw py::error_already_set();
    return is_equal;
  }

  ~Differentiation() {
    if (!Py_IsInitialized()) {  // the interpreter has ended: nobody counts
      gradients.release(), options.release(), setting.release(), in_force.release();
      return;
    }
    py::gil_scoped_acquire gil;
    gradients = options = setting = in_force = py::object();
  }
};

struct Gradient : public Node {
  Gradient(std::shared_ptr<const Differentiation> of, bool may_fall_back, std::vector<double> numbers)
      : of_(std::move(of)), may_fall_back_(may_fall_back), numbers_(std::move(numbers)) {
    saved_.reserve(of_->saved.size() + of_->last_result - of_->first_result);
  }

  std::string name() const override {
    return of_->name;
  }

  void save(const at::Tensor& tensor, bool is_result) {
    saved_.emplace_back(tensor, is_result);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);  // two threads may go through one graph
    for (auto& variable : saved_) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const size_t of_results = grads.size();
    variable_list tensors = std::move(grads);
    tensors.reserve(of_results + saved_.size());
    {
      const auto self = Nodes<NodePointer>::of(static_cast<Node*>(this));
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& variable : saved_) tensors.push_back(variable.unpack(self));
    }
    return gradients(tensors, of_results, needs());
  }

  // Compiled autograd: its graph is specialized on the kind of call, has the saved tensors as inputs, and calls back.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(of_->number);
    args.collect(may_fall_back_);
    args.collect(numbers_);
    for (const auto& variable : saved_) args.collect(variable, true);
  }

  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    std::vector<c10::IValue> tensors;
    for (auto& variable : saved_) {
      swap.before(variable);
      tensors.emplace_back(variable.unpack(Nodes<NodePointer>::of(static_cast<Node*>(this))));
    }
    auto node = Nodes<NodePointer>::make<Gradient>(of_, may_fall_back_, numbers_);  // has saved nothing
    const auto run = [node, needs = needs()](const variable_list& grads, const std::vector<c10::IValue>& saved) {
      variable_list tensors(grads.begin(), grads.end());
      for (const auto& tensor : saved) tensors.push_back(tensor.toTensor());
      return node->gradients(tensors, grads.size(), needs);
    };
    using namespace torch::dynamo::autograd;
    const std::vector<at::TypePtr> types(tensors.size(), at::TensorType::get());
    const auto layouts = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    const auto& python = getPyCompilerInterface();
    const auto name = python->bind_function(swap.get_py_compiler(), of_->name, run, types, true, false);
    auto found = python->call_function(swap.get_py_compiler(), "apply_functional", name, grads, tensors, layouts);
    for (auto& variable : saved_) swap.after(variable);
    return found;
  }

 private:
  // The gradients, given those of the results and what was saved, and which are needed.
  variable_list gradients(const variable_list& tensors, size_t grads, uint64_t needs) const {
    py::gil_scoped_acquire gil;
    variable_list found(of_->differentiable.size());
    Words words;
    const bool is_plain_call = describe_backward(tensors, needs, words);
    if (is_plain_call && launch(words, tensors, needs, found)) return found;
    run_in_python(tensors, grads, needs, is_plain_call ? &words : nullptr, found);
    return found;
  }

  uint64_t needs() const {
    uint64_t found = 0;
    for (size_t place = 0; place < of_->differentiable.size(); ++place) {
      found |= static_cast<uint64_t>(task_should_compute_output(place)) << place;
    }
    return found;
  }

  // Whether autograd's engine alone sees this call, and the words that describe it.
  bool describe_backward(const variable_list& tensors, uint64_t needs, Words& words) const {
    describe_state(words);
    if (words.back() & 1 || is_observed()) return false;  // to be differentiated again, or seen
    words.push_back(needs);
    for (const double number : numbers_) {  // which may decide what a backward pass does
      uint64_t bits = 0;
      std::memcpy(&bits, &number, sizeof bits);
      words.push_back(bits);
    }
    for (size_t place = 0; place < tensors.size(); ++place) {
      const auto& tensor = tensors[place];
      if (!tensor.defined()) {
        words.push_back(kNone);
        continue;
      }
      if (!is_plain(tensor)) return false;
      words.push_back(kTensor);
      describe(tensor, false, words);
    }
    return true;
  }

  // Launches a known backward call; false if Python must look at it.
  bool launch(const Words& words, const variable_list& tensors, uint64_t needs, variable_list& found) const {
    const auto known = of_->backwards->find(words);  // held: Python may forget it during the launch
    const auto recipe = known == nullptr ? nullptr : known->recipe.lock();
    if (recipe == nullptr) return false;
    uint64_t addresses[most_operands];
    const auto& operands = known->operands;
    for (size_t slot = 0; slot < operands.size(); ++slot) addresses[slot] = address_of(tensors[operands[slot]]);
    Results results;
    if (!recipe->run(addresses, nullptr, tensors[operands[0]].device(), results)) return false;
    size_t result = 0;
    for (size_t place = 0; place < found.size(); ++place) {
      if (needs >> place & 1) found[place] = std::move(results[known->returned[result++]]);
    }
    return true;
  }

  void run_in_python(
      const variable_list& tensors, size_t grads, uint64_t needs, const Words* words, variable_list& found) const {
    py::tuple of_results(grads), saved(of_->saved.size() + tensors.size() - grads - given()), wanted(found.size());
    for (size_t place = 0; place < grads; ++place) of_results[place] = wrapped(tensors[place]);
    size_t next = grads, at = 0;
    for (const int place : of_->saved) saved[at++] = place < 0 ? py::none() : wrapped(tensors[next++]);
    while (next < tensors.size()) saved[at++] = wrapped(tensors[next++]);
    for (size_t place = 0; place < found.size(); ++place) wanted[place] = py::bool_(needs >> place & 1);
    // The gradients, and if calls like this one are launched here from now on, their recipe and where its operands are.
    const py::object given_back = of_->gradients(
        of_->options, of_results, saved, wanted, py::arg("may_fall_back") = may_fall_back_,
        py::arg("numbers") = py::tuple(py::cast(numbers_)), py::arg("can_register") = words != nullptr);
    const py::sequence gradients = given_back.attr("gradients");
    for (size_t place = 0; place < found.size(); ++place) {
      const py::object gradient = gradients[place];
      if (!gradient.is_none()) found[place] = THPVariable_Unpack(gradient.ptr());
    }
    const py::object recipe = given_back.attr("recipe");
    if (words == nullptr || recipe.is_none()) return;
    auto known = std::make_shared<KnownBackward>();
    known->words = *words;
    known->recipe = py::cast<std::shared_ptr<Recipe>>(recipe);
    known->returned = py::cast<std::vector<size_t>>(given_back.attr("returned"));
    for (const auto place : py::cast<std::vector<size_t>>(given_back.attr("operands"))) {
      known->operands.push_back(place_among_tensors(place, grads));
    }
    if (known->operands.empty() || known->operands.size() != py::cast<const Recipe&>(recipe).operands) return;
    of_->backwards->add(std::move(known));
  }

  // How many of the saved arguments are tensors.
  size_t given() const {
    size_t count = 0;
    for (const int place : of_->saved) count += place >= 0;
    return count;
  }

  // Of a place among gradients, saved arguments and saved results, of which those that are None are left out here.
  size_t place_among_tensors(size_t place, size_t grads) const {
    size_t left_out = 0;
    for (size_t argument = 0; argument < of_->saved.size() && grads + argument < place; ++argument) {
      left_out += of_->saved[argument] < 0;
    }
    return place - left_out;
  }

  static py::object wrapped(const at::Tensor& tensor) {
    return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)) : py::none();
  }

  std::shared_ptr<const Differentiation> of_;
  std::vector<SavedVariable> saved_;
  bool may_fall_back_;
  std::vector<double> numbers_;
};

}  // namespace cudnn_sdpa
