// A driver without a GPU: the functions that recorded launches use, over host memory.
//
// Streams run at once, in the thread that launches. A captured stream makes a graph with kernels, memsets and edges, as
// CUDA does: a kernel that may overlap with the one ahead of it gets a programmatic edge, and its node loses that
// attribute. Kernels are C functions that get an array of pointers to their arguments. One that lets the next kernel begin
// early runs behind that, if it may overlap.
#include "driver.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

using namespace cudnn_sdpa::driver;

namespace {

constexpr Result kInvalidValue = 1, kInvalidHandle = 400, kLossyQuery = 402, kCaptureInvalidated = 901;

struct Function {
  std::string name;
  void (*run)(void**);
  std::vector<size_t> sizes;
  bool is_loaded = true, tells_sizes = true, lets_next_begin = false;
};

struct GraphNode {
  int type = kKernelNode;
  KernelNode kernel{};
  MemsetNode set{};
  std::vector<std::vector<unsigned char>> bytes;
  std::vector<void*> arguments;
  std::map<int, Attribute> attributes;
  void* extra[5] = {};
  size_t packed = 0;
};

struct Graph {
  std::vector<std::unique_ptr<GraphNode>> nodes;
  struct Link {
    GraphNode *from, *to;
    Edge data;
  };
  std::vector<Link> links;
};

using Bytes = std::vector<std::vector<unsigned char>>;

void run(const Function& function, Bytes& bytes) {
  std::vector<void*> pointers;
  for (auto& one : bytes) pointers.push_back(one.data());
  function.run(pointers.data());
}

struct Stream {
  std::unique_ptr<Graph> captured;
  GraphNode* last = nullptr;
  bool forks = false;  // the next node follows none
  Function* under_way = nullptr;  // a kernel that has let the next one begin, and has done nothing else yet
  Bytes of_under_way;

  void finish() {
    if (under_way != nullptr) run(*std::exchange(under_way, nullptr), of_under_way);
  }
};

std::map<uintptr_t, Stream> numbered;  // a stream's handle is any number
std::set<Graph*> graphs;
std::map<uint64_t, uint64_t> device_memory;  // begins and ends
std::string launched;                        // by what the driver was asked, a line each
void* main_context = &launched;
thread_local void* current_context = nullptr;
Result fails_with = 0;

std::mutex mutex;  // of what follows; never held while a kernel runs, which may wait for the GIL
void note(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex);
  launched += line + "\n";
}

Stream& stream_of(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  return numbered[reinterpret_cast<uintptr_t>(handle)];
}

std::string hex(const void* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const unsigned byte = static_cast<const unsigned char*>(data)[i];
    text += "0123456789abcdef"[byte >> 4], text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

GraphNode* add(Stream& stream, bool overlaps) {
  auto& graph = *stream.captured;
  graph.nodes.insert(graph.nodes.begin(), std::make_unique<GraphNode>());  // in no order that tells anything
  GraphNode* node = graph.nodes.front().get();
  const bool follows_kernel = stream.last != nullptr && stream.last->type == kKernelNode;
  const Edge edge = overlaps && follows_kernel ? Edge{programmatic, 0, programmatic, {}} : Edge{};
  if (stream.last != nullptr && !stream.forks) graph.links.push_back({stream.last, node, edge});
  stream.last = node, stream.forks = false;
  return node;
}

Result set_memory(uint64_t address, unsigned value, unsigned size, size_t width, void* of) {
  if (current_context == nullptr) return 201;
  auto& stream = stream_of(of);
  if (stream.captured) {
    add(stream, false)->type = kMemsetNode;
    stream.last->set = {address, 0, value, size, width, 1};
    return 0;
  }
  stream.finish();
  const uint64_t numbers[] = {value, size, width};
  note("memset " + hex(&address, sizeof address) + " " + hex(numbers, sizeof numbers));
  for (size_t i = 0; i < width; ++i) std::memcpy(reinterpret_cast<char*>(address) + i * size, &value, size);
  return 0;
}

}  // namespace

extern "C" {

Result cuCtxGetCurrent(void** context) { return *context = current_context, 0; }
Result cuCtxSetCurrent(void* context) { return current_context = context, 0; }

Result cuFuncGetName(const char** name, void* of) { return *name = static_cast<Function*>(of)->name.c_str(), 0; }

Result cuFuncGetParamInfo(void* of, size_t index, size_t* offset, size_t* size) {
  if (!static_cast<Function*>(of)->tells_sizes) return kInvalidHandle;
  const auto& sizes = static_cast<Function*>(of)->sizes;
  if (index >= sizes.size()) return kInvalidValue;
  *offset = 0, *size = sizes[index];
  for (size_t before = 0; before < index; ++before) *offset += sizes[before];
  return 0;
}

Result cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }

