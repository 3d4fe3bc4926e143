/* A stand-in for libcuda.so.1 on machines without an NVIDIA driver.
 *
 * cuDNN links against the driver, and asks it a few things while it plans and compiles; it launches nothing. This
 * library says that there is no device, and accepts whatever is loaded. It is good for planning and for nothing else,
 * and only the helper process of cudnn_sdpa.offline loads it.
 */
#include <stddef.h>

typedef int result;
enum { SUCCESS = 0, NO_DEVICE = 100 };

/* By this symbol the package tells the stand-in from a real driver. */
int cudnn_sdpa_stand_in_driver = 1;

static int dummy;

result cuInit(unsigned flags) { (void)flags; return NO_DEVICE; }
result cuDeviceGetCount(int *count) { *count = 0; return NO_DEVICE; }
result cuDriverGetVersion(int *version) { *version = 12090; return SUCCESS; }
result cuCtxGetCurrent(void **context) { *context = NULL; return SUCCESS; }
result cuGetErrorName(int error, const char **text) { (void)error; *text = "CUDA_ERROR_NO_DEVICE"; return SUCCESS; }
result cuGetErrorString(int error, const char **text) { (void)error; *text = "no NVIDIA driver"; return SUCCESS; }

/* Compiled code is "loaded" so that plans can be finalized. */
result cuLibraryLoadData(void **library) { *library = &dummy; return SUCCESS; }
result cuLibraryGetKernel(void **kernel) { *kernel = &dummy; return SUCCESS; }
result cuKernelGetAttribute(int *value) { *value = 0; return SUCCESS; }
result cuOccupancyMaxPotentialClusterSize(int *size) { *size = 8; return SUCCESS; }

/* How many clusters of thread blocks run at once differs from chip to chip, and cuDNN writes it into plans: one for too
   few leaves results unwritten. No number will do, so that kernels which ask for it are declined. */
result cuOccupancyMaxActiveClusters(int *count) { *count = -1; return NO_DEVICE; }

#define ACCEPT(name) result name(void) { return SUCCESS; }
ACCEPT(cuCtxGetLimit)
ACCEPT(cuCtxPopCurrent)
ACCEPT(cuCtxPushCurrent)
ACCEPT(cuDeviceGet)
ACCEPT(cuDeviceGetAttribute)
ACCEPT(cuFuncGetAttribute)
ACCEPT(cuFuncSetAttribute)
ACCEPT(cuKernelGetFunction)
ACCEPT(cuKernelSetAttribute)
ACCEPT(cuLaunchCooperativeKernel)
ACCEPT(cuLaunchKernel)
ACCEPT(cuLaunchKernelEx)
ACCEPT(cuLibraryGetGlobal)
ACCEPT(cuLibraryGetModule)
ACCEPT(cuLibraryLoadFromFile)
ACCEPT(cuLibraryUnload)
ACCEPT(cuLinkAddData)
ACCEPT(cuLinkComplete)
ACCEPT(cuLinkCreate)
ACCEPT(cuLinkDestroy)
ACCEPT(cuMemcpyHtoDAsync)
ACCEPT(cuModuleGetFunction)
ACCEPT(cuModuleGetGlobal)
ACCEPT(cuModuleLoadData)
ACCEPT(cuModuleLoadDataEx)
ACCEPT(cuModuleUnload)
ACCEPT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ACCEPT(cuStreamGetCtx)
ACCEPT(cuTensorMapEncodeIm2col)
ACCEPT(cuTensorMapEncodeTiled)
