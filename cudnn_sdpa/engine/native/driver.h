// CUDA's driver as `cuda.h` declares it: the functions and structures that recorded launches use.
//
// PyTorch's headers lack `cuda.h`, and machines need no CUDA toolkit. These layouts are part of the driver's ABI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudnn_sdpa::driver {

using Result = int;  // 0 is success

struct KernelNode {
  void* function;
  unsigned grid[3], block[3], shared;
  void** arguments;
  void** extra;
  void* kernel;  // where there is no function
  void* context;
};

struct MemsetNode {
  uint64_t address;
  size_t pitch;
  unsigned value, element_size;
  size_t width, height;
};

struct Edge {
  uint8_t from_port, to_port, type, reserved[5];
};

struct Attribute {
  int id;
  alignas(8) unsigned char value[64];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

enum NodeType : int { kKernelNode = 0, kMemsetNode = 2 };

enum AttributeId : int {
  kAccessPolicyWindow = 1,
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterSchedulingPolicy = 5,
  kProgrammaticStreamSerialization = 6,
  kMemSyncDomain = 10,
  kPreferredClusterDimension = 11,
  kDeviceUpdatable = 13,
  kSharedMemoryCarveout = 14,
};

// Ends of `CU_LAUNCH_PARAM_BUFFER_POINTER` and `..._SIZE`: arguments in one buffer.
inline void* const buffer_end = nullptr;
inline void* const buffer_pointer = reinterpret_cast<void*>(1);
inline void* const buffer_size = reinterpret_cast<void*>(2);

constexpr Result invalid_value = 1;
constexpr int programmatic = 1;     // the type of an edge, and the port that it leaves
constexpr int relaxed_capture = 2;  // a mode: other threads may do anything
constexpr int memory_type = 2;      // an attribute of pointers

// The functions, by the names of their symbols.
#define CUDNN_SDPA_DRIVER_FUNCTIONS(X)                                                             \
  X(cuCtxGetCurrent, (void**))                                                                     \
  X(cuCtxSetCurrent, (void*))                                                                      \
  X(cuFuncGetName, (const char**, void*))                                                          \
  X(cuFuncGetParamInfo, (void*, size_t, size_t*, size_t*))                                         \
  X(cuGraphDestroy, (void*))                                                                       \
  X(cuGraphGetEdges_v2, (void*, void**, void**, Edge*, size_t*))                                   \
  X(cuGraphGetNodes, (void*, void**, size_t*))                                                     \
  X(cuGraphKernelNodeGetAttribute, (void*, int, void*))                                            \
  X(cuGraphKernelNodeGetParams_v2, (void*, KernelNode*))                                           \
  X(cuGraphMemsetNodeGetParams, (void*, MemsetNode*))                                              \
  X(cuGraphNodeGetType, (void*, int*))                                                             \
  X(cuKernelGetFunction, (void**, void*))                                                          \
  X(cuLaunchKernelEx, (const LaunchConfig*, void*, void**, void**))                                \
  X(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void*))                                     \
  X(cuMemsetD16Async, (uint64_t, unsigned short, size_t, void*))                                   \
  X(cuMemsetD32Async, (uint64_t, unsigned, size_t, void*))                                         \
  X(cuPointerGetAttribute, (void*, int, uint64_t))                                                 \
  X(cuStreamBeginCapture_v2, (void*, int))                                                         \
  X(cuStreamEndCapture, (void*, void**))

// Their addresses, which are found in the driver's library.
struct Functions {
#define CUDNN_SDPA_DECLARE(name, parameters) Result(*name) parameters = nullptr;
  CUDNN_SDPA_DRIVER_FUNCTIONS(CUDNN_SDPA_DECLARE)
#undef CUDNN_SDPA_DECLARE
};

}  // namespace cudnn_sdpa::driver