Result cuGraphDestroy(void* graph) {
  if (!graphs.erase(static_cast<Graph*>(graph))) return kInvalidValue;
  delete static_cast<Graph*>(graph);
  return 0;
}

Result cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
  const auto& all = static_cast<Graph*>(graph)->nodes;
  for (size_t i = 0; nodes != nullptr && i < *count; ++i) nodes[i] = all[i].get();
  *count = all.size();
  return 0;
}

Result cuGraphGetEdges_v2(void* graph, void** from, void** to, Edge* data, size_t* count) {
  const auto& all = static_cast<Graph*>(graph)->links;
  for (const auto& link : all) {
    if (data == nullptr && link.data.type) return kLossyQuery;
  }
  for (size_t i = 0; from != nullptr && i < *count; ++i) {
    from[i] = to[i] = nullptr;
    if (i < all.size()) from[i] = all[i].from, to[i] = all[i].to, data[i] = all[i].data;
  }
  *count = all.size();
  return 0;
}

Result cuGraphNodeGetType(void* node, int* type) { return *type = static_cast<GraphNode*>(node)->type, 0; }
Result cuGraphMemsetNodeGetParams(void* node, MemsetNode* set) { return *set = static_cast<GraphNode*>(node)->set, 0; }

Result cuGraphKernelNodeGetParams_v2(void* node, KernelNode* kernel) {
  return *kernel = static_cast<GraphNode*>(node)->kernel, 0;
}

Result cuGraphKernelNodeGetAttribute(void* node, int id, void* value) {
  const auto& attributes = static_cast<GraphNode*>(node)->attributes;
  const auto found = attributes.find(id);
  std::memset(value, 0, 64);
  if (found != attributes.end()) std::memcpy(value, found->second.value, 64);
  return 0;
}

Result cuPointerGetAttribute(void* data, int, uint64_t address) {
  const auto after = device_memory.upper_bound(address);
  if (after == device_memory.begin() || std::prev(after)->second <= address) return kInvalidValue;
  *static_cast<int*>(data) = 2;
  return 0;
}

Result cuStreamBeginCapture_v2(void* stream, int mode) {
  if (current_context == nullptr) return 201;
  if (mode != relaxed_capture || stream_of(stream).captured) return kInvalidValue;
  stream_of(stream) = {std::make_unique<Graph>()};
  return 0;
}

Result cuStreamEndCapture(void* of, void** graph) {
  auto& stream = stream_of(of);
  if (!stream.captured) return kCaptureInvalidated;
  graphs.insert(stream.captured.get());
  *graph = stream.captured.release();
  return 0;
}

Result cuLaunchKernelEx(const LaunchConfig* config, void* of, void** arguments, void** extra) {
  auto* function = static_cast<Function*>(of);
  if (fails_with) return fails_with;
  if (current_context == nullptr) return 201;
  if (!function->is_loaded) return kInvalidHandle;
  Bytes bytes;
  for (size_t argument = 0, offset = 0; argument < function->sizes.size(); ++argument) {
    const size_t size = function->sizes[argument];
    const void* at = extra ? static_cast<char*>(extra[1]) + offset : arguments[argument];
    const auto* from = static_cast<const unsigned char*>(at);
    bytes.emplace_back(from, from + size), offset += size;
  }
  std::map<int, Attribute> attributes;
  for (unsigned i = 0; i < config->count; ++i) attributes[config->attributes[i].id] = config->attributes[i];
  auto& stream = stream_of(config->stream);
  if (stream.captured) {
    auto* node = add(stream, attributes.erase(kProgrammaticStreamSerialization));
    node->kernel.function = function, node->kernel.shared = config->shared;
    std::memcpy(node->kernel.grid, config->grid, sizeof config->grid);
    std::memcpy(node->kernel.block, config->block, sizeof config->block);
    node->bytes = std::move(bytes), node->attributes = std::move(attributes);
    if (extra) {
      std::vector<unsigned char> all;
      for (const auto& one : node->bytes) all.insert(all.end(), one.begin(), one.end());
      node->bytes = {all}, node->packed = all.size();
      node->extra[0] = buffer_pointer, node->extra[1] = node->bytes[0].data();
      node->extra[2] = buffer_size, node->extra[3] = &node->packed;
      node->kernel.extra = node->extra;
    } else {
      for (auto& one : node->bytes) node->arguments.push_back(one.data());
      node->kernel.arguments = node->arguments.data();
    }
    return 0;
  }
  std::string line = "kernel " + function->name + " " + hex(config, offsetof(LaunchConfig, stream) - 4);
  for (const auto& [id, attribute] : attributes) line += " @" + std::to_string(id) + "=" + hex(attribute.value, 64);
  for (const auto& one : bytes) line += " " + hex(one.data(), one.size());
  note(line);
  if (!attributes.count(kProgrammaticStreamSerialization)) stream.finish();
  if (function->lets_next_begin) {
    stream.under_way = function, stream.of_under_way = std::move(bytes);
    return 0;
  }
  run(*function, bytes);
  stream.finish();
  return 0;
}

