// What a plan launches, read from captured graphs and launched with other addresses by the driver alone.
//
// A plan is captured several times at addresses of which no two move alike. A word of its kernels' arguments is an
// operand's address if it moves as the operand does. All else must be equal in all captures, but for what host code leaves
// unwritten of an argument, and the last captures must be as the others predict, to the byte.
#pragma once

#include "driver.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cudnn_sdpa {

inline driver::Functions cuda;

// Python, run from here: the interpreter ends a daemon's thread that waits for the GIL, and no such end may unwind C++.
// So Python is asked no more once it is about to end, and waits for those that have asked.
class Asking {
 public:
  inline static bool is_over = false;
  inline static int count = 0;  // the GIL guards both

  Asking() {
    ++count;
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

  ~Asking() {
    --count;
  }
};

// What is wrong with a plan: it is launched as before.
inline std::runtime_error refusal(const std::string& why) {
  return std::runtime_error(why);
}

inline void check(driver::Result error, const char* what) {
  if (error) throw refusal(std::string(what) + ": CUDA reports error " + std::to_string(error));
}

// Noise where the variables of the next function that is called will be. A kernel's argument shows it in the bytes that
// the host code of the launch leaves unwritten.
class StackNoise {
 public:
  // Of a pair of kinds, 1 and 2, 3 and 4, and so on, the one is the other's complement.
  explicit StackNoise(uint64_t kind) {
    kind_ = kind;
  }
  StackNoise(const StackNoise&) = delete;
  StackNoise& operator=(const StackNoise&) = delete;

  ~StackNoise() {
    kind_ = 0;
  }

  // While plans are captured; else it does nothing.
  static void write() {
    if (kind_) fill();
  }

 private:
  inline static uint64_t kind_ = 0;  // the GIL guards it

  [[gnu::noinline]] static void fill() {
    volatile uint64_t noise[2048];  // more than such functions take of the stack
    uint64_t word = 0x9e3779b97f4a7c15 * ((kind_ + 1) / 2);
    for (auto& each : noise) {
      word ^= word << 13, word ^= word >> 7, word ^= word << 17;
      each = kind_ % 2 ? word : ~word;
    }
  }
};

// A kernel or a memset of a plan; the argument of a memset is its address.
class LaunchNode {
 public:
  // An address among the arguments: that of a slot, some bytes on.
  struct Patch {
    size_t slot;
    int64_t offset;
    size_t argument, place;
    std::optional<uint64_t> of_zeros = {};  // where it is in a launch's zeros, if a memset clears that memory
  };

  std::string name, look;  // `look` is all but the arguments
  std::vector<std::vector<uint8_t>> arguments;
  std::vector<std::vector<bool>> unwritten;  // for each byte of these, whether host code leaves it as the stack was
  std::vector<Patch> patches;

  static LaunchNode of(void* handle) {
    LaunchNode node;
    int type = 0;
    check(cuda.cuGraphNodeGetType(handle, &type), "a node's type");
    if (type == driver::kKernelNode) {
      node.read_kernel(handle);
    } else if (type == driver::kMemsetNode) {
      node.read_memset(handle);
    } else {
      throw refusal("it enqueues more than kernels and memsets: a node of type " + std::to_string(type));
    }
    return node;
  }

  // The kernel may begin before what is ahead of it in the stream has ended.
  void overlap() {
    driver::Attribute attribute{driver::kProgrammaticStreamSerialization, {}};
    attribute.value[0] = 1;
    attributes_.push_back(attribute);
  }

  bool is_kernel() const {
    return !memset_;
  }

  // The bytes that a memset clears; none if it sets them to other values.
  size_t cleared() const {
    return memset_ && !memset_->value ? memset_->width * memset_->element_size : 0;
  }

  // Whether another launch has these arguments, but for what is unwritten.
  bool has_arguments_of(const LaunchNode& other) const {
    for (size_t argument = 0; argument < arguments.size(); ++argument) {
      for (size_t place = 0; place < arguments[argument].size(); ++place) {
        const bool differs = arguments[argument][place] != other.arguments[argument][place];
        if (differs && !unwritten[argument][place]) return false;
      }
    }
    return true;
  }

