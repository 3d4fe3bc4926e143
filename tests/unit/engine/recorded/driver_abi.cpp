// What `driver.h` declares is what `cuda.h` declares; compiled, not run.
#include <cuda.h>

#include "driver.h"

#include <cstddef>

namespace ours = cudnn_sdpa::driver;

#define SAME(mine, theirs) static_assert(sizeof(ours::mine) == sizeof(theirs) && alignof(ours::mine) == alignof(theirs))
#define AT(mine, field, theirs, other) static_assert(offsetof(ours::mine, field) == offsetof(theirs, other))
#define EQUAL(mine, theirs) static_assert(int(ours::mine) == int(theirs))

SAME(KernelNode, CUDA_KERNEL_NODE_PARAMS_v2);
AT(KernelNode, function, CUDA_KERNEL_NODE_PARAMS_v2, func);
AT(KernelNode, grid, CUDA_KERNEL_NODE_PARAMS_v2, gridDimX);
AT(KernelNode, block, CUDA_KERNEL_NODE_PARAMS_v2, blockDimX);
AT(KernelNode, shared, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
AT(KernelNode, arguments, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
AT(KernelNode, extra, CUDA_KERNEL_NODE_PARAMS_v2, extra);
AT(KernelNode, kernel, CUDA_KERNEL_NODE_PARAMS_v2, kern);
AT(KernelNode, context, CUDA_KERNEL_NODE_PARAMS_v2, ctx);

SAME(MemsetNode, CUDA_MEMSET_NODE_PARAMS);
AT(MemsetNode, address, CUDA_MEMSET_NODE_PARAMS, dst);
AT(MemsetNode, pitch, CUDA_MEMSET_NODE_PARAMS, pitch);
AT(MemsetNode, value, CUDA_MEMSET_NODE_PARAMS, value);
AT(MemsetNode, element_size, CUDA_MEMSET_NODE_PARAMS, elementSize);
AT(MemsetNode, width, CUDA_MEMSET_NODE_PARAMS, width);
AT(MemsetNode, height, CUDA_MEMSET_NODE_PARAMS, height);

SAME(Edge, CUgraphEdgeData);
AT(Edge, from_port, CUgraphEdgeData, from_port);
AT(Edge, to_port, CUgraphEdgeData, to_port);
AT(Edge, type, CUgraphEdgeData, type);

SAME(Attribute, CUlaunchAttribute);
AT(Attribute, id, CUlaunchAttribute, id);
AT(Attribute, value, CUlaunchAttribute, value);

SAME(LaunchConfig, CUlaunchConfig);
AT(LaunchConfig, grid, CUlaunchConfig, gridDimX);
AT(LaunchConfig, block, CUlaunchConfig, blockDimX);
AT(LaunchConfig, shared, CUlaunchConfig, sharedMemBytes);
AT(LaunchConfig, stream, CUlaunchConfig, hStream);
AT(LaunchConfig, attributes, CUlaunchConfig, attrs);
AT(LaunchConfig, count, CUlaunchConfig, numAttrs);

EQUAL(kKernelNode, CU_GRAPH_NODE_TYPE_KERNEL);
EQUAL(kMemsetNode, CU_GRAPH_NODE_TYPE_MEMSET);
EQUAL(kAccessPolicyWindow, CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW);
EQUAL(kCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
EQUAL(kClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
EQUAL(kClusterSchedulingPolicy, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);
EQUAL(kProgrammaticStreamSerialization, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
EQUAL(kMemSyncDomain, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN);
EQUAL(kPreferredClusterDimension, CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION);
EQUAL(kDeviceUpdatable, CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE);
EQUAL(kSharedMemoryCarveout, CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT);
EQUAL(invalid_value, CUDA_ERROR_INVALID_VALUE);
EQUAL(programmatic, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC);
EQUAL(programmatic, CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC);
EQUAL(relaxed_capture, CU_STREAM_CAPTURE_MODE_RELAXED);
EQUAL(memory_type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
static_assert(CU_LAUNCH_PARAM_END_AS_INT == 0 && CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT == 1);
static_assert(CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT == 2);

// Parameters: as many, and of the same sizes. Handles are pointers, enumerations integers.
template <class>
struct Parameters;
template <class... Types>
struct Parameters<int (*)(Types...)> {
  static constexpr size_t sizes[] = {sizeof(Types)...};
};
template <class... Types>
struct Parameters<CUresult (*)(Types...)> {
  static constexpr size_t sizes[] = {sizeof(Types)...};
};

template <class Mine, class Theirs>
constexpr bool alike() {
  constexpr auto& mine = Parameters<Mine>::sizes;
  constexpr auto& theirs = Parameters<Theirs>::sizes;
  if (sizeof mine != sizeof theirs) return false;
  for (size_t place = 0; place < sizeof mine / sizeof *mine; ++place) {
    if (mine[place] != theirs[place]) return false;
  }
  return true;
}

// `cuda.h` renames some functions to the symbols of their present versions, which have these names then.
#define FUNCTION(name, parameters) static_assert(alike<decltype(ours::Functions::name), decltype(&::name)>(), #name);
CUDNN_SDPA_DRIVER_FUNCTIONS(FUNCTION)