Result cuMemsetD8Async(uint64_t to, unsigned char value, size_t width, void* stream) {
  return set_memory(to, value, 1, width, stream);
}
Result cuMemsetD16Async(uint64_t to, unsigned short value, size_t width, void* stream) {
  return set_memory(to, value, 2, width, stream);
}
Result cuMemsetD32Async(uint64_t to, unsigned value, size_t width, void* stream) {
  return set_memory(to, value, 4, width, stream);
}

// For tests.

void fork_stream(void* stream) { stream_of(stream).forks = true; }
bool is_captured(void* stream) { return stream_of(stream).captured != nullptr; }
void enqueue_host_work(void* stream) { add(stream_of(stream), false)->type = 3; }
void make_context_current() { current_context = main_context; }
void lose_context() { current_context = nullptr; }
void change_context() { current_context = &fails_with; }
void own_memory(uint64_t begin, uint64_t size) { device_memory[begin] = begin + size; }
void fail_with(Result error) { fails_with = error; }
void unload(void* function) { static_cast<Function*>(function)->is_loaded = false; }
void hide_sizes(void* function) { static_cast<Function*>(function)->tells_sizes = false; }
void let_next_begin(void* function) { static_cast<Function*>(function)->lets_next_begin = true; }
size_t open_graphs() { return graphs.size(); }
const char* take_launched() {
  static std::string taken;
  const std::lock_guard<std::mutex> lock(mutex);
  taken = std::move(launched), launched.clear();
  return taken.c_str();
}
void* new_function(const char* name, void (*run)(void**), const size_t* sizes, size_t count) {
  return new Function{name, run, {sizes, sizes + count}};  // lives as long as the process
}

// Kernels. The workspace: how often a kernel has counted, then products.

constexpr int kWords = 64;
constexpr size_t kApart = 512;

// (workspace): nothing is counted yet.
void start(void** arguments) { **static_cast<unsigned**>(arguments[0]) = 0; }

// (workspace, a, b, scale, shift): products of a and b, which count once.
void products(void** arguments) {
  auto* const space = *static_cast<float**>(arguments[0]);
  const auto *a = *static_cast<float**>(arguments[1]), *b = *static_cast<float**>(arguments[2]);
  const float scale = *static_cast<float*>(arguments[3]);
  *reinterpret_cast<unsigned*>(space) += 1;
  for (int i = 0; i < kWords; ++i) space[i + 4] = (a[i] - 2 * b[i]) * scale;
}

// (workspace, a, b, scale, shift, counter): the same, with the count elsewhere.
void products_apart(void** arguments) {
  products(arguments);
  **static_cast<unsigned**>(arguments[5]) += 1;
}

// Likewise; it notes something behind the counter.
void products_beside(void** arguments) {
  products_apart(arguments);
  (*static_cast<unsigned**>(arguments[5]))[1] = 7, (*static_cast<unsigned**>(arguments[5]))[2] = 7;
}

// (description, workspace): the results, at an address within a structure at a place that is a multiple of 4 only.
void finish(void** arguments) {
  float* out = nullptr;
  std::memcpy(&out, static_cast<char*>(arguments[0]) + 20, sizeof out);
  const auto* const space = *static_cast<float**>(arguments[1]);
  for (int i = 0; i < kWords; ++i) out[i] = space[i + 4] + *reinterpret_cast<const unsigned*>(space);
}

// (description, workspace, counter): likewise.
void finish_apart(void** arguments) {
  float* out = nullptr;
  std::memcpy(&out, static_cast<char*>(arguments[0]) + 20, sizeof out);
  const auto* const space = *static_cast<float**>(arguments[1]);
  for (int i = 0; i < kWords; ++i) out[i] = space[i + 4] + **static_cast<unsigned**>(arguments[2]);
}

// Likewise; it also counts where it knows the counter to be in the workspace.
void finish_elsewhere(void** arguments) {
  finish_apart(arguments);
  (*static_cast<unsigned**>(arguments[1]))[kApart / sizeof(unsigned)] += 1;
}
}