  template <class AddressOf>
  void put(const AddressOf& address_of) {
    for (const auto& patch : patches) {
      const uint64_t word = address_of(patch);
      std::memcpy(arguments[patch.argument].data() + patch.place, &word, sizeof word);
    }
  }

  driver::Result launch(void* stream) {
    if (memset_) {
      uint64_t address = 0;
      std::memcpy(&address, arguments[0].data(), sizeof address);
      const auto& set = *memset_;
      if (set.element_size == 4) return cuda.cuMemsetD32Async(address, set.value, set.width, stream);
      if (set.element_size == 2) {
        return cuda.cuMemsetD16Async(address, static_cast<unsigned short>(set.value), set.width, stream);
      }
      return cuda.cuMemsetD8Async(address, static_cast<unsigned char>(set.value), set.width, stream);
    }
    driver::LaunchConfig config = config_;
    config.stream = stream;
    config.attributes = attributes_.data(), config.count = static_cast<unsigned>(attributes_.size());
    if (!is_packed_) return cuda.cuLaunchKernelEx(&config, function_, pointers_.data(), nullptr);
    size_t size = arguments[0].size();
    void* extra[] = {
        driver::buffer_pointer, arguments[0].data(), driver::buffer_size, &size, driver::buffer_end};
    return cuda.cuLaunchKernelEx(&config, function_, nullptr, extra);
  }

  // Before the first launch: the driver reads the arguments where they are now.
  void point() {
    pointers_.clear();
    for (auto& argument : arguments) pointers_.push_back(argument.data());
  }

 private:
  void* function_ = nullptr;
  driver::LaunchConfig config_{};
  std::vector<driver::Attribute> attributes_;
  std::vector<void*> pointers_;
  std::optional<driver::MemsetNode> memset_;
  bool is_packed_ = false;

  void take(const void* bytes, size_t size) {
    const auto* begin = static_cast<const uint8_t*>(bytes);
    arguments.emplace_back(begin, begin + size);
  }

  void read_memset(void* handle) {
    check(cuda.cuGraphMemsetNodeGetParams(handle, &memset_.emplace()), "a memset");
    if (memset_->height > 1) throw refusal("it sets rows of memory");
    take(&memset_->address, sizeof memset_->address);
    name = "memset";
    for (const size_t number : {memset_->width, size_t{memset_->element_size}, size_t{memset_->value}}) {
      look += " " + std::to_string(number);
    }
  }

  void read_kernel(void* handle) {
    driver::KernelNode node{};
    check(cuda.cuGraphKernelNodeGetParams_v2(handle, &node), "a kernel's arguments");
    function_ = node.function;
    if (function_ == nullptr) check(cuda.cuKernelGetFunction(&function_, node.kernel), "a kernel's function");
    std::copy(node.grid, node.grid + 3, config_.grid);
    std::copy(node.block, node.block + 3, config_.block);
    config_.shared = node.shared;
    const char* of_function = nullptr;
    const bool is_named = !cuda.cuFuncGetName(&of_function, function_) && of_function != nullptr;
    name = is_named ? of_function : "a kernel";
    look = std::to_string(reinterpret_cast<uintptr_t>(function_)) + " " + std::to_string(node.shared);
    for (size_t dim = 0; dim < 3; ++dim) {
      look += " " + std::to_string(node.grid[dim]) + " " + std::to_string(node.block[dim]);
    }
    read_arguments(node);
    read_attributes(handle);
  }

  void read_arguments(const driver::KernelNode& node) {
    size_t offset = 0, size = 0;
    if (node.arguments != nullptr) {
      driver::Result error = 0;
      while (!(error = cuda.cuFuncGetParamInfo(function_, arguments.size(), &offset, &size))) {
        take(node.arguments[arguments.size()], size);
      }
      if (error != driver::invalid_value) check(error, "a kernel's arguments");  // otherwise there is no further one
      return;
    }
    const void* buffer = nullptr;
    for (void** entry = node.extra; entry != nullptr && *entry != driver::buffer_end; entry += 2) {
      if (*entry == driver::buffer_pointer) buffer = entry[1];
      if (*entry == driver::buffer_size) size = *static_cast<size_t*>(entry[1]);
    }
    is_packed_ = buffer != nullptr;
    if (is_packed_) {
      take(buffer, size);
    } else if (!cuda.cuFuncGetParamInfo(function_, 0, &offset, &size)) {
      throw refusal("a kernel's arguments cannot be read");
    }
  }

  void read_attributes(void* handle) {
    using namespace driver;
    for (const int id : {kCooperative, kClusterDimension, kClusterSchedulingPolicy, kPreferredClusterDimension,
                         kSharedMemoryCarveout, kAccessPolicyWindow, kMemSyncDomain, kDeviceUpdatable}) {
      Attribute attribute{id, {}};
      if (cuda.cuGraphKernelNodeGetAttribute(handle, id, attribute.value)) continue;  // older drivers know fewer
      const auto *begin = std::begin(attribute.value), *end = std::end(attribute.value);
      if (std::all_of(begin, end, [](unsigned char byte) { return !byte; })) continue;
      if (id == kAccessPolicyWindow || id == kMemSyncDomain || id == kDeviceUpdatable) {
        throw refusal("a kernel has the launch attribute " + std::to_string(id));
      }
      look += " @" + std::to_string(id) + std::string(begin, end);
      attributes_.push_back(attribute);
    }
  }
};

// Nodes of one launch after another, and for each whether it may begin before the one ahead of it has ended.
struct Sequence {
  std::vector<LaunchNode> nodes;
  std::vector<bool> overlaps;
};

constexpr size_t most_nodes = 128;  // of a graph: the GIL is held while they are looked at

// The nodes of a graph in the order in which one stream got them.
inline Sequence read_graph(void* graph) {
  size_t count = 0;
  check(cuda.cuGraphGetNodes(graph, nullptr, &count), "a graph's nodes");
  if (count > most_nodes) throw refusal("it launches too much: " + std::to_string(count) + " nodes");
  std::vector<void*> handles(count);
  check(cuda.cuGraphGetNodes(graph, handles.data(), &count), "a graph's nodes");
  size_t edges = count * count;  // room for all: a query without room for their data may be refused
  std::vector<void*> from(edges), to(edges);
  std::vector<driver::Edge> data(edges);
  if (edges) check(cuda.cuGraphGetEdges_v2(graph, from.data(), to.data(), data.data(), &edges), "a graph's edges");
  Sequence found;
  void* last = nullptr;
  std::vector<void*> done;
  const auto is_done = [&](void* node) { return std::find(done.begin(), done.end(), node) != done.end(); };
  while (done.size() < count) {
    void* next = nullptr;
    for (void* node : handles) {
      bool is_ready = !is_done(node);
      for (size_t edge = 0; edge < edges; ++edge) is_ready = is_ready && (to[edge] != node || is_done(from[edge]));
      if (!is_ready) continue;
      if (next != nullptr) throw refusal("it launches side by side");
      next = node;
    }
    bool overlaps = false, follows = last == nullptr;
    for (size_t edge = 0; edge < edges; ++edge) {
      if (to[edge] != next || from[edge] != last) continue;
      const auto& [from_port, to_port, type, _] = data[edge];
      follows = true, overlaps = type == driver::programmatic;
      if (to_port || (overlaps ? from_port != driver::programmatic : type || from_port)) {
        throw refusal("a kernel depends on another one's launch");
      }
    }
    if (!follows) throw refusal("it launches side by side");
    found.nodes.push_back(LaunchNode::of(next));
    found.overlaps.push_back(overlaps);
    done.push_back(last = next);
  }
  return found;
}

// A plan's launches. The GIL guards it.
class Recorded {
 public:
  bool is_watched = true;   // Python launches the plan, and looks at what happens
  bool is_serving = false;  // the plan is launched as recorded
  uint64_t calls_before = 0;  // launches until Python looks
  bool takes_zeros = false;  // it has been proved with zeros, too
  driver::Result error = 0;  // of such a launch, after which there are no more

  using Words = std::vector<uint64_t>;
  using Moving = std::vector<std::pair<size_t, uint64_t>>;  // a slot, and what its address is a multiple of

  // Takes the current context, which is that of all launches; a thread that has launched the plan has it.
  void take_context() {
    check(cuda.cuCtxGetCurrent(&context_), "the current context");
  }

  // Captures launches of a plan, two in a row, and finds what they have in common.
  //
  // `execute` is the frontend's, called with each of `sets`: the addresses of the plan's operands, then that of its
  // workspace, which has `workspace` bytes. `noise` is that of the stack in each launch: a set that is launched with a
  // pair of complements shows what is unwritten. Slots that `moving` names move in them; `scalars` are operands in host
  // memory. `handle` is bound to `stream`, or is the stream. The GIL is held all along, unless `execute` releases it: CUDA
  // refuses to synchronize a GPU while one of its streams is captured.
  void record(
      uint64_t stream, uint64_t handle, const py::object& execute, const std::vector<Words>& sets,
      const std::vector<uint64_t>& noise, Moving moving, const std::vector<size_t>& scalars, uint64_t workspace) {
    if (sets.size() < 6 || sets.size() % 2) throw std::invalid_argument("too few launches");
    if (noise.size() != sets.size()) throw std::invalid_argument("each launch needs its noise");
    if (!has_context()) throw refusal("another CUDA context is current");
    std::vector<Sequence> launches;
    for (size_t first = 0; first < sets.size(); first += 2) {
      auto both = capture(stream, [&] {
        for (const size_t launch : {first, first + 1}) {
          const auto& set = sets[launch];
          const StackNoise of_launch(noise[launch]);
          StackNoise::write();
          execute(reinterpret_cast<uint64_t>(set.data()), set.size() - 1, set.back(), handle, -1);
        }
      });
      const size_t count = both.nodes.size() / 2;
      if (!count || both.nodes.size() % 2) throw refusal("a launch is not like the one before");
      const auto nodes = both.nodes.begin();
      const auto overlaps = both.overlaps.begin();
      launches.push_back({{nodes, nodes + count}, {overlaps, overlaps + count}});
      launches.push_back({{nodes + count, nodes + 2 * count}, {overlaps + count, overlaps + 2 * count}});
      launches[first].overlaps[0] = launches[first + 1].overlaps[0];  // which the first of all cannot show
    }
    check_alike(launches);
    std::vector<LaunchNode> nodes = launches[0].nodes;
    for (size_t node = 0; node < nodes.size(); ++node) {
      if (launches[0].overlaps[node] && nodes[node].is_kernel()) nodes[node].overlap();
      for (size_t argument = 0; argument < nodes[node].arguments.size(); ++argument) {
        find_unwritten(launches, sets, noise, nodes[node], node, argument);
        find_addresses(launches, sets, moving, nodes[node], node, argument);
      }
    }
    for (size_t last = sets.size() - 2; last < sets.size(); ++last) {
      for (size_t node = 0; node < nodes.size(); ++node) {
        nodes[node].put([&](const LaunchNode::Patch& patch) { return sets[last][patch.slot] + patch.offset; });
        if (!nodes[node].has_arguments_of(launches[last].nodes[node])) {
          throw refusal("another capture is not as predicted: " + nodes[node].name);
        }
      }
    }
    if (!moving.empty() && moving.back().first == sets[0].size() - 1) moving.pop_back();  // the workspace is the plan's
    count_ = sets[0].size() - 1;
    find_ahead(nodes);
    nodes_ = std::move(nodes), moving_ = std::move(moving);
    for (auto& node : nodes_) node.point();
    find_counters(workspace);
    scalars_.clear();
    for (const size_t place : scalars) scalars_.emplace_back(place, bits_at(sets[0][place]));
  }

  // Whether a launch with these operands is one that was recorded.
  bool serves(const uint64_t* pointers) const {
    if (nodes_.empty()) return false;
    for (const auto& [slot, alignment] : moving_) {
      if (!pointers[slot] || pointers[slot] & (alignment - 1)) return false;
    }
    for (const auto& [slot, ahead] : ahead_) {
      if (pointers[slot] < ahead) return false;
    }
    for (const auto& [place, value] : scalars_) {
      if (bits_at(pointers[place]) != value) return false;
    }
    return has_context();
  }

  // With `zeros`, as many bytes as `zeros()` says, all zeros: kernels count there, and no memset is launched.
  driver::Result launch(const uint64_t* pointers, uint64_t workspace, uint64_t stream, uint64_t zeros = 0) {
    for (auto& node : nodes_) {
      if (zeros && !node.is_kernel()) continue;
      node.put([&](const LaunchNode::Patch& patch) {
        if (zeros && patch.of_zeros) return zeros + *patch.of_zeros;
        return (patch.slot < count_ ? pointers[patch.slot] : workspace) + patch.offset;
      });
      if (const auto error = node.launch(reinterpret_cast<void*>(stream))) return error;
    }
    return 0;
  }

  size_t operands() const {
    return count_;
  }

  // Bytes of zeros that a launch may be given; 0 if it clears memory itself.
  uint64_t zeros() const {
    return zeros_;
  }

  // What counts there: where it is in the workspace of other launches, its bytes, and where it is in the zeros.
  const std::vector<std::array<uint64_t, 3>>& counters() const {
    return counters_;
  }

  // Whether a memset is to memory of an operand.
  bool sets_operands() const {
    return std::any_of(nodes_.begin(), nodes_.end(), [&](const LaunchNode& node) {
      return !node.is_kernel() && !node.patches.empty() && node.patches[0].slot < count_;
    });
  }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& node : nodes_) found.push_back(node.name);
    return found;
  }

 private:
  std::vector<LaunchNode> nodes_;
  Moving moving_;  // operands in the GPU's memory
  std::vector<std::pair<size_t, uint64_t>> ahead_;  // operands, and bytes from an address among the arguments to theirs
  std::vector<std::pair<size_t, uint32_t>> scalars_;  // operands in host memory, and the values in the arguments
  size_t count_ = 0;
  std::vector<std::array<uint64_t, 3>> counters_;
  uint64_t zeros_ = 0;
  void* context_ = nullptr;

  // Finds the counters that memsets clear: a few words of the workspace, whose addresses kernels get as they are. What is
  // behind one, up to the next address that a kernel gets, may be its, too.
  void find_counters(uint64_t workspace) {
    counters_.clear(), zeros_ = 0;
    for (size_t at = 0; at < nodes_.size(); ++at) {
      if (nodes_[at].is_kernel()) continue;
      const auto& address = nodes_[at].patches;
      const uint64_t size = nodes_[at].cleared();
      bool is_counter = size && address.size() == 1 && address[0].slot == count_, is_used = false;
      uint64_t space = is_counter ? workspace - address[0].offset : 0;
      for (size_t other = 0; is_counter && other < nodes_.size(); ++other) {
        for (auto& patch : nodes_[other].patches) {
          const int64_t on = patch.offset - address[0].offset;
          if (other == at || patch.slot != count_ || on < 0) continue;
          if (on >= static_cast<int64_t>(size)) {
            space = std::min(space, static_cast<uint64_t>(on));
            continue;
          }
          is_counter = nodes_[other].is_kernel() && other > at;  // else it would have to be cleared again
          patch.of_zeros = zeros_ + on, is_used = true;
        }
      }
      if (!is_counter || !is_used || space > most_space) {
        counters_.clear(), zeros_ = 0;
        return;
      }
      counters_.push_back({static_cast<uint64_t>(address[0].offset), size, zeros_});
      zeros_ += (space + alignment - 1) / alignment * alignment;
    }
  }

  // Finds the addresses ahead of their operand: below zero host code masks them in its own way.
  void find_ahead(const std::vector<LaunchNode>& nodes) {
    ahead_.clear();
    for (const auto& node : nodes) {
      for (const auto& patch : node.patches) {
        if (patch.offset >= 0) continue;
        if (patch.slot == count_) throw refusal("an address is ahead of the workspace: " + node.name);
        ahead_.emplace_back(patch.slot, static_cast<uint64_t>(-patch.offset));
      }
    }
  }

  static constexpr uint64_t most_space = 512, alignment = 256;  // bytes of a counter, and of where workspaces begin

  // Makes the context current that a new thread lacks.
  bool has_context() const {
    void* current = nullptr;
    if (context_ == nullptr || cuda.cuCtxGetCurrent(&current)) return false;
    return current == context_ || (current == nullptr && !cuda.cuCtxSetCurrent(context_));
  }

  // Of an address from its operand's: tensor maps of packed sequences begin 2 TiB ahead of their tensor.
  static constexpr int64_t most_offset = int64_t{1} << 42;

  static uint32_t bits_at(uint64_t address) {
    uint32_t bits = 0;
    std::memcpy(&bits, reinterpret_cast<const void*>(address), sizeof bits);
    return bits;
  }

  template <class Launch>
  static Sequence capture(uint64_t stream, const Launch& launch) {
    // A capture that is open when this ends is closed, and its graph freed. Until then no garbage is collected: CUDA
    // refuses to destroy another graph, or to unload kernels, while a stream is captured, and would end the capture.
    struct Capture {
      void* stream;
      void* graph = nullptr;
      bool is_open = true, collects = PyGC_Disable();

      driver::Result end() {
        is_open = false;
        const auto error = cuda.cuStreamEndCapture(stream, &graph);
        if (collects) PyGC_Enable();
        return error;
      }

      ~Capture() {
        if (is_open) end();
        if (graph != nullptr) cuda.cuGraphDestroy(graph);
      }
    };
    auto* const raw = reinterpret_cast<void*>(stream);
    check(cuda.cuStreamBeginCapture_v2(raw, driver::relaxed_capture), "it cannot be captured");
    Capture capture{raw};
    launch();
    check(capture.end(), "it cannot be captured");
    return read_graph(capture.graph);
  }

  static void check_alike(const std::vector<Sequence>& launches) {
    const auto& first = launches[0];
    for (const auto& other : launches) {
      bool is_alike = other.nodes.size() == first.nodes.size() && other.overlaps == first.overlaps;
      for (size_t node = 0; is_alike && node < first.nodes.size(); ++node) {
        const auto &one = first.nodes[node], &another = other.nodes[node];
        is_alike = one.name == another.name && one.look == another.look;
        is_alike = is_alike && one.arguments.size() == another.arguments.size();
        for (size_t place = 0; is_alike && place < one.arguments.size(); ++place) {
          is_alike = one.arguments[place].size() == another.arguments[place].size();
        }
      }
      if (!is_alike) throw refusal("what it launches depends on its operands' addresses");
    }
  }

  static uint64_t word_at(const std::vector<uint8_t>& bytes, size_t place, size_t size = 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + place, size);
    return word;
  }

  // Finds the bytes of one argument that host code leaves unwritten: between launches of one set they differ in all bits
  // where the noise does, and in none where it is the same. They are zeros in recorded launches.
  static void find_unwritten(
      const std::vector<Sequence>& launches, const std::vector<Words>& sets, const std::vector<uint64_t>& noise,
      LaunchNode& node, size_t number, size_t argument) {
    const auto bytes = [&](size_t launch) -> const auto& { return launches[launch].nodes[number].arguments[argument]; };
    const size_t size = bytes(0).size();
    std::vector<bool> shows(size), varies(size);
    for (size_t launch = 0; launch < launches.size(); ++launch) {
      for (size_t other = 0; other < launch; ++other) {
        if (sets[launch] != sets[other]) continue;
        for (size_t place = 0; place < size; ++place) {
          const int differs = bytes(launch)[place] ^ bytes(other)[place];
          if (!differs) continue;
          const bool is_noise = noise[launch] != noise[other] && differs == 0xff;
          (is_noise ? shows : varies)[place] = true;
        }
      }
    }
    for (size_t place = 0; place < size; ++place) {
      shows[place] = shows[place] && !varies[place];
      if (shows[place]) node.arguments[argument][place] = 0;
    }
    node.unwritten.push_back(std::move(shows));
  }

  // Finds the addresses in one argument of a node, from all launches but the last two.
  static void find_addresses(
      const std::vector<Sequence>& launches, const std::vector<Words>& sets, const Moving& moving,
      LaunchNode& node, size_t number, size_t argument) {
    const size_t count = launches.size() - 2, size = node.arguments[argument].size();
    const auto bytes = [&](size_t launch) -> const auto& { return launches[launch].nodes[number].arguments[argument]; };
    enum Kind : char { kEqual, kMoves, kAddress };
    std::vector<Kind> kinds(size, kEqual);
    const auto& unwritten = node.unwritten[argument];
    for (size_t place = 0; place < size; ++place) {
      for (size_t launch = 1; launch < count && !unwritten[place]; ++launch) {
        if (bytes(launch)[place] != bytes(0)[place]) kinds[place] = kMoves;
      }
    }
    for (const size_t step : {8, 4}) {
      for (size_t place = 0; place + 8 <= size; place += step) {
        const auto begin = kinds.begin() + place, end = begin + 8;
        if (std::find(begin, end, kMoves) == end || std::find(begin, end, kAddress) != end) continue;
        for (const auto& moved : moving) {
          const size_t slot = moved.first;
          const auto offset = [&](size_t launch) {
            return static_cast<int64_t>(word_at(bytes(launch), place) - sets[launch][slot]);
          };
          bool is_its = std::abs(offset(0)) < most_offset;
          for (size_t launch = 1; is_its && launch < count; ++launch) is_its = offset(launch) == offset(0);
          if (!is_its) continue;
          node.patches.push_back({slot, offset(0), argument, place});
          std::fill(begin, end, kAddress);
          break;
        }
      }
    }
    const auto unknown = std::find(kinds.begin(), kinds.end(), kMoves);
    if (unknown != kinds.end()) {
      throw refusal(
          "byte " + std::to_string(unknown - kinds.begin()) + " of argument " + std::to_string(argument) +
          " moves with no operand: " + node.name);
    }
    for (size_t place = 0; place + 8 <= size; place += 4) {
      const uint64_t word = word_at(node.arguments[argument], place);
      const auto begin = kinds.begin() + place, end = begin + 8;
      const auto first = unwritten.begin() + place;
      if (std::find(begin, end, kAddress) != end || std::find(first, first + 8, true) != first + 8) continue;
      if (word >> 48 || !(word >> 32)) continue;  // no address of a GPU's memory
      int type = 0;
      if (!cuda.cuPointerGetAttribute(&type, driver::memory_type, word)) {
        throw refusal("it uses memory that is no operand's: " + node.name);
      }
    }
    // Memory that is not anywhere has one upper half in all captures, so a word that equals it may be half of an address.
    for (size_t place = 0; place + 4 <= size; place += 4) {
      if (std::find(kinds.begin() + place, kinds.begin() + place + 4, kAddress) != kinds.begin() + place + 4) continue;
      const uint64_t word = word_at(node.arguments[argument], place, 4);
      for (const auto& moved : moving) {
        bool is_half = word != 0;
        for (size_t launch = 0; is_half && launch < count; ++launch) is_half = sets[launch][moved.first] >> 32 == word;
        if (is_half) throw refusal("a number may be half of an address: " + node.name);
      }
    }
  }
};

}  // namespace cudnn_sdpa
